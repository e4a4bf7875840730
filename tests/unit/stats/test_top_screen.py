# SPDX-License-Identifier: Apache-2.0
"""`tierkv top` as it looks: whole screens against stored ones.

After a change that is meant: TIERKV_WRITE_SCREENS=1 pytest tests/unit/stats/test_top_screen.py
"""

from __future__ import annotations

import asyncio
import html
import os
import re
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest

from tests.unit.stats.fake_engine import START, FakeEngine, FakeSource
from tierkv.cli.top_app import Top
from tierkv.stats.protocol import StatsError
from tierkv.stats.source import Sample

SCREENS = Path(__file__).parent / "screens"
LOOKS = 70


class Clock:
    """The time of day, as the engine sees it."""

    def __init__(self, engine: FakeEngine) -> None:
        self.engine = engine
        self.late = 0.3

    def __call__(self) -> float:
        return self.engine.time + self.late


def shown(app: Top) -> list[str]:
    """The screen's lines, read off a picture of it."""
    cells: dict[float, list[tuple[float, float, str]]] = {}
    text = r'<text class="[^"]*" x="([\d.]+)" y="([\d.]+)" textLength="([\d.]+)"[^>]*>(.*?)</text>'
    picture = app.export_screenshot()
    for x, y, length, words in re.findall(text, picture):
        cells.setdefault(float(y), []).append((float(x), float(length), html.unescape(words)))
    width = min(length / len(words) for row in cells.values() for _, length, words in row)
    lines = []
    for _, row in sorted(cells.items()):
        line = ""
        for x, _, words in sorted(row):
            line = line.ljust(round(x / width)) + words
        lines.append(line.replace("\N{NO-BREAK SPACE}", " ").rstrip())
    return lines


def run(
    app: Top, size: tuple[int, int], act: Callable[[Any], Coroutine[Any, Any, None]]
) -> list[str]:
    lines: list[str] = []

    async def main() -> None:
        async with app.run_test(size=size) as pilot:
            await act(pilot)
            await pilot.pause()
            lines.extend(shown(app))

    asyncio.run(main())
    return lines


@pytest.fixture
def make_top(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Top]:
    def make(engine: FakeEngine | None = None, *, light: bool = False, waves: bool = True) -> Top:
        source = FakeSource(engine or FakeEngine(), waves)
        monkeypatch.setattr("tierkv.cli.top_view.time.time", Clock(source.engine))
        return Top([source], interval=0, light=light)

    return make


async def look(pilot: Any) -> None:
    for _ in range(LOOKS):
        await pilot.app.refresh_now()


def stored(name: str, lines: list[str]) -> None:
    file = SCREENS / f"{name}.txt"
    text = "\n".join(lines) + "\n"
    if os.environ.get("TIERKV_WRITE_SCREENS"):
        SCREENS.mkdir(exist_ok=True)
        file.write_text(text, encoding="utf-8")
    assert text == file.read_text(encoding="utf-8")


@pytest.mark.parametrize("light", [False, True], ids=["dark", "light"])
@pytest.mark.parametrize("size", [(80, 24), (200, 50)], ids=["80x24", "200x50"])
def test_a_busy_engine(make_top: Callable[..., Top], size: tuple[int, int], light: bool) -> None:
    engine = FakeEngine()
    engine.fail("disk", "checksum", 3)
    app = make_top(engine, light=light)
    lines = run(app, size, look)
    # Both themes show the same words.
    stored(f"busy-{size[0]}x{size[1]}", lines)
    assert all(len(line) <= size[0] for line in lines)
    assert app.theme == ("textual-light" if light else "textual-dark")


def test_an_engine_without_requests_shows_no_rate_at_all(make_top: Callable[..., Top]) -> None:
    engine = FakeEngine(("dram", "disk"))
    lines = run(make_top(engine, waves=False), (80, 24), look)
    stored("fresh-80x24", lines)
    assert not any("0.0%" in line for line in lines)


def test_the_help(make_top: Callable[..., Top]) -> None:
    async def act(pilot: Any) -> None:
        await look(pilot)
        await pilot.press("h")

    stored("help-80x24", run(make_top(), (80, 24), act))


def test_keys_sort_pause_and_change_the_theme(make_top: Callable[..., Top]) -> None:
    app = make_top()
    seen: dict[str, list[str]] = {}

    async def act(pilot: Any) -> None:
        await look(pilot)
        for name in ("longest prompt", "most missed", "slowest"):
            await pilot.press("s")
            await pilot.pause()
            seen[name] = shown(app)
        await pilot.press("s", "p")
        await app.refresh_now()
        await pilot.pause()
        seen["paused"] = shown(app)
        await pilot.press("p", "t")
        await pilot.pause()
        seen["light"] = shown(app)

    run(app, (120, 40), act)
    for name in ("longest prompt", "most missed", "slowest"):
        assert f"sorted by {name}" in seen[name][0]

    def column(name: str, title: str) -> list[str]:
        lines = seen[name]
        (at,) = [i for i, line in enumerate(lines) if line.startswith("request ")]
        end = lines[at].index(title) + len(title)
        rows = [line for line in lines[at + 1 :] if line.startswith("cmpl-")]
        return [row[:end].split()[-1] for row in rows]

    assert column("longest prompt", "prompt")[:2] == ["10.7k", "10.7k"]
    assert column("most missed", "lost")[:2] == ["9.6k", "9.6k"]
    assert column("slowest", "wait")[0] == "47.1ms"
    assert "PAUSED, p to go on" in seen["paused"][0]
    assert app.theme == "textual-light"
    assert not app._paused


def test_an_engine_that_ends_is_said_to_be_gone_and_the_other_goes_on(
    make_top: Callable[..., Top],
) -> None:
    app = make_top()

    class Gone:
        info: dict[str, Any] = {"model": "other"}  # noqa: RUF012
        origin = "pid 1"

        def read(self, requests: int) -> Sample:
            raise StatsError("the engine hung up; is it still running?")

        def close(self) -> None: ...

    app = Top([*app._sources, Gone()], interval=0)
    both: list[list[str]] = []

    async def act(pilot: Any) -> None:
        await look(pilot)
        await pilot.pause()
        both.append(shown(app))
        await pilot.press("tab")
        await pilot.pause()
        both.append(shown(app))

    run(app, (100, 30), act)
    assert both[0][0] == "engine 1 of 2, Tab for the next"
    assert "llama-8b" in both[0][1]
    assert both[1][0].startswith("engine 2 of 2, Tab for the next  the engine hung up")


def test_an_idle_engine_has_no_rate_now_and_says_so(
    make_top: Callable[..., Top], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = FakeEngine()
    source = FakeSource(engine, waves=False)
    engine.pass_time(5)

    def idle(requests: int) -> Sample:
        sample = engine.sample(3)
        return Sample(sample.time, True, sample.metrics, sample.requests)

    source.read = idle  # type: ignore[method-assign]
    monkeypatch.setattr("tierkv.cli.top_view.time.time", lambda: START + 65.0)
    lines = run(Top([source], interval=0), (80, 24), look)
    assert "idle for 1m00s" in lines[0]
    assert lines[1].startswith("hit rate – now    session 71.4%")


def test_reuse_of_any_text_has_a_line_once_there_is_some(
    make_top: Callable[..., Top], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = FakeEngine()
    source = FakeSource(engine, waves=False)
    engine.pass_time(5)
    told = {
        "requests": [({"outcome": "served"}, 12), ({"outcome": "failed"}, 1)],
        "declined": [({"reason": "short"}, 30), ({"reason": "cost"}, 5)],
        "tokens": [({"kind": "reused"}, 34_000), ({"kind": "recomputed"}, 5_200)],
        "seconds": [({}, 3.1)],
        "shadows": [({"agree": "yes"}, 49), ({"agree": "no"}, 1)],
        "shadow_kl_nats": [({}, 1.0)],
    }

    def blended(requests: int) -> Sample:
        sample = engine.sample(3)
        for name, series in told.items():
            sample.metrics[f"tierkv_blend_{name}_total"] = [
                {"labels": labels, "value": value} for labels, value in series
            ]
        return sample

    source.read = blended  # type: ignore[method-assign]
    lines = run(Top([source], interval=0), (120, 30), look)
    (line,) = [line for line in lines if line.startswith("any text")]
    assert line == (
        "any text 12 prompts blended · 1 failed · 35 not · reused 34k, anew 5.2k tok · 3.1s · "
        "shadows 98.0% same, KL 0.02"
    )
