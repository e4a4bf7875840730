# SPDX-License-Identifier: Apache-2.0
"""Read keys and values out of the pages in which an attention backend keeps them.

Writing needs no knowledge of the layout: the backend's own cache-write operator does it. Reading
has no such operator, so the layouts are known here, and each is tried at start by writing with the
one and reading with the other. One that does not come back bit for bit is not used.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tierkv.errors import UnsupportedError

Split = Callable[[Tensor, int, int], tuple[Tensor, Tensor]]
"""(pages [blocks, heads, 2 x tokens x dims], tokens, dims) to views of keys and values whose axes,
the first left alone, flatten to [heads, blocks x tokens, dims]."""


def _interleaved(pages: Tensor, tokens: int, dims: int) -> tuple[Tensor, Tensor]:
    """Of each head and token first its key, then its value (GPU backends)."""
    both = pages.view(*pages.shape[:2], tokens, 2, dims)
    return both[..., 0, :].transpose(0, 1), both[..., 1, :].transpose(0, 1)


def _transposed(pages: Tensor, tokens: int, dims: int) -> tuple[Tensor, Tensor]:
    """CPU attention with AVX: of each head all keys, [dims, tokens], then all values."""
    keys, values = pages.view(*pages.shape[:2], 2, tokens * dims).unbind(2)
    keys = keys.view(*pages.shape[:2], dims, tokens).transpose(2, 3)
    return keys.transpose(0, 1), values.view(*pages.shape[:2], tokens, dims).transpose(0, 1)


def _tiles(pages: Tensor, tokens: int, dims: int) -> tuple[Tensor, Tensor]:
    """CPU attention with AMX: keys and values in tiles of 16, in pairs."""
    keys, values = pages.view(*pages.shape[:2], 2, tokens * dims).unbind(2)
    keys = keys.view(*pages.shape[:2], tokens // 16, dims // 2, 16, 2)
    values = values.view(*pages.shape[:2], dims // 16, tokens // 2, 16, 2)
    return (
        keys.permute(1, 0, 2, 4, 3, 5),  # head, block, group, token, pair, parity
        values.permute(1, 0, 3, 5, 2, 4),  # head, block, pair, parity, group, dim
    )


LAYOUTS: dict[str, Split] = {
    "amx": _tiles,
    "vec": _transposed,
    "vec16": _transposed,
    "": _interleaved,
}
"""By what vLLM's CPU backend calls its instruction set; nothing on other devices."""


def _is_pairs(elements: Tensor) -> bool:
    """Whether its last axis holds two elements that can be taken for one of twice the size."""
    *strides, last = elements.stride()
    even = not any(n % 2 for n in (*strides, elements.storage_offset()))
    return elements.itemsize == 2 and elements.shape[-1] == 2 and last == 1 and even


@dataclass(frozen=True, slots=True)
class PageReader:
    """Keys and values of one layer's pages, or of equal layers side by side.

    Attributes:
        heads, tokens, dims: KV heads of this rank, tokens in a block, size of a head.
        dtype: of an element.
        split: the layout.
    """

    heads: int
    tokens: int
    dims: int
    dtype: torch.dtype
    split: Split

    @classmethod
    def of(cls, layer: Any, cache: Tensor) -> PageReader:
        """The reader of one attention layer, tried on pages of its own.

        Args:
            layer: vLLM's `Attention`.
            cache: its KV cache, [blocks, heads, tokens, 2 x dims].

        Raises:
            UnsupportedError: a layout that is not known or does not read back.
        """
        isa = str(getattr(layer, "isa", ""))
        split = LAYOUTS.get(isa)
        _, heads, tokens, width = cache.shape
        if split is None or width % 2 or not cache.dtype.is_floating_point or cache.itemsize < 2:
            raise UnsupportedError(f"pages of {cache.dtype} and instruction set {isa!r}")
        reader = cls(heads, tokens, width // 2, cache.dtype, split)
        reader._try(layer, cache)
        return reader

    @property
    def page_elements(self) -> int:
        return 2 * self.heads * self.tokens * self.dims

    def read(self, pages: Tensor, keys: Tensor, values: Tensor) -> None:
        """Copy whole blocks out: one strided copy each for keys and values.

        Args:
            pages: [blocks, rows, 2 x tokens x dims] of `dtype`; rows are heads, of one layer or
                of several.
            keys, values: [rows, blocks x tokens, dims], written.
        """
        both = self.split(pages, self.tokens, self.dims)
        for source, target in zip(both, (keys, values), strict=True):
            into = target.view(source.shape)
            if _is_pairs(source) and _is_pairs(into):
                # Pairs that stay together are copied as one: less than half the time.
                source, into = source.view(torch.int32), into.view(torch.int32)
            into.copy_(source)

    def _try(self, layer: Any, cache: Tensor) -> None:
        like: dict[str, Any] = {"dtype": self.dtype, "device": cache.device}
        trial = torch.zeros((2, *cache.shape[1:]), **like)
        shape = (2 * self.tokens, self.heads, self.dims)
        generator = torch.Generator().manual_seed(1)
        keys = torch.randn(shape, generator=generator).to(**like)
        values = torch.randn(shape, generator=generator).to(**like)
        slots = torch.arange(shape[0], dtype=torch.int64, device=cache.device)
        layer.impl.do_kv_cache_update(layer, keys, values, trial, slots)
        got = torch.empty((2, self.heads, shape[0], self.dims), **like)
        self.read(trial.view(2, self.heads, -1), got[0], got[1])
        for read, written in zip(got, (keys, values), strict=True):
            if not torch.equal(read, written.transpose(0, 1)):
                raise UnsupportedError(f"pages of {type(layer.impl).__name__} do not read back")
