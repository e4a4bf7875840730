# SPDX-License-Identifier: Apache-2.0
"""SlotIndex against a dict of keys and sets of states, step by step."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tierkv.policies import KNOWN_POLICIES, make_policy
from tierkv.tiers.slot_index import SlotIndex

CAPACITY = 6
keys = st.integers(0, 9).map(lambda n: b"%016d" % n)


class SlotIndexMachine(RuleBasedStateMachine):
    """The model knows which key each slot holds, what is visible, filling, leased."""

    @initialize(policy=st.sampled_from(sorted(KNOWN_POLICIES)))
    def start(self, policy: str) -> None:
        self.evicted: list[tuple[bytes, int]] = []
        self.index = SlotIndex(
            CAPACITY,
            make_policy(policy, CAPACITY),
            lambda *gone: self.evicted.append(gone),
        )
        self.ready: dict[bytes, int] = {}
        self.filling: dict[bytes, int] = {}
        self.orphans: set[int] = set()
        self.leases: dict[int, int] = {}

    def taken(self) -> set[int]:
        return {*self.ready.values(), *self.filling.values(), *self.orphans, *self.leases}

    def forget_evicted(self, count: int) -> None:
        assert len(self.evicted) == count
        for key, slot in self.evicted:
            assert self.ready.pop(key) == slot
            assert slot not in self.leases
        self.evicted.clear()

    @rule(names=st.lists(keys, min_size=1, max_size=5, unique=True))
    def reserve(self, names: list[bytes]) -> None:
        names = [n for n in names if n not in self.ready and n not in self.filling]
        free = CAPACITY - len(self.taken())
        evictable = sum(slot not in self.leases for slot in self.ready.values())
        slots = self.index.reserve_run(names)
        assert len(slots) == min(len(names), free + evictable)
        self.forget_evicted(max(0, len(slots) - free))
        for name, slot in zip(names, slots, strict=False):
            assert slot not in self.taken()
            self.filling[name] = slot

    @rule(name=keys)
    def reserve_one(self, name: bytes) -> None:
        if self.index.find(name) is None:
            free = CAPACITY - len(self.taken())
            evictable = sum(slot not in self.leases for slot in self.ready.values())
            slot = self.index.reserve(name)
            assert (slot is None) == (free + evictable == 0)
            self.forget_evicted(int(free == 0 and evictable > 0))
            if slot is not None:
                assert slot not in self.taken()
                self.filling[name] = slot

    @precondition(lambda self: self.filling or self.orphans)
    @rule(data=st.data(), works=st.booleans())
    def finish(self, data: st.DataObject, works: bool) -> None:
        slot = data.draw(st.sampled_from(sorted({*self.filling.values(), *self.orphans})))
        orphan = slot in self.orphans
        if works:
            assert self.index.publish(slot) == (not orphan)
        else:
            self.index.abandon(slot)
        self.orphans.discard(slot)
        for key in [k for k, s in self.filling.items() if s == slot]:
            del self.filling[key]
            if works:
                self.ready[key] = slot

    @rule(name=keys, count=st.integers(1, 3))
    def lease(self, name: bytes, count: int) -> None:
        slot = self.index.get(name)
        if slot is not None:
            self.index.lease(slot, count)
            self.leases[slot] = self.leases.get(slot, 0) + count

    @rule(names=st.lists(keys, max_size=5, unique=True))
    def lease_run(self, names: list[bytes]) -> None:
        ready = list(itertools.takewhile(self.ready.__contains__, names))
        slots = self.index.lease_run(names)
        assert slots == [self.ready[name] for name in ready]
        for slot in slots:
            self.leases[slot] = self.leases.get(slot, 0) + 1
        self.index.touch_run(slots)

    @rule(count=st.integers(0, CAPACITY))
    def forecast(self, count: int) -> None:
        slots = self.index.forecast(count)
        assert len(slots) <= count
        assert set(slots) <= set(self.ready.values()) - set(self.leases)

    @precondition(lambda self: self.leases)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        slot = data.draw(st.sampled_from(sorted(self.leases)))
        self.index.release(slot)
        self.leases[slot] -= 1
        if not self.leases[slot]:
            del self.leases[slot]

    @rule(name=keys)
    def touch(self, name: bytes) -> None:
        slot = self.index.find(name)
        if slot is not None:
            self.index.touch(slot)

    @rule(name=keys)
    def remove(self, name: bytes) -> None:
        assert self.index.remove(name) == (name in self.ready or name in self.filling)
        self.ready.pop(name, None)
        if name in self.filling:
            self.orphans.add(self.filling.pop(name))

    @rule()
    def clear(self) -> None:
        assert self.index.clear() == len(self.ready)
        self.ready.clear()
        self.orphans.update(self.filling.values())
        self.filling.clear()

    @rule()
    def evict(self) -> None:
        slot = self.index.evict()
        evictable = [s for s in self.ready.values() if s not in self.leases]
        assert (slot is None) == (not evictable)
        self.forget_evicted(int(slot is not None))

    @rule(name=keys, slot=st.integers(0, CAPACITY - 1))
    def adopt(self, name: bytes, slot: int) -> None:
        if slot not in self.taken() and self.index.find(name) is None:
            self.index.adopt(name, slot)
            self.ready[name] = slot

    @invariant()
    def agrees(self) -> None:
        index = self.index
        index.check()
        assert set(index.keys()) == set(self.ready)
        assert {key: index.get(key) for key in self.ready} == self.ready
        assert all(index.get(key) is None for key in self.filling)
        assert {key: index.find(key) for key in self.filling} == self.filling
        assert index.ready == len(index) == len(self.ready)
        assert index.filling == len(self.filling) + len(self.orphans)
        assert index.leased == len(self.leases)
        assert index.free == CAPACITY - len(self.taken())
        assert all(index.leases(slot) == self.leases.get(slot, 0) for slot in range(CAPACITY))


TestSlotIndexMachine = SlotIndexMachine.TestCase
TestSlotIndexMachine.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


@pytest.mark.parametrize("policy", sorted(KNOWN_POLICIES))
def test_a_chain_reserved_together_loses_its_leaves_first_however_it_completes(policy: str) -> None:
    index = SlotIndex(4, make_policy(policy, 4))
    chain = [b"a", b"b", b"c", b"d"]
    slots = index.reserve_run(chain)
    for at in (2, 0, 3, 1):
        index.publish(slots[at])
    gone = []
    for _ in range(4):
        before = set(index.keys())
        index.evict()
        gone += before - set(index.keys())
    assert gone == [b"d", b"c", b"b", b"a"]


def test_a_removed_slot_is_hidden_at_once_but_not_reused_while_leased() -> None:
    index = SlotIndex(1, make_policy("lru", 1))
    slot = index.reserve(b"a")
    assert slot == 0
    index.publish(slot)
    index.lease(slot, 2)
    assert index.remove(b"a")
    assert index.get(b"a") is None
    assert index.reserve(b"b") is None
    index.release(slot)
    assert index.reserve(b"b") is None
    index.release(slot)
    assert index.reserve(b"b") == 0
