# SPDX-License-Identifier: Apache-2.0
"""A document in a terminal: the same words and numbers as its page, without the pictures."""

from __future__ import annotations

import sys
from typing import Literal

from rich.console import Console
from rich.table import Table as RichTable

from tierkv.report.document import Code, Document, Plot, Table

PIPE_COLUMNS = 100
"""A pipe has no width, and rich would take 80 columns and break the lines of tables."""


def make_console(plain: bool = False) -> Console:
    """For stdout; without colour if `plain`, and by `NO_COLOR`."""
    width = None if sys.stdout.isatty() else PIPE_COLUMNS
    return Console(width=width, no_color=plain or None, highlight=False)


def show(document: Document, console: Console) -> None:
    """Print everything that is no picture."""
    console.print(document.title, style="bold", markup=False)
    console.print(document.lead, markup=False)
    for section in document.sections:
        shown = [block for block in section.blocks if not isinstance(block, Plot)]
        if not shown:
            continue
        console.print()
        console.print(section.title, style="bold", markup=False)
        for number, block in enumerate(shown):
            if number and isinstance(block, Table):
                console.print()
            if isinstance(block, Table):
                console.print(_table(block))
            elif isinstance(block, Code):
                console.print(block.text, style="dim", markup=False)
            else:
                console.print(block.text, style="bold red" if block.bad else "", markup=False)


def _table(table: Table) -> RichTable:
    from rich.text import Text as Plain

    made = RichTable(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    for number, title in enumerate(table.titles()):
        # Folded where there is no room: a number that is cut short would be another number.
        justify: Literal["right", "left"] = "right" if table.is_number(number) else "left"
        made.add_column(Plain(title), justify=justify, overflow="fold")
    for number, row in enumerate(table.rows):
        style = "bold red" if number in table.bad else None
        made.add_row(*(Plain(cell) for cell in row), style=style)
    return made
