# SPDX-License-Identifier: Apache-2.0
"""The result as one HTML file: no network, no script, readable on paper."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tierkv.demo import table
from tierkv.report.document import Block, Code, Document, Plot, Section, Table, Text
from tierkv.report.html import render

COLOURS = {
    "none": "#8c8c8c",
    "apc": "#4c8bd0",
    "cold": "#c8901a",
    "dram": "#2e8b57",
    "disk": "#a66dbe",
}


def render_page(result: Mapping[str, Any]) -> str:
    """The page as text."""
    return render(build(result, pictures=True))


def build(result: Mapping[str, Any], *, pictures: bool) -> Document:
    """The document."""
    tokens = result["phases"][0]["samples"][0]["prompt_tokens"]
    lead = (
        f"Documents of about {tokens:,} tokens are asked about over HTTP, in five phases. The "
        "nearer the two TierKV phases come to vLLM's own prefix cache, the less a hit costs."
    )
    times: list[Block] = [_phases(result)]
    if pictures:
        reading = "Time to the first token by phase: a dot is one request, a bar is the median."
        times.insert(0, Plot(plot(result), reading))
    config = result["config"]
    return Document(
        "TierKV demo",
        lead,
        [
            Section("Time to the first token", times),
            Section(
                "Ratios of requests measured side by side",
                [
                    _ratios(result),
                    Text(f"Spread: {result['spread']}."),
                    *(Text(line, line.startswith("FAILED")) for line in table.summary(result)),
                ],
            ),
            Section(
                "How it was measured",
                [
                    Text(f"{table.machine_line(result)} Finished {result['finished']}."),
                    _checks(result),
                    Code(
                        f"vllm serve {config['model']} {' '.join(config['vllm_arguments'])}\n\n"
                        f"{config['tierkv']}"
                    ),
                ],
            ),
        ],
    )


def _phases(result: Mapping[str, Any]) -> Table:
    columns = (
        "phase",
        ">median ms",
        ">spread ms",
        ">requests",
        ">÷ (a)",
        ">÷ (b)",
        "hit tokens by tier",
    )
    rows = [
        [
            phase["title"],
            table.milliseconds(phase["ttft_median_s"]),
            table.milliseconds(phase["ttft_spread_s"]),
            str(len(phase["samples"])),
            f"{phase['over_none']:.3f}",
            f"{phase['over_apc']:.2f}",
            table.tiers(phase["hit_tokens"]),
        ]
        for phase in result["phases"]
    ]
    return Table(columns, rows)


def _ratios(result: Mapping[str, Any]) -> Table:
    rows = []
    for name, what in table.RATIOS.items():
        ratio = result["ratios"][name]
        rows.append(
            [what, f"{ratio['median']:.2f}", f"{ratio['spread']:.2f}", str(ratio["repeats"])]
        )
    return Table(("ratio", ">median", ">spread", ">repeats"), rows)


def _checks(result: Mapping[str, Any]) -> Table:
    checks = result["checks"]
    rows = [["holds" if check["passed"] else "FAILED", check["detail"]] for check in checks]
    failed = frozenset(at for at, check in enumerate(checks) if not check["passed"])
    return Table(("check", "what was found"), rows, failed)


def plot(result: Mapping[str, Any]) -> str:
    """An SVG element: every sample as a dot, the median as a bar, by phase."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    from tierkv.report.figure import drawing

    phases = result["phases"]
    with drawing("phases") as made:
        axes = made.axes
        for row, phase in enumerate(phases):
            colour = COLOURS[phase["name"]]
            times = [sample["ttft_s"] * 1000 for sample in phase["samples"]]
            heights = [row + 0.3 * ((i * 0.618034) % 1 - 0.5) for i in range(len(times))]
            axes.plot(times, heights, "o", color=colour, alpha=0.45, markersize=4)
            middle = phase["ttft_median_s"] * 1000
            axes.plot([middle, middle], [row - 0.35, row + 0.35], color=colour, linewidth=3)
        axes.set_yticks(range(len(phases)), [phase["title"] for phase in phases])
        axes.invert_yaxis()
        axes.grid(visible=False, axis="y")
        axes.set_xscale("log")
        axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
        axes.xaxis.set_minor_formatter(NullFormatter())
        axes.set_xlabel("time to the first token, ms (logarithmic; left is better)")
    return made.svg
