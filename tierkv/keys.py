# SPDX-License-Identifier: Apache-2.0
"""Identity: which KV is the same KV.

Every digest is keyed BLAKE2b (RFC 7693) over tagged, length-prefixed fields, 128 bits kept. Tags
and lengths make the encoding injective: no two different lists of fields give the same bytes, so a
LoRA that is called like a tenant cannot be taken for it. The engine's own block hashes are never
used: their values change between its releases.

A *chunk key* names exact KV: namespace, everything before the chunk, the chunk's tokens, and the
request's scope. A *content key* names a piece of text wherever it stands: the same without what
came before. Both hold the tenant.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b

import numpy as np
import numpy.typing as npt

KEY_BYTES = 16
KEY_FORMAT = 1
"""Raise it whenever the bytes that go into a digest change: old stores then simply miss."""

TokenIds = npt.NDArray[np.int32]


def _digest(person: bytes, secret: bytes, fields: Iterable[tuple[str, bytes]]) -> bytes:
    h = blake2b(digest_size=KEY_BYTES, key=secret, person=person)
    for tag, value in fields:
        name = tag.encode()
        h.update(len(name).to_bytes(2, "little") + name + len(value).to_bytes(8, "little"))
        h.update(value)
    return h.digest()


def _short(secret: bytes) -> bytes:
    """The secret as a key that BLAKE2b takes."""
    return blake2b(secret, digest_size=64).digest() if len(secret) > 64 else secret


@dataclass(frozen=True, slots=True)
class Chunk:
    """One chunk of one sequence.

    Attributes:
        key: exact identity, 16 bytes.
        parent: key of the chunk before it, or the root of its scope.
        content_key: identity of its text anywhere, 16 bytes.
        tokens: its token ids, int32 little-endian; compared on every load from a lower tier.
    """

    key: bytes
    parent: bytes
    content_key: bytes
    tokens: bytes


class Namespace:
    """All that makes two KV caches incompatible, as one digest.

    Args:
        fields: name to value; every value is written as text. Order does not matter.
        secret: key of all digests, at most 64 bytes; empty means plain hashing.
        about: for people who look at what is stored (the model's name, ...); no part of identity.
    """

    def __init__(
        self,
        fields: Mapping[str, str | int | float | bool],
        secret: bytes = b"",
        about: Mapping[str, str] | None = None,
    ) -> None:
        secret = _short(secret)
        self.about = dict(about or {})
        self.fields = {name: str(value) for name, value in sorted(fields.items())}
        self.secret = secret
        self.digest = _digest(
            b"tierkv-ns",
            secret,
            [("format", str(KEY_FORMAT).encode())]
            + [(name, value.encode()) for name, value in self.fields.items()],
        )

    def __repr__(self) -> str:
        return f"Namespace({self.digest.hex()[:12]})"

    def scope(self, **fields: str | None) -> Scope:
        """The part of the namespace that one request lives in: tenant, LoRA, ... (None: absent)."""
        present = {name: value for name, value in sorted(fields.items()) if value is not None}
        return Scope(self.digest, self.secret, present)


class Scope:
    """A namespace narrowed to one request's tenant and adapters: where its chains are rooted.

    Args:
        namespace: digest, 16 bytes.
        secret: key of all digests.
        fields: name to value, sorted by name.
    """

    def __init__(self, namespace: bytes, secret: bytes, fields: Mapping[str, str]) -> None:
        tagged = [("namespace", namespace)]
        tagged += [(name, value.encode()) for name, value in fields.items()]
        self.secret = _short(secret)
        self.root = _digest(b"tierkv-root", self.secret, tagged)
        self.content_root = _digest(b"tierkv-text", self.secret, tagged)

    def chunk_key(self, parent: bytes, tokens: bytes, extra: bytes = b"") -> bytes:
        """Key of the chunk with this text (int32 little-endian) behind `parent`."""
        return self._key(b"tierkv-chunk", parent, tokens, extra)

    def content_key(self, tokens: bytes, extra: bytes = b"") -> bytes:
        """Key of this text wherever it stands."""
        return self._key(b"tierkv-content", self.content_root, tokens, extra)

    def _key(self, person: bytes, parent: bytes, tokens: bytes, extra: bytes) -> bytes:
        # `parent` has a fixed length; the two lengths in front make the rest injective.
        lengths = len(tokens).to_bytes(4, "little") + len(extra).to_bytes(4, "little")
        return blake2b(
            b"".join((parent, lengths, tokens, extra)),
            digest_size=KEY_BYTES,
            key=self.secret,
            person=person,
        ).digest()


class ChunkChain:
    """The chunks of one growing token sequence. Not thread-safe; owned by the request's owner.

    Args:
        scope: where the chain is rooted.
        chunk_tokens: tokens in a chunk.
    """

    def __init__(self, scope: Scope, chunk_tokens: int) -> None:
        self.scope = scope
        self._chunk_tokens = chunk_tokens
        self.chunks: list[Chunk] = []

    def extend(
        self,
        token_ids: Sequence[int],
        extras: Mapping[int, bytes] | None = None,
    ) -> None:
        """Add every full chunk of `token_ids` that is not in the chain yet.

        Hot path: about 2 µs a chunk beside the hashing itself.

        Args:
            token_ids: the whole sequence from its start, at least as long as last time.
            extras: chunk index to bytes that also decide its KV (images at their offsets).
        """
        size = self._chunk_tokens
        have, full = len(self.chunks), len(token_ids) // size
        if full <= have:
            return
        data = np.asarray(token_ids[have * size : full * size], dtype="<i4").tobytes()
        parent = self.chunks[-1].key if self.chunks else self.scope.root
        width = size * 4
        for index in range(have, full):
            start = (index - have) * width
            tokens = data[start : start + width]
            extra = extras.get(index, b"") if extras else b""
            key = self.scope.chunk_key(parent, tokens, extra)
            content = self.scope.content_key(tokens, extra)
            self.chunks.append(Chunk(key, parent, content, tokens))
            parent = key
