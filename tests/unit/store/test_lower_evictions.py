# SPDX-License-Identifier: Apache-2.0
"""What tiers below DRAM give up is counted too, each chunk under its reason."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from tests.unit.store.rig import Rig, chain
from tierkv.tiers.base import Usage

MakeRig = Callable[..., Rig]


def evictions(rig: Rig, reason: str) -> float:
    rig.store.refresh_gauges()
    return rig.counted("tierkv_evictions_total", tier="disk", reason=reason)


def test_chunks_that_a_tier_gave_up_for_room_are_counted_once(
    make_rig: MakeRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = make_rig()
    usage = Usage(3, 300, 900)
    monkeypatch.setattr(rig.disk, "usage", lambda: usage)
    assert evictions(rig, "capacity") == 0
    usage = replace(usage, evicted_chunks=5)
    assert evictions(rig, "capacity") == 5
    assert evictions(rig, "capacity") == 5
    usage = replace(usage, evicted_chunks=7)
    assert evictions(rig, "capacity") == 7


def test_chunks_that_a_tier_was_told_to_forget_are_counted_if_it_held_them(
    make_rig: MakeRig,
) -> None:
    rig = make_rig()
    rig.disk.give(*chain(2, "a"), *chain(3, "b"))
    rig.store.invalidate(chain(4, "a"))
    rig.pump()
    assert (evictions(rig, "invalid"), evictions(rig, "reset")) == (2, 0)
    rig.store.reset()
    rig.pump()
    assert (evictions(rig, "invalid"), evictions(rig, "reset")) == (2, 3)


def test_what_a_tier_failed_to_forget_is_counted_when_it_has(make_rig: MakeRig) -> None:
    rig = make_rig(tiers={"disk": {"probe_after": 5.0}})
    rig.disk.give(*chain(2))
    rig.disk.script.evict = OSError("a bug")
    rig.store.invalidate(chain(2))
    rig.pump()
    assert evictions(rig, "invalid") == 0
    rig.disk.script.evict = None
    rig.clock.now += 5.0
    rig.store.poll()
    rig.pump()
    assert evictions(rig, "invalid") == 2
