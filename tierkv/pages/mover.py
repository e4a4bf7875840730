# SPDX-License-Identifier: Apache-2.0
"""The contract of a page mover: copy blocks between an engine's paged KV and pool slots.

A mover decides nothing: it is told which engine block belongs to which place of which slot, and
says when a job is over. A job ends exactly once, well or badly; what goes wrong in one job is its
own outcome and touches no other. To a mover, a slot holds as many of the table's blocks as fit into
a chunk's part: `blocks_per_chunk` of them, times the number of groups in hybrid models.

Threads. All calls come from the worker's model thread.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from tierkv.errors import GeometryError, UnsupportedError
from tierkv.pages.geometry import PageTable
from tierkv.pages.pool import PoolRegion

Direction = Literal["d2h", "h2d"]
Ops = npt.NDArray[np.integer]
"""[n, 3] = (slot, index of the block in its chunk, engine block id), any integer type."""

_logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Finished:
    """How a job ended.

    Attributes:
        job_id: the caller's number.
        ok: every byte was copied. Otherwise the targets hold anything, but nothing else changed.
        nbytes: copied; 0 when not ok.
        seconds: that the copying took; on CUDA without the wait for the engine's work before it.
        direction: "d2h" for a save, "h2d" for a load.
    """

    job_id: int
    ok: bool
    nbytes: int
    seconds: float
    direction: Direction


class PageMover(ABC):
    """Copies between one rank's engine blocks and its region of the pool.

    Args:
        table: where the engine keeps its pages.
        region: this rank's part of the pool; closed by its owner, after the mover.

    Attributes:
        notes: things an operator should know, one sentence each.

    Raises:
        GeometryError: a chunk's part is not a whole number of the table's blocks.
    """

    notes: tuple[str, ...] = ()

    def __init__(self, table: PageTable, region: PoolRegion) -> None:
        if region.layout.block_bytes % table.block_bytes:
            raise GeometryError(
                f"an engine block has {table.block_bytes} bytes, the pool was made for "
                f"{region.layout.block_bytes}; workers and scheduler see different KV layouts"
            )
        self._table = table
        self._region = region
        self._blocks_per_slot = region.layout.part_bytes // table.block_bytes
        self._bounds = np.array([region.slots, self._blocks_per_slot, table.num_blocks])
        self._has_failed = False

    @abstractmethod
    def save(self, job_id: int, ops: Ops) -> None:
        """Start copying engine blocks into slots. Never raises.

        Reads what work that is already queued on the engine's compute stream has written.
        """

    @abstractmethod
    def load(self, job_id: int, ops: Ops) -> None:
        """Start copying from slots into engine blocks. Never raises.

        Writes after work that is already queued on the engine's compute stream.
        """

    @abstractmethod
    def poll(self) -> list[Finished]:
        """Jobs that ended since the last call, each exactly once. Never blocks, never raises."""

    @abstractmethod
    def fence(self, job_ids: Iterable[int]) -> None:
        """Let later work on the engine's compute stream come after these saves.

        Call it before blocks that are being saved are written again. Ids that are unknown or over
        are ignored. Does not block the calling thread. Never raises: a save that cannot be waited
        for may read what is written over it, so it fails.
        """

    @abstractmethod
    def close(self) -> None:
        """Wait for copies in flight and let go of engine and pool. May be called twice.

        `poll` may be called once more afterwards and gives what is left.
        """

    def _checked(self, ops: Ops) -> Ops:
        """`ops` if every number in it is in range.

        Raises:
            GeometryError: it is not; nothing may be copied.
        """
        if ops.ndim != 2 or ops.shape[1] != 3 or ops.dtype.kind not in "iu":
            raise GeometryError(f"operations must be integers [n, 3], not {ops.dtype} {ops.shape}")
        if len(ops) and ((ops.min(axis=0) < 0).any() or (ops.max(axis=0) >= self._bounds).any()):
            bounds = tuple(self._bounds.tolist())
            raise GeometryError(f"an operation is outside (slots, index, blocks) = {bounds}")
        return ops

    def _failed(self, job_id: int, direction: Direction, error: Exception) -> None:
        """Log the first failure; the caller counts them all."""
        level = logging.DEBUG if self._has_failed else logging.ERROR
        self._has_failed = True
        _logger.log(level, "%s copy of job %d failed: %s", direction, job_id, error)


def make_mover(table: PageTable, region: PoolRegion) -> PageMover:
    """The mover for the device that holds the engine's pages.

    Raises:
        GeometryError, TierError: see the movers.
        UnsupportedError: there is none for this device.
    """
    device = table.device.type
    # Imported here: one needs Triton and a GPU, and each engine needs only one of them.
    if device == "cuda":
        from tierkv.pages.cuda_mover import CudaMover

        return CudaMover(table, region)
    if device == "cpu":
        from tierkv.pages.cpu_mover import CpuMover

        return CpuMover(table, region)
    raise UnsupportedError(
        f"KV pages on device {device!r} cannot be moved; run the engine on cpu or cuda"
    )


class Run(NamedTuple):
    """Consecutive operations that one strided copy can do.

    Attributes:
        slot: of all of them.
        start: first block's place in its chunk; the others follow it.
        block: first engine block.
        row: which operation is the first.
        length: how many.
    """

    slot: int
    start: int
    block: int
    row: int
    length: int


def runs_of(ops: Ops, *, of_blocks: bool) -> list[Run]:
    """Cut `ops` into the fewest runs, in order.

    Args:
        ops: [n, 3], checked.
        of_blocks: engine blocks must follow one another too.
    """
    if not len(ops):
        return []
    step = np.diff(ops, axis=0)
    joined = (step[:, 0] == 0) & (step[:, 1] == 1)
    if of_blocks:
        joined &= step[:, 2] == 1
    first = np.concatenate(([0], np.flatnonzero(~joined) + 1))
    count = np.diff(first, append=len(ops))
    heads = ops[first].tolist()
    return [
        Run(slot, start, block, row, n)
        for (slot, start, block), row, n in zip(heads, first.tolist(), count.tolist(), strict=True)
    ]
