# SPDX-License-Identifier: Apache-2.0
"""Stores with their own thread, over a tier that waits for the test or over the real disk tier."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from pathlib import Path

from tests.unit.store.rig import LAYOUT, NAMESPACE, ScriptedTier, payload
from tierkv.config.models import DiskConfig, DramConfig, TierKVConfig
from tierkv.keys import Chunk
from tierkv.store import Context, LoadTicket, Store


def config(path: Path | None, slots: int = 16, **more: object) -> TierKVConfig:
    dram = DramConfig(capacity=slots * LAYOUT.slot_bytes)
    if path is None:
        return TierKVConfig(tiers=(dram,))
    disk = DiskConfig(path=path, capacity=1 << 20, min_free=0, **more)
    return TierKVConfig(tiers=(dram, disk))


def save(store: Store, chunks: Sequence[Chunk]) -> None:
    given = store.save(chunks)
    for at, slot in given:
        for rank, part in enumerate(store.pool.parts(slot)):
            part[:] = payload(chunks[at].key, rank)
    store.commit([slot for _, slot in given], store.generation)


def wait(store: Store, ticket: LoadTicket) -> LoadTicket:
    """Until it settles, letting the real I/O loop have its turns."""
    while not ticket.poll():
        assert store._io is not None
        store._io.run(asyncio.sleep(0), 30)
        store.poll()
    return ticket


def verify(store: Store, ticket: LoadTicket, chunks: Sequence[Chunk]) -> None:
    for chunk, slot in zip(chunks, ticket.slots, strict=False):
        for rank, part in enumerate(store.pool.parts(slot)):
            assert bytes(part) == payload(chunk.key, rank)


class Held(ScriptedTier):
    """Tells the test's thread when it was asked, and waits until the test lets it go on."""

    def __init__(self, config: DiskConfig) -> None:
        super().__init__(config)
        self.asked = threading.Semaphore(0)
        self.go = threading.Event()

    async def load(self, chunk, parts):  # type: ignore[no-untyped-def]
        self.asked.release()
        await asyncio.to_thread(self.go.wait, 30)
        return await super().load(chunk, parts)

    async def recall(self, most, seconds):  # type: ignore[no-untyped-def]
        await asyncio.to_thread(self.go.wait, 30)
        return await super().recall(most, seconds)

    async def save(self, chunk, parts):  # type: ignore[no-untyped-def]
        self.asked.release()
        await asyncio.to_thread(self.go.wait, 30)
        return await super().save(chunk, parts)


def held_store(slots: int = 16, **more: object) -> tuple[Store, Held]:
    tiers: list[Held] = []

    def make_tier(config):  # type: ignore[no-untyped-def]
        tiers.append(Held(config))
        return tiers[0]

    store = Store(config(Path("/nonexistent"), slots, **more), Context(make_tier=make_tier))
    store.open(NAMESPACE, LAYOUT)
    return store, tiers[0]
