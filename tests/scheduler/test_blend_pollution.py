# SPDX-License-Identifier: Apache-2.0
"""Approximate KV stays where it was made.

See `blending.py`: approximate bytes that reach somebody else fail the rig's own check.
"""

from __future__ import annotations

import pytest
from tierkv_vllm.blend.taint import Taint

from tests.scheduler.blend_kit import (
    FIRST,
    SECOND,
    A,
    B,
    MakeRig,
    counted,
    counter,
    exact_again,
    held_by_vllm,
    refused,
    served,
)
from tests.scheduler.conftest import text
from tests.scheduler.test_reuse import forget_engine_cache, idle
from tests.scheduler.test_ways_out import step_until


def test_an_exact_request_finds_nothing_of_a_blended_one_in_vllms_cache(
    make_blend: MakeRig,
) -> None:
    rig = make_blend()
    rig.generate("first", FIRST)
    # Long enough to fill further blocks with what is computed on top.
    rig.add("second", SECOND, 60)
    rig.run()
    assert served(rig) == 1
    longer = SECOND + rig.outputs["second"]
    held = held_by_vllm(rig)
    exact_again(rig, "exact", longer)
    # The two blocks before the first reused token are exact, and shared.
    assert held_by_vllm(rig) - held == 32
    exact_again(rig, "again", longer)
    assert held_by_vllm(rig) - held == 32 + 528


def test_without_the_taint_the_same_test_fails(
    make_blend: MakeRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Taint, "put", classmethod(lambda cls, request, first: cls(first, ())))
    with pytest.raises(AssertionError, match="wrong KV"):
        test_an_exact_request_finds_nothing_of_a_blended_one_in_vllms_cache(make_blend)


def test_nothing_approximate_is_saved_or_becomes_a_donor(make_blend: MakeRig) -> None:
    rig = make_blend()
    rig.generate("first", FIRST)
    known = len(rig.planner.donors)
    stored = counter(rig, "tierkv_engine_blocks_total", "op")[("save",)]
    prompt = text(920, 70) + B + A + text(921, 40)
    rig.add("second", prompt, 80)
    rig.run()
    assert served(rig) == 1
    # Of its 590 tokens one chunk lies before the first reused token.
    assert counter(rig, "tierkv_engine_blocks_total", "op")[("save",)] - stored == 4
    assert len(rig.planner.donors) == known + 1
    forget_engine_cache(rig)
    exact_again(rig, "exact", prompt + rig.outputs["second"])
    assert (
        counted(rig)["hit", "dram"] - counter(rig, "tierkv_blend_tokens_total", "kind")[("reused",)]
        == 64
    )


def test_if_it_were_saved_the_rig_would_notice(
    make_blend: MakeRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = make_blend()
    rig.generate("first", FIRST)
    rig.add("second", SECOND, 80)
    step_until(rig, lambda: "second" in rig.running)
    rig.connector._scheduler._requests["second"].approximate_from = None
    rig.run()
    forget_engine_cache(rig)
    with pytest.raises(AssertionError, match="wrong KV"):
        exact_again(rig, "exact", SECOND)


def test_a_prompt_that_comes_back_is_computed_in_full_once_and_stored(
    make_blend: MakeRig,
) -> None:
    rig = make_blend(blend={"exact_after": 2})
    rig.generate("first", FIRST)
    outcomes = []
    for turn in range(4):
        before = served(rig)
        forget_engine_cache(rig)
        rig.generate(f"turn {turn}", SECOND)
        outcomes.append(served(rig) - before)
    assert outcomes == [1, 1, 0, 0]
    assert refused(rig)["repeated"] >= 1
    by_reuse = counter(rig, "tierkv_query_tokens_total", "outcome", "reuse")
    # The fourth one is an ordinary hit: 7 chunks, or what ends a block before the last token.
    assert by_reuse["hit", "exact"] >= 448
    idle(rig)
