# SPDX-License-Identifier: Apache-2.0
"""What the demo's client makes of a server's stream and of its metrics."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import ClassVar

import pytest

from tierkv.demo.client import Answer, Client, Counters, parse_counters, read_answer
from tierkv.demo.paths import DemoError
from tierkv.demo.server import Server

# As vLLM 0.32 sends it, shortened.
STREAM = [
    'data: {"choices":[{"index":0,"text":" Paris","token_ids":[7042]}]}',
    "",
    'data: {"choices":[{"index":0,"text":".","token_ids":[30]}]}',
    (
        'data: {"choices":[],"usage":{"prompt_tokens":5,"completion_tokens":2,'
        '"prompt_tokens_details":{"cached_tokens":4}}}'
    ),
    "data: [DONE]",
]
METRICS = """\
# HELP vllm:prompt_tokens_total Number of prefill tokens processed.
# TYPE vllm:prompt_tokens_total counter
vllm:prompt_tokens_total{engine="0",model_name="demo"} 42.0
# HELP vllm:prompt_tokens_cached_by_source_total Cached.
# TYPE vllm:prompt_tokens_cached_by_source_total counter
vllm:prompt_tokens_cached_by_source_total{engine="0",model_name="demo",source="device"} 7.0
vllm:prompt_tokens_cached_by_source_total{engine="0",model_name="demo",source="host"} 8.0
vllm:prompt_tokens_cached_by_source_total{engine="0",model_name="demo",source="p2p"} 0.0
"""
OWN_METRICS = """\
# HELP tierkv_query_tokens_total Query tokens.
# TYPE tierkv_query_tokens_total counter
tierkv_query_tokens_total{outcome="hit",tier="dram",reuse="exact"} 5.0
tierkv_query_tokens_total{outcome="hit",tier="dram",reuse="any_text"} 1.0
tierkv_query_tokens_total{outcome="hit",tier="attic",reuse="exact"} 2.0
tierkv_query_tokens_total{outcome="miss",tier="dram",reuse="none"} 100.0
"""


def test_a_stream_gives_tokens_text_and_usage() -> None:
    answer = read_answer(STREAM, time.perf_counter())
    assert answer is not None
    assert answer.token_ids == (7042, 30)
    assert answer.text == " Paris."
    assert (answer.prompt_tokens, answer.cached_tokens) == (5, 4)


def test_ttft_ends_with_the_first_token_and_not_with_the_stream(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = [100.0]

    def lines() -> Iterator[str]:
        for line in STREAM:
            now[0] += 1.0
            yield line

    monkeypatch.setattr("tierkv.demo.client.time.perf_counter", lambda: now[0])
    answer = read_answer(lines(), 100.0)
    assert answer is not None
    assert answer.ttft_s == 1.0


@pytest.mark.parametrize("lines", [[], STREAM[:2], STREAM[3:]], ids=["empty", "cut", "no token"])
def test_an_incomplete_stream_is_no_answer(lines: list[str]) -> None:
    assert read_answer(lines, 0.0) is None


def test_a_server_that_hides_cached_tokens_reports_none() -> None:
    usage = 'data: {"choices":[],"usage":{"prompt_tokens":5,"prompt_tokens_details":null}}'
    answer = read_answer([STREAM[0], usage], 0.0)
    assert answer is not None
    assert answer.cached_tokens == 0


def test_answers_are_compared_by_token_and_without_tokens_by_text() -> None:
    tokens = Answer(0.1, 5, 0, (1, 2), "same text")
    others = Answer(0.1, 5, 0, (1, 3), "same text")
    silent = Answer(0.1, 5, 0, (), "same text")
    assert not tokens.same_as(others)
    assert tokens.same_as(silent)
    assert not silent.same_as(Answer(0.1, 5, 0, (), "other text"))


def test_vllms_sources_become_tiers() -> None:
    assert parse_counters(METRICS) == Counters(42, {"gpu": 7, "dram": 8, "p2p": 0})


def test_tierkvs_own_counters_win_and_only_hits_count() -> None:
    counters = parse_counters(METRICS + OWN_METRICS)
    assert counters.hit_tokens == {"gpu": 7, "dram": 6, "attic": 2}


def test_a_difference_of_counters_leaves_out_idle_tiers() -> None:
    earlier, later = Counters(10, {"gpu": 5}), Counters(30, {"gpu": 5, "dram": 4})
    assert later.since(earlier) == Counters(20, {"dram": 4})


class _Handler(BaseHTTPRequestHandler):
    counted: ClassVar[list[tuple[int, int]]] = []
    """Prompt tokens and hit tokens, one pair a request of /metrics; the last one stays."""

    def do_GET(self) -> None:
        left = type(self).counted
        prompt, hits = left.pop(0) if len(left) > 1 else left[0]
        cached = "vllm:prompt_tokens_cached_by_source_total"
        self._answer(
            200,
            f"# TYPE vllm:prompt_tokens_total counter\nvllm:prompt_tokens_total {prompt}\n"
            f'# TYPE {cached} counter\n{cached}{{source="host"}} {hits}\n',
        )

    def do_POST(self) -> None:
        length = int(self.headers["Content-Length"])
        if b"refuse" in self.rfile.read(length):
            self._answer(400, "the prompt is too long")
        else:
            self._answer(200, "\n".join(STREAM) + "\n")

    def _answer(self, status: int, text: str) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(text.encode())))
        self.end_headers()
        self.wfile.write(text.encode())

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def client(tmp_path: Path) -> Iterator[Client]:
    with ThreadingHTTPServer(("127.0.0.1", 0), _Handler) as http:
        thread = threading.Thread(target=http.serve_forever, args=(0.01,))
        thread.start()
        log = tmp_path / "server.log"
        log.write_text("an old line\nthe last line\n")
        server = Server("fake", [], port=http.server_port, folder=tmp_path, log=log)
        client = Client(server)
        yield client
        client.close()
        http.shutdown()
        thread.join()


def test_a_refused_request_names_reason_log_and_its_last_line(client: Client) -> None:
    with pytest.raises(DemoError, match=r"too long.*server\.log") as caught:
        client.ask("refuse this", 4)
    assert "the last line" in str(caught.value)


def test_counters_wait_until_the_server_has_counted_every_request(client: Client) -> None:
    _Handler.counted = [(0, 0), (5, 0), (5, 4)]
    assert client.ask("The capital of France is", 2).cached_tokens == 4
    assert client.counters() == Counters(5, {"dram": 4})


def test_counters_that_never_add_up_are_returned_as_they_are(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tierkv.demo.client.SETTLE_S", 0.0)
    _Handler.counted = [(5, 0)]
    client.ask("The capital of France is", 2)
    assert client.counters() == Counters(5, {"dram": 0})


def test_a_server_that_is_gone_is_an_error_with_its_log(tmp_path: Path) -> None:
    log = tmp_path / "server.log"
    log.write_text("the last line\n")
    client = Client(Server("fake", [], port=1, folder=tmp_path, log=log))
    with pytest.raises(DemoError, match="the last line"):
        client.ask("anything", 1)
    client.close()
