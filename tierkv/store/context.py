# SPDX-License-Identifier: Apache-2.0
"""What the Store takes from outside, so that tests and simulations can give it something else."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from tierkv.config.models import LowerTierConfig
from tierkv.store.io_loop import IoLoop
from tierkv.telemetry.counters import Counters
from tierkv.tiers.base import Tier
from tierkv.tiers.registry import make_tier


@dataclass(frozen=True, slots=True)
class Context:
    """Surroundings of one Store.

    Attributes:
        clock: seconds, monotonic; called on the scheduler thread and on the I/O loop.
        counters: changed on the scheduler thread only.
        make_tier: from configuration to tier; wrap it to put a tier of your own around another.
        make_io: the thread that runs the tiers' coroutines.
    """

    clock: Callable[[], float] = time.monotonic
    counters: Counters = field(default_factory=Counters)
    make_tier: Callable[[LowerTierConfig], Tier] = make_tier
    make_io: Callable[[], IoLoop] = IoLoop
