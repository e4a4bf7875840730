# SPDX-License-Identifier: Apache-2.0
"""What a load would take of DRAM, told before anything is held; and several loads at once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from unittest import mock

from tests.unit.store.rig import Rig, chain
from tierkv.keys import Chunk
from tierkv.store import tickets

MakeRig = Callable[..., Rig]


def told(rig: Rig, wanted: Sequence[Chunk], own: Sequence[Chunk] = ()) -> tuple[int, int, int]:
    """Reads, room, and most room."""
    demand = rig.store.demand(wanted, own)
    assert set(demand.missing) <= {chunk.key for chunk in wanted}
    return demand.reads, demand.room, demand.most


def test_what_is_leased_or_wanted_itself_is_no_room(make_rig: MakeRig) -> None:
    rig, here, there = make_rig(slots=10), chain(5), chain(4, "b")
    assert told(rig, there) == (4, 10, 10)
    rig.saved(here)
    rig.pump()
    # Five are free, five can be evicted.
    assert told(rig, there) == (4, 10, 10)
    assert told(rig, [*there, *here[:2], *there]) == (4, 8, 8)
    ticket = rig.load(here[:3])
    assert told(rig, there) == (4, 7, 10)
    assert told(rig, [*there, *here]) == (4, 5, 5)
    # What the caller keeps is not given up by anybody else.
    assert told(rig, there, here[:3]) == (4, 7, 7)
    assert told(rig, [*there, here[0]], here[:3]) == (4, 7, 7)
    assert rig.index.leased == 3
    ticket.release()


def test_what_is_pinned_is_no_room_and_counts_once(make_rig: MakeRig) -> None:
    rig, here, there = make_rig(slots=10), chain(6), chain(4, "b")
    rig.saved(here)
    rig.pump()
    assert rig.store.pin([chunk.key for chunk in here[:4]]) == 4
    assert told(rig, there) == (4, 6, 6)
    assert told(rig, [*there, *here[2:]]) == (4, 4, 4)
    assert told(rig, there, here[3:5]) == (4, 6, 5)
    ticket = rig.load(here[5:])
    assert told(rig, there) == (4, 5, 6)
    ticket.release()
    rig.store.unpin(None)


def test_what_is_being_read_already_needs_no_slot(make_rig: MakeRig) -> None:
    rig, chunks = make_rig(slots=6), chain(4)
    rig.disk.give(*chunks)
    rig.disk.script.hold = True
    first = rig.store.load(chunks[:3])
    assert told(rig, chunks) == (1, 3, 6)
    assert rig.store.demand(chunks).missing == (chunks[3].key,)
    rig.pump()
    rig.end_calls()
    rig.disk.script.hold = False
    assert rig.settled(first).ready == 3
    first.release()


def test_loads_at_once_do_not_evict_what_the_others_want(make_rig: MakeRig) -> None:
    rig, here, there = make_rig(slots=8, policy="lru"), chain(4), chain(4, "b")
    rig.saved(here)
    rig.saved(chain(4, "c"))
    rig.pump()
    rig.disk.held.clear()
    rig.disk.give(*there)
    first, second = rig.store.load_all([there, here])
    assert [rig.settled(ticket).ready for ticket in (first, second)] == [4, 4]
    rig.verify(first, there)
    rig.verify(second, here)
    first.release()
    second.release()


def test_what_is_here_stays_for_a_run_that_takes_long_to_come_to_it(make_rig: MakeRig) -> None:
    rig, chunks = make_rig(slots=12, policy="lru"), chain(12)
    rig.saved(chunks[10:])
    rig.pump()
    rig.disk.held.clear()
    rig.disk.give(*chunks[:10])
    with mock.patch.object(tickets, "MAX_BEGUN", 2):
        (ticket,) = rig.store.load_all([chunks])
        assert rig.settled(ticket).ready == 12
    rig.verify(ticket, chunks)
    ticket.release()
    assert rig.index.leased == 0


def test_what_a_load_has_yet_to_take_is_told(make_rig: MakeRig) -> None:
    rig, chunks = make_rig(slots=200), chain(150)
    rig.disk.give(*chunks)
    ticket = rig.store.load(chunks)
    assert ticket.unclaimed == 86  # it begins 64 reads at once
    rig.settled(ticket)
    assert (ticket.ready, ticket.unclaimed) == (150, 0)
    ticket.release()
    none = rig.load(chain(3, "b"))
    assert none.unclaimed == 0
    none.release()
