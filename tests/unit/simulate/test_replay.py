# SPDX-License-Identifier: Apache-2.0
"""The replay against stack distances, libcachesim and a real Store: none shares its code."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.unit.simulate.traces import BLOCK, conversations, write
from tests.unit.store.rig import NAMESPACE, InlineIo
from tierkv.config.models import DiskConfig, DramConfig, LowerTierConfig, TierKVConfig
from tierkv.keys import Chunk, ChunkChain
from tierkv.pages.layout import SlotLayout
from tierkv.policies import make_policy
from tierkv.simulate.replay import Replay
from tierkv.simulate.sweep import ceiling
from tierkv.simulate.trace import Trace, read_trace
from tierkv.store import Context, Store
from tierkv.testing.memory import MemoryTier
from tierkv.tiers.base import Outcome, Presence, Result, Usage
from tierkv.tiers.slot_index import SlotIndex

SEEDS = (1, 2, 3)


def make_trace(tmp_path: Path, seed: int, requests: int = 150) -> Trace:
    return read_trace(write(tmp_path / "t.jsonl", conversations(seed, requests)), BLOCK)


def replayed(trace: Trace, dram: int, disk: int, policy: str, write: str = "through") -> Replay:
    tiers = Replay(dram, disk, policy, write)
    for prompt in trace.prompts:
        tiers.request(prompt, BLOCK)
    return tiers


def hits_by_stack(trace: Trace, capacity: int) -> int:
    """Hit tokens of LRU by definition: what is there is the `capacity` most recent chunks."""
    recent: list[bytes] = []  # most recent first
    tokens = 0
    for prompt in trace.prompts:
        there = set(recent[:capacity])
        run = 0
        while run < len(prompt.keys) and prompt.keys[run] in there:
            run += 1
        tokens += min(run * BLOCK, prompt.tokens - 1)
        touched = set(prompt.keys)
        recent = [*prompt.keys, *(key for key in recent if key not in touched)]
    return tokens


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("capacity", [1, 7, 40, 150, 10_000])
def test_lru_hits_are_those_of_stack_distances(tmp_path: Path, seed: int, capacity: int) -> None:
    trace = make_trace(tmp_path, seed)
    found = replayed(trace, capacity, 0, "lru").found
    assert found.dram_tokens == hits_by_stack(trace, capacity), f"seed {seed}"
    assert found.disk_tokens == found.disk_writes == 0


@pytest.mark.parametrize("seed", SEEDS)
def test_a_disk_below_counts_for_what_dram_lost(tmp_path: Path, seed: int) -> None:
    trace = make_trace(tmp_path, seed)
    found = replayed(trace, 20, 90, "lru").found
    # LRU tiers include each other: DRAM hits as if alone, both together as the larger one alone.
    assert found.dram_tokens == hits_by_stack(trace, 20), f"seed {seed}"
    assert found.dram_tokens + found.disk_tokens == hits_by_stack(trace, 90), f"seed {seed}"
    assert found.disk_tokens > 0


@pytest.mark.parametrize("policy", ["lru", "s3fifo"])
def test_with_room_for_all_hits_reach_the_ceiling(tmp_path: Path, policy: str) -> None:
    trace = make_trace(tmp_path, 4)
    found = replayed(trace, trace.distinct_chunks, 0, policy).found
    assert found.dram_tokens == ceiling(trace) == hits_by_stack(trace, 10**6)


def test_on_reuse_writes_only_what_was_asked_for_twice(tmp_path: Path) -> None:
    trace = make_trace(tmp_path, 5)
    through = replayed(trace, 60, 500, "lru", "through").found
    reuse = replayed(trace, 60, 500, "lru", "on_reuse").found
    seen: dict[bytes, int] = {}
    for prompt in trace.prompts:
        for key in prompt.keys:
            seen[key] = seen.get(key, 0) + 1
    assert through.disk_writes == trace.distinct_chunks
    assert 0 < reuse.disk_writes <= sum(times > 1 for times in seen.values())


# -- the real Store ------------------------------------------------------------------------------

LAYOUT = SlotLayout(chunk_tokens=BLOCK, block_tokens=1, block_bytes=8)


class IndexedTier(MemoryTier):
    """A disk without bytes: which chunks it holds is the index's and the policy's business."""

    def __init__(self, config: LowerTierConfig, capacity: int, policy: str) -> None:
        super().__init__(config.name)
        self.index = SlotIndex(capacity, make_policy(policy, capacity))

    def lookup(self, key: bytes) -> Presence:
        return Presence.HIT if self.index.get(key) is not None else Presence.MISS

    async def load(self, chunk: Chunk, parts: object) -> Result:
        return Result(Outcome.DONE)

    async def save(self, chunk: Chunk, parts: object) -> Result:
        if self.index.get(chunk.key) is None:
            slot = self.index.reserve(chunk.key)
            assert slot is not None
            self.index.publish(slot)
        return Result(Outcome.DONE)

    async def touch(self, keys: object) -> None:
        assert isinstance(keys, list)
        slots = [slot for key in keys if (slot := self.index.get(key)) is not None]
        self.index.touch_run(slots[::-1])  # the Store names them from their end

    def usage(self) -> Usage:
        return Usage(len(self.index), 0, 0)


def hits_of_store(trace: Trace, dram: int, disk: int, policy: str, write: str) -> dict[str, int]:
    """Hit tokens by tier when the prompts go through a Store, one after the other."""
    io: list[InlineIo] = []

    def make_io() -> InlineIo:
        io.append(InlineIo())
        return io[0]

    tiers: list[object] = [DramConfig(capacity=dram * LAYOUT.slot_bytes, policy=policy)]
    if disk:
        tiers.append(DiskConfig(path="/nonexistent", capacity=1 << 40, write=write))
    context = Context(
        make_io=make_io,
        make_tier=lambda config: IndexedTier(config, disk, policy),
        clock=lambda: 1000.0,
    )
    store = Store(TierKVConfig(tiers=tuple(tiers)), context)
    store.open(NAMESPACE, LAYOUT)
    hits = {"dram": 0, "disk": 0}
    for prompt in trace.prompts:
        chain = ChunkChain(NAMESPACE.scope(), BLOCK)
        # Tokens that are equal exactly where the keys are.
        tokens = [byte for key in prompt.keys for byte in key[:BLOCK]]
        chain.extend(tokens)
        chunks = chain.chunks
        ticket = store.load(chunks)
        while not ticket.poll():
            io[0].pump()
            store.poll()
        for source in ticket.sources:
            hits[source] += BLOCK
        if ticket.ready and ticket.ready * BLOCK == prompt.tokens:
            hits[ticket.sources[-1]] -= 1
        ticket.release()
        slots = [slot for _, slot in store.save(chunks)]
        store.commit(slots, store.generation)
        if io:
            io[0].pump()
            store.poll()
        store.touch(chunks)
        if io:
            io[0].pump()
            store.poll()
    store.close()
    return hits


@pytest.mark.parametrize("policy", ["lru", "s3fifo"])
@pytest.mark.parametrize(
    ("dram", "disk", "write"),
    [(40, 0, "through"), (150, 0, "through"), (60, 120, "through"), (60, 120, "on_reuse")],
)
@pytest.mark.parametrize("seed", SEEDS)
def test_hits_are_those_of_a_real_store(
    tmp_path: Path, seed: int, dram: int, disk: int, write: str, policy: str
) -> None:
    trace = make_trace(tmp_path, seed, requests=200)
    # Write-behind drops what exceeds half of the pool; a replay knows no queue.
    assert max(len(prompt.keys) for prompt in trace.prompts) <= dram // 2
    found = replayed(trace, dram, disk, policy, write).found
    expected = hits_of_store(trace, dram, disk, policy, write)
    assert {"dram": found.dram_tokens, "disk": found.disk_tokens} == expected, f"seed {seed}"


def test_the_books_of_both_indexes_balance_afterwards(tmp_path: Path) -> None:
    tiers = replayed(make_trace(tmp_path, 6), 5, 30, "s3fifo")
    tiers.dram.check()
    assert tiers.disk is not None
    tiers.disk.check()
    assert tiers.dram.leased == tiers.disk.leased == 0
