# SPDX-License-Identifier: Apache-2.0
"""The contract of an eviction policy: in which order the slots of a tier are given up.

A policy sees slot numbers, not bytes: all chunks of a tier have one size. It is owned by the
thread that owns the tier's index; no lock. Every call is O(1) except `victim`, which is O(1)
amortised as long as few slots are refused.

Chains. A chunk whose parent is gone is unreachable, so leaves should go first. Policies need not
know about chains: whoever inserts or touches a chain does it from its end to its start, so that a
parent is always the more recent (and never the less frequent) one.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable


class EvictionPolicy(ABC):
    """An order over the slots 0 … capacity-1 of one tier."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity

    @abstractmethod
    def insert(self, slot: int, key: bytes) -> None:
        """The slot now holds `key`. It was not in the order before."""

    @abstractmethod
    def touch(self, slot: int) -> None:
        """The slot was used. It is in the order."""

    def touch_run(self, slots: Iterable[int]) -> None:
        """`touch` each of these, in this order. Hot path: chains of thousands."""
        for slot in slots:
            self.touch(slot)

    @abstractmethod
    def remove(self, slot: int) -> None:
        """The slot was emptied for another reason than `victim`. It is in the order."""

    @abstractmethod
    def victim(self, evictable: Callable[[int], bool]) -> int | None:
        """Take the next slot to give up out of the order and return it.

        Slots that are not `evictable` (leased) keep a place in the order. None if there is none.
        """

    @abstractmethod
    def forecast(self, count: int) -> list[int]:
        """At most `count` slots that come up next, soonest first, whether leased or not.

        Changes nothing. What is used in the meantime may stay after all. O(count).
        """

    @abstractmethod
    def __len__(self) -> int:
        """How many slots are in the order."""
