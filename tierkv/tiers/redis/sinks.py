# SPDX-License-Identifier: Apache-2.0
"""Receives one record into a slot, believing nothing of it.

The length must be exactly what the geometry says before a byte is taken; the header is checked
before the payload is let into the slot; the payload's checksum is compared at the end. XXH3 runs at
12 GB/s and more, so that happens on the event loop: 0.1 ms for a chunk of 1.4 MB.
"""

from __future__ import annotations

from collections.abc import Sequence

from tierkv.codecs.raw import RawCodec
from tierkv.errors import ErrorKind, FormatError
from tierkv.keys import Chunk
from tierkv.record import RecordFormat, RecordHeader
from tierkv.tiers.redis.link import Sink

MAX_DRAIN = 64 << 10
"""A foreign value up to this size, or up to a record's, is read to its end; a longer one costs the
connection."""


class RecordSink(Sink):
    """For one load.

    Args:
        format: of the namespace and geometry that are expected.
        chunk: what the record must hold.
        parts: `layout.part_stride` writable bytes a rank.

    Attributes:
        error: why the value was not taken, None if there is no reason.
    """

    def __init__(self, format: RecordFormat, chunk: Chunk, parts: Sequence[memoryview]) -> None:
        self.error: FormatError | None = None
        self.drain_limit = max(MAX_DRAIN, format.max_record_bytes)
        self.length = 0
        """Of the value, as the server announced it."""
        self._format = format
        self._chunk = chunk
        self._parts = parts
        self._header_bytes = bytearray(format.header_bytes)
        self._header: RecordHeader | None = None
        self._pieces = [memoryview(self._header_bytes), *parts]
        self._piece = 0
        self._offset = 0

    def accept(self, length: int) -> bool:
        self.length = length
        expected = self._format.max_record_bytes
        if length != expected:
            self.error = FormatError(
                f"a value of {length} bytes where a record has {expected}", kind=ErrorKind.GEOMETRY
            )
        return self.error is None

    def buffer(self) -> memoryview | None:
        if self.error is not None:
            return None
        return self._pieces[self._piece][self._offset :]

    def received(self, count: int) -> None:
        self._offset += count
        if self._offset < len(self._pieces[self._piece]):
            return
        if not self._piece:
            self._check_header()
        self._piece += 1
        self._offset = 0

    def _check_header(self) -> None:
        try:
            header = self._format.check(self._header_bytes, self._chunk)
            if header.codec_id != RawCodec.codec_id or header.stored_bytes != header.raw_bytes:
                raise FormatError("packed, where records in Redis are raw")
        except FormatError as error:
            self.error = error
        else:
            self._header = header

    def verify(self) -> None:
        """Compare the payload with its checksum, once all bytes are here.

        Raises:
            FormatError: this one, or what was wrong before.
        """
        if self.error is not None:
            raise self.error
        if self._header is None or self._piece != len(self._pieces):
            raise FormatError("the record ends too early")
        self._format.check_payload(self._header, self._parts)
