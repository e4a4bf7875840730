# SPDX-License-Identifier: Apache-2.0
"""What chunks are called on the server: `PREFIX:NAMESPACE:SHAPE:GENERATION:KEY`, in hexadecimal.

No braces: they would be a hash tag, and put a whole namespace on one node of a cluster. The shape
stands for geometry and record format, so that engines that differ in these, which would only find
each other's chunks unreadable, do not see them.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import astuple
from hashlib import blake2b

from tierkv.pages.layout import SlotLayout
from tierkv.record import RECORD_FORMAT
from tierkv.tiers.redis.generation import Generation


class Names:
    """Owned by the event loop.

    Args:
        prefix: `key_prefix` of the configuration.
        namespace: digest, 16 bytes.
    """

    def __init__(self, prefix: str, namespace: bytes, layout: SlotLayout) -> None:
        fields = repr((RECORD_FORMAT, *astuple(layout))).encode()
        shape = blake2b(fields, digest_size=4).hexdigest()
        self.generation = Generation()
        self.of_generation = f"{prefix}:{namespace.hex()}:generation".encode()
        """Of the key that holds the generation itself."""
        self.of_about = f"{prefix}:{namespace.hex()}:about".encode()
        """Of the key that says what the namespace is, for people."""
        self._stem = f"{prefix}:{namespace.hex()}:{shape}:"

    def of(self, key: bytes) -> bytes | None:
        """Name of a chunk; None while the generation is not known."""
        word = self.generation.word
        return None if word is None else f"{self._stem}{word}:{key.hex()}".encode()

    def of_all(self, keys: Iterable[bytes]) -> dict[bytes, bytes]:
        """Key to name, each once, in order; empty while the generation is not known."""
        word = self.generation.word
        if word is None:
            return {}
        stem = f"{self._stem}{word}:"
        return {key: f"{stem}{key.hex()}".encode() for key in keys}
