# SPDX-License-Identifier: Apache-2.0
"""Servers and requests that the benchmarks of any-text reuse share."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from tierkv.demo.client import MODEL, Answer, Client
from tierkv.demo.plan import tierkv_arguments
from tierkv.demo.ports import free_port
from tierkv.demo.server import Server

LEAST_BLENDED = 0.95
CONFIG = """\
version: 1
blend: {mode: %s, exact_after: 0}
tiers:
  - {type: dram, capacity: 3GiB}
"""


def serve(stack: ExitStack, name: str, model: Path, folder: Path, *, mode: str | None) -> Client:
    """A running `vllm serve`.

    Args:
        mode: of `blend`; None is vLLM without TierKV.
    """
    arguments = [
        str(model), "--served-model-name", MODEL, "--enforce-eager", "--block-size", "128",
        "--max-model-len", "8192", "--max-num-batched-tokens", "8192", "--max-num-seqs", "4",
        "--kv-cache-memory-bytes", str(1 << 30), "--num-gpu-blocks-override", "140",
        "--enable-prompt-tokens-details",
    ]  # fmt: skip
    if mode is not None:
        config = folder / f"{name}.yaml"
        config.write_text(CONFIG % mode)
        arguments += tierkv_arguments(config)
    server = Server(name, arguments, port=free_port(), folder=folder, log=folder / f"{name}.log")
    stack.enter_context(server)
    server.start()
    server.wait_ready()
    client = Client(server)
    stack.callback(client.close)
    return client


def blended_share(client: Client, asked: int) -> float:
    """How many of the prompts that were to be blended were.

    Raises:
        SystemExit: so few that what was measured is something else, vLLM's own cache perhaps.
    """
    served = sum(
        int(sample.value)
        for family in text_string_to_metric_families(client.metrics())
        for sample in family.samples
        if sample.name == "tierkv_blend_requests_total" and sample.labels["outcome"] == "served"
    )
    if served < LEAST_BLENDED * asked:
        raise SystemExit(
            f"only {served} of {asked} prompts were blended, so this compares nothing: see "
            "tierkv_blend_declined_total for why"
        )
    return served / asked


def ask(
    client: Client, tokens: list[int], options: dict[str, Any] | None = None, answer: int = 4
) -> Answer:
    """Greedy continuation by `answer` tokens; `options` are TierKV's, of this request."""
    body = {
        "model": MODEL, "prompt": tokens, "max_tokens": answer, "ignore_eos": True,
        "temperature": 0, "stream": True, "stream_options": {"include_usage": True},
        "return_token_ids": True, "kv_transfer_params": {"tierkv": options or {}},
    }  # fmt: skip
    return client.stream(body)
