# SPDX-License-Identifier: Apache-2.0
"""Having one tier forget, so that it stays forgotten.

From the call on the keys are misses. The tier is told while no save runs: a save that began before
could otherwise bring back what was to be forgotten. What it failed to forget stays a miss and is
told again.

Threads and ownership. Owned by the Store's scheduler thread; no lock. The errand's coroutine runs
on the I/O loop and touches only the tier and the errand.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from tierkv.errors import ErrorKind
from tierkv.store.complaints import Complaints
from tierkv.store.io_loop import IoLoop, Lane
from tierkv.store.jobs import Errand
from tierkv.tiers.base import Tier

MAX_KEYS = 65536
"""Keys that may wait to be forgotten; beyond it the tier is told to forget everything."""


class Forgetting:
    """One errand at a time; what comes up meanwhile goes with the next one.

    Args:
        saves: the lane that must be quiet meanwhile.
        retry_after: seconds after which the tier is told again.
        cleared: called when the tier has forgotten everything.
        gave_up: called with the reason, and how many chunks the tier held of those it forgot.
    """

    def __init__(
        self,
        tier: Tier,
        io: IoLoop,
        saves: Lane,
        clock: Callable[[], float],
        retry_after: float,
        complain: Complaints,
        cleared: Callable[[], None],
        gave_up: Callable[[str, int], None],
    ) -> None:
        self.any = False
        """Whether anything is to be forgotten; spares `covers` on hot paths."""
        self._tier = tier
        self._io = io
        self._saves = saves
        self._clock = clock
        self._retry_after = retry_after
        self._complain = complain
        self._cleared = cleared
        self._gave_up = gave_up
        self._to_evict: dict[bytes, None] = {}
        self._to_clear = False
        self._evicting: dict[bytes, None] = {}
        self._clearing = False
        self._again_at = float("inf")

    def covers(self, key: bytes) -> bool:
        """Whether the tier is being told to forget the key, or will be."""
        return self._to_clear or self._clearing or key in self._to_evict or key in self._evicting

    def keys(self, keys: Sequence[bytes]) -> None:
        """Forget these."""
        self._to_evict.update(dict.fromkeys(keys))
        if len(self._to_evict) > MAX_KEYS:
            self._to_evict.clear()
            self._to_clear = True
        self._go_on()

    def everything(self) -> None:
        """Forget the whole namespace."""
        self._to_clear = True
        self._go_on()

    def check(self, now: float) -> None:
        """Tell it again what it failed to forget, when it is time."""
        if now >= self._again_at:
            self._go_on()

    def _go_on(self) -> None:
        if not self._clearing and not self._evicting:
            self._again_at = float("inf")
            if self._to_clear:
                self._clearing, self._to_clear = True, False
                self._to_evict.clear()
                self._tell(None)
            elif self._to_evict:
                self._evicting, self._to_evict = self._to_evict, {}
                self._tell(tuple(self._evicting))
        self.any = bool(self._to_clear or self._clearing or self._to_evict or self._evicting)

    def _tell(self, keys: Sequence[bytes] | None) -> None:
        errand = Errand(keys, self._told)

        async def tell() -> None:
            errand.held = await (self._tier.clear() if keys is None else self._tier.evict(keys))

        self._io.errand(errand, lambda: self._saves.alone(tell))

    def _told(self, errand: Errand) -> None:
        if not errand.ok:
            self._complain("forgetting", ErrorKind.WORKER, errand.error)
            self._to_clear |= self._clearing
            self._to_evict.update(self._evicting)
            self._again_at = self._clock() + self._retry_after
        else:
            self._gave_up("reset" if self._clearing else "invalid", errand.held)
            if self._clearing:
                self._cleared()
        self._clearing = False
        self._evicting = {}
        if errand.ok:
            self._go_on()
