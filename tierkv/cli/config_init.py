# SPDX-License-Identifier: Apache-2.0
"""`tierkv config init`: a commented configuration to start from."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from tierkv.cli import output

EXAMPLE = """\
  tierkv config init
  tierkv config init - > my.yaml"""


def config_init(
    file: Annotated[Path, typer.Argument(help="File to write; - is stdout.")] = Path("tierkv.yaml"),
    force: Annotated[bool, typer.Option("--force", help="Replace the file if it exists.")] = False,
) -> None:
    """Write a commented configuration to start from.

    It works on this machine as it is: DRAM only. Every other key stands behind a #, with its
    default and its meaning.
    """
    from tierkv.config.effective import default_dram_capacity
    from tierkv.config.sample import sample_text
    from tierkv.config.units import format_size

    capacity, _ = default_dram_capacity()
    text = sample_text(format_size(capacity))
    if str(file) == "-":
        output.result(text.rstrip("\n"))
        return
    flags = os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC | (os.O_TRUNC if force else os.O_EXCL)
    try:
        # 0600 for the day when it names where secrets are; the umask may take more.
        with open(os.open(file, flags, 0o600), "w", encoding="utf-8") as out:
            out.write(text)
    except FileExistsError:
        output.message(f"{file}: exists already; give another name, or --force to replace it")
        raise typer.Exit(2) from None
    except OSError as error:
        output.message(f"{file}: cannot be written ({error.strerror}); give another path")
        raise typer.Exit(1) from None
    output.result(f"{file}: written; read it, then run: tierkv check {file}")
