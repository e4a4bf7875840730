# SPDX-License-Identifier: Apache-2.0
"""Which key is in which slot, and what may happen to the slot: shared by DRAM and the disk slab.

    FREE ── reserve ──▶ FILLING ── publish ──▶ READY ── evict, remove ──▶ FREE
                           │                     └─ remove while leased ──▶ HIDDEN
                           ├─ abandon ──▶ FREE                HIDDEN ── last release ──▶ FREE
                           └─ remove ──▶ ORPHAN ── publish, abandon ──▶ FREE

A slot is visible (`get`) only while READY, so never before all its bytes are there and never after
`remove` returned. It is evicted only while READY and not leased. Compact: one dict entry, one list
entry and a few array items a slot, no object (`benchmarks/store.py` measures bytes a chunk).

No thread of its own and no lock: owned by one thread. `get` alone may be called from any thread;
its answer may be out of date by the time it is used.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence

from tierkv.policies.base import EvictionPolicy

FREE, FILLING, READY, HIDDEN, ORPHAN = range(5)
"""States of a slot. HIDDEN: removed while leased. ORPHAN: removed while being filled."""


class SlotIndex:
    """Keys to slots 0 … capacity-1, leases, and eviction on allocation.

    Args:
        capacity: number of slots.
        policy: fresh order of the same capacity. FILLING slots are in it, refused as victims: a run
            reserved together lies in the right order whatever order it is completed in.
        on_evict: called with (key, slot) when a READY slot is given up for another key, before the
            slot is handed out. Must not call back into the index.
    """

    def __init__(
        self,
        capacity: int,
        policy: EvictionPolicy,
        on_evict: Callable[[bytes, int], None] | None = None,
    ) -> None:
        assert policy.capacity == capacity
        self.capacity = capacity
        self.limit = capacity
        self.on_evict = on_evict
        self._policy = policy
        self._slots: dict[bytes, int] = {}  # READY and FILLING
        self._keys: list[bytes | None] = [None] * capacity
        self._states = bytearray(capacity)
        self._leases = array("i", [0]) * capacity
        self._freed = array("i")  # stack of slots that were used before
        self._fresh = 0  # slots from here on were never handed out, unless adopted
        self._counts = [capacity, 0, 0, 0, 0]  # by state
        self._leased = 0
        self._leased_ready = 0

    # -- what is where ---------------------------------------------------------------------------

    def get(self, key: bytes) -> int | None:
        """The slot that holds `key`, complete and visible. Hot path."""
        slot = self._slots.get(key)
        return slot if slot is not None and self._states[slot] == READY else None

    def find(self, key: bytes) -> int | None:
        """As `get`, but also while the slot is being filled."""
        return self._slots.get(key)

    def state(self, slot: int) -> int:
        return self._states[slot]

    def key_of(self, slot: int) -> bytes | None:
        """The key a slot holds or held last; None once it is free."""
        return self._keys[slot]

    def keys(self) -> Iterator[bytes]:
        """READY keys in no particular order. Do not change the index while iterating."""
        return (key for _, key in self.places())

    def places(self) -> Iterator[tuple[int, bytes]]:
        """READY slots and their keys, as `keys`."""
        return ((slot, key) for key, slot in self._slots.items() if self._states[slot] == READY)

    def __len__(self) -> int:
        return self._counts[READY]

    @property
    def free(self) -> int:
        """FREE slots below the limit."""
        return self._counts[FREE] - (self.capacity - self.limit)

    @property
    def ready(self) -> int:
        return self._counts[READY]

    @property
    def filling(self) -> int:
        """Slots being filled, removed ones included."""
        return self._counts[FILLING] + self._counts[ORPHAN]

    @property
    def leased(self) -> int:
        """Slots with at least one lease, removed ones included."""
        return self._leased

    @property
    def evictable(self) -> int:
        """READY slots without a lease."""
        return self._counts[READY] - self._leased_ready

    def set_limit(self, limit: int) -> None:
        """Hand out only slots below `limit`: a slab that grows and shrinks on its medium.

        Slots from `limit` on must be FREE. O(change).
        """
        assert 0 <= limit <= self.capacity
        assert not any(self._states[limit : self.limit]), "slots above the limit are in use"
        # Those that were used before are on no list any more: `_pop_free` dropped them.
        self._freed.extend(range(self.limit, min(limit, self._fresh)))
        self.limit = limit

    # -- filling ---------------------------------------------------------------------------------

    def reserve(self, key: bytes) -> int | None:
        """A slot to fill with `key`, free or evicted; None if all are leased or being filled.

        `key` must not be in the index (see `find`).
        """
        slot = self._take(key)
        if slot is not None:
            self._policy.insert(slot, key)
        return slot

    def reserve_run(self, keys: Sequence[bytes]) -> list[int]:
        """Slots for a chain, first chunk first; fewer than `keys` if room ends.

        They enter the eviction order from the last to the first, so that leaves go first.
        """
        slots: list[int] = []
        for key in keys:
            slot = self._take(key)
            if slot is None:
                break
            slots.append(slot)
        for slot, key in zip(reversed(slots), reversed(keys[: len(slots)]), strict=True):
            self._policy.insert(slot, key)
        return slots

    def publish(self, slot: int) -> bool:
        """The slot is filled: make it visible. False if its key was removed: the slot is free."""
        if self._states[slot] == ORPHAN:
            self._free(slot)
            return False
        assert self._states[slot] == FILLING, f"slot {slot} is not being filled"
        self._move(slot, READY)
        return True

    def abandon(self, slot: int) -> None:
        """Filling failed: the slot is free again."""
        if self._states[slot] == FILLING:
            self._forget(slot)
        else:
            assert self._states[slot] == ORPHAN, f"slot {slot} is not being filled"
        self._free(slot)

    def adopt(self, key: bytes, slot: int) -> None:
        """Recovery: this FREE slot holds `key` and is READY. Call from the oldest to the newest."""
        assert self._states[slot] == FREE, f"slot {slot} is taken"
        assert slot < self.limit, f"slot {slot} is beyond the limit"
        assert key not in self._slots
        self._keys[slot] = key
        self._slots[key] = slot
        self._policy.insert(slot, key)
        self._move(slot, READY)

    # -- using -----------------------------------------------------------------------------------

    def lease(self, slot: int, count: int = 1) -> None:
        """Keep a READY slot from being evicted or reused until as many `release` calls."""
        assert self._states[slot] == READY, f"slot {slot} is not ready"
        if not self._leases[slot]:
            self._leased += 1
            self._leased_ready += 1
        self._leases[slot] += count

    def release(self, slot: int) -> None:
        """Give one lease back."""
        leases = self._leases[slot] - 1
        assert leases >= 0, f"slot {slot} has no lease"
        self._leases[slot] = leases
        if leases:
            return
        self._leased -= 1
        if self._states[slot] == READY:
            self._leased_ready -= 1
        else:
            self._free(slot)

    def lease_run(self, keys: Iterable[bytes]) -> list[int]:
        """Lease what is READY from the first key on; the slots, up to the first that is not.

        Hot path: about 0.2 µs a key, where `get` and `lease` would take twice that.
        """
        find, states, leases = self._slots.get, self._states, self._leases
        slots: list[int] = []
        newly = 0
        for key in keys:
            slot = find(key)
            if slot is None or states[slot] != READY:
                break
            count = leases[slot]
            if not count:
                newly += 1
            leases[slot] = count + 1
            slots.append(slot)
        self._leased += newly
        self._leased_ready += newly
        return slots

    def leases(self, slot: int) -> int:
        return self._leases[slot]

    def touch(self, slot: int) -> None:
        """The READY or FILLING slot was used."""
        self._policy.touch(slot)

    def touch_run(self, slots: Sequence[int]) -> None:
        """A chain was used, first chunk first: touch it from its end, so that leaves go first.

        Slots that are not READY (removed since they were leased) are passed over.
        """
        states = self._states
        self._policy.touch_run([slot for slot in reversed(slots) if states[slot] == READY])

    def forecast(self, count: int) -> list[int]:
        """READY slots without a lease among the `count` that the policy gives up next."""
        return [slot for slot in self._policy.forecast(count) if self._is_evictable(slot)]

    # -- forgetting ------------------------------------------------------------------------------

    def remove(self, key: bytes) -> bool:
        """Hide `key` at once; its slot is free as soon as nobody reads or fills it."""
        slot = self._slots.get(key)
        if slot is None:
            return False
        if self._states[slot] == FILLING:
            self._forget(slot)
            self._move(slot, ORPHAN)
        else:
            self._forget(slot)
            if self._leases[slot]:
                self._leased_ready -= 1
                self._move(slot, HIDDEN)
            else:
                self._free(slot)
        return True

    def clear(self) -> int:
        """`remove` every key; returns how many were READY."""
        ready = self._counts[READY]
        for key in list(self._slots):
            self.remove(key)
        return ready

    def evict(self) -> int | None:
        """Give up the policy's next victim and return its slot, now FREE (shrinking)."""
        slot = self._victim()
        if slot is not None:
            self._free(slot)
        return slot

    # --------------------------------------------------------------------------------------------

    def check(self) -> None:
        """Raise AssertionError if the books do not balance. O(capacity); for tests."""
        states = self._states
        for state in range(5):
            assert self._counts[state] == states.count(state), f"count of state {state}"
        held = [slot for slot in range(self.capacity) if self._leases[slot]]
        assert self._leased == len(held)
        assert self._leased_ready == sum(states[slot] == READY for slot in held)
        assert all(states[slot] in (READY, HIDDEN) for slot in held)
        assert all(self._leases[slot] for slot in range(self.capacity) if states[slot] == HIDDEN)
        assert len(self._slots) == self._counts[READY] + self._counts[FILLING]
        for key, slot in self._slots.items():
            assert self._keys[slot] == key
            assert states[slot] in (READY, FILLING)
        assert len(self._policy) == len(self._slots)
        known = min(self._fresh, self.limit)
        untouched = sum(states[slot] == FREE for slot in range(self._fresh, self.limit))
        assert not any(states[self.limit :]), "a slot above the limit is in use"
        freed = {slot for slot in self._freed if states[slot] == FREE and slot < known}
        assert len(freed) + untouched == self.free

    def _take(self, key: bytes) -> int | None:
        assert key not in self._slots, "the key is in the index already"
        slot = self._pop_free() if self.free else self._victim()
        if slot is None:
            return None
        self._keys[slot] = key
        self._slots[key] = slot
        self._move(slot, FILLING)
        return slot

    def _pop_free(self) -> int:
        states = self._states
        while self._freed:
            slot = self._freed.pop()
            # Else adopted since it was freed, or above the limit.
            if states[slot] == FREE and slot < min(self._fresh, self.limit):
                return slot
        while states[self._fresh] != FREE:  # adopted
            self._fresh += 1
        self._fresh += 1
        return self._fresh - 1

    def _victim(self) -> int | None:
        if not self.evictable:  # spares the policy a walk over slots that are all leased
            return None
        slot = self._policy.victim(self._is_evictable)
        assert slot is not None, "the policy found no victim where one is evictable"
        key = self._keys[slot]
        assert key is not None
        del self._slots[key]
        if self.on_evict is not None:
            self.on_evict(key, slot)
        return slot

    def _is_evictable(self, slot: int) -> bool:
        return self._states[slot] == READY and not self._leases[slot]

    def _forget(self, slot: int) -> None:
        key = self._keys[slot]
        assert key is not None
        del self._slots[key]
        self._policy.remove(slot)

    def _free(self, slot: int) -> None:
        self._keys[slot] = None
        self._move(slot, FREE)
        if slot < self._fresh:
            self._freed.append(slot)

    def _move(self, slot: int, state: int) -> None:
        self._counts[self._states[slot]] -= 1
        self._counts[state] += 1
        self._states[slot] = state
