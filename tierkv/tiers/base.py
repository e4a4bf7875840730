# SPDX-License-Identifier: Apache-2.0
"""The contract of a tier below DRAM (disk, Redis, yours).

A tier may forget, but it must not lie: after `save(chunk, v)`, a `load` of the chunk gives exactly
`v` or a miss; never other bytes, part of them, another chunk's, or a value that `evict` removed
once that call has returned. What goes wrong inside is an outcome with an `ErrorKind`, not an
exception. `tierkv.testing.TierContract` checks this for any tier.

Threads. Coroutines run on the Store's I/O loop, which is the only thread that changes a tier's
state; several may be in flight at once. `lookup` and `usage` may be called from any thread at any
time: they read single values, do no I/O and never block. The memory in `parts` is leased by the
caller until the coroutine returns; the tier neither keeps nor resizes it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum, StrEnum

from tierkv.errors import ErrorKind
from tierkv.keys import Chunk
from tierkv.pages.layout import SlotLayout


class Presence(Enum):
    """What a tier can say about a key without I/O."""

    MISS = 0
    HIT = 1
    UNKNOWN = 2
    """Only the other side knows: call `probe` first."""


class Outcome(StrEnum):
    """How an operation ended."""

    DONE = "done"
    MISS = "miss"
    """load: the tier does not hold the chunk (any more)."""
    REFUSED = "refused"
    """save: no room, or paused; nothing was changed. load: tier down, breaker open."""
    FAILED = "failed"
    """An error of the kind given; the chunk is forgotten if its bytes were bad."""


@dataclass(frozen=True, slots=True)
class Result:
    """Outcome of one `load` or `save`.

    Attributes:
        outcome: see `Outcome`.
        error: set exactly when FAILED, or when REFUSED for a cause worth counting (full disk).
        nbytes: bytes moved to or from the tier's medium.
    """

    outcome: Outcome
    error: ErrorKind | None = None
    nbytes: int = 0


@dataclass(frozen=True, slots=True)
class Usage:
    """Fill level of a tier. Bytes as the medium counts them; capacity 0 means unknown.

    Attributes:
        evicted_chunks: given up for want of room since `open`; 0 also where others decide that
            and do not tell.
    """

    chunks: int
    used_bytes: int
    capacity_bytes: int
    evicted_chunks: int = 0


@dataclass(frozen=True, slots=True)
class TierReport:
    """What `open` found, for the start-up line and `tierkv doctor`."""

    recovered_chunks: int = 0
    recovered_bytes: int = 0
    seconds: float = 0.0
    notes: tuple[str, ...] = ()
    """What an operator should know (no O_DIRECT here, capacity shrunk), one sentence each."""


class Tier(ABC):
    """One tier below DRAM. Made from its config model, then opened once for one namespace."""

    name: str
    """From the configuration; the `tier` label of every metric."""

    @abstractmethod
    async def open(self, namespace: bytes, layout: SlotLayout) -> TierReport:
        """Take the medium into use and recover what it holds of `namespace`.

        Raises:
            TierError: unusable; the message ends with the remedy. Nothing is left held.
        """

    async def describe(self, about: Mapping[str, str]) -> None:  # noqa: B027 - only a courtesy
        """Keep, for people who look at what is stored, what the namespace is (`Namespace.about`).

        Called once, after `open`. Best effort; never raises.
        """

    async def recall(self, most: int, seconds: float) -> list[Chunk]:
        """Keys and text, without the KV, of what an earlier run left; any-text reuse asks.

        Called at most once, after `open`, before anything is loaded or saved. Only for tiers that
        can tell; for the others nothing is lost but that. Never raises.

        Args:
            most: chunks to tell of.
            seconds: after so long what is known by then is enough.

        Returns:
            The most recently used first.
        """
        return []

    @abstractmethod
    def lookup(self, key: bytes) -> Presence:
        """Any thread; O(1); no I/O; never blocks; no side effect."""

    async def probe(self, keys: Sequence[bytes]) -> None:  # noqa: B027 - only some tiers need it
        """Settle UNKNOWN keys, in one round trip, so that `lookup` answers HIT or MISS.

        On failure they stay UNKNOWN, which callers treat as a miss. Never raises.
        """

    @abstractmethod
    async def load(self, chunk: Chunk, parts: Sequence[memoryview]) -> Result:
        """Read the chunk into `parts`, one writable buffer of `layout.part_stride` bytes a rank.

        DONE only after key, token ids, geometry and checksum were verified. After any other
        outcome the content of `parts` is undefined. Never raises.
        """

    @abstractmethod
    async def save(self, chunk: Chunk, parts: Sequence[memoryview]) -> Result:
        """Write the chunk; visible to `lookup` only once all its bytes are written.

        DONE also if the tier holds the chunk already. Never raises.
        """

    @abstractmethod
    async def touch(self, keys: Sequence[bytes]) -> None:
        """Say that these were used (elsewhere too), most valuable last. Ignores unknown keys."""

    @abstractmethod
    async def evict(self, keys: Sequence[bytes]) -> int:
        """Forget these keys and return how many were held; none is served once this returned."""

    @abstractmethod
    async def clear(self) -> int:
        """Forget the whole namespace and return how many chunks were held."""

    @abstractmethod
    def usage(self) -> Usage:
        """Any thread; O(1)."""

    @abstractmethod
    async def close(self) -> None:
        """Finish or drop what is in flight and let go of the medium. May be called twice."""
