# SPDX-License-Identifier: Apache-2.0
"""A real cluster and a real Sentinel on loopback; a master dies in the middle of loads (row 29)."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from tests.redis_kit import (
    CHUNKS,
    LAYOUT,
    NAMESPACE,
    RedisCluster,
    RedisServer,
    WatchedRedis,
    ask,
    connected,
    eventually,
    expected,
    free_port,
    load,
    make_config,
    needs_redis,
    opened,
    run,
    save,
    save_all,
    until,
)
from tierkv.errors import TierError
from tierkv.keys import Chunk
from tierkv.tiers.base import Outcome, Presence
from tierkv.tiers.redis.check import check_server
from tierkv.tiers.redis.dial import Endpoint
from tierkv.tiers.redis.discovery import find_master
from tierkv.tiers.redis.tier import RedisTier

pytestmark = needs_redis


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisCluster]:
    with RedisCluster(tmp_path_factory.mktemp("cluster")) as cluster:
        yield cluster


async def loads_until_all_hit(tier: RedisTier, chunks: Sequence[Chunk]) -> None:
    """Load these again and again until all are hits; each hit must be right."""
    begin = time.perf_counter()
    lost = 0

    async def are_hits() -> bool:
        nonlocal lost
        found = await asyncio.gather(*[load(tier, chunk) for chunk in chunks])
        for chunk, (result, slot) in zip(chunks, found, strict=True):
            if result.outcome is Outcome.DONE:
                assert slot == expected(chunk)
            else:
                lost += 1
        return all(result.outcome is Outcome.DONE for result, _ in found)

    await eventually(are_hits)
    print(f"{lost} loads lost, all hits again after {time.perf_counter() - begin:.2f} s")


def test_chunks_are_spread_over_the_nodes_of_a_cluster_and_found_there(
    cluster: RedisCluster,
) -> None:
    async def test() -> None:
        config = make_config(cluster.url, cluster=True)
        writer = await opened(config)
        await save_all(writer, CHUNKS)
        reader = await opened(config)
        keys = [chunk.key for chunk in CHUNKS]
        assert await ask(reader, [*keys, bytes(16)]) == [Presence.HIT] * 64 + [Presence.MISS]
        for chunk in CHUNKS:
            assert (await load(reader, chunk))[1] == expected(chunk)
        assert await reader.evict(keys[:10]) == 10
        assert (await load(writer, CHUNKS[0]))[0].outcome is Outcome.MISS
        assert not any(finding.fatal for finding in await check_server(config))
        await reader.close()
        await writer.close()

    run(test)
    names = cluster.names()
    assert sum(map(len, names.values())) == 54
    assert all(len(found) > 5 for found in names.values())


def test_a_slot_that_moves_is_followed_while_and_after_it_moves(cluster: RedisCluster) -> None:
    source, target = cluster.servers[1], cluster.servers[2]

    async def test() -> None:
        tier = await opened(make_config(cluster.url, cluster=True))
        await tier.clear()
        await save_all(tier, CHUNKS)
        name = source.names()[0]
        [chunk] = [chunk for chunk in CHUNKS if name.endswith(chunk.key.hex())]
        slot = source.cli("CLUSTER", "KEYSLOT", name)
        target.cli("CLUSTER", "SETSLOT", slot, "IMPORTING", source.cli("CLUSTER", "MYID"))
        source.cli("CLUSTER", "SETSLOT", slot, "MIGRATING", target.cli("CLUSTER", "MYID"))
        source.cli("MIGRATE", "127.0.0.1", str(target.port), name, "0", "5000")
        # The source answers ASK.
        assert (await load(tier, chunk))[1] == expected(chunk)
        for server in (target, source, cluster.servers[0]):
            server.cli("CLUSTER", "SETSLOT", slot, "NODE", target.cli("CLUSTER", "MYID"))
        # Now MOVED, also for small requests.
        assert (await load(tier, chunk))[1] == expected(chunk)
        await tier.touch([chunk.key])
        assert await tier.evict([chunk.key]) == 1
        assert (await save(tier, chunk)).outcome is Outcome.DONE
        assert name in target.names()
        await tier.close()

    run(test)


def test_a_cluster_node_that_dies_in_the_middle_of_loads_is_replaced(
    cluster: RedisCluster,
) -> None:
    replica = cluster.servers[3]

    async def test() -> None:
        tier = await opened(make_config(cluster.url, cluster=True))
        await tier.clear()
        await save_all(tier, CHUNKS)
        held = len(cluster.servers[0].names())
        assert held > 5
        until(lambda: len(replica.cli("KEYS", "*").splitlines()) >= held)
        loads = asyncio.create_task(loads_until_all_hit(tier, CHUNKS))
        await asyncio.sleep(0)
        cluster.servers[0].kill()
        await loads
        assert len(replica.names()) == held
        await tier.close()

    run(test)


def test_a_cluster_whose_known_node_is_down_at_start_is_found_later(
    cluster: RedisCluster,
) -> None:
    async def test() -> None:
        tier = RedisTier(make_config(f"redis://127.0.0.1:{free_port()}", cluster=True))
        report = await tier.open(NAMESPACE, LAYOUT)
        assert "does not tell the cluster's slots" in report.notes[0]
        assert (await load(tier, CHUNKS[0]))[0].outcome is Outcome.REFUSED
        await tier.close()

    run(test)


@pytest.fixture(scope="module")
def watched(tmp_path_factory: pytest.TempPathFactory) -> Iterator[WatchedRedis]:
    with WatchedRedis(tmp_path_factory.mktemp("sentinel")) as watched:
        yield watched


def test_a_master_that_was_replaced_and_lives_on_is_left(watched: WatchedRedis) -> None:
    async def test() -> None:
        sentinel = {"service": watched.service, "nodes": watched.nodes}
        tier = await opened(make_config("redis:///0", sentinel=sentinel))
        await save_all(tier, CHUNKS[:8])
        until(lambda: len(watched.replica.names()) == 8)
        watched.sentinels[0].cli("SENTINEL", "FAILOVER", watched.service)
        until(lambda: "role:master" in watched.replica.cli("INFO", "replication"))
        await tier.look_after()  # what it does every few seconds

        async def is_written_to_the_new_one() -> bool:
            await save(tier, CHUNKS[20])
            return len(watched.replica.names()) == 9

        await eventually(is_written_to_the_new_one)
        await connected(tier)
        await loads_until_all_hit(tier, CHUNKS[:8])
        await tier.close()

    run(test)


def test_sentinel_is_followed_when_the_master_dies_in_the_middle_of_loads(
    watched: WatchedRedis,
) -> None:
    async def test() -> None:
        sentinel = {"service": watched.service, "nodes": watched.nodes}
        tier = await opened(make_config("redis:///0", sentinel=sentinel))
        assert tier.talk is not None
        master = watched.at(str(tier.talk.topology.nodes()[0].endpoint))
        replica = watched.master if master is watched.replica else watched.replica
        await tier.clear()
        await save_all(tier, CHUNKS)
        until(lambda: "master_link_status:up" in replica.cli("INFO", "replication"))
        until(lambda: len(replica.names()) >= 64)
        loads = asyncio.create_task(loads_until_all_hit(tier, CHUNKS))
        await asyncio.sleep(0)
        master.kill()
        await loads
        assert await tier.evict([CHUNKS[0].key]) == 1

        async def is_saved() -> bool:
            return (await save(tier, CHUNKS[0], version=1)).outcome is Outcome.DONE

        # Saves pause for a moment after one that the dead master took with it.
        await eventually(is_saved)
        await tier.close()

    run(test)


def test_connections_to_a_master_that_was_replaced_are_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sentinel = {"service": "kv", "nodes": "127.0.0.1:1"}
    with RedisServer(tmp_path / "old") as old, RedisServer(tmp_path / "new") as new:
        masters = [Endpoint("127.0.0.1", old.port)]

        async def named(*_: object) -> Endpoint:
            return masters[-1]

        monkeypatch.setattr("tierkv.tiers.redis.topology.find_master", named)

        async def test() -> None:
            tier = await opened(make_config("redis:///0", sentinel=sentinel))
            await save(tier, CHUNKS[0])
            masters.append(Endpoint("127.0.0.1", new.port))
            await tier.look_after()  # the old one lives on, and has closed nothing
            await connected(tier)
            assert (await save(tier, CHUNKS[1])).outcome is Outcome.DONE
            await tier.close()

        run(test)
        assert (len(old.names()), len(new.names())) == (1, 1)


def test_a_cluster_cannot_lead_plaintext_to_another_machine(tmp_path: Path) -> None:
    options = {"cluster-enabled": "yes", "cluster-announce-ip": "192.0.2.1"}
    with RedisServer(tmp_path / "node", **options) as node:
        node.cli("CLUSTER", "ADDSLOTSRANGE", "0", "16383")

        async def test() -> None:
            tier = RedisTier(make_config(node.url[:-2], cluster=True))
            with pytest.raises(TierError, match=r"plaintext to 192\.0\.2\.1:\d+, which the server"):
                await tier.open(NAMESPACE, LAYOUT)
            await tier.close()

        run(test)


def test_asking_sentinel_ends_when_it_is_cancelled(watched: WatchedRedis) -> None:
    sentinel = {"service": watched.service, "nodes": watched.nodes}
    config = make_config("redis:///0", sentinel=sentinel)
    assert config.sentinel is not None

    async def test() -> None:
        ended = 0
        for steps in range(200):
            task = asyncio.create_task(find_master(config, config.sentinel))
            for _ in range(steps % 40):
                await asyncio.sleep(0)
            if not task.done():
                task.cancel()
                await asyncio.wait([task])
                assert task.cancelled()
                ended += 1
        assert ended > 50

    run(test)


def test_a_service_that_no_sentinel_knows_is_a_finding(watched: WatchedRedis) -> None:
    async def test() -> None:
        sentinel = {"service": "unknown", "nodes": watched.nodes}
        [finding] = await check_server(make_config("redis:///0", sentinel=sentinel))
        assert "names a master of 'unknown'" in finding.message

    run(test)
