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
from tierkv.telemetry.build import build_labels
from tierkv.telemetry.catalog import CATALOG, Kind, Metric
from tierkv.telemetry.counters import merge_changes
from tierkv.telemetry.rates import AVOIDABLE, token_rates

if TYPE_CHECKING:
    from vllm.config import VllmConfig

    from tierkv_vllm.scheduler import SchedulerSide


class TierKVStats(KVConnectorStats):
    """What changed since the last call; `data` is a `tierkv.telemetry.counters.Changes`."""

    def reset(self) -> None:
        self.data = {}

    def aggregate(self, other: KVConnectorStats) -> TierKVStats:
        self.data = merge_changes(self.data, other.data)
        return self

    def is_empty(self) -> bool:
        return not self.data

    def reduce(self) -> dict[str, int | float]:
        """The interval in one log line: hit rate and its parts, and what was avoidably lost."""
        rows: dict[tuple[str, str], float] = {}
        for _, (outcome, tier, *_), value in self._rows("tierkv_query_tokens_total"):
            rows[outcome, tier] = rows.get((outcome, tier), 0) + value
        gpu = sum(value for *_, value in self._rows("tierkv_gpu_hit_tokens_total"))
        found = token_rates(rows, gpu)
        parts = {"hit rate": found.hit}
        parts.update({tier: found.hit_of(tier) for tier in found.hits})
        parts.update({name: found.outcome(name) for name in AVOIDABLE if found.outcomes.get(name)})
        parts["prefill avoided"] = found.prefill_avoided
        line: dict[str, int | float] = {"TierKV query tokens": int(found.query_tokens)}
        line.update({f"{name} %": round(100 * n, 1) for name, n in parts.items() if n is not None})
        return line

    def _rows(self, metric: str) -> list[tuple[str, list[str], float]]:
        return [row for row in self.data.get("counters", ()) if row[0] == metric]


def collect(side: SchedulerSide) -> TierKVStats | None:
    """Everything that changed since the last step; None if nothing did."""
    side.store.refresh_gauges()
    changes = side.store.context.counters.drain()
    return TierKVStats(data=changes) if changes else None


def with_aside(stats: TierKVStats | None, kind: str) -> TierKVStats:
    """These changes, and that TierKV stands aside."""
    aside = TierKVStats(data={"gauges": [["tierkv_aside", [kind], 1]]})
    return aside.aggregate(stats) if stats is not None else aside


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
        transfer = vllm_config.kv_transfer_config
        extra = transfer.kv_connector_extra_config if transfer is not None else {}
        tiers = [tier.name for tier in load_config(inline=extra).config.tiers]
        self._metrics = {metric.name: self._make(metric) for metric in CATALOG}
        for metric in CATALOG:
            for values in metric.series(tiers):
                for engine in per_engine_labelvalues:
                    self._child(metric.name, values, engine)
        for engine in per_engine_labelvalues:
            self._child("tierkv_build_info", tuple(build_labels().values()), engine).set(1)

    def _make(self, metric: Metric) -> Any:
        names = [*self._labelnames, *(label.name for label in metric.labels)]
        options: dict[str, Any] = {"labelnames": names}
        if metric.kind is Kind.HISTOGRAM:
            options["buckets"] = metric.buckets
        elif metric.kind is Kind.GAUGE:
            # Several API servers write one page: the last to hear of an engine is right.
            options["multiprocess_mode"] = "mostrecent"
        kinds: dict[Kind, Any] = {
            Kind.COUNTER: self._counter_cls,
            Kind.GAUGE: self._gauge_cls,
            Kind.HISTOGRAM: self._histogram_cls,
        }
        return kinds[metric.kind](metric.name, metric.help, **options)

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
