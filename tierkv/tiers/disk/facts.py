# SPDX-License-Identifier: Apache-2.0
"""What the disk tier remembers of each slot beside its key: 26 bytes of arrays, no object.

A slot is *stale* while it is not READY though its entry on disk may be intact: evicted by the
policy and not yet written again, failed in the middle, or void since the last run. Stale entries
are cleared before `evict` returns, so that no later run finds in them what was removed.

Owned by the I/O loop thread; no lock.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple

import numpy as np

from tierkv.tiers.disk.recover import Recovery


class Stored(NamedTuple):
    """What the record in a slot must say. A tuple: made on each load."""

    sequence: int
    codec_id: int
    stored_bytes: int


class SlotFacts:
    """By slot number.

    Args:
        capacity: most slots there can be; memory of slots that are not used takes no room.
        found: what an earlier run left.
        wall_ns: ns since 1970.
    """

    def __init__(self, capacity: int, found: Recovery, wall_ns: Callable[[], int]) -> None:
        self._wall_ns = wall_ns
        self._sequences = np.zeros(capacity, np.uint64)  # 0: the entry on disk is surely empty
        self._stored = np.zeros(capacity, np.uint64)
        self._codecs = np.zeros(capacity, np.uint16)
        self._used = np.zeros(capacity, np.uint64)
        slots = [entry.slot for entry, _ in found.entries]
        self._sequences[slots] = [entry.sequence for entry, _ in found.entries]
        self._stored[slots] = [entry.stored_bytes for entry, _ in found.entries]
        self._codecs[slots] = [entry.codec_id for entry, _ in found.entries]
        self._used[slots] = [used_ns for _, used_ns in found.entries]
        self.stale = set(found.stale)
        self._sequences[found.stale] = 1
        # From the clock, because entries with higher numbers may have been lost with the power,
        # while the records they were about are still there.
        self._next_sequence = max(int(self._sequences.max(initial=0)) + 1, wall_ns())
        self._last_stamp = int(self._used.max(initial=0))

    def stored(self, slot: int) -> Stored:
        """Of a READY slot. Hot path."""
        return Stored(int(self._sequences[slot]), int(self._codecs[slot]), int(self._stored[slot]))

    def begin(self, slot: int) -> tuple[int, bool]:
        """The slot is about to be written: its new sequence, and whether to clear it first."""
        was_held = bool(self._sequences[slot])
        sequence = self._next_sequence
        self._next_sequence += 1
        self._sequences[slot] = sequence
        self.stale.add(slot)
        return sequence, was_held

    def written(self, slot: int, codec_id: int, stored_bytes: int) -> None:
        """Record and entry are on disk. The slot is stale until `published`."""
        self._stored[slot] = stored_bytes
        self._codecs[slot] = codec_id
        self.used(slot)

    def published(self, slot: int) -> None:
        """The slot is READY: its entry is in force."""
        self.stale.discard(slot)

    def used(self, slot: int) -> None:
        """Note the time; strictly rising, whatever the wall clock does."""
        self._last_stamp = max(self._wall_ns(), self._last_stamp + 1)
        self._used[slot] = self._last_stamp

    def by_use(self, slots: Iterable[int]) -> list[int]:
        """These slots, the one that was used last first."""
        those = np.fromiter(slots, np.int64)
        order: list[int] = those[np.argsort(self._used[those])[::-1]].tolist()
        return order

    def cleared(self, slots: Iterable[int]) -> None:
        """The entries of these slots are empty."""
        for slot in slots:
            self._sequences[slot] = 0
            self.stale.discard(slot)

    def cleared_all(self) -> None:
        """All entries are empty."""
        self._sequences[:] = 0
        self.stale.clear()

    def stamps(self, slots: int) -> bytes:
        """The first slots' times of use, as the file `used` has them."""
        return self._used[:slots].astype("<u8").tobytes()
