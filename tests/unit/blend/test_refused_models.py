# SPDX-License-Identifier: Apache-2.0
"""What cannot be blended is refused by name, and does not take exact reuse away."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tierkv_vllm.blend.forward import Attention, Scratch, choose
from tierkv_vllm.blend.model import _layer
from tierkv_vllm.blend.pages import PageReader

from tierkv.errors import UnsupportedError


def attention_layer() -> Any:
    return SimpleNamespace(
        impl=SimpleNamespace(do_kv_cache_update=lambda *_: None, scale=1.0), head_size=8
    )


def test_keys_with_learned_positions_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PageReader, "_try", lambda *_: None)
    cache = torch.zeros(2, 1, 16, 16)
    modules = {"h.0.attn": torch.nn.Module()}
    with pytest.raises(UnsupportedError, match=r"layer h\.0\.attn\.attn has no rotary embedding"):
        _layer("h.0.attn.attn", attention_layer(), cache, modules, {})


def test_a_layer_without_positions_among_others_is_not_turned(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(PageReader, "_try", lambda *_: None)
    parent: Any = torch.nn.Module()
    parent.rotary_emb = None
    cache = torch.zeros(2, 1, 16, 16)
    layer = _layer("h.0.attn", attention_layer(), cache, {"h.0": parent}, {})
    assert layer.rope is None


def test_what_is_attended_to_is_summed_up_where_the_draft_lies() -> None:
    """A choice between tensors of two devices would fail, on every machine with a GPU."""
    model: Any = SimpleNamespace(layers=[None], heads=1)
    scratch = Scratch(model, 8, torch.empty(2, 1, 8, 4, device="meta"))
    attention = Attention(scratch, torch.arange(4), group=1, scale=1.0, watch=True)
    assert attention.mass is not None
    assert attention.mass.device == scratch.keys.device
    chosen = choose(attention.mass, torch.arange(2, device="meta"), 0, 3)
    assert chosen.device == scratch.keys.device
    assert chosen.shape == (5,)
