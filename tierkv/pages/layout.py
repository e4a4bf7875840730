# SPDX-License-Identifier: Apache-2.0
"""How one chunk lies in memory: the same bytes in a DRAM slot, a disk slot and a record's payload.

    payload  = part of rank 0 | part of rank 1 | ...          each padded to ALIGNMENT
    part     = engine block 0 | block 1 | ...                  `blocks_per_chunk` of them
    block    = page of layer 0 | page of layer 1 | ...         in the order of registration

A block's pages lie side by side, so that an engine whose own layout keeps all layers of a block
together moves a block with one copy.

Hybrid models have several groups of layers, each with blocks of its own. `block_tokens` is then the
least common multiple of their block sizes, `block_bytes` what so many tokens take in all groups,
and a part holds the chunk's blocks of the first group, then those of the second, and so on. Who
reads and writes parts (movers and the connector) knows the groups; everybody else need not.
"""

from __future__ import annotations

from dataclasses import dataclass

from tierkv.errors import GeometryError

ALIGNMENT = 4096
"""Bytes. O_DIRECT wants file offsets, lengths and addresses aligned to the device's block."""


def align_up(size: int, alignment: int = ALIGNMENT) -> int:
    """The smallest multiple of `alignment` that is at least `size`."""
    return -(-size // alignment) * alignment


@dataclass(frozen=True, slots=True)
class SlotLayout:
    """Sizes of a chunk. Pure values; equal layouts are interchangeable.

    Attributes:
        chunk_tokens: tokens in a chunk.
        block_tokens: tokens in one engine block; divides `chunk_tokens`.
        block_bytes: bytes of one engine block, all layers of one rank.
        ranks: tensor-parallel workers that each hold their part of every chunk.

    Raises:
        GeometryError: sizes that do not divide or are not positive.
    """

    chunk_tokens: int
    block_tokens: int
    block_bytes: int
    ranks: int = 1

    def __post_init__(self) -> None:
        if min(self.chunk_tokens, self.block_tokens, self.block_bytes, self.ranks) < 1:
            raise GeometryError(f"sizes must be positive: {self}")
        if self.chunk_tokens % self.block_tokens:
            raise GeometryError(
                f"chunk_tokens={self.chunk_tokens} is not a multiple of the engine's block size "
                f"{self.block_tokens}; set chunk_tokens to a multiple of {self.block_tokens}"
            )

    @property
    def blocks_per_chunk(self) -> int:
        return self.chunk_tokens // self.block_tokens

    @property
    def part_bytes(self) -> int:
        """Bytes of one rank's part that carry KV."""
        return self.blocks_per_chunk * self.block_bytes

    @property
    def part_stride(self) -> int:
        """Bytes from one rank's part to the next: `part_bytes` padded to ALIGNMENT."""
        return align_up(self.part_bytes)

    @property
    def slot_bytes(self) -> int:
        """Bytes that one chunk takes in DRAM: all ranks, padding included."""
        return self.ranks * self.part_stride
