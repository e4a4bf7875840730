# SPDX-License-Identifier: Apache-2.0
"""The Redis tier beside bare sockets that read and write values of the same size.

The tier's figure includes everything: header, key and checksum verified, bytes in their slots. The
bare sockets send GET and SET and look at nothing; there are as many of them as the tier has
connections. They speak to one server, so there is no such limit for Sentinel and clusters.

Threads and ownership. `Sockets` starts one thread a connection for each turn, and ends it. The
tier belongs to the event loop that runs the turns.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import ssl
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Self

from tierkv.bench.ratio import in_parallel, timed
from tierkv.config.redis import RedisConfig
from tierkv.config.secrets import resolve_secret
from tierkv.errors import TierError
from tierkv.keys import Chunk
from tierkv.pages.layout import ALIGNMENT, SlotLayout
from tierkv.testing.samples import make_chunks, make_parts
from tierkv.tiers.base import Outcome
from tierkv.tiers.redis.commands import command, set_head
from tierkv.tiers.redis.tier import RedisTier

NAMESPACE = b"benchmark-redis!"
AT_ONCE = 24
TTL_SECONDS = 600.0
"""Should the benchmark be killed, its values go by themselves."""

READY_SECONDS = 10.0


class RedisBench:
    """One value size on one server. The chunks are the tier's own, under its prefix.

    Args:
        config: of the tier.
        layout: of a chunk.
        count: chunks.
    """

    def __init__(self, config: RedisConfig, layout: SlotLayout, count: int) -> None:
        patient = {"load_deadline": 120.0, "save_deadline": 120.0, "ttl": TTL_SECONDS}
        self.config = config.model_copy(update=patient)
        self.chunks: list[Chunk] = make_chunks(count, layout)
        self.total_bytes = count * layout.slot_bytes
        self._layout = layout
        self._slots = [make_parts(layout) for _ in range(AT_ONCE)]
        for slot in self._slots:
            for part in slot:
                part[:] = os.urandom(ALIGNMENT) * (len(part) // ALIGNMENT)
        self._tier = RedisTier(self.config)

    async def open(self) -> Self:
        """Open the tier and fill it once.

        Raises:
            TierError: the server cannot be reached, or takes nothing.
        """
        await self._tier.open(NAMESPACE, self._layout)
        await all_connections(self._tier, self.config)
        await self._save_all()
        return self

    async def close(self) -> None:
        """Take the chunks back, if there is a server to take them from; their TTL does the rest."""
        with contextlib.suppress(TierError):
            await self._tier.evict([chunk.key for chunk in self.chunks])
        await self._tier.close()

    async def read_turn(self) -> float:
        """Seconds to load everything once."""
        return await timed(self._load_all)

    async def write_turn(self) -> float:
        """Seconds to save everything once."""
        await self._tier.evict([chunk.key for chunk in self.chunks])
        return await timed(self._save_all)

    async def _load_all(self) -> None:
        await in_parallel(len(self.chunks), self._load, AT_ONCE)

    async def _save_all(self) -> None:
        await in_parallel(len(self.chunks), self._save, max(1, self.config.reads_at_once // 4))

    async def _load(self, number: int) -> None:
        result = await self._tier.load(self.chunks[number], self._slots[number % AT_ONCE])
        self._expect(result.outcome, "reads")

    async def _save(self, number: int) -> None:
        result = await self._tier.save(self.chunks[number], self._slots[number % AT_ONCE])
        self._expect(result.outcome, "saves")

    def _expect(self, outcome: Outcome, verb: str) -> None:
        if outcome is not Outcome.DONE:
            raise TierError(
                f"{self.config.url}: {verb} end as {outcome.value}; has the server room for "
                f"{self.total_bytes >> 20} MiB? 'tierkv doctor' looks closer",
                tier=self.config.name,
            )


class Sockets:
    """Bare connections to one server.

    Args:
        config: of the tier: address, TLS, password, number of connections.
        value_bytes: of a value.
        count: values.

    Raises:
        OSError: no connection.
    """

    def __init__(self, config: RedisConfig, value_bytes: int, count: int) -> None:
        prefix = f"{config.key_prefix}:{NAMESPACE.hex()}:bare"
        self._names = [f"{prefix}:{number}".encode() for number in range(count)]
        self._value = os.urandom(ALIGNMENT) * (value_bytes // ALIGNMENT)
        self._config = config
        self._sockets = [self._connect() for _ in range(config.max_connections)]
        # As many places as the tier has: a small buffer would stay in the processor's cache.
        self._buffers = [bytearray(value_bytes + 64) for _ in self._sockets]

    @staticmethod
    def can(config: RedisConfig) -> bool:
        """Whether there is one server to speak to."""
        return not config.cluster and config.sentinel is None

    def read_all(self) -> float:
        """Seconds to GET everything once."""
        return self._turn(self._get)

    def write_all(self) -> float:
        """Seconds to SET everything once."""
        return self._turn(self._set)

    def close(self) -> None:
        """Take the values back and close the connections."""
        first = self._sockets[0]
        first.sendall(b"".join(command(b"UNLINK", name) for name in self._names))
        for _ in self._names:
            self._line(first)
        for each in self._sockets:
            each.close()

    def _turn(self, work: Callable[[int, Sequence[bytes]], None]) -> float:
        width = len(self._sockets)
        started = time.perf_counter()
        with ThreadPoolExecutor(width, thread_name_prefix="tierkv-bench") as pool:
            shares = [self._names[n::width] for n in range(width)]
            list(pool.map(work, range(width), shares))
        return time.perf_counter() - started

    def _get(self, number: int, names: Sequence[bytes]) -> None:
        link, buffer = self._sockets[number], memoryview(self._buffers[number])
        for name in names:
            link.sendall(command(b"GET", name))
            length = int(self._line(link)[1:]) + 2
            have = 0
            while have < length:
                got = link.recv_into(buffer[have:length])
                if not got:
                    raise ConnectionResetError
                have += got

    def _set(self, number: int, names: Sequence[bytes]) -> None:
        link = self._sockets[number]
        for name in names:
            head, tail = set_head(name, len(self._value), round(TTL_SECONDS * 1000))
            link.sendall(head)
            link.sendall(self._value)
            link.sendall(tail)
            self._line(link)

    def _connect(self) -> socket.socket:
        config = self._config
        if config.socket_path:
            link = socket.socket(socket.AF_UNIX)
            link.connect(config.socket_path)
        else:
            link = socket.create_connection(config.address, timeout=READY_SECONDS)
            link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        link.settimeout(60.0)
        if config.uses_tls:
            context = ssl.create_default_context(cafile=config.tls_ca)
            if config.tls_cert is not None:
                context.load_cert_chain(config.tls_cert, config.tls_key)
            link = context.wrap_socket(link, server_hostname=config.address[0])
        if config.username or config.password is not None:
            user = [config.username.encode()] if config.username else []
            password = b"" if config.password is None else resolve_secret(config.password)
            link.sendall(command(b"AUTH", *user, password))
            self._line(link)
        if config.database:
            link.sendall(command(b"SELECT", b"%d" % config.database))
            self._line(link)
        return link

    @staticmethod
    def _line(link: socket.socket) -> bytes:
        """One line of a reply, without its end.

        Raises:
            OSError: the server closed, or refused.
        """
        line = bytearray()
        while not line.endswith(b"\r\n"):
            byte = link.recv(1)
            if not byte:
                raise ConnectionResetError
            line += byte
        if line[:1] == b"-":
            raise OSError(line[1:].split(b" ")[0].decode("ascii", "replace"))
        return bytes(line[:-2])


async def all_connections(tier: RedisTier, config: RedisConfig) -> None:
    """Wait until the tier has all its connections.

    Raises:
        TierError: it does not get them.
    """
    try:
        async with asyncio.timeout(READY_SECONDS):
            while not _is_ready(tier, config):
                await asyncio.sleep(0.01)
    except TimeoutError:
        raise TierError(
            f"{config.url}: cannot be reached; 'tierkv doctor' looks closer", tier=config.name
        ) from None


def _is_ready(tier: RedisTier, config: RedisConfig) -> bool:
    nodes = tier.talk.topology.nodes() if tier.talk is not None else []
    links = min((len(node.links) for node in nodes), default=0)
    return tier.is_ready and links >= config.max_connections
