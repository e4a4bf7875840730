# SPDX-License-Identifier: Apache-2.0
"""Chunks that a user wishes to keep in DRAM: each holds one lease of its own until it is let go.

Bounded: at most one slot in `SHARE`, so that there is always room for what is not pinned.

Threads and ownership. Owned by the Store's scheduler thread; no lock.
"""

from __future__ import annotations

from collections.abc import Iterable

from tierkv.store.dram import Dram

SHARE = 2
"""One slot in so many may be pinned."""


class Pins:
    """See the module."""

    def __init__(self, dram: Dram) -> None:
        self._index = dram.index
        self._slots: dict[bytes, int] = {}

    def __len__(self) -> int:
        return len(self._slots)

    def __contains__(self, key: bytes) -> bool:
        return key in self._slots

    def pin(self, keys: Iterable[bytes]) -> int:
        """Keep those that are in DRAM now, up to the bound; how many of `keys` are pinned then."""
        pinned = 0
        for key in keys:
            if key not in self._slots:
                slot = self._index.get(key)
                if slot is None or len(self._slots) >= self._index.capacity // SHARE:
                    continue
                self._index.lease(slot)
                self._slots[key] = slot
            pinned += 1
        return pinned

    def unpin(self, keys: Iterable[bytes]) -> int:
        """Let these be evicted as others are; how many were pinned."""
        slots = [self._slots.pop(key) for key in keys if key in self._slots]
        for slot in slots:
            self._index.release(slot)
        return len(slots)

    def unpin_all(self) -> int:
        return self.unpin(list(self._slots))
