# SPDX-License-Identifier: Apache-2.0
"""Any tier, with a log of its calls: what was asked, in which order, and what came of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tierkv.keys import Chunk
from tierkv.pages.layout import SlotLayout
from tierkv.tiers.base import Outcome, Presence, Result, Tier, TierReport, Usage


@dataclass(frozen=True, slots=True)
class Call:
    """One finished call.

    Attributes:
        operation: name of the method.
        keys: the keys it was about.
        outcome: of a load or save; None for the others.
    """

    operation: str
    keys: tuple[bytes, ...] = ()
    outcome: Outcome | None = None


class RecordingTier(Tier):
    """`calls` grows by one `Call` whenever a coroutine of `inner` has returned."""

    def __init__(self, inner: Tier) -> None:
        self.name = inner.name
        self.inner = inner
        self.calls: list[Call] = []

    def keys_of(self, operation: str) -> list[bytes]:
        """All keys of all calls of one operation, in order."""
        return [key for call in self.calls if call.operation == operation for key in call.keys]

    async def open(self, namespace: bytes, layout: SlotLayout) -> TierReport:
        report = await self.inner.open(namespace, layout)
        self.calls.append(Call("open"))
        return report

    async def describe(self, about: Mapping[str, str]) -> None:
        await self.inner.describe(about)
        self.calls.append(Call("describe"))

    async def recall(self, most: int, seconds: float) -> list[Chunk]:
        chunks = await self.inner.recall(most, seconds)
        self.calls.append(Call("recall", tuple(chunk.key for chunk in chunks)))
        return chunks

    def lookup(self, key: bytes) -> Presence:
        return self.inner.lookup(key)

    async def probe(self, keys: Sequence[bytes]) -> None:
        await self.inner.probe(keys)
        self.calls.append(Call("probe", tuple(keys)))

    async def load(self, chunk: Chunk, parts: Sequence[memoryview]) -> Result:
        result = await self.inner.load(chunk, parts)
        self.calls.append(Call("load", (chunk.key,), result.outcome))
        return result

    async def save(self, chunk: Chunk, parts: Sequence[memoryview]) -> Result:
        result = await self.inner.save(chunk, parts)
        self.calls.append(Call("save", (chunk.key,), result.outcome))
        return result

    async def touch(self, keys: Sequence[bytes]) -> None:
        await self.inner.touch(keys)
        self.calls.append(Call("touch", tuple(keys)))

    async def evict(self, keys: Sequence[bytes]) -> int:
        held = await self.inner.evict(keys)
        self.calls.append(Call("evict", tuple(keys)))
        return held

    async def clear(self) -> int:
        held = await self.inner.clear()
        self.calls.append(Call("clear"))
        return held

    def usage(self) -> Usage:
        return self.inner.usage()

    async def close(self) -> None:
        await self.inner.close()
        self.calls.append(Call("close"))
