# SPDX-License-Identifier: Apache-2.0
"""What the tiers hold from an earlier run, as the Store tells it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from tests.unit.store.real import held_store, save
from tests.unit.store.rig import Rig, chain
from tierkv.store import life

MakeRig = Callable[..., Rig]
pytestmark = pytest.mark.usefixtures("no_thread_is_left")


def test_what_tiers_hold_from_earlier_is_told_once_each(make_rig: MakeRig) -> None:
    rig = make_rig(tiers={"near": {}, "far": {}})
    chunks = chain(5)
    rig.tiers["near"].script.recall = [chunks[3], chunks[0]]
    rig.tiers["far"].script.recall = [chunks[0], chunks[4], chunks[1]]
    assert rig.store.recall(10, 2.0) == [chunks[n] for n in (3, 0, 4, 1)]
    assert rig.store.recall(3, 2.0) == [chunks[n] for n in (3, 0, 4)]
    assert rig.tiers["far"].script.log == [("recall", 10, 2.0), ("recall", 3, 2.0)]
    assert make_rig(tiers={}).store.recall(10, 2.0) == []


def test_a_tier_that_cannot_tell_what_it_holds_does_not_keep_the_others_from_it(
    make_rig: MakeRig, caplog: pytest.LogCaptureFixture
) -> None:
    rig, chunks = make_rig(tiers={"near": {}, "far": {}}), chain(2)
    rig.tiers["far"].script.recall = chunks
    for bug in (ValueError("a bug"), asyncio.CancelledError()):
        rig.tiers["near"].script.recall = bug
        assert rig.store.recall(10, 2.0) == chunks
    assert "tier near cannot tell what it holds" in caplog.text
    assert rig.load(chunks).ready == 0  # and all goes on


def test_who_does_not_tell_what_it_holds_is_not_waited_for(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(life, "RECALL_GRACE", 0.05)
    store, tier = held_store()
    tier.script.recall = chain(2)
    assert store.recall(10, 0.0) == []
    assert "tier disk did not tell in time what it holds" in caplog.text
    tier.go.set()
    assert store.recall(10, 60.0) == chain(2)
    store.close()


def test_if_the_loop_dies_while_it_asks_nothing_is_known(caplog: pytest.LogCaptureFixture) -> None:
    store, tier = held_store()
    tier.go.set()
    tier.script.recall = SystemExit("a tier did something very bad")
    assert store.recall(10, 60.0) == []
    assert "the I/O loop did not tell what the tiers hold" in caplog.text
    save(store, chain(2))  # DRAM goes on as ever
    store.close()
