# SPDX-License-Identifier: Apache-2.0
"""The tree of commands, and what they have in common: exit codes, errors, quiet pipes.

A command is one module of this package with a function of the same name, and one line in a table
below. Its module is imported when the command is used or listed, so it imports nothing heavy at the
top: what it needs, it imports inside the function. `EXAMPLE` in the module ends its help.

Exit codes: 0 fine, 1 failed at run time, 2 usage or configuration, 3 works but degraded (damaged
chunks found, warnings of `doctor --strict`), 130 interrupted.
"""

from __future__ import annotations

import errno
import importlib
import sys
from collections.abc import Sequence
from typing import Annotated, Any, ClassVar

import typer
from typer.core import TyperGroup

from tierkv import __version__
from tierkv.cli import output
from tierkv.errors import ConfigError, TierKVError

OK, FAILED, USAGE, INTERRUPTED = 0, 1, 2, 130


class _Group(TyperGroup):
    """A group whose commands are imported on demand."""

    commands_table: ClassVar[dict[str, str]] = {}
    """Command to the module that has it; the function is called like the module."""

    def list_commands(self, ctx: Any) -> list[str]:
        return list(self.commands_table)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        module_name = self.commands_table.get(cmd_name)
        return None if module_name is None else _load(cmd_name, module_name)


class _Config(_Group):
    commands_table: ClassVar = {
        "init": "tierkv.cli.config_init",
        "show": "tierkv.cli.config_show",
    }


class _Bench(_Group):
    commands_table: ClassVar = {
        "tiers": "tierkv.cli.bench_tiers",
    }


class _Root(_Group):
    commands_table: ClassVar = {
        "bench": "tierkv.cli.app",
        "check": "tierkv.cli.check",
        "config": "tierkv.cli.app",
        "demo": "tierkv.cli.demo",
        "doctor": "tierkv.cli.doctor",
        "du": "tierkv.cli.du",
        "inspect": "tierkv.cli.inspect",
        "ls": "tierkv.cli.ls",
        "pin": "tierkv.cli.pin",
        "purge": "tierkv.cli.purge",
        "report": "tierkv.cli.report",
        "simulate": "tierkv.cli.simulate",
        "stat": "tierkv.cli.stat",
        "top": "tierkv.cli.top",
        "verify": "tierkv.cli.verify",
        "version": "tierkv.cli.version",
        "warm": "tierkv.cli.warm",
        "why": "tierkv.cli.why",
    }

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        group = GROUPS.get(cmd_name)
        if group is not None:
            return typer.main.get_command(group)
        return super().get_command(ctx, cmd_name)


def _load(name: str, module_name: str) -> Any:
    module = importlib.import_module(module_name)
    single = _typer()
    epilog = f"Example:\n\n\b\n{module.EXAMPLE}" if module.EXAMPLE else None
    single.command(name, epilog=epilog)(getattr(module, module_name.rpartition(".")[2]))
    return typer.main.get_command(single)


def _typer(**settings: Any) -> typer.Typer:
    # No markup: help is plain text, looks the same in a pipe, and does not load rich.
    return typer.Typer(
        rich_markup_mode=None, pretty_exceptions_enable=False, add_completion=False, **settings
    )


def _need_command(context: typer.Context) -> None:
    # Not `no_args_is_help`: whether that is a success depends on the version of click.
    if context.invoked_subcommand is None:
        output.message(context.get_help())
        raise typer.Exit(USAGE)


_config = _typer(cls=_Config, invoke_without_command=True)


@_config.callback(epilog="Example:\n\n\b\n  tierkv config init && tierkv config show")
def _config_group(context: typer.Context) -> None:
    """Write a sample configuration, or show the one in effect."""
    _need_command(context)


_bench = _typer(cls=_Bench, invoke_without_command=True)


@_bench.callback(epilog="Example:\n\n\b\n  tierkv bench tiers --path /mnt/nvme")
def _bench_group(context: typer.Context) -> None:
    """Measure what this machine can do."""
    _need_command(context)


GROUPS = {"bench": _bench, "config": _config}
GROUP_CLASSES = {"bench": _Bench, "config": _Config}


app = typer.Typer(
    cls=_Root, invoke_without_command=True, rich_markup_mode=None, pretty_exceptions_enable=False
)


def _print_version(wanted: bool) -> None:
    if wanted:
        output.result(f"tierkv {__version__}")
        raise typer.Exit(OK)


@app.callback(epilog="Example:\n\n\b\n  tierkv config init tierkv.yaml && tierkv check tierkv.yaml")
def _root(
    context: typer.Context,
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Print the version and leave."
        ),
    ] = False,
) -> None:
    """TierKV keeps the KV cache of an LLM engine in tiers and gives it back."""
    _need_command(context)


def run(arguments: Sequence[str]) -> int:
    """Run one command line and return its exit code. Errors go to stderr, one line each."""
    output.prepare()
    try:
        command = typer.main.get_command(app)
        code = command.main(args=list(arguments), prog_name="tierkv", standalone_mode=False)
        sys.stdout.flush()
        return code if isinstance(code, int) else OK
    except ConfigError as error:
        output.problems(error.problems)
        return USAGE
    except TierKVError as error:
        output.message(f"tierkv: {error}")
        return FAILED
    except (KeyboardInterrupt, typer.Abort):
        return INTERRUPTED
    except BrokenPipeError:
        output.silence()
        return OK
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        output.silence()
        output.message(f"tierkv: {error.strerror}: the output is cut short; free space for it")
        return FAILED
    except SystemExit as leave:
        # typer ends the process by itself when the reader of a pipe has gone.
        if not isinstance(leave.__context__, BrokenPipeError):
            raise
        output.silence()
        return OK
    except Exception as error:
        # A usage error of click, which typer first depended on and later brought along: it is
        # known by what it can do.
        show, code = getattr(error, "show", None), getattr(error, "exit_code", None)
        if callable(show) and isinstance(code, int):
            show()
            return code
        raise
