# SPDX-License-Identifier: Apache-2.0
"""Which KV caches may be exchanged: vLLM's configuration as the fields of a TierKV namespace.

Each field is here because leaving it out would, or did, give some engine wrong answers: see
`docs/reference/keys.md`. A field too many costs a cold cache; a field too few costs a wrong token.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING, Any

import vllm

from tierkv.keys import Namespace, Scope

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.request import Request

_WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".gguf")
_SAMPLES = 16
_SAMPLE_BYTES = 64 * 1024


def namespace(
    vllm_config: VllmConfig,
    kv_cache_config: KVCacheConfig,
    worker_fields: Mapping[str, str],
    secret: bytes,
) -> Namespace:
    """The namespace of one engine. Reads at most 1 MiB of each local weight file."""
    model, cache, parallel = (
        vllm_config.model_config,
        vllm_config.cache_config,
        vllm_config.parallel_config,
    )
    load = vllm_config.load_config
    speculative = vllm_config.speculative_config
    weights = weights_digest(model.model, model.hf_config)
    fields: dict[str, str | int | float | bool] = {
        # The CPU kernels' page content and the page order are vLLM's own business and may change
        # with any minor release; a patch release does not touch them.
        "engine": "vllm-" + ".".join(vllm.__version__.split(".")[:2]),
        # Local weights are known by content, so that a model may lie at another path elsewhere.
        "model": "" if weights and Path(model.model).exists() else model.model,
        "revision": model.revision or "",
        "model_config": _digest_json(
            {k: v for k, v in model.hf_config.to_dict().items() if k != "_name_or_path"}
        ),
        "weights": weights,
        "load_format": str(load.load_format),
        "dummy_seed": model.seed if str(load.load_format) == "dummy" else "",
        "dtype": str(model.dtype),
        "quantization": str(model.quantization),
        "kv_dtype": str(cache.cache_dtype),
        "kv_scales_calculated": bool(getattr(cache, "calculate_kv_scales", False)),
        "groups": _digest_json(
            [
                [repr(g.kv_cache_spec), sorted(g.layer_names)]
                for g in kv_cache_config.kv_cache_groups
            ]
        ),
        "layout": str(kv_cache_config.kv_cache_layout),
        "tp": parallel.tensor_parallel_size,
        "pp": parallel.pipeline_parallel_size,
        "dcp": getattr(parallel, "decode_context_parallel_size", 1),
        "pcp": getattr(parallel, "prefill_context_parallel_size", 1),
        "draft_model": str(getattr(speculative, "model", None)) if speculative else "",
    }
    fields.update({f"worker.{name}": value for name, value in worker_fields.items()})
    served = model.served_model_name
    about = {
        "model": str(served[0] if isinstance(served, list) else served or model.model),
        "engine": f"vllm {vllm.__version__}",
        "dtype": str(model.dtype).removeprefix("torch."),
        "kv_dtype": str(cache.cache_dtype),
    }
    return Namespace(fields, secret, about)


def scope(space: Namespace, request: Request) -> Scope:
    """The request's own part of the namespace: tenant and LoRA adapter."""
    lora = request.lora_request
    return space.scope(
        tenant=request.cache_salt,
        lora=lora.lora_name if lora else None,
        lora_weights=lora_digest(lora.lora_path) or lora.lora_path if lora else None,
    )


def media_extras(request: Request, chunk_tokens: int) -> dict[int, bytes]:
    """Images and the like, by the chunks that they reach into.

    Their placeholder tokens are the same for every image, so the identifier and where the chunk
    starts within the item go into the chunk's key.
    """
    extras: dict[int, list[str]] = {}
    for feature in request.mm_features:
        start, length = feature.mm_position.offset, feature.mm_position.length
        last = (start + max(length, 1) - 1) // chunk_tokens
        for index in range(start // chunk_tokens, last + 1):
            extras.setdefault(index, []).append(
                json.dumps([feature.identifier, start - index * chunk_tokens, length])
            )
    return {index: "\n".join(items).encode() for index, items in extras.items()}


def weights_digest(model: str, hf_config: Any) -> str:
    """Identity of the weights: the hub's commit, or samples of the local files."""
    path = Path(model)
    if not path.exists():
        return str(getattr(hf_config, "_commit_hash", None) or "")
    files = [path] if path.is_file() else sorted(path.iterdir())
    return _sampled_digest([f for f in files if f.suffix in _WEIGHT_SUFFIXES])


_lora_digests: dict[str, tuple[float, str]] = {}


def lora_digest(path: str) -> str:
    """Identity of an adapter's weights; empty where the path is no local directory.

    vLLM swaps adapters in place under one name (`load_inplace`), so the directory's modification
    time is looked at on every call and the files are read again when it moved.
    """
    try:
        files = sorted(f for f in Path(path).iterdir() if f.suffix in _WEIGHT_SUFFIXES)
        changed = max((f.stat().st_mtime for f in files), default=0.0)
    except OSError:
        return ""
    known = _lora_digests.get(path)
    if known is None or known[0] != changed:
        if len(_lora_digests) >= 1024:
            _lora_digests.clear()
        known = _lora_digests[path] = (changed, _sampled_digest(files))
    return known[1]


def _sampled_digest(files: list[Path]) -> str:
    """Names, sizes and evenly spread samples: finds other weights, not a single flipped bit."""
    digest = blake2b(digest_size=16)
    for file in files:
        size = file.stat().st_size
        digest.update(f"{file.name}\0{size}\0".encode())
        with file.open("rb", buffering=0) as stream:
            for i in range(_SAMPLES):
                stream.seek(max(0, (size - _SAMPLE_BYTES) * i // max(1, _SAMPLES - 1)))
                digest.update(stream.read(_SAMPLE_BYTES))
                if size <= _SAMPLE_BYTES:
                    break
    return digest.hexdigest() if files else ""


def _digest_json(value: Any) -> str:
    text = json.dumps(value, sort_keys=True, default=str)
    return blake2b(text.encode(), digest_size=16).hexdigest()
