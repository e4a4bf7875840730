# SPDX-License-Identifier: Apache-2.0
"""The disk tier tells how many chunks it gave up for want of room, whatever took the room."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.unit.tiers.disk_kit import CHUNKS, SLOT_BYTES, make_config, opened, run, save
from tierkv.tiers.disk.directory import Directory


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def test_new_chunks_that_displace_old_ones_are_told(tmp_path: Path) -> None:
    async def test() -> None:
        tier, _ = await opened(make_config(tmp_path, slots=3))
        told = []
        for chunk in CHUNKS[:5]:
            await save(tier, chunk)
            told.append(tier.usage().evicted_chunks)
        assert told == [0, 0, 0, 1, 2]
        # Forgetting by order is not eviction.
        assert await tier.evict([CHUNKS[4].key]) == 1
        assert await tier.clear() == 2
        assert tier.usage().evicted_chunks == 2
        await tier.close()

    run(test)


def test_slots_given_back_to_a_full_file_system_are_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, clock = make_config(tmp_path, slots=10, min_free=1 << 20), Clock()

    async def test() -> None:
        tier, _ = await opened(config, clock=clock)
        for chunk in CHUNKS[:10]:
            await save(tier, chunk)
        free = (1 << 20) - 3 * SLOT_BYTES
        monkeypatch.setattr(Directory, "free_bytes", lambda self: free)
        clock.now += 2
        await save(tier, CHUNKS[10])
        # Three slots went, and one of the seven that are left was needed for the new chunk.
        assert tier.usage().chunks == 7
        assert tier.usage().evicted_chunks == 4
        await tier.close()

    run(test)
