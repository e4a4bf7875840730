# SPDX-License-Identifier: Apache-2.0
"""Ranks blend together or not at all, and an engine with many blends keeps its memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.scheduler.blending import BlendRig
from tests.scheduler.conftest import dram, text
from tests.scheduler.rig import expected_output
from tests.scheduler.test_reuse import idle

MakeRig = Callable[..., BlendRig]

A, B = text(951, 200), text(952, 200)
FIRST = A + B + text(953, 30)
SECOND = text(954, 40) + B + A + text(955, 40)
THIRD = text(956, 40) + B + A + text(957, 40)
SERVED = "tierkv_blend_requests_total"


@pytest.fixture
def make_blend(rig_model: Path) -> Iterator[MakeRig]:
    rigs: list[BlendRig] = []

    def make(blend: dict[str, Any] | None = None, **options: Any) -> BlendRig:
        wanted = {"mode": "balanced", "min_tokens": 64, **(blend or {})}
        rigs.append(BlendRig(rig_model, {**dram(), "blend": wanted}, num_blocks=200, **options))
        return rigs[-1]

    yield make
    for rig in rigs:
        rig.close()


def side(rig: BlendRig) -> Any:
    connector: Any = rig.connector
    return connector._scheduler


def served(rig: BlendRig) -> int:
    counts = side(rig).store.context.counters.snapshot()[SERVED]
    return sum(int(one["value"]) for one in counts if one["labels"]["outcome"] == "served")


@pytest.mark.parametrize(("ranks", "replicas"), [(2, 2), (4, 2)])
def test_a_blend_waits_for_every_replica(make_blend: MakeRig, ranks: int, replicas: int) -> None:
    rig = make_blend(ranks=ranks, replicas=replicas)
    rig.generate("first", FIRST)
    rig.add("second", SECOND, 4)
    rig.run()
    assert rig.outputs["second"] == expected_output(SECOND, 4)
    assert served(rig) == 1
    assert all("second" in runner.blended for runner in rig.runners)
    idle(rig)


def broken(*_: Any, **__: Any) -> Any:
    raise RuntimeError("no memory for a pass")


def test_a_rank_that_fails_among_others_ends_the_engine(make_blend: MakeRig) -> None:
    """What it would send next, the others would take for its part of the pass."""
    rig = make_blend(ranks=2)
    rig.generate("first", FIRST)
    for runner in rig.runners:
        runner._in_lockstep = True
    rig.recompute = broken
    rig.add("second", SECOND, 4)
    with pytest.raises(RuntimeError, match="no memory for a pass"):
        rig.run()


def test_a_shadow_that_fails_is_dropped_and_the_engine_comes_to_rest(make_blend: MakeRig) -> None:
    rig = make_blend({"shadow": 1.0})
    rig.generate("first", FIRST)
    runner = rig.runners[0]
    runner._in_full = broken_work  # type: ignore[method-assign, assignment]
    rig.generate("second", SECOND)
    assert served(rig) == 1
    assert not rig.busy()
    assert not runner._shadows
    idle(rig)


def broken_work(_: Any) -> Iterator[int]:
    yield 1
    raise RuntimeError("no memory for a draft")


def test_blends_at_once_share_the_memory_they_may_take(make_blend: MakeRig) -> None:
    # 96 bytes a token on a rank: room for one prompt of 480 tokens, not for two.
    rig = make_blend({"max_prompt_bytes": "64KiB", "max_blend_tokens_per_step": 32})
    rig.generate("first", FIRST)
    rig.add("second", SECOND, 4)
    rig.add("third", THIRD, 4)
    most = 0
    while rig.busy():
        rig.step()
        most = max(most, len(rig.planner._jobs))
    assert most == 1
    assert served(rig) == 2
    assert rig.outputs["third"] == expected_output(THIRD, 4)
    idle(rig)


def test_a_prompt_that_donors_cover_to_its_end_may_need_no_recomputing(make_blend: MakeRig) -> None:
    """Then nothing is run, and nothing can be compared either."""
    wishes = {"mode": "fast", "anchor_tokens": 0, "recompute_ratio": 0.0, "shadow": 1.0}
    rig = make_blend(wishes)
    document = text(958, 256)
    rig.generate("first", text(959, 64) + document)
    rig.add("second", document, 4)
    rig.run()
    assert served(rig) == 1
    assert not rig.runners[0]._shadows
    idle(rig)


def test_all_tokens_of_a_blend_are_attributed_to_a_source(make_blend: MakeRig) -> None:
    rig = make_blend()
    rig.generate("first", FIRST)
    request = rig.add("second", SECOND, 4)
    rig.step()
    split = side(rig).hit_tokens_by_tier_type(request)
    # vLLM computes nothing of the prompt but its last token.
    assert sum(split.values()) == len(SECOND)
    assert 0 < split[""] < split["dram"] < len(B + A)


def test_an_offer_that_vllm_cuts_short_is_let_go_and_the_prompt_computed(
    make_blend: MakeRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = make_blend()
    rig.generate("first", FIRST)
    planner = side(rig)
    allocated = planner.allocated
    leased: list[int] = []

    def less(request: Any, blocks: Any, external: int) -> None:
        short = request.request_id == "second" and external > 0 and not leased
        allocated(request, blocks, external - 1 if short else external)
        if short:
            leased.append(planner.store.snapshot()["tierkv_leased_slots"][0]["value"])

    monkeypatch.setattr(planner, "allocated", less)
    rig.generate("second", SECOND)
    assert leased == [0]
    declined = planner.store.snapshot()["tierkv_blend_declined_total"]
    told = {one["labels"]["reason"]: one["value"] for one in declined if one["value"]}
    assert told == {"no_match": 1, "cut_short": 1}  # the first prompt had no donors
    idle(rig)
