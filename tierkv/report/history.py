# SPDX-License-Identifier: Apache-2.0
"""The plots of a recording: what happened over time."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from tierkv.report.document import Plot
from tierkv.report.figure import PALETTE, TEXT, Drawing, drawing, tier_colour
from tierkv.report.recording import Row, thinned
from tierkv.report.summary import rates_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes

INTERVALS = 240
"""Points of a line; more cannot be told apart on a page."""

_OUTCOME_COLOURS = {
    "hit": "#2e8b57",
    "recomputed": "#3aa5a0",
    "miss": "#8c8c8c",
    "tail": "#a0763a",
    "late": "#c8901a",
    "unavailable": "#d1495b",
    "skipped": "#4c8bd0",
    "failed": "#7d1128",
    "declined": "#a66dbe",
}

_NO_DATA = float("nan")
"""A gap in a line, where zero would be a lie."""


def plots(rows: Sequence[Row]) -> list[Plot]:
    """All plots that the recording has data for."""
    rows = thinned(rows, INTERVALS)
    made = [_hit_rate(rows)]
    if any(row["outcomes"] for row in rows):
        made.append(_outcomes(rows))
    if any(row["misses"] for row in rows):
        made.append(_misses(rows))
    names = tier_names(rows)
    if any(_tier(row, name, "capacity_bytes") for row in rows for name in names):
        made.append(_fill(rows, names))
    moving = [
        name
        for name in names
        if any(_tier(row, name, op) for row in rows for op in ("load_bytes", "save_bytes"))
    ]
    if moving:
        made.append(_speed(rows, moving))
    if any(row["saved_prefill_seconds"] for row in rows):
        made.append(_savings(rows))
    return made


def tier_names(rows: Sequence[Row]) -> list[str]:
    """Of all tiers, in the order in which they first appear."""
    return list(dict.fromkeys(name for row in rows for name in row["tiers"]))


def _hit_rate(rows: Sequence[Row]) -> Plot:
    names = tier_names(rows)
    with drawing("hit-rate") as made:
        rates = [rates_of(row) for row in rows]
        parts = [[_percent(rate.hit_of(name)) for rate in rates] for name in names]
        colours = [tier_colour(name, at) for at, name in enumerate(names)]
        _stack(made, rows, names, parts, colours)
        made.axes.plot(
            _times(rows),
            [_percent(rate.avoidable) for rate in rates],
            color=TEXT,
            linestyle="--",
            linewidth=1.2,
            label="avoidable loss",
        )
        made.axes.set_ylim(0, 100)
        _finish(made, rows, "% of query tokens")
    return Plot(
        made.svg,
        "Hit rate by tier over time: hit tokens ÷ query tokens, the tiers stacked. A gap is an "
        "interval without prompts; the dashed line is what faster or healthier tiers would add.",
    )


def _outcomes(rows: Sequence[Row]) -> Plot:
    names = list(dict.fromkeys(n for row in rows for n, v in (row["outcomes"] or {}).items() if v))
    with drawing("outcomes") as made:
        values = [
            [(row["outcomes"] or {}).get(name, 0) / row["seconds"] for row in rows]
            for name in names
        ]
        _stack(made, rows, names, values, [_OUTCOME_COLOURS.get(name, TEXT) for name in names])
        _finish(made, rows, "query tokens a second")
    return Plot(
        made.svg,
        "Query tokens a second, by what became of them; each token has exactly one outcome.",
    )


def _misses(rows: Sequence[Row]) -> Plot:
    names = list(dict.fromkeys(n for row in rows for n, v in (row["misses"] or {}).items() if v))
    with drawing("misses", height=2.8) as made:
        values = [
            [(row["misses"] or {}).get(name, 0) / row["seconds"] for row in rows] for name in names
        ]
        labels = [name.replace("_", " ") for name in names]
        # No green and no purple: these are tiers and hits elsewhere on the page.
        _stack(made, rows, labels, values, [PALETTE[at] for at in (5, 3, 2, 4, 6, 7)])
        _finish(made, rows, "missed tokens a second")
    return Plot(made.svg, "Missed tokens a second, by why they were not stored.")


def _fill(rows: Sequence[Row], names: Sequence[str]) -> Plot:
    def share(row: Row, name: str) -> float:
        capacity: float | None = _tier(row, name, "capacity_bytes")
        used: float | None = _tier(row, name, "used_bytes")
        return 100 * used / capacity if capacity and used is not None else _NO_DATA

    with drawing("fill", height=2.8) as made:
        _lines(made.axes, rows, [n for n in names if any(share(r, n) >= 0 for r in rows)], share)
        made.axes.set_ylim(0, 105)
        _finish(made, rows, "% of capacity in use")
    return Plot(made.svg, "How full each tier is. A full tier evicts: more room may pay off.")


def _speed(rows: Sequence[Row], names: Sequence[str]) -> Plot:
    with drawing("speed", height=2.8) as made:
        for op, style in (("load", "-"), ("save", "--")):

            def speed(row: Row, name: str, op: str = op) -> float:
                return float(_tier(row, name, f"{op}_bytes") or 0) / float(row["seconds"]) / 1e6

            _lines(made.axes, rows, names, speed, style, f" {op}")
        made.axes.set_ylim(bottom=0)
        _finish(made, rows, "MB a second")
    return Plot(
        made.svg,
        "Bytes read from (solid) and written to (dashed) the tiers below DRAM, MB a second.",
    )


def _savings(rows: Sequence[Row]) -> Plot:
    with drawing("savings", height=2.8) as made:
        for name, label, colour in (
            ("saved_prefill_seconds", "prefill saved (estimated)", PALETTE[0]),
            ("load_seconds", "waited for loads", PALETTE[4]),
        ):
            values = [(row[name] or 0) / row["seconds"] for row in rows]
            made.axes.plot(_times(rows), values, color=colour, label=label)
        made.axes.set_ylim(bottom=0)
        _finish(made, rows, "seconds in each second")
    return Plot(
        made.svg,
        "Seconds of prefill saved and seconds waited for loads, in each second. The cache pays "
        "while the first is above the second.",
    )


# -- drawing -------------------------------------------------------------------------------------


def _times(rows: Sequence[Row]) -> list[float]:
    """The end of each interval, in `_unit` since the start."""
    start = rows[0]["time"] - rows[0]["seconds"]
    scale, _ = _unit(rows)
    return [(row["time"] - start) / scale for row in rows]


def _unit(rows: Sequence[Row]) -> tuple[float, str]:
    length = rows[-1]["time"] - rows[0]["time"] + rows[0]["seconds"]
    for scale, name in ((86400.0, "days"), (3600.0, "hours"), (60.0, "minutes")):
        if length >= 3 * scale:
            return scale, name
    return 1.0, "seconds"


def _stack(
    made: Drawing,
    rows: Sequence[Row],
    names: Sequence[str],
    values: Sequence[Sequence[float]],
    colours: Sequence[str],
) -> None:
    """Areas over one another, each interval as a step as wide as it is long."""
    ends = _times(rows)
    scale, _ = _unit(rows)
    starts = [end - row["seconds"] / scale for end, row in zip(ends, rows, strict=True)]
    edges = [*starts, ends[-1]]
    base = [0.0] * len(rows)
    for at, (name, part) in enumerate(zip(names, values, strict=True)):
        colour = colours[at % len(colours)]
        top = [low + (0 if math.isnan(v) else v) for low, v in zip(base, part, strict=True)]
        if any(top):
            made.axes.stairs(
                top, edges, baseline=base, fill=True, color=colour, alpha=0.75, label=name
            )
        base = top


def _lines(
    axes: Axes,
    rows: Sequence[Row],
    names: Sequence[str],
    value: Callable[[Row, str], float],
    style: str = "-",
    suffix: str = "",
) -> None:
    for at, name in enumerate(names):
        values = [value(row, name) for row in rows]
        axes.plot(
            _times(rows), values, color=tier_colour(name, at), linestyle=style, label=name + suffix
        )


def _finish(made: Drawing, rows: Sequence[Row], unit: str) -> None:
    made.axes.set_xlim(0, _times(rows)[-1])
    made.axes.set_xlabel(f"{_unit(rows)[1]} since the start")
    made.axes.set_ylabel(unit)
    made.legend()


def _percent(rate: float | None) -> float:
    return _NO_DATA if rate is None else 100 * rate


def _tier(row: Row, name: str, field: str) -> Any:
    return (row["tiers"].get(name) or {}).get(field)
