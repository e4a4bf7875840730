# SPDX-License-Identifier: Apache-2.0
"""Loads: runs over DRAM and lower tiers, shared reads, deadlines, failures, attribution."""

from __future__ import annotations

import logging
from collections.abc import Callable

import pytest

from tests.unit.store.rig import Rig, chain
from tierkv.errors import ErrorKind
from tierkv.store.breaker import State
from tierkv.store.lower import MAX_LATE
from tierkv.store.runs import MAX_AWAITED, MAX_BEGUN
from tierkv.tiers.base import Outcome, Presence, Result

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


def test_what_is_ready_at_the_deadline_counts_and_the_rest_becomes_a_hit_for_later(
    make_rig: MakeRig,
) -> None:
    rig, chunks = make_rig(tiers={"disk": {"load_deadline": 2.0}}), chain(3)
    rig.disk.give(*chunks)
    rig.disk.script.hold = True
    ticket = rig.store.load(chunks)
    rig.pump()
    next(c for c in rig.disk.script.calls if c.chunk is chunks[0]).end()
    rig.pump()
    rig.clock.now += 1.999
    rig.store.poll()
    assert not ticket.poll()
    rig.clock.now += 0.001
    rig.store.poll()
    assert ticket.poll()
    assert (ticket.ready, ticket.rest) == (1, "late")
    ticket.release()
    rig.end_calls()
    later = rig.store.load(chunks)
    assert later.poll()
    assert (later.ready, later.rest) == (3, "")
    rig.verify(later, chunks)
    later.release()


def test_a_read_that_hangs_keeps_its_slot_and_one_that_waits_gives_it_back(
    make_rig: MakeRig,
) -> None:
    rig, chunks = make_rig(tiers={"disk": {"io_threads": 1}}), chain(3)
    rig.disk.give(*chunks)
    rig.disk.script.hold = True
    ticket = rig.store.load(chunks)
    rig.pump()
    assert rig.index.filling == 3
    rig.clock.now += 2.0
    rig.store.poll()
    assert ticket.poll()
    assert ticket.rest == "late"
    assert rig.index.filling == 1  # the tier may still write into that one
    assert rig.counted("tierkv_errors_total", tier="disk", kind="timeout") == 3
    rig.end_calls(EIO)
    assert rig.index.filling == 0
    # What ran out of time has been counted, whatever it says in the end.
    assert rig.counted("tierkv_errors_total", tier="disk", kind="timeout") == 3
    assert rig.counted("tierkv_errors_total", tier="disk", kind="eio") == 0
    ticket.release()


def test_a_tier_that_is_slow_but_works_is_late_and_not_at_fault(make_rig: MakeRig) -> None:
    options = {"io_threads": 1, "load_deadline": 2.0, "breaker_failures": 1}
    rig, chunks = make_rig(slots=16, tiers={"disk": options}), chain(10)
    rig.disk.give(*chunks)
    rig.disk.script.hold = True
    ticket = rig.store.load(chunks)
    rig.pump()
    for _ in range(4):  # half a second each
        rig.clock.now += 0.5
        rig.end_calls()
    assert ticket.poll()
    assert (ticket.ready, ticket.rest) == (4, "late")
    assert rig.index.filling == 1  # those that waited were dropped
    rig.clock.now += 1.9
    rig.store.poll()
    assert rig.lower.breaker.state is State.CLOSED
    assert rig.counted("tierkv_errors_total", tier="disk", kind="timeout") == 0
    rig.clock.now += 0.1  # the one that runs has had its two seconds
    rig.store.poll()
    rig.store.poll()
    assert rig.lower.breaker.state is State.OPEN
    assert rig.counted("tierkv_errors_total", tier="disk", kind="timeout") == 1
    ticket.release()


def test_reads_that_wait_in_vain_are_given_up_in_portions(make_rig: MakeRig) -> None:
    options = {"io_threads": 1, "load_deadline": 2.0}
    rig, chunks = make_rig(slots=400, tiers={"disk": options}), chain(2 * MAX_LATE)
    rig.disk.give(*chunks)
    rig.disk.script.hold = True
    ticket = rig.store.load(chunks)
    rig.pump()
    ticket.poll()
    assert rig.index.filling == 2 * MAX_LATE
    rig.clock.now += 2.0
    left = []
    for _ in range(3):
        rig.store.poll()
        left.append(rig.index.filling)
    assert left == [MAX_LATE + 1, 1, 1]  # the one that runs keeps its slot, and is told of once
    assert rig.counted("tierkv_errors_total", tier="disk", kind="timeout") == 2 * MAX_LATE
    ticket.release()


def test_a_failed_read_ends_the_run_and_is_not_tried_again_for_a_while(make_rig: MakeRig) -> None:
    rig, chunks = make_rig(), chain(3)
    rig.disk.give(*chunks)
    rig.disk.script.hold = True
    ticket = rig.store.load(chunks)
    rig.pump()
    next(c for c in rig.disk.script.calls if c.chunk is chunks[1]).end(EIO)
    rig.end_calls()
    assert ticket.poll()
    assert (ticket.ready, ticket.rest) == (1, "failed")
    rig.verify(ticket, chunks)
    assert rig.counted("tierkv_errors_total", tier="disk", kind="eio") == 1
    ticket.release()
    rig.disk.script.hold = False
    before = rig.disk.count("load")
    for _ in range(20):
        again = rig.load(chunks)
        assert (again.ready, again.rest) == (1, "miss")
        again.release()
    assert rig.disk.count("load") == before
    rig.clock.now += 5
    again = rig.load(chunks)
    assert (again.ready, again.rest) == (3, "")
    again.release()


def test_a_tier_that_promises_and_does_not_deliver_is_not_asked_on_and_on(
    make_rig: MakeRig,
) -> None:
    rig, chunks = make_rig(), chain(1)
    rig.disk.promised.add(chunks[0].key)
    for _ in range(50):
        ticket = rig.load(chunks)
        assert (ticket.ready, ticket.rest) == (0, "miss")
        ticket.release()
    assert rig.disk.count("load") == 1


def test_a_chunk_that_one_tier_failed_on_is_read_from_the_next(make_rig: MakeRig) -> None:
    rig, chunks = make_rig(tiers={"disk": {}, "tape": {}}), chain(1)
    rig.tiers["disk"].give(*chunks)
    rig.tiers["tape"].give(*chunks)
    rig.tiers["disk"].script.load = EIO
    first = rig.load(chunks)
    assert first.rest == "failed"
    second = rig.load(chunks)
    assert (second.ready, second.sources) == (1, ["tape"])
    first.release()
    second.release()


def test_a_tier_that_raises_fails_that_read_only(
    make_rig: MakeRig, caplog: pytest.LogCaptureFixture
) -> None:
    rig, chunks = make_rig(), chain(3)
    rig.disk.give(*chunks)
    rig.disk.script.hold = True
    ticket = rig.store.load(chunks)
    rig.pump()
    next(c for c in rig.disk.script.calls if c.chunk is chunks[2]).end(ZeroDivisionError("a bug"))
    rig.end_calls()
    assert ticket.poll()
    assert (ticket.ready, ticket.rest) == (2, "failed")
    assert rig.counted("tierkv_errors_total", tier="disk", kind="worker") == 1
    assert [r.levelname for r in caplog.records if "a bug" in (r.exc_text or "")] == ["ERROR"]
    ticket.release()


@pytest.mark.parametrize("nonsense", ["done", 7, object()])
def test_a_tier_that_answers_nonsense_fails_that_read(make_rig: MakeRig, nonsense: object) -> None:
    rig, chunks = make_rig(), chain(1)
    rig.disk.give(*chunks)
    rig.disk.script.load = nonsense  # type: ignore[assignment]
    ticket = rig.load(chunks)
    assert (ticket.ready, ticket.rest) == (0, "failed")
    ticket.release()


def test_a_lookup_that_raises_is_a_miss(make_rig: MakeRig) -> None:
    rig, chunks = make_rig(), chain(2)
    rig.disk.give(*chunks)
    rig.disk.script.lookup = RuntimeError("a bug")
    ticket = rig.load(chunks)
    assert (ticket.ready, ticket.rest) == (0, "miss")
    assert rig.counted("tierkv_errors_total", tier="disk", kind="worker") >= 1
    ticket.release()


def test_the_same_failure_is_logged_once_in_ten_seconds(
    make_rig: MakeRig, caplog: pytest.LogCaptureFixture
) -> None:
    rig, chunks = make_rig(tiers={"disk": {"breaker_failures": 1000}}, slots=64), chain(50)
    rig.disk.give(*chunks)
    rig.disk.script.load = EIO

    def lines() -> int:
        return sum("load failed (eio)" in record.getMessage() for record in caplog.records)

    with caplog.at_level(logging.WARNING):
        for chunk in chunks[:40]:
            rig.load([chunk]).release()
        assert lines() == 1
        rig.clock.now += 10
        rig.load([chunks[40]]).release()
        assert lines() == 2
    assert rig.counted("tierkv_errors_total", tier="disk", kind="eio") == 41


def test_after_failures_in_a_row_the_tier_is_unavailable_until_a_probe_succeeds(
    make_rig: MakeRig,
) -> None:
    options = {"breaker_failures": 3, "probe_after": 5.0}
    rig, chunks = make_rig(tiers={"disk": options}, slots=32), chain(20)
    rig.disk.give(*chunks)
    rig.disk.script.load = EIO
    for chunk in chunks[:3]:
        assert rig.load([chunk]).rest == "failed"
    asked = rig.disk.count("load")
    unavailable = rig.load(chunks[5:])
    assert (unavailable.ready, unavailable.rest) == (0, "unavailable")
    assert rig.disk.count("load") == asked
    rig.clock.now += 5
    rig.disk.script.load = None
    probe = rig.load(chunks[5:])  # one chunk probes; the others are not risked
    assert (probe.ready, probe.rest) == (1, "unavailable")
    assert rig.disk.count("load") == asked + 1
    healed = rig.load(chunks[5:])
    assert (healed.ready, healed.rest) == (15, "")
    rig.verify(healed, chunks[5:])
    for ticket in (unavailable, probe, healed):
        ticket.release()


def open_breaker(rig: Rig) -> None:
    """By one failed read; then wait until a probe is due."""
    rig.disk.script.load = EIO
    rig.disk.promised.update(chunk.key for chunk in chain(1, "bad"))
    assert rig.load(chain(1, "bad")).rest == "failed"
    rig.disk.script.load = None
    assert not rig.lower.breaker.would_allow()
    rig.clock.now += 5
    assert rig.lower.breaker.would_allow()


@pytest.mark.parametrize("how", ["read", "write"])
def test_a_probe_that_is_thrown_away_before_it_ran_is_made_later(
    make_rig: MakeRig, how: str
) -> None:
    rig, chunks = make_rig(tiers={"disk": {"breaker_failures": 1, "probe_after": 5.0}}), chain(2)
    open_breaker(rig)
    if how == "read":
        rig.disk.give(*chunks)
        rig.store.prefetch(chunks)
    else:
        rig.saved(chunks)
    assert rig.lower.breaker.state is State.HALF_OPEN
    rig.store.reset()
    assert rig.lower.breaker.would_allow()


def test_a_probe_for_which_there_is_no_slot_is_made_later(make_rig: MakeRig) -> None:
    options = {"breaker_failures": 1, "probe_after": 5.0}
    rig, chunks = make_rig(slots=4, tiers={"disk": options}), chain(2)
    open_breaker(rig)
    holder = chain(4, "b")
    given = rig.store.save(holder)  # takes every slot
    rig.disk.give(*chunks)
    ticket = rig.store.load(chunks)
    assert not ticket.poll()
    assert rig.lower.breaker.would_allow()
    rig.store.abandon([slot for _, slot in given], 0)
    rig.settled(ticket)
    assert ticket.ready >= 1
    ticket.release()


def test_checksum_failures_do_not_shut_a_tier_out(make_rig: MakeRig) -> None:
    rig, chunks = make_rig(tiers={"disk": {"breaker_failures": 1}}, slots=32), chain(20)
    rig.disk.give(*chunks)
    rig.disk.script.load = Result(Outcome.FAILED, ErrorKind.CHECKSUM)
    for chunk in chunks[:10]:
        assert rig.load([chunk]).rest == "failed"
    rig.disk.script.load = None
    ticket = rig.load(chunks[10:])
    assert ticket.ready == 10
    ticket.release()


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


def test_keys_that_only_the_other_side_knows_are_probed_in_one_go(make_rig: MakeRig) -> None:
    rig, chunks = make_rig(), chain(4)
    rig.disk.give(*chunks[:3])
    rig.disk.script.probed = False
    rig.disk.script.hold = True
    ticket = rig.store.load(chunks)
    rig.pump()
    assert not ticket.poll()
    assert rig.disk.script.log == [("probe", *(chunk.key for chunk in chunks))]
    rig.disk.script.hold = False
    rig.end_calls()
    rig.settled(ticket)
    assert (ticket.ready, ticket.rest) == (3, "miss")
    assert rig.disk.count("probe") == 1
    rig.verify(ticket, chunks)
    ticket.release()


def test_a_tier_whose_probes_fail_is_unavailable_and_left_alone(make_rig: MakeRig) -> None:
    options = {"breaker_failures": 3, "probe_after": 5.0}
    rig, chunks = make_rig(tiers={"disk": options}), chain(4)
    rig.disk.give(*chunks)
    rig.disk.script.probed = rig.disk.script.probe_tells = False
    for _ in range(10):
        ticket = rig.load(chunks)
        assert (ticket.ready, ticket.rest) == (0, "unavailable")
    assert rig.disk.count("probe") == 3
    rig.disk.script.probe_tells = True
    rig.clock.now += 5
    ticket = rig.load(chunks)
    assert ticket.ready == 4
    assert rig.disk.count("probe") == 4
    ticket.release()


def test_a_probe_that_raises_is_a_failure_of_the_tier(
    make_rig: MakeRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig, chunks = make_rig(tiers={"disk": {"breaker_failures": 1}}), chain(1)
    rig.disk.script.probed = False

    async def raises(keys: object) -> None:
        raise OSError("a bug")

    monkeypatch.setattr(rig.disk, "probe", raises)
    assert rig.load(chunks).rest == "unavailable"
    assert rig.counted("tierkv_errors_total", tier="disk", kind="worker") == 1
    assert rig.lower.breaker.state is State.OPEN


def test_probes_are_bounded_while_the_tier_does_not_answer(make_rig: MakeRig) -> None:
    rig = make_rig()
    rig.disk.script.probed = False
    rig.disk.script.hold = True
    tickets = [rig.store.load(chain(1, f"{n}")) for n in range(100)]
    rig.pump()
    assert rig.disk.count("probe") == 64
    assert [ticket.poll() for ticket in tickets] == [False] * 64 + [True] * 36


def test_a_probe_that_hangs_makes_the_load_late(make_rig: MakeRig) -> None:
    rig, chunks = make_rig(), chain(2)
    rig.disk.script.probed = False
    rig.disk.script.hold = True
    ticket = rig.store.load(chunks)
    rig.pump()
    rig.clock.now += 2.0
    assert ticket.poll()
    assert (ticket.ready, ticket.rest) == (0, "late")
    rig.store.poll()
    assert rig.counted("tierkv_errors_total", tier="disk", kind="timeout") == 1
    rig.end_calls()
    assert rig.counted("tierkv_errors_total", tier="disk", kind="timeout") == 1


def test_reading_ahead_probes_so_that_the_load_knows(make_rig: MakeRig) -> None:
    rig, chunks = make_rig(slots=16), chain(2)
    rig.disk.give(*chunks)
    rig.disk.script.probed = False
    rig.store.prefetch(chunks)
    rig.pump()
    ticket = rig.load(chunks)
    assert ticket.ready == 2
    assert rig.disk.count("probe") == 1
    ticket.release()


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


def test_presence_unavailable_counts_as_unavailable(make_rig: MakeRig) -> None:
    rig, chunks = make_rig(), chain(1)
    rig.disk.give(*chunks)
    rig.disk.script.lookup = Presence.HIT
    rig.io.alive = False  # the loop died
    ticket = rig.store.load(chunks)
    assert ticket.poll()
    assert (ticket.ready, ticket.rest) == (0, "unavailable")
    name = "tierkv_lookup_chunks_total"
    assert rig.counted(name, tier="disk", result="unavailable") == 1
