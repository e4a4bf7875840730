# SPDX-License-Identifier: Apache-2.0
"""A bar on stderr for what takes more than two seconds; nothing where nobody can see it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def bar(what: str, total: int, *, in_bytes: bool = False) -> Iterator[Callable[[int], None]]:
    """Show a bar for the length of the block.

    Args:
        what: is being done.
        total: steps, or bytes.
        in_bytes: count bytes, and show their rate.

    Yields:
        Call it with what was done since the last call.
    """
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
        TransferSpeedColumn,
    )

    console = Console(stderr=True)
    if not console.is_terminal or console.is_dumb_terminal:
        yield lambda done: None
        return
    units = (
        [DownloadColumn(binary_units=True), TransferSpeedColumn()]
        if in_bytes
        else [MofNCompleteColumn()]
    )
    columns = (TextColumn("{task.description}"), BarColumn(bar_width=30), *units)
    with Progress(*columns, TimeRemainingColumn(), console=console, transient=True) as progress:
        task = progress.add_task(what, total=total)
        yield lambda done: progress.advance(task, done)


@contextmanager
def spinner(what: str) -> Iterator[Callable[[str], None]]:
    """Say what is being done, for the length of the block.

    Yields:
        Call it with what comes next.
    """
    from rich.console import Console

    console = Console(stderr=True)
    if not console.is_terminal or console.is_dumb_terminal:
        yield lambda stage: None
        return
    with console.status(what) as status:
        yield lambda stage: status.update(f"{what} {stage}")
