# SPDX-License-Identifier: Apache-2.0
"""Recompute chosen tokens of a sequence over a draft of its KV.

The draft (`Scratch`) begins as what is known: exact prefix, donors' text with its keys turned, and
zeros where nothing is. A pass runs the model's own modules on chosen tokens only. In each layer
their fresh keys and values go into the draft first, then they attend to all of it that is before
them: chosen tokens see each other fresh, which is what CacheBlend and its successors do, and
everybody else as drafted and corrected (`drift`). With all tokens chosen it is the ordinary
computation.

Attention is two dense matrix products with a softmax in between: a choice scattered over the
sequence needs no kernel of the engine's, called in a way that it was not made for. PyTorch's fused
attention takes twice as long for few rows over many keys (on CPUs without AMX, measured).
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tierkv.blend.plan import PASSAGE_TOKENS, PASSAGES
from tierkv_vllm.blend.drift import DriftPass
from tierkv_vllm.blend.model import BlendModel

BATCH_ROWS = 32
"""Chosen tokens that attend together, at most. They see what is before the last of them, masked."""
SCORES_BYTES = 64 << 20
"""Memory of the scores of one batch, about; fewer tokens attend together where it would be more."""
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
        layers, heads: of this rank's model.
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
        self.layers, self.heads = len(model.layers), model.heads

    def layer(self, index: int) -> tuple[Tensor, Tensor]:
        """Keys and values of one layer, [heads, tokens, dims]; views."""
        rows = slice(index * self.heads, (index + 1) * self.heads)
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
        self._first = first
        self._grouped = scratch.heads, group
        self._drift = drift
        self._after_layer = after_layer
        device, dtype, heads = scratch.keys.device, scratch.keys.dtype, scratch.heads
        row = heads * group * (int(positions[-1]) + 1 - first)  # scores of one chosen token
        rows = min(BATCH_ROWS, max(1, SCORES_BYTES // (row * dtype.itemsize)))
        self._batches = [_Batch.of(part, dtype) for part in torch.split(positions, rows)]
        # Made once: new memory for each product would take as long as the product.
        self._scores, self._shares = torch.empty((2, rows * row), dtype=dtype, device=device)
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
        watched = self.mass is not None and layer % WATCH_EVERY == WATCH_EVERY - 1
        out = torch.empty_like(query)
        begin = 0
        for batch in self._batches:
            end = begin + batch.rows
            seen = slice(self._first, batch.seen)
            # Query heads of one KV head become rows: [heads, group x rows, dims].
            rows = query[begin:end].view(batch.rows, *self._grouped, -1).permute(1, 2, 0, 3)
            shares = self._attended(rows, keys[:, seen], batch)
            mixed = torch.bmm(shares, values[:, seen])
            out[begin:end] = mixed.view(rows.shape).permute(2, 0, 1, 3).flatten(1, 2)
            if watched:
                assert self.mass is not None
                shares = shares.float()
                self.mass[0, seen] += shares.sum((0, 1))
                self.mass[1, seen] += shares.square_().square_().sum((0, 1))
            begin = end
        return out

    def _attended(self, rows: Tensor, keys: Tensor, batch: _Batch) -> Tensor:
        """What each row takes of each key: [heads, group x rows, keys], valid until the next."""
        heads, group, count, _ = rows.shape
        shape = (heads, group * count, keys.shape[1])
        scores, shares = (
            memory[: math.prod(shape)].view(shape) for memory in (self._scores, self._shares)
        )
        _multiply(rows.flatten(1, 2), keys, self._scale, scores)
        only_some = batch.mask.shape[1]
        scores.view(heads, group, count, -1)[..., -only_some:] += batch.mask
        return torch.softmax(scores, -1, out=shares)


def _multiply(rows: Tensor, keys: Tensor, scale: float, scores: Tensor) -> None:
    """`scores` [heads, rows, keys] become `scale` times `rows` times `keys`."""
    if not keys.is_cpu:
        scores.baddbmm_(rows, keys.mT, beta=0, alpha=scale)
        return
    # Of all heads together it would first copy keys that are part of a longer sequence.
    for product, left, right in zip(scores, rows, keys, strict=True):
        product.addmm_(left, right.T, beta=0, alpha=scale)


@dataclass(frozen=True, slots=True, eq=False)
class _Batch:
    """Rows that attend together.

    Attributes:
        rows: how many.
        seen: keys that the last of them sees.
        mask: [rows, keys behind those that all of them see], 0 or -inf.
    """

    rows: int
    seen: int
    mask: Tensor

    @classmethod
    def of(cls, positions: Tensor, dtype: torch.dtype) -> _Batch:
        begin, seen = int(positions[0]), int(positions[-1]) + 1
        hidden = torch.arange(begin, seen, device=positions.device) > positions[:, None]
        mask = torch.zeros(hidden.shape, dtype=dtype, device=positions.device)
        return cls(len(positions), seen, mask.masked_fill_(hidden, -torch.inf))


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
