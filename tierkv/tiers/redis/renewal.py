# SPDX-License-Identifier: Apache-2.0
"""Gives keys that are used another life: PEXPIRE, at most once in a quarter of the TTL for each.

It is also what tells the server's own eviction that a chunk is in use that DRAM answers for.

Threads and ownership. Belongs to the event loop. Keys that loads have used are collected for
`COLLECT_SECONDS` by one short task and renewed in one round trip.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

from tierkv.tiers.redis.names import Names
from tierkv.tiers.redis.talk import Talk
from tierkv.tiers.redis.verdicts import Verdicts

COLLECT_SECONDS = 0.1


class Renewal:
    """See the module.

    Args:
        ttl: seconds, None for ever: then nothing is ever due.
        clock: seconds, monotonic.
        spawn: runs a task.
    """

    def __init__(
        self,
        ttl: float | None,
        clock: Callable[[], float],
        verdicts: Verdicts,
        names: Names,
        talk: Talk,
        spawn: Callable[[Coroutine[Any, Any, None]], None],
    ) -> None:
        self._ttl = ttl
        self._clock = clock
        self._verdicts = verdicts
        self._names = names
        self._talk = talk
        self._spawn = spawn
        self._collected: dict[bytes, None] = {}

    def due_after_save(self) -> float:
        """When a key that was stored now is to be renewed; the clock's time."""
        return math.inf if self._ttl is None else self._clock() + self._ttl / 4

    def due_after_answer(self) -> float:
        """The same for a key that was found: how long it lives yet is not known."""
        return math.inf if self._ttl is None else self._clock()

    def soon(self, key: bytes) -> None:
        """The key was used: renew it if it is due."""
        if self._verdicts.is_due(key):
            if not self._collected:
                self._spawn(self._renew_collected())
            self._collected[key] = None

    async def now(self, keys: Sequence[bytes]) -> None:
        """The keys were used, most valuable last: renew those that are due. Never raises."""
        due = [key for key in keys if self._verdicts.is_due(key)]
        if not due or self._ttl is None:
            return
        for key in due:
            self._verdicts.renewed(key, self.due_after_save())  # first: or others renew it too
        found = await self._talk.each(
            b"PEXPIRE", self._names.of_all(due), b"%d" % round(self._ttl * 1000)
        )
        for key, reply in found.items():
            if reply == 0:
                self._verdicts.miss(key)

    async def _renew_collected(self) -> None:
        await asyncio.sleep(COLLECT_SECONDS)
        keys, self._collected = list(self._collected), {}
        await self.now(keys)
