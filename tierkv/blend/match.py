# SPDX-License-Identifier: Apache-2.0
"""The runs of a prompt that donors cover, to the token.

A window that a donor has is grown token by token into the chunks before and behind the donor, as
far as their text agrees with the prompt's: so rounding to chunks costs nothing, wherever a document
begins in either of them. From left to right, the run that reaches furthest is taken.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from tierkv.blend.donors import Donor, DonorIndex
from tierkv.keys import Scope, TokenIds

Present = Callable[[bytes], bool]
"""Whether a tier has the chunk of this key now."""

MIN_GROWTH = 8
"""Tokens for which a neighbouring chunk is worth loading."""


@dataclass(frozen=True, slots=True)
class Run:
    """Prompt tokens [begin, end), as consecutive donors hold them.

    Attributes:
        shift: position in the prompt less position where it was computed.
        donors: in order; the first may be needed from its middle, the last to its middle.
    """

    begin: int
    end: int
    shift: int
    donors: tuple[Donor, ...]

    def __len__(self) -> int:
        return self.end - self.begin


def find_runs(
    index: DonorIndex, tokens: TokenIds, begin: int, scope: Scope, present: Present
) -> list[Run]:
    """Cover what can be covered of `tokens[begin:]`. Hot path: see benchmarks/blend_match.py.

    Args:
        index: asked.
        tokens: int32 [n], the whole prompt.
        begin: what is before it is known exactly.
        scope: of the request.
        present: asked for each chunk before it becomes part of a run; those it denies are
            forgotten.

    Returns:
        Runs that do not overlap, ascending.
    """
    runs: list[Run] = []

    def covered() -> int:
        return runs[-1].end if runs else begin

    for offset, donors in index.hits(tokens, begin, scope, lambda offset: offset < covered()):
        best: Run | None = None
        for donor in donors:
            if not _is_present(index, donor, present):
                continue
            run = _grow(index, tokens, covered(), offset, donor, present)
            # Of equals, the one with more text before it: it was the better donor, measured.
            if best is None or (run.end, -run.shift) > (best.end, -best.shift):
                best = run
        if best is not None:
            for donor in best.donors:
                index.used(donor)
            runs.append(best)
    return runs


def _grow(
    index: DonorIndex,
    tokens: TokenIds,
    left_edge: int,
    offset: int,
    donor: Donor,
    present: Present,
) -> Run:
    size = index.chunk_tokens
    chain = [donor]
    begin, end = offset, offset + size
    while (before := index.before(chain[0])) is not None and begin > left_edge:
        room = tokens[max(left_edge, begin - size) : begin]
        agree = _agreeing(before.tokens[::-1], room[::-1])
        if agree < MIN_GROWTH or not _is_present(index, before, present):
            break
        chain.insert(0, before)
        begin -= agree
        if agree < size:
            break
    while end < len(tokens):
        room = tokens[end : end + size]
        behind = [(_agreeing(after.tokens, room), after) for after in index.after(chain[-1])]
        behind = [(n, after) for n, after in behind if n >= MIN_GROWTH]
        agree, best = max(behind, key=lambda pair: pair[0], default=(0, None))
        if best is None or not _is_present(index, best, present):
            break
        chain.append(best)
        end += agree
        if agree < size:
            break
    return Run(begin, end, offset - donor.start, tuple(chain))


def _agreeing(first: TokenIds, second: TokenIds) -> int:
    """Length of the common beginning."""
    n = min(len(first), len(second))
    differ = np.flatnonzero(first[:n] != second[:n])
    return int(differ[0]) if len(differ) else n


def _is_present(index: DonorIndex, donor: Donor, present: Present) -> bool:
    if present(donor.chunk.key):
        return True
    index.discard(donor.chunk.key)
    return False
