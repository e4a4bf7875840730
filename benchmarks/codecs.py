# SPDX-License-Identifier: Apache-2.0
"""What a codec gains on real KV: bytes saved, and how fast it packs and unpacks.

    python benchmarks/codecs.py kv.npy --json codecs.json

The sample is KV as it lies in a slot: a `.npy` array of any shape (bfloat16 as uint16), or a file
of raw bytes. It is cut into chunks. `…_stored_over_raw` is the share of the bytes that is left.
A codec pays where the disk is slower than `…_pays_below_gb_per_s`: what it saves in reading then
takes longer to read than it takes to unpack, on one core, not overlapped.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from tierkv.codecs import KNOWN_CODECS, make_codec
from tierkv.pages.layout import align_up


@dataclass(frozen=True, slots=True)
class Ratio:
    """Median over chunks, and the distance of the quartiles as its spread."""

    median: float
    spread: float
    repeats: int

    @classmethod
    def of(cls, values: Sequence[float]) -> Ratio:
        if len(values) == 1:
            return cls(round(values[0], 4), 0.0, 1)
        low, _, high = statistics.quantiles(values, n=4)
        return cls(round(statistics.median(values), 4), round(high - low, 4), len(values))


def read_sample(path: Path) -> bytes:
    """The sample's bytes. Arrays of objects are refused: they would need pickle."""
    if path.suffix == ".npy":
        return np.ascontiguousarray(np.load(path, allow_pickle=False)).tobytes()
    return path.read_bytes()


def measure(name: str, chunks: list[memoryview]) -> tuple[list[float], float, float]:
    """Stored over raw of each chunk; GB/s of packing and of unpacking, of raw bytes."""
    codec, shares, packing, unpacking = make_codec(name), [], [], []
    target = memoryview(bytearray(len(chunks[0])))
    for chunk in chunks:
        started = time.thread_time()
        pieces = codec.encode([chunk])
        packing.append(len(chunk) / max(time.thread_time() - started, 1e-9) / 1e9)
        if pieces is None:
            shares.append(1.0)  # does not pay: stored raw, and not unpacked
            continue
        stored = memoryview(b"".join(pieces))
        shares.append(len(stored) / len(chunk))
        started = time.thread_time()
        codec.decode(stored, [target])
        unpacking.append(len(chunk) / max(time.thread_time() - started, 1e-9) / 1e9)
        assert target == chunk
    return shares, statistics.median(packing), statistics.median(unpacking or [float("inf")])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("sample", type=Path, help=".npy or raw bytes of real KV")
    parser.add_argument("--json", type=Path, help="write the results here")
    parser.add_argument("--chunk-bytes", type=int, default=1474560, help="default: 1.4 MiB")
    options = parser.parse_args()
    data, size = read_sample(options.sample), align_up(options.chunk_bytes)
    chunks = [memoryview(data)[at : at + size] for at in range(0, len(data) - size + 1, size)]
    if not chunks:
        raise SystemExit(f"{options.sample} has {len(data)} bytes, less than one chunk of {size}")
    ratios, figures = {}, {}
    for name in sorted(KNOWN_CODECS):
        if name == "raw":
            continue
        shares, packing, unpacking = measure(name, chunks)
        ratios[f"{name}_stored_over_raw"] = Ratio.of(shares)
        saved = 1 - statistics.median(shares)
        figures[f"{name}_pack_gb_per_s"] = round(packing, 3)
        figures[f"{name}_unpack_gb_per_s"] = round(unpacking, 3)
        figures[f"{name}_pays_below_gb_per_s"] = round(saved * unpacking if saved else 0.0, 3)
    result = {"ratios": {name: asdict(ratio) for name, ratio in ratios.items()}, "figures": figures}
    print(json.dumps(result, indent=2))
    if options.json:
        options.json.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
