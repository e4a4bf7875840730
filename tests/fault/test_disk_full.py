# SPDX-License-Identifier: Apache-2.0
"""A really full file system: a tmpfs of few bytes, filled by the tier and by others."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.fault.disk_kit import (
    CHUNKS,
    FOLDER,
    LAYOUT,
    NAMESPACE,
    SLOT_BYTES,
    digest,
    make_config,
)
from tests.unit.tiers.disk_kit import run
from tierkv.errors import ErrorKind, TierError
from tierkv.testing.samples import make_parts, make_payload
from tierkv.tiers.base import Outcome, Result
from tierkv.tiers.disk import DiskTier


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def small(tmp_path: Path) -> Iterator[Path]:
    """A file system of 256 KiB: seven slots and a bit."""
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=256k,mode=700", "tierkv-test", str(tmp_path)],
        capture_output=True,
        text=True,
        check=False,
    )
    if mounted.returncode:
        pytest.skip(f"NOT TESTED: no tmpfs may be mounted here: {mounted.stderr.strip()}")
    try:
        yield tmp_path
    finally:
        subprocess.run(["umount", str(tmp_path)], check=True)


def free(path: Path) -> int:
    found = os.statvfs(path)
    return found.f_bavail * found.f_frsize


async def save(tier: DiskTier, number: int) -> Result:
    return await tier.save(CHUNKS[number], make_payload(CHUNKS[number], LAYOUT))


async def is_served(tier: DiskTier, number: int) -> bool:
    parts = make_parts(LAYOUT)
    result = await tier.load(CHUNKS[number], parts)
    if result.outcome is not Outcome.DONE:
        assert result.outcome is Outcome.MISS, result
        return False
    assert digest(parts) == digest(make_payload(CHUNKS[number], LAYOUT))
    return True


def test_a_capacity_beyond_the_file_system_ends_at_what_there_is(small: Path) -> None:
    async def test() -> None:
        tier = DiskTier(make_config(small / "kv", slots=100))
        await tier.open(NAMESPACE, LAYOUT)
        for number in range(12):
            assert (await save(tier, number)).outcome is Outcome.DONE
        held = tier.usage().chunks
        assert 6 <= held <= 8
        assert sum([await is_served(tier, number) for number in range(12)]) == held
        assert await is_served(tier, 11)
        await tier.close()
        tier = DiskTier(make_config(small / "kv", slots=100))
        report = await tier.open(NAMESPACE, LAYOUT)
        assert report.recovered_chunks == held
        await tier.close()

    run(test)


def test_a_file_system_that_is_full_at_start_is_waited_for(small: Path) -> None:
    clock = Clock()

    async def test() -> None:
        tier = DiskTier(make_config(small / "kv", slots=100), clock=clock)
        await tier.open(NAMESPACE, LAYOUT)
        filler = small / "filler"
        filler.write_bytes(bytes(free(small)))
        assert await save(tier, 0) == Result(Outcome.REFUSED, ErrorKind.ENOSPC)
        assert not await is_served(tier, 0)
        filler.unlink()
        clock.now += 60
        assert (await save(tier, 0)).outcome is Outcome.DONE
        assert await is_served(tier, 0)
        await tier.close()

    run(test)


def test_no_room_for_a_header_page_is_a_tier_error_that_leaves_nothing_held(small: Path) -> None:
    async def test() -> None:
        (small / "filler").write_bytes(bytes(free(small)))
        for _ in range(2):
            with pytest.raises(TierError, match="No space left on device"):
                await DiskTier(make_config(small / "kv")).open(NAMESPACE, LAYOUT)
        (small / "filler").unlink()
        tier = DiskTier(make_config(small / "kv"))
        await tier.open(NAMESPACE, LAYOUT)
        assert (await save(tier, 0)).outcome is Outcome.DONE
        await tier.close()

    run(test)


def test_when_others_fill_the_disk_the_tier_gives_its_slots_back(small: Path) -> None:
    clock, floor = Clock(), 2 * SLOT_BYTES

    async def test() -> None:
        tier = DiskTier(make_config(small / "kv", slots=100, min_free=floor), clock=clock)
        await tier.open(NAMESPACE, LAYOUT)
        number = 0
        for _ in range(8):
            assert (await save(tier, number % 12)).outcome is Outcome.DONE
            number += 1
            assert free(small) >= floor
        before = tier.usage().chunks
        with (small / "filler").open("wb") as filler:
            for _ in range(3):
                filler.write(bytes(SLOT_BYTES))
                filler.flush()
                clock.now += 2
                await save(tier, number % 12)
                number += 1
                assert free(small) >= floor
        assert tier.usage().chunks <= before - 3
        assert (small / "kv" / FOLDER / "slab").stat().st_blocks * 512 <= before * SLOT_BYTES
        for chunk in range(12):
            await is_served(tier, chunk)
        (small / "filler").unlink()
        clock.now += 60
        for number in range(12):
            assert (await save(tier, number)).outcome is Outcome.DONE
        assert tier.usage().chunks >= before
        assert free(small) >= floor
        await tier.close()

    run(test)
