# SPDX-License-Identifier: Apache-2.0
"""The numbers behind every metric, as plain ints and floats, without an exporter.

What may be counted is in `tierkv.telemetry.catalog`; a name or a label value that is not there is a
bug and raises. So the number of series is bounded by construction.

No thread and no lock: one owner (in the connector: the scheduler thread). `snapshot` returns plain
values that may be sent anywhere.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from typing import TypedDict

from tierkv.telemetry.catalog import BY_NAME, CATALOG, Kind, Metric


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


class Counters:
    """All series of one engine.

    Args:
        tiers: names of the configured tiers, DRAM first. `declare_tiers` adds more.
    """

    def __init__(self, tiers: Sequence[str] = ()) -> None:
        self._tiers: list[str] = []
        self._numbers: dict[str, dict[tuple[str, ...], float]] = {}
        self._histograms: dict[str, dict[tuple[str, ...], HistogramValue]] = {}
        self.declare_tiers(tiers)

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
        self._numbers[name][_key(BY_NAME[name], labels)] += value

    def set(self, name: str, value: float, **labels: str) -> None:
        """Set a gauge.

        Raises:
            KeyError: no such metric, label or label value.
        """
        metric, numbers = BY_NAME[name], self._numbers[name]
        assert metric.kind is Kind.GAUGE, f"{name} is no gauge"
        key = _key(metric, labels)
        numbers[key]  # KeyError for an unknown series
        numbers[key] = value

    def observe(self, name: str, value: float, **labels: str) -> None:
        """Add one observation to a histogram.

        Raises:
            KeyError: no such metric, label or label value.
        """
        metric = BY_NAME[name]
        histogram = self._histograms[name][_key(metric, labels)]
        histogram["count"] += 1
        histogram["sum"] += value
        histogram["buckets"][bisect_left(metric.buckets, value)] += 1

    def get(self, name: str, **labels: str) -> float:
        """A counter or gauge as it stands.

        Raises:
            KeyError: no such metric, label or label value.
        """
        return self._numbers[name][_key(BY_NAME[name], labels)]

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
