# SPDX-License-Identifier: Apache-2.0
"""Codec 0: the bytes as they lie in a slot, so that a tier may read straight into the slot."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from tierkv.codecs.base import Codec
from tierkv.errors import FormatError


class RawCodec(Codec):
    """The parts one after the other."""

    name: ClassVar[str] = "raw"
    codec_id: ClassVar[int] = 0

    def encode(self, parts: Sequence[memoryview]) -> list[memoryview]:
        return list(parts)

    def decode(self, stored: memoryview, parts: Sequence[memoryview]) -> None:
        if len(stored) != sum(map(len, parts)):
            raise FormatError(f"raw payload of {len(stored)} bytes does not fill the slot")
        start = 0
        for part in parts:
            part[:] = stored[start : start + len(part)]
            start += len(part)
