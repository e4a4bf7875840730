# SPDX-License-Identifier: Apache-2.0
"""What a load would take of DRAM, told before anything is held for it.

Loads that take what room there is and wait for the rest would wait for each other. Who loads
several chains at once, and has no use for a part of them, asks first.

Threads and ownership. Owned by the Store's scheduler thread; no lock; looks only.
"""

from __future__ import annotations

from collections.abc import Iterable, Set
from dataclasses import dataclass

from tierkv.store.dram import Dram
from tierkv.store.pins import Pins
from tierkv.tiers.slot_index import READY


@dataclass(frozen=True, slots=True)
class Demand:
    """In slots of the DRAM tier.

    Attributes:
        missing: keys that are to be read from lower tiers; what is being read already is not.
        room: slots for that now: free, or evictable and not wanted itself.
        most: the same if nobody else held anything but what is pinned.
    """

    missing: tuple[bytes, ...]
    room: int
    most: int

    @property
    def reads(self) -> int:
        """Slots that it would fill."""
        return len(self.missing)


def demand_of(wanted: Set[bytes], own: Iterable[bytes], dram: Dram, pins: Pins) -> Demand:
    """About 0.5 µs a key.

    Args:
        wanted: keys of the chunks to be loaded.
        own: of chunks that the caller has leased and keeps.
    """
    index = dram.index
    missing = []
    ready = idle = pinned = 0
    for key in wanted:
        slot = index.find(key)
        if slot is None:
            missing.append(key)
        elif index.state(slot) == READY:
            ready += 1
            idle += not index.leases(slot)
            pinned += key in pins
    kept = ready + len(pins) - pinned
    kept += sum(1 for key in own if key not in wanted and key not in pins)
    room = index.free + index.evictable - idle
    return Demand(tuple(missing), room, dram.pool.slots - kept)
