# SPDX-License-Identifier: Apache-2.0
"""What an operator sees of a real server: `tierkv top`, `stat`, `why`, `pin`, and `explain`."""

from __future__ import annotations

import json
import os
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.engine.engines import ANSWER, BLOCK, CHUNK, disk, hit, tiers
from tests.engine.prompts import Texts
from tierkv.cli.app import run
from tierkv.demo.ports import free_port
from tierkv.demo.server import Server
from tierkv.stats import client, discovery
from tierkv.stats.source import SocketSource, url_sources
from tierkv.telemetry import rates

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def server(random_llama_dir: Path) -> Iterator[Server]:
    """A server that may be controlled; its socket lies in the tests' runtime directory."""
    patch = pytest.MonkeyPatch()
    patch.setenv("OMP_NUM_THREADS", "1")
    patch.setenv("VLLM_SERVER_DEV_MODE", "1")  # for /reset_prefix_cache
    with tempfile.TemporaryDirectory(prefix="tks-") as short:
        folder = Path(short) / "server"
        folder.mkdir()
        config = tiers("64MiB", disk(Path(short) / "kv"), stats={"control": True})
        transfer = {
            "kv_connector": "TierKVConnector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": config,
        }
        arguments = [
            *(str(random_llama_dir), "--served-model-name", "small", "--dtype", "float32"),
            *("--enforce-eager", "--block-size", str(BLOCK), "--max-model-len", "1024"),
            *("--num-gpu-blocks-override", "100", "--kv-cache-memory-bytes", str(1 << 30)),
            *("--kv-transfer-config", json.dumps(transfer)),
        ]
        found = Server("stats", arguments, port=free_port(), folder=folder, log=Path(short) / "log")
        found.start()
        found.wait_ready()
        yield found
        found.stop()
    patch.undo()


@pytest.fixture
def engine(server: Server) -> Iterator[client.Engine]:
    """Whose socket it is cannot be mistaken: the only one of a child of the server."""
    # Engines of other tests may be alive, too.
    mine = []
    for each in client.engines():
        if os.getpgid(each.info["pid"]) == server.pid:
            mine.append(each)
        else:
            each.close()
    (found,) = mine
    yield found
    found.close()


def post(server: Server, path: str, body: Any = None) -> httpx.Response:
    with httpx.Client(trust_env=False, timeout=300.0) as web:
        return web.post(server.url + path, json=body).raise_for_status()


def ask(server: Server, prompt: Sequence[int], **more: Any) -> dict[str, Any]:
    body = {"model": "small", "prompt": list(prompt), "max_tokens": ANSWER, "ignore_eos": True}
    answer: dict[str, Any] = post(server, "/v1/completions", {**body, **more}).json()
    return answer


def forget(server: Server) -> None:
    post(server, "/reset_prefix_cache")


def wait_until(condition: Callable[[], bool]) -> None:
    """Return when it holds; one that never does is ended by pytest-timeout."""
    tick = threading.Event()
    while not condition():
        tick.wait(0.05)


def test_a_request_is_told_what_became_of_its_prompt_if_it_asks(
    server: Server, texts: Texts
) -> None:
    prompt = texts(180, 600)
    asking = {"kv_transfer_params": {"tierkv": {"explain": True}}}
    cold = ask(server, prompt, **asking)["kv_transfer_params"]["tierkv"]
    chunks = 599 // CHUNK * CHUNK
    assert cold["parts"] == [
        {"outcome": "miss", "tier": "none", "reason": "never_seen", "tokens": chunks},
        {"outcome": "tail", "tier": "none", "reason": "", "tokens": 600 - chunks},
    ]
    forget(server)
    assert not ask(server, prompt).get("kv_transfer_params")
    forget(server)
    warm = ask(server, prompt, **asking)["kv_transfer_params"]["tierkv"]
    assert warm["parts"][0] == {
        "outcome": "hit",
        "tier": "dram",
        "reason": "",
        "tokens": hit(600),
    }
    assert warm["load_seconds"] > 0


def test_the_commands_show_what_the_metrics_page_counts(
    server: Server, engine: client.Engine, texts: Texts, capsys: pytest.CaptureFixture[str]
) -> None:
    ask(server, texts(181, 300))
    forget(server)
    ask(server, texts(181, 300))
    pid = str(engine.info["pid"])
    assert (engine.info["model"], engine.info["control"]) == ("small", True)
    (page,) = url_sources(server.url)

    def same() -> bool:
        # The page hears of a step a little later than the socket.
        socket, web = SocketSource(engine).read(1).metrics, page.read(0).metrics
        return rates.rates(socket) == rates.rates(web) and rates.rates(web).query_tokens > 0

    wait_until(same)
    found = rates.rates(page.read(0).metrics)
    assert found.hit_tokens >= hit(300)

    assert run(["top", "--once", "--pid", pid]) == 0
    shown = capsys.readouterr().out
    assert f"TierKV {engine.info['version']}  small  pid {pid}" in shown
    assert f"session {rates.percent(found.hit)}" in shown
    assert "misses   never seen 100.0%" in shown
    assert run(["top", "--once", "--url", server.url]) == 0
    assert f"session {rates.percent(found.hit)}" in capsys.readouterr().out

    assert run(["why", "--last", "1", "--json", "--pid", pid]) == 0
    (request,) = json.loads(capsys.readouterr().out)["requests"]
    first = request["parts"][0]
    assert (first["outcome"], first["tokens"]) == ("hit", hit(300))
    assert run(["why", "--last", "1", "--pid", pid]) == 0
    assert "hit: dram" in capsys.readouterr().out

    # An idle engine has no rate in an interval, and its tiers hold what they hold.
    assert run(["stat", "-i", "0.1", "-n", "2", "--json", "--pid", pid]) == 0
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [row["hit_rate"] for row in rows] == [None, None]
    assert rows[0]["tiers"]["dram"]["used_bytes"] > 0


def test_an_idle_server_takes_a_command_and_does_it_first(
    server: Server, engine: client.Engine, texts: Texts, capsys: pytest.CaptureFixture[str]
) -> None:
    prompt = texts(182, 300)
    ask(server, prompt)
    forget(server)
    pid = str(engine.info["pid"])
    assert run(["pin", "--all", "--pid", pid]) == 0
    assert "queued" in capsys.readouterr().out
    assert engine.request("purge", all=True) == {"queued": True}
    ask(server, prompt)
    (request,) = engine.request("requests", last=1)
    assert [part["outcome"] for part in request["parts"]] == ["miss", "tail"]
    assert rates.total(engine.request("snapshot")["metrics"], "tierkv_pinned_slots") == 0


def test_a_server_that_ended_is_not_found_any_more(server: Server, engine: client.Engine) -> None:
    assert engine.path in discovery.find()
    server.stop()
    # vLLM may end its engine before that could tidy up: then the next look sweeps the socket.
    assert engine.path not in discovery.find()
    assert not engine.path.exists()
