# SPDX-License-Identifier: Apache-2.0
"""Invalidate and reset: at once, everywhere, whatever is under way."""

from __future__ import annotations

from collections.abc import Callable

from tests.unit.store.rig import Rig, chain

MakeRig = Callable[..., Rig]


def test_an_invalidated_chunk_is_gone_from_all_tiers_at_once(make_rig: MakeRig) -> None:
    rig, chunks = make_rig(tiers={"disk": {}, "tape": {}}), chain(3)
    rig.saved(chunks)
    rig.pump()
    rig.store.invalidate(chunks[1:])
    ticket = rig.store.load(chunks)  # before any tier was told
    assert ticket.poll()
    assert (ticket.ready, ticket.rest) == (1, "miss")
    rig.pump()
    for tier in rig.tiers.values():
        assert set(tier.held) == {chunks[0].key}
    assert rig.counted("tierkv_evictions_total", tier="dram", reason="invalid") == 2
    ticket.release()


def test_a_write_under_way_does_not_bring_an_invalidated_chunk_back(make_rig: MakeRig) -> None:
    rig, chunks = make_rig(tiers={"disk": {"io_threads": 4}}, slots=16), chain(3)
    rig.disk.script.hold = True
    rig.saved(chunks)
    rig.pump()  # one write is under way, two wait
    rig.store.invalidate(chunks)
    rig.pump()
    assert rig.disk.count("evict") == 0  # not while a write could still land
    assert rig.index.leased == 1
    rig.end_calls()
    assert rig.disk.script.log[-1][0] == "evict"
    assert rig.disk.held == {}
    assert rig.load(chunks).ready == 0


def test_a_read_under_way_does_not_bring_an_invalidated_chunk_back(make_rig: MakeRig) -> None:
    rig, chunks = make_rig(), chain(2)
    rig.disk.give(*chunks)
    rig.disk.script.hold = True
    ticket = rig.store.load(chunks)
    rig.pump()
    rig.store.invalidate(chunks[1:])
    rig.end_calls()
    assert ticket.poll()
    assert (ticket.ready, ticket.rest) == (1, "miss")
    assert rig.index.get(chunks[1].key) is None
    ticket.release()


def test_a_ticket_does_not_get_what_was_invalidated_while_it_waited(make_rig: MakeRig) -> None:
    rig, chunks = make_rig(), chain(3)
    rig.disk.give(chunks[0])
    rig.saved(chunks[1:])
    rig.pump()
    rig.disk.script.hold = True
    ticket = rig.store.load(chunks)
    rig.pump()
    rig.store.invalidate(chunks[2:])
    rig.end_calls()
    assert ticket.poll()
    assert (ticket.ready, ticket.rest) == (2, "miss")
    ticket.release()


def test_a_chunk_saved_anew_after_it_was_invalidated_is_written_anew(make_rig: MakeRig) -> None:
    rig, chunks = make_rig(slots=16), chain(1)
    rig.saved(chunks, version=1)
    rig.pump()
    rig.store.invalidate(chunks)
    rig.saved(chunks, version=2)  # the tier has not been told yet
    for _ in range(3):
        rig.pump()
    rig.store._dram.forget_all()
    ticket = rig.load(chunks)
    assert ticket.sources == ["disk"]
    rig.verify(ticket, chunks, version=2)
    ticket.release()


def test_other_chunks_are_served_while_some_are_being_forgotten(make_rig: MakeRig) -> None:
    rig, chunks, others = make_rig(slots=16), chain(2), chain(2, "b")
    rig.disk.give(*chunks, *others)
    rig.store.invalidate(chunks)
    ticket = rig.load(others)
    assert ticket.ready == 2
    ticket.release()


def test_a_leased_slot_keeps_its_bytes_though_its_chunk_was_invalidated(make_rig: MakeRig) -> None:
    rig, chunks = make_rig(slots=2, tiers={}), chain(2)
    rig.saved(chunks)
    ticket = rig.load(chunks)
    rig.store.invalidate(chunks)
    assert rig.store.save(chain(2, "b")) == []
    rig.verify(ticket, chunks)
    ticket.release()
    given = rig.store.save(chain(2, "b"))
    assert len(given) == 2
    rig.store.abandon([slot for _, slot in given], 0)


def test_a_tier_that_fails_to_forget_is_not_believed_and_told_again(make_rig: MakeRig) -> None:
    rig, chunks, others = make_rig(tiers={"disk": {"probe_after": 5.0}}), chain(1), chain(1, "b")
    rig.disk.give(*chunks, *others)
    rig.disk.script.evict = OSError("a bug")
    rig.store.invalidate(chunks)
    rig.pump()
    assert rig.load(chunks).ready == 0
    assert rig.counted("tierkv_errors_total", tier="disk", kind="worker") == 1
    rig.disk.script.evict = None
    rig.clock.now += 4.9
    rig.pump()
    assert chunks[0].key in rig.disk.held
    rig.clock.now += 0.1
    rig.store.poll()
    rig.pump()
    assert set(rig.disk.held) == {others[0].key}


def test_reset_forgets_everything_and_starts_a_new_generation(make_rig: MakeRig) -> None:
    rig, chunks = make_rig(), chain(4)
    rig.saved(chunks)
    rig.pump()
    rig.disk.give(*chain(2, "b"))
    before = rig.store.generation
    rig.store.reset()
    assert rig.store.generation == before + 1
    for name in ("a", "b"):
        ticket = rig.store.load(chain(2, name))
        assert ticket.poll()
        assert (ticket.ready, ticket.rest) == (0, "miss")
    rig.pump()
    assert rig.disk.held == {}
    assert rig.index.free == 8
    assert rig.counted("tierkv_evictions_total", tier="dram", reason="reset") == 4


def test_reset_with_reads_under_way_discards_them(make_rig: MakeRig) -> None:
    rig, chunks = make_rig(tiers={"disk": {"io_threads": 2}}), chain(5)
    rig.saved(chunks[:1])
    rig.pump()
    rig.disk.give(*chunks)
    rig.disk.script.hold = True
    ticket = rig.store.load(chunks)
    rig.pump()
    rig.store.reset()
    assert rig.index.filling == 2  # two run, the others never began
    assert ticket.poll()
    assert (ticket.ready, ticket.slots, ticket.rest) == (0, [], "miss")
    rig.end_calls()
    assert rig.index.ready == 0
    assert rig.index.free == 8
    ticket.release()


def test_a_ticket_that_was_settled_before_a_reset_keeps_its_slots_until_released(
    make_rig: MakeRig,
) -> None:
    rig, chunks = make_rig(slots=2, tiers={}), chain(2)
    rig.saved(chunks)
    ticket = rig.load(chunks)
    rig.store.reset()
    rig.verify(ticket, chunks)
    assert rig.index.free == 0
    ticket.release()
    assert rig.index.free == 2


def test_reset_with_writes_under_way_outlives_them(make_rig: MakeRig) -> None:
    rig, chunks = make_rig(tiers={"disk": {"io_threads": 4}}), chain(3)
    rig.disk.script.hold = True
    rig.saved(chunks)
    rig.pump()
    rig.store.reset()
    rig.pump()
    assert rig.disk.count("clear") == 0
    assert rig.counted("tierkv_saves_dropped_total", tier="disk", reason="reset") == 2
    rig.end_calls()
    assert rig.disk.count("clear") == 1
    assert rig.disk.held == {}
    assert rig.load(chunks).ready == 0


def test_a_save_begun_before_a_reset_does_not_land_after_it(make_rig: MakeRig) -> None:
    rig, chunks = make_rig(), chain(2)
    generation = rig.store.generation
    old = rig.store.save(chunks)
    rig.store.reset()
    new = rig.store.save(chunks)
    assert {slot for _, slot in old}.isdisjoint(slot for _, slot in new)
    for at, slot in old:
        rig.write(chunks[at], slot, version=1)
    for at, slot in new:
        rig.write(chunks[at], slot, version=2)
    rig.store.commit([slot for _, slot in old], generation)
    assert rig.store.load(chunks).ready == 0
    rig.store.commit([slot for _, slot in new], rig.store.generation)
    ticket = rig.load(chunks)
    rig.verify(ticket, chunks, version=2)
    assert ticket.ready == 2
    ticket.release()


def test_what_is_saved_while_the_tier_is_being_cleared_is_written_afterwards(
    make_rig: MakeRig,
) -> None:
    rig, chunks = make_rig(slots=16), chain(2)
    rig.saved(chunks, version=1)
    rig.pump()
    rig.store.reset()
    rig.saved(chunks, version=2)  # the tier still says that it holds them
    for _ in range(3):
        rig.pump()
    rig.store._dram.forget_all()
    ticket = rig.load(chunks)
    assert ticket.sources == ["disk"] * 2
    rig.verify(ticket, chunks, version=2)
    ticket.release()


def test_a_tier_that_fails_to_clear_serves_nothing_until_it_has(make_rig: MakeRig) -> None:
    rig, chunks = make_rig(tiers={"disk": {"probe_after": 5.0}}), chain(1)
    rig.disk.give(*chunks)
    rig.disk.script.evict = OSError("a bug")
    for _ in range(3):
        rig.store.reset()
        rig.pump()
        assert rig.load(chunks).ready == 0
    rig.disk.script.evict = None
    rig.clock.now += 5
    rig.store.poll()
    rig.pump()
    assert rig.disk.held == {}
    rig.disk.give(*chunks)
    ticket = rig.load(chunks)
    assert ticket.ready == 1
    ticket.release()


def test_too_many_keys_to_forget_become_one_clear(make_rig: MakeRig) -> None:
    rig = make_rig()
    rig.disk.script.hold = True
    rig.saved(chain(1))
    rig.pump()  # a write that hangs keeps the tier from being told
    template = chain(1)[0]

    class Named:
        def __init__(self, n: int) -> None:
            self.key = n.to_bytes(16, "little")

    rig.store.invalidate([template])
    for n in range(3):
        rig.store.invalidate([Named(n * 30_000 + i) for i in range(30_000)])  # type: ignore[misc]
    rig.end_calls()
    rig.pump()
    assert rig.disk.count("evict") == 1
    assert rig.disk.count("clear") == 1


def test_resets_in_a_row_with_work_in_flight_leave_nothing_behind(make_rig: MakeRig) -> None:
    rig, chunks = make_rig(tiers={"disk": {"io_threads": 4}}, slots=8), chain(4)
    rig.disk.script.hold = True
    tickets = []
    for _ in range(5):
        rig.disk.give(*chunks)
        tickets.append(rig.store.load(chunks))
        rig.saved(chain(2, "b"))
        rig.pump()
        rig.store.reset()
        rig.end_calls()
    for ticket in tickets:
        assert ticket.poll()
        ticket.release()
    rig.end_calls()
    assert rig.index.free == 8
    assert rig.disk.held == {}
