# SPDX-License-Identifier: Apache-2.0
"""The configuration: models, and `load_config`, which finds, merges and validates it."""

from tierkv.config.base import LowerTierConfig, SecretRef, TierConfig
from tierkv.config.disk import DiskConfig
from tierkv.config.dram import DramConfig
from tierkv.config.effective import InvalidConfig, LoadedConfig, load_config
from tierkv.config.models import TierKVConfig
from tierkv.config.secrets import resolve_secret

__all__ = [
    "DiskConfig",
    "DramConfig",
    "InvalidConfig",
    "LoadedConfig",
    "LowerTierConfig",
    "SecretRef",
    "TierConfig",
    "TierKVConfig",
    "load_config",
    "resolve_secret",
]
