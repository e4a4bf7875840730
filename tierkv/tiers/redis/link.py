# SPDX-License-Identifier: Apache-2.0
"""One connection to a Redis server: pipelined requests, and bulk values received where they belong.

redis-py builds a Python object for every value, which then has to be copied into its slot. Here the
event loop receives a value straight into the memory that a sink names: 2.5 to 3 times the bytes a
second for a fifth of the CPU time (`docs/howto/redis.md` has the figures). Works over TLS too.

A connection is never used again after anything went wrong on it: a deadline, a request sent in
part, bytes that are not RESP, a length that nobody asked for. All who wait then get `LinkLost`.
From that moment on, or from the moment at which a caller is cancelled, no byte is written into the
memory that was lent.

Threads and ownership. Everything here belongs to the event loop; no lock.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Sequence
from typing import TypeAlias, cast

from tierkv.errors import ErrorKind
from tierkv.tiers.redis.commands import Reply, parse_error

Buffer: TypeAlias = bytes | bytearray | memoryview

SCRATCH_BYTES = 64 << 10
"""Room for replies that are no values: 16,000 answers to EXISTS at once."""

PEEK_BYTES = 4096
"""How much is received ahead when a value may follow: what comes with its length is copied."""

WRITE_BYTES = 256 << 10
"""Step in which values are sent. What a full socket does not take of it is copied by asyncio."""

MAX_LINE = 4096
MAX_TEXT = 1 << 20
"""Longest reply that is built as an object (INFO has some 6 KB)."""

_WASTE = memoryview(bytearray(SCRATCH_BYTES))
"""Where bytes go that nobody wants. Never read."""


class LinkLost(Exception):
    """The connection ended before the reply was complete.

    Attributes:
        kind: why: TIMEOUT, EIO (closed by the other side), PROTOCOL, WORKER (closed by us).
    """

    def __init__(self, kind: ErrorKind) -> None:
        super().__init__(kind.value)
        self.kind = kind


class NotSent(Exception):
    """The deadline passed before the request was sent; nothing is wrong with the connection."""


class Sink(ABC):
    """Takes the bytes of one bulk reply."""

    @abstractmethod
    def accept(self, length: int) -> bool:
        """Whether a value of that many bytes is wanted. Nothing was received of it yet."""

    @abstractmethod
    def buffer(self) -> memoryview | None:
        """Where the next bytes go, not empty and no longer than what is missing; None: nowhere."""

    @abstractmethod
    def received(self, count: int) -> None:
        """So many bytes were written into what `buffer` gave."""

    drain_limit: int
    """A value that is not wanted is read to its end up to so many bytes; a longer one costs the
    connection."""


class _Text(Sink):
    """A short bulk reply, built as bytes."""

    drain_limit = 0

    def __init__(self) -> None:
        self._data = bytearray()
        self._have = 0

    def accept(self, length: int) -> bool:
        if length > MAX_TEXT:
            return False
        self._data = bytearray(length)
        return True

    def buffer(self) -> memoryview:
        return memoryview(self._data)[self._have :]

    def received(self, count: int) -> None:
        self._have += count

    @property
    def value(self) -> bytes:
        return bytes(self._data)


class _Nobody(Sink):
    """Takes the place of a sink whose caller has gone."""

    def __init__(self, drain_limit: int) -> None:
        self.drain_limit = drain_limit

    def accept(self, length: int) -> bool:
        return False

    def buffer(self) -> None:
        return None

    def received(self, count: int) -> None:
        pass


class _Call:
    """The replies that one caller waits for."""

    __slots__ = ("future", "missing", "replies", "sink")

    def __init__(self, future: asyncio.Future[list[Reply]], count: int, sink: Sink | None) -> None:
        self.future = future
        self.missing = count
        self.replies: list[Reply] = []
        self.sink = sink


class Link(asyncio.BufferedProtocol):
    """See the module. Made by `tierkv.tiers.redis.dial`.

    Args:
        on_lost: told once, when the connection is gone.
    """

    def __init__(self, on_lost: Callable[[Link], None] | None = None) -> None:
        self.on_lost = on_lost
        self._sending = asyncio.Lock()  # requests must not get between the pieces of another
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport | None = None
        self._lost: ErrorKind | None = None
        self._calls: deque[_Call] = deque()
        self._scratch = bytearray(SCRATCH_BYTES)
        self._view = memoryview(self._scratch)
        self._start = 0  # of what was received into the scratch and not read yet
        self._end = 0
        self._sink: Sink | None = None  # of the bulk reply under way
        self._length = 0  # of it
        self._left = 0  # bytes of it still to come
        self._at_end = False  # all of it is here but its line end
        self._wanted = False  # whether it goes into the sink
        self._writable = asyncio.Event()
        self._writable.set()
        self.cause: Exception | None = None
        """What the transport died of, if it says so."""
        self.gone = asyncio.Event()
        """Set when the transport has let go of the socket."""

    @property
    def is_open(self) -> bool:
        return self._lost is None

    @property
    def pending(self) -> int:
        """Calls that wait for replies."""
        return len(self._calls)

    # -- asking ----------------------------------------------------------------------------------

    async def ask(self, request: bytes, count: int, deadline: float) -> list[Reply]:
        """Send requests and wait for their `count` replies, in order.

        Args:
            deadline: loop time.

        Raises:
            LinkLost: see the module.
        """
        call = self._expect(count, None)
        self._write(request)
        return await self._settled(call, deadline)

    async def fetch(self, request: bytes, count: int, sink: Sink, deadline: float) -> Reply:
        """As `ask`, for requests whose last reply is a value; its bytes go into `sink`.

        Returns:
            The last reply: the value's length, nil or an error.
        """
        call = self._expect(count, sink)
        self._write(request)
        return (await self._settled(call, deadline))[-1]

    async def push(self, pieces: Sequence[Buffer], count: int, deadline: float) -> Reply:
        """As `ask`, for one request given in pieces, none of which is copied as a whole.

        Several may be under way: each is sent when those before it were sent, answered or not.
        The pieces are in nobody's use once this returns.

        Returns:
            The last reply.

        Raises:
            NotSent: its turn did not come; the connection is well.
        """
        try:
            async with asyncio.timeout_at(deadline):
                await self._sending.acquire()
        except TimeoutError:
            raise NotSent from None
        try:
            call = self._expect(count, None)
            await self._send(call, pieces, deadline)
        finally:
            self._sending.release()
        return (await self._settled(call, deadline))[-1]

    def abort(self, kind: ErrorKind) -> None:
        """Give the connection up, at once and for all callers. May be called twice."""
        if self._lost is not None:
            return
        self._lost = kind
        self._sink = None
        self._left = 0
        self._writable.set()
        calls, self._calls = self._calls, deque()
        for call in calls:
            call.sink = None
            if not call.future.done():
                call.future.set_exception(LinkLost(kind))
        if self._transport is not None:
            self._transport.abort()
        if self.on_lost is not None:
            self.on_lost(self)

    async def _send(self, call: _Call, pieces: Sequence[Buffer], deadline: float) -> None:
        try:
            async with asyncio.timeout_at(deadline):
                for piece in pieces:
                    view = memoryview(piece)
                    for start in range(0, len(view), WRITE_BYTES):
                        self._write(view[start : start + WRITE_BYTES])
                        if not self._writable.is_set():
                            await self._writable.wait()
        except TimeoutError:
            self.abort(ErrorKind.TIMEOUT)
        except asyncio.CancelledError:
            self.abort(ErrorKind.WORKER)
            call.future.exception()  # nobody else will look at it
            raise

    def _expect(self, count: int, sink: Sink | None) -> _Call:
        if self._lost is not None:
            raise LinkLost(self._lost)
        call = _Call(self._loop.create_future(), count, sink)
        self._calls.append(call)
        return call

    def _write(self, data: Buffer) -> None:
        if self._lost is not None or self._transport is None:
            return
        if self._transport.is_closing():  # an earlier send has failed; asyncio tells us later
            self.abort(ErrorKind.EIO)
        else:
            self._transport.write(data)

    async def _settled(self, call: _Call, deadline: float) -> list[Reply]:
        try:
            async with asyncio.timeout_at(deadline):
                return await call.future
        except TimeoutError:
            self.abort(ErrorKind.TIMEOUT)
            raise LinkLost(ErrorKind.TIMEOUT) from None
        except asyncio.CancelledError:
            self._abandon(call)
            raise

    def _abandon(self, call: _Call) -> None:
        """The replies are still due, but their memory is no longer ours."""
        if call.sink is not None:
            nobody = _Nobody(call.sink.drain_limit)
            if self._sink is call.sink:
                self._sink, self._wanted = nobody, False
            call.sink = nobody

    # -- asyncio's side --------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        # Ask for more only when everything has left: then a piece is sent from where it lies. Not
        # 0, at which asyncio's TLS pauses for good (0 bytes waiting are "at least" 0).
        self._transport.set_write_buffer_limits(high=1)

    def connection_lost(self, exc: Exception | None) -> None:
        self.cause = exc
        self.abort(ErrorKind.EIO)
        self.gone.set()

    def pause_writing(self) -> None:
        self._writable.clear()

    def resume_writing(self) -> None:
        self._writable.set()

    def get_buffer(self, sizehint: int) -> memoryview:
        if self._lost is not None:
            return _WASTE
        if self._left:
            room = self._sink.buffer() if self._wanted and self._sink is not None else None
            return _WASTE[: self._left] if room is None else room
        if self._start == self._end:
            self._start = self._end = 0
        elif self._start:
            rest = bytes(self._view[self._start : self._end])
            self._view[: len(rest)] = rest
            self._start, self._end = 0, len(rest)
        value_follows = bool(self._calls) and self._calls[0].sink is not None
        most = self._end + PEEK_BYTES if value_follows else SCRATCH_BYTES
        return self._view[self._end : most]

    def buffer_updated(self, nbytes: int) -> None:
        if self._lost is not None:
            return
        if self._left:
            if self._wanted and self._sink is not None and self._sink.buffer() is not None:
                self._sink.received(nbytes)
            self._left -= nbytes
            self._at_end = not self._left
            return
        self._end += nbytes
        while self._lost is None and self._start < self._end:
            if not (self._end_bulk() if self._at_end else self._read_line()):
                break

    # -- reading ---------------------------------------------------------------------------------

    def _read_line(self) -> bool:
        """Read one reply, or the beginning of a bulk reply. False: more has to come first."""
        stop = self._scratch.find(b"\r\n", self._start, self._end)
        if stop < 0:
            if self._end - self._start > MAX_LINE:
                self.abort(ErrorKind.PROTOCOL)
            return False
        line = bytes(self._view[self._start : stop])
        self._start = stop + 2
        kind, rest = line[:1], line[1:]
        if not self._calls or len(rest) > MAX_LINE:
            self.abort(ErrorKind.PROTOCOL)  # nobody has asked
        elif kind == b":" and rest.removeprefix(b"-").isdigit() and len(rest) < 20:
            self._reply(int(rest))
        elif kind == b"+":
            self._reply(rest)
        elif kind == b"-":
            self._reply(parse_error(rest))
        elif line == b"$-1":
            self._reply(None)
        elif kind == b"$" and rest.isdigit() and len(rest) < 12:
            return self._begin_bulk(int(rest))
        else:
            self.abort(ErrorKind.PROTOCOL)
        return True

    def _begin_bulk(self, length: int) -> bool:
        call = self._calls[0]
        sink = self._sink = call.sink or _Text()
        self._length = length
        self._wanted = sink.accept(length)
        if not self._wanted and length > sink.drain_limit:
            self.abort(ErrorKind.PROTOCOL)
            return False
        # The beginning came with the line.
        here = min(length, self._end - self._start)
        self._left = length
        while here:
            room = sink.buffer() if self._wanted else None
            count = here if room is None else min(here, len(room))
            if room is not None:
                room[:count] = self._view[self._start : self._start + count]
                sink.received(count)
            self._start += count
            self._left -= count
            here -= count
        self._at_end = not self._left
        return self._at_end

    def _end_bulk(self) -> bool:
        if self._end - self._start < 2:
            return False
        if self._scratch[self._start : self._start + 2] != b"\r\n":
            self.abort(ErrorKind.PROTOCOL)
            return False
        self._start += 2
        self._at_end = False
        sink, self._sink = self._sink, None
        self._reply(sink.value if isinstance(sink, _Text) else self._length)
        return True

    def _reply(self, reply: Reply) -> None:
        call = self._calls[0]
        call.replies.append(reply)
        call.missing -= 1
        if not call.missing:
            self._calls.popleft()
            call.sink = None
            if not call.future.done():
                call.future.set_result(call.replies)
