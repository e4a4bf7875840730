# SPDX-License-Identifier: Apache-2.0
"""Every way in which a request, a load or a save can end gives leases, jobs and blocks back."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import pytest

from tests.scheduler.conftest import dram, dram_and_disk, text
from tests.scheduler.movers import FailingMover, LateMover, RandomMover
from tests.scheduler.rig import Rig, expected_output
from tests.scheduler.test_reuse import counted, forget_engine_cache, idle
from tierkv.pages.mover import PageMover

MakeRig = Callable[..., Rig]


def disturb(rig: Rig, rng: Random, last: int) -> set[str]:
    """Now and then abort one of the requests r0 to r`last`, now and then reset vLLM's cache.

    Returns:
        The request that was ended before its time, if there is one.
    """
    aborted = set()
    if rng.random() < 0.15:
        victim = f"r{rng.randrange(last + 1)}"
        if victim not in rig.finished:
            aborted.add(victim)
        rig.abort(victim)
    if rng.random() < 0.05:
        rig.scheduler.reset_prefix_cache()
    return aborted


def wrap_movers(rig: Rig, wrap: Callable[[PageMover], Any]) -> list[Any]:
    """Put a misbehaving mover around each worker's own."""
    movers = []
    for worker in rig.workers:
        worker._worker._mover = wrap(worker._worker._mover)
        movers.append(worker._worker._mover)
    return movers


def step_until(rig: Rig, condition: Callable[[], bool], limit: int = 50) -> None:
    for _ in range(limit):
        if condition():
            return
        rig.step()
    raise AssertionError("the condition never came true")


def test_abort_while_a_load_writes_the_blocks(make_rig: MakeRig) -> None:
    rig = make_rig()
    prompt = text(1, 300)
    rig.generate("cold", prompt)
    forget_engine_cache(rig)
    (mover,) = wrap_movers(rig, LateMover)
    rig.add("aborted", prompt)
    step_until(rig, lambda: mover.waiting[1] == 1)
    rig.abort("aborted")
    rig.step()
    # vLLM keeps the blocks until the load is reported; nobody else may get them before.
    assert rig.free_blocks() < rig.num_blocks - 1
    mover.run(loads=True)
    mover.hold = False
    rig.run()
    idle(rig)
    rig.generate("after", prompt)
    assert counted(rig)["hit", "dram"] == 512


def test_abort_while_waiting_running_and_unknown(make_rig: MakeRig) -> None:
    rig = make_rig(max_seqs=1)
    rig.add("running", text(2, 300), 50)
    rig.add("waiting", text(3, 300), 50)
    for _ in range(5):
        rig.step()
    rig.abort("waiting")
    rig.abort("running")
    rig.abort("never heard of")
    rig.run()
    idle(rig)
    # What the aborted request had computed is not lost.
    forget_engine_cache(rig)
    rig.generate("again", text(2, 300))
    assert counted(rig)["hit", "dram"] == 256


def test_blocks_that_are_being_saved_are_not_overwritten_first(make_rig: MakeRig) -> None:
    # Room for one request: the second one writes into the blocks that the first one left.
    rig = make_rig(num_blocks=21)
    (mover,) = wrap_movers(rig, LateMover)
    documents = [text(10 + i, 300) for i in range(4)]
    for i, document in enumerate(documents):
        rig.add(f"cold {i}", document)
    step_until(rig, lambda: len(rig.finished) == 4)
    mover.hold = False
    rig.run()
    for i, document in enumerate(documents):
        forget_engine_cache(rig)
        rig.generate(f"warm {i}", document)
    assert counted(rig)["hit", "dram"] == 4 * 256
    idle(rig)


def test_without_the_fence_the_same_test_fails(
    make_rig: MakeRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(LateMover, "fence", lambda self, job_ids: None)
    with pytest.raises(AssertionError, match="wrong KV"):
        test_blocks_that_are_being_saved_are_not_overwritten_first(make_rig)


def test_blocks_shared_within_one_step_are_saved_only_once_they_exist(make_rig: MakeRig) -> None:
    rig = make_rig(max_tokens=512)
    shared = text(40, 130)
    wrap_movers(rig, lambda inner: inner)
    # Both in one step: the second takes the first one's blocks before they are computed.
    rig.add("first", shared + text(41, 20))
    rig.add("second", shared + text(42, 20))
    rig.run()
    forget_engine_cache(rig)
    rig.generate("warm", shared + text(43, 20))
    assert counted(rig)["hit", "dram"] == 128


def test_preemption_saves_what_was_computed_and_resumes_from_it(make_rig: MakeRig) -> None:
    # Three requests that together outgrow the blocks while they generate.
    rig = make_rig(num_blocks=40, max_tokens=512)
    prompts = {f"r{i}": text(20 + i, 170) for i in range(3)}
    for name, prompt in prompts.items():
        rig.add(name, prompt, 90)
    rig.run()
    assert rig.preemptions > 0
    for name, prompt in prompts.items():
        assert rig.outputs[name] == expected_output(prompt, 90)
    idle(rig)


def test_a_failed_load_is_recomputed_once_and_not_offered_again(make_rig: MakeRig) -> None:
    rig = make_rig()
    prompt = text(30, 300)
    rig.generate("cold", prompt)
    forget_engine_cache(rig)
    wrap_movers(rig, lambda inner: FailingMover(inner, fails_load=lambda job_id: True))
    rig.generate("failed", prompt)
    assert counted(rig)["failed", "dram"] == 256
    assert ("hit", "dram") not in counted(rig)
    idle(rig)


def test_one_failing_rank_fails_the_load_on_all(make_rig: MakeRig) -> None:
    rig = make_rig(ranks=2)
    prompt = text(31, 300)
    rig.generate("cold", prompt)
    forget_engine_cache(rig)
    worker = rig.workers[1]._worker
    worker._mover = FailingMover(worker._mover, fails_load=lambda job_id: True)
    rig.generate("failed", prompt)
    assert counted(rig)["failed", "dram"] == 256
    idle(rig)


def test_a_failed_save_is_never_served(make_rig: MakeRig) -> None:
    rig = make_rig(ranks=2)
    worker = rig.workers[1]._worker
    worker._mover = FailingMover(worker._mover, fails_save=lambda job_id: True)
    prompt = text(32, 300)
    rig.generate("cold", prompt)
    forget_engine_cache(rig)
    rig.generate("miss", prompt)
    assert ("hit", "dram") not in counted(rig)
    idle(rig)


def test_reset_forgets_everything_even_with_copies_in_flight(
    make_rig: MakeRig, tmp_path: Path
) -> None:
    rig = make_rig(dram_and_disk(tmp_path / "kv"))
    (mover,) = wrap_movers(rig, LateMover)
    prompt = text(33, 300)
    rig.add("cold", prompt)
    step_until(rig, lambda: mover.waiting[0] > 0 and "cold" in rig.finished)
    assert rig.scheduler.reset_prefix_cache(reset_connector=True)
    mover.hold = False
    rig.run()
    rig.generate("after", prompt)
    assert not any(outcome == "hit" for outcome, _ in counted(rig))
    idle(rig)


def test_requests_alive_at_a_reset_save_nothing_more(make_rig: MakeRig) -> None:
    rig = make_rig()
    prompt = text(34, 300)
    rig.add("alive", prompt, 40)
    for _ in range(4):
        rig.step()
    rig.connector.reset_cache()
    rig.run()
    forget_engine_cache(rig)
    rig.generate("after", prompt)
    assert ("hit", "dram") not in counted(rig)


def test_an_exception_in_a_hook_never_reaches_the_engine(
    make_rig: MakeRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = make_rig()
    prompt = text(35, 300)
    rig.generate("cold", prompt)
    forget_engine_cache(rig)
    side = rig.connector._scheduler

    def broken(*args: object, **kwargs: object) -> None:
        raise RuntimeError("broken on purpose")

    monkeypatch.setattr(side, "_load_ops", broken)
    # The load was admitted when it broke: vLLM must still hear of its end.
    rig.generate("broken", prompt)
    assert rig.connector._aside is not None
    rig.generate("without", prompt)
    assert rig.free_blocks() == rig.num_blocks - 1


@pytest.mark.parametrize(
    "hook", ["on_new_request", "matched_tokens", "plan_step", "finished", "loaded", "saved"]
)
def test_any_hook_may_break(make_rig: MakeRig, monkeypatch: pytest.MonkeyPatch, hook: str) -> None:
    rig = make_rig()
    prompt = text(36, 300)
    rig.generate("cold", prompt)
    forget_engine_cache(rig)

    def broken(*args: object, **kwargs: object) -> None:
        raise RuntimeError("broken on purpose")

    monkeypatch.setattr(rig.connector._scheduler, hook, broken)
    longer = prompt + text(37, 100)
    rig.add("broken", longer)
    for _ in range(40):
        rig.step()
    assert rig.outputs["broken"] == expected_output(longer, 4)
    assert rig.connector._aside is not None


@pytest.mark.parametrize("seed", range(6))
def test_random_traffic_leaves_nothing_behind(make_rig: MakeRig, tmp_path: Path, seed: int) -> None:
    """A tree of prompts, aborts, resets, late copies and little memory, all from one seed."""
    rng = Random(seed)
    config = (
        dram_and_disk(tmp_path / "kv", capacity="128KiB", disk="1MiB")
        if seed % 2
        else dram("128KiB")
    )
    rig = make_rig(config, num_blocks=rng.choice([30, 45, 80]), max_tokens=rng.choice([64, 200]))
    movers = wrap_movers(rig, lambda inner: RandomMover(inner, seed))
    stems = [text(seed * 100 + i, rng.randrange(40, 200)) for i in range(4)]
    asked: dict[str, tuple[list[int], int]] = {}
    aborted: set[str] = set()
    for i in range(60):
        prompt = rng.choice(stems) + text(seed * 1000 + rng.randrange(12), rng.randrange(1, 120))
        asked[f"r{i}"] = (prompt, rng.randrange(1, 30))
        rig.add(f"r{i}", *asked[f"r{i}"])
        for _ in range(rng.randrange(6)):
            rig.step()
        aborted |= disturb(rig, rng, i)
    for mover in movers:
        mover.hold = False
    rig.run()
    for name, (prompt, count) in asked.items():
        if name not in aborted:
            assert rig.outputs[name] == expected_output(prompt, count), name
    idle(rig)


def test_a_mover_that_cannot_be_made_leaves_the_engine_alone(
    make_rig: MakeRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*args: object) -> None:
        raise RuntimeError("no C compiler")

    monkeypatch.setattr("tierkv_vllm.worker.make_mover", broken)
    rig = make_rig()
    assert rig.connector._aside == "RuntimeError: no C compiler"
    rig.generate("without", text(38, 300))
    assert rig.free_blocks() == rig.num_blocks - 1
