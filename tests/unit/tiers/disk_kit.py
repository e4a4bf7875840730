# SPDX-License-Identifier: Apache-2.0
"""Small disk tiers for tests, and where their bytes lie, worked out from `format.md` alone."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any, TypeVar

from tierkv.config.disk import DiskConfig
from tierkv.keys import Chunk
from tierkv.pages.layout import SlotLayout
from tierkv.testing.samples import joined, make_chunks, make_parts, make_payload
from tierkv.tiers.base import Outcome, Result, TierReport
from tierkv.tiers.disk import DiskTier

T = TypeVar("T")

NAMESPACE = b"disk-test-space!"
LAYOUT = SlotLayout(chunk_tokens=4, block_tokens=2, block_bytes=6000, ranks=2)
HEADER_BYTES = 4096
PART_STRIDE = 12288  # two blocks of 6000 bytes, padded
SLOT_BYTES = HEADER_BYTES + 2 * PART_STRIDE
ENTRY_BYTES = 128
CHUNKS = make_chunks(40, LAYOUT)
FOLDER = f"{NAMESPACE.hex()}-v1"


def make_config(path: Path, slots: int = 40, **options: Any) -> DiskConfig:
    """Room for exactly `slots` chunks of LAYOUT."""
    capacity = 65536 + slots * (SLOT_BYTES + ENTRY_BYTES + 8 + 32)
    return DiskConfig(**{"path": path / "kv", "capacity": capacity, "min_free": 0} | options)


def run(test: Callable[[], Coroutine[Any, Any, T]]) -> T:
    return asyncio.run(asyncio.wait_for(test(), 60))


async def opened(
    config: DiskConfig, namespace: bytes = NAMESPACE, layout: SlotLayout = LAYOUT, **options: Any
) -> tuple[DiskTier, TierReport]:
    tier = DiskTier(config, **options)
    return tier, await tier.open(namespace, layout)


async def save(tier: DiskTier, chunk: Chunk, version: int = 0) -> Result:
    return await tier.save(chunk, make_payload(chunk, LAYOUT, version=version))


async def load(tier: DiskTier, chunk: Chunk) -> tuple[Result, bytes | None]:
    parts = make_parts(LAYOUT)
    result = await tier.load(chunk, parts)
    return result, joined(parts) if result.outcome is Outcome.DONE else None


def value(chunk: Chunk, version: int = 0) -> bytes:
    return joined(make_payload(chunk, LAYOUT, version=version))


def slab(config: DiskConfig) -> Path:
    return config.path / FOLDER / "slab"


def table(config: DiskConfig) -> Path:
    return config.path / FOLDER / "table"


def slot_offset(slot: int) -> int:
    return 4096 + slot * SLOT_BYTES


def entry_offset(slot: int) -> int:
    return 4096 + slot * ENTRY_BYTES


def filled(config: DiskConfig, count: int) -> None:
    """A directory in which the first `count` chunks were saved, one after the other."""

    async def fill() -> None:
        tier, _ = await opened(config)
        for chunk in CHUNKS[:count]:
            assert (await save(tier, chunk)).outcome is Outcome.DONE
        await tier.close()

    run(fill)


def patch(path: Path, offset: int, data: bytes) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        file.write(data)


def flip(path: Path, offset: int, bit: int = 0) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([byte ^ 1 << bit]))
