# SPDX-License-Identifier: Apache-2.0
"""Differences between the vLLM releases that TierKV supports, in one place."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import vllm

from tierkv.errors import UnsupportedError

OLDEST, NEWEST = (0, 30), (0, 33)


def check_version(version: str = vllm.__version__) -> None:
    """Refuse releases whose connector interface is not known.

    Raises:
        UnsupportedError: outside of the range, or not a release number.
    """
    match = re.match(r"(\d+)\.(\d+)", version)
    found = (int(match[1]), int(match[2])) if match else (0, 0)
    if not OLDEST <= found <= NEWEST:
        raise UnsupportedError(
            f"vLLM {version} is outside of the range that this TierKV supports, "
            f"{OLDEST[0]}.{OLDEST[1]} to {NEWEST[0]}.{NEWEST[1]}; install one of those, or a "
            "TierKV release for yours"
        )


def cache_hit_sources(tokens_by_type: Mapping[str, int]) -> dict[Any, int]:
    """Tokens by type of tier as vLLM's closed list of sources (0.32 and later ask for it)."""
    try:
        from vllm.v1.metrics.cache_hit_source import CacheHitSource
    except ImportError:
        return {}
    known = {"dram": CacheHitSource.HOST, "disk": CacheHitSource.DISK}
    split: dict[Any, int] = {}
    for kind, tokens in tokens_by_type.items():
        source = known.get(kind, CacheHitSource.EXTERNAL_UNSPECIFIED)
        split[source] = split.get(source, 0) + tokens
    return split
