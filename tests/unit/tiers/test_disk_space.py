# SPDX-License-Identifier: Apache-2.0
"""Capacity is exact, older namespaces give way first, and the floor of free space is kept."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from tests.unit.tiers.disk_kit import (
    CHUNKS,
    FOLDER,
    LAYOUT,
    SLOT_BYTES,
    filled,
    load,
    make_config,
    opened,
    run,
    save,
    slab,
    value,
)
from tierkv.errors import ErrorKind, TierError
from tierkv.testing.samples import make_chunks
from tierkv.tiers.base import Outcome
from tierkv.tiers.disk import space
from tierkv.tiers.disk.directory import Directory

MANY = make_chunks(200, LAYOUT)


def allocated(path: Path) -> int:
    """Bytes that the file system has given to the directory, as `du` counts them."""
    paths = [path, *path.rglob("*")]
    return sum(p.lstat().st_blocks * 512 for p in paths if p.exists())


@pytest.fixture
def small_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(space, "STEP_BYTES", 3 * SLOT_BYTES)


@pytest.mark.usefixtures("small_steps")
@pytest.mark.parametrize("slots", [1, 2, 7, 23])
@pytest.mark.parametrize("codec", ["raw", "lz4"])
def test_no_byte_is_allocated_above_the_capacity(tmp_path: Path, slots: int, codec: str) -> None:
    config = make_config(tmp_path, slots=slots, codec=codec)

    async def test() -> None:
        tier, _ = await opened(config)
        for number, chunk in enumerate(MANY[: 4 * slots]):
            assert (await save(tier, chunk)).outcome is Outcome.DONE
            assert allocated(config.path) <= config.capacity
            assert tier.usage().chunks == min(number + 1, slots)
            if number % 5 == 4:
                await tier.touch([chunk.key])
        await tier.close()
        assert allocated(config.path) <= config.capacity

    run(test)


def test_a_capacity_below_one_chunk_is_refused_with_the_least(tmp_path: Path) -> None:
    config = make_config(tmp_path, slots=1)

    async def test() -> None:
        with pytest.raises(TierError, match=r"less than one chunk takes; set it to \d+KiB or more"):
            await opened(config.model_copy(update={"capacity": config.capacity - 1}))
        tier, _ = await opened(config)
        assert (await save(tier, CHUNKS[0])).outcome is Outcome.DONE
        await tier.close()

    run(test)


@pytest.mark.usefixtures("small_steps")
def test_the_slab_grows_with_use(tmp_path: Path) -> None:
    config = make_config(tmp_path, slots=20)

    async def test() -> None:
        tier, _ = await opened(config)
        sizes = []
        for chunk in CHUNKS[:7]:
            await save(tier, chunk)
            sizes.append((slab(config).stat().st_size - 4096) // SLOT_BYTES)
        await tier.close()
        assert sizes == [3, 3, 3, 6, 6, 6, 9]

    run(test)


@pytest.mark.usefixtures("small_steps")
def test_the_least_recently_used_namespace_gives_way_only_when_room_is_needed(
    tmp_path: Path,
) -> None:
    config = make_config(tmp_path, slots=24)
    names = [b"namespace-%06d" % n for n in range(3)]

    async def test() -> None:
        for time, namespace in enumerate(names):
            tier, _ = await opened(config, namespace)
            for chunk in CHUNKS[:5]:
                await save(tier, chunk)
            await tier.close()
            for file in (config.path / f"{namespace.hex()}-v1").iterdir():
                os.utime(file, (1000 + time, 1000 + time))
        # The first is opened once more: now the second is the oldest.
        tier, report = await opened(config, names[0])
        assert report.recovered_chunks == 5
        await tier.close()

        def left() -> list[bool]:
            return [(config.path / f"{name.hex()}-v1" / "slab").exists() for name in names]

        tier, _ = await opened(config)
        for number, chunk in enumerate(MANY[:60]):
            assert (await save(tier, chunk)).outcome is Outcome.DONE
            assert allocated(config.path) <= config.capacity
            if number == 1:
                assert left() == [True, True, True]
            elif number == 6:
                assert left() == [True, False, True]
        assert left() == [False, False, False]
        assert tier.usage().chunks == 24
        await tier.close()

    run(test)


def test_files_of_others_are_neither_counted_nor_removed(tmp_path: Path) -> None:
    config = make_config(tmp_path, slots=4)
    filled(config, 4)
    foreign = [
        config.path / "notes.txt",
        config.path / "engine-2" / "slab",
        config.path / ("0" * 32) / "slab",
        config.path / ("0" * 32 + "-v1") / "letter",
    ]
    for path in foreign:
        path.parent.mkdir(exist_ok=True, mode=0o700)
        path.write_bytes(bytes(1 << 20))

    async def test() -> None:
        tier, _ = await opened(config, b"another-test-ns!")
        for chunk in CHUNKS[:8]:
            assert (await save(tier, chunk)).outcome is Outcome.DONE
        assert tier.usage().chunks == 4
        await tier.close()

    run(test)
    assert not slab(config).exists()
    assert all(path.stat().st_size == 1 << 20 for path in foreign)


@pytest.mark.usefixtures("small_steps")
def test_a_slab_of_the_future_counts_and_gives_way_last(tmp_path: Path) -> None:
    config = make_config(tmp_path, slots=8)
    filled(config, 3)
    future = config.path / FOLDER.replace("-v1", "-v2")
    (config.path / FOLDER).rename(future)
    taken = allocated(future)

    async def test() -> None:
        directory = Directory.open(config.path, "disk")
        assert directory.allocated_bytes() == allocated(config.path)
        directory.close()
        tier, _ = await opened(config)
        fits = (config.capacity - taken - 65536) // SLOT_BYTES
        for chunk in CHUNKS[:fits]:
            await save(tier, chunk)
        assert (future / "slab").exists()
        for chunk in CHUNKS[:9]:
            await save(tier, chunk)
            assert allocated(config.path) <= config.capacity
        assert not future.exists()
        assert tier.usage().chunks == 8
        await tier.close()

    run(test)


def test_a_lowered_capacity_removes_older_namespaces_at_once(tmp_path: Path) -> None:
    filled(make_config(tmp_path, slots=10), 10)
    config = make_config(tmp_path, slots=3)

    async def test() -> None:
        tier, report = await opened(config, b"another-test-ns!")
        assert [note for note in report.notes if "removed: over the capacity" in note]
        assert allocated(config.path) <= config.capacity
        await tier.close()

    run(test)


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def free(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """What the file system says it has left: set `free[0]`."""
    left = [1 << 40]
    monkeypatch.setattr(Directory, "free_bytes", lambda self: left[0])
    return left


def test_the_slab_does_not_grow_below_the_floor(tmp_path: Path, free: list[int]) -> None:
    config = make_config(tmp_path, slots=20, min_free=1 << 20)
    free[0] = (1 << 20) + 3 * SLOT_BYTES + 1000

    async def test() -> None:
        tier, _ = await opened(config)
        for chunk in CHUNKS[:3]:
            assert (await save(tier, chunk)).outcome is Outcome.DONE
        free[0] = (1 << 20) + 1000
        for chunk in CHUNKS[3:9]:  # in place of older ones
            assert (await save(tier, chunk)).outcome is Outcome.DONE
        assert tier.usage().chunks == 3
        assert slab(config).stat().st_size == 4096 + 3 * SLOT_BYTES
        await tier.close()

    run(test)


def test_without_room_for_a_single_slot_saves_are_refused_for_want_of_space(
    tmp_path: Path, free: list[int]
) -> None:
    config, clock = make_config(tmp_path, min_free=1 << 20), Clock()
    free[0] = 1 << 20

    async def test() -> None:
        tier, _ = await opened(config, clock=clock)
        result = await save(tier, CHUNKS[0])
        assert (result.outcome, result.error) == (Outcome.REFUSED, ErrorKind.ENOSPC)
        free[0] = 1 << 30
        assert (await save(tier, CHUNKS[0])).outcome is Outcome.REFUSED
        clock.now += 6
        assert (await save(tier, CHUNKS[0])).outcome is Outcome.DONE
        await tier.close()

    run(test)


def test_slots_are_given_back_when_others_fill_the_file_system(
    tmp_path: Path, free: list[int]
) -> None:
    config, clock = make_config(tmp_path, slots=10, min_free=1 << 20), Clock()

    async def test() -> None:
        tier, _ = await opened(config, clock=clock)
        for chunk in CHUNKS[:10]:
            await save(tier, chunk)
        free[0] = (1 << 20) - 3 * SLOT_BYTES
        clock.now += 2
        await save(tier, CHUNKS[10])
        assert slab(config).stat().st_size == 4096 + 7 * SLOT_BYTES
        assert tier.usage().chunks == 7
        held = [n for n in range(11) if (await load(tier, CHUNKS[n]))[1] == value(CHUNKS[n])]
        assert len(held) == 7
        assert 10 in held
        # And taken again when there is room.
        free[0] = 1 << 40
        clock.now += 100
        for chunk in CHUNKS[11:17]:
            assert (await save(tier, chunk)).outcome is Outcome.DONE
        assert tier.usage().chunks == 10
        await tier.close()
        tier, report = await opened(config)
        assert report.recovered_chunks == 10
        await tier.close()

    run(test)


def test_older_namespaces_give_way_before_own_slots_for_the_floor(
    tmp_path: Path, free: list[int]
) -> None:
    config, clock = make_config(tmp_path, slots=20, min_free=1 << 20), Clock()
    filled(config, 5)

    async def test() -> None:
        tier, _ = await opened(config, b"another-test-ns!", clock=clock)
        await save(tier, CHUNKS[0])
        free[0] = 0
        clock.now += 2
        # Told again and again that nothing is free, it gives everything.
        assert (await save(tier, CHUNKS[1])).outcome is Outcome.REFUSED
        assert not slab(config).exists()
        assert tier.usage().chunks == 0
        await tier.close()

    run(test)


def test_a_failed_preallocation_gives_back_its_part_and_smaller_steps_are_tried(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = make_config(tmp_path, slots=16)
    fallocate = os.posix_fallocate
    tried: list[int] = []

    def full(fd: int, offset: int, length: int) -> None:
        if length >= SLOT_BYTES:
            tried.append(length // SLOT_BYTES)
            if length > 2 * SLOT_BYTES:
                fallocate(fd, offset, length // 2)
                raise OSError(errno.ENOSPC, "No space left on device")
        fallocate(fd, offset, length)

    monkeypatch.setattr(os, "posix_fallocate", full)

    async def test() -> None:
        tier, _ = await opened(config)
        assert (await save(tier, CHUNKS[0])).outcome is Outcome.DONE
        assert tried == [16, 8, 4, 2]
        assert slab(config).stat().st_size == 4096 + 2 * SLOT_BYTES
        assert (await load(tier, CHUNKS[0]))[1] == value(CHUNKS[0])
        await tier.close()

    run(test)
