# SPDX-License-Identifier: Apache-2.0
"""Tells what the demo is doing, on stderr: bars on a terminal, one line a stage elsewhere."""

from __future__ import annotations

import sys
import time
from types import TracebackType
from typing import Protocol, Self

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn


class Reporter(Protocol):
    """How the demo tells its progress. A context manager; the end of the block clears the bar."""

    def begin(self, steps: int) -> None:
        """The work has `steps` steps in all."""

    def stage(self, text: str) -> None:
        """From here on this is being done."""

    def step(self, count: int = 1) -> None:
        """`count` steps are done."""

    def __enter__(self) -> Self: ...

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None: ...


class LineReporter:
    """One line a stage, with the seconds since the start: for logs and pipes."""

    def __init__(self) -> None:
        self._started = time.monotonic()

    def begin(self, steps: int) -> None:
        """Nothing to show."""

    def stage(self, text: str) -> None:
        """Print `text` as a line."""
        print(f"[{time.monotonic() - self._started:5.0f} s] {text}", file=sys.stderr, flush=True)

    def step(self, count: int = 1) -> None:
        """Nothing to show."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        pass


class BarReporter:
    """One bar for the whole, with the stage beside it."""

    def __init__(self, console: Console) -> None:
        self._bar = Progress(
            SpinnerColumn(),
            BarColumn(bar_width=30),
            TextColumn("{task.percentage:>3.0f}%"),
            TimeElapsedColumn(),
            TextColumn("{task.description}"),
            console=console,
            transient=True,
        )
        self._task = self._bar.add_task("", total=None)

    def begin(self, steps: int) -> None:
        """Size the bar."""
        self._bar.update(self._task, total=steps)

    def stage(self, text: str) -> None:
        """Show `text` beside the bar."""
        self._bar.update(self._task, description=text)

    def step(self, count: int = 1) -> None:
        """Move the bar."""
        self._bar.advance(self._task, count)

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()


def make_reporter(plain: bool = False) -> Reporter:
    """Bars if stderr is a terminal that can draw them, lines otherwise."""
    console = Console(stderr=True)
    drawable = console.is_terminal and not console.is_dumb_terminal and not plain
    return BarReporter(console) if drawable else LineReporter()
