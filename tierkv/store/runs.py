# SPDX-License-Identifier: Apache-2.0
"""Finding and fetching the next part of a chain: which chunks are here, and who has the others.

A run goes on over chunks that are READY in DRAM, being read into it, or held by a lower tier that
may be asked and is worth asking. It ends at the first that is none of these.

Threads and ownership. Owned by the Store's scheduler thread; no lock.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import islice

from tierkv.keys import Chunk
from tierkv.store.context import Context
from tierkv.store.cost import CostModel
from tierkv.store.dram import Dram
from tierkv.store.jobs import Errand, Fate, Read
from tierkv.store.lower import LowerTier, Where
from tierkv.tiers.slot_index import READY

MAX_BEGUN = 64
"""Reads that one call begins: under half a millisecond of the scheduler's time."""

MAX_AWAITED = 128
"""Most chunks a ticket waits for at once: more than a tier has under way. The rest begins as these
arrive."""

MAX_PROBED = 1024
"""Keys in one probe."""

Entry = int | Read
"""A leased READY slot, or a read that a claim was put on."""


@dataclass(slots=True)
class Decisions:
    """What was decided about each tier for one ticket, so that it is decided once.

    Attributes:
        worth: tier name to the cost model's word.
        probes: tier name to the last probe of keys that only the other side knows, and the first
            chunk that it does not cover.
    """

    worth: dict[str, bool] = field(default_factory=dict)
    probes: dict[str, tuple[Errand, int]] = field(default_factory=dict)


@dataclass(slots=True)
class Extension:
    """The next part of a run. Every entry is held for the caller.

    Attributes:
        leased: leading chunks that were READY: their slots.
        entries: what follows.
        begun: how many of `entries` are reads that began now, by tier name.
        joined: how many are reads that were under way.
        end: why the run ends after this; None if it may go on later.
        blame: with `end`: the tier that is to blame, or "none".
        waits_for: with `end` None and chunks left: the tier whose deadline counts.
        asked: at the end of the run: (tier, result) of those that were asked for the last chunk.
    """

    leased: list[int]
    entries: list[Entry] = field(default_factory=list)
    begun: dict[str, int] = field(default_factory=dict)
    joined: int = 0
    end: str | None = None
    blame: str = "none"
    waits_for: LowerTier | None = None
    asked: list[tuple[str, str]] = field(default_factory=list)


class Runs:
    """See the module.

    Args:
        lowers: tiers below DRAM, fastest first; shared with the Store.
    """

    def __init__(
        self, dram: Dram, lowers: Sequence[LowerTier], cost: CostModel, context: Context
    ) -> None:
        self.dram = dram
        self.lowers = lowers
        self.clock = context.clock
        self.generation = 0
        self._cost = cost

    def extend(
        self,
        chunks: Sequence[Chunk],
        start: int,
        decisions: Decisions,
        reason: str,
        max_reads: int = MAX_BEGUN,
    ) -> Extension:
        """Go on with a run at chunk `start`. O(chunks gone over); begins at most `max_reads`.

        Args:
            chunks: the chain, or the part of it that is wanted.
            start: index of the first chunk to look at.
            decisions: the caller's, kept from call to call.
            reason: why, for the counters: load or prefetch.
        """
        index = self.dram.index
        # Hot path: a chain that is all in DRAM is leased in one go.
        leased = index.lease_run(chunk.key for chunk in islice(chunks, start, None))
        found = Extension(leased)
        planned: list[tuple[int, LowerTier, int]] = []  # place in entries, tier, permit
        at = start + len(leased)
        while at < len(chunks):
            key = chunks[at].key
            slot = index.find(key)
            if slot is not None and index.state(slot) == READY:
                more = index.lease_run(chunk.key for chunk in islice(chunks, at, None))
                found.entries += more
                at += len(more)
                continue
            if slot is None:
                lower = self._locate(chunks, at, decisions, reason, found)
                if lower is None:
                    break
                if len(planned) >= max_reads:
                    found.waits_for = lower
                    break
                permit = lower.breaker.allow()
                if not permit:
                    found.end, found.blame = Fate.UNAVAILABLE.value, lower.name
                    break
                planned.append((len(found.entries), lower, permit))
                found.entries.append(-1)
            else:
                read = self.dram.fills.get(slot)
                if read is None:  # being saved: nobody knows for how long
                    found.end = Fate.MISS.value
                    break
                read.waiters += 1
                found.joined += 1
                found.entries.append(read)
            at += 1
        if planned:
            self._begin(chunks, start + len(leased), planned, reason, found)
        return found

    def let_go(self, entries: Iterable[Entry]) -> None:
        """Give back what `extend` held."""
        for entry in entries:
            if isinstance(entry, int):
                self.dram.index.release(entry)
            elif entry.fate is Fate.READY:
                self.dram.index.release(entry.slot)
            elif entry.fate is Fate.PENDING:
                entry.waiters -= 1

    def _begin(
        self,
        chunks: Sequence[Chunk],
        first: int,
        planned: list[tuple[int, LowerTier, int]],
        reason: str,
        found: Extension,
    ) -> None:
        """Reserve slots for the planned reads and start them; cut the run where room ends."""
        slots = self.dram.index.reserve_run([chunks[first + place].key for place, _, _ in planned])
        if len(slots) < len(planned):
            for _, lower, permit in planned[len(slots) :]:
                lower.breaker.unused(permit)
            place, lower, _ = planned[len(slots)]
            self.let_go([entry for entry in found.entries[place:] if entry != -1])
            found.joined -= sum(isinstance(entry, Read) for entry in found.entries[place:])
            del found.entries[place:]
            found.end, found.waits_for = None, lower
            found.asked.clear()
        now = self.clock()
        batches: dict[str, list[Read]] = {}
        for slot, (place, lower, permit) in zip(slots, planned, strict=False):
            deadline = now + lower.config.load_deadline
            read = lower.new_read(chunks[first + place], slot, permit, reason, deadline)
            read.waiters = 1
            found.entries[place] = read
            batches.setdefault(lower.name, []).append(read)
        for lower in self.lowers:
            if batch := batches.get(lower.name):
                lower.submit(batch)
                found.begun[lower.name] = len(batch)
        self.dram.count_evictions()

    def _locate(
        self,
        chunks: Sequence[Chunk],
        at: int,
        decisions: Decisions,
        reason: str,
        found: Extension,
    ) -> LowerTier | None:
        """The tier to read chunk `at` from. None: `found` says why the run ends or waits."""
        key = chunks[at].key
        end, blame = Fate.MISS.value, "none"
        asked: list[tuple[str, str]] = []
        for lower in self.lowers:
            probe, covers = decisions.probes.get(lower.name, (None, 0))
            if probe is not None and not probe.back:
                found.waits_for = lower
                return None
            where = lower.where(key)
            if where is Where.UNKNOWN:
                if at >= covers:
                    keys = [chunk.key for chunk in islice(chunks, at, at + MAX_PROBED)]
                    decisions.probes[lower.name] = lower.probe(keys), at + len(keys)
                    found.waits_for = lower
                    return None
                where = Where.UNAVAILABLE  # the probe could not tell
            if where is Where.HIT:
                if self._worth(lower, len(chunks) - at, decisions, reason):
                    return lower
                end, blame = "skipped", lower.name
                asked.append((lower.name, "hit"))
            elif where is Where.UNAVAILABLE:
                if end == Fate.MISS.value:
                    end, blame = Fate.UNAVAILABLE.value, lower.name
                asked.append((lower.name, "unavailable"))
            else:
                asked.append((lower.name, "miss"))
        found.end, found.blame, found.asked = end, blame, asked
        return None

    def _worth(self, lower: LowerTier, chunks: int, decisions: Decisions, reason: str) -> bool:
        worth = decisions.worth.get(lower.name)
        if worth is None:
            # Reading ahead must not use up the one time in 64 at which a load measures again.
            ask = self._cost.pays if reason == "prefetch" else self._cost.worth
            worth = decisions.worth[lower.name] = ask(lower.name, chunks)
        return worth
