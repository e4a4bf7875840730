# SPDX-License-Identifier: Apache-2.0
"""Turned keys against vLLM's own rotary embeddings: turning is as good as computing there."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from tierkv_vllm.blend.rope import Rope
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.model_executor.layers.rotary_embedding import get_rope

from tierkv.errors import UnsupportedError

HEADS, DIMS, LONGEST = 2, 32, 4096
KINDS: dict[str, dict[str, Any]] = {
    "plain": {"rope_type": "default", "rope_theta": 10_000.0},
    "linear": {"rope_type": "linear", "factor": 4.0},
    "llama3": {
        "rope_type": "llama3",
        "rope_theta": 500_000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 256,
    },
    "yarn": {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 512},
    "yarn, no truncation": {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 1024,
        "truncate": False,
        "attention_factor": 1.3,
    },
}
MOVES = [(0, 1), (1, 0), (5, 1000), (1000, 5), (17, 4095), (4095, 0), (300, 300)]


@pytest.fixture(autouse=True)
def engine() -> Iterator[None]:
    """vLLM's layers ask for the engine's configuration when they are made."""
    with set_current_vllm_config(VllmConfig()):
        yield


def embedding(kind: str, *, neox: bool = True, partial: float = 1.0) -> Any:
    parameters = {**KINDS[kind], "partial_rotary_factor": partial}
    return get_rope(DIMS, LONGEST, neox, parameters, torch.float32)


def keys_at(rotary: Any, keys: torch.Tensor, position: int) -> torch.Tensor:
    """[tokens, heads, dims] as the embedding gives them at consecutive positions."""
    positions = torch.arange(position, position + len(keys))
    flat = keys.reshape(len(keys), -1).clone()
    _, turned = rotary.forward_native(positions, flat.clone(), flat)
    return turned.view(keys.shape)


def some_keys(count: int = 1) -> torch.Tensor:
    return torch.randn(count, HEADS, DIMS, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("neox", [True, False])
@pytest.mark.parametrize("partial", [1.0, 0.5])
def test_a_turned_key_is_the_key_of_its_new_position(kind: str, neox: bool, partial: float) -> None:
    rotary = embedding(kind, neox=neox, partial=partial)
    rope = Rope.of(rotary)
    for old, new in MOVES:
        keys = some_keys()
        turned = keys_at(rotary, keys, old)
        rope.turn(turned, new - old)
        torch.testing.assert_close(turned, keys_at(rotary, keys, new), atol=2e-3, rtol=0)
        # The distance is far less than what another position would make of it.
        if old != new:
            assert (turned - keys_at(rotary, keys, old)).abs().max() > 0.05


def test_a_whole_piece_turns_by_one_distance() -> None:
    rotary = embedding("llama3")
    keys = some_keys(50)
    turned = keys_at(rotary, keys, 700)
    Rope.of(rotary).turn(turned, -650)
    torch.testing.assert_close(turned, keys_at(rotary, keys, 50), atol=2e-3, rtol=0)


def test_what_the_rotation_leaves_out_is_not_touched() -> None:
    rotary = embedding("plain", partial=0.5)
    keys = some_keys()
    turned = keys.clone()
    Rope.of(rotary).turn(turned, 99)
    assert torch.equal(turned[..., DIMS // 2 :], keys[..., DIMS // 2 :])
    assert not torch.equal(turned[..., : DIMS // 2], keys[..., : DIMS // 2])


def test_no_distance_changes_no_bit() -> None:
    keys = some_keys().bfloat16()
    turned = keys.clone()
    Rope.of(embedding("plain")).turn(turned, 0)
    assert torch.equal(turned, keys)


def test_turning_there_and_back_is_the_identity_and_keeps_lengths() -> None:
    rope = Rope.of(embedding("yarn"))
    keys = some_keys().double()
    turned = keys.clone()
    rope.turn(turned, 3000)
    assert torch.allclose(turned.norm(dim=-1), keys.norm(dim=-1), atol=1e-5)
    rope.turn(turned, -3000)
    torch.testing.assert_close(turned, keys, atol=1e-5, rtol=0)


def test_half_precision_is_rounded_once() -> None:
    """The result is the exactly turned key, rounded: no step of it is taken in bfloat16."""
    rope = Rope.of(embedding("plain"))
    keys = some_keys(64).bfloat16()
    exact = keys.double()
    rope.turn(exact, 12_345)
    turned = keys.clone()
    rope.turn(turned, 12_345)
    # bfloat16 has eight binary digits; rounding in between as well would take up to three times it.
    assert bool(((turned.double() - exact).abs() <= exact.abs() * 2.0**-8 + 1e-5).all())


def test_views_with_any_strides_turn_in_place() -> None:
    rotary = embedding("plain")
    rope = Rope.of(rotary)
    room = torch.zeros(DIMS, HEADS, 7)
    view = room.permute(2, 1, 0)
    keys = some_keys(7)
    view.copy_(keys)
    rope.turn(view, -40)
    rope.turn(keys, -40)
    assert torch.equal(view, keys)


@pytest.mark.parametrize(
    "parameters",
    [
        {"rope_type": "dynamic", "factor": 2.0},
        {"rope_type": "dynamic", "alpha": 2.0},
        {"rope_type": "ntk", "factor": 2.0},
        {"rope_type": "default", "mrope_section": [4, 6, 6]},
        {
            "rope_type": "deepseek_yarn",
            "factor": 8.0,
            "original_max_position_embeddings": 512,
        },
        {"rope_type": "proportional"},
    ],
    ids=str,
)
def test_a_rotation_that_is_not_known_to_be_exact_is_refused_with_its_name(
    parameters: dict[str, Any],
) -> None:
    rotary = get_rope(DIMS, LONGEST, True, parameters, torch.float32)
    with pytest.raises(UnsupportedError, match=type(rotary).__name__):
        Rope.of(rotary)


def test_several_scaling_factors_at_once_are_refused() -> None:
    from vllm.model_executor.layers.rotary_embedding import LinearScalingRotaryEmbedding

    rotary = LinearScalingRotaryEmbedding(
        DIMS, DIMS, LONGEST, 10_000.0, True, [1.0, 4.0], torch.float32
    )
    with pytest.raises(UnsupportedError, match="LinearScaling"):
        Rope.of(rotary)
