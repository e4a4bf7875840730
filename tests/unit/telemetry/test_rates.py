# SPDX-License-Identifier: Apache-2.0
"""The hit rate by its definition, on numbers worked out by hand."""

from __future__ import annotations

import pytest

from tierkv.telemetry import rates
from tierkv.telemetry.catalog import BY_NAME
from tierkv.telemetry.counters import Counters

QUERY = "tierkv_query_tokens_total"


def filled() -> Counters:
    counters = Counters(["dram", "disk"])
    for outcome, tier, tokens in (
        ("hit", "dram", 480),
        ("hit", "disk", 120),
        ("failed", "disk", 10),
        ("late", "none", 20),
        ("unavailable", "none", 30),
        ("skipped", "none", 40),
        ("miss", "none", 250),
        ("tail", "none", 50),
    ):
        reuse = "exact" if outcome == "hit" else "none"
        counters.add(QUERY, tokens, outcome=outcome, tier=tier, reuse=reuse)
    counters.add("tierkv_gpu_hit_tokens_total", 500)
    return counters


def test_the_hit_rate_is_hit_tokens_over_query_tokens_and_the_tiers_add_up() -> None:
    found = rates.rates(filled().snapshot())
    assert found.query_tokens == 1000
    assert found.hit == 0.6
    assert (found.hit_of("dram"), found.hit_of("disk"), found.hit_of("redis")) == (0.48, 0.12, 0.0)
    assert found.avoidable == 0.1
    assert found.outcome("tail") == 0.05
    assert found.gpu == pytest.approx(500 / 1500)
    assert found.prefill_avoided == pytest.approx(1100 / 1500)


def test_without_data_there_is_no_rate() -> None:
    found = rates.rates(Counters(["dram"]).snapshot())
    empty = [found.hit, found.hit_of("dram"), found.avoidable, found.gpu, found.prefill_avoided]
    assert empty == [None] * 5
    assert rates.percent(found.hit) == "–"
    assert rates.percent(0.0) == "0.0%"
    assert rates.percent(0.7144) == "71.4%"
    # All of it in the GPU's own cache: no hit rate, but prefill was avoided.
    counters = Counters(["dram"])
    counters.add("tierkv_gpu_hit_tokens_total", 5)
    found = rates.rates(counters.snapshot())
    assert (found.hit, found.prefill_avoided) == (None, 1.0)


def test_a_difference_is_what_happened_in_between() -> None:
    counters = filled()
    counters.set("tierkv_chunks", 7, tier="dram")
    counters.observe("tierkv_io_duration_seconds", 0.5, tier="disk", op="load")
    before = counters.snapshot()
    counters.add(QUERY, 30, outcome="hit", tier="disk", reuse="exact")
    counters.add(QUERY, 10, outcome="miss", tier="none", reuse="none")
    counters.set("tierkv_chunks", 5, tier="dram")
    counters.observe("tierkv_io_duration_seconds", 0.01, tier="disk", op="load")
    step = rates.difference(counters.snapshot(), before)
    assert rates.rates(step).hit == 0.75
    assert rates.total(step, "tierkv_chunks", tier="dram") == 5
    value = rates.histogram(step, "tierkv_io_duration_seconds", tier="disk", op="load")
    assert value is not None
    assert (value["count"], sum(value["buckets"])) == (1, 1)
    assert value["sum"] == pytest.approx(0.01)


def test_an_engine_that_was_restarted_counts_from_zero() -> None:
    fresh = Counters(["dram", "disk"])
    fresh.add(QUERY, 5, outcome="hit", tier="dram", reuse="exact")
    step = rates.difference(fresh.snapshot(), filled().snapshot())
    assert rates.total(step, QUERY, outcome="hit", tier="dram") == 5
    assert rates.difference(fresh.snapshot(), {}) == fresh.snapshot()


def test_a_quantile_lies_within_its_bucket() -> None:
    counters = Counters(["disk"])
    bounds = BY_NAME["tierkv_io_duration_seconds"].buckets
    for seconds in [0.0015] * 50 + [0.03] * 49 + [99.0]:
        counters.observe("tierkv_io_duration_seconds", seconds, tier="disk", op="load")
    value = rates.histogram(
        counters.snapshot(), "tierkv_io_duration_seconds", tier="disk", op="load"
    )
    # 50 lie in (1 ms, 2 ms], 49 in (20 ms, 50 ms], one above 10 s.
    assert rates.quantile(value, bounds, 0.25) == pytest.approx(0.0015)
    assert rates.quantile(value, bounds, 0.5) == pytest.approx(0.002)
    assert rates.quantile(value, bounds, 0.99) == pytest.approx(0.05)
    assert rates.quantile(value, bounds, 1.0) == 10.0
    assert rates.quantile(None, bounds, 0.5) is None
    empty = rates.histogram(
        Counters(["disk"]).snapshot(), "tierkv_io_duration_seconds", tier="disk", op="load"
    )
    assert rates.quantile(empty, bounds, 0.5) is None


def test_the_tiers_are_named_dram_first() -> None:
    assert rates.tier_names(Counters(["dram", "b", "a"]).snapshot()) == ["dram", "b", "a"]
