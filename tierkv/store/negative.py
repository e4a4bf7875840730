# SPDX-License-Identifier: Apache-2.0
"""Keys that a tier promised and did not deliver: not asked again for a while.

Without it a broken hit is offered, fails, is recomputed, and is offered again, without end
(vllm#49176).

Threads and ownership. Owned by the Store's scheduler thread; no lock.
"""

from __future__ import annotations

from collections.abc import Callable


class NegativeTable:
    """Key to the time until which it is not asked for. Bounded: the oldest entry gives way.

    Args:
        clock: seconds, monotonic.
        ttl: seconds that the first failure counts; doubled with every further one.
        max_ttl: seconds, at most.
        capacity: entries, at most.
    """

    def __init__(
        self,
        clock: Callable[[], float],
        ttl: float = 5.0,
        max_ttl: float = 300.0,
        capacity: int = 4096,
    ) -> None:
        self._clock = clock
        self._ttl = ttl
        self._max_ttl = max_ttl
        self._capacity = capacity
        self._entries: dict[bytes, tuple[float, float]] = {}  # until, ttl; oldest failure first

    def __len__(self) -> int:
        return len(self._entries)

    def blocked(self, key: bytes) -> bool:
        """Whether the key is not to be asked for now. Hot path."""
        entry = self._entries.get(key)
        return entry is not None and self._clock() < entry[0]

    def failed(self, key: bytes) -> None:
        """The tier did not deliver the key."""
        entry = self._entries.pop(key, None)
        ttl = self._ttl if entry is None else min(entry[1] * 2, self._max_ttl)
        if len(self._entries) >= self._capacity:
            del self._entries[next(iter(self._entries))]
        self._entries[key] = (self._clock() + ttl, ttl)

    def forgive(self, key: bytes) -> None:
        """The tier delivered the key, or was given it anew."""
        self._entries.pop(key, None)

    def clear(self) -> None:
        """The tier forgot everything."""
        self._entries.clear()
