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
from dataclasses import asdict
from pathlib import Path

from tierkv.bench.dram import PageBench
from tierkv.bench.ratio import Ratio


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
        bench = PageBench(layout, page_bytes, chunk_blocks, options.mib << 20)
        first_saves.append(bench.first_save())
        ops = bench.ops(scattered)
        # The first turn touches the memory.
        turns = [bench.turn(ops) for _ in range(options.repeats + 1)][1:]
        bench.close()
        for kind in ("save", "load"):
            ratios[f"{name}_{kind}"] = Ratio.of(
                [turn[f"plain_{kind}"] / turn[kind] for turn in turns]
            )
            ratio = ratios[f"{name}_{kind}"]
            print(f"{name}_{kind:5} {ratio.median:6.3f} ± {ratio.spread:.3f}")
    print(f"first save into fresh slots: {statistics.median(first_saves) / 1e9:.2f} GB/s")
    if options.json:
        document = {"ratios": {name: asdict(ratio) for name, ratio in ratios.items()}}
        options.json.write_text(json.dumps(document, indent=2) + "\n")


if __name__ == "__main__":
    main()
