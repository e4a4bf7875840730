# SPDX-License-Identifier: Apache-2.0
"""Medians with their spread, and pieces of work that run so many at a time."""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Ratio:
    """Median over repeats, and the distance of the quartiles as its spread."""

    median: float
    spread: float
    repeats: int

    @classmethod
    def of(cls, values: Sequence[float], digits: int = 3) -> Ratio:
        if len(values) == 1:
            return cls(round(values[0], digits), 0.0, 1)
        low, _, high = statistics.quantiles(values, n=4)
        return cls(round(statistics.median(values), digits), round(high - low, digits), len(values))


async def timed(action: Callable[[], Awaitable[None] | None]) -> float:
    """Seconds of one call."""
    started = time.perf_counter()
    waiting = action()
    if waiting is not None:
        await waiting
    return time.perf_counter() - started


async def in_parallel(count: int, work: Callable[[int], Awaitable[None]], width: int) -> None:
    """Run `work(0 … count-1)`, `width` at a time."""
    numbers = iter(range(count))

    async def worker() -> None:
        for number in numbers:
            await work(number)

    await asyncio.gather(*[worker() for _ in range(width)])
