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
MIN_EXTENSION = 32
"""Tokens by which a run that begins in covered text must reach beyond it, if nothing else is said:
its first ones there are computed anew anyway."""
MAX_REPLACED = 2048
"""Tokens of a run whose place another may take: in a longer one a seam does not matter, and looking
for it again takes time."""
MAX_TRIES = 8
"""Windows in covered text that are grown between two runs: repetitive text has no end of them."""


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
    index: DonorIndex,
    tokens: TokenIds,
    begin: int,
    scope: Scope,
    present: Present,
    extension: int = MIN_EXTENSION,
) -> list[Run]:
    """Cover what can be covered of `tokens[begin:]`. Hot path: see benchmarks/blend_match.py.

    Args:
        index: asked.
        tokens: int32 [n], the whole prompt.
        begin: what is before it is known exactly.
        scope: of the request.
        present: asked for each chunk before it becomes part of a run; those it denies are
            forgotten.
        extension: tokens by which a run that begins in covered text must reach beyond it.

    Returns:
        Runs that do not overlap, ascending.
    """
    runs: list[Run] = []
    size = index.chunk_tokens
    overlapping: Run | None = None  # of those that begin in covered text, the one that ends last
    tried = 0  # windows in covered text, since the last run

    def covered() -> int:
        return runs[-1].end if runs else begin

    def of_no_use(offset: int) -> bool:
        if offset < covered() and tried >= MAX_TRIES:
            return True
        # Grown by a part of a chunk, it ends in covered text still.
        return offset + 2 * size <= covered()

    def take(run: Run) -> None:
        nonlocal tried
        tried = 0
        runs.append(_clipped(run, covered(), size))

    def take_instead_of_last(offset: int, donor: Donor) -> bool:
        """If this donor has more than all that the last run has: one seam less."""
        if not runs or len(runs[-1]) > MAX_REPLACED:
            return False
        edge = runs[-2].end if len(runs) > 1 else begin
        whole = _clipped(_grow(index, tokens, edge, offset, donor, present), edge, size)
        if whole.begin > runs[-1].begin or whole.end <= runs[-1].end:
            return False
        runs[-1] = whole
        return True

    for offset, donors in index.hits(tokens, max(0, begin - 2 * size + 1), scope, of_no_use):
        tried += offset < covered()
        grown = [
            (_grow(index, tokens, covered(), offset, donor, present), donor)
            for donor in donors
            if _is_present(index, donor, present)
        ]
        if not grown:
            continue
        # Of equals, the one with more text before it: it was the better donor, measured.
        best, donor = max(grown, key=lambda pair: (pair[0].end, -pair[0].shift))
        behind = offset >= covered()
        if overlapping is not None and (
            best.begin >= covered() + extension or (behind and overlapping.end > best.end)
        ):
            take(overlapping)
            overlapping = None
            behind = offset >= covered()
        if behind:
            take(best)
            overlapping = None
        elif best.end >= max(covered() + extension, overlapping.end + 1 if overlapping else 0):
            overlapping = None if take_instead_of_last(offset, donor) else best
    if overlapping is not None:
        take(overlapping)
    if _is_stub(runs, begin, size):
        del runs[0]
    for run in runs:
        for donor in run.donors:
            index.used(donor)
    return runs


def _is_stub(runs: list[Run], begin: int, size: int) -> bool:
    """Whether the first run is a little behind the exact beginning, and then comes other text.

    It would save next to nothing, and all that other text would count as approximate for it.
    """
    if not runs or not begin or runs[0].begin > begin or len(runs[0]) >= size:
        return False
    return len(runs) == 1 or runs[1].begin >= runs[0].end + size


def _clipped(run: Run, edge: int, size: int) -> Run:
    """Without what is before the edge, and without a chunk of which only crumbs are behind it."""
    if run.begin >= edge:
        return run
    needed = [donor for donor in run.donors if donor.start + size + run.shift > edge]
    inside = needed[0].start + size + run.shift - edge
    if inside < MIN_GROWTH and len(needed) > 1:
        return Run(edge + inside, run.end, run.shift, tuple(needed[1:]))
    return Run(edge, run.end, run.shift, tuple(needed))


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
