# SPDX-License-Identifier: Apache-2.0
"""A document in a narrow terminal: everything is there, whatever the width."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from tierkv.report.console import show
from tierkv.report.document import Code, Document, Plot, Section, Table, Text


@pytest.mark.parametrize("width", [30, 80])
def test_cells_are_folded_and_never_cut_short(width: int) -> None:
    cells = [f"{n}23,456,78{n}" for n in range(6)]
    table = Table([f">column {n}" for n in range(6)], [cells])
    out = io.StringIO()
    show(Document("title", "lead", [Section("s", [table])]), Console(file=out, width=width))
    text = out.getvalue()
    assert "…" not in text
    # Down each column, line by line: the digits of its one cell.
    shown = sorted(c for c in text.partition("s\n")[2] if c.isdigit())
    wanted = sorted(c for c in "".join(cells) + "012345" if c.isdigit())
    assert shown == wanted


def test_words_are_printed_as_they_are_and_pictures_are_not() -> None:
    blocks = [Text("[bold]no markup[/bold]"), Plot("<svg/>", "reading"), Code("[code]")]
    out = io.StringIO()
    show(Document("[t]", "[l]", [Section("[s]", blocks)]), Console(file=out, width=80))
    assert out.getvalue().split("\n") == ["[t]", "[l]", "", "[s]", "[bold]no markup[/bold]",
                                          "[code]", ""]  # fmt: skip
