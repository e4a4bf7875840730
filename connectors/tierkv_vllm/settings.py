# SPDX-License-Identifier: Apache-2.0
"""Settings that depend on the engine: both halves of the connector must come to the same value."""

from __future__ import annotations

from tierkv.config import LoadedConfig
from tierkv.errors import ConfigError, GeometryError
from tierkv.pages.layout import SlotLayout
from tierkv.pages.pool import PoolRegion

DEFAULT_CHUNK_TOKENS = 64
"""Small enough that little is lost at a prompt's end, large enough that a chunk of a current model
is megabytes: what a disk and a network want to move at once."""


def chunk_tokens_for(loaded: LoadedConfig, block_tokens: int) -> int:
    """Tokens in a chunk: as configured, else the first multiple of the block size that is ≥ 64.

    Raises:
        ConfigError: the configured value is not a multiple of the engine's block size.
    """
    chosen = loaded.config.chunk_tokens
    if chosen is None:
        return -(-DEFAULT_CHUNK_TOKENS // block_tokens) * block_tokens
    if chosen % block_tokens:
        below = chosen // block_tokens * block_tokens
        choices = " or ".join(str(n) for n in (below, below + block_tokens) if n)
        raise ConfigError(
            f"{loaded.sources['chunk_tokens']}: chunk_tokens: {chosen} is not a multiple of vLLM's "
            f"block size {block_tokens}; set it to {choices}, or leave it out"
        )
    return chosen


def make_region(loaded: LoadedConfig, layout: SlotLayout) -> PoolRegion:
    """One rank's part of the DRAM pool, as large as configured.

    Raises:
        ConfigError: the capacity holds no chunk.
        TierError: the system gives no such memory.
    """
    dram = loaded.config.dram
    try:
        return PoolRegion.create(layout, dram.capacity)
    except GeometryError as error:
        key = f"tiers.{dram.name}.capacity"
        raise ConfigError(f"{loaded.sources[key]}: {key}: {error}") from error
