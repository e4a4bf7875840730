# SPDX-License-Identifier: Apache-2.0
"""`tierkv doctor`: what keeps TierKV from working here, and what to do about it."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Annotated

import typer

from tierkv.cli import columns, loading, output, progress, storage

if TYPE_CHECKING:
    from tierkv.doctor import Examination, Finding

JSON = {
    "ok": "whether nothing was found",
    "file": "the configuration that was read, or null",
    "findings": "list of `check` (a stable name), `level` (`error`, `warning`), `where`, `what`, "
    "`remedy`; errors first",
    "looked_at": "list of what was looked at, in words",
    "facts": "`memory_bytes`, `memory_available_bytes`, `locked_memory_limit_bytes`, "
    "`open_files_limit`, `shared_memory_free_bytes`, `cpus`, and `versions` by package",
}

EXAMPLE = """\
  tierkv doctor
  tierkv doctor --config tierkv.yaml --strict
  tierkv doctor -- vllm serve MODEL --kv-transfer-config '{…}'"""


def doctor(
    command: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[-- COMMAND…]",
            help="The command that starts vLLM: its flags are looked at too; it is not run.",
            show_default=False,
        ),
    ] = None,
    config: storage.ConfigOption = None,
    strict: Annotated[
        bool, typer.Option("--strict", help="Exit with 3 if there are warnings.")
    ] = False,
    as_json: loading.JsonOption = False,
) -> None:
    """Find what keeps TierKV from working, or working well.

    Looks at configuration, machine, directories, Redis and vLLM. Each finding says where, what, and
    what to do. Nothing is changed. Exit code 0 if nothing keeps
    TierKV from working, 2 if the configuration does, 1 if something else does; 3 for warnings
    alone, with --strict.
    """
    from tierkv.doctor import Level, examine

    output.quiet()
    with progress.spinner("looking at") as tell:
        found = examine(config, command or [], os.environ, tell)
    errors, warnings = found.count(Level.ERROR), found.count(Level.WARNING)
    if as_json:
        output.result_json(_json(found))
    else:
        for finding in found.findings:
            _print(finding)
        if errors or warnings:
            counts = [(errors, "error"), (warnings, "warning")]
            output.result(", ".join(columns.count(n, noun) for n, noun in counts if n))
        else:
            looked_at = "; ".join(found.looked_at)
            output.result(f"{output.styled('everything fine', 'green')}: {looked_at}")
    if any(each.check == "config" and each.level is Level.ERROR for each in found.findings):
        raise typer.Exit(2)
    if errors:
        raise typer.Exit(1)
    if warnings and strict:
        raise typer.Exit(3)


def _print(finding: Finding) -> None:
    style: output.Style = "red" if finding.level == "error" else "yellow"
    level = output.styled(finding.level, style)
    output.result(f"{level}: {output.styled(finding.where, 'bold')}: {finding.what}")
    if finding.remedy:
        output.result(f"  {finding.remedy}")


def _json(found: Examination) -> dict[str, object]:
    return {
        "ok": not found.findings,
        "file": None if found.file is None else str(found.file),
        "findings": [
            {
                "check": finding.check,
                "level": finding.level.value,
                "where": finding.where,
                "what": finding.what,
                "remedy": finding.remedy,
            }
            for finding in found.findings
        ],
        "looked_at": found.looked_at,
        "facts": found.facts,
    }
