# SPDX-License-Identifier: Apache-2.0
"""The disk tier beside plain O_DIRECT reads and writes of the same bytes.

Measured in turns on the same file, so that a busy neighbour counts for both sides.

Threads and ownership. `DiskBench` starts up to eight threads for plain reads, and ends them in
`close`; the tier has its own.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Self

from tierkv.bench.ratio import timed
from tierkv.config.disk import DiskConfig
from tierkv.keys import Chunk
from tierkv.pages.layout import ALIGNMENT, SlotLayout
from tierkv.record import RecordFormat
from tierkv.testing.samples import make_chunks
from tierkv.tiers.base import Outcome, Result
from tierkv.tiers.disk import DiskTier
from tierkv.tiers.disk.io import aligned_buffer, read_full, write_full
from tierkv.tiers.disk.table import PAGE_BYTES

NAMESPACE = b"benchmark-of-dsk"
AT_ONCE = 32
THREADS = 8


class DiskBench:
    """A tier full of chunks, and the same slab opened once more for plain reads and writes.

    Args:
        path: a directory that is not there yet.
        layout: of a chunk.
        count: chunks.
    """

    def __init__(self, path: Path, layout: SlotLayout, count: int) -> None:
        record = RecordFormat(NAMESPACE, layout)
        self.slot_bytes = record.max_record_bytes
        self.total_bytes = count * self.slot_bytes
        self.notes: tuple[str, ...] = ()
        """What the tier had to say when it was opened."""
        self.chunks: list[Chunk] = make_chunks(count, layout)
        self._layout = layout
        self._path = path
        capacity = 2 * self.total_bytes + (1 << 20)
        config = DiskConfig.model_validate({"path": path, "capacity": capacity, "min_free": 0})
        self._tier = DiskTier(config)
        # As in a pool: as many slots as are loaded at once, touched before.
        self._slots = [aligned_buffer(layout.slot_bytes) for _ in range(min(AT_ONCE, count))]
        for slot in self._slots:
            slot[:] = os.urandom(ALIGNMENT) * (len(slot) // ALIGNMENT)
        self._headers = [aligned_buffer(record.header_bytes) for _ in self._slots]
        self._threads = ThreadPoolExecutor(THREADS, thread_name_prefix="tierkv-bench")
        self._fd = -1
        self._step = 1

    async def open(self) -> Self:
        """Open the tier and fill it once."""
        report = await self._tier.open(NAMESPACE, self._layout)
        self.notes = report.notes
        slab = next(self._path.glob("*/slab"))
        try:
            self._fd, self._step = os.open(slab, os.O_RDWR | os.O_DIRECT), ALIGNMENT
        except OSError:
            self._fd, self._step = os.open(slab, os.O_RDWR), 1
        await self._save_all()
        return self

    async def close(self) -> None:
        await self._tier.close()
        self._threads.shutdown()
        os.close(self._fd)

    async def read_turn(self) -> dict[str, float]:
        """Seconds to read everything: plainly one after the other, by the tier, plainly at once."""
        return {
            "sequential_read": await timed(self._read_in_sequence),
            "load": await timed(self._load_all),
            "concurrent_read": await timed(self._read_at_once),
        }

    async def write_turn(self) -> dict[str, float]:
        """Seconds to write everything: plainly one after the other, and by the tier."""
        plain = await timed(self._write_in_sequence)
        await self._tier.evict([chunk.key for chunk in self.chunks])
        return {"sequential_write": plain, "save": await timed(self._save_all)}

    def _offset(self, slot: int) -> int:
        return PAGE_BYTES + slot * self.slot_bytes

    def _memory(self, slot: int) -> list[memoryview]:
        # The tier's: plain reads into one small buffer would stay in the processor's cache.
        place = slot % len(self._slots)
        return [self._headers[place], self._slots[place]]

    def _read(self, slot: int) -> None:
        read_full(self._fd, self._memory(slot), self._offset(slot), step=self._step)

    def _read_in_sequence(self) -> None:
        for slot in range(len(self.chunks)):
            self._read(slot)

    def _read_at_once(self) -> None:
        for start in range(0, len(self.chunks), len(self._slots)):
            end = min(start + len(self._slots), len(self.chunks))
            list(self._threads.map(self._read, range(start, end)))

    def _write_in_sequence(self) -> None:
        for slot in range(len(self.chunks)):
            write_full(self._fd, self._memory(slot), self._offset(slot), step=self._step)

    async def _load_all(self) -> None:
        await self._all_by_tier(self._tier.load)

    async def _save_all(self) -> None:
        await self._all_by_tier(self._tier.save)

    async def _all_by_tier(
        self, operation: Callable[[Chunk, Sequence[memoryview]], Awaitable[Result]]
    ) -> None:
        for start in range(0, len(self.chunks), len(self._slots)):
            batch = self.chunks[start : start + len(self._slots)]
            results = await asyncio.gather(
                *[
                    operation(chunk, self._parts(self._slots[place]))
                    for place, chunk in enumerate(batch)
                ]
            )
            assert all(result.outcome is Outcome.DONE for result in results), results

    def _parts(self, slot: memoryview) -> list[memoryview]:
        stride = self._layout.part_stride
        return [slot[at : at + stride] for at in range(0, len(slot), stride)]
