# SPDX-License-Identifier: Apache-2.0
"""Triton kernels that collect the pages of scattered blocks in one buffer, and put them back.

An engine block may be thousands of small pieces far apart; a copy engine pays for each of them. On
the device they are collected at the speed of its own memory, and the bus sees one large copy.

Addresses are data here: a table of one row a run (`PageTable.runs`) says where block 0 lies, how
far it is to the next block, how many bytes a run has and where it goes in a stored block. Bytes are
moved in words of 8 where every number allows it, else one by one.

Kernels are launched on the current stream. Correctness is tested on the CPU with Triton's
interpreter (TRITON_INTERPRET=1), where addresses are those of host memory.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
import triton
import triton.language as tl

from tierkv.pages.geometry import PageTable

_WORDS = 1024
"""Words that one program moves: 8 KiB, long enough to hide the reading of its table row."""


class DevicePages:
    """A page table as the kernels read it. Owns a small tensor on the table's device."""

    def __init__(self, table: PageTable) -> None:
        runs = table.runs()
        is_wide = not (runs % 8).any() and table.block_bytes % 8 == 0
        self._word = torch.int64 if is_wide else torch.uint8
        self._runs = torch.from_numpy(runs).to(table.device)
        self._tiles = triton.cdiv(int(runs[:, 2].max()), _WORDS * self._word.itemsize)
        self._block_bytes = table.block_bytes

    def upload(self, block_ids: npt.NDArray[np.integer]) -> torch.Tensor:
        """Block ids as the kernels take them: int32 [n] on the device.

        Queued on the current stream, without waiting: the caching allocators keep both copies'
        memory until the stream is past their last use, so the caller may drop the result as soon as
        its kernel is launched.
        """
        ids = torch.from_numpy(block_ids.astype(np.int32))
        if self._runs.is_cuda:
            ids = ids.pin_memory()
        return ids.to(self._runs.device, non_blocking=True)

    def gather(self, blocks: torch.Tensor, out: torch.Tensor) -> None:
        """Copy engine blocks into rows: out[i] = block blocks[i], pages in stored order.

        Args:
            blocks: int32 [n] on the device, each in range; a negative one is skipped.
            out: uint8 [>= n, block_bytes] on the device, contiguous and aligned to 8.
        """
        self._launch(blocks, out, is_gather=True)

    def scatter(self, blocks: torch.Tensor, rows: torch.Tensor) -> None:
        """Copy rows into engine blocks: block blocks[i] = rows[i]. Arguments as for `gather`.

        A block named twice ends up with either row, or a mixture of both.
        """
        self._launch(blocks, rows, is_gather=False)

    def _launch(self, blocks: torch.Tensor, rows: torch.Tensor, *, is_gather: bool) -> None:
        # The first axis of a grid may have 2^31 programs, the others 65,535.
        grid = (len(blocks), len(self._runs), self._tiles)
        _move[grid](self._runs, blocks, rows.view(self._word), self._block_bytes, is_gather, _WORDS)


@triton.jit(do_not_specialize=["block_bytes"])  # type: ignore[untyped-decorator]
def _move(
    runs: tl.tensor,
    blocks: tl.tensor,
    rows: tl.tensor,
    block_bytes: tl.tensor,
    IS_GATHER: tl.constexpr,
    WORDS: tl.constexpr,
) -> None:
    """One program: one tile of one run of one block."""
    word: tl.constexpr = rows.dtype.element_ty
    word_bytes: tl.constexpr = word.primitive_bitwidth // 8
    row = tl.program_id(0).to(tl.int64)
    run = runs + tl.program_id(1) * 4
    block = tl.load(blocks + row).to(tl.int64)
    address = tl.load(run) + block * tl.load(run + 1)
    nbytes = tl.where(block >= 0, tl.load(run + 2), 0)
    offset = tl.load(run + 3)
    at = tl.program_id(2).to(tl.int64) * WORDS + tl.arange(0, WORDS)
    mask = at * word_bytes < nbytes
    page = address.to(tl.pointer_type(word)) + at
    kept = rows + (row * block_bytes + offset) // word_bytes + at
    if IS_GATHER:
        tl.store(kept, tl.load(page, mask=mask), mask=mask)
    else:
        tl.store(page, tl.load(kept, mask=mask), mask=mask)
