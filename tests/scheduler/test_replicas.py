# SPDX-License-Identifier: Apache-2.0
"""Ranks that hold the same KV (MLA) store it once, all of them load it, and none waits in vain."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from tierkv_vllm.replicas import Replicas

from tests.scheduler.conftest import dram_and_disk, text
from tests.scheduler.movers import RandomMover
from tests.scheduler.rig import Rig, expected_output
from tests.scheduler.test_reuse import counted, forget_engine_cache, idle
from tierkv.errors import UnsupportedError
from tierkv.pages.layout import SlotLayout
from tierkv.pages.pool import PoolRegion, RegionHandle

MakeRig = Callable[..., Rig]


@pytest.mark.parametrize(("ranks", "replicas", "parts"), [(2, 2, 1), (4, 2, 2), (4, 4, 1)])
def test_replicas_store_one_part_and_all_load_it(
    make_rig: MakeRig, tmp_path: Path, ranks: int, replicas: int, parts: int
) -> None:
    config = dram_and_disk(tmp_path / "kv")
    first = make_rig(config, ranks=ranks, replicas=replicas)
    assert first.connector._scheduler.store.layout.ranks == parts
    first.generate("cold", text(1, 300))
    forget_engine_cache(first)
    first.generate("warm", text(1, 300))
    assert counted(first)["hit", "dram"] == 256
    idle(first)
    first.close()
    second = make_rig(config, ranks=ranks, replicas=replicas)
    second.generate("restarted", text(1, 300))
    assert counted(second)["hit", "disk"] == 256


def test_a_save_counts_only_when_every_replica_has_acknowledged_it(make_rig: MakeRig) -> None:
    # The copies of the writer end at random; the other rank acknowledges at once.
    rig = make_rig(ranks=2, replicas=2)
    for worker in rig.workers:
        worker._worker._mover = RandomMover(worker._worker._mover, seed=3)
    for i in range(30):
        rig.add(f"r{i}", text(i % 4, 100 + 10 * (i % 7)), 4)
        rig.step()
        if i % 5 == 0:
            rig.scheduler.reset_prefix_cache()
    rig.run()
    for i in range(30):
        assert rig.outputs[f"r{i}"] == expected_output(text(i % 4, 100 + 10 * (i % 7)), 4)
    idle(rig)


LAYOUT = SlotLayout(chunk_tokens=4, block_tokens=2, block_bytes=100)


def test_a_rank_that_fails_early_still_tells_the_others() -> None:
    told: list[RegionHandle | None] = []

    def gather(handle: RegionHandle | None) -> list[RegionHandle | None]:
        told.append(handle)
        return [None, None]

    def fail() -> None:
        with Replicas(0, 2, gather):
            raise ValueError("no page table")

    with pytest.raises(ValueError, match="no page table"):
        fail()
    assert told == [None]
    refusal = pytest.raises(UnsupportedError, match="rank 0, which keeps the same KV, cannot serve")
    with refusal, Replicas(1, 2, gather) as follower:
        follower.region(lambda: PoolRegion.create(LAYOUT, 1 << 20))
    assert told == [None, None]


def test_a_writer_that_gets_no_memory_tells_the_others_once() -> None:
    told: list[RegionHandle | None] = []

    def gather(handle: RegionHandle | None) -> list[RegionHandle | None]:
        told.append(handle)
        return [None, None]

    def make() -> PoolRegion:
        raise MemoryError

    with pytest.raises(MemoryError), Replicas(0, 2, gather) as writer:
        writer.region(make)
    assert told == [None]
