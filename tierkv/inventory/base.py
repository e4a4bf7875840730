# SPDX-License-Identifier: Apache-2.0
"""What can be asked of a place that holds chunks, without the engine that put them there.

Asking changes nothing and takes no lock, so it may be done beside a running engine; what is seen
is then a moment's picture. Removing needs the place to be free, or to be shared by nature (Redis).

Everything here blocks; one thread at a time.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Self

from tierkv.config.disk import DiskConfig
from tierkv.config.redis import RedisConfig
from tierkv.record import RecordHeader

if TYPE_CHECKING:
    from tierkv.config.base import LowerTierConfig


@dataclass(frozen=True, slots=True)
class NamespaceSummary:
    """One namespace: KV of one model, one geometry, one version of the engine.

    Attributes:
        tier: name of the tier.
        name: what it is called in its place: `<digest>-v1` on disk, the digest in Redis.
        digest: of the namespace, hex.
        about: what its engine said of it (model, engine, dtype, kv_dtype); may be empty.
        chunks: that can be read.
        chunk_bytes: of those, header included.
        allocated_bytes: as the medium counts, free slots and leftovers included.
        tokens: in those chunks.
        oldest_ns, newest_ns: when the first and the last of them was written; None if unknown.
        used_ns: last use; None if unknown.
        problem: why nothing in it can be read, "" if it can.
    """

    tier: str
    name: str
    digest: str
    about: Mapping[str, str] = field(default_factory=dict)
    chunks: int = 0
    chunk_bytes: int = 0
    allocated_bytes: int = 0
    tokens: int = 0
    oldest_ns: int | None = None
    newest_ns: int | None = None
    used_ns: int | None = None
    problem: str = ""

    @property
    def model(self) -> str:
        return self.about.get("model", "")


@dataclass(frozen=True, slots=True)
class StoredChunk:
    """One chunk as its place lists it.

    Attributes:
        namespace: `NamespaceSummary.name`.
        key, parent: 16 bytes each.
        nbytes: header and stored payload.
        tokens: in it.
        created_ns: when it was written; None if unknown.
        used_ns: last use; None if unknown.
        locator: where it is; the inventory's own business.
    """

    namespace: str
    key: bytes
    parent: bytes
    nbytes: int
    tokens: int
    created_ns: int | None
    used_ns: int | None
    locator: int | bytes


@dataclass(frozen=True, slots=True)
class Problem:
    """Something that is stored and cannot be used.

    Attributes:
        namespace: where.
        what: a chunk's key in hex, or the file.
        reason: one sentence.
        locator: what `Inventory.drop` needs; None: the whole namespace.
    """

    namespace: str
    what: str
    reason: str
    locator: int | bytes | None


class Inventory(ABC):
    """One tier's place."""

    tier: str
    """Name of the tier."""
    place: str
    """Its directory or address, for messages."""
    capacity_bytes: int | None = None
    """Most bytes the tier may use, if it is configured."""
    free_bytes: int | None = None
    """What the medium has left for us, if it says so."""
    holder: int | None = None
    """Pid of the process that has the place for itself, 0 if it did not leave one; None: nobody,
    or nobody that can be seen."""

    @property
    def used_by(self) -> str:
        """The holder in words, "" if there is none."""
        if self.holder is None:
            return ""
        return f"process {self.holder}" if self.holder else "another process"

    @abstractmethod
    def namespaces(self) -> list[NamespaceSummary]:
        """All of them, the one used last first."""

    @abstractmethod
    def chunks(self, namespace: str) -> Iterator[StoredChunk]:
        """What one namespace holds, in no order."""

    @abstractmethod
    def header(self, chunk: StoredChunk) -> RecordHeader:
        """Read the chunk's own header.

        Raises:
            FormatError: it is not there, or damaged.
        """

    @abstractmethod
    def check(self, chunk: StoredChunk) -> Problem | None:
        """Read all of the chunk and compare the checksums."""

    @abstractmethod
    def damage(self, namespace: str) -> list[Problem]:
        """What is wrong beside the chunks themselves."""

    @abstractmethod
    def drop(self, problems: Sequence[Problem]) -> None:
        """Forget what cannot be used.

        Raises:
            TierError: somebody uses the place.
        """

    @abstractmethod
    def remove(self, namespace: str, chunks: Sequence[StoredChunk] | None = None) -> int:
        """Forget chunks, or the whole namespace; returns how many were there.

        Raises:
            TierError: somebody uses the place.
        """

    def close(self) -> None:  # noqa: B027 - not all hold something
        """Let go of the place. May be called twice."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def open_inventory(config: LowerTierConfig) -> Inventory | None:
    """The inventory of a configured tier; None for tiers of other packages, which have none.

    Raises:
        TierError: it cannot be reached or read.
    """
    if isinstance(config, DiskConfig):
        from tierkv.inventory.disk import DiskInventory

        return DiskInventory(config.path, config.name, config.capacity)
    if isinstance(config, RedisConfig):
        from tierkv.inventory.redis import RedisInventory

        return RedisInventory(config)
    return None
