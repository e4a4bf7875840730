# SPDX-License-Identifier: Apache-2.0
"""Changes: what one process counts, another can repeat, and nothing is counted twice."""

from __future__ import annotations

import msgpack

from tierkv.telemetry.counters import MAX_SAMPLES, Counters, merge_changes

BYTES = "tierkv_io_bytes_total"
SECONDS = "tierkv_io_duration_seconds"


def test_changes_say_by_how_much_and_are_told_once() -> None:
    counters = Counters(["dram", "disk"])
    assert counters.drain() == {}
    counters.add(BYTES, 100, tier="disk", op="load")
    counters.add(BYTES, 11, tier="disk", op="load")
    counters.set("tierkv_chunks", 7, tier="dram")
    counters.observe(SECONDS, 0.25, tier="disk", op="save")
    counters.observe(SECONDS, 0.5, tier="disk", op="save")
    assert counters.drain() == {
        "counters": [[BYTES, ["disk", "load"], 111]],
        "gauges": [["tierkv_chunks", ["dram"], 7]],
        "samples": [[SECONDS, ["disk", "save"], [0.25, 0.5]]],
    }
    assert counters.drain() == {}
    counters.add(BYTES, 1, tier="disk", op="load")
    assert counters.drain() == {"counters": [[BYTES, ["disk", "load"], 1]]}
    assert counters.get(BYTES, tier="disk", op="load") == 112


def test_a_gauge_that_stays_is_no_change() -> None:
    counters = Counters(["dram"])
    counters.set("tierkv_chunks", 7, tier="dram")
    counters.drain()
    counters.set("tierkv_chunks", 7, tier="dram")
    assert counters.drain() == {}


def test_samples_are_bounded() -> None:
    counters = Counters(["disk"])
    for i in range(MAX_SAMPLES + 10):
        counters.observe(SECONDS, i / 1000, tier="disk", op="load")
    ((_, _, samples),) = counters.drain()["samples"]
    assert samples == [i / 1000 for i in range(MAX_SAMPLES)]


def test_two_intervals_merge_also_after_a_journey() -> None:
    counters = Counters(["dram", "disk"])
    counters.add(BYTES, 5, tier="disk", op="load")
    counters.set("tierkv_chunks", 1, tier="dram")
    counters.observe(SECONDS, 0.1, tier="disk", op="load")
    first = msgpack.unpackb(msgpack.packb(counters.drain()))
    counters.add(BYTES, 6, tier="disk", op="load")
    counters.add(BYTES, 7, tier="disk", op="save")
    counters.set("tierkv_chunks", 2, tier="dram")
    counters.observe(SECONDS, 0.2, tier="disk", op="load")
    second = msgpack.unpackb(msgpack.packb(counters.drain()))
    assert merge_changes(first, second) == {
        "counters": [[BYTES, ["disk", "load"], 11], [BYTES, ["disk", "save"], 7]],
        "gauges": [["tierkv_chunks", ["dram"], 2]],
        "samples": [[SECONDS, ["disk", "load"], [0.1, 0.2]]],
    }
    assert merge_changes({}, {}) == {}
