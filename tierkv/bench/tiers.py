# SPDX-License-Identifier: Apache-2.0
"""Every tier of a configuration beside the limit of its medium, for `tierkv bench tiers`.

A share is the tier's speed over the limit's, both measured in turns; it says how much of what is
possible the tier gives. The speed itself says what the medium is worth.
"""

from __future__ import annotations

import asyncio
import shutil
import statistics
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from tierkv.bench.disk import DiskBench
from tierkv.bench.ratio import Ratio
from tierkv.config import DiskConfig, TierConfig
from tierkv.config.redis import RedisConfig
from tierkv.errors import TierError
from tierkv.pages.layout import SlotLayout

CHUNK_TOKENS, BLOCK_TOKENS = 64, 16

_MEMCPY = "memcpy in one piece"
"""Of so many bytes it streams past the caches, which no copy of single pages does."""

Turns = dict[str, list[float]]
"""Seconds of each repeat, by what was measured."""


@dataclass(frozen=True, slots=True)
class Size:
    """What is moved.

    Attributes:
        token_bytes: KV of a token in all layers.
        total_bytes: of one turn, about.
        repeats: turns that count; one more warms up.
    """

    token_bytes: int
    total_bytes: int
    repeats: int

    @property
    def layout(self) -> SlotLayout:
        return SlotLayout(CHUNK_TOKENS, BLOCK_TOKENS, BLOCK_TOKENS * self.token_bytes)

    @property
    def chunks(self) -> int:
        return max(8, self.total_bytes // self.layout.slot_bytes)


@dataclass(frozen=True, slots=True)
class Row:
    """One tier in one direction.

    Attributes:
        tier: its name.
        op: `load` or `save`.
        limit: what the limit is, in words; "" if none was measured.
        bytes_per_s: of the tier, median.
        limit_bytes_per_s: of the limit, median; None if none was measured.
        share: the one over the other; None if there is no limit.
    """

    tier: str
    op: str
    limit: str
    bytes_per_s: float
    limit_bytes_per_s: float | None
    share: Ratio | None


def measure_dram(name: str, size: Size, tell: Callable[[int], None]) -> list[Row]:
    """Copies between vLLM's memory and the pool, on the CPU.

    Raises:
        ModuleNotFoundError: torch is not installed.
    """
    from tierkv.bench.dram import BLOCK_TOKENS, LAYERS, PageBench

    page_bytes = max(4096, size.token_bytes * BLOCK_TOKENS // LAYERS // 4096 * 4096)
    bench = PageBench("LBHNC", page_bytes, 1, size.total_bytes)
    try:
        turns: Turns = {}
        ops = bench.ops(scattered=True)
        for _ in range(size.repeats + 1):
            _add(turns, bench.turn(ops))
            tell(1)
        total = bench.total_bytes
    finally:
        bench.close()
    return [
        _row(name, "load", turns, "load", "plain_load", _MEMCPY, total),
        _row(name, "save", turns, "save", "plain_save", _MEMCPY, total),
    ]


def measure_disk(
    tier: DiskConfig, size: Size, tell: Callable[[int], None], notes: list[str]
) -> list[Row]:
    """The disk tier in a directory of its own beside the configured one, removed at the end.

    Raises:
        TierError: no room, or the directory cannot be made.
    """
    parent = tier.path
    while not parent.is_dir():
        parent = parent.parent
    layout, count = size.layout, size.chunks
    free = shutil.disk_usage(parent).free
    if free < 3 * size.total_bytes + tier.min_free:
        raise TierError(
            f"{parent} has {free >> 20} MiB free, too little to measure with; give less --size",
            tier=tier.name,
        )
    try:
        folder = tempfile.TemporaryDirectory(dir=parent, prefix=".tierkv-bench-")
    except OSError as error:
        raise TierError(
            f"{parent} cannot be written ({error.strerror}); give another --path", tier=tier.name
        ) from None

    async def run(path: Path) -> tuple[Turns, int]:
        bench = DiskBench(path, layout, count)
        turns: Turns = {}
        try:
            await bench.open()
            notes.extend(bench.notes)
            for _ in range(size.repeats + 1):
                _add(turns, await bench.read_turn())
                tell(1)
            for _ in range(size.repeats + 1):
                _add(turns, await bench.write_turn())
                tell(1)
        finally:
            await bench.close()
        return turns, bench.total_bytes

    with folder as name:
        turns, total = asyncio.run(run(Path(name) / "kv"))
    plain = "O_DIRECT" if not notes else "plain I/O"
    return [
        _row(tier.name, "load", turns, "load", "concurrent_read", f"{plain}, 8 at once", total),
        _row(tier.name, "save", turns, "save", "sequential_write", f"{plain}, one by one", total),
    ]


def measure_redis(tier: RedisConfig, size: Size, tell: Callable[[int], None]) -> list[Row]:
    """The Redis tier on its configured server; its values are taken back at the end.

    Raises:
        ModuleNotFoundError: redis is not installed.
        TierError: the server cannot be reached, or has no room.
    """
    from tierkv.bench.redis import RedisBench, Sockets

    async def run() -> Turns:
        bench = RedisBench(tier, size.layout, size.chunks)
        sockets = None
        turns: Turns = {}
        try:
            await bench.open()
            if Sockets.can(tier):
                sockets = Sockets(tier, size.layout.slot_bytes, size.chunks)
                await asyncio.to_thread(sockets.write_all)
            for _ in range(size.repeats + 1):
                if sockets is not None:
                    bare = await asyncio.to_thread(sockets.read_all)
                    _add(turns, {"bare_read": bare})
                _add(turns, {"load": await bench.read_turn()})
                if sockets is not None:
                    bare = await asyncio.to_thread(sockets.write_all)
                    _add(turns, {"bare_write": bare})
                _add(turns, {"save": await bench.write_turn()})
                tell(1)
        finally:
            if sockets is not None:
                sockets.close()
            await bench.close()
        return turns

    try:
        turns = asyncio.run(run())
    except OSError as error:
        raise TierError(
            f"{tier.url}: {error}; 'tierkv doctor' looks closer", tier=tier.name
        ) from None
    total = size.chunks * size.layout.slot_bytes
    bare = f"bare sockets, {tier.max_connections} at once"
    return [
        _row(tier.name, "load", turns, "load", "bare_read", bare, total),
        _row(tier.name, "save", turns, "save", "bare_write", bare, total),
    ]


def steps(tiers: Sequence[TierConfig], size: Size) -> int:
    """Turns in all, for a progress bar."""
    rounds = size.repeats + 1
    return sum(2 * rounds if isinstance(tier, DiskConfig) else rounds for tier in tiers)


def _add(turns: Turns, seconds: dict[str, float]) -> None:
    for name, value in seconds.items():
        turns.setdefault(name, []).append(value)


def _row(tier: str, op: str, turns: Turns, ours: str, plain: str, limit: str, total: int) -> Row:
    """The first turn of each kind warms up and does not count."""
    mine = turns[ours][1:]
    rate = total / statistics.median(mine)
    theirs = turns.get(plain, [])[1:]
    if not theirs:
        return Row(tier, op, "", rate, None, None)
    share = Ratio.of([b / a for a, b in zip(mine, theirs, strict=True)])
    return Row(tier, op, limit, rate, total / statistics.median(theirs), share)
