# SPDX-License-Identifier: Apache-2.0
"""`tierkv top`: where hits come from and why misses miss, live."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from tierkv.cli import looking, output
from tierkv.errors import TierKVError

if TYPE_CHECKING:
    from tierkv.stats.source import Source

EXAMPLE = """\
  tierkv top
  tierkv top --url http://gpu-box:8000/metrics
  tierkv top --once | head"""

PLAIN_WIDTH = 110
MAX_REQUESTS = 20
ONCE_SECONDS = 1.0
"""`--once` looks twice: rates need two looks."""


def top(
    url: looking.UrlOption = None,
    pid: looking.PidOption = None,
    interval: Annotated[
        float, typer.Option("--interval", "-i", min=0.1, max=3600, help="Seconds between looks.")
    ] = 1.0,
    once: Annotated[bool, typer.Option("--once", help="Print it once as plain text.")] = False,
    light: Annotated[bool, typer.Option("--light", help="For light terminals.")] = False,
) -> None:
    """Show running engines live: hit rate by tier, speeds, misses by reason, requests.

    Finds all engines of this user by itself. Prints once, as plain text, where stdout is no
    terminal. Keys: s sort, p pause, Tab next engine, t dark or light, h help, q quit.
    """
    from tierkv.stats.source import open_sources

    sources = open_sources(url, pid)
    try:
        if once or not sys.stdout.isatty() or os.environ.get("TERM") == "dumb":
            _print(sources)
            return
        try:
            from tierkv.cli.top_app import Top
        except ModuleNotFoundError as error:
            if (error.name or "").partition(".")[0] != "textual":
                raise
            raise TierKVError(
                "the live screen needs textual; run: pip install 'tierkv[cli]' "
                "(tierkv top --once works without it)"
            ) from error
        Top(sources, interval, light).run()
    finally:
        for source in sources:
            source.close()


def _print(sources: Sequence[Source]) -> None:
    from tierkv.cli.top_text import plain
    from tierkv.cli.top_view import Viewer

    viewers = [Viewer(source.info, source.origin) for source in sources]
    for look in range(2):
        if look:
            _wait(ONCE_SECONDS)
        for viewer, source in zip(viewers, sources, strict=True):
            viewer.add(source.read(MAX_REQUESTS))
    for number, viewer in enumerate(viewers):
        output.result(("\n" if number else "") + plain(viewer.view(), PLAIN_WIDTH))


_wait = time.sleep
