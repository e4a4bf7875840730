# SPDX-License-Identifier: Apache-2.0
"""What an engine did over time, as `tierkv stat --json` writes it: one object a line and interval.

Tolerant of what later and earlier versions write: `time` and `query_tokens` must be there, what
else is missing counts as not known, and what is not known here is ignored. A last line that was
cut off is left out.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tierkv.errors import TierKVError
from tierkv.telemetry.counters import Snapshot

Row = dict[str, Any]

_SUMS = ("seconds", "query_tokens", "hit_tokens", "gpu_hit_tokens", "saved_prefill_seconds",
         "load_seconds")  # fmt: skip
_TIER_SUMS = ("hit_tokens", "load_bytes", "save_bytes", "errors")
_TIER_LAST = ("used_bytes", "capacity_bytes")


class SourceError(TierKVError):
    """What was given is nothing a report can be made of; one line with the remedy."""


@dataclass(frozen=True, slots=True)
class Recording:
    """Intervals in the order of time.

    Attributes:
        origin: where they come from, for people.
        rows: as `tierkv stat --json` prints them.
        changes: what all counters did in between, gauges as they stood at the end; None for a
            recording that was read from a file.
        info: what the engine told of itself.
    """

    origin: str
    rows: list[Row]
    changes: Snapshot | None = None
    info: dict[str, Any] = field(default_factory=dict)


def is_row(value: Any) -> bool:
    """Whether this is a line of a recording."""
    return isinstance(value, dict) and _is_number(value.get("time")) and "query_tokens" in value


def parse_recording(text: str, origin: str) -> Recording:
    """From the lines of a file.

    Raises:
        SourceError: a line is no interval; the message has its number.
    """
    lines = text.splitlines()
    rows: list[Row] = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            value = json.loads(line)
        except ValueError:
            if number == len(lines) and rows:
                break  # cut off while it was written
            value = None
        if not is_row(value):
            raise SourceError(
                f"{origin}:{number}: no line of 'tierkv stat --json'; record with: "
                "tierkv stat --json > run.jsonl"
            )
        rows.append(_filled(value, rows[-1] if rows else None))
    if not rows:
        raise SourceError(f"{origin}: nothing in it; record with: tierkv stat --json > run.jsonl")
    return Recording(origin, rows)


def read_text(file: Path) -> str:
    """The text of a file.

    Raises:
        SourceError: it cannot be read.
    """
    try:
        return file.read_text("utf-8", "replace")
    except OSError as error:
        raise SourceError(
            f"{file}: cannot be read ({error.strerror}); give another file"
        ) from error


def _filled(row: Row, before: Row | None) -> Row:
    """With a length, which an interval needs to be a rate."""
    if not _is_number(row.get("seconds")) or row["seconds"] <= 0:
        passed = row["time"] - before["time"] if before is not None else 0
        row = {**row, "seconds": passed if passed > 0 else 1.0}
    return row


def merged(rows: Sequence[Row]) -> Row:
    """Several intervals as one: amounts add up, states are the last ones, breakers the worst."""
    last = rows[-1]
    made: Row = {"time": last["time"]}
    for name in _SUMS:
        made[name] = _sum(rows, name)
    for name in ("outcomes", "misses"):
        made[name] = merged_counts([row.get(name) for row in rows])
    names = dict.fromkeys(name for row in rows for name in row.get("tiers") or {})
    made["tiers"] = {name: _merged_tier([(row.get("tiers") or {}).get(name) for row in rows])
                     for name in names}  # fmt: skip
    return made


def merged_counts(counts: Sequence[Any]) -> dict[str, float] | None:
    """Sums by name; None if nobody counted."""
    known = [one for one in counts if isinstance(one, dict)]
    if not known:
        return None
    names = dict.fromkeys(name for one in known for name in one)
    return {name: _sum(known, name) or 0 for name in names}


def _merged_tier(tiers: Sequence[Any]) -> Row:
    known = [tier for tier in tiers if isinstance(tier, dict)]
    made: Row = {name: _sum(known, name) for name in _TIER_SUMS}
    for name in _TIER_LAST:
        values = [tier[name] for tier in known if _is_number(tier.get(name))]
        made[name] = values[-1] if values else None
    states = [tier["breaker_state"] for tier in known if _is_number(tier.get("breaker_state"))]
    made["breaker_state"] = max(states, default=None)
    return made


def thinned(rows: Sequence[Row], most: int) -> list[Row]:
    """At most `most` intervals, by merging neighbours."""
    size = max(1, math.ceil(len(rows) / most))
    return [merged(rows[at : at + size]) for at in range(0, len(rows), size)]


def _sum(rows: Sequence[Row], name: str) -> float | None:
    values = [row[name] for row in rows if _is_number(row.get(name))]
    return sum(values) if values else None


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
