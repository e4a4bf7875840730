# SPDX-License-Identifier: Apache-2.0
"""Sends requests to the servers that have the keys, and follows redirects.

Owned by the event loop.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping

from tierkv.config.redis import RedisConfig
from tierkv.tiers.redis.commands import (
    NO_LINK,
    Reply,
    ReplyError,
    command,
    is_redirect,
    pipeline,
)
from tierkv.tiers.redis.dial import Dialer
from tierkv.tiers.redis.link import Link, LinkLost
from tierkv.tiers.redis.node import Node
from tierkv.tiers.redis.topology import make_topology

BATCH = 1024
"""Keys in one pipelined request: 110 KB, written in one go."""

MAX_HOPS = 3
"""Nodes that are tried for one key: the expected one, and where two redirects lead."""

_ASKING = command(b"ASKING")


class Talk:
    """See the module.

    Args:
        on_down: called when a server was lost.

    Raises:
        DialError: fatal; a TLS file cannot be read.
    """

    def __init__(self, config: RedisConfig, on_down: Callable[[], None]) -> None:
        self.topology = make_topology(config, Dialer(config), self._changed)
        self.wake = asyncio.Event()
        """Set when there is something to look after."""
        self.has_moved = False
        """Whether something points to a change of the topology."""
        self._patience = config.load_deadline
        self._on_down = on_down

    def deadline(self) -> float:
        """For a small request that is sent now; loop time."""
        return asyncio.get_running_loop().time() + self._patience

    def moved(self) -> None:
        """Something points to a change of the topology."""
        self.has_moved = True
        self.wake.set()

    def _changed(self, node: Node) -> None:
        if node.is_up:
            self.wake.set()
        else:
            self.moved()
            self._on_down()

    async def one(
        self,
        name: bytes,
        pick: Callable[[Node], Link | None],
        send: Callable[[Link, bytes], Awaitable[Reply]],
    ) -> Reply:
        """The reply of the server that has the key, or `NO_LINK`.

        Args:
            pick: which of the server's connections.
            send: sends its request after the bytes given, and waits.
        """
        node = self.topology.node_for(name)
        before = b""
        for _ in range(MAX_HOPS):
            link = pick(node) if node is not None else None
            if node is None or link is None:
                break
            reply = await send(link, before)
            if not isinstance(reply, ReplyError) or not is_redirect(reply):
                return reply
            self.moved()
            before = _ASKING if reply.code == "ASK" else b""
            node = self.topology.redirected(reply, node)
        return NO_LINK

    async def each(
        self, verb: bytes, names: Mapping[bytes, bytes], *more: bytes
    ) -> dict[bytes, Reply]:
        """The replies to one small command for each key, in one round trip to each server.

        Args:
            names: key to name.

        Returns:
            By key; those that nobody answered for are missing. Never raises.
        """
        places = {key: self.topology.node_for(name) for key, name in names.items()}
        found = await self._ask(verb, names, places, more)
        moved: dict[bytes, Node | None] = {}
        for key, reply in found.items():
            node = places[key]
            if isinstance(reply, ReplyError) and reply.code == "MOVED" and node is not None:
                moved[key] = self.topology.redirected(reply, node)
        if moved:
            self.moved()
            found |= await self._ask(verb, names, moved, more)
        return found

    async def _ask(
        self,
        verb: bytes,
        names: Mapping[bytes, bytes],
        places: Mapping[bytes, Node | None],
        more: tuple[bytes, ...],
    ) -> dict[bytes, Reply]:
        by_link: dict[Link, list[bytes]] = {}
        for key, node in places.items():
            link = node.control_link() if node is not None else None
            if link is not None:
                by_link.setdefault(link, []).append(key)
        batches = [
            (link, keys[start : start + BATCH])
            for link, keys in by_link.items()
            for start in range(0, len(keys), BATCH)
        ]
        requests = [
            link.ask(
                pipeline(verb, [names[key] for key in keys], *more), len(keys), self.deadline()
            )
            for link, keys in batches
        ]
        found: dict[bytes, Reply] = {}
        answers = await asyncio.gather(*requests, return_exceptions=True)
        for (_, keys), answer in zip(batches, answers, strict=True):
            if isinstance(answer, list):
                found.update(zip(keys, answer, strict=True))
            elif not isinstance(answer, LinkLost):
                raise answer
        return found
