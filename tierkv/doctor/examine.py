# SPDX-License-Identifier: Apache-2.0
"""All checks, one after the other.

Blocks for some seconds, most of them where a server does not answer.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tierkv.config import DiskConfig, LoadedConfig
from tierkv.config.redis import RedisConfig
from tierkv.doctor import engine, launch, limits, places, servers, settings
from tierkv.doctor.finding import Finding, Level


@dataclass(slots=True)
class Examination:
    """What was looked at, and what was found.

    Attributes:
        findings: errors first.
        looked_at: in words, for the end of the report.
        facts: the machine and what is installed, for programs and bug reports.
        file: the configuration that was read, if any.
    """

    findings: list[Finding] = field(default_factory=list)
    looked_at: list[str] = field(default_factory=list)
    facts: dict[str, Any] = field(default_factory=dict)
    file: Path | None = None

    def count(self, level: Level) -> int:
        return sum(finding.level is level for finding in self.findings)


def examine(
    file: Path | None,
    command: Sequence[str],
    environ: Mapping[str, str],
    tell: Callable[[str], None] = lambda stage: None,
) -> Examination:
    """Look at everything.

    Args:
        file: the configuration; None: as an engine finds it.
        command: vLLM's command line, if it is to be looked at too.
        tell: called with what is being looked at.
    """
    found = Examination(facts=limits.facts())
    tell("the configuration")
    started = launch.understand(command)
    loaded, problems = settings.read(file, started.inline, environ)
    found.findings += problems
    if loaded is not None:
        found.file = loaded.file
        found.looked_at.append(str(loaded.file or "the default configuration"))
        if not problems:
            found.findings += settings.fit_together(loaded)
        _look_at_tiers(loaded, found, tell)
        found.findings += launch.against(started, loaded)
    tell("the engine")
    found.findings += started.findings
    if started.given:
        found.looked_at.append("the command")
    found.findings += launch.variables(environ, started)
    found.findings += limits.look(started.workers)
    installed, problems = engine.probe(environ)
    # A command that is not the one started needs no warning.
    found.findings += [
        each
        for each in problems
        if (each.check, each.level) != ("vllm-command", Level.WARNING) or not started.by_module
    ]
    found.facts["versions"] = dict(installed.versions) if installed is not None else {}
    if installed is not None and installed.vllm:
        found.looked_at.append(f"vLLM {installed.vllm}")
    # Stable: within a level, in the order in which things were looked at.
    found.findings = sorted(dict.fromkeys(found.findings), key=lambda each: each.level)
    return found


def _look_at_tiers(loaded: LoadedConfig, found: Examination, tell: Callable[[str], None]) -> None:
    for tier in loaded.config.tiers:
        if isinstance(tier, DiskConfig):
            tell(f"the disk tier in {tier.path}")
            found.findings += places.look_at(tier)
            found.looked_at.append(f"{tier.name} in {tier.path}")
        elif isinstance(tier, RedisConfig):
            tell(f"the Redis server {tier.url}")
            found.findings += servers.look_at(tier)
            found.looked_at.append(f"{tier.name} at {tier.url}")
