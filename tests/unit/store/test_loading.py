# SPDX-License-Identifier: Apache-2.0
"""Loads: runs over DRAM and lower tiers, shared reads, reading ahead, attribution."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.unit.store.rig import Rig, chain
from tierkv.errors import ErrorKind
from tierkv.store.runs import MAX_AWAITED, MAX_BEGUN
from tierkv.tiers.base import Outcome, Result

MakeRig = Callable[..., Rig]
EIO = Result(Outcome.FAILED, ErrorKind.EIO)


def test_a_chain_in_dram_is_ready_at_once_and_ends_where_it_ends(make_rig: MakeRig) -> None:
    rig, chunks = make_rig(), chain(6)
    rig.saved(chunks[:4])
    ticket = rig.store.load(chunks)
    assert ticket.poll()
    assert (ticket.ready, ticket.rest) == (4, "miss")
    assert ticket.sources == ["dram"] * 4
    rig.verify(ticket, chunks)
    whole = rig.store.load(chunks[:4])
    assert whole.poll()
    assert (whole.ready, whole.rest) == (4, "")
    ticket.release()
    whole.release()


def test_nothing_wanted_is_nothing_missing(make_rig: MakeRig) -> None:
    ticket = make_rig().store.load([])
    assert ticket.poll()
    assert (ticket.ready, ticket.rest) == (0, "")


def test_a_run_goes_on_over_dram_and_lower_tiers_and_ends_at_the_first_gap(
    make_rig: MakeRig,
) -> None:
    rig, chunks = make_rig(tiers={"disk": {}, "tape": {}}), chain(7)
    rig.saved([chunks[0]])
    rig.saved([chunks[3]])
    for tier in rig.tiers.values():
        tier.held.clear()
    rig.tiers["disk"].give(chunks[1], chunks[4])
    rig.tiers["tape"].give(chunks[2], chunks[4], chunks[6])
    ticket = rig.load(chunks)
    assert (ticket.ready, ticket.rest) == (5, "miss")
    assert ticket.sources == ["dram", "disk", "tape", "dram", "disk"]
    rig.verify(ticket, chunks)
    ticket.release()


def test_many_tickets_share_one_read_and_each_owns_a_lease(make_rig: MakeRig) -> None:
    rig, chunks = make_rig(), chain(2)
    rig.disk.give(*chunks)
    rig.disk.script.hold = True
    tickets = [rig.store.load(chunks) for _ in range(3)]
    rig.pump()
    assert not any(ticket.poll() for ticket in tickets)
    assert rig.disk.count("load") == 2
    tickets[1].release()
    rig.end_calls()
    for ticket in (tickets[0], tickets[2]):
        assert ticket.poll()
        assert (ticket.ready, ticket.sources) == (2, ["disk", "disk"])
        rig.verify(ticket, chunks)
    slot = tickets[0].slots[0]
    assert rig.index.leases(slot) == 2
    tickets[0].release()
    tickets[0].release()
    assert rig.index.leases(slot) == 1
    tickets[2].release()


def test_chunks_become_ready_in_order_of_the_chain_whatever_comes_first(make_rig: MakeRig) -> None:
    rig, chunks = make_rig(), chain(3)
    rig.disk.give(*chunks)
    rig.disk.script.hold = True
    ticket = rig.store.load(chunks)
    rig.pump()
    calls = {call.chunk.key: call for call in rig.disk.script.calls}
    calls[chunks[2].key].end()
    calls[chunks[1].key].end()
    rig.pump()
    assert not ticket.poll()
    assert ticket.ready == 0
    calls[chunks[0].key].end()
    rig.pump()
    assert ticket.poll()
    rig.verify(ticket, chunks)
    ticket.release()


def test_a_chunk_that_workers_are_saving_is_a_miss_until_it_is_committed(make_rig: MakeRig) -> None:
    rig, chunks = make_rig(), chain(2)
    given = rig.store.save(chunks)
    ticket = rig.store.load(chunks)
    assert ticket.poll()
    assert (ticket.ready, ticket.rest) == (0, "miss")
    rig.store.abandon([slot for _, slot in given], 0)


def test_a_hit_that_is_slower_than_recomputing_is_skipped(make_rig: MakeRig) -> None:
    rig, chunks = make_rig(slots=64), chain(40)
    rig.disk.give(*chunks)
    rig.disk.script.hold = True
    for chunk in chunks[:8]:
        ticket = rig.store.load([chunk])
        rig.pump()
        rig.clock.now += 1.0  # a second each
        rig.end_calls()
        assert ticket.poll()
        assert ticket.ready == 1
        ticket.release()
        rig.store.observe_prefill(2, 0.5)  # half a second a chunk
    ticket = rig.store.load(chunks[6:])
    assert ticket.poll()
    assert (ticket.ready, ticket.rest) == (2, "skipped")  # what is in DRAM costs nothing
    for _ in range(100):  # nor is it read ahead
        rig.store.prefetch(chunks[8:])
    rig.pump()
    assert rig.disk.count("load") == 8
    ticket.release()


def test_a_chunk_read_ahead_counts_once_for_the_tier_it_came_from(make_rig: MakeRig) -> None:
    rig, chunks = make_rig(slots=16), chain(4)
    rig.disk.give(*chunks)
    rig.store.prefetch(chunks)
    rig.pump()
    assert rig.index.leased == 0
    assert rig.disk.count("load") == 4
    first, second = rig.load(chunks), rig.load(chunks)
    assert rig.disk.count("load") == 4
    assert first.sources == ["disk"] * 4
    assert second.sources == ["dram"] * 4
    rig.verify(first, chunks)
    first.release()
    second.release()
    assert rig.counted("tierkv_moves_total", source="disk", target="dram", reason="prefetch") == 4


def test_an_attribution_does_not_outlive_the_chunk(make_rig: MakeRig) -> None:
    rig, chunks = make_rig(slots=4, tiers={"disk": {"write": "on_reuse"}}), chain(4)
    others = chain(4, "b")
    rig.disk.give(chunks[0])
    rig.store.prefetch(chunks[:1])
    rig.pump()
    rig.saved(others)  # takes all four slots
    ticket = rig.load(others)
    assert ticket.sources == ["dram"] * 4
    ticket.release()
    rig.store.poll()  # which offers them to the disk


def test_reading_ahead_takes_at_most_a_quarter_of_the_pool(make_rig: MakeRig) -> None:
    rig, chunks, others = make_rig(slots=16), chain(10), chain(10, "b")
    rig.disk.give(*chunks, *others)
    rig.disk.script.hold = True
    rig.store.prefetch(chunks)
    rig.store.prefetch(others)
    assert rig.index.filling == 4
    rig.end_calls()
    rig.store.prefetch(others)
    assert rig.index.filling == 4
    ticket = rig.store.load(chunks)  # a load takes what it needs
    assert rig.index.filling == 10
    rig.pump()
    rig.end_calls()
    rig.end_calls()
    assert ticket.poll()
    assert ticket.ready == 10
    ticket.release()


def test_reading_ahead_does_not_evict_the_beginning_of_the_same_chain(make_rig: MakeRig) -> None:
    rig, chunks = make_rig(slots=4), chain(5)
    rig.saved(chunks[:4])  # full, and the oldest slots are these
    rig.disk.give(*chunks)
    rig.store.prefetch(chunks)
    rig.pump()
    ticket = rig.store.load(chunks[:4])
    assert ticket.poll()
    assert ticket.ready == 4
    ticket.release()


def test_a_load_evicts_others_but_not_itself(make_rig: MakeRig) -> None:
    rig, chunks, others = make_rig(slots=6), chain(6), chain(4, "b")
    rig.saved(chunks[:2])
    rig.saved(others)
    rig.disk.give(*chunks)
    ticket = rig.load(chunks)
    assert (ticket.ready, ticket.rest) == (6, "")
    rig.verify(ticket, chunks)
    assert rig.counted("tierkv_evictions_total", tier="dram", reason="capacity") == 4
    ticket.release()


def test_with_all_slots_leased_a_load_is_late_and_nothing_locks_up(make_rig: MakeRig) -> None:
    rig, chunks, others = make_rig(slots=4), chain(4), chain(2, "b")
    rig.saved(chunks)
    rig.pump()
    holder = rig.load(chunks)
    rig.disk.give(*others)
    blocked = rig.store.load(others)
    assert not blocked.poll()
    assert rig.store.save(chain(1, "c")) == []
    rig.clock.now += 1.0
    assert not blocked.poll()
    rig.clock.now += 1.0
    assert blocked.poll()
    assert (blocked.ready, blocked.rest) == (0, "late")
    waiting = rig.store.load(others)
    assert not waiting.poll()
    holder.release()  # room in time
    assert rig.settled(waiting).ready == 2
    rig.verify(waiting, others)
    blocked.release()
    waiting.release()
    assert rig.counted("tierkv_saves_dropped_total", tier="dram", reason="no_slot") == 1


def test_a_chain_longer_than_the_pool_fills_it_and_does_not_wait_for_more(
    make_rig: MakeRig,
) -> None:
    rig, chunks = make_rig(slots=4), chain(9)
    rig.disk.give(*chunks)
    ticket = rig.load(chunks)
    assert (ticket.ready, ticket.rest) == (4, "late")
    rig.verify(ticket, chunks)
    ticket.release()


def test_a_very_long_run_is_read_in_portions(make_rig: MakeRig) -> None:
    count = 3 * MAX_AWAITED
    rig, chunks = make_rig(slots=count + 8), chain(count)
    rig.disk.give(*chunks)
    ticket = rig.store.load(chunks)
    assert rig.index.filling == MAX_BEGUN
    rig.disk.script.hold = True
    for _ in range(4):
        rig.io.pump()
        ticket.poll()
        assert rig.index.filling == MAX_AWAITED
    rig.disk.script.hold = False
    rig.end_calls()
    rig.settled(ticket)
    assert (ticket.ready, ticket.rest) == (count, "")
    rig.verify(ticket, chunks)
    ticket.release()
    # Its leaves go first, although they were read last.
    assert rig.index.forecast(3) == [ticket.slots[-1], ticket.slots[-2], ticket.slots[-3]]


def test_truncating_keeps_the_first_leases_only(make_rig: MakeRig) -> None:
    rig, chunks = make_rig(), chain(5)
    rig.saved(chunks)
    rig.pump()
    ticket = rig.load(chunks)
    slots = list(ticket.slots)
    ticket.truncate(7)
    assert ticket.ready == 5
    ticket.truncate(2)
    assert (ticket.ready, ticket.slots, ticket.sources) == (2, slots[:2], ["dram"] * 2)
    assert [rig.index.leases(slot) for slot in slots] == [1, 1, 0, 0, 0]
    ticket.release()
    ticket.truncate(0)
    assert rig.index.leased == 0


def test_a_ticket_may_be_released_while_it_waits(make_rig: MakeRig) -> None:
    rig, chunks = make_rig(), chain(4)
    rig.saved(chunks[:1])
    rig.pump()
    rig.disk.give(*chunks)
    rig.disk.script.hold = True
    ticket = rig.store.load(chunks)
    rig.pump()
    ticket.release()
    assert rig.index.leased == 0
    rig.end_calls()
    assert rig.index.ready == 4  # the reads went on
    assert ticket.poll()


def test_lookups_are_counted_once_by_what_each_tier_said(make_rig: MakeRig) -> None:
    rig, chunks = make_rig(slots=16, tiers={"disk": {}, "tape": {}}), chain(9)
    rig.saved(chunks[:2])
    for tier in rig.tiers.values():
        tier.held.clear()
    rig.tiers["disk"].give(*chunks[2:4])
    rig.tiers["tape"].give(*chunks[4:7])
    ticket = rig.store.load(chunks)
    for _ in range(5):
        rig.pump()
        ticket.poll()
    name = "tierkv_lookup_chunks_total"
    assert rig.counted(name, tier="dram", result="hit") == 2
    assert rig.counted(name, tier="dram", result="miss") == 6  # five were read, one is nowhere
    assert rig.counted(name, tier="disk", result="hit") == 2
    assert rig.counted(name, tier="tape", result="hit") == 3
    assert rig.counted(name, tier="disk", result="miss") == 1
    assert rig.counted(name, tier="tape", result="miss") == 1
    assert rig.counted(name, tier="dram", result="pending") == 0
    ticket.release()


def test_a_batch_of_reads_wakes_the_loop_once(
    make_rig: MakeRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig, chunks = make_rig(slots=64), chain(50)
    rig.disk.give(*chunks)
    calls: list[object] = []
    original = rig.io.call
    monkeypatch.setattr(rig.io, "call", lambda *args: (calls.append(args), original(*args)))
    ticket = rig.store.load(chunks)
    assert len(calls) == 1
    rig.settled(ticket)
    assert ticket.ready == 50
    ticket.release()


def test_no_more_reads_run_at_once_than_the_tier_has_threads(make_rig: MakeRig) -> None:
    rig, chunks = make_rig(slots=32, tiers={"disk": {"io_threads": 5}}), chain(20)
    rig.disk.give(*chunks)
    rig.disk.script.hold = True
    ticket = rig.store.load(chunks)
    rig.pump()
    running = []
    while rig.disk.script.calls:
        running.append(len(rig.disk.script.calls))
        rig.disk.script.calls[0].end()
        rig.pump()
    assert running == [5] * 16 + [4, 3, 2, 1]
    assert rig.settled(ticket).ready == 20
    ticket.release()
