# SPDX-License-Identifier: Apache-2.0
"""Loads of chunks of which only the other side knows whether it has them."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.unit.store.rig import Rig, chain
from tierkv.store.breaker import State
from tierkv.tiers.base import Presence

MakeRig = Callable[..., Rig]


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
