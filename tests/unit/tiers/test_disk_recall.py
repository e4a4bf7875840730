# SPDX-License-Identifier: Apache-2.0
"""What a disk tier tells of the text that an earlier run left."""

from __future__ import annotations

import asyncio
import itertools
import os
from pathlib import Path
from typing import Any

import pytest

from tests.unit.tiers.disk_kit import (
    CHUNKS,
    HEADER_BYTES,
    LAYOUT,
    filled,
    flip,
    make_config,
    opened,
    patch,
    run,
    save,
    slab,
    slot_offset,
)
from tierkv.config.disk import DiskConfig
from tierkv.keys import Chunk
from tierkv.testing.samples import make_chunks
from tierkv.tiers.base import Outcome
from tierkv.tiers.disk.tier import RECALLED

MANY = make_chunks(400, LAYOUT)


@pytest.fixture
def many(tmp_path: Path) -> DiskConfig:
    """A directory that holds more than two threads read at once."""
    config = make_config(tmp_path, slots=400, io_threads=2)

    async def fill() -> None:
        tier, _ = await opened(config)
        for chunk in MANY:
            assert (await save(tier, chunk)).outcome is Outcome.DONE
        await tier.close()

    run(fill)
    return config


def recalled(
    config: DiskConfig, most: int = 100, seconds: float = 60.0, **options: Any
) -> list[Chunk]:
    async def test() -> list[Chunk]:
        tier, _ = await opened(config, **options)
        found = await tier.recall(most, seconds)
        await tier.close()
        return found

    return run(test)


def use(config: DiskConfig, *numbers: int) -> None:
    async def test() -> None:
        tier, _ = await opened(config)
        await tier.touch([CHUNKS[number].key for number in numbers])
        await tier.close()

    run(test)


@pytest.mark.parametrize(
    "options", [{}, {"codec": "lz4"}, {"direct_io": "never"}, {"io_threads": 1}]
)
def test_keys_and_text_come_back_the_last_used_first(
    tmp_path: Path, options: dict[str, object]
) -> None:
    config = make_config(tmp_path, **options)
    filled(config, 6)
    assert recalled(config) == CHUNKS[:6][::-1]
    use(config, 2, 0)
    assert recalled(config) == [CHUNKS[n] for n in (0, 2, 5, 4, 3, 1)]
    assert recalled(config, most=2) == [CHUNKS[n] for n in (0, 2)]


def test_many_are_read_in_portions_and_all_of_them_are_told(many: DiskConfig) -> None:
    assert recalled(many, most=1000) == MANY[::-1]
    assert recalled(many, most=130) == MANY[::-1][:130]


def test_when_time_is_up_what_is_known_by_then_is_told(many: DiskConfig) -> None:
    seconds = itertools.count()

    def clock() -> float:
        return float(next(seconds))

    # One second passes with every look at the clock: one before each header, one before each
    # portion of 64, and one at the beginning.
    one_thread = many.model_copy(update={"io_threads": 1})
    assert recalled(one_thread, 1000, 100.5, clock=clock) == MANY[::-1][:98]
    assert recalled(many, seconds=0.0) == []


def test_closing_ends_it_and_waits_for_its_threads(many: DiskConfig) -> None:
    async def test() -> list[Chunk]:
        tier, _ = await opened(many)
        recalling = asyncio.create_task(tier.recall(1000, 60.0))
        await asyncio.sleep(0)
        await tier.close()
        return await recalling

    # Two threads had begun a portion each.
    assert run(test) == MANY[::-1][: 2 * RECALLED]


def test_headers_that_are_damaged_or_of_another_chunk_are_left_out(tmp_path: Path) -> None:
    config = make_config(tmp_path)
    filled(config, 6)
    flip(slab(config), slot_offset(1) + 200)
    other = slab(config).read_bytes()[slot_offset(4) : slot_offset(4) + HEADER_BYTES]
    patch(slab(config), slot_offset(2), other)
    flip(slab(config), slot_offset(3) + HEADER_BYTES + 5)  # its KV: loading will tell
    assert recalled(config) == [CHUNKS[n] for n in (5, 4, 3, 0)]


def test_a_slab_that_was_cut_tells_of_what_is_left(tmp_path: Path) -> None:
    config = make_config(tmp_path)
    filled(config, 6)

    async def test() -> list[Chunk]:
        tier, _ = await opened(config)
        os.truncate(slab(config), slot_offset(3))
        found = await tier.recall(100, 60.0)
        await tier.close()
        return found

    assert run(test) == CHUNKS[:3][::-1]
