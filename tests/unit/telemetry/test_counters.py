# SPDX-License-Identifier: Apache-2.0
"""Counters: what is counted is found again, what is not in the catalogue is refused."""

from __future__ import annotations

import json
import re

import msgpack
import pytest

from tierkv.errors import ErrorKind
from tierkv.telemetry.catalog import CATALOG, Kind
from tierkv.telemetry.counters import Counters, Snapshot


def find(snapshot: Snapshot, name: str, **labels: str) -> object:
    (found,) = [series["value"] for series in snapshot[name] if series["labels"] == labels]
    return found


def test_every_series_of_every_tier_exists_from_the_start_at_zero() -> None:
    snapshot = Counters(["dram", "disk"]).snapshot()
    assert set(snapshot) == {metric.name for metric in CATALOG}
    for kind in ErrorKind:
        assert find(snapshot, "tierkv_errors_total", tier="disk", kind=kind.value) == 0
    query = "tierkv_query_tokens_total"
    assert find(snapshot, query, outcome="miss", tier="none", reuse="none") == 0
    assert find(snapshot, query, outcome="hit", tier="dram", reuse="exact") == 0
    assert find(snapshot, "tierkv_leased_slots") == 0
    loads = find(snapshot, "tierkv_io_duration_seconds", tier="disk", op="load")
    assert loads == {"count": 0, "sum": 0.0, "buckets": [0] * 17}


def test_counts_add_up_by_label_whatever_their_order() -> None:
    counters = Counters(["dram", "disk"])
    counters.add("tierkv_io_bytes_total", 100, tier="disk", op="load")
    counters.add("tierkv_io_bytes_total", 50, op="load", tier="disk")
    counters.add("tierkv_io_bytes_total", tier="disk", op="save")
    snapshot = counters.snapshot()
    assert find(snapshot, "tierkv_io_bytes_total", tier="disk", op="load") == 150
    assert find(snapshot, "tierkv_io_bytes_total", tier="disk", op="save") == 1
    assert find(snapshot, "tierkv_io_bytes_total", tier="dram", op="load") == 0
    assert counters.get("tierkv_io_bytes_total", tier="disk", op="load") == 150


def test_an_observation_lands_in_the_first_bucket_that_is_not_below_it() -> None:
    counters = Counters(["disk"])
    for value in (0.00005, 0.0001, 0.00011, 10.0, 11.0):
        counters.observe("tierkv_io_duration_seconds", value, tier="disk", op="save")
    value = find(counters.snapshot(), "tierkv_io_duration_seconds", tier="disk", op="save")
    assert isinstance(value, dict)
    assert value["buckets"] == [2, 1, *[0] * 13, 1, 1]
    assert value["count"] == 5
    assert value["sum"] == pytest.approx(21.00026)


def test_a_bound_series_counts_like_one_that_is_named_each_time() -> None:
    named, bound = Counters(["disk"]), Counters(["disk"])
    add = bound.bind("tierkv_io_bytes_total", tier="disk", op="load")
    observe = bound.bind("tierkv_io_duration_seconds", tier="disk", op="load")
    for value in (1, 3.5, 20):
        named.add("tierkv_io_bytes_total", value, tier="disk", op="load")
        named.observe("tierkv_io_duration_seconds", value, tier="disk", op="load")
        add(value)
        observe(value)
        if value > 1:
            assert bound.drain() == named.drain() != {}
    assert bound.snapshot() == named.snapshot() != Counters(["disk"]).snapshot()
    with pytest.raises(KeyError):
        bound.bind("tierkv_io_bytes_total", tier="tape", op="load")


def test_a_gauge_shows_its_last_value() -> None:
    counters = Counters(["disk"])
    counters.set("tierkv_breaker_state", 2, tier="disk")
    counters.set("tierkv_breaker_state", 1, tier="disk")
    assert find(counters.snapshot(), "tierkv_breaker_state", tier="disk") == 1


@pytest.mark.parametrize(
    ("name", "labels"),
    [
        ("tierkv_nonsense_total", {}),
        ("tierkv_errors_total", {"tier": "disk"}),
        ("tierkv_errors_total", {"tier": "disk", "kind": "sunspots"}),
        ("tierkv_errors_total", {"tier": "user@example.org", "kind": "eio"}),
        ("tierkv_errors_total", {"tier": "disk", "why": "eio"}),
        ("tierkv_leased_slots", {"tier": "disk"}),
    ],
)
def test_what_is_not_in_the_catalogue_cannot_be_counted(name: str, labels: dict[str, str]) -> None:
    counters = Counters(["disk"])
    with pytest.raises(KeyError):
        counters.add(name, **labels)
    assert "sunspots" not in str(counters.snapshot())
    assert "example" not in str(counters.snapshot())


def test_a_gauge_that_is_not_in_the_catalogue_cannot_be_set() -> None:
    with pytest.raises(KeyError):
        Counters(["disk"]).set("tierkv_chunks", 1, tier="tape")


def test_a_tier_declared_later_starts_at_zero_and_leaves_the_others_alone() -> None:
    counters = Counters(["dram"])
    counters.add("tierkv_evictions_total", 7, tier="dram", reason="capacity")
    counters.declare_tiers(["dram", "disk"])
    assert counters.get("tierkv_evictions_total", tier="dram", reason="capacity") == 7
    assert counters.get("tierkv_evictions_total", tier="disk", reason="capacity") == 0


def test_a_snapshot_is_a_copy_that_any_serialiser_takes() -> None:
    counters = Counters(["disk"])
    snapshot = counters.snapshot()
    counters.observe("tierkv_io_duration_seconds", 1.0, tier="disk", op="load")
    counters.add("tierkv_evictions_total", tier="disk", reason="reset")
    assert snapshot == Counters(["disk"]).snapshot()
    assert json.loads(json.dumps(snapshot)) == snapshot
    assert msgpack.unpackb(msgpack.packb(snapshot)) == snapshot


def test_names_follow_the_rules_of_prometheus() -> None:
    names = [metric.name for metric in CATALOG]
    assert len(set(names)) == len(names)
    for metric in CATALOG:
        assert re.fullmatch(r"tierkv_[a-z0-9_]+", metric.name)
        assert metric.name.endswith("_total") == (metric.kind is Kind.COUNTER)
        assert bool(metric.buckets) == (metric.kind is Kind.HISTOGRAM)
        assert list(metric.buckets) == sorted(metric.buckets)
        assert metric.help.endswith(".")
        for label in metric.labels:
            assert label.values or label.tiers
            assert len(set(label.values)) == len(label.values)
