# SPDX-License-Identifier: Apache-2.0
"""An engine that exists on its stats socket alone: numbers that a test chooses, a real server."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tierkv.stats.publisher import Published, Publisher
from tierkv.stats.server import StatsServer
from tierkv.stats.source import Sample
from tierkv.telemetry.counters import Counters
from tierkv.telemetry.requests import Part, RequestRecord

GIB = 1 << 30
START = 1_800_000_000.0
"""When the engine started, in seconds since 1970."""

INFO: dict[str, Any] = {
    "version": "0.1.0",
    "vllm": "0.32.0",
    "record_format": "1",
    "model": "llama-8b",
    "namespace": "ab" * 16,
    "started": START,
    "tiers": [{"name": name, "type": name} for name in ("dram", "disk", "redis")],
    "chunk_tokens": 64,
    "chunk_bytes": 8 << 20,
    "pid": 4711,
    "control": False,
}


def records(count: int, at: float) -> tuple[RequestRecord, ...]:
    """Requests of all kinds, the last one at `at`."""
    kinds = (
        (Part("hit", "dram", "", 6144), Part("tail", "none", "", 56)),
        (
            Part("hit", "dram", "", 2048),
            Part("hit", "disk", "", 4096),
            Part("miss", "none", "never_seen", 1024),
            Part("tail", "none", "", 12),
        ),
        (Part("miss", "disk", "evicted", 9600), Part("tail", "none", "", 40)),
        (Part("hit", "redis", "", 1024), Part("late", "redis", "", 3072)),
        (Part("declined", "none", "no_read", 700),),
        (Part("failed", "disk", "checksum", 2048), Part("miss", "redis", "expired", 64)),
    )
    made = []
    for i in range(count):
        parts = kinds[i % len(kinds)]
        gpu = 512 * (i % 3)
        made.append(
            RequestRecord(
                f"cmpl-{i * 2654435761 % (1 << 32):08x}b6c94a1e-0",
                at - 3.7 * (count - 1 - i),
                sum(part.tokens for part in parts) + gpu,
                gpu,
                parts,
                0.0001 + 0.013 * (i % 4),
                0.002 * (i % 5),
            )
        )
    return tuple(made)


@dataclass
class FakeEngine:
    """Counters that grow as told, and what `top` would read of them."""

    tiers: tuple[str, ...] = ("dram", "disk", "redis")

    def __post_init__(self) -> None:
        self.counters = Counters(self.tiers)
        self.time = START
        put = self.counters.set
        for tier, capacity in zip(self.tiers, (32 * GIB, 1024 * GIB, 0), strict=False):
            put("tierkv_capacity_bytes", capacity, tier=tier)

    def pass_time(self, seconds: float, load: float = 1.0) -> None:
        """Some traffic; `load` 0 is none at all."""
        self.time += seconds
        if not load:
            return
        add, put = self.counters.add, self.counters.set
        query = "tierkv_query_tokens_total"
        unit = 1000 * seconds * load
        for tier, part in zip(self.tiers, (0.48, 0.191, 0.043), strict=False):
            reuse = "any_text" if tier == "redis" else "exact"
            add(query, unit * part, outcome="hit", tier=tier, reuse=reuse)
        for outcome, part in (("miss", 0.21), ("late", 0.011), ("tail", 0.055), ("skipped", 0.01)):
            add(query, unit * part, outcome=outcome, tier="none", reuse="none")
        miss = "tierkv_miss_tokens_total"
        add(miss, unit * 0.13, reason="never_seen", tier="none")
        add(miss, unit * 0.06, reason="evicted", tier=self.tiers[-1])
        add(miss, unit * 0.02, reason="evicted", tier=self.tiers[0])
        add("tierkv_gpu_hit_tokens_total", unit * 0.29)
        add("tierkv_saved_prefill_seconds_total", unit / 4000)
        add("tierkv_load_seconds_total", unit / 90000)
        for at, tier in enumerate(self.tiers[1:], 1):
            add("tierkv_io_bytes_total", unit * 90e3 / at**2, tier=tier, op="load")
            add("tierkv_io_bytes_total", unit * 40e3 / at**2, tier=tier, op="save")
            for i in range(10):
                took = 0.0008 * at**4 * (i + 1)
                self.counters.observe("tierkv_io_duration_seconds", took, tier=tier, op="load")
            put("tierkv_queue_depth", 3 * at, tier=tier, op="save")
        for tier, used in zip(self.tiers, (30.1 * GIB, 611 * GIB, 88 * GIB), strict=False):
            put("tierkv_used_bytes", used, tier=tier)
        if "redis" in self.tiers:
            put("tierkv_breaker_state", 1, tier="redis")

    def fail(self, tier: str, kind: str, count: int) -> None:
        self.counters.add("tierkv_errors_total", count, tier=tier, kind=kind)

    def sample(self, requests: int = 40) -> Sample:
        told = [record.as_dict() for record in records(requests, self.time)] if requests else []
        return Sample(self.time, False, self.counters.snapshot(), told)

    def serve(self, control: bool = False) -> tuple[StatsServer, Publisher]:
        """A real socket that tells the numbers as they are now; close the server."""
        publisher = Publisher(self.counters.snapshot, tuple)
        server = StatsServer(publisher, INFO, control)
        server.start()
        self.publish(publisher)
        return server, publisher

    def publish(self, publisher: Publisher, requests: int = 40) -> None:
        publisher.last = Published(
            self.time, False, self.counters.snapshot(), records(requests, self.time)
        )


class FakeSource:
    """A source without a socket: each look is another step of the engine."""

    def __init__(self, engine: FakeEngine, waves: bool = True) -> None:
        self.info = INFO
        self.origin = "pid 4711"
        self.engine = engine
        self.waves = waves
        self.looks = 0
        self.closed = False

    def read(self, requests: int) -> Sample:
        self.looks += 1
        if self.waves:
            self.engine.pass_time(1.0, (self.looks * 7 % 11) / 4)
        return self.engine.sample(min(requests, 40))

    def close(self) -> None:
        self.closed = True
