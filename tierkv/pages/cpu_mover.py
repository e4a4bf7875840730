# SPDX-License-Identifier: Apache-2.0
"""Page mover for engines whose KV lies in host memory: plain copies, done when the call returns.

No thread of its own: a load is on its request's way to the first token anyway. The copies are
torch's, on the engine's model thread and so with the OpenMP team that computes between them, which
is idle now: two cores copy 60 MB in 5 ms where one takes 9. (On any other thread they would raise
a second team, which costs more than the copy takes.)
"""

from __future__ import annotations

import time
from collections.abc import Iterable

import numpy as np
import torch

from tierkv.pages.geometry import PageTable
from tierkv.pages.mover import Direction, Finished, Ops, PageMover, runs_of
from tierkv.pages.pool import PoolRegion


class CpuMover(PageMover):
    """Synchronous copies in the calling thread; see `PageMover`."""

    def __init__(self, table: PageTable, region: PoolRegion) -> None:
        super().__init__(table, region)
        self._finished: list[Finished] = []
        self._pairs: list[tuple[torch.Tensor, torch.Tensor]] = []
        """A segment as [block, run, byte] in the engine, as [slot, index, run, byte] in the pool.

        Equal from the last three axes on, so that one assignment copies a run of operations.
        """
        layout = region.layout
        for segment in table.segments:
            engine = segment.view.permute(1, 0, 2)
            pool = np.ndarray(
                (region.slots, self._blocks_per_slot, *engine.shape[1:]),
                np.uint8,
                region.array,
                segment.offset,
                (layout.part_stride, table.block_bytes, segment.run_bytes, 1),
            )
            self._pairs.append((engine, torch.from_numpy(pool)))

    def save(self, job_id: int, ops: Ops) -> None:
        self._run(job_id, ops, "d2h")

    def load(self, job_id: int, ops: Ops) -> None:
        self._run(job_id, ops, "h2d")

    def poll(self) -> list[Finished]:
        finished, self._finished = self._finished, []
        return finished

    def fence(self, job_ids: Iterable[int]) -> None:
        """Nothing to do: a save is over when `save` returns."""

    def close(self) -> None:
        self._pairs = []

    def _run(self, job_id: int, ops: Ops, direction: Direction) -> None:
        started, nbytes = time.perf_counter(), 0
        try:
            self._copy(self._checked(ops), direction)
            nbytes = len(ops) * self._table.block_bytes
        except Exception as error:  # whatever it is, it is this job's outcome
            self._failed(job_id, direction, error)
            ok = False
        else:
            ok = True
        seconds = time.perf_counter() - started
        self._finished.append(Finished(job_id, ok, nbytes, seconds, direction))

    def _copy(self, ops: Ops, direction: Direction) -> None:
        """Hot path: about 1 µs a run of operations beside the bytes themselves."""
        if not self._pairs:
            raise RuntimeError("the mover is closed")
        runs = runs_of(ops, of_blocks=True)
        if direction == "d2h":
            self._region.populate({run.slot for run in runs})
            for engine, pool in self._pairs:
                for slot, start, block, _, n in runs:
                    pool[slot, start : start + n].copy_(engine[block : block + n])
        else:
            for engine, pool in self._pairs:
                for slot, start, block, _, n in runs:
                    engine[block : block + n].copy_(pool[slot, start : start + n])
