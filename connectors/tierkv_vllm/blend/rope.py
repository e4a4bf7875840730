# SPDX-License-Identifier: Apache-2.0
"""Turn keys to another position: exact up to one rounding, from the stored original.

A rotary embedding turns each pair of a key's dimensions by `position x frequency`, so a key that
was computed at one position becomes that of another by one more turn, by the difference. Values
and whatever the rotation leaves out do not depend on the position.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from tierkv.errors import UnsupportedError

EXACT = {
    "RotaryEmbedding": lambda rope: rope._compute_inv_freq(rope.base),
    "Llama3RotaryEmbedding": lambda rope: rope._compute_inv_freq(rope.base),
    "YaRNScalingRotaryEmbedding": lambda rope: rope._compute_inv_freq(rope.scaling_factor),
    "LinearScalingRotaryEmbedding": lambda rope: (
        rope._compute_inv_freq(rope.base) / rope.scaling_factors[0]
    ),
}
"""vLLM's rotary embeddings whose frequencies do not depend on the sequence's length, by class, with
where each keeps them. The embedding's own table of cosines is of no use: it is rounded, and for
YaRN it holds a factor that stored keys have already."""


@dataclass(frozen=True, slots=True, eq=False)
class Rope:
    """How one layer's keys are turned.

    Attributes:
        frequencies: float32 [rotary_dim / 2], radians a token.
        neox: pairs are (i, i + rotary_dim / 2); otherwise (2i, 2i + 1).
    """

    frequencies: Tensor
    neox: bool

    @classmethod
    def of(cls, module: nn.Module) -> Rope:
        """The rotation of one of vLLM's rotary embeddings.

        Raises:
            UnsupportedError: its keys cannot be turned exactly.
        """
        kind = type(module).__name__
        frequencies = EXACT.get(kind)
        if frequencies is None or len(getattr(module, "scaling_factors", ())) > 1:
            raise UnsupportedError(f"keys of a {kind} cannot be turned exactly")
        return cls(frequencies(module).float().cpu(), bool(module.is_neox_style))

    def turn(self, keys: Tensor, by: int) -> None:
        """Move `keys` by `by` tokens (either sign), in place.

        Args:
            keys: [..., head_size], any strides and floating dtype; the arithmetic is float32.
        """
        if by:
            cos, sin = _distance(self, by)
            self.apply(keys, cos.to(keys.device), sin.to(keys.device))

    def angles(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """By how much each pair of dimensions is turned.

        Args:
            positions: int64, any shape, on the CPU.

        Returns:
            Cosines and sines, float32 [*positions.shape, rotary_dim / 2].
        """
        # float64: the product of a large distance and a frequency loses digits in float32, in
        # which the rest of a full turn has enough of them.
        angles = positions[..., None] * self.frequencies.double()
        turn = angles.remainder(2 * math.pi).float()
        return turn.cos(), turn.sin()

    def spread(self, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        """Angles of pairs, [..., rotary_dim / 2], as `apply` takes them: [..., rotary_dim].

        Each dimension gets its pair's cosine, and the sine with the sign of its partner's part.
        """
        if self.neox:
            return torch.cat([cos, cos], -1), torch.cat([-sin, sin], -1)
        return torch.stack([cos, cos], -1).flatten(-2), torch.stack([-sin, sin], -1).flatten(-2)

    def apply(self, keys: Tensor, cos: Tensor, sin: Tensor) -> None:
        """Turn `keys` in place; with `-sin` the other way.

        Args:
            keys: [..., head_size], any strides and floating dtype; the arithmetic is float32.
            cos, sin: from `spread`, of a shape that broadcasts to [..., rotary_dim].
        """
        turned = keys[..., : 2 * len(self.frequencies)]
        x = turned.float()
        if self.neox:
            partner = x.roll(len(self.frequencies), -1)
        else:
            partner = x.view(*x.shape[:-1], len(self.frequencies), 2).flip(-1).flatten(-2)
        turned.copy_(torch.addcmul(x * cos, partner, sin))


@functools.lru_cache(maxsize=16)
def _distance(rope: Rope, by: int) -> tuple[Tensor, Tensor]:
    """The same for each layer of a run."""
    return rope.spread(*rope.angles(torch.tensor(by)))
