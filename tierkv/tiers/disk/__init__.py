# SPDX-License-Identifier: Apache-2.0
"""The disk tier; `tier.py` is where to begin reading."""

from tierkv.tiers.disk.tier import DiskTier

__all__ = ["DiskTier"]
