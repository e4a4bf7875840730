# SPDX-License-Identifier: Apache-2.0
"""LRU against an OrderedDict: the oldest slot that may go, whatever was touched and leased."""

from __future__ import annotations

from collections import OrderedDict
from random import Random

import pytest

from tierkv.policies import make_policy

CAPACITY = 12
Step = tuple[str, int]


def steps(seed: int, leases: int) -> list[Step]:
    """1,000 steps; `leases` in a hundred of them are leases. Seeds run deep where lists do not."""
    rng = Random(seed)
    weights = [30, 10, 10, 5, 30, leases]
    kinds = ["insert", "touch", "run", "remove", "victim", "lease"]
    actions = rng.choices(kinds, weights, k=1000)
    return [(action, rng.randrange(CAPACITY)) for action in actions]


@pytest.mark.parametrize("seed", range(40))
def test_the_victim_is_the_least_recently_used_slot_that_is_not_leased(seed: int) -> None:
    lru = make_policy("lru", CAPACITY)
    order: OrderedDict[int, None] = OrderedDict()
    leased: set[int] = set()  # only ever grows: then the order is exact even behind leased slots
    for action, slot in steps(seed, leases=1):
        if action == "insert" and slot not in order:
            lru.insert(slot, b"")
            order[slot] = None
        elif action == "touch" and slot in order:
            lru.touch(slot)
            order.move_to_end(slot)
        elif action == "run":
            now = list(order)
            run = [*now[slot // 2 : slot], *now[slot + 1 :]][: slot + 1]
            lru.touch_run(run)
            for each in run:
                order.move_to_end(each)
        elif action == "remove" and slot in order:
            lru.remove(slot)
            del order[slot]
        elif action == "lease":
            leased.add(slot)
        elif action == "victim":
            expected = next((s for s in order if s not in leased), None)
            assert lru.victim(lambda s: s not in leased) == expected
            order.pop(expected, None)  # type: ignore[arg-type]
        assert len(lru) == len(order)
        assert lru.forecast(5) == list(order)[:5]


@pytest.mark.parametrize("seed", range(40))
def test_whatever_is_released_a_victim_is_found_exactly_while_there_is_one(seed: int) -> None:
    lru = make_policy("lru", CAPACITY)
    held: set[int] = set()
    leased: set[int] = set()

    def evictable(slot: int) -> bool:
        return slot not in leased

    for action, slot in steps(seed, leases=20):
        if action == "insert" and slot not in held:
            lru.insert(slot, b"")
            held.add(slot)
        elif action == "touch" and slot in held:
            lru.touch(slot)
        elif action == "run":
            lru.touch_run(sorted(held)[slot:])
        elif action == "remove" and slot in held:
            lru.remove(slot)
            held.discard(slot)
        elif action == "lease":
            leased ^= {slot}
        elif action == "victim":
            victim = lru.victim(evictable)
            assert (victim is None) == (not held - leased)
            assert victim is None or victim in held - leased
            held.discard(victim)  # type: ignore[arg-type]
        assert len(lru) == len(held)
    drained = [lru.victim(lambda s: True) for _ in range(len(held))]
    assert sorted(drained) == sorted(held)  # type: ignore[type-var]


def test_many_leased_slots_at_the_old_end_are_not_walked_for_every_victim() -> None:
    leased, total = 500, 2000
    lru = make_policy("lru", total)
    for slot in range(total):
        lru.insert(slot, b"")
    asked = 0

    def evictable(slot: int) -> bool:
        nonlocal asked
        asked += 1
        return slot >= leased

    victims = [lru.victim(evictable) for _ in range(total - leased)]
    assert victims == list(range(leased, total))
    assert asked <= 3 * total  # walking past them each time would ask 751,500 times


def test_a_slot_released_behind_the_walk_is_found_again() -> None:
    lru = make_policy("lru", 6)
    for slot in range(6):
        lru.insert(slot, b"")
    assert lru.victim(lambda s: s >= 2) == 2
    # 0 and 1 are free to go now: at most two more calls pass them by.
    assert 0 in {lru.victim(lambda s: True) for _ in range(3)}
