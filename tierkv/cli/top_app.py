# SPDX-License-Identifier: Apache-2.0
"""The live screen of `tierkv top`.

Threads and ownership. Textual's event loop owns the widgets and the viewers; reading a source
blocks, so it runs in a thread of its own, one at a time, which touches the source only.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import ClassVar

from rich.console import Group
from rich.text import Text
from textual.app import App, ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Vertical
from textual.screen import ModalScreen
from textual.widgets import Footer, Static

from tierkv.cli import top_text
from tierkv.cli.top_view import Viewer
from tierkv.stats.protocol import StatsError
from tierkv.stats.source import Sample, Source

MAX_REQUESTS = 200
"""Requests asked for: enough to sort, and a few tens of KiB."""

HELP = """\
hit rate         hit tokens / query tokens; tiers add up to it
query tokens     prompt tokens that the GPU's own prefix cache lacked
now, session     the last 10 seconds; since the engine started
prefill avoided  GPU hits and TierKV hits together, of all prompt tokens
avoidable        late, unavailable, skipped, failed: slow or ill tiers
saved … for …    estimated prefill time; what requests waited for it
load, save       bytes a second from and to the tier
p50, p99         time of one chunk's load
state            breaker: closed is well, half tries again, open is down
lost             prompt tokens that were no hit and could have been
wait             what the request waited for lookup and load
–                no data; 0 means zero

s sort requests   p pause   Tab next engine   t dark or light   q quit"""


class Help(ModalScreen[None]):
    """What the words mean."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape,h,question_mark,q", "dismiss", "close"),
    ]
    CSS = """
    Help { align: center middle; }
    Help > Static { width: 78; height: auto; padding: 0 1; border: round $accent;
                    background: $surface; }
    """

    def compose(self) -> ComposeResult:
        yield Static(HELP, markup=False)


class Top(App[None]):
    """See the module.

    Args:
        sources: engines, at least one; closed at the end.
        interval: seconds between two looks; 0: only `refresh_now` looks.
        light: colours for a light terminal.
    """

    CSS = "Screen { background: $background; } #body { height: 1fr; } Static { width: 100%; }"
    TITLE = "tierkv top"
    ENABLE_COMMAND_PALETTE = False
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("s", "sort", "sort"),
        Binding("p", "pause", "pause"),
        Binding("tab", "next", "engine", priority=True),
        Binding("t", "theme", "dark/light"),
        Binding("h,question_mark", "help", "help"),
        Binding("q", "quit", "quit"),
    ]

    def __init__(
        self, sources: Sequence[Source], interval: float = 1.0, light: bool = False
    ) -> None:
        super().__init__()
        self._sources = list(sources)
        self._viewers = [Viewer(source.info, source.origin) for source in sources]
        self._gone: dict[int, str] = {}
        self._seen: set[int] = set()
        self._interval = interval
        self._light = light
        self._at = 0
        self._sort = 0
        self._paused = False
        self._busy = False

    def compose(self) -> ComposeResult:
        with Vertical(id="body"):
            yield Static(id="main")
        yield Footer(show_command_palette=False)

    async def on_mount(self) -> None:
        self.theme = "textual-light" if self._light else "textual-dark"
        await self.refresh_now()
        if self._interval:
            self.set_interval(self._interval, self.refresh_now)

    async def refresh_now(self) -> None:
        """Look at all engines, unless the last look has not ended yet."""
        if self._busy or self._paused:
            return
        self._busy = True
        try:
            for at, source in enumerate(self._sources):
                if at in self._gone:
                    continue
                try:
                    sample = await asyncio.to_thread(_read, source)
                except StatsError as error:
                    self._gone[at] = str(error)
                    continue
                self._viewers[at].add(sample)
                self._seen.add(at)
        finally:
            self._busy = False
        self._show()

    def _show(self) -> None:
        size = self.query_one("#body").size
        lines = self._lines(size.width or self.size.width, size.height or self.size.height - 1)
        self.query_one("#main", Static).update(Group(*lines))

    def _lines(self, width: int, height: int) -> list[Text]:
        notes = []
        if len(self._sources) > 1:
            notes.append(f"engine {self._at + 1} of {len(self._sources)}, Tab for the next")
        if self._paused:
            notes.append("PAUSED, p to go on")
        if self._sort:
            notes.append(f"sorted by {list(top_text.SORTS)[self._sort]}")
        if self._at in self._gone:
            notes.append(self._gone[self._at])
        last = [Text("  ".join(notes), "yellow")] if notes else []
        if self._at not in self._seen:
            return last
        view = self._viewers[self._at].view()
        sort = list(top_text.SORTS)[self._sort]
        return last + top_text.screen(view, width, height - len(last), sort)

    def on_resize(self) -> None:
        self._show()

    def action_sort(self) -> None:
        self._sort = (self._sort + 1) % len(top_text.SORTS)
        self._show()

    def action_pause(self) -> None:
        self._paused = not self._paused
        self._show()

    def action_next(self) -> None:
        self._at = (self._at + 1) % len(self._sources)
        self._show()

    def action_theme(self) -> None:
        self.theme = "textual-dark" if self.theme == "textual-light" else "textual-light"

    def action_help(self) -> None:
        self.push_screen(Help())


def _read(source: Source) -> Sample:
    return source.read(MAX_REQUESTS)
