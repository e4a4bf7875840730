# SPDX-License-Identifier: Apache-2.0
"""One namespace's slab and table, open: blocking reads and writes of whole chunks.

    slab  = header page | slot 0 | slot 1 | ...       slot = a record: header, then the parts
    table = header page | entry 0 | entry 1 | ...

Order of a write: clear the slot's old entry, write the record, write its entry. What is torn by a
crash in between is an empty entry, or a record that fails its checks.

**Threads and ownership.** Starts no thread. All methods block. `read`, `texts`, `write` and
`clear_entries` may run on any number of the tier's threads at once, for different slots;
everything else is one call at a time. Each thread has its own scratch memory.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from tierkv.codecs import codec_by_id, make_codec
from tierkv.errors import FormatError, GeometryError, TierError
from tierkv.keys import Chunk
from tierkv.pages.layout import ALIGNMENT, SlotLayout, align_up
from tierkv.record import RecordFormat, checksum
from tierkv.tiers.disk.directory import ABOUT, SLAB, TABLE, Directory
from tierkv.tiers.disk.facts import Stored
from tierkv.tiers.disk.io import EndOfFileError, aligned_buffer, is_aligned, read_full, write_full
from tierkv.tiers.disk.recover import Files, Recovery, open_files, recover
from tierkv.tiers.disk.space import Space
from tierkv.tiers.disk.table import EMPTY, ENTRY_BYTES, PAGE_BYTES, pack_entry

if TYPE_CHECKING:
    from tierkv.config.disk import DiskConfig

_RAW = 0
"""Number of the codec whose bytes are read straight into the slot."""


class Volume:
    """Made by `open`; ends with `close`, after which nothing may be called."""

    def __init__(
        self,
        directory: Directory,
        files: Files,
        config: DiskConfig,
        record: RecordFormat,
        wall_ns: Callable[[], int],
    ) -> None:
        self.slot_bytes = record.max_record_bytes
        self.header_bytes = record.header_bytes
        self.most_slots = Space.most_slots(config.capacity, self.slot_bytes)
        self.space = Space(
            directory,
            files,
            capacity=config.capacity,
            min_free=config.min_free,
            slot_bytes=self.slot_bytes,
        )
        self.persistent = True
        """False once the table had to be given up: chunks are served, but not found again."""
        self._directory = directory
        self._files = files
        self._record = record
        self._codec = make_codec(config.codec)
        self._wall_ns = wall_ns
        self._slab_fd = files.slab_fd
        self._step = 1
        self._scratch = _Scratch(record.header_bytes, record.layout.slot_bytes)

    @classmethod
    def open(
        cls,
        config: DiskConfig,
        namespace: bytes,
        layout: SlotLayout,
        wall_ns: Callable[[], int] = time.time_ns,
    ) -> tuple[Volume, Recovery]:
        """Lock the directory, open the namespace's files, find out what they hold.

        Raises:
            TierError: the directory cannot be used or (recover: strict) is damaged; LockedError if
                another engine uses it. Nothing is left open.
        """
        record = RecordFormat(namespace, layout)
        if Space.most_slots(config.capacity, record.max_record_bytes) < 1:
            least = Space.least_capacity(record.max_record_bytes)
            raise TierError(
                f"capacity of {config.capacity} bytes is less than one chunk takes; set it to "
                f"{least // 1024}KiB or more",
                tier=config.name,
            )
        with contextlib.ExitStack() as undo:
            try:
                directory = Directory.open(config.path, config.name)
                undo.callback(directory.close)
                files, notes = open_files(directory, namespace)
                undo.callback(files.close)
                volume = cls(directory, files, config, record, wall_ns)
                found = recover(
                    files,
                    record,
                    config.recover,
                    volume.most_slots,
                    str(config.path / files.name),
                    config.name,
                )
                notes += found.notes
                # Marks the namespace as the one used last, for when room is needed.
                os.utime(files.table_fd)
                notes += volume.space.fit_capacity()
                if config.direct_io == "auto":
                    notes += volume._try_direct_io(undo)
            except OSError as error:
                raise TierError(
                    f"{config.path} cannot be used ({error.strerror}); make room or set path to "
                    f"another directory",
                    tier=config.name,
                ) from error
            undo.pop_all()
        return volume, Recovery(found.entries, found.stale, found.slots, notes)

    # -- chunks ----------------------------------------------------------------------------------

    def read(
        self,
        slot: int,
        expected: Stored,
        chunk: Chunk,
        parts: Sequence[memoryview],
    ) -> int:
        """Read `chunk` from `slot` into `parts` and verify it.

        Hot path. Raw chunks and page-aligned parts: one system call fills the header's scratch
        and the parts; nothing is copied.

        Args:
            expected: what the record must say, known from `write` or from the table.

        Returns:
            Bytes read.

        Raises:
            FormatError: the slot holds something else or is damaged.
            EndOfFileError: the slab was cut.
            OSError: as the kernel says.
        """
        self._check_parts(parts)
        header = self._scratch.header
        in_place = expected.codec_id == _RAW and (self._step == 1 or all(map(is_aligned, parts)))
        if in_place:
            stored = list(parts)
            buffers = [header, *parts]
        else:
            body = self._scratch.body[: align_up(expected.stored_bytes)]
            stored = [body[: expected.stored_bytes]]
            buffers = [header, body]
        read_full(self._slab_fd, buffers, self._offset(slot), step=self._step)
        found = self._record.check(header, chunk)
        if (found.sequence, found.codec_id, found.stored_bytes) != expected:
            raise FormatError("an older or later record of this key")
        self._record.check_payload(found, stored)
        if not in_place:
            codec_by_id(expected.codec_id).decode(stored[0], parts)
        return len(header) + expected.stored_bytes

    def texts(
        self, places: Iterable[tuple[int, bytes]], is_late: Callable[[], bool]
    ) -> list[Chunk]:
        """Keys and text of the chunks in these slots, without their KV.

        Left out are those that cannot be read: loading them would tell, and forget them.

        Args:
            places: slot, and the key that it holds.
            is_late: asked before each; then it is enough.
        """
        header, chunks = self._scratch.header, []
        for slot, key in places:
            if is_late():
                break
            with contextlib.suppress(FormatError, EndOfFileError, OSError):
                read_full(self._slab_fd, [header], self._offset(slot), step=self._step)
                chunks.append(self._record.chunk(header, key))
        return chunks

    def write(
        self,
        slot: int,
        sequence: int,
        chunk: Chunk,
        parts: Sequence[memoryview],
        *,
        clear_first: bool,
    ) -> tuple[int, int]:
        """Write `chunk` and its entry.

        Args:
            clear_first: the slot's entry on disk may say that it holds something.

        Returns:
            Number of the codec that packed it, bytes of its payload.

        Raises:
            GeometryError: parts or tokens of another size; nothing was written.
            OSError: as the kernel says; slot and entry are then undefined, but never wrong.
        """
        self._check_parts(parts)
        pieces = self._codec.encode(parts)
        codec_id = self._codec.codec_id if pieces is not None else _RAW
        stored = list(parts) if pieces is None else pieces
        stored_bytes = sum(map(len, stored))
        header, created_ns = self._scratch.header, self._wall_ns()
        self._record.pack_header(
            header,
            chunk,
            codec_id=codec_id,
            sequence=sequence,
            created_ns=created_ns,
            stored_bytes=stored_bytes,
            payload_checksum=checksum(stored),
        )
        if self._step != 1 and not all(map(is_aligned, stored)):
            stored = [_gather(stored, self._scratch.body)]
        entry = pack_entry(
            slot,
            chunk,
            sequence=sequence,
            created_ns=created_ns,
            stored_bytes=stored_bytes,
            codec_id=codec_id,
        )
        if clear_first:
            self._write_entry(slot, EMPTY)
        write_full(self._slab_fd, [header, *stored], self._offset(slot), step=self._step)
        self._write_entry(slot, entry)
        return codec_id, stored_bytes

    def clear_entries(self, slots: Iterable[int], *, durable: bool) -> None:
        """Make the table forget these slots; `durable`: also after a power loss.

        If that fails the table is given up, so that no later run can serve what was evicted.
        """
        try:
            for slot in slots:
                self._write_entry(slot, EMPTY)
            if durable and self.persistent:
                os.fdatasync(self._files.table_fd)
        except OSError:
            self._give_up_table()
            raise

    def clear(self) -> None:
        """Make the table forget all slots, also after a power loss."""
        table_fd = self._files.table_fd
        try:
            size = os.fstat(table_fd).st_size
            os.ftruncate(table_fd, PAGE_BYTES)
            os.posix_fallocate(table_fd, 0, size)
            if self.persistent:
                os.fdatasync(table_fd)
        except OSError:
            self._give_up_table()
            raise

    # -- the rest --------------------------------------------------------------------------------

    def write_about(self, about: Mapping[str, str]) -> None:
        """Note what the namespace is, for `tierkv ls`. A courtesy; errors are ignored."""
        text = json.dumps(dict(about), indent=2, ensure_ascii=False) + "\n"
        with contextlib.suppress(OSError, TierError):
            fd = self._directory.open_file(self._files.name, self._files.directory_fd, ABOUT)
            try:
                os.ftruncate(fd, 0)
                os.pwrite(fd, text.encode(), 0)
            finally:
                os.close(fd)

    def write_used(self, stamps: bytes) -> None:
        """Note when each slot was used last: 8 bytes a slot. A hint; errors are ignored."""
        with contextlib.suppress(OSError):
            os.pwrite(self._files.used_fd, stamps, 0)

    def close(self, stamps: bytes) -> None:
        """Write times of use (`write_used`) and the table back, close everything, unlock."""
        self.write_used(stamps)
        with contextlib.suppress(OSError):
            os.fdatasync(self._files.table_fd)
        if self._slab_fd != self._files.slab_fd:
            os.close(self._slab_fd)
        self._files.close()
        self._directory.close()

    def _offset(self, slot: int) -> int:
        return PAGE_BYTES + slot * self.slot_bytes

    def _check_parts(self, parts: Sequence[memoryview]) -> None:
        layout = self._record.layout
        if len(parts) != layout.ranks or any(part.nbytes != layout.part_stride for part in parts):
            raise GeometryError(
                f"{[part.nbytes for part in parts]} bytes given for {layout.ranks} parts of "
                f"{layout.part_stride}"
            )

    def _write_entry(self, slot: int, entry: bytes) -> None:
        if os.pwrite(self._files.table_fd, entry, PAGE_BYTES + slot * ENTRY_BYTES) != ENTRY_BYTES:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def _give_up_table(self) -> None:
        self.persistent = False
        with contextlib.suppress(OSError):
            os.unlink(TABLE, dir_fd=self._files.directory_fd)

    def _try_direct_io(self, undo: contextlib.ExitStack) -> list[str]:
        """Open the slab once more with O_DIRECT and read a page; notes if that does not work."""
        flags = os.O_RDWR | os.O_DIRECT | os.O_NOFOLLOW | os.O_CLOEXEC
        try:
            fd = os.open(SLAB, flags, dir_fd=self._files.directory_fd)
        except OSError as error:
            return [_no_direct_io(self._directory.path, error)]
        try:
            read_full(fd, [aligned_buffer(ALIGNMENT)], 0, step=ALIGNMENT)
        except OSError as error:
            os.close(fd)
            return [_no_direct_io(self._directory.path, error)]
        undo.callback(os.close, fd)
        self._slab_fd, self._step = fd, ALIGNMENT
        return []


class _Scratch(threading.local):
    """Aligned memory of one thread: a record's header, and a payload that is not in its place."""

    def __init__(self, header_bytes: int, body_bytes: int) -> None:
        self.header = aligned_buffer(header_bytes)
        self._body_bytes = body_bytes
        self._body: memoryview | None = None

    @property
    def body(self) -> memoryview:
        if self._body is None:
            self._body = aligned_buffer(self._body_bytes)
        return self._body


def _gather(pieces: Iterable[memoryview], body: memoryview) -> memoryview:
    """Copy the pieces into `body` and pad with zeros to ALIGNMENT."""
    end = 0
    for piece in pieces:
        body[end : end + len(piece)] = piece
        end += len(piece)
    padded = align_up(end)
    body[end:padded] = bytes(padded - end)
    return body[:padded]


def _no_direct_io(path: Path, error: OSError) -> str:
    return (
        f"{path}: no O_DIRECT here ({error.strerror}); chunks pass through the page cache, which "
        f"takes memory and a copy"
    )
