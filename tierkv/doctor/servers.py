# SPDX-License-Identifier: Apache-2.0
"""Redis tiers: whether the package is here, and what the server says of itself.

Threads and ownership. Runs an event loop of its own on the caller's thread, and ends it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator

from tierkv.config.redis import RedisConfig
from tierkv.doctor.finding import Finding, Level, error


def look_at(tier: RedisConfig) -> Iterator[Finding]:
    """What there is to say about the server. Takes some seconds if it does not answer."""
    try:
        from tierkv.tiers.redis.check import check_server
    except ModuleNotFoundError as missing:
        if (missing.name or "").partition(".")[0] not in ("redis", "hiredis"):
            raise
        yield error(
            "redis-package",
            f"tier {tier.name}",
            f"the Redis tier needs {missing.name}, which is not installed",
            "run: pip install 'tierkv[redis]'",
        )
        return
    log = logging.getLogger("tierkv.tiers.redis")
    before, log.disabled = log.disabled, True  # what it would say is what is found here
    children = [logging.getLogger(f"tierkv.tiers.redis.{name}") for name in ("node", "topology")]
    levels = [child.level for child in children]
    for child in children:
        child.setLevel(logging.CRITICAL)
    try:
        found = asyncio.run(check_server(tier))
    finally:
        log.disabled = before
        for child, level in zip(children, levels, strict=True):
            child.setLevel(level)
    for finding in found:
        each = Level.ERROR if finding.fatal else Level.WARNING
        yield Finding.of("redis", each, f"tier {tier.name}", finding.message)
