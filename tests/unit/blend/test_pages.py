# SPDX-License-Identifier: Apache-2.0
"""Reading pages back that vLLM's own operator wrote."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tierkv_vllm.blend.pages import LAYOUTS, PageReader

from tierkv.errors import UnsupportedError

HEADS, TOKENS, DIMS, BLOCKS = 2, 32, 64, 6


class CpuAttention:
    """The cache-write half of vLLM's CPU backend."""

    def do_kv_cache_update(
        self, layer: Any, key: Any, value: Any, cache: torch.Tensor, slots: torch.Tensor
    ) -> None:
        from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackendImpl

        CPUAttentionBackendImpl.do_kv_cache_update(self, layer, key, value, cache, slots)  # type: ignore[arg-type]

    attn_type = "decoder"
    kv_cache_dtype = "auto"


class Interleaved:
    """How GPU backends lay a page out: of each head and token the key, then the value."""

    def do_kv_cache_update(
        self, layer: Any, key: Any, value: Any, cache: torch.Tensor, slots: torch.Tensor
    ) -> None:
        for token, slot in enumerate(slots.tolist()):
            place = cache[slot // TOKENS, :, slot % TOKENS]
            place[:, :DIMS], place[:, DIMS:] = key[token], value[token]


def layer_of(isa: str | None, impl: Any) -> Any:
    layer = SimpleNamespace(impl=impl, _k_scale_float=1.0, _v_scale_float=1.0)
    if isa is not None:
        layer.isa = isa
    return layer


def supported_isas() -> list[tuple[str, torch.dtype]]:
    """What vLLM's operator can do on this machine."""
    import vllm.v1.attention.backends.cpu_attn as backend

    kinds = [("vec16", torch.float32), ("vec16", torch.bfloat16), ("vec", torch.bfloat16)]
    kinds.append(("vec", torch.float32))
    if backend._get_attn_isa(torch.bfloat16, TOKENS, DIMS) == "amx":
        kinds.append(("amx", torch.bfloat16))
    return kinds


def written(count: int, dtype: torch.dtype, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    both = torch.randn(2, count, HEADS, DIMS, generator=generator).to(dtype)
    return both[0].contiguous(), both[1].contiguous()


@pytest.mark.parametrize(("isa", "dtype"), supported_isas(), ids=str)
def test_scattered_blocks_read_back_what_vllm_wrote(isa: str, dtype: torch.dtype) -> None:
    check(layer_of(isa, CpuAttention()), dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_interleaved_pages_read_back(dtype: torch.dtype) -> None:
    check(layer_of(None, Interleaved()), dtype)


def check(layer: Any, dtype: torch.dtype) -> None:
    cache = torch.zeros(BLOCKS, HEADS, TOKENS, 2 * DIMS, dtype=dtype)
    reader = PageReader.of(layer, cache)
    assert (reader.heads, reader.tokens, reader.dims) == (HEADS, TOKENS, DIMS)
    assert reader.page_elements == cache[0].numel()
    blocks = torch.tensor([4, 1, 5])
    keys, values = written(3 * TOKENS, dtype, 3)
    places = torch.arange(3 * TOKENS)
    slots = blocks[places // TOKENS] * TOKENS + places % TOKENS
    layer.impl.do_kv_cache_update(layer, keys, values, cache, slots)
    got = torch.zeros(2, HEADS, 3 * TOKENS, DIMS, dtype=dtype)
    reader.read(cache[blocks].flatten(2), got[0], got[1])
    assert torch.equal(got[0], keys.transpose(0, 1))
    assert torch.equal(got[1], values.transpose(0, 1))


def test_layers_side_by_side_read_at_once_into_a_part_of_a_larger_tensor() -> None:
    layer = layer_of("vec16", CpuAttention())
    pages, wanted = [], []
    for number in range(3):
        cache = torch.zeros(2, HEADS, TOKENS, 2 * DIMS)
        keys, values = written(2 * TOKENS, torch.float32, number)
        layer.impl.do_kv_cache_update(layer, keys, values, cache, torch.arange(2 * TOKENS))
        pages.append(cache.flatten(2))
        wanted.append((keys.transpose(0, 1), values.transpose(0, 1)))
    reader = PageReader.of(layer, torch.zeros(1, HEADS, TOKENS, 2 * DIMS))
    room = torch.full((2, 3 * HEADS, 5 * TOKENS, DIMS), 7.0)
    part = slice(TOKENS, 3 * TOKENS)
    reader.read(torch.cat(pages, dim=1), room[0, :, part], room[1, :, part])
    assert torch.equal(room[0, :, part], torch.cat([k for k, _ in wanted]))
    assert torch.equal(room[1, :, part], torch.cat([v for _, v in wanted]))
    assert bool((room[:, :, :TOKENS] == 7).all())
    assert bool((room[:, :, 3 * TOKENS :] == 7).all())


@pytest.mark.parametrize("isa", ["neon", "rvv", "vxe"])
def test_an_unknown_layout_is_refused(isa: str) -> None:
    with pytest.raises(UnsupportedError, match=isa):
        PageReader.of(layer_of(isa, CpuAttention()), torch.zeros(2, HEADS, TOKENS, 2 * DIMS))


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8, torch.float8_e4m3fn], ids=str)
def test_quantised_pages_are_refused(dtype: torch.dtype) -> None:
    cache = torch.zeros(2, HEADS, TOKENS, 2 * DIMS).to(dtype)
    with pytest.raises(UnsupportedError, match="pages of"):
        PageReader.of(layer_of("vec16", CpuAttention()), cache)


@pytest.mark.parametrize("isa", sorted(LAYOUTS))
def test_a_backend_that_lays_pages_out_in_another_way_is_noticed(isa: str) -> None:
    """Values where keys are expected: what does not read back bit for bit is not used."""

    class Swapped(Interleaved):
        def do_kv_cache_update(
            self, layer: Any, key: Any, value: Any, cache: torch.Tensor, slots: torch.Tensor
        ) -> None:
            super().do_kv_cache_update(layer, value, key, cache, slots)

    with pytest.raises(UnsupportedError, match="do not read back"):
        PageReader.of(layer_of(isa, Swapped()), torch.zeros(2, HEADS, TOKENS, 2 * DIMS))
