# SPDX-License-Identifier: Apache-2.0
"""Page copies on the CPU beside memcpy of the same bytes between the same memories. Needs torch."""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np
import torch

from tierkv.pages.cpu_mover import CpuMover
from tierkv.pages.geometry import PageTable
from tierkv.pages.layout import SlotLayout
from tierkv.pages.mover import Ops
from tierkv.pages.pool import DramPool, PoolRegion

LAYERS = 30
BLOCK_TOKENS = 128


class PageBench:
    """One geometry: an engine's KV, a pool as large, and a mover between them.

    Args:
        layout: order of vLLM's axes, `LBHNC` or `BLHNC`.
        page_bytes: of one layer's page of a block.
        chunk_blocks: blocks in a chunk.
        total_bytes: of KV, about.
    """

    def __init__(self, layout: str, page_bytes: int, chunk_blocks: int, total_bytes: int) -> None:
        chunks = max(1, total_bytes // (LAYERS * page_bytes * chunk_blocks))
        self.blocks = chunks * chunk_blocks
        self.chunk_blocks = chunk_blocks
        self.storage = torch.ones(LAYERS * self.blocks * page_bytes, dtype=torch.uint8)
        if layout == "LBHNC":
            views = list(self.storage.view(LAYERS, self.blocks, page_bytes))
        else:
            views = list(self.storage.view(self.blocks, LAYERS, page_bytes).transpose(0, 1))
        table = PageTable.from_layers(views)
        slot = SlotLayout(chunk_blocks * BLOCK_TOKENS, BLOCK_TOKENS, table.block_bytes)
        self.pool = DramPool.create(slot, chunks * slot.slot_bytes)
        self.region = PoolRegion.attach(self.pool.handles[0])
        self.mover = CpuMover(table, self.region)

    @property
    def total_bytes(self) -> int:
        return int(self.storage.nbytes)

    def ops(self, scattered: bool) -> Ops:
        """Every block once: in order, or blocks and slots shuffled as in a pool long in use."""
        rng = np.random.default_rng(0)
        order = rng.permutation if scattered else np.arange
        chunks = self.blocks // self.chunk_blocks
        slots = np.repeat(order(chunks), self.chunk_blocks)
        index = np.tile(np.arange(self.chunk_blocks), chunks)
        return np.stack([slots, index, order(self.blocks)], axis=1).astype(np.int32)

    def turn(self, ops: Ops) -> dict[str, float]:
        """Seconds to copy everything, plainly and by the mover, in both directions.

        Raises:
            AssertionError: a copy failed.
        """
        engine = self.storage.numpy()
        pool = self.region.array.reshape(-1)[: engine.size]
        seconds = {
            "plain_save": _seconds(lambda: np.copyto(pool, engine)),
            "save": _seconds(lambda: self.mover.save(0, ops)),
            "plain_load": _seconds(lambda: np.copyto(engine, pool)),
            "load": _seconds(lambda: self.mover.load(0, ops)),
        }
        assert all(finished.ok for finished in self.mover.poll()), "a copy failed"
        return seconds

    def first_save(self) -> float:
        """Bytes a second into slots that have no memory yet."""
        seconds = _seconds(lambda: self.mover.save(0, self.ops(scattered=False)))
        self.mover.poll()
        return self.storage.nbytes / seconds

    def close(self) -> None:
        self.mover.close()
        self.region.close()
        self.pool.close()


def _seconds(call: Callable[[], object]) -> float:
    # Of this thread's own time: neither side ever waits, and others may use the processor.
    started = time.thread_time()
    call()
    return time.thread_time() - started
