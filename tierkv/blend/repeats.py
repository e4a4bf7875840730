# SPDX-License-Identifier: Apache-2.0
"""Prompts that come back are worth exact KV: count how often each was served blended."""

from __future__ import annotations

from collections import OrderedDict

MAX_PROMPTS = 65536
"""Remembered; the one that came longest ago is forgotten first."""


class Repeats:
    """Decides when a prompt is computed in full.

    Args:
        exact_after: blended servings after which it is; 0: never.
    """

    def __init__(self, exact_after: int) -> None:
        self._exact_after = exact_after
        self._served: OrderedDict[bytes, int] = OrderedDict()

    def due(self, key: bytes) -> bool:
        """Whether the prompt of this key is to be computed in full now."""
        return 0 < self._exact_after <= self._served.get(key, 0)

    def served(self, key: bytes) -> None:
        """The prompt was served blended."""
        self._served[key] = self._served.pop(key, 0) + 1
        if len(self._served) > MAX_PROMPTS:
            self._served.popitem(last=False)

    def clear(self) -> None:
        self._served.clear()
