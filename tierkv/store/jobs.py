# SPDX-License-Identifier: Apache-2.0
"""What crosses between the scheduler thread and the I/O loop: one object an operation.

Threads and ownership. The scheduler thread makes a job and owns it again once it has come back
through `IoLoop.done`. In between, the loop writes `started`, `ended` and `result`; the fields below
the line in each class stay the scheduler's. No field has two writers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Any

from tierkv.keys import Chunk
from tierkv.tiers.base import Outcome, Result

if TYPE_CHECKING:
    from tierkv.store.lower import LowerTier

NOT_RUN = Result(Outcome.REFUSED)


class Fate(StrEnum):
    """How a read stands for those who wait for it. The values are a ticket's `rest`."""

    PENDING = "pending"
    READY = ""
    MISS = "miss"
    LATE = "late"
    UNAVAILABLE = "unavailable"
    FAILED = "failed"


@dataclass(slots=True, eq=False)
class Job:
    """One operation on one chunk, in a lane.

    Attributes:
        chunk: what is read or written.
        slot: the DRAM slot it is read into or written from.
        permit: the breaker's.
        on_done: called with the job, on the scheduler thread, when it came back.
        started: seconds, when the tier was called; 0.0 before.
        ended: seconds, when the tier had answered.
        result: the tier's answer.
    """

    chunk: Chunk
    slot: int
    permit: int
    reason: str
    on_done: Callable[[Any], None]
    started: float = 0.0
    ended: float = 0.0
    result: Result = NOT_RUN
    # ---- the scheduler's
    overdue: bool = False
    """Its deadline passed; the breaker has been told, and is not told again."""


@dataclass(slots=True, eq=False)
class Read(Job):
    """A chunk on its way from a lower tier into a DRAM slot, shared by all who want it.

    Attributes:
        lower: where it is read from.
        deadline: seconds; later than this it counts as a failure of the tier.
        fate: see `Fate`.
        waiters: tickets that hold a claim: each owns one lease once the fate is READY.
    """

    lower: LowerTier = field(kw_only=True)
    deadline: float = field(kw_only=True)
    # ---- the scheduler's
    fate: Fate = Fate.PENDING
    waiters: int = 0


@dataclass(slots=True, eq=False)
class Errand:
    """Anything else that is asked of a tier: forgetting, touching, probing.

    Attributes:
        keys: what it is about; None means everything.
        on_done: called with the errand, on the scheduler thread.
        ok: the tier did it.
        error: what it raised instead.
        held: chunks that it held of those it forgot.
        returned: the tier has answered or raised; `on_done` is yet to be called.
    """

    keys: Sequence[bytes] | None
    on_done: Callable[[Any], None]
    ok: bool = False
    error: Exception | None = None
    held: int = 0
    returned: bool = False
    # ---- the scheduler's
    permit: int = 0
    """The breaker's, for a probe."""
    deadline: float = float("inf")
    """Seconds; for a probe."""
    back: bool = False
    """It came back."""
