# SPDX-License-Identifier: Apache-2.0
"""How long not to try again what failed for want of room: twice as long each time, bounded.

Owned by one thread; the clock is injected.
"""

from __future__ import annotations

from collections.abc import Callable

FIRST_SECONDS = 5.0
LONGEST_SECONDS = 60.0
"""What somebody tidied up is in use again after a minute at most."""


class Pause:
    """Over until the first `begin`."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._seconds = FIRST_SECONDS
        self._until = float("-inf")

    @property
    def is_over(self) -> bool:
        """True if it may be tried now."""
        return self._clock() >= self._until

    def begin(self) -> None:
        """It failed: wait, and longer the next time."""
        self._until = self._clock() + self._seconds
        self._seconds = min(2 * self._seconds, LONGEST_SECONDS)

    def reset(self) -> None:
        """It worked."""
        self._seconds = FIRST_SECONDS
        self._until = float("-inf")
