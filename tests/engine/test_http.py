# SPDX-License-Identifier: Apache-2.0
"""`vllm serve` as users run it: cached tokens in the usage, metrics, options of one request, both
ways of naming the connector, and what a mistake in the configuration looks like."""

from __future__ import annotations

import json
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.engine.engines import ANSWER, BLOCK, Reference, disk, hit, tiers
from tests.engine.prompts import Texts
from tierkv.demo.paths import DemoError
from tierkv.demo.ports import free_port
from tierkv.demo.server import Server

pytestmark = [pytest.mark.engine, pytest.mark.timeout(900)]

NAME = {"kv_connector": "TierKVConnector"}
MODULE = {"kv_connector": "TierKVConnector", "kv_connector_module_path": "tierkv_vllm"}

Row = tuple[dict[str, str], float]


@pytest.fixture(scope="module")
def short_path() -> Iterator[Path]:
    """A directory with a short name: pytest's own are too long for UNIX sockets below them."""
    with tempfile.TemporaryDirectory(prefix="tkh-") as path:
        yield Path(path)


@pytest.fixture(scope="module")
def make_server(short_path: Path, random_llama_dir: Path) -> Iterator[Callable[..., Server]]:
    """Servers over the small model; they are stopped at the end."""
    patch = pytest.MonkeyPatch()
    patch.setenv("OMP_NUM_THREADS", "1")
    # For `/reset_prefix_cache`.
    patch.setenv("VLLM_SERVER_DEV_MODE", "1")
    servers: list[Server] = []

    def make(way: Mapping[str, str], config: Mapping[str, Any]) -> Server:
        name = f"server-{len(servers)}"
        transfer = {**way, "kv_role": "kv_both", "kv_connector_extra_config": dict(config)}
        arguments = [
            *(str(random_llama_dir), "--served-model-name", "small", "--dtype", "float32"),
            *("--enforce-eager", "--block-size", str(BLOCK), "--max-model-len", "1024"),
            *("--num-gpu-blocks-override", "100", "--kv-cache-memory-bytes", str(1 << 30)),
            *("--max-num-batched-tokens", "256", "--enable-prompt-tokens-details"),
            *("--kv-transfer-config", json.dumps(transfer)),
        ]
        folder = short_path / name
        folder.mkdir()
        servers.append(
            Server(name, arguments, port=free_port(), folder=folder, log=short_path / f"{name}.log")
        )
        servers[-1].start()
        return servers[-1]

    yield make
    for server in servers:
        server.stop(10.0)
    patch.undo()


@pytest.fixture(scope="module")
def config(short_path: Path) -> dict[str, Any]:
    return tiers("64MiB", disk(short_path / "kv"))


@pytest.fixture(scope="module")
def mistaken(make_server: Callable[..., Server], short_path: Path) -> Server:
    """A server with a mistake on line 4 of its configuration; it takes a while to end."""
    (short_path / "tierkv.yaml").write_text(
        "version: 1\ntiers:\n  - type: dram\n    capacty: 1GiB\n"
    )
    return make_server(NAME, {"config": str(short_path / "tierkv.yaml")})


@pytest.fixture(scope="module")
def server(make_server: Callable[..., Server], config: dict[str, Any], mistaken: Server) -> Server:
    """Connector by its name alone, as the plug-in registers it. Starts beside `mistaken`."""
    server = make_server(NAME, config)
    server.wait_ready()
    return server


def post(server: Server, path: str, body: object = None) -> httpx.Response:
    with httpx.Client(trust_env=False, timeout=600.0) as client:
        return client.post(server.url + path, json=body)


def ask(server: Server, prompt: Sequence[int], **more: Any) -> tuple[tuple[int, ...], int]:
    """A greedy answer, and how many of the prompt's were cached."""
    body = {
        "model": "small",
        "prompt": list(prompt),
        "max_tokens": ANSWER,
        "temperature": 0,
        "ignore_eos": True,
        "return_token_ids": True,
        **more,
    }
    response = post(server, "/v1/completions", body)
    assert response.status_code == httpx.codes.OK, response.text
    answer = response.json()
    details = answer["usage"]["prompt_tokens_details"]
    return tuple(answer["choices"][0]["token_ids"]), (details or {}).get("cached_tokens") or 0


def forget(server: Server) -> None:
    """Empty vLLM's own prefix cache."""
    assert post(server, "/reset_prefix_cache").status_code == httpx.codes.OK


def metrics(server: Server) -> dict[str, list[Row]]:
    """All samples by name."""
    with httpx.Client(trust_env=False, timeout=60.0) as client:
        page = client.get(f"{server.url}/metrics").raise_for_status().text
    found: dict[str, list[Row]] = {}
    for family in text_string_to_metric_families(page):
        for sample in family.samples:
            found.setdefault(sample.name, []).append((sample.labels, sample.value))
    return found


def total(rows: Sequence[Row], **labels: str) -> float:
    return sum(value for row, value in rows if labels.items() <= row.items())


def wait_until(condition: Callable[[], bool]) -> None:
    """Return when `condition` holds; one that never does is ended by pytest-timeout."""
    tick = threading.Event()
    while not condition():
        tick.wait(0.1)


def test_usage_tells_the_cached_tokens(
    server: Server, texts: Texts, small_reference: Reference
) -> None:
    prompt = texts(160, 600)
    cold = ask(server, prompt)
    forget(server)
    warm = ask(server, prompt)
    (right,) = small_reference.tokens([prompt])
    assert cold == (right, 0)
    assert warm == (right, hit(600))


def test_metrics_carry_vllms_labels_and_agree_with_its_own_counts(
    server: Server, texts: Texts
) -> None:
    ask(server, texts(161, 300))
    forget(server)
    ask(server, texts(161, 300)[:200] + texts(162, 100))
    queries = "tierkv_query_tokens_total"

    def settled() -> bool:
        # A server counts a little after it has answered.
        found = metrics(server)
        prompts = total(found["vllm:prompt_tokens_total"])
        return total(found[queries]) == prompts > 0

    wait_until(settled)
    found = metrics(server)
    for labels, _ in found[queries]:
        assert (labels["model_name"], labels["engine"]) == ("small", "0")
    hits = total(found[queries], outcome="hit", tier="dram")
    assert hits >= hit(300, 200)
    assert total(found[queries]) == total(found["vllm:external_prefix_cache_queries_total"])
    assert hits == total(found["vllm:external_prefix_cache_hits_total"])
    by_source = found["vllm:prompt_tokens_cached_by_source_total"]
    assert total(by_source, source="host") == hits
    # Every series exists from the start.
    assert {labels["tier"] for labels, _ in found["tierkv_chunks"]} == {"dram", "disk"}
    assert total(found["tierkv_chunks"], tier="dram") > 0
    assert any(labels["outcome"] == "unavailable" for labels, _ in found[queries])
    assert found["tierkv_io_duration_seconds_count"]


def test_a_request_chooses_for_itself_and_a_bad_choice_is_ignored(
    server: Server, texts: Texts, small_reference: Reference
) -> None:
    prompt = texts(163, 300)
    (right,) = small_reference.tokens([prompt])
    ask(server, prompt, kv_transfer_params={"tierkv": {"save": False}})
    forget(server)
    assert ask(server, prompt) == (right, 0)
    forget(server)
    assert ask(server, prompt, kv_transfer_params={"tierkv": {"load": False}}) == (right, 0)
    forget(server)
    bad = {"tierkv": {"load": "no", "lod": True}}
    assert ask(server, prompt, kv_transfer_params=bad) == (right, hit(300))
    log = server.log.read_text(errors="replace")
    assert "kv_transfer_params.tierkv.load: expected true or false, not 'no'; ignored" in log
    assert "kv_transfer_params.tierkv.lod: unknown; known are load, save, " in log


UNREAD = 500
"""Tokens of an answer that nobody waits for."""


def hang_up(server: Server, prompt: Sequence[int], after: int) -> None:
    """Leave a streamed answer after so many events of it."""
    body = {"model": "small", "prompt": list(prompt), "max_tokens": UNREAD, "stream": True}
    body |= {"ignore_eos": True, "temperature": 0}
    with (
        httpx.Client(trust_env=False, timeout=600.0) as client,
        client.stream("POST", server.url + "/v1/completions", json=body) as response,
    ):
        assert response.status_code == httpx.codes.OK
        events = (line for line in response.iter_lines() if line)
        for _ in range(after):
            assert next(events).startswith("data: {")


@pytest.mark.feature("abort and disconnect in the middle")
def test_clients_that_hang_up_leave_nothing_behind(
    server: Server, texts: Texts, small_reference: Reference
) -> None:
    def idle() -> bool:
        page = metrics(server)
        used = (
            "vllm:num_requests_running",
            "vllm:num_requests_waiting",
            "vllm:kv_cache_usage_perc",
        )
        return not any(total(page[name]) for name in (*used, "tierkv_leased_slots"))

    prompts = [texts(165 + i, 420) for i in range(4)]
    before = total(metrics(server)["vllm:generation_tokens_total"])
    for after in (1, 0):
        # In the middle of the answer; then, the prompts being stored, while they are loaded.
        for i, prompt in enumerate(prompts):
            hang_up(server, prompt, after * (1 + 5 * i))
        wait_until(idle)
        forget(server)
    answers = [ask(server, prompt) for prompt in prompts]
    assert [tokens for tokens, _ in answers] == small_reference.tokens(prompts)
    assert all(cached >= hit(420) for _, cached in answers)
    wait_until(idle)
    # The engine did not go on for those who had left.
    generated = total(metrics(server)["vllm:generation_tokens_total"]) - before
    assert generated < len(prompts) * UNREAD


def test_a_restarted_server_finds_its_cache_by_the_other_way_in(
    server: Server,
    make_server: Callable[..., Server],
    config: dict[str, Any],
    texts: Texts,
    small_reference: Reference,
) -> None:
    prompt = texts(164, 600)
    ask(server, prompt)
    assert server.stop()
    again = make_server(MODULE, config)
    again.wait_ready()
    assert ask(again, prompt) == (small_reference.tokens([prompt])[0], hit(600))
    assert total(metrics(again)["tierkv_query_tokens_total"], outcome="hit", tier="disk") == hit(
        600
    )
    assert "recovered in" in again.log.read_text(errors="replace")
    assert again.stop()


def test_a_mistake_in_the_configuration_ends_the_server_with_one_line(
    mistaken: Server, short_path: Path
) -> None:
    file = short_path / "tierkv.yaml"
    with pytest.raises(DemoError, match="ended by itself"):
        mistaken.wait_ready()
    lines = mistaken.log.read_text(errors="replace").splitlines()
    assert [line for line in lines if f"{file}:4:5: tiers.0.dram.capacty: unknown key" in line]
