# SPDX-License-Identifier: Apache-2.0
"""Which requests are blended, and how.

See `blending.py`: approximate bytes that reach somebody else fail the rig's own check.
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.scheduler.blend_kit import (
    CHOSEN,
    EXPLAIN,
    FIRST,
    OFF,
    SECOND,
    A,
    B,
    MakeRig,
    counter,
    exact_again,
    refused,
    served,
)
from tests.scheduler.blending import recompute
from tests.scheduler.conftest import text
from tests.scheduler.rig import expected_output
from tests.scheduler.test_reuse import forget_engine_cache, idle
from tests.scheduler.test_ways_out import step_until
from tierkv.blend.plan import MODES

QUALITY = {"tierkv": {"blend": "quality"}}


def test_a_request_that_wants_exact_kv_gets_it(make_blend: MakeRig) -> None:
    rig = make_blend()
    rig.generate("first", FIRST)
    rig.generate("exact", SECOND, params=OFF)
    assert served(rig) == 0
    assert rig.blended == {}
    assert refused(rig) == {"no_match": 1}


def test_on_request_blends_only_for_those_who_ask(make_blend: MakeRig) -> None:
    rig = make_blend(blend={"mode": "on_request"})
    rig.generate("first", FIRST)
    rig.generate("silent", SECOND)
    assert served(rig) == 0
    forget_engine_cache(rig)
    other = text(922, 30) + A + B + text(923, 40)
    rig.generate("asks", other, params={"tierkv": {"blend": "fast"}})
    assert served(rig) == 1


def test_a_request_may_choose_another_mode(make_blend: MakeRig) -> None:
    rig = make_blend(blend={"mode": "fast"})
    rig.generate("first", FIRST)
    rig.generate("fast", text(924, 40) + B + A + text(905, 40))
    fast = counter(rig, "tierkv_blend_tokens_total", "kind")[("recomputed",)]
    rig.generate("quality", text(925, 40) + B + A + text(905, 40), params=QUALITY)
    both = counter(rig, "tierkv_blend_tokens_total", "kind")[("recomputed",)]
    assert fast == 40 + 12 + 16 + 12 + 40 + CHOSEN
    # The configuration's own values are those of its own mode.
    quality = MODES["quality"]
    anchors, every = quality.anchor_tokens, quality.sample_every
    samples = sum(round((length - anchors) / every) for length in (184, 200))
    anew = 40 + anchors + 16 + anchors + 40 + samples
    assert both - fast == anew + round(quality.ratio * 384) + 384 // 16


def test_tenants_never_share(make_blend: MakeRig) -> None:
    rig = make_blend()
    rig.generate("theirs", FIRST, salt="theirs")
    rig.generate("ours", SECOND, salt="ours")
    rig.generate("nobody's", SECOND)
    assert served(rig) == 0
    rig.generate("theirs again", SECOND, salt="theirs")
    assert served(rig) == 1


@pytest.mark.parametrize(
    "declined", [{"params": {"tierkv": {"load": False}}}, {"prompt_logprobs": 1}]
)
def test_requests_that_must_not_load_are_not_blended(
    make_blend: MakeRig, declined: dict[str, Any]
) -> None:
    rig = make_blend()
    rig.generate("first", FIRST)
    rig.add("second", SECOND, 4, **declined)
    rig.run()
    assert served(rig) == 0
    idle(rig)


def test_short_prompts_and_short_finds_are_computed(make_blend: MakeRig) -> None:
    rig = make_blend(blend={"min_tokens": 300})
    rig.generate("first", FIRST)
    rig.generate("short prompt", text(926, 40) + A)
    rig.generate("short find", text(927, 200) + A)
    assert served(rig) == 0
    assert refused(rig) == {"no_match": 1, "short": 1}


def test_a_prompt_that_needs_too_much_memory_is_computed(make_blend: MakeRig) -> None:
    # 96 bytes a token on a rank.
    rig = make_blend(blend={"max_prompt_bytes": "40KiB"})
    rig.generate("first", FIRST)
    rig.generate("second", SECOND)
    assert refused(rig) == {"no_match": 1, "memory": 1}


def test_only_the_last_incomplete_block_approximate_is_not_worth_it(make_blend: MakeRig) -> None:
    """Its hash does not exist yet, so it could not be tainted."""
    rig = make_blend(blend={"min_tokens": 4}, block_size=128, num_blocks=40)
    assert rig.connector._scheduler.store.layout.chunk_tokens == 128
    document = text(928, 256)
    rig.generate("first", document)
    rig.generate("second", text(929, 256) + document[:100] + text(930, 20))
    assert served(rig) == 0
    idle(rig)


def test_without_vllms_prefix_cache_it_works_as_well(make_blend: MakeRig) -> None:
    rig = make_blend(prefix_caching=False)
    rig.generate("first", FIRST)
    rig.generate("second", SECOND)
    assert served(rig) == 1
    exact_again(rig, "exact", SECOND)
    idle(rig)


def test_few_tokens_are_recomputed_between_two_steps(make_blend: MakeRig) -> None:
    rig = make_blend(blend={"max_blend_tokens_per_step": 16}, max_tokens=512)
    rig.generate("first", FIRST)
    rig.add("other", text(931, 20), 60)
    step_until(rig, lambda: len(rig.outputs["other"]) == 1)
    rig.add("second", SECOND, 4)
    step_until(rig, lambda: bool(rig.outputs["second"]))
    # The other one went on meanwhile: 166 tokens, 16 a step.
    assert len(rig.outputs["other"]) > 10
    rig.run()
    assert rig.outputs["second"] == expected_output(SECOND, 4)


def test_what_one_pass_computes_is_bounded_by_the_memory_of_its_masks(
    make_blend: MakeRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tierkv_vllm.blend.forward.MASKS_BYTES", 16 * len(SECOND))
    rig = make_blend(blend={"shadow": 1.0})
    passes: list[int] = []

    def counted(model: Any, scratch: Any, tokens: Any, chosen: Any, **more: Any) -> Any:
        passes.append(len(chosen))
        return recompute(model, scratch, tokens, chosen, **more)

    rig.recompute = counted
    rig.generate("first", FIRST)
    rig.generate("second", SECOND)
    anew = counter(rig, "tierkv_blend_tokens_total", "kind")[("recomputed",)]
    whole, rest = divmod(anew, 16)
    assert passes == [16] * whole + [rest] + [16] * (len(SECOND) // 16)  # and in full, to compare


def test_a_response_tells_what_was_taken_from_where(make_blend: MakeRig) -> None:
    rig = make_blend()
    rig.generate("first", FIRST)
    told: dict[str, Any] = {}
    side = rig.connector._scheduler
    finished = side.finished
    side.finished = lambda request: told.setdefault(request.request_id, finished(request))
    rig.generate("second", SECOND, params=EXPLAIN)
    parts = told["second"]["tierkv"]
    assert str(parts).count("any_text") == 1
    assert "recomputed" in str(parts)
