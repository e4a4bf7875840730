# SPDX-License-Identifier: Apache-2.0
"""Correct reused text by what a sample of it has drifted.

Another context shifts the keys and values of a whole piece of text by something that all its
tokens have in common: measured, a fifth of the squared difference between stored and freshly
computed keys before the rotation, and a tenth of that of values. Attention averages over tokens, so
what they have in common is what shows. It is cheap to learn: some evenly spaced tokens are computed
anew in any case (`BlendPlan.samples`), and in each layer and head the mean of what they differ by
from the draft is added to the rest of their segment.

The mean is trusted as far as the samples agree: it is scaled by p / (p + e), where p is its squared
length and e the variance of a mean of so many samples (Wiener's filter).
"""

from __future__ import annotations

import torch
from torch import Tensor

from tierkv.blend.plan import MIN_SAMPLES
from tierkv_vllm.blend.model import BlendModel
from tierkv_vllm.blend.rope import Rope

BASES_AT_ONCE = 16
"""Segments whose `Rotation.basis` is in memory together."""


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
        self._rotations: dict[Rope, Rotation] = {}

    def during(self, chosen: Tensor, first: int, end: int) -> DriftPass | None:
        """The correction of the positions [first, end), for the pass that computes some of them.

        Passes that share a segment correct it each for its part, by its own samples of it.

        Args:
            chosen: int64 [n], ascending: the positions that are computed.

        Returns:
            None if there is nothing to learn from them.
        """
        spans, samples = [], []
        for begin, stop in self._segments.clamp(first, end).tolist():
            low, high = torch.searchsorted(self._samples, torch.tensor([begin, stop])).tolist()
            if high - low >= MIN_SAMPLES:
                spans.append((begin, stop))
                samples.append(self._samples[low:high])
        return DriftPass(self, spans, samples, chosen) if spans else None

    def rotation(self, rope: Rope) -> Rotation:
        """A layer's rotation at each position of the prompt; made once."""
        if rope not in self._rotations:
            self._rotations[rope] = Rotation(rope, int(self._segments[-1, 1]), self.model)
        return self._rotations[rope]


class Rotation:
    """One rotation at each position, as a product that turns one key to many positions at once.

    What a key becomes at a position is a sum over its pairs of dimensions, of the pair times a
    cosine and the pair turned by a right angle times a sine: `cos_sin` times `basis` of the key.

    Attributes:
        cos_sin: of the model's dtype, [positions, 2 x pairs].
        width: of a key that is turned.
    """

    def __init__(self, rope: Rope, positions: int, model: BlendModel) -> None:
        angles = torch.cat(rope.angles(torch.arange(positions)), -1)
        self.cos_sin = angles.to(model.dtype).to(model.device)
        self.width = angles.shape[1]
        self._rope = rope
        one = torch.eye(self.width, device=model.device)
        half = self.width // 2
        self._ones = rope.spread(one[:, :half], one[:, half:])

    def basis(self, keys: Tensor) -> Tensor:
        """[..., width, width] of keys [..., dims] at position 0; what is not turned is left out."""
        basis = keys[..., None, : self.width].repeat_interleave(self.width, -2)
        self._rope.apply(basis, *self._ones)
        return basis


class DriftPass:
    """The correction that goes with one pass of the model: see `Drift.during`.

    Args:
        drift: whose pass it is.
        spans: [begin, end) of what is corrected.
        samples: of each span, int64 positions on the CPU.
        chosen: int64 [n], ascending: the positions that the pass computes.
    """

    def __init__(
        self,
        drift: Drift,
        spans: list[tuple[int, int]],
        samples: list[Tensor],
        chosen: Tensor,
    ) -> None:
        self._drift = drift
        self._spans = spans
        self._samples = torch.cat(samples)
        self._at = self._samples.to(chosen.device)
        self._rows = torch.searchsorted(chosen, self._at)
        counts = torch.tensor([len(part) for part in samples])
        owner = torch.repeat_interleave(torch.arange(len(spans)), counts)
        # Times this, a sum over all samples is the mean of each span's own.
        self._mean = (torch.eye(len(spans)) / counts)[owner].T.to(chosen.device)
        self._counts = counts[:, None].to(chosen.device)
        self._back: dict[Rope, tuple[Tensor, Tensor]] = {}

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
            self._add_turned(self._shift(key, keys, rope), keys, self._drift.rotation(rope))
        self._add(self._shift(value, values), values)

    def _add(self, shift: Tensor, draft: Tensor) -> None:
        shift = shift.to(draft.dtype)
        for index, (begin, end) in enumerate(self._spans):
            draft[:, begin:end] += shift[:, index, None]

    def _add_turned(self, shift: Tensor, keys: Tensor, rotation: Rotation) -> None:
        width = rotation.width
        for index, (begin, end) in enumerate(self._spans):
            at = index % BASES_AT_ONCE
            if at == 0:
                bases = rotation.basis(shift[:, index : index + BASES_AT_ONCE]).to(keys.dtype)
            angles = rotation.cos_sin[None, begin:end].expand(len(keys), -1, -1)
            keys[:, begin:end, :width].baddbmm_(angles, bases[:, at])
        if width < keys.shape[-1]:
            self._add(shift[..., width:], keys[..., width:])

    def _shift(self, fresh: Tensor, draft: Tensor, rope: Rope | None = None) -> Tensor:
        """float32 [heads, spans, dims]; of keys as they are at position 0."""
        fresh = fresh.index_select(0, self._rows).transpose(0, 1)
        gap = fresh.float() - draft.index_select(1, self._at).float()
        if rope is not None:
            rope.apply(gap, *self._turn_back(rope))
        mean = self._mean @ gap
        power = mean.square().sum(-1, keepdim=True)
        spread = self._mean @ gap.square().sum(-1, keepdim=True) - power
        error = (spread / (self._counts - 1)).clamp_min(0)
        return mean * (power / (power + error).clamp_min(torch.finfo(power.dtype).tiny))

    def _turn_back(self, rope: Rope) -> tuple[Tensor, Tensor]:
        """From the samples' positions to position 0."""
        if rope not in self._back:
            cos, sin = rope.spread(*rope.angles(-self._samples))
            device = self._at.device
            self._back[rope] = cos.to(device), sin.to(device)
        return self._back[rope]
