# SPDX-License-Identifier: Apache-2.0
"""Least recently used: the default order, and the one whose behaviour nobody has to look up.

A doubly linked list whose links are two arrays of ints, indexed by slot: 8 bytes a slot, no object
a slot. Index `capacity` is the sentinel: its newer neighbour is the oldest slot, its older
neighbour the newest one.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable

from tierkv.policies.base import EvictionPolicy

_ABSENT = -1


class LRU(EvictionPolicy):
    """Gives up the slot whose last insert or touch is longest ago.

    Slots that `victim` finds leased keep their place. So that many of them at the old end do not
    make every call walk past all of them, a walk that passed k of them lets the next k calls go on
    behind them instead of starting over: O(1) amortised. Slots released in the meantime are found
    by the call after those.
    """

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        self._head = capacity
        self._newer = array("i", [_ABSENT]) * (capacity + 1)
        self._older = array("i", [_ABSENT]) * (capacity + 1)
        self._newer[capacity] = self._older[capacity] = capacity
        self._size = 0
        self._resume = capacity  # newest slot known to be refused; the sentinel: start over
        self._credit = 0  # calls that may still begin at _resume

    def insert(self, slot: int, key: bytes) -> None:
        assert self._newer[slot] == _ABSENT, f"slot {slot} is in the order already"
        self._link_newest(slot)
        self._size += 1

    def touch(self, slot: int) -> None:
        self._unlink(slot)
        self._link_newest(slot)

    def touch_run(self, slots: Iterable[int]) -> None:
        """A chain mostly lies in the list as it was last touched: move such stretches whole."""
        newer, older, head = self._newer, self._older, self._head
        self._resume = head  # it may be among them
        rest = iter(slots)
        first = last = next(rest, head)
        while first != head:
            slot = next(rest, head)
            if slot != head and newer[last] == slot:
                last = slot
                continue
            before, after = older[first], newer[last]
            newer[before] = after
            older[after] = before
            newest = older[head]
            newer[newest] = first
            older[first] = newest
            newer[last] = head
            older[head] = last
            first = last = slot

    def remove(self, slot: int) -> None:
        self._unlink(slot)
        self._newer[slot] = _ABSENT
        self._size -= 1

    def victim(self, evictable: Callable[[int], bool]) -> int | None:
        head = self._head
        if self._credit and self._resume != head:
            self._credit -= 1
            slot, passed = self._walk(self._resume, evictable)
            self._credit += passed
            if slot != head:
                self.remove(slot)
                return slot
        slot, self._credit = self._walk(head, evictable)
        if slot == head:
            self._resume = head
            return None
        self.remove(slot)
        return slot

    def forecast(self, count: int) -> list[int]:
        newer, head = self._newer, self._head
        slots: list[int] = []
        slot = newer[head]
        while slot != head and len(slots) < count:
            slots.append(slot)
            slot = newer[slot]
        return slots

    def __len__(self) -> int:
        return self._size

    def _walk(self, start: int, evictable: Callable[[int], bool]) -> tuple[int, int]:
        """From just newer than `start`: (first evictable slot or the sentinel, slots passed)."""
        newer, head, passed = self._newer, self._head, 0
        slot = newer[start]
        while slot != head and not evictable(slot):
            passed += 1
            slot = newer[slot]
        self._resume = self._older[slot]
        return slot, passed

    def _link_newest(self, slot: int) -> None:
        head = self._head
        newest = self._older[head]
        self._newer[newest] = slot
        self._older[slot] = newest
        self._newer[slot] = head
        self._older[head] = slot

    def _unlink(self, slot: int) -> None:
        older, newer = self._older[slot], self._newer[slot]
        if slot == self._resume:
            self._resume = older
        self._newer[older] = newer
        self._older[newer] = older
