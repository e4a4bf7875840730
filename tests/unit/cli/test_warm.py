# SPDX-License-Identifier: Apache-2.0
"""`tierkv warm` against a small real HTTP server that answers like an OpenAI API."""

from __future__ import annotations

import io
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from tierkv.cli.app import run
from tierkv.demo.ports import free_port

Captured = pytest.CaptureFixture[str]


class Api(ThreadingHTTPServer):
    """Counts the words of a prompt as its tokens; refuses prompts with "bad" in them."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.requests: list[tuple[str, dict[str, Any]]] = []
        self.keys: list[str | None] = []
        self.models: Any = {"data": [{"id": "tiny"}, {"id": "other"}]}
        self.most_at_once = 0
        self.most_threads = 0
        self.gate: threading.Barrier | None = None
        self._lock = threading.Lock()
        self._at_once = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def prompts(self) -> list[Any]:
        return sorted(body.get("prompt", body.get("messages")) for _, body in self.requests)

    def begin(self) -> None:
        with self._lock:
            self._at_once += 1
            self.most_at_once = max(self.most_at_once, self._at_once)
            senders = [t for t in threading.enumerate() if t.name.startswith("tierkv-warm")]
            self.most_threads = max(self.most_threads, len(senders))
        if self.gate is not None:
            self.gate.wait(30)

    def end(self) -> None:
        with self._lock:
            self._at_once -= 1


class _Handler(BaseHTTPRequestHandler):
    server: Api

    def do_GET(self) -> None:
        self._say(200, self.server.models)

    def do_POST(self) -> None:
        self.server.begin()
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.requests.append((self.path, body))
        self.server.keys.append(self.headers["Authorization"])
        text = json.dumps(body.get("prompt", body.get("messages")))
        self.server.end()
        if "bad" in text:
            self._say(400, {"error": {"message": "too\nlong"}})
        elif "odd" in text:
            self._say(200, {"nothing": 1})
        else:
            details = {"cached_tokens": 2} if "known" in text else None
            usage = {"prompt_tokens": len(text.split()), "prompt_tokens_details": details}
            self._say(200, {"usage": usage})

    def _say(self, code: int, value: Any) -> None:
        data = json.dumps(value).encode()
        self.send_response(code)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def api(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Api]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    server = Api()
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


def write(text: str) -> str:
    Path("prompts").write_text(text)
    return "prompts"


def test_each_line_is_sent_once_for_a_single_token(api: Api, capsys: Captured) -> None:
    file = write("one two three\n\nfour five\nknown six seven\r\n")
    assert run(["warm", file, "--url", api.url]) == 0
    printed = capsys.readouterr()
    assert printed.err == ""
    assert printed.out.startswith("3 prompts, 8 tokens (2 of them cached) in ")
    assert printed.out.endswith(" tokens/s, 0 failures\n")
    assert api.prompts() == ["four five", "known six seven", "one two three"]
    for path, body in api.requests:
        assert path == "/v1/completions"
        assert body.items() >= {"model": "tiny", "max_tokens": 1, "stream": False}.items()


def test_json_lines_are_requests_of_their_own(api: Api, capsys: Captured) -> None:
    chat = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 99, "stream": True,
            "n": 4, "temperature": 0.5}  # fmt: skip
    ids = {"prompt": [1, 2, 3], "model": "other"}
    file = write("\n".join(map(json.dumps, (chat, ids))))
    assert run(["warm", file, "--url", f"{api.url}/v1/", "--salt", "team", "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert (printed["ok"], printed["prompts"], printed["failures"]) == (True, 2, [])
    by_path = dict(api.requests)
    assert by_path["/v1/chat/completions"] == {
        "model": "tiny", "messages": chat["messages"], "max_tokens": 1, "stream": False,
        "temperature": 0.5, "cache_salt": "team",
    }  # fmt: skip
    assert by_path["/v1/completions"] == {
        "model": "other", "prompt": [1, 2, 3], "max_tokens": 1, "stream": False,
        "cache_salt": "team",
    }  # fmt: skip


def test_a_whole_file_is_one_prompt(
    api: Api, capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("{not json}\nline two\n"))
    assert run(["warm", "-", "--whole", "--model", "m", "--url", api.url]) == 0
    assert capsys.readouterr().out.startswith("1 prompt, ")
    [(_, body)] = api.requests
    assert (body["prompt"], body["model"]) == ("{not json}\nline two\n", "m")


def test_so_many_are_sent_at_once_and_no_more(api: Api, capsys: Captured) -> None:
    api.gate = threading.Barrier(3)  # breaks unless three are there together
    file = write("\n".join(f"prompt {n}" for n in range(9)))
    assert run(["warm", file, "--concurrency", "3", "--url", api.url]) == 0
    assert (api.most_at_once, api.most_threads) == (3, 3)
    assert len(api.requests) == 9
    capsys.readouterr()


def test_failures_are_told_by_line_and_the_rest_goes_on(api: Api, capsys: Captured) -> None:
    file = write("good\nbad\n\nodd one\ngood too\n")
    assert run(["warm", file, "--url", api.url]) == 1
    printed = capsys.readouterr()
    assert printed.err == (
        "line 2: HTTP 400: too long\nline 4: the answer is none of an OpenAI API\n"
    )
    assert printed.out.startswith("2 prompts, 3 tokens in ")
    assert printed.out.endswith(", 2 failures\n")
    assert run(["warm", file, "--url", api.url, "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["failures"] == [
        {"line": 2, "reason": "HTTP 400: too long"},
        {"line": 4, "reason": "the answer is none of an OpenAI API"},
    ]


def test_many_failures_are_not_told_one_by_one(api: Api, capsys: Captured) -> None:
    assert run(["warm", write("bad\n" * 30), "--url", api.url]) == 1
    told = capsys.readouterr().err.splitlines()
    assert len(told) == 11
    assert told[-1] == "… and 20 more failures"


def test_the_api_key_is_sent_and_never_shown(
    api: Api, capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MY_KEY", "geheim")
    assert run(["warm", write("a\nbad\n"), "--api-key-env", "MY_KEY", "--url", api.url]) == 1
    assert set(api.keys) == {"Bearer geheim"}
    assert "geheim" not in "".join(capsys.readouterr())


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("{broken\n", "prompts:1: begins like a JSON object and is none"),
        ('fine\n{"text": "x"}\n', 'prompts:2: has neither "messages" nor "prompt"'),
        ("\n \n", "prompts: no prompt in it; write one a line"),
    ],
)
def test_a_file_that_holds_no_prompts_is_2(
    api: Api, capsys: Captured, text: str, told: str
) -> None:
    assert run(["warm", write(text), "--url", api.url]) == 2
    assert capsys.readouterr().err.startswith(told)
    assert api.requests == []


def test_a_file_that_cannot_be_read_is_2(api: Api, capsys: Captured) -> None:
    assert run(["warm", "missing", "--url", api.url]) == 2
    assert capsys.readouterr().err == (
        "missing: No such file or directory; give a file with prompts\n"
    )
    Path("binary").write_bytes(b"\xff\xfe\x00")
    assert run(["warm", "binary", "--url", api.url]) == 2


def test_no_engine_there_is_one_line_and_1(capsys: Captured, tmp_path: Path) -> None:
    (tmp_path / "p").write_text("x")
    url = f"http://127.0.0.1:{free_port()}"
    assert run(["warm", str(tmp_path / "p"), "--url", url]) == 1
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith(f"tierkv: {url} cannot be reached (")
    assert printed.err.endswith("); is the engine up, and --url right?\n")
    assert run(["warm", str(tmp_path / "p"), "--url", "localhost:8000"]) == 2


def test_another_server_is_told_from_an_engine(api: Api, capsys: Captured) -> None:
    api.models = {"hello": "world"}
    assert run(["warm", write("x"), "--url", api.url]) == 1
    assert "is not a list of models; is this vLLM's address?" in capsys.readouterr().err
