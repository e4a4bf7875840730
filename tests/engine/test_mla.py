# SPDX-License-Identifier: Apache-2.0
"""Latent attention (MLA): a page is stored once, not once a rank.

A small DeepSeek-V2 with random weights in bfloat16, which is what vLLM's kernel for CPUs with AMX
takes. Answers are compared with vLLM's own prefix cache: it cuts the prefill at the same place, so
they are equal to the last bit, whatever bfloat16 rounds.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.engine.engines import Engine, cached_of, disk, tiers, tokens_of
from tests.engine.host import Answer, Host
from tests.engine.prompts import Texts
from tests.models import prepare_random_mla

pytestmark = [pytest.mark.engine, pytest.mark.timeout(900)]

Start = Callable[..., Engine]
LENGTHS = [129, 321, 65, 257]


@pytest.fixture(scope="module")
def mla_dir() -> Path:
    return prepare_random_mla(print)


def has_amx() -> bool:
    return " amx_tile " in Path("/proc/cpuinfo").read_text()


def from_own_cache(host: Host, prompts: list[list[int]]) -> list[Answer]:
    """Answers with vLLM's own prefix cache full, one prompt at a time."""
    return [host.generate([p], 6)[0] for p in prompts for _ in range(2)][1::2]


def one_at_a_time(host: Host, prompts: list[list[int]]) -> list[Answer]:
    return [host.generate([p], 6)[0] for p in prompts]


def part_bytes(host: Host) -> tuple[int, int]:
    layout = host.side.store.layout
    return layout.ranks, layout.slot_bytes


@pytest.mark.feature("MLA models: a page is stored once, not once a rank")
def test_two_ranks_of_an_mla_model_share_one_copy(
    start: Start, mla_dir: Path, texts: Texts, tmp_path: Path
) -> None:
    prompts = [texts(i, length) for i, length in enumerate(LENGTHS)]
    config = tiers("64MiB", disk(tmp_path / "kv"))
    cpus = sorted(os.sched_getaffinity(0))
    environment = {"VLLM_CPU_OMP_THREADS_BIND": f"{cpus[0]}|{cpus[-1]}"}
    # Enough blocks for `max_model_len` also where vLLM makes them 16 tokens (CPUs without AMX).
    more = {"dtype": "bfloat16", "tensor_parallel_size": 2, "num_gpu_blocks_override": 200}
    first = start(mla_dir, config, environment=environment, **more)
    if not has_amx():
        # vLLM's other kernel cannot go on after tokens that it did not compute.
        assert "TierKV stands aside: vLLM's MLA attention for CPUs without AMX" in first.log
        return
    own = first.run(from_own_cache, prompts)
    first.forget()
    warm = first.run(one_at_a_time, prompts)
    assert tokens_of(warm) == tokens_of(own)
    assert cached_of(warm) == cached_of(own) == [128, 320, 64, 256]
    ranks, nbytes = first.run(part_bytes)
    # 64 tokens of 576 numbers of 2 bytes in 3 layers; for both ranks together.
    assert (ranks, nbytes) == (1, 64 * 576 * 2 * 3)
    assert set(first.run(Host.leftovers).values()) == {0}
    first.close()

    second = start(mla_dir, config, environment=environment, **more)
    restarted = second.run(one_at_a_time, prompts)
    assert tokens_of(restarted) == tokens_of(own)
    assert second.run(Host.counted)["hit", "disk"] == sum(cached_of(own))
    second.close()
