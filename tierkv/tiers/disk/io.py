# SPDX-License-Identifier: Apache-2.0
"""Whole reads and writes at an offset, aligned memory, and what an errno means for a tier.

All of it blocks; it runs on the disk tier's own threads.
"""

from __future__ import annotations

import errno
import mmap
import os
from collections.abc import Sequence

import numpy as np

from tierkv.errors import ErrorKind
from tierkv.pages.layout import ALIGNMENT

_NO_ROOM = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})


class EndOfFileError(Exception):
    """The file ends before what was asked for: it was cut behind our back."""


def error_kind(error: OSError) -> ErrorKind:
    """The `kind` under which an operating-system error is counted."""
    if error.errno in _NO_ROOM:
        return ErrorKind.ENOSPC
    return ErrorKind.TIMEOUT if error.errno == errno.ETIMEDOUT else ErrorKind.EIO


def aligned_buffer(size: int) -> memoryview:
    """Zeroed memory that begins at a page; freed with the last view of it."""
    return memoryview(mmap.mmap(-1, size))


def is_aligned(buffer: memoryview) -> bool:
    """Whether O_DIRECT takes this memory: it begins and ends at a multiple of ALIGNMENT."""
    address = int(np.frombuffer(buffer, np.uint8).ctypes.data)
    return address % ALIGNMENT == 0 and len(buffer) % ALIGNMENT == 0


def read_full(fd: int, buffers: Sequence[memoryview], offset: int, *, step: int) -> None:
    """Fill all buffers from `offset` on, in as few calls as the kernel allows (mostly one).

    Args:
        step: a short read is resumed at a multiple of it: ALIGNMENT with O_DIRECT, else 1.

    Raises:
        EndOfFileError: the file is too short.
        OSError: as the kernel says; EIO also if it moves less than one `step`.
    """
    pending = list(buffers)
    while pending:
        moved = os.preadv(fd, pending, offset)
        if moved == 0:
            raise EndOfFileError(f"nothing at offset {offset}")
        offset += _advance(pending, moved, step)


def write_full(fd: int, buffers: Sequence[memoryview], offset: int, *, step: int) -> None:
    """Write all buffers from `offset` on; see `read_full`."""
    pending = list(buffers)
    while pending:
        offset += _advance(pending, os.pwritev(fd, pending, offset), step)


def _advance(pending: list[memoryview], moved: int, step: int) -> int:
    """Drop `moved` bytes, rounded down to `step`, from the front of `pending`; returns them."""
    wanted = sum(map(len, pending))
    if moved != wanted:
        moved -= moved % step
        if not 0 < moved < wanted:
            raise OSError(errno.EIO, "the device moved less than a block, or more than was asked")
    left = moved
    while pending and left >= len(pending[0]):
        left -= len(pending.pop(0))
    if left:
        pending[0] = pending[0][left:]
    return moved
