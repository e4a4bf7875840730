# SPDX-License-Identifier: Apache-2.0
"""A Store over DRAM and Redis that is used as an engine uses it, for the benchmarks beside it.

Every byte that is handed out is compared with what was saved. What is not handed out is "computed":
saved again, as an engine would.

**Threads and ownership.** `ProxyThread` runs a `FaultProxy` in a loop of its own; the list of
toxics is replaced as a whole and read there. It ends with the `with` block. The Store has its own
I/O loop.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from threading import Thread
from typing import Self

from tierkv.config import SecretRef, TierKVConfig
from tierkv.config.dram import DramConfig
from tierkv.config.redis import RedisConfig
from tierkv.keys import Chunk, ChunkChain, Namespace
from tierkv.pages.layout import SlotLayout
from tierkv.store import Store
from tierkv.store.report import StoreReport
from tierkv.testing.proxy import FaultProxy, Toxic
from tierkv.testing.samples import joined, make_payload

NAMESPACE = Namespace({"model": "benchmark"}, b"secret")
TICK = 0.0002
"""Seconds between two looks at a load, as an engine looks once a step."""

PREFILL_TOKENS_PER_S = 20_000
"""What the engine is taken to compute, for the cost model; nothing is computed."""


class ProxyThread:
    """A `FaultProxy` for code that is not asynchronous. `with ProxyThread(port) as proxy:`"""

    def __init__(self, port: int, *, seed: int = 0) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = Thread(target=self._loop.run_forever, name="fault-proxy")
        self._proxy = FaultProxy(("127.0.0.1", port), seed=seed)

    def __enter__(self) -> Self:
        self._thread.start()
        self.set_down(False)
        return self

    def __exit__(self, *_: object) -> None:
        self.set_down(True)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self._proxy.port}/0"

    def toxics(self, *toxics: Toxic) -> None:
        """These are in effect from now on, and no others."""
        self._proxy.toxics = list(toxics)

    def set_down(self, down: bool) -> None:
        """See `FaultProxy.set_down`."""
        asyncio.run_coroutine_threadsafe(self._proxy.set_down(down), self._loop).result(10)


def make_chain(count: int, name: str, layout: SlotLayout) -> list[Chunk]:
    """A chain of `count` chunks; another name gives another one."""
    tokens = ChunkChain(NAMESPACE.scope(tenant=name), layout.chunk_tokens)
    tokens.extend(range(count * layout.chunk_tokens))
    return tokens.chunks


class Texts:
    """Chains by name and their right bytes, each made once."""

    def __init__(self, layout: SlotLayout, chunks: int) -> None:
        self.layout = layout
        self._chunks = chunks
        self._chains: dict[str, list[Chunk]] = {}
        self._bytes: dict[bytes, bytes] = {}

    def __call__(self, name: str) -> list[Chunk]:
        if name not in self._chains:
            self._chains[name] = make_chain(self._chunks, name, self.layout)
        return self._chains[name]

    def right(self, chunk: Chunk) -> bytes:
        """What a slot with that chunk must hold."""
        if chunk.key not in self._bytes:
            self._bytes[chunk.key] = joined(make_payload(chunk, self.layout))
        return self._bytes[chunk.key]


@dataclass(frozen=True, slots=True)
class Served:
    """One request.

    Attributes:
        seconds: until it was known what is loaded, and it was.
        loaded: chunks that were.
        sources: tiers that they came from.
        rest: why there were no more, "" if all were loaded.
        wrong: loaded chunks whose bytes were not theirs.
    """

    seconds: float
    loaded: int
    sources: frozenset[str]
    rest: str
    wrong: int


class Engine:
    """See the module.

    Args:
        slots: chunks that DRAM holds.
        redis: None leaves Redis away.
    """

    def __init__(self, texts: Texts, slots: int, redis: RedisConfig | None) -> None:
        self._texts = texts
        dram = DramConfig(capacity=slots * texts.layout.slot_bytes)
        self.store = Store(
            TierKVConfig(
                key_secret=SecretRef(env="UNUSED"),
                tiers=(dram,) if redis is None else (dram, redis),
            )
        )

    def open(self) -> StoreReport:
        return self.store.open(NAMESPACE, self._texts.layout)

    def request(self, name: str) -> Served:
        """Load what there is of a chain, look at every byte, and compute the rest."""
        store, chunks = self.store, self._texts(name)
        begin = time.perf_counter()
        store.prefetch(chunks)
        ticket = store.load(chunks)
        while not ticket.poll():
            time.sleep(TICK)
            store.poll()
        seconds = time.perf_counter() - begin
        held = list(zip(chunks, ticket.slots, strict=False))
        wrong = sum(joined(store.pool.parts(s)) != self._texts.right(c) for c, s in held)
        served = Served(seconds, len(held), frozenset(ticket.sources), ticket.rest, wrong)
        self.compute(name)
        ticket.release()
        store.touch(chunks)
        store.poll()
        return served

    def compute(self, name: str) -> None:
        """Save what DRAM lacks of a chain."""
        chunks = self._texts(name)
        slots = self.store.save(chunks)
        tokens = len(slots) * self._texts.layout.chunk_tokens
        self.store.observe_prefill(tokens, tokens / PREFILL_TOKENS_PER_S)
        for at, slot in slots:
            right, start = self._texts.right(chunks[at]), 0
            for part in self.store.pool.parts(slot):
                part[:] = right[start : start + len(part)]
                start += len(part)
        self.store.commit([slot for _, slot in slots], self.store.generation)


@contextmanager
def opened(engine: Engine) -> Iterator[Engine]:
    """An engine that is open; closed at the end without waiting for what is not written."""
    engine.open()
    try:
        yield engine
    finally:
        engine.store.close(0.0)
