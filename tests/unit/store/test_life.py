# SPDX-License-Identifier: Apache-2.0
"""Opening and closing the Store."""

from __future__ import annotations

import asyncio
import logging
import os
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.unit.store.real import config, save
from tests.unit.store.rig import LAYOUT, NAMESPACE, Rig, chain, refused_to_open
from tierkv.config.models import DramConfig, TierKVConfig
from tierkv.errors import ConfigError
from tierkv.pages.pool import DramPool
from tierkv.store import Store

MakeRig = Callable[..., Rig]
pytestmark = pytest.mark.usefixtures("no_thread_is_left")


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
