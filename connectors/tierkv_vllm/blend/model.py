# SPDX-License-Identifier: Apache-2.0
"""The model inside a vLLM worker, as far as selective recomputation needs it."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from tierkv.errors import UnsupportedError
from tierkv_vllm.blend.pages import PageReader
from tierkv_vllm.blend.rope import Rope
from tierkv_vllm.model_watch import model_runner

if TYPE_CHECKING:
    from vllm.config import VllmConfig

Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]
"""(layer, query [n, query heads, dims], key [n, heads, dims], value) to [n, query heads, dims]."""


@dataclass(frozen=True, slots=True, eq=False)
class Layer:
    """One attention layer.

    Attributes:
        module: vLLM's `Attention`.
        cache: its KV cache, [blocks, heads, tokens in a block, 2 x dims].
        reader: reads its pages.
        rope: how its keys are turned; None if it has no positions.
    """

    module: Any
    cache: Tensor
    reader: PageReader
    rope: Rope | None


class BlendModel:
    """Runs the model on chosen tokens, with an attention of the caller's.

    Args:
        vllm_config: of the engine.
        kv_caches: as registered, layer name to tensor, in order.

    Raises:
        UnsupportedError: this model, or something the engine does, can't be blended.
    """

    def __init__(self, vllm_config: VllmConfig, kv_caches: Mapping[str, Tensor]) -> None:
        runner = model_runner()
        if runner is None:
            raise UnsupportedError(
                "the model is out of reach: VLLM_PLUGINS excludes tierkv, or vLLM loaded the "
                "model in another way than by its worker"
            )
        _check_engine(vllm_config)
        self.vllm_config = vllm_config
        self.model: Any = runner.get_model()
        modules = dict(self.model.named_modules())
        context = vllm_config.compilation_config.static_forward_context
        ropes: dict[nn.Module, Rope] = {}
        self.layers = [
            _layer(name, context[name], cache, modules, ropes) for name, cache in kv_caches.items()
        ]
        first = self.layers[0]
        self.device, self.dtype = first.cache.device, first.cache.dtype
        self.heads, self.dims = first.reader.heads, first.reader.dims
        self.block_tokens = first.reader.tokens
        self.scale = float(first.module.impl.scale)
        self.group = first.module.num_heads // first.module.num_kv_heads
        shapes = {(layer.reader.heads, layer.reader.dims) for layer in self.layers}
        if len(shapes) > 1:
            raise UnsupportedError("layers with different numbers or sizes of heads")

    def forward(self, tokens: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """Run the decoder on some tokens of one sequence.

        Args:
            tokens, positions: int64 [n], ascending positions.
            attend: called by each layer in turn.

        Returns:
            Hidden states [n, hidden size] for `logits`.
        """
        from vllm.forward_context import set_forward_context

        with (
            torch.inference_mode(),
            self._attention(attend),
            set_forward_context(None, self.vllm_config, num_tokens=len(tokens), skip_compiled=True),
        ):
            hidden: Tensor = self.model(
                input_ids=tokens.to(torch.int32),
                positions=positions,
                intermediate_tensors=None,
                inputs_embeds=None,
            )
        return hidden

    def logits(self, hidden: Tensor) -> Tensor:
        """float32 [n, vocabulary]."""
        with torch.inference_mode():
            logits: Tensor = self.model.compute_logits(hidden)
            return logits.float()

    def summed_over_ranks(self, values: Tensor) -> Tensor:
        """The sum over all tensor-parallel ranks, the same bits on each."""
        from vllm.distributed import tensor_model_parallel_all_reduce

        if self.vllm_config.parallel_config.tensor_parallel_size == 1:
            return values
        return tensor_model_parallel_all_reduce(values)

    @contextmanager
    def _attention(self, attend: Attend) -> Iterator[None]:
        """Every attention layer calls `attend` instead of vLLM's operator."""
        for index, layer in enumerate(self.layers):
            # An attribute of the instance goes before the class's method.
            layer.module.forward = functools.partial(_forward, layer.module, index, attend)
        try:
            yield
        finally:
            for layer in self.layers:
                del layer.module.forward


def _forward(
    module: Any,
    index: int,
    attend: Attend,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    output_shape: Sequence[int] | None = None,
    **_: Any,
) -> Tensor:
    out = attend(
        index,
        query.view(-1, module.num_heads, module.head_size),
        key.view(-1, module.num_kv_heads, module.head_size),
        value.view(-1, module.num_kv_heads, module.head_size),
    )
    return out.reshape(out.shape[0], -1)


def _check_engine(vllm_config: VllmConfig) -> None:
    """Refuse what makes an extra forward pass, or approximate KV, unsafe."""
    parallel = vllm_config.parallel_config
    refused = {
        "pipeline parallelism": parallel.pipeline_parallel_size > 1,
        "data parallelism": parallel.data_parallel_size > 1,
        "context parallelism": getattr(parallel, "decode_context_parallel_size", 1) > 1,
        "LoRA": vllm_config.lora_config is not None,
        "multimodal models": vllm_config.model_config.is_multimodal_model,
        "a draft model": (
            vllm_config.speculative_config is not None
            and vllm_config.speculative_config.method != "ngram"
        ),
    }
    for what, present in refused.items():
        if present:
            raise UnsupportedError(f"not with {what}")


def _layer(
    name: str,
    module: Any,
    cache: Tensor,
    modules: Mapping[str, nn.Module],
    ropes: dict[nn.Module, Rope],
) -> Layer:
    impl = module.impl
    refused = {
        "a sliding window": getattr(module, "sliding_window", None) is not None,
        "ALiBi": getattr(impl, "alibi_slopes", None) is not None,
        "a cap on logits": bool(getattr(impl, "logits_soft_cap", None)),
        "attention sinks": getattr(impl, "sinks", None) is not None,
        "a quantised KV cache": cache.dtype.itemsize < 2,
        "shared KV layers": getattr(module, "kv_sharing_target_layer_name", None) is not None,
        "a latent KV cache": cache.dim() != 4 or not hasattr(impl, "do_kv_cache_update"),
        "values of another size": module.head_size
        != getattr(module, "head_size_v", module.head_size),
    }
    for what, present in refused.items():
        if present:
            raise UnsupportedError(f"layer {name} has {what}")
    parent = modules.get(name.rpartition(".")[0])
    if not hasattr(parent, "rotary_emb"):
        # Learned positions, say, which are in the keys for good. None: a layer without positions.
        raise UnsupportedError(f"layer {name} has no rotary embedding where vLLM keeps it")
    rotary = getattr(parent, "rotary_emb", None)
    rope = None
    if isinstance(rotary, nn.Module):
        # Layers that share one of vLLM's embeddings share one rotation, and tables of its angles.
        if rotary not in ropes:
            ropes[rotary] = Rope.of(rotary)
        rope = ropes[rotary]
    return Layer(module, cache, PageReader.of(module, cache), rope)
