# SPDX-License-Identifier: Apache-2.0
"""DRAM as the Store keeps it: the pool's slots, their index, and what is on its way into them.

Threads and ownership. Owned by the Store's scheduler thread; no lock. The I/O loop only calls
`pool.parts` for slots that are leased or filling.
"""

from __future__ import annotations

from collections.abc import Sequence

from tierkv.keys import Chunk
from tierkv.pages.pool import DramPool
from tierkv.policies import make_policy
from tierkv.store.ghosts import Ghosts
from tierkv.store.jobs import Fate, Read
from tierkv.telemetry.counters import Counters
from tierkv.tiers.base import Usage
from tierkv.tiers.slot_index import READY, SlotIndex


class Dram:
    """The first tier.

    Args:
        name: from the configuration.
        policy: name of the eviction policy.
        pool: the memory.
        ghosts: told of every key that is given up.
        keeps_chunks: remember the whole `Chunk` of every slot, not only its key: a tier that is
            written when DRAM gives a chunk up needs its token ids then. About 0.5 KiB a slot.
    """

    def __init__(
        self,
        name: str,
        policy: str,
        pool: DramPool,
        counters: Counters,
        ghosts: Ghosts,
        keeps_chunks: bool,
    ) -> None:
        self.name = name
        self.pool = pool
        self.ghosts = ghosts
        self.index = SlotIndex(pool.slots, make_policy(policy, pool.slots), self._on_evict)
        self.fills: dict[int, Read] = {}
        """Slots being filled by reads that tickets may still join."""
        self.saves: dict[int, tuple[Chunk, int]] = {}
        """Slots being filled by workers: chunk and generation."""
        self._counters = counters
        self._evicted = 0
        self._chunks: list[Chunk | None] | None = [None] * pool.slots if keeps_chunks else None
        # Lower tier that a slot's chunk was read from and whose hit is still to be claimed.
        self._origins: dict[int, str] = {}

    def _on_evict(self, key: bytes, slot: int) -> None:
        self._evicted += 1
        self._origins.pop(slot, None)
        self.ghosts.had(key, 0)

    def count_evictions(self) -> None:
        """Put the evictions since last time under their counter. After anything that reserves."""
        if self._evicted:
            self._counters.add(
                "tierkv_evictions_total", self._evicted, tier=self.name, reason="capacity"
            )
            self._evicted = 0

    def publish(self, slot: int, chunk: Chunk) -> bool:
        """The slot holds the chunk. False if it was forgotten meanwhile."""
        if not self.index.publish(slot):
            return False
        if self._chunks is not None:
            self._chunks[slot] = chunk
        return True

    def filled(self, read: Read) -> bool:
        """A read delivered. Those who wait own a lease each from now on."""
        self.fills.pop(read.slot, None)
        if not self.publish(read.slot, read.chunk):
            return False
        read.fate = Fate.READY
        if read.waiters:
            self.index.lease(read.slot, read.waiters)
        else:
            self._origins[read.slot] = read.lower.name
        return True

    def not_filled(self, read: Read, fate: Fate) -> None:
        """A read ended without the chunk: its slot is free again."""
        if self.fills.get(read.slot) is read:
            del self.fills[read.slot]
        self.index.abandon(read.slot)
        if read.fate is Fate.PENDING:
            read.fate = fate

    def sources(self, slots: Sequence[int]) -> list[str]:
        """`source` of each of these."""
        if not self._origins:  # hot path
            return [self.name] * len(slots)
        return [self.source(slot) for slot in slots]

    def source(self, slot: int) -> str:
        """Which tier's hit this is, for the ticket that has just leased it.

        A chunk that was read ahead counts for the tier it came from, once; then it is DRAM's.
        """
        return self._origins.pop(slot, self.name)

    def ready_run(self, chunks: Sequence[Chunk]) -> int:
        """How many leading chunks are READY. Hot path; changes nothing."""
        get = self.index.get
        for count, chunk in enumerate(chunks):
            if get(chunk.key) is None:
                return count
        return len(chunks)

    def chunk_of(self, slot: int) -> Chunk | None:
        """The chunk in a READY slot, if chunks are kept."""
        return self._chunks[slot] if self._chunks is not None else None

    def forget(self, key: bytes) -> bool:
        """Hide the key at once. A read of it that is under way will be thrown away."""
        slot = self.index.find(key)
        if slot is None:
            return False
        was_ready = self.index.state(slot) == READY
        self._drop_fill(slot)
        self._origins.pop(slot, None)
        self.index.remove(key)
        return was_ready

    def forget_all(self) -> int:
        """Hide every key; how many were READY."""
        for slot in list(self.fills):
            self._drop_fill(slot)
        self._origins.clear()
        return self.index.clear()

    def _drop_fill(self, slot: int) -> None:
        read = self.fills.pop(slot, None)
        if read is not None:
            read.fate = Fate.MISS
            read.waiters = 0

    def usage(self) -> Usage:
        """Fill level; slots that are being filled count as used."""
        size = self.pool.layout.slot_bytes
        used = self.pool.slots - self.index.free
        return Usage(self.index.ready, used * size, self.pool.slots * size)
