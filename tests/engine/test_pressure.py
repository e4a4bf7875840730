# SPDX-License-Identifier: Apache-2.0
"""Too little of everything: of vLLM's blocks, of DRAM, of disk. Tokens stay right, nothing leaks.

With a small random model: what is at stake is who gets which memory when, not what is computed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from random import Random

import pytest

from tests.engine.engines import Engine, Reference, cached_of, disk, hit, tiers, tokens_of
from tests.engine.host import Answer, Host, Prompt
from tests.engine.prompts import Texts

pytestmark = [pytest.mark.engine, pytest.mark.timeout(900)]

Start = Callable[..., Engine]


def generate_and_count_preemptions(
    host: Host, prompts: Sequence[Prompt], count: int
) -> tuple[list[Answer], int]:
    for i, prompt in enumerate(prompts):
        host.add(f"r{i}", prompt, count)
    before = sum(host.metrics("vllm:num_preemptions").values())
    answers = host.run()
    host.settle()
    preemptions = sum(host.metrics("vllm:num_preemptions").values()) - before
    return [answers[f"r{i}"] for i in range(len(prompts))], int(preemptions)


def test_preempted_requests_end_with_the_right_tokens(
    start: Start, small_reference: Reference, texts: Texts, random_llama_dir: Path
) -> None:
    engine = start(random_llama_dir, tiers("64MiB"), max_num_batched_tokens=256)
    # 100 blocks of 32: eight requests of 12 blocks fit. With its 32nd token each outgrows them.
    prompts = [texts(115 + i, 353) for i in range(8)]
    answers, preemptions = engine.run(generate_and_count_preemptions, prompts, 60)
    assert preemptions > 0
    assert tokens_of(answers) == small_reference.tokens(prompts, 60)
    assert set(engine.run(Host.leftovers).values()) == {0}
    engine.forget()
    again = engine.generate(prompts, 60)
    assert tokens_of(again) == small_reference.tokens(prompts, 60)
    assert cached_of(again) == [hit(353)] * 8


@pytest.mark.feature("evictions from every tier")
def test_evictions_from_dram_and_disk_never_change_a_token(
    start: Start,
    small_reference: Reference,
    texts: Texts,
    random_llama_dir: Path,
    tmp_path: Path,
) -> None:
    # A chunk is 256 KiB. Ten documents of six or seven chunks: vLLM holds three of them, DRAM four
    # (28 chunks), the disk six.
    config = tiers("7MiB", disk(tmp_path / "kv", "11MiB"))
    engine = start(random_llama_dir, config, num_gpu_blocks_override=45, max_model_len=640)
    documents = [texts(140 + i, 390 + 12 * i) for i in range(10)]
    seed = 20_240_611
    print(f"seed {seed}")
    rng = Random(seed)
    # Mostly what was asked for lately, or there would be no hits.
    order = list(range(10))
    for _ in range(60):
        order.append(rng.choice(order[-6:] if rng.random() < 0.7 else range(10)))
    answers: list[Answer] = []
    while len(answers) < len(order):
        batch = order[len(answers) :][: rng.randrange(1, 5)]
        answers += engine.generate([documents[i] for i in batch])
    right = small_reference.tokens(documents)
    assert tokens_of(answers) == [right[i] for i in order]
    evicted = engine.run(Host.counter, "tierkv_evictions_total", "tier", "reason")
    assert evicted["dram", "capacity"] > 0
    assert evicted["disk", "capacity"] > 0
    counted = engine.run(Host.counted)
    assert counted["hit", "dram"] > 0
    assert counted["hit", "disk"] > 0
    assert set(engine.run(Host.leftovers).values()) == {0}
    engine.close()
