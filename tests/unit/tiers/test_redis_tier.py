# SPDX-License-Identifier: Apache-2.0
"""What the Redis tier promises beyond the contract, on a real server."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from tests.redis_kit import (
    CHUNKS,
    LAYOUT,
    NAMESPACE,
    RECORD_BYTES,
    RedisServer,
    ask,
    connected,
    eventually,
    expected,
    load,
    make_config,
    needs_redis,
    opened,
    run,
    save,
    save_all,
)
from tierkv.config.base import SecretRef
from tierkv.errors import ErrorKind, TierError
from tierkv.keys import Chunk
from tierkv.testing.proxy import FaultProxy, latency
from tierkv.testing.samples import make_chunks, make_parts, make_payload
from tierkv.tiers.base import Outcome, Presence, Result
from tierkv.tiers.redis.tier import RedisTier

pytestmark = needs_redis

DAY = 86_400


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture(scope="module")
def one_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    folder = tmp_path_factory.mktemp("redis")
    with RedisServer(folder, unixsocket=str(folder / "socket")) as server:
        yield server


@pytest.fixture
def server(one_server: RedisServer) -> RedisServer:
    one_server.cli("FLUSHALL")
    return one_server


# -- what is on the server -----------------------------------------------------------------------


def test_a_chunk_is_one_key_of_known_form_and_its_value_a_record(server: RedisServer) -> None:
    async def test() -> None:
        tier = await opened(make_config(server.url, key_prefix="kv:eu"))
        await save(tier, CHUNKS[0])
        await tier.close()

    run(test)
    [name] = server.names()
    prefix, region, namespace, shape, generation, key = name.split(":")
    assert (prefix, region, namespace, key) == (
        "kv",
        "eu",
        NAMESPACE.hex(),
        CHUNKS[0].key.hex(),
    )
    assert len(bytes.fromhex(shape)) == len(bytes.fromhex(generation)) == 4
    assert server.cli("GET", f"kv:eu:{NAMESPACE.hex()}:generation") == generation
    assert server.cli("STRLEN", name) == str(RECORD_BYTES)
    assert server.cli("GETRANGE", name, "0", "5") == "TIERKV"
    assert "{" not in name


def test_chunks_are_found_by_the_next_engine_and_by_another_one_at_the_same_time(
    server: RedisServer,
) -> None:
    async def test() -> None:
        first = await opened(make_config(server.url))
        second = await opened(make_config(server.url))
        await save_all(first, CHUNKS[:10])
        assert await ask(second, [c.key for c in CHUNKS[:12]]) == (
            [Presence.HIT] * 10 + [Presence.MISS] * 2
        )
        await first.close()
        third = await opened(make_config(server.url))
        for tier in (second, third):
            for chunk in CHUNKS[:10]:
                result, value = await load(tier, chunk)
                assert result == Result(Outcome.DONE, nbytes=RECORD_BYTES)
                assert value == expected(chunk)
            await tier.close()

    run(test)


def test_a_known_miss_is_asked_for_again_after_a_moment(server: RedisServer) -> None:
    async def test() -> None:
        clock = Clock()
        reader = await opened(make_config(server.url, miss_ttl=1.0), clock=clock)
        writer = await opened(make_config(server.url))
        key = CHUNKS[0].key
        assert await ask(reader, [key]) == [Presence.MISS]
        await save(writer, CHUNKS[0])
        assert await ask(reader, [key]) == [Presence.MISS]
        clock.now += 1.5
        assert reader.lookup(key) is Presence.UNKNOWN
        assert await ask(reader, [key]) == [Presence.HIT]
        await reader.close()
        await writer.close()

    run(test)


def test_what_another_engine_has_stored_is_not_sent_again(server: RedisServer) -> None:
    async def test() -> None:
        first = await opened(make_config(server.url))
        second = await opened(make_config(server.url))
        await save(first, CHUNKS[0])
        assert await save(second, CHUNKS[0], version=1) == Result(Outcome.DONE)
        assert (await load(second, CHUNKS[0]))[1] == expected(CHUNKS[0])
        await first.close()
        await second.close()

    run(test)


@pytest.mark.parametrize("kind", ["database", "socket"])
def test_a_database_and_a_unix_socket_may_be_given(server: RedisServer, kind: str) -> None:
    url = f"redis://127.0.0.1:{server.port}/3"
    if kind == "socket":
        url = f"unix://{server.folder}/socket"

    async def test() -> None:
        tier = await opened(make_config(url))
        await save(tier, CHUNKS[0])
        assert (await load(tier, CHUNKS[0]))[1] == expected(CHUNKS[0])
        await tier.close()

    run(test)
    assert server.cli("-n", "3" if kind == "database" else "0", "DBSIZE") == "2"


# -- round trips and lives -----------------------------------------------------------------------


def test_asking_for_2000_chunks_takes_one_round_trip_and_so_do_100_loads(
    server: RedisServer,
) -> None:
    async def test() -> None:
        async with FaultProxy(("127.0.0.1", server.port)) as proxy:
            tier = await opened(make_config(f"redis://127.0.0.1:{proxy.port}"))
            await save_all(tier, CHUNKS)
            await tier.close()
            tier = await opened(make_config(f"redis://127.0.0.1:{proxy.port}"))
            proxy.toxics.append(latency(0.1))
            keys = [c.key for c in CHUNKS] + [n.to_bytes(16, "big") for n in range(1936)]
            proxy.count_round_trips()
            found = await ask(tier, keys)
            assert proxy.round_trips == 1
            assert found == [Presence.HIT] * 64 + [Presence.MISS] * 1936
            proxy.count_round_trips()
            assert await ask(tier, keys) == found
            assert proxy.round_trips == 0
            results = await asyncio.gather(*[load(tier, chunk) for chunk in CHUNKS])
            assert {result.outcome for result, _ in results} == {Outcome.DONE}
            assert proxy.round_trips == 1
            await tier.close()

    run(test)


def life_ms(server: RedisServer, chunk: Chunk) -> int:
    return int(server.cli("PTTL", server.name_of(chunk)))


def test_lives_are_set_and_renewed_at_most_once_in_a_quarter(server: RedisServer) -> None:
    async def test() -> None:
        clock = Clock()
        tier = await opened(make_config(server.url, ttl=DAY), clock=clock)
        chunk = CHUNKS[0]
        await save(tier, chunk)
        assert DAY * 1000 - 60_000 < life_ms(server, chunk) <= DAY * 1000
        # As if most of it had passed.
        server.cli("PEXPIRE", server.name_of(chunk), "5000")
        clock.now += DAY / 4 - 1
        await tier.touch([chunk.key])
        await load(tier, chunk)
        assert life_ms(server, chunk) <= 5000
        clock.now += 2
        await tier.touch([chunk.key])
        assert life_ms(server, chunk) > DAY * 1000 - 60_000
        server.cli("PEXPIRE", server.name_of(chunk), "5000")
        await tier.touch([chunk.key])
        assert life_ms(server, chunk) <= 5000
        await tier.close()

    run(test)


def test_a_load_renews_what_was_found_there(server: RedisServer) -> None:
    async def test() -> None:
        writer = await opened(make_config(server.url, ttl=DAY))
        await save_all(writer, CHUNKS[:3])
        await writer.close()
        for chunk in CHUNKS[:3]:
            server.cli("PEXPIRE", server.name_of(chunk), "60000")
        tier = await opened(make_config(server.url, ttl=DAY))
        await ask(tier, [c.key for c in CHUNKS[:3]])
        await load(tier, CHUNKS[0])

        async def is_renewed() -> bool:
            return life_ms(server, CHUNKS[0]) > 60_000

        await eventually(is_renewed)
        assert life_ms(server, CHUNKS[1]) <= 60_000  # asked for, not used
        await tier.close()

    run(test)


def test_a_renewed_key_that_is_gone_is_a_miss(server: RedisServer) -> None:
    async def test() -> None:
        clock = Clock()
        tier = await opened(make_config(server.url, ttl=DAY), clock=clock)
        await save(tier, CHUNKS[0])
        server.cli("DEL", server.name_of(CHUNKS[0]))
        clock.now += DAY / 2
        await tier.touch([CHUNKS[0].key, CHUNKS[1].key])
        assert tier.lookup(CHUNKS[0].key) is Presence.MISS
        assert tier.lookup(CHUNKS[1].key) is Presence.UNKNOWN
        await tier.close()

    run(test)


def test_without_a_ttl_chunks_stay(server: RedisServer) -> None:
    async def test() -> None:
        tier = await opened(make_config(server.url, ttl=None))
        await save(tier, CHUNKS[0])
        await tier.touch([CHUNKS[0].key])
        assert life_ms(server, CHUNKS[0]) == -1
        await tier.close()

    run(test)


# -- forgetting ----------------------------------------------------------------------------------


def test_clearing_makes_all_engines_forget_and_frees_what_this_one_knew(
    server: RedisServer,
) -> None:
    async def test() -> None:
        first = await opened(make_config(server.url))
        second = await opened(make_config(server.url))
        await save_all(first, CHUNKS[:4])
        await save_all(second, CHUNKS[4:6])
        before = server.names()
        assert await first.clear() == 4
        others = (CHUNKS[4].key.hex(), CHUNKS[5].key.hex())
        assert server.names() == [name for name in before if name.endswith(others)]
        for chunk in CHUNKS[:6]:
            assert (await load(first, chunk))[0].outcome is Outcome.MISS
        await second.look_after()  # what it does every few seconds
        for chunk in CHUNKS[:6]:
            assert second.lookup(chunk.key) is not Presence.HIT
            assert (await load(second, chunk))[0].outcome is Outcome.MISS
        await save(second, CHUNKS[0], version=1)
        assert (await load(first, CHUNKS[0]))[1] == expected(CHUNKS[0], 1)
        third = await opened(make_config(server.url))
        assert await ask(third, [c.key for c in CHUNKS[:6]]) == [Presence.HIT] + [Presence.MISS] * 5
        for tier in (first, second, third):
            await tier.close()

    run(test)


def test_what_cannot_be_forgotten_on_the_server_is_said(server: RedisServer) -> None:
    async def test() -> None:
        async with FaultProxy(("127.0.0.1", server.port)) as proxy:
            tier = await opened(make_config(f"redis://127.0.0.1:{proxy.port}"))
            await save(tier, CHUNKS[0])
            await proxy.set_down(True)
            with pytest.raises(TierError, match="redis: the server cannot be told"):
                await tier.evict([CHUNKS[0].key])
            assert tier.lookup(CHUNKS[0].key) is not Presence.HIT
            await tier.close()

    run(test)


def test_clearing_while_the_server_is_away_holds_once_it_is_back(server: RedisServer) -> None:
    async def test() -> None:
        async with FaultProxy(("127.0.0.1", server.port)) as proxy:
            tier = await opened(make_config(f"redis://127.0.0.1:{proxy.port}"))
            await save(tier, CHUNKS[0])
            await proxy.set_down(True)
            await tier.clear()
            await proxy.set_down(False)

            async def is_back() -> bool:
                return (await load(tier, CHUNKS[0]))[0].outcome is Outcome.MISS

            await eventually(is_back)
            await tier.look_after()
            await tier.close()
        tier = await opened(make_config(server.url))
        assert (await load(tier, CHUNKS[0]))[0].outcome is Outcome.MISS
        await tier.close()

    run(test)


# -- nothing in a value is trusted ---------------------------------------------------------------


def bad_load(server: RedisServer, spoil: bytes, *, chunk: Chunk = CHUNKS[0]) -> Result:
    """Load a chunk whose value was replaced; it must be forgotten and not come back."""

    async def test() -> Result:
        tier = await opened(make_config(server.url))
        await ask(tier, [chunk.key])
        result, _ = await load(tier, chunk)
        assert tier.lookup(chunk.key) is not Presence.HIT

        async def is_gone() -> bool:
            return not any(name.endswith(chunk.key.hex()) for name in server.names())

        await eventually(is_gone)
        again, _ = await load(tier, chunk)
        assert again.outcome is Outcome.MISS
        assert (await save(tier, chunk)).outcome is Outcome.DONE
        assert (await load(tier, chunk))[1] == expected(chunk)
        await tier.close()
        return result

    return run(test)


@pytest.fixture
def stored(server: RedisServer) -> tuple[str, bytes]:
    """Name and value of the first chunk."""

    async def test() -> None:
        tier = await opened(make_config(server.url))
        await save(tier, CHUNKS[0])
        await tier.close()

    run(test)
    name = server.name_of(CHUNKS[0])
    return name, server.value(name)


@pytest.mark.parametrize(
    ("place", "kind"),
    [
        (0, ErrorKind.FORMAT),
        (8, ErrorKind.FORMAT),
        (10, ErrorKind.CHECKSUM),
        (90, ErrorKind.CHECKSUM),
        (150, ErrorKind.CHECKSUM),
        (167, ErrorKind.CHECKSUM),
        (168, ErrorKind.CHECKSUM),
        (RECORD_BYTES // 2, ErrorKind.CHECKSUM),
        (RECORD_BYTES - 1, ErrorKind.CHECKSUM),
    ],
)
def test_a_flipped_bit_is_a_counted_miss(
    server: RedisServer, stored: tuple[str, bytes], place: int, kind: ErrorKind
) -> None:
    name, value = stored
    spoiled = bytearray(value)
    spoiled[place] ^= 4
    server.set_value(name, bytes(spoiled))
    assert bad_load(server, spoiled) == Result(Outcome.FAILED, kind, RECORD_BYTES)


@pytest.mark.parametrize("length", [0, 1, 167, 168, RECORD_BYTES - 1, RECORD_BYTES + 1, 60_000])
def test_a_value_of_another_length_is_a_counted_miss(
    server: RedisServer, stored: tuple[str, bytes], length: int
) -> None:
    name, value = stored
    server.set_value(name, (value * 3)[:length])
    assert bad_load(server, value) == Result(Outcome.FAILED, ErrorKind.GEOMETRY, length)


def test_a_huge_value_costs_its_connection_and_nothing_else(
    server: RedisServer, stored: tuple[str, bytes]
) -> None:
    name, _ = stored
    server.set_value(name, bytes(5_000_000))

    async def test() -> None:
        tier = await opened(make_config(server.url))
        result, slot = await load(tier, CHUNKS[0])
        assert (result.outcome, result.error) == (Outcome.FAILED, ErrorKind.GEOMETRY)
        assert set(slot) == {0}
        assert (await save(tier, CHUNKS[1])).outcome is Outcome.DONE
        assert (await load(tier, CHUNKS[1]))[1] == expected(CHUNKS[1])
        await tier.close()

    run(test)


def test_the_value_of_another_chunk_is_not_served(
    server: RedisServer, stored: tuple[str, bytes]
) -> None:
    name, value = stored
    server.set_value(name.replace(CHUNKS[0].key.hex(), CHUNKS[1].key.hex()), value)
    server.cli("DEL", name)
    found = bad_load(server, value, chunk=CHUNKS[1])
    assert found == Result(Outcome.FAILED, ErrorKind.KEY_MISMATCH, RECORD_BYTES)


def test_a_value_of_another_type_is_a_counted_miss(
    server: RedisServer, stored: tuple[str, bytes]
) -> None:
    name, value = stored
    server.cli("DEL", name)
    server.cli("LPUSH", name, "x")
    assert bad_load(server, value) == Result(Outcome.FAILED, ErrorKind.FORMAT)


def test_engines_of_another_geometry_do_not_see_each_other(
    server: RedisServer, stored: tuple[str, bytes]
) -> None:
    async def test() -> None:
        tier = RedisTier(make_config(server.url))
        await tier.open(NAMESPACE, replace(LAYOUT, block_tokens=4, block_bytes=12_000))
        assert await ask(tier, [CHUNKS[0].key]) == [Presence.MISS]
        await tier.close()

    run(test)
    assert stored[0] in server.names()


def test_engines_of_another_model_do_not_see_each_other_nor_take_their_values(
    server: RedisServer, stored: tuple[str, bytes]
) -> None:
    other = b"another-model-16"

    async def test() -> None:
        tier = RedisTier(make_config(server.url))
        await tier.open(other, LAYOUT)
        await connected(tier)
        assert await ask(tier, [CHUNKS[0].key]) == [Presence.MISS]
        # Even if somebody puts it where this one looks.
        word = server.cli("GET", f"tierkv:{other.hex()}:generation")
        _, _, shape, _, key = stored[0].split(":")
        server.set_value(f"tierkv:{other.hex()}:{shape}:{word}:{key}", stored[1])
        result, _ = await load(tier, CHUNKS[0])
        assert result == Result(Outcome.FAILED, ErrorKind.KEY_MISMATCH, RECORD_BYTES)
        await tier.clear()
        await tier.close()

    run(test)
    assert server.value(stored[0]) == stored[1]


@pytest.mark.parametrize("spoil", [("LPUSH", "x"), ("SET", "no word"), ("SET", "")])
def test_a_generation_that_is_none_is_written_over(
    server: RedisServer, spoil: tuple[str, str]
) -> None:
    name = f"tierkv:{NAMESPACE.hex()}:generation"
    server.cli(spoil[0], name, spoil[1])

    async def test() -> None:
        tier = await opened(make_config(server.url))
        assert (await save(tier, CHUNKS[0])).outcome is Outcome.DONE
        server.cli("DEL", name)
        server.cli(spoil[0], name, spoil[1])
        await tier.look_after()
        assert (await load(tier, CHUNKS[0]))[0].outcome is Outcome.DONE
        await tier.close()

    run(test)
    assert len(bytes.fromhex(server.cli("GET", name))) == 4


def test_a_value_that_went_behind_our_back_is_a_plain_miss(
    server: RedisServer, stored: tuple[str, bytes]
) -> None:
    async def test() -> None:
        tier = await opened(make_config(server.url))
        assert await ask(tier, [CHUNKS[0].key]) == [Presence.HIT]
        server.cli("DEL", stored[0])
        assert (await load(tier, CHUNKS[0]))[0] == Result(Outcome.MISS)
        assert tier.lookup(CHUNKS[0].key) is Presence.MISS
        await tier.close()

    run(test)


# -- limits --------------------------------------------------------------------------------------


def test_a_chunk_that_no_redis_value_can_hold_is_refused_at_start(server: RedisServer) -> None:
    async def test() -> None:
        tier = RedisTier(make_config(server.url))
        with pytest.raises(TierError, match="set chunk_tokens lower"):
            await tier.open(NAMESPACE, replace(LAYOUT, block_bytes=300 << 20))
        await tier.close()

    run(test)


def test_bytes_in_flight_are_bounded(server: RedisServer) -> None:
    async def test() -> None:
        async with FaultProxy(("127.0.0.1", server.port)) as proxy:
            config = make_config(
                f"redis://127.0.0.1:{proxy.port}", max_inflight=3 * RECORD_BYTES + 1
            )
            tier = await opened(config)
            await save_all(tier, CHUNKS)
            proxy.toxics.append(latency(0.05))
            loads = [asyncio.create_task(load(tier, chunk)) for chunk in CHUNKS[:12]]
            most = 0
            assert tier.talk is not None
            [node] = tier.talk.topology.nodes()
            while not all(task.done() for task in loads):
                most = max(most, sum(link.pending for link in node.loads.links))
                await asyncio.sleep(0)
            assert most == 3
            assert {(await task)[0].outcome for task in loads} == {Outcome.DONE}
            await tier.close()

    run(test)


def test_memory_that_is_not_plain_bytes_is_taken_as_such(server: RedisServer) -> None:
    async def test() -> None:
        tier = await opened(make_config(server.url))
        payload = make_payload(CHUNKS[0], LAYOUT)
        await tier.save(CHUNKS[0], [part.cast("I") for part in payload])
        parts = make_parts(LAYOUT)
        result = await tier.load(CHUNKS[0], [part.cast("d") for part in parts])
        assert result.outcome is Outcome.DONE
        assert b"".join(parts) == expected(CHUNKS[0])
        await tier.close()

    run(test)


def test_a_chunk_of_another_length_is_not_saved(server: RedisServer) -> None:
    other = make_chunks(1, replace(LAYOUT, chunk_tokens=8))[0]

    async def test() -> None:
        tier = await opened(make_config(server.url))
        assert await save(tier, replace(other)) == Result(Outcome.FAILED, ErrorKind.GEOMETRY)
        await tier.close()

    run(test)


def test_the_password_is_read_again_for_each_connection(
    server: RedisServer, tmp_path: Path
) -> None:
    secret = tmp_path / "secret"
    secret.write_text("first\n")
    server.cli("ACL", "SETUSER", "rotating", "on", ">first", "~*", "+@all")

    async def test() -> None:
        async with FaultProxy(("127.0.0.1", server.port)) as proxy:
            url = f"redis://127.0.0.1:{proxy.port}"
            config = make_config(url, username="rotating", password=SecretRef(file=secret))
            tier = await opened(config)
            server.cli("ACL", "SETUSER", "rotating", "resetpass", ">second")
            secret.write_text("second\n")
            await proxy.cut()

            async def is_back() -> bool:
                return (await save(tier, CHUNKS[0])).outcome is Outcome.DONE

            await eventually(is_back)
            await tier.close()

    try:
        run(test)
    finally:
        server.cli("ACL", "DELUSER", "rotating")


def test_nothing_is_left_open(server: RedisServer) -> None:
    async def test() -> None:
        before = len(os.listdir("/proc/self/fd"))
        tasks = asyncio.all_tasks()
        for _ in range(3):
            tier = await opened(make_config(server.url))
            await save(tier, CHUNKS[0])
            await tier.close()
        assert asyncio.all_tasks() == tasks
        assert len(os.listdir("/proc/self/fd")) == before

    run(test)
