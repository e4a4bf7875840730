# SPDX-License-Identifier: Apache-2.0
"""Loads that end badly: deadlines, failed reads, tiers that break their word, the breaker."""

from __future__ import annotations

import logging
from collections.abc import Callable

import pytest

from tests.unit.store.rig import Rig, chain
from tierkv.errors import ErrorKind
from tierkv.store.breaker import State
from tierkv.store.lower import MAX_LATE
from tierkv.tiers.base import Outcome, Result

MakeRig = Callable[..., Rig]
EIO = Result(Outcome.FAILED, ErrorKind.EIO)


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
