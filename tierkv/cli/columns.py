# SPDX-License-Identifier: Apache-2.0
"""Tables of plain text, and how sizes, counts and ages are written in them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from tierkv.cli import output

NOTHING = "–"
"""Stands for what is not known; 0 means zero."""


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """Aligned lines, the head first. Columns whose head begins with > are flush right."""
    titles = [title.removeprefix(">") for title in head]
    right = [title.startswith(">") for title in head]
    widths = [max(map(len, column)) for column in zip(titles, *rows, strict=True)]

    def line(cells: Sequence[str]) -> str:
        padded = [
            cell.rjust(width) if is_right else cell.ljust(width)
            for cell, width, is_right in zip(cells, widths, right, strict=True)
        ]
        return "  ".join(padded).rstrip()

    yield output.styled(line(titles), "bold")
    yield from map(line, rows)


def size(nbytes: int | None) -> str:
    """Bytes with one decimal, like `1.4MiB`."""
    from tierkv.config.units import approximate_size

    if nbytes is None:
        return NOTHING
    return f"{nbytes}B" if nbytes < 1024 else approximate_size(nbytes)


def age(then_ns: int | None, now_ns: int) -> str:
    """How long ago, in the largest unit that gives at least 1: `5s`, `3m`, `2h`, `9d`."""
    if not then_ns:
        return NOTHING
    seconds = max(0, now_ns - then_ns) // 1_000_000_000
    for length, unit in ((86400, "d"), (3600, "h"), (60, "m")):
        if seconds >= length:
            return f"{seconds // length}{unit}"
    return f"{seconds}s"


def count(number: int, noun: str) -> str:
    """`1 chunk`, `1,234 chunks`."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"
