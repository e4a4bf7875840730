# SPDX-License-Identifier: Apache-2.0
"""S3-FIFO against the paper's algorithm written down with plain lists."""

from __future__ import annotations

from random import Random

import pytest

from tierkv.policies import make_policy
from tierkv.policies.s3fifo import S3FIFO

CAPACITY = 20
SMALL, MAIN = 2, 18  # a tenth, and the rest


class PaperS3FIFO:
    """Oldest entry first in every list; an entry is [key, uses]. Eviction by key, no slots."""

    def __init__(self) -> None:
        self.small: list[list] = []
        self.main: list[list] = []
        self.ghost: list[bytes] = []

    def insert(self, key: bytes) -> None:
        if key in self.ghost:
            self.ghost.remove(key)
            self.main.append([key, 0])
        else:
            self.small.append([key, 0])

    def read(self, key: bytes) -> None:
        for entry in self.small + self.main:
            if entry[0] == key:
                entry[1] = min(entry[1] + 1, 3)

    def delete(self, key: bytes) -> None:
        self.small = [e for e in self.small if e[0] != key]
        self.main = [e for e in self.main if e[0] != key]

    def evict(self, leased: set[bytes]) -> bytes | None:
        first, second = self.from_small, self.from_main
        if len(self.small) < SMALL:
            first, second = second, first
        return first(leased) or second(leased)

    def from_small(self, leased: set[bytes]) -> bytes | None:
        for key, uses in list(self.small):  # each comes up once, oldest first
            self.small.pop(0)
            if key in leased:
                self.small.append([key, uses])
            elif uses > 1:
                self.main.append([key, 0])
                if len(self.main) > MAIN:
                    return self.from_main(leased)
            else:
                self.ghost = [*self.ghost, key][-MAIN:]
                return key
        return None

    def from_main(self, leased: set[bytes]) -> bytes | None:
        while any(e[0] not in leased for e in self.main):
            key, uses = self.main.pop(0)
            if key not in leased and uses == 0:
                return key
            self.main.append([key, uses if key in leased else uses - 1])
        return None


@pytest.mark.parametrize("seed", range(60))
def test_it_evicts_what_the_papers_algorithm_evicts(seed: int) -> None:
    rng = Random(seed)
    actions = rng.choices(["use", "delete", "lease"], [90, 3, 7], k=1500)
    skew = rng.uniform(0.5, 1.5)  # keys used often and seldom
    popularity = [(n + 1) ** -skew for n in range(60)]
    names = rng.choices([b"%d" % n for n in range(60)], popularity, k=1500)
    policy, paper = make_policy("s3fifo", CAPACITY), PaperS3FIFO()
    slot_of: dict[bytes, int] = {}
    leased: set[bytes] = set()
    holder: dict[int, bytes] = {}

    def evictable(slot: int) -> bool:
        return holder[slot] not in leased

    for action, key in zip(actions, names, strict=True):
        if action == "lease":
            leased ^= {key}
        elif action == "delete" and key in slot_of:
            policy.remove(slot_of.pop(key))
            paper.delete(key)
        elif action == "use" and key in slot_of:
            policy.touch(slot_of[key])
            paper.read(key)
        elif action == "use":
            free = set(range(CAPACITY)) - set(slot_of.values())
            if not free:
                holder = {slot: k for k, slot in slot_of.items()}
                slot = policy.victim(evictable)
                victim = paper.evict(leased)
                assert (None if slot is None else holder[slot]) == victim
                if victim is None:
                    continue
                del slot_of[victim]
                free = {slot}  # type: ignore[arg-type]
            slot_of[key] = min(free)
            policy.insert(slot_of[key], key)
            paper.insert(key)
        assert len(policy) == len(slot_of)


def test_a_scan_does_not_push_out_what_is_used_again_and_again() -> None:
    policy = make_policy("s3fifo", 100)
    holder: dict[int, bytes] = {}

    def put(key: bytes) -> None:
        slot = len(holder) if len(holder) < 100 else policy.victim(lambda s: True)
        assert slot is not None
        holder[slot] = key
        policy.insert(slot, key)

    hot = [b"hot%d" % n for n in range(50)]
    for key in hot:
        put(key)
    for slot in range(50):
        policy.touch(slot)
        policy.touch(slot)
    for n in range(1000):
        put(b"scan%d" % n)
    assert set(hot) <= set(holder.values())


def test_the_ghost_is_bounded_by_the_main_queue() -> None:
    policy = S3FIFO(50)
    for n in range(50):
        policy.insert(n, b"%d" % n)
    for n in range(50, 1000):
        slot = policy.victim(lambda s: True)
        assert slot is not None
        policy.insert(slot, b"%d" % n)
    assert len(policy._ghost) == 45


def test_with_every_slot_leased_there_is_no_victim_and_no_endless_round() -> None:
    policy = S3FIFO(10)
    for n in range(10):
        policy.insert(n, b"%d" % n)
        policy.touch(n)
        policy.touch(n)
    assert policy.victim(lambda s: False) is None
    assert len(policy) == 10


def test_the_forecast_names_the_next_victims_if_nothing_is_used_meanwhile() -> None:
    policy = S3FIFO(20)
    for n in range(20):
        policy.insert(n, b"%d" % n)
    for n in (0, 3):  # used again and again: these stay
        policy.touch(n)
        policy.touch(n)
    forecast = policy.forecast(10)
    assert forecast == [1, 2, 4, 5, 6, 7, 8, 9]  # it looks at ten, and leaves out those two
    assert [policy.victim(lambda s: True) for _ in forecast] == forecast
