# SPDX-License-Identifier: Apache-2.0
"""Saves and write-behind: visible when complete, bounded, by each tier's policy."""

from __future__ import annotations

import logging
from collections.abc import Callable

import pytest

from tests.unit.store.rig import LAYOUT, Rig, chain
from tierkv.errors import ErrorKind
from tierkv.store.breaker import State
from tierkv.store.lower import MAX_DROPPED
from tierkv.store.reused import MAX_CHAINS, MAX_OFFERED
from tierkv.store.store import APPLY_SECONDS
from tierkv.tiers.base import Outcome, Result

MakeRig = Callable[..., Rig]


def dropped(rig: Rig, reason: str, tier: str = "disk") -> float:
    return rig.counted("tierkv_saves_dropped_total", tier=tier, reason=reason)


def test_a_chunk_is_visible_only_once_it_is_committed(make_rig: MakeRig) -> None:
    rig, chunks = make_rig(), chain(3)
    given = rig.store.save(chunks)
    assert [at for at, _ in given] == [0, 1, 2]
    assert rig.store.load(chunks).ready == 0
    for at, slot in given:
        rig.write(chunks[at], slot)
    rig.store.commit([slot for _, slot in given], rig.store.generation)
    ticket = rig.load(chunks)
    assert ticket.ready == 3
    rig.verify(ticket, chunks)
    ticket.release()


def test_what_dram_has_or_is_getting_is_not_saved_twice(make_rig: MakeRig) -> None:
    rig, chunks = make_rig(), chain(5)
    rig.saved(chunks[1:2])
    rig.disk.give(chunks[2])
    rig.disk.script.hold = True
    rig.store.prefetch(chunks[2:3])
    first = rig.store.save(chunks[:4])
    assert [at for at, _ in first] == [0, 3]
    assert [at for at, _ in rig.store.save(chunks)] == [4]
    for slot in list(rig.store._dram.saves):
        rig.store.abandon([slot], 0)


def test_an_abandoned_save_frees_its_slot_and_leaves_nothing(make_rig: MakeRig) -> None:
    rig, chunks = make_rig(slots=2), chain(2)
    given = rig.store.save(chunks)
    rig.store.abandon([slot for _, slot in given], rig.store.generation)
    assert rig.index.free == 2
    assert rig.store.load(chunks).ready == 0
    assert len(rig.store.save(chunks)) == 2
    rig.store.abandon([slot for _, slot in given], rig.store.generation)


def test_saving_stops_at_the_first_chunk_without_a_slot(make_rig: MakeRig) -> None:
    rig, chunks, others = make_rig(slots=4, tiers={}), chain(5), chain(2, "b")
    rig.saved(others)
    holder = rig.load(others)
    given = rig.store.save(chunks)
    assert [at for at, _ in given] == [0, 1]
    assert dropped(rig, "no_slot", "dram") == 3
    rig.store.abandon([slot for _, slot in given], 0)
    holder.release()


def test_children_do_not_evict_their_parents(make_rig: MakeRig) -> None:
    rig, chunks = make_rig(slots=4, tiers={}), chain(6)
    rig.saved(chunks[:3])
    given = rig.store.save(chunks)
    assert [at for at, _ in given] == [3]
    rig.store.abandon([slot for _, slot in given], 0)
    ticket = rig.load(chunks[:3])
    assert ticket.ready == 3
    ticket.release()


def test_full_dram_gives_up_the_leaves_of_the_oldest_chain(make_rig: MakeRig) -> None:
    rig, old, new = make_rig(slots=6, tiers={}), chain(6), chain(4, "b")
    rig.saved(old)
    rig.saved(new)
    ticket = rig.load(old)
    assert (ticket.ready, ticket.rest) == (2, "miss")
    ticket.release()
    assert rig.counted("tierkv_evictions_total", tier="dram", reason="capacity") == 4


def test_touching_a_chain_keeps_it(make_rig: MakeRig) -> None:
    rig, old, mid, new = make_rig(slots=6, tiers={}), chain(3), chain(3, "b"), chain(3, "c")
    rig.saved(old)
    rig.saved(mid)
    rig.store.touch(old)
    rig.saved(new)
    kept, gone = rig.load(old), rig.load(mid)
    assert (kept.ready, gone.ready) == (3, 0)
    kept.release()


def test_a_second_or_unknown_report_of_a_slot_is_ignored(
    make_rig: MakeRig, caplog: pytest.LogCaptureFixture
) -> None:
    rig, chunks = make_rig(), chain(2)
    rig.saved(chunks)
    with caplog.at_level(logging.WARNING):
        rig.store.commit([0, 1, 7], rig.store.generation)
        rig.store.abandon([0], rig.store.generation)
    assert len(caplog.records) == 4
    ticket = rig.load(chunks)
    assert ticket.ready == 2
    ticket.release()


def test_through_writes_what_is_committed_from_the_end_of_the_chain(make_rig: MakeRig) -> None:
    rig, chunks = make_rig(), chain(3)
    rig.saved(chunks)
    rig.pump()
    assert rig.disk.script.log == [("save", chunk.key) for chunk in reversed(chunks)]
    rig.disk.give()
    assert rig.index.leased == 0
    moves = {"source": "dram", "target": "disk", "reason": "through"}
    assert rig.counted("tierkv_moves_total", **moves) == 3
    assert rig.counted("tierkv_io_bytes_total", tier="disk", op="save") == 3 * LAYOUT.slot_bytes


def test_what_is_written_comes_back_as_it_was(make_rig: MakeRig) -> None:
    rig, chunks = make_rig(slots=8), chain(4)
    rig.saved(chunks)
    rig.pump()
    rig.saved(chain(8, "b"))
    ticket = rig.load(chunks)
    assert ticket.sources == ["disk"] * 4
    rig.verify(ticket, chunks)
    ticket.release()


def test_a_chunk_the_tier_has_or_is_getting_is_not_queued(make_rig: MakeRig) -> None:
    rig, chunks = make_rig(slots=16), chain(3)
    rig.disk.give(chunks[1])
    rig.disk.script.hold = True
    rig.saved(chunks)
    rig.pump()
    rig.lower.writer.offer(chunks, [rig.index.get(chunk.key) for chunk in chunks])
    rig.disk.script.hold = False
    rig.end_calls()
    rig.end_calls()
    assert rig.disk.count("save") == 2


def test_on_reuse_writes_a_chunk_when_it_is_hit_and_not_before(make_rig: MakeRig) -> None:
    rig, chunks = make_rig(tiers={"disk": {"write": "on_reuse"}}, slots=16), chain(4)
    rig.saved(chunks)
    rig.pump()
    assert rig.disk.count("save") == 0
    ticket = rig.load(chunks[:3])
    rig.store.poll()
    rig.pump()
    assert rig.disk.script.log == [("save", chunk.key) for chunk in reversed(chunks[:3])]
    ticket.release()
    rig.load(chunks[:3]).release()
    rig.store.poll()
    rig.pump()
    assert rig.disk.count("save") == 3
    moves = {"source": "dram", "target": "disk", "reason": "on_reuse"}
    assert rig.counted("tierkv_moves_total", **moves) == 3


def test_a_long_chain_that_is_reused_is_written_in_portions_and_whole(make_rig: MakeRig) -> None:
    count = 2 * MAX_OFFERED + 1
    rig = make_rig(slots=4 * count, tiers={"disk": {"write": "on_reuse"}})
    chunks, gone = chain(count), chain(3, "b")
    rig.saved(chunks + gone)
    rig.load(gone).release()
    rig.load(chunks).release()
    rig.store.forget([gone[1].key])
    assert rig.lower.writer.pending == {}
    rig.store.poll()
    assert rig.lower.writer.pending.keys() == {gone[0].key, gone[2].key}
    rig.store.poll()
    assert rig.lower.writer.pending.keys() >= {chunk.key for chunk in chunks[-MAX_OFFERED:]}
    assert len(rig.lower.writer.pending) == MAX_OFFERED + 2
    assert rig.store.drain()  # which does not wait for further polls
    rig.pump()
    assert rig.disk.held.keys() == {chunk.key for chunk in [*chunks, gone[0], gone[2]]}


def test_a_chain_that_is_half_written_is_written_whole_whatever_comes(make_rig: MakeRig) -> None:
    count = MAX_OFFERED + 1
    rig = make_rig(slots=4 * count, tiers={"disk": {"write": "on_reuse"}})
    chunks, other = chain(count), chain(1, "b")
    rig.saved(chunks + other)
    rig.load(chunks).release()
    rig.store.poll()
    for _ in range(MAX_CHAINS + 1):
        rig.load(other).release()
    assert rig.store.drain()
    assert rig.disk.held.keys() >= {chunk.key for chunk in chunks}


def test_what_was_finished_in_time_is_not_late_because_it_is_applied_late(
    make_rig: MakeRig,
) -> None:
    options = {"breaker_failures": 1, "load_deadline": 2.0, "save_deadline": 2.0}
    rig = make_rig(slots=16, tiers={"disk": options})
    chunks, saved = chain(4), chain(4, "b")
    rig.disk.give(*chunks)
    ticket = rig.store.load(chunks)
    rig.saved(saved)
    rig.io.pump()
    assert (rig.disk.count("load"), rig.disk.count("save")) == (4, 4)
    rig.clock.now += 100.0
    rig.clock.tick = 1.5 * APPLY_SECONDS
    for _ in range(8):
        rig.store.poll()
    assert rig.lower.breaker.state is State.CLOSED
    assert rig.counted("tierkv_errors_total", tier="disk", kind="timeout") == 0
    assert rig.lower.writer.pending == {}
    ticket.release()


def test_a_long_queue_of_a_tier_that_failed_is_dropped_in_portions(make_rig: MakeRig) -> None:
    count = 2 * MAX_DROPPED + 1
    rig = make_rig(slots=4 * count, tiers={"disk": {"breaker_failures": 1}})
    rig.saved(chain(count))
    assert len(rig.lower.writer.pending) == count
    rig.lower.breaker.failure(rig.lower.breaker.allow(), ErrorKind.TIMEOUT)
    left = []
    for _ in range(4):
        rig.store.poll()
        left.append(len(rig.lower.writer.pending))
    assert left == [count - MAX_DROPPED, 1, 0, 0]
    assert rig.counted("tierkv_saves_dropped_total", tier="disk", reason="unavailable") == count


def test_a_poll_that_takes_long_leaves_the_rest_to_the_next(make_rig: MakeRig) -> None:
    rig = make_rig(slots=16)
    rig.saved(chain(4))
    rig.io.pump()
    assert rig.disk.count("save") == 4
    rig.clock.tick = 1.5 * APPLY_SECONDS  # every job takes at least so long
    left = []
    for _ in range(4):
        rig.store.poll()
        left.append(len(rig.lower.writer.pending))
    assert left == [3, 2, 1, 0]


def test_on_evict_copies_down_what_comes_up_for_eviction(make_rig: MakeRig) -> None:
    rig = make_rig(slots=20, tiers={"disk": {"write": "on_evict"}})
    old, new = chain(8), chain(10, "b")
    rig.saved(old)
    rig.pump()
    assert rig.disk.count("save") == 0  # there is room enough
    rig.saved(new)
    rig.saved(chain(1, "c"))
    rig.pump()
    assert rig.disk.count("save") > 0
    for n in range(20):
        rig.saved(chain(1, f"more{n}"))
        for _ in range(3):
            rig.pump()
    assert {chunk.key for chunk in (*old, *new)} <= set(rig.disk.held)
    ticket = rig.load(old)
    assert ticket.sources == ["disk"] * 8
    rig.verify(ticket, old)
    ticket.release()
    moves = {"source": "dram", "target": "disk", "reason": "on_evict"}
    assert rig.counted("tierkv_moves_total", **moves) == len(rig.disk.held)


def test_the_queue_is_bounded_and_drops_the_oldest(make_rig: MakeRig) -> None:
    options = {"write_queue": 3 * LAYOUT.slot_bytes, "io_threads": 4}
    rig = make_rig(slots=16, tiers={"disk": options})
    chunks = [chain(1, f"{n}")[0] for n in range(6)]
    rig.disk.script.hold = True
    rig.saved(chunks[:1])
    rig.pump()  # the first one is under way
    for chunk in chunks[1:]:
        rig.saved([chunk])
    assert rig.index.leased == 3
    assert dropped(rig, "queue_full") == 3
    rig.disk.script.hold = False
    rig.end_calls()
    assert set(rig.disk.held) == {chunks[0].key, chunks[4].key, chunks[5].key}


def test_with_everything_under_way_the_newest_is_dropped(make_rig: MakeRig) -> None:
    options = {"write_queue": LAYOUT.slot_bytes}
    rig, chunks = make_rig(tiers={"disk": options}), chain(2)
    rig.disk.script.hold = True
    rig.saved(chunks[:1])
    rig.pump()
    rig.saved(chunks[1:])
    assert dropped(rig, "queue_full") == 1
    rig.end_calls()
    assert set(rig.disk.held) == {chunks[0].key}


def test_of_a_long_chain_the_beginning_is_queued(make_rig: MakeRig) -> None:
    options = {"write_queue": 3 * LAYOUT.slot_bytes}
    rig, chunks = make_rig(slots=16, tiers={"disk": options}), chain(8)
    rig.saved(chunks)
    for _ in range(4):
        rig.pump()
    assert set(rig.disk.held) == {chunk.key for chunk in chunks[:3]}
    assert dropped(rig, "queue_full") == 5


def test_write_behind_leaves_half_of_the_pool_to_eviction(make_rig: MakeRig) -> None:
    rig = make_rig(slots=8, tiers={"disk": {}, "tape": {}})
    for tier in rig.tiers.values():
        tier.script.hold = True
    rig.saved(chain(8))
    rig.pump()
    assert rig.index.leased == 2  # the same two chunks for each of the two tiers
    assert len(rig.store.save(chain(6, "b"))) == 6
    for slot in list(rig.store._dram.saves):
        rig.store.abandon([slot], 0)


def test_writes_take_a_quarter_of_the_tiers_threads(make_rig: MakeRig) -> None:
    rig = make_rig(slots=32, tiers={"disk": {"io_threads": 8}})
    rig.disk.script.hold = True
    rig.saved(chain(8))
    rig.pump()
    assert len(rig.disk.script.calls) == 2


def test_reads_do_not_wait_for_writes(make_rig: MakeRig) -> None:
    rig, wanted = make_rig(slots=32, tiers={"disk": {"io_threads": 4}}), chain(4, "b")
    rig.disk.script.hold = True
    rig.saved(chain(8))
    rig.pump()
    rig.disk.give(*wanted)
    ticket = rig.store.load(wanted)
    rig.pump()
    rig.end_calls(op="load")
    assert ticket.poll()
    assert ticket.ready == 4
    ticket.release()


@pytest.mark.parametrize(
    ("answer", "reason", "kind"),
    [
        (Result(Outcome.REFUSED), "refused", None),
        (Result(Outcome.REFUSED, ErrorKind.ENOSPC), "refused", "enospc"),
        (Result(Outcome.FAILED, ErrorKind.EIO), "failed", "eio"),
        (OSError("a bug"), "failed", "worker"),
    ],
)
def test_a_write_that_does_not_succeed_is_counted_and_the_chunk_stays(
    make_rig: MakeRig, answer: Result | Exception, reason: str, kind: str | None
) -> None:
    rig, chunks = make_rig(), chain(2)
    rig.disk.script.save = answer
    rig.saved(chunks)
    rig.pump()
    assert dropped(rig, reason) == 2
    errors = {k.value: rig.counted("tierkv_errors_total", tier="disk", kind=k) for k in ErrorKind}
    assert {name: n for name, n in errors.items() if n} == ({kind: 2} if kind else {})
    ticket = rig.load(chunks)
    assert ticket.sources == ["dram"] * 2
    ticket.release()


def test_a_full_disk_goes_on_serving_loads(make_rig: MakeRig) -> None:
    rig, chunks = make_rig(slots=64, tiers={"disk": {"breaker_failures": 2}}), chain(3, "b")
    rig.disk.script.save = Result(Outcome.REFUSED, ErrorKind.ENOSPC)
    rig.saved(chain(20))
    for _ in range(3):
        rig.pump()
    rig.disk.give(*chunks)
    ticket = rig.load(chunks)
    assert ticket.ready == 3
    ticket.release()


def test_while_the_breaker_is_open_nothing_waits_to_be_written(make_rig: MakeRig) -> None:
    options = {"breaker_failures": 2, "probe_after": 5.0, "io_threads": 4}
    rig = make_rig(slots=32, tiers={"disk": options})
    rig.disk.script.save = Result(Outcome.FAILED, ErrorKind.EIO)
    rig.disk.script.hold = True
    rig.saved(chain(6))
    rig.pump()
    for _ in range(2):  # fail two
        rig.disk.script.calls[0].end(rig.disk.script.save)
        rig.pump()
    assert rig.index.leased == 1  # the one under way
    assert dropped(rig, "unavailable") == 3
    rig.disk.script.hold = False
    rig.end_calls(rig.disk.script.save)
    rig.saved(chain(2, "b"))
    assert dropped(rig, "unavailable") == 5
    assert rig.index.leased == 0
    rig.clock.now += 5
    rig.disk.script.save = None
    rig.saved(chain(2, "c"))  # one of them probes
    rig.pump()
    assert len(rig.disk.held) == 1
    rig.saved(chain(2, "d"))
    rig.pump()
    assert len(rig.disk.held) == 3


def test_a_write_that_hangs_is_a_failure_of_the_tier_but_keeps_its_slot(make_rig: MakeRig) -> None:
    options = {"breaker_failures": 1, "save_deadline": 30.0}
    rig = make_rig(tiers={"disk": options})
    rig.disk.script.hold = True
    rig.saved(chain(1))
    rig.pump()
    rig.clock.now += 30.0
    rig.store.poll()
    assert rig.counted("tierkv_errors_total", tier="disk", kind="timeout") == 0
    rig.clock.now += 0.1
    rig.store.poll()
    rig.store.poll()
    assert rig.counted("tierkv_errors_total", tier="disk", kind="timeout") == 1
    assert rig.index.leased == 1
    rig.saved(chain(1, "b"))
    assert dropped(rig, "unavailable") == 1
    rig.end_calls()
    assert rig.index.leased == 0


def test_a_write_forgives_a_chunk_that_could_not_be_read(make_rig: MakeRig) -> None:
    rig, chunks = make_rig(), chain(1)
    rig.disk.promised.add(chunks[0].key)
    assert rig.load(chunks).rest == "miss"
    rig.disk.promised.clear()
    rig.saved(chunks)  # recomputed
    rig.pump()
    rig.store._dram.forget_all()
    ticket = rig.load(chunks)
    assert ticket.sources == ["disk"]
    ticket.release()


def test_the_tiers_hear_of_a_touched_chain_most_valuable_last(make_rig: MakeRig) -> None:
    rig, chunks = make_rig(), chain(3)
    rig.store.touch(chunks)
    rig.pump()
    assert rig.disk.script.log == [("touch", *(chunk.key for chunk in reversed(chunks)))]


def test_touches_are_bounded_while_the_tier_does_not_keep_up(make_rig: MakeRig) -> None:
    rig, chunks = make_rig(), chain(1)
    for _ in range(100):
        rig.store.touch(chunks)
    rig.pump()
    assert rig.disk.count("touch") == 16
    rig.store.touch(chunks)
    rig.pump()
    assert rig.disk.count("touch") == 17


def test_gauges_show_what_is_held_and_under_way(make_rig: MakeRig) -> None:
    rig, chunks = make_rig(slots=8, tiers={"disk": {"breaker_failures": 1}}), chain(4)
    rig.disk.script.hold = True
    rig.saved(chunks)
    rig.disk.give(*chain(1, "b"))
    ticket = rig.store.load(chain(1, "b"))
    rig.pump()
    snapshot = rig.store.snapshot()

    def gauge(name: str, **labels: str) -> object:
        (value,) = [s["value"] for s in snapshot[name] if s["labels"] == labels]
        return value

    size = LAYOUT.slot_bytes
    assert gauge("tierkv_chunks", tier="dram") == 4
    assert gauge("tierkv_used_bytes", tier="dram") == 5 * size
    assert gauge("tierkv_capacity_bytes", tier="dram") == 8 * size
    assert gauge("tierkv_chunks", tier="disk") == 1
    assert gauge("tierkv_leased_slots") == 4
    assert gauge("tierkv_queue_depth", tier="disk", op="load") == 1
    assert gauge("tierkv_queue_depth", tier="disk", op="save") == 4
    assert gauge("tierkv_inflight_bytes", tier="disk", op="save") == 4 * size
    assert gauge("tierkv_breaker_state", tier="disk") == 0
    assert list(rig.store.usage()) == ["dram", "disk"]
    ticket.release()
    rig.clock.now += 2
    rig.store.poll()
    snapshot = rig.store.snapshot()
    assert gauge("tierkv_breaker_state", tier="disk") == 2
