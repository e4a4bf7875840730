# SPDX-License-Identifier: Apache-2.0
"""KV cache groups: hybrid models keep a block table for each kind of attention.

A layer with a sliding window looks back only so far, and vLLM lets go of its older blocks while a
request runs: their places in the block table become block 0, which belongs to nobody. Two rules
follow, and both are here. A load that ends after `tokens` tokens needs a group's blocks from
`first_needed(tokens)` on, no more. And what lies before that place may be overwritten as soon as
a step that began with `tokens` computed tokens has been planned.

A chunk is stored only when its blocks of all groups are there. Then any chunk may be the end of a
hit, for every group at once; see `docs/explanation/decisions.md`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from tierkv.telemetry.counters import Counters

Sizes = Sequence[tuple[int, int | None]]
"""Of each group in vLLM's order: tokens in a block, and the window (None: no end)."""


@dataclass(frozen=True, slots=True)
class Group:
    """One group, as a request and a chunk see it.

    Attributes:
        block_tokens: tokens in one of its blocks.
        per_chunk: its blocks in a chunk.
        first_index: place of the first of them in a chunk's part.
        window: tokens that its layers look back over, the current one included; None if all.
    """

    block_tokens: int
    per_chunk: int
    first_index: int = 0
    window: int | None = None

    @property
    def attention(self) -> str:
        """Label of the metric that counts its blocks."""
        return "full" if self.window is None else "window"

    def count(self, counters: Counters, op: str, blocks: int) -> None:
        """Count blocks that a load or a save (`op`) copies."""
        name = "tierkv_engine_blocks_total"
        counters.add(name, blocks, op=op, attention=self.attention)

    def first_needed(self, tokens: int) -> int:
        """The first block that vLLM needs, and keeps, once `tokens` tokens are computed."""
        if self.window is None:
            return 0
        return max(0, tokens + 1 - self.window) // self.block_tokens

    def first_whole(self, tokens: int, block_ids: Sequence[int]) -> int:
        """First chunk with all its blocks, when the last planned step began with `tokens`."""
        if self.window is None:
            return 0
        first = self.first_needed(tokens)
        while first < len(block_ids) and block_ids[first] == 0:
            first += 1
        return -(-first // self.per_chunk)


def common_block_tokens(sizes: Sizes) -> int:
    """Tokens after which a block ends in every group: where hits may end."""
    return math.lcm(*(block_tokens for block_tokens, _ in sizes))


def make_groups(sizes: Sizes, chunk_tokens: int) -> tuple[Group, ...]:
    """The groups of an engine, laid out one after the other in a chunk's part.

    Args:
        chunk_tokens: a multiple of every block size.
    """
    groups: list[Group] = []
    index = 0
    for block_tokens, window in sizes:
        per_chunk = chunk_tokens // block_tokens
        groups.append(Group(block_tokens, per_chunk, index, window))
        index += per_chunk
    return tuple(groups)
