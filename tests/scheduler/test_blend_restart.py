# SPDX-License-Identifier: Apache-2.0
"""Reuse of any text from what an earlier engine left on disk.

See `blending.py`: approximate bytes that reach somebody else fail the rig's own check.
"""

from __future__ import annotations

from pathlib import Path
from unittest import mock

import pytest

from tests.scheduler.blend_kit import (
    FIRST,
    OFF,
    SECOND,
    A,
    B,
    MakeRig,
    counted,
    exact_again,
    kv_bytes,
    plan_by_hand,
    refused,
    served,
)
from tests.scheduler.blending import BlendRig, turned
from tests.scheduler.conftest import dram_and_disk, text
from tests.scheduler.rig import HEAD_SIZE, kv_of, prefix_states
from tests.scheduler.test_reuse import idle
from tests.scheduler.test_ways_out import step_until
from tierkv.store import Store


def restarted(make_blend: MakeRig, path: Path, *prompts: list[int], **options: object) -> BlendRig:
    """An engine behind one that has served these."""
    config = dram_and_disk(path / "kv", load_deadline="5m")
    first = make_blend(config, **options)
    for number, prompt in enumerate(prompts):
        first.generate(f"before {number}", prompt, params=OFF)
    first.close()
    return make_blend(config, **options)


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_restarted_engine_reuses_text_anywhere_from_its_first_prompt_on(
    make_blend: MakeRig, tmp_path: Path, ranks: int
) -> None:
    rig = restarted(make_blend, tmp_path, FIRST, ranks=ranks, blend={"recompute_ratio": 0.0})
    rig.add("second", SECOND, 4)
    step_until(rig, lambda: "second" in rig.running, 1_000_000)
    fixed, pieces = plan_by_hand()
    for rank in range(ranks):
        got = kv_bytes(rig, "second", rank)
        for layer in range(len(got)):
            donors = kv_of(prefix_states(FIRST), layer, rank)
            for piece, shift in pieces:
                kept = [place for place in piece if place not in fixed]
                wanted = donors[[place - shift for place in kept]].clone()
                wanted[..., :HEAD_SIZE] += turned(shift)
                assert (got[layer, kept] == wanted).all()
    rig.run()
    assert served(rig) == 1
    assert counted(rig)["hit", "disk"] > 300
    exact_again(rig, "exact", SECOND)
    idle(rig)


def test_what_lost_its_beginning_on_disk_is_not_reused(make_blend: MakeRig, tmp_path: Path) -> None:
    config = dram_and_disk(tmp_path / "kv")
    first = make_blend(config)
    first.generate("first", FIRST, params=OFF)
    store = first.connector._scheduler.store
    assert store.drain()
    (beginning, *_) = first.planner.donors._by_key
    store.forget([beginning])
    first.close()
    rig = make_blend(config)
    rig.generate("second", SECOND)
    assert served(rig) == 0
    assert refused(rig) == {"no_match": 1}


def test_documents_that_are_only_reused_are_not_forgotten_first(
    make_blend: MakeRig, tmp_path: Path
) -> None:
    """On disk their time of use counts: what was used last is recalled first, and evicted last."""
    config = dram_and_disk(tmp_path / "kv")
    first = make_blend(config)
    first.generate("first", FIRST, params=OFF)
    chain = list(first.planner.donors._by_key)
    first.generate("other", text(933, 400), params=OFF)
    assert first.connector._scheduler.store.drain()
    first.generate("second", SECOND)
    assert served(first) == 1
    first.close()
    second = make_blend(config)
    recalled = list(second.planner.donors._by_key)
    # The last used last; of a chain that is its beginning, on which the places of the rest depend.
    assert recalled[-6:] == chain[::-1]


def test_an_engine_starts_without_donors_if_they_cannot_be_told(
    make_blend: MakeRig, caplog: pytest.LogCaptureFixture
) -> None:
    with mock.patch.object(Store, "recall", side_effect=RuntimeError("on purpose")):
        rig = make_blend()
    assert "what the tiers hold from earlier is not reused anywhere" in caplog.text
    rig.generate("first", FIRST)
    rig.generate("second", SECOND)
    assert served(rig) == 1
    idle(rig)


def test_a_tenant_s_text_is_nobody_s_after_a_restart(make_blend: MakeRig, tmp_path: Path) -> None:
    config = dram_and_disk(tmp_path / "kv")
    first = make_blend(config)
    first.generate("first", FIRST, salt="x", params=OFF)
    first.close()
    rig = make_blend(config)
    for name, salt in (("nobody", None), ("other", "y")):
        rig.generate(name, SECOND, salt=salt)
    assert served(rig) == 0
    # Its own again, once an exact hit has brought it back.
    rig.generate("mine", FIRST, salt="x")
    rig.generate("then", text(931, 40) + B + A + text(932, 40), salt="x")
    assert served(rig) == 1
    idle(rig)
