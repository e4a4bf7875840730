# SPDX-License-Identifier: Apache-2.0
"""A Redis server and a network that go wrong while an engine uses them: rows 20 to 29.

Every load is judged byte for byte: what is not the chunk that was saved must be no DONE. Figures
(operations lost, seconds to heal) are printed, not asserted; `run` ends what hangs.
"""

from __future__ import annotations

import asyncio
import logging
import random
import signal
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from tests.redis_kit import (
    CHUNKS,
    LAYOUT,
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
from tierkv.errors import ErrorKind, TierError
from tierkv.keys import Chunk
from tierkv.testing.may_forget import MayForget
from tierkv.testing.proxy import (
    FaultProxy,
    Toxic,
    bandwidth,
    latency,
    limit_data,
    reset_peer,
    slicer,
    slow_close,
    timeout,
)
from tierkv.testing.samples import joined, make_chunks, make_payload
from tierkv.tiers.base import Outcome, Presence, Result
from tierkv.tiers.redis.tier import RedisTier

pytestmark = needs_redis

REFUSED = Result(Outcome.REFUSED)


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def server(tmp_path: Path) -> Iterator[RedisServer]:
    with RedisServer(tmp_path / "redis") as server:
        yield server


async def load_all(tier: RedisTier, chunks: Sequence[Chunk]) -> list[Result]:
    """Load these at once; what is DONE must be right."""
    found = await asyncio.gather(*[load(tier, chunk) for chunk in chunks])
    for chunk, (result, slot) in zip(chunks, found, strict=True):
        if result.outcome is Outcome.DONE:
            assert slot == expected(chunk)
    return [result for result, _ in found]


def outcomes(results: Sequence[Result]) -> Counter[str]:
    return Counter(f"{r.outcome}{f' ({r.error})' if r.error else ''}" for r in results)


async def all_hit(tier: RedisTier, chunks: Sequence[Chunk]) -> None:
    """Load these until all are there; a busy machine may need more than one deadline for it."""

    async def are_done() -> bool:
        return set(outcomes(await load_all(tier, chunks))) == {"done"}

    await eventually(are_done)


async def healed(tier: RedisTier, chunk: Chunk) -> float:
    """Seconds until a load of the chunk, saved again if need be, is right."""
    begin = time.perf_counter()

    async def is_right() -> bool:
        if (await save(tier, chunk)).outcome is not Outcome.DONE:
            return False
        result, slot = await load(tier, chunk)
        return result.outcome is Outcome.DONE and slot == expected(chunk)

    await eventually(is_right)
    return time.perf_counter() - begin


# -- the server ----------------------------------------------------------------------------------


def test_a_server_killed_in_the_middle_of_loads_costs_those_and_heals(
    server: RedisServer, caplog: pytest.LogCaptureFixture
) -> None:
    async def test() -> None:
        tier = await opened(make_config(server.url))
        await save_all(tier, CHUNKS)
        loads = asyncio.create_task(load_all(tier, CHUNKS))
        await asyncio.sleep(0)
        server.kill()
        results = await loads
        print("in flight at the kill:", dict(outcomes(results)))
        assert all(r.outcome in (Outcome.DONE, Outcome.FAILED, Outcome.REFUSED) for r in results)
        assert {r.error for r in results if r.outcome is Outcome.FAILED} <= {ErrorKind.EIO}

        async def is_noticed() -> bool:
            return (await load(tier, CHUNKS[0]))[0] == REFUSED

        await eventually(is_noticed)
        assert [tier.lookup(chunk.key) for chunk in CHUNKS] == [Presence.UNKNOWN] * 64
        assert await ask(tier, [CHUNKS[0].key]) == [Presence.UNKNOWN]
        assert await save(tier, CHUNKS[0]) == REFUSED
        server.start()
        await connected(tier)
        # It came back empty: all are misses, and nobody believes otherwise.
        assert await load_all(tier, CHUNKS) == [Result(Outcome.MISS)] * 64
        print(f"healed after {await healed(tier, CHUNKS[0]):.2f} s")
        await tier.close()

    with caplog.at_level(logging.INFO, "tierkv"):
        run(test)
    said = [record.getMessage() for record in caplog.records]
    assert len(said) == 2, said  # went away, is back
    assert said[1].endswith("is back")


def test_what_was_known_is_dropped_as_soon_as_the_server_is_gone(server: RedisServer) -> None:
    async def test() -> None:
        tier = await opened(make_config(server.url))
        await save_all(tier, CHUNKS[:3])
        server.kill()

        async def is_forgotten() -> bool:
            return [tier.lookup(c.key) for c in CHUNKS[:3]] == [Presence.UNKNOWN] * 3

        await eventually(is_forgotten)
        await tier.close()

    run(test)


def test_kills_and_restarts_under_load_never_give_wrong_bytes(server: RedisServer) -> None:
    seed = 20_240
    print("seed", seed)
    dice = random.Random(seed)
    model = MayForget()
    counts: Counter[str] = Counter()

    async def test() -> None:
        tier = await opened(make_config(server.url, load_deadline=1.0))

        async def work(number: int) -> None:
            chunk, step = dice.choice(CHUNKS[:16]), dice.random()
            if step < 0.45:
                payload = make_payload(chunk, LAYOUT, version=number)
                model.saving(chunk.key, joined(payload))
                counts[f"save {(await tier.save(chunk, payload)).outcome}"] += 1
            elif step < 0.95:
                result, slot = await load(tier, chunk)
                counts[f"load {result.outcome}"] += 1
                model.judge(chunk.key, slot if result.outcome is Outcome.DONE else None)
            else:
                try:
                    await tier.evict([chunk.key])
                except TierError:
                    counts["evict failed"] += 1

        for round_ in range(20):
            await asyncio.gather(*[work(round_ * 1000 + n) for n in range(60)])
            jobs = [asyncio.create_task(work(round_ * 1000 + 500 + n)) for n in range(60)]
            for _ in range(dice.randrange(40)):
                await asyncio.sleep(0)
            server.kill()
            await asyncio.gather(*jobs)
            server.start()
            if dice.random() < 0.8:  # else go on while it is not connected yet
                await connected(tier)
        await connected(tier)
        await save_all(tier, CHUNKS[:16])
        await load_all(tier, CHUNKS[:16])
        await tier.close()

    run(test)
    print("20 kills:", dict(counts), f"{model.hits} hits judged")
    assert model.hits > 50


def test_a_server_that_stands_still_costs_a_deadline_and_heals(server: RedisServer) -> None:
    async def test() -> None:
        tier = await opened(make_config(server.url, load_deadline=0.2, save_deadline=0.2))
        await save_all(tier, CHUNKS[:8])
        server.kill(signal.SIGSTOP)
        results = await load_all(tier, CHUNKS[:8])
        assert results == [Result(Outcome.FAILED, ErrorKind.TIMEOUT)] * 8
        assert (await save(tier, CHUNKS[9])).outcome in (Outcome.FAILED, Outcome.REFUSED)
        await tier.probe([CHUNKS[10].key])
        assert tier.lookup(CHUNKS[10].key) is Presence.UNKNOWN
        server.kill(signal.SIGCONT)
        print(f"healed after {await healed(tier, CHUNKS[0]):.2f} s")
        await all_hit(tier, CHUNKS[1:8])
        await tier.close()

    run(test)


def test_a_full_server_pauses_saves_and_serves_loads(tmp_path: Path) -> None:
    async def test() -> None:
        clock = Clock()
        tier = await opened(make_config(server.url), clock=clock)
        used = int(server.cli("INFO", "memory").split("used_memory:")[1].split()[0])
        server.cli("CONFIG", "SET", "maxmemory", str(used + 10 * RECORD_BYTES))
        results = [await save(tier, chunk) for chunk in CHUNKS]
        stored = sum(result.outcome is Outcome.DONE for result in results)
        assert 0 < stored < 32
        assert results[stored] == Result(Outcome.REFUSED, ErrorKind.ENOSPC)
        # Counted once; then nothing is even tried.
        assert results[stored + 1 :] == [REFUSED] * (63 - stored)
        [writes] = [s for s in server.cli("INFO", "commandstats").split() if "cmdstat_set:" in s]
        assert "rejected_calls=1," in writes
        assert outcomes(await load_all(tier, CHUNKS[:stored])) == {"done": stored}
        server.cli("CONFIG", "SET", "maxmemory", "0")
        assert await save(tier, CHUNKS[60]) == REFUSED
        clock.now += 60
        assert (await save(tier, CHUNKS[60])).outcome is Outcome.DONE
        await tier.close()

    with RedisServer(tmp_path / "r", **{"maxmemory-policy": "noeviction"}) as server:
        run(test)


def test_what_the_server_evicts_is_a_miss_and_no_error(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    chunks = make_chunks(300, LAYOUT, seed=1000)

    async def test() -> None:
        tier = await opened(make_config(server.url))
        await save_all(tier, chunks)
        results = await load_all(tier, chunks)
        found = outcomes(results)
        print(dict(found), f"{found['miss'] / 300:.0%} said to be there were not")
        assert set(found) == {"done", "miss"}
        for chunk, result in zip(chunks, results, strict=True):
            is_there = tier.lookup(chunk.key) is Presence.HIT
            assert is_there == (result.outcome is Outcome.DONE)
        await tier.close()

    options = {"maxmemory": "4mb", "maxmemory-policy": "allkeys-lru"}
    with RedisServer(tmp_path / "r", **options) as server, caplog.at_level("WARNING", "tierkv"):
        run(test)
    assert not caplog.records


def test_a_master_that_becomes_a_replica_serves_loads_and_refuses_saves(
    server: RedisServer, tmp_path: Path
) -> None:
    slowly = {"key-load-delay": "20000", "loading-process-events-interval-bytes": "1024"}

    async def test() -> None:
        tier = await opened(make_config(server.url))
        await save_all(tier, CHUNKS[:32])
        await tier.close()
        tier = await opened(make_config(other.url))
        await save_all(tier, CHUNKS[40:44])
        other.cli("REPLICAOF", "127.0.0.1", str(server.port))
        seen = set()

        async def is_copied() -> bool:
            # LOADING on connections that are there already, for as long as it loads its copy.
            [result] = await load_all(tier, CHUNKS[:1])
            seen.add(result.outcome)
            return result.outcome is Outcome.DONE

        await eventually(is_copied)
        print("while it was loading:", sorted(seen))
        assert seen <= {Outcome.REFUSED, Outcome.MISS, Outcome.DONE}
        assert await load_all(tier, CHUNKS[40:44]) == [Result(Outcome.MISS)] * 4
        assert await save(tier, CHUNKS[41]) == REFUSED
        await tier.look_after()
        assert outcomes(await load_all(tier, CHUNKS[:1])) == {"done": 1}
        await tier.close()

    with RedisServer(tmp_path / "other", **slowly) as other:
        run(test)


# -- the network ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("toxic", "allowed"),
    [
        (slicer(20), {"done"}),
        (slicer(700), {"done"}),
        (latency(0.02, jitter=0.02), {"done"}),
        (bandwidth(20_000_000), {"done"}),
        (reset_peer(), {"failed (eio)", "refused"}),
        (limit_data(3 * RECORD_BYTES + 1000), {"done", "failed (eio)", "refused"}),
        (limit_data(10), {"failed (eio)", "refused"}),
        (slow_close(0.05), {"done"}),
        (timeout(), {"failed (timeout)", "refused"}),
        (timeout(stream="upstream"), {"failed (timeout)", "refused"}),
        (latency(5.0), {"failed (timeout)", "refused"}),
        (bandwidth(1000), {"failed (timeout)", "refused"}),
    ],
    ids=lambda value: (
        f"{value.kind}-{value.size or value.seconds}-{value.stream}"
        if isinstance(value, Toxic)
        else ""
    ),
)
def test_a_bad_network_costs_hits_and_nothing_else(
    server: RedisServer, toxic: Toxic, allowed: set[str]
) -> None:
    async def test() -> None:
        async with FaultProxy(("127.0.0.1", server.port), seed=7) as proxy:
            patience = 5.0 if allowed == {"done"} else 0.3
            config = make_config(f"redis://127.0.0.1:{proxy.port}", load_deadline=patience)
            tier = await opened(config)
            await save_all(tier, CHUNKS[:24])
            proxy.toxics.append(toxic)
            found = outcomes(await load_all(tier, CHUNKS[:24]))
            print(dict(found))
            assert set(found) <= allowed
            proxy.toxics.clear()
            print(f"healed after {await healed(tier, CHUNKS[0]):.2f} s")
            await connected(tier)
            await all_hit(tier, CHUNKS[:24])
            await tier.close()

    run(test)


def test_a_stall_in_the_middle_of_a_value_closes_that_connection_for_good(
    server: RedisServer,
) -> None:
    async def test() -> None:
        async with FaultProxy(("127.0.0.1", server.port)) as proxy:
            config = make_config(f"redis://127.0.0.1:{proxy.port}", load_deadline=0.5)
            tier = await opened(config)
            await save_all(tier, CHUNKS[:20])
            made = proxy.connections_made
            proxy.toxics.append(bandwidth(20_000))
            loads = asyncio.create_task(load_all(tier, CHUNKS[:20]))
            await asyncio.sleep(0.2)  # some of every value is here
            proxy.toxics[:] = [timeout()]
            assert outcomes(await loads) == {"failed (timeout)": 20}
            proxy.toxics.clear()
            await connected(tier)
            assert proxy.connections_made >= made + 5  # all that loads were on
            await all_hit(tier, CHUNKS[:20])
            await tier.close()

    run(test)


def test_a_slow_network_is_not_taken_from_loads_by_saves(server: RedisServer) -> None:
    async def test() -> None:
        async with FaultProxy(("127.0.0.1", server.port)) as proxy:
            tier = await opened(make_config(f"redis://127.0.0.1:{proxy.port}"))
            await save_all(tier, CHUNKS[:4])
            proxy.toxics.append(bandwidth(200_000, stream="both"))
            saves = [asyncio.create_task(save(tier, chunk)) for chunk in CHUNKS[20:40]]
            await asyncio.sleep(0)
            assert outcomes(await load_all(tier, CHUNKS[:4])) == {"done": 4}
            waiting = sum(not task.done() for task in saves)
            print(f"{waiting} of 20 saves were still waiting when 4 loads were done")
            assert waiting >= 15
            proxy.toxics.clear()
            assert {(await task).outcome for task in saves} == {Outcome.DONE}
            await tier.close()

    run(test)


def test_after_a_partition_it_heals_by_itself(server: RedisServer) -> None:
    async def test() -> None:
        async with FaultProxy(("127.0.0.1", server.port)) as proxy:
            tier = await opened(make_config(f"redis://127.0.0.1:{proxy.port}"))
            await save_all(tier, CHUNKS[:8])
            for _ in range(3):
                await proxy.set_down(True)
                results = await load_all(tier, CHUNKS[:8])
                assert {r.outcome for r in results} <= {Outcome.FAILED, Outcome.REFUSED}
                await proxy.set_down(False)
                print(f"first hit {await healed(tier, CHUNKS[0]):.2f} s after it healed")
                await connected(tier)
                await all_hit(tier, CHUNKS[:8])
            await tier.close()

    run(test)


def test_another_server_behind_the_same_address_has_what_it_has(
    server: RedisServer, tmp_path: Path
) -> None:
    async def test() -> None:
        async with FaultProxy(("127.0.0.1", server.port)) as proxy:
            tier = await opened(make_config(f"redis://127.0.0.1:{proxy.port}"))
            await save_all(tier, CHUNKS[:4])
            proxy.upstream = ("127.0.0.1", other.port)
            await proxy.cut(reset=True)
            await connected(tier)
            assert await load_all(tier, CHUNKS[:4]) == [Result(Outcome.MISS)] * 4
            await healed(tier, CHUNKS[0])
            await tier.close()

    with RedisServer(tmp_path / "other") as other:
        run(test)
        assert len(other.names()) == 1


def test_lookups_never_wait_whatever_the_network_does(server: RedisServer) -> None:
    async def test() -> None:
        async with FaultProxy(("127.0.0.1", server.port)) as proxy:
            tier = await opened(make_config(f"redis://127.0.0.1:{proxy.port}", load_deadline=0.3))
            await save_all(tier, CHUNKS)
            proxy.toxics.append(timeout(stream="both"))
            loads = asyncio.create_task(load_all(tier, CHUNKS))
            await asyncio.sleep(0)
            keys = [n.to_bytes(16, "big") for n in range(1936)] + [c.key for c in CHUNKS]
            begin = time.perf_counter()
            found = [tier.lookup(key) for key in keys]
            print(f"2,000 lookups took {(time.perf_counter() - begin) * 1e3:.2f} ms")
            assert found == [Presence.UNKNOWN] * 1936 + [Presence.HIT] * 64
            await loads
            await tier.close()

    run(test)
