# SPDX-License-Identifier: Apache-2.0
"""The contract of a tier in its simplest form: a dict. For tests of what stands above tiers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from tierkv.errors import ErrorKind
from tierkv.keys import Chunk
from tierkv.pages.layout import SlotLayout
from tierkv.tiers.base import Outcome, Presence, Result, Tier, TierReport, Usage


@dataclass
class Medium:
    """What outlives a `MemoryTier`: chunks by namespace and layout, oldest first."""

    shelves: dict[tuple[bytes, SlotLayout], dict[bytes, tuple[bytes, list[bytes]]]] = field(
        default_factory=dict
    )


class MemoryTier(Tier):
    """Holds up to `capacity` chunks and gives up the one that was touched longest ago."""

    def __init__(
        self, name: str = "memory", *, capacity: int = 1 << 20, medium: Medium | None = None
    ) -> None:
        self.name = name
        self._capacity = capacity
        self._medium = medium or Medium()
        self._chunks: dict[bytes, tuple[bytes, list[bytes]]] = {}
        self._evicted = 0
        self._is_open = False

    async def open(self, namespace: bytes, layout: SlotLayout) -> TierReport:
        self._layout = layout
        self._chunks = self._medium.shelves.setdefault((namespace, layout), {})
        self._is_open = True
        return TierReport(
            recovered_chunks=len(self._chunks),
            recovered_bytes=len(self._chunks) * layout.slot_bytes,
        )

    def lookup(self, key: bytes) -> Presence:
        return Presence.HIT if self._is_open and key in self._chunks else Presence.MISS

    async def load(self, chunk: Chunk, parts: Sequence[memoryview]) -> Result:
        if self.lookup(chunk.key) is not Presence.HIT:
            return Result(Outcome.MISS)
        tokens, values = self._chunks[chunk.key]
        if tokens != chunk.tokens:
            return Result(Outcome.FAILED, ErrorKind.KEY_MISMATCH)
        if not self._fits(parts):
            return Result(Outcome.FAILED, ErrorKind.GEOMETRY)
        for part, value in zip(parts, values, strict=True):
            part[:] = value
        return Result(Outcome.DONE, nbytes=self._layout.slot_bytes)

    async def save(self, chunk: Chunk, parts: Sequence[memoryview]) -> Result:
        if not self._is_open or not self._capacity:
            return Result(Outcome.REFUSED)
        if not self._fits(parts):
            return Result(Outcome.FAILED, ErrorKind.GEOMETRY)
        if chunk.key in self._chunks:
            return Result(Outcome.DONE)
        if len(self._chunks) == self._capacity:
            del self._chunks[next(iter(self._chunks))]
            self._evicted += 1
        self._chunks[chunk.key] = (chunk.tokens, [bytes(part) for part in parts])
        return Result(Outcome.DONE, nbytes=self._layout.slot_bytes)

    async def touch(self, keys: Sequence[bytes]) -> None:
        for key in keys:
            if key in self._chunks:
                self._chunks[key] = self._chunks.pop(key)

    async def evict(self, keys: Sequence[bytes]) -> int:
        return sum(self._chunks.pop(key, None) is not None for key in keys)

    async def clear(self) -> int:
        held = len(self._chunks)
        self._chunks.clear()
        return held

    def usage(self) -> Usage:
        size = self._layout.slot_bytes if self._is_open else 0
        used, capacity = len(self._chunks) * size, self._capacity * size
        return Usage(len(self._chunks), used, capacity, self._evicted)

    async def close(self) -> None:
        self._is_open = False

    def _fits(self, parts: Sequence[memoryview]) -> bool:
        return [part.nbytes for part in parts] == [self._layout.part_stride] * self._layout.ranks
