# SPDX-License-Identifier: Apache-2.0
"""Capacities as a person writes them, in chunks: `64GiB` for a known model, `4Mtokens` for any."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tierkv.config.units import approximate_size, format_size, parse_size
from tierkv.errors import TierKVError
from tierkv.pages.layout import align_up

_TOKENS = re.compile(r"([0-9]+(?:\.[0-9]+)?)\s?([kMG]?)\s?tokens?")
_SCALE = {"": 1, "k": 10**3, "M": 10**6, "G": 10**9}
_DTYPE_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}

SWEPT = 6
"""DRAM capacities tried by default, each twice the one before."""


@dataclass(frozen=True, slots=True)
class Capacity:
    """Room for chunks.

    Attributes:
        text: as written, or the shortest way to write it.
        chunks: whole ones that fit.
        nbytes: None where the size of a token is not known.
    """

    text: str
    chunks: int
    nbytes: int | None


@dataclass(frozen=True, slots=True)
class Scale:
    """From tokens to bytes.

    Attributes:
        block_tokens: tokens in a chunk.
        bytes_per_token: of KV, all layers and ranks; None: not known, so capacities are in tokens.
    """

    block_tokens: int
    bytes_per_token: int | None = None

    @property
    def chunk_bytes(self) -> int | None:
        """What one chunk takes in DRAM and on disk."""
        if self.bytes_per_token is None:
            return None
        return align_up(self.bytes_per_token * self.block_tokens)

    def parse(self, text: str) -> Capacity:
        """A capacity as written.

        Raises:
            ValueError: unclear, or not even one chunk; the message is for the user.
        """
        text = text.strip()
        match = _TOKENS.fullmatch(text)
        size = self.chunk_bytes
        if match is not None:
            chunks = int(float(match[1]) * _SCALE[match[2]]) // self.block_tokens
            nbytes = None if size is None else chunks * size
        elif size is None:
            parse_size(text)  # says what is wrong with what is no size either
            raise ValueError(
                f"{text!r} needs to know the model: give --model DIR or --bytes-per-token N, or "
                "write capacities like 4Mtokens"
            )
        else:
            nbytes = parse_size(text)
            chunks = nbytes // size
        if chunks < 1:
            raise ValueError(f"{text!r} has no room for one chunk of {self.block_tokens} tokens")
        return Capacity(text, chunks, nbytes)

    def of_chunks(self, chunks: int) -> str:
        """About how much so many chunks take, in words."""
        if self.chunk_bytes is None:
            return approximate_tokens(chunks * self.block_tokens)
        return approximate_size(chunks * self.chunk_bytes)

    def sweep(self, distinct_chunks: int) -> tuple[list[Capacity], list[Capacity]]:
        """Capacities worth trying for a trace: of DRAM and of disk.

        DRAM doubles from about a hundredth of what would hold everything up to about a third; the
        disk holds about a third: what holds everything has the ceiling.
        """
        size = self.chunk_bytes
        unit = size if size is not None else self.block_tokens
        everything = _power_of_two(max(distinct_chunks, 1) * unit)
        dram = [everything >> shift for shift in range(SWEPT + 1, 1, -1)]
        disk = [everything >> 2]
        return (
            [self._exact(n, unit) for n in dram if n >= unit] or [self._exact(unit, unit)],
            [self._exact(n, unit) for n in disk if n >= unit],
        )

    def _exact(self, amount: int, unit: int) -> Capacity:
        if self.chunk_bytes is None:
            chunks = amount // unit
            return Capacity(approximate_tokens(amount), chunks, None)
        return Capacity(format_size(amount), amount // unit, amount)


def approximate_tokens(tokens: int) -> str:
    """So many tokens in few digits, as `parse` would read it: 4.2Mtokens."""
    for unit in ("G", "M", "k"):
        if tokens >= _SCALE[unit]:
            return f"{tokens / _SCALE[unit]:.4g}{unit}tokens"
    return f"{tokens}tokens"


def bytes_per_token(model: Path) -> int:
    """Bytes of KV a token of a model takes, from its `config.json`.

    Every layer is taken to keep every token at the model's own dtype: an upper bound for models
    with windows or states, and twice too much with an fp8 KV cache.

    Raises:
        TierKVError: no such file, or it does not tell.
    """
    path = model / "config.json"
    try:
        config = json.loads(path.read_text("utf-8"))
        config = config.get("text_config", config)
        layers = int(config["num_hidden_layers"])
        size = _dtype_bytes(config)
        if "kv_lora_rank" in config:  # MLA keeps one latent and one rotated part a layer
            return layers * (int(config["kv_lora_rank"]) + int(config["qk_rope_head_dim"])) * size
        heads = int(config["num_attention_heads"])
        kv_heads = int(config.get("num_key_value_heads") or heads)
        head_dim = int(config.get("head_dim") or int(config["hidden_size"]) // heads)
    except OSError as error:
        raise TierKVError(
            f"{path}: cannot be read ({error.strerror}); --model takes a directory with a "
            "config.json, or give --bytes-per-token N"
        ) from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise TierKVError(
            f"{path}: does not tell the size of the KV cache ({error}); give --bytes-per-token N"
        ) from error
    return 2 * layers * kv_heads * head_dim * size


def _dtype_bytes(config: dict[str, Any]) -> int:
    name = str(config.get("dtype") or config.get("torch_dtype") or "bfloat16")
    return _DTYPE_BYTES[name.removeprefix("torch.")]


def _power_of_two(amount: int) -> int:
    """The smallest that is not less."""
    return 1 << max(0, amount - 1).bit_length()
