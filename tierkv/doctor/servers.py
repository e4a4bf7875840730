# SPDX-License-Identifier: Apache-2.0
"""Redis tiers: whether the package is here, and what the server says of itself.

Threads and ownership. Runs an event loop of its own on the caller's thread, and ends it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import replace

from tierkv.config.redis import RedisConfig
from tierkv.doctor.finding import Finding, Level, error

_LOOK_THERE = "start the server, or mend url; until then engines run without this tier"


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
    for finding in asyncio.run(check_server(tier)):
        each = Level.ERROR if finding.fatal else Level.WARNING
        told = Finding.of("redis", each, f"tier {tier.name}", finding.message)
        yield told if told.remedy else replace(told, remedy=_LOOK_THERE)
