# SPDX-License-Identifier: Apache-2.0
"""What the Store costs: time on the engine's scheduler thread, and memory for the index.

    python benchmarks/store.py --json store.json

Ratios are cost over budget, so 1.0 is the most that is allowed: 2 ms of the scheduler's time to
look up and lease 2,000 chunks, 250 bytes of index a chunk at one million chunks. The tier below
DRAM answers at once, so what is measured is the Store and not a disk. Time is the thread's own: on
the wall, each call may wait for the interpreter lock besides, which an instant tier hogs. `figures`
has the same in absolute numbers, and the latency that the I/O loop adds to one read.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import time
import tracemalloc
from collections.abc import Callable, Sequence
from pathlib import Path

from tierkv.config.models import DiskConfig, DramConfig, LowerTierConfig, TierKVConfig
from tierkv.keys import Chunk, ChunkChain, Namespace
from tierkv.pages.layout import SlotLayout
from tierkv.policies import make_policy
from tierkv.store import Context, Store
from tierkv.tiers.base import Outcome, Presence, Result, Tier, TierReport, Usage
from tierkv.tiers.slot_index import SlotIndex

CHUNKS = 2000
BUDGET_MS = 2.0
INDEX_CHUNKS = 1_000_000
INDEX_BUDGET_BYTES = 250
LAYOUT = SlotLayout(chunk_tokens=64, block_tokens=16, block_bytes=1024)
NAMESPACE = Namespace({"model": "benchmark"})


class InstantTier(Tier):
    """Holds every key it was given, and reads nothing."""

    def __init__(self, config: LowerTierConfig, keys: Sequence[bytes]) -> None:
        self.name = config.name
        self._keys = dict.fromkeys(keys)

    async def open(self, namespace: bytes, layout: SlotLayout) -> TierReport:
        return TierReport()

    def lookup(self, key: bytes) -> Presence:
        return Presence.HIT if key in self._keys else Presence.MISS

    async def load(self, chunk: Chunk, parts: Sequence[memoryview]) -> Result:
        return Result(Outcome.DONE, nbytes=LAYOUT.slot_bytes)

    async def save(self, chunk: Chunk, parts: Sequence[memoryview]) -> Result:
        return Result(Outcome.DONE, nbytes=LAYOUT.slot_bytes)

    async def touch(self, keys: Sequence[bytes]) -> None:
        pass

    async def evict(self, keys: Sequence[bytes]) -> int:
        return 0

    async def clear(self) -> int:
        return 0

    def usage(self) -> Usage:
        return Usage(len(self._keys), 0, 0)

    async def close(self) -> None:
        pass


def chain(count: int) -> list[Chunk]:
    tokens = ChunkChain(NAMESPACE.scope(), LAYOUT.chunk_tokens)
    tokens.extend(range(count * LAYOUT.chunk_tokens))
    return tokens.chunks


def make_store(below: Sequence[bytes] | None, policy: str = "lru") -> Store:
    dram = DramConfig(capacity=2 * CHUNKS * LAYOUT.slot_bytes, policy=policy)
    if below is None:
        store = Store(TierKVConfig(tiers=(dram,)))
    else:
        disk = DiskConfig(path="/nonexistent", capacity=1 << 40)
        context = Context(make_tier=lambda config: InstantTier(config, below))
        store = Store(TierKVConfig(tiers=(dram, disk)), context)
    store.open(NAMESPACE, LAYOUT)
    return store


def timed(action: Callable[[], object]) -> float:
    """Milliseconds of this thread."""
    start = time.thread_time()
    action()
    return (time.thread_time() - start) * 1e3


def dram_hit(policy: str, repeats: int) -> list[float]:
    """One lookup of 2,000 chunks that are all in DRAM: load, poll."""
    store, chunks = make_store(None, policy), chain(CHUNKS)
    store.commit([slot for _, slot in store.save(chunks)], store.generation)

    def lookup() -> None:
        ticket = store.load(chunks)
        assert ticket.poll()
        assert ticket.ready == CHUNKS
        tickets.append(ticket)

    times = []
    for _ in range(repeats):
        tickets: list = []
        times.append(timed(lookup))
        tickets[0].release()
    store.close()
    return times


def promotion(repeats: int) -> tuple[list[float], list[float]]:
    """2,000 chunks that are all below DRAM: longest call, and all calls together."""
    chunks = chain(CHUNKS)
    store = make_store([chunk.key for chunk in chunks])
    longest, together = [], []
    for _ in range(repeats):
        start = time.thread_time()
        ticket = store.load(chunks)
        calls = [(time.thread_time() - start) * 1e3]
        settled = False
        while not settled:
            time.sleep(0.002)  # the scheduler does something else, and the I/O loop gets its turn
            start = time.thread_time()
            store.poll()
            settled = ticket.poll()
            calls.append((time.thread_time() - start) * 1e3)
        assert ticket.ready == CHUNKS, ticket.rest
        ticket.release()
        longest.append(max(calls))
        together.append(sum(calls))
        store._dram.forget_all()
    store.close()
    return longest, together


def added_latency(repeats: int) -> list[float]:
    """Microseconds from load to ready for one chunk that its tier delivers at once."""
    chunks = chain(1)
    store = make_store([chunks[0].key])
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        ticket = store.load(chunks)
        while not ticket.poll():
            time.sleep(0)
            store.poll()
        times.append((time.perf_counter() - start) * 1e6)
        assert ticket.ready == 1
        ticket.release()
        store._dram.forget_all()
    store.close()
    return times


def index_bytes(policy: str) -> float:
    """Bytes of index a chunk, keys included, with a million chunks."""
    gc.collect()
    tracemalloc.start()
    index = SlotIndex(INDEX_CHUNKS, make_policy(policy, INDEX_CHUNKS))
    for number in range(INDEX_CHUNKS):
        slot = index.reserve(number.to_bytes(16, "little"))
        assert slot is not None
        index.publish(slot)
    size, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(index) == INDEX_CHUNKS
    return size / INDEX_CHUNKS


def ratio(values: list[float], budget: float) -> dict[str, float]:
    """Median over repeats, and the distance of the quartiles as its spread, over the budget."""
    shares = [value / budget for value in values]
    low, _, high = statistics.quantiles(shares, n=4) if len(shares) > 1 else (0, 0, 0)
    return {
        "median": round(statistics.median(shares), 3),
        "spread": round(high - low, 3),
        "repeats": len(shares),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, help="write the result to this file")
    parser.add_argument("--repeats", type=int, default=51)
    args = parser.parse_args()
    hits = {policy: dram_hit(policy, args.repeats) for policy in ("lru", "s3fifo")}
    longest, together = promotion(max(2, args.repeats // 5))
    latency = added_latency(args.repeats)
    memory = {policy: [index_bytes(policy)] for policy in ("lru", "s3fifo")}
    result = {
        "ratios": {
            **{f"dram_lookup_2000_{p}": ratio(ms, BUDGET_MS) for p, ms in hits.items()},
            "longest_call_2000_below_dram": ratio(longest, BUDGET_MS),
            **{f"index_memory_{p}": ratio(b, INDEX_BUDGET_BYTES) for p, b in memory.items()},
        },
        "figures": {
            **{f"dram_lookup_2000_{p}_ms": statistics.median(ms) for p, ms in hits.items()},
            "longest_call_2000_below_dram_ms": statistics.median(longest),
            "all_calls_2000_below_dram_ms": statistics.median(together),
            "io_loop_added_latency_us": statistics.median(latency),
            **{f"index_bytes_a_chunk_{p}": b[0] for p, b in memory.items()},
        },
    }
    print(json.dumps(result, indent=2))
    if args.json:
        args.json.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
