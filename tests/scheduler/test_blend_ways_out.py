# SPDX-License-Identifier: Apache-2.0
"""Whatever ends a blend, everything is given back.

See `blending.py`: approximate bytes that reach somebody else fail the rig's own check.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import pytest

from tests.scheduler.blend_kit import (
    EXPLAIN,
    FIRST,
    OFF,
    SECOND,
    A,
    B,
    MakeRig,
    counted,
    counter,
    exact_again,
    held_by_vllm,
    served,
)
from tests.scheduler.blending import BlendRig, recompute
from tests.scheduler.conftest import dram, dram_and_disk, text
from tests.scheduler.movers import FailingMover, RandomMover
from tests.scheduler.rig import expected_output
from tests.scheduler.test_reuse import forget_engine_cache, idle
from tests.scheduler.test_ways_out import disturb, step_until, wrap_movers


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


def offer_behind_a_hog(rig: BlendRig) -> None:
    """SECOND was offered a blend and finds no blocks while another request has them."""
    rig.generate("first", FIRST)
    rig.add("hog", text(980, 300), 40)
    step_until(rig, lambda: bool(rig.outputs["hog"]))
    rig.add("second", SECOND, 4)
    for _ in range(3):
        rig.step()


def test_a_reset_forgets_offers_that_were_made_before_it(make_blend: MakeRig) -> None:
    """After new weights were loaded, what was found before is of the past."""
    rig = make_blend(num_blocks=40, max_tokens=512)
    offer_behind_a_hog(rig)
    assert rig.planner.pending == 1
    assert "second" not in rig.running
    rig.connector.reset_cache()
    rig.run()
    assert rig.outputs["second"] == expected_output(SECOND, 4)
    assert served(rig) == 0
    idle(rig)


def test_an_offer_that_is_not_taken_gives_its_leases_back(make_blend: MakeRig) -> None:
    rig = make_blend(num_blocks=40, max_tokens=512)
    offer_behind_a_hog(rig)
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
    aborted: set[str] = set()
    for i in range(50):
        prompt = [t for d in rng.sample(documents, rng.randrange(1, 4)) for t in d]
        prompt += text(seed * 1000 + rng.randrange(20), rng.randrange(1, 50))
        count = rng.choice([1, 5, 60])
        asked[f"r{i}"] = (prompt, count)
        params = rng.choice([None, None, None, OFF, EXPLAIN])
        rig.add(f"r{i}", prompt, count, params=params, salt=rng.choice([None, None, "x"]))
        for _ in range(rng.randrange(8)):
            rig.step()
        aborted |= disturb(rig, rng, i)
    for mover in movers:
        mover.hold = False
    rig.run(1_000_000)
    for name, (prompt, count) in asked.items():
        if name not in aborted:
            assert rig.outputs[name] == expected_output(prompt, count), name
    idle(rig)
    # Over a disk it depends on the time of reads.
    assert served(rig) > (0 if seed % 2 else 3)
    assert not any(runner._drafts or runner._active for runner in rig.runners)
