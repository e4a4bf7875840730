# SPDX-License-Identifier: Apache-2.0
"""Any-text reuse beside vLLM's real scheduler: claims, accounts, taint, and every way out.

See `blending.py`: approximate bytes that reach somebody else fail the rig's own check.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from tierkv_vllm.blend.taint import Taint

from tests.scheduler.blending import MARK, BlendRig, recompute, turned
from tests.scheduler.conftest import dram, dram_and_disk, text
from tests.scheduler.movers import FailingMover, RandomMover
from tests.scheduler.rig import HEAD_SIZE, Rig, expected_output, kv_of, prefix_states
from tests.scheduler.test_counting import Exporter
from tests.scheduler.test_reuse import forget_engine_cache, idle
from tests.scheduler.test_ways_out import step_until, wrap_movers
from tierkv.blend.plan import MODES
from tierkv.cli.top_view import Viewer
from tierkv.stats import client
from tierkv.stats.source import SocketSource
from tierkv.telemetry import rates

MakeRig = Callable[..., BlendRig]
OFF = {"tierkv": {"blend": "off"}}
EXPLAIN = {"tierkv": {"explain": True}}

BLEND = {
    "mode": "balanced",
    "min_tokens": 64,
    "anchor_tokens": 12,
    "sample_every": 0,
    "recompute_ratio": 0.06,
}

A, B = text(901, 200), text(902, 200)
FIRST = A + B + text(903, 30)
"""Leaves donors: 6 chunks, of B the first 184 tokens."""
SECOND = text(904, 40) + B + A + text(905, 40)
"""Holds B in [40, 240) and A in [240, 440) of 480."""


@pytest.fixture
def make_blend(rig_model: Path) -> Iterator[MakeRig]:
    rigs: list[Rig] = []

    def make(config: dict[str, Any] | None = None, **options: Any) -> BlendRig:
        blend = {**BLEND, **options.pop("blend", {})}
        extra = {**(config or dram()), "blend": blend}
        rigs.append(BlendRig(rig_model, extra, **{"num_blocks": 200, **options}))
        return rigs[-1]  # type: ignore[return-value]

    yield make
    for rig in rigs:
        rig.close()


def counter(rig: Rig, name: str, *labels: str) -> dict[tuple[str, ...], int]:
    """One counter by some of its labels, zeros left out."""
    found: dict[tuple[str, ...], int] = {}
    for one in rig.connector._scheduler.store.context.counters.snapshot()[name]:
        if one["value"]:
            key = tuple(one["labels"][label] for label in labels)
            found[key] = found.get(key, 0) + int(one["value"])
    return found


def counted(rig: Rig) -> dict[tuple[str, ...], int]:
    """Query tokens by (outcome, tier), zeros left out."""
    return counter(rig, "tierkv_query_tokens_total", "outcome", "tier")


def held_by_vllm(rig: Rig) -> int:
    """Prompt tokens that vLLM's own prefix cache had, over all requests so far."""
    return counter(rig, "tierkv_gpu_hit_tokens_total").get((), 0)


def served(rig: Rig) -> int:
    return counter(rig, "tierkv_blend_requests_total", "outcome").get(("served",), 0)


def refused(rig: Rig) -> dict[str, int]:
    return {k: n for (k,), n in counter(rig, "tierkv_blend_declined_total", "reason").items()}


def kv_bytes(rig: Rig, request_id: str, rank: int = 0) -> torch.Tensor:
    """A running request's KV in all layers: int8 [layers, positions, heads, 2 x head size]."""
    state = rig.running[request_id]
    blocks, offsets = rig._places(state, 0, 0, len(state.blocks[0]) * rig.block_size)
    return torch.stack([cache[blocks, :, offsets] for _, cache in rig._layers(0, rank)])


def plan_by_hand() -> tuple[list[int], list[tuple[range, int]]]:
    """For SECOND behind FIRST: what is computed in any case, and donors' pieces with their shift.

    B's last 16 tokens were never stored: FIRST has 430 tokens, 6 whole chunks.
    """
    pieces = [(range(40, 224), -160), (range(240, 440), 240)]
    fixed = [*range(52), *range(224, 252), *range(440, 480)]
    return fixed, pieces


@pytest.mark.parametrize("ranks", [1, 2])
def test_every_byte_of_a_blended_prompt_comes_from_where_the_plan_says(
    make_blend: MakeRig, ranks: int
) -> None:
    rig = make_blend(ranks=ranks)
    rig.generate("first", FIRST)
    rig.add("second", SECOND, 4)
    step_until(rig, lambda: "second" in rig.running)
    fixed, pieces = plan_by_hand()
    kept = [place for piece, _ in pieces for place in piece if place not in fixed]
    extra = round(0.06 * (184 + 200))
    # The rig's model attends the more to a token the later it stands.
    kept = kept[:-extra]
    for rank in range(ranks):
        got = kv_bytes(rig, "second", rank)
        for layer in range(len(got)):
            donors = kv_of(prefix_states(FIRST), layer, rank)
            wanted = torch.full_like(got[layer, : len(SECOND)], MARK)
            own = kv_of(prefix_states(SECOND), layer, rank)
            wanted[:40] = own[:40]
            for piece, shift in pieces:
                for place in piece:
                    if place in kept:
                        wanted[place] = donors[place - shift]
                        wanted[place, :, :HEAD_SIZE] += turned(shift)
            assert torch.equal(got[layer, : len(SECOND)], wanted), (rank, layer)
    rig.run()
    assert rig.outputs["second"] == expected_output(SECOND, 4)
    idle(rig)


def test_the_time_of_a_blend_is_counted_and_learnt(make_blend: MakeRig) -> None:
    rig = make_blend()
    rig.generate("first", FIRST)
    rig.generate("second", SECOND)
    assert served(rig) == 1
    scheduler = rig.connector._scheduler
    (spent,) = scheduler.store.context.counters.snapshot()["tierkv_blend_seconds_total"]
    assert spent["value"] > 0
    assert scheduler._blend._seconds_per_token == pytest.approx(spent["value"] / len(SECOND))


def test_accounts_add_up(make_blend: MakeRig) -> None:
    rig = make_blend()
    rig.generate("first", FIRST)
    before = counted(rig)
    assert before == {("miss", "none"): 384, ("tail", "none"): 46}
    rig.generate("second", SECOND)
    fixed, _ = plan_by_hand()
    recomputed = len(fixed) + round(0.06 * 384)
    assert counted(rig) == {
        **before,
        ("hit", "dram"): 480 - recomputed,
        ("recomputed", "none"): recomputed,
    }
    assert sum(counted(rig).values()) == rig.queries == len(FIRST) + len(SECOND)
    assert rig.hits == len(SECOND)
    by_reuse = counter(rig, "tierkv_query_tokens_total", "outcome", "reuse")
    assert by_reuse["hit", "any_text"] == 480 - recomputed
    assert ("hit", "exact") not in by_reuse
    assert counter(rig, "tierkv_blend_tokens_total", "kind") == {
        ("reused",): 480 - recomputed,
        ("recomputed",): recomputed,
    }
    assert counter(rig, "tierkv_blend_requests_total", "outcome") == {("served",): 1}
    # The first one had nothing to be compared with.
    assert refused(rig) == {"no_match": 1}


def test_socket_page_and_top_tell_the_same_of_a_blended_prompt(make_blend: MakeRig) -> None:
    rig = make_blend()
    exporter = Exporter(rig)
    rig.generate("first", FIRST)
    rig.generate("second", SECOND)
    rig.step()
    fixed, _ = plan_by_hand()
    anew = len(fixed) + round(0.06 * 384)
    reused = len(SECOND) - anew
    with closing(client.connect(rig.connector._scheduler._watch._server.path)) as engine:
        viewer = Viewer(engine.info, "here")
        viewer.add(SocketSource(engine).read(50))
        on_socket = engine.request("snapshot")["metrics"]
    for metrics in (on_socket, exporter.snapshot()):
        tokens = rates.totals(metrics, "tierkv_query_tokens_total", "outcome", "tier", "reuse")
        assert {key: n for key, n in tokens.items() if n} == {
            ("miss", "none", "none"): 384,
            ("tail", "none", "none"): 46,
            ("hit", "dram", "any_text"): reused,
            ("recomputed", "none", "none"): anew,
        }
        blended = rates.totals(metrics, "tierkv_blend_tokens_total", "kind")
        assert blended == {("reused",): reused, ("recomputed",): anew}
        assert rates.total(metrics, "tierkv_blend_requests_total", outcome="served") == 1
        assert rates.total(metrics, "tierkv_blend_declined_total", reason="no_match") == 1
    view = viewer.view()
    assert view.blend is not None
    assert (view.blend.served, view.blend.failed, view.blend.declined) == (1, 0, 1)
    assert (view.blend.reused, view.blend.recomputed, view.blend.kl) == (reused, anew, None)
    assert view.session.hit == reused / (len(FIRST) + len(SECOND))
    assert [tier.hit_session for tier in view.tiers] == [view.session.hit]
    (second,) = [one for one in view.requests or () if one["request_id"] == "second"]
    parts = [(part["outcome"], part["tier"], part["tokens"]) for part in second["parts"]]
    assert sorted(parts) == [("hit", "dram", reused), ("recomputed", "none", anew)]
    idle(rig)


def test_exact_text_comes_first_and_is_counted_apart(make_blend: MakeRig) -> None:
    rig = make_blend()
    beginning = text(910, 200)
    rig.generate("first", FIRST)
    rig.generate("beginning", beginning)
    forget_engine_cache(rig)
    # 192 exact tokens are loaded, and the rest is blended behind them, in one claim.
    rig.generate("both", beginning[:192] + B + A[:100] + text(911, 20))
    by_reuse = counter(rig, "tierkv_query_tokens_total", "outcome", "reuse")
    assert by_reuse["hit", "exact"] == 192
    assert by_reuse["hit", "any_text"] > 200
    assert sum(counted(rig).values()) == rig.queries
    assert rig.blended["both"] == 192
    assert rig.runners[0].jobs["both"].exact == 192
    idle(rig)


def test_engine_blocks_that_are_there_already_are_used_as_they_are(make_blend: MakeRig) -> None:
    rig = make_blend()
    beginning = text(912, 100)
    rig.generate("first", FIRST)
    rig.generate("beginning", beginning)
    rig.generate("both", beginning + B + A + text(913, 20))
    # Six blocks of vLLM's own; the first 4 tokens of what follows are computed.
    assert rig.runners[0].jobs["both"].exact == 96
    assert rig.blended["both"] == 100
    idle(rig)


def test_donors_on_disk_are_read_and_counted_for_it(make_blend: MakeRig, tmp_path: Path) -> None:
    rig = make_blend(dram_and_disk(tmp_path / "kv", capacity="160KiB"))
    side = rig.connector._scheduler
    rig.generate("first", FIRST)
    assert side.store.drain()
    # DRAM has room for 26 chunks: others push the donors out.
    for i in range(12):
        rig.generate(f"other {i}", text(914_000 + i, 200))
        assert side.store.drain()
    in_dram = [side.store._dram.index.get(key) for key in rig.planner.donors._by_key]
    assert in_dram[:6] == [None] * 6
    rig.add("second", SECOND, 4)
    step_until(rig, lambda: "second" in rig.finished, 100_000)
    rig.run()
    assert rig.outputs["second"] == expected_output(SECOND, 4)
    assert served(rig) == 1
    by_tier = counter(rig, "tierkv_query_tokens_total", "outcome", "tier", "reuse")
    assert by_tier["hit", "disk", "any_text"] == 337
    idle(rig)


# No pollution


def exact_again(rig: BlendRig, name: str, prompt: list[int]) -> None:
    """The same prompt with exact KV only: the rig checks all that it attends to."""
    rig.generate(name, prompt, params=OFF)


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


# Control


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
    assert fast == 40 + 12 + 16 + 12 + 40 + round(0.06 * 384)
    # The configuration's own values are those of its own mode.
    quality = MODES["quality"]
    anchors, every = quality.anchor_tokens, quality.sample_every
    first, second = (range(b + anchors + every // 2, e, every) for b, e in ((40, 224), (240, 440)))
    anew = 40 + anchors + len(first) + 16 + anchors + len(second) + 40
    assert both - fast == anew + round(quality.ratio * 384)


QUALITY = {"tierkv": {"blend": "quality"}}


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


# Ways out


def fresh_hashes(rig: BlendRig, prompt: list[int]) -> list[bytes]:
    request = rig.add("for its hashes", prompt, 1)
    hashes = list(request.block_hashes)
    rig.abort("for its hashes")
    return hashes


def fail_drafts(rig: BlendRig, rank: int) -> None:
    def broken(*_: Any) -> Any:
        raise MemoryError("no memory for a draft")

    rig.runners[rank]._draft = broken  # type: ignore[method-assign]


def fail_recomputing(rig: BlendRig, rank: int) -> None:
    def broken(*_: Any, **__: Any) -> Any:
        raise RuntimeError("no memory for a pass")

    rig.recompute = broken


@pytest.mark.parametrize("fail", [fail_drafts, fail_recomputing])
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_blend_that_fails_leaves_an_ordinary_request_behind(
    make_blend: MakeRig, fail: Callable[[BlendRig, int], None], ranks: int
) -> None:
    rig = make_blend(ranks=ranks, max_tokens=512)
    rig.generate("first", FIRST)
    fail(rig, ranks - 1)
    request = rig.add("second", SECOND, 4)
    rig.run()
    # The rig has checked that every byte of it was computed.
    assert rig.outputs["second"] == expected_output(SECOND, 4)
    assert counter(rig, "tierkv_blend_requests_total", "outcome") == {("failed",): 1}
    assert counted(rig)["failed", "dram"] == 480
    assert sum(counted(rig).values()) == len(FIRST) + len(SECOND)
    hashes = fresh_hashes(rig, SECOND)
    assert request.block_hashes[: len(hashes)] == hashes
    rig.run()
    # Its blocks are everybody's, and what it computed is stored.
    held = held_by_vllm(rig)
    exact_again(rig, "exact", SECOND)
    assert held_by_vllm(rig) - held == 464
    forget_engine_cache(rig)
    exact_again(rig, "from the tier", SECOND)
    assert counted(rig)["hit", "dram"] == 448
    idle(rig)


def test_the_exact_part_of_a_blend_that_fails_stays_cached(make_blend: MakeRig) -> None:
    rig = make_blend()
    beginning = text(932, 200)
    rig.generate("first", FIRST)
    rig.generate("beginning", beginning)
    forget_engine_cache(rig)
    fail_drafts(rig, 0)
    rig.generate("both", beginning[:192] + B + A)
    forget_engine_cache(rig)
    rig.generate("beginning again", beginning)
    assert counted(rig)["hit", "dram"] == 192


def test_exact_tokens_that_do_not_arrive_fail_the_blend(make_blend: MakeRig) -> None:
    rig = make_blend()
    beginning = text(933, 200)
    rig.generate("first", FIRST)
    rig.generate("beginning", beginning)
    forget_engine_cache(rig)
    wrap_movers(rig, lambda inner: FailingMover(inner, fails_load=lambda job_id: True))
    prompt = beginning[:192] + B + A
    rig.generate("both", prompt)
    assert counter(rig, "tierkv_blend_requests_total", "outcome") == {("failed",): 1}
    assert rig.blended == {}
    idle(rig)


def hold_news(rig: BlendRig, rank: int) -> Callable[[], None]:
    """A rank that reports late, until the returned function is called."""
    runner = rig.runners[rank]
    own = runner.news
    runner.news = lambda: None  # type: ignore[method-assign]

    def release() -> None:
        runner.news = own  # type: ignore[method-assign]

    return release


def test_a_rank_that_reports_late_delays_only_its_request(make_blend: MakeRig) -> None:
    rig = make_blend(ranks=2)
    rig.generate("first", FIRST)
    release = hold_news(rig, 1)
    rig.add("second", SECOND, 4)
    for turn in range(3):
        rig.add(f"other {turn}", text(940 + turn, 100), 4)
    step_until(rig, lambda: all(f"other {turn}" in rig.finished for turn in range(3)))
    assert "second" not in rig.running
    assert rig.connector.has_pending_push_work()
    release()
    rig.run()
    assert rig.outputs["second"] == expected_output(SECOND, 4)
    assert served(rig) == 1
    idle(rig)


@pytest.mark.parametrize("steps", range(5))
def test_an_abort_at_any_time_gives_everything_back(make_blend: MakeRig, steps: int) -> None:
    rig = make_blend(ranks=2, blend={"max_blend_tokens_per_step": 32})
    rig.generate("first", FIRST)
    rig.add("second", SECOND, 4)
    for _ in range(steps):
        rig.step()
    rig.abort("second")
    rig.run()
    idle(rig)
    assert all(not runner._drafts and not runner._active for runner in rig.runners)
    rig.generate("after", SECOND)
    exact_again(rig, "exact", SECOND)
    idle(rig)


def test_an_abort_while_a_rank_is_late_holds_the_blocks_until_it_reports(
    make_blend: MakeRig,
) -> None:
    rig = make_blend(ranks=2)
    rig.generate("first", FIRST)
    release = hold_news(rig, 1)
    rig.add("second", SECOND, 4)
    for _ in range(4):
        rig.step()
    rig.abort("second")
    for _ in range(4):
        rig.step()
    # Blocks that are still to be filled belong to nobody else.
    assert rig.free_blocks() < rig.num_blocks - 1
    release()
    rig.run()
    idle(rig)


def test_a_blended_request_that_is_preempted_goes_on_and_saves_nothing_approximate(
    make_blend: MakeRig,
) -> None:
    rig = make_blend(num_blocks=70, max_tokens=512)
    rig.generate("first", FIRST)
    prompts = {f"r{i}": text(950 + i, 70) + B + A[:100] + text(960 + i, 30) for i in range(2)}
    for name, prompt in prompts.items():
        rig.add(name, prompt, 200)
    rig.run()
    assert rig.preemptions > 0
    assert served(rig) >= 2
    for name, prompt in prompts.items():
        assert rig.outputs[name] == expected_output(prompt, 200)
    idle(rig)
    for name, prompt in prompts.items():
        exact_again(rig, f"{name} exact", prompt + rig.outputs[name])
        forget_engine_cache(rig)
        exact_again(rig, f"{name} from the tier", prompt + rig.outputs[name])


def test_a_second_blend_of_one_request_does_not_make_the_first_one_exact(
    make_blend: MakeRig,
) -> None:
    """Preempted, it finds its own approximate blocks again, and is blended behind them."""
    rig = make_blend(max_tokens=512)
    rig.generate("first", FIRST)
    prompt = text(970, 70) + B + A + text(971, 40)
    rig.add("second", prompt, 60)
    step_until(rig, lambda: len(rig.outputs["second"]) == 3)
    request = rig.scheduler.requests["second"]
    rig.scheduler.running.remove(request)
    rig.scheduler._preempt_request(request, 0.0)
    rig.scheduler.prev_step_scheduled_req_ids.discard("second")
    # Of its blocks all but the first ten are evicted.
    pool = rig.scheduler.kv_cache_manager.block_pool
    for block in pool.blocks:
        known = request.block_hashes[10:]
        if block.block_hash is not None and any(h in block.block_hash for h in known):
            pool._maybe_evict_cached_block(block)
    rig.run()
    assert rig.outputs["second"] == expected_output(prompt, 60)
    assert served(rig) == 2
    forget_engine_cache(rig)
    exact_again(rig, "exact", prompt + rig.outputs["second"])
    idle(rig)


def test_a_reset_forgets_offers_that_were_made_before_it(make_blend: MakeRig) -> None:
    """After new weights were loaded, what was found before is of the past."""
    rig = make_blend(num_blocks=40, max_tokens=512)
    rig.generate("first", FIRST)
    rig.add("hog", text(980, 300), 40)
    step_until(rig, lambda: bool(rig.outputs["hog"]))
    rig.add("second", SECOND, 4)
    for _ in range(3):
        rig.step()
    assert rig.planner.pending == 1
    assert "second" not in rig.running
    rig.connector.reset_cache()
    rig.run()
    assert rig.outputs["second"] == expected_output(SECOND, 4)
    assert served(rig) == 0
    idle(rig)


def test_an_offer_that_is_not_taken_gives_its_leases_back(make_blend: MakeRig) -> None:
    rig = make_blend(num_blocks=40, max_tokens=512)
    rig.generate("first", FIRST)
    rig.add("hog", text(981, 300), 40)
    step_until(rig, lambda: bool(rig.outputs["hog"]))
    rig.add("second", SECOND, 4)
    for _ in range(3):
        rig.step()
    leased = rig.connector._scheduler.store.snapshot()["tierkv_leased_slots"][0]["value"]
    assert leased == 6
    rig.abort("second")
    rig.run()
    idle(rig)


def test_shadows_run_when_the_engine_is_idle_and_come_to_an_end(make_blend: MakeRig) -> None:
    rig = make_blend(blend={"shadow": 1.0}, ranks=2)
    rig.generate("first", FIRST)
    rig.generate("second", SECOND)
    assert counter(rig, "tierkv_blend_shadows_total", "agree") == {("yes",): 1}
    assert not rig.busy()
    idle(rig)


def test_standing_aside_with_a_blend_under_way_serves_on(
    make_blend: MakeRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = make_blend(blend={"shadow": 1.0})
    rig.generate("first", FIRST)
    rig.add("second", SECOND, 4)
    rig.step()
    rig.connector._stand_aside("on purpose")
    rig.run()
    assert rig.outputs["second"] == expected_output(SECOND, 4)
    assert rig.free_blocks() == rig.num_blocks - 1


@pytest.mark.parametrize("seed", range(6))
def test_random_traffic_leaves_nothing_behind(
    make_blend: MakeRig, tmp_path: Path, seed: int
) -> None:
    """Documents in ever new orders, aborts, resets, failures, late copies, little memory."""
    rng = Random(seed)
    small = dram_and_disk(tmp_path / "kv", capacity="256KiB", disk="2MiB")
    rig = make_blend(
        small if seed % 2 else dram("512KiB"),
        num_blocks=rng.choice([60, 90, 140]),
        max_tokens=rng.choice([64, 300]),
        ranks=1 + seed % 2,
        blend={
            "mode": rng.choice(["fast", "balanced", "quality"]),
            "max_blend_tokens_per_step": rng.choice([24, 200]),
            "exact_after": rng.choice([0, 1, 2]),
            "shadow": rng.choice([0.0, 0.5]),
        },
    )

    def flaky(*args: Any, **more: Any) -> Any:
        if rng.random() < 0.03:
            raise RuntimeError(f"on purpose, seed {seed}")
        return recompute(*args, **more)

    if rig.ranks == 1:
        rig.recompute = flaky
    movers = wrap_movers(rig, lambda inner: RandomMover(inner, seed))
    documents = [text(seed * 100 + i, rng.randrange(70, 220)) for i in range(6)]
    asked: dict[str, tuple[list[int], int]] = {}
    aborted = set()
    for i in range(50):
        prompt = [t for d in rng.sample(documents, rng.randrange(1, 4)) for t in d]
        prompt += text(seed * 1000 + rng.randrange(20), rng.randrange(1, 50))
        count = rng.choice([1, 5, 60])
        asked[f"r{i}"] = (prompt, count)
        params = rng.choice([None, None, None, OFF, EXPLAIN])
        rig.add(f"r{i}", prompt, count, params=params, salt=rng.choice([None, None, "x"]))
        for _ in range(rng.randrange(8)):
            rig.step()
        if rng.random() < 0.15:
            victim = f"r{rng.randrange(i + 1)}"
            if victim not in rig.finished:
                aborted.add(victim)
            rig.abort(victim)
        if rng.random() < 0.05:
            rig.scheduler.reset_prefix_cache()
    for mover in movers:
        mover.hold = False
    rig.run(5000)
    for name, (prompt, count) in asked.items():
        if name not in aborted:
            assert rig.outputs[name] == expected_output(prompt, count), name
    idle(rig)
    assert served(rig) > 3
    assert not any(runner._drafts or runner._active for runner in rig.runners)
