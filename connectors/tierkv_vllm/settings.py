# SPDX-License-Identifier: Apache-2.0
"""Settings that depend on the engine: both halves of the connector must come to the same value."""

from __future__ import annotations

from tierkv.config import LoadedConfig
from tierkv.errors import ConfigError, GeometryError
from tierkv.pages.layout import SlotLayout
from tierkv.pages.pool import PoolRegion
from tierkv_vllm.groups import Sizes, common_block_tokens

DEFAULT_CHUNK_TOKENS = 64
"""Small enough that little is lost at a prompt's end, large enough that a chunk of a current model
is megabytes: what a disk and a network want to move at once."""


def slot_layout(
    loaded: LoadedConfig, sizes: Sizes, engine_block_bytes: int, ranks: int
) -> SlotLayout:
    """How chunks of this engine lie in memory.

    Args:
        sizes: of the engine's KV cache groups.
        engine_block_bytes: bytes of one engine block, all layers of one rank.
        ranks: parts of a chunk.

    Raises:
        ConfigError: see `chunk_tokens_for`.
    """
    block_tokens = common_block_tokens(sizes)
    windows = [window for _, window in sizes if window is not None]
    chunk_tokens = chunk_tokens_for(loaded, block_tokens, min(windows, default=None))
    blocks = sum(block_tokens // tokens for tokens, _ in sizes)
    return SlotLayout(chunk_tokens, block_tokens, blocks * engine_block_bytes, ranks)


def chunk_tokens_for(loaded: LoadedConfig, block_tokens: int, window: int | None = None) -> int:
    """Tokens in a chunk: as configured, else the first multiple of the block size that is ≥ 64.

    Not more than the smallest window, if it can be helped: of a longer chunk, vLLM may have let
    go of the beginning before its end is computed.

    Raises:
        ConfigError: the configured value is not a multiple of the engine's block size.
    """
    chosen = loaded.config.chunk_tokens
    if chosen is None:
        chosen = -(-DEFAULT_CHUNK_TOKENS // block_tokens) * block_tokens
        if window is not None and window < chosen:
            chosen = max(1, window // block_tokens) * block_tokens
        return chosen
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
