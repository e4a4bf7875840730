# SPDX-License-Identifier: Apache-2.0
"""The directory of a disk tier, read from outside.

Looking needs no lock: entries of the table carry their own checksum, and a record that does not
match is only called damaged if its entry still says the same afterwards (an engine clears a slot's
entry before it writes the slot). Removing takes the engine's own lock.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from tierkv.errors import FormatError, LockedError, TierError
from tierkv.inventory.base import Inventory, NamespaceSummary, Problem, StoredChunk
from tierkv.pages.layout import ALIGNMENT, align_up
from tierkv.record import RecordHeader, checksum, parse_header
from tierkv.tiers.disk.directory import ABOUT, FILES, SLAB, TABLE, USED, Directory, directory_name
from tierkv.tiers.disk.io import EndOfFileError, aligned_buffer, read_full
from tierkv.tiers.disk.lock import holder_of
from tierkv.tiers.disk.table import (
    DISK_FORMAT,
    EMPTY,
    ENTRY_BYTES,
    PAGE_BYTES,
    SLAB_MAGIC,
    TABLE_MAGIC,
    Entry,
    Identity,
    parse_page,
    scan_entries,
)

_NAME = re.compile(r"([0-9a-f]{32})-v(0|[1-9][0-9]{0,4})")
_DIRECTORY_FLAGS = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
# Not blocking: a pipe that somebody put in a file's place must not hold us.
_FILE_FLAGS = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
_MOST_ABOUT_BYTES = 64 << 10
_WIPE_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class _Contents:
    """What a namespace's table says."""

    identity: Identity
    table: bytes
    entries: list[Entry]
    damaged: list[int]  # slots
    stamps: list[int]  # by slot: last use, ns

    @property
    def slot_bytes(self) -> int:
        return self.identity.header_bytes + self.identity.layout.slot_bytes

    def parent(self, slot: int) -> bytes:
        start = slot * ENTRY_BYTES + 16
        return self.table[start : start + 16]

    def used_ns(self, entry: Entry) -> int:
        return max(entry.created_ns, self.stamps[entry.slot])


class DiskInventory(Inventory):
    """See the module.

    Args:
        path: the tier's directory.
        tier: name of the tier.
        capacity: as configured, if it is.

    Raises:
        TierError: there is no such directory, or it may not be read.
    """

    def __init__(self, path: Path, tier: str = "disk", capacity: int | None = None) -> None:
        self.tier = tier
        self.place = str(path)
        self.capacity_bytes = capacity
        self._path = path
        try:
            self._fd = os.open(path, _DIRECTORY_FLAGS)
        except OSError as error:
            raise TierError(
                f"{path} cannot be read ({error.strerror}); give the tier's directory",
                tier=tier,
            ) from None
        self.holder = holder_of(self._fd)
        found = os.fstatvfs(self._fd)
        self.free_bytes = found.f_bavail * found.f_frsize
        self._slabs: dict[str, tuple[int, int]] = {}  # descriptor and step of slabs that are open

    # -- looking ---------------------------------------------------------------------------------

    def namespaces(self) -> list[NamespaceSummary]:
        found = [self._summary(name) for name in os.listdir(self._fd) if _NAME.fullmatch(name)]
        present = [summary for summary in found if summary is not None]
        return sorted(present, key=lambda summary: summary.used_ns or 0, reverse=True)

    def _summary(self, name: str) -> NamespaceSummary | None:
        digest = name[:32]
        try:
            with self._folder(name) as folder:
                allocated, touched = _measure(folder)
                about = _about(folder)
        except OSError:
            return None  # a file or link of that name, or gone
        if not touched:
            return None  # none of our files in it
        plain = NamespaceSummary(self.tier, name, digest, about, allocated_bytes=allocated)
        try:
            contents = self._read(name)
        except FormatError as error:
            return replace(plain, problem=str(error), used_ns=touched)
        entries = contents.entries
        created = [entry.created_ns for entry in entries]
        header = contents.identity.header_bytes
        return replace(
            plain,
            chunks=len(entries),
            chunk_bytes=sum(header + entry.stored_bytes for entry in entries),
            tokens=len(entries) * contents.identity.layout.chunk_tokens,
            oldest_ns=min(created, default=None),
            newest_ns=max(created, default=None),
            used_ns=max(map(contents.used_ns, entries), default=touched),
        )

    def chunks(self, namespace: str) -> Iterator[StoredChunk]:
        contents = self._read(namespace)
        header, tokens = contents.identity.header_bytes, contents.identity.layout.chunk_tokens
        for entry in contents.entries:
            yield StoredChunk(
                namespace,
                entry.key,
                contents.parent(entry.slot),
                header + entry.stored_bytes,
                tokens,
                entry.created_ns,
                contents.used_ns(entry),
                entry.slot,
            )

    def header(self, chunk: StoredChunk) -> RecordHeader:
        contents = self._identity(chunk.namespace)
        data = aligned_buffer(contents.header_bytes)
        self._read_slot(chunk, contents, [data])
        return parse_header(data)

    def check(self, chunk: StoredChunk) -> Problem | None:
        try:
            self._check(chunk)
        except (FormatError, EndOfFileError, OSError) as error:
            reason = "the slab is cut short" if isinstance(error, EndOfFileError) else str(error)
            if self._still_there(chunk):
                return Problem(chunk.namespace, chunk.key.hex(), reason, chunk.locator)
        return None

    def _check(self, chunk: StoredChunk) -> None:
        identity = self._identity(chunk.namespace)
        header_bytes = identity.header_bytes
        payload_bytes = chunk.nbytes - header_bytes
        data = aligned_buffer(align_up(header_bytes + payload_bytes))
        self._read_slot(chunk, identity, [data])
        header = parse_header(data[:header_bytes])
        if header.key != chunk.key or header.namespace != identity.namespace:
            raise FormatError("the slot holds another chunk")
        if header.stored_bytes != payload_bytes:
            raise FormatError("the slot holds an older or later record of this chunk")
        if checksum([data[header_bytes : header_bytes + payload_bytes]]) != header.payload_checksum:
            raise FormatError("the payload does not match its checksum")

    def damage(self, namespace: str) -> list[Problem]:
        try:
            contents = self._read(namespace)
        except FormatError as error:
            if int(namespace.rpartition("-v")[2]) != DISK_FORMAT:
                return []  # not ours to judge
            return [Problem(namespace, TABLE, str(error), None)]
        return [
            Problem(namespace, f"entry {slot} of {TABLE}", "the entry is damaged", slot)
            for slot in contents.damaged
        ]

    # -- removing --------------------------------------------------------------------------------

    def drop(self, problems: Sequence[Problem]) -> None:
        with self._owned() as directory:
            for namespace in dict.fromkeys(problem.namespace for problem in problems):
                mine = [problem for problem in problems if problem.namespace == namespace]
                if any(problem.locator is None for problem in mine):
                    directory.remove(namespace)
                else:
                    self._clear(directory, namespace, [int(p.locator or 0) for p in mine])

    def remove(self, namespace: str, chunks: Sequence[StoredChunk] | None = None) -> int:
        with self._owned() as directory:
            if chunks is not None:
                self._clear(directory, namespace, [int(chunk.locator) for chunk in chunks])
                self._wipe(directory, namespace, chunks)
                return len(chunks)
            try:
                count = sum(1 for _ in self.chunks(namespace))
            except FormatError:
                count = 0
            if not directory.remove(namespace):
                raise TierError(
                    f"{self._path / namespace} cannot be removed; remove it by hand",
                    tier=self.tier,
                )
            return count

    def _clear(self, directory: Directory, namespace: str, slots: Sequence[int]) -> None:
        """Make the table forget slots, for good."""
        with self._writable(directory, namespace, TABLE) as fd:
            for slot in slots:
                os.pwrite(fd, EMPTY, PAGE_BYTES + slot * ENTRY_BYTES)
            os.fdatasync(fd)

    def _wipe(self, directory: Directory, namespace: str, chunks: Sequence[StoredChunk]) -> None:
        """Overwrite slots with zeros: what is purged is not to be read from the disk either."""
        identity = self._identity(namespace)
        slot_bytes = identity.header_bytes + identity.layout.slot_bytes
        zeros = bytes(min(_WIPE_BYTES, slot_bytes))
        with self._writable(directory, namespace, SLAB) as fd:
            for chunk in chunks:
                start = PAGE_BYTES + int(chunk.locator) * slot_bytes
                for at in range(start, start + slot_bytes, len(zeros)):
                    os.pwrite(fd, zeros[: start + slot_bytes - at], at)
            os.fdatasync(fd)

    @contextlib.contextmanager
    def _writable(self, directory: Directory, namespace: str, name: str) -> Iterator[int]:
        with self._folder(namespace) as folder:
            fd = directory.open_file(namespace, folder, name)
            try:
                yield fd
            finally:
                os.close(fd)

    @contextlib.contextmanager
    def _owned(self) -> Iterator[Directory]:
        """The directory, locked as by an engine."""
        try:
            directory = Directory.open(self._path, self.tier)
        except LockedError as error:
            who = f"process {error.holder}" if error.holder else "another process"
            raise TierError(
                f"{self._path} is in use by {who}; stop that engine first", tier=self.tier
            ) from None
        try:
            yield directory
        finally:
            directory.close()

    # -- files -----------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _folder(self, namespace: str) -> Iterator[int]:
        fd = os.open(namespace, _DIRECTORY_FLAGS, dir_fd=self._fd)
        try:
            yield fd
        finally:
            os.close(fd)

    def _identity(self, namespace: str) -> Identity:
        """Whose files these are.

        Raises:
            FormatError: another version, or damaged.
        """
        version = int(namespace.rpartition("-v")[2])
        if version != DISK_FORMAT:
            raise FormatError(f"disk format {version}, this version reads {DISK_FORMAT}")
        try:
            with self._folder(namespace) as folder:
                table = parse_page(_content(folder, TABLE, PAGE_BYTES), TABLE_MAGIC)
                slab = parse_page(_content(folder, SLAB, PAGE_BYTES), SLAB_MAGIC)
        except OSError as error:
            raise FormatError(f"damaged: {error.strerror or error}") from None
        except FormatError as error:
            raise FormatError(f"damaged: {error}") from None
        if slab != table or directory_name(table.namespace, DISK_FORMAT) != namespace:
            raise FormatError("damaged: slab and table do not belong together")
        return table

    def _read(self, namespace: str) -> _Contents:
        identity = self._identity(namespace)
        with self._folder(namespace) as folder:
            table = _content(folder, TABLE)[PAGE_BYTES:]
            used = b""
            with contextlib.suppress(OSError):
                used = _content(folder, USED)
            slab_bytes = os.stat(SLAB, dir_fd=folder, follow_symlinks=False).st_size
        table = table[: len(table) // ENTRY_BYTES * ENTRY_BYTES]
        slots = len(table) // ENTRY_BYTES
        scan = scan_entries(table, identity.layout.slot_bytes)
        there = (slab_bytes - PAGE_BYTES) // (identity.header_bytes + identity.layout.slot_bytes)
        entries = [entry for entry in scan.entries if entry.slot < there]
        words = np.frombuffer(table, "<u8").reshape(-1, ENTRY_BYTES // 8)
        filled = set(np.flatnonzero(words.any(axis=1)).tolist())
        damaged = sorted(filled - {entry.slot for entry in entries} - set(scan.repeated))
        stamps = np.frombuffer(used[: len(used) // 8 * 8], "<u8").tolist()[:slots]
        stamps += [0] * (slots - len(stamps))
        return _Contents(identity, table, entries, damaged, stamps)

    def _still_there(self, chunk: StoredChunk) -> bool:
        """Whether the chunk's entry is as it was: not cleared or replaced meanwhile."""
        try:
            with self._folder(chunk.namespace) as folder:
                offset = PAGE_BYTES + int(chunk.locator) * ENTRY_BYTES
                entry = _content(folder, TABLE, ENTRY_BYTES, offset)
        except OSError:
            return False
        created = int.from_bytes(entry[56:64], "little")
        return entry[:16] == chunk.key and created == chunk.created_ns

    def _read_slot(
        self, chunk: StoredChunk, identity: Identity, buffers: Sequence[memoryview]
    ) -> None:
        fd, step = self._slab(chunk.namespace)
        slot_bytes = identity.header_bytes + identity.layout.slot_bytes
        read_full(fd, buffers, PAGE_BYTES + int(chunk.locator) * slot_bytes, step=step)

    def _slab(self, namespace: str) -> tuple[int, int]:
        """Open without the page cache where that works: a scrub must read what the disk has."""
        if namespace not in self._slabs:
            with self._folder(namespace) as folder:
                try:
                    fd, step = os.open(SLAB, _FILE_FLAGS | os.O_DIRECT, dir_fd=folder), ALIGNMENT
                except OSError:
                    fd, step = os.open(SLAB, _FILE_FLAGS, dir_fd=folder), 1
            self._slabs[namespace] = fd, step
        return self._slabs[namespace]

    def close(self) -> None:
        for fd, _ in self._slabs.values():
            os.close(fd)
        self._slabs.clear()
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def _content(folder: int, name: str, size: int | None = None, offset: int = 0) -> bytes:
    """A file's bytes; all of them, or at most `size` from `offset` on."""
    with open(os.open(name, _FILE_FLAGS, dir_fd=folder), "rb") as file:
        file.seek(offset)
        return file.read() if size is None else file.read(size)


def _measure(folder: int) -> tuple[int, int]:
    """Bytes that the file system counts, and when one of our files was written last; 0: none."""
    allocated, touched = os.fstat(folder).st_blocks * 512, 0
    for file in (*FILES, ABOUT):
        with contextlib.suppress(FileNotFoundError):
            found = os.stat(file, dir_fd=folder, follow_symlinks=False)
            allocated += found.st_blocks * 512
            touched = max(touched, found.st_mtime_ns)
    return allocated, touched


def _about(folder: int) -> dict[str, str]:
    try:
        value = json.loads(_content(folder, ABOUT, _MOST_ABOUT_BYTES))
    except (OSError, ValueError):
        return {}
    return as_about(value)


def as_about(value: object) -> dict[str, str]:
    """What was noted of a namespace, as far as it is text for a terminal."""
    if not isinstance(value, dict):
        return {}
    return {
        str(name)[:40]: text[:200]
        for name, text in value.items()
        if isinstance(text, str) and text.isprintable() and str(name).isprintable()
    }
