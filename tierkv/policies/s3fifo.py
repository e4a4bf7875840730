# SPDX-License-Identifier: Apache-2.0
"""S3-FIFO: keeps one-off prompts from pushing out what is used again and again.

Yang et al., "FIFO queues are all you need for cache eviction", SOSP 2023, algorithm 1. New keys
enter a small queue (a tenth); those used more than once there move to the main queue, the others
leave and are remembered by key in a ghost queue. A key found in the ghost enters the main queue at
once. In the main queue a used slot goes round again, one use poorer.

Two queues over shared link arrays (LRU's trick), a byte a slot for queue and frequency, and the
ghost: as many keys as the main queue may have slots.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable

from tierkv.policies.base import EvictionPolicy

_SMALL_SHARE = 10  # the small queue's share is one in ten: the paper's choice
_MAX_FREQ = 3  # two bits, the paper's choice
_PROMOTE_ABOVE = 1  # "if t.freq > 1" in the paper's EVICTS

_NOWHERE, _SMALL, _MAIN = 0, 1, 2


class S3FIFO(EvictionPolicy):
    """Small, main and ghost queue.

    A leased slot that comes up for eviction goes to the young end of its queue with its frequency
    unchanged: it is in use right now.
    """

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        self.small_target = max(1, capacity // _SMALL_SHARE)
        self.main_target = max(1, capacity - self.small_target)
        # Sentinels: capacity + _SMALL and capacity + _MAIN.
        self._newer = array("i", [0]) * (capacity + 3)
        self._older = array("i", [0]) * (capacity + 3)
        for queue in (_SMALL, _MAIN):
            head = capacity + queue
            self._newer[head] = self._older[head] = head
        self._queue = bytearray(capacity)
        self._freq = bytearray(capacity)
        self._sizes = [0, 0, 0]
        self._keys: list[bytes | None] = [None] * capacity
        self._ghost: dict[bytes, None] = {}  # insertion order is queue order

    def insert(self, slot: int, key: bytes) -> None:
        assert self._queue[slot] == _NOWHERE, f"slot {slot} is in the order already"
        self._keys[slot] = key
        self._freq[slot] = 0
        if key in self._ghost:
            del self._ghost[key]
            self._push(slot, _MAIN)
        else:
            self._push(slot, _SMALL)

    def touch(self, slot: int) -> None:
        if self._freq[slot] < _MAX_FREQ:
            self._freq[slot] += 1

    def remove(self, slot: int) -> None:
        self._pull(slot)
        self._keys[slot] = None

    def victim(self, evictable: Callable[[int], bool]) -> int | None:
        if self._sizes[_SMALL] >= self.small_target:
            slot = self._evict_small(evictable)
            return slot if slot is not None else self._evict_main(evictable)
        slot = self._evict_main(evictable)
        return slot if slot is not None else self._evict_small(evictable)

    def forecast(self, count: int) -> list[int]:
        """The small queue's unused slots, then the main queue's."""
        slots: list[int] = []
        for queue, most in ((_SMALL, _PROMOTE_ABOVE), (_MAIN, 0)):
            head = self.capacity + queue
            slot = self._newer[head]
            looked = 0
            while slot != head and looked < count and len(slots) < count:
                if self._freq[slot] <= most:
                    slots.append(slot)
                looked += 1
                slot = self._newer[slot]
        return slots

    def __len__(self) -> int:
        return self._sizes[_SMALL] + self._sizes[_MAIN]

    def _evict_small(self, evictable: Callable[[int], bool]) -> int | None:
        refused = 0
        while refused < self._sizes[_SMALL]:
            slot = self._newer[self.capacity + _SMALL]
            if not evictable(slot):
                self._pull(slot)
                self._push(slot, _SMALL)
                refused += 1
            elif self._freq[slot] > _PROMOTE_ABOVE:
                self._pull(slot)
                self._freq[slot] = 0
                self._push(slot, _MAIN)
                if self._sizes[_MAIN] > self.main_target:
                    # At least the slot just moved is evictable, so this finds one.
                    return self._evict_main(evictable)
            else:
                key = self._keys[slot]
                self.remove(slot)
                self._remember(key)
                return slot
        return None

    def _evict_main(self, evictable: Callable[[int], bool]) -> int | None:
        refused = 0
        while refused < self._sizes[_MAIN]:
            slot = self._newer[self.capacity + _MAIN]
            if not evictable(slot):
                refused += 1
            elif self._freq[slot]:
                self._freq[slot] -= 1
                refused = 0
            else:
                self.remove(slot)
                return slot
            self._pull(slot)
            self._push(slot, _MAIN)
        return None

    def _remember(self, key: bytes | None) -> None:
        assert key is not None
        self._ghost[key] = None
        if len(self._ghost) > self.main_target:
            del self._ghost[next(iter(self._ghost))]

    def _push(self, slot: int, queue: int) -> None:
        head = self.capacity + queue
        newest = self._older[head]
        self._newer[newest] = slot
        self._older[slot] = newest
        self._newer[slot] = head
        self._older[head] = slot
        self._queue[slot] = queue
        self._sizes[queue] += 1

    def _pull(self, slot: int) -> None:
        older, newer = self._older[slot], self._newer[slot]
        self._newer[older] = newer
        self._older[newer] = older
        self._sizes[self._queue[slot]] -= 1
        self._queue[slot] = _NOWHERE
