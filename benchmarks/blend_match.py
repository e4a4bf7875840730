# SPDX-License-Identifier: Apache-2.0
"""How long it takes to find donors for a long prompt among many stored chunks.

    python benchmarks/blend_match.py [--chunks 1000000] [--tokens 131072] [--json F]

Random text, which is the worst case for building the index and a fair one for asking it; a tenth of
the prompt is stored text at odd offsets. One thread, as in the scheduler. The time is that of
`find_runs` as a whole: hashing every window, filtering, comparing text, growing the matches.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path

import numpy as np

from tierkv.blend.donors import DonorIndex
from tierkv.blend.match import find_runs
from tierkv.keys import ChunkChain, Namespace

CHUNK_TOKENS = 64
DOCUMENT_CHUNKS = 16
VOCABULARY = 50_000


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--chunks", type=int, default=1_000_000)
    parser.add_argument("--tokens", type=int, default=131_072)
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    rng = np.random.default_rng(1)
    scope = Namespace({"model": "benchmark"}).scope()
    index = DonorIndex(CHUNK_TOKENS, args.chunks, b"benchmark")
    kept = []
    began = time.perf_counter()
    for number in range(args.chunks // DOCUMENT_CHUNKS):
        document = rng.integers(0, VOCABULARY, DOCUMENT_CHUNKS * CHUNK_TOKENS, dtype=np.int32)
        chain = ChunkChain(scope, CHUNK_TOKENS)
        chain.extend(document)
        index.add(chain.chunks, 0, scope)
        if number % 1000 == 0:
            kept.append(document)
    building = time.perf_counter() - began
    prompt = rng.integers(0, VOCABULARY, args.tokens, dtype=np.int32)
    stored = 0
    for place, document in enumerate(kept[: args.tokens // 10 // len(kept[0])]):
        begin = 37 + place * 10 * len(document)
        prompt[begin : begin + len(document)] = document
        stored += len(document)
    times = []
    for _ in range(args.repeats):
        began = time.perf_counter()
        runs = find_runs(index, prompt, 0, scope, lambda key: True)
        times.append((time.perf_counter() - began) * 1e3)
    found = sum(map(len, runs))
    if found < stored:
        raise SystemExit(f"{found} tokens found of {stored} that are stored")
    low, middle, high = statistics.quantiles(times, n=4)
    result = {
        "chunks": len(index),
        "prompt_tokens": args.tokens,
        "stored_tokens": stored,
        "found_tokens": found,
        "find_ms": middle,
        "find_ms_iqr": high - low,
        "add_us_a_chunk": building / len(index) * 1e6,
    }
    print(json.dumps(result, indent=1))
    if args.json:
        args.json.write_text(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
