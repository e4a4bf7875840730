# SPDX-License-Identifier: Apache-2.0
"""The Store against a dict that may forget: any order of calls, failures and delays.

What a chunk must hold is derived from its key and a version that every `invalidate` and `reset`
raises: bytes of another chunk, half of them, or a value that was to be forgotten name themselves.
The tiers touch a slot's memory only when the test ends their call, so a slot that is handed out too
early is overwritten. Leases, slots and jobs are counted from outside after every step.
"""

from __future__ import annotations

from collections.abc import Callable
from random import Random

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tests.unit.store.rig import LAYOUT, Call, Rig, chain, payload
from tierkv.errors import ErrorKind
from tierkv.keys import Chunk
from tierkv.store import LoadTicket
from tierkv.store.jobs import Fate, Read
from tierkv.tiers.base import Outcome, Result
from tierkv.tiers.slot_index import FILLING, READY

CHAINS = {name: chain(5, name) for name in "abc"}
RESTS = {"", "miss", "late", "unavailable", "skipped", "failed"}
ANSWERS = {
    "well": None,
    "miss": Result(Outcome.MISS),
    "refused": Result(Outcome.REFUSED),
    "full": Result(Outcome.REFUSED, ErrorKind.ENOSPC),
    "eio": Result(Outcome.FAILED, ErrorKind.EIO),
    "checksum": Result(Outcome.FAILED, ErrorKind.CHECKSUM),
    "bug": RuntimeError("a bug"),
}

Part = tuple[str, int, int]
parts = st.tuples(st.sampled_from("abc"), st.sampled_from([0, 0, 0, 1, 3]), st.integers(1, 5))
picks = st.integers(0, 999)
seldom = st.integers(0, 5).map(lambda n: n == 0)


def cut(part: Part) -> list[Chunk]:
    """Part of a chain: its name, the first chunk, how many."""
    name, first, count = part
    return CHAINS[name][first : first + count]


class Loaded:
    """A ticket and what its slots must hold."""

    def __init__(self, ticket: LoadTicket, chunks: list[Chunk], generation: int) -> None:
        self.ticket = ticket
        self.chunks = chunks
        self.generation = generation
        self.versions: list[int] = []
        self.settled = False
        self.truncated = False


class StoreMachine(RuleBasedStateMachine):
    """Two tiers below a small pool."""

    @initialize(
        slots=st.sampled_from([1, 2, 5, 9]),
        policy=st.sampled_from(["lru", "s3fifo"]),
        writes=st.tuples(*[st.sampled_from(["through", "on_reuse", "on_evict"])] * 2),
        queue=st.sampled_from([1, 3, 100]),
        threads=st.sampled_from([1, 4, 8]),
    )
    def start(
        self, slots: int, policy: str, writes: tuple[str, str], queue: int, threads: int
    ) -> None:
        common = {
            "write_queue": queue * LAYOUT.slot_bytes,
            "io_threads": threads,
            "breaker_failures": 3,
            "probe_after": 5.0,
        }
        tiers = {
            name: {"write": write, **common}
            for name, write in zip(("disk", "tape"), writes, strict=True)
        }
        self.rig = Rig(slots=slots, tiers=tiers, policy=policy)
        for tier in self.rig.tiers.values():
            tier.script.hold = True
        self.store = self.rig.store
        for tier, name in zip(self.rig.tiers.values(), "ab", strict=True):
            tier.give(*CHAINS[name][: slots + 1])
        self.version = {chunk.key: 0 for chunks in CHAINS.values() for chunk in chunks}
        self.saves: list[tuple[Chunk, int, int, int]] = []  # chunk, slot, generation, version
        self.tickets: list[Loaded] = []

    # -- the caller

    @rule(part=parts)
    def save(self, part: Part) -> None:
        chunks = cut(part)
        dram = {chunk.key for chunk in chunks if self.rig.index.find(chunk.key) is not None}
        given = self.store.save(chunks)
        lacking = [at for at, chunk in enumerate(chunks) if chunk.key not in dram]
        assert [at for at, _ in given] == lacking[: len(given)]
        for at, slot in given:
            for part in self.store.pool.parts(slot):
                part[:] = b"\xdd" * len(part)
            key = chunks[at].key
            self.saves.append((chunks[at], slot, self.store.generation, self.version[key]))

    @precondition(lambda self: self.saves)
    @rule(pick=picks, count=st.integers(1, 5), fails=seldom)
    def report(self, pick: int, count: int, fails: bool) -> None:
        generation = self.saves[pick % len(self.saves)][2]
        done = [save for save in self.saves if save[2] == generation][:count]
        self.saves = [save for save in self.saves if save not in done]
        for chunk, slot, _, version in done:
            self.rig.write(chunk, slot, version)
        slots = [save[1] for save in done]
        (self.store.abandon if fails else self.store.commit)(slots, generation)

    @rule(part=parts)
    def load(self, part: Part) -> None:
        chunks = cut(part)
        self.tickets.append(Loaded(self.store.load(chunks), chunks, self.store.generation))
        self.look_at_tickets()

    @rule(part=parts)
    def prefetch(self, part: Part) -> None:
        chunks = cut(part)
        self.store.prefetch(chunks)

    @rule()
    def poll(self) -> None:
        self.store.poll()
        for loaded in self.tickets:
            before = loaded.ticket.ready
            settled = loaded.ticket.poll()
            assert not (loaded.settled and not settled)
            if loaded.generation == self.store.generation:
                assert loaded.ticket.ready >= before
            if settled and not loaded.settled:
                loaded.settled = True
                assert loaded.ticket.rest in RESTS
                whole = loaded.ticket.ready == len(loaded.chunks)
                assert loaded.truncated or (loaded.ticket.rest == "") == whole

    @precondition(lambda self: self.tickets)
    @rule(pick=picks, keep=st.integers(0, 4))
    def truncate(self, pick: int, keep: int) -> None:
        loaded = self.tickets[pick % len(self.tickets)]
        loaded.truncated |= keep < loaded.ticket.ready
        loaded.ticket.truncate(keep)
        loaded.versions = loaded.versions[: loaded.ticket.ready]
        assert loaded.ticket.poll() or not loaded.truncated

    @precondition(lambda self: self.tickets)
    @rule(pick=picks)
    def release(self, pick: int) -> None:
        loaded = self.tickets[pick % len(self.tickets)]
        loaded.ticket.release()
        loaded.ticket.release()
        self.tickets.remove(loaded)

    @rule(part=parts)
    def touch(self, part: Part) -> None:
        chunks = cut(part)
        self.store.touch(chunks)

    @rule(part=parts, really=seldom)
    def invalidate(self, part: Part, really: bool) -> None:
        if really:
            self.store.invalidate(cut(part))
            for chunk in cut(part):
                self.version[chunk.key] += 1

    @rule(really=seldom)
    def reset(self, really: bool) -> None:
        if really:
            self.store.reset()
            for key in self.version:
                self.version[key] += 1

    @rule(seconds=st.sampled_from([0.0, 0.5, 0.5, 2.0, 31.0]))
    def wait(self, seconds: float) -> None:
        self.rig.clock.now += seconds

    # -- the tiers

    def calls(self) -> list[Call]:
        return [call for tier in self.rig.tiers.values() for call in tier.script.calls]

    @rule()
    def pump(self) -> None:
        self.rig.pump()

    @rule(seed=picks, how=st.sampled_from([*["well"] * 12, *ANSWERS]))
    def end_some(self, seed: int, how: str) -> None:
        self.rig.io.pump()
        rng = Random(seed)
        for call in self.calls():
            if rng.random() < 0.5:
                call.end(ANSWERS[how])
        self.rig.pump()

    @rule(name=st.sampled_from(["disk", "tape"]), part=parts, promise=seldom, really=seldom)
    def tier_forgets(self, name: str, part: Part, promise: bool, really: bool) -> None:
        tier = self.rig.tiers[name]
        for chunk in cut(part) if really else ():
            if tier.held.pop(chunk.key, None) is not None and promise:
                tier.promised.add(chunk.key)

    @rule(name=st.sampled_from(["disk", "tape"]), fails=seldom)
    def tier_forgets_on_request(self, name: str, fails: bool) -> None:
        self.rig.tiers[name].script.evict = OSError("a bug") if fails else None

    # -- what holds at any time

    def look_at_tickets(self) -> None:
        for loaded in self.tickets:
            ticket = loaded.ticket
            new = loaded.chunks[len(loaded.versions) : ticket.ready]
            loaded.versions += [self.version[chunk.key] for chunk in new]
            if ticket.ready < len(loaded.versions):  # withdrawn by a reset
                assert loaded.generation != self.store.generation
                loaded.versions = loaded.versions[: ticket.ready]
            assert len(ticket.slots) == len(ticket.sources) == ticket.ready
            assert set(ticket.sources) <= {"dram", "disk", "tape"}
            for chunk, slot, version in zip(
                loaded.chunks, ticket.slots, loaded.versions, strict=False
            ):
                self.holds(slot, chunk.key, version)

    def holds(self, slot: int, key: bytes, version: int) -> None:
        for rank, part in enumerate(self.store.pool.parts(slot)):
            assert bytes(part) == payload(key, rank, version), "wrong bytes"

    @invariant()
    def what_is_served_is_right(self) -> None:
        self.look_at_tickets()
        for key in list(self.rig.index.keys()):
            self.holds(self.rig.index.get(key), key, self.version[key])

    @invariant()
    def every_lease_has_an_owner(self) -> None:
        index = self.rig.index
        owned = [0] * index.capacity
        for loaded in self.tickets:
            for slot in loaded.ticket.slots:
                owned[slot] += 1
            for entry in loaded.ticket._waiting:
                if not isinstance(entry, Read):
                    owned[entry] += 1
                elif entry.fate is Fate.READY:
                    owned[entry.slot] += 1
        for lower in self.store._lowers:
            for job in lower.writer.pending.values():
                owned[job.slot] += 1
            assert len(lower.writer.pending) <= lower.writer.capacity
        assert [index.leases(slot) for slot in range(index.capacity)] == owned

    @invariant()
    def every_slot_is_accounted_for(self) -> None:
        index = self.rig.index
        index.check()
        saves = {save[1] for save in self.saves}
        assert saves == set(self.store._dram.saves)
        reads = {slot for lower in self.store._lowers for slot in lower.reads}
        assert not saves & reads
        assert index.filling == len(saves) + len(reads)
        for lower in self.store._lowers:
            for slot, read in lower.reads.items():
                waiting = index.state(slot) == FILLING
                assert waiting == (read.fate is Fate.PENDING)
                assert self.store._dram.fills.get(slot) is (read if waiting else None)
        usage = self.store.usage()["dram"]
        assert usage.used_bytes <= usage.capacity_bytes
        ready = sum(index.state(slot) == READY for slot in range(index.capacity))
        assert usage.chunks == ready

    def teardown(self) -> None:
        if not hasattr(self, "rig"):
            return
        for tier in self.rig.tiers.values():
            tier.script.evict = None
        for loaded in self.tickets:
            loaded.ticket.release()
        self.tickets.clear()
        for _, slot, generation, _ in self.saves:
            self.store.abandon([slot], generation)
        self.saves.clear()
        self.rig.close()
        assert self.rig.index.free == self.rig.index.capacity


TestStoreMachine = StoreMachine.TestCase
TestStoreMachine.settings = settings(max_examples=100, stateful_step_count=50, deadline=None)


@pytest.mark.parametrize("seed", range(40))
def test_the_same_rules_run_deep(seed: int) -> None:
    """Generated runs are short and shrink well; these are long, and meet what takes many steps."""
    print(f"seed {seed}")
    rng = Random(seed)
    machine = StoreMachine()
    writes = rng.choice(["through", "on_reuse", "on_evict"]), rng.choice(["through", "on_evict"])
    machine.start(
        slots=rng.choice([1, 2, 5, 9, 14]),
        policy=rng.choice(["lru", "s3fifo"]),
        writes=writes,
        queue=rng.choice([1, 3, 100]),
        threads=rng.choice([1, 4, 8]),
    )

    def part() -> Part:
        return rng.choice("abc"), rng.choice([0, 0, 0, 1, 3]), rng.randint(1, 5)

    def rarely() -> bool:
        return rng.random() < 0.05

    def tier() -> str:
        return rng.choice(["disk", "tape"])

    how = [*["well"] * 30, *ANSWERS]
    actions: dict[str, tuple[int, Callable[[], None]]] = {
        "save": (4, lambda: machine.save(part())),
        "report": (5, lambda: machine.report(rng.randrange(999), rng.randint(1, 5), rarely())),
        "load": (4, lambda: machine.load(part())),
        "prefetch": (2, lambda: machine.prefetch(part())),
        "poll": (6, machine.poll),
        "truncate": (1, lambda: machine.truncate(rng.randrange(999), rng.randint(0, 4))),
        "release": (4, lambda: machine.release(rng.randrange(999))),
        "touch": (1, lambda: machine.touch(part())),
        "invalidate": (1, lambda: machine.invalidate(part(), rng.random() < 0.2)),
        "reset": (1, lambda: machine.reset(rarely())),
        "wait": (3, lambda: machine.wait(rng.choice([0.1, 0.5, 2.0]))),
        "pump": (3, machine.pump),
        "end": (8, lambda: machine.end_some(rng.randrange(999), rng.choice(how))),
        "forget": (1, lambda: machine.tier_forgets(tier(), part(), rarely(), rng.random() < 0.3)),
        "refuse": (1, lambda: machine.tier_forgets_on_request(tier(), rarely())),
    }
    names, weights = list(actions), [weight for weight, _ in actions.values()]
    served = 0
    try:
        for name in rng.choices(names, weights, k=600):
            if name == "report" and not machine.saves:
                continue
            if name in ("truncate", "release") and not machine.tickets:
                continue
            actions[name][1]()
            machine.what_is_served_is_right()
            machine.every_lease_has_an_owner()
            machine.every_slot_is_accounted_for()
            served += sum(loaded.ticket.ready for loaded in machine.tickets)
    finally:
        machine.teardown()
    assert served, "the run never served anything"
