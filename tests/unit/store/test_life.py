# SPDX-License-Identifier: Apache-2.0
"""Opening and closing the Store, its one thread, and the real disk tier."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from tests.unit.store.rig import (
    LAYOUT,
    NAMESPACE,
    Rig,
    ScriptedTier,
    chain,
    payload,
    refused_to_open,
)
from tierkv.config.models import DiskConfig, DramConfig, TierKVConfig
from tierkv.errors import ConfigError
from tierkv.keys import Chunk
from tierkv.pages.layout import SlotLayout
from tierkv.pages.pool import DramPool
from tierkv.store import Context, LoadTicket, Store, life
from tierkv.store.io_loop import IoLoop

MakeRig = Callable[..., Rig]


@pytest.fixture(autouse=True)
def no_thread_is_left() -> Iterator[None]:
    before = set(threading.enumerate())
    yield
    for thread in set(threading.enumerate()) - before:
        thread.join(10)  # a disk tier's threads end by themselves soon after
    assert set(threading.enumerate()) <= before


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


# Opening


def test_the_report_says_what_is_in_use(make_rig: MakeRig) -> None:
    report = make_rig(slots=8).report
    assert report.namespace == NAMESPACE.digest.hex()
    assert report.layout == LAYOUT
    assert list(report.tiers) == ["dram", "disk"]
    dram, disk = report.tiers.values()
    assert (dram.capacity_bytes, dram.capacity_chunks) == (8 * LAYOUT.slot_bytes, 8)
    assert (disk.capacity_bytes, disk.capacity_chunks) == (1 << 20, (1 << 20) // LAYOUT.slot_bytes)
    assert (disk.recovered_chunks, disk.recovered_bytes, disk.seconds) == (3, 300, 0.5)
    assert disk.notes == ("Noted.",)
    assert report.disabled == {}


def test_a_tier_that_cannot_be_opened_is_left_out_and_said_once(
    make_rig: MakeRig, caplog: pytest.LogCaptureFixture
) -> None:
    rig = make_rig(
        tiers={"disk": {}, "tape": {}},
        before_open=refused_to_open("disk", "no such directory; make it"),
    )
    assert rig.report.disabled == {"disk": "disk: no such directory; make it"}
    assert list(rig.report.tiers) == ["dram", "tape"]
    errors = [r.getMessage() for r in caplog.records if r.levelno == logging.ERROR]
    assert errors == ["tier disk is left out: disk: no such directory; make it"]
    chunks = chain(2)
    rig.tiers["tape"].give(*chunks)
    assert rig.load(chunks).release() is None
    assert list(rig.store.usage()) == ["dram", "tape"]


def test_a_tier_that_raises_anything_else_when_opened_is_left_out_too(make_rig: MakeRig) -> None:
    def prepare(rig: Rig) -> None:
        rig.disk.script.open = ZeroDivisionError("oops")

    rig = make_rig(before_open=prepare)
    assert "ZeroDivisionError: oops" in rig.report.disabled["disk"]
    rig.saved(chain(3))
    ticket = rig.load(chain(3))
    assert ticket.ready == 3
    ticket.release()


def test_dram_smaller_than_one_chunk_is_a_configuration_error() -> None:
    store = Store(TierKVConfig(tiers=(DramConfig(capacity=LAYOUT.slot_bytes - 1),)))
    with pytest.raises(ConfigError, match=r"tiers\.dram\.capacity: .*holds no chunk"):
        store.open(NAMESPACE, LAYOUT)
    store.close()


def test_a_pool_that_exists_already_is_used() -> None:
    pool = DramPool.create(LAYOUT, 3 * LAYOUT.slot_bytes)
    store = Store(config(None))
    report = store.open(NAMESPACE, LAYOUT, pool)
    assert store.pool is pool
    assert report.tiers["dram"].capacity_chunks == 3
    store.close()


def test_making_a_store_takes_no_thread_and_no_memory(tmp_path: Path) -> None:
    before = set(threading.enumerate()), os.listdir("/proc/self/fd")
    Store(config(tmp_path / "kv"))
    assert (set(threading.enumerate()), os.listdir("/proc/self/fd")) == before
    assert not (tmp_path / "kv").exists()


def test_without_a_lower_tier_there_is_no_thread() -> None:
    before = set(threading.enumerate())
    store = Store(config(None))
    store.open(NAMESPACE, LAYOUT)
    assert set(threading.enumerate()) == before
    save(store, chain(3))
    ticket = store.load(chain(4))
    assert ticket.poll()
    assert ticket.ready == 3
    ticket.release()
    store.poll()
    store.prefetch(chain(4))
    store.reset()
    store.close()


# What is there from earlier


def test_what_tiers_hold_from_earlier_is_told_once_each(make_rig: MakeRig) -> None:
    rig = make_rig(tiers={"near": {}, "far": {}})
    chunks = chain(5)
    rig.tiers["near"].script.recall = [chunks[3], chunks[0]]
    rig.tiers["far"].script.recall = [chunks[0], chunks[4], chunks[1]]
    assert rig.store.recall(10, 2.0) == [chunks[n] for n in (3, 0, 4, 1)]
    assert rig.store.recall(3, 2.0) == [chunks[n] for n in (3, 0, 4)]
    assert rig.tiers["far"].script.log == [("recall", 10, 2.0), ("recall", 3, 2.0)]
    assert make_rig(tiers={}).store.recall(10, 2.0) == []


def test_a_tier_that_cannot_tell_what_it_holds_does_not_keep_the_others_from_it(
    make_rig: MakeRig, caplog: pytest.LogCaptureFixture
) -> None:
    rig, chunks = make_rig(tiers={"near": {}, "far": {}}), chain(2)
    rig.tiers["far"].script.recall = chunks
    for bug in (ValueError("a bug"), asyncio.CancelledError()):
        rig.tiers["near"].script.recall = bug
        assert rig.store.recall(10, 2.0) == chunks
    assert "tier near cannot tell what it holds" in caplog.text
    assert rig.load(chunks).ready == 0  # and all goes on


# Closing


def test_close_writes_what_is_queued_and_may_be_called_twice(make_rig: MakeRig) -> None:
    rig, chunks = make_rig(), chain(3)
    rig.saved(chunks)
    rig.store.close()
    assert set(rig.disk.held) == {chunk.key for chunk in chunks}
    assert rig.index.leased == 0
    assert rig.disk.closed == 1
    rig.store.close()
    assert rig.disk.closed == 1


def test_close_with_a_full_queue_that_does_not_drain_drops_it(make_rig: MakeRig) -> None:
    rig = make_rig(slots=16, tiers={"disk": {"io_threads": 4}})
    rig.disk.script.hold = True
    rig.saved(chain(6))
    rig.pump()
    rig.store.close()
    assert rig.disk.held == {}
    dropped = rig.counted("tierkv_saves_dropped_total", tier="disk", reason="shutdown")
    assert dropped == 5  # all but the one under way
    assert rig.disk.closed == 1
    assert rig.index.leased == 0


@pytest.mark.parametrize(("timeout", "offered"), [(5.0, 3), (0.0, 0)])
def test_close_offers_what_was_used_again_while_there_is_time(
    make_rig: MakeRig, timeout: float, offered: int
) -> None:
    rig, chunks = make_rig(tiers={"disk": {"write": "on_reuse"}}), chain(3)
    rig.saved(chunks)
    rig.store.load(chunks).release()
    rig.store.close(timeout)
    dropped = rig.counted("tierkv_saves_dropped_total", tier="disk", reason="shutdown")
    assert len(rig.disk.held) + dropped == offered


def test_close_waits_for_a_reset_to_reach_the_tiers(make_rig: MakeRig) -> None:
    rig, chunks = make_rig(), chain(2)
    rig.disk.give(*chunks)
    rig.store.reset()
    rig.store.close()
    assert rig.disk.held == {}


def test_close_says_so_if_a_tier_was_not_done_forgetting(
    make_rig: MakeRig, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    rig = make_rig()

    async def hangs() -> None:
        await asyncio.get_running_loop().create_future()

    monkeypatch.setattr(rig.disk, "clear", hangs)
    rig.store.reset()
    rig.pump()
    rig.store.close()
    assert any("not everything was written" in r.getMessage() for r in caplog.records)


def test_a_closed_store_answers_and_takes_leases_back(make_rig: MakeRig) -> None:
    rig, chunks = make_rig(), chain(3)
    rig.saved(chunks)
    given = rig.store.save(chain(2, "b"))
    rig.pump()
    ticket = rig.load(chunks)
    rig.store.close()
    ticket.release()
    rig.store.commit([slot for _, slot in given], rig.store.generation)
    late = rig.store.load(chunks)
    assert late.poll()
    assert (late.ready, late.rest) == (0, "miss")
    assert rig.store.save(chunks) == []
    rig.store.prefetch(chunks)
    rig.store.touch(chunks)
    rig.store.invalidate(chunks)
    rig.store.poll()
    assert rig.index.free == 8


def test_a_tier_that_raises_when_closed_does_not_keep_the_others_open(make_rig: MakeRig) -> None:
    rig = make_rig(tiers={"disk": {}, "tape": {}})

    async def raises() -> None:
        raise OSError("a bug")

    rig.tiers["disk"].close = raises  # type: ignore[method-assign]
    rig.store.close()
    assert rig.tiers["tape"].closed == 1


def test_a_store_that_was_never_opened_may_be_closed() -> None:
    Store(config(None)).close()


# The real thread


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


def test_nothing_blocks_while_a_tier_hangs() -> None:
    store, tier = held_store()
    tier.give(*chain(4))
    ticket = store.load(chain(4))
    assert tier.asked.acquire(timeout=30)
    store.poll()
    assert not ticket.poll()
    save(store, chain(3, "b"))  # DRAM goes on as ever
    hit = store.load(chain(3, "b"))
    assert hit.poll()
    assert hit.ready == 3
    store.touch(chain(4))
    hit.release()
    tier.go.set()
    wait(store, ticket)
    assert ticket.ready == 4
    verify(store, ticket, chain(4))
    ticket.release()
    store.close()


def test_who_does_not_tell_what_it_holds_is_not_waited_for(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(life, "RECALL_GRACE", 0.05)
    store, tier = held_store()
    tier.script.recall = chain(2)
    assert store.recall(10, 0.0) == []
    assert "tier disk did not tell in time what it holds" in caplog.text
    tier.go.set()
    assert store.recall(10, 60.0) == chain(2)
    store.close()


def test_if_the_loop_dies_while_it_asks_nothing_is_known(caplog: pytest.LogCaptureFixture) -> None:
    store, tier = held_store()
    tier.go.set()
    tier.script.recall = SystemExit("a tier did something very bad")
    assert store.recall(10, 60.0) == []
    assert "the I/O loop did not tell what the tiers hold" in caplog.text
    save(store, chain(2))  # DRAM goes on as ever
    store.close()


def test_write_behind_goes_on_without_a_scheduler_step() -> None:
    store, tier = held_store(io_threads=4)
    tier.go.set()
    chunks = chain(6)
    save(store, chunks)
    for _ in chunks:  # one after the other, and nobody polls
        assert tier.asked.acquire(timeout=30)
    store.close()
    assert set(tier.held) == {chunk.key for chunk in chunks}


def test_close_does_not_wait_for_a_tier_that_hangs(caplog: pytest.LogCaptureFixture) -> None:
    store, tier = held_store()
    save(store, chain(4))
    assert tier.asked.acquire(timeout=30)
    store.close(timeout=0.0)
    assert any("not everything was written" in r.getMessage() for r in caplog.records)
    tier.go.set()


def test_if_the_loop_dies_dram_goes_on(caplog: pytest.LogCaptureFixture) -> None:
    store, tier = held_store()
    tier.go.set()
    save(store, chain(2))
    tier.give(*chain(2, "b"))

    def die() -> None:
        raise SystemExit("a tier did something very bad")

    io = store._io
    assert io is not None
    io.call(die)
    io._thread.join(30)
    ticket = store.load(chain(2, "b"))
    assert ticket.poll()
    assert (ticket.ready, ticket.rest) == (0, "unavailable")
    hit = store.load(chain(2))
    assert hit.poll()
    assert hit.ready == 2
    hit.release()
    save(store, chain(1, "c"))
    store.prefetch(chain(2, "b"))
    store.touch(chain(2))
    store.invalidate(chain(2))
    store.reset()
    store.poll()
    store.close(timeout=1.0)
    assert any("the I/O loop died" in r.getMessage() for r in caplog.records)


def test_a_loop_that_was_never_started_can_be_stopped() -> None:
    loop = IoLoop()
    assert loop.stop(1.0)
    assert loop.stop(1.0)
    loop.call(print)
    with pytest.raises(RuntimeError, match="does not run"):
        loop.run(asyncio.sleep(0))
    gc.collect()


# The real disk tier


def test_what_was_saved_is_found_again_after_a_restart(tmp_path: Path) -> None:
    chunks = chain(6)
    store = Store(config(tmp_path / "kv"))
    store.open(NAMESPACE, LAYOUT)
    save(store, chunks)
    store.close()
    store = Store(config(tmp_path / "kv"))
    report = store.open(NAMESPACE, LAYOUT)
    assert report.tiers["disk"].recovered_chunks == 6
    ticket = wait(store, store.load(chunks))
    assert (ticket.ready, ticket.rest, set(ticket.sources)) == (6, "", {"disk"})
    verify(store, ticket, chunks)
    ticket.release()
    store.close()


def test_a_second_store_in_the_same_directory_goes_on_without_it(tmp_path: Path) -> None:
    first, second = Store(config(tmp_path / "kv")), Store(config(tmp_path / "kv"))
    first.open(NAMESPACE, LAYOUT)
    report = second.open(NAMESPACE, LAYOUT)
    assert str(os.getpid()) in report.disabled["disk"]
    save(second, chain(2))
    ticket = second.load(chain(2))
    assert ticket.poll()
    assert ticket.ready == 2
    ticket.release()
    second.close()
    first.close()


def test_a_chain_larger_than_dram_lives_on_disk(tmp_path: Path) -> None:
    store = Store(config(tmp_path / "kv", slots=8))
    store.open(NAMESPACE, LAYOUT)
    chains = [chain(4, f"{n}") for n in range(6)]
    for chunks in chains:
        save(store, chunks)
        assert store._io is not None
        store._io.run(store._lowers[0].drained(), 30)
        store.poll()
    for chunks in chains:
        ticket = wait(store, store.load(chunks))
        assert (ticket.ready, ticket.rest) == (4, "")
        verify(store, ticket, chunks)
        ticket.release()
    store.close()


def test_reset_and_invalidate_reach_the_disk(tmp_path: Path) -> None:
    kept, bad = chain(3), chain(3, "b")
    store = Store(config(tmp_path / "kv"))
    store.open(NAMESPACE, LAYOUT)
    save(store, kept)
    save(store, bad)
    store.invalidate(bad)
    store.close()
    store = Store(config(tmp_path / "kv"))
    report = store.open(NAMESPACE, LAYOUT)
    assert report.tiers["disk"].recovered_chunks == 3
    assert wait(store, store.load(bad)).ready == 0
    ticket = wait(store, store.load(kept))
    assert ticket.ready == 3
    ticket.release()
    store.reset()
    store.close()
    store = Store(config(tmp_path / "kv"))
    assert store.open(NAMESPACE, LAYOUT).tiers["disk"].recovered_chunks == 0
    store.close()


def test_another_layout_of_the_same_size_is_another_pool_and_no_hit(tmp_path: Path) -> None:
    chunks = chain(2)
    store = Store(config(tmp_path / "kv"))
    store.open(NAMESPACE, LAYOUT)
    save(store, chunks)
    store.close()
    other = SlotLayout(chunk_tokens=2, block_tokens=2, block_bytes=48, ranks=2)
    assert other.slot_bytes == LAYOUT.slot_bytes
    store = Store(config(tmp_path / "kv"))
    store.open(NAMESPACE, other)
    assert wait(store, store.load(chunks)).ready == 0
    store.close()
