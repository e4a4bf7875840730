# SPDX-License-Identifier: Apache-2.0
"""Page mover for NVIDIA GPUs: copies on streams of their own, beside the model's.

Two lanes, one stream each, so that a load never waits for a save. What orders them is events:

    a job starts    its lane waits for all that is queued on the compute stream at that moment: the
                    forward that writes what is saved; earlier users of blocks that are loaded into
    `fence`         the compute stream waits for saves, before it writes their blocks again; a load
                    into such blocks is behind that, through the line above
    `poll`          a job is over when the event at its end is: asked for, never waited for

Where an engine keeps at least 1 MiB of a block together (large pages, or all layers of a block side
by side), each such run is copied by itself. Smaller ones are collected in a staging buffer on the
device by a kernel, and cross the bus as one copy for all consecutive blocks of a slot. Each lane
has one staging buffer: the order on its stream keeps one batch from overwriting the last one, and
the bus rests for the kernel only (device memory is 20 or more times as fast as the bus).

Threads and ownership. No thread. Two CUDA streams, owned by the mover and used by the worker's
model thread only; `close` waits for them. The pool region is pinned from construction to `close`,
so it must stay mapped meanwhile.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import cuda

from tierkv.errors import TierError
from tierkv.pages.geometry import PageTable
from tierkv.pages.kernels import DevicePages
from tierkv.pages.mover import Direction, Finished, Ops, PageMover, runs_of
from tierkv.pages.pool import PoolRegion

STAGING_BYTES = 64 << 20
"""A lane's staging buffer. At 50 GB/s over the bus, 1.3 ms of copying for one launch."""
DIRECT_BYTES = 1 << 20
"""From this size on a run is copied by itself: 20 µs on the bus hide 5 µs of launching."""

_logger = logging.getLogger(__name__)


@dataclass(slots=True)
class _Job:
    job_id: int
    nbytes: int
    ok: bool
    begin: cuda.Event
    end: cuda.Event


class CudaMover(PageMover):
    """Asynchronous copies on two streams; see `PageMover`.

    Takes up to 2 x 64 MiB of device memory (none where copies are direct) and compiles its kernels
    here rather than in the middle of a request. Pins the region; where the system refuses, copies
    go through the driver's own buffers and the calling thread waits for them: slower, and one
    warning says so.

    Raises:
        GeometryError: see `PageMover`.
        TierError: no room on the device for the staging buffers.
    """

    def __init__(self, table: PageTable, region: PoolRegion) -> None:
        super().__init__(table, region)
        self._device = table.device
        self._pool = torch.from_numpy(region.array)
        with cuda.device(self._device):
            try:
                pages = DevicePages(table) if table.min_run_bytes < DIRECT_BYTES else None
                self._save = _Lane("d2h", table, self._pool, pages)
                self._load = _Lane("h2d", table, self._pool, pages)
            except torch.OutOfMemoryError as error:
                raise TierError(
                    f"device {self._device} has no memory left for two staging buffers of up to "
                    f"{max(STAGING_BYTES, table.block_bytes)} bytes; let the engine take less of "
                    "it (vLLM: lower gpu_memory_utilization)",
                    tier="dram",
                ) from error
            self._is_pinned = _pin(self._pool, self._device)
        if not self._is_pinned:
            note = (
                f"{region.array.nbytes} bytes of the DRAM pool could not be pinned: copies are "
                "slow and the engine waits for them; lower the dram tier's capacity"
            )
            _logger.warning("%s", note)
            self.notes = (note,)

    def save(self, job_id: int, ops: Ops) -> None:
        self._submit(self._save, job_id, ops)

    def load(self, job_id: int, ops: Ops) -> None:
        self._submit(self._load, job_id, ops)

    def poll(self) -> list[Finished]:
        return self._save.poll() + self._load.poll()

    def fence(self, job_ids: Iterable[int]) -> None:
        wanted = set(job_ids)
        for job in self._save.pending:
            if job.job_id in wanted:
                try:
                    cuda.current_stream(self._device).wait_event(job.end)
                except Exception as error:  # the device is in an error state
                    job.ok = False
                    self._failed(job.job_id, self._save.direction, error)

    def close(self) -> None:
        if not len(self._pool):
            return
        for lane in (self._save, self._load):
            lane.close()
        if self._is_pinned:
            _cudart().cudaHostUnregister(self._pool.data_ptr())
        self._pool = torch.empty((0, 0), dtype=torch.uint8)

    def _submit(self, lane: _Lane, job_id: int, ops: Ops) -> None:
        job = _Job(
            job_id,
            0,
            False,
            cuda.Event(enable_timing=True),  # type: ignore[no-untyped-call]
            cuda.Event(enable_timing=True),  # type: ignore[no-untyped-call]
        )
        try:
            checked = self._checked(ops)
            job.nbytes = len(checked) * self._table.block_bytes
            with cuda.device(self._device):
                queued = cuda.current_stream().record_event()
                with cuda.stream(lane.stream):
                    lane.stream.wait_event(queued)
                    job.begin.record()
                    try:
                        lane.copy(checked)
                        job.ok = True
                    finally:
                        # Also after an error: copies that were queued before it may still be
                        # running, and only when they are over may slots and blocks be used again.
                        job.end.record()
        except Exception as error:  # whatever it is, it is this job's outcome
            job.ok = False
            self._failed(job_id, lane.direction, error)
        lane.pending.append(job)


class _Lane:
    """One direction: its stream, its staging buffer, and its jobs in order of submission."""

    def __init__(
        self,
        direction: Direction,
        table: PageTable,
        pool: torch.Tensor,
        pages: DevicePages | None,
    ) -> None:
        self.direction = direction
        self.stream = cuda.Stream()  # type: ignore[no-untyped-call]
        self.pending: deque[_Job] = deque()
        self._table = table
        self._pool = pool
        self._pages = pages
        self._staging = torch.empty(0, dtype=torch.uint8)
        if pages is None:
            return
        rows = max(1, min(table.num_blocks, STAGING_BYTES // table.block_bytes))
        with cuda.stream(self.stream):
            self._staging = torch.empty(
                (rows, table.block_bytes), dtype=torch.uint8, device=table.device
            )
            # A negative id is skipped: this compiles the kernel and moves nothing.
            self._move(pages, pages.upload(np.array([-1])))

    def copy(self, ops: Ops) -> None:
        """Queue the copies of `ops` on the current stream, which is this lane's."""
        if not len(self._pool):
            raise RuntimeError("the mover is closed")
        if self._pages is None:
            self._copy_direct(ops)
            return
        rows = len(self._staging)
        for start in range(0, len(ops), rows):
            self._copy_staged(self._pages, ops[start : start + rows])

    def poll(self) -> list[Finished]:
        finished = []
        while self.pending:
            job = self.pending[0]
            try:
                if not job.end.query():  # type: ignore[no-untyped-call]
                    break
                seconds = job.begin.elapsed_time(job.end) / 1e3 if job.ok else 0.0
            except Exception as error:  # the device is in an error state: nothing will be copied
                _logger.debug("event of job %d: %s", job.job_id, error)
                job.ok, seconds = False, 0.0
            self.pending.popleft()
            nbytes = job.nbytes if job.ok else 0
            finished.append(Finished(job.job_id, job.ok, nbytes, seconds, self.direction))
        return finished

    def close(self) -> None:
        try:
            self.stream.synchronize()
        except RuntimeError as error:  # the device is in an error state: nothing runs any more
            _logger.debug("%s stream: %s", self.direction, error)
        self._pool = torch.empty((0, 0), dtype=torch.uint8)
        self._staging = torch.empty(0, dtype=torch.uint8)

    def _copy_direct(self, ops: Ops) -> None:
        size = self._table.block_bytes
        for slot, index, block in ops.tolist():
            part = self._pool[slot]
            at = index * size
            for segment in self._table.segments:
                for run in segment.view[:, block]:
                    self._transfer(run, part[at : at + len(run)])
                    at += len(run)

    def _copy_staged(self, pages: DevicePages, ops: Ops) -> None:
        blocks = pages.upload(ops[:, 2])
        if self.direction == "d2h":
            self._move(pages, blocks)
        size = self._table.block_bytes
        for slot, start, _, row, length in runs_of(ops, of_blocks=False):
            part = self._pool[slot, start * size : (start + length) * size]
            self._transfer(self._staging[row : row + length].view(-1), part)
        if self.direction == "h2d":
            self._move(pages, blocks)

    def _move(self, pages: DevicePages, blocks: torch.Tensor) -> None:
        if self.direction == "d2h":
            pages.gather(blocks, self._staging)
        else:
            pages.scatter(blocks, self._staging)

    def _transfer(self, on_device: torch.Tensor, on_host: torch.Tensor) -> None:
        """Both contiguous bytes of one length, so that it is a single asynchronous memcpy."""
        if self.direction == "d2h":
            on_host.copy_(on_device, non_blocking=True)
        else:
            on_device.copy_(on_host, non_blocking=True)


def _pin(pool: torch.Tensor, device: torch.device) -> bool:
    """Page-lock the region, so that copies run on their own. Touches all of its memory."""
    if int(_cudart().cudaHostRegister(pool.data_ptr(), pool.nbytes, 0)) == 0:
        return True
    # The runtime keeps the error until the next launch of a kernel asks for it: one of ours takes
    # the blame, lest it be one of the engine's.
    with suppress(RuntimeError):
        torch.full((1,), 1, device=device)
    return False


def _cudart() -> Any:
    return cuda.cudart()  # type: ignore[no-untyped-call]
