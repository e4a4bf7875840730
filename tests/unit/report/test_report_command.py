# SPDX-License-Identifier: Apache-2.0
"""`tierkv report` as its user meets it: sources told apart, one set of numbers in three forms."""

from __future__ import annotations

import json
import re
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

import pytest

from tests.unit.demo.conftest import _make as demo_record
from tests.unit.report.recordings import day, idle, row, tier, write
from tierkv.cli import report as command
from tierkv.cli.app import run
from tierkv.demo.plan import Plan
from tierkv.demo.result import build_result
from tierkv.stats import source as stats_source
from tierkv.stats.protocol import StatsError
from tierkv.stats.source import Sample
from tierkv.telemetry.counters import Counters

BENCH = {
    "machine": "2 CPUs",
    "date": "2026-11-30",
    "ratios": {"disk_over_limit": {"median": 0.91, "spread": 0.02, "repeats": 7}},
    "figures": {"load_ms": 1.234},
    "tiers": [{"tier": "disk", "op": "load", "bytes_per_s": 1_500_000_000, "limit": None}],
    "notes": [],
}


def page_of(tmp_path: Path, *arguments: str) -> str:
    page = tmp_path / "page.html"
    assert run(["report", *arguments, "-o", str(page)]) == 0
    return page.read_text()


def printed(capsys: pytest.CaptureFixture[str]) -> str:
    return " ".join(capsys.readouterr().out.split())


def pictures(page: str) -> list[ET.Element]:
    return [ET.fromstring(svg) for svg in re.findall(r"<svg.*?</svg>", page, re.S)]


@pytest.fixture
def recording(tmp_path: Path) -> str:
    return str(write(tmp_path / "run.jsonl", [row(n) for n in range(5)] + [idle(5)]))


def test_table_json_and_page_have_the_same_numbers(
    recording: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page = page_of(tmp_path, recording)
    table = printed(capsys)
    assert run(["report", recording, "--json"]) == 0
    value = json.loads(capsys.readouterr().out)
    assert value["hit_rate"] == 0.6
    assert value["tiers"]["disk"]["hit_rate"] == 0.2
    assert len(value["rows"]) == 6
    for text in ("60.0%", "40.0%", "20.0%", "73.3%", "10.0%", "5,000", "2.5 s", "500 ms", "28.6MiB",
                 "never seen", "80.0%", "a tier missed its load_deadline"):  # fmt: skip
        assert text in table, text
        assert text in page, text


def test_no_number_of_the_page_is_cut_short_in_a_terminal(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page = page_of(tmp_path, str(write(tmp_path / "day.jsonl", day())))
    table = printed(capsys)
    cells = re.findall(r'<td class="n">([^<]+)</td>', page)
    assert "137,132,468" in cells
    for cell in cells:
        assert cell in table


def test_the_page_has_a_picture_of_each_thing_over_time(recording: str, tmp_path: Path) -> None:
    page = page_of(tmp_path, recording)
    text = [" ".join(e.text or "" for e in svg.iter()) for svg in pictures(page)]
    wanted = ("% of query tokens", "query tokens a second", "missed tokens a second",
              "% of capacity in use", "MB a second", "seconds in each second")  # fmt: skip
    assert len(text) == len(wanted)
    for svg, unit in zip(text, wanted, strict=True):
        assert unit in svg


def test_the_page_stands_alone_and_its_ids_are_its_own(tmp_path: Path) -> None:
    page = page_of(tmp_path, str(write(tmp_path / "day.jsonl", day())))
    assert "<script" not in page
    assert not re.search(r"""(src|href)\s*=\s*["'](?!#)""", page)
    assert "@import" not in page
    assert "url(http" not in page
    ids = re.findall(r'\bid="([^"]+)"', page)
    assert len(ids) == len(set(ids))
    for used in re.findall(r'(?:href="#|url\(#)([^")]+)', page):
        assert used in ids


def test_what_a_recording_says_is_never_markup(tmp_path: Path) -> None:
    bad = row(0, tiers={"<script>alert(1)</script>": tier(hit_tokens=600)},
              outcomes={"<b>hit</b>": 600})  # fmt: skip
    page = page_of(tmp_path, str(write(tmp_path / "run.jsonl", [bad, row(1)])))
    assert "<script" not in page
    assert "<b>" not in page
    pictures(page)


def test_an_open_breaker_and_errors_are_said_in_words(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    broken = row(0, tiers={"disk": tier(breaker_state=2, errors=3)}, load_seconds=9.0)
    page = page_of(tmp_path, str(write(tmp_path / "run.jsonl", [broken])))
    table = printed(capsys)
    for text in (
        "The breaker of tier disk was open.",
        "Tier disk had 3 errors.",
        "it does not pay",
    ):
        assert text in table
        assert text in page
    assert 'class="bad">The breaker' in page


def test_savings_that_are_not_known_yet_are_no_verdict(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    early = row(0, saved_prefill_seconds=0, load_seconds=9.0)
    page_of(tmp_path, str(write(tmp_path / "run.jsonl", [early])))
    table = printed(capsys)
    assert "What that saved is not known" in table
    assert "pay" not in table


def test_a_configuration_is_shown_without_its_secrets(
    recording: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    secret = tmp_path / "secret"
    secret.write_text("hunter2-hunter2-hunter2")
    secret.chmod(0o600)
    config = tmp_path / "tierkv.yaml"
    config.write_text(
        "tiers:\n  - {type: dram, capacity: 1MiB}\n"
        f"  - {{type: redis, url: 'redis://localhost', password: {{file: {secret}}}}}\n"
        f"key_secret: {{file: {secret}}}\n"
    )
    page = page_of(tmp_path, recording, "--config", str(config))
    assert "hunter2" not in page
    assert "tiers.dram.capacity" in page
    assert "tierkv.yaml:2" in page


def test_the_demo_its_page_and_its_report_are_one(tmp_path: Path) -> None:
    plan = Plan(documents=2, rounds=2, restarts=1, answer_tokens=3)
    result = build_result(demo_record(), plan, Path("/models/some-model"), 12.3)
    file = tmp_path / "demo.json"
    file.write_text(json.dumps(result))
    page = page_of(tmp_path, str(file))
    assert "TierKV demo" in page
    assert "(e) TierKV from disk" in page
    assert len(pictures(page)) == 1


def test_a_benchmark_becomes_tables_and_a_picture(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "disk.json"
    file.write_text(json.dumps(BENCH))
    page = page_of(tmp_path, str(file))
    table = printed(capsys)
    for text in (
        "disk over limit",
        "0.910",
        "0.020",
        "load ms",
        "1.234",
        "1,500,000,000",
        "2 CPUs",
    ):
        assert text in table
        assert text in page
    assert "0.020" in table
    assert len(pictures(page)) == 1


def test_a_simulation_becomes_its_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace = tmp_path / "t.jsonl"
    trace.write_text('{"hash_ids": [1, 2, 3], "input_length": 48}\n' * 3)
    command_line = ["simulate", str(trace), "--block-tokens", "16", "--dram", "64tokens", "--json"]
    assert run([*command_line, "--disk", "none"]) == 0
    file = tmp_path / "sizes.json"
    file.write_text(capsys.readouterr().out)
    assert "65.3 %" in page_of(tmp_path, str(file))  # 2 of 3 prompts, but for their last token


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('{"some": "json"}', "neither a recording"),
        ("word salad", "no line of 'tierkv stat --json'"),
        ("", "nothing in it"),
    ],
)
def test_a_file_of_another_kind_is_said(
    tmp_path: Path, text: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "x.json"
    file.write_text(text)
    assert run(["report", str(file)]) == 1
    assert said in capsys.readouterr().err
    assert run(["report", str(tmp_path / "missing")]) == 1
    assert "cannot be read (No such file" in capsys.readouterr().err


# -- a running engine ----------------------------------------------------------------------------


class Engine:
    """Stands for a running one: each look comes a second and some hits later."""

    def __init__(self, looks: int = 100, ending: BaseException | None = None) -> None:
        self.info = {"model": "tiny", "pid": 7}
        self.origin = "pid 7"
        self.closed = False
        self._left = looks
        self._ending = ending
        self._counters = Counters(["dram", "disk"])
        self._time = 1_800_000_000.0

    def read(self, requests: int) -> Sample:
        if not self._left and self._ending is not None:
            raise self._ending
        self._left -= 1
        self._time += 1
        labels: dict[str, Any] = {"tier": "dram", "reuse": "exact"}
        self._counters.add("tierkv_query_tokens_total", 300, outcome="hit", **labels)
        labels = {"tier": "none", "reuse": "none"}
        self._counters.add("tierkv_query_tokens_total", 100, outcome="miss", **labels)
        return Sample(self._time, False, self._counters.snapshot(), None)

    def close(self) -> None:
        self.closed = True


def watched(monkeypatch: pytest.MonkeyPatch, engine: Engine) -> None:
    clock = iter(range(1000))
    monkeypatch.setattr(command, "_wait", lambda seconds: None)
    monkeypatch.setattr(command, "_clock", lambda: next(clock))
    monkeypatch.setattr(stats_source, "open_source", lambda url, pid: engine)


def test_a_running_engine_is_watched_for_so_long(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    engine = Engine()
    watched(monkeypatch, engine)
    page = page_of(tmp_path, "--seconds", "10")
    assert engine.closed
    table = printed(capsys)
    assert "TierKV: tiny" in table
    assert "75.0%" in table
    assert "75.0%" in page
    assert "pid 7" in page


@pytest.mark.parametrize("ending", [KeyboardInterrupt(), StatsError("gone")])
def test_an_early_end_reports_what_there_is(
    ending: BaseException, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    watched(monkeypatch, Engine(looks=4, ending=ending))
    assert run(["report", "--seconds", "500", "--json"]) == 0
    value = json.loads(capsys.readouterr().out)
    assert (value["intervals"], value["query_tokens"]) == (3, 1200)


def test_nothing_to_watch_is_said(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    watched(monkeypatch, Engine(looks=1, ending=StatsError("engine 7: gone; start it")))
    assert run(["report"]) == 1
    assert "gone; start it" in capsys.readouterr().err
    assert run(["report", "x.jsonl", "--pid", "5"]) == 2
