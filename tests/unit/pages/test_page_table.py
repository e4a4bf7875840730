# SPDX-License-Identifier: Apache-2.0
"""Which pieces a page table finds in an engine's memory, and that they are the right bytes."""

from __future__ import annotations

import pytest
import torch

from tests.unit.pages.engine_kv import EngineKV, Shape
from tierkv.errors import GeometryError
from tierkv.pages.geometry import PageTable


def _stored(table: PageTable, block: int) -> bytes:
    """A block's bytes through the segments, in their order."""
    parts = []
    for segment in table.segments:
        assert sum(map(len, parts)) == segment.offset
        parts.append(segment.view[:, block].numpy().tobytes())
    return b"".join(parts)


def _stored_by_address(kv: EngineKV, table: PageTable, block: int) -> bytes:
    out = bytearray(table.block_bytes)
    for address, row_stride, nbytes, offset in table.runs().tolist():
        at = address + block * row_stride - kv.storage.data_ptr()
        out[offset : offset + nbytes] = kv.bytes()[at : at + nbytes].tobytes()
    return bytes(out)


@pytest.mark.parametrize(
    ("shape", "runs"),
    [
        (Shape("LB"), [(3, 40)]),
        (Shape("LB", pad=5, start=7), [(3, 40)]),
        (Shape("BL"), [(1, 120)]),
        (Shape("BL", start=9), [(1, 120)]),
        (Shape("BL", pad=5), [(3, 40)]),
        (Shape("LB", layers=1), [(1, 40)]),
        (Shape("LB", blocks=1), [(1, 120)]),
        (Shape("BL", blocks=1, pad=1), [(3, 40)]),
    ],
)
def test_regular_layers_are_one_segment_with_the_bytes_of_every_page(
    shape: Shape, runs: list[tuple[int, int]]
) -> None:
    kv = EngineKV(shape)
    kv.fill(kv.all_blocks())
    table = PageTable.from_layers(kv.views)
    assert [(s.view.shape[0], s.run_bytes) for s in table.segments] == runs
    assert (table.num_blocks, table.block_bytes) == (shape.blocks, shape.block_bytes)
    assert table.min_run_bytes == runs[0][1]
    assert table.device == torch.device("cpu")
    for block in range(shape.blocks):
        assert _stored(table, block) == kv.block(block)
        assert _stored_by_address(kv, table, block) == kv.block(block)


@pytest.mark.parametrize("order", ["LB", "BL"])
def test_pages_are_stored_in_the_order_of_registration(order: str) -> None:
    kv = EngineKV(Shape(order))
    kv.fill(kv.all_blocks())
    table = PageTable.from_layers([kv.views[2], kv.views[0], kv.views[1]])
    content = kv.block(4)
    assert _stored(table, 4) == content[80:120] + content[:40] + content[40:80]
    assert _stored_by_address(kv, table, 4) == content[80:120] + content[:40] + content[40:80]


def test_layers_that_share_memory_are_taken_once_in_the_widest_form() -> None:
    kv = EngineKV(Shape("LB"))
    kv.fill(kv.all_blocks())
    narrow = kv.views[1][:, :10]
    table = PageTable.from_layers([kv.views[0], narrow, kv.views[1], kv.views[2], kv.views[0]])
    assert table.block_bytes == 120
    assert len(table.segments) == 1
    assert _stored(table, 5) == kv.block(5)


def test_layers_of_two_storages_or_two_sizes_are_segments_of_their_own() -> None:
    one, two = EngineKV(Shape("LB")), EngineKV(Shape("LB", layers=2, page=24))
    for kv in (one, two):
        kv.fill(kv.all_blocks())
    table = PageTable.from_layers(one.views + two.views)
    assert [s.offset for s in table.segments] == [0, 120]
    assert table.min_run_bytes == 24
    assert _stored(table, 3) == one.block(3) + two.block(3)


def test_two_storages_of_one_shape_are_not_taken_for_one() -> None:
    one, two = EngineKV(Shape("LB")), EngineKV(Shape("LB"))
    one.fill(one.all_blocks())
    two.fill(two.all_blocks(salt=50))
    first, second = one.block(3)[:40], two.block(3, salt=50)[:40]
    table = PageTable.from_layers([one.views[0], two.views[0]])
    assert len(table.segments) == 2
    assert _stored(table, 3) == first + second
    # Whichever of the two lies higher in memory: one of the orders has a positive distance.
    assert _stored(PageTable.from_layers([two.views[0], one.views[0]]), 3) == second + first


def test_pages_of_one_storage_that_differ_in_size_or_row_stride_are_not_one_segment() -> None:
    storage = torch.arange(240, dtype=torch.uint8)
    rows = storage.view(8, 30)
    table = PageTable.from_layers([rows[:, :10], rows[:, 12:20], storage[22:54].view(8, 4)])
    assert [s.view.shape[2] for s in table.segments] == [10, 8, 4]
    assert _stored(table, 2) == bytes([*range(60, 70), *range(72, 80), *range(30, 34)])
    same_size = PageTable.from_layers([rows[:, :4], storage[22:54].view(8, 4)])
    assert _stored(same_size, 2) == bytes([*range(60, 64), *range(30, 34)])


def test_unequal_pages_that_follow_one_another_in_a_block_are_one_run() -> None:
    storage = torch.arange(8 * 30, dtype=torch.uint8).view(8, 30)
    table = PageTable.from_layers([storage[:, :12], storage[:, 12:26], storage[:, 26:]])
    assert [s.view.shape for s in table.segments] == [(1, 8, 30)]
    assert _stored(table, 2) == bytes(range(60, 90))


def test_unevenly_spaced_layers_are_cut_where_the_distance_changes() -> None:
    storage = torch.arange(200, dtype=torch.uint8)
    starts = (0, 20, 40, 90, 140)
    table = PageTable.from_layers([storage[at : at + 12].view(3, 4) for at in starts])
    assert [s.view.shape[0] for s in table.segments] == [3, 2]
    expected = b"".join(bytes(range(at + 4, at + 8)) for at in starts)
    assert _stored(table, 1) == expected


def test_segments_write_through_to_the_engine() -> None:
    kv = EngineKV(Shape("BL", pad=3))
    PageTable.from_layers(kv.views).segments[0].view[1, 6] = 77
    assert kv.bytes().tolist().count(77) == 40
    assert kv.bytes()[kv.address(1, 6) : kv.address(1, 6) + 40].tolist() == [77] * 40


_OK = torch.zeros(4, 8, dtype=torch.int8)


@pytest.mark.parametrize(
    ("views", "message"),
    [
        ([], "no KV layers"),
        ([_OK, torch.zeros(5, 8, dtype=torch.int8)], "layer 1: .* number of blocks"),
        ([_OK, torch.zeros(4, 8, dtype=torch.int8, device="meta")], "number of blocks or device"),
        ([torch.zeros(4, 8, dtype=torch.float16)], "not a byte view"),
        ([torch.zeros(4, 2, 8, dtype=torch.int8)], "not a byte view"),
        ([torch.zeros(0, 8, dtype=torch.int8)], "not a byte view"),
        ([_OK[:, ::2]], "overlap or are not contiguous"),
        ([_OK[:1].expand(4, 8)], "overlap or are not contiguous"),
        ([torch.zeros(64, dtype=torch.int8).as_strided((4, 8), (7, 1))], "overlap"),
    ],
)
def test_views_that_are_no_pages_are_refused(views: list[torch.Tensor], message: str) -> None:
    with pytest.raises(GeometryError, match=message):
        PageTable.from_layers(views)
