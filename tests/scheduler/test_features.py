# SPDX-License-Identifier: Apache-2.0
"""Rows of the compatibility matrix for which no model is needed: every byte is foretold."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.scheduler.conftest import dram, dram_and_disk, text
from tests.scheduler.movers import LateMover
from tests.scheduler.rig import Rig, expected_output
from tests.scheduler.test_reuse import counted, forget_engine_cache, idle

MakeRig = Callable[..., Rig]

SLOTS = 8
"""Chunks that fit into 64 KiB."""


@pytest.mark.feature("prompts longer than the DRAM pool")
@pytest.mark.parametrize("with_disk", [False, True])
def test_a_prompt_longer_than_the_pool_is_served_as_far_as_it_fits(
    make_rig: MakeRig, tmp_path: Path, with_disk: bool
) -> None:
    config = dram_and_disk(tmp_path / "kv", "64KiB") if with_disk else dram("64KiB")
    rig = make_rig(config, num_blocks=120)
    prompt = text(1, 64 * 18 + 5)
    for turn in range(3):
        rig.generate(f"r{turn}", prompt)
        assert rig.connector._scheduler.store.drain()
        forget_engine_cache(rig)
    hits = sum(n for (outcome, _), n in counted(rig).items() if outcome == "hit")
    # Two warm turns, each at most a pool full; with a disk below, the beginning is always there.
    assert hits <= 2 * SLOTS * 64
    if with_disk:
        assert hits == 2 * SLOTS * 64
    idle(rig)


@pytest.mark.feature("PagedAttention's sharing: reference counts")
@pytest.mark.parametrize("prefix_caching", [True, False])
def test_requests_for_one_stored_prompt_share_the_blocks_of_one_load(
    make_rig: MakeRig, prefix_caching: bool
) -> None:
    rig = make_rig(num_blocks=200, prefix_caching=prefix_caching, max_tokens=1024)
    prompt = text(3, 300)
    rig.generate("cold", prompt)
    forget_engine_cache(rig)
    for i in range(4):
        rig.add(f"r{i}", prompt, 6)
    used, steps = 0, 0
    while rig.scheduler.has_unfinished_requests():
        rig.step()
        steps += 1
        used = max(used, rig.num_blocks - 1 - rig.free_blocks())
    rig.run()
    assert all(rig.outputs[f"r{i}"] == expected_output(prompt, 6) for i in range(4))
    # 16 blocks are loaded and 2 more filled by the first that computes; vLLM shares all of these.
    # Each request has one of its own for its last tokens. (Looked at between steps.)
    assert used == (18 + 4 if prefix_caching else 4 * 19)
    assert counted(rig)["hit", "dram"] == (256 if prefix_caching else 4 * 256)
    # They wait for the copy and no longer.
    assert steps <= 10
    idle(rig)


def test_who_waits_for_a_load_that_is_aborted_or_fails_goes_on_alone(make_rig: MakeRig) -> None:
    rig = make_rig(num_blocks=200, max_tokens=1024)
    prompt = text(4, 300)
    rig.generate("cold", prompt)
    forget_engine_cache(rig)
    worker = rig.workers[0]._worker
    worker._mover = LateMover(worker._mover)
    rig.add("first", prompt, 6)
    rig.add("second", prompt, 6)
    for _ in range(4):
        rig.step()
    assert worker._mover.waiting == (0, 1)
    rig.abort("first")
    worker._mover.hold = False
    rig.run()
    assert rig.outputs["second"] == expected_output(prompt, 6)
    assert counted(rig)["hit", "dram"] >= 256
    assert not rig.connector._scheduler._arriving
    idle(rig)


@pytest.mark.feature("n requests for the same uncached prompt at once")
@pytest.mark.parametrize("prefix_caching", [True, False])
def test_nobody_waits_for_what_somebody_else_computes(
    make_rig: MakeRig, prefix_caching: bool
) -> None:
    rig = make_rig(num_blocks=200, prefix_caching=prefix_caching, max_tokens=1024)
    prompt = text(2, 300)
    for i in range(6):
        rig.add(f"r{i}", prompt, 4)
    # No convoy: as many steps as one request takes, when all fit into a step or share blocks.
    steps = 0
    while rig.scheduler.has_unfinished_requests():
        rig.step()
        steps += 1
    rig.run()
    assert all(rig.outputs[f"r{i}"] == expected_output(prompt, 4) for i in range(6))
    assert steps <= (5 if prefix_caching else 9)
    # Saved once: four chunks.
    assert rig.connector._scheduler.store.usage()["dram"].chunks == 4
    idle(rig)
