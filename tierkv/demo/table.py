# SPDX-License-Identifier: Apache-2.0
"""The result as a person reads it in a terminal."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.table import Table

RATIOS = {
    "dram_over_apc": "DRAM hit ÷ vLLM's own prefix-cache hit",
    "disk_over_dram": "disk hit ÷ DRAM hit",
    "cold_over_none": "first time with TierKV ÷ without",
    "none_over_dram": "recomputing ÷ DRAM hit",
}
"""What each ratio compares, in the order in which they are shown."""

FLIPS = {
    "apc_as_none": "vLLM's own prefix cache",
    "dram_as_none": "TierKV from DRAM",
}


def milliseconds(seconds: float) -> str:
    """`seconds` in ms, with a decimal below 100."""
    value = seconds * 1000
    return f"{value:,.1f}" if value < 100 else f"{value:,.0f}"


def tiers(hit_tokens: Mapping[str, int]) -> str:
    """Hit tokens by tier in a few words; a dash for none."""
    return ", ".join(f"{tier} {tokens:,}" for tier, tokens in hit_tokens.items()) or "–"


def summary(result: Mapping[str, Any]) -> list[str]:
    """Sentences below the table: what the answers show, and what is wrong, if anything is."""
    answers = result["answers"]
    lines = []
    if result["answers_identical"]:
        compared = answers["dram_as_apc"]["of"] + answers["disk_as_apc"]["of"]
        lines.append(
            f"Answers: all {compared} from DRAM and from disk are token for token those with "
            "vLLM's own prefix cache."
        )
    flips = [
        f"{found['of'] - found['same']} of {found['of']} with {who}"
        for name, who in FLIPS.items()
        if (found := answers[name])["of"]
    ]
    lines.append(
        f"Against full recomputation these differ: {'; '.join(flips)}. There the prefill is cut "
        "in another way, and bfloat16 rounds otherwise."
    )
    lines += [f"FAILED: {check['detail']}" for check in result["checks"] if not check["passed"]]
    return lines


def print_result(result: Mapping[str, Any], console: Console) -> None:
    """The table, the ratios and the sentences below them."""
    table = Table(title="Time to the first token", title_justify="left", title_style="bold")
    table.add_column("phase", no_wrap=True)
    for name in ("median ms", "spread ms", "÷ (a)", "÷ (b)"):
        table.add_column(name, justify="right")
    table.add_column("hit tokens by tier")
    for phase in result["phases"]:
        table.add_row(
            phase["title"],
            milliseconds(phase["ttft_median_s"]),
            milliseconds(phase["ttft_spread_s"]),
            f"{phase['over_none']:.3f}",
            f"{phase['over_apc']:.2f}",
            tiers(phase["hit_tokens"]),
        )
    console.print(table)
    table = Table(title="Ratios of requests measured side by side", title_justify="left")
    table.title_style = "bold"
    table.add_column("ratio", no_wrap=True)
    for name in ("median", "spread", "repeats"):
        table.add_column(name, justify="right")
    for name, what in RATIOS.items():
        ratio = result["ratios"][name]
        table.add_row(
            what, f"{ratio['median']:.2f}", f"{ratio['spread']:.2f}", str(ratio["repeats"])
        )
    console.print(table)
    console.print(f"Spread: {result['spread']}.", highlight=False)
    for line in summary(result):
        style = "bold red" if line.startswith("FAILED") else None
        console.print(line, style=style, highlight=False)
    console.print(machine_line(result), highlight=False)


def machine_line(result: Mapping[str, Any]) -> str:
    """Where and with what it was measured."""
    machine, versions = result["machine"], result["versions"]
    parts = ", ".join(f"{name} {number}" for name, number in versions.items())
    return (
        f"{result['config']['model']} on {machine['cpu']}, {machine['cpus_used']} CPUs, "
        f"{machine['memory_gib']} GiB; {parts}; {result['seconds']:.0f} s."
    )
