# SPDX-License-Identifier: Apache-2.0
"""Two `vllm serve` on one Redis, set up as `examples/shared_redis` does it."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, closing
from pathlib import Path

import httpx
import pytest

from tests.engine.engines import ANSWER, Reference
from tests.engine.prompts import Texts
from tests.redis_kit import RedisServer, needs_redis, until
from tierkv.demo.client import Answer, Client
from tierkv.demo.phases import Host
from tierkv.demo.plan import BLOCK_TOKENS, tierkv_arguments, vllm_arguments
from tierkv.demo.ports import free_port
from tierkv.demo.server import Server

pytestmark = [pytest.mark.engine, pytest.mark.timeout(900), needs_redis]

CONFIG = Path(__file__).parents[2] / "examples/shared_redis/tierkv.yaml"
LENGTH = 600
HIT = LENGTH // BLOCK_TOKENS * BLOCK_TOKENS
CHUNKS = HIT // BLOCK_TOKENS


@pytest.fixture(scope="module")
def folder() -> Iterator[Path]:
    # pytest's own are too long for UNIX sockets below them.
    with tempfile.TemporaryDirectory(prefix="tks-") as path:
        yield Path(path)


@pytest.fixture(scope="module")
def redis(folder: Path) -> Iterator[RedisServer]:
    with RedisServer(folder / "redis") as server:
        yield server


@pytest.fixture(scope="module")
def engines(
    redis: RedisServer, folder: Path, random_llama_dir: Path
) -> Iterator[tuple[Host, Host]]:
    """Both over the small model."""
    arguments = [*vllm_arguments(random_llama_dir, 100), *tierkv_arguments(CONFIG)]
    with pytest.MonkeyPatch.context() as patch, ExitStack() as stack:
        patch.setenv("REDIS_URL", redis.url)
        patch.setenv("SHARED_CACHE_KEY", os.urandom(16).hex())
        patch.setenv("OMP_NUM_THREADS", "1")
        patch.setenv("VLLM_SERVER_DEV_MODE", "1")  # for `/reset_prefix_cache`
        hosts = []
        for name in ("first", "second"):
            server = Server(
                name,
                [*arguments, "--dtype", "float32"],
                port=free_port(),
                folder=folder,
                log=folder / f"{name}.log",
            )
            stack.callback(server.stop, 10.0)
            server.start()
            hosts.append(Host(server, stack.enter_context(closing(Client(server)))))
        for host in hosts:
            host.server.wait_ready()
        yield hosts[0], hosts[1]


def ask(host: Host, prompt: list[int]) -> tuple[Answer, dict[str, int]]:
    """The answer, and the tiers that the cached tokens came from by the page of metrics."""
    before = host.client.counters()
    answer = host.client.ask(prompt, ANSWER)
    return answer, dict(host.client.counters().since(before).hit_tokens)


def forget(host: Host) -> None:
    """Empty vLLM's own prefix cache."""
    url = f"{host.server.url}/reset_prefix_cache"
    with httpx.Client(trust_env=False, timeout=60.0) as client:
        client.post(url).raise_for_status()


def test_what_the_first_engine_computed_the_second_loads(
    engines: tuple[Host, Host], redis: RedisServer, texts: Texts, small_reference: Reference
) -> None:
    first, second = engines
    prompt = texts(170, LENGTH)
    [right] = small_reference.tokens([prompt])
    answer, hits = ask(first, prompt)
    assert (answer.token_ids, answer.cached_tokens, hits) == (right, 0, {})
    until(lambda: len(redis.names()) == CHUNKS)

    answer, hits = ask(second, prompt)
    assert (answer.token_ids, answer.cached_tokens, hits) == (right, HIT, {"redis": HIT})
    forget(second)
    answer, hits = ask(second, prompt)
    assert (answer.token_ids, answer.cached_tokens, hits) == (right, HIT, {"dram": HIT})


def test_a_prompt_that_only_begins_alike_takes_the_beginning(
    engines: tuple[Host, Host], redis: RedisServer, texts: Texts, small_reference: Reference
) -> None:
    first, second = engines
    whole = texts(171, LENGTH)
    other = whole[: 2 * BLOCK_TOKENS + 5] + texts(172, 300)
    before = len(redis.names())
    ask(first, whole)
    until(lambda: len(redis.names()) == before + CHUNKS)
    answer, hits = ask(second, other)
    assert hits == {"redis": 2 * BLOCK_TOKENS}
    assert answer.token_ids == small_reference.tokens([other])[0]


def test_engines_answer_while_redis_is_dead_and_share_again_when_it_is_back(
    engines: tuple[Host, Host], redis: RedisServer, texts: Texts, small_reference: Reference
) -> None:
    first, second = engines
    known, new = texts(173, LENGTH), texts(174, LENGTH)
    right, right_new = small_reference.tokens([known, new])
    ask(second, known)
    redis.kill()
    try:
        forget(second)
        answer, hits = ask(second, known)
        assert (answer.token_ids, hits) == (right, {"dram": HIT})
        for host in engines:
            answer, hits = ask(host, new)
            assert (answer.token_ids, hits) == (right_new, {})
    finally:
        redis.start()
    numbers = iter(range(175, 184))

    def is_shared_again() -> bool:
        prompt = texts(next(numbers), LENGTH)
        ask(first, prompt)
        answer, hits = ask(second, prompt)
        assert answer.token_ids == small_reference.tokens([prompt])[0]
        return hits == {"redis": HIT}

    until(is_shared_again, 120.0)
