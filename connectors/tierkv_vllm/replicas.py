# SPDX-License-Identifier: Apache-2.0
"""Ranks that hold the same KV (MLA, or fewer KV heads than ranks) share one part of a chunk.

vLLM says how many consecutive tensor-parallel ranks are such replicas of each other. The first of
them, the writer, makes the part of the DRAM pool and saves into it; the others map it and only
load. All of them acknowledge every save, so that nobody reads what is not written.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from tierkv.errors import UnsupportedError
from tierkv.pages.pool import PoolRegion, RegionHandle

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig

Gather = Callable[[RegionHandle | None], list[RegionHandle | None]]
"""Everybody's handle by rank; every rank must call it, once."""


class Replicas:
    """One rank's place among its replicas. Leave it as a context: no rank may wait for another.

    Args:
        rank: of this worker.
        count: ranks that hold the same KV; 1 if none do.
        gather: how the ranks tell each other where the writers' regions are.
    """

    def __init__(self, rank: int, count: int, gather: Gather) -> None:
        self.count = count
        self.is_writer = rank % count == 0
        self._writer = rank - rank % count
        self._gather: Gather | None = gather if count > 1 else None

    def __enter__(self) -> Replicas:
        return self

    def __exit__(self, *_: object) -> None:
        if self._gather is not None:
            self._tell(None)  # this rank failed before it had anything to tell

    def region(self, make: Callable[[], PoolRegion]) -> PoolRegion:
        """This rank's part of the pool: its own, or its writer's.

        Raises:
            UnsupportedError: the writer has none.
            Whatever `make` raises, and `PoolRegion.attach`.
        """
        if self._gather is None:
            return make()
        own = make() if self.is_writer else None
        handle = self._tell(own.handle if own is not None else None)[self._writer]
        if own is not None:
            return own
        if handle is None:
            raise UnsupportedError(f"rank {self._writer}, which keeps the same KV, cannot serve")
        return PoolRegion.attach(handle)

    def _tell(self, handle: RegionHandle | None) -> list[RegionHandle | None]:
        gather, self._gather = self._gather, None
        assert gather is not None, "told twice"
        return gather(handle)


def replica_count(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> int:
    """Consecutive ranks that hold the same KV; vLLM tells since 0.31."""
    # With pipeline stages each rank number means something else: a part for each rank, then.
    if vllm_config.parallel_config.pipeline_parallel_size > 1:
        return 1
    return int(getattr(kv_cache_config, "kv_tp_replicas", 1))


def replicas_of(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> Replicas:
    """This worker's place. Call it in a worker."""
    return Replicas(
        vllm_config.parallel_config.rank,
        replica_count(vllm_config, kv_cache_config),
        _gather_in_tp_group,
    )


def _gather_in_tp_group(handle: RegionHandle | None) -> list[RegionHandle | None]:
    import torch
    from vllm.distributed.parallel_state import get_tp_group

    group = get_tp_group()
    handles: list[RegionHandle | None] = [None] * group.world_size
    torch.distributed.all_gather_object(handles, handle, group=group.cpu_group)
    return handles
