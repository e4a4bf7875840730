# SPDX-License-Identifier: Apache-2.0
"""Correct reused text by what a sample of it has drifted.

Another context shifts the keys and values of a whole piece of text, most of all by what all its
tokens have in common: measured, a quarter to a half of the difference between a stored and a
freshly computed layer is the same for every token of a document, before the rotation. Attention
averages over tokens, so what they have in common is what shows. It is cheap to learn: some evenly
spaced tokens are computed anew in any case (`BlendPlan.samples`), and in each layer and head the
mean of what they differ by from the draft is added to the rest of their segment.

The mean is trusted as far as the samples agree: it is scaled by p / (p + e), where p is its squared
length and e the variance of a mean of so many samples (Wiener's filter).
"""

from __future__ import annotations

import torch
from torch import Tensor

from tierkv_vllm.blend.model import BlendModel
from tierkv_vllm.blend.rope import Rope

LEAST_SAMPLES = 2
"""Of a segment: one alone does not tell how far it can be trusted."""


class Drift:
    """Of one prompt: which parts drift alike, and the tokens that tell by how much.

    Args:
        model: whose keys they are.
        segments: int64 [n, 2] on the CPU, ascending: [begin, end) of each.
        samples: int64 positions on the CPU, ascending; all are among the tokens that are computed.
    """

    def __init__(self, model: BlendModel, segments: Tensor, samples: Tensor) -> None:
        self._model = model
        self._segments = segments
        self._samples = samples
        self._tables: dict[Rope, tuple[Tensor, Tensor]] = {}

    def during(self, chosen: Tensor, first: int, end: int) -> Pass | None:
        """For a pass that computes, of the positions [first, end), these.

        Args:
            chosen: int64 [n], ascending.

        Returns:
            None if there is nothing to learn from them.
        """
        spans, ats, means = [], [], []
        count = 0
        for begin, stop in self._segments.clamp(first, end).tolist():
            low, high = torch.searchsorted(self._samples, torch.tensor([begin, stop])).tolist()
            if high - low >= LEAST_SAMPLES:
                spans.append((begin, stop))
                ats.append(self._samples[low:high])
                means.append((count, count + high - low))
                count += high - low
        if not spans:
            return None
        mean = torch.zeros(len(spans), count)
        for row, (low, high) in zip(mean, means, strict=True):
            row[low:high] = 1 / (high - low)
        at = torch.cat(ats).to(chosen.device)
        return Pass(self, spans, at, torch.searchsorted(chosen, at), mean.to(chosen.device))

    def table(self, layer: int) -> tuple[Rope, Tensor, Tensor] | None:
        """A layer's rotation and its angles at each position; None if it has no positions."""
        rope = self._model.layers[layer].rope
        if rope is None:
            return None
        if rope not in self._tables:
            cos, sin = rope.table(torch.arange(int(self._segments[-1, 1])))
            device = self._model.device
            self._tables[rope] = cos.to(device), sin.to(device)
        return rope, *self._tables[rope]


class Pass:
    """Of one pass of the model: see `Drift.during`."""

    def __init__(
        self,
        drift: Drift,
        spans: list[tuple[int, int]],
        at: Tensor,
        rows: Tensor,
        mean: Tensor,
    ) -> None:
        self._drift = drift
        self._spans = spans
        self._at = at
        self._rows = rows
        self._mean = mean

    def correct(self, layer: int, keys: Tensor, values: Tensor, key: Tensor, value: Tensor) -> None:
        """Add to a layer's draft what it has drifted by. What was computed goes in afterwards.

        Args:
            keys, values: [heads, tokens, dims], the draft.
            key, value: [computed tokens, heads, dims].
        """
        shift = self._shift(value, values)
        for index, (begin, end) in enumerate(self._spans):
            values[:, begin:end] += shift[:, index, None]
        table = self._drift.table(layer)
        if table is None:
            shift = self._shift(key, keys)
            for index, (begin, end) in enumerate(self._spans):
                keys[:, begin:end] += shift[:, index, None]
            return
        rope, cos, sin = table
        shift = self._shift(key, keys, (rope, cos[self._at], -sin[self._at]))
        for index, (begin, end) in enumerate(self._spans):
            turned = shift[:, index, None].repeat(1, end - begin, 1)
            rope.apply(turned, cos[begin:end], sin[begin:end])
            keys[:, begin:end] += turned

    def _shift(
        self, fresh: Tensor, draft: Tensor, turn: tuple[Rope, Tensor, Tensor] | None = None
    ) -> Tensor:
        """float32 [heads, segments, dims]; of keys as they are before the rotation."""
        gap = fresh[self._rows].transpose(0, 1).float() - draft[:, self._at].float()
        if turn is not None:
            rope, cos, sin = turn
            rope.apply(gap, cos, sin)
        mean = self._mean @ gap
        power = mean.square().sum(-1, keepdim=True)
        spread = self._mean @ gap.square().sum(-1, keepdim=True) - power
        count = (self._mean > 0).sum(-1, keepdim=True)
        error = (spread / (count - 1)).clamp_min(0)
        return mean * (power / (power + error).clamp_min(torch.finfo(power.dtype).tiny))
