# SPDX-License-Identifier: Apache-2.0
"""What a load would take of DRAM, told before anything is held for it.

Loads that take what room there is and wait for the rest would wait for each other. Who loads
several chains at once, and has no use for a part of them, asks first.

Threads and ownership. Owned by the Store's scheduler thread; no lock; looks only.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from tierkv.store.dram import Dram
from tierkv.tiers.slot_index import READY


@dataclass(frozen=True, slots=True)
class Demand:
    """In slots of the DRAM tier.

    Attributes:
        reads: to be filled from lower tiers; what is being filled already does not count.
        room: free for that now, or evictable and not wanted itself.
        most: `room` if nobody held anything but what is pinned.
    """

    reads: int
    room: int
    most: int


def demand_of(keys: Iterable[bytes], dram: Dram, pinned: int) -> Demand:
    """About 0.3 µs a key.

    Args:
        keys: of the wanted chunks; repeated ones count once.
        pinned: slots that are pinned.
    """
    index = dram.index
    reads = ready = idle = 0
    for key in set(keys):
        slot = index.find(key)
        if slot is None:
            reads += 1
        elif index.state(slot) == READY:
            ready += 1
            idle += not index.leases(slot)
    room = index.free + index.evictable - idle
    # Of the wanted ones that are leased some may be the pinned ones: then `most` is not all.
    return Demand(reads, room, max(room, dram.pool.slots - pinned - ready))
