# SPDX-License-Identifier: Apache-2.0
"""Two `vllm serve` and one redis-server: what the first engine computes the second one loads.

    python examples/shared_redis/run.py

Starts all three on loopback, on free ports, and stops them at the end.
"""

from __future__ import annotations

import os
import secrets
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path

from redis import Redis

from tierkv.demo.client import Client
from tierkv.demo.figures import Spread
from tierkv.demo.model import prepare_model
from tierkv.demo.phases import QUIET_S, Host
from tierkv.demo.plan import (
    BLOCK_TOKENS,
    BLOCKS_CACHED,
    small_space,
    tierkv_arguments,
    vllm_arguments,
)
from tierkv.demo.ports import free_port
from tierkv.demo.server import Server
from tierkv.demo.workload import build_documents

CONFIG = Path(__file__).resolve().parent / "tierkv.yaml"
DOCUMENTS = 7
"""Asked about; the first one warms both engines up."""
ANSWER_TOKENS = 16


@contextmanager
def redis_server(port: int, folder: Path) -> Iterator[Redis]:
    """A redis-server set up as a cache should be, and a connection to it."""
    where = ["--port", str(port), "--bind", "127.0.0.1", "--dir", str(folder)]
    limits = ["--save", "", "--maxmemory", "2gb", "--maxmemory-policy", "allkeys-lru"]
    process = subprocess.Popen(["redis-server", *where, *limits], stdout=subprocess.DEVNULL)
    try:
        with Redis(port=port) as client:
            yield client
    finally:
        process.terminate()
        process.wait()


@contextmanager
def engine(name: str, model: Path, folder: Path) -> Iterator[Host]:
    """A `vllm serve` with TierKV that has begun to start."""
    # In float32 rounding does not change an answer. In bfloat16 it may: a prompt whose beginning
    # is loaded is computed in other pieces than a prompt that is computed whole.
    arguments = [*vllm_arguments(model, small_space()), "--dtype", "float32"]
    arguments += tierkv_arguments(CONFIG)
    server = Server(name, arguments, port=free_port(), folder=folder, log=folder / f"{name}.log")
    with server, closing(Client(server)) as client:
        server.start()
        yield Host(server, client)


def compare(first: Host, second: Host, redis: Redis) -> bool:
    """Ask both engines the same; print what came of it; whether it is as it should be."""
    documents = build_documents(
        first.client.count_tokens,
        count=DOCUMENTS,
        cached_tokens=BLOCKS_CACHED * BLOCK_TOKENS,
        block_tokens=BLOCK_TOKENS,
        answer_tokens=ANSWER_TOKENS,
    )
    prompts = [document.prompt(0) for document in documents]

    computed = [first.client.ask(prompt, ANSWER_TOKENS) for prompt in prompts]
    while len(redis.keys("tierkv:*:*:*:*")) < DOCUMENTS * BLOCKS_CACHED:
        time.sleep(0.1)  # chunks, a key each, go to Redis in the background
    time.sleep(QUIET_S)
    loaded = [second.client.ask(prompt, ANSWER_TOKENS) for prompt in prompts]

    print(f"{'engine':8} {'TTFT':>10} {'spread':>8}   hit tokens by tier")
    for host, answers in ((first, computed), (second, loaded)):
        ttft = Spread.of([answer.ttft_s * 1e3 for answer in answers[1:]])
        hits = {tier: n for tier, n in host.client.counters().hit_tokens.items() if n}
        told = ", ".join(f"{tier} {tokens:,}" for tier, tokens in hits.items()) or "none: computed"
        print(f"{host.server.name:8} {ttft.median:7.0f} ms {ttft.spread:5.0f} ms   {told}")
    pairs = list(zip(computed, loaded, strict=True))
    gain = Spread.of([a.ttft_s / b.ttft_s for a, b in pairs[1:]])
    same = sum(a.same_as(b) for a, b in pairs)
    print(f"computing ÷ loading: {gain.median:.1f} (spread {gain.spread:.1f})")
    print(f"identical answers: {same} of {len(pairs)}")

    redis.shutdown(nosave=True)
    again = second.client.ask(documents[1].prompt(1), ANSWER_TOKENS)
    print(f"Redis stopped, another question: answered in {again.ttft_s * 1e3:.0f} ms")
    return same == len(pairs) and hits == {"redis": sum(a.cached_tokens for a in loaded)}


def main() -> None:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # which stops what was started
    model = prepare_model(print)
    port = free_port()
    # What the configuration takes from the environment.
    os.environ["REDIS_URL"] = f"redis://127.0.0.1:{port}/0"
    os.environ["SHARED_CACHE_KEY"] = secrets.token_hex()
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="tierkv-")))
        redis = stack.enter_context(redis_server(port, folder))
        hosts = [stack.enter_context(engine(name, model, folder)) for name in ("first", "second")]
        print("Starting two engines")
        for host in hosts:
            host.server.wait_ready()
        if not compare(*hosts, redis):
            sys.exit("the second engine did not load what the first has computed")


if __name__ == "__main__":
    main()
