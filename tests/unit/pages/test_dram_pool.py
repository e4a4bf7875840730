# SPDX-License-Identifier: Apache-2.0
"""The pool's memory: who sees which bytes, how much there is, and what is left of it."""

from __future__ import annotations

import fcntl
import mmap
import multiprocessing
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from tierkv.errors import GeometryError, TierError
from tierkv.pages import pool as pool_module
from tierkv.pages.layout import SlotLayout
from tierkv.pages.pool import DramPool, PoolRegion, RegionHandle

LAYOUT = SlotLayout(chunk_tokens=64, block_tokens=16, block_bytes=3000, ranks=2)
STRIDE = 12288  # 4 blocks of 3,000 bytes, padded to 4 KiB


@pytest.fixture
def pool() -> Iterator[DramPool]:
    pool = DramPool.create(LAYOUT, 5 * 2 * STRIDE + STRIDE)
    yield pool
    pool.close()


def _taken(pool: DramPool) -> int:
    """Bytes of the machine's memory that the pool has taken."""
    return sum(os.stat(handle.path).st_blocks * 512 for handle in pool.handles)


def _open_files() -> list[str]:
    return sorted(os.listdir("/proc/self/fd"))


def test_a_pool_has_as_many_whole_slots_as_its_capacity_holds(pool: DramPool) -> None:
    assert pool.slots == 5
    assert [handle.size_bytes for handle in pool.handles] == [5 * STRIDE] * 2
    assert [os.stat(handle.path).st_size for handle in pool.handles] == [5 * STRIDE] * 2


@pytest.mark.parametrize("capacity", [0, -1, 2 * STRIDE - 1])
def test_a_capacity_below_one_slot_is_refused_and_says_what_is_needed(capacity: int) -> None:
    with pytest.raises(GeometryError, match=r"dram: capacity=.* at least 24576 bytes"):
        DramPool.create(LAYOUT, capacity)


def test_memory_that_the_system_cannot_give_is_a_tier_error_and_holds_no_descriptor() -> None:
    before = _open_files()
    for capacity in (1 << 60, 1 << 90):
        with pytest.raises(TierError, match="lower capacity"):
            DramPool.create(LAYOUT, capacity)
    assert _open_files() == before


def test_a_pool_of_which_one_rank_gets_no_memory_holds_none(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    before = _open_files()
    _fail_second_map(monkeypatch)
    with pytest.raises(TierError, match=r"no shared memory of 61440 bytes: .*ENOMEM"):
        DramPool.create(LAYOUT, 5 * 2 * STRIDE)
    assert _open_files() == before


def _fail_second_map(monkeypatch: pytest.MonkeyPatch) -> None:
    real = pool_module._map
    calls: list[int] = []

    def fail_second(fd: int, size: int) -> mmap.mmap:
        calls.append(fd)
        if len(calls) == 2:
            raise OSError(12, "ENOMEM")
        return real(fd, size)

    monkeypatch.setattr(pool_module, "_map", fail_second)


def test_every_byte_of_a_part_belongs_to_one_slot_and_one_rank(pool: DramPool) -> None:
    for slot in range(5):
        for rank, part in enumerate(pool.parts(slot)):
            assert part.nbytes == STRIDE
            assert not part.readonly
            part[:] = bytes([10 * rank + slot + 1]) * STRIDE
    for rank, handle in enumerate(pool.handles):
        whole = Path(handle.path).read_bytes()
        assert whole == b"".join(bytes([10 * rank + slot + 1]) * STRIDE for slot in range(5))


def test_parts_are_aligned_for_direct_io(pool: DramPool) -> None:
    for slot in range(5):
        for part in pool.parts(slot):
            assert np.frombuffer(part, np.uint8).ctypes.data % 4096 == 0


@pytest.mark.parametrize("slot", [-1, 5])
def test_a_slot_out_of_range_is_an_error_not_a_neighbour(pool: DramPool, slot: int) -> None:
    with pytest.raises(IndexError):
        pool.parts(slot)


def test_memory_is_taken_when_first_touched(pool: DramPool) -> None:
    assert _taken(pool) == 0
    pool.parts(3)[1][0] = 1
    assert 4096 <= _taken(pool) < 2 * 5 * STRIDE


def test_populate_gives_the_named_slots_memory_and_keeps_their_bytes(pool: DramPool) -> None:
    pool.parts(2)[1][:3] = b"abc"
    region = PoolRegion.attach(pool.handles[1])
    region.populate([2, 4, 2])
    assert _taken(pool) >= 2 * STRIDE
    assert bytes(region.array[2, :3]) == b"abc"
    assert not region.array[4].any()
    region.close()


class _Mapping:
    def __init__(self, error: OSError) -> None:
        self.calls: list[tuple[int, int, int]] = []
        self._error = error

    def madvise(self, *call: int) -> None:
        self.calls.append(call)  # type: ignore[arg-type]
        raise self._error

    def close(self) -> None: ...


@pytest.mark.parametrize("page", [4096, 65536])
def test_populate_asks_once_for_whole_pages_and_an_old_kernel_may_not_know_it(
    pool: DramPool, page: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mmap, "PAGESIZE", page)
    region = PoolRegion.attach(pool.handles[0])
    real, region._mapping = region._mapping, _Mapping(OSError(22, "EINVAL"))
    region.populate([1])
    region.populate([1])
    [(_, start, length)] = region._mapping.calls
    assert start % page == 0
    assert start <= STRIDE
    assert start + length == 2 * STRIDE
    region._mapping = real
    region.close()


def test_populate_without_memory_is_an_error_each_time(pool: DramPool) -> None:
    region = PoolRegion.attach(pool.handles[0])
    real, region._mapping = region._mapping, _Mapping(OSError(12, "ENOMEM"))
    for _ in range(2):
        with pytest.raises(OSError, match="ENOMEM"):
            region.populate([1])
    region._mapping = real
    region.close()


def test_a_region_is_one_rank_of_the_same_memory(pool: DramPool) -> None:
    regions = [PoolRegion.attach(pool.handles[rank]) for rank in (0, 1)]
    for rank, region in enumerate(regions):
        assert region.array.shape == (5, STRIDE)
        pool.parts(4)[rank][-1] = 7 + rank
        assert region.array[4, -1] == 7 + rank
        region.array[1, 0] = 20 + rank
        assert pool.parts(1)[rank][0] == 20 + rank
    assert not PoolRegion.attach(pool.handles[0]).array[[0, 2, 3]].any()
    for region in regions:
        region.close()


@pytest.mark.parametrize("slots", [6, 4, 0, -5])
def test_a_handle_of_other_sizes_than_its_region_is_refused(pool: DramPool, slots: int) -> None:
    before = _open_files()
    with pytest.raises(GeometryError, match=r"is not the region .*; restart the engine"):
        PoolRegion.attach(replace(pool.handles[1], slots=slots))
    assert _open_files() == before


def test_a_handle_of_an_empty_file_is_refused() -> None:
    fd = os.memfd_create("empty", os.MFD_ALLOW_SEALING)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
    with pytest.raises(GeometryError, match="is not the region of 0 bytes"):
        PoolRegion.attach(RegionHandle(f"/proc/self/fd/{fd}", 0, LAYOUT))
    os.close(fd)


def test_a_file_that_is_no_sealed_pool_of_that_size_is_refused(
    pool: DramPool, tmp_path: Path
) -> None:
    other = DramPool.create(LAYOUT, 2 * 2 * STRIDE)
    plain = tmp_path / "file"
    plain.write_bytes(bytes(pool.handles[0].size_bytes))
    for path in (other.handles[0].path, str(plain)):
        with pytest.raises(GeometryError, match="is not the region"):
            PoolRegion.attach(replace(pool.handles[0], path=path))
    other.close()


def test_nobody_can_cut_the_memory_short_under_its_readers(pool: DramPool) -> None:
    fd = os.open(pool.handles[0].path, os.O_RDWR)
    with pytest.raises(PermissionError):
        os.ftruncate(fd, 0)
    os.close(fd)


def test_a_pool_that_was_closed_cannot_be_attached_or_used(pool: DramPool) -> None:
    pool.close()
    pool.close()
    with pytest.raises(
        TierError, match=r"cannot map /proc/\d+/fd/\d+: No such file or directory; "
    ):
        PoolRegion.attach(pool.handles[0])
    with pytest.raises(IndexError, match="slot 0 of a closed pool"):
        pool.parts(0)


def test_a_region_that_was_closed_cannot_be_used(pool: DramPool) -> None:
    region = PoolRegion.attach(pool.handles[0])
    region.populate([0])
    region.close()
    region.close()
    assert region.array.shape == (0, STRIDE)
    for slot in (0, 1):
        with pytest.raises(IndexError):
            region.populate([slot])


def test_a_second_close_closes_no_descriptor_of_somebody_else() -> None:
    pool = DramPool.create(LAYOUT, 2 * STRIDE)
    numbers = [int(handle.path.rpartition("/")[2]) for handle in pool.handles]
    pool.close()
    taken = [os.open("/dev/null", os.O_RDONLY) for _ in numbers]
    assert set(taken) & set(numbers)
    pool.close()
    for fd in taken:
        os.close(fd)


def test_an_attached_region_holds_one_descriptor_and_a_made_one_two(pool: DramPool) -> None:
    before = len(_open_files())
    made = PoolRegion.create(LAYOUT, 2 * STRIDE)
    assert len(_open_files()) == before + 2  # its path's, and the mapping's own
    attached = PoolRegion.attach(pool.handles[0])
    assert len(_open_files()) == before + 3
    made.close()
    attached.close()
    assert len(_open_files()) == before


def test_closing_leaves_views_in_flight_usable_and_memory_goes_with_the_last_of_them() -> None:
    before = _open_files()
    pool = DramPool.create(LAYOUT, 2 * STRIDE)
    region = PoolRegion.attach(pool.handles[1])
    part, array = pool.parts(0)[1], region.array
    pool.close()
    region.close()
    array[0, 0] = 9
    assert part[0] == 9
    assert region.array.size == 0
    part.release()
    del array  # but neither the pool nor the region
    assert _open_files() == before


def _write_as_rank(handle: RegionHandle, rank: int) -> None:
    region = PoolRegion.attach(handle)
    region.array[:] = np.arange(handle.slots, dtype=np.uint8)[:, None] + 10 * rank
    os.kill(os.getpid(), signal.SIGKILL)


def test_workers_in_other_processes_write_their_rank_and_may_die_of_kill_9(
    pool: DramPool,
) -> None:
    spawn = multiprocessing.get_context("spawn")  # hands the handle over by pickle
    workers = [spawn.Process(target=_write_as_rank, args=(pool.handles[n], n)) for n in (0, 1)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(60)
        assert worker.exitcode == -signal.SIGKILL
        worker.close()
    for slot in range(5):
        for rank, part in enumerate(pool.parts(slot)):
            assert bytes(part) == bytes([slot + 10 * rank]) * STRIDE


OWNER = """
import sys
from tierkv.pages.layout import SlotLayout
from tierkv.pages.pool import DramPool
pool = DramPool.create(SlotLayout(64, 16, 3000, 2), 5 * 2 * 12288)
for slot in range(5):
    for part in pool.parts(slot):
        part[:] = bytes([slot + 1]) * 12288
print(pool.handles[0].path, flush=True)
sys.stdin.read()
"""


def test_kill_9_of_the_owner_leaves_its_workers_their_bytes_and_nothing_else() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", OWNER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as owner:
        assert owner.stdout is not None
        path = owner.stdout.readline().strip()
        handle = RegionHandle(path, 5, LAYOUT)
        region = PoolRegion.attach(handle)
        owner.kill()
        assert owner.wait(60) == -signal.SIGKILL
    assert [int(region.array[slot, -1]) for slot in range(5)] == [1, 2, 3, 4, 5]
    with pytest.raises(TierError, match="cannot map"):
        PoolRegion.attach(handle)
    region.close()
    assert not [name for name in os.listdir("/dev/shm") if "tierkv" in name]


@pytest.fixture
def regions() -> Iterator[list[PoolRegion]]:
    """As workers of two ranks make them."""
    regions = [PoolRegion.create(LAYOUT, 5 * 2 * STRIDE + STRIDE) for _ in range(2)]
    yield regions
    for region in regions:
        region.close()


def test_a_pool_over_the_workers_regions_sees_each_ranks_bytes(regions: list[PoolRegion]) -> None:
    for rank, region in enumerate(regions):
        assert region.array.shape == (5, STRIDE)
        region.array[:] = np.arange(5, dtype=np.uint8)[:, None] + 10 * rank
    pool = DramPool.attach([region.handle for region in regions])
    assert (pool.slots, pool.layout) == (5, LAYOUT)
    for slot in range(5):
        for rank, part in enumerate(pool.parts(slot)):
            assert bytes(part) == bytes([slot + 10 * rank]) * STRIDE
    pool.parts(3)[1][7] = 99
    assert regions[1].array[3].tolist().count(99) == 1
    assert regions[1].array[3, 7] == 99
    assert not (regions[0].array == 99).any()
    pool.close()
    assert regions[1].array[3, 7] == 99


def test_a_workers_region_holds_its_memory_alone_and_takes_it_when_touched(
    regions: list[PoolRegion],
) -> None:
    assert os.stat(regions[0].handle.path).st_size == 5 * STRIDE
    assert os.stat(regions[0].handle.path).st_blocks == 0
    regions[0].populate([1])
    assert os.stat(regions[0].handle.path).st_blocks * 512 >= STRIDE
    assert os.stat(regions[1].handle.path).st_blocks == 0


def test_of_ranks_with_different_numbers_of_slots_the_least_counts(
    regions: list[PoolRegion],
) -> None:
    smaller = PoolRegion.create(LAYOUT, 3 * 2 * STRIDE)
    for pair in ([regions[0], smaller], [smaller, regions[1]]):
        for rank, region in enumerate(pair):
            region.array[:] = np.arange(region.slots, dtype=np.uint8)[:, None] + 10 * rank
        pool = DramPool.attach([region.handle for region in pair])
        assert pool.slots == 3
        for slot in range(3):
            for rank, part in enumerate(pool.parts(slot)):
                assert bytes(part) == bytes([slot + 10 * rank]) * STRIDE
        with pytest.raises(IndexError, match="slot 3 of 3"):
            pool.parts(3)
        pool.close()
    smaller.close()


def test_regions_that_do_not_make_a_pool_are_refused_and_none_is_held(
    regions: list[PoolRegion],
) -> None:
    first, second = (region.handle for region in regions)
    other = PoolRegion.create(replace(LAYOUT, block_tokens=32, block_bytes=6000), 5 * 2 * STRIDE)
    before = _open_files()
    for handles in (
        [],
        [first],
        [first, second, second],
        [first, first],  # two ranks over the same bytes
        [first, other.handle],
    ):
        with pytest.raises(GeometryError, match="do not make a pool"):
            DramPool.attach(handles)
        assert _open_files() == before
    other.close()


def _gone(regions: list[PoolRegion], patch: pytest.MonkeyPatch) -> type[Exception]:
    regions[1].close()
    return TierError


def _another_size(regions: list[PoolRegion], patch: pytest.MonkeyPatch) -> type[Exception]:
    regions[1].handle = replace(regions[1].handle, slots=4)
    return GeometryError


def _no_address_space(regions: list[PoolRegion], patch: pytest.MonkeyPatch) -> type[Exception]:
    _fail_second_map(patch)
    return TierError


def _no_answer(regions: list[PoolRegion], patch: pytest.MonkeyPatch) -> type[Exception]:
    real = os.fstat
    asked: list[int] = []

    def fail_second(fd: int) -> os.stat_result:
        asked.append(fd)
        if len(asked) == 2:
            raise OSError(5, "EIO")
        return real(fd)

    patch.setattr(pool_module.os, "fstat", fail_second)
    return TierError


@pytest.mark.parametrize("fault", [_gone, _another_size, _no_address_space, _no_answer])
def test_a_pool_that_cannot_attach_all_regions_holds_none(
    regions: list[PoolRegion],
    fault: Callable[[list[PoolRegion], pytest.MonkeyPatch], type[Exception]],
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        expected = fault(regions, patch)
        before = _open_files()
        with pytest.raises(expected, match=regions[1].handle.path):
            DramPool.attach([region.handle for region in regions])
        assert _open_files() == before


def test_pool_and_layout_import_no_torch() -> None:
    code = "import sys, tierkv.pages.pool, tierkv.pages.layout; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
