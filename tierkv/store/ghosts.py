# SPDX-License-Identifier: Apache-2.0
"""Why a chunk that is asked for is not there: a memory of what tiers once held.

Without it every miss looks alike, and nobody can tell whether a larger tier would help. Each key
that leaves DRAM or enters a lower tier is noted, with the lowest tier that has had it: when all
tiers miss it later, that is the one that gave it up.

A table of fixed size, one place a key, addressed by the key itself (which is a hash): a newer key
in the same place overwrites the older one, which then counts as never seen. 17 bytes a place.

Threads and ownership. Owned by the Store's scheduler thread; no lock.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Sequence

PLACES = 1 << 17
"""2.2 MiB: as many chunks as some 500 GiB of KV hold."""

_NONE, _INVALID = 0, 255

Why = tuple[str, str]
"""Reason (one of `tierkv.telemetry.catalog.MISS_REASONS`) and tier."""

NEVER_SEEN: Why = ("never_seen", "none")


class Ghosts:
    """See the module.

    Args:
        tiers: name of each tier and the seconds that it keeps a chunk (None: as long as it has
            room), DRAM first.
        clock: seconds, monotonic.
        places: a power of two.
    """

    def __init__(
        self,
        tiers: Sequence[tuple[str, float | None]],
        clock: Callable[[], float],
        places: int = PLACES,
    ) -> None:
        assert places & (places - 1) == 0
        self._tiers = tuple(tiers)
        self._clock = clock
        self._mask = places - 1
        self._marks = array("Q", [0]) * places
        self._causes = bytearray(places)  # 1 + index of the tier
        self._since = array("d", [0.0]) * places

    def had(self, key: bytes, tier: int) -> None:
        """This tier, by its place in the list, has the key or has just given it up."""
        mark, place = self._at(key)
        if self._marks[place] == mark and tier + 1 < self._causes[place] < _INVALID:
            return
        self._marks[place] = mark
        self._causes[place] = tier + 1
        self._since[place] = self._clock()

    def invalid(self, keys: Iterable[bytes]) -> None:
        """These were forgotten because their bytes were wrong, or because somebody wished so."""
        for key in keys:
            mark, place = self._at(key)
            self._marks[place] = mark
            self._causes[place] = _INVALID

    def forget_all(self) -> None:
        """As if no chunk had ever been seen."""
        self._causes[:] = bytes(len(self._causes))

    def why(self, key: bytes) -> Why:
        """Why no tier holds the key. About 0.5 µs."""
        mark, place = self._at(key)
        cause = self._causes[place]
        if cause == _NONE or self._marks[place] != mark:
            return NEVER_SEEN
        if cause == _INVALID:
            return "invalid", "none"
        name, ttl = self._tiers[cause - 1]
        if ttl is not None and self._clock() - self._since[place] >= ttl:
            return "expired", name
        return "evicted", name

    def _at(self, key: bytes) -> tuple[int, int]:
        mark = int.from_bytes(key[:8], "little")
        return mark, mark & self._mask
