# SPDX-License-Identifier: Apache-2.0
"""The document of a benchmark's JSON: ratios with their spread, and whatever figures it has."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tierkv.report.document import Block, Document, Plot, Section, Table, Text

_RATIO = {"median", "spread", "repeats"}


def is_bench(value: Any) -> bool:
    """Whether this has the form that all benchmarks of the project print."""
    return (
        isinstance(value, dict)
        and isinstance(value.get("ratios"), dict)
        and all(isinstance(r, dict) and r.keys() >= _RATIO for r in value["ratios"].values())
    )


def build(result: Mapping[str, Any], name: str, *, pictures: bool) -> Document:
    """The document. Lists of objects become tables, single values a list at the end."""
    ratios = result["ratios"]
    blocks: list[Block] = []
    if ratios:
        rows = [
            [_words(what), f"{r['median']:,.3f}", f"{r['spread']:,.3f}", f"{r['repeats']}"]
            for what, r in ratios.items()
        ]
        blocks.append(Table(("ratio", ">median", ">spread", ">repeats"), rows))
        if pictures:
            blocks.insert(0, _plot(ratios))
    else:
        blocks.append(Text("The benchmark compares nothing."))
    sections = [Section("Ratios", blocks)]
    plain: dict[str, Any] = {}
    for key, value in result.items():
        if key == "ratios":
            continue
        if isinstance(value, Mapping) and value:
            rows = [[_words(what), _cell(found)] for what, found in value.items()]
            sections.append(Section(_title(key), [Table((_words(key), ">value"), rows)]))
        elif isinstance(value, list) and value and all(isinstance(v, Mapping) for v in value):
            sections.append(Section(_title(key), [_table(value)]))
        else:
            plain[key] = value
    if plain:
        rows = [[_words(key), _cell(value)] for key, value in plain.items()]
        sections.append(Section("How it was measured", [Table(("", "value"), rows)]))
    lead = (
        "Ratios of figures that were measured side by side. The spread is the distance of the "
        "quartiles over the repeats."
    )
    return Document(f"TierKV benchmark: {name}", lead, sections)


def _plot(ratios: Mapping[str, Mapping[str, float]]) -> Plot:
    from tierkv.report.figure import PALETTE, drawing

    with drawing("ratios", height=0.8 + 0.35 * len(ratios)) as made:
        axes = made.axes
        for row, ratio in enumerate(ratios.values()):
            half = ratio["spread"] / 2
            axes.errorbar(ratio["median"], row, xerr=half, fmt="o", color=PALETTE[0], capsize=3)
        axes.axvline(1, color=PALETTE[5], linestyle="--", linewidth=1)
        axes.set_yticks(range(len(ratios)), [_words(name) for name in ratios])
        axes.invert_yaxis()
        axes.set_ylim(len(ratios) - 0.5, -0.5)
        axes.set_xlim(left=0)
        axes.set_xlabel("ratio")
    return Plot(
        made.svg, "A dot is the median, its bar as wide as the spread; the dashed line is 1: equal."
    )


def _table(rows: list[Mapping[str, Any]]) -> Table:
    names = list(dict.fromkeys(name for row in rows for name in row))
    numeric = {
        name for name in names if all(isinstance(row.get(name), int | float | None) for row in rows)
    }
    columns = [(">" if name in numeric else "") + _words(name) for name in names]
    return Table(columns, [[_cell(row.get(name)) for name in names] for row in rows])


def _cell(value: Any) -> str:
    if value is None:
        return "–"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, float):
        return f"{value:,.4g}" if abs(value) < 1000 else f"{value:,.0f}"
    if isinstance(value, Mapping):
        return ", ".join(f"{_words(k)} {_cell(v)}" for k, v in value.items())
    if isinstance(value, list):
        return ", ".join(_cell(item) for item in value) or "–"
    return str(value)


def _words(name: str) -> str:
    return str(name).replace("_", " ")


def _title(name: str) -> str:
    words = _words(name)
    return words[:1].upper() + words[1:]
