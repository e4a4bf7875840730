# SPDX-License-Identifier: Apache-2.0
"""The result as one HTML file: no network, no script, readable on paper."""

from __future__ import annotations

import io
from collections.abc import Mapping
from importlib import resources
from typing import Any

from tierkv.demo import table

COLOURS = {
    "none": "#8c8c8c",
    "apc": "#4c72b0",
    "cold": "#c8a13a",
    "dram": "#2e8b57",
    "disk": "#8b5a9f",
}


def render_page(result: Mapping[str, Any]) -> str:
    """The page as text."""
    import jinja2

    template = resources.files("tierkv.demo").joinpath("page.html.j2").read_text("utf-8")
    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined)
    environment.filters.update(ms=table.milliseconds, tiers=table.tiers)
    return environment.from_string(template).render(
        result=result,
        ratios=table.RATIOS,
        summary=table.summary(result),
        machine=table.machine_line(result),
        plot=plot(result),
    )


def plot(result: Mapping[str, Any]) -> str:
    """An SVG element: every sample as a dot, the median as a bar, by phase."""
    import matplotlib as mpl
    from matplotlib.figure import Figure
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    phases = result["phases"]
    # Text stays text, and equal results give equal bytes.
    with mpl.rc_context({"svg.fonttype": "none", "svg.hashsalt": "tierkv"}):
        figure = Figure(figsize=(8, 3.2), layout="constrained")
        axes = figure.add_subplot()
        for row, phase in enumerate(phases):
            colour = COLOURS[phase["name"]]
            times = [sample["ttft_s"] * 1000 for sample in phase["samples"]]
            heights = [row + 0.3 * ((i * 0.618034) % 1 - 0.5) for i in range(len(times))]
            axes.plot(times, heights, "o", color=colour, alpha=0.45, markersize=4)
            middle = phase["ttft_median_s"] * 1000
            axes.plot([middle, middle], [row - 0.35, row + 0.35], color=colour, linewidth=3)
        axes.set_yticks(range(len(phases)), [phase["title"] for phase in phases])
        axes.invert_yaxis()
        axes.set_xscale("log")
        axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
        axes.xaxis.set_minor_formatter(NullFormatter())
        axes.set_xlabel("time to the first token, ms (logarithmic; left is better)")
        axes.grid(axis="x", alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
        target = io.StringIO()
        figure.savefig(target, format="svg", metadata={"Date": None})
    text = target.getvalue()
    # Inline SVG has no XML declaration and no document type.
    return text[text.index("<svg") :]
