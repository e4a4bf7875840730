# SPDX-License-Identifier: Apache-2.0
"""SlotIndex with a limit that moves: the slots of a slab that grows and shrinks."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tierkv.policies import make_policy
from tierkv.tiers.slot_index import SlotIndex

CAPACITY = 6


def make_index(limit: int) -> SlotIndex:
    index = SlotIndex(CAPACITY, make_policy("lru", CAPACITY))
    index.set_limit(limit)
    return index


def key(n: int) -> bytes:
    return b"%016d" % n


def fill(index: SlotIndex, n: int) -> int:
    slot = index.reserve(key(n))
    assert slot is not None
    index.publish(slot)
    return slot


def test_only_slots_below_the_limit_are_handed_out() -> None:
    index = make_index(2)
    assert index.free == 2
    assert [fill(index, n) for n in range(3)] == [0, 1, 0]
    assert index.get(key(0)) is None
    index.set_limit(3)
    assert fill(index, 3) == 2
    index.check()


def test_nothing_is_handed_out_below_a_limit_of_zero() -> None:
    index = make_index(0)
    assert index.reserve(key(0)) is None


def test_slots_in_use_cannot_be_cut_off() -> None:
    index = make_index(3)
    fill(index, 0)
    with pytest.raises(AssertionError, match="in use"):
        index.set_limit(0)


@given(st.lists(st.tuples(st.sampled_from(["fill", "remove", "limit"]), st.integers(0, 6))))
def test_every_slot_below_the_limit_can_be_used_and_none_above(
    steps: list[tuple[str, int]],
) -> None:
    index = make_index(CAPACITY)
    held: dict[int, int] = {}  # number to slot, oldest first
    limit = CAPACITY
    for action, number in steps:
        if action == "fill" and number not in held:
            slot = index.reserve(key(number))
            if limit == 0:
                assert slot is None
                continue
            assert slot is not None
            assert slot < limit
            if len(held) == limit:
                del held[next(iter(held))]
            assert slot not in held.values()
            index.publish(slot)
            held[number] = slot
        elif action == "remove":
            assert index.remove(key(number)) == (held.pop(number, None) is not None)
        elif action == "limit":
            for gone in [n for n, slot in held.items() if slot >= number]:
                index.remove(key(gone))
                del held[gone]
            limit = number
            index.set_limit(limit)
        index.check()
        assert index.free == limit - len(held)
