# SPDX-License-Identifier: Apache-2.0
"""A 64-bit hash of every window of a token sequence, all windows at once.

    S[i] = sum of x[j] * b^j for j < i,  window i = (S[i + n] - S[i]) * b^-i,  modulo 2^64

x is a keyed mix of the token id, b odd. The low bits of such a polynomial are weak, so the result
is mixed once more. Only a filter: whoever finds equal hashes compares the text.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from tierkv.keys import TokenIds

Hashes = npt.NDArray[np.uint64]

_BASE = 0x9E3779B97F4A7C15
_MODULUS = 1 << 64


class Fingerprints:
    """Hashes of windows of one length.

    Args:
        window: tokens.
        seed: 8 bytes or more; windows hash alike only under the same one.
    """

    def __init__(self, window: int, seed: bytes) -> None:
        self.window = window
        self._seed = np.uint64(int.from_bytes(seed[:8], "little"))
        self._powers = self._inverse = np.ones(1, np.uint64)

    def of(self, tokens: TokenIds) -> Hashes:
        """uint64 [len(tokens) - window + 1]; empty if there is no whole window. Hot path.

        Args:
            tokens: int32 [n].
        """
        count = len(tokens) - self.window + 1
        if count <= 0:
            return np.empty(0, np.uint64)
        self._grow(len(tokens))
        sums = np.zeros(len(tokens) + 1, np.uint64)
        np.cumsum(
            _mix(tokens.astype(np.uint64) ^ self._seed) * self._powers[: len(tokens)], out=sums[1:]
        )
        return _mix((sums[self.window :] - sums[:count]) * self._inverse[:count])

    def _grow(self, length: int) -> None:
        if length <= len(self._powers):
            return
        length = 1 << (length - 1).bit_length()
        self._powers = _powers_of(_BASE, length)
        self._inverse = _powers_of(pow(_BASE, -1, _MODULUS), length)


def _powers_of(base: int, count: int) -> Hashes:
    factors = np.full(count, base, np.uint64)
    factors[0] = 1
    return np.multiply.accumulate(factors)


def _mix(values: Hashes) -> Hashes:
    """The finaliser of splitmix64 (Steele, Lea, Flood 2014): every bit depends on every bit."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))
