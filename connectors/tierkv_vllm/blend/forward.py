# SPDX-License-Identifier: Apache-2.0
"""Recompute chosen tokens of a sequence over a draft of its KV.

The draft (`Scratch`) begins as what is known: exact prefix, donors' text with its keys turned, and
zeros where nothing is. A pass runs the model's own modules on chosen tokens only. In each layer
their fresh keys and values go into the draft first, then they attend to all of it that is before
them: chosen tokens see each other fresh, which is what CacheBlend and its successors do, and
everybody else as drafted and corrected (`drift`). With all tokens chosen it is the ordinary
computation.

Attention is PyTorch's own: dense, so that a choice scattered over the sequence costs one matrix
product and no kernel of the engine's is called in a way that it was not made for.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from tierkv.blend.plan import PASSAGE_TOKENS, PASSAGES
from tierkv_vllm.blend.drift import DriftPass
from tierkv_vllm.blend.model import BlendModel

BATCH_ROWS = 128
"""Chosen tokens that attend together. They see what is before the last of them, masked."""
MASKS_BYTES = 256 << 20
"""Memory of the masks of one pass, at most."""
BEFORE = 10
"""Tokens of a passage before the one that is pointed to. A fact is pointed to by its end, and what
it means stands before."""
WATCH_EVERY = 3
"""Layers of which one is watched: the choice is as good as from all of them, measured."""
WATCH_SHARE = 2 / 3
"""Of the model's depth that is watched; what is above need not be run."""


class _Enough(Exception):
    """All layers that are watched have been run."""


class Scratch:
    """A draft of a sequence's KV, outside the engine's pages.

    Attributes:
        keys, values: [layers x heads, tokens, dims], of the cache's dtype.
        tokens: length of the sequence.
    """

    def __init__(self, model: BlendModel, tokens: int, memory: Tensor | None = None) -> None:
        """A draft of `tokens` tokens.

        Args:
            memory: from `ScratchMemory`; holds anything. Without it there are zeros.
        """
        if memory is None:
            memory = _allocate(model, tokens).zero_()
        self.keys, self.values = memory[:, :, :tokens]
        self.tokens = tokens
        self.layers = len(model.layers)
        self._heads = model.heads

    def layer(self, index: int) -> tuple[Tensor, Tensor]:
        """Keys and values of one layer, [heads, tokens, dims]; views."""
        rows = slice(index * self._heads, (index + 1) * self._heads)
        return self.keys[rows], self.values[rows]


class ScratchMemory:
    """Memory of drafts, used again: the first touch of new memory costs as much as filling it.

    One block is kept, as large as the longest prompt was. Whoever finds it taken gets another.
    """

    def __init__(self, model: BlendModel) -> None:
        self._model = model
        self._kept: Tensor | None = None

    def take(self, tokens: int) -> Tensor:
        """[2, layers x heads, at least `tokens`, dims]; holds anything."""
        kept, self._kept = self._kept, None
        if kept is not None and kept.shape[2] >= tokens:
            return kept
        return _allocate(self._model, tokens)

    def give(self, memory: Tensor) -> None:
        """Take it back."""
        if self._kept is None or self._kept.shape[2] < memory.shape[2]:
            self._kept = memory


def _allocate(model: BlendModel, tokens: int) -> Tensor:
    shape = (2, len(model.layers) * model.heads, tokens, model.dims)
    return torch.empty(shape, dtype=model.dtype, device=model.device)


class Attention:
    """The attention of one pass over a scratch.

    Args:
        scratch: read and, at the chosen positions and by `drift`, written.
        positions: int64 [n] of the chosen tokens, ascending.
        group: query heads of one KV head.
        scale: of the scores.
        watch: run part of the model only, and add up, over heads and every `WATCH_EVERY`th layer,
            how much the chosen tokens attend to each token: `mass`, see `attended`.
        first: position of the first token that exists; nobody sees what is before it.
        drift: corrects what is not chosen.
        after_layer: called when a layer's keys and values are in the scratch.
    """

    def __init__(
        self,
        scratch: Scratch,
        positions: Tensor,
        *,
        group: int,
        scale: float,
        watch: bool = False,
        first: int = 0,
        drift: DriftPass | None = None,
        after_layer: Callable[[int], None] | None = None,
    ) -> None:
        self._scratch = scratch
        self._positions = positions
        self._scale = scale
        self._drift = drift
        self._after_layer = after_layer
        self._batches = [
            _Batch.of(part, first, group, scratch.keys.dtype)
            for part in torch.split(positions, BATCH_ROWS)
        ]
        device = scratch.keys.device
        self.mass = torch.zeros((2, scratch.tokens), device=device) if watch else None
        self._watched_layers = round(scratch.layers * WATCH_SHARE)

    def __call__(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        if self.mass is not None and layer >= self._watched_layers:
            raise _Enough
        keys, values = self._scratch.layer(layer)
        if self._drift is not None:
            self._drift.correct(layer, keys, values, key, value)
        keys[:, self._positions] = key.transpose(0, 1)
        values[:, self._positions] = value.transpose(0, 1)
        if self._after_layer is not None:
            self._after_layer(layer)
        out = torch.empty_like(query)
        begin = 0
        for batch in self._batches:
            end = begin + batch.rows
            heads = keys.shape[0]
            # Query heads of one KV head become rows: [heads, group x rows, dims].
            rows = query[begin:end]
            grouped = rows.reshape(len(rows), heads, -1, query.shape[2]).permute(1, 2, 0, 3)
            flat = grouped.reshape(heads, -1, query.shape[2])
            seen, mask = batch.seen, batch.mask
            if self.mass is not None and layer % WATCH_EVERY == WATCH_EVERY - 1:
                self.mass[:, :seen] += self._watched(flat, keys[:, :seen], mask)
            mixed = scaled_dot_product_attention(
                flat[None], keys[None, :, :seen], values[None, :, :seen], mask, scale=self._scale
            )[0]
            out[begin:end] = mixed.view(grouped.shape).permute(2, 0, 1, 3).flatten(1, 2)
            begin = end
        return out

    def _watched(self, query: Tensor, keys: Tensor, mask: Tensor) -> Tensor:
        # In float32: rounded to the cache's type, scores that have much in common all look alike.
        sums = torch.zeros((2, keys.shape[1]), device=keys.device)
        # Head by head: the scores of a long prompt are larger than its keys.
        for rows, those in zip(query, keys, strict=True):
            scores = (self._scale * rows.float()) @ those.float().T
            shares = scores.add_(mask).softmax(-1)
            sums[0] += shares.sum(0)
            sums[1] += shares.square_().square_().sum(0)
        return sums


@dataclass(frozen=True, slots=True, eq=False)
class _Batch:
    """Rows that attend together; `mask` is [group x rows, seen], 0 or -inf."""

    rows: int
    seen: int
    mask: Tensor

    @classmethod
    def of(cls, positions: Tensor, first: int, group: int, dtype: torch.dtype) -> _Batch:
        seen = int(positions[-1]) + 1
        keys = torch.arange(seen, device=positions.device)
        hidden = (keys > positions[:, None]) | (keys < first)
        mask = torch.zeros(hidden.shape, dtype=dtype, device=positions.device)
        return cls(len(positions), seen, mask.masked_fill_(hidden, -torch.inf).repeat(group, 1))


def most_at_once(model: BlendModel, tokens: int) -> int:
    """Tokens of a sequence of `tokens` that one pass may compute: their masks take memory."""
    token_bytes: int = model.group * tokens * model.dtype.itemsize
    return max(1, MASKS_BYTES // token_bytes)


def recompute(
    model: BlendModel,
    scratch: Scratch,
    tokens: Tensor,
    chosen: Tensor,
    **attention: Any,
) -> Tensor:
    """Compute the chosen tokens anew, into the scratch.

    Args:
        tokens: int64 [tokens] of the whole sequence.
        chosen: int64 [n], ascending positions.
        attention: see `Attention`.

    Returns:
        Hidden states of the chosen tokens.
    """
    attend = Attention(scratch, chosen, group=model.group, scale=model.scale, **attention)
    return model.forward(tokens[chosen], chosen, attend)


def attended(model: BlendModel, scratch: Scratch, tokens: Tensor, query: Tensor) -> Tensor:
    """How much the `query` positions attend to each token: float32 [2, tokens], in no unit.

    First sums of attention, then sums of its fourth powers. Most of the former is spread thinly, by
    all heads alike; the latter are those heads that have found what they look for, and point to it.

    Runs the query over the draft, as it is before any correction, through the lower part of the
    model. The scratch is left as it was: donors' text in the query is yet to be compared.
    """
    attend = Attention(scratch, query, group=model.group, scale=model.scale, watch=True)
    keys, values = scratch.keys[:, query], scratch.values[:, query]
    with contextlib.suppress(_Enough):
        model.forward(tokens[query], query, attend)
    scratch.keys[:, query], scratch.values[:, query] = keys, values
    assert attend.mass is not None
    return attend.mass


def choose(mass: Tensor, fixed: Tensor, exact: int, extra: int, passages: int = PASSAGES) -> Tensor:
    """The fixed positions and `extra` others, ascending.

    First what is around the tokens that the query points to, then those of most mass.

    Args:
        mass: as `attended` gives it.
        fixed: int64 positions.
        exact: leading positions that are not to be chosen.
        passages: places that are looked around.
    """
    left = mass.clone()
    left[:, :exact] = -torch.inf
    left[:, fixed] = -torch.inf
    spread, sharp = left
    bonus = torch.zeros_like(spread)
    window = torch.arange(-BEFORE, PASSAGE_TOKENS - BEFORE, device=mass.device)
    for _ in range(passages):
        around = (sharp.argmax() + window).clamp(exact, len(spread) - 1)
        bonus[around] = 1 + mass[0].sum()  # more than any token has by itself
        sharp[around] = -torch.inf
    return torch.cat([fixed, (spread + bonus).topk(extra).indices]).sort().values
