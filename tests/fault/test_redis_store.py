# SPDX-License-Identifier: Apache-2.0
"""The Store over a real Redis: engines share, and a Redis that is away costs only its own hits."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.redis_kit import RedisServer, needs_redis, until
from tierkv.config import SecretRef, TierKVConfig
from tierkv.config.dram import DramConfig
from tierkv.config.redis import RedisConfig
from tierkv.keys import Chunk, ChunkChain, Namespace
from tierkv.pages.layout import SlotLayout
from tierkv.store import Store
from tierkv.testing.samples import joined, make_payload

pytestmark = needs_redis

LAYOUT = SlotLayout(chunk_tokens=4, block_tokens=2, block_bytes=4000, ranks=2)
NAMESPACE = Namespace({"model": "test"}, b"secret")


@pytest.fixture
def server(tmp_path: Path) -> Iterator[RedisServer]:
    with RedisServer(tmp_path / "redis") as server:
        yield server


def chain(count: int, name: str) -> list[Chunk]:
    tokens = ChunkChain(NAMESPACE.scope(tenant=name), LAYOUT.chunk_tokens)
    tokens.extend(range(count * LAYOUT.chunk_tokens))
    return tokens.chunks


@contextmanager
def engine(url: str, slots: int = 1500, **options: object) -> Iterator[Store]:
    """A Store of DRAM and Redis, with its I/O thread."""
    store = Store(
        TierKVConfig(
            key_secret=SecretRef(env="UNUSED"),
            tiers=(
                DramConfig(capacity=slots * LAYOUT.slot_bytes),
                RedisConfig(url=url, **options),  # type: ignore[arg-type]
            ),
        )
    )
    report = store.open(NAMESPACE, LAYOUT)
    assert not report.disabled
    try:
        yield store
    finally:
        store.close()


def put(store: Store, chunks: Sequence[Chunk]) -> None:
    """What an engine does with KV that it has computed."""
    slots = store.save(chunks)
    for at, slot in slots:
        for part, value in zip(
            store.pool.parts(slot), make_payload(chunks[at], LAYOUT), strict=True
        ):
            part[:] = value
    store.commit([slot for _, slot in slots], store.generation)


def get(store: Store, chunks: Sequence[Chunk]) -> tuple[int, set[str], str]:
    """Chunks that were loaded, the tiers they came from, and why there were no more."""
    ticket = store.load(chunks)
    while not ticket.poll():
        store.poll()
        time.sleep(0.001)
    for chunk, slot in zip(chunks, ticket.slots, strict=False):
        assert joined(store.pool.parts(slot)) == joined(make_payload(chunk, LAYOUT))
    found = (ticket.ready, set(ticket.sources), ticket.rest)
    ticket.release()
    return found


def test_what_one_engine_computed_the_other_one_loads(server: RedisServer) -> None:
    chunks = chain(700, "a")
    with engine(server.url) as first, engine(server.url) as second:
        put(first, chunks)
        assert first.drain(30)
        assert get(second, chunks[:10]) == (10, {"redis"}, "")
        assert get(second, chunks) == (700, {"redis", "dram"}, "")
        assert get(second, chunks) == (700, {"dram"}, "")
        second.reset()
        second.drain()
        until(lambda: get(second, chunks)[0] == 0)
    # All that share it forget (and find out by themselves within seconds).
    with engine(server.url) as third:
        assert get(third, chunks) == (0, set(), "miss")


def test_dram_hits_go_on_whatever_becomes_of_redis(server: RedisServer) -> None:
    seed = 99
    print("seed", seed)
    dice = random.Random(seed)
    here, there = chain(40, "here"), chain(40, "there")
    counts = {"": 0, "miss": 0, "late": 0, "unavailable": 0, "failed": 0}
    with engine(server.url) as writer:
        put(writer, there)
        assert writer.drain(30)
    options = {"load_deadline": 0.5, "probe_after": 0.1}
    with engine(server.url, slots=60, **options) as store:
        put(store, here)
        up = True
        for step in range(200):
            if dice.random() < 0.15:
                if up:
                    server.kill()
                else:
                    server.start()
                up = not up
            assert get(store, here) == (40, {"dram"}, "")
            wanted = dice.choice(there[:1] + chain(1, f"new{step}"))
            ready, _, rest = get(store, [wanted])
            counts[rest] += 1
            assert ready == (not rest)
        print(counts)
        assert counts["unavailable"] + counts["failed"] > 10
        assert counts["failed"] < 40
        if not up:
            server.start()
        # It heals: what is saved goes there again.
        tries = iter(range(10_000))

        def is_back() -> bool:
            put(store, chain(1, f"fresh{next(tries)}"))
            store.poll()
            return len(server.names()) >= 5

        until(is_back)
