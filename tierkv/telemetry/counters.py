# SPDX-License-Identifier: Apache-2.0
"""The numbers behind every metric, as plain ints and floats, without an exporter.

What may be counted is in `tierkv.telemetry.catalog`; a name or a label value that is not there is a
bug and raises. So the number of series is bounded by construction.

No thread and no lock: one owner (in the connector: the scheduler thread). `snapshot` returns plain
values that may be sent anywhere.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeAlias, TypedDict

from tierkv.telemetry.build import build_labels
from tierkv.telemetry.catalog import BY_NAME, CATALOG, Kind, Metric

_Key: TypeAlias = tuple[str, ...]


class HistogramValue(TypedDict):
    """Observations so far; `buckets[i]` counts those in bucket i alone, the last what is above."""

    count: int
    sum: float
    buckets: list[int]


class Series(TypedDict):
    """One series of a snapshot."""

    labels: dict[str, str]
    value: float | HistogramValue


Snapshot = dict[str, list[Series]]
"""Metric name to its series. Serialisable by msgpack and JSON as it is."""

Changes = dict[str, list[list[Any]]]
"""What changed, as rows [metric name, label values, ...] under "counters" (by how much), "gauges"
(to what) and "samples" (what was observed). Empty if nothing did. Serialisable as it is."""

MAX_SAMPLES = 256
"""Observations of one series kept until the next `drain`; what is beyond them is in `snapshot`."""


class Counters:
    """All series of one engine.

    Args:
        tiers: names of the configured tiers, DRAM first. `declare_tiers` adds more.
    """

    def __init__(self, tiers: Sequence[str] = ()) -> None:
        self._tiers: list[str] = []
        self._numbers: dict[str, dict[tuple[str, ...], float]] = {}
        self._histograms: dict[str, dict[tuple[str, ...], HistogramValue]] = {}
        self._raised: dict[tuple[str, tuple[str, ...]], float] = {}
        self._put: dict[tuple[str, tuple[str, ...]], float] = {}
        self._samples: dict[tuple[str, tuple[str, ...]], list[float]] = {}
        self.declare_tiers(tiers)
        # No change that `drain` tells: it is so from the start, on the other side too.
        self._numbers["tierkv_build_info"][tuple(build_labels().values())] = 1

    def declare_tiers(self, names: Sequence[str]) -> None:
        """Make every series of these tiers, at zero."""
        self._tiers += [name for name in names if name not in self._tiers]
        for metric in CATALOG:
            if metric.kind is Kind.HISTOGRAM:
                histograms = self._histograms.setdefault(metric.name, {})
                for series in metric.series(self._tiers):
                    if series not in histograms:
                        empty = [0] * (len(metric.buckets) + 1)
                        histograms[series] = {"count": 0, "sum": 0.0, "buckets": empty}
            else:
                numbers = self._numbers.setdefault(metric.name, {})
                for series in metric.series(self._tiers):
                    numbers.setdefault(series, 0)

    def add(self, name: str, value: float = 1, **labels: str) -> None:
        """Raise a counter. O(1), about 1 µs.

        Raises:
            KeyError: no such metric, label or label value.
        """
        assert value >= 0, "counters never fall"
        self._add(self._numbers[name], (name, _key(BY_NAME[name], labels)), value)

    def set(self, name: str, value: float, **labels: str) -> None:
        """Set a gauge.

        Raises:
            KeyError: no such metric, label or label value.
        """
        metric, numbers = BY_NAME[name], self._numbers[name]
        assert metric.kind is Kind.GAUGE, f"{name} is no gauge"
        key = _key(metric, labels)
        if numbers[key] != value:  # KeyError for an unknown series
            numbers[key] = value
            self._put[name, key] = value

    def observe(self, name: str, value: float, **labels: str) -> None:
        """Add one observation to a histogram.

        Raises:
            KeyError: no such metric, label or label value.
        """
        metric = BY_NAME[name]
        key = _key(metric, labels)
        self._observe(self._histograms[name][key], metric.buckets, (name, key), value)

    def bind(self, name: str, **labels: str) -> Callable[[float], None]:
        """`add` or `observe` for one series, looked up once. For hot paths: a third of the time.

        Raises:
            KeyError: no such metric, label or label value.
        """
        metric = BY_NAME[name]
        key = _key(metric, labels)
        if metric.kind is Kind.HISTOGRAM:
            histogram = self._histograms[name][key]
            return partial(self._observe, histogram, metric.buckets, (name, key))
        numbers = self._numbers[name]
        numbers[key]  # KeyError for an unknown series
        return partial(self._add, numbers, (name, key))

    def _add(
        self, numbers: dict[tuple[str, ...], float], series: tuple[str, _Key], value: float
    ) -> None:
        numbers[series[1]] += value
        self._raised[series] = self._raised.get(series, 0) + value

    def _observe(
        self,
        histogram: HistogramValue,
        bounds: tuple[float, ...],
        series: tuple[str, _Key],
        value: float,
    ) -> None:
        histogram["count"] += 1
        histogram["sum"] += value
        histogram["buckets"][bisect_left(bounds, value)] += 1
        samples = self._samples.setdefault(series, [])
        if len(samples) < MAX_SAMPLES:
            samples.append(value)

    def get(self, name: str, **labels: str) -> float:
        """A counter or gauge as it stands.

        Raises:
            KeyError: no such metric, label or label value.
        """
        return self._numbers[name][_key(BY_NAME[name], labels)]

    def drain(self) -> Changes:
        """What changed since the last call, for an exporter in another process. O(changes)."""
        changes: Changes = {}
        if self._raised:
            changes["counters"] = [[name, list(key), n] for (name, key), n in self._raised.items()]
        if self._put:
            changes["gauges"] = [[name, list(key), n] for (name, key), n in self._put.items()]
        if self._samples:
            changes["samples"] = [[name, list(key), n] for (name, key), n in self._samples.items()]
        self._raised, self._put, self._samples = {}, {}, {}
        return changes

    def snapshot(self) -> Snapshot:
        """A copy of everything, in the order of the catalogue."""
        result: Snapshot = {}
        for metric in CATALOG:
            names = [label.name for label in metric.labels]
            series: list[Series] = []
            for key, number in self._numbers.get(metric.name, {}).items():
                series.append({"labels": dict(zip(names, key, strict=True)), "value": number})
            for key, histogram in self._histograms.get(metric.name, {}).items():
                copy: HistogramValue = {**histogram, "buckets": list(histogram["buckets"])}
                series.append({"labels": dict(zip(names, key, strict=True)), "value": copy})
            result[metric.name] = series
        return result


def _key(metric: Metric, labels: dict[str, str]) -> tuple[str, ...]:
    if len(labels) != len(metric.labels):
        wanted = ", ".join(label.name for label in metric.labels)
        raise KeyError(f"{metric.name} has the labels ({wanted}), got ({', '.join(labels)})")
    return tuple([labels[label.name] for label in metric.labels])


def merge_changes(older: Changes, newer: Changes) -> Changes:
    """Two intervals as one: counters add up, the newer gauge holds, samples follow one another."""
    merged: Changes = {}
    for kind in ("counters", "gauges", "samples"):
        rows: dict[tuple[str, tuple[str, ...]], Any] = {}
        for name, labels, value in (*older.get(kind, ()), *newer.get(kind, ())):
            key = (name, tuple(labels))
            rows[key] = rows[key] + value if kind != "gauges" and key in rows else value
        if rows:
            merged[kind] = [[name, list(labels), value] for (name, labels), value in rows.items()]
    return merged
