# SPDX-License-Identifier: Apache-2.0
"""Two tensor-parallel workers, each with its own part of every chunk.

The right answers come from one process that holds the whole model: in float32 the order in which
two workers' sums are added does not change a token.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.engine.engines import Engine, Reference, cached_of, disk, hit, tiers, tokens_of
from tests.engine.host import Host
from tests.engine.prompts import Texts

pytestmark = [pytest.mark.engine, pytest.mark.timeout(900)]

Start = Callable[..., Engine]
LENGTHS = [129, 300, 64, 257]


def two_cpus() -> str:
    """One CPU a worker, as `VLLM_CPU_OMP_THREADS_BIND` takes it; the same one if there is one."""
    cpus = sorted(os.sched_getaffinity(0))
    return f"{cpus[0]}|{cpus[-1]}"


@pytest.mark.feature("tensor parallel 2, saved with one size and not served to the other")
def test_two_workers_give_the_same_tokens_cold_from_dram_and_after_a_restart(
    start: Start,
    small_reference: Reference,
    texts: Texts,
    random_llama_dir: Path,
    tmp_path: Path,
) -> None:
    prompts = [texts(170 + i, length) for i, length in enumerate(LENGTHS)]
    right = small_reference.tokens(prompts)
    config = tiers("64MiB", disk(tmp_path / "kv"))
    environment = {"VLLM_CPU_OMP_THREADS_BIND": two_cpus()}

    first = start(random_llama_dir, config, environment=environment, tensor_parallel_size=2)
    cold = first.generate(prompts)
    first.forget()
    warm = first.generate(prompts)
    assert tokens_of(cold) == tokens_of(warm) == right
    assert cached_of(cold) == [0] * len(LENGTHS)
    assert cached_of(warm) == [hit(length) for length in LENGTHS]
    assert first.run(Host.counted)["hit", "dram"] == sum(map(hit, LENGTHS))
    assert set(first.run(Host.leftovers).values()) == {0}
    first.close()

    second = start(random_llama_dir, config, environment=environment, tensor_parallel_size=2)
    restarted = second.generate(prompts)
    assert tokens_of(restarted) == right
    assert cached_of(restarted) == [hit(length) for length in LENGTHS]
    assert second.run(Host.counted)["hit", "disk"] == sum(map(hit, LENGTHS))
    second.close()
    # Each half of a chunk is of use to nobody but an engine of two.
    alone = start(random_llama_dir, config)
    assert cached_of(alone.generate(prompts)) == [0] * len(LENGTHS)
    alone.close()
