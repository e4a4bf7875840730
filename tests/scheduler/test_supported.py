# SPDX-License-Identifier: Apache-2.0
"""Which KV caches are served, and with which words TierKV stands aside from the others."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tierkv_vllm import kv_pages
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    CrossAttentionSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheSpec,
    MambaSpec,
    MLAAttentionSpec,
    RSWASpec,
    SinkFullAttentionSpec,
    SlidingWindowSpec,
)

from tierkv.errors import UnsupportedError

SIZES: dict[str, Any] = {
    "block_size": 16,
    "num_kv_heads": 2,
    "head_size": 8,
    "dtype": torch.float32,
}
FULL = FullAttentionSpec(**SIZES)
WINDOW = SlidingWindowSpec(**SIZES, sliding_window=64)


def cache(*specs: KVCacheSpec, **changes: Any) -> KVCacheConfig:
    groups = [KVCacheGroupSpec([f"layer.{i}"], spec, **changes) for i, spec in enumerate(specs)]
    return KVCacheConfig(num_blocks=8, kv_cache_tensors=[], kv_cache_groups=groups)


def engine(impl: object = None, encoder: bool = False, **parallel: int) -> Any:
    layers = {"layer.0": SimpleNamespace(impl=impl)}
    return SimpleNamespace(
        parallel_config=SimpleNamespace(**parallel),
        compilation_config=SimpleNamespace(static_forward_context=layers),
        model_config=SimpleNamespace(is_encoder_decoder=encoder),
    )


SERVED = {
    "full attention": cache(FULL),
    "full attention beside windows": cache(FULL, WINDOW, WINDOW),
    "windows alone": cache(WINDOW),
    "MLA": cache(MLAAttentionSpec(**{**SIZES, "num_kv_heads": 1, "head_size": 576})),
}


@pytest.mark.parametrize("case", SERVED)
def test_these_models_are_served(case: str) -> None:
    kv_pages.check_supported(engine(), SERVED[case])


MAMBA = MambaSpec(block_size=16, shapes=((4, 4),), dtypes=(torch.float32,))
REFUSED = {
    "Mamba": (cache(FULL, MAMBA), "layer layer.1 keeps a MambaSpec, neither full attention nor"),
    "linear attention alone": (cache(MAMBA), "layer layer.0 keeps a MambaSpec"),
    "chunked local attention": (
        cache(FULL, ChunkedLocalAttentionSpec(**SIZES, attention_chunk_size=64)),
        "layer layer.1 keeps a ChunkedLocalAttentionSpec",
    ),
    "cross attention": (cache(FULL, CrossAttentionSpec(**SIZES)), "keeps a CrossAttentionSpec"),
    "attention sinks in blocks of their own": (
        cache(SinkFullAttentionSpec(**SIZES, sink_len=16)),
        "keeps a SinkFullAttentionSpec",
    ),
    "gaps in full attention": (
        cache(RSWASpec(**SIZES, rswa_window=64)),
        "keeps a RSWASpec",
    ),
    "draft layers": (cache(FULL, is_eagle_group=True), "a draft model's layers"),
    "not for transfer": (
        cache(FULL, WINDOW, enable_kv_transfer=False),
        "vLLM excludes a KV cache group",
    ),
    "bidirectional": (cache(replace(FULL, non_causal=True)), "attends to later tokens"),
    "no cache at all": (cache(), "the model has no KV cache"),
}


@pytest.mark.feature("state, cross attention, draft layers: stands aside")
@pytest.mark.parametrize("case", REFUSED)
def test_these_models_are_not_served_and_the_reason_is_said(case: str) -> None:
    config, reason = REFUSED[case]
    with pytest.raises(UnsupportedError, match=reason):
        kv_pages.check_supported(engine(), config)


@pytest.mark.parametrize("what", ["decode_context_parallel_size", "prefill_context_parallel_size"])
def test_context_parallelism_is_not_served(what: str) -> None:
    with pytest.raises(UnsupportedError, match=f"{what} is greater than 1"):
        kv_pages.check_supported(engine(**{what: 2}), cache(FULL))


def test_encoder_decoder_models_are_not_served() -> None:
    with pytest.raises(UnsupportedError, match="encoder-decoder models"):
        kv_pages.check_supported(engine(encoder=True), cache(FULL))


class CPUMLAImpl:
    """Called like vLLM's reference kernel."""


def test_a_kernel_that_cannot_go_on_after_loaded_tokens_is_not_served() -> None:
    with pytest.raises(UnsupportedError, match="MLA attention for CPUs without AMX"):
        kv_pages.check_supported(engine(CPUMLAImpl()), SERVED["MLA"])


def strided(storage: torch.Tensor, offset: int, nbytes: int, row: int, blocks: int) -> torch.Tensor:
    return storage.as_strided((blocks, nbytes), (row, 1), offset)


def test_groups_that_lie_over_each_other_are_copied_as_whole_blocks() -> None:
    storage = torch.zeros(4 * 100, dtype=torch.int8)
    # One group of two layers of 30 bytes, one of a layer of 70; 30 bytes between them are padding.
    pages = [(0, 30), (30, 30), (0, 70)]
    views = kv_pages._united([strided(storage, at, n, 100, 4) for at, n in pages])
    assert [(v.storage_offset(), tuple(v.shape), v.stride()) for v in views] == [
        (0, (4, 70), (100, 1))
    ]
    # Layers apart from each other: two regions, in which two groups' layers share the pages.
    apart = [strided(storage, at, n, 50, 4) for at, n in [(0, 50), (200, 50), (0, 50), (200, 40)]]
    found = [(v.storage_offset(), v.shape[1]) for v in kv_pages._united(apart)]
    assert found == [(0, 50), (200, 50)]
