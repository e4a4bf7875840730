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
from dataclasses import asdict
from pathlib import Path

from tierkv.bench.disk import AT_ONCE, NAMESPACE, DiskBench
from tierkv.bench.ratio import Ratio
from tierkv.config.disk import DiskConfig
from tierkv.keys import Chunk
from tierkv.pages.layout import SlotLayout
from tierkv.testing.samples import make_chunks
from tierkv.tiers.disk import DiskTier
from tierkv.tiers.disk.io import aligned_buffer
from tierkv.tiers.disk.table import EMPTY, PAGE_BYTES, pack_entry

LAYOUT = SlotLayout(chunk_tokens=64, block_tokens=16, block_bytes=16 * 23040)
SMALL = SlotLayout(chunk_tokens=64, block_tokens=16, block_bytes=64)


async def transfers(
    path: Path, count: int, repeats: int
) -> tuple[dict[str, Ratio], dict[str, float]]:
    """Loads and saves of `count` chunks against plain reads and writes of the same bytes."""
    bench = await DiskBench(path, LAYOUT, count).open()
    for note in bench.notes:
        print(note)
    seconds: dict[str, list[float]] = {}
    for turn in (bench.read_turn, bench.write_turn):
        for _ in range(repeats + 1):
            for name, value in (await turn()).items():
                seconds.setdefault(name, []).append(value)
    await bench.close()
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
        f"{name}_gb_per_s": round(bench.total_bytes / statistics.median(values[1:]) / 1e9, 3)
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
