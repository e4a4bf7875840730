# SPDX-License-Identifier: Apache-2.0
"""What is in which slot of the slab, as it lies on disk: one self-checksummed entry a slot.

An entry is written after its slot's data and cleared before the slot is written again, so a
restart reads this small file once and knows what it has; there is no journal and no snapshot that
could be older than the slab. Should an entry be wrong all the same (power loss reorders writes),
the record in the slot disagrees with it or with what was asked for, and the load is a miss.

Pure functions over bytes; `docs/reference/format.md` has the byte tables.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import xxhash

from tierkv.errors import FormatError, GeometryError
from tierkv.keys import KEY_BYTES, Chunk
from tierkv.pages.layout import ALIGNMENT, SlotLayout
from tierkv.record import Buffer

DISK_FORMAT = 1
"""Raise it whenever slab, table or record change; older versions then leave the files alone."""

SLAB_MAGIC = b"TKVSLAB\n"
TABLE_MAGIC = b"TKVTABL\n"

PAGE_BYTES = ALIGNMENT
"""Header page at the start of the slab and of the table."""

ENTRY_BYTES = 128
EMPTY = bytes(ENTRY_BYTES)

_PAGE = struct.Struct("<8sHHI16s16sIIIIQ")
_ENTRY = struct.Struct("<16s16s16sQQQIHH40xQ")
_SUM = struct.Struct("<Q")
_PAGE_SUM_AT = PAGE_BYTES - _SUM.size
_ENTRY_SUM_AT = ENTRY_BYTES - _SUM.size
_USED = 1


@dataclass(frozen=True, slots=True)
class Identity:
    """Which slab and table belong together, and whose they are: their header pages.

    Attributes:
        namespace: digest, 16 bytes.
        slab_id: random, 16 bytes, new whenever the slab is begun anew.
        layout: sizes of a chunk.
        header_bytes: of a record.
    """

    namespace: bytes
    slab_id: bytes
    layout: SlotLayout
    header_bytes: int

    def pack(self, magic: bytes) -> bytes:
        """One page."""
        layout = self.layout
        page = _PAGE.pack(
            magic,
            DISK_FORMAT,
            0,
            ENTRY_BYTES,
            self.namespace,
            self.slab_id,
            layout.ranks,
            layout.chunk_tokens,
            layout.block_tokens,
            self.header_bytes,
            layout.block_bytes,
        ).ljust(_PAGE_SUM_AT, b"\0")
        return page + _SUM.pack(xxhash.xxh3_64_intdigest(page))


def page_version(page: bytes, magic: bytes) -> int | None:
    """The format version that a header page claims; None if it is no such page at all."""
    if len(page) < PAGE_BYTES or page[: len(magic)] != magic:
        return None
    return int.from_bytes(page[8:10], "little")


def parse_page(page: bytes, magic: bytes) -> Identity:
    """Read a header page of this format version.

    Raises:
        FormatError: it is not one, or damaged.
    """
    if page_version(page, magic) != DISK_FORMAT:
        raise FormatError("no header page of this format version")
    if _SUM.unpack_from(page, _PAGE_SUM_AT)[0] != xxhash.xxh3_64_intdigest(page[:_PAGE_SUM_AT]):
        raise FormatError("the header page does not match its checksum")
    _, _, _, _, namespace, slab_id, ranks, chunk_tokens, block_tokens, header_bytes, block_bytes = (
        _PAGE.unpack_from(page)
    )
    try:
        layout = SlotLayout(chunk_tokens, block_tokens, block_bytes, ranks)
    except GeometryError as error:
        raise FormatError(f"the header page has impossible sizes: {error}") from error
    return Identity(namespace, slab_id, layout, header_bytes)


def pack_entry(
    slot: int, chunk: Chunk, *, sequence: int, created_ns: int, stored_bytes: int, codec_id: int
) -> bytes:
    """The entry that says: `slot` holds `chunk`, as its record of this sequence."""
    body = _ENTRY.pack(
        chunk.key,
        chunk.parent,
        chunk.content_key,
        sequence,
        created_ns,
        stored_bytes,
        slot,
        codec_id,
        _USED,
        0,
    )[:_ENTRY_SUM_AT]
    return body + _SUM.pack(xxhash.xxh3_64_intdigest(body))


class Entry(NamedTuple):
    """One intact entry of the table; fields as in `pack_entry`.

    A tuple, because a frozen dataclass takes three times as long to make, and 100,000 are.
    """

    slot: int
    key: bytes
    sequence: int
    created_ns: int
    stored_bytes: int
    codec_id: int


@dataclass(frozen=True, slots=True)
class Scan:
    """What a table says.

    Attributes:
        entries: intact ones, in the order of their slots, one a key (of two, the later write).
        repeated: slots of entries that a later write of the same key makes void.
        damaged: how many entries are neither empty nor intact.
    """

    entries: list[Entry]
    repeated: list[int]
    damaged: int


def scan_entries(data: Buffer, most_stored_bytes: int) -> Scan:
    """Read the entries of a table, header page cut off; about 1 µs each.

    Args:
        data: whole entries.
        most_stored_bytes: what a slot can hold.
    """
    words: npt.NDArray[np.uint64] = np.frombuffer(data, "<u8").reshape(-1, ENTRY_BYTES // 8)
    newest: dict[bytes, Entry] = {}
    repeated, damaged = [], 0
    digest, view = xxhash.xxh3_64_intdigest, memoryview(data)
    for index in np.flatnonzero(words.any(axis=1)).tolist():
        start = index * ENTRY_BYTES
        key, _, _, sequence, created_ns, stored_bytes, slot, codec_id, state, check = (
            _ENTRY.unpack_from(data, start)
        )
        if (
            check != digest(view[start : start + _ENTRY_SUM_AT])
            or slot != index
            or state != _USED
            or not 0 < stored_bytes <= most_stored_bytes
        ):
            damaged += 1
            continue
        entry = Entry(slot, key, sequence, created_ns, stored_bytes, codec_id)
        other = newest.get(entry.key)
        if other is not None and other.sequence > entry.sequence:
            entry, other = other, entry
        if other is not None:
            repeated.append(other.slot)
        newest[entry.key] = entry
    return Scan(sorted(newest.values(), key=lambda entry: entry.slot), repeated, damaged)


assert KEY_BYTES == 16  # the structs above say so
