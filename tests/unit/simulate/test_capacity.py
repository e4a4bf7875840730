# SPDX-License-Identifier: Apache-2.0
"""Capacities: what fits, what a model's token takes, and what is tried by default."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tierkv.errors import TierKVError
from tierkv.simulate.capacity import Scale, approximate_tokens, bytes_per_token

# From the models' own config.json; bytes as vLLM says when it sizes its cache.
LLAMA_3_1_8B = {
    "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8,
    "hidden_size": 4096, "torch_dtype": "bfloat16",
}  # fmt: skip
DEEPSEEK_V3 = {
    "num_hidden_layers": 61, "num_attention_heads": 128, "num_key_value_heads": 128,
    "hidden_size": 7168, "kv_lora_rank": 512, "qk_rope_head_dim": 64, "torch_dtype": "bfloat16",
}  # fmt: skip


def model(tmp_path: Path, config: Any) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(config))
    return tmp_path


@pytest.mark.parametrize(
    ("config", "size"),
    [
        (LLAMA_3_1_8B, 131072),
        ({**LLAMA_3_1_8B, "torch_dtype": "float32"}, 262144),
        ({"text_config": {**LLAMA_3_1_8B, "head_dim": 64}}, 65536),
        ({**LLAMA_3_1_8B, "num_key_value_heads": None}, 524288),
        (DEEPSEEK_V3, 61 * 576 * 2),
    ],
)
def test_a_token_takes_what_its_config_says(
    tmp_path: Path, config: dict[str, Any], size: int
) -> None:
    assert bytes_per_token(model(tmp_path, config)) == size


@pytest.mark.parametrize("config", [{}, [], {**LLAMA_3_1_8B, "torch_dtype": "int3"}])
def test_a_config_that_does_not_tell_is_said(tmp_path: Path, config: Any) -> None:
    with pytest.raises(TierKVError, match="give --bytes-per-token"):
        bytes_per_token(model(tmp_path, config))


def test_a_missing_config_is_said(tmp_path: Path) -> None:
    with pytest.raises(TierKVError, match="--model takes a directory"):
        bytes_per_token(tmp_path)


def test_sizes_are_whole_chunks_padded_as_in_a_slot() -> None:
    scale = Scale(block_tokens=512, bytes_per_token=131072)
    assert scale.chunk_bytes == 64 << 20
    assert scale.parse("1GiB").chunks == 16
    assert scale.parse(" 1.0625GiB ").chunks == 17
    assert Scale(block_tokens=1, bytes_per_token=100).chunk_bytes == 4096


def test_tokens_need_no_model() -> None:
    scale = Scale(block_tokens=512)
    assert scale.parse("4Mtokens").chunks == 7812
    assert scale.parse("1.5k tokens").chunks == 2
    with pytest.raises(ValueError, match="give --model DIR"):
        scale.parse("1GiB")
    with pytest.raises(ValueError, match="'lots' is not a size"):
        scale.parse("lots")


@pytest.mark.parametrize("text", ["100tokens", "1MiB", "32", "lots"])
def test_what_is_unclear_or_too_small_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"no room|unit|not a size"):
        Scale(block_tokens=512, bytes_per_token=131072).parse(text)


@pytest.mark.parametrize("per_token", [None, 131072])
@pytest.mark.parametrize("distinct", [1, 5, 170_899])
def test_the_default_sweep_goes_from_little_to_nearly_everything(
    per_token: int | None, distinct: int
) -> None:
    drams, disks = Scale(512, per_token).sweep(distinct)
    chunks = [capacity.chunks for capacity in drams]
    assert chunks == sorted(set(chunks))
    assert min(chunks) >= 1
    assert distinct / 4 <= drams[-1].chunks <= max(1, distinct)
    assert all(disk.chunks <= distinct for disk in disks)
    if distinct > 100:
        assert drams[0].chunks < distinct / 50
    for capacity in (*drams, *disks):  # what is shown can be written back
        again = Scale(512, per_token).parse(capacity.text).chunks
        assert again == pytest.approx(capacity.chunks, rel=0.02)


@pytest.mark.parametrize(
    ("tokens", "text"), [(512, "512tokens"), (4096, "4.096ktokens"), (87_500_000, "87.5Mtokens")]
)
def test_tokens_are_written_in_few_digits(tokens: int, text: str) -> None:
    assert approximate_tokens(tokens) == text
