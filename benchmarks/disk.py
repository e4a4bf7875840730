# SPDX-License-Identifier: Apache-2.0
"""How near the disk tier comes to plain O_DIRECT reads and writes of the same bytes.

    python benchmarks/disk.py --path /mnt/nvme --json disk.json

Chunks have the size of SmolLM2-135M's (64 tokens, 1.4 MiB); 32 are loaded at once, as when a
prompt of 2,048 tokens hits. Ratios are speeds over speeds, measured in turns on the same file, so
that a busy neighbour counts for both sides; the budget for `load_over_sequential_read` is 0.9.
`figures` has what is no ratio: µs of Python a chunk, ms to reopen, GB/s.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import tempfile
import time
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

from tierkv.config.disk import DiskConfig
from tierkv.keys import Chunk
from tierkv.pages.layout import SlotLayout
from tierkv.testing.samples import make_chunks
from tierkv.tiers.base import Outcome
from tierkv.tiers.disk import DiskTier
from tierkv.tiers.disk.io import aligned_buffer, read_full, write_full
from tierkv.tiers.disk.table import EMPTY, PAGE_BYTES, pack_entry

NAMESPACE = b"benchmark-of-dsk"
LAYOUT = SlotLayout(chunk_tokens=64, block_tokens=16, block_bytes=16 * 23040)
SMALL = SlotLayout(chunk_tokens=64, block_tokens=16, block_bytes=64)
AT_ONCE = 32
STEP = 4096


@dataclass(frozen=True, slots=True)
class Ratio:
    """Median over repeats, and the distance of the quartiles as its spread."""

    median: float
    spread: float
    repeats: int

    @classmethod
    def of(cls, values: Sequence[float]) -> Ratio:
        low, _, high = statistics.quantiles(values, n=4)
        return cls(round(statistics.median(values), 3), round(high - low, 3), len(values))


class Bench:
    """A tier full of chunks, and the same slab opened once more for plain reads."""

    def __init__(self, tier: DiskTier, slab: Path, chunks: list[Chunk]) -> None:
        self.tier = tier
        self.chunks = chunks
        self.slot_bytes = tier._volume.slot_bytes
        self.fd = os.open(slab, os.O_RDWR | os.O_DIRECT)
        # As in a pool: as many slots as are loaded at once, touched before.
        self.slots = [aligned_buffer(LAYOUT.part_stride) for _ in range(AT_ONCE)]
        for slot in self.slots:
            slot[:] = os.urandom(len(slot))
        self.headers = [aligned_buffer(STEP) for _ in range(AT_ONCE)]
        self.threads = ThreadPoolExecutor(8)

    def offset(self, slot: int) -> int:
        return PAGE_BYTES + slot * self.slot_bytes

    def memory(self, slot: int) -> list[memoryview]:
        # The tier's: plain reads into one small buffer would stay in the processor's cache.
        return [self.headers[slot % AT_ONCE], self.slots[slot % AT_ONCE]]

    def read(self, slot: int) -> None:
        read_full(self.fd, self.memory(slot), self.offset(slot), step=STEP)

    def read_in_sequence(self) -> None:
        for slot in range(len(self.chunks)):
            self.read(slot)

    def read_at_once(self) -> None:
        for start in range(0, len(self.chunks), AT_ONCE):
            end = min(start + AT_ONCE, len(self.chunks))
            list(self.threads.map(self.read, range(start, end)))

    def write_in_sequence(self) -> None:
        for slot in range(len(self.chunks)):
            write_full(self.fd, self.memory(slot), self.offset(slot), step=STEP)

    async def load_all(self) -> None:
        for start in range(0, len(self.chunks), AT_ONCE):
            results = await asyncio.gather(
                *[
                    self.tier.load(chunk, [self.slots[place]])
                    for place, chunk in enumerate(self.chunks[start : start + AT_ONCE])
                ]
            )
            assert all(result.outcome is Outcome.DONE for result in results), results

    async def save_all(self) -> None:
        for start in range(0, len(self.chunks), AT_ONCE):
            results = await asyncio.gather(
                *[
                    self.tier.save(chunk, [self.slots[place]])
                    for place, chunk in enumerate(self.chunks[start : start + AT_ONCE])
                ]
            )
            assert all(result.outcome is Outcome.DONE for result in results), results


async def timed(action: Callable[[], Awaitable[None] | None]) -> float:
    """Seconds of one call."""
    started = time.perf_counter()
    waiting = action()
    if waiting is not None:
        await waiting
    return time.perf_counter() - started


async def transfers(
    path: Path, count: int, repeats: int
) -> tuple[dict[str, Ratio], dict[str, float]]:
    """Loads and saves of `count` chunks against plain reads and writes of the same bytes."""
    tier = DiskTier(DiskConfig(path=path, capacity=2 << 30, min_free=0))
    report = await tier.open(NAMESPACE, LAYOUT)
    for note in report.notes:
        print(note)
    chunks = make_chunks(count, LAYOUT)
    bench = Bench(tier, next(path.glob("*/slab")), chunks)
    await bench.save_all()
    seconds: dict[str, list[float]] = {}
    for _ in range(repeats + 1):
        for name, action in (
            ("sequential_read", bench.read_in_sequence),
            ("load", bench.load_all),
            ("concurrent_read", bench.read_at_once),
        ):
            seconds.setdefault(name, []).append(await timed(action))
    for _ in range(repeats + 1):
        seconds.setdefault("sequential_write", []).append(await timed(bench.write_in_sequence))
        await tier.evict([chunk.key for chunk in chunks])
        seconds.setdefault("save", []).append(await timed(bench.save_all))
    await tier.close()
    total = count * bench.slot_bytes
    ratios = {
        f"{ours}_over_{plain}": Ratio.of(
            # The first round warms up.
            [b / a for a, b in zip(seconds[ours][1:], seconds[plain][1:], strict=True)]
        )
        for ours, plain in (
            ("load", "sequential_read"),
            ("load", "concurrent_read"),
            ("save", "sequential_write"),
        )
    }
    figures = {
        f"{name}_gb_per_s": round(total / statistics.median(values[1:]) / 1e9, 3)
        for name, values in seconds.items()
    }
    return ratios, figures


async def overhead(path: Path, repeats: int) -> float:
    """µs a load of a chunk so small that nearly all of it is the tier's own work."""
    tier = DiskTier(DiskConfig(path=path, capacity=64 << 20, min_free=0, direct_io="never"))
    await tier.open(NAMESPACE, SMALL)
    chunks = make_chunks(AT_ONCE, SMALL)
    slots = [aligned_buffer(SMALL.part_stride) for _ in chunks]
    for chunk, slot in zip(chunks, slots, strict=True):
        await tier.save(chunk, [slot])
    spent = []
    for _ in range(10 * repeats):
        started = time.process_time()
        await asyncio.gather(
            *[tier.load(chunk, [slot]) for chunk, slot in zip(chunks, slots, strict=True)]
        )
        spent.append((time.process_time() - started) / AT_ONCE)
    await tier.close()
    return statistics.median(spent) * 1e6


async def reopening(path: Path, count: int) -> float:
    """ms to open a directory that holds `count` chunks; the slab is sparse, its size as real."""
    config = DiskConfig(path=path, capacity=1 << 20, min_free=0)
    tier = DiskTier(config)
    await tier.open(NAMESPACE, SMALL)
    chunk = make_chunks(1, SMALL)[0]
    folder, slot_bytes = next(path.glob("*-v1")), tier._volume.slot_bytes
    await tier.close()
    with (folder / "table").open("ab") as table:
        for slot in range(count):
            named = Chunk(slot.to_bytes(16, "little"), chunk.parent, chunk.content_key, b"")
            table.write(
                pack_entry(
                    slot,
                    named,
                    sequence=slot + 1,
                    created_ns=1,
                    stored_bytes=SMALL.slot_bytes,
                    codec_id=0,
                )
            )
        table.write(EMPTY)
    os.truncate(folder / "slab", PAGE_BYTES + (count + 1) * slot_bytes)
    config = config.model_copy(update={"capacity": (count + 100) * (slot_bytes + 168) + 65536})
    tier = DiskTier(config)
    report = await tier.open(NAMESPACE, SMALL)
    assert report.recovered_chunks == count, report
    await tier.close()
    return report.seconds * 1e3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, help="write the results here")
    parser.add_argument(
        "--path", type=Path, default=Path(), help="directory on the disk to measure"
    )
    parser.add_argument("--chunks", type=int, default=256, help="chunks of 1.4 MiB")
    parser.add_argument("--repeats", type=int, default=9)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.path, prefix="tierkv-bench-") as folder:
        path = Path(folder)
        ratios, figures = asyncio.run(transfers(path / "a", options.chunks, options.repeats))
        figures["cpu_us_a_small_load"] = round(
            asyncio.run(overhead(path / "b", options.repeats)), 1
        )
        figures["reopen_ms_for_100k_chunks"] = round(asyncio.run(reopening(path / "c", 100_000)), 1)
    result = {"ratios": {name: asdict(ratio) for name, ratio in ratios.items()}, "figures": figures}
    print(json.dumps(result, indent=2))
    if options.json:
        options.json.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
