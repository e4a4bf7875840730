# SPDX-License-Identifier: Apache-2.0
"""Failures of one tier: each is counted, and of each kind one in a while is logged.

Threads and ownership. Owned by the Store's scheduler thread; no lock.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from tierkv.errors import ErrorKind
from tierkv.telemetry.counters import Counters

logger = logging.getLogger(__name__)

LOG_EVERY = 10.0
"""Seconds between two log lines about the same kind of failure."""


class Complaints:
    """Call it with what went wrong.

    Args:
        tier: its name.
        clock: seconds, monotonic.
    """

    def __init__(self, tier: str, clock: Callable[[], float], counters: Counters) -> None:
        self._tier = tier
        self._clock = clock
        self._counters = counters
        self._logged: dict[ErrorKind, float] = {}

    def __call__(self, what: str, kind: ErrorKind, error: BaseException | None = None) -> None:
        """Count a failure, and say so unless the same was said a moment ago.

        Args:
            what: the operation: load, save, ...
            error: an exception, where there was one: always a bug of the tier.
        """
        self._counters.add("tierkv_errors_total", tier=self._tier, kind=kind.value)
        now = self._clock()
        last = self._logged.get(kind)
        if last is None or now - last >= LOG_EVERY:
            self._logged[kind] = now
            logger.warning(
                "tier %s: %s failed (%s); requests go on without it, more of this is only counted",
                self._tier,
                what,
                kind.value,
                exc_info=error,
            )
