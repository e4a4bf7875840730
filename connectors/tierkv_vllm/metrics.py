# SPDX-License-Identifier: Apache-2.0
"""From the Store's counters to vLLM's own `/metrics` page and its periodic log line.

Counters live beside the scheduler. What changed in a step travels with vLLM's scheduler statistics
to the API server, where the same names are Prometheus metrics with vLLM's `model_name` and `engine`
in front of their own labels. Every series exists from the start, at zero.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (
    KVConnectorPromMetrics,
    KVConnectorStats,
    PromMetric,
    PromMetricT,
)

from tierkv.config import load_config
from tierkv.telemetry.catalog import CATALOG, Kind, Metric
from tierkv.telemetry.counters import merge_changes

if TYPE_CHECKING:
    from vllm.config import VllmConfig

    from tierkv_vllm.scheduler import SchedulerSide


class TierKVStats(KVConnectorStats):
    """What changed since the last call; `data` is a `tierkv.telemetry.counters.Changes`."""

    def reset(self) -> None:
        self.data = {}

    def aggregate(self, other: KVConnectorStats) -> KVConnectorStats:
        self.data = merge_changes(self.data, other.data)
        return self

    def is_empty(self) -> bool:
        return not self.data

    def reduce(self) -> dict[str, int | float | str]:
        """The interval in one line: the hit rate and its parts, as percent of query tokens."""
        outcomes: dict[tuple[str, str], float] = {}
        for name, labels, value in self.data.get("counters", ()):
            if name == "tierkv_query_tokens_total":
                outcome, tier, _ = labels
                outcomes[outcome, tier] = outcomes.get((outcome, tier), 0) + value
        total = sum(outcomes.values())
        if not total:
            return {"TierKV query tokens": 0}
        hits = {tier: n for (outcome, tier), n in outcomes.items() if outcome == "hit"}
        line: dict[str, int | float | str] = {
            "TierKV query tokens": int(total),
            "hit rate": f"{100 * sum(hits.values()) / total:.1f}%",
        }
        line.update({f"{tier} hits": f"{100 * n / total:.1f}%" for tier, n in hits.items()})
        for outcome in ("failed", "late", "unavailable", "skipped"):
            lost = sum(n for (name, _), n in outcomes.items() if name == outcome)
            if lost:
                line[outcome] = f"{100 * lost / total:.1f}%"
        return line


def collect(side: SchedulerSide) -> TierKVStats | None:
    """Everything that changed since the last step; None if nothing did."""
    side.store.refresh_gauges()
    changes = side.store.context.counters.drain()
    return TierKVStats(data=changes) if changes else None


class TierKVPromMetrics(KVConnectorPromMetrics):
    """The catalogue as Prometheus metrics, one child an engine and series."""

    def __init__(
        self,
        vllm_config: VllmConfig,
        metric_types: dict[type[PromMetric], type[PromMetricT]],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        extra = vllm_config.kv_transfer_config.kv_connector_extra_config
        tiers = [tier.name for tier in load_config(inline=extra).config.tiers]
        self._metrics = {metric.name: self._make(metric) for metric in CATALOG}
        for metric in CATALOG:
            for values in metric.series(tiers):
                for engine in per_engine_labelvalues:
                    self._child(metric.name, values, engine)

    def _make(self, metric: Metric) -> Any:
        names = [*self._labelnames, *(label.name for label in metric.labels)]
        if metric.kind is Kind.HISTOGRAM:
            return self._histogram_cls(
                metric.name, metric.help, labelnames=names, buckets=metric.buckets
            )
        kind = self._counter_cls if metric.kind is Kind.COUNTER else self._gauge_cls
        return kind(metric.name, metric.help, labelnames=names)

    def _child(self, name: str, values: tuple[str, ...], engine: int) -> Any:
        # prometheus_client keeps the children itself; looking one up is a dict access.
        return self._metrics[name].labels(*self.per_engine_labelvalues[engine], *values)

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """Apply one step's changes of one engine."""
        for name, labels, value in transfer_stats_data.get("counters", ()):
            self._child(name, labels, engine_idx).inc(value)
        for name, labels, value in transfer_stats_data.get("gauges", ()):
            self._child(name, labels, engine_idx).set(value)
        for name, labels, samples in transfer_stats_data.get("samples", ()):
            child = self._child(name, labels, engine_idx)
            for sample in samples:
                child.observe(sample)


