# SPDX-License-Identifier: Apache-2.0
"""A recording in numbers: everything that its page, its table and its JSON show.

Rates are 0 to 1 and null without data, amounts null where nobody counted.
"""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

from tierkv.report.recording import Recording, merged
from tierkv.report.surroundings import machine, versions
from tierkv.telemetry.catalog import BY_NAME
from tierkv.telemetry.counters import Snapshot
from tierkv.telemetry.rates import TokenRates, histogram, quantile, totals

SCHEMA = 1
"""Raised when a field changes its meaning or goes."""

Summary = dict[str, Any]

_IO = "tierkv_io_duration_seconds"


def summarize(recording: Recording) -> Summary:
    """All figures of a recording."""
    whole = merged(recording.rows)
    rates = rates_of(whole)
    changes = recording.changes or {}
    first = recording.rows[0]
    misses = whole["misses"]
    if misses is None and recording.changes is not None:
        misses = _by(changes, "tierkv_miss_tokens_total", "reason")
    return {
        "schema": SCHEMA,
        "what": "tierkv report: what an engine did",
        "origin": recording.origin,
        "engine": {
            name: recording.info[name]
            for name in ("model", "version", "vllm", "namespace")
            if name in recording.info
        },
        "from": _when(first["time"] - first["seconds"]),
        "to": _when(whole["time"]),
        "seconds": whole["seconds"],
        "intervals": len(recording.rows),
        "query_tokens": whole["query_tokens"],
        "hit_tokens": whole["hit_tokens"],
        "gpu_hit_tokens": whole["gpu_hit_tokens"],
        "hit_rate": rates.hit,
        "prefill_avoided": rates.prefill_avoided if whole["gpu_hit_tokens"] is not None else None,
        "avoidable": rates.avoidable if whole["outcomes"] is not None else None,
        "outcomes": whole["outcomes"],
        "misses": misses,
        "saved_prefill_seconds": whole["saved_prefill_seconds"],
        "load_seconds": whole["load_seconds"],
        "tiers": {
            name: {
                **tier,
                "hit_rate": rates.hit_of(name),
                **_details(name, changes),
            }
            for name, tier in whole["tiers"].items()
        },
        "errors": _labelled(changes, "tierkv_errors_total", "tier", "kind"),
        "saves_dropped": _labelled(changes, "tierkv_saves_dropped_total", "tier", "reason"),
        "declined": _by(changes, "tierkv_declined_requests_total", "reason"),
        "made_with": versions(),
        "made_on": machine(),
    }


def rates_of(row: dict[str, Any]) -> TokenRates:
    """The one definition of the hit rate, over a whole recording or an interval of it."""
    hits = {name: tier.get("hit_tokens") or 0 for name, tier in (row.get("tiers") or {}).items()}
    if not any(hits.values()):
        hits = {"all tiers": row.get("hit_tokens") or 0}
    return TokenRates(
        row.get("query_tokens") or 0,
        row.get("gpu_hit_tokens") or 0,
        row.get("outcomes") or {},
        hits,
    )


def _details(tier: str, changes: Snapshot) -> dict[str, float | None]:
    """What only all counters tell of a tier."""
    made: dict[str, float | None] = {}
    for op in ("load", "save"):
        value = histogram(changes, _IO, tier=tier, op=op)
        for name, q in (("p50", 0.5), ("p99", 0.99)):
            made[f"{op}_{name}_s"] = quantile(value, BY_NAME[_IO].buckets, q)
    evicted = totals(changes, "tierkv_evictions_total", "tier", "reason")
    made["evicted_chunks"] = evicted.get((tier, "capacity"))
    return made


def _by(changes: Snapshot, metric: str, label: str) -> dict[str, float] | None:
    if metric not in changes:
        return None
    return {key[0]: value for key, value in totals(changes, metric, label).items()}


def _labelled(changes: Snapshot, metric: str, *labels: str) -> dict[str, float] | None:
    """Those that are not zero, as `tier kind`."""
    if metric not in changes:
        return None
    return {" ".join(k): value for k, value in totals(changes, metric, *labels).items() if value}


def _when(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="seconds")
