# SPDX-License-Identifier: Apache-2.0
"""How near the Redis tier comes to redis-benchmark at the same value size, in one run.

    python benchmarks/redis.py --json redis.json

Starts a redis-server of its own on loopback. A ratio is the tier's bytes a second over
redis-benchmark's with as many connections, both measured in turns; the budget for reads is 0.7. The
tier's figure includes everything: header, key and checksum verified, bytes in their slots. Beside
it, the same reads by redis-py with hiredis, copied into the slots and not verified.

Round trips are counted between the tier and the server, with 20 ms of latency.
"""
# ruff: noqa: E402

from __future__ import annotations

import sys
from pathlib import Path

# This file is called like the package it needs: its folder must not come first.
sys.path[0] = str(Path(__file__).resolve().parent.parent)

import argparse
import asyncio
import json
import os
import resource
import statistics
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass

from redis.asyncio import Redis

from tests.redis_kit import RedisServer
from tierkv.bench.ratio import Ratio, in_parallel
from tierkv.bench.redis import NAMESPACE, all_connections
from tierkv.config.redis import RedisConfig
from tierkv.pages.layout import SlotLayout
from tierkv.testing.proxy import FaultProxy, latency
from tierkv.testing.samples import make_chunks, make_parts
from tierkv.tiers.base import Outcome
from tierkv.tiers.redis.tier import RedisTier

CONNECTIONS = 8
"""Of the tier, which is its default, and of redis-benchmark."""

LATENCY = 0.02
"""Seconds."""

SIZES = {
    # bytes of a token in all layers (64 tokens a chunk) and of which model
    "smollm2_135m": 23040,
    "llama_8b": 131072,
}


@dataclass(slots=True)
class Timing:
    """Of one run."""

    gb_per_s: float
    cpu_s_per_gb: float


def cpu_seconds(whose: int) -> float:
    used = resource.getrusage(whose)
    return used.ru_utime + used.ru_stime


@contextmanager
def timed(nbytes: int, into: list[Timing]) -> Iterator[None]:
    cpu = cpu_seconds(resource.RUSAGE_SELF)
    start = time.perf_counter()
    yield
    seconds = time.perf_counter() - start
    cpu = cpu_seconds(resource.RUSAGE_SELF) - cpu
    into.append(Timing(nbytes / 1e9 / seconds, cpu / (nbytes / 1e9)))


class Bench:
    """One value size on one server."""

    def __init__(self, server: RedisServer, token_bytes: int, total_bytes: int) -> None:
        self.layout = SlotLayout(64, 16, 16 * token_bytes)
        self.config = RedisConfig(url=server.url, load_deadline=60)  # busy machines are slow
        self.server = server
        self.count = max(8, total_bytes // self.layout.slot_bytes)
        self.chunks = make_chunks(min(self.count, 64), self.layout)
        self.width = 24
        self.slots = [make_parts(self.layout) for _ in range(self.width)]
        for (part,) in self.slots:
            part[:] = os.urandom(len(part))
        self.nbytes = self.count * self.layout.slot_bytes
        self.runs: dict[str, list[Timing]] = {
            name: [] for name in ("read", "redis_py", "benchmark_get", "save", "benchmark_set")
        }

    async def repeat(self) -> None:
        tier = RedisTier(self.config)
        await tier.open(NAMESPACE, self.layout)
        await all_connections(tier, self.config)
        for number in range(len(self.chunks)):
            self.server.set_value(f"key:{number:012d}", bytes(self.slots[0][0]))
        await in_parallel(len(self.chunks), lambda number: self._save(tier, number), 4)
        self._benchmark("get")
        with timed(self.nbytes, self.runs["read"]):
            await in_parallel(self.count, lambda number: self._load(tier, number), self.width)
        await self._redis_py(tier)
        self._benchmark("set")
        saves = min(self.count, len(self.chunks))
        await tier.clear()
        with timed(saves * self.layout.slot_bytes, self.runs["save"]):
            await in_parallel(
                saves, lambda number: self._save(tier, number), self.config.reads_at_once // 4
            )
        await tier.close()

    async def _save(self, tier: RedisTier, number: int) -> None:
        result = await tier.save(self.chunks[number], self.slots[number % self.width])
        assert result.outcome is Outcome.DONE, result

    async def _load(self, tier: RedisTier, number: int) -> None:
        slot = self.slots[number % self.width]
        result = await tier.load(self.chunks[number % len(self.chunks)], slot)
        assert result.outcome is Outcome.DONE, result

    async def _redis_py(self, tier: RedisTier) -> None:
        names = [name.encode() for name in self.server.names() if name.startswith("tierkv:")]
        width = CONNECTIONS
        clients = [
            Redis(port=self.server.port, single_connection_client=True) for _ in range(width)
        ]
        free = list(range(width))

        async def get(number: int) -> None:
            which = free.pop()
            value = await clients[which].get(names[number % len(names)])
            self.slots[which][0][:] = value[-self.layout.slot_bytes :]
            free.append(which)

        with timed(self.nbytes, self.runs["redis_py"]):
            await in_parallel(self.count, get, width)
        for client in clients:
            await client.aclose()

    def _benchmark(self, verb: str) -> None:
        # As many keys as we use: a single value would stay in the processor's cache.
        words = ["redis-benchmark", "-p", str(self.server.port), "-c", str(CONNECTIONS), "--csv"]
        words += ["-n", str(self.count), "-d", str(self.layout.slot_bytes), "-t", verb]
        words += ["-r", str(len(self.chunks))]
        cpu = cpu_seconds(resource.RUSAGE_CHILDREN)
        lines = subprocess.run(words, capture_output=True, text=True, check=True).stdout
        cpu = cpu_seconds(resource.RUSAGE_CHILDREN) - cpu
        row = next(line for line in lines.splitlines() if line.startswith(f'"{verb.upper()}"'))
        rate = float(row.replace('"', "").split(",")[1])
        self.runs[f"benchmark_{verb}"].append(
            Timing(rate * self.layout.slot_bytes / 1e9, cpu / (self.nbytes / 1e9))
        )

    def ratio(self, ours: str, theirs: str) -> Ratio:
        pairs = zip(self.runs[ours], self.runs[theirs], strict=True)
        return Ratio.of([a.gb_per_s / b.gb_per_s for a, b in pairs])

    def figures(self) -> dict[str, dict[str, float]]:
        return {
            name: {
                "gb_per_s": round(statistics.median(run.gb_per_s for run in runs), 3),
                "best_gb_per_s": round(max(run.gb_per_s for run in runs), 3),
                "cpu_s_per_gb": round(statistics.median(run.cpu_s_per_gb for run in runs), 3),
                "least_cpu_s_per_gb": round(min(run.cpu_s_per_gb for run in runs), 3),
            }
            for name, runs in self.runs.items()
        }


async def round_trips(server: RedisServer, chunks: int = 100) -> dict[str, int]:
    """Round trips of one request: to ask what is there, and to load it."""
    layout = SlotLayout(64, 16, 16 * 64)
    samples = make_chunks(chunks, layout)
    async with FaultProxy(("127.0.0.1", server.port)) as proxy:
        config = RedisConfig(url=f"redis://127.0.0.1:{proxy.port}/0")
        for is_writer in (True, False):
            tier = RedisTier(config)
            await tier.open(NAMESPACE, layout)
            await all_connections(tier, config)
            if is_writer:
                for chunk in samples:
                    await tier.save(chunk, make_parts(layout))
                await tier.close()
        proxy.toxics.append(latency(LATENCY))
        proxy.count_round_trips()
        await tier.probe([chunk.key for chunk in samples])
        asked = proxy.round_trips
        proxy.count_round_trips()
        results = await asyncio.gather(*[tier.load(c, make_parts(layout)) for c in samples])
        assert {result.outcome for result in results} == {Outcome.DONE}
        loaded = proxy.round_trips
        await tier.close()
    return {"probe": asked, "loads": loaded, "chunks": chunks}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--bytes", type=int, default=1 << 30, help="read in each repeat")
    arguments = parser.parse_args()
    ratios: dict[str, Ratio] = {}
    figures: dict[str, object] = {}
    with tempfile.TemporaryDirectory() as folder, RedisServer(Path(folder)) as server:
        for label, token_bytes in SIZES.items():
            bench = Bench(server, token_bytes, arguments.bytes)
            for _ in range(arguments.repeats):
                server.cli("FLUSHALL")
                asyncio.run(bench.repeat())
            suffix = "" if not ratios else f"_{label}"
            ratios |= {
                f"redis_read_over_benchmark{suffix}": bench.ratio("read", "benchmark_get"),
                f"redis_save_over_benchmark{suffix}": bench.ratio("save", "benchmark_set"),
                f"redis_read_over_redis_py{suffix}": bench.ratio("read", "redis_py"),
            }
            figures[label] = {"value_bytes": bench.layout.slot_bytes, **bench.figures()}
        server.cli("FLUSHALL")
        figures["round_trips_a_request"] = asyncio.run(round_trips(server))
    for name, ratio in ratios.items():
        print(f"{name:44s} {ratio.median:6.2f} ± {ratio.spread:.2f}  ({ratio.repeats} repeats)")
    print(json.dumps(figures, indent=2))
    if arguments.json:
        report = {
            "benchmark": "redis",
            "ratios": {name: asdict(ratio) for name, ratio in ratios.items()},
            "figures": figures,
        }
        arguments.json.write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()
