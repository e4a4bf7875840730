# SPDX-License-Identifier: Apache-2.0
"""The Store's one thread, and the real disk tier behind it."""

from __future__ import annotations

import asyncio
import gc
import os
from pathlib import Path

import pytest

from tests.unit.store.real import config, held_store, save, verify, wait
from tests.unit.store.rig import LAYOUT, NAMESPACE, chain
from tierkv.pages.layout import SlotLayout
from tierkv.store import Store
from tierkv.store.io_loop import IoLoop

pytestmark = pytest.mark.usefixtures("no_thread_is_left")


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
