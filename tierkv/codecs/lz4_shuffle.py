# SPDX-License-Identifier: Apache-2.0
"""Codec 1: LZ4 over 2-byte elements split into their low and high bytes.

KV in bfloat16 or float16 has noise in the low bytes and few values in the high ones (sign and
exponent). LZ4 finds nothing in a mixture of both; with the bytes apart it packs the high half.
`benchmarks/codecs.py` measures what that gains on a sample of real KV.

    stored = length of block 0 | length of block 1 | ...    uint32 little-endian, one a rank
             block 0 | block 1 | ...
    block  = LZ4 block (no frame, no size) of: all low bytes of the part, then all high bytes
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import ClassVar

import lz4.block
import numpy as np

from tierkv.codecs.base import Codec
from tierkv.errors import FormatError

_WORTH = 15 / 16
"""Stored above this share of the raw size, a chunk costs more to unpack than it saves to read."""


class Lz4ShuffleCodec(Codec):
    """One LZ4 block a rank."""

    name: ClassVar[str] = "lz4"
    codec_id: ClassVar[int] = 1

    def encode(self, parts: Sequence[memoryview]) -> list[memoryview] | None:
        blocks: list[bytes] = []
        for part in parts:
            pairs = np.frombuffer(part, np.uint8).reshape(-1, 2)
            shuffled = np.empty((2, len(pairs)), np.uint8)
            shuffled[0] = pairs[:, 0]
            shuffled[1] = pairs[:, 1]
            blocks.append(lz4.block.compress(shuffled, store_size=False))
        lengths = struct.pack(f"<{len(blocks)}I", *map(len, blocks))
        pieces = [lengths, *blocks]
        if sum(map(len, pieces)) > _WORTH * sum(map(len, parts)):
            return None
        return [memoryview(piece) for piece in pieces]

    def decode(self, stored: memoryview, parts: Sequence[memoryview]) -> None:
        start = 4 * len(parts)
        if len(stored) < start:
            raise FormatError("lz4 payload without its table of lengths")
        lengths = struct.unpack_from(f"<{len(parts)}I", stored)
        if start + sum(lengths) != len(stored):
            raise FormatError("lz4 payload whose blocks do not add up to its length")
        for part, length in zip(parts, lengths, strict=True):
            _unpack(stored[start : start + length], part)
            start += length


def _unpack(block: memoryview, part: memoryview) -> None:
    try:
        plain = lz4.block.decompress(block, uncompressed_size=len(part))
    except lz4.block.LZ4BlockError as error:
        raise FormatError(f"a block is not LZ4: {error}") from error
    if len(plain) != len(part):
        raise FormatError(f"a block of {len(plain)} bytes for a part of {len(part)}")
    half = len(part) // 2
    shuffled = np.frombuffer(plain, np.uint8)
    elements = np.frombuffer(part, "<u2")
    # Shift and or: five times as fast as numpy's transposed copy of single bytes.
    np.left_shift(shuffled[half:], 8, out=elements, dtype=np.uint16)
    np.bitwise_or(elements, shuffled[:half], out=elements)
