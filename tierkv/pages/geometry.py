# SPDX-License-Identifier: Apache-2.0
"""Where an engine keeps the pages of its blocks, in as few strided pieces as possible.

The engine hands over one view a layer. Copying layer by layer would cost thousands of small copies
a chunk, so what lies regularly is taken together: pages that follow one another within a block
become one run, and equal runs at equal distances become one segment. The order of bytes within a
block stays that of registration (`tierkv.pages.layout`), however the engine's memory is laid out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from tierkv.errors import GeometryError


@dataclass(frozen=True, slots=True, eq=False)
class Segment:
    """Equal runs at equal distances.

    Attributes:
        view: uint8 [runs, blocks, run bytes] over the engine's own storage; last stride 1.
        offset: where its first run starts in a block as stored, bytes; the others follow it.
    """

    view: torch.Tensor
    offset: int

    @property
    def run_bytes(self) -> int:
        return self.view.shape[2]


@dataclass(slots=True)
class _Run:
    """One stretch of bytes per block, while segments are being looked for."""

    tensor: torch.Tensor
    address: int
    row_stride: int
    nbytes: int

    def is_same_grid(self, other: _Run) -> bool:
        mine, its = self.tensor.untyped_storage(), other.tensor.untyped_storage()
        return (
            mine.data_ptr() == its.data_ptr()
            and mine.nbytes() == its.nbytes()
            and self.row_stride == other.row_stride
        )


class PageTable:
    """All pages of one rank's engine blocks. Immutable; keeps the engine's storage alive.

    Attributes:
        segments: in the order of a stored block.
        num_blocks: engine blocks; valid ids are 0 … num_blocks-1.
        block_bytes: bytes of one block, all layers.
        device: where the engine keeps them.
    """

    def __init__(self, segments: Sequence[Segment]) -> None:
        self.segments = tuple(segments)
        self.num_blocks = self.segments[0].view.shape[1]
        self.block_bytes = sum(s.view.shape[0] * s.run_bytes for s in self.segments)
        self.device = self.segments[0].view.device

    @classmethod
    def from_layers(cls, views: Sequence[torch.Tensor]) -> PageTable:
        """Find the segments of an engine's layers.

        Args:
            views: one a layer in order of registration: int8 or uint8 [num_blocks, page bytes],
                any row stride, last stride 1. Layers with equal address and row stride share their
                memory and are taken once, in the width of the widest.

        Raises:
            GeometryError: no layers, or layers that do not have one device and number of blocks,
                or whose pages overlap.
        """
        if not views:
            raise GeometryError("no KV layers were registered; nothing can be cached")
        return cls(_segments(_joined(_distinct(views))))

    @property
    def min_run_bytes(self) -> int:
        """Bytes of the smallest run; the whole block where the engine keeps its layers together."""
        return min(segment.run_bytes for segment in self.segments)

    def runs(self) -> npt.NDArray[np.int64]:
        """int64 [runs, 4]: address of block 0, row stride, bytes, offset in the stored block."""
        rows = []
        for segment in self.segments:
            stride, row_stride, _ = segment.view.stride()
            for index in range(segment.view.shape[0]):
                address = segment.view.data_ptr() + index * stride
                offset = segment.offset + index * segment.run_bytes
                rows.append((address, row_stride, segment.run_bytes, offset))
        return np.array(rows, dtype=np.int64)


def _distinct(views: Sequence[torch.Tensor]) -> list[_Run]:
    found: dict[tuple[int, int], _Run] = {}
    for index, view in enumerate(views):
        run = _checked(index, view, views[0])
        known = found.setdefault((run.address, run.row_stride), run)
        if known.nbytes < run.nbytes:
            known.tensor, known.nbytes = run.tensor, run.nbytes
    return list(found.values())


def _checked(index: int, view: torch.Tensor, first: torch.Tensor) -> _Run:
    where = f"KV layer {index}: shape {tuple(view.shape)}, {view.dtype} on {view.device}"
    if view.ndim != 2 or view.itemsize != 1 or 0 in view.shape:
        raise GeometryError(f"{where} is not a byte view [num_blocks, page_bytes]")
    if view.shape[0] != first.shape[0] or view.device != first.device:
        raise GeometryError(f"{where} differs from layer 0 in number of blocks or device")
    blocks, nbytes = view.shape
    row_stride = view.stride(0) if blocks > 1 else nbytes
    if view.stride(1) != 1 or row_stride < nbytes:
        raise GeometryError(f"{where} has pages that overlap or are not contiguous")
    return _Run(view.view(torch.uint8), view.data_ptr(), row_stride, nbytes)


def _joined(pages: list[_Run]) -> list[_Run]:
    """Join pages of a block that follow one another without a gap."""
    runs = [pages[0]]
    for page in pages[1:]:
        last = runs[-1]
        width = last.nbytes + page.nbytes
        fits = last.tensor.shape[0] == 1 or width <= last.row_stride
        if last.is_same_grid(page) and last.address + last.nbytes == page.address and fits:
            last.nbytes = width
        else:
            runs.append(page)
    return runs


def _segments(runs: list[_Run]) -> list[Segment]:
    """Group runs of one size that lie at one positive distance."""
    groups: list[list[_Run]] = []
    for run in runs:
        group = groups[-1] if groups else []
        if group and group[0].is_same_grid(run) and group[0].nbytes == run.nbytes:
            step = run.address - group[-1].address
            if step > 0 and (len(group) == 1 or step == group[1].address - group[0].address):
                group.append(run)
                continue
        groups.append([run])
    segments, offset = [], 0
    for group in groups:
        segments.append(Segment(_strided(group), offset))
        offset += len(group) * group[0].nbytes
    return segments


def _strided(group: list[_Run]) -> torch.Tensor:
    first = group[0]
    step = group[1].address - first.address if len(group) > 1 else first.nbytes
    return first.tensor.as_strided(
        (len(group), first.tensor.shape[0], first.nbytes),
        (step, first.row_stride, 1),
        first.address - first.tensor.untyped_storage().data_ptr(),
    )
