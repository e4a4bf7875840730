# SPDX-License-Identifier: Apache-2.0
"""Which server has a key: one server, the master that Sentinel names, or a node of a cluster.

Threads and ownership. Belongs to the event loop; `refresh` is called from one task at a time.
"""

from __future__ import annotations

import asyncio
import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence

from redis.crc import key_slot

from tierkv.config.redis import RedisConfig
from tierkv.tiers.redis.commands import ReplyError
from tierkv.tiers.redis.dial import Dialer, DialError, Endpoint
from tierkv.tiers.redis.discovery import SlotRange, find_master, find_slots
from tierkv.tiers.redis.node import Node

logger = logging.getLogger(__name__)

MAX_NODES = 1024
SLOTS = 16384

OnChange = Callable[[Node], None]


class Topology(ABC):
    """See the module."""

    @abstractmethod
    def nodes(self) -> list[Node]:
        """All servers that are talked to."""

    @abstractmethod
    def node_for(self, name: bytes) -> Node | None:
        """The server that should have the key of that name; None: nobody knows."""

    @abstractmethod
    async def start(self) -> DialError | None:
        """Begin, and return after the first attempt: why it failed, None if it did not."""

    @abstractmethod
    async def refresh(self, *, routine: bool) -> None:
        """Find out whether keys have moved. Never raises.

        Args:
            routine: nothing points to a change.
        """

    def redirected(self, error: ReplyError, node: Node) -> Node | None:
        """Where MOVED or ASK, said by `node`, leads; None: to nobody known."""
        return None

    async def stop(self) -> None:
        """Close all connections. May be called twice."""
        for node in self.nodes():
            await node.stop()


def make_topology(config: RedisConfig, dialer: Dialer, on_change: OnChange) -> Topology:
    """The one that the configuration asks for."""
    if config.cluster:
        return Cluster(config, dialer, on_change)
    if config.sentinel is not None:
        return Watched(config, dialer, on_change)
    return Single(config, dialer, on_change)


class Single(Topology):
    """One server."""

    def __init__(self, config: RedisConfig, dialer: Dialer, on_change: OnChange) -> None:
        self._config = config
        master = config.sentinel is not None
        self._node = Node(config, dialer, self._resolve, on_change, master=master)

    async def _resolve(self) -> Endpoint:
        if self._config.socket_path:
            return Endpoint(path=self._config.socket_path)
        return Endpoint(*self._config.address)

    def nodes(self) -> list[Node]:
        return [self._node]

    def node_for(self, name: bytes) -> Node | None:
        return self._node

    async def start(self) -> DialError | None:
        self._node.start()
        await self._node.tried.wait()
        return self._node.error

    async def refresh(self, *, routine: bool) -> None:
        pass  # each new connection looks the host up again


class Watched(Single):
    """The master of a service that Sentinel watches."""

    async def _resolve(self) -> Endpoint:
        assert self._config.sentinel is not None
        return await find_master(self._config, self._config.sentinel)

    async def refresh(self, *, routine: bool) -> None:
        try:
            endpoint = await self._resolve()
        except DialError:
            return  # as long as the connections work, they are good enough
        if self._node.endpoint not in (None, endpoint):
            logger.info("tier %s: the master is now %s", self._config.name, endpoint)
            self._node.drop()


class Cluster(Topology):
    """The masters of a cluster. The table of slots is read anew when it proves wrong."""

    def __init__(self, config: RedisConfig, dialer: Dialer, on_change: OnChange) -> None:
        self._config = config
        self._dialer = dialer
        self._on_change = on_change
        self._nodes: dict[Endpoint, Node] = {}
        self._table: list[Node | None] = [None] * SLOTS
        self._complained = False

    def nodes(self) -> list[Node]:
        return list(self._nodes.values())

    def node_for(self, name: bytes) -> Node | None:
        return self._table[key_slot(name)]

    async def start(self) -> DialError | None:
        problem = await self._read_table()
        if problem is not None:
            return problem
        await asyncio.gather(*[node.tried.wait() for node in self.nodes()])
        return next((node.error for node in self.nodes() if node.error), None)

    async def refresh(self, *, routine: bool) -> None:
        if routine and self._nodes and all(node.is_up for node in self.nodes()):
            return
        problem = await self._read_table()
        if problem is not None and not self._complained:
            logger.warning("tier %s: %s; tried again in the background", self._config.name, problem)
        self._complained = problem is not None

    def redirected(self, error: ReplyError, node: Node) -> Node | None:
        # Only to nodes of the table: an answer must not lead us, and our password, anywhere else.
        _, _, address = error.text.partition(" ")
        host, _, port = address.strip().rpartition(":")
        if not port.isdigit() or node.endpoint is None:
            return None
        return self._nodes.get(Endpoint(host or node.endpoint.host, int(port)))

    async def _read_table(self) -> DialError | None:
        known = [node.endpoint for node in self.nodes() if node.is_up and node.endpoint]
        seed = Endpoint(*self._config.address)
        problem: DialError | None = None
        for endpoint in [*known, seed] if seed not in known else known:
            try:
                await self._adopt(await find_slots(self._config, endpoint))
            except DialError as error:
                problem = error
                if error.fatal:
                    break
            else:
                return None
        return problem

    async def _adopt(self, ranges: Sequence[SlotRange]) -> None:
        masters = list(dict.fromkeys(endpoint for _, _, endpoint in ranges))[:MAX_NODES]
        gone = [node for endpoint, node in self._nodes.items() if endpoint not in masters]
        self._nodes = {endpoint: self._node(endpoint) for endpoint in masters}
        table: list[Node | None] = [None] * SLOTS
        for first, last, endpoint in ranges:
            for slot in range(max(0, first), min(last, SLOTS - 1) + 1):
                table[slot] = self._nodes.get(endpoint)
        self._table = table
        for node in gone:
            await node.stop()

    def _node(self, endpoint: Endpoint) -> Node:
        node = self._nodes.get(endpoint)
        if node is None:

            async def resolve() -> Endpoint:
                return endpoint

            node = Node(self._config, self._dialer, resolve, self._on_change)
            node.start()
        return node
