# SPDX-License-Identifier: Apache-2.0
"""One connection: what is read where, and that nothing is read into memory that is not lent."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from tierkv.errors import ErrorKind
from tierkv.tiers.redis.commands import ReplyError, command, parse_error, pipeline, set_head
from tierkv.tiers.redis.link import Link, LinkLost, NotSent, Sink

Script = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


class Buffers(Sink):
    """Takes a value of exactly the buffers' length; the rest of each buffer must stay as it is."""

    def __init__(self, *sizes: int, drain_limit: int = 0) -> None:
        self.buffers = [bytearray(b"\xee" * size) for size in sizes]
        self.drain_limit = drain_limit
        self.have = 0

    def accept(self, length: int) -> bool:
        return length == sum(map(len, self.buffers))

    def buffer(self) -> memoryview | None:
        start = self.have
        for buffer in self.buffers:
            if start < len(buffer):
                return memoryview(buffer)[start:]
            start -= len(buffer)
        raise AssertionError("asked for more than the value has")

    def received(self, count: int) -> None:
        self.have += count

    @property
    def value(self) -> bytes:
        return b"".join(self.buffers)


def talk(script: Script, test: Callable[[Link], Awaitable[None]]) -> None:
    """Run `test` on a link whose other side is `script`."""

    async def main() -> None:
        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            try:
                await script(reader, writer)
            finally:
                writer.close()

        server = await asyncio.start_server(serve, "127.0.0.1")
        host, port = server.sockets[0].getsockname()
        _, link = await asyncio.get_running_loop().create_connection(Link, host, port)
        try:
            await test(link)
        finally:
            link.abort(ErrorKind.WORKER)
            await link.gone.wait()
            server.close()
            await server.wait_closed()

    asyncio.run(asyncio.wait_for(main(), 30))


def says(*pieces: bytes) -> Script:
    """Waits for a request, says the pieces, one packet each, and waits for the end."""

    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(1)
        for piece in pieces:
            writer.write(piece)
            await writer.drain()
            await asyncio.sleep(0)
        await reader.read()

    return script


def later() -> float:
    return asyncio.get_running_loop().time() + 20


def test_commands_are_written_as_resp() -> None:
    assert command(b"GET", b"a:1") == b"*2\r\n$3\r\nGET\r\n$3\r\na:1\r\n"
    assert pipeline(b"PEXPIRE", [b"x", b"yy"], b"5") == (
        b"*3\r\n$7\r\nPEXPIRE\r\n$1\r\nx\r\n$1\r\n5\r\n*3\r\n$7\r\nPEXPIRE\r\n$2\r\nyy\r\n$1\r\n5\r\n"
    )
    head, tail = set_head(b"k", 3, None)
    assert head + b"abc" + tail == command(b"SET", b"k", b"abc")
    head, tail = set_head(b"k", 3, 1500)
    assert head + b"abc" + tail == command(b"SET", b"k", b"abc", b"PX", b"1500")


WIRE = b":1\r\n+OK\r\n-MOVED 5 h:1\r\n$-1\r\n$4\r\n\r\nab\r\n:-7\r\n"
REPLIES = [1, b"OK", ReplyError("MOVED", "5 h:1"), None, b"\r\nab", -7]


@pytest.mark.parametrize("cut", range(1, len(WIRE)))
def test_replies_are_read_wherever_packets_are_cut(cut: int) -> None:
    async def test(link: Link) -> None:
        assert await link.ask(b"?", len(REPLIES), later()) == REPLIES
        assert link.is_open

    talk(says(WIRE[:cut], WIRE[cut:]), test)


def test_answers_reach_their_callers_in_order() -> None:
    async def test(link: Link) -> None:
        first, second, third = await asyncio.gather(
            link.ask(b"?", 2, later()), link.ask(b"?", 1, later()), link.ask(b"?", 3, later())
        )
        assert (first, second, third) == ([1, 2], [3], [4, 5, 6])

    talk(says(b":1\r\n:2\r\n:3\r\n:4\r\n", b":5\r\n:6\r\n"), test)


@pytest.mark.parametrize("step", [1, 7, 1000, 4095, 4096, 4097, 70_000])
def test_values_land_in_the_sinks_buffers_whatever_the_packets(step: int) -> None:
    values = [bytes([n]) * size for n, size in enumerate((9000, 1, 70_001))]
    wire = b"".join(b"$%d\r\n%b\r\n" % (len(value), value) for value in values) + b":5\r\n"

    async def test(link: Link) -> None:
        sinks = [Buffers(4000, 5000), Buffers(1), Buffers(70_000, 1)]
        fetches = [link.fetch(b"?", 1, sink, later()) for sink in sinks]
        *lengths, last = await asyncio.gather(*fetches, link.ask(b"?", 1, later()))
        assert lengths == [len(value) for value in values]
        assert [sink.value for sink in sinks] == values
        assert last == [5]

    talk(says(*[wire[at : at + step] for at in range(0, len(wire), step)]), test)


def test_a_value_of_another_length_is_read_past_and_the_link_goes_on() -> None:
    async def test(link: Link) -> None:
        sink = Buffers(10, drain_limit=5000)
        reply, after = await asyncio.gather(
            link.fetch(b"?", 1, sink, later()), link.ask(b"?", 1, later())
        )
        assert (reply, after) == (5000, [8])
        assert sink.value == b"\xee" * 10

    talk(says(b"$5000\r\n" + b"x" * 5000 + b"\r\n:8\r\n"), test)


@pytest.mark.parametrize(
    "wire",
    [
        b"$5001\r\n" + b"x" * 100,  # more than is read past
        b"$536870913\r\n",
        b"$99999999999\r\n",
        b"$999999999999999999999999999999\r\n",
        b"$-2\r\n",
        b"$+5\r\nabcde\r\n",
        b"$1_0\r\n",
        b"$\r\n",
        b":\r\n",
        b":1.5\r\n",
        b":99999999999999999999999\r\n",
        b"*1\r\n:1\r\n",
        b"%1\r\n",
        b"HTTP/1.1 400 Bad Request\r\n",
        b"\r\n",
        b"x" * 100_000,
        b":" + b"1" * 5000 + b"\r\n",
        b"$10\r\n0123456789xx",  # no line end where the value ends
    ],
)
def test_what_is_not_asked_for_or_not_resp_ends_the_link(wire: bytes) -> None:
    async def test(link: Link) -> None:
        sink = Buffers(10, drain_limit=5000)
        behind = asyncio.create_task(link.ask(b"?", 1, later()))
        with pytest.raises(LinkLost) as caught:
            await link.fetch(b"?", 2, sink, later())
        assert caught.value.kind is ErrorKind.PROTOCOL
        with pytest.raises(LinkLost):
            await behind
        with pytest.raises(LinkLost):
            await link.ask(b"?", 1, later())
        assert not link.is_open

    # One of the callers waits for a plain reply first.
    talk(says(b":1\r\n" + wire), test)


def test_an_unasked_reply_ends_the_link() -> None:
    async def test(link: Link) -> None:
        assert await link.ask(b"?", 1, later()) == [1]
        await link.gone.wait()
        with pytest.raises(LinkLost) as caught:
            await link.ask(b"?", 1, later())
        assert caught.value.kind is ErrorKind.PROTOCOL

    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(1)
        writer.write(b":1\r\n")
        await writer.drain()
        await asyncio.sleep(0.01)
        writer.write(b":2\r\n")
        await reader.read()

    talk(script, test)


def test_a_text_that_is_too_long_is_not_built() -> None:
    async def test(link: Link) -> None:
        with pytest.raises(LinkLost) as caught:
            await link.ask(b"?", 1, later())
        assert caught.value.kind is ErrorKind.PROTOCOL

    talk(says(b"$1048577\r\n"), test)


def test_a_deadline_ends_the_link_and_nothing_is_written_afterwards() -> None:
    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(1)
        writer.write(b"$20000\r\n" + b"a" * 10_000)
        await reader.read()  # until the other side gives up

    async def test(link: Link) -> None:
        sink = Buffers(20_000)
        with pytest.raises(LinkLost) as caught:
            await link.fetch(b"?", 1, sink, asyncio.get_running_loop().time() + 0.1)
        assert caught.value.kind is ErrorKind.TIMEOUT
        assert sink.value == b"a" * 10_000 + b"\xee" * 10_000
        link.buffer_updated(len(link.get_buffer(-1)[:10]))  # bytes that were under way
        assert sink.value == b"a" * 10_000 + b"\xee" * 10_000
        assert not link.is_open

    talk(script, test)


def test_a_closed_connection_fails_all_who_wait() -> None:
    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readexactly(3)
        writer.write(b":1\r\n$100\r\nabc")
        await writer.drain()

    async def test(link: Link) -> None:
        lost: list[Link] = []
        link.on_lost = lost.append
        found = await asyncio.gather(
            link.ask(b"?", 1, later()),
            link.fetch(b"?", 1, Buffers(100), later()),
            link.ask(b"?", 1, later()),
            return_exceptions=True,
        )
        assert found[0] == [1]
        assert [type(error) for error in found[1:]] == [LinkLost, LinkLost]
        assert {error.kind for error in found[1:]} == {ErrorKind.EIO}  # type: ignore[union-attr]
        assert lost == [link]

    talk(script, test)


@pytest.mark.parametrize("received", [0, 5000])
def test_a_cancelled_caller_gets_its_memory_back_and_the_link_goes_on(received: int) -> None:
    go_on = asyncio.Event()

    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readexactly(1)
        value = b"$10000\r\n" + b"a" * 10_000 + b"\r\n"
        writer.write(value[: received and received + 8])
        await go_on.wait()
        writer.write(value[received and received + 8 :] + b":9\r\n")
        await reader.read()

    async def test(link: Link) -> None:
        sink = Buffers(10_000, drain_limit=10_000)
        task = asyncio.create_task(link.fetch(b"?", 1, sink, later()))
        while sink.have < received or link.pending == 0:
            await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        before = sink.value
        sink.buffers[0].append(0)  # BufferError if somebody still has a view
        sink.buffers[0].pop()
        go_on.set()
        assert await link.ask(b"?", 1, later()) == [9]
        assert sink.value == before == b"a" * received + b"\xee" * (10_000 - received)

    talk(script, test)


def test_large_requests_arrive_whole_and_one_after_the_other() -> None:
    seen = bytearray()
    pieces = [[b"head%d" % n, bytes([n]) * 3_000_000, b"tail"] for n in range(3)]
    whole = b"".join(b"".join(p) for p in pieces)

    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while len(seen) < len(whole):
            seen.extend(await reader.read(100_000))
        writer.write(b"+A\r\n+B\r\n+C\r\n")
        await reader.read()

    async def test(link: Link) -> None:
        replies = await asyncio.gather(*[link.push(p, 1, later()) for p in pieces])
        assert replies == [b"A", b"B", b"C"]
        assert bytes(seen) == whole

    talk(script, test)


def test_a_request_sent_in_part_ends_the_link_and_one_whose_turn_did_not_come_does_not() -> None:
    over = asyncio.Event()

    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await over.wait()  # reads nothing

    async def test(link: Link) -> None:
        soon = asyncio.get_running_loop().time() + 0.2
        first = asyncio.create_task(link.push([bytes(64_000_000)], 1, later()))
        await asyncio.sleep(0)
        with pytest.raises(NotSent):
            await link.push([b"x"], 1, soon)
        assert link.is_open
        first.cancel()
        with pytest.raises(asyncio.CancelledError):
            await first
        assert not link.is_open
        over.set()

    talk(script, test)


@pytest.mark.parametrize(
    ("line", "code"),
    [
        (b"OOM command not allowed", "OOM"),
        (b"NOAUTH", "NOAUTH"),
        (b"", "UNKNOWN"),
        (b"\x1b]0;gotcha\x07 x", "UNKNOWN"),
        (b"all is\nwell", "UNKNOWN"),
        (b"\xff\xfe", "UNKNOWN"),
        (b"A" * 33, "UNKNOWN"),
    ],
)
def test_the_code_of_an_error_is_a_word_whatever_the_server_says(line: bytes, code: str) -> None:
    assert parse_error(line).code == code
