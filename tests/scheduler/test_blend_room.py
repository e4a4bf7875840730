# SPDX-License-Identifier: Apache-2.0
"""Prompts whose donors must be read while DRAM is full: they hold nothing until all of it fits.

A DRAM tier of 16 chunks over a disk. Donors are on the disk; what DRAM holds in the end is leased
by the test, as loads under way would.
"""

from __future__ import annotations

from pathlib import Path
from unittest import mock

import pytest

from tests.scheduler.blend_kit import OFF, SECOND, A, B, MakeRig, counted, refused, served
from tests.scheduler.blending import BlendRig
from tests.scheduler.conftest import dram_and_disk, text
from tests.scheduler.rig import expected_output
from tests.scheduler.test_reuse import forget_engine_cache, idle
from tests.scheduler.test_ways_out import step_until
from tierkv.store import LoadTicket, tickets

C, D = text(911, 200), text(912, 200)
FILLER = text(913, 16 * 64 + 10)
OTHER = text(914, 40) + D + C + text(915, 40)
"""As SECOND, of two other documents: six donors each."""
LESS = text(923, 10) + C[:128] + text(924, 20)
"""Two donors."""


class Full:
    """All documents were served, then DRAM was filled with other text."""

    def __init__(self, make_blend: MakeRig, path: Path, deadline: str = "5m") -> None:
        tiers = dram_and_disk(path / "kv", capacity="128KiB", load_deadline=deadline)
        self.rig: BlendRig = make_blend(tiers)
        self.store = self.rig.connector._scheduler.store
        assert self.store.pool.slots == 16
        for name, prompt in (("ab", A + B), ("cd", C + D), ("filler", FILLER)):
            self.rig.generate(name, prompt + text(916, 30), params=OFF)
            assert self.store.drain()
        forget_engine_cache(self.rig)
        # Six chunks of A and B, six of C and D, the filler's.
        self.stored = [donor.chunk for donor in self.rig.planner.donors._by_key.values()]

    def hold(self, count: int) -> LoadTicket:
        """Lease the first chunks of the filler."""
        ticket = self.store.load(self.stored[-16:][:count])
        assert ticket.poll()
        assert ticket.ready == count
        return ticket

    def waiting(self, **behind: list[int]) -> LoadTicket:
        """Four slots are left, SECOND waits for six, and these come after it."""
        held = self.hold(12)
        for name, prompt in {"second": SECOND, **behind}.items():
            self.rig.add(name, prompt, 4)
            self.rig.step()
        assert "second" in self.line
        return held

    def all_served(self, held: LoadTicket, count: int) -> None:
        """Given the room, everybody gets on, and nothing is left."""
        held.release()
        self.rig.run()
        assert served(self.rig) == count
        idle(self.rig)

    @property
    def line(self) -> list[str]:
        return list(self.rig.planner._room._line)

    def taken(self) -> tuple[int, int]:
        """Slots leased, and being filled."""
        return self.store._dram.index.leased, self.store._dram.index.filling


@pytest.fixture
def full(make_blend: MakeRig, tmp_path: Path) -> Full:
    return Full(make_blend, tmp_path)


def test_prompts_that_wait_for_room_hold_none_of_it(full: Full) -> None:
    rig, held = full.rig, full.waiting(other=OTHER)
    for _ in range(5):
        rig.step()
    assert full.taken() == (12, 0)
    held.truncate(9)
    rig.run()
    # Seven slots: room for the donors of one at a time.
    assert rig.outputs["second"] == expected_output(SECOND, 4)
    assert rig.outputs["other"] == expected_output(OTHER, 4)
    assert served(rig) == 2
    assert not refused(rig)
    held.release()
    idle(rig)


def test_all_for_whom_there_is_room_begin(full: Full) -> None:
    held = full.waiting(other=OTHER)
    held.release()
    full.rig.step()
    assert sum(full.taken()) == 12
    full.all_served(held, 2)


def test_slots_that_a_claim_has_yet_to_take_are_no_room(full: Full) -> None:
    """Long runs are read in portions; what is left of them counts."""
    rig, held = full.rig, full.hold(9)
    with mock.patch.object(tickets, "MAX_BEGUN", 1):
        rig.add("second", SECOND, 4)
        rig.add("less", LESS, 4)
        rig.step()
        # Four of the first one's six are under way; the other one needs two.
        assert sum(full.taken()) == 13
        rig.abort("less")
        step_until(rig, lambda: "second" in rig.running, 100_000)
    # Read, it needs no more.
    assert len(rig.planner._room) == 0
    rig.run()
    assert served(rig) == 1
    held.release()
    idle(rig)


def test_a_prompt_whose_own_beginning_is_in_its_way_waits_for_nobody(full: Full) -> None:
    rig = full.rig
    # Five slots for what is exact and twelve for donors, of sixteen.
    rig.generate("all", FILLER[:320] + text(925, 10) + SECOND[40:440] + OTHER[40:])
    assert refused(rig) == {"memory": 1}
    assert counted(rig)["hit", "dram"] == 320
    idle(rig)


def test_who_has_waited_in_vain_lets_the_next_one_go(full: Full) -> None:
    rig, held = full.rig, full.waiting(less=LESS)
    assert full.line == ["second", "less"]
    with mock.patch.object(rig.planner, "_patience", 0.0):
        assert rig.planner.offer(rig.connector._scheduler._requests["second"], 0) is None
    # At once, whenever vLLM admits it.
    assert full.line == ["less"]
    rig.run()
    assert refused(rig) == {"gone": 1}
    assert rig.outputs["less"] == expected_output(LESS, 4)
    full.all_served(held, 1)


def test_whose_donors_have_come_meanwhile_need_not_wait_for_the_first(full: Full) -> None:
    rig, held = full.rig, full.waiting(less=LESS)
    assert full.taken() == (12, 0)
    brought = full.store.load(full.stored[6:8])
    step_until(rig, brought.poll, 1_000_000)
    step_until(rig, lambda: "less" in rig.finished)
    assert served(rig) == 1
    assert "second" not in rig.running
    brought.release()
    full.all_served(held, 2)


def test_who_finds_more_of_its_beginning_keeps_its_place(full: Full) -> None:
    rig, held = full.rig, full.waiting(other=OTHER)
    asked_at = rig.planner._queries["second"].asked_at
    rig.add("beginning", SECOND[:40], 4)
    step_until(rig, lambda: "beginning" in rig.finished)
    rig.step()
    # Two blocks of it are in vLLM's own cache now.
    assert rig.planner._queries["second"].exact == 32
    assert rig.planner._queries["second"].asked_at == asked_at
    assert full.line == ["second", "other"]
    full.all_served(held, 2)


def test_who_wants_other_donors_by_now_is_not_held_back_by_those_of_before(full: Full) -> None:
    rig, held = full.rig, full.waiting(mixed=D[:192] + FILLER[320:700] + text(926, 20))
    assert full.line == ["second", "mixed"]
    # What it lacks is computed by somebody else and is in vLLM's own cache: no donor any more.
    rig.add("computed", D[:192] + text(927, 20), 4, params=OFF)
    step_until(rig, lambda: "mixed" in rig.finished, 200)
    assert served(rig) == 1
    assert "second" not in rig.running
    full.all_served(held, 2)


def test_time_for_which_a_claim_was_held_is_no_time_of_waiting(full: Full) -> None:
    rig = full.rig
    rig.add("second", SECOND, 4)
    planner = rig.planner
    waiting = rig.connector._scheduler._requests["second"]
    while planner.offer(waiting, 0) is True:
        rig.connector._scheduler.store.poll()
    claimed = planner._queries["second"]
    assert claimed.claim is not None
    planner.offer(waiting, 16)
    assert planner._queries["second"].asked_at > claimed.asked_at
    rig.run()
    assert served(rig) == 1
    idle(rig)


def test_who_came_first_is_first_even_if_others_need_less(full: Full) -> None:
    rig, held = full.rig, full.waiting(less=LESS)
    for _ in range(5):
        rig.step()
    assert full.taken() == (12, 0)
    rig.abort("second")
    rig.run()
    # Four slots are enough for it, once it is the first.
    assert rig.outputs["less"] == expected_output(LESS, 4)
    full.all_served(held, 1)


def test_what_is_in_dram_waits_for_nobody(full: Full) -> None:
    here = text(919, 40) + FILLER[:400] + text(920, 40)
    rig, held = full.rig, full.waiting(here=here)
    for _ in range(20):
        rig.step()
    assert rig.outputs["here"] == expected_output(here, 4)
    assert served(rig) == 1
    assert "second" not in rig.running
    full.all_served(held, 2)


def test_donors_that_never_fit_are_not_waited_for(full: Full) -> None:
    rig = full.rig
    rig.generate("more", text(921, 400), params=OFF)
    assert full.store.drain()
    prompt = SECOND[:440] + OTHER[40:440] + text(921, 390) + text(922, 40)
    rig.generate("all", prompt)
    assert refused(rig) == {"memory": 1}
    assert served(rig) == 0
    idle(rig)


def test_a_prompt_waits_for_room_no_longer_than_for_a_read(
    make_blend: MakeRig, tmp_path: Path
) -> None:
    full = Full(make_blend, tmp_path, deadline="1ms")
    held = full.hold(12)
    full.rig.add("second", SECOND, 4)
    full.rig.run(1_000_000)
    assert full.rig.outputs["second"] == expected_output(SECOND, 4)
    assert refused(full.rig) == {"gone": 1}
    held.release()
    idle(full.rig)
