# SPDX-License-Identifier: Apache-2.0
"""A configuration that cannot be used stops the engine with one line that says what to do; a model
that cannot be cached does not: TierKV stands aside, says why, and the engine serves."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.engine.engines import Engine, EngineError, tiers
from tests.engine.host import Answer, Host, Prompt
from tests.engine.prompts import Texts

pytestmark = [pytest.mark.engine, pytest.mark.timeout(900)]

Start = Callable[..., Engine]

UNUSABLE = {
    "unknown key": (
        tiers("64MiB", capacty="1GiB"),
        "inline: capacty: unknown key; the keys here: ",
    ),
    "missing file": (
        {"config": "/nonexistent/tierkv.yaml"},
        "/nonexistent/tierkv.yaml: no such file; give the path of a configuration, or write one ",
    ),
    "odd chunk": (
        tiers("64MiB", chunk_tokens=48),
        "inline: chunk_tokens: 48 is not a multiple of vLLM's block size 32; set it to 32 or 64",
    ),
    "small": (
        tiers("100KiB"),
        "inline: tiers.dram.capacity: dram: capacity=102400 bytes holds no chunk; set it to at lea",
    ),
}


@pytest.mark.parametrize("case", UNUSABLE)
def test_an_engine_does_not_start_with_a_configuration_that_cannot_be_used(
    start: Start, random_llama_dir: Path, case: str
) -> None:
    config, message = UNUSABLE[case]
    with pytest.raises(EngineError) as raised:
        start(random_llama_dir, config)
    # One line says it all.
    assert [line for line in str(raised.value).splitlines() if message in line]


CHUNKED: dict[str, Any] = {
    # Llama 4's text model: attention within chunks of 64 tokens beside full attention.
    "architectures": ["Llama4ForCausalLM"],
    "model_type": "llama4_text",
    "hidden_size": 64,
    "intermediate_size": 128,
    "intermediate_size_mlp": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 64,
    "vocab_size": 49152,
    "max_position_embeddings": 4096,
    "attention_chunk_size": 64,
    "layer_types": ["chunked_attention", "full_attention"],
    "no_rope_layers": [1, 0],
    "moe_layers": [],
    "interleave_moe_layer_step": 0,
    "num_local_experts": 1,
    "num_experts_per_tok": 1,
    "rope_theta": 10000.0,
    "torch_dtype": "float32",
}


def twice(host: Host, prompt: Prompt) -> list[Answer]:
    first = host.generate([prompt], 8)
    host.forget()
    return first + host.generate([prompt], 8)


def told_aside(host: Host) -> list[str]:
    """What the engine's page of metrics says about why TierKV stands aside."""
    from prometheus_client import REGISTRY

    return [
        sample.labels["reason"]
        for family in REGISTRY.collect()
        for sample in family.samples
        if sample.name == "tierkv_aside" and sample.value
    ]


@pytest.mark.feature("groups that cannot be served: stands aside")
def test_tierkv_stands_aside_for_models_that_it_cannot_serve(
    start: Start, texts: Texts, tmp_path: Path
) -> None:
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text(json.dumps(CHUNKED))
    # The weights are made up by vLLM.
    engine = start(model, tiers("64MiB"), load_format="dummy", max_model_len=1024)
    first, second = engine.run(twice, texts(150, 200))
    assert first.tokens == second.tokens
    assert len(first.tokens) == 8
    assert (first.cached, second.cached) == (0, 0)
    assert "keeps a ChunkedLocalAttentionSpec, neither full attention nor" in engine.log
    assert "TierKV stands aside: layer " in engine.log
    assert engine.run(told_aside) == ["unsupported"]
    engine.close()
