# SPDX-License-Identifier: Apache-2.0
"""What the disk tier does when calls fail, overlap or are cancelled; files faked by the syscall."""

from __future__ import annotations

import asyncio
import errno
import gc
import logging
import os
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.unit.tiers.disk_kit import (
    CHUNKS,
    LAYOUT,
    SLOT_BYTES,
    entry_offset,
    load,
    make_config,
    opened,
    run,
    save,
    table,
    value,
)
from tierkv.errors import ErrorKind, TierError
from tierkv.testing.samples import joined, make_parts, make_payload
from tierkv.tiers.base import Outcome, Presence, Result
from tierkv.tiers.disk import tier as tier_module
from tierkv.tiers.disk.volume import Volume


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def failing(monkeypatch: pytest.MonkeyPatch, name: str, number: int | None) -> list[int]:
    """Make `os.<name>` raise this errno (None: work again); gives the number of calls."""
    real: Callable[..., Any] = getattr(os, name)
    calls: list[int] = []

    def call(*args: Any) -> Any:
        calls.append(1)
        if number is not None:
            raise OSError(number, os.strerror(number))
        return real(*args)

    monkeypatch.setattr(os, name, call)
    return calls


def test_after_a_full_disk_writing_pauses_and_reading_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock()

    async def test() -> None:
        tier, _ = await opened(make_config(tmp_path), clock=clock)
        await save(tier, CHUNKS[0])
        with monkeypatch.context() as patch:
            calls = failing(patch, "pwritev", errno.ENOSPC)
            assert await save(tier, CHUNKS[1]) == Result(Outcome.REFUSED, ErrorKind.ENOSPC)
            assert tier.lookup(CHUNKS[1].key) is Presence.MISS
            for _ in range(5):
                assert await save(tier, CHUNKS[1]) == Result(Outcome.REFUSED)
            assert len(calls) == 1
            assert (await load(tier, CHUNKS[0]))[1] == value(CHUNKS[0])
            clock.now += 5
            assert (await save(tier, CHUNKS[1])).error is ErrorKind.ENOSPC
            clock.now += 5  # twice as long now
            assert await save(tier, CHUNKS[1]) == Result(Outcome.REFUSED)
            assert len(calls) == 2
        clock.now += 5
        assert (await save(tier, CHUNKS[1])).outcome is Outcome.DONE
        assert (await load(tier, CHUNKS[1]))[1] == value(CHUNKS[1])
        await tier.close()

    run(test)


@pytest.mark.parametrize("number", [errno.EIO, errno.EROFS])
def test_a_failed_write_leaves_nothing_visible_and_loses_no_slot(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    async def test() -> None:
        tier, _ = await opened(make_config(tmp_path, slots=2))
        await save(tier, CHUNKS[0])
        with monkeypatch.context() as patch:
            failing(patch, "pwritev", number)
            for _ in range(3):
                assert await save(tier, CHUNKS[1]) == Result(Outcome.FAILED, ErrorKind.EIO)
                assert tier.lookup(CHUNKS[1].key) is Presence.MISS
        for chunk in CHUNKS[1:3]:
            assert (await save(tier, chunk)).outcome is Outcome.DONE
        assert tier.usage().chunks == 2
        await tier.close()

    run(test)


def test_a_failed_read_forgets_the_chunk_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def test() -> None:
        tier, _ = await opened(make_config(tmp_path))
        await save(tier, CHUNKS[0])
        with monkeypatch.context() as patch:
            calls = failing(patch, "preadv", errno.EIO)
            assert (await load(tier, CHUNKS[0]))[0] == Result(Outcome.FAILED, ErrorKind.EIO)
            assert (await load(tier, CHUNKS[0]))[0] == Result(Outcome.MISS)
            assert len(calls) == 1
        await tier.close()
        tier, report = await opened(make_config(tmp_path))
        assert report.recovered_chunks == 0
        await tier.close()

    run(test)


def test_a_read_that_fails_for_want_of_memory_forgets_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def test() -> None:
        tier, _ = await opened(make_config(tmp_path))
        await save(tier, CHUNKS[0])
        with monkeypatch.context() as patch:
            failing(patch, "preadv", errno.ENOMEM)
            assert (await load(tier, CHUNKS[0]))[0].outcome is Outcome.FAILED
        assert (await load(tier, CHUNKS[0]))[1] == value(CHUNKS[0])
        await tier.close()

    run(test)


def test_a_bug_in_the_blocking_half_is_an_outcome_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: Any, **__: Any) -> Any:
        raise ZeroDivisionError

    async def test() -> None:
        tier, _ = await opened(make_config(tmp_path))
        await save(tier, CHUNKS[0])
        with monkeypatch.context() as patch:
            patch.setattr(Volume, "read", broken)
            patch.setattr(Volume, "write", broken)
            assert (await load(tier, CHUNKS[0]))[0] == Result(Outcome.FAILED, ErrorKind.WORKER)
            assert await save(tier, CHUNKS[1]) == Result(Outcome.FAILED, ErrorKind.WORKER)
        assert (await load(tier, CHUNKS[0]))[1] == value(CHUNKS[0])
        assert (await save(tier, CHUNKS[1])).outcome is Outcome.DONE
        await tier.close()

    run(test)


def test_one_log_line_a_kind_of_failure_and_ten_seconds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    clock = Clock()

    async def test() -> None:
        tier, _ = await opened(make_config(tmp_path), clock=clock)
        failing(monkeypatch, "pwritev", errno.EIO)
        for _ in range(20):
            await save(tier, CHUNKS[0])
        assert len(caplog.records) == 1
        clock.now += 10
        await save(tier, CHUNKS[0])
        assert len(caplog.records) == 2
        await tier.close()

    with caplog.at_level(logging.INFO):
        run(test)
    assert caplog.records[0].message == "disk: save failed: [Errno 5] Input/output error"


def test_the_table_is_written_after_the_slab_and_cleared_before_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    order: list[str] = []
    pwrite, pwritev = os.pwrite, os.pwritev

    def watch_pwrite(fd: int, data: bytes, offset: int) -> int:
        order.append("clear" if data == bytes(128) else "entry")
        return pwrite(fd, data, offset)

    def watch_pwritev(fd: int, data: list[memoryview], offset: int) -> int:
        order.append("record")
        return pwritev(fd, data, offset)

    async def test() -> None:
        tier, _ = await opened(make_config(tmp_path, slots=1))
        monkeypatch.setattr(os, "pwrite", watch_pwrite)
        monkeypatch.setattr(os, "pwritev", watch_pwritev)
        await save(tier, CHUNKS[0])
        assert order == ["record", "entry"]
        await save(tier, CHUNKS[1])
        assert order[2:] == ["clear", "record", "entry"]
        monkeypatch.undo()
        await tier.close()

    run(test)


def test_what_evict_removed_is_cleared_and_synced_before_it_returns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = make_config(tmp_path)

    async def test() -> None:
        tier, _ = await opened(config)
        for chunk in CHUNKS[:3]:
            await save(tier, chunk)
        synced: list[bytes] = []
        monkeypatch.setattr(os, "fdatasync", lambda fd: synced.append(table(config).read_bytes()))
        await tier.evict([CHUNKS[1].key])
        assert len(synced) == 1
        entries = [synced[0][entry_offset(slot) :][:128] for slot in range(3)]
        assert [any(entry) for entry in entries] == [True, False, True]
        await tier.clear()
        assert len(synced) == 2
        assert not any(synced[1][4096:])
        monkeypatch.undo()
        await tier.close()

    run(test)


@pytest.mark.parametrize("call", ["pwrite", "fdatasync"])
@pytest.mark.parametrize("how", ["evict", "clear"])
def test_if_the_table_cannot_forget_it_is_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str, how: str
) -> None:
    config = make_config(tmp_path)

    async def test() -> None:
        tier, _ = await opened(config)
        for chunk in CHUNKS[:2]:
            await save(tier, chunk)
        with monkeypatch.context() as patch:
            calls = failing(patch, call if how == "evict" else "fdatasync", errno.EIO)
            if how == "evict":
                assert await tier.evict([CHUNKS[0].key]) == 1
            else:
                assert await tier.clear() == 2
            assert len(calls) == 1
        assert (await load(tier, CHUNKS[0]))[1] is None
        # This run goes on, the next one begins empty.
        await save(tier, CHUNKS[2])
        assert (await load(tier, CHUNKS[2]))[1] == value(CHUNKS[2])
        await tier.close()
        tier, report = await opened(config)
        assert report.recovered_chunks == 0
        await tier.close()

    run(test)


def test_a_chunk_that_the_policy_evicted_does_not_come_back_after_an_evict(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = make_config(tmp_path, slots=1)

    async def test() -> None:
        tier, _ = await opened(config)
        await save(tier, CHUNKS[0])
        with monkeypatch.context() as patch:
            # Clearing its entry fails, so the write into its slot does not happen.
            failing(patch, "pwrite", errno.EIO)
            assert (await save(tier, CHUNKS[1])).outcome is Outcome.FAILED
        assert await tier.evict([CHUNKS[0].key]) == 0
        await tier.close()
        tier, report = await opened(config)
        assert report.recovered_chunks == 0
        await tier.close()

    run(test)


class Gate:
    """Holds `os.<name>` in its thread until `open` is set."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
        self.entered, self.open = threading.Event(), threading.Event()
        real: Callable[..., Any] = getattr(os, name)

        def call(*args: Any) -> Any:
            self.entered.set()
            assert self.open.wait(60)
            return real(*args)

        monkeypatch.setattr(os, name, call)

    async def until_entered(self) -> None:
        await asyncio.to_thread(self.entered.wait, 60)


def test_a_cancelled_load_ends_after_its_thread(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def test() -> None:
        tier, _ = await opened(make_config(tmp_path))
        await save(tier, CHUNKS[0])
        gate = Gate(monkeypatch, "preadv")
        parts = make_parts(LAYOUT)
        loading = asyncio.create_task(tier.load(CHUNKS[0], parts))
        await gate.until_entered()
        for _ in range(3):
            loading.cancel()
            await asyncio.sleep(0)
            assert not loading.done()
        gate.open.set()
        await asyncio.wait([loading])
        assert loading.cancelled()
        assert joined(parts) == value(CHUNKS[0])  # complete: nobody writes any more
        assert (await load(tier, CHUNKS[0]))[1] == value(CHUNKS[0])
        await tier.close()

    run(test)


def test_a_load_that_is_cancelled_in_the_queue_never_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def test() -> None:
        tier, _ = await opened(make_config(tmp_path, io_threads=1))
        for chunk in CHUNKS[:2]:
            await save(tier, chunk)
        gate = Gate(monkeypatch, "preadv")
        first = asyncio.create_task(load(tier, CHUNKS[0]))
        await gate.until_entered()
        parts = make_parts(LAYOUT)
        second = asyncio.create_task(tier.load(CHUNKS[1], parts))
        await asyncio.sleep(0)
        second.cancel()
        await asyncio.wait([second])
        assert second.cancelled()
        gate.open.set()
        assert (await first)[1] == value(CHUNKS[0])
        assert (await load(tier, CHUNKS[1]))[1] == value(CHUNKS[1])
        assert not any(joined(parts))
        await tier.close()

    run(test)


def test_a_cancelled_save_is_visible_or_not_but_never_half(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def test() -> None:
        tier, _ = await opened(make_config(tmp_path))
        gate = Gate(monkeypatch, "pwritev")
        saving = asyncio.create_task(save(tier, CHUNKS[0]))
        other = asyncio.create_task(save(tier, CHUNKS[0], version=1))
        await gate.until_entered()
        saving.cancel()
        await asyncio.sleep(0)
        assert tier.lookup(CHUNKS[0].key) is Presence.MISS
        gate.open.set()
        await asyncio.wait([saving, other])
        assert saving.cancelled()
        assert other.result() == Result(Outcome.DONE)
        assert (await load(tier, CHUNKS[0]))[1] == value(CHUNKS[0])
        await tier.close()

    run(test)


def test_even_a_loop_that_cancels_everything_waits_for_the_thread(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    parts = make_parts(LAYOUT)
    gates: list[Gate] = []

    async def test() -> None:
        tier, _ = await opened(make_config(tmp_path))
        await save(tier, CHUNKS[0])
        gates.append(Gate(monkeypatch, "preadv"))
        task = asyncio.create_task(tier.load(CHUNKS[0], parts))
        await gates[0].until_entered()
        threading.Timer(0.05, gates[0].open.set).start()
        del task  # asyncio.run cancels it

    asyncio.run(test())
    assert joined(parts) == value(CHUNKS[0])


def test_a_slot_is_not_reused_while_it_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def test() -> None:
        tier, _ = await opened(make_config(tmp_path, slots=1))
        await save(tier, CHUNKS[0])
        gate = Gate(monkeypatch, "preadv")
        loading = asyncio.create_task(load(tier, CHUNKS[0]))
        await gate.until_entered()
        assert await save(tier, CHUNKS[1]) == Result(Outcome.REFUSED)
        assert await tier.evict([CHUNKS[0].key]) == 1
        assert await save(tier, CHUNKS[1]) == Result(Outcome.REFUSED)
        gate.open.set()
        await loading
        assert (await save(tier, CHUNKS[1])).outcome is Outcome.DONE
        assert (await load(tier, CHUNKS[1]))[1] == value(CHUNKS[1])
        await tier.close()

    run(test)


@pytest.mark.parametrize("how", ["evict", "clear"])
def test_forgetting_waits_for_saves_in_flight(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    config = make_config(tmp_path)

    async def test() -> None:
        tier, _ = await opened(config)
        gate = Gate(monkeypatch, "pwritev")
        saving = asyncio.create_task(save(tier, CHUNKS[0]))
        await gate.until_entered()
        forgetting = asyncio.create_task(
            tier.evict([CHUNKS[0].key]) if how == "evict" else tier.clear()
        )
        await asyncio.sleep(0.01)
        assert not forgetting.done()
        gate.open.set()
        assert await forgetting == 0
        await saving
        assert tier.lookup(CHUNKS[0].key) is Presence.MISS
        assert (await load(tier, CHUNKS[0]))[0] == Result(Outcome.MISS)
        assert not any(table(config).read_bytes()[4096:])
        monkeypatch.undo()
        await save(tier, CHUNKS[0], version=1)
        assert (await load(tier, CHUNKS[0]))[1] == value(CHUNKS[0], 1)
        await tier.close()

    run(test)


def test_an_evict_does_not_disturb_a_save_into_a_slot_that_was_stale(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def test() -> None:
        tier, _ = await opened(make_config(tmp_path, slots=1))
        await save(tier, CHUNKS[0])
        gate = Gate(monkeypatch, "pwritev")
        saving = asyncio.create_task(save(tier, CHUNKS[1]))
        await gate.until_entered()
        assert await tier.evict([CHUNKS[0].key]) == 0
        gate.open.set()
        assert (await saving).outcome is Outcome.DONE
        assert (await load(tier, CHUNKS[1]))[1] == value(CHUNKS[1])
        await tier.close()

    run(test)


def test_while_everything_is_forgotten_nothing_is_saved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = make_config(tmp_path)

    async def test() -> None:
        tier, _ = await opened(config)
        await save(tier, CHUNKS[0])
        gate = Gate(monkeypatch, "ftruncate")
        clearing = asyncio.create_task(tier.clear())
        await gate.until_entered()
        assert await save(tier, CHUNKS[1]) == Result(Outcome.REFUSED)
        gate.open.set()
        assert await clearing == 1
        monkeypatch.undo()
        await save(tier, CHUNKS[1])
        assert (await load(tier, CHUNKS[1]))[1] == value(CHUNKS[1])
        await tier.close()
        tier, report = await opened(config)
        assert report.recovered_chunks == 1
        await tier.close()

    run(test)


def test_close_gives_up_on_a_call_that_hangs_and_keeps_the_lock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(tier_module, "CLOSE_TIMEOUT", 0.01)
    config = make_config(tmp_path)

    async def test() -> None:
        tier, _ = await opened(config)
        await save(tier, CHUNKS[0])
        gate = Gate(monkeypatch, "preadv")
        loading = asyncio.create_task(load(tier, CHUNKS[0]))
        await gate.until_entered()
        await tier.close()
        assert "leaving 1 calls that hang" in caplog.text
        with pytest.raises(Exception, match="in use by process"):
            await opened(config)
        gate.open.set()
        assert (await loading)[1] == value(CHUNKS[0])
        tier._volume.close(b"")  # what the end of the process does

    run(test)


def test_times_of_use_are_written_once_a_minute_and_at_the_end(tmp_path: Path) -> None:
    config, clock, wall = make_config(tmp_path), Clock(), [1000]
    used = config.path / f"{b'disk-test-space!'.hex()}-v1" / "used"

    async def test() -> None:
        tier, _ = await opened(config, clock=clock, wall_ns=lambda: wall[0])
        await save(tier, CHUNKS[0])
        wall[0] = 5000
        await tier.touch([CHUNKS[0].key, CHUNKS[9].key])
        assert used.stat().st_size == 0
        clock.now += 60
        await tier.touch([])
        assert int.from_bytes(used.read_bytes()[:8], "little") == 5000
        wall[0] = 10  # the wall clock was set back
        await tier.touch([CHUNKS[0].key])
        await tier.close()
        assert int.from_bytes(used.read_bytes()[:8], "little") == 5001

    run(test)


def test_used_bytes_are_those_of_whole_slots(tmp_path: Path) -> None:
    async def test() -> None:
        config = make_config(tmp_path, codec="lz4")
        tier, _ = await opened(config)
        for chunk in CHUNKS[:3]:
            await save(tier, chunk)
        usage = tier.usage()
        assert usage.used_bytes == 3 * SLOT_BYTES
        assert usage.capacity_bytes == config.capacity
        await tier.close()

    run(test)


def test_lz4_moves_fewer_bytes_and_reads_what_raw_wrote(tmp_path: Path) -> None:
    async def test() -> None:
        parts = [memoryview(bytes(range(64)) * 192) for _ in range(2)]
        tier, _ = await opened(make_config(tmp_path, codec="raw"))
        raw = await tier.save(CHUNKS[0], parts)
        assert raw.nbytes == SLOT_BYTES
        await tier.close()
        tier, _ = await opened(make_config(tmp_path, codec="lz4"))
        packed = await tier.save(CHUNKS[1], parts)
        assert packed.nbytes < SLOT_BYTES // 3
        await tier.save(CHUNKS[2], [memoryview(os.urandom(12288)) for _ in range(2)])
        await tier.close()
        tier, report = await opened(make_config(tmp_path, codec="raw"))
        assert report.recovered_chunks == 3
        for chunk, size in ((CHUNKS[0], raw.nbytes), (CHUNKS[1], packed.nbytes)):
            back = make_parts(LAYOUT)
            assert await tier.load(chunk, back) == Result(Outcome.DONE, nbytes=size)
            assert joined(back) == joined(parts)
        assert (await tier.load(CHUNKS[2], make_parts(LAYOUT))).nbytes == SLOT_BYTES
        await tier.close()

    run(test)


def test_an_index_that_does_not_fit_the_memory_leaves_nothing_held(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def too_much(*_: Any) -> Any:
        raise MemoryError

    config = make_config(tmp_path)

    async def test() -> None:
        with monkeypatch.context() as patch:
            tier = tier_module.DiskTier(config)
            patch.setattr(tier_module, "make_policy", too_much)
            with pytest.raises(TierError, match="no memory for an index of 40 chunks; lower"):
                await tier.open(b"disk-test-space!", LAYOUT)
        tier, _ = await opened(config)
        await tier.close()

    run(test)


@pytest.mark.parametrize("how", ["renamed", "deleted"])
def test_a_directory_that_vanishes_ends_nothing(tmp_path: Path, how: str) -> None:
    config = make_config(tmp_path)

    async def test() -> None:
        tier, _ = await opened(config)
        await save(tier, CHUNKS[0])
        if how == "renamed":
            config.path.rename(tmp_path / "elsewhere")
        else:
            shutil.rmtree(config.path)
        assert (await load(tier, CHUNKS[0]))[1] == value(CHUNKS[0])
        result = await save(tier, CHUNKS[1])
        assert result.outcome is Outcome.DONE
        assert (await load(tier, CHUNKS[1]))[1] == value(CHUNKS[1])
        assert await tier.evict([CHUNKS[0].key]) == 1
        await tier.close()
        tier, report = await opened(config)
        assert report.recovered_chunks == 0
        await tier.close()

    run(test)


def test_a_tier_that_was_never_opened_holds_nothing(tmp_path: Path) -> None:
    async def test() -> None:
        tier = tier_module.DiskTier(make_config(tmp_path))
        assert tier.lookup(CHUNKS[0].key) is Presence.MISS
        assert (await load(tier, CHUNKS[0]))[0] == Result(Outcome.MISS)
        parts = make_payload(CHUNKS[0], LAYOUT)
        assert await tier.save(CHUNKS[0], parts) == Result(Outcome.REFUSED)
        assert (await tier.evict([CHUNKS[0].key]), await tier.clear()) == (0, 0)
        assert tier.usage().chunks == 0
        await tier.close()

    run(test)


def test_no_thread_is_left_behind(tmp_path: Path) -> None:
    async def test() -> None:
        tier, _ = await opened(make_config(tmp_path))
        await asyncio.gather(*[save(tier, chunk) for chunk in CHUNKS[:10]])
        await tier.close()

    gc.collect()  # a test above leaves a tier unclosed on purpose
    run(test)
    for thread in threading.enumerate():
        if thread.name.startswith("tierkv-disk"):
            thread.join(60)
            assert not thread.is_alive()
