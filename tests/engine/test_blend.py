# SPDX-License-Identifier: Apache-2.0
"""Any-text reuse in a real engine with vLLM's prefix cache on.

The right KV and the right answers come from an engine without TierKV and without any cache, in
float32. Approximate KV must stay where it was made; with everything recomputed it is no longer
approximate.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch

from tests.engine.engines import ANSWER, BLOCK, Engine, Reference, disk, options, tiers
from tests.engine.host import Host, Prompt
from tests.engine.prompts import Texts
from tests.engine.test_tensor_parallel import two_cpus

pytestmark = [pytest.mark.engine, pytest.mark.timeout(900)]

Start = Callable[..., Engine]
OFF = {"tierkv": {"blend": "off"}}
EXPLAIN = {"tierkv": {"explain": True}}
BLEND = {"mode": "balanced", "min_tokens": 128, "exact_after": 0}


@pytest.fixture(scope="module")
def blending(model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    """The real model in float32, with any-text reuse."""
    config = tiers("256MiB", blend=BLEND)
    engine = Engine(options(model_dir, config), tmp_path_factory.mktemp("blending") / "log")
    yield engine
    engine.close()


@pytest.fixture(scope="module")
def small(random_llama_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    """The same with the small random model."""
    config = tiers("64MiB", blend=BLEND)
    engine = Engine(options(random_llama_dir, config), tmp_path_factory.mktemp("small") / "log")
    yield engine
    engine.close()


# On the other side of the connection


def ask(
    host: Host, prompt: Prompt, count: int = ANSWER, params: Mapping[str, Any] | None = None
) -> tuple[tuple[int, ...], int, Any]:
    """Tokens, cached tokens, and what the response's `kv_transfer_params` say."""
    output = host.llm.generate(
        [{"prompt_token_ids": list(prompt)}], host.sampling(count, params), use_tqdm=False
    )[0]
    host.settle()
    tokens = tuple(output.outputs[0].token_ids)
    return tokens, output.num_cached_tokens or 0, output.kv_transfer_params


def kv_and_tokens(
    host: Host, prompt: Prompt, params: Mapping[str, Any] | None = None
) -> tuple[torch.Tensor, tuple[int, ...]]:
    """The pages of a prompt's whole blocks in all layers, while it runs, and its answer."""
    host.engine.add_request("kv", {"prompt_token_ids": list(prompt)}, host.sampling(ANSWER, params))

    def answering() -> bool:
        return any(r.num_output_tokens >= 2 for r in host.scheduler.requests.values())

    assert host.step_until(answering) == {}
    blocks = host.blocks_of(prompt)[: len(prompt) // BLOCK]
    pages = torch.stack([layer[blocks] for layer in host.kv_tensors]).clone()
    (answer,) = host.run().values()
    host.settle()
    return pages, answer.tokens


def change_ratio(host: Host, ratio: float | None) -> None:
    """Recompute this share from now on, however little that pays; None: as configured."""
    planner = host.side._blend
    planner._config = planner._config.model_copy(update={"recompute_ratio": ratio})
    if ratio is None:
        del planner._objection
    else:
        planner._objection = lambda tracked, plan: None


def blend_counts(host: Host) -> dict[str, int]:
    found = {f"requests {k}": n for (k,), n in outcome(host).items()}
    kinds = host.counter("tierkv_blend_tokens_total", "kind")
    return found | {f"tokens {k}": n for (k,), n in kinds.items()}


def outcome(host: Host) -> dict[tuple[str, ...], int]:
    return host.counter("tierkv_blend_requests_total", "outcome")


def learn(host: Host, prompts: list[Prompt]) -> None:
    """Let prompts be computed exactly and be stored."""
    for prompt in prompts:
        ask(host, prompt, 1, OFF)
    host.forget()


def served_in_order(host: Host, prompts: list[Prompt]) -> list[tuple[int, int]]:
    """Of each prompt, one after the other: tokens reused, and bytes stored afterwards."""
    found = []
    before = blend_counts(host).get("tokens reused", 0)
    for prompt in prompts:
        ask(host, prompt, 1)
        now = blend_counts(host).get("tokens reused", 0)
        used = sum(int(s["value"]) for s in host.side.store.snapshot()["tierkv_used_bytes"])
        found.append((now - before, used))
        before = now
    return found


# Here


def test_a_blended_prompt_that_is_asked_for_exactly_is_computed_in_full(
    blending: Engine, reference: Reference, texts: Texts
) -> None:
    documents = [texts(0, 150), texts(1, 190)]
    blending.run(learn, [documents[0] + documents[1] + texts(2, 20)])
    prompt = texts(3, 20) + documents[1] + documents[0] + texts(4, 41)
    right, tokens = reference._engine.run(kv_and_tokens, prompt)
    before = blending.run(blend_counts).get("requests served", 0)
    blended, _ = blending.run(kv_and_tokens, prompt)
    assert blending.run(blend_counts)["requests served"] == before + 1
    # It was approximate indeed: elsewhere than in the block that holds no reused token.
    assert (blended - right).abs().amax() > 1e-2
    # With nothing forgotten: neither vLLM's prefix cache nor TierKV's tiers may help.
    exact, exact_tokens = blending.run(kv_and_tokens, prompt, OFF)
    assert torch.equal(exact, right)
    assert exact_tokens == tokens
    # And again from TierKV, byte for byte.
    blending.forget()
    again, again_tokens = blending.run(kv_and_tokens, prompt, OFF)
    stored = len(prompt) // 64 * 2
    assert torch.equal(again[:, :stored], right[:, :stored])
    assert again_tokens == tokens
    assert set(blending.run(Host.leftovers).values()) == {0}


def test_with_all_tokens_recomputed_it_is_the_full_computation(
    blending: Engine, reference: Reference, texts: Texts
) -> None:
    documents = [texts(10, 170), texts(11, 150)]
    blending.run(learn, [documents[0] + documents[1] + texts(12, 20)])
    prompt = texts(13, 21) + documents[1] + documents[0] + texts(14, 60)
    right, tokens = reference._engine.run(kv_and_tokens, prompt)
    before = blending.run(blend_counts).get("requests served", 0)
    blending.run(change_ratio, 1.0)
    try:
        got, got_tokens = blending.run(kv_and_tokens, prompt)
    finally:
        blending.run(change_ratio, None)
    assert blending.run(blend_counts)["requests served"] == before + 1
    assert (got - right).abs().amax() < 1e-4
    assert got_tokens == tokens


def test_answers_mostly_agree_and_what_was_done_is_told(
    blending: Engine, reference: Reference, texts: Texts
) -> None:
    documents = [texts(20 + i, 140 + 10 * i) for i in range(4)]
    blending.run(
        learn,
        [
            documents[0] + documents[1] + texts(25, 70),
            documents[2] + documents[3] + texts(26, 70),
        ],
    )
    rng = Random(1)
    prompts = [
        [t for d in rng.sample(documents, 3) for t in d] + texts(30 + i, 40) for i in range(5)
    ]
    agreeing = 0
    for prompt, right in zip(prompts, reference.tokens(prompts), strict=True):
        before = blending.run(blend_counts)
        tokens, cached, told = blending.run(ask, prompt, ANSWER, EXPLAIN)
        after = blending.run(blend_counts)
        reused = after["tokens reused"] - before.get("tokens reused", 0)
        recomputed = after["tokens recomputed"] - before.get("tokens recomputed", 0)
        exact = cached - reused - recomputed
        # The whole prompt was claimed, and vLLM computes its last token.
        assert len(prompt) - 1 <= cached <= len(prompt)
        assert exact % BLOCK == 0
        parts = {
            (part["outcome"], part["reason"]): part["tokens"] for part in told["tierkv"]["parts"]
        }
        assert parts["hit", "any_text"] == reused > 100
        assert parts["recomputed", ""] == recomputed < 0.4 * len(prompt)
        agreeing += sum(a == b for a, b in zip(tokens, right, strict=True))
    assert agreeing >= 0.6 * ANSWER * len(prompts)
    assert set(blending.run(Host.leftovers).values()) == {0}


def test_a_restarted_engine_blends_its_first_prompt_as_the_one_before_it_did(
    start: Start, texts: Texts, random_llama_dir: Path, tmp_path: Path
) -> None:
    config = tiers("64MiB", disk(tmp_path / "kv"), blend=BLEND)
    documents = [texts(36, 200), texts(37, 200)]
    prompt = texts(38, 20) + documents[1] + documents[0] + texts(39, 41)
    first = start(random_llama_dir, config)
    first.run(learn, [documents[0] + documents[1] + texts(35, 70)])
    right, tokens = first.run(kv_and_tokens, prompt)
    assert first.run(blend_counts)["requests served"] == 1
    first.close()
    second = start(random_llama_dir, config)
    assert "7 of 7 recovered chunks can be reused anywhere" in second.log
    got, got_tokens = second.run(kv_and_tokens, prompt)
    assert second.run(blend_counts)["requests served"] == 1
    assert (got - right).abs().amax() < 1e-4
    assert got_tokens == tokens
    assert second.run(Host.counted)["hit", "disk"] > 200
    second.close()


def test_two_workers_blend_in_lockstep(
    start: Start, small_reference: Reference, texts: Texts, random_llama_dir: Path
) -> None:
    config = tiers("64MiB", blend={**BLEND, "shadow": 1.0})
    environment = {"VLLM_CPU_OMP_THREADS_BIND": two_cpus()}
    engine = start(random_llama_dir, config, environment=environment, tensor_parallel_size=2)
    documents = [texts(40, 200), texts(41, 200)]
    engine.run(learn, [documents[0] + documents[1] + texts(42, 70)])
    prompts = [texts(43 + i, 30) + documents[1] + documents[0] + texts(46, 40) for i in range(3)]
    right = small_reference.tokens(prompts)
    engine.run(ask, prompts[0])
    # All recomputed, on both: then it must be right to the token.
    engine.run(change_ratio, 1.0)
    assert [engine.run(ask, prompt)[0] for prompt in prompts[1:]] == right[1:]
    counts = engine.run(blend_counts)
    assert counts["requests served"] == 3
    assert "requests failed" not in counts
    shadows = engine.run(Host.counter, "tierkv_blend_shadows_total", "agree")
    assert sum(shadows.values()) == 3
    assert shadows["yes",] >= 2
    assert engine.run(ask, prompts[0], ANSWER, OFF)[0] == right[0]
    assert set(engine.run(Host.leftovers).values()) == {0}
    engine.close()


def test_sixty_orders_of_the_same_documents_store_nothing_and_find_as_much_as_ever(
    small: Engine, texts: Texts
) -> None:
    documents = [texts(50 + i, 160 + 7 * i) for i in range(5)]
    small.run(learn, [[t for d in documents for t in d] + texts(60, 70)])
    rng = Random(4)
    prompts = []
    for turn in range(60):
        order = rng.sample(documents, len(documents))
        # Something new in front: no prefix of it is known.
        prompts.append(texts(100 + turn, 30) + [t for d in order for t in d] + texts(70, 40))
    found = small.run(served_in_order, prompts)
    reused, stored = [n for n, _ in found], [used for _, used in found]
    assert len(set(stored)) == 1
    assert min(reused) > 600
    assert sum(reused[-10:]) >= 0.98 * sum(reused[:10])
    assert small.run(blend_counts)["requests served"] == 60
    assert set(small.run(Host.leftovers).values()) == {0}


def test_many_at_once_all_end(small: Engine, small_reference: Reference, texts: Texts) -> None:
    """Blended, exact and plain requests in one batch do not disturb each other."""
    documents = [texts(80 + i, 150) for i in range(3)]
    small.run(learn, [[t for d in documents for t in d] + texts(84, 70)])
    plain = [texts(85 + i, 100 + 30 * i) for i in range(4)]
    mixed = [texts(90 + i, 10) + documents[i % 3] + documents[(i + 1) % 3] for i in range(4)]
    batch = [prompt for pair in zip(plain, mixed, strict=True) for prompt in pair]
    answers = small.generate(batch)
    right = small_reference.tokens(plain)
    assert [answer.tokens for answer in answers[::2]] == right
    assert set(small.run(Host.leftovers).values()) == {0}
