# SPDX-License-Identifier: Apache-2.0
"""Whole reads and writes: short ones are resumed, cut files and lying devices are not believed."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from tierkv.errors import ErrorKind
from tierkv.tiers.disk.io import (
    EndOfFileError,
    aligned_buffer,
    error_kind,
    is_aligned,
    read_full,
    write_full,
)

DATA = os.urandom(5 * 4096)


@pytest.fixture
def fd(tmp_path: Path) -> int:
    path = tmp_path / "file"
    path.write_bytes(DATA)
    number = os.open(path, os.O_RDWR)
    yield number
    os.close(number)


def buffers() -> list[memoryview]:
    return [aligned_buffer(4096), aligned_buffer(8192)]


@pytest.mark.parametrize("longest", [4096, 4097, 8191, 8192, 12287])
def test_a_short_read_is_resumed_at_a_whole_block(
    fd: int, monkeypatch: pytest.MonkeyPatch, longest: int
) -> None:
    calls: list[tuple[int, int]] = []
    preadv = os.preadv

    def short(fd: int, buffers: list[memoryview], offset: int) -> int:
        calls.append((offset, sum(map(len, buffers))))
        assert offset % 4096 == 0
        return min(longest, preadv(fd, buffers, offset))

    monkeypatch.setattr(os, "preadv", short)
    target = buffers()
    read_full(fd, target, 4096, step=4096)
    assert b"".join(target) == DATA[4096 : 4 * 4096]
    assert calls[0] == (4096, 12288)
    assert len(calls) > 1


def test_without_direct_io_a_read_is_resumed_at_any_byte(
    fd: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    preadv = os.preadv

    def short(fd: int, buffers: list[memoryview], offset: int) -> int:
        return preadv(fd, [buffers[0][:1000]], offset)

    monkeypatch.setattr(os, "preadv", short)
    target = buffers()
    read_full(fd, target, 1, step=1)
    assert b"".join(target) == DATA[1 : 1 + 12288]


def test_a_short_write_is_resumed(fd: int, monkeypatch: pytest.MonkeyPatch) -> None:
    pwritev = os.pwritev

    def short(fd: int, buffers: list[memoryview], offset: int) -> int:
        return pwritev(fd, [buffers[0][:4096]], offset)

    monkeypatch.setattr(os, "pwritev", short)
    source = buffers()
    source[0][:] = b"a" * 4096
    source[1][:] = b"b" * 8192
    write_full(fd, source, 8192, step=4096)
    assert os.pread(fd, 1 << 20, 0) == DATA[:8192] + b"a" * 4096 + b"b" * 8192


def test_a_file_that_was_cut_is_noticed(fd: int) -> None:
    with pytest.raises(EndOfFileError):
        read_full(fd, buffers(), 3 * 4096, step=1)


@pytest.mark.parametrize("moved", [0, 100, 3 * 4096 + 1, 1 << 20])
def test_a_write_that_moves_less_than_a_block_or_too_much_is_an_error(
    fd: int, monkeypatch: pytest.MonkeyPatch, moved: int
) -> None:
    monkeypatch.setattr(os, "pwritev", lambda *_: moved)
    with pytest.raises(OSError, match="less than a block") as caught:
        write_full(fd, buffers(), 0, step=4096)
    assert caught.value.errno == errno.EIO


def test_alignment_is_that_of_address_and_length() -> None:
    memory = aligned_buffer(8192)
    assert is_aligned(memory)
    assert is_aligned(memory[4096:])
    assert not is_aligned(memory[1:4097])
    assert not is_aligned(memory[:4095])


@pytest.mark.parametrize(
    ("number", "kind"),
    [
        (errno.ENOSPC, ErrorKind.ENOSPC),
        (errno.EDQUOT, ErrorKind.ENOSPC),
        (errno.EFBIG, ErrorKind.ENOSPC),
        (errno.EIO, ErrorKind.EIO),
        (errno.EROFS, ErrorKind.EIO),
        (errno.ETIMEDOUT, ErrorKind.TIMEOUT),
    ],
)
def test_errors_are_counted_under_their_cause(number: int, kind: ErrorKind) -> None:
    assert error_kind(OSError(number, "")) is kind
