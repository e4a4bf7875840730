# SPDX-License-Identifier: Apache-2.0
"""Any tier, with failures: one seed and one set of odds explain a whole run.

The honest faults (fail, refuse, forget, raise, hang) are what a Store must live with. The lies
(flip, misdirect) break the contract on purpose: they show that a test would notice.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tierkv.errors import ErrorKind
from tierkv.keys import Chunk
from tierkv.pages.layout import SlotLayout
from tierkv.tiers.base import Outcome, Presence, Result, Tier, TierReport, Usage


@dataclass(frozen=True, slots=True)
class Odds:
    """Probability of each fault, 0 … 1, drawn anew for every load and save.

    Attributes:
        load_fails: FAILED with an error kind, parts half filled with junk.
        load_raises: an exception that breaks the contract, as a bug would.
        load_hangs: does not return before `release`.
        save_fails: FAILED, nothing saved.
        save_refused: REFUSED.
        save_raises: as `load_raises`.
        save_hangs: as `load_hangs`.
        save_forgotten: DONE, but nothing was saved.
        lie_flip: DONE with one bit turned.
        lie_misdirect: DONE with the bytes of a chunk saved earlier.
    """

    load_fails: float = 0.0
    load_raises: float = 0.0
    load_hangs: float = 0.0
    save_fails: float = 0.0
    save_refused: float = 0.0
    save_raises: float = 0.0
    save_hangs: float = 0.0
    save_forgotten: float = 0.0
    lie_flip: float = 0.0
    lie_misdirect: float = 0.0


class InjectedError(RuntimeError):
    """What a faulty tier raises where its contract says that nothing is raised."""


class FaultyTier(Tier):
    """`inner`, but what `odds` say goes wrong.

    Args:
        inner: an honest tier.
        seed: of every draw; print it when a test fails.
        odds: may be replaced at any time (`tier.odds = Odds()` heals).

    Attributes:
        injected: how often each fault struck, by its name in `Odds`.
    """

    def __init__(self, inner: Tier, seed: int, odds: Odds) -> None:
        self.name = inner.name
        self.inner = inner
        self.seed = seed
        self.odds = odds
        self.injected: Counter[str] = Counter()
        self._random = random.Random(seed)
        self._released = asyncio.Event()
        self._saved: list[Chunk] = []

    def release(self) -> None:
        """Let every call that hangs go on, and hang no more. On the loop's thread."""
        self._released.set()

    async def open(self, namespace: bytes, layout: SlotLayout) -> TierReport:
        return await self.inner.open(namespace, layout)

    async def describe(self, about: Mapping[str, str]) -> None:
        await self.inner.describe(about)

    async def recall(self, most: int, seconds: float) -> list[Chunk]:
        return await self.inner.recall(most, seconds)

    def lookup(self, key: bytes) -> Presence:
        return self.inner.lookup(key)

    async def probe(self, keys: Sequence[bytes]) -> None:
        await self.inner.probe(keys)

    async def load(self, chunk: Chunk, parts: Sequence[memoryview]) -> Result:
        if self._strikes("load_hangs"):
            await self._released.wait()
        if self._strikes("load_raises"):
            raise InjectedError(f"load, seed {self.seed}")
        if self._strikes("load_fails"):
            parts[0][: len(parts[0]) // 2] = self._random.randbytes(len(parts[0]) // 2)
            return Result(Outcome.FAILED, self._random.choice([*ErrorKind]))
        if self._saved and self._strikes("lie_misdirect"):
            chunk = self._random.choice(self._saved)
        result = await self.inner.load(chunk, parts)
        if result.outcome is Outcome.DONE and self._strikes("lie_flip"):
            part = self._random.choice(parts)
            part[self._random.randrange(len(part))] ^= 1 << self._random.randrange(8)
        return result

    async def save(self, chunk: Chunk, parts: Sequence[memoryview]) -> Result:
        if self._strikes("save_hangs"):
            await self._released.wait()
        if self._strikes("save_raises"):
            raise InjectedError(f"save, seed {self.seed}")
        if self._strikes("save_fails"):
            return Result(Outcome.FAILED, self._random.choice([*ErrorKind]))
        if self._strikes("save_refused"):
            return Result(Outcome.REFUSED)
        if self._strikes("save_forgotten"):
            return Result(Outcome.DONE)
        if self.odds.lie_misdirect:
            self._saved.append(chunk)
        return await self.inner.save(chunk, parts)

    async def touch(self, keys: Sequence[bytes]) -> None:
        await self.inner.touch(keys)

    async def evict(self, keys: Sequence[bytes]) -> int:
        return await self.inner.evict(keys)

    async def clear(self) -> int:
        return await self.inner.clear()

    def usage(self) -> Usage:
        return self.inner.usage()

    async def close(self) -> None:
        self.release()
        await self.inner.close()

    def _strikes(self, fault: str) -> bool:
        odds: float = getattr(self.odds, fault)
        # Drawn only where it can strike, so that a fault's odds do not shift the others' draws.
        if not odds or self._random.random() >= odds:
            return False
        self.injected[fault] += 1
        return True
