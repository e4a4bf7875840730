# SPDX-License-Identifier: Apache-2.0
"""Opening, recalling, draining and closing the tiers below DRAM: what blocks in the Store.

Threads and ownership. Called on the Store's scheduler thread, which waits; the coroutines run on
the I/O loop.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence
from concurrent.futures import CancelledError

from tierkv.config.models import LowerTierConfig
from tierkv.errors import ConfigError, TierError
from tierkv.keys import Chunk, Namespace
from tierkv.pages.layout import SlotLayout
from tierkv.store.context import Context
from tierkv.store.io_loop import IoLoop
from tierkv.store.lower import LowerTier
from tierkv.tiers.base import Tier, TierReport

logger = logging.getLogger(__name__)

RECALL_GRACE = 2.0
"""Seconds by which a tier may be late with what it tells."""

LEAST_CLOSE_SECONDS = 1.0
"""A tier gets at least this long to close, whatever writing took: it may have an index to write."""


def open_tiers(
    io: IoLoop,
    configs: Sequence[LowerTierConfig],
    namespace: Namespace,
    layout: SlotLayout,
    context: Context,
) -> list[tuple[Tier, TierReport] | str]:
    """Open all at once; for each the tier and what it found, or the reason why not."""

    async def open_one(config: LowerTierConfig) -> tuple[Tier, TierReport] | str:
        try:
            tier = context.make_tier(config)
            report = await tier.open(namespace.digest, layout)
            if namespace.about:
                await tier.describe(namespace.about)
            return tier, report
        except (TierError, ConfigError) as error:
            return str(error)
        except Exception as error:
            logger.exception("opening tier %s raised", config.name)
            return f"{config.name}: {type(error).__name__}: {error}; this is a bug of the tier"

    async def open_all() -> list[tuple[Tier, TierReport] | str]:
        return list(await asyncio.gather(*map(open_one, configs)))

    return io.run(open_all())


def recall(io: IoLoop, lowers: Sequence[LowerTier], most: int, seconds: float) -> list[Chunk]:
    """What the tiers hold from earlier, keys and text; all are asked at once. See `Tier.recall`."""

    async def recall_one(lower: LowerTier) -> list[Chunk]:
        try:
            return await lower.tier.recall(most, seconds)
        except Exception:
            logger.exception("tier %s cannot tell what it holds", lower.name)
            return []

    async def recall_all() -> list[Chunk]:
        told = [asyncio.create_task(recall_one(lower)) for lower in lowers]
        _, late = await asyncio.wait(told, timeout=seconds + RECALL_GRACE)
        for lower, task in zip(lowers, told, strict=True):
            if task in late:
                logger.warning("tier %s did not tell in time what it holds", lower.name)
                task.cancel()
        heard = [task.result() for task in told if task.done() and not task.cancelled()]
        return [chunk for chunks in heard for chunk in chunks]

    if not lowers:
        return []
    try:
        found = io.run(recall_all(), seconds + 2 * RECALL_GRACE)
    except (TimeoutError, RuntimeError, CancelledError):
        logger.warning("the I/O loop did not tell what the tiers hold")
        return []
    return list({chunk.key: chunk for chunk in found}.values())[:most]


def drain(io: IoLoop, lowers: Sequence[LowerTier], timeout: float) -> bool:
    """Wait until everything queued is written and forgotten; False if `timeout` did not do."""

    async def drain_all() -> None:
        await asyncio.gather(*(lower.drained() for lower in lowers))

    try:
        io.run(drain_all(), timeout)
    except (TimeoutError, RuntimeError):
        return False
    return True


def close_tiers(io: IoLoop, lowers: Sequence[LowerTier], timeout: float) -> None:
    """Drain for up to `timeout` seconds, drop the rest, close the tiers, end the loop."""

    async def close_all() -> None:
        await asyncio.gather(*(lower.tier.close() for lower in lowers), return_exceptions=True)

    end = time.monotonic() + timeout
    if not drain(io, lowers, timeout):
        logger.warning("not everything was written within %g s; the rest is dropped", timeout)
    for lower in lowers:
        lower.writer.drop_waiting("shutdown")
    try:
        io.run(close_all(), max(LEAST_CLOSE_SECONDS, end - time.monotonic()))
    except (TimeoutError, RuntimeError):
        logger.warning("a tier does not close; it is left behind")
    if not io.stop(LEAST_CLOSE_SECONDS):
        logger.warning("the I/O loop does not end; it is left behind")
