# SPDX-License-Identifier: Apache-2.0
"""Engines started in other ways, the same with TierKV as without: one row, one engine.

In float32 none of these ways changes a token, so one reference serves for all; where it does (fp8
pages, adapters) the row has a reference of its own.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.engine.engines import REFERENCE_CPU, Engine, Reference, cached_of, tiers, tokens_of
from tests.engine.host import Host, Prompt
from tests.engine.pairs import Pair, completions, generate, loaded_tokens, sampling, settled
from tests.engine.prompts import Texts

pytestmark = [pytest.mark.engine, pytest.mark.timeout(900)]

Start = Callable[..., Engine]
LENGTHS = [129, 300, 64, 257, 520]
REPEATING = 12
"""Tokens of an answer: enough for drafts to be made and refused."""


def expected_hits(block: int, chunk: int) -> list[int]:
    """Whole chunks of each prompt, up to the last block boundary before its end."""
    return [min(n // chunk * chunk, (n - 1) // block * block) for n in LENGTHS]


WAYS: dict[str, tuple[dict[str, Any], list[int]]] = {
    "automatic prefix caching off": ({"enable_prefix_caching": False}, expected_hits(32, 64)),
    "speculative decoding (ngram)": (
        {
            "speculative_config": {
                "method": "ngram",
                "num_speculative_tokens": 3,
                "prompt_lookup_max": 3,
                "prompt_lookup_min": 1,
            }
        },
        expected_hits(32, 64),
    ),
    "block size 128": ({"block_size": 128}, expected_hits(128, 128)),
    "block size 64": ({"block_size": 64}, expected_hits(64, 64)),
    "torch.compile on": ({"enforce_eager": False}, expected_hits(32, 64)),
}


def cold_and_warm(host: Host, prompts: list[Prompt], count: int) -> Any:
    cold = host.generate(prompts, count)
    settled(host)
    warm = host.generate(prompts, count)
    settled(host)
    return cold, warm


@pytest.mark.parametrize("way", [pytest.param(w, marks=pytest.mark.feature(w)) for w in WAYS])
def test_the_same_tokens_however_the_engine_is_started(
    start: Start, small_reference: Reference, texts: Texts, random_llama_dir: Path, way: str
) -> None:
    changes, hits = WAYS[way]
    prompts = [texts(5 + i, length) for i, length in enumerate(LENGTHS)]
    # Words that come again, for drafts.
    prompts[1] = (prompts[1][:30] * 10)[:300]
    engine = start(random_llama_dir, tiers("128MiB"), **changes)
    with small_reference.meanwhile(prompts, REPEATING):
        cold, warm = engine.run(cold_and_warm, prompts, REPEATING)
    right = small_reference.tokens(prompts, REPEATING)
    assert tokens_of(cold) == right
    assert tokens_of(warm) == right
    assert cached_of(warm) == hits
    if "ngram" in way:
        assert sum(engine.run(Host.metrics, "vllm:spec_decode_num_draft_tokens").values()) > 0
    engine.close()


@pytest.mark.feature("MultiConnector with another connector")
def test_beside_another_connector(
    start: Start, small_reference: Reference, texts: Texts, random_llama_dir: Path, tmp_path: Path
) -> None:
    prompts = [texts(15 + i, length) for i, length in enumerate(LENGTHS)]
    children = [
        {
            "kv_connector": "TierKVConnector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": tiers("128MiB"),
        },
        {
            "kv_connector": "ExampleConnector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": {"shared_storage_path": str(tmp_path / "example")},
        },
    ]
    transfer = {
        "kv_connector": "MultiConnector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"connectors": children},
    }
    # The example knows nothing of several groups.
    engine = start(
        random_llama_dir, kv_transfer_config=transfer, disable_hybrid_kv_cache_manager=True
    )
    cached, tokens = engine.run(through_multi, prompts)
    assert tokens == [list(answer) for answer in small_reference.tokens(prompts)]
    assert cached == expected_hits(32, 64)
    engine.close()


def through_multi(host: Host, prompts: list[Prompt]) -> Any:
    inputs = [{"prompt_token_ids": list(prompt)} for prompt in prompts]
    host.llm.generate(inputs, sampling(), use_tqdm=False)
    host.run()
    assert host.llm.reset_prefix_cache()
    outputs = host.llm.generate(inputs, sampling(), use_tqdm=False)
    host.run()
    return [o.num_cached_tokens for o in outputs], [list(o.outputs[0].token_ids) for o in outputs]


def make_pair(start: Start, model: Path, **changes: Any) -> Pair:
    off = start(model, environment=REFERENCE_CPU, **changes)
    return Pair(start(model, tiers("128MiB"), **changes), off)


@pytest.mark.feature("fp8 KV cache")
def test_pages_of_fp8(start: Start, texts: Texts, random_llama_dir: Path) -> None:
    pair = make_pair(start, random_llama_dir, kv_cache_dtype="fp8")
    prompts = [texts(25 + i, length) for i, length in enumerate(LENGTHS)]
    # vLLM's own cache cuts a prefill where TierKV does; without it every position is computed from
    # unrounded keys of this step, which fp8 makes visible. So compare with a hit of its own.
    right = pair.off.run(own_hits, prompts)
    pair.on.run(own_hits, prompts)
    pair.on.run(settled)
    before = pair.on.run(loaded_tokens)
    warm = pair.on.run(one_by_one, prompts)
    assert warm == right
    assert pair.on.run(loaded_tokens) > before
    pair.on.run(settled)


def one_by_one(host: Host, prompts: list[Prompt]) -> Any:
    return [completions(generate(host, [prompt], sampling())) for prompt in prompts]


def own_hits(host: Host, prompts: list[Prompt]) -> Any:
    one_by_one(host, prompts)
    return one_by_one(host, prompts)


def write_adapter(folder: Path, model: Path, seed: int) -> Path:
    """A random adapter of rank 8 for the attention's projections."""
    import json

    import torch
    from safetensors.torch import save_file

    config = json.loads((model / "config.json").read_text())
    hidden = config["hidden_size"]
    head = config["head_dim"]
    outs = {
        "q_proj": head * config["num_attention_heads"],
        "v_proj": head * config["num_key_value_heads"],
    }
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for layer in range(config["num_hidden_layers"]):
        for name, out in outs.items():
            base = f"base_model.model.model.layers.{layer}.self_attn.{name}"
            down = torch.randn((8, hidden), generator=generator) * 0.1
            up = torch.randn((out, 8), generator=generator) * 0.1
            tensors[f"{base}.lora_A.weight"], tensors[f"{base}.lora_B.weight"] = down, up
    folder.mkdir()
    save_file(tensors, folder / "adapter_model.safetensors")
    adapter = {
        "peft_type": "LORA",
        "r": 8,
        "lora_alpha": 16,
        "target_modules": list(outs),
        "bias": "none",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": str(model),
    }
    (folder / "adapter_config.json").write_text(json.dumps(adapter))
    return folder


def with_adapters(host: Host, prompt: Prompt, adapters: list[tuple[str, str] | None]) -> Any:
    from vllm.lora.request import LoRARequest

    answers = []
    for number, adapter in enumerate(adapters, 1):
        lora = LoRARequest(adapter[0], number, adapter[1]) if adapter else None
        answers.append(generate(host, [prompt], sampling(), lora_request=lora)[0])
    return completions(answers)


@pytest.mark.feature("LoRA: two adapters, one prompt, no sharing")
def test_adapters_get_their_own_answers_and_share_nothing(
    start: Start, texts: Texts, random_llama_dir: Path, tmp_path: Path
) -> None:
    adapters = [
        (n, str(write_adapter(tmp_path / n, random_llama_dir, i))) for i, n in enumerate("ab")
    ]
    pair = make_pair(start, random_llama_dir, enable_lora=True, max_loras=2, max_lora_rank=8)
    prompt = texts(35, 300)
    right = pair.same(with_adapters, prompt, [*adapters, None])
    assert len({tuple(answer[0]["tokens"]) for answer in right}) == 3
    # Three copies were saved, one each; a third adapter finds none of them.
    third = ("c", str(write_adapter(tmp_path / "c", random_llama_dir, 9)))
    before = pair.on.run(loaded_tokens)
    pair.on.run(with_adapters, prompt, [third])
    assert pair.on.run(loaded_tokens) == before
    pair.on.run(settled)
