# SPDX-License-Identifier: Apache-2.0
"""Recordings with figures known beforehand, in the form of `tierkv stat --json`."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

START = 1_800_000_000.0


def row(number: int, **changes: Any) -> dict[str, Any]:
    """Interval `number` of two seconds: 1,000 query tokens, 600 hits, 400 of them from DRAM."""
    made = {
        "time": START + 2 * (number + 1),
        "seconds": 2.0,
        "query_tokens": 1000,
        "hit_tokens": 600,
        "gpu_hit_tokens": 500,
        "hit_rate": 0.6,
        "prefill_avoided": 0.73333,
        "avoidable": 0.1,
        "outcomes": {"hit": 600, "miss": 250, "late": 100, "tail": 50},
        "misses": {"never_seen": 200, "evicted": 50},
        "saved_prefill_seconds": 0.5,
        "load_seconds": 0.1,
        "tiers": {
            "dram": tier(hit_tokens=400, used_bytes=3 << 30, capacity_bytes=4 << 30),
            "disk": tier(hit_tokens=200, load_bytes=6_000_000, save_bytes=2_000_000,
                         used_bytes=10 << 30, capacity_bytes=100 << 30),
        },
    }  # fmt: skip
    return {**made, **changes}


def tier(**changes: Any) -> dict[str, Any]:
    made = dict.fromkeys(("hit_tokens", "load_bytes", "save_bytes", "errors", "breaker_state"), 0)
    return {**made, "hit_rate": None, "used_bytes": 0, "capacity_bytes": 0, **changes}


def idle(number: int) -> dict[str, Any]:
    """An interval without prompts."""
    nothing = {"hit": 0, "miss": 0, "late": 0, "tail": 0}
    return row(
        number, query_tokens=0, hit_tokens=0, gpu_hit_tokens=0, hit_rate=None, outcomes=nothing,
        misses={"never_seen": 0, "evicted": 0}, saved_prefill_seconds=0, load_seconds=0,
        tiers={"dram": tier(), "disk": tier()},
    )  # fmt: skip


def write(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(one) + "\n" for one in rows))
    return path


def day() -> list[dict[str, Any]]:
    """An invented day in the life of an engine: it warms up, a disk fails, a quiet hour."""
    rows = []
    for n in range(288):
        if 200 <= n < 212:
            rows.append({**idle(n), "time": START + 300 * (n + 1), "seconds": 300.0})
            continue
        warm = 1 - math.exp(-n / 60)
        queries = int(4e5 * (1.2 + math.sin(n / 46)))
        broken = 120 <= n < 140
        dram = int(queries * 0.38 * warm)
        disk = 0 if broken else int(queries * 0.3 * warm)
        lost = int(queries * 0.3 * warm) if broken else int(queries * 0.004)
        tail = int(queries * 0.03)
        miss = queries - dram - disk - lost - tail
        rows.append(
            row(
                n, time=START + 300 * (n + 1), seconds=300.0, query_tokens=queries,
                hit_tokens=dram + disk, gpu_hit_tokens=int(queries * 0.4),
                outcomes={"hit": dram + disk, "miss": miss, "unavailable": lost if broken else 0,
                          "late": 0 if broken else lost, "tail": tail},
                misses={"never_seen": int(miss * 0.8), "evicted": miss - int(miss * 0.8)},
                saved_prefill_seconds=(dram + disk) / 5000, load_seconds=disk / 40000,
                tiers={
                    "dram": tier(hit_tokens=dram, used_bytes=int((32 << 30) * min(1, n / 40)),
                                 capacity_bytes=32 << 30),
                    "disk": tier(hit_tokens=disk, load_bytes=disk * 131072,
                                 save_bytes=0 if broken else miss * 131072,
                                 used_bytes=int((1 << 40) * 0.8 * warm), capacity_bytes=1 << 40,
                                 errors=7 if n == 120 else 0, breaker_state=2 if broken else 0),
                },
            )
        )  # fmt: skip
    return rows
