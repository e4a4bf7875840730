# SPDX-License-Identifier: Apache-2.0
"""Settings that depend on the engine: both halves of the connector must come to the same value."""

from __future__ import annotations

from tierkv.config import TierKVConfig
from tierkv.errors import ConfigError

DEFAULT_CHUNK_TOKENS = 64
"""Small enough that little is lost at a prompt's end, large enough that a chunk of a current model
is megabytes: what a disk and a network want to move at once."""


def chunk_tokens_for(config: TierKVConfig, block_tokens: int) -> int:
    """Tokens in a chunk: as configured, else the first multiple of the block size that is ≥ 64.

    Raises:
        ConfigError: the configured value is not a multiple of the engine's block size.
    """
    if config.chunk_tokens is None:
        return -(-DEFAULT_CHUNK_TOKENS // block_tokens) * block_tokens
    if config.chunk_tokens % block_tokens:
        below = config.chunk_tokens // block_tokens * block_tokens
        choices = " or ".join(str(n) for n in (below, below + block_tokens) if n)
        raise ConfigError(
            f"chunk_tokens: {config.chunk_tokens} is not a multiple of vLLM's block size "
            f"{block_tokens}; set it to {choices}, or leave it out"
        )
    return config.chunk_tokens
