# SPDX-License-Identifier: Apache-2.0
"""The configuration as an engine would read it: its mistakes, and tiers that do not fit."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from tierkv.config import DiskConfig, InvalidConfig, LoadedConfig, TierKVConfig, load_config
from tierkv.config.units import format_size
from tierkv.doctor.finding import Finding, Level, warning


def read(
    file: Path | None, inline: Mapping[str, Any] | None, environ: Mapping[str, str]
) -> tuple[LoadedConfig | None, list[Finding]]:
    """The configuration in effect, None if it cannot be used, and what is wrong with it."""
    findings: list[Finding] = []
    try:
        loaded = load_config(file, inline, environ, check_machine=True, strict=True)
    except InvalidConfig as invalid:
        for problem in invalid.details:
            where = ": ".join(filter(None, (str(problem.place), problem.path)))
            findings.append(Finding.of("config", Level.ERROR, where, problem.message))
        try:
            # What does not fit this machine is no reason to look at nothing else.
            loaded = load_config(file, inline, environ)
        except InvalidConfig:
            return None, findings
        return loaded, findings
    for text in loaded.warnings:
        place, path, message = ([*text.split(": ", 2), "", ""])[:3]
        findings.append(Finding.of("config", Level.WARNING, f"{place}: {path}", message))
    return loaded, findings


def fit_together(loaded: LoadedConfig) -> Iterator[Finding]:
    """Tiers that are of no use beside each other."""
    config = loaded.config
    above = config.dram
    for tier in config.lower:
        if not isinstance(tier, DiskConfig):
            continue
        if tier.capacity <= above.capacity:
            yield warning(
                "tier-smaller-than-above",
                _place(loaded, f"tiers.{tier.name}.capacity"),
                f"{tier.name} ({format_size(tier.capacity)}) is no larger than {above.name} above "
                f"it ({format_size(above.capacity)}): it holds little that is not there already",
                f"set it to several times {format_size(above.capacity)}, or leave the tier out",
            )
    yield from _queues(loaded, config)


def _queues(loaded: LoadedConfig, config: TierKVConfig) -> Iterator[Finding]:
    queued = [tier for tier in config.lower if tier.write_queue is not None]
    total = sum(tier.write_queue or 0 for tier in queued)
    if total >= config.dram.capacity:
        yield warning(
            "write-queue",
            _place(loaded, f"tiers.{queued[-1].name}.write_queue"),
            f"chunks that wait to be written may fill all of DRAM ({format_size(total)} of "
            f"{format_size(config.dram.capacity)}): then nothing can be evicted, and saves are "
            "dropped",
            f"set the write queues to {format_size(config.dram.capacity // 2)} together, or leave "
            "them out",
        )


def _place(loaded: LoadedConfig, path: str) -> str:
    return f"{loaded.sources.get(path, 'default')}: {path}"
