# SPDX-License-Identifier: Apache-2.0
"""That the CUDA mover's events force the right order, whatever order streams run in otherwise.

Runs without a GPU on `fake_cuda`. What a real device adds (copies, pinning, kernels) is in
`test_cuda_mover.py`.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch

from tests.unit.pages.engine_kv import EngineKV, Shape
from tests.unit.pages.fake_cuda import FakeCuda, FakePages
from tierkv.errors import TierError
from tierkv.pages import cuda_mover
from tierkv.pages.cuda_mover import CudaMover
from tierkv.pages.geometry import PageTable
from tierkv.pages.pool import DramPool, PoolRegion

SHAPE = Shape("LB", layers=3, blocks=8, page=40)
SLOTS, CHUNK_BLOCKS = 4, 3
SEEDS = range(60)


class Device:
    """A fake device with an engine's KV on it, a pool and a mover."""

    def __init__(
        self,
        seed: int,
        patch: pytest.MonkeyPatch,
        direct_bytes: int = 1 << 20,
        register_error: int = 0,
    ) -> None:
        self.seed = seed
        self.cuda = FakeCuda(seed)
        self.cuda.register_error = register_error
        patch.setattr(cuda_mover, "cuda", self.cuda)
        patch.setattr(cuda_mover, "DevicePages", lambda table: FakePages(self.cuda, table))
        patch.setattr(cuda_mover, "DIRECT_BYTES", direct_bytes)
        patch.setattr(cuda_mover, "STAGING_BYTES", 2 * SHAPE.block_bytes)  # two blocks a batch
        patch.setattr(cuda_mover._Lane, "_transfer", self._transfer())
        self.kv = EngineKV(SHAPE)
        self.kv.fill(self.kv.all_blocks())
        layout = SHAPE.slot_layout(CHUNK_BLOCKS)
        self.pool = DramPool.create(layout, SLOTS * layout.slot_bytes)
        self.region = PoolRegion.attach(self.pool.handles[0])
        self.mover = CudaMover(PageTable.from_layers(self.kv.views), self.region)

    def _transfer(self) -> Callable[..., None]:
        def transfer(lane: object, on_device: torch.Tensor, on_host: torch.Tensor) -> None:
            assert on_device.shape == on_host.shape
            assert on_device.is_contiguous()
            assert on_host.is_contiguous()
            if lane.direction == "d2h":  # type: ignore[attr-defined]
                self.cuda.launch(lambda: on_host.copy_(on_device))
            else:
                self.cuda.launch(lambda: on_device.copy_(on_host))

        return transfer

    def write(self, block: int, salt: int) -> None:
        """Queue what a forward does: write a block on the compute stream, in two halves."""
        for view, layer in zip(self.kv.views, range(SHAPE.layers), strict=True):
            content = self.kv.block(block, salt)[layer * 40 : (layer + 1) * 40]
            page = torch.frombuffer(bytearray(content), dtype=torch.int8)
            self.cuda.launch(lambda view=view, page=page: view[block].copy_(page))

    def place(self, slot: int, index: int) -> bytes:
        return bytes(self.pool.parts(slot)[0][index * 120 : (index + 1) * 120])

    def block(self, block: int) -> bytes:
        return b"".join(view[block].numpy().tobytes() for view in self.kv.views)

    def close(self) -> None:
        self.mover.close()
        assert self.cuda.registered == []
        self.region.close()
        self.pool.close()


@pytest.fixture(params=["staged", "direct"])
def devices(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Iterator[Device]]:
    opened: list[Device] = []

    def each_seed() -> Iterator[Device]:
        for seed in SEEDS:
            print("seed", seed)
            opened.append(Device(seed, monkeypatch, 1 << 20 if request.param == "staged" else 1))
            yield opened[-1]
            opened.pop().close()

    yield each_seed()
    for device in opened:
        device.close()


def _ops(*ops: tuple[int, int, int]) -> np.ndarray:
    return np.array(ops, dtype=np.int32).reshape(-1, 3)


def test_a_save_has_what_was_queued_before_it_and_a_fence_keeps_out_what_comes_after(
    devices: Iterator[Device],
) -> None:
    for device in devices:
        device.write(5, salt=1)
        device.mover.save(1, _ops((2, 0, 5), (2, 1, 4), (2, 2, 3), (0, 0, 5)))
        device.mover.fence([1])
        device.write(5, salt=2)
        device.cuda.run()
        assert device.place(2, 0) == device.kv.block(5, salt=1), device.seed
        assert device.place(0, 0) == device.kv.block(5, salt=1), device.seed
        assert device.place(2, 1) == device.kv.block(4)
        assert device.place(2, 2) == device.kv.block(3)
        assert device.block(5) == device.kv.block(5, salt=2)


def test_without_a_fence_for_its_job_the_engine_goes_on_at_once(devices: Iterator[Device]) -> None:
    overtaken = 0
    for device in devices:
        device.mover.save(1, _ops((2, 0, 5)))
        device.mover.fence([2])
        device.write(5, salt=2)
        device.cuda.run()
        overtaken += device.place(2, 0) != device.kv.block(5)
    assert overtaken, "the compute stream waited for the save"


def test_a_load_overwrites_what_was_queued_before_it(devices: Iterator[Device]) -> None:
    for device in devices:
        for slot in range(SLOTS):
            device.pool.parts(slot)[0][:360] = bytes(range(slot, slot + 180)) * 2
        device.write(6, salt=9)
        device.mover.load(1, _ops((1, 0, 6), (1, 1, 2), (3, 2, 7)))
        device.cuda.run()
        assert device.block(6) == bytes(range(1, 121)), device.seed
        assert device.block(2) == bytes([*range(121, 181), *range(1, 61)])
        assert device.block(7) == bytes(range(63, 183))


def test_a_load_into_blocks_that_were_fenced_comes_after_their_save(
    devices: Iterator[Device],
) -> None:
    for device in devices:
        device.pool.parts(3)[0][:120] = bytes(range(120))
        device.mover.save(1, _ops((0, 0, 1), (0, 1, 2), (0, 2, 3)))
        device.mover.fence([1])
        device.mover.load(2, _ops((3, 0, 3)))
        device.cuda.run()
        assert device.place(0, 2) == device.kv.block(3), device.seed
        assert device.block(3) == bytes(range(120)), device.seed


def test_a_job_is_told_once_and_only_when_its_bytes_are_there(devices: Iterator[Device]) -> None:
    for device in devices:
        device.mover.save(1, _ops(*((1, n, n) for n in range(3))))
        device.mover.load(2, _ops((0, 0, 7)))
        device.mover.save(3, _ops((2, 1, 6)))
        told = []
        while True:
            went_on = device.cuda.step()
            for finished in device.mover.poll():
                assert finished.ok
                assert finished.seconds == 0.002
                told.append((finished.job_id, finished.direction, finished.nbytes))
                if finished.job_id == 1:
                    assert device.place(1, 2) == device.kv.block(2), device.seed
                if finished.job_id == 3:
                    assert device.place(2, 1) == device.kv.block(6), device.seed
            if not went_on:
                break
        assert sorted(told) == [(1, "d2h", 360), (2, "h2d", 120), (3, "d2h", 120)]
        assert told.index((1, "d2h", 360)) < told.index((3, "d2h", 120))
        assert device.mover.poll() == []


def test_a_job_that_fails_half_way_is_told_when_its_queued_copies_are_over(
    devices: Iterator[Device], caplog: pytest.LogCaptureFixture
) -> None:
    for device in devices:
        queue = cuda_mover._Lane._transfer
        count = 0

        def fail_second(lane: object, *tensors: torch.Tensor) -> None:
            nonlocal count
            count += 1
            if count == 2:
                raise RuntimeError("out of memory")
            queue(lane, *tensors)  # noqa: B023

        with pytest.MonkeyPatch.context() as patch, caplog.at_level(logging.CRITICAL):
            patch.setattr(cuda_mover._Lane, "_transfer", fail_second)
            device.mover.save(1, _ops((0, 0, 1), (1, 0, 2)))
        device.mover.save(2, _ops((2, 0, 3)))
        assert device.mover.poll() == []
        device.mover.fence([1])
        device.cuda.run()
        [failed, good] = device.mover.poll()
        assert (failed.job_id, failed.ok, failed.nbytes) == (1, False, 0)
        assert (good.job_id, good.ok) == (2, True)
        assert device.place(2, 0) == device.kv.block(3)


def test_a_save_that_the_engine_cannot_be_made_to_wait_for_fails_alone(
    devices: Iterator[Device], caplog: pytest.LogCaptureFixture
) -> None:
    device = next(devices)
    device.mover.save(1, _ops((0, 0, 1)))
    device.mover.save(2, _ops((1, 0, 2)))

    def refuse(event: object) -> None:
        raise RuntimeError("device-side assert")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(device.cuda.compute, "wait_event", refuse)
        device.mover.fence([1])
    device.mover.fence([2])
    device.cuda.run()
    told = [(f.job_id, f.ok, f.nbytes) for f in device.mover.poll()]
    assert told == [(1, False, 0), (2, True, 120)]
    assert [record.getMessage() for record in caplog.records] == [
        "d2h copy of job 1 failed: device-side assert"
    ]


def test_operations_out_of_range_or_of_another_form_queue_nothing(
    devices: Iterator[Device], caplog: pytest.LogCaptureFixture
) -> None:
    device = next(devices)
    device.cuda.run()
    with caplog.at_level(logging.CRITICAL):
        device.mover.load(1, _ops((0, 0, SHAPE.blocks)))
        device.mover.save(2, _ops((SLOTS, 0, 0)))
        device.mover.save(3, np.array(1))
    device.mover.fence([2, 3, 99])
    assert not device.cuda.step()
    told = [(f.job_id, f.ok, f.nbytes) for f in device.mover.poll()]
    assert sorted(told) == [(1, False, 0), (2, False, 0), (3, False, 0)]


def test_close_waits_for_copies_and_poll_then_tells_them(devices: Iterator[Device]) -> None:
    device = next(devices)
    device.mover.save(1, _ops((0, 0, 1), (0, 1, 2), (0, 2, 3)))
    device.mover.load(2, _ops((1, 0, 4)))
    device.mover.close()
    device.mover.close()
    assert device.place(0, 2) == device.kv.block(3)
    device.mover.save(3, _ops((0, 0, 1)))
    device.cuda.run()
    told = [(f.job_id, f.ok) for f in device.mover.poll()]
    assert sorted(told) == [(1, True), (2, True), (3, False)]


def test_a_closed_mover_does_not_keep_the_pool_in_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    before = sorted(os.listdir("/proc/self/fd"))
    device = Device(0, monkeypatch)
    device.close()
    assert sorted(os.listdir("/proc/self/fd")) == before


@pytest.mark.parametrize("lane", [1, 2])
def test_no_device_memory_for_staging_is_a_tier_error_with_a_remedy_and_pins_nothing(
    lane: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    device = Device(0, monkeypatch)
    device.mover.close()
    empty, asked = torch.empty, 0

    def out_of_memory(*args: object, **options: object) -> torch.Tensor:
        nonlocal asked
        asked += "device" in options
        if asked == lane and "device" in options:
            raise torch.OutOfMemoryError("CUDA out of memory.\nTried to allocate 64 MiB")
        return empty(*args, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "empty", out_of_memory)
        with pytest.raises(
            TierError, match=r"staging .*; .*lower gpu_memory_utilization"
        ) as caught:
            CudaMover(PageTable.from_layers(device.kv.views), device.region)
    assert "\n" not in str(caught.value)
    assert device.cuda.registered == []
    device.close()


def test_consecutive_blocks_of_a_slot_cross_the_bus_as_one_copy(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    device = Device(0, monkeypatch)
    sizes: list[int] = []
    monkeypatch.setattr(
        cuda_mover._Lane, "_transfer", lambda lane, on_device, on_host: sizes.append(len(on_host))
    )
    monkeypatch.setattr(device.mover._save, "_staging", torch.empty((8, 120), dtype=torch.uint8))
    device.mover.save(1, _ops((0, 0, 5), (0, 1, 1), (1, 0, 2), (1, 2, 3)))
    assert sizes == [240, 120, 120]
    device.close()


def test_a_pool_that_cannot_be_pinned_is_used_with_one_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    device = Device(0, monkeypatch, register_error=2)
    device.mover.save(1, _ops((0, 0, 1)))
    device.cuda.run()
    assert [finished.ok for finished in device.mover.poll()] == [True]
    assert device.place(0, 0) == device.kv.block(1)
    device.close()  # must not unregister what was never registered
    [record] = caplog.records
    assert record.levelname == "WARNING"
    assert "could not be pinned" in record.getMessage()
    assert device.mover.notes == (record.getMessage(),)
