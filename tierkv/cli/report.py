# SPDX-License-Identifier: Apache-2.0
"""`tierkv report`: a recording, a benchmark or a running engine as one page that stands alone."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tierkv.cli import loading, looking, output, progress

if TYPE_CHECKING:
    from tierkv.report.recorded import ConfigValue
    from tierkv.report.recording import Recording, Row

EXAMPLE = """\
  tierkv stat --json > run.jsonl; tierkv report run.jsonl -o run.html
  tierkv report --url localhost:8000 --seconds 300 -o now.html
  tierkv demo --json demo.json; tierkv report demo.json -o demo.html"""


def report(
    source: Annotated[
        Path | None,
        typer.Argument(
            metavar="[SOURCE]",
            readable=False,  # the reader says more about a file that cannot be read
            help="Lines of 'tierkv stat --json', or the JSON of 'tierkv demo', 'tierkv simulate' "
            "or a benchmark. [default: a running engine]",
            show_default=False,
        ),
    ] = None,
    page: Annotated[
        Path | None,
        typer.Option("--output", "-o", metavar="FILE", help="Write a page, with plots."),
    ] = None,
    url: looking.UrlOption = None,
    pid: looking.PidOption = None,
    seconds: Annotated[
        float, typer.Option("--seconds", min=1, max=86400, help="Watch the engine for so long.")
    ] = 60.0,
    interval: Annotated[
        float, typer.Option("--interval", "-i", min=0.1, max=3600, help="Seconds between looks.")
    ] = 1.0,
    config: Annotated[
        Path | None,
        typer.Option("--config", metavar="FILE", help="Also show this configuration."),
    ] = None,
    as_json: loading.JsonOption = False,
) -> None:
    """Report what an engine did: hit rate over time, tiers, misses by reason, savings.

    Prints tables; with -o also writes one HTML file with plots, which loads nothing. Without SOURCE
    a running engine is watched: this user's, or the server of --url. Ctrl-C ends that early, and
    reports what there is. Secrets in a configuration are shown as the references that they are.
    """
    from tierkv.report import sources

    live = source is None
    if not live and (url is not None or pid is not None):
        raise typer.BadParameter("give SOURCE, or --url or --pid for a running engine, not both")
    if page is not None:
        from tierkv.report.html import check_page, write_page

        check_page(page)
    values = _config(config)
    if source is None:
        recording = watch(url, pid, seconds, interval)
        found = sources.from_recording(recording, values, pictures=page is not None)
    else:
        found = sources.from_file(source, values, pictures=page is not None)
    if page is not None and found.page is not None:
        write_page(page, found.page)
    if as_json:
        output.result_json(found.value)
    else:
        from tierkv.report.console import make_console, show

        show(found.text, make_console())
    if page is not None:
        output.message(f"Page: {page}")


_wait = time.sleep
_clock = time.monotonic


def watch(url: str | None, pid: int | None, seconds: float, interval: float) -> Recording:
    """Record a running engine for so long, or until Ctrl-C.

    Raises:
        StatsError: there is none, or it went before the first interval was over.
        KeyboardInterrupt: before the first interval was over.
    """
    from tierkv.cli.stat import following, measured
    from tierkv.report.recording import Recording
    from tierkv.stats.protocol import StatsError
    from tierkv.stats.source import open_source
    from tierkv.telemetry.rates import difference

    engine = open_source(url, pid)
    try:
        first = before = engine.read(0)
        rows: list[Row] = []
        start = _clock()
        with progress.bar("watching", round(seconds)) as tell:
            shown = 0
            while not rows or _clock() - start < seconds:
                try:
                    _wait(min(interval, seconds))
                    sample = following(before, engine.read(0), interval)
                except (KeyboardInterrupt, StatsError):
                    if not rows:
                        raise
                    break
                rows.append(measured(before, sample, interval))
                before = sample
                passed = min(round(seconds), int(_clock() - start))
                tell(passed - shown)
                shown = passed
        changes = difference(before.metrics, first.metrics)
        return Recording(engine.origin, rows, changes, engine.info)
    finally:
        engine.close()


def _config(file: Path | None) -> list[ConfigValue]:
    if file is None:
        return []
    from tierkv.config.values import effective_values

    loaded = loading.load(file, None, check_machine=False, json_list=None)
    return [
        (value.path, value.text, str(loaded.sources[value.path]))
        for value in effective_values(loaded.config)
    ]
