# SPDX-License-Identifier: Apache-2.0
"""Two engines behind one `vllm serve`, each with a cache of its own and both on one page."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.engine.engines import BLOCK, CPUS, Reference, hit, tiers
from tests.engine.prompts import Texts
from tests.engine.test_http import ask, forget, metrics, total, wait_until
from tierkv.demo.ports import free_port
from tierkv.demo.server import Server

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def two_engines(random_llama_dir: Path) -> Iterator[Server]:
    transfer = {
        "kv_connector": "TierKVConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": tiers("64MiB"),
    }
    arguments = [
        *(str(random_llama_dir), "--served-model-name", "small", "--dtype", "float32"),
        *("--enforce-eager", "--block-size", str(BLOCK), "--max-model-len", "1024"),
        *("--num-gpu-blocks-override", "100", "--kv-cache-memory-bytes", str(1 << 28)),
        *("--max-num-batched-tokens", "256", "--enable-prompt-tokens-details"),
        *("--data-parallel-size", "2", "--kv-transfer-config", json.dumps(transfer)),
    ]
    environment = {
        "OMP_NUM_THREADS": "1",
        "VLLM_SERVER_DEV_MODE": "1",
        # A list of CPUs for each engine: with one for all, vLLM ends.
        "VLLM_CPU_OMP_THREADS_BIND": f"{CPUS[0]}|{CPUS[-1]}",
    }
    with tempfile.TemporaryDirectory(prefix="tkd-") as folder:
        path = Path(folder)
        server = Server(
            "two",
            arguments,
            port=free_port(),
            folder=path,
            log=path / "log",
            environment=environment,
        )
        server.start()
        try:
            server.wait_ready()
            yield server
        finally:
            server.stop(10.0)


@pytest.mark.feature("data parallel 2")
def test_two_engines_behind_one_server_answer_alike(
    two_engines: Server, small_reference: Reference, texts: Texts
) -> None:
    prompts = [texts(160, 600), texts(163, 300), texts(165, 420), texts(166, 420)]
    right = small_reference.tokens(prompts)
    hits = 0
    for _ in range(4):
        answers = [ask(two_engines, prompt) for prompt in prompts]
        assert [tokens for tokens, _ in answers] == right
        for prompt, (_, cached) in zip(prompts, answers, strict=True):
            assert cached in (0, hit(len(prompt)))
            hits += cached
        forget(two_engines)
    # Each engine computes a prompt once at most.
    assert hits >= 2 * sum(hit(len(prompt)) for prompt in prompts)
    wait_until(
        lambda: total(metrics(two_engines)["tierkv_query_tokens_total"], outcome="hit") == hits
    )
    page = metrics(two_engines)
    for name in ("tierkv_query_tokens_total", "tierkv_chunks"):
        assert {labels["engine"] for labels, _ in page[name]} == {"0", "1"}
        # Each series once, though two API servers write it.
        series = [tuple(sorted(labels.items())) for labels, _ in page[name]]
        assert len(series) == len(set(series))
        assert not any("pid" in labels for labels, _ in page[name])
