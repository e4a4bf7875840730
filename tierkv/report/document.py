# SPDX-License-Identifier: Apache-2.0
"""What a result says, before anybody decides how it looks.

A command builds one `Document` of its result; the console and the HTML page show the same one, so
their numbers cannot differ.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Text:
    """A paragraph; `bad` marks what is wrong, in words and in colour."""

    text: str
    bad: bool = False


@dataclass(frozen=True, slots=True)
class Table:
    """Rows of cells, all text.

    Attributes:
        columns: their titles; one that begins with `>` (not shown) holds numbers, set to the right.
        rows: one cell a column.
        bad: indexes of rows that say that something is wrong.
    """

    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    bad: frozenset[int] = frozenset()

    def titles(self) -> list[str]:
        """Titles as they are shown."""
        return [title.removeprefix(">") for title in self.columns]

    def is_number(self, column: int) -> bool:
        """Whether the column is set to the right."""
        return self.columns[column].startswith(">")


@dataclass(frozen=True, slots=True)
class Plot:
    """A picture, and in one sentence how it is read.

    Attributes:
        svg: an inline SVG element whose text and axes have the colour of the text around it.
        reading: what the axes are and what to look for.
    """

    svg: str
    reading: str


@dataclass(frozen=True, slots=True)
class Code:
    """Lines to be shown as they are."""

    text: str


Block = Text | Table | Plot | Code


@dataclass(frozen=True, slots=True)
class Section:
    """A heading and what stands below it."""

    title: str
    blocks: Sequence[Block]


@dataclass(frozen=True, slots=True)
class Document:
    """A whole result.

    Attributes:
        title: heading of the page.
        lead: what this is, in a sentence or two.
        sections: in reading order.
    """

    title: str
    lead: str
    sections: Sequence[Section]
