# SPDX-License-Identifier: Apache-2.0
"""The disk tier: chunks in the slots of one slab, found again after a restart.

What is where is in memory (`SlotIndex`), so `lookup` needs no I/O; the volume does the I/O. A slot
is visible after its record and its table entry were written, and hidden before its entry is
cleared. Every load is verified; what fails is forgotten.

**Threads and ownership.** I/O loop thread: everything here. `lookup` and `usage` may be called
from any thread: they read single values. The blocking half (`Volume`) runs on `Threads`, started
by `open` and ended by `close`; it gets values and memory, and changes none of the fields here.
`_moving`, an asyncio lock, lets one call at a time change the slab's length or clear the table.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, TypeVar

from tierkv.errors import ErrorKind, TierError
from tierkv.keys import Chunk
from tierkv.pages.layout import SlotLayout
from tierkv.policies import make_policy
from tierkv.tiers.base import Outcome, Presence, Result, Tier, TierReport, Usage
from tierkv.tiers.disk.facts import SlotFacts
from tierkv.tiers.disk.failures import Failures, is_loss
from tierkv.tiers.disk.recover import Recovery
from tierkv.tiers.disk.threads import Threads
from tierkv.tiers.disk.volume import Volume
from tierkv.tiers.pause import Pause
from tierkv.tiers.slot_index import FREE, HIDDEN, READY, SlotIndex

if TYPE_CHECKING:
    from tierkv.config.disk import DiskConfig

logger = logging.getLogger(__name__)

USED_EVERY = 60.0
"""Seconds between two writes of the times of use: what a crash may forget of the order."""

FLOOR_EVERY = 1.0
"""Seconds between two looks at the free space of the file system, while chunks are saved."""

RECALLED = 64
"""Headers that one thread reads at a time in `recall`."""

CLOSE_TIMEOUT = 10.0
"""Seconds that `close` waits for calls that hang in the kernel."""

P = ParamSpec("P")
T = TypeVar("T")
Method = Callable[Concatenate["DiskTier", P], Coroutine[Any, Any, T]]


def _operation(method: Method[P, T]) -> Method[P, T]:
    """Count the call as running, for `close`, and raise a held-back cancellation at its end."""

    async def run(self: DiskTier, /, *args: P.args, **kwargs: P.kwargs) -> T:
        task = asyncio.current_task()
        before = task.cancelling() if task else 0
        running = asyncio.get_running_loop().create_future()
        self._running.add(running)
        try:
            result = await method(self, *args, **kwargs)
        finally:
            self._running.discard(running)
            running.set_result(None)
        if task and task.cancelling() > before:
            raise asyncio.CancelledError
        return result

    return run


class DiskTier(Tier):
    """See the module. One namespace; opened once.

    Args:
        config: its section of the configuration.
        clock: seconds, monotonic.
        wall_ns: ns since 1970, compared across restarts only.
    """

    def __init__(
        self,
        config: DiskConfig,
        *,
        clock: Callable[[], float] = time.monotonic,
        wall_ns: Callable[[], int] = time.time_ns,
    ) -> None:
        self.name = config.name
        self._config = config
        self._clock = clock
        self._wall_ns = wall_ns
        self._is_open = False
        self._clearing = 0
        self._slot_bytes = 0
        self._evicted = 0
        self._index = SlotIndex(0, make_policy(config.policy, 0))
        self._running: set[asyncio.Future[None]] = set()
        self._saving: dict[bytes, asyncio.Future[Result]] = {}
        self._write_pause = Pause(clock)
        self._growth_pause = Pause(clock)
        self._failures = Failures(config.name, clock)

    # -- life ------------------------------------------------------------------------------------

    async def open(self, namespace: bytes, layout: SlotLayout) -> TierReport:
        started = self._clock()
        self._threads = Threads(self._config.io_threads, f"tierkv-{self.name}")
        try:
            self._volume, found = await self._threads.call(
                Volume.open, self._config, namespace, layout, self._wall_ns
            )
        except BaseException:
            self._threads.shutdown()
            raise
        try:
            self._adopt(found)
        except MemoryError:
            self._volume.close(b"")
            self._threads.shutdown()
            raise TierError(
                f"no memory for an index of {self._volume.most_slots} chunks; lower capacity",
                tier=self.name,
            ) from None
        self._moving = asyncio.Lock()
        self._used_written = self._floor_seen = self._clock()
        self._slot_bytes = self._volume.slot_bytes
        self._is_open = True
        return TierReport(
            recovered_chunks=len(self._index),
            recovered_bytes=len(self._index) * self._slot_bytes,
            seconds=self._clock() - started,
            notes=tuple(found.notes),
        )

    async def describe(self, about: Mapping[str, str]) -> None:
        await self._threads.call(self._volume.write_about, about)

    @_operation
    async def recall(self, most: int, seconds: float) -> list[Chunk]:
        end = self._clock() + seconds
        held = dict(self._index.places())
        order = self._facts.by_use(held)[:most]
        found: list[Chunk] = []
        portions = range(0, len(order), RECALLED)
        at_once = self._config.io_threads
        for first in range(0, len(portions), at_once):
            if not self._is_open or self._clock() >= end:
                break
            calls = [
                self._threads.call(
                    self._volume.texts,
                    [(slot, held[slot]) for slot in order[start : start + RECALLED]],
                    lambda: self._clock() >= end,
                )
                for start in portions[first : first + at_once]
            ]
            for chunks in await asyncio.gather(*calls):
                found += chunks
        return found

    def _adopt(self, found: Recovery) -> None:
        capacity = self._volume.most_slots
        index = SlotIndex(capacity, make_policy(self._config.policy, capacity), self._on_evict)
        index.set_limit(found.slots)
        for entry, _ in found.entries:
            index.adopt(entry.key, entry.slot)
        self._facts = SlotFacts(capacity, found, self._wall_ns)
        self._index = index

    def _on_evict(self, key: bytes, slot: int) -> None:
        self._evicted += 1

    async def close(self) -> None:
        if not self._is_open:
            return
        self._is_open = False
        if self._running:
            _, hanging = await asyncio.wait(set(self._running), timeout=CLOSE_TIMEOUT)
            if hanging:
                # Their threads may write yet: files and lock stay until the process ends.
                logger.warning("%s: leaving %d calls that hang", self.name, len(hanging))
                self._threads.shutdown()
                return
        try:
            await self._threads.call(self._volume.close, self._facts.stamps(self._index.limit))
        finally:
            self._threads.shutdown()

    # -- asking ----------------------------------------------------------------------------------

    def lookup(self, key: bytes) -> Presence:
        held = self._is_open and self._index.get(key) is not None
        return Presence.HIT if held else Presence.MISS

    def usage(self) -> Usage:
        chunks = len(self._index)
        used = chunks * self._slot_bytes
        return Usage(chunks, used, self._config.capacity, self._evicted)

    @_operation
    async def touch(self, keys: Sequence[bytes]) -> None:
        for key in keys:
            slot = self._index.get(key)
            if slot is not None:
                self._index.touch(slot)
                self._facts.used(slot)
        now = self._clock()
        if self._is_open and now - self._used_written >= USED_EVERY:
            self._used_written = now
            stamps = self._facts.stamps(self._index.limit)
            await self._threads.call(self._volume.write_used, stamps)

    # -- loading ---------------------------------------------------------------------------------

    @_operation
    async def load(self, chunk: Chunk, parts: Sequence[memoryview]) -> Result:
        slot = self._index.get(chunk.key) if self._is_open else None
        if slot is None:
            return Result(Outcome.MISS)
        self._index.lease(slot)
        try:
            nbytes = await self._threads.call(
                self._volume.read, slot, self._facts.stored(slot), chunk, _as_bytes(parts)
            )
        except Exception as error:
            if is_loss(error):
                await self._forget(slot, chunk.key)
            return Result(Outcome.FAILED, self._failures.report("load", error))
        finally:
            self._index.release(slot)
        return Result(Outcome.DONE, nbytes=nbytes)

    async def _forget(self, slot: int, key: bytes) -> None:
        """Drop a leased slot whose bytes are bad: in memory at once, and then on disk."""
        if self._index.get(key) == slot:
            self._index.remove(key)
            await self._clear_entries([slot], durable=False)

    # -- saving ----------------------------------------------------------------------------------

    @_operation
    async def save(self, chunk: Chunk, parts: Sequence[memoryview]) -> Result:
        if not self._is_open or self._clearing:
            return Result(Outcome.REFUSED)
        if self._index.get(chunk.key) is not None:
            return Result(Outcome.DONE)
        other = self._saving.get(chunk.key)
        if other is not None:
            # Shielded: our cancellation must not end the other one's wait.
            result = await asyncio.shield(other)
            return Result(result.outcome, result.error)
        if not self._write_pause.is_over:
            return Result(Outcome.REFUSED)
        mine = self._saving[chunk.key] = asyncio.get_running_loop().create_future()
        result = Result(Outcome.REFUSED)
        try:
            result = await self._save(chunk, _as_bytes(parts))
        except Exception as error:
            kind = self._failures.report("save", error)
            if kind is ErrorKind.ENOSPC:
                self._write_pause.begin()
                result = Result(Outcome.REFUSED, kind)
            else:
                result = Result(Outcome.FAILED, kind)
        finally:
            del self._saving[chunk.key]
            mine.set_result(result)
        return result

    async def _save(self, chunk: Chunk, parts: Sequence[memoryview]) -> Result:
        await self._keep_floor()
        await self._grow()
        index = self._index
        slot = index.reserve(chunk.key)
        if slot is None:
            # Without a single slot it is the disk that is full; else all are in use just now.
            return Result(Outcome.REFUSED, None if index.limit else ErrorKind.ENOSPC)
        sequence, was_held = self._facts.begin(slot)
        try:
            codec_id, stored_bytes = await self._threads.call(
                self._volume.write, slot, sequence, chunk, parts, clear_first=was_held
            )
        except BaseException:
            index.abandon(slot)
            raise
        self._facts.written(slot, codec_id, stored_bytes)
        if index.publish(slot):
            self._facts.published(slot)
        self._write_pause.reset()
        return Result(Outcome.DONE, nbytes=self._volume.header_bytes + stored_bytes)

    async def _grow(self) -> None:
        """Make the slab longer if no slot is free and it may."""
        index, most = self._index, self._volume.most_slots
        if index.free or index.limit == most or not self._growth_pause.is_over:
            return
        async with self._moving:
            if index.free or index.limit == most or not self._growth_pause.is_over:
                return  # somebody else has tried meanwhile
            slots = await self._threads.call(self._volume.space.grow, index.limit, most)
            if slots > index.limit:
                index.set_limit(slots)
                self._growth_pause.reset()
            else:
                self._growth_pause.begin()

    async def _keep_floor(self) -> None:
        """Give slots back if others have filled the file system below `min_free`."""
        now = self._clock()
        if now - self._floor_seen < FLOOR_EVERY or self._moving.locked():
            return
        self._floor_seen = now
        async with self._moving:
            excess = await self._threads.call(self._volume.space.excess)
            limit = self._empty_end(excess)
            cut = range(limit, self._index.limit)
            if cut:
                self._index.set_limit(limit)
                self._facts.stale.update(cut)
                await self._threads.call(self._volume.space.cut, limit)
                self._facts.cleared(cut)

    def _empty_end(self, count: int) -> int:
        """Forget up to `count` slots at the slab's end, as far as none is in use; the new end."""
        index = self._index
        for slot in range(index.limit - 1, max(0, index.limit - count) - 1, -1):
            key = index.key_of(slot)
            if index.state(slot) == READY and not index.leases(slot) and key is not None:
                index.remove(key)
                self._evicted += 1
            elif index.state(slot) != FREE:
                return slot + 1
        return max(0, index.limit - count)

    # -- forgetting ------------------------------------------------------------------------------

    @_operation
    async def evict(self, keys: Sequence[bytes]) -> int:
        index, held = self._index, []
        for key in keys:
            slot = index.get(key)
            if slot is not None:
                index.lease(slot)  # so that nobody writes into it before its entry is cleared
                held.append(slot)
            index.remove(key)
        if not self._is_open:
            return 0
        try:
            await self._end_of_saves(keys)
            async with self._moving:
                # The stale ones may be of these keys, evicted by the policy a moment ago.
                await self._clear_entries([*held, *self._facts.stale], durable=True)
        finally:
            for slot in held:
                index.release(slot)
        return len(held)

    @_operation
    async def clear(self) -> int:
        if not self._is_open:
            return 0
        self._clearing += 1
        try:
            held = self._index.clear()
            await self._end_of_saves(list(self._saving))
            async with self._moving:
                try:
                    await self._threads.call(self._volume.clear)
                except OSError as error:
                    self._failures.report("clear", error)
                else:
                    self._facts.cleared_all()
        finally:
            self._clearing -= 1
        return held

    async def _end_of_saves(self, keys: Iterable[bytes]) -> None:
        saves = [self._saving[key] for key in set(keys) if key in self._saving]
        if saves:
            await asyncio.wait(saves)

    async def _clear_entries(self, slots: Sequence[int], *, durable: bool) -> None:
        """Clear entries of slots that are not visible. A failure gives the table up."""
        if not slots:
            return
        self._facts.stale.update(slots)
        try:
            await self._threads.call(self._volume.clear_entries, slots, durable=durable)
        except OSError as error:
            self._failures.report("evict", error)
            return
        # A stale slot may have been taken meanwhile; its new entry may be gone: forgotten after a
        # restart, nothing worse.
        self._facts.cleared(slot for slot in slots if self._index.state(slot) in (FREE, HIDDEN))


def _as_bytes(parts: Sequence[memoryview]) -> list[memoryview]:
    return [part if part.format == "B" and part.ndim == 1 else part.cast("B") for part in parts]
