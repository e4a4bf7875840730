# SPDX-License-Identifier: Apache-2.0
"""What looking costs: counters, the log of requests, a stats socket read once a second.

    python benchmarks/telemetry.py --json telemetry.json
    python benchmarks/telemetry.py --engine DIR --json telemetry.json

The first measures the scheduler's own time: settling a request (the fate of every token, the
reasons of its misses, its record), one snapshot, and one call of `publish` in a step that is not
due. The second runs `vllm serve` on the model in DIR and answers the same prompts with nobody
connected and with a reader as `tierkv top` is one, `--hertz` times a second, by turns; its ratio is
the time with over the time without, minus one. The bound is 0.01 at one look a second; more looks
show more above the noise of a machine.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from random import Random
from typing import Any

from tierkv.keys import ChunkChain, Namespace
from tierkv.pages.layout import SlotLayout
from tierkv.stats.publisher import INTERVAL, Publisher
from tierkv.stats.source import SocketSource
from tierkv.store import Context, Store
from tierkv.telemetry.requests import Part, RequestLog, RequestRecord

LAYOUT = SlotLayout(chunk_tokens=64, block_tokens=16, block_bytes=1024)
BOUND = 0.01


def timed(action: Callable[[], object], times: int) -> float:
    """Median seconds of one call, over five rounds."""
    rounds = []
    for _ in range(5):
        began = time.thread_time()
        for _ in range(times):
            action()
        rounds.append((time.thread_time() - began) / times)
    return statistics.median(rounds)


def scheduler_costs() -> dict[str, float]:
    """Seconds of the scheduler's thread."""
    from tierkv.config.models import DramConfig, TierKVConfig

    store = Store(TierKVConfig(tiers=(DramConfig(capacity=64 << 20),)), Context())
    namespace = Namespace({"model": "benchmark"})
    store.open(namespace, LAYOUT)
    chain = ChunkChain(namespace.scope(), LAYOUT.chunk_tokens)
    chain.extend(range(32_768))
    log = RequestLog()
    part = Part("hit", "dram", "", 2048)
    record = RequestRecord("cmpl-0", 0.0, 2048, 0, (part,) * 3)
    for _ in range(600):
        log.add(record)
    add, count = store.context.counters.add, "tierkv_query_tokens_total"

    def settle() -> None:
        for _ in range(3):
            add(count, 64, outcome="hit", tier="dram", reuse="exact")
        store.why_missing(chain.chunks[:32])
        log.add(RequestRecord("cmpl-0", time.time(), 2048, 0, (part, part, part)))

    publisher = Publisher(store.snapshot, log.copy)
    publisher.publish(idle=False)
    try:
        return {
            "settle_request_2048_missed_tokens": timed(settle, 500),
            "why_missing_32768_tokens": timed(lambda: store.why_missing(chain.chunks), 20),
            "snapshot": timed(lambda: (store.snapshot(), log.copy()), 200),
            "publish_when_not_due": timed(lambda: Publisher.publish(publisher, idle=False), 1000),
        }
    finally:
        store.close()


@contextmanager
def reader(source: SocketSource, hertz: float) -> Iterator[None]:
    """As `tierkv top` looks, so many times a second."""
    stop = threading.Event()

    def look() -> None:
        while not stop.wait(1 / hertz):
            source.read(200)

    thread = threading.Thread(target=look, name="reader")
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


def engine_cost(model: Path, rounds: int, hertz: float) -> dict[str, Any]:
    """The same work with and without a reader, by turns."""
    import os

    import httpx

    from tierkv.demo.ports import free_port
    from tierkv.demo.server import Server
    from tierkv.stats import client

    rng = Random(1)
    transfer = {
        "kv_connector": "TierKVConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"tiers": [{"type": "dram", "capacity": "512MiB"}]},
    }
    with tempfile.TemporaryDirectory(prefix="tkb-") as short:
        os.environ["XDG_RUNTIME_DIR"] = short
        folder = Path(short) / "s"
        folder.mkdir()
        arguments = [
            *(str(model), "--served-model-name", "m", "--max-model-len", "2048", "--enforce-eager"),
            *("--kv-cache-memory-bytes", str(1 << 30), "--max-num-seqs", "8"),
            *("--no-enable-prefix-caching", "--kv-transfer-config", json.dumps(transfer)),
        ]
        server = Server("bench", arguments, port=free_port(), folder=folder, log=Path(short) / "l")
        with server, httpx.Client(trust_env=False, timeout=300.0) as web:
            server.start()
            server.wait_ready()

            def work(seed: int) -> float:
                prompts = [[rng.randrange(100, 4000) for _ in range(300)] for _ in range(4)]
                body = {"model": "m", "prompt": prompts, "max_tokens": 60, "ignore_eos": True}
                began = time.perf_counter()
                web.post(f"{server.url}/v1/completions", json={**body, "seed": seed})
                return time.perf_counter() - began

            work(0)
            source = SocketSource(client.engines()[0])
            without, with_reader = [], []
            for turn in range(rounds):
                # ABBA, so that a drift of the machine meets both alike.
                for watched in ((False, True), (True, False))[turn % 2]:
                    if watched:
                        with reader(source, hertz):
                            with_reader.append(work(turn))
                    else:
                        without.append(work(turn))
                print(f"{turn}: {without[-1]:.2f} s, read {with_reader[-1]:.2f} s", flush=True)
            source.close()
    ratios = [a / b - 1 for a, b in zip(with_reader, without, strict=True)]
    return {
        "rounds": rounds,
        "looks_a_second": hertz,
        "seconds_without": statistics.median(without),
        "seconds_with": statistics.median(with_reader),
        "cost": statistics.median(ratios),
        "spread": statistics.stdev(ratios) if rounds > 1 else None,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path)
    parser.add_argument("--engine", type=Path, metavar="DIR", help="model to serve as well")
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--hertz", type=float, default=1.0, help="looks a second; 1 is top's own")
    options = parser.parse_args()
    costs = scheduler_costs()
    share = costs["snapshot"] / INTERVAL
    result: dict[str, Any] = {"seconds": costs, "snapshot_share_of_a_core": share, "bound": BOUND}
    for name, seconds in costs.items():
        print(f"{name:36} {1e6 * seconds:9.1f} us")
    print(f"{'snapshots, share of a core':36} {100 * share:9.3f} %")
    if options.engine is not None:
        result["engine"] = engine_cost(options.engine, options.rounds, options.hertz)
        print(json.dumps(result["engine"], indent=2))
    if options.json is not None:
        options.json.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
