# SPDX-License-Identifier: Apache-2.0
"""The Store: knows what is where and decides what is loaded, saved, moved and forgotten.

**Threads and ownership.** Scheduler thread: everything here; all methods are called from that one
thread, and none but `open`, `recall`, `drain` and `close` blocks or does I/O. I/O loop thread: the
coroutines of the tiers below DRAM. Crossing: jobs, handed over through a lane's queue and back
through the loop's `done` queue, which `poll` drains. So the index has one owner and there is no
lock. The thread is started by `open`, if there is a lower tier, and ended by `close`, which waits
at most about its timeout and may be called twice. If it dies, the lower tiers are unavailable and
the engine goes on with DRAM.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Sequence

from tierkv.config.models import LowerTierConfig, TierKVConfig
from tierkv.errors import ConfigError, GeometryError
from tierkv.keys import Chunk, Namespace
from tierkv.pages.layout import SlotLayout
from tierkv.pages.pool import DramPool
from tierkv.store.context import Context
from tierkv.store.cost import CostModel
from tierkv.store.demand import Demand, demand_of
from tierkv.store.dram import Dram
from tierkv.store.ghosts import NEVER_SEEN, Ghosts, Why
from tierkv.store.io_loop import IoLoop
from tierkv.store.life import close_tiers, drain, open_tiers, recall
from tierkv.store.lower import LowerTier, Where
from tierkv.store.pins import Pins
from tierkv.store.report import StoreReport, TierSummary
from tierkv.store.reused import Reused
from tierkv.store.runs import MAX_BEGUN, Decisions, Runs
from tierkv.store.tickets import LoadTicket
from tierkv.telemetry.counters import Snapshot
from tierkv.tiers.base import Tier, TierReport, Usage

logger = logging.getLogger(__name__)

PREFETCH_SHARE = 4
"""Reading ahead may have one in so many of the pool's slots under way."""
APPLY_SECONDS = 0.0005
"""After so long one poll leaves what else was finished to the next: the scheduler waits for it."""
DEMOTE_SHARE = 10
"""With fewer than one in so many slots free, the next victims are copied down ahead (on_evict)."""
DEMOTE_AHEAD = 128
"""Victims looked at, at most, beyond those just evicted."""


class Store:
    """See the module.

    Args:
        config: which tiers, and how.
        context: clock, counters and the like; a default one of its own if None.

    Attributes:
        pool: the DRAM slots; after `open`.
        layout: sizes of a chunk; after `open`.
        config: as given.
        context: as given, or the default.
    """

    pool: DramPool
    layout: SlotLayout

    def __init__(self, config: TierKVConfig, context: Context | None = None) -> None:
        self.config = config
        self.context = context if context is not None else Context()
        self._counters = self.context.counters
        self._counters.declare_tiers([tier.name for tier in config.tiers])
        self._io: IoLoop | None = None
        self._lowers: list[LowerTier] = []
        self._opened = False
        self._open = False

    # -- life ------------------------------------------------------------------------------------

    def open(
        self, namespace: Namespace, layout: SlotLayout, pool: DramPool | None = None
    ) -> StoreReport:
        """Take memory, start the I/O loop, open the tiers. Blocks; once.

        A lower tier that cannot be opened is left out, said once at error level, and listed in the
        report; the Store goes on without it.

        Args:
            namespace: what is cached; decides what tiers recover.
            layout: sizes of a chunk.
            pool: DRAM slots of that layout that exist already; without it, one of the configured
                capacity is made. `close` closes it either way.

        Raises:
            ConfigError: the DRAM tier is smaller than one chunk.
            TierError: there is no memory for it.
        """
        assert not self._opened, "a Store is opened once"
        self._opened = True
        dram = self.config.dram
        try:
            self.pool = pool if pool is not None else DramPool.create(layout, dram.capacity)
        except GeometryError as error:
            raise ConfigError(f"tiers.{dram.name}.capacity: {error}") from error
        self.layout = layout
        keeps_chunks = any(tier.write == "on_evict" for tier in self.config.lower)
        known = [(tier.name, getattr(tier, "ttl", None)) for tier in self.config.tiers]
        self._ghosts = Ghosts(known, self.context.clock)
        self._dram = Dram(
            dram.name, dram.policy, self.pool, self._counters, self._ghosts, keeps_chunks
        )
        self._pins = Pins(self._dram)
        self._cost = CostModel(layout.chunk_tokens, layout.slot_bytes)
        self._reused = Reused(self._dram, self._lowers)
        self._runs = Runs(self._dram, self._lowers, self._cost, self.context)
        usage = self._dram.usage()
        tiers = {dram.name: TierSummary(usage.capacity_bytes, self.pool.slots)}
        disabled: dict[str, str] = {}
        self._open = True
        if self.config.lower:
            self._io = self.context.make_io()
            self._io.start()
            lower = self.config.lower
            answers = open_tiers(self._io, lower, namespace, layout, self.context)
            for config, answer in zip(lower, answers, strict=True):
                if isinstance(answer, str):
                    disabled[config.name] = answer
                    logger.error("tier %s is left out: %s", config.name, answer)
                else:
                    tiers[config.name] = self._add_tier(config, *answer)
        return StoreReport(namespace.digest.hex(), layout, tiers, disabled)

    def _add_tier(self, config: LowerTierConfig, tier: Tier, found: TierReport) -> TierSummary:
        assert self._io is not None
        # Half of the pool, shared by all tiers: the other half stays free to be evicted.
        share = self.pool.slots * self.layout.slot_bytes // 2 // len(self.config.lower)
        place = self.config.tiers.index(config)
        lower = LowerTier(
            tier, config, self._dram, self._io, self._cost, self.context, share, place
        )
        self._lowers.append(lower)
        capacity = lower.usage().capacity_bytes
        return TierSummary(
            capacity,
            capacity // self.layout.slot_bytes,
            found.recovered_chunks,
            found.recovered_bytes,
            found.seconds,
            found.notes,
        )

    def close(self, timeout: float = 5.0) -> None:
        """Finish write-behind for up to `timeout` seconds, close the tiers, give the pool back.

        Blocks at most about a second longer. What is not written by then is dropped and counted.
        Idempotent; leases that are still out may be released afterwards.
        """
        if not self._open:
            return
        self._open = False
        end = time.monotonic() + timeout
        while time.monotonic() < end and self._reused.offer():
            pass
        lowers = list(self._lowers)
        self._lowers.clear()  # nothing new from here on
        if self._io is not None:
            close_tiers(self._io, lowers, max(0.0, end - time.monotonic()))
        self._apply_done()
        self._pins.unpin_all()
        self._dram.forget_all()
        self.pool.close()

    def drain(self, timeout: float = 5.0) -> bool:
        """Wait until everything queued is written; False if `timeout` seconds did not do.

        Blocks: for shutdown, tests and tools.
        """
        while self._reused.offer():
            pass
        drained = self._io is None or drain(self._io, self._lowers, timeout)
        self._apply_done()
        return drained

    def recall(self, most: int, seconds: float) -> list[Chunk]:
        """What the tiers hold from an earlier run, as far as they can tell its text.

        Blocks, for `seconds` and, if a tier hangs, a few more: once, between `open` and the first
        request.

        Args:
            most: chunks to tell of.

        Returns:
            Keys and text, a tier's most recently used first.
        """
        return recall(self._io, self._lowers, most, seconds) if self._io is not None else []

    # -- loading ---------------------------------------------------------------------------------

    def prefetch(self, chunks: Sequence[Chunk]) -> None:
        """A request arrived: begin to read what lower tiers hold of its chain. Keeps no lease.

        Bounded: reads under way take at most a quarter of the pool's slots; the rest is left to
        `load`.

        Args:
            chunks: what will be wanted, first chunk first.
        """
        room = self.pool.slots // PREFETCH_SHARE - sum(len(lower.reads) for lower in self._lowers)
        ready = self._dram.ready_run(chunks) if self._lowers and room > 0 else len(chunks)
        if ready == len(chunks):
            return
        # From the first chunk on, though only the rest is read: the leases keep reads of the end
        # of the chain from evicting its beginning.
        found = self._runs.extend(chunks, 0, Decisions(), "prefetch", min(room, MAX_BEGUN))
        self._runs.let_go(found.leased)
        self._runs.let_go(found.entries)

    def load(self, chunks: Sequence[Chunk]) -> LoadTicket:
        """Lease what is ready in DRAM and begin to read the rest of the run.

        Hot path: about 0.5 µs a chunk that is in DRAM, some µs a chunk that is read.

        Args:
            chunks: the wanted part of a chain, first chunk first.

        Returns:
            A ticket to be polled and, whatever happens, released.
        """
        return self._begin(LoadTicket(self._runs, chunks), chunks)

    def load_all(self, chains: Sequence[Sequence[Chunk]]) -> list[LoadTicket]:
        """`load` of several parts of chains: what is read for one evicts nothing of the others."""
        tickets = [LoadTicket(self._runs, chunks, hold=True) for chunks in chains]
        pairs = zip(tickets, chains, strict=True)
        return [self._begin(ticket, chunks) for ticket, chunks in pairs]

    def _begin(self, ticket: LoadTicket, chunks: Sequence[Chunk]) -> LoadTicket:
        """Start a ticket and count what it found."""
        found = ticket.begin()
        dram, add = self._dram.name, self._counters.add
        here = len(found.leased) + sum(isinstance(entry, int) for entry in found.entries)
        begun = sum(found.begun.values())
        name = "tierkv_lookup_chunks_total"
        if here:
            add(name, here, tier=dram, result="hit")
        if found.joined:
            add(name, found.joined, tier=dram, result="pending")
        if begun or found.asked:
            add(name, begun + bool(found.asked), tier=dram, result="miss")
        for tier, count in found.begun.items():
            add(name, count, tier=tier, result="hit")
        for tier, result in found.asked:
            add(name, tier=tier, result=result)
        if found.leased:
            self._reused.add(chunks, len(found.leased))
        return ticket

    def demand(self, chunks: Iterable[Chunk], own: Iterable[Chunk] = ()) -> Demand:
        """What a `load` of these would take of DRAM; nothing is held. About 0.5 µs a chunk.

        Args:
            own: chunks that the caller has leased and keeps.
        """
        wanted = {chunk.key for chunk in chunks}
        return demand_of(wanted, (chunk.key for chunk in own), self._dram, self._pins)

    def why_missing(self, chunks: Sequence[Chunk]) -> list[Why]:
        """Why each of these was not found; the first of them is where a run of hits ended.

        One that is there, behind one that is missing, has the reason of the one before it. About
        1 µs a chunk.
        """
        index, saves = self._dram.index, self._dram.saves
        offered = [lower.offers for lower in self._lowers]
        reasons = []
        why = NEVER_SEEN
        for chunk in chunks:
            slot = index.find(chunk.key)
            if slot is not None:
                why = ("saving", "none") if slot in saves else why
            else:
                for offers in offered:  # hot path: a generator for `any` takes as long as the rest
                    if offers(chunk.key):
                        break
                else:
                    why = self._ghosts.why(chunk.key)
            reasons.append(why)
        return reasons

    def prefill_rate(self) -> float | None:
        """Tokens that the engine computes in a second; None before it was measured."""
        return self._cost.tokens_per_second()

    def observe_prefill(self, tokens: int, seconds: float) -> None:
        """The engine computed `tokens` of prompts in `seconds`: what a load is measured against."""
        self._cost.observe_prefill(tokens, seconds)

    # -- saving ----------------------------------------------------------------------------------

    def save(self, chunks: Sequence[Chunk]) -> list[tuple[int, int]]:
        """Slots for chunks that DRAM lacks, to be filled by the workers and then committed.

        Stops at the first chunk that gets no slot: a child without its parent is useless.

        Args:
            chunks: part of a chain, first chunk first.

        Returns:
            (index into `chunks`, slot) of each chunk that is to be copied. Every slot must come
            back through `commit` or `abandon`.
        """
        if not self._open:
            return []
        index = self._dram.index
        lacking = [at for at, chunk in enumerate(chunks) if index.find(chunk.key) is None]
        if not lacking:
            return []
        # What is here already must not be evicted for its own children.
        held = index.lease_run(chunk.key for chunk in chunks[: lacking[0]])
        slots = index.reserve_run([chunks[at].key for at in lacking])
        self._runs.let_go(held)
        for at, slot in zip(lacking, slots, strict=False):
            self._dram.saves[slot] = (chunks[at], self.generation)
        if len(slots) < len(lacking):
            self._counters.add(
                "tierkv_saves_dropped_total",
                len(lacking) - len(slots),
                tier=self._dram.name,
                reason="no_slot",
            )
        self._dram.count_evictions()
        self._demote_ahead(len(slots))
        return list(zip(lacking, slots, strict=False))

    def commit(self, slots: Sequence[int], generation: int) -> None:
        """All ranks have written these slots: their chunks become visible.

        Args:
            slots: from `save`, in the order of the chain.
            generation: of the Store when `save` gave them. Slots that are not to be filled in
                that generation are ignored.
        """
        chunks, ready = [], []
        for slot in slots:
            chunk = self._take_save(slot, generation)
            if chunk is not None and self._dram.publish(slot, chunk):
                chunks.append(chunk)
                ready.append(slot)
        if ready:
            for lower in self._lowers:
                if lower.config.write == "through":
                    lower.writer.offer(chunks, ready)

    def abandon(self, slots: Sequence[int], generation: int) -> None:
        """These slots were not written: they are free again. Arguments as for `commit`."""
        for slot in slots:
            if self._take_save(slot, generation) is not None:
                self._dram.index.abandon(slot)

    def _take_save(self, slot: int, generation: int) -> Chunk | None:
        chunk, begun_in = self._dram.saves.get(slot, (None, -1))
        if begun_in != generation:
            logger.warning("slot %d is not being saved to; a second report is ignored", slot)
            return None
        del self._dram.saves[slot]
        return chunk

    def _demote_ahead(self, just_taken: int) -> None:
        """Copy down what DRAM is about to give up, for the tiers that are written on_evict."""
        index = self._dram.index
        if index.free * DEMOTE_SHARE >= index.capacity:
            return
        for lower in self._lowers:
            if lower.config.write == "on_evict":
                ahead = just_taken + min(DEMOTE_AHEAD, -(-index.capacity // DEMOTE_SHARE))
                # Soonest victim last, so that it is queued first.
                slots = index.forecast(ahead)[::-1]
                known = [(self._dram.chunk_of(slot), slot) for slot in slots]
                pairs = [(chunk, slot) for chunk, slot in known if chunk is not None]
                lower.writer.offer([chunk for chunk, _ in pairs], [slot for _, slot in pairs])

    # -- the rest --------------------------------------------------------------------------------

    @property
    def generation(self) -> int:
        """Raised by every `reset`."""
        return self._runs.generation

    def holds(self, key: bytes) -> bool:
        """Whether a chunk can be loaded now, as far as is known without asking a server."""
        return self._dram.index.get(key) is not None or any(
            lower.where(key) is Where.HIT for lower in self._lowers
        )

    def touch(self, chunks: Sequence[Chunk]) -> None:
        """A chain was used: make it recent in all tiers, its beginning most of all."""
        get = self._dram.index.get
        found = [get(chunk.key) for chunk in chunks]
        self._dram.index.touch_run([slot for slot in found if slot is not None])
        self.touch_below(chunks)

    def touch_below(self, chunks: Sequence[Chunk]) -> None:
        """As `touch`, in the tiers below DRAM alone."""
        if self._lowers:
            keys = [chunk.key for chunk in reversed(chunks)]
            for lower in self._lowers:
                lower.touch(keys)

    def invalidate(self, chunks: Sequence[Chunk]) -> None:
        """What was delivered of these was wrong: forget them in all tiers, at once."""
        self.forget([chunk.key for chunk in chunks])

    def forget(self, keys: Sequence[bytes]) -> None:
        """Forget these keys in all tiers, at once; pinned ones too."""
        self._pins.unpin(keys)
        for lower in self._lowers:
            lower.forget(keys)
        self._count_evictions("invalid", sum(self._dram.forget(key) for key in keys))
        self._ghosts.invalid(keys)

    def reset(self) -> None:
        """Forget everything in all tiers. What is in flight is thrown away when it comes back."""
        self._pins.unpin_all()
        for lower in self._lowers:
            lower.forget_all()
        self._count_evictions("reset", self._dram.forget_all())
        self._ghosts.forget_all()
        self._runs.generation += 1

    def _count_evictions(self, reason: str, count: int) -> None:
        if count:
            self._counters.add("tierkv_evictions_total", count, tier=self._dram.name, reason=reason)

    def pin(self, keys: Sequence[bytes] | None) -> int:
        """Keep these (None: all) from being evicted from DRAM, as far as they are there now.

        At most half of the slots. Returns how many of them are pinned then.
        """
        return self._pins.pin(list(self._dram.index.keys()) if keys is None else keys)

    def unpin(self, keys: Sequence[bytes] | None) -> int:
        """Let these (None: all) be evicted again; how many were pinned."""
        return self._pins.unpin_all() if keys is None else self._pins.unpin(keys)

    def held(self, keys: Sequence[bytes] | None) -> dict[str, int]:
        """How many of these (None: of all) each tier holds, as far as it can say without I/O."""
        if keys is None:
            return {name: usage.chunks for name, usage in self.usage().items()}
        here = {self._dram.name: sum(self._dram.index.get(key) is not None for key in keys)}
        here.update((lower.name, sum(map(lower.offers, keys))) for lower in self._lowers)
        return here

    def poll(self) -> None:
        """Apply what the I/O loop finished, and look at the clock for what it did not.

        Call in every step; cheap when nothing did. Never more than about a millisecond, since what
        is left is applied by the next call.
        """
        self._apply_done(APPLY_SECONDS)
        self._reused.offer()
        if self._lowers:
            now = self.context.clock()
            for lower in self._lowers:
                lower.check_deadlines(now)

    def _apply_done(self, seconds: float = float("inf")) -> None:
        if self._io is None:
            return
        done, clock = self._io.done, self.context.clock
        end = clock() + seconds
        while not done.empty():
            job = done.get_nowait()
            job.on_done(job)
            if clock() >= end:
                break

    def usage(self) -> dict[str, Usage]:
        """Fill level by name of the tier, DRAM first."""
        usage = {self._dram.name: self._dram.usage()}
        usage.update((lower.name, lower.usage()) for lower in self._lowers)
        return usage

    def refresh_gauges(self) -> None:
        """Bring the gauges among the counters up to date, and the tiers' own evictions."""
        put = self._counters.set
        for name, usage in self.usage().items():
            put("tierkv_chunks", usage.chunks, tier=name)
            put("tierkv_used_bytes", usage.used_bytes, tier=name)
            put("tierkv_capacity_bytes", usage.capacity_bytes, tier=name)
        put("tierkv_leased_slots", self._dram.index.leased - len(self._pins))
        put("tierkv_pinned_slots", len(self._pins))
        for lower in self._lowers:
            lower.count_evictions()
            put("tierkv_breaker_state", lower.breaker.state, tier=lower.name)
            for op, count in (("load", len(lower.reads)), ("save", len(lower.writer.pending))):
                put("tierkv_queue_depth", count, tier=lower.name, op=op)
                size = count * self.layout.slot_bytes
                put("tierkv_inflight_bytes", size, tier=lower.name, op=op)

    def snapshot(self) -> Snapshot:
        """All counters, with the gauges brought up to date."""
        self.refresh_gauges()
        return self._counters.snapshot()
