# SPDX-License-Identifier: Apache-2.0
"""A load as its caller holds it: what is ready, what is awaited, and until when.

Threads and ownership. Owned by the Store's scheduler thread; no lock. The Store keeps no list of
tickets: a ticket holds leases and claims, and whoever holds the ticket must `release` it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from tierkv.keys import Chunk
from tierkv.store.jobs import Fate, Read
from tierkv.store.lower import LowerTier
from tierkv.store.runs import MAX_AWAITED, MAX_BEGUN, Decisions, Entry, Extension, Runs
from tierkv.tiers.slot_index import READY


class LoadTicket:
    """Leading chunks of a chain, leased in DRAM as they become ready.

    Attributes:
        slots: DRAM slots of the leading chunks that are leased and verified.
        sources: for each, the name of the tier that held it when it was asked for. A chunk that
            was read ahead counts for the tier it was read from, for the first ticket that gets it.
        rest: once settled, why the run ended after `slots`: "" (all ready), "miss", "late",
            "unavailable", "skipped" (recomputing is faster), "failed".
        blame: with `rest`: name of the tier that is to blame, or "none".
        error: kind of the error, where the tier told one, else "".
    """

    def __init__(self, runs: Runs, chunks: Sequence[Chunk], *, hold: bool = False) -> None:
        """`hold`: lease all that is here at once, not only what the run has come to."""
        self.slots: list[int] = []
        self.sources: list[str] = []
        self.rest = ""
        self.blame = "none"
        self.error = ""
        self._runs = runs
        self._chunks = chunks
        self._generation = runs.generation
        self._began = runs.clock()
        self._waiting: deque[Entry] = deque()
        self._decisions = Decisions()
        self._frontier = 0  # chunks that are in `slots` or `_waiting`
        # Why the run ends at the frontier, once that is known, and whose fault it is.
        self._end: str | None = None
        self._end_blame = "none"
        self._waits_for: LowerTier | None = None
        self._settled = False
        self._released = False
        self._held: list[int] = []
        if hold:
            for chunk in chunks:
                self._held += runs.dram.index.lease_run([chunk.key])

    @property
    def ready(self) -> int:
        """Leading chunks that are leased and verified in DRAM."""
        return len(self.slots)

    @property
    def unclaimed(self) -> int:
        """Wanted chunks that it neither holds nor waits for yet."""
        return 0 if self._settled else len(self._chunks) - self._frontier

    def begin(self) -> Extension:
        """Look up, lease and start. Called once, by the Store; returns what was found, to count."""
        found = self._extend()
        self._advance()
        return found

    def poll(self) -> bool:
        """True once settled. Advances; O(newly ready); never blocks.

        Settled: every wanted chunk is ready, or the run ended (see `rest`), or a deadline passed;
        what is ready by then counts.
        """
        if self._settled:
            return True
        if self._generation != self._runs.generation:
            # Everything was forgotten meanwhile: what was not handed out yet must not be.
            self._settle(Fate.MISS.value)
            self.truncate(0)
            return True
        self._collect()
        if not self._settled:
            if (
                self._end is None
                and self._frontier < len(self._chunks)
                and len(self._waiting) < MAX_AWAITED
            ):
                self._extend()
            self._advance()
        return self._settled

    def truncate(self, n: int) -> None:
        """Keep only the first `n` leases, and wait for no more if `n` is less than `ready`."""
        if n < len(self.slots):
            if not self._settled:
                self._settle(self._end or "", self._end_blame)
            if not self._released:
                self._runs.let_go(self.slots[n:])
            del self.slots[n:]
            del self.sources[n:]

    def release(self) -> None:
        """Give all leases back. Idempotent, and safe after `Store.reset` and `Store.close`.

        `slots` and `sources` stay as a record of what was delivered.
        """
        if not self._released:
            if not self._settled:
                self._settle(self._end or "", self._end_blame)
            self._released = True
            self._runs.let_go(self.slots)

    def _extend(self) -> Extension:
        found = self._runs.extend(
            self._chunks,
            self._frontier,
            self._decisions,
            "load",
            min(MAX_BEGUN, MAX_AWAITED - len(self._waiting)),
        )
        self._frontier += len(found.leased) + len(found.entries)
        if self._waiting:
            self._waiting += found.leased
        else:
            self._take(found.leased)
        self._waiting += found.entries
        self._end, self._end_blame, self._waits_for = found.end, found.blame, found.waits_for
        return found

    def _take(self, slots: list[int]) -> None:
        self.slots += slots
        self.sources += self._runs.dram.sources(slots)

    def _collect(self) -> None:
        """Move what has become ready from `_waiting` to `slots`."""
        waiting, dram = self._waiting, self._runs.dram
        while waiting:
            entry = waiting[0]
            read = entry if isinstance(entry, Read) else None
            if read is not None and read.fate is not Fate.READY:
                if read.fate is not Fate.PENDING:
                    self.error = str(read.result.error or "")
                    self._settle(read.fate.value, read.lower.name)
                return
            slot = entry.slot if isinstance(entry, Read) else entry
            if dram.index.state(slot) != READY:
                self._settle(Fate.MISS.value)  # invalidated while it waited for those before it
                return
            self.slots.append(slot)
            self.sources.append(dram.source(slot) if read is None else read.lower.name)
            waiting.popleft()

    def _advance(self) -> None:
        self._collect()
        if self._settled:
            return
        if not self._waiting and (self._end is not None or self._frontier == len(self._chunks)):
            self._settle(self._end or "", self._end_blame)
            return
        dram = self._runs.dram
        if self._waits_for is not None and not self._waiting and len(self.slots) >= dram.pool.slots:
            # The pool is full of this very chain: no use to wait.
            self._settle(Fate.LATE.value, self._waits_for.name)
            return
        first = self._waiting[0] if self._waiting else None
        lower = first.lower if isinstance(first, Read) else self._waits_for
        if lower is not None and self._runs.clock() >= self._began + lower.config.load_deadline:
            self._settle(Fate.LATE.value, lower.name)

    def _settle(self, rest: str, blame: str = "none") -> None:
        self._settled = True
        self.rest = rest
        if rest not in ("", Fate.MISS.value):
            self.blame = blame
        self._runs.let_go(self._waiting)
        self._waiting.clear()
        self._runs.let_go(self._held)
        self._held.clear()
        # Once, and all together, so that a parent outlives its child whatever came when.
        self._runs.dram.index.touch_run(self.slots)
