# SPDX-License-Identifier: Apache-2.0
"""Records: every field where the byte table says, every damage found, in the documented order."""

from __future__ import annotations

import struct
from pathlib import Path

import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from tierkv.errors import ErrorKind, FormatError, GeometryError
from tierkv.keys import Chunk
from tierkv.pages.layout import SlotLayout
from tierkv.record import MAX_HEADER_BYTES, RecordFormat, checksum, parse_header

DATA = Path(__file__).parents[1] / "data"
LAYOUT = SlotLayout(chunk_tokens=4, block_tokens=2, block_bytes=2560, ranks=2)
NAMESPACE = bytes(range(16))
CHUNK = Chunk(
    key=b"k" * 16,
    parent=b"p" * 16,
    content_key=b"c" * 16,
    tokens=struct.pack("<4i", 1, 2, 70000, -1),
)
PARTS = [bytes([7]) * 5120 + bytes(3072), bytes([9]) * 5120 + bytes(3072)]
RECORD = RecordFormat(NAMESPACE, LAYOUT)


def header(record: RecordFormat = RECORD, chunk: Chunk = CHUNK) -> bytearray:
    target = bytearray(record.header_bytes)
    record.pack_header(
        target,
        chunk,
        codec_id=0,
        sequence=3,
        created_ns=1_700_000_000_000_000_000,
        stored_bytes=record.layout.slot_bytes,
        payload_checksum=checksum(PARTS),
    )
    return target


def resealed(data: bytearray, offset: int, value: bytes) -> bytearray:
    """`data` with other bytes at `offset` and a checksum that fits again."""
    data = bytearray(data)
    data[offset : offset + len(value)] = value
    data[-8:] = struct.pack("<Q", xxhash.xxh3_64_intdigest(bytes(data[:-8])))
    return data


def test_every_field_lies_where_the_byte_table_says() -> None:
    data = bytes(header())
    assert len(data) == 4096
    assert data[0:8] == b"TIERKV\r\n"
    assert struct.unpack_from("<HHI", data, 8) == (1, 0, 4096)
    assert struct.unpack_from("<IIII", data, 16) == (2, 4, 2, 0)
    assert struct.unpack_from("<QQQ", data, 32) == (5120, 16384, 16384)
    assert struct.unpack_from("<QQ", data, 56) == (3, 1_700_000_000_000_000_000)
    assert struct.unpack_from("<Q", data, 72) == (xxhash.xxh3_64_intdigest(b"".join(PARTS)),)
    assert data[80:144] == NAMESPACE + b"k" * 16 + b"p" * 16 + b"c" * 16
    assert struct.unpack_from("<4i", data, 144) == (1, 2, 70000, -1)
    assert data[160:4088] == bytes(3928)
    assert struct.unpack_from("<Q", data, 4088) == (xxhash.xxh3_64_intdigest(data[:4088]),)


def test_what_was_packed_is_read_back() -> None:
    found = RECORD.check(header(), CHUNK)
    assert found == parse_header(bytes(header()))
    assert (found.key, found.parent, found.content_key) == (b"k" * 16, b"p" * 16, b"c" * 16)
    assert (found.sequence, found.created_ns) == (3, 1_700_000_000_000_000_000)
    assert (found.codec_id, found.stored_bytes, found.tokens) == (0, 16384, CHUNK.tokens)
    RECORD.check_payload(found, PARTS)


def test_the_header_is_as_short_as_its_alignment_lets_it() -> None:
    assert RecordFormat(NAMESPACE, LAYOUT, alignment=8).header_bytes == 144 + 4 * 4 + 8
    many = SlotLayout(chunk_tokens=1024, block_tokens=16, block_bytes=64)
    assert RecordFormat(NAMESPACE, many).header_bytes == 8192
    assert RECORD.max_record_bytes == 4096 + 16384


def test_the_golden_record_of_format_1_is_still_read_and_written() -> None:
    golden = (DATA / "record_v1.bin").read_bytes()
    assert bytes(header()) + b"".join(PARTS) == golden
    found = RECORD.check(golden, CHUNK)
    RECORD.check_payload(found, [golden[found.header_bytes :]])


def test_a_record_of_the_future_is_refused_by_its_version() -> None:
    golden = (DATA / "record_v2_future.bin").read_bytes()
    with pytest.raises(FormatError, match="record format 2") as caught:
        RECORD.check(golden, CHUNK)
    assert caught.value.kind is ErrorKind.FORMAT


def test_every_single_bit_flip_in_the_header_is_found() -> None:
    good = header()
    for bit in range(8 * len(good)):
        good[bit // 8] ^= 1 << bit % 8
        with pytest.raises(FormatError):
            RECORD.check(good, CHUNK)
        good[bit // 8] ^= 1 << bit % 8
    RECORD.check(good, CHUNK)


@given(st.integers(0, 8 * sum(map(len, PARTS)) - 1))
def test_a_bit_flip_in_the_payload_is_found(bit: int) -> None:
    payload = bytearray(b"".join(PARTS))
    payload[bit // 8] ^= 1 << bit % 8
    with pytest.raises(FormatError) as caught:
        RECORD.check_payload(RECORD.check(header(), CHUNK), [payload])
    assert caught.value.kind is ErrorKind.CHECKSUM


@pytest.mark.parametrize(
    ("offset", "value", "kind"),
    [
        (0, b"tierkv", ErrorKind.FORMAT),
        (8, b"\x00\x00", ErrorKind.FORMAT),
        (8, b"\x02\x00", ErrorKind.FORMAT),
        (12, struct.pack("<I", 4095), ErrorKind.CHECKSUM),
        (12, struct.pack("<I", 100), ErrorKind.FORMAT),
        (12, struct.pack("<I", 0xFFFFFFFF), ErrorKind.FORMAT),
        (16, struct.pack("<I", 1), ErrorKind.GEOMETRY),
        (20, struct.pack("<I", 8), ErrorKind.GEOMETRY),
        (20, struct.pack("<I", 0xFFFFFFFF), ErrorKind.FORMAT),
        (24, struct.pack("<I", 4), ErrorKind.GEOMETRY),
        (28, struct.pack("<I", 1), ErrorKind.FORMAT),
        (32, struct.pack("<Q", 5121), ErrorKind.GEOMETRY),
        (40, struct.pack("<Q", 1 << 63), ErrorKind.GEOMETRY),
        (48, struct.pack("<Q", 16385), ErrorKind.GEOMETRY),
        (80, b"n" * 16, ErrorKind.KEY_MISMATCH),
        (96, b"K" * 16, ErrorKind.KEY_MISMATCH),
        (144, struct.pack("<i", 2), ErrorKind.KEY_MISMATCH),
    ],
)
def test_a_well_sealed_header_of_something_else_is_refused(
    offset: int, value: bytes, kind: ErrorKind
) -> None:
    with pytest.raises(FormatError) as caught:
        RECORD.check(resealed(header(), offset, value), CHUNK)
    assert caught.value.kind is kind


def test_layouts_of_equal_byte_size_are_told_apart() -> None:
    # The same 16384 bytes a slot and 5120 a part, cut into blocks in another way.
    other = SlotLayout(chunk_tokens=4, block_tokens=4, block_bytes=5120, ranks=2)
    assert (other.slot_bytes, other.part_bytes) == (LAYOUT.slot_bytes, LAYOUT.part_bytes)
    with pytest.raises(FormatError) as caught:
        RecordFormat(NAMESPACE, other).check(header(), CHUNK)
    assert caught.value.kind is ErrorKind.GEOMETRY


@given(st.binary(max_size=512), st.booleans())
def test_arbitrary_bytes_are_refused_and_nothing_else_is_raised(data: bytes, magic: bool) -> None:
    if magic:
        data = b"TIERKV\r\n\x01\x00" + data
    with pytest.raises(FormatError):
        parse_header(data)


def test_a_cut_header_is_refused() -> None:
    whole = bytes(header())
    for size in range(0, len(whole), 97):
        with pytest.raises(FormatError):
            parse_header(whole[:size])


def test_what_does_not_fit_is_not_packed() -> None:
    short = Chunk(CHUNK.key, CHUNK.parent, CHUNK.content_key, b"\0" * 12)
    with pytest.raises(GeometryError, match="3 tokens"):
        header(chunk=short)
    target = bytearray(RECORD.header_bytes)
    with pytest.raises(GeometryError, match="at most 16384"):
        RECORD.pack_header(
            target,
            CHUNK,
            codec_id=0,
            sequence=1,
            created_ns=0,
            stored_bytes=16385,
            payload_checksum=0,
        )
    huge = SlotLayout(chunk_tokens=MAX_HEADER_BYTES // 4, block_tokens=1, block_bytes=1)
    with pytest.raises(GeometryError, match="chunk_tokens"):
        RecordFormat(NAMESPACE, huge)
