# SPDX-License-Identifier: Apache-2.0
"""The result of a simulation for people: a table of hit rates, a plot, and what they say."""

from __future__ import annotations

from typing import Any

from tierkv.report.document import Block, Document, Plot, Section, Table, Text
from tierkv.simulate.sweep import Result, percent

NOTHING = "–"
"""A combination that was not tried: a disk no larger than the DRAM above it."""


def build(result: Result, *, pictures: bool) -> Document:
    """The document; with `pictures`, what the page has besides."""
    trace = result["trace"]
    chunk = result["chunk_bytes"]
    size = f", {chunk / 2**20:,.1f} MiB each" if chunk else ""
    lead = (
        f"{trace['requests']:,} requests with {trace['prompt_tokens']:,} prompt tokens, in chunks "
        f"of {trace['block_tokens']} tokens{size}. The hit rate is hit tokens ÷ prompt tokens, "
        "with nothing in the engine's own prefix cache."
    )
    rates: list[Block] = [_rates(result)]
    if pictures:
        rates.insert(0, Plot(plot(result), _READING))
    sections = [
        Section("What it says", [Text(sentence) for sentence in result["reading"]]),
        Section("Hit rate by DRAM, disk and policy", rates),
    ]
    if any(point["disk"] for point in result["points"]):
        sections.append(Section("What the disk has to do", [_traffic(result)]))
    return Document(f"tierkv simulate: {trace['name']}", lead, sections)


_READING = (
    "Hit rate over DRAM capacity (logarithmic); a line is a policy with a disk of one size below "
    "the DRAM, the dashed line what unbounded space would give. Where a line is flat, more DRAM "
    "does not pay."
)


def _series(result: Result) -> dict[tuple[str, str | None], dict[str, dict[str, Any]]]:
    """Points by (policy, disk) and then by DRAM, in the order of the result."""
    series: dict[tuple[str, str | None], dict[str, dict[str, Any]]] = {}
    for point in result["points"]:
        disk = point["disk"]["text"] if point["disk"] else None
        series.setdefault((point["policy"], disk), {})[point["dram"]["text"]] = point
    return series


def _title(policy: str, disk: str | None) -> str:
    return f"{policy}\n{f'+ {disk}' if disk else 'no disk'}"


def _drams(result: Result) -> list[str]:
    chunks = {point["dram"]["text"]: point["dram"]["chunks"] for point in result["points"]}
    return sorted(chunks, key=lambda text: chunks[text])


def _rates(result: Result) -> Table:
    series = _series(result)
    columns = [">DRAM", *(f">{_title(*key)}" for key in series)]
    rows = []
    for dram in _drams(result):
        found = [points.get(dram) for points in series.values()]
        rows.append([dram, *(NOTHING if p is None else percent(p["hit_rate"]) for p in found)])
    rows.append(["unbounded", *([percent(result["ceiling"]["hit_rate"])] * len(series))])
    return Table(columns, rows)


def _traffic(result: Result) -> Table:
    """Reads and writes below the smallest DRAM of each series: the most the disk has to do."""
    rows = []
    for (policy, disk), points in _series(result).items():
        if disk is None:
            continue
        point = min(points.values(), key=lambda point: point["dram"]["chunks"])
        rows.append(
            [
                policy,
                disk,
                point["dram"]["text"],
                percent(point["disk_hit_rate"]),
                *(_amount(result, point, what) for what in ("read", "written")),
            ]
        )
    columns = ("policy", ">disk", ">DRAM", ">hits from disk", ">read", ">written")
    return Table(columns, rows)


def _amount(result: Result, point: dict[str, Any], what: str) -> str:
    chunks, nbytes = point[f"disk_{what}_chunks"], point[f"disk_{what}_bytes"]
    if nbytes is None:
        return f"{chunks:,} chunks"
    seconds = result["trace"]["seconds"]
    rate = f" ({nbytes / seconds / 1e6:,.0f} MB/s)" if seconds else ""
    return f"{nbytes / 2**30:,.0f} GiB{rate}"


def plot(result: Result) -> str:
    """An SVG element: hit rate over DRAM capacity, a line for each policy and disk."""
    from tierkv.report.figure import PALETTE, drawing

    series = _series(result)
    disks = list(dict.fromkeys(disk for _, disk in series))
    policies = list(dict.fromkeys(policy for policy, _ in series))
    drams = _drams(result)
    styles, markers = ("-", "--", ":", "-."), ("o", "s", "^", "d")
    with drawing("rates", height=3.8) as made:
        axes = made.axes
        for (policy, disk), points in series.items():
            which = policies.index(policy) % len(styles)
            known = [text for text in drams if text in points]
            axes.plot(
                [points[text]["dram"]["chunks"] for text in known],
                [100 * points[text]["hit_rate"] for text in known],
                color=PALETTE[disks.index(disk) % len(PALETTE)],
                linestyle=styles[which],
                marker=markers[which],
                markersize=4,
                label=_title(policy, disk).replace("\n", ", "),
            )
        most = 100 * result["ceiling"]["hit_rate"]
        axes.axhline(most, color="#7f7f7f", linestyle=(0, (6, 4)), label="unbounded", linewidth=1)
        axes.set_xscale("log", base=2)
        positions = {p["dram"]["text"]: p["dram"]["chunks"] for p in result["points"]}
        axes.set_xticks([positions[text] for text in drams], drams)
        axes.minorticks_off()
        axes.set_ylim(0, most * 1.1 or 1)
        axes.set_xlabel("capacity of DRAM")
        axes.set_ylabel("hit rate, % of prompt tokens")
        made.legend()
    return made.svg
