# SPDX-License-Identifier: Apache-2.0
"""The table's bytes: where the byte table says, and nothing damaged is believed."""

from __future__ import annotations

import struct

import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from tierkv.errors import FormatError
from tierkv.keys import Chunk
from tierkv.pages.layout import SlotLayout
from tierkv.tiers.disk.table import (
    EMPTY,
    SLAB_MAGIC,
    TABLE_MAGIC,
    Identity,
    pack_entry,
    page_version,
    parse_page,
    scan_entries,
)

IDENTITY = Identity(b"n" * 16, b"i" * 16, SlotLayout(64, 16, 1000, 3), 4096)


def chunk(number: int) -> Chunk:
    return Chunk(b"%016d" % number, b"p" * 16, b"c" * 16, b"")


def entry(slot: int, number: int, sequence: int = 5, stored_bytes: int = 100) -> bytes:
    return pack_entry(
        slot,
        chunk(number),
        sequence=sequence,
        created_ns=77,
        stored_bytes=stored_bytes,
        codec_id=1,
    )


def resealed(data: bytes, offset: int, value: bytes) -> bytes:
    body = data[:offset] + value + data[offset + len(value) : -8]
    return body + struct.pack("<Q", xxhash.xxh3_64_intdigest(body))


def test_an_entry_lies_as_the_byte_table_says() -> None:
    data = entry(9, 3)
    assert len(data) == 128
    assert data[:48] == b"%016d" % 3 + b"p" * 16 + b"c" * 16
    assert struct.unpack_from("<QQQIHH", data, 48) == (5, 77, 100, 9, 1, 1)
    assert data[80:120] == bytes(40)
    assert struct.unpack_from("<Q", data, 120)[0] == xxhash.xxh3_64_intdigest(data[:120])


def test_a_header_page_lies_as_the_byte_table_says() -> None:
    page = IDENTITY.pack(TABLE_MAGIC)
    assert len(page) == 4096
    assert page[:8] == b"TKVTABL\n"
    assert struct.unpack_from("<HHI", page, 8) == (1, 0, 128)
    assert page[16:48] == b"n" * 16 + b"i" * 16
    assert struct.unpack_from("<IIIIQ", page, 48) == (3, 64, 16, 4096, 1000)
    assert struct.unpack_from("<Q", page, 4088)[0] == xxhash.xxh3_64_intdigest(page[:4088])
    assert parse_page(page, TABLE_MAGIC) == IDENTITY


def test_a_damaged_or_foreign_header_page_is_refused() -> None:
    page = IDENTITY.pack(SLAB_MAGIC)
    for data in (b"", page[:4095], page[:100] + b"x" + page[101:], bytes(4096)):
        with pytest.raises(FormatError):
            parse_page(data, SLAB_MAGIC)
    with pytest.raises(FormatError):
        parse_page(page, TABLE_MAGIC)
    with pytest.raises(FormatError, match="impossible"):
        parse_page(resealed(page, 48, bytes(4)), SLAB_MAGIC)


def test_the_version_of_a_page_is_read_without_trusting_the_rest() -> None:
    page = IDENTITY.pack(SLAB_MAGIC)
    assert page_version(page, SLAB_MAGIC) == 1
    assert page_version(page[:8] + b"\x05\x00" + bytes(4086), SLAB_MAGIC) == 5
    assert page_version(bytes(4096), SLAB_MAGIC) is None
    assert page_version(page[:100], SLAB_MAGIC) is None


def test_a_scan_gives_what_the_entries_say() -> None:
    scan = scan_entries(entry(0, 7, sequence=3) + EMPTY + entry(2, 8, sequence=4), 100)
    found = [(e.slot, e.key, e.sequence, e.created_ns, e.stored_bytes) for e in scan.entries]
    assert found == [(0, b"%016d" % 7, 3, 77, 100), (2, b"%016d" % 8, 4, 77, 100)]
    assert (scan.repeated, scan.damaged) == ([], 0)
    assert scan_entries(b"", 100).entries == []


@pytest.mark.parametrize("order", [(1, 2), (2, 1)])
def test_of_two_entries_of_one_key_the_later_write_counts(order: tuple[int, int]) -> None:
    first, second = order
    scan = scan_entries(entry(0, 7, sequence=first) + entry(1, 7, sequence=second), 100)
    assert [(e.slot, e.sequence) for e in scan.entries] == [(order.index(2), 2)]
    assert scan.repeated == [order.index(1)]


def test_every_flipped_bit_of_an_entry_makes_it_damaged() -> None:
    good = entry(0, 7)
    for bit in range(8 * len(good)):
        bad = bytearray(good)
        bad[bit // 8] ^= 1 << bit % 8
        scan = scan_entries(bytes(bad) + entry(1, 8), 100)
        assert [e.slot for e in scan.entries] == [1]
        assert scan.damaged == 1


@pytest.mark.parametrize(
    "bad",
    [
        entry(1, 7),  # written to the wrong place
        entry(0, 7, stored_bytes=101),  # more than a slot holds
        entry(0, 7, stored_bytes=0),
        resealed(entry(0, 7), 78, b"\x02\x00"),  # an unknown state
    ],
)
def test_a_well_sealed_entry_that_cannot_be_is_damaged(bad: bytes) -> None:
    scan = scan_entries(bad, 100)
    assert (scan.entries, scan.damaged) == ([], 1)


@given(st.binary(max_size=1024).map(lambda data: data[: len(data) // 128 * 128]))
def test_junk_is_counted_and_never_believed(junk: bytes) -> None:
    scan = scan_entries(junk, 1 << 40)
    assert scan.entries == []
    pieces = [junk[start : start + 128] for start in range(0, len(junk), 128)]
    assert scan.damaged == sum(any(piece) for piece in pieces)
