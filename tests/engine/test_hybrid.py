# SPDX-License-Identifier: Apache-2.0
"""Models with more than one KV cache group, for real: Gemma 3 270M, window 512, in float32.

vLLM's hybrid KV cache manager is on: 3 layers of full attention are one group, 15 layers with a
window are five more. Prompts are shorter and longer than the window, and cut into steps.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.engine.engines import (
    REFERENCE_CPU,
    Engine,
    Reference,
    cached_of,
    disk,
    hit,
    options,
    tiers,
    tokens_of,
)
from tests.engine.host import Host
from tests.engine.prompts import Texts
from tests.models import GEMMA_BOS, prepare_gemma

pytestmark = [pytest.mark.engine, pytest.mark.timeout(900)]

Start = Callable[..., Engine]
LENGTHS = [100, 129, 400, 513, 600, 800, 1100]


@pytest.fixture(scope="module")
def gemma_dir() -> Path:
    return prepare_gemma(print)


@pytest.fixture(scope="module")
def gemma_texts(gemma_dir: Path) -> Callable[[int, int], list[int]]:
    texts = Texts(gemma_dir)
    return lambda number, length: [GEMMA_BOS, *texts(number, length - 1)]


@pytest.fixture(scope="module")
def gemma_reference(
    gemma_dir: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Reference]:
    log = tmp_path_factory.mktemp("gemma") / "log"
    sizes = {"enable_prefix_caching": False, "num_gpu_blocks_override": 800}
    engine = Engine(options(gemma_dir, **sizes), log, REFERENCE_CPU)
    yield Reference(engine)
    engine.close()


def groups_of(host: Host) -> list[str]:
    return [type(g.kv_cache_spec).__name__ for g in host.scheduler.kv_cache_config.kv_cache_groups]


def half_window(host: Host, prompt: list[int], longer: list[int]) -> list[int]:
    """What vLLM holds itself of `prompt`, and TierKV then loads behind it."""
    host.forget()
    host.generate([prompt], 1)
    (answer,) = host.generate([longer], 6)
    return [answer.cached, *answer.tokens]


@pytest.mark.feature("hybrid models: full attention beside sliding windows")
def test_a_hybrid_model_gives_the_same_tokens_cold_warm_and_after_a_restart(
    start: Start,
    gemma_dir: Path,
    gemma_texts: Callable[[int, int], list[int]],
    gemma_reference: Reference,
    tmp_path: Path,
) -> None:
    prompts = [gemma_texts(2 * i, length) for i, length in enumerate(LENGTHS)]
    # Branches inside and behind the first window's length.
    branches = [prompts[-1][:n] + gemma_texts(30 + n % 7, 60)[1:] for n in (448, 900)]
    config = tiers("2GiB", disk(tmp_path / "kv", capacity="2GiB"))
    sizes = {"max_num_batched_tokens": 256, "num_gpu_blocks_override": 800}
    first = start(gemma_dir, config, **sizes)
    assert sorted(first.run(groups_of)) == ["FullAttentionSpec"] + 5 * ["SlidingWindowSpec"]
    with gemma_reference.meanwhile([*prompts, *branches]):
        cold = first.generate(prompts)
        first.forget()
        warm = first.generate(prompts)
        first.forget()
        branched = first.generate(branches)
    right = gemma_reference.tokens(prompts)
    assert tokens_of(cold) == right
    assert cached_of(cold) == [0] * len(prompts)
    assert tokens_of(warm) == right
    assert cached_of(warm) == [hit(length) for length in LENGTHS]
    assert tokens_of(branched) == gemma_reference.tokens(branches)
    assert cached_of(branched) == [448, 896]
    # The window of a load that goes on behind vLLM's own hit comes from both.
    cached, *tokens = first.run(half_window, prompts[-1][:700], prompts[-1])
    assert tuple(tokens) == right[-1]
    assert cached == hit(1100)
    assert set(first.run(Host.leftovers).values()) == {0}
    first.close()

    second = start(gemma_dir, config, **sizes)
    restarted = second.generate(prompts)
    assert tokens_of(restarted) == right
    assert cached_of(restarted) == [hit(length) for length in LENGTHS]
    counted = second.run(Host.counted)
    assert counted["hit", "disk"] == sum(map(hit, LENGTHS))
    assert set(second.run(Host.leftovers).values()) == {0}
    second.close()
