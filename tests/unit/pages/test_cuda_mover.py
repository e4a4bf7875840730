# SPDX-License-Identifier: Apache-2.0
"""The CUDA mover on a real GPU: bytes, order against queued work, pinning."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch

from tests.unit.pages.engine_kv import EngineKV, Shape
from tierkv.pages import cuda_mover
from tierkv.pages.cuda_mover import CudaMover
from tierkv.pages.geometry import PageTable
from tierkv.pages.pool import DramPool, PoolRegion

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU; none is here"),
]

SLOTS, CHUNK_BLOCKS = 4, 3
LONG = 1_000_000_000
"""Cycles that a stream is kept busy for, about half a second."""


class Gpu:
    """An engine's KV on the GPU, a pool and a mover."""

    def __init__(self, shape: Shape) -> None:
        self.kv = EngineKV(shape, "cuda")
        self.kv.fill(self.kv.all_blocks())
        layout = shape.slot_layout(CHUNK_BLOCKS)
        self.pool = DramPool.create(layout, SLOTS * layout.slot_bytes)
        self.region = PoolRegion.attach(self.pool.handles[0])
        self.mover = CudaMover(PageTable.from_layers(self.kv.views), self.region)

    def place(self, slot: int, index: int) -> bytes:
        size = self.kv.shape.block_bytes
        return bytes(self.pool.parts(slot)[0][index * size : (index + 1) * size])

    def write(self, block: int, salt: int) -> None:
        """Queue a write of a block on the compute stream."""
        page = self.kv.shape.page
        content = np.frombuffer(self.kv.block(block, salt), np.int8).copy()
        pages = torch.from_numpy(content).to("cuda").view(-1, page)
        for view, new in zip(self.kv.views, pages, strict=True):
            view[block].copy_(new)

    def done(self) -> list[tuple[int, bool]]:
        torch.cuda.synchronize()
        return sorted((finished.job_id, finished.ok) for finished in self.mover.poll())


@pytest.fixture
def gpu() -> Iterator[Callable[[Shape], Gpu]]:
    opened: list[Gpu] = []

    def make(shape: Shape) -> Gpu:
        opened.append(Gpu(shape))
        return opened[-1]

    yield make
    for one in opened:
        one.mover.close()
        one.region.close()
        one.pool.close()


def _ops(*ops: tuple[int, int, int]) -> np.ndarray:
    return np.array(ops, dtype=np.int32).reshape(-1, 3)


@pytest.mark.parametrize("direct_bytes", [1, 1 << 20])
@pytest.mark.parametrize("staging_bytes", [1, 64 << 20])
@pytest.mark.parametrize(
    "shape",
    [
        Shape("LB", page=40),
        Shape("LB", page=41, pad=2, start=1),
        Shape("BL", page=16),
        Shape("BL", page=9000, pad=8),
    ],
    ids=str,
)
def test_blocks_are_saved_and_come_back_and_nothing_else_changes(
    gpu: Callable[[Shape], Gpu],
    shape: Shape,
    staging_bytes: int,
    direct_bytes: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(cuda_mover, "STAGING_BYTES", staging_bytes)
    monkeypatch.setattr(cuda_mover, "DIRECT_BYTES", direct_bytes)
    one = gpu(shape)
    saved = {(2, 0): 5, (2, 1): 6, (2, 2): 5, (0, 1): 1}
    one.mover.save(1, _ops(*((*place, block) for place, block in saved.items())))
    assert one.done() == [(1, True)]
    for slot in range(SLOTS):
        for index in range(CHUNK_BLOCKS):
            block = saved.get((slot, index))
            expected = bytes(shape.block_bytes) if block is None else one.kv.block(block)
            assert one.place(slot, index) == expected, (slot, index)
    one.kv.fill(one.kv.all_blocks(salt=99))
    one.mover.load(2, _ops((2, 1, 0), (2, 2, 7), (0, 1, 3)))
    assert one.done() == [(2, True)]
    loaded = {0: one.kv.block(6), 7: one.kv.block(5), 3: one.kv.block(1)}
    expected_image = one.kv.image(one.kv.all_blocks(salt=99) | loaded)
    assert one.kv.bytes().tobytes() == expected_image.tobytes()


def test_a_save_reads_what_was_queued_before_it_and_a_fence_keeps_it(
    gpu: Callable[[Shape], Gpu],
) -> None:
    one = gpu(Shape(page=64))
    torch.cuda._sleep(LONG)
    one.write(5, salt=1)
    one.mover.save(1, _ops((1, 0, 5)))
    assert one.mover.poll() == []
    # The copy itself is kept waiting, so that only the fence can hold the next write back.
    with torch.cuda.stream(one.mover._save.stream):
        torch.cuda._sleep(LONG)
    one.mover.save(2, _ops((1, 1, 5)))
    one.mover.fence([2])
    one.write(5, salt=2)
    assert one.done() == [(1, True), (2, True)]
    assert one.place(1, 0) == one.kv.block(5, salt=1)
    assert one.place(1, 1) == one.kv.block(5, salt=1)


def test_a_load_writes_after_what_was_queued_before_it(gpu: Callable[[Shape], Gpu]) -> None:
    one = gpu(Shape(page=64))
    one.pool.parts(3)[0][:192] = bytes(range(192))
    torch.cuda._sleep(LONG)
    one.write(5, salt=1)
    one.mover.load(1, _ops((3, 0, 5)))
    assert one.done() == [(1, True)]
    expected = one.kv.all_blocks() | {5: bytes(range(192))}
    assert one.kv.bytes().tobytes() == one.kv.image(expected).tobytes()


def test_a_load_does_not_wait_for_a_save(gpu: Callable[[Shape], Gpu]) -> None:
    one = gpu(Shape(page=64))
    with torch.cuda.stream(one.mover._save.stream):
        torch.cuda._sleep(LONG)
    one.mover.save(1, _ops((1, 0, 5)))
    one.mover.load(2, _ops((3, 0, 4)))
    one.mover._load.stream.synchronize()
    assert [finished.job_id for finished in one.mover.poll()] == [2]
    assert one.done() == [(1, True)]


def test_an_operation_out_of_range_fails_its_job_alone(gpu: Callable[[Shape], Gpu]) -> None:
    one = gpu(Shape(page=64))
    one.mover.load(1, _ops((0, 0, 2), (0, 0, 8)))
    one.mover.save(2, _ops((1, 0, 5)))
    assert one.done() == [(1, False), (2, True)]
    assert one.kv.bytes().tobytes() == one.kv.image(one.kv.all_blocks()).tobytes()


def test_memory_that_cannot_be_pinned_is_copied_all_the_same(
    gpu: Callable[[Shape], Gpu], caplog: pytest.LogCaptureFixture
) -> None:
    one = gpu(Shape(page=64))
    with caplog.at_level(logging.WARNING):
        second = CudaMover(PageTable.from_layers(one.kv.views), one.region)  # pinned already
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    torch.full((1,), 1.0, device="cuda")  # raises if the error of pinning was left behind
    second.save(1, _ops((2, 0, 6)))
    torch.cuda.synchronize()
    assert [finished.ok for finished in second.poll()] == [True]
    assert one.place(2, 0) == one.kv.block(6)
    second.close()


def test_close_gives_pinned_memory_back(gpu: Callable[[Shape], Gpu]) -> None:
    one = gpu(Shape(page=64))
    address, size = one.region.array.ctypes.data, one.region.array.nbytes
    one.mover.close()
    cudart = torch.cuda.cudart()
    assert int(cudart.cudaHostRegister(address, size, 0)) == 0
    assert int(cudart.cudaHostUnregister(address)) == 0
