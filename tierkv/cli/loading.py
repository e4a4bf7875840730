# SPDX-License-Identifier: Apache-2.0
"""What `check` and `config show` share: which file, how it is loaded, how failure is told."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tierkv.cli import output

if TYPE_CHECKING:
    from tierkv.config import InvalidConfig, LoadedConfig

FileArgument = Annotated[
    Path | None,
    typer.Argument(
        metavar="FILE",
        readable=False,  # the loader says more about a file that cannot be read
        help="Configuration file. [default: $TIERKV_CONFIG, else tierkv.yaml]",
        show_default=False,
    ),
]
ConfigOption = Annotated[
    Path | None,
    typer.Option("--config", metavar="FILE", help="The same as FILE.", show_default=False),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]


def load(
    file: Path | None, config: Path | None, *, check_machine: bool, json_list: str | None
) -> LoadedConfig:
    """The configuration, or the end of the command with exit code 2.

    Args:
        file: as an argument.
        config: as an option; not both.
        check_machine: whether to look at this machine too.
        json_list: tell problems as JSON, in which this list of the command's own is empty; None:
            as lines.
    """
    from tierkv.config import InvalidConfig, load_config

    if file is not None and config is not None:
        raise typer.BadParameter("give FILE or --config, not both")
    try:
        return load_config(file or config, check_machine=check_machine, strict=True)
    except InvalidConfig as error:
        if json_list is not None:
            output.result_json({**failure(error), json_list: []})
        else:
            output.problems(error.problems)
            count = len(error.details)
            output.message(f"{count} problem{'' if count == 1 else 's'}")
        raise typer.Exit(2) from None


def success(loaded: LoadedConfig) -> dict[str, Any]:
    """The part of the JSON object that every command on a configuration prints."""
    return {
        "ok": True,
        "file": None if loaded.file is None else str(loaded.file),
        "problems": [],
        "notes": loaded.notes,
        "warnings": loaded.warnings,
    }


def failure(error: InvalidConfig) -> dict[str, Any]:
    """The same, for a configuration that cannot be used."""
    return {
        "ok": False,
        "file": None if error.file is None else str(error.file),
        "problems": [
            {
                "source": problem.place.kind,
                "place": str(problem.place),
                "line": problem.place.line,
                "column": problem.place.column,
                "path": problem.path,
                "message": problem.message,
            }
            for problem in error.details
        ],
        "notes": [],
        "warnings": [],
    }
