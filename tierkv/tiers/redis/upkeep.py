# SPDX-License-Identifier: Apache-2.0
"""Looks after the servers of a tier: where they are, whether they answer, which generation it is.

Threads and ownership. Belongs to the event loop. `run` is one task, begun by `RedisTier.open` and
ended by its `close`. If it died, a failover or another engine's `clear` would not be followed;
loads and saves would go on.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable

from tierkv.config.redis import RedisConfig
from tierkv.tiers.redis.commands import ReplyError, command
from tierkv.tiers.redis.generation import Step
from tierkv.tiers.redis.link import LinkLost
from tierkv.tiers.redis.names import Names
from tierkv.tiers.redis.talk import Talk

logger = logging.getLogger(__name__)

LOOK_EVERY = 5.0
"""Seconds between two looks."""

TROUBLE_EVERY = 0.5
"""The same while a server is missing."""

MAX_STEPS = 3
"""Exchanges with the server until the generation is agreed on; if need be it goes on next time."""


class Upkeep:
    """See the module.

    Args:
        on_adopted: called when another engine's generation was taken over.
    """

    def __init__(
        self, config: RedisConfig, talk: Talk, names: Names, on_adopted: Callable[[], None]
    ) -> None:
        self._name = config.name
        self._ttl_ms = None if config.ttl is None else round(config.ttl * 1000)
        self._talk = talk
        self._names = names
        self._on_adopted = on_adopted

    async def run(self) -> None:
        talk = self._talk
        while True:
            nodes = talk.topology.nodes()
            is_well = bool(nodes) and all(node.is_up for node in nodes)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(LOOK_EVERY if is_well else TROUBLE_EVERY):
                    await talk.wake.wait()
            talk.wake.clear()
            try:
                await self.look()
            except Exception:
                logger.exception("tier %s: cannot look after the servers", self._name)

    async def look(self) -> None:
        """Look once."""
        talk = self._talk
        routine, talk.has_moved = not talk.has_moved, False
        await talk.topology.refresh(routine=routine)
        await self.settle()
        await self._ping()

    async def _ping(self) -> None:
        """Notice connections that lead nowhere while nobody uses them."""
        nodes = self._talk.topology.nodes()
        idle = [link for node in nodes for link in node.links if not link.pending]
        await asyncio.gather(
            *[link.ask(command(b"PING"), 1, self._talk.deadline()) for link in idle],
            return_exceptions=True,
        )

    async def settle(self) -> None:
        """Agree with the server on the generation. Never raises."""
        name, generation = self._names.of_generation, self._names.generation
        read, life = [command(b"GET", name)], tuple[bytes, ...]()
        if self._ttl_ms is not None:
            # It must outlive all that is called by it.
            life = (b"PX", b"%d" % (4 * self._ttl_ms))
            read.append(command(b"PEXPIRE", name, life[1]))
        for _ in range(MAX_STEPS):
            node = self._talk.topology.node_for(name)
            link = node.control_link() if node is not None else None
            if link is None:
                return
            try:
                value = (await link.ask(b"".join(read), len(read), self._talk.deadline()))[0]
                if isinstance(value, ReplyError) and value.code == "WRONGTYPE":
                    value = b""  # somebody's list or hash: no word, to be written over
                if not isinstance(value, bytes | None):
                    return  # LOADING, MOVED, ...: another time
                step = generation.found(value)
                if step is Step.ADOPTED:
                    self._on_adopted()
                if step in (Step.NOTHING, Step.ADOPTED):
                    return
                word = generation.word or ""
                only = (b"NX",) if step is Step.OFFER else ()
                write = command(b"SET", name, word.encode(), *only, *life)
                written = (await link.ask(write, 1, self._talk.deadline()))[0]
            except LinkLost:
                return
            if step is Step.IMPOSE and written == b"OK":
                generation.imposed(word)
                return
