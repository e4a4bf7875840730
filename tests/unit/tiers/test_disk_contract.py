# SPDX-License-Identifier: Apache-2.0
"""The disk tier keeps the contract of `tierkv.tiers.base`: each codec, O_DIRECT or not."""

from __future__ import annotations

import itertools
import tempfile
from pathlib import Path
from typing import Any, ClassVar

import pytest
from hypothesis import settings

from tierkv.config.disk import DiskConfig
from tierkv.testing.contract import TierContract
from tierkv.testing.machine import LAYOUT, tier_machine
from tierkv.tiers.base import Tier
from tierkv.tiers.disk import DiskTier
from tierkv.tiers.disk.space import Space


class DiskContract(TierContract):
    options: ClassVar[dict[str, Any]] = {}

    @pytest.fixture(autouse=True)
    def medium(self, tmp_path: Path) -> None:
        # Room for a few chunks more than the contract asks for, so that eviction happens.
        slots = (self.least_chunks + 2) * (4096 + self.layout.slot_bytes)
        self.config = DiskConfig(
            path=tmp_path / "kv",
            capacity=Space.least_capacity(slots) + 8192,
            min_free=0,
            io_threads=4,
            **self.options,
        )

    def make_tier(self) -> Tier:
        return DiskTier(self.config)


class TestRawDirect(DiskContract):
    options: ClassVar[dict[str, Any]] = {"codec": "raw", "direct_io": "auto"}


class TestRawBuffered(DiskContract):
    options: ClassVar[dict[str, Any]] = {"codec": "raw", "direct_io": "never"}


class TestLz4Direct(DiskContract):
    options: ClassVar[dict[str, Any]] = {"codec": "lz4", "direct_io": "auto"}


class TestLz4Buffered(DiskContract):
    options: ClassVar[dict[str, Any]] = {"codec": "lz4", "direct_io": "never"}


class TestS3Fifo(DiskContract):
    options: ClassVar[dict[str, Any]] = {"policy": "s3fifo"}


@pytest.fixture(autouse=True, scope="module")
def media() -> Any:
    """A directory for each run of the state machine, removed together at the end."""
    with tempfile.TemporaryDirectory() as root:
        numbers = itertools.count()
        MEDIA.append(lambda: Path(root) / str(next(numbers)))
        yield
        MEDIA.clear()


MEDIA: list[Any] = []


def make_disk(path: Path) -> Tier:
    slots = 5 * (4096 + LAYOUT.slot_bytes)
    capacity = Space.least_capacity(slots) + 4096
    return DiskTier(DiskConfig(path=path, capacity=capacity, min_free=0, io_threads=2))


TestDiskMachine = tier_machine(lambda: MEDIA[0](), make_disk).TestCase
TestDiskMachine.settings = settings(max_examples=40, stateful_step_count=25, deadline=None)
