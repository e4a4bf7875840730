# SPDX-License-Identifier: Apache-2.0
"""Attention of scattered tokens over a whole sequence, against PyTorch's own, all rows at once."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tierkv_vllm.blend.forward import Attention, Scratch
from torch.nn.functional import scaled_dot_product_attention

SCALE = 0.125
LARGE = 400.0
"""What all scores have in common, as models with biases have it: bfloat16 has steps of 2 there."""


@pytest.mark.parametrize("shared", [0.0, LARGE])
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float32, 2e-4), (torch.bfloat16, 0.02), (torch.float16, 0.003)]
)
@pytest.mark.parametrize(("group", "first"), [(1, 0), (3, 5)])
def test_scattered_tokens_attend_to_all_before_them(
    group: int, first: int, dtype: torch.dtype, tolerance: float, shared: float
) -> None:
    model: Any = SimpleNamespace(layers=[None] * 2, heads=2)
    random = torch.Generator().manual_seed(1)
    # More than attend together, from the first that there is.
    positions = torch.cat([torch.arange(4), torch.randperm(290, generator=random)[:170] + 4])
    positions = positions.sort().values + first
    # Something else lies before and behind the sequence: the memory has been a longer one's.
    memory = torch.full((2, 4, 320, 64), 9.0).to(dtype)
    memory[:, :, first:300].normal_(generator=random)
    scratch = Scratch(model, 300, memory)
    query = torch.randn(len(positions), 2 * group, 64, generator=random).to(dtype)
    key, value = torch.randn(2, len(positions), 2, 64, generator=random).to(dtype)
    if shared:  # one dimension of query and key, equal in all
        query[..., 0] = shared
        scratch.keys[..., 0] = key[..., 0] = 1 / SCALE
    keys, values = (part.clone() for part in scratch.layer(1))
    keys[:, positions], values[:, positions] = key.transpose(0, 1), value.transpose(0, 1)
    places = torch.arange(300)
    right = scaled_dot_product_attention(
        query.transpose(0, 1).double(),
        keys.repeat_interleave(group, 0).double(),
        values.repeat_interleave(group, 0).double(),
        (places <= positions[:, None]) & (places >= first),
        scale=SCALE,
    ).transpose(0, 1)
    attend = Attention(scratch, positions, group=group, scale=SCALE, first=first)
    got = attend(1, query, key, value).double()
    assert ((got - right).norm() / right.norm()).item() < tolerance
    assert torch.equal(scratch.layer(1)[0], keys)
    assert torch.equal(scratch.layer(1)[1], values)
