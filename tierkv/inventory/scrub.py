# SPDX-License-Identifier: Apache-2.0
"""Reads every chunk and compares its checksums, no faster than told to.

Blocks; the caller's thread.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from tierkv.inventory.base import Inventory, NamespaceSummary, Problem


@dataclass(frozen=True, slots=True)
class Step:
    """One thing that was looked at.

    Attributes:
        nbytes: read for it.
        problem: what is wrong with it, if anything.
    """

    nbytes: int
    problem: Problem | None


class Throttle:
    """Keeps a rate over the whole run: slow parts may be made up for, within a second.

    Args:
        rate: bytes a second; None: no limit.
    """

    def __init__(
        self,
        rate: float | None,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._rate = rate
        self._clock = clock
        self._sleep = sleep
        self._due = clock()

    def spend(self, nbytes: int) -> None:
        """So many bytes were read: wait until that is within the rate."""
        if self._rate is None:
            return
        now = self._clock()
        self._due = max(self._due, now - 1.0) + nbytes / self._rate
        if self._due > now:
            self._sleep(self._due - now)


def scrub(inventory: Inventory, summary: NamespaceSummary, throttle: Throttle) -> Iterator[Step]:
    """Look at everything in a namespace."""
    for problem in inventory.damage(summary.name):
        yield Step(0, problem)
    if summary.problem:
        return  # nothing in it can be read
    for chunk in inventory.chunks(summary.name):
        problem_of_chunk = inventory.check(chunk)
        yield Step(chunk.nbytes, problem_of_chunk)
        throttle.spend(chunk.nbytes)
