# SPDX-License-Identifier: Apache-2.0
"""Hybrid models: several KV cache groups, each with its own blocks, windows and block sizes.

The rig checks every byte that each group's attention reads; a block that vLLM took out of a window
and gave to somebody else shows at once.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest

from tests.scheduler.conftest import dram, dram_and_disk, text
from tests.scheduler.movers import LateMover, RandomMover
from tests.scheduler.rig import GroupShape, Rig, expected_output
from tests.scheduler.test_reuse import counted, forget_engine_cache, idle

MakeRig = Callable[..., Rig]

FULL = GroupShape()
WINDOW = 96
GEMMA = (FULL, GroupShape(window=WINDOW), GroupShape(window=WINDOW))
"""One full-attention group beside two with a window: 3 blocks of 16 tokens for each 16 tokens."""
MODELS = {
    "full and two windows": GEMMA,
    "windows alone": (GroupShape(window=WINDOW),),
    "two windows": (FULL, GroupShape(window=64), GroupShape(window=160)),
    "blocks of two sizes": (FULL, GroupShape(32, WINDOW, heads=1)),
    "a window with finer blocks": (GroupShape(32, heads=1), GroupShape(16, WINDOW)),
    "a window that ends inside a block": (FULL, GroupShape(window=75)),
    "a window shorter than a chunk": (FULL, GroupShape(window=40)),
}
LENGTHS = (63, 64, 65, 90, 128, 129, 161, 192, 300, 500)


@pytest.mark.parametrize("model", MODELS)
def test_prompts_around_the_window_come_back_right_for_every_group(
    make_rig: MakeRig, model: str
) -> None:
    rig = make_rig(groups=MODELS[model], num_blocks=200)
    for i, length in enumerate(LENGTHS):
        rig.generate(f"cold {i}", text(i, length), 8)
    assert ("hit", "dram") not in counted(rig)
    forget_engine_cache(rig)
    for i, length in enumerate(LENGTHS):
        rig.generate(f"warm {i}", text(i, length), 8)
    block, chunk = rig.block_size, rig.connector._scheduler.store.layout.chunk_tokens
    # Whole chunks of the prompt, up to the last block boundary before its end.
    hits = [min(n // chunk * chunk, (n - 1) // block * block) for n in LENGTHS]
    assert counted(rig)["hit", "dram"] == sum(hits)
    idle(rig)


def loads_of(rig: Rig) -> list[np.ndarray[Any, Any]]:
    """Operations of all loads from now on."""
    seen: list[np.ndarray[Any, Any]] = []
    worker = rig.workers[0]._worker
    inner = worker._mover.load

    def load(job_id: int, ops: np.ndarray[Any, Any]) -> None:
        seen.append(ops)
        inner(job_id, ops)

    worker._mover.load = load
    return seen


def test_a_window_group_loads_its_window_alone(make_rig: MakeRig) -> None:
    rig = make_rig(groups=GEMMA, num_blocks=200)
    rig.generate("cold", text(1, 400))
    forget_engine_cache(rig)
    loads = loads_of(rig)
    rig.generate("warm", text(1, 400))
    (ops,) = loads
    # The hit ends at 384 (six chunks of 4 blocks). Position 384 looks back to 384 - 95 = 289,
    # which is in block 18: blocks 18 to 23 are needed, of 24 in the full-attention group.
    per_group = [int(((ops[:, 1] >= 4 * g) & (ops[:, 1] < 4 * g + 4)).sum()) for g in range(3)]
    assert per_group == [24, 6, 6]
    # Six different slots for full attention, the last two of them for windows.
    assert [len({int(s) for s in ops[ops[:, 1] // 4 == g][:, 0]}) for g in range(3)] == [6, 2, 2]
    assert (ops[:, 2] > 0).all()
    assert counted(rig)["hit", "dram"] == 384
    # Counted by kind: 6 chunks of 4 blocks were saved in each of the three groups.
    series = rig.connector._scheduler.store.snapshot()["tierkv_engine_blocks_total"]
    blocks = {tuple(one["labels"].values()): one["value"] for one in series}
    assert blocks == {
        ("load", "full"): 24,
        ("load", "window"): 12,
        ("save", "full"): 24,
        ("save", "window"): 48,
    }


def test_any_chunk_may_be_the_end_of_a_hit(make_rig: MakeRig) -> None:
    rig = make_rig(groups=GEMMA, num_blocks=200)
    trunk = text(2, 500)
    rig.generate("trunk", trunk)
    expected = 0
    for i, shared in enumerate([480, 100, 260, 385, 64, 330]):
        forget_engine_cache(rig)
        rig.generate(f"branch {i}", trunk[:shared] + text(100 + i, 90))
        expected += shared // 64 * 64
        assert counted(rig)["hit", "dram"] == expected
    idle(rig)


def test_a_hit_goes_on_where_the_engines_own_ends(make_rig: MakeRig) -> None:
    rig = make_rig(groups=GEMMA, num_blocks=200)
    prompt = text(3, 450)
    rig.generate("cold", prompt)
    forget_engine_cache(rig)
    # The engine now holds 208 tokens of it itself; it ends inside a chunk.
    rig.generate("short", prompt[:210])
    before = counted(rig)["hit", "dram"]
    rig.generate("long", prompt)
    assert counted(rig)["hit", "dram"] - before == 448 - 208
    idle(rig)


def test_what_left_a_window_before_it_was_saved_is_not_saved(make_rig: MakeRig) -> None:
    # Chunks of 64 tokens and a window of 32: with steps of 24 tokens, vLLM lets go of the
    # beginning of every chunk before its end is computed.
    rig = make_rig(
        dram(chunk_tokens=64), groups=(FULL, GroupShape(window=32)), max_tokens=24, num_blocks=100
    )
    rig.generate("cold", text(4, 300), 40)
    forget_engine_cache(rig)
    rig.generate("warm", text(4, 300), 40)
    assert ("hit", "dram") not in counted(rig)
    # In one step the whole prompt is there when it is saved, whatever the window.
    big = make_rig(
        dram(chunk_tokens=64), groups=(FULL, GroupShape(window=32)), max_tokens=512, num_blocks=100
    )
    big.generate("cold", text(4, 300))
    forget_engine_cache(big)
    big.generate("warm", text(4, 300))
    assert counted(big)["hit", "dram"] == 256


def test_small_windows_make_small_chunks(make_rig: MakeRig) -> None:
    rig = make_rig(groups=(FULL, GroupShape(window=40)), max_tokens=24, num_blocks=100)
    assert rig.connector._scheduler.store.layout.chunk_tokens == 32
    rig.generate("cold", text(5, 300))
    forget_engine_cache(rig)
    rig.generate("warm", text(5, 300))
    assert counted(rig)["hit", "dram"] == 288


def test_a_restarted_hybrid_engine_finds_its_cache_on_disk(
    make_rig: MakeRig, tmp_path: Path
) -> None:
    config = dram_and_disk(tmp_path / "kv", capacity="4MiB")
    first = make_rig(config, groups=GEMMA, num_blocks=200)
    first.generate("cold", text(6, 500))
    first.close()
    second = make_rig(config, groups=GEMMA, num_blocks=200)
    second.generate("restarted", text(6, 500))
    assert counted(second)["hit", "disk"] == 448
    second.close()
    # Other windows are another model.
    other = make_rig(config, groups=(FULL, GroupShape(window=80), GroupShape(window=80)))
    other.generate("other", text(6, 100))
    assert ("hit", "disk") not in counted(other)


def test_two_ranks_of_a_hybrid_model_hold_their_own_parts(make_rig: MakeRig) -> None:
    rig = make_rig(groups=GEMMA, num_blocks=200, ranks=2)
    rig.generate("cold", text(7, 300))
    forget_engine_cache(rig)
    rig.generate("warm", text(7, 300))
    assert counted(rig)["hit", "dram"] == 256
    idle(rig)


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("mover", ["late", "random"])
def test_random_traffic_never_meets_a_wrong_byte(make_rig: MakeRig, model: str, mover: str) -> None:
    seed = list(MODELS).index(model) + 10 * (mover == "late")
    rng = Random(seed)
    print(f"seed {seed}")
    # Few blocks: requests are preempted, blocks of one group become another's all the time, and
    # requests that have loaded would wait for each other's blocks if TierKV let them.
    rig = make_rig(
        dram("256KiB"), groups=MODELS[model], num_blocks=90, max_tokens=rng.choice([48, 112, 256])
    )
    worker = rig.workers[0]._worker
    if mover == "late":
        worker._mover = LateMover(worker._mover)
        worker._mover.hold = False
    else:
        worker._mover = RandomMover(worker._mover, seed)
    prompts: dict[str, list[int]] = {}
    trunks = [text(500 + i, 400) for i in range(3)]
    for i in range(60):
        trunk = rng.choice(trunks)
        prompt = trunk[: rng.randrange(1, 400)] + text(i, rng.randrange(60))
        prompts[f"r{i}"] = prompt
        rig.add(f"r{i}", prompt or [1], rng.randrange(1, 40))
        for _ in range(rng.randrange(6)):
            rig.step()
        if rng.random() < 0.1:
            rig.abort(rng.choice(list(prompts)))
        if rng.random() < 0.1:
            rig.scheduler.reset_prefix_cache()
    rig.run()
    for request_id in rig.finished:
        output = rig.outputs[request_id]
        assert output == expected_output(prompts[request_id], len(output))
    assert counted(rig)["hit", "dram"] > 0
    idle(rig)
