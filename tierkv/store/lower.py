# SPDX-License-Identifier: Apache-2.0
"""One tier below DRAM as the Store sees it: may it be asked, what is under way, what went wrong.

Threads and ownership. Owned by the Store's scheduler thread; no lock. The coroutines run on
the I/O loop and touch only the tier, the pool's memory and their job.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from enum import Enum

from tierkv.config.models import LowerTierConfig
from tierkv.errors import ErrorKind
from tierkv.keys import Chunk
from tierkv.store.breaker import ONE_CHUNK, Breaker, State
from tierkv.store.complaints import Complaints
from tierkv.store.context import Context
from tierkv.store.cost import CostModel
from tierkv.store.dram import Dram
from tierkv.store.forgetting import Forgetting
from tierkv.store.io_loop import IoLoop, Lane
from tierkv.store.jobs import Errand, Fate, Job, Read
from tierkv.store.negative import NegativeTable
from tierkv.store.writer import Writer
from tierkv.tiers.base import Outcome, Presence, Result, Tier, Usage

logger = logging.getLogger(__name__)

MAX_TOUCHES = 16
"""Touches under way; further ones are dropped: they only concern the order of eviction."""
MAX_LATE = 64
"""Reads that are given up in one look at the clock; the others in the next."""
MAX_DROPPED = 64
"""Writes that wait in vain and are dropped in one look at the clock; the others in the next."""
MAX_PROBES = 64
"""Probes under way; with that many nothing more is asked that needs one."""


class Where(Enum):
    """What can be said about a key without asking the tier."""

    MISS = 0
    HIT = 1
    UNKNOWN = 2
    UNAVAILABLE = 3


class LowerTier:
    """See the module.

    Args:
        tier: opened by `Store.open` before anything else here is called.
        write_bytes: of DRAM that write-behind to this tier may keep leased.
        place: of this tier in the list of all; DRAM is 0.
    """

    def __init__(
        self,
        tier: Tier,
        config: LowerTierConfig,
        dram: Dram,
        io: IoLoop,
        cost: CostModel,
        context: Context,
        write_bytes: int,
        place: int,
    ) -> None:
        self.tier = tier
        self._place = place
        self.name = config.name
        self.config = config
        self.reads: dict[int, Read] = {}
        """By slot, oldest first: all that were submitted and have not come back."""
        self.breaker = Breaker(config.breaker_failures, config.probe_after, context.clock)
        self._negative = NegativeTable(context.clock)
        self._dram = dram
        self._io = io
        self._cost = cost
        self._clock = context.clock
        self._counters = context.counters
        self._complain = Complaints(self.name, context.clock, context.counters)
        slot_bytes = dram.pool.layout.slot_bytes
        limit = config.reads_at_once
        who = f"tier {self.name}"
        self._read_lane = Lane(io, self._load, limit, context.clock, who)
        # A quarter: reads, which someone waits for, must find most of the tier's threads free.
        self._write_lane = Lane(io, self._save, max(1, limit // 4), context.clock, who)
        self.writer = Writer(
            self.name,
            config.write,
            max(1, min(config.write_queue or write_bytes, write_bytes) // slot_bytes),
            config.save_deadline,
            dram,
            self._write_lane,
            self.breaker,
            context.counters,
            self.holds,
            self._written,
        )
        self._forgetting = Forgetting(
            tier,
            io,
            self._write_lane,
            context.clock,
            config.probe_after,
            self._complain,
            self._negative.clear,
            self._gave_up,
        )
        self._evictions_counted = 0
        self._answered_at = float("-inf")  # seconds, when the last read came back
        self._touches = 0
        self._probes: list[Errand] = []
        bind = context.counters.bind
        self._count_bytes = {
            op: bind("tierkv_io_bytes_total", tier=self.name, op=op) for op in ("load", "save")
        }
        self._count_seconds = {
            op: bind("tierkv_io_duration_seconds", tier=self.name, op=op) for op in ("load", "save")
        }
        self._count_reads = {
            reason: bind("tierkv_moves_total", source=self.name, target=dram.name, reason=reason)
            for reason in ("load", "prefetch")
        }

    # -- asking ----------------------------------------------------------------------------------

    def where(self, key: bytes) -> Where:
        """Whether the key can be read from here now. Hot path; no I/O, no side effect."""
        presence = self._presence(key)
        if presence is Presence.MISS or self._negative.blocked(key):
            return Where.MISS
        if self._forgets(key):
            return Where.MISS
        if not self.breaker.would_allow() or not self._io.alive:
            return Where.UNAVAILABLE
        if presence is Presence.HIT:
            return Where.HIT
        return Where.UNKNOWN if len(self._probes) < MAX_PROBES else Where.UNAVAILABLE

    def _presence(self, key: bytes) -> Presence:
        try:
            return self.tier.lookup(key)
        except Exception as error:
            self._complain("lookup", ErrorKind.WORKER, error)
            return Presence.MISS

    def _forgets(self, key: bytes) -> bool:
        return self._forgetting.any and self._forgetting.covers(key)

    def holds(self, key: bytes) -> bool:
        """Whether the tier has the key, as far as can be said without asking it."""
        return self._presence(key) is Presence.HIT and not self._forgets(key)

    def offers(self, key: bytes) -> bool:
        """Whether a lookup would find it here if the tier is up."""
        return self.holds(key) and not self._negative.blocked(key)

    def usage(self) -> Usage:
        try:
            return self.tier.usage()
        except Exception as error:
            self._complain("usage", ErrorKind.WORKER, error)
            return Usage(0, 0, 0)

    def count_evictions(self) -> None:
        """Put what the tier gave up for want of room since last time under its counter."""
        evicted = self.usage().evicted_chunks
        self._gave_up("capacity", evicted - self._evictions_counted)
        self._evictions_counted = max(evicted, self._evictions_counted)

    def _gave_up(self, reason: str, count: int) -> None:
        if count > 0:
            self._counters.add("tierkv_evictions_total", count, tier=self.name, reason=reason)

    # -- reading ---------------------------------------------------------------------------------

    def new_read(self, chunk: Chunk, slot: int, permit: int, reason: str, deadline: float) -> Read:
        """A read into a reserved slot; it begins with `submit`."""
        read = Read(chunk, slot, permit, reason, self._read_done, lower=self, deadline=deadline)
        self.reads[slot] = read
        self._dram.fills[slot] = read
        return read

    def submit(self, reads: Sequence[Read]) -> None:
        """Begin these, in this order."""
        self._read_lane.submit(reads)

    def _read_done(self, read: Read) -> None:
        if self.reads.get(read.slot) is read:
            del self.reads[read.slot]
        result = read.result
        self._answered_at = max(self._answered_at, read.ended)
        if result.outcome is Outcome.DONE:
            self._answered(read)
            self._moved(read, "load", result.nbytes)
            self._negative.forgive(read.chunk.key)
            self._note(read.chunk.key)
            self._cost.observe_load(self.name, read.started, read.ended)
            if self._dram.filled(read):
                self._count_reads[read.reason](1)
        elif result.outcome is Outcome.MISS:
            # It had said HIT. A tier that keeps saying so must not be asked on and on.
            self._answered(read)
            self._negative.failed(read.chunk.key)
            self._dram.not_filled(read, Fate.MISS)
        elif result.outcome is Outcome.REFUSED:
            self._failed(read, "load", result.error)
            self._dram.not_filled(read, Fate.UNAVAILABLE)
        else:
            self._negative.failed(read.chunk.key)
            if result.error in ONE_CHUNK:
                self._dram.ghosts.invalid((read.chunk.key,))
            self._failed(read, "load", result.error or ErrorKind.WORKER)
            self._dram.not_filled(read, Fate.FAILED)

    # -- writing ---------------------------------------------------------------------------------

    def _written(self, job: Job) -> None:
        result = job.result
        if result.outcome is Outcome.DONE:
            self._answered(job)
            self._moved(job, "save", result.nbytes)
            self._negative.forgive(job.chunk.key)
            self._note(job.chunk.key)
            self._counters.add(
                "tierkv_moves_total", source=self._dram.name, target=self.name, reason=job.reason
            )
            return
        if result.outcome is Outcome.REFUSED:
            # No room, or paused: the tier is well, it answers.
            self._answered(job)
            if result.error is not None:
                self._complain("save", result.error)
        else:
            self._failed(job, "save", result.error or ErrorKind.WORKER)
        reason = "refused" if result.outcome is Outcome.REFUSED else "failed"
        self._counters.add("tierkv_saves_dropped_total", tier=self.name, reason=reason)

    def _note(self, key: bytes) -> None:
        """The tier has the key; if it goes missing later, that is known. Not if it is to go."""
        if not self._forgets(key):
            self._dram.ghosts.had(key, self._place)

    # -- forgetting ------------------------------------------------------------------------------

    def forget(self, keys: Sequence[bytes]) -> None:
        """Have the tier forget these; from now on they are misses."""
        self.writer.forget(keys)
        self._forgetting.keys(keys)

    def forget_all(self) -> None:
        """Have the tier forget everything, and throw away what waits."""
        self.writer.drop_waiting("reset")
        self._drop_waiting_reads()
        self._forgetting.everything()

    def _drop_waiting_reads(self) -> None:
        while self._read_lane.queue:
            try:
                read = self._read_lane.queue.popleft()
            except IndexError:
                return
            self._drop_read(read, Fate.MISS)
            self.breaker.unused(read.permit)

    def _drop_read(self, read: Read, fate: Fate) -> None:
        del self.reads[read.slot]
        self._dram.not_filled(read, fate)

    # -- small errands ---------------------------------------------------------------------------

    def touch(self, keys: Sequence[bytes]) -> None:
        """Say that these were used, most valuable last."""
        if self._touches < MAX_TOUCHES and self.breaker.state is State.CLOSED and self._io.alive:
            self._touches += 1
            self._io.errand(Errand(keys, self._touched), lambda: self.tier.touch(keys))

    def _touched(self, errand: Errand) -> None:
        self._touches -= 1
        if not errand.ok:
            self._complain("touch", ErrorKind.WORKER, errand.error)

    def probe(self, keys: Sequence[bytes]) -> Errand:
        """Have the tier find out about UNKNOWN keys. The errand is `back` when it has, or is late.

        `where` has just said UNKNOWN, so the breaker allows it.
        """
        errand = Errand(
            keys,
            self._probed,
            permit=self.breaker.allow(),
            deadline=self._clock() + self.config.load_deadline,
        )
        self._probes.append(errand)
        self._io.errand(errand, lambda: self.tier.probe(keys))
        return errand

    def _probed(self, errand: Errand) -> None:
        if errand not in self._probes:  # it was late, and that has been told
            return
        self._probes.remove(errand)
        errand.back = True
        if not errand.ok:
            self._complain("probe", ErrorKind.WORKER, errand.error)
            self._tell_breaker_failure(errand.permit, ErrorKind.WORKER)
        elif errand.keys and self._presence(errand.keys[0]) is Presence.UNKNOWN:
            # By the contract of `Tier.probe`, this is how it says that it failed.
            self._complain("probe", ErrorKind.TIMEOUT)
            self._tell_breaker_failure(errand.permit, ErrorKind.TIMEOUT)
        else:
            self.breaker.success(errand.permit)

    # -- time ------------------------------------------------------------------------------------

    def check_deadlines(self, now: float) -> None:
        """Reads and writes that take too long are failures of the tier. Cheap if there are none.

        A read that runs keeps its slot until it returns, since the tier may still write into it;
        one that still waits when its deadline passes is dropped.
        """
        if self.reads:
            late: list[Read] = []
            for read in self.reads.values():
                if read.deadline > now or len(late) == MAX_LATE:
                    break
                if read.ended:  # and not applied yet: `ended` says when, not this look at the clock
                    continue
                if not read.started or self._runs_too_long(read, now):
                    late.append(read)
            for read in late:
                self._late(read, now)
        for errand in [e for e in self._probes if e.deadline <= now and not e.returned]:
            self._probes.remove(errand)
            errand.back = True
            self._complain("probe", ErrorKind.TIMEOUT)
            self._tell_breaker_failure(errand.permit, ErrorKind.TIMEOUT)
        self.writer.check_deadlines(now)
        self._forgetting.check(now)
        if self.breaker.state is State.OPEN:
            self.writer.drop_waiting("unavailable", MAX_DROPPED)

    def _runs_too_long(self, read: Read, now: float) -> bool:
        """Not said again of one that was told."""
        return not read.overdue and (read.ended or now) - read.started >= self.config.load_deadline

    def _late(self, read: Read, now: float) -> None:
        if not read.started:
            try:
                self._read_lane.queue.remove(read)
            except ValueError:
                return  # the loop has just taken it
            self._drop_read(read, Fate.LATE)
            # A queue that is too long is no failure of a tier that works it off.
            failed = self._answered_at < read.deadline - self.config.load_deadline
            if not failed:
                self.breaker.unused(read.permit)
        else:  # the loop may have begun it just now
            failed = self._runs_too_long(read, now)
        if failed:
            read.overdue = True
            self._complain("load", ErrorKind.TIMEOUT)
            self._tell_breaker_failure(read.permit, ErrorKind.TIMEOUT)

    # -- ending ----------------------------------------------------------------------------------

    async def drained(self) -> None:
        """Wait until every queued write is done. Loop thread."""
        await self._write_lane.drained()

    # --------------------------------------------------------------------------------------------

    async def _load(self, read: Read) -> Result:
        return await self.tier.load(read.chunk, self._dram.pool.parts(read.slot))

    async def _save(self, job: Job) -> Result:
        return await self.tier.save(job.chunk, self._dram.pool.parts(job.slot))

    def _moved(self, job: Job, op: str, nbytes: int) -> None:
        self._count_bytes[op](nbytes)
        self._count_seconds[op](job.ended - job.started)

    def _answered(self, job: Job) -> None:
        if not job.overdue:
            self.breaker.success(job.permit)

    def _failed(self, job: Job, what: str, kind: ErrorKind | None) -> None:
        if job.overdue:  # told and counted when its deadline passed
            return
        if kind is not None:
            self._complain(what, kind)
        self._tell_breaker_failure(job.permit, kind or ErrorKind.TIMEOUT)

    def _tell_breaker_failure(self, permit: int, kind: ErrorKind) -> None:
        was = self.breaker.state
        self.breaker.failure(permit, kind)
        if self.breaker.state is State.OPEN and was is not State.OPEN:
            logger.warning(
                "tier %s: left alone after repeated failures (%s); tried again every %g s",
                self.name,
                kind.value,
                self.config.probe_after,
            )
