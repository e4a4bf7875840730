# SPDX-License-Identifier: Apache-2.0
"""What Redis does to serving: real engines over HTTP, one real redis-server, killed now and then.

    python benchmarks/redis_serving.py --json redis_serving.json

1. Time to the first token of a hit in Redis over that of the same hit in DRAM (budget 1.8): one
   engine computes, another one loads each document from Redis and then from DRAM, when all of its
   DRAM tier has been in use once. `redis_first_over_dram` is the same while that memory is taken
   from the machine. On the shared machines that this runs on, memory that nobody touched for a
   second is slow the next time, for any program, so another client reads the values of each
   document in Redis just before; not for `redis_first_over_dram`.
2. With Redis stopped, DRAM hits over those of an engine without Redis (budget 1.03), in turns.
3. 200 requests to an engine whose DRAM is too small, while Redis is killed and started, also in
   the middle of requests: every one must succeed with the answer that was computed at first. In
   float32, so that rounding decides no answer.
4. A lookup of 2,000 chunks in the scheduler's thread with Redis up, stopped, stalled and stalling
   in the middle of it, over its budget of 2 ms. Also with the first chunk in Redis and all others
   in DRAM (`hole`), and polls while 2,000 writes wait in vain (`writes`). Without an engine; the
   longest of all calls, by the thread's own time; `control` is the longest of as many calls of a
   loop of half a millisecond that has nothing to do with TierKV.

vLLM's own prefix cache is emptied before every measured request.
"""
# ruff: noqa: E402

from __future__ import annotations

import sys
from pathlib import Path

# `redis.py` beside this file is called like a package that is needed: not from this folder.
sys.path[0] = str(Path(__file__).resolve().parent.parent)

import argparse
import gc
import json
import logging
import os
import random
import signal
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import asdict, dataclass
from threading import Timer
from typing import Any

import httpx
from redis import Redis

from benchmarks.redis_rig import Engine, ProxyThread, Texts, opened
from tests.redis_kit import RedisServer, until
from tierkv.config.redis import RedisConfig
from tierkv.demo.client import Answer, Client
from tierkv.demo.figures import Spread
from tierkv.demo.model import prepare_model
from tierkv.demo.phases import GROUP, QUIET_S, Host
from tierkv.demo.plan import BLOCK_TOKENS, tierkv_arguments, vllm_arguments
from tierkv.demo.ports import free_port
from tierkv.demo.server import Server
from tierkv.demo.workload import build_documents
from tierkv.pages.layout import SlotLayout
from tierkv.store.breaker import State
from tierkv.testing.proxy import timeout

ANSWER_TOKENS = 8
BLOCKS = 64
"""Of vLLM's own KV space."""
LONG, SHORT = 16, 4
"""Whole blocks in a document of parts 1 and 2, and of part 3."""
DOCUMENTS = 24
"""Of part 1; part 2 has half of them."""
RUN = 4
"""So many documents in a row come from one tier in part 1; the first of them is not counted."""
ROUNDS = 3
"""How often each is asked for in part 2."""
REQUESTS = 200
TURNS = 0.12
"""Chance that Redis is killed or started with a request of part 3."""
CHUNKS = 2000
BUDGET_MS = 2.0
REPEATS = 9
CONTROL = 40_000
"""Numbers added up in about half a millisecond."""
SEED = 11
STARTED = time.monotonic()


@dataclass(frozen=True, slots=True)
class Prompts:
    """Two questions about each document."""

    first: list[str]
    second: list[str]

    def last_half(self) -> Prompts:
        half = len(self.first) // 2
        return Prompts(self.first[half:], self.second[half:])


class Servers:
    """Starts engines that share one Redis."""

    def __init__(self, folder: Path, redis: RedisServer, stack: ExitStack) -> None:
        self._folder = folder
        self._redis = redis
        self._stack = stack
        self._model = prepare_model(print)

    def start(self, name: str, dram: str, *more: str, shared: bool = True) -> Host:
        """An engine that has begun to start; `wait_ready` is the caller's."""
        tiers: list[dict[str, Any]] = [{"type": "dram", "capacity": dram}]
        if shared:
            tiers.append({"type": "redis", "url": self._redis.url})
        config = self._folder / f"{name}.yaml"
        key = {"env": "BENCHMARK_KEY"}
        config.write_text(json.dumps({"version": 1, "key_secret": key, "tiers": tiers}))
        arguments = [*vllm_arguments(self._model, BLOCKS), *more, *tierkv_arguments(config)]
        server = Server(
            name,
            arguments,
            port=free_port(),
            folder=self._folder,
            log=self._folder / f"{name}.log",
        )
        self._stack.enter_context(server)
        server.start()
        return Host(server, self._stack.enter_context(closing(Client(server))))


def make_prompts(host: Host, count: int, blocks: int) -> Prompts:
    documents = build_documents(
        host.client.count_tokens,
        count=count,
        cached_tokens=blocks * BLOCK_TOKENS,
        block_tokens=BLOCK_TOKENS,
        answer_tokens=ANSWER_TOKENS,
    )
    first, second = ([document.prompt(q) for document in documents] for q in (0, 1))
    return Prompts(first, second)


def ask(host: Host, prompt: str) -> Answer:
    """Ask, with vLLM's own prefix cache empty."""
    with httpx.Client(trust_env=False, timeout=60.0) as client:
        client.post(f"{host.server.url}/reset_prefix_cache").raise_for_status()
    return host.client.ask(prompt, ANSWER_TOKENS)


def hits(host: Host, tier: str) -> int:
    return host.client.counters().hit_tokens.get(tier, 0)


def ratio(above: Sequence[Answer], below: Sequence[Answer]) -> Spread:
    return Spread.of([a.ttft_s / b.ttft_s for a, b in zip(above, below, strict=True)])


def milliseconds(answers: Sequence[Answer]) -> Spread:
    return Spread.of([answer.ttft_s * 1e3 for answer in answers])


@dataclass(slots=True)
class Report:
    """What is measured: ratios with a budget, and figures without one."""

    ratios: dict[str, Spread]
    figures: dict[str, Any]


def from_redis_and_from_dram(
    first: Host, second: Host, redis: RedisServer, prompts: Prompts, report: Report
) -> None:
    """Part 1."""
    answers: dict[str, list[Answer]] = {"computed": [], "redis_first": [], "redis": [], "dram": []}
    values: list[set[str]] = []  # of each document
    for prompt in prompts.first:
        answers["computed"].append(ask(first, prompt))
        until(lambda: len(redis.names()) == LONG * len(answers["computed"]))
        values.append(set(redis.names()).difference(*values))
    time.sleep(QUIET_S)
    with Redis.from_url(redis.url) as client:

        def run(name: str, documents: Iterable[int], *, touch: bool = True) -> None:
            for at in documents:
                if touch:
                    for value in values[at]:
                        client.get(value)
                answers[name].append(ask(second, prompts.first[at]))

        half = len(prompts.first) // 2
        run("redis_first", range(half), touch=False)
        for begin in range(half, len(prompts.first), RUN):
            run("redis", range(begin, begin + RUN))
            run("dram", range(begin, begin + RUN))
    tokens = LONG * BLOCK_TOKENS
    assert (hits(second, "redis"), hits(second, "dram")) == (2 * half * tokens, half * tokens)
    assert all(a.same_as(b) for a, b in zip(answers["redis"], answers["dram"], strict=True))
    assert all(
        a.same_as(b)
        for a, b in zip(answers["redis_first"] + answers["redis"], answers["computed"], strict=True)
    )
    figures = report.figures["ttft_ms"] = {}
    for name, those in answers.items():
        del those[::RUN]  # the first one after a change is slower
        figures[name] = asdict(milliseconds(those))
    report.ratios["redis_over_dram"] = ratio(answers["redis"], answers["dram"])
    report.ratios["redis_first_over_dram"] = ratio(answers["redis_first"], answers["dram"])
    computed = answers["computed"][-len(answers["redis"]) :]
    report.ratios["computed_over_redis"] = ratio(computed, answers["redis"])


def with_redis_stopped(shared: Host, alone: Host, prompts: Prompts, report: Report) -> None:
    """Part 2. Both hold all documents in DRAM."""
    pairs: dict[str, list[Answer]] = {"shared": [], "alone": []}
    order = [("shared", shared), ("alone", alone)]
    for _ in range(ROUNDS):
        for begin in range(0, len(prompts.second), GROUP):
            for name, host in order:
                time.sleep(QUIET_S)
                group = prompts.second[begin : begin + GROUP]
                ask(host, group[0])  # the first one after a pause is slower
                pairs[name] += [ask(host, prompt) for prompt in group]
            order.reverse()
    for answers in pairs.values():
        assert {answer.cached_tokens for answer in answers} == {LONG * BLOCK_TOKENS}
    report.ratios["stopped_over_without"] = ratio(pairs["shared"], pairs["alone"])
    report.figures["ttft_ms"] |= {
        "dram_redis_stopped": asdict(milliseconds(pairs["shared"])),
        "dram_without_redis": asdict(milliseconds(pairs["alone"])),
    }


def kills_and_restarts(host: Host, redis: RedisServer, report: Report) -> None:
    """Part 3. A request that fails raises."""
    prompts = make_prompts(host, 14, SHORT)
    right = [ask(host, prompt) for prompt in prompts.first]
    assert not any(answer.cached_tokens for answer in right)
    before, dice = host.client.counters(), random.Random(SEED)
    kills, wrong, is_up = 0, 0, True
    answers = []
    for _ in range(REQUESTS):
        turn = None
        if dice.random() < TURNS:
            kills += is_up
            turn = Timer(dice.uniform(0.0, 0.05), redis.kill if is_up else redis.start)
            turn.start()
            is_up = not is_up
        number = dice.randrange(len(right))
        answers.append(ask(host, prompts.first[number]))
        wrong += not answers[-1].same_as(right[number])
        if turn is not None:
            turn.join()
    if not is_up:
        redis.start()
    since = host.client.counters().since(before)
    report.figures["kills_and_restarts"] = {
        "seed": SEED,
        "requests": len(answers),
        "failed": REQUESTS - len(answers),
        "wrong_answers": wrong,
        "kills": kills,
        "prompt_tokens": since.prompt_tokens,
        "hit_tokens": dict(since.hit_tokens),
        "ttft_ms": asdict(milliseconds(answers)),
        "slowest_ttft_ms": max(answer.ttft_s for answer in answers) * 1e3,
        "slowest_computed_ttft_ms": max(answer.ttft_s for answer in right) * 1e3,
    }


# -- part 4 --------------------------------------------------------------------------------------


class Longest:
    """The longest of some calls in ms, by this thread's time and by the wall."""

    def __init__(self) -> None:
        self.thread = 0.0
        self.wall = 0.0

    def of(self, call: Callable[[], Any]) -> Any:
        wall, thread = time.perf_counter(), time.thread_time()
        result = call()
        self.thread = max(self.thread, (time.thread_time() - thread) * 1e3)
        self.wall = max(self.wall, (time.perf_counter() - wall) * 1e3)
        return result


def one_lookup(engine: Engine, chunks: Sequence[Any], control: Longest) -> tuple[Longest, int]:
    """A request as the scheduler sees it; also how many chunks it got.

    Args:
        control: of a loop of half a millisecond that has nothing to do with TierKV: what the
            machine adds to calls that were made in between.
    """
    store, longest = engine.store, Longest()
    longest.of(lambda: store.prefetch(chunks))
    ticket = longest.of(lambda: store.load(chunks))
    while not longest.of(ticket.poll):
        time.sleep(0.002)  # the engine computes, and the I/O loop gets its turn
        longest.of(store.poll)
        control.of(lambda: sum(range(CONTROL)))
    ticket.release()
    return longest, ticket.ready


def lookups(folder: Path, report: Report) -> None:
    """Part 4."""
    layout = SlotLayout(chunk_tokens=64, block_tokens=16, block_bytes=1024)
    texts = Texts(layout, CHUNKS)
    calls: dict[str, list[Longest]] = {}
    control = Longest()
    found: Counter[str] = Counter()

    def measure(
        engine: Engine, state: str, name: str, before: Callable[[], None] = lambda: None
    ) -> None:
        # As vLLM does once an engine has started: what lives on is not gone over again and again.
        gc.collect()
        gc.freeze()
        for repeat in range(-1, REPEATS):
            before()
            longest, ready = one_lookup(engine, texts("dram" if name == "hole" else name), control)
            # The first is not counted: it brings code into memory that never ran yet.
            if repeat >= 0:
                calls.setdefault(f"{state}_{name}", []).append(longest)
                found[f"{state}_{name}"] += ready
            if name == "redis":
                engine.store._dram.forget_all()

    def fill_dram(engine: Engine) -> None:
        while engine.request("dram").rest:
            pass  # what came too late is there the next time

    def fill_redis(engine: Engine) -> None:
        engine.request("redis")
        assert engine.store.drain(30)
        engine.store._dram.forget_all()

    def give_up_writes(engine: Engine, name: str) -> Longest:
        engine.compute(name)
        lower, longest = engine.store._lowers[0], Longest()
        waiting = lower.writer.pending
        assert len(waiting) == CHUNKS
        while len(waiting) > lower.config.reads_at_once:  # what is under way stays
            time.sleep(0.002)
            longest.of(engine.store.poll)
        return longest

    with RedisServer(folder) as redis, ProxyThread(redis.port) as proxy:
        config = RedisConfig(url=proxy.url, load_deadline=5.0, probe_after=0.2)
        slots = 4 * CHUNKS + 100
        # On a shared machine, code that did not run for a second takes ten times as long the next
        # time, whatever it does: so where there is a deadline to wait for, it comes soon.
        hasty = config.model_copy(update={"load_deadline": 0.05, "save_deadline": 0.05})
        with opened(Engine(texts, slots, hasty)) as engine:

            def from_redis() -> bool:
                served = engine.request("redis")
                engine.store._dram.forget_all()
                lower = engine.store._lowers[0]
                is_well = lower.breaker.state is State.CLOSED and not lower.writer.pending
                return is_well and served.sources == {"redis"}

            def heal_and_stall() -> None:
                proxy.toxics()
                until(from_redis)
                proxy.toxics(timeout(stream="both"))

            fill_redis(engine)
            measure(engine, "stalling", "redis", heal_and_stall)
            for repeat in range(-1, REPEATS):
                heal_and_stall()
                longest = give_up_writes(engine, f"written {repeat}")
                if repeat >= 0:
                    calls.setdefault("stalling_writes", []).append(longest)
            heal_and_stall()
            fill_dram(engine)
            measure(engine, "stalled", "dram")
            measure(engine, "stalled", "redis")
            proxy.toxics()
        with opened(Engine(texts, slots, config)) as engine:
            fill_redis(engine)
            fill_dram(engine)
            measure(engine, "up", "dram")
            assert engine.store.drain(30)
            measure(engine, "up", "redis")
            fill_dram(engine)
            measure(engine, "up", "hole", lambda: engine.store._dram.forget(texts("dram")[0].key))
            redis.kill()
            measure(engine, "stopped", "dram")
            measure(engine, "stopped", "redis")
    whole = ("up_dram", "up_redis", "up_hole", "stalled_dram", "stopped_dram")
    assert {found[state] for state in whole} == {REPEATS * CHUNKS}
    report.figures["chunks_found"] = dict(found)
    for name, longest in calls.items():
        shares = [call.thread / BUDGET_MS for call in longest]
        report.ratios[f"lookup_over_budget_{name}"] = Spread.of(shares)
    report.figures["longest_call_ms"] = {
        name: {"thread": max(c.thread for c in longest), "wall": max(c.wall for c in longest)}
        for name, longest in [*calls.items(), ("control", [control])]
    }


def stage(text: str) -> None:
    print(f"[{time.monotonic() - STARTED:5.0f} s] {text}", file=sys.stderr, flush=True)


@contextmanager
def workplace() -> Iterator[tuple[Path, ExitStack]]:
    with ExitStack() as stack:
        yield Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="tierkv-"))), stack


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path)
    parser.add_argument("--lookups", action="store_true", help="part 4 alone")
    arguments = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # which stops what was started
    os.environ |= {"BENCHMARK_KEY": "benchmark", "VLLM_SERVER_DEV_MODE": "1"}
    logging.getLogger("tierkv").setLevel(logging.CRITICAL)  # of Redis it complains, and rightly
    report = Report({}, {})
    with workplace() as (folder, stack):
        if not arguments.lookups:
            stage("starting two engines")
            redis = stack.enter_context(RedisServer(folder / "redis"))
            servers = Servers(folder, redis, stack)
            first = servers.start("first", "2GiB")
            second = servers.start("second", "590MiB")  # half of the documents
            for host in (first, second):
                host.server.wait_ready()
            prompts = make_prompts(first, DOCUMENTS, LONG)
            stage("from Redis and from DRAM")
            from_redis_and_from_dram(first, second, redis, prompts, report)
            first.server.stop(5.0)
            stage("starting an engine without Redis")
            alone = servers.start("alone", "2GiB", shared=False)
            alone.server.wait_ready()
            held = prompts.last_half()
            for prompt in held.first:
                ask(alone, prompt)
            redis.stop()
            stage("with Redis stopped, and without it")
            with_redis_stopped(second, alone, held, report)
            for host in (second, alone):
                host.server.stop(5.0)
            redis.start()
            stage("starting a small engine")
            small = servers.start("small", "150MiB", "--dtype", "float32")
            small.server.wait_ready()
            stage("kills and restarts")
            kills_and_restarts(small, redis, report)
            small.server.stop(5.0)
        stage("lookups")
        lookups(folder / "lookups", report)
    for name, spread in report.ratios.items():
        print(f"{name:36s} {spread.median:6.3f} ± {spread.spread:.3f}  ({spread.repeats} repeats)")
    print(json.dumps(report.figures, indent=2))
    if arguments.json:
        result = {
            "benchmark": "redis_serving",
            "ratios": {name: asdict(spread) for name, spread in report.ratios.items()},
            "figures": report.figures,
        }
        arguments.json.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
