# SPDX-License-Identifier: Apache-2.0
"""A Store whose time and I/O are the test's: nothing happens until the test says so.

`InlineIo` runs the loop on the test's own thread, when pumped. `ScriptedTier` keeps chunks in a
dict; while `hold` is set, every load and save waits until the test ends it, and touches the slot's
memory only then: what hands a slot out too early is found out by its bytes.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any, TypeVar

from tierkv.config.models import DiskConfig, DramConfig, LowerTierConfig, TierKVConfig
from tierkv.errors import TierError
from tierkv.keys import Chunk, ChunkChain, Namespace
from tierkv.pages.layout import SlotLayout
from tierkv.store import Context, LoadTicket, Store
from tierkv.store.io_loop import IoLoop
from tierkv.store.lower import LowerTier
from tierkv.tiers.base import Outcome, Presence, Result, Tier, TierReport, Usage

T = TypeVar("T")

LAYOUT = SlotLayout(chunk_tokens=2, block_tokens=1, block_bytes=24, ranks=2)
NAMESPACE = Namespace({"model": "test"})


def chain(count: int, name: str = "a") -> list[Chunk]:
    """The first chunks of the sequence of that name."""
    tokens = ChunkChain(NAMESPACE.scope(tenant=name), LAYOUT.chunk_tokens)
    tokens.extend(range(count * LAYOUT.chunk_tokens))
    return tokens.chunks


def payload(key: bytes, rank: int, version: int = 0) -> bytes:
    """What a rank's part of the chunk holds: derived from its key, so a wrong byte names itself."""
    seed = key + bytes([rank]) + version.to_bytes(4, "little")
    return blake2b(seed, digest_size=32).digest() * (LAYOUT.part_stride // 32)


class Clock:
    """Seconds that pass when the test says so, and `tick` more with every look."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.tick = 0.0

    def __call__(self) -> float:
        self.now += self.tick
        return self.now


class InlineIo(IoLoop):
    """The I/O loop without its thread."""

    def start(self) -> None:
        self.alive = True

    def pump(self) -> None:
        """Run everything that can go on."""
        for _ in range(0 if self._loop.is_closed() else 12):
            self._loop.call_soon(self._loop.stop)
            self._loop.run_forever()

    def run(self, coroutine: Coroutine[Any, Any, T], timeout: float | None = None) -> T:
        task = self._loop.create_task(coroutine)
        self.pump()
        if not task.done():  # it waits for something that only the test can end
            task.cancel()
            self.pump()
            raise TimeoutError
        return task.result()

    def stop(self, timeout: float) -> bool:
        if not self._loop.is_closed():
            for task in asyncio.all_tasks(self._loop):
                task.cancel()
            self.pump()
            self._loop.close()
        self.alive = False
        return True


@dataclass(eq=False)
class Call:
    """One load or save that the tier was asked for and has not ended."""

    op: str
    chunk: Chunk
    parts: Sequence[memoryview]
    gate: asyncio.Future[Result | BaseException | None]

    def end(self, how: Result | BaseException | None = None) -> None:
        """None: as it should. A result: with this one. An exception: by raising it."""
        if not self.gate.done():
            self.gate.set_result(how)


@dataclass
class Script:
    """What the tier does."""

    hold: bool = False
    load: Result | BaseException | None = None
    save: Result | BaseException | None = None
    lookup: Presence | BaseException | None = None
    evict: BaseException | None = None
    open: BaseException | None = None
    recall: list[Chunk] | BaseException = field(default_factory=list)
    probed: bool = True
    """Before it is, keys are UNKNOWN to `lookup`."""
    probe_tells: bool = True
    calls: list[Call] = field(default_factory=list)
    log: list[tuple[Any, ...]] = field(default_factory=list)


class ScriptedTier(Tier):
    """Chunks in a dict, and a script."""

    def __init__(self, config: LowerTierConfig) -> None:
        self.name = config.name
        self.held: dict[bytes, list[bytes]] = {}
        self.promised: set[bytes] = set()
        """Keys that `lookup` says it has though it has not."""
        self.script = Script()
        self.closed = 0

    async def open(self, namespace: bytes, layout: SlotLayout) -> TierReport:
        if self.script.open is not None:
            raise self.script.open
        return TierReport(recovered_chunks=3, recovered_bytes=300, seconds=0.5, notes=("Noted.",))

    async def recall(self, most: int, seconds: float) -> list[Chunk]:
        self.script.log.append(("recall", most, seconds))
        if self.script.hold:
            await self._gate("recall", None, ())
        if isinstance(self.script.recall, BaseException):
            raise self.script.recall
        return self.script.recall[:most]

    def lookup(self, key: bytes) -> Presence:
        if isinstance(self.script.lookup, BaseException):
            raise self.script.lookup
        if self.script.lookup is not None:
            return self.script.lookup
        if not self.script.probed:
            return Presence.UNKNOWN
        held = key in self.held or key in self.promised
        return Presence.HIT if held else Presence.MISS

    async def probe(self, keys: Sequence[bytes]) -> None:
        self.script.log.append(("probe", *keys))
        if self.script.hold:
            await self._gate("probe", None, ())
        self.script.probed = self.script.probe_tells

    async def _gate(self, op: str, chunk: Any, parts: Sequence[memoryview]) -> Any:
        call = Call(op, chunk, parts, asyncio.get_running_loop().create_future())
        self.script.calls.append(call)
        try:
            return await call.gate
        finally:
            self.script.calls.remove(call)

    async def load(self, chunk: Chunk, parts: Sequence[memoryview]) -> Result:
        self.script.log.append(("load", chunk.key))
        how = self.script.load
        if self.script.hold:
            how = await self._gate("load", chunk, parts)
        for part in parts:
            part[:] = b"\xee" * len(part)  # undefined unless DONE
        if isinstance(how, BaseException):
            raise how
        if how is not None:
            return how
        if chunk.key not in self.held:
            return Result(Outcome.MISS)
        for part, content in zip(parts, self.held[chunk.key], strict=True):
            part[:] = content
        return Result(Outcome.DONE, nbytes=LAYOUT.slot_bytes)

    async def save(self, chunk: Chunk, parts: Sequence[memoryview]) -> Result:
        self.script.log.append(("save", chunk.key))
        how = self.script.save
        if self.script.hold:
            how = await self._gate("save", chunk, parts)
        if isinstance(how, BaseException):
            raise how
        if how is not None:
            return how
        self.held.setdefault(chunk.key, [bytes(part) for part in parts])
        return Result(Outcome.DONE, nbytes=LAYOUT.slot_bytes)

    async def touch(self, keys: Sequence[bytes]) -> None:
        self.script.log.append(("touch", *keys))

    async def evict(self, keys: Sequence[bytes]) -> int:
        self.script.log.append(("evict", *keys))
        if self.script.evict is not None:
            raise self.script.evict
        self.promised.difference_update(keys)
        return sum(self.held.pop(key, None) is not None for key in keys)

    async def clear(self) -> int:
        self.script.log.append(("clear",))
        if self.script.evict is not None:
            raise self.script.evict
        count = len(self.held)
        self.held.clear()
        self.promised.clear()
        return count

    def usage(self) -> Usage:
        return Usage(len(self.held), len(self.held) * LAYOUT.slot_bytes, 1 << 20)

    async def close(self) -> None:
        self.closed += 1

    # For tests

    def give(self, *chunks: Chunk) -> None:
        """It held these all along."""
        for chunk in chunks:
            self.held[chunk.key] = [payload(chunk.key, rank) for rank in range(LAYOUT.ranks)]

    def count(self, op: str) -> int:
        return sum(entry[0] == op for entry in self.script.log)


class Rig:
    """A Store over `slots` DRAM slots and scripted tiers, and what tests do with it.

    Args:
        slots: of DRAM.
        tiers: name to what its configuration sets, for each tier below.
        dram: what DRAM's configuration sets.
    """

    def __init__(
        self,
        slots: int = 8,
        tiers: dict[str, dict[str, Any]] | None = None,
        before_open: Callable[[Rig], None] = lambda rig: None,
        **dram: Any,
    ) -> None:
        self.clock = Clock()
        self.io = InlineIo()
        self.tiers: dict[str, ScriptedTier] = {}
        configs: list[Any] = [DramConfig(capacity=slots * LAYOUT.slot_bytes, **dram)]
        for name, more in ({"disk": {}} if tiers is None else tiers).items():
            config = DiskConfig(path=f"/nonexistent/{name}", name=name, capacity=1 << 30, **more)
            self.tiers[name] = ScriptedTier(config)
            configs.append(config)
        before_open(self)
        context = Context(
            clock=self.clock,
            make_tier=lambda config: self.tiers[config.name],
            make_io=lambda: self.io,
        )
        self.store = Store(TierKVConfig(tiers=tuple(configs)), context)
        self.report = self.store.open(NAMESPACE, LAYOUT)
        self.counters = context.counters

    @property
    def disk(self) -> ScriptedTier:
        return self.tiers["disk"]

    @property
    def lower(self) -> LowerTier:
        return self.store._lowers[0]

    @property
    def index(self) -> Any:
        return self.store._dram.index

    def write(self, chunk: Chunk, slot: int, version: int = 0) -> None:
        """As the workers do, before they report."""
        for rank, part in enumerate(self.store.pool.parts(slot)):
            part[:] = payload(chunk.key, rank, version)

    def saved(self, chunks: Sequence[Chunk], version: int = 0) -> None:
        """Save, write, commit. All must get a slot."""
        given = self.store.save(chunks)
        assert len(given) == len(chunks)
        for at, slot in given:
            self.write(chunks[at], slot, version)
        self.store.commit([slot for _, slot in given], self.store.generation)

    def pump(self) -> None:
        """Let the I/O loop do what it can, and apply it."""
        self.io.pump()
        self.store.poll()

    def settled(self, ticket: LoadTicket) -> LoadTicket:
        """Until it is; every step may start further reads."""
        for _ in range(100):
            if ticket.poll():
                return ticket
            self.pump()
        raise AssertionError("the ticket does not settle")

    def load(self, chunks: Sequence[Chunk]) -> LoadTicket:
        return self.settled(self.store.load(chunks))

    def verify(self, ticket: LoadTicket, chunks: Sequence[Chunk], version: int = 0) -> None:
        """The ticket's slots hold the leading chunks, byte for byte."""
        assert len(ticket.slots) == len(ticket.sources) == ticket.ready
        for chunk, slot in zip(chunks, ticket.slots, strict=False):
            for rank, part in enumerate(self.store.pool.parts(slot)):
                assert bytes(part) == payload(chunk.key, rank, version)

    def end_calls(self, how: Result | BaseException | None = None, op: str | None = None) -> int:
        """End every call that is under way (of one kind); how many there were."""
        count = 0
        for tier in self.tiers.values():
            for call in list(tier.script.calls):
                if op in (None, call.op):
                    call.end(how)
                    count += 1
        self.pump()
        return count

    def counted(self, name: str, **labels: str) -> float:
        return self.counters.get(name, **labels)

    def nothing_is_left(self) -> None:
        """No lease, no slot being filled, no job; the index's books balance."""
        self.index.check()
        assert self.index.leased == 0
        assert self.index.filling == 0
        for lower in self.store._lowers:
            assert not lower.reads
            assert not lower.writer.pending

    def close(self) -> None:
        """As a test ends: everything under way ends too, and nothing may be left."""
        try:
            for tier in self.tiers.values():
                tier.script.hold = False
            while self.end_calls():
                pass
            if self.io.alive:
                self.store.drain()  # what was reused may not have been offered yet
            while self.end_calls():
                pass
            self.nothing_is_left()
        finally:
            self.store.close()
            self.io.stop(0)  # without a lower tier the Store has not used it


def refused_to_open(name: str, why: str) -> Callable[[Rig], None]:
    """For `before_open`: this tier cannot be opened."""

    def prepare(rig: Rig) -> None:
        rig.tiers[name].script.open = TierError(why, tier=name)

    return prepare
