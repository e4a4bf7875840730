# SPDX-License-Identifier: Apache-2.0
"""The result as data: one JSON document with everything needed to judge the figures."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from tierkv.demo import figures
from tierkv.demo.phases import Phase, Record
from tierkv.demo.plan import CONFIG, SHARED_ARGUMENTS, Plan, large_space, small_space
from tierkv.demo.server import cpu_binding
from tierkv.report.surroundings import machine, versions

SCHEMA = 1
"""Raised when a field changes its meaning or goes."""

Result = dict[str, Any]


def build_result(record: Record, plan: Plan, model: Path, seconds: float) -> Result:
    """Everything as plain values.

    Args:
        record: what was measured.
        plan: with which sizes.
        model: directory of the model; only its name is told.
        seconds: how long it took.
    """
    ratios = figures.ratios(record)
    ttft, hits = figures.ttft(record), figures.hit_tokens(record)
    return {
        "schema": SCHEMA,
        "what": "tierkv demo: time to the first token (TTFT), measured at the client over HTTP",
        "finished": datetime.now(UTC).isoformat(timespec="seconds"),
        "seconds": round(seconds, 1),
        "phases": [
            {
                "name": str(phase),
                "title": figures.TITLES[phase],
                "ttft_median_s": ttft[phase].median,
                "ttft_spread_s": ttft[phase].spread,
                "hit_tokens": hits[phase],
                "prompt_tokens": sum(s.answer.prompt_tokens for s in record.of(phase)),
                "over_none": ttft[phase].median / ttft[Phase.NONE].median,
                "over_apc": ttft[phase].median / ttft[Phase.APC].median,
                "samples": [
                    {
                        "document": record.documents[sample.document].name,
                        "question": sample.question,
                        "turn": sample.turn,
                        "ttft_s": sample.answer.ttft_s,
                        "prompt_tokens": sample.answer.prompt_tokens,
                        "cached_tokens": sample.answer.cached_tokens,
                        "hit_tokens": dict(sample.hit_tokens),
                    }
                    for sample in record.of(phase)
                ],
            }
            for phase in Phase
        ],
        "ratios": {name: asdict(ratio) for name, ratio in ratios.items()},
        "spread": "interquartile range",
        "answers_identical": figures.answers_identical(record),
        "answers": {
            f"{phase}_as_{reference}": asdict(figures.compare(record, phase, reference))
            for phase, reference in (
                (Phase.DRAM, Phase.APC),
                (Phase.DISK, Phase.APC),
                (Phase.COLD, Phase.NONE),
                (Phase.APC, Phase.NONE),
                (Phase.DRAM, Phase.NONE),
            )
        },
        "checks": [asdict(check) for check in figures.checks(record)],
        "versions": versions(),
        "machine": {**machine(), "cpu_binding": cpu_binding()},
        "config": {
            "model": model.name,
            "plan": asdict(plan),
            "vllm_arguments": list(SHARED_ARGUMENTS),
            "vllm_blocks": {"small": small_space(), "large": large_space(plan)},
            "tierkv": CONFIG.format(path="…"),
        },
    }


def passed(result: Mapping[str, Any]) -> bool:
    """Whether every check of the result holds."""
    return all(check["passed"] for check in result["checks"])
