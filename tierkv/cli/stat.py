# SPDX-License-Identifier: Apache-2.0
"""`tierkv stat`: one line an interval, for a terminal, a pipe or a file."""

from __future__ import annotations

import csv
import io
import sys
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tierkv.cli import looking, output

if TYPE_CHECKING:
    from tierkv.stats.source import Sample

EXAMPLE = """\
  tierkv stat -i 1 -n 10
  tierkv stat --json > run.jsonl
  tierkv stat --csv --url localhost:8000"""

JSON = {
    "time, seconds": "of the numbers, since 1970; how long the interval was; one object a line",
    "query_tokens, hit_tokens, gpu_hit_tokens": "in the interval",
    "any_text_hit_tokens": "those of hit_tokens that were reused in another place",
    "hit_rate, prefill_avoided, avoidable": "0 to 1; null without data",
    "outcomes": "query tokens by outcome",
    "saved_prefill_seconds, load_seconds": "estimated; waited",
    "tiers": "by name: `hit_tokens`, `hit_rate`, `load_bytes`, `save_bytes`, `errors` in the "
    "interval; `used_bytes`, `capacity_bytes`, `breaker_state` at its end",
}

HEAD_EVERY = 20
"""Lines between two headings on a terminal."""


def stat(
    interval: Annotated[
        float, typer.Option("--interval", "-i", min=0.1, max=86400, help="Seconds a line.")
    ] = 1.0,
    count: Annotated[
        int, typer.Option("--count", "-n", min=0, help="Lines; 0 goes on until Ctrl-C.")
    ] = 0,
    url: looking.UrlOption = None,
    pid: looking.PidOption = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object a line.")] = False,
    as_csv: Annotated[bool, typer.Option("--csv", help="Comma-separated, with a heading.")] = False,
) -> None:
    """Print what a running engine did in each interval.

    Field names of --json and --csv are stable; a rate without data is null, or empty in CSV.
    """
    import json

    from tierkv.stats.source import open_source

    if as_json and as_csv:
        raise typer.BadParameter("give --json or --csv, not both")
    source = open_source(url, pid)
    try:
        before, looked = source.read(0), _clock()
        line = 0
        while not count or line < count:
            _wait(interval)
            sample = following(before, source.read(0), max(interval, _clock() - looked))
            looked = _clock()
            row = measured(before, sample, interval)
            before = sample
            if as_json:
                output.result(json.dumps(row))
            elif as_csv:
                flat = flattened(row)
                if not line:
                    output.result(_csv(list(flat)))
                output.result(_csv(list(flat.values())))
            else:
                if not line or (sys.stdout.isatty() and line % HEAD_EVERY == 0):
                    output.result(output.styled(_heading(row), "bold"))
                output.result(_line(row))
            line += 1
    finally:
        source.close()


_wait = time.sleep
_clock = time.monotonic


def following(before: Sample, after: Sample, passed: float) -> Sample:
    """The next sample. An idle engine tells its last one again: time has passed all the same."""
    if after.time > before.time:
        return after
    return replace(after, time=before.time + passed)


def measured(before: Sample, after: Sample, interval: float) -> dict[str, Any]:
    """What happened between two samples.

    Between samples of equal time nothing happened in `interval` seconds.
    """
    from tierkv.telemetry import rates

    seconds = after.time - before.time or interval
    step = rates.difference(after.metrics, before.metrics)
    found = rates.rates(step)
    tiers = {}
    for name in rates.tier_names(after.metrics):
        tiers[name] = {
            "hit_tokens": int(found.hits.get(name, 0)),
            "hit_rate": _rounded(found.hit_of(name)),
            "load_bytes": int(rates.total(step, "tierkv_io_bytes_total", tier=name, op="load")),
            "save_bytes": int(rates.total(step, "tierkv_io_bytes_total", tier=name, op="save")),
            "used_bytes": int(rates.total(after.metrics, "tierkv_used_bytes", tier=name)),
            "capacity_bytes": int(rates.total(after.metrics, "tierkv_capacity_bytes", tier=name)),
            "errors": int(rates.total(step, "tierkv_errors_total", tier=name)),
            "breaker_state": int(rates.total(after.metrics, "tierkv_breaker_state", tier=name)),
        }
    return {
        "time": round(after.time, 3),
        "seconds": round(seconds, 3),
        "query_tokens": int(found.query_tokens),
        "hit_tokens": int(found.hit_tokens),
        "gpu_hit_tokens": int(found.gpu_tokens),
        "any_text_hit_tokens": int(
            rates.total(step, "tierkv_query_tokens_total", outcome="hit", reuse="any_text")
        ),
        "hit_rate": _rounded(found.hit),
        "prefill_avoided": _rounded(found.prefill_avoided),
        "avoidable": _rounded(found.avoidable),
        "outcomes": {name: int(tokens) for name, tokens in found.outcomes.items()},
        "misses": {
            reason: int(tokens)
            for (reason,), tokens in rates.totals(
                step, "tierkv_miss_tokens_total", "reason"
            ).items()
        },
        "saved_prefill_seconds": round(rates.total(step, "tierkv_saved_prefill_seconds_total"), 4),
        "load_seconds": round(rates.total(step, "tierkv_load_seconds_total"), 4),
        "tiers": tiers,
    }


def _rounded(rate: float | None) -> float | None:
    return None if rate is None else round(rate, 5)


def flattened(row: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested names joined by dots."""
    flat: dict[str, Any] = {}
    for name, value in row.items():
        if isinstance(value, dict):
            flat |= flattened(value, f"{prefix}{name}.")
        else:
            flat[prefix + name] = value
    return flat


def _csv(values: list[Any]) -> str:
    text = io.StringIO()
    csv.writer(text, lineterminator="").writerow(["" if v is None else v for v in values])
    return text.getvalue()


def _heading(row: dict[str, Any]) -> str:
    tiers = "".join(f" {name[:7]:>7}%" for name in row["tiers"])
    first = f"{'time':8} {'query/s':>8}  {'hit%':>6}{tiers} {'gpu+hit%':>8} {'lost%':>6}"
    return f"{first} {'load':>7} {'save':>7}"


def _line(row: dict[str, Any]) -> str:
    from tierkv.cli import numbers

    seconds = row["seconds"]
    clock = time.strftime("%H:%M:%S", time.localtime(row["time"]))
    tiers = "".join(f" {numbers.share(tier['hit_rate']):>8}" for tier in row["tiers"].values())
    load = sum(tier["load_bytes"] for tier in row["tiers"].values()) / seconds
    save = sum(tier["save_bytes"] for tier in row["tiers"].values()) / seconds
    return (
        f"{clock:8} {numbers.count(row['query_tokens'] / seconds):>8}  "
        f"{numbers.share(row['hit_rate']):>6}{tiers} "
        f"{numbers.share(row['prefill_avoided']):>8} {numbers.share(row['avoidable']):>6} "
        f"{numbers.speed(load):>7} {numbers.speed(save):>7}"
    )
