# SPDX-License-Identifier: Apache-2.0
"""Circuit breaker of one tier: stop asking what does not answer, ask again carefully.

CLOSED counts failures in a row; OPEN refuses until `probe_after` has passed; HALF_OPEN lets one
probe through. A refused call is an *unavailable* outcome, never an exception.

Calls overlap, so each carries the permit it was allowed with: results of calls that began before
the last change of state say nothing about the state now and are ignored. Otherwise a straggler's
failure could let a second probe through while the first is under way.

Threads and ownership. Owned by the Store's scheduler thread; no lock. Other threads may read
`state` for metrics.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import IntEnum

from tierkv.errors import ErrorKind

ONE_CHUNK = frozenset(
    {ErrorKind.CHECKSUM, ErrorKind.KEY_MISMATCH, ErrorKind.GEOMETRY, ErrorKind.FORMAT}
)
"""One chunk's bytes were bad. It is forgotten."""
_ANSWERED = ONE_CHUNK | {ErrorKind.ENOSPC}
"""The tier answered: one chunk was bad, or there is no room. Other chunks may be well."""


class State(IntEnum):
    """The value of `tierkv_breaker_state`."""

    CLOSED = 0
    HALF_OPEN = 1
    OPEN = 2


class Breaker:
    """See the module.

    Args:
        failures: in a row, that open it.
        probe_after: seconds from opening until one probe is let through.
        clock: seconds, monotonic.
    """

    def __init__(self, failures: int, probe_after: float, clock: Callable[[], float]) -> None:
        self.state = State.CLOSED
        self._limit = failures
        self._probe_after = probe_after
        self._clock = clock
        self._failures = 0
        self._retry_at = 0.0
        self._permit = 1

    def would_allow(self) -> bool:
        """Whether `allow` would let a call start now."""
        if self.state is State.CLOSED:
            return True
        return self.state is State.OPEN and self._clock() >= self._retry_at

    def allow(self) -> int:
        """A permit if a call may start now, to be handed back with its result; else 0. O(1)."""
        if self.state is State.CLOSED:
            return self._permit
        if not self.would_allow():
            return 0
        self._change(State.HALF_OPEN)
        return self._permit

    def unused(self, permit: int) -> None:
        """The call was not made after all: if it was the probe, another one may be."""
        if permit == self._permit and self.state is State.HALF_OPEN:
            self._change(State.OPEN)
            self._retry_at = self._clock()

    def success(self, permit: int) -> None:
        """The call ended in time, hit or miss."""
        if permit != self._permit:
            return
        self._failures = 0
        if self.state is State.HALF_OPEN:
            self._change(State.CLOSED)

    def failure(self, permit: int, kind: ErrorKind) -> None:
        """The call failed or ran out of time. A miss is no failure; a timeout is."""
        if kind in _ANSWERED:
            self.success(permit)
            return
        if permit != self._permit:
            return
        self._failures += 1
        if self.state is State.HALF_OPEN or self._failures >= self._limit:
            self._change(State.OPEN)
            self._failures = 0
            self._retry_at = self._clock() + self._probe_after

    def _change(self, state: State) -> None:
        self.state = state
        self._permit += 1
