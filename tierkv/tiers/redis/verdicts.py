# SPDX-License-Identifier: Apache-2.0
"""What the server last said about each key, so that a lookup needs no round trip.

"There" is believed until a load shows otherwise or the server was away; "not there" for a moment
only, since another engine may store it. Both tables are bounded: the oldest eighth is forgotten
when one is full, and forgotten means asked again.

Threads and ownership. The event loop changes the tables; `presence` and `len` may be called from
any thread: each reads a single entry of a dict.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import islice
from typing import TypeVar

from tierkv.tiers.base import Presence

MAX_HITS = 1 << 18
MAX_MISSES = 1 << 16

V = TypeVar("V")


class Verdicts:
    """See the module.

    Args:
        clock: seconds, monotonic.
        miss_seconds: how long "not there" is believed.
    """

    def __init__(
        self,
        clock: Callable[[], float],
        miss_seconds: float,
        *,
        max_hits: int = MAX_HITS,
        max_misses: int = MAX_MISSES,
    ) -> None:
        self._clock = clock
        self._miss_seconds = miss_seconds
        self._max_hits = max_hits
        self._max_misses = max_misses
        self._hits: dict[bytes, float] = {}  # to when its life on the server is to be renewed
        self._misses: dict[bytes, float] = {}  # to when that is no longer believed

    def presence(self, key: bytes) -> Presence:
        """Any thread."""
        if key in self._hits:
            return Presence.HIT
        until = self._misses.get(key)
        if until is not None and self._clock() < until:
            return Presence.MISS
        return Presence.UNKNOWN

    def __len__(self) -> int:
        """Keys known to be there. Any thread."""
        return len(self._hits)

    def hits(self) -> list[bytes]:
        """Keys known to be there."""
        return list(self._hits)

    def hit(self, key: bytes, renew_at: float) -> None:
        """It is there, and need not be renewed before `renew_at`."""
        self._misses.pop(key, None)
        self._hits[key] = renew_at
        _keep_below(self._hits, self._max_hits)

    def miss(self, key: bytes, seconds: float | None = None) -> None:
        """It is not there; to be believed for `seconds`, or as long as usual."""
        self._hits.pop(key, None)
        until = self._clock() + (self._miss_seconds if seconds is None else seconds)
        # A longer verdict, of a value that is bad, is not shortened.
        self._misses[key] = max(until, self._misses.pop(key, until))
        _keep_below(self._misses, self._max_misses)

    def is_due(self, key: bytes) -> bool:
        """Whether it is there and its life is to be renewed."""
        renew_at = self._hits.get(key)
        return renew_at is not None and self._clock() >= renew_at

    def renewed(self, key: bytes, renew_at: float) -> None:
        """Its life was renewed."""
        if key in self._hits:
            self._hits[key] = renew_at

    def clear(self) -> None:
        """Nothing is known any more."""
        self._hits.clear()
        self._misses.clear()


def _keep_below(table: dict[bytes, V], most: int) -> None:
    # Many at once: taking one off the front of a dict again and again is quadratic.
    if len(table) > most:
        for key in list(islice(table, max(1, most // 8))):
            del table[key]
