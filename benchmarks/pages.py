# SPDX-License-Identifier: Apache-2.0
"""How near page copies on the CPU come to memcpy of the same bytes between the same memories.

    python benchmarks/pages.py --json pages.json

A ratio is the mover's speed over memcpy's, so 1.0 is the best that can be expected and the budget
is 0.8. Both copy between the same two pieces of memory, in turns, so that neither where they lie
nor a busy neighbour counts for one side alone. Ratios that a budget is for come first; the others
show where small pages and scattered blocks begin to cost.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch

from tierkv.pages.cpu_mover import CpuMover
from tierkv.pages.geometry import PageTable
from tierkv.pages.layout import SlotLayout
from tierkv.pages.mover import Ops
from tierkv.pages.pool import DramPool, PoolRegion

LAYERS = 30
BLOCK_TOKENS = 128


@dataclass(frozen=True, slots=True)
class Ratio:
    """Median over repeats, and the distance of the quartiles as its spread."""

    median: float
    spread: float
    repeats: int

    @classmethod
    def of(cls, values: list[float]) -> Ratio:
        low, _, high = statistics.quantiles(values, n=4)
        return cls(round(statistics.median(values), 3), round(high - low, 3), len(values))


class Bench:
    """One geometry: an engine's KV, a pool as large, and a mover between them."""

    def __init__(self, layout: str, page_bytes: int, chunk_blocks: int, total_bytes: int) -> None:
        chunks = max(1, total_bytes // (LAYERS * page_bytes * chunk_blocks))
        self.blocks = chunks * chunk_blocks
        self.chunk_blocks = chunk_blocks
        self.storage = torch.ones(LAYERS * self.blocks * page_bytes, dtype=torch.uint8)
        if layout == "LBHNC":
            views = list(self.storage.view(LAYERS, self.blocks, page_bytes))
        else:
            views = list(self.storage.view(self.blocks, LAYERS, page_bytes).transpose(0, 1))
        table = PageTable.from_layers(views)
        slot = SlotLayout(chunk_blocks * BLOCK_TOKENS, BLOCK_TOKENS, table.block_bytes)
        self.pool = DramPool.create(slot, chunks * slot.slot_bytes)
        self.region = PoolRegion.attach(self.pool.handles[0])
        self.mover = CpuMover(table, self.region)

    def ops(self, scattered: bool) -> Ops:
        """Every block once: in order, or blocks and slots shuffled as in a pool long in use."""
        rng = np.random.default_rng(0)
        order = rng.permutation if scattered else np.arange
        chunks = self.blocks // self.chunk_blocks
        slots = np.repeat(order(chunks), self.chunk_blocks)
        index = np.tile(np.arange(self.chunk_blocks), chunks)
        return np.stack([slots, index, order(self.blocks)], axis=1).astype(np.int32)

    def ratios(self, ops: Ops, repeats: int) -> tuple[list[float], list[float]]:
        """Speed over memcpy's, for saves and for loads."""
        engine = self.storage.numpy()
        pool = self.region.array.reshape(-1)[: engine.size]
        saves: list[float] = []
        loads: list[float] = []
        for repeat in range(repeats + 1):
            plain_save = _seconds(lambda: np.copyto(pool, engine))
            save = _seconds(lambda: self.mover.save(0, ops))
            plain_load = _seconds(lambda: np.copyto(engine, pool))
            load = _seconds(lambda: self.mover.load(0, ops))
            if not all(finished.ok for finished in self.mover.poll()):
                raise SystemExit("a copy failed")
            if repeat:  # the first turn touches the memory
                saves.append(plain_save / save)
                loads.append(plain_load / load)
        return saves, loads

    def first_save(self) -> float:
        """Bytes a second into slots that have no memory yet."""
        seconds = _seconds(lambda: self.mover.save(0, self.ops(scattered=False)))
        self.mover.poll()
        return self.storage.nbytes / seconds

    def close(self) -> None:
        self.mover.close()
        self.region.close()
        self.pool.close()


def _seconds(call: Callable[[], object]) -> float:
    # Of this thread's own time: neither side ever waits, and others may use the processor.
    started = time.thread_time()
    call()
    return time.thread_time() - started


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--json", type=Path, help="write the ratios here")
    parser.add_argument("--repeats", type=int, default=15, help="turns a geometry (default 15)")
    parser.add_argument("--mib", type=int, default=64, help="bytes copied a turn (default 64 MiB)")
    options = parser.parse_args()

    ratios: dict[str, Ratio] = {}
    # SmolLM2-135M as vLLM's CPU backend lays it out: blocks of 128 tokens, 96 KiB a layer.
    cases = [("dram_copy_over_memcpy", "LBHNC", 98_304, 1, True)]
    for layout in ("LBHNC", "BLHNC"):
        for kib in (1, 4, 16, 64, 256, 1024):
            for scattered in (False, True):
                name = f"copy_{layout}_{kib}KiB_{'scattered' if scattered else 'in_order'}"
                cases.append((name, layout, kib << 10, 4, scattered))
    first_saves: list[float] = []
    for name, layout, page_bytes, chunk_blocks, scattered in cases:
        bench = Bench(layout, page_bytes, chunk_blocks, options.mib << 20)
        first_saves.append(bench.first_save())
        saves, loads = bench.ratios(bench.ops(scattered), options.repeats)
        bench.close()
        ratios[f"{name}_save"] = Ratio.of(saves)
        ratios[f"{name}_load"] = Ratio.of(loads)
        for kind in ("save", "load"):
            ratio = ratios[f"{name}_{kind}"]
            print(f"{name}_{kind:5} {ratio.median:6.3f} ± {ratio.spread:.3f}")
    print(f"first save into fresh slots: {statistics.median(first_saves) / 1e9:.2f} GB/s")
    if options.json:
        document = {"ratios": {name: asdict(ratio) for name, ratio in ratios.items()}}
        options.json.write_text(json.dumps(document, indent=2) + "\n")


if __name__ == "__main__":
    main()
