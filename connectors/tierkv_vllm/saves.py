# SPDX-License-Identifier: Apache-2.0
"""Save jobs under way: from chunks whose KV is complete to chunks that the Store can give back.

Thread: vLLM's scheduler thread.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from tierkv.keys import Chunk, Scope
from tierkv.store import Store
from tierkv_vllm.groups import Group
from tierkv_vllm.messages import SaveJob

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput

BlockIds = Sequence[Sequence[int]]
"""Engine blocks by KV cache group."""


@dataclass(frozen=True, slots=True)
class Saving:
    """Chunks of one request that are to be saved.

    Attributes:
        chunks: consecutive ones.
        blocks: that hold them.
        first: number of the first of them in its chain.
        scope: of the chain.
    """

    chunks: list[Chunk]
    blocks: BlockIds
    first: int
    scope: Scope


@dataclass(slots=True)
class _Job:
    """A save job that workers have not all reported yet."""

    slots: list[int]
    blocks: set[int]
    generation: int
    ranks_left: int
    savings: list[Saving]
    ok: bool = True


class Saves:
    """See the module. Bounded by the DRAM slots that the Store reserves for them.

    Args:
        store: gives the slots, and gets them back filled or not.
        groups: KV cache groups of the engine.
        ranks: workers that must report each job.
        new_job_id: never gives the same twice.
    """

    def __init__(
        self, store: Store, groups: Sequence[Group], ranks: int, new_job_id: Callable[[], int]
    ) -> None:
        self._store = store
        self._groups = groups
        self._ranks = ranks
        self._new_job_id = new_job_id
        self._jobs: dict[int, _Job] = {}

    def __len__(self) -> int:
        """Jobs under way."""
        return len(self._jobs)

    def begin(self, savings: list[Saving]) -> SaveJob | None:
        """One job for all that the Store lacks of these; None if it lacks nothing."""
        rows: list[tuple[int, int, int]] = []
        slots: list[int] = []
        for saving in savings:
            for index, slot in self._store.save(saving.chunks):
                slots.append(slot)
                for group, ids in zip(self._groups, saving.blocks, strict=True):
                    part = ids[index * group.per_chunk : (index + 1) * group.per_chunk]
                    group.count(self._store.context.counters, "save", len(part))
                    rows += [(slot, j, block) for j, block in enumerate(part, group.first_index)]
        if not rows:
            return None
        job = SaveJob(self._new_job_id(), np.asarray(rows, dtype=np.int32))
        self._jobs[job.job_id] = _Job(
            slots, {row[2] for row in rows}, self._store.generation, self._ranks, savings
        )
        return job

    def fences(self, written: set[int], output: SchedulerOutput) -> list[int]:
        """Jobs whose blocks this step writes; those that it overwrites unordered are lost.

        Args:
            written: blocks that the step hands out.
            output: the step.
        """
        # Model runner V2 zeroes blocks and copies them on write before a connector can order
        # anything: what such a save reads cannot be trusted.
        unordered = set(output.new_block_ids_to_zero or ())
        unordered.update(copy.dst_block_id for copy in output.kv_cache_block_copies or ())
        fences = []
        for job_id, job in self._jobs.items():
            if job.blocks & unordered:
                job.ok = False
            if job.blocks & written:
                fences.append(job_id)
        return fences

    def reported(self, reports: Mapping[int, tuple[int, bool]]) -> list[Saving]:
        """Ranks ended these jobs; a job counts when the last one has.

        Args:
            reports: job id to (how many ranks, whether all of them succeeded).

        Returns:
            What the Store holds from now on.
        """
        stored: list[Saving] = []
        for job_id, (ranks, ok) in reports.items():
            job = self._jobs.get(job_id)
            if job is None:
                continue
            job.ok &= ok
            job.ranks_left -= ranks
            if job.ranks_left > 0:
                continue
            del self._jobs[job_id]
            if job.ok:
                self._store.commit(job.slots, job.generation)
                stored += job.savings
            else:
                self._store.abandon(job.slots, job.generation)
        return stored
