# SPDX-License-Identifier: Apache-2.0
"""`tierkv top --once`, `stat`, `why` and `pin` against a stats socket, as a shell runs them."""

from __future__ import annotations

import csv
import json
import os
import sys
import tempfile
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, Counter, Gauge, generate_latest

from tests.unit.stats.fake_engine import START, FakeEngine
from tierkv.cli import numbers, stat, why
from tierkv.cli.app import run
from tierkv.stats.source import parse_page, url_sources


@pytest.fixture(autouse=True)
def runtime(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with tempfile.TemporaryDirectory(prefix="tk-") as short:
        monkeypatch.setenv("XDG_RUNTIME_DIR", short)
        monkeypatch.setattr("tierkv.stats.discovery.gettempdir", lambda: short)
        yield


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeEngine]:
    """On its socket, with ten seconds of traffic behind it; each wait is a second of traffic."""
    fake = FakeEngine()
    fake.pass_time(10)
    server, publisher = fake.serve(control=True)

    def wait(seconds: float) -> None:
        fake.pass_time(seconds, 2.0)
        fake.publish(publisher)

    monkeypatch.setattr("tierkv.cli.stat._wait", wait)
    monkeypatch.setattr("tierkv.cli.top._wait", wait)
    monkeypatch.setattr("tierkv.cli.top_view.time.time", lambda: fake.time + 0.1)
    yield fake
    server.close()


def test_top_prints_once_where_there_is_no_terminal(
    engine: FakeEngine, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["top"]) == 0
    out = capsys.readouterr().out.splitlines()
    assert out[0] == f"TierKV 0.1.0  llama-8b  pid {os.getpid()}  up 11s"
    assert out[1] == "hit rate 71.4% now = dram 48.0 + disk 19.1 + redis 4.3    session 71.4%"
    assert any(line.endswith("evicted from disk") for line in out)
    assert not any("\033" in line for line in out)


def test_savings_that_are_not_known_yet_are_a_dash(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    fake = FakeEngine()
    fake.counters.add("tierkv_load_seconds_total", 5.0)
    server, _ = fake.serve()
    monkeypatch.setattr("tierkv.cli.top._wait", lambda seconds: None)
    try:
        assert run(["top", "--once"]) == 0
    finally:
        server.close()
    assert capsys.readouterr().out.splitlines()[2].endswith("saved – for 5s wait")


def test_top_shows_all_engines_of_the_user(
    engine: FakeEngine, capsys: pytest.CaptureFixture[str]
) -> None:
    other, _ = FakeEngine(("dram",)).serve()
    try:
        assert run(["top", "--once"]) == 0
    finally:
        other.close()
    assert capsys.readouterr().out.count("TierKV 0.1.0  llama-8b") == 2


@pytest.mark.parametrize("command", [["top"], ["stat"], ["why"], ["pin", "--all"]])
def test_without_an_engine_it_says_how_to_start_one(
    command: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(command) == 1
    told = capsys.readouterr()
    assert told.out == ""
    assert "no running engine" in told.err
    assert ("--url" in told.err) == (command[0] in ("top", "stat"))
    assert "vllm serve MODEL --kv-transfer-config" in told.err


def test_top_without_textual_names_the_package(
    engine: FakeEngine, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == "textual"]:
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.setitem(sys.modules, "textual", None)
    monkeypatch.delitem(sys.modules, "tierkv.cli.top_app", raising=False)
    monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
    monkeypatch.setenv("TERM", "xterm")
    assert run(["top"]) == 1
    assert "run: pip install 'tierkv[cli]'" in capsys.readouterr().err


def test_stat_tells_what_happened_in_each_interval(
    engine: FakeEngine, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["stat", "-i", "2", "-n", "3", "--json"]) == 0
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [row["time"] for row in rows] == [START + 12, START + 14, START + 16]
    for row in rows:
        # 2 s at twice 1,000 tokens a second.
        assert row["seconds"] == 2
        assert row["query_tokens"] == 4000
        assert row["any_text_hit_tokens"] == row["tiers"]["redis"]["hit_tokens"] == 172
        assert row["tiers"]["dram"]["hit_tokens"] == 1920
        assert row["tiers"]["redis"]["breaker_state"] == 1
        assert row["hit_rate"] == pytest.approx(0.714)
        assert sum(tier["hit_rate"] for tier in row["tiers"].values()) == pytest.approx(
            row["hit_rate"], abs=1e-5
        )
        assert row["prefill_avoided"] == pytest.approx(1.004 / 1.29, abs=1e-5)


def test_stat_writes_csv_that_a_reader_takes(
    engine: FakeEngine, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["stat", "-n", "2", "--csv"]) == 0
    rows = list(csv.DictReader(capsys.readouterr().out.splitlines()))
    assert len(rows) == 2
    assert rows[0]["tiers.disk.hit_tokens"] == "382"
    assert float(rows[0]["hit_rate"]) == pytest.approx(0.714)


def test_stat_without_traffic_has_no_rate(
    engine: FakeEngine, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tierkv.cli.stat._wait", lambda seconds: None)
    assert run(["stat", "-n", "1"]) == 0
    heading, line = capsys.readouterr().out.splitlines()
    assert heading.split()[2] == "hit%"
    assert line.split()[1:] == ["0", *["–"] * 6, "0/s", "0/s"]
    assert run(["stat", "-n", "1", "--json"]) == 0
    row = json.loads(capsys.readouterr().out)
    assert row["hit_rate"] is None
    assert row["query_tokens"] == 0


def test_time_goes_on_while_an_engine_is_idle() -> None:
    fake = FakeEngine()
    fake.pass_time(10)
    last = fake.sample()
    first = stat.following(last, last, 2.0)
    second = stat.following(first, last, 2.0)
    assert [first.time - last.time, second.time - last.time] == [2.0, 4.0]
    fake.pass_time(5)
    busy = stat.following(second, fake.sample(), 2.0)
    row = stat.measured(second, busy, 2.0)
    assert (row["seconds"], row["time"]) == (1.0, START + 15)


def test_stat_takes_one_format() -> None:
    assert run(["stat", "--json", "--csv"]) == 2


def test_why_tells_each_fate_and_its_reason(
    engine: FakeEngine, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["why", "--last", "2"]) == 0
    first, second = capsys.readouterr().out.split("\n\n")
    assert [line.split("%  ")[1] for line in first.splitlines()[1:]] == [
        "gpu: the engine's own prefix cache",
        "miss: evicted from disk",
        "tail: less than a chunk, or the last token",
    ]
    assert first.splitlines()[2].split()[:2] == ["9600", "90.0%"]
    assert [line.split("%  ")[1] for line in second.splitlines()[1:]] == [
        "hit: redis",
        "late: redis",
    ]


def test_why_says_that_text_came_from_another_place() -> None:
    parts = [
        {"outcome": "hit", "tier": "dram", "reason": "any_text", "tokens": 90},
        {"outcome": "recomputed", "tier": "none", "reason": "", "tokens": 10},
    ]
    request = {"request_id": "r", "time": 0.0, "prompt_tokens": 100, "gpu_tokens": 0,
               "lookup_seconds": 0.0, "load_seconds": 0.1, "parts": parts}  # fmt: skip
    _, hit, anew = why.lines(request)
    assert hit.endswith("hit: dram, text from another place")
    assert anew.endswith("recomputed: between and inside the reused text, to repair it")


def test_why_gives_programs_what_the_engine_remembers(
    engine: FakeEngine, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["why", "-n", "5", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["pid"] == os.getpid()
    assert len(told["requests"]) == 5
    assert told["requests"][-1]["parts"][0] == {
        "outcome": "hit",
        "tier": "redis",
        "reason": "",
        "tokens": 1024,
    }


class _Answer(BaseHTTPRequestHandler):
    """What the server under test says; `page` and `asked` are the test's."""

    page = b""
    asked: dict[str, Any] = {}  # noqa: RUF012

    def do_GET(self) -> None:
        self._reply(self.page)

    def do_POST(self) -> None:
        length = int(self.headers["Content-Length"])
        type(self).asked = {"path": self.path, **json.loads(self.rfile.read(length))}
        self._reply(json.dumps({"tokens": [7, 8, 9]}).encode())

    def _reply(self, body: bytes) -> None:
        self.send_response(200 if body else 404)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *args: Any) -> None: ...


@pytest.fixture
def http() -> Iterator[str]:
    with HTTPServer(("127.0.0.1", 0), _Answer) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


def test_pin_sends_the_tokens_of_a_prompt_file(
    tmp_path: Path, http: str, capsys: pytest.CaptureFixture[str]
) -> None:
    server, publisher = FakeEngine().serve(control=True)
    seen: list[tuple[str, dict[str, Any]]] = []
    stop = threading.Event()

    def do(op: str, arguments: dict[str, Any]) -> dict[str, Any]:
        seen.append((op, arguments))
        return {"chunks": 3, "held": {"dram": 3}}

    def scheduler() -> None:
        while not stop.is_set():
            publisher.run_commands(do)
            stop.wait(0.005)

    thread = threading.Thread(target=scheduler)
    thread.start()
    text, chat = tmp_path / "prompt.txt", tmp_path / "chat.json"
    text.write_text("You are helpful.")
    chat.write_text('{"messages": [{"role": "system", "content": "Be brief."}]}')
    try:
        assert run(["pin", str(text), "--server", http]) == 0
        assert capsys.readouterr().out == "3 chunks pinned\n"
        assert _Answer.asked == {
            "path": "/tokenize",
            "model": "llama-8b",
            "prompt": "You are helpful.",
        }
        assert run(["pin", str(chat), "--server", http, "--tenant", "acme", "--remove"]) == 0
        assert _Answer.asked["messages"] == [{"role": "system", "content": "Be brief."}]
        assert run(["pin", "--key", "ab" * 16, "--json"]) == 0
        assert run(["pin", "--all"]) == 0
    finally:
        stop.set()
        thread.join()
        server.close()
    assert seen == [
        ("pin", {"tokens": [7, 8, 9], "tenant": None}),
        ("unpin", {"tokens": [7, 8, 9], "tenant": "acme"}),
        ("pin", {"keys": ["ab" * 16]}),
        ("pin", {"all": True}),
    ]
    assert run(["pin"]) == 2
    assert run(["pin", str(text), "--all"]) == 2


def test_pin_says_what_is_wrong_with_the_file_or_the_server(
    engine: FakeEngine, tmp_path: Path, http: str, capsys: pytest.CaptureFixture[str]
) -> None:
    broken = tmp_path / "chat.json"
    broken.write_text("{")
    assert run(["pin", str(broken), "--server", http]) == 1
    assert f"{broken}: cannot be read as a prompt" in capsys.readouterr().err
    broken.write_text('{"messages": []}')
    assert run(["pin", str(broken), "--server", "file:///etc"]) == 1
    assert "give an http:// or https:// address" in capsys.readouterr().err
    assert run(["pin", str(broken), "--server", "http://127.0.0.1:1"]) == 1
    assert "is --server right?" in capsys.readouterr().err


def test_a_metrics_page_is_as_good_a_source_but_for_the_requests(
    engine: FakeEngine, http: str, capsys: pytest.CaptureFixture[str]
) -> None:
    registry = CollectorRegistry()
    names = ["model_name", "engine"]
    tokens = Counter(
        "tierkv_query_tokens", "t", [*names, "outcome", "tier", "reuse"], registry=registry
    )
    capacity = Gauge("tierkv_capacity_bytes", "c", [*names, "tier"], registry=registry)
    for tier in ("dram", "disk"):
        capacity.labels("m", "0", tier).set(1 << 30)
    tokens.labels("m", "0", "hit", "disk", "exact").inc(300)
    tokens.labels("m", "0", "miss", "none", "none").inc(100)
    Gauge("vllm:other", "o", names, registry=registry).labels("m", "0").set(1)
    _Answer.page = generate_latest(registry)
    assert run(["top", "--once", "--url", http]) == 0
    out = capsys.readouterr().out
    assert f"m  {http}/metrics engine 0" in out
    assert "hit rate – now    session 75.0%" in out
    assert "requests: not on a metrics page" in out
    (source,) = url_sources(http.removeprefix("http://"))
    assert set(source.read(0).metrics) == {"tierkv_query_tokens_total", "tierkv_capacity_bytes"}
    _Answer.page = b"# no metrics of ours\n"
    assert run(["stat", "--url", f"{http}/metrics"]) == 1
    assert "no metrics of TierKV on this page" in capsys.readouterr().err
    _Answer.page = b"<html>hello"
    assert run(["stat", "--url", http]) == 1
    assert "no" in capsys.readouterr().err
    assert run(["top", "--url", "ftp://x/metrics"]) == 1
    assert "give an http:// or https:// address" in capsys.readouterr().err


def test_histograms_of_a_page_are_those_of_the_socket() -> None:
    page = """\
# TYPE tierkv_io_duration_seconds histogram
tierkv_io_duration_seconds_bucket{model_name="m",engine="0",op="load",tier="disk",le="0.1"} 2
tierkv_io_duration_seconds_bucket{model_name="m",engine="0",op="load",tier="disk",le="1.0"} 5
tierkv_io_duration_seconds_bucket{model_name="m",engine="0",op="load",tier="disk",le="+Inf"} 6
tierkv_io_duration_seconds_count{model_name="m",engine="0",op="load",tier="disk"} 6
tierkv_io_duration_seconds_sum{model_name="m",engine="0",op="load",tier="disk"} 12.5
"""
    assert parse_page(page) == {
        ("m", "0"): {
            "tierkv_io_duration_seconds": [
                {
                    "labels": {"tier": "disk", "op": "load"},
                    "value": {"count": 6, "sum": 12.5, "buckets": [2, 3, 1]},
                }
            ]
        }
    }


@pytest.mark.parametrize(
    ("shown", "wanted"),
    [
        (numbers.count(None), "–"),
        (numbers.count(0), "0"),
        (numbers.count(999), "999"),
        (numbers.count(999.6), "1k"),
        (numbers.count(12345), "12.3k"),
        (numbers.count(999_900), "1M"),
        (numbers.count(5e9), "5G"),
        (numbers.share(0.0), "0.0"),
        (numbers.share(None), "–"),
        (numbers.speed(0), "0/s"),
        (numbers.speed(9.12e9), "9.12G/s"),
        (numbers.seconds(0.00014), "140us"),
        (numbers.seconds(0.0011), "1.1ms"),
        (numbers.seconds(0.99999), "1s"),
        (numbers.seconds(2.5), "2.5s"),
        (numbers.seconds(4000), "4000s"),
        (numbers.age(12.9), "12s"),
        (numbers.age(185), "3m05s"),
        (numbers.age(3 * 3600 + 720), "3h12m"),
        (numbers.age(4 * 86400 + 7200), "4d02h"),
        (numbers.age(None), "–"),
        (numbers.filled(30.1 * (1 << 30), 32 << 30), "30.1/32 GiB"),
        (numbers.filled(88 << 30, 0), "88 GiB"),
        (numbers.filled(0, 0), "0 B"),
        (numbers.sparkline([None, 0, 1, 2], 6), "   ▁▅█"),
        (numbers.sparkline([], 2), "  "),
    ],
)
def test_numbers_are_short_and_no_data_is_not_zero(shown: str, wanted: str) -> None:
    assert shown == wanted


def test_the_interval_of_an_idle_engine_is_the_one_asked_for(engine: FakeEngine) -> None:
    sample = engine.sample()
    assert stat.measured(sample, sample, 7.0)["seconds"] == 7.0
