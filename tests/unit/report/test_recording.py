# SPDX-License-Identifier: Apache-2.0
"""Reading a recording, and its sums against sums done by hand."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.unit.report.recordings import START, idle, row, tier
from tierkv.report.recording import Recording, SourceError, merged, parse_recording, thinned
from tierkv.report.summary import summarize
from tierkv.telemetry.counters import Counters
from tierkv.telemetry.rates import difference


def lines(*rows: dict[str, Any]) -> str:
    return "".join(json.dumps(one) + "\n" for one in rows)


def summary_of(*rows: dict[str, Any]) -> dict[str, Any]:
    return summarize(parse_recording(lines(*rows), "run.jsonl"))


def test_amounts_add_up_and_rates_are_those_of_the_sums() -> None:
    big = row(1, query_tokens=3000, hit_tokens=600, gpu_hit_tokens=0,
              outcomes={"hit": 600, "miss": 2400},
              tiers={"dram": tier(hit_tokens=600, used_bytes=7, capacity_bytes=9)})  # fmt: skip
    found = summary_of(row(0), big)
    assert (found["query_tokens"], found["hit_tokens"]) == (4000, 1200)
    assert found["hit_rate"] == pytest.approx(1200 / 4000)
    assert found["tiers"]["dram"]["hit_rate"] == pytest.approx(1000 / 4000)
    assert found["tiers"]["disk"]["hit_rate"] == pytest.approx(200 / 4000)
    assert found["prefill_avoided"] == pytest.approx((1200 + 500) / (4000 + 500))
    assert found["avoidable"] == pytest.approx(100 / 4000)
    assert found["outcomes"] == {"hit": 1200, "miss": 2650, "late": 100, "tail": 50}
    assert found["misses"] == {"never_seen": 400, "evicted": 100}
    assert found["saved_prefill_seconds"] == 1.0
    assert found["seconds"] == 4.0
    assert (found["from"], found["to"]) == (
        "2027-01-15T08:00:00+00:00",
        "2027-01-15T08:00:04+00:00",
    )


def test_states_are_the_last_and_breakers_the_worst() -> None:
    open_one = row(0, tiers={"disk": tier(used_bytes=5, capacity_bytes=10, breaker_state=2)})
    closed = row(1, tiers={"disk": tier(used_bytes=8, capacity_bytes=10, breaker_state=0)})
    disk = summary_of(open_one, closed)["tiers"]["disk"]
    assert (disk["used_bytes"], disk["breaker_state"]) == (8, 2)


def test_no_prompts_is_no_hit_rate() -> None:
    found = summary_of(idle(0), idle(1))
    assert found["hit_rate"] is None
    assert found["query_tokens"] == 0


def test_what_an_older_version_does_not_tell_is_not_known_rather_than_zero() -> None:
    found = summary_of({"time": START, "query_tokens": 10, "hit_tokens": 4, "new": {"x": [1]}})
    assert found["hit_rate"] == 0.4
    assert found["outcomes"] is found["misses"] is found["avoidable"] is None
    assert found["prefill_avoided"] is found["saved_prefill_seconds"] is None
    assert found["tiers"] == {}


def test_an_interval_without_a_length_lasts_since_the_one_before() -> None:
    rows = [row(0), {**row(3), "seconds": None}]
    assert parse_recording(lines(*rows), "r").rows[1]["seconds"] == 6.0


def test_a_last_line_that_was_cut_off_is_left_out() -> None:
    text = lines(row(0), row(1)) + lines(row(2))[:40]
    assert len(parse_recording(text, "run.jsonl").rows) == 2


@pytest.mark.parametrize("bad", ["no json", "[]", '{"time": "now", "query_tokens": 1}', "{}"])
def test_a_line_that_is_no_interval_is_named(bad: str) -> None:
    with pytest.raises(SourceError, match=r"^run\.jsonl:2: .*tierkv stat --json > run"):
        parse_recording(lines(row(0)) + bad + "\n" + lines(row(1)), "run.jsonl")


def test_thinning_keeps_all_amounts() -> None:
    rows = [row(n, query_tokens=n) for n in range(1000)]
    thin = thinned(rows, 240)
    assert len(thin) == 200
    assert merged(thin)["query_tokens"] == sum(range(1000))
    assert merged(thin)["tiers"] == merged(rows)["tiers"]
    assert thin[-1]["time"] == rows[-1]["time"]


def test_counters_of_a_live_engine_tell_latencies_errors_and_reasons() -> None:
    counters = Counters(["dram", "disk"])
    counters.add("tierkv_errors_total", 5, tier="disk", kind="eio")
    before = counters.snapshot()
    counters.add("tierkv_errors_total", 2, tier="disk", kind="checksum")
    counters.add("tierkv_evictions_total", 3, tier="dram", reason="capacity")
    counters.add("tierkv_saves_dropped_total", 4, tier="disk", reason="queue_full")
    counters.add("tierkv_declined_requests_total", 1, reason="opted_out")
    counters.add("tierkv_miss_tokens_total", 9, reason="evicted", tier="disk")
    for _ in range(99):
        counters.observe("tierkv_io_duration_seconds", 0.0015, tier="disk", op="load")
    counters.observe("tierkv_io_duration_seconds", 0.4, tier="disk", op="load")
    changes = difference(counters.snapshot(), before)
    rows = [{**row(0), "misses": None}]
    found = summarize(Recording("pid 1", rows, changes, {"model": "m", "pid": 1, "control": True}))
    assert found["errors"] == {"disk checksum": 2}
    assert found["saves_dropped"] == {"disk queue_full": 4}
    assert found["declined"]["opted_out"] == 1
    assert found["misses"]["evicted"] == 9
    assert found["tiers"]["dram"]["evicted_chunks"] == 3
    disk = found["tiers"]["disk"]
    assert 0.001 <= disk["load_p50_s"] <= 0.002
    assert disk["load_p99_s"] <= 0.002 < 0.4
    assert disk["save_p50_s"] is None
    assert found["engine"] == {"model": "m"}
