# SPDX-License-Identifier: Apache-2.0
"""The hit rate, defined once: the log line, `tierkv top`, `stat` and the reports all ask here.

    hit rate = hit tokens / query tokens

over the same requests; see `docs/reference/metrics.md`. What has no denominator is None, which
`percent` shows as –: no data is not zero.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import cast

from tierkv.telemetry.catalog import BY_NAME, Kind
from tierkv.telemetry.counters import HistogramValue, Series, Snapshot

AVOIDABLE = ("failed", "late", "unavailable", "skipped")
"""Outcomes of query tokens that a faster or healthier tier would have made hits."""

NO_DATA = "–"


@dataclass(frozen=True, slots=True)
class TokenRates:
    """Where prompt tokens came from. Rates are 0 to 1, None where there is no data.

    Attributes:
        query_tokens: prompt tokens that the engine's own prefix cache lacked.
        gpu_tokens: prompt tokens that it had.
        outcomes: query tokens by outcome.
        hits: hit tokens by tier.
    """

    query_tokens: float
    gpu_tokens: float
    outcomes: Mapping[str, float]
    hits: Mapping[str, float]

    @property
    def hit_tokens(self) -> float:
        return sum(self.hits.values())

    @property
    def prompt_tokens(self) -> float:
        return self.query_tokens + self.gpu_tokens

    @property
    def hit(self) -> float | None:
        """The hit rate."""
        return ratio(self.hit_tokens, self.query_tokens)

    def hit_of(self, tier: str) -> float | None:
        """The tier's part of the hit rate; the tiers add up."""
        return ratio(self.hits.get(tier, 0), self.query_tokens)

    @property
    def avoidable(self) -> float | None:
        """Query tokens that faster or healthier tiers would have made hits, of all."""
        return ratio(sum(self.outcomes.get(name, 0) for name in AVOIDABLE), self.query_tokens)

    def outcome(self, name: str) -> float | None:
        return ratio(self.outcomes.get(name, 0), self.query_tokens)

    @property
    def gpu(self) -> float | None:
        """Prompt tokens that the engine's own prefix cache held, of all prompt tokens."""
        return ratio(self.gpu_tokens, self.prompt_tokens)

    @property
    def prefill_avoided(self) -> float | None:
        """Hits of the engine's own cache and of TierKV, of all prompt tokens."""
        return ratio(self.gpu_tokens + self.hit_tokens, self.prompt_tokens)


def ratio(part: float, whole: float) -> float | None:
    """None where there is no whole."""
    return part / whole if whole else None


def percent(rate: float | None, digits: int = 1) -> str:
    """`71.4%`, or – without data."""
    return NO_DATA if rate is None else f"{100 * rate:.{digits}f}%"


def token_rates(rows: Mapping[tuple[str, str], float], gpu_tokens: float = 0) -> TokenRates:
    """From query tokens by (outcome, tier)."""
    outcomes: dict[str, float] = {}
    hits: dict[str, float] = {}
    for (outcome, tier), tokens in rows.items():
        outcomes[outcome] = outcomes.get(outcome, 0) + tokens
        if outcome == "hit":
            hits[tier] = hits.get(tier, 0) + tokens
    return TokenRates(sum(outcomes.values()), gpu_tokens, outcomes, hits)


def rates(snapshot: Snapshot) -> TokenRates:
    """Of a snapshot: since the engine started; of a `difference`: in between."""
    rows = totals(snapshot, "tierkv_query_tokens_total", "outcome", "tier")
    return token_rates(
        cast("dict[tuple[str, str], float]", rows), total(snapshot, "tierkv_gpu_hit_tokens_total")
    )


def difference(newer: Snapshot, older: Snapshot) -> Snapshot:
    """What happened between two snapshots of one engine; gauges are the newer one's.

    A counter that is smaller than before has started anew: its value is what happened since.
    """
    result: Snapshot = {}
    for name, series in newer.items():
        metric = BY_NAME.get(name)
        if metric is not None and metric.kind is Kind.GAUGE:
            result[name] = series
            continue
        before = {_key(one): one["value"] for one in older.get(name, ())}
        result[name] = [
            {"labels": one["labels"], "value": _minus(one["value"], before.get(_key(one)))}
            for one in series
        ]
    return result


def total(snapshot: Snapshot, name: str, **labels: str) -> float:
    """Sum of the series with these labels, 0 if there is none."""
    return sum(
        cast(float, one["value"])
        for one in snapshot.get(name, ())
        if labels.items() <= one["labels"].items()
    )


def totals(snapshot: Snapshot, name: str, *labels: str) -> dict[tuple[str, ...], float]:
    """Sums by these labels."""
    sums: dict[tuple[str, ...], float] = {}
    for one in snapshot.get(name, ()):
        key = tuple(one["labels"][label] for label in labels)
        sums[key] = sums.get(key, 0) + cast(float, one["value"])
    return sums


def histogram(snapshot: Snapshot, name: str, **labels: str) -> HistogramValue | None:
    """The one series with these labels."""
    for one in snapshot.get(name, ()):
        if one["labels"] == labels:
            return cast(HistogramValue, one["value"])
    return None


def quantile(value: HistogramValue | None, bounds: Sequence[float], q: float) -> float | None:
    """Estimate of a quantile: linear within its bucket, as Prometheus does; None without data.

    What lies above the last bound is given as that bound.
    """
    if value is None or not value["count"]:
        return None
    rank, seen, low = q * value["count"], 0, 0.0
    for count, high in zip(value["buckets"], bounds, strict=False):
        if count and seen + count >= rank:
            return low + (high - low) * (rank - seen) / count
        seen += count
        low = high
    return bounds[-1]


def tier_names(snapshot: Snapshot) -> list[str]:
    """Names of the tiers, DRAM first, as the engine declared them."""
    return list(_unique(one["labels"]["tier"] for one in snapshot.get("tierkv_capacity_bytes", ())))


def _unique(names: Iterator[str]) -> dict[str, None]:
    return dict.fromkeys(names)


def _key(one: Series) -> tuple[str, ...]:
    return tuple(one["labels"].values())


def _minus(
    new: float | HistogramValue, old: float | HistogramValue | None
) -> float | HistogramValue:
    if old is None:
        return new
    if isinstance(new, dict) and isinstance(old, dict):
        if new["count"] < old["count"]:
            return new
        return {
            "count": new["count"] - old["count"],
            "sum": new["sum"] - old["sum"],
            "buckets": [a - b for a, b in zip(new["buckets"], old["buckets"], strict=True)],
        }
    assert isinstance(new, int | float)
    assert isinstance(old, int | float)
    return new - old if new >= old else new
