# SPDX-License-Identifier: Apache-2.0
"""Writes the reference page of the command line from the commands themselves.

python -m tierkv.cli.reference > docs/reference/cli.md
"""

from __future__ import annotations

import importlib
import inspect
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import typer

from tierkv.cli import app

_HEAD = """\
# Command line

<!-- Generated from the commands. Do not edit; run:
     python -m tierkv.cli.reference > docs/reference/cli.md -->

`tierkv COMMAND --help` prints what stands here. Results go to stdout, messages to stderr. With
`--json` a command prints one JSON object, whose fields keep their names. There is colour on
terminals alone, and none with `NO_COLOR`; bars are drawn on terminals alone.

| Exit code | Meaning |
|---:|---|
| 0 | fine |
| 1 | failed at run time |
| 2 | usage or configuration |
| 3 | works, but degraded: damaged chunks were found, warnings with `--strict` |
| 130 | interrupted |

**Completion.** `tierkv --install-completion` lets your shell (bash, zsh, fish or PowerShell)
complete commands and options with the tab key, from its next start on; `--show-completion` prints
the script instead, for those who keep their own.
"""


def reference_text() -> str:
    """The page, Markdown."""
    return "\n".join([_HEAD, *_commands(app._Root, typer.main.get_command(app.app), "tierkv")])


def _commands(group: type[app._Group], command: Any, prefix: str) -> Iterator[str]:
    for name, module_name in group.commands_table.items():
        found = command.get_command(None, name)
        if name in app.GROUPS:
            yield from _commands(app.GROUP_CLASSES[name], found, f"{prefix} {name}")
        else:
            yield _command(f"{prefix} {name}", importlib.import_module(module_name), found)


def _command(title: str, module: Any, command: Any) -> str:
    arguments = [each for each in command.params if each.param_type_name == "argument"]
    options = [each for each in command.params if each.param_type_name == "option"]
    usage = " ".join([title, *(["[OPTIONS]"] if options else []), *map(_place, arguments)])
    parts = [f"## `{title}`\n", f"```\n{usage}\n```\n", _prose(command.help) + "\n"]
    rows = [(_place(each), each) for each in arguments] + [(_flags(each), each) for each in options]
    rows = [row for row in rows if row[0] != "--help"]
    if rows:
        lines = ["| | Default | Meaning |", "|---|---|---|"]
        lines += [
            f"| `{_cell(label)}` | {_default(each)} | {_help(each)} |" for label, each in rows
        ]
        parts.append("\n".join(lines) + "\n")
    fields = getattr(module, "JSON", None)
    if fields:
        lines = ["| Field of `--json` | Meaning |", "|---|---|"]
        lines += [f"| {_names(name)} | {_cell(text)} |" for name, text in fields.items()]
        parts.append("\n".join(lines) + "\n")
    if module.EXAMPLE:
        parts.append(f"```\n{inspect.cleandoc(module.EXAMPLE)}\n```\n")
    return "\n".join(parts)


def _prose(text: str) -> str:
    return "\n".join(line.rstrip() for line in inspect.cleandoc(text).splitlines())


def _place(argument: Any) -> str:
    name = argument.metavar or argument.name.upper()
    return name if argument.required or name.startswith("[") else f"[{name}]"


def _flags(option: Any) -> str:
    flags = " / ".join(option.opts + option.secondary_opts)
    if option.is_flag:
        return flags
    return f"{flags} {option.metavar or option.name.upper().replace('_', '-')}"


def _default(param: Any) -> str:
    if param.required:
        return "required"
    value = None if callable(param.default) else param.default
    is_shown = isinstance(value, str | int | float | Path) and not isinstance(value, bool)
    return f"`{value}`" if is_shown and str(value) else ""


def _help(param: Any) -> str:
    # What click's help adds by itself stands in a column of its own.
    return _cell((param.help or "").strip())


def _names(fields: str) -> str:
    return ", ".join(f"`{name}`" for name in fields.split(", "))


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


if __name__ == "__main__":
    sys.stdout.write(reference_text())
