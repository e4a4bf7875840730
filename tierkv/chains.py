# SPDX-License-Identifier: Apache-2.0
"""Which stored chunks follow which, and from which request's scope they come.

A chunk names the one before it; the first one names the root of its scope, which is a keyed digest
of the tenant and the LoRA adapter. So a tenant's chunks are found by walking down from that root.
What cannot be reached from a root that can be named (another tenant's, an adapter's, text whose
beginning was evicted) belongs to somebody who cannot be named here.

Pure functions over values.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Protocol, TypeVar

from tierkv.keys import Scope


class Linked(Protocol):
    """A chunk, as far as its chain is concerned."""

    @property
    def key(self) -> bytes: ...

    @property
    def parent(self) -> bytes: ...


C = TypeVar("C", bound=Linked)


def tenant_root(namespace: str, tenant: str, secret: bytes) -> bytes:
    """Where a tenant's chains begin, without LoRA.

    Args:
        namespace: digest in hex.
        tenant: the request's `cache_salt`; "" for requests without one.
        secret: of the configuration's `key_secret`; b"" without one.
    """
    fields = {"tenant": tenant} if tenant else {}
    return Scope(bytes.fromhex(namespace), secret, fields).root


def below(root: bytes, chunks: Iterable[C]) -> Iterator[tuple[int, C]]:
    """The chunks whose chain leads back to `root`, parents first, each with its number in it."""
    children: dict[bytes, list[C]] = {}
    for chunk in chunks:
        children.setdefault(chunk.parent, []).append(chunk)
    parents = [(0, root)]
    while parents:
        number, parent = parents.pop()
        for chunk in children.pop(parent, []):
            yield number, chunk
            parents.append((number + 1, chunk.key))
