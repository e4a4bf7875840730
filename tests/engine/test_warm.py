# SPDX-License-Identifier: Apache-2.0
"""A cache from the outside, beside the engine that has it: warm, ls, verify, inspect, purge."""

from __future__ import annotations

import json
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.engine.engines import BLOCK, CHUNK, disk, hit, tiers
from tests.engine.prompts import Texts
from tierkv.cli.app import run
from tierkv.demo.ports import free_port
from tierkv.demo.server import Server

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]

PROMPTS, LENGTH = 4, 300
CHUNKS = LENGTH // CHUNK
Captured = pytest.CaptureFixture[str]


@pytest.fixture(scope="module")
def folder() -> Iterator[Path]:
    # pytest's own are too long for UNIX sockets below them.
    with tempfile.TemporaryDirectory(prefix="tkw-") as path:
        yield Path(path)


@pytest.fixture(scope="module")
def server(folder: Path, random_llama_dir: Path) -> Iterator[Server]:
    """The small model with DRAM and disk, whose stats socket takes commands."""
    config = tiers("64MiB", disk(folder / "kv"), stats={"control": True})
    transfer = {
        "kv_connector": "TierKVConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": config,
    }
    arguments = [
        *(str(random_llama_dir), "--served-model-name", "small", "--dtype", "float32"),
        *("--enforce-eager", "--block-size", str(BLOCK), "--max-model-len", "1024"),
        *("--num-gpu-blocks-override", "100", "--kv-cache-memory-bytes", str(1 << 30)),
        *("--enable-prompt-tokens-details", "--kv-transfer-config", json.dumps(transfer)),
    ]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMP_NUM_THREADS", "1")
        patch.setenv("VLLM_SERVER_DEV_MODE", "1")  # for `/reset_prefix_cache`
        patch.setenv("XDG_RUNTIME_DIR", str(folder))  # where the stats socket is
        server = Server("warm", arguments, port=free_port(), folder=folder, log=folder / "log")
        server.start()
        try:
            server.wait_ready()
            yield server
        finally:
            server.stop(10.0)


def forget(server: Server) -> None:
    """Empty vLLM's own prefix cache."""
    with httpx.Client(trust_env=False, timeout=600.0) as client:
        done = client.post(f"{server.url}/reset_prefix_cache")
        assert done.status_code == httpx.codes.OK


def wait_until(condition: Callable[[], bool]) -> None:
    """Return when `condition` holds; one that never does is ended by pytest-timeout."""
    tick = threading.Event()
    while not condition():
        tick.wait(0.1)


def test_a_cache_is_filled_looked_at_and_purged_beside_its_engine(
    server: Server, folder: Path, random_llama_dir: Path, capsys: Captured
) -> None:
    def read(*arguments: str, code: int = 0) -> Any:
        assert run([*arguments, "--json"]) == code, capsys.readouterr().err
        return json.loads(capsys.readouterr().out)

    texts, path = Texts(random_llama_dir), str(folder / "kv")
    prompts = [texts(170 + number, LENGTH) for number in range(PROMPTS)]
    file = folder / "prompts.jsonl"
    file.write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in prompts))

    cold = read("warm", str(file), "--url", server.url)
    assert (cold["prompts"], cold["prompt_tokens"]) == (PROMPTS, PROMPTS * LENGTH)
    assert cold["cached_tokens"] == 0
    forget(server)
    warm = read("warm", str(file), "--url", server.url)
    assert warm["cached_tokens"] == PROMPTS * hit(LENGTH)

    # Written to disk a little later than answered.
    wait_until(lambda: read("ls", "--path", path)["namespaces"][0]["chunks"] == PROMPTS * CHUNKS)
    listed = read("ls", "--path", path)
    assert listed["places"][0]["in_use_by"]
    [space] = listed["namespaces"]
    assert (space["model"], space["about"]["dtype"]) == ("small", "float32")
    assert space["tokens"] == PROMPTS * CHUNKS * CHUNK
    checked = read("verify", "--path", path)
    assert (checked["ok"], checked["chunks"]) == (True, PROMPTS * CHUNKS)

    chunks = read("ls", "small", "--path", path)["chunks"]
    stored = {chunk["key"] for chunk in chunks}
    first = next(chunk["key"] for chunk in chunks if chunk["parent"] not in stored)
    [found] = read("inspect", first, "--path", path, "--tokens")["chunks"]
    [mine] = [prompt for prompt in prompts if prompt[:CHUNK] == found["token_ids"]]

    # The engine forgets the whole text, and no other.
    purged = read("purge", "--key", first, "--path", path, "--yes")
    assert [target["chunks"] for target in purged["targets"]] == [CHUNKS]
    forget(server)
    file.write_text(json.dumps({"prompt": mine}) + "\n")
    assert read("warm", str(file), "--url", server.url)["cached_tokens"] == 0
    forget(server)
    others = [prompt for prompt in prompts if prompt is not mine]
    file.write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in others))
    again = read("warm", str(file), "--url", server.url)
    assert again["cached_tokens"] == len(others) * hit(LENGTH)

    assert server.stop()
    assert read("ls", "--path", path)["places"][0]["in_use_by"] is None
    assert read("verify", "--path", path)["ok"]
    assert run(["purge", "--all", "--path", path, "--yes"]) == 0
    capsys.readouterr()
    assert read("ls", "--path", path)["namespaces"] == []
