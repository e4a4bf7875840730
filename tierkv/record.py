# SPDX-License-Identifier: Apache-2.0
"""The self-describing bytes of a chunk on disk and in Redis: a header, then the payload.

The header says whose KV this is, how it is packed and what it must add up to; it ends with a
checksum of itself. `docs/reference/format.md` has the byte table, `tests/data/` golden records.

Reading checks, in this order: magic, version, header checksum, lengths against the geometry that
the reader knows, namespace, key, token ids, and last the payload's checksum. Nothing is allocated
by a length that was read. The checksums (XXH3-64) find accidents, not forgery.

Thread: any; a `RecordFormat` is immutable.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable
from dataclasses import dataclass

import xxhash

from tierkv.errors import ErrorKind, FormatError, GeometryError
from tierkv.keys import KEY_BYTES, Chunk
from tierkv.pages.layout import ALIGNMENT, SlotLayout, align_up

MAGIC = b"TIERKV\r\n"
"""The line end breaks where something rewrites line ends, as it did for PNG's authors."""

RECORD_FORMAT = 1
"""Raise it whenever the bytes of a record change their meaning."""

MAX_HEADER_BYTES = 1 << 24
"""Cap on the header that a tool reads without knowing the geometry: 4 million token ids."""

_FIXED = struct.Struct("<8sHHIIIIIQQQQQQ16s16s16s16s")
_SUM = struct.Struct("<Q")
_TOKEN_BYTES = 4

Buffer = bytes | bytearray | memoryview


@dataclass(frozen=True, slots=True)
class RecordHeader:
    """A header that is intact by itself (magic, version, checksum); whose it is was not compared.

    Attributes:
        codec_id: how the payload is packed; see `tierkv.codecs`.
        header_bytes: from the record's start to the payload.
        ranks, chunk_tokens, block_tokens, part_bytes: the `SlotLayout` it was written for.
        raw_bytes: payload before packing: `SlotLayout.slot_bytes`.
        stored_bytes: payload as it follows the header.
        sequence: number of the write in its tier; tells two writes of one key apart.
        created_ns: wall clock, ns since 1970.
        payload_checksum: XXH3-64 of the stored payload.
        namespace, key, parent, content_key: 16 bytes each; `tierkv.keys`.
        tokens: the chunk's token ids, int32 little-endian.
    """

    codec_id: int
    header_bytes: int
    ranks: int
    chunk_tokens: int
    block_tokens: int
    part_bytes: int
    raw_bytes: int
    stored_bytes: int
    sequence: int
    created_ns: int
    payload_checksum: int
    namespace: bytes
    key: bytes
    parent: bytes
    content_key: bytes
    tokens: bytes


def checksum(pieces: Iterable[Buffer]) -> int:
    """XXH3-64 of the pieces one after the other. xxhash lets go of the GIL meanwhile."""
    digest = xxhash.xxh3_64()
    for piece in pieces:
        digest.update(piece)
    return int(digest.intdigest())


def parse_header(data: Buffer) -> RecordHeader:
    """Read a header of any namespace and geometry. For tools; tiers use `RecordFormat.check`.

    Args:
        data: from the record's start, at least the whole header.

    Raises:
        FormatError: not an intact header of this format version.
    """
    if len(data) < _FIXED.size or bytes(data[: len(MAGIC)]) != MAGIC:
        raise FormatError("no record begins here: the magic is missing")
    fields = _FIXED.unpack_from(data)
    _, version, codec_id, header_bytes, ranks, chunk_tokens, block_tokens, reserved = fields[:8]
    part_bytes, raw_bytes, stored_bytes, sequence, created_ns, payload_checksum = fields[8:14]
    namespace, key, parent, content_key = fields[14:]
    if version != RECORD_FORMAT:
        raise FormatError(f"record format {version}, this version reads {RECORD_FORMAT}")
    least = _FIXED.size + chunk_tokens * _TOKEN_BYTES + _SUM.size
    if not least <= header_bytes <= min(len(data), MAX_HEADER_BYTES):
        raise FormatError(f"the header claims {header_bytes} bytes for {chunk_tokens} tokens")
    body = header_bytes - _SUM.size
    if xxhash.xxh3_64_intdigest(data[:body]) != _SUM.unpack_from(data, body)[0]:
        raise FormatError("the header does not match its checksum", kind=ErrorKind.CHECKSUM)
    if reserved:
        raise FormatError("a reserved field of the header is set")
    return RecordHeader(
        codec_id,
        header_bytes,
        ranks,
        chunk_tokens,
        block_tokens,
        part_bytes,
        raw_bytes,
        stored_bytes,
        sequence,
        created_ns,
        payload_checksum,
        namespace,
        key,
        parent,
        content_key,
        bytes(data[_FIXED.size : _FIXED.size + chunk_tokens * _TOKEN_BYTES]),
    )


class RecordFormat:
    """Records of one namespace and one geometry.

    Args:
        namespace: digest, 16 bytes.
        layout: sizes of a chunk.
        alignment: the header is padded to a multiple of it: `ALIGNMENT` on disk, so that the
            payload may be read with O_DIRECT; 8 where bytes on the wire count.

    Raises:
        GeometryError: more tokens in a chunk than a header can hold.
    """

    def __init__(self, namespace: bytes, layout: SlotLayout, *, alignment: int = ALIGNMENT) -> None:
        assert len(namespace) == KEY_BYTES
        self.namespace = namespace
        self.layout = layout
        self.header_bytes = align_up(
            _FIXED.size + layout.chunk_tokens * _TOKEN_BYTES + _SUM.size, alignment
        )
        if self.header_bytes > MAX_HEADER_BYTES:
            raise GeometryError(
                f"chunk_tokens={layout.chunk_tokens} does not fit a record; set it below "
                f"{MAX_HEADER_BYTES // _TOKEN_BYTES}"
            )
        self._sum_at = self.header_bytes - _SUM.size
        self._geometry = (
            self.header_bytes,
            layout.ranks,
            layout.chunk_tokens,
            layout.block_tokens,
            layout.part_bytes,
            layout.slot_bytes,
        )

    @property
    def max_record_bytes(self) -> int:
        """Header and payload; a packed payload is never longer than the raw one."""
        return self.header_bytes + self.layout.slot_bytes

    def pack_header(
        self,
        target: bytearray | memoryview,
        chunk: Chunk,
        *,
        codec_id: int,
        sequence: int,
        created_ns: int,
        stored_bytes: int,
        payload_checksum: int,
    ) -> None:
        """Write the header of `chunk` into the first `header_bytes` of `target`, padding included.

        Raises:
            GeometryError: the chunk has another number of tokens than the layout says, or the
                payload is longer than the raw one.
        """
        layout = self.layout
        if len(chunk.tokens) != layout.chunk_tokens * _TOKEN_BYTES:
            raise GeometryError(
                f"a chunk of {len(chunk.tokens) // _TOKEN_BYTES} tokens where a record holds "
                f"{layout.chunk_tokens}"
            )
        if stored_bytes > layout.slot_bytes:
            raise GeometryError(f"payload of {stored_bytes} bytes, at most {layout.slot_bytes} fit")
        fixed = _FIXED.pack(
            MAGIC,
            RECORD_FORMAT,
            codec_id,
            self.header_bytes,
            layout.ranks,
            layout.chunk_tokens,
            layout.block_tokens,
            0,
            layout.part_bytes,
            layout.slot_bytes,
            stored_bytes,
            sequence,
            created_ns,
            payload_checksum,
            self.namespace,
            chunk.key,
            chunk.parent,
            chunk.content_key,
        )
        body = (fixed + chunk.tokens).ljust(self._sum_at, b"\0")
        target[: self._sum_at] = body
        _SUM.pack_into(target, self._sum_at, xxhash.xxh3_64_intdigest(body))

    def check(self, data: Buffer, chunk: Chunk) -> RecordHeader:
        """Read a header and compare it with what is asked for. Hot path, about 5 µs.

        Args:
            data: at least the first `header_bytes` of the record.
            chunk: what the record should hold; its key and token ids are compared.

        Raises:
            FormatError: `kind` is FORMAT (not a record of this version), CHECKSUM (damaged),
                GEOMETRY (other sizes) or KEY_MISMATCH (another namespace, key or text).
        """
        header = self._own(data, chunk.key)
        if header.tokens != chunk.tokens:
            raise FormatError("other token ids under this key", kind=ErrorKind.KEY_MISMATCH)
        return header

    def chunk(self, data: Buffer, key: bytes) -> Chunk:
        """Read keys and text of a record out of its header; about 5 µs.

        Args:
            data: at least the first `header_bytes` of the record.
            key: of the chunk that it should hold.

        Raises:
            FormatError: as `check`.
        """
        header = self._own(data, key)
        return Chunk(header.key, header.parent, header.content_key, header.tokens)

    def _own(self, data: Buffer, key: bytes) -> RecordHeader:
        header = parse_header(data)
        geometry = (
            header.header_bytes,
            header.ranks,
            header.chunk_tokens,
            header.block_tokens,
            header.part_bytes,
            header.raw_bytes,
        )
        if geometry != self._geometry or header.stored_bytes > header.raw_bytes:
            raise FormatError("a record of another geometry", kind=ErrorKind.GEOMETRY)
        if header.namespace != self.namespace:
            raise FormatError("a record of another namespace", kind=ErrorKind.KEY_MISMATCH)
        if header.key != key:
            raise FormatError("a record of another key", kind=ErrorKind.KEY_MISMATCH)
        return header

    def check_payload(self, header: RecordHeader, pieces: Iterable[Buffer]) -> None:
        """Compare the stored payload, given in pieces, with the header's checksum.

        Raises:
            FormatError: kind CHECKSUM.
        """
        if checksum(pieces) != header.payload_checksum:
            raise FormatError("the payload does not match its checksum", kind=ErrorKind.CHECKSUM)
