# SPDX-License-Identifier: Apache-2.0
"""Bytes after saves and loads on the CPU, found by formula; and that nothing else was touched."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import ExitStack

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.unit.pages.engine_kv import FILLER, EngineKV, Shape
from tierkv.errors import GeometryError, UnsupportedError
from tierkv.pages.cpu_mover import CpuMover
from tierkv.pages.geometry import PageTable
from tierkv.pages.layout import SlotLayout
from tierkv.pages.mover import Run, make_mover, runs_of
from tierkv.pages.pool import DramPool, PoolRegion

SHAPE = Shape("LB", layers=3, blocks=8, page=40)
SLOTS, CHUNK_BLOCKS = 4, 3


class Rank:
    """One rank's engine, region and mover over a pool."""

    def __init__(self, pool: DramPool, rank: int, shape: Shape) -> None:
        self.kv = EngineKV(shape)
        self.kv.fill(self.kv.all_blocks())
        self.region = PoolRegion.attach(pool.handles[rank])
        self.mover = CpuMover(PageTable.from_layers(self.kv.views), self.region)

    def close(self) -> None:
        self.mover.close()
        self.region.close()


def _ops(*ops: tuple[int, int, int]) -> np.ndarray:
    return np.array(ops, dtype=np.int32).reshape(-1, 3)


def _place(pool: DramPool, slot: int, index: int, rank: int = 0) -> bytes:
    size = pool.layout.block_bytes
    return bytes(pool.parts(slot)[rank][index * size : (index + 1) * size])


def _image(pool: DramPool) -> bytes:
    return b"".join(bytes(part) for slot in range(pool.slots) for part in pool.parts(slot))


@pytest.fixture
def pool() -> Iterator[DramPool]:
    layout = SHAPE.slot_layout(CHUNK_BLOCKS)
    pool = DramPool.create(layout, SLOTS * layout.slot_bytes)
    yield pool
    pool.close()


@pytest.fixture
def rank(pool: DramPool) -> Iterator[Rank]:
    rank = Rank(pool, 0, SHAPE)
    yield rank
    rank.close()


def test_a_save_writes_the_named_places_with_pages_layer_by_layer_and_nothing_else(
    pool: DramPool, rank: Rank
) -> None:
    rank.mover.save(1, _ops((2, 0, 5), (2, 1, 6), (0, 2, 1), (3, 0, 1)))
    saved = {(2, 0): 5, (2, 1): 6, (0, 2): 1, (3, 0): 1}
    for slot in range(SLOTS):
        for index in range(CHUNK_BLOCKS):
            block = saved.get((slot, index))
            expected = bytes(120) if block is None else rank.kv.block(block)
            assert _place(pool, slot, index) == expected, (slot, index)
        assert not any(pool.parts(slot)[0][CHUNK_BLOCKS * 120 :])
    assert rank.kv.bytes().tobytes() == rank.kv.image(rank.kv.all_blocks()).tobytes()


def test_a_load_writes_the_named_blocks_and_nothing_else(pool: DramPool, rank: Rank) -> None:
    for slot in range(SLOTS):
        part = pool.parts(slot)[0]
        part[:] = (np.arange(len(part)) % 241 + slot).astype(np.uint8).data
    before = _image(pool)
    rank.mover.load(1, _ops((1, 2, 7), (3, 0, 0), (3, 1, 1), (3, 2, 4)))
    expected = rank.kv.all_blocks()
    for slot, index, block in ((1, 2, 7), (3, 0, 0), (3, 1, 1), (3, 2, 4)):
        at = index * 120
        expected[block] = bytes((x % 241 + slot) % 256 for x in range(at, at + 120))
    assert rank.kv.bytes().tobytes() == rank.kv.image(expected).tobytes()
    assert _image(pool) == before


def test_jobs_are_reported_once_in_order_with_bytes_and_direction(rank: Rank) -> None:
    rank.mover.save(7, _ops((0, 0, 1), (0, 1, 2)))
    rank.mover.load(3, _ops((0, 1, 4)))
    rank.mover.save(9, _ops())
    rank.mover.fence([7, 100])
    finished = rank.mover.poll()
    assert [(f.job_id, f.ok, f.nbytes, f.direction) for f in finished] == [
        (7, True, 240, "d2h"),
        (3, True, 120, "h2d"),
        (9, True, 0, "d2h"),
    ]
    assert all(f.seconds >= 0 for f in finished)
    assert rank.mover.poll() == []


@pytest.mark.parametrize(
    "bad",
    [
        (SLOTS, 0, 0),
        (-1, 0, 0),
        (0, CHUNK_BLOCKS, 0),
        (0, -1, 0),
        (0, 0, SHAPE.blocks),
        (0, 0, -1),
    ],
)
@pytest.mark.parametrize("direction", ["save", "load"])
def test_an_operation_out_of_range_fails_its_job_and_copies_nothing(
    pool: DramPool, rank: Rank, bad: tuple[int, int, int], direction: str
) -> None:
    pool.parts(1)[0][:] = b"\x09" * pool.layout.part_stride
    slots, engine = _image(pool), rank.kv.bytes().tobytes()
    start = rank.mover.save if direction == "save" else rank.mover.load
    start(1, _ops((1, 0, 2), bad))
    start(2, _ops())
    [failed, other] = rank.mover.poll()
    assert (failed.job_id, failed.ok, failed.nbytes) == (1, False, 0)
    assert (other.job_id, other.ok) == (2, True)
    assert _image(pool) == slots
    assert rank.kv.bytes().tobytes() == engine


@pytest.mark.parametrize(
    "ops", [np.zeros((2, 2), np.int32), np.zeros((1, 3)), np.array(3), np.zeros(3, np.int64)]
)
def test_operations_of_another_form_fail_their_job(rank: Rank, ops: np.ndarray) -> None:
    rank.mover.save(5, ops)
    assert [(f.job_id, f.ok) for f in rank.mover.poll()] == [(5, False)]


def test_an_error_in_a_copy_is_that_jobs_outcome_and_logged_once(
    rank: Rank, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(self: PoolRegion, slots: object) -> None:
        raise OSError(12, "no memory for the slot")

    with monkeypatch.context() as patch, caplog.at_level(logging.INFO):
        patch.setattr(PoolRegion, "populate", refuse)
        rank.mover.save(1, _ops((0, 0, 1)))
        rank.mover.save(2, _ops((0, 0, 1)))
    rank.mover.save(3, _ops((0, 0, 1)))
    assert [(f.job_id, f.ok) for f in rank.mover.poll()] == [(1, False), (2, False), (3, True)]
    assert [record.getMessage() for record in caplog.records] == [
        "d2h copy of job 1 failed: [Errno 12] no memory for the slot"
    ]


def test_after_close_jobs_fail_and_earlier_ones_are_still_told(rank: Rank) -> None:
    rank.mover.save(1, _ops((0, 0, 1)))
    rank.mover.close()
    rank.mover.close()
    rank.mover.load(2, _ops((0, 0, 1)))
    assert [(f.job_id, f.ok) for f in rank.mover.poll()] == [(1, True), (2, False)]


def test_a_pool_made_for_other_blocks_is_refused(pool: DramPool) -> None:
    region = PoolRegion.attach(pool.handles[0])
    table = PageTable.from_layers(EngineKV(Shape(page=41)).views)
    with pytest.raises(GeometryError, match="123 bytes, the pool was made for 120"):
        CpuMover(table, region)
    region.close()


def test_the_mover_fits_the_device_of_the_pages(pool: DramPool) -> None:
    region = PoolRegion.attach(pool.handles[0])
    mover = make_mover(PageTable.from_layers(EngineKV(SHAPE).views), region)
    assert type(mover) is CpuMover
    assert mover.notes == ()
    mover.close()
    elsewhere = PageTable.from_layers([torch.zeros(8, 120, dtype=torch.int8, device="meta")])
    with pytest.raises(UnsupportedError, match="'meta' cannot be moved; run the engine on cpu"):
        make_mover(elsewhere, region)
    region.close()


def test_two_ranks_keep_apart_in_one_slot() -> None:
    layout = SHAPE.slot_layout(CHUNK_BLOCKS, ranks=2)
    pool = DramPool.create(layout, SLOTS * layout.slot_bytes)
    first, second = Rank(pool, 0, SHAPE), Rank(pool, 1, SHAPE)
    second.kv.fill(second.kv.all_blocks(salt=90))
    first.mover.save(1, _ops((2, 1, 3)))
    second.mover.save(1, _ops((2, 1, 4)))
    assert _place(pool, 2, 1, rank=0) == first.kv.block(3)
    assert _place(pool, 2, 1, rank=1) == second.kv.block(4, salt=90)
    second.mover.load(2, _ops((2, 1, 0)))
    expected = second.kv.all_blocks(salt=90)
    expected[0] = second.kv.block(4, salt=90)
    assert second.kv.bytes().tobytes() == second.kv.image(expected).tobytes()
    for rank in (first, second):
        rank.close()
    pool.close()


def test_layers_that_share_memory_are_stored_once_and_come_back() -> None:
    kv = EngineKV(SHAPE)
    kv.fill(kv.all_blocks())
    table = PageTable.from_layers([kv.views[0], kv.views[1], kv.views[0], kv.views[2]])
    layout = SlotLayout(16, 16, table.block_bytes)
    pool = DramPool.create(layout, layout.slot_bytes)
    region = PoolRegion.attach(pool.handles[0])
    mover = CpuMover(table, region)
    mover.save(1, _ops((0, 0, 5)))
    kv.fill({})
    mover.load(2, _ops((0, 0, 6)))
    assert kv.bytes().tobytes() == kv.image({6: kv.block(5)}).tobytes()
    mover.close()
    region.close()
    pool.close()


def test_layers_of_two_page_sizes_go_to_their_own_places_in_a_slot() -> None:
    wide, narrow = EngineKV(SHAPE), EngineKV(Shape("BL", layers=2, page=24))
    table = PageTable.from_layers(wide.views + narrow.views)
    layout = SlotLayout(32, 16, table.block_bytes)
    pool = DramPool.create(layout, layout.slot_bytes)
    region = PoolRegion.attach(pool.handles[0])
    mover = CpuMover(table, region)
    for kv in (wide, narrow):
        kv.fill(kv.all_blocks())
    mover.save(1, _ops((0, 0, 5), (0, 1, 2)))
    contents = wide.block(5) + narrow.block(5), wide.block(2) + narrow.block(2)
    assert (_place(pool, 0, 0), _place(pool, 0, 1)) == contents
    mover.load(2, _ops((0, 1, 7)))
    for kv in (wide, narrow):
        assert kv.bytes().tobytes() == kv.image(kv.all_blocks() | {7: kv.block(2)}).tobytes()
    mover.close()
    region.close()
    pool.close()


SHAPES = st.builds(
    Shape,
    order=st.sampled_from(["LB", "BL"]),
    layers=st.integers(1, 5),
    blocks=st.integers(1, 9),
    page=st.integers(1, 70),
    pad=st.integers(0, 3),
    start=st.integers(0, 3),
)


@settings(deadline=None)
@given(shape=SHAPES, chunk_blocks=st.integers(1, 4), slots=st.integers(1, 4), data=st.data())
def test_whatever_was_saved_comes_back_in_any_order_and_geometry(
    shape: Shape, chunk_blocks: int, slots: int, data: st.DataObject
) -> None:
    places = [(slot, index) for slot in range(slots) for index in range(chunk_blocks)]
    blocks = st.integers(0, shape.blocks - 1)
    chosen = data.draw(st.lists(st.sampled_from(places), unique=True))
    saves = [(*place, data.draw(blocks)) for place in chosen]
    targets = data.draw(st.lists(blocks, unique=True)) if saves else []
    loads = [(*data.draw(st.sampled_from(chosen)), target) for target in targets]

    layout = shape.slot_layout(chunk_blocks)
    with ExitStack() as stack:
        pool = DramPool.create(layout, slots * layout.slot_bytes)
        stack.callback(pool.close)
        rank = Rank(pool, 0, shape)
        stack.callback(rank.close)

        rank.mover.save(1, _ops(*saves))
        held = {(slot, index): rank.kv.block(block) for slot, index, block in saves}
        for place in places:
            assert _place(pool, *place) == held.get(place, bytes(shape.block_bytes))

        other = rank.kv.all_blocks(salt=100)
        rank.kv.fill(other)
        rank.mover.load(2, _ops(*loads))
        other |= {block: held[slot, index] for slot, index, block in loads}
        assert rank.kv.bytes().tobytes() == rank.kv.image(other).tobytes()
        assert all(finished.ok for finished in rank.mover.poll())


def test_gaps_between_pages_are_left_alone() -> None:
    shape = Shape("BL", pad=3, start=2)
    layout = shape.slot_layout(1)
    pool = DramPool.create(layout, 8 * layout.slot_bytes)
    rank = Rank(pool, 0, shape)
    rank.mover.save(1, _ops(*((n, 0, n) for n in range(8))))
    rank.kv.storage.fill_(FILLER)
    rank.mover.load(2, _ops(*((n, 0, 7 - n) for n in range(8))))
    content = {7 - n: rank.kv.block(n) for n in range(8)}
    assert rank.kv.bytes().tobytes() == rank.kv.image(content).tobytes()
    rank.close()
    pool.close()


@pytest.mark.parametrize(
    ("of_blocks", "expected"),
    [
        (True, [Run(0, 0, 4, 0, 2), Run(0, 2, 8, 2, 1), Run(1, 0, 9, 3, 1), Run(1, 2, 10, 4, 1)]),
        (False, [Run(0, 0, 4, 0, 3), Run(1, 0, 9, 3, 1), Run(1, 2, 10, 4, 1)]),
    ],
)
def test_operations_are_cut_into_the_longest_runs(of_blocks: bool, expected: list[Run]) -> None:
    ops = _ops((0, 0, 4), (0, 1, 5), (0, 2, 8), (1, 0, 9), (1, 2, 10))
    assert runs_of(ops, of_blocks=of_blocks) == expected
    assert runs_of(ops[:0], of_blocks=of_blocks) == []


def test_the_engines_tensors_see_what_was_loaded(pool: DramPool, rank: Rank) -> None:
    pool.parts(0)[0][:120] = bytes(range(1, 121))
    rank.mover.load(1, _ops((0, 0, 3)))
    assert torch.equal(rank.kv.views[1][3], torch.arange(41, 81, dtype=torch.int8))
