# SPDX-License-Identifier: Apache-2.0
"""Correct reused text by what a sample of it has drifted.

Another context shifts the keys and values of a whole piece of text by something that all its tokens
have in common: measured, a fifth of the squared difference between stored and freshly computed keys
before the rotation, and a tenth of that of values. Attention averages over tokens, so what they have
in common is what shows. It is cheap to learn: some evenly spaced tokens are computed anew in any
case (`BlendPlan.samples`), and in each layer and head the mean of what they differ by from the draft
is added to the rest of their segment.

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
        self.model = model
        self._segments = segments
        self._samples = samples
        self._turns: dict[Rope, Turns] = {}

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

    def turns(self, rope: Rope) -> Turns:
        """The rotation at each position of the prompt."""
        if rope not in self._turns:
            self._turns[rope] = Turns(rope, int(self._segments[-1, 1]), self.model)
        return self._turns[rope]


class Turns:
    """One rotation at each position, as a product that turns one key to many positions at once.

    What a key becomes at a position is a sum over its pairs of dimensions, of the pair times a
    cosine and the pair turned by a right angle times a sine: `cos_sin` times `basis` of the key.

    Attributes:
        cos_sin: of the model's dtype, [positions, 2 x pairs].
        width: of a key that is turned.
    """

    def __init__(self, rope: Rope, positions: int, model: BlendModel) -> None:
        angles = rope.angles(torch.arange(positions))
        self.cos_sin = torch.cat(angles, -1).to(model.device, model.dtype)
        self.width = self.cos_sin.shape[1]
        self._rope = rope
        self._angles = [part.to(model.device) for part in angles]
        one = torch.eye(self.width, device=model.device)
        half = self.width // 2
        self._ones = rope.spread(one[:, :half], one[:, half:])

    def back(self, keys: Tensor, at: Tensor) -> None:
        """Turn keys from the positions `at`, [tokens], to position 0, in place."""
        cos, sin = (part.index_select(0, at) for part in self._angles)
        self._rope.apply(keys, *self._rope.spread(cos, -sin))

    def basis(self, keys: Tensor) -> Tensor:
        """[..., width, width] of keys [..., dims] at position 0; what is not turned is left out."""
        basis = keys[..., None, : self.width].repeat_interleave(self.width, -2)
        self._rope.apply(basis, *self._ones)
        return basis


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
        self._counts = (mean > 0).sum(-1, keepdim=True)

    def correct(self, layer: int, keys: Tensor, values: Tensor, key: Tensor, value: Tensor) -> None:
        """Add to a layer's draft what it has drifted by. What was computed goes in afterwards.

        Args:
            keys, values: [heads, tokens, dims], the draft.
            key, value: [computed tokens, heads, dims].
        """
        rope = self._drift.model.layers[layer].rope
        if rope is None:
            self._add(self._shift(key, keys), keys)
        else:
            turns = self._drift.turns(rope)
            shift = self._shift(key, keys, turns)
            basis = turns.basis(shift).to(keys.dtype)
            for index, (begin, end) in enumerate(self._spans):
                angles = turns.cos_sin[None, begin:end].expand(len(keys), -1, -1)
                keys[:, begin:end, : turns.width].baddbmm_(angles, basis[:, index])
            if turns.width < keys.shape[-1]:
                self._add(shift[..., turns.width :], keys[..., turns.width :])
        self._add(self._shift(value, values), values)

    def _add(self, shift: Tensor, draft: Tensor) -> None:
        shift = shift.to(draft.dtype)
        for index, (begin, end) in enumerate(self._spans):
            draft[:, begin:end] += shift[:, index, None]

    def _shift(self, fresh: Tensor, draft: Tensor, turns: Turns | None = None) -> Tensor:
        """float32 [heads, segments, dims]; of keys as they are at position 0."""
        fresh = fresh.index_select(0, self._rows).transpose(0, 1)
        gap = fresh.float() - draft.index_select(1, self._at).float()
        if turns is not None:
            turns.back(gap, self._at)
        mean = self._mean @ gap
        power = mean.square().sum(-1, keepdim=True)
        spread = self._mean @ gap.square().sum(-1, keepdim=True) - power
        error = (spread / (self._counts - 1)).clamp_min(0)
        return mean * (power / (power + error).clamp_min(torch.finfo(power.dtype).tiny))
