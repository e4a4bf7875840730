# SPDX-License-Identifier: Apache-2.0
"""Child process of `tierkv.demo.model` that writes model directories; the only user of torch here.

Called as `python -m tierkv.demo.convert KIND SOURCE FOLDER`.
"""

from __future__ import annotations

import sys
from pathlib import Path


def convert_gguf(source: Path, folder: Path) -> None:
    """GGUF file `source` to bfloat16 safetensors, tokenizer and chat template in `folder`."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    where = {"pretrained_model_name_or_path": str(source.parent), "gguf_file": source.name}
    tokenizer = AutoTokenizer.from_pretrained(**where)
    if not tokenizer.chat_template:
        raise ValueError(f"{source}: no chat template in the GGUF file")
    model = AutoModelForCausalLM.from_pretrained(
        **where,
        dtype=torch.bfloat16,
        # Without it the weights stay in GGUF's own packing, which cannot be written back.
        quantization_config=GgufConfig(dequantize=True),
    )
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def random_llama(source: Path, folder: Path) -> None:
    """A random Llama of 4 heads, 2 KV heads and 4 layers, with the tokenizer in `source`."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig

    tokenizer = AutoTokenizer.from_pretrained(source)
    torch.manual_seed(0)
    # Weights larger than usual: with the customary 0.02 attention is so flat that the next token
    # hardly depends on the KV cache, and a test of its bytes could not fail.
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=8192,
        initializer_range=0.15,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    model = AutoModelForCausalLM.from_config(  # type: ignore[no-untyped-call]
        config, dtype=torch.bfloat16
    )
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def main() -> None:
    kind, source, folder = sys.argv[1:]
    {"gguf": convert_gguf, "random-llama": random_llama}[kind](Path(source), Path(folder))


if __name__ == "__main__":
    main()
