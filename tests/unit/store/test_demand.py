# SPDX-License-Identifier: Apache-2.0
"""What a load would take of DRAM, told before anything is held."""

from __future__ import annotations

from collections.abc import Callable

from tests.unit.store.rig import Rig, chain
from tierkv.store.demand import Demand

MakeRig = Callable[..., Rig]


def test_what_is_leased_pinned_or_wanted_itself_is_no_room(make_rig: MakeRig) -> None:
    rig, here, there = make_rig(slots=10), chain(5), chain(4, "b")
    assert rig.store.demand(there) == Demand(reads=4, room=10, most=10)
    rig.saved(here)
    rig.pump()
    # Five are free, five can be evicted.
    assert rig.store.demand(there) == Demand(reads=4, room=10, most=10)
    assert rig.store.demand([*there, *here[:2], *there]) == Demand(reads=4, room=8, most=8)
    ticket = rig.load(here[:3])
    assert rig.store.demand(there) == Demand(reads=4, room=7, most=10)
    assert rig.store.demand([*there, *here]) == Demand(reads=4, room=5, most=5)
    assert rig.store.pin([here[4].key]) == 1
    assert rig.store.demand(there) == Demand(reads=4, room=6, most=9)
    assert rig.index.leased == 4
    ticket.release()
    assert rig.store.demand(there) == Demand(reads=4, room=9, most=9)
    rig.store.unpin([here[4].key])


def test_what_is_being_read_already_needs_no_slot(make_rig: MakeRig) -> None:
    rig, chunks = make_rig(slots=6), chain(4)
    rig.disk.give(*chunks)
    rig.disk.script.hold = True
    first = rig.store.load(chunks[:3])
    assert rig.store.demand(chunks) == Demand(reads=1, room=3, most=6)
    rig.pump()
    rig.end_calls()
    rig.disk.script.hold = False
    assert rig.settled(first).ready == 3
    first.release()
