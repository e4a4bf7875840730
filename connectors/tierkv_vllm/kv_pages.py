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
    MLAAttentionSpec,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
    group_kernel_blocks,
)

from tierkv.errors import UnsupportedError

if TYPE_CHECKING:
    from vllm.config import VllmConfig

SERVED = (FullAttentionSpec, MLAAttentionSpec, SlidingWindowSpec)
"""Kinds of layers whose rules are known here. Not their subclasses: those have rules of their own
(sinks, gaps, compressed pages)."""


def check_supported(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> None:
    """Refuse what would be served wrongly.

    Raises:
        UnsupportedError: with the reason, for the log line with which TierKV stands aside.
    """
    groups = kv_cache_config.kv_cache_groups
    parallel = vllm_config.parallel_config
    layers = vllm_config.compilation_config.static_forward_context
    if not groups:
        raise UnsupportedError("the model has no KV cache")
    if any(getattr(group, "is_eagle_group", False) for group in groups):
        # Their KV depends on the target model's hidden states, not on tokens alone.
        raise UnsupportedError("a draft model's layers have a KV cache of their own")
    for name, spec in _layer_specs(kv_cache_config):
        # A state needs rules of its own. (With vLLM's hybrid manager off, layers with a window
        # come as FullAttentionSpec and keep every token.)
        if type(spec) not in SERVED:
            raise UnsupportedError(
                f"layer {name} keeps a {type(spec).__name__}, neither full attention nor a "
                "sliding window"
            )
        impl = getattr(layers.get(name), "impl", None)
        if type(impl).__name__ == "CPUMLAImpl":
            raise UnsupportedError(
                "vLLM's MLA attention for CPUs without AMX cannot go on after loaded tokens"
            )
        if getattr(spec, "non_causal", False):
            raise UnsupportedError(f"layer {name} attends to later tokens")
    # A claim is good only if every group has it: one that must not be stored spoils all.
    if len(kv_cache_config.prefix_cacheable_group_ids) < len(groups):
        raise UnsupportedError("vLLM excludes a KV cache group from prefix caching or transfer")
    for what in ("decode_context_parallel_size", "prefill_context_parallel_size"):
        if getattr(parallel, what, 1) > 1:
            raise UnsupportedError(f"{what} is greater than 1")
    if getattr(kv_cache_config, "hisparse_host_num_blocks", None) is not None:
        raise UnsupportedError("HiSparse keeps its blocks on the host")
    if vllm_config.model_config.is_encoder_decoder:
        raise UnsupportedError("encoder-decoder models")


def group_sizes(kv_cache_config: KVCacheConfig) -> list[tuple[int, int | None]]:
    """Tokens in a block, and the window (None: no end), of each KV cache group."""
    sizes: list[tuple[int, int | None]] = []
    for group in kv_cache_config.kv_cache_groups:
        spec = group.kv_cache_spec
        if isinstance(spec, UniformTypeKVCacheSpecs):
            spec = next(iter(spec.kv_cache_specs.values()))
        window = None
        if isinstance(spec, SlidingWindowSpec):
            window = spec.sliding_window + getattr(spec, "extra_retained_tokens", 0)
        sizes.append((spec.block_size, window))
    return sizes


def page_views(
    kv_cache_config: KVCacheConfig, kv_caches: Mapping[str, torch.Tensor]
) -> list[torch.Tensor]:
    """int8 views [num_blocks, page_bytes] in a fixed order over vLLM's own memory.

    One a layer; where groups lie over each other, which they do in hybrid models (a block belongs
    to one of them at a time), views that share bytes are made one. Copying all views of a block
    then copies it whole, whichever group it belongs to.

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
    return views if len(kv_cache_config.kv_cache_groups) == 1 else _united(views)


def _united(views: list[torch.Tensor]) -> list[torch.Tensor]:
    """Views whose pages overlap, as one view each; those of one address and stride are equal."""
    grids: dict[tuple[int, int], list[tuple[int, int, torch.Tensor]]] = {}
    for view in views:
        key = (view.untyped_storage().data_ptr(), view.stride(0))
        grids.setdefault(key, []).append((int(view.storage_offset()), view.shape[1], view))
    united = []
    for pages in grids.values():
        pages.sort(key=lambda page: page[:2])
        start, end, view = pages[0][0], pages[0][0], pages[0][2]
        for offset, nbytes, page in pages:
            if offset >= end > start:
                united.append(_spanning(view, start, end))
                start, end, view = offset, offset, page
            end = max(end, offset + nbytes)
        united.append(_spanning(view, start, end))
    return united


def _spanning(view: torch.Tensor, start: int, end: int) -> torch.Tensor:
    """Bytes `start` to `end` of each block on the grid of `view`."""
    return view.as_strided((view.shape[0], end - start), view.stride(), start)


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
