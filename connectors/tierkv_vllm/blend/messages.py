# SPDX-License-Identifier: Apache-2.0
"""What the planner and the runners say to each other about one blended prompt. Plain values."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class BlendJob:
    """Draft a prompt's KV; nothing of the engine is touched before the job is told to go on.

    Attributes:
        job_id: ours.
        request_id: whose load this is.
        tokens: int32 [end], of the prompt.
        block_ids: its engine blocks for them.
        exact: leading tokens whose KV is, or will be when the job goes on, in those blocks.
        pieces: int32 [n, 5], a donor a row, consecutive ones of a run together: DRAM slot, first
            token in its chunk, tokens, first position in the prompt, positions that it moves by.
        fixed, samples, query: positions; see `tierkv.blend.plan.BlendPlan`.
        segments: int32 [n, 2]; see there.
        extra: tokens to choose.
        shadow: compute it in full too, later, and compare; only where the last token is `fixed`.
        exact_ops: copies, as of a `LoadJob`, that bring the part of the exact tokens that the
            engine lacks.
    """

    job_id: int
    request_id: str
    tokens: Ints
    block_ids: Ints
    exact: int
    pieces: Ints
    fixed: Ints
    samples: Ints
    segments: Ints
    query: Ints
    extra: int
    shadow: bool
    exact_ops: Ints


@dataclass(frozen=True, slots=True)
class BlendOrders:
    """Scheduler to workers, in one step.

    Attributes:
        prepare: draft these.
        go: job ids that all ranks have drafted: recompute and fill the blocks.
        cancel: job ids that a rank could not draft: report them failed.
        idle: nobody waits for this step: time for a shadow.
    """

    prepare: tuple[BlendJob, ...] = ()
    go: tuple[int, ...] = ()
    cancel: tuple[int, ...] = ()
    idle: bool = False


@dataclass(slots=True)
class Ended:
    """Requests whose load ended in this step; the failed ones are among the finished."""

    finished: set[str] = field(default_factory=set)
    failed: set[str] = field(default_factory=set)


@dataclass(frozen=True, slots=True)
class BlendNews:
    """A rank to the scheduler.

    Attributes:
        drafted: job id to (ranks, whether all could).
        seconds: job id to time spent, of jobs that ended; the slowest rank's.
        shadows: (KL divergence in nats, whether the most likely token is the same) of each prompt
            that was also computed in full; the same on every rank.
        shadows_left: how many wait for an idle step.
    """

    drafted: dict[int, tuple[int, bool]]
    seconds: dict[int, float]
    shadows: tuple[tuple[float, bool], ...] = ()
    shadows_left: int = 0

    def merged(self, other: BlendNews) -> BlendNews:
        drafted = dict(self.drafted)
        for job_id, (ranks, ok) in other.drafted.items():
            have, was_ok = drafted.get(job_id, (0, True))
            drafted[job_id] = (have + ranks, was_ok and ok)
        seconds = dict(self.seconds)
        for job_id, value in other.seconds.items():
            seconds[job_id] = max(value, seconds.get(job_id, 0.0))
        return BlendNews(
            drafted,
            seconds,
            self.shadows or other.shadows,
            max(self.shadows_left, other.shadows_left),
        )
