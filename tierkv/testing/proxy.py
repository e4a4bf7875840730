# SPDX-License-Identifier: Apache-2.0
"""A TCP proxy that makes a network bad on purpose, between a tier and its server in tests.

    async with FaultProxy(("127.0.0.1", server_port)) as proxy:
        proxy.toxics.append(latency(0.05, jitter=0.01))
        ...  # connect to 127.0.0.1:proxy.port
        proxy.toxics.clear()
        await proxy.set_down(True)

The faults and their names are toxiproxy's. A toxic works on what the server says ("downstream",
the default), on what the client says ("upstream"), or on "both"; connections that are there already
have it from the next bytes on. Loopback only.

**Threads and ownership.** Belongs to the event loop that entered it. Four tasks a connection, two a
direction: one receives, one sends what is due. All end when the proxy is left.
"""

from __future__ import annotations

import asyncio
import random
import socket
import struct
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Literal, Self

Stream = Literal["downstream", "upstream", "both"]

_READ_BYTES = 64 << 10
_ON_THE_WAY = 256
"""Reads that one direction may hold back; then it stops receiving."""

_TICK = 0.01
"""Seconds of transmission that `bandwidth` sends at once."""


@dataclass(frozen=True, slots=True)
class Toxic:
    """One fault. Made by the functions below.

    Attributes:
        kind: toxiproxy's name.
        stream: which direction it works on.
        seconds: of `latency`, of `slow_close`, between the slices of `slicer`.
        jitter: seconds more or less, of `latency`.
        size: bytes of `limit_data` and `slicer`, bytes a second of `bandwidth`.
    """

    kind: str
    stream: Stream
    seconds: float = 0.0
    jitter: float = 0.0
    size: int = 0


def latency(seconds: float, *, jitter: float = 0.0, stream: Stream = "downstream") -> Toxic:
    """Everything arrives later, by up to `jitter` more or less, and in order."""
    return Toxic("latency", stream, seconds, jitter)


def bandwidth(bytes_per_s: int, *, stream: Stream = "downstream") -> Toxic:
    """So many bytes a second and connection, no more."""
    return Toxic("bandwidth", stream, size=bytes_per_s)


def timeout(*, stream: Stream = "downstream") -> Toxic:
    """Bytes vanish and connections stay, as with toxiproxy's `timeout` of 0."""
    return Toxic("timeout", stream)


def reset_peer(*, stream: Stream = "downstream") -> Toxic:
    """The connection is reset (RST) as soon as bytes come."""
    return Toxic("reset_peer", stream)


def slicer(size: int, *, seconds: float = 0.0, stream: Stream = "downstream") -> Toxic:
    """Bytes arrive in slices of about `size`, with `seconds` between them."""
    return Toxic("slicer", stream, seconds, size=size)


def limit_data(size: int, *, stream: Stream = "downstream") -> Toxic:
    """The connection is closed once it has passed on `size` bytes under this toxic."""
    return Toxic("limit_data", stream, size=size)


def slow_close(seconds: float, *, stream: Stream = "downstream") -> Toxic:
    """That one side has closed reaches the other one only later."""
    return Toxic("slow_close", stream, seconds)


class _Ended(Exception):
    """The connection is over."""


class _Connection:
    """Both halves of one proxied connection."""

    def __init__(self, client: asyncio.StreamWriter, server: asyncio.StreamWriter) -> None:
        self.client = client
        self.server = server
        self.turns = 0
        self.was_answered = True

    def abort(self, *, reset: bool = False) -> None:
        for writer in (self.client, self.server):
            sock = writer.get_extra_info("socket")
            if reset and sock is not None and sock.fileno() >= 0:
                # Without time to linger, closing sends RST.
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            writer.transport.abort()


class FaultProxy:
    """See the module.

    Args:
        upstream: host and port of the real server; may be changed later, for new connections.
        seed: of the jitter and of the sizes of slices.

    Attributes:
        toxics: the faults in effect; change the list at any time.
        port: where it listens, on 127.0.0.1; the same after `set_down(False)`.
        connections_made: how many there were.
    """

    def __init__(self, upstream: tuple[str, int], *, seed: int = 0) -> None:
        self.upstream = upstream
        self.toxics: list[Toxic] = []
        self.port = 0
        self.connections_made = 0
        self._random = random.Random(seed)
        self._server: asyncio.Server | None = None
        self._connections: set[_Connection] = set()
        self._handlers: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> Self:
        await self.set_down(False)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.set_down(True)

    async def set_down(self, down: bool) -> None:
        """Cut everything and refuse connections, or accept them again."""
        if down and self._server is not None:
            self._server.close()
            self._server = None
            await self.cut()
        elif not down and self._server is None:
            self._server = await asyncio.start_server(self._accept, "127.0.0.1", self.port or None)
            self.port = self._server.sockets[0].getsockname()[1]

    async def cut(self, *, reset: bool = False) -> None:
        """End all connections that there are, by FIN or by RST."""
        for connection in self._connections:
            connection.abort(reset=reset)
        handlers = list(self._handlers)
        for handler in handlers:
            handler.cancel()
        if handlers:
            await asyncio.wait(handlers)

    @property
    def round_trips(self) -> int:
        """Most times that one connection asked and was answered since `count_round_trips`.

        What the client says before it has heard anything belongs to one round trip, so that only a
        proxy with some latency counts pipelined requests rightly.
        """
        return max((connection.turns for connection in self._connections), default=0)

    def count_round_trips(self) -> None:
        """Count from here."""
        for connection in self._connections:
            connection.turns = 0
            connection.was_answered = True

    # --------------------------------------------------------------------------------------------

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        handler = asyncio.current_task()
        assert handler is not None
        self._handlers.add(handler)
        self.connections_made += 1
        try:
            with suppress(asyncio.CancelledError, OSError):
                await self._serve(reader, writer)
        finally:
            self._handlers.discard(handler)
            writer.transport.abort()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        from_server, to_server = await asyncio.open_connection(*self.upstream)
        connection = _Connection(writer, to_server)
        self._connections.add(connection)
        to, fro = _Direction("upstream", connection), _Direction("downstream", connection)
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self._receive(reader, to))
                group.create_task(self._send(to_server, to))
                group.create_task(self._receive(from_server, fro))
                group.create_task(self._send(writer, fro))
        except* (_Ended, OSError):
            pass  # half a connection is of no use to request and reply: all four end
        finally:
            self._connections.discard(connection)
            connection.abort()

    async def _receive(self, source: asyncio.StreamReader, direction: _Direction) -> None:
        loop = asyncio.get_running_loop()
        due = 0.0
        while data := await source.read(_READ_BYTES):
            if direction.stream == "upstream":
                direction.connection.turns += direction.connection.was_answered
                direction.connection.was_answered = False
            delay = sum(
                toxic.seconds + self._random.uniform(-toxic.jitter, toxic.jitter)
                for toxic in self._of(direction, "latency")
            )
            due = max(due, loop.time() + delay)  # never out of order
            await direction.queue.put((due, data))
        delay = sum(toxic.seconds for toxic in self._of(direction, "slow_close"))
        await direction.queue.put((max(due, loop.time() + delay), b""))

    async def _send(self, target: asyncio.StreamWriter, direction: _Direction) -> None:
        while True:
            due, data = await direction.queue.get()
            await asyncio.sleep(max(0.0, due - asyncio.get_running_loop().time()))
            if not data:
                raise _Ended
            if self._of(direction, "reset_peer"):
                direction.connection.abort(reset=True)
                raise _Ended
            if self._of(direction, "timeout"):
                continue
            data, is_last = self._limited(data, direction)
            for piece, pause in self._pieces(data, direction):
                target.write(piece)
                await target.drain()
                await asyncio.sleep(pause)
            if is_last:
                raise _Ended
            if direction.stream == "downstream":
                direction.connection.was_answered = True

    def _limited(self, data: bytes, direction: _Direction) -> tuple[bytes, bool]:
        """What `limit_data` lets through, and whether it is the end."""
        is_last = False
        for toxic in self._of(direction, "limit_data"):
            left = toxic.size - direction.passed.get(toxic, 0)
            is_last = is_last or len(data) >= left
            data = data[:left]
            direction.passed[toxic] = direction.passed.get(toxic, 0) + len(data)
        return data, is_last

    def _pieces(self, data: bytes, direction: _Direction) -> Iterator[tuple[bytes, float]]:
        """What is sent at once, and how long to wait after it."""
        slicers = self._of(direction, "slicer")
        slowest = min((toxic.size for toxic in self._of(direction, "bandwidth")), default=0)
        start = 0
        while start < len(data):
            size, pause = len(data), 0.0
            for toxic in slicers:
                size = min(size, max(1, self._random.randint(toxic.size // 2, toxic.size * 3 // 2)))
                pause = toxic.seconds
            if slowest:
                size = min(size, max(1, int(slowest * _TICK)))
            piece = data[start : start + size]
            start += size
            yield piece, pause + (len(piece) / slowest if slowest else 0.0)

    def _of(self, direction: _Direction, kind: str) -> list[Toxic]:
        streams = (direction.stream, "both")
        return [toxic for toxic in self.toxics if toxic.kind == kind and toxic.stream in streams]


class _Direction:
    """One direction of a connection: what was received and is not due yet."""

    def __init__(self, stream: Stream, connection: _Connection) -> None:
        self.stream = stream
        self.connection = connection
        self.queue: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue(_ON_THE_WAY)
        self.passed: dict[Toxic, int] = {}
        """Bytes that each `limit_data` has let through."""
