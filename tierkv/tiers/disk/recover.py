# SPDX-License-Identifier: Apache-2.0
"""How the disk tier comes back: open a namespace's files, judge them, read the table.

    files of this format, namespace and geometry    used
    files of another format version                 set aside under that version's name
    anything else (damaged, foreign, other sizes)   begun anew, or refused by `recover: strict`

All of it blocks; it runs once, in `open`.
"""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass
from typing import Literal

import numpy as np

from tierkv.errors import FormatError, TierError
from tierkv.pages.layout import SlotLayout
from tierkv.record import RecordFormat
from tierkv.tiers.disk.directory import FILES, SLAB, TABLE, Directory, directory_name
from tierkv.tiers.disk.table import (
    DISK_FORMAT,
    ENTRY_BYTES,
    PAGE_BYTES,
    SLAB_MAGIC,
    TABLE_MAGIC,
    Entry,
    Identity,
    Scan,
    page_version,
    parse_page,
    scan_entries,
)

Mode = Literal["none", "quiet", "strict"]

USED_BYTES = 8
"""Of a slot in the file `used`: when it was used last, ns since 1970."""


@dataclass(slots=True)
class Files:
    """The open files of one namespace. Whoever holds it closes it."""

    name: str
    directory_fd: int
    slab_fd: int
    table_fd: int
    used_fd: int

    def close(self) -> None:
        for fd in (self.slab_fd, self.table_fd, self.used_fd, self.directory_fd):
            os.close(fd)


@dataclass(frozen=True, slots=True)
class Recovery:
    """What an earlier run left.

    Attributes:
        entries: chunks to take over, the least recently used first, with the time of their use.
        stale: slots whose entries on disk are intact but void.
        slots: how many slots the slab has room for already.
        notes: for the operator.
    """

    entries: list[tuple[Entry, int]]
    stale: list[int]
    slots: int
    notes: list[str]


def open_files(directory: Directory, namespace: bytes) -> tuple[Files, list[str]]:
    """Make or open the namespace's files; files of another version are moved out of the way."""
    name, notes = directory_name(namespace, DISK_FORMAT), list[str]()
    files = _open(directory, name)
    try:
        version = _foreign_version(files)
    except BaseException:
        files.close()
        raise
    if version is not None:
        files.close()
        aside = directory_name(namespace, version)
        if directory.rename(name, aside):
            notes.append(
                f"{directory.path / aside} is of disk format {version}, this version writes "
                f"{DISK_FORMAT}: left alone, its bytes count"
            )
        files = _open(directory, name)
    return files, notes


def recover(
    files: Files, wanted: RecordFormat, mode: Mode, most_slots: int, place: str, tier: str
) -> Recovery:
    """Judge the files and read the table, or begin both anew.

    Args:
        wanted: namespace and geometry.
        most_slots: what the capacity allows; a longer slab is cut.
        place: the files' directory, for messages.
        tier: name of the tier, for messages.

    Raises:
        TierError: `mode` is strict and something is damaged; nothing was changed.
    """
    damage = None if mode == "none" else _damage(files, wanted)
    if damage and mode == "strict":
        raise TierError(f"{place}: {damage}; remove it, or set recover: quiet", tier=tier)
    table_bytes = os.fstat(files.table_fd).st_size
    if mode == "none" or damage or table_bytes == 0:
        begin_anew(files, wanted.namespace, wanted.layout, wanted.header_bytes)
        return Recovery([], [], 0, [f"{place}: {damage}; begun anew"] if damage else [])

    slot_bytes = wanted.max_record_bytes
    slab_slots = max(0, (os.fstat(files.slab_fd).st_size - PAGE_BYTES) // slot_bytes)
    table_slots = (table_bytes - PAGE_BYTES) // ENTRY_BYTES
    scan = scan_entries(
        _read(files.table_fd, PAGE_BYTES, table_slots * ENTRY_BYTES), wanted.layout.slot_bytes
    )
    cut = sum(entry.slot >= slab_slots for entry in scan.entries)
    if mode == "strict" and (scan.damaged or cut):
        raise TierError(
            f"{place}: {scan.damaged} damaged entries, {cut} beyond the end of the slab; remove "
            f"it, or set recover: quiet",
            tier=tier,
        )
    notes = []
    if scan.damaged or cut:
        notes.append(f"{place}: {scan.damaged + cut} damaged entries dropped")
    slots = min(slab_slots, most_slots)
    if slots < slab_slots:
        os.ftruncate(files.table_fd, PAGE_BYTES + min(slots, table_slots) * ENTRY_BYTES)
        os.ftruncate(files.slab_fd, PAGE_BYTES + slots * slot_bytes)
        lost = sum(slots <= entry.slot < slab_slots for entry in scan.entries)
        notes.append(f"{place}: cut to the capacity, {lost} chunks dropped")
    # So that no stray entry beyond the slab's end comes back to life when the slab grows.
    os.ftruncate(files.table_fd, PAGE_BYTES + slots * ENTRY_BYTES)
    return Recovery(
        _by_use(files, scan, slots), [slot for slot in scan.repeated if slot < slots], slots, notes
    )


def begin_anew(files: Files, namespace: bytes, layout: SlotLayout, header_bytes: int) -> None:
    """Empty the files and write their header pages, under a new identity.

    The table goes first and comes back last: whatever is interrupted, an empty table means empty.
    """
    for fd in (files.table_fd, files.used_fd, files.slab_fd):
        os.ftruncate(fd, 0)
    identity = Identity(namespace, os.urandom(16), layout, header_bytes)
    _write(files.slab_fd, identity.pack(SLAB_MAGIC))
    _write(files.table_fd, identity.pack(TABLE_MAGIC))


def _open(directory: Directory, name: str) -> Files:
    directory_fd = directory.open_namespace(name)
    fds = [directory_fd]
    try:
        for file in FILES:
            fds.append(directory.open_file(name, directory_fd, file))  # noqa: PERF401  # on error
    except BaseException:
        for fd in fds:
            os.close(fd)
        raise
    _, slab_fd, table_fd, used_fd = fds
    return Files(name, directory_fd, slab_fd, table_fd, used_fd)


def _foreign_version(files: Files) -> int | None:
    for fd, magic in ((files.table_fd, TABLE_MAGIC), (files.slab_fd, SLAB_MAGIC)):
        version = page_version(os.pread(fd, PAGE_BYTES, 0), magic)
        if version not in (None, DISK_FORMAT):
            return version
    return None


def _damage(files: Files, wanted: RecordFormat) -> str | None:
    """What is wrong with the header pages; None if nothing is, or if the table is empty."""
    page = os.pread(files.table_fd, PAGE_BYTES, 0)
    if not page:
        return None
    try:
        table = parse_page(page, TABLE_MAGIC)
    except FormatError as error:
        return f"{TABLE}: {error}"
    try:
        slab = parse_page(os.pread(files.slab_fd, PAGE_BYTES, 0), SLAB_MAGIC)
    except FormatError as error:
        return f"{SLAB}: {error}"
    if slab != table:
        return "slab and table do not belong together"
    if (slab.layout, slab.header_bytes) != (wanted.layout, wanted.header_bytes):
        return "chunks of another geometry"
    return None if slab.namespace == wanted.namespace else "chunks of another namespace"


def _by_use(files: Files, scan: Scan, slots: int) -> list[tuple[Entry, int]]:
    size = min(os.fstat(files.used_fd).st_size, slots * USED_BYTES) // USED_BYTES
    stamps = np.frombuffer(_read(files.used_fd, 0, size * USED_BYTES), "<u8").tolist()
    stamps += [0] * (slots - size)
    used = [
        (max(entry.created_ns, stamps[entry.slot]), entry.sequence, entry)
        for entry in scan.entries
        if entry.slot < slots
    ]
    # Equal times happen (a clock stands still): the later write counts.
    used.sort()
    return [(entry, used_ns) for used_ns, _, entry in used]


def _read(fd: int, offset: int, size: int) -> bytearray:
    """`size` bytes, which the file's length has bounded."""
    data = bytearray(max(0, size))
    view = memoryview(data)
    while view:
        moved = os.preadv(fd, [view], offset)
        if moved == 0:
            break  # cut meanwhile: what is missing stays zero, which is empty
        view, offset = view[moved:], offset + moved
    return data


def _write(fd: int, page: bytes) -> None:
    if os.pwrite(fd, page, 0) != len(page):
        with contextlib.suppress(OSError):
            os.ftruncate(fd, 0)
        raise OSError(28, os.strerror(28))
