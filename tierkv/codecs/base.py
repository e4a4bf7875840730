# SPDX-License-Identifier: Apache-2.0
"""The contract of a codec: a chunk's parts to stored bytes, and back.

A codec is a pure function with a name and a number. The number goes into the record's header, so
that a tier reads what any configuration wrote. A codec need not check anything but its own
framing: the record's checksum over the stored bytes was compared before `decode` is called, and
is no defence against forgery, so `decode` must stay within `parts` whatever it is given.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import ClassVar


class Codec(ABC):
    """Stateless; any thread; blocking (CPU only)."""

    name: ClassVar[str]
    codec_id: ClassVar[int]
    """0 … 999 are tierkv's own (`docs/reference/format.md`); others take 1000 … 65535."""

    @abstractmethod
    def encode(self, parts: Sequence[memoryview]) -> list[memoryview] | None:
        """The stored bytes of `parts`, in pieces, or None if packing does not pay.

        Args:
            parts: one buffer a rank, all of one length, a multiple of 4096 bytes. Not changed;
                the result may be views of them.

        Returns:
            At most as many bytes as `parts` have. None: the caller stores them raw.
        """

    @abstractmethod
    def decode(self, stored: memoryview, parts: Sequence[memoryview]) -> None:
        """Fill `parts` from what `encode` gave for buffers of the same lengths.

        Raises:
            FormatError: not bytes of this codec; the content of `parts` is then undefined.
        """
