# SPDX-License-Identifier: Apache-2.0
"""Chains that were found in DRAM, on their way to the tiers that are written on reuse.

Offering a chunk to a tier costs some microseconds, and a chain may have thousands, while the lookup
that found them has a millisecond or two: so they are offered a portion at a time, by `Store.poll`.

Threads and ownership. Owned by the Store's scheduler thread; no lock.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from itertools import islice

from tierkv.keys import Chunk
from tierkv.store.dram import Dram
from tierkv.store.lower import LowerTier

MAX_OFFERED = 128
"""Chunks in one portion."""
MAX_CHAINS = 256
"""Waiting; of more the oldest are forgotten, until they are used again."""


class Reused:
    """See the module.

    Args:
        lowers: tiers below DRAM; shared with the Store.
    """

    def __init__(self, dram: Dram, lowers: Sequence[LowerTier]) -> None:
        self._dram = dram
        self._lowers = lowers
        self._chains: deque[tuple[Sequence[Chunk], int]] = deque(maxlen=MAX_CHAINS)
        # Begun: apart, so that no new one pushes out the beginning of what is half written.
        self._current: tuple[Sequence[Chunk], int] | None = None

    def add(self, chunks: Sequence[Chunk], count: int) -> None:
        """The first `count` of these were used again. O(1)."""
        if any(lower.config.write == "on_reuse" for lower in self._lowers):
            self._chains.append((chunks, count))

    def offer(self) -> bool:
        """Offer the next portion; False if there was none."""
        if self._current is None:
            if not self._chains:
                return False
            self._current = self._chains.popleft()
        chunks, count = self._current
        get = self._dram.index.get
        # From its end, as everywhere: when there is no room, the leaves are what is left out.
        begin = max(0, count - MAX_OFFERED)
        found = [(chunk, get(chunk.key)) for chunk in islice(chunks, begin, count)]
        there = [(chunk, slot) for chunk, slot in found if slot is not None]
        for lower in self._lowers:
            if lower.config.write == "on_reuse":
                lower.writer.offer([chunk for chunk, _ in there], [slot for _, slot in there])
        self._current = (chunks, begin) if begin else None
        return True
