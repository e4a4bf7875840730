# SPDX-License-Identifier: Apache-2.0
"""The fault proxy does what its toxics say, and nothing without them."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from tierkv.testing.proxy import (
    FaultProxy,
    bandwidth,
    latency,
    limit_data,
    reset_peer,
    slicer,
    slow_close,
    timeout,
)

Stream = tuple[asyncio.StreamReader, asyncio.StreamWriter]
DATA = bytes(range(256)) * 2000


class Echo:
    """A server that says everything twice, and notes what it was told."""

    def __init__(self) -> None:
        self.heard = bytearray()
        self.ends = 0

    async def __call__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while data := await reader.read(65536):
                self.heard += data
                writer.write(data)
                writer.write(data)
                await writer.drain()
        except ConnectionError:
            pass
        finally:
            self.ends += 1
            writer.close()


def behind(test: Callable[[FaultProxy, Echo], Awaitable[None]], *, seed: int = 0) -> None:
    """Run `test` with a proxy in front of an Echo."""

    async def main() -> None:
        echo = Echo()
        server = await asyncio.start_server(echo, "127.0.0.1")
        async with FaultProxy(server.sockets[0].getsockname(), seed=seed) as proxy:
            await test(proxy, echo)
        server.close()
        while asyncio.all_tasks() - before:
            await asyncio.sleep(0)

    before: set[asyncio.Task[object]] = set()

    async def outer() -> None:
        before.update(asyncio.all_tasks())
        await main()

    asyncio.run(asyncio.wait_for(outer(), 30))


async def connect(proxy: FaultProxy) -> Stream:
    return await asyncio.open_connection("127.0.0.1", proxy.port)


async def say(stream: Stream, data: bytes, answer: int) -> bytes:
    stream[1].write(data)
    return await stream[0].readexactly(answer)


async def leave(*streams: Stream) -> None:
    for _, writer in streams:
        writer.transport.abort()
        await asyncio.sleep(0)


def test_without_toxics_bytes_pass_unchanged_in_both_directions() -> None:
    async def test(proxy: FaultProxy, echo: Echo) -> None:
        streams = [await connect(proxy) for _ in range(3)]
        for stream in streams:
            answer = await say(stream, b"ab", 4)
            assert answer == b"abab"
        assert proxy.connections_made == 3
        await leave(*streams)

    behind(test)


def test_an_end_is_passed_on() -> None:
    async def test(proxy: FaultProxy, echo: Echo) -> None:
        reader, writer = await connect(proxy)
        await say((reader, writer), b"x", 2)
        writer.write_eof()
        assert await reader.read() == b""
        writer.close()
        while not echo.ends:
            await asyncio.sleep(0)

    behind(test)


@pytest.mark.parametrize(
    "toxic", [slicer(1000), bandwidth(200_000_000), latency(0.01, jitter=0.01)]
)
def test_what_only_delays_keeps_every_byte_in_order(toxic: object) -> None:
    async def test(proxy: FaultProxy, echo: Echo) -> None:
        proxy.toxics.append(toxic)  # type: ignore[arg-type]
        stream = await connect(proxy)
        half = len(DATA) // 2
        stream[1].write(DATA)
        got = await stream[0].readexactly(2 * len(DATA))
        assert bytes(echo.heard) == DATA
        assert sorted(got) == sorted(DATA * 2)
        assert got[:half].startswith(DATA[:1000])
        await leave(stream)

    behind(test, seed=3)


def test_latency_works_on_the_direction_that_it_is_for() -> None:
    async def test(proxy: FaultProxy, echo: Echo) -> None:
        loop = asyncio.get_running_loop()
        stream = await connect(proxy)
        for direction, delays in (("downstream", 1), ("upstream", 1), ("both", 2)):
            proxy.toxics[:] = [latency(0.1, stream=direction)]  # type: ignore[arg-type]
            begin = loop.time()
            await say(stream, b"x", 2)
            assert loop.time() - begin >= 0.1 * delays
        await leave(stream)

    behind(test)


def test_bandwidth_is_held_to() -> None:
    async def test(proxy: FaultProxy, echo: Echo) -> None:
        loop = asyncio.get_running_loop()
        proxy.toxics.append(bandwidth(100_000))
        stream = await connect(proxy)
        begin = loop.time()
        await say(stream, bytes(15_000), 30_000)
        assert loop.time() - begin >= 0.28
        await leave(stream)

    behind(test)


def test_bytes_vanish_and_the_connection_stays() -> None:
    async def test(proxy: FaultProxy, echo: Echo) -> None:
        stream = await connect(proxy)
        proxy.toxics.append(timeout())
        stream[1].write(b"lost")
        while bytes(echo.heard) != b"lost":
            await asyncio.sleep(0)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(stream[0].read(1), 0.05)
        proxy.toxics.clear()
        assert await say(stream, b"x", 2) == b"xx"
        await leave(stream)

    behind(test)


def test_a_reset_is_one() -> None:
    async def test(proxy: FaultProxy, echo: Echo) -> None:
        stream = await connect(proxy)
        proxy.toxics.append(reset_peer())
        with pytest.raises(ConnectionResetError):
            await say(stream, b"x", 2)
        stream[1].transport.abort()

    behind(test)


def test_no_more_than_the_limit_comes_and_then_the_end() -> None:
    async def test(proxy: FaultProxy, echo: Echo) -> None:
        proxy.toxics.append(limit_data(7))
        stream = await connect(proxy)
        assert await say(stream, b"abc", 6) == b"abcabc"
        stream[1].write(b"def")
        assert await stream[0].read() == b"d"
        await leave(stream)

    behind(test)


def test_a_slow_close_comes_late() -> None:
    async def test(proxy: FaultProxy, echo: Echo) -> None:
        loop = asyncio.get_running_loop()
        proxy.toxics.append(slow_close(0.1, stream="upstream"))
        reader, writer = await connect(proxy)
        await say((reader, writer), b"x", 2)
        begin = loop.time()
        writer.write_eof()
        assert await reader.read() == b""
        assert loop.time() - begin >= 0.1
        writer.close()

    behind(test)


def test_down_refuses_and_up_accepts_on_the_same_port() -> None:
    async def test(proxy: FaultProxy, echo: Echo) -> None:
        stream, port = await connect(proxy), proxy.port
        await say(stream, b"x", 2)
        await proxy.set_down(True)
        assert await stream[0].read() == b""
        with pytest.raises(ConnectionRefusedError):
            await connect(proxy)
        await proxy.set_down(False)
        assert proxy.port == port
        again = await connect(proxy)
        assert await say(again, b"y", 2) == b"yy"
        await leave(stream, again)

    behind(test)


def test_cut_ends_what_there_is_and_accepts_new_ones() -> None:
    async def test(proxy: FaultProxy, echo: Echo) -> None:
        for reset in (False, True):
            stream = await connect(proxy)
            await say(stream, b"x", 2)
            await proxy.cut(reset=reset)
            if reset:
                with pytest.raises(ConnectionResetError):
                    await stream[0].readexactly(1)
            else:
                assert await stream[0].read() == b""
            await leave(stream)

    behind(test)


def test_round_trips_are_counted_on_the_busiest_connection() -> None:
    async def test(proxy: FaultProxy, echo: Echo) -> None:
        proxy.toxics.append(latency(0.05))
        one, two = await connect(proxy), await connect(proxy)
        await asyncio.gather(say(one, b"a", 2), say(two, b"b", 2))
        await say(one, b"a", 2)
        one[1].write(b"p")
        await asyncio.sleep(0)
        await say(one, b"q", 4)  # sent before anything came back: the same trip
        assert proxy.round_trips == 3
        proxy.count_round_trips()
        assert proxy.round_trips == 0
        await say(two, b"b", 2)
        assert proxy.round_trips == 1
        await leave(one, two)

    behind(test)
