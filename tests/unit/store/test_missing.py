# SPDX-License-Identifier: Apache-2.0
"""What the Store says about what it does not deliver, and what it keeps by a user's wish."""

from __future__ import annotations

from collections.abc import Callable

from tests.unit.store.rig import Rig, chain
from tierkv.errors import ErrorKind
from tierkv.tiers.base import Outcome, Result

MakeRig = Callable[..., Rig]


def reasons(rig: Rig, chunks: list) -> list[tuple[str, str]]:  # type: ignore[type-arg]
    return rig.store.why_missing(chunks)


def test_a_chunk_that_dram_gave_up_was_evicted_and_a_longer_chains_end_never_seen(
    make_rig: MakeRig,
) -> None:
    rig, chunks = make_rig(slots=4, tiers={}), chain(3)
    rig.saved(chunks[:2])
    rig.saved(chain(4, "b"))
    assert reasons(rig, chunks) == [
        ("evicted", "dram"),
        ("evicted", "dram"),
        ("never_seen", "none"),
    ]


def test_what_is_there_behind_a_gap_counts_with_the_gap(make_rig: MakeRig) -> None:
    rig, chunks = make_rig(slots=8, tiers={}), chain(3)
    rig.saved(chunks)
    rig.store.forget([chunks[0].key])
    assert reasons(rig, chunks) == [("invalid", "none")] * 3


def test_a_chunk_that_is_just_being_saved_says_so(make_rig: MakeRig) -> None:
    rig, chunks = make_rig(tiers={}), chain(2)
    given = rig.store.save(chunks)
    ticket = rig.load(chunks)
    assert ticket.rest == "miss"
    assert reasons(rig, chunks) == [("saving", "none")] * 2
    rig.store.abandon([slot for _, slot in given], rig.store.generation)
    ticket.release()


def test_a_tier_that_loses_what_it_was_given_evicted_it(make_rig: MakeRig) -> None:
    rig, chunks = make_rig(slots=4), chain(2)
    rig.saved(chunks)
    rig.pump()
    rig.saved(chain(4, "b"))
    rig.pump()
    assert rig.disk.held.pop(chunks[0].key)
    assert reasons(rig, chunks) == [("evicted", "disk"), ("evicted", "disk")]


def test_damaged_bytes_are_told_once_as_the_error_and_then_as_invalid(make_rig: MakeRig) -> None:
    rig, chunks = make_rig(), chain(2)
    rig.disk.give(*chunks)
    rig.disk.script.load = Result(Outcome.FAILED, ErrorKind.CHECKSUM)
    ticket = rig.load(chunks)
    assert (ticket.rest, ticket.blame, ticket.error) == ("failed", "disk", "checksum")
    again = rig.load(chunks)
    assert (again.rest, again.blame) == ("miss", "none")
    assert reasons(rig, chunks)[0] == ("invalid", "none")


def test_a_ticket_names_the_tier_that_was_late_down_or_too_slow(make_rig: MakeRig) -> None:
    rig, chunks = make_rig(), chain(2)
    rig.disk.give(*chunks)
    rig.disk.script.hold = True
    late = rig.store.load(chunks)
    rig.pump()
    rig.clock.now += 2.0
    rig.pump()
    assert late.poll()
    assert (late.rest, late.blame) == ("late", "disk")
    late.release()
    rig.end_calls()
    rig.disk.script.hold = False

    other = chain(2, "other")
    rig.disk.give(*other)
    for _ in range(5):
        rig.lower.breaker.failure(rig.lower.breaker.allow(), ErrorKind.EIO)
    down = rig.load(other)
    assert (down.rest, down.blame) == ("unavailable", "disk")
    down.release()
    rig.clock.now += 60

    rig.store._cost.worth = lambda tier, count: False  # type: ignore[method-assign]
    slow = rig.load(other)
    assert (slow.rest, slow.blame) == ("skipped", "disk")
    slow.release()


def test_pinned_chunks_are_not_evicted_and_leave_half_of_the_pool(make_rig: MakeRig) -> None:
    rig, chunks = make_rig(slots=8, tiers={}), chain(6)
    keys = [chunk.key for chunk in chunks]
    rig.saved(chunks)
    assert rig.store.pin(keys) == 4  # half of eight slots
    assert rig.store.pin(keys) == 4
    assert rig.counted("tierkv_leased_slots") == 0
    rig.store.refresh_gauges()
    assert rig.counted("tierkv_leased_slots") == 0
    assert rig.counted("tierkv_pinned_slots") == 4
    for name in "bcde":
        rig.saved(chain(4, name))
    assert rig.store.held(keys) == {"dram": 4}
    assert rig.store.unpin(keys[:1]) == 1
    assert rig.store.unpin(None) == 3
    rig.saved(chain(8, "f"))
    assert rig.store.held(keys) == {"dram": 0}
    rig.nothing_is_left()


def test_a_pinned_chunk_that_is_purged_or_reset_leaves_its_slot(make_rig: MakeRig) -> None:
    rig, chunks = make_rig(slots=8), chain(4)
    keys = [chunk.key for chunk in chunks]
    rig.saved(chunks)
    rig.pump()
    assert rig.store.pin(None) == 4
    assert rig.store.held(None) == {"dram": 4, "disk": 4}
    rig.store.forget(keys[2:])
    rig.pump()
    assert rig.store.held(keys) == {"dram": 2, "disk": 2}
    rig.store.reset()
    rig.pump()
    assert rig.store.held(None) == {"dram": 0, "disk": 0}
    rig.nothing_is_left()
    assert rig.store.pin(keys) == 0


def test_a_write_that_ends_after_a_purge_does_not_make_its_chunk_an_evicted_one(
    make_rig: MakeRig,
) -> None:
    rig, chunks = make_rig(), chain(2)
    rig.disk.script.hold = True
    rig.saved(chunks)
    rig.pump()  # a write is under way
    rig.store.forget([chunk.key for chunk in chunks])
    rig.end_calls()
    rig.disk.script.hold = False
    rig.pump()
    assert reasons(rig, chunks) == [("invalid", "none")] * 2
