# SPDX-License-Identifier: Apache-2.0
"""vLLM's KV tensors as plain pages: which bytes of which tensor are block b of layer l.

Facts about vLLM 0.30 to 0.33 that this rests on (v1/worker/utils.py, v1/kv_cache_interface.py):
`register_kv_caches` gets one tensor a layer, whose first dimension counts *kernel* blocks, a whole
number of which make one manager block; views of several layers may share one storage; the spec
of a layer knows its page's size.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

import torch
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheSpec,
    UniformTypeKVCacheSpecs,
    group_kernel_blocks,
)

from tierkv.errors import UnsupportedError

if TYPE_CHECKING:
    from vllm.config import VllmConfig


def check_supported(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> None:
    """Refuse what would be served wrongly.

    Raises:
        UnsupportedError: with the reason, for the log line with which TierKV stands aside.
    """
    groups = kv_cache_config.kv_cache_groups
    parallel = vllm_config.parallel_config
    if len(groups) != 1:
        kinds = ", ".join(sorted({type(g.kv_cache_spec).__name__ for g in groups})) or "none"
        raise UnsupportedError(f"the model has {len(groups)} KV cache groups ({kinds}), not one")
    if 0 not in kv_cache_config.prefix_cacheable_group_ids:
        raise UnsupportedError("vLLM excludes the model's KV cache from prefix caching or transfer")
    if getattr(groups[0], "is_eagle_group", False):
        # Their KV depends on the target model's hidden states, not on tokens alone.
        raise UnsupportedError("a draft model's layers share the KV cache group")
    for name, spec in _layer_specs(kv_cache_config):
        # A window or a state needs rules of its own. (With vLLM's hybrid manager off, windowed
        # layers come as FullAttentionSpec and keep every token: those are served.)
        if not isinstance(spec, FullAttentionSpec):
            raise UnsupportedError(
                f"layer {name} keeps a {type(spec).__name__}, not full attention"
            )
        if getattr(spec, "non_causal", False):
            raise UnsupportedError(f"layer {name} attends to later tokens")
    for what in ("decode_context_parallel_size", "prefill_context_parallel_size"):
        if getattr(parallel, what, 1) > 1:
            raise UnsupportedError(f"{what} is greater than 1")
    if getattr(kv_cache_config, "hisparse_host_num_blocks", None) is not None:
        raise UnsupportedError("HiSparse keeps its blocks on the host")
    if vllm_config.model_config.is_encoder_decoder:
        raise UnsupportedError("encoder-decoder models")


def block_tokens(kv_cache_config: KVCacheConfig) -> int:
    """Tokens in one engine block."""
    return kv_cache_config.kv_cache_groups[0].kv_cache_spec.block_size


def page_views(
    kv_cache_config: KVCacheConfig, kv_caches: Mapping[str, torch.Tensor]
) -> list[torch.Tensor]:
    """One int8 view [num_blocks, page_bytes] a layer, in a fixed order, over vLLM's own memory.

    Raises:
        UnsupportedError: a layer's blocks do not lie as dense pages.
    """
    views = []
    for name, spec in _layer_specs(kv_cache_config):
        if name not in kv_caches:
            raise UnsupportedError(f"vLLM registered no KV tensor for layer {name}")
        cache = group_kernel_blocks(kv_caches[name], kv_cache_config.num_blocks)
        page = getattr(spec, "unpadded_page_size_bytes", spec.page_size_bytes)
        stride = cache.stride(0) * cache.element_size()
        # The view below takes `page` bytes from each block's start: true only if nothing of the
        # block lies elsewhere, i.e. blocks and layers are the two outermost dimensions.
        if stride < page or _extent_bytes(cache[0]) > page:
            raise UnsupportedError(
                f"layer {name}: a block spans {_extent_bytes(cache[0])} bytes, its page has {page} "
                f"and blocks are {stride} apart (layout {kv_cache_config.kv_cache_layout}); "
                "unset VLLM_KV_CACHE_LAYOUT"
            )
        view = torch.empty(0, dtype=torch.int8, device=cache.device).set_(
            cache.untyped_storage(),
            cache.storage_offset() * cache.element_size(),
            (kv_cache_config.num_blocks, page),
            (stride, 1),
        )
        views.append(view)
    return views


def worker_fields(
    vllm_config: VllmConfig, kv_cache_config: KVCacheConfig, kv_caches: Mapping[str, torch.Tensor]
) -> dict[str, str]:
    """What decides the meaning of a page's bytes and only a worker can see."""
    layers = vllm_config.compilation_config.static_forward_context
    name, cache = next(iter(kv_caches.items()))
    layer = layers.get(name)
    impl = getattr(layer, "impl", None)
    return {
        "device": cache.device.type,
        # CPU attention stores K transposed, or in tiles, depending on the instruction set.
        "isa": str(getattr(layer, "isa", "")),
        "attention": type(impl).__name__,
        "views": ";".join(
            f"{name}:{tuple(t.shape[1:])}:{t.stride()[1:]}:{t.dtype}"
            for name, t in kv_caches.items()
        ),
    }


def _layer_specs(kv_cache_config: KVCacheConfig) -> Iterator[tuple[str, KVCacheSpec]]:
    for group in kv_cache_config.kv_cache_groups:
        spec = group.kv_cache_spec
        each = spec.kv_cache_specs if isinstance(spec, UniformTypeKVCacheSpecs) else {}
        for name in group.layer_names:
            yield name, each.get(name, spec)


def _extent_bytes(block: torch.Tensor) -> int:
    """Bytes from the first to the last element of a block."""
    if block.numel() == 0:
        return 0
    last = sum(
        (size - 1) * stride for size, stride in zip(block.shape, block.stride(), strict=True)
    )
    return (last + 1) * block.element_size()
