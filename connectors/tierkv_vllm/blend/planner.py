# SPDX-License-Identifier: Apache-2.0
"""The scheduler's half: finds donors for a prompt, claims it, and sees its blend through.

Asked after the exact lookup is settled, so exact KV always comes first. A blend claims the prompt
up to its end (or a little behind the last reused text); what no donor has is computed by the
workers along with what must be computed anew, and vLLM computes the last token as after any load.

From the first reused token on a request's KV is approximate: its hashes are tainted, nothing of it
is saved, and it never becomes a donor.

Thread: vLLM's scheduler thread.
"""

from __future__ import annotations

import random
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING

import numpy as np
from vllm.logger import init_logger

from tierkv.blend.donors import DonorIndex
from tierkv.blend.match import MIN_EXTENSION, find_runs
from tierkv.blend.plan import MODES, BlendPlan, make_plan, mode_of
from tierkv.blend.repeats import Repeats
from tierkv.config.blend import BlendConfig
from tierkv.keys import Chunk, Scope
from tierkv.store import LoadTicket, Store
from tierkv_vllm.blend.messages import BlendJob, BlendNews, BlendOrders
from tierkv_vllm.blend.room import Answer, Room
from tierkv_vllm.blend.taint import Taint
from tierkv_vllm.messages import CopyOps

if TYPE_CHECKING:
    from tierkv_vllm.tracking import TrackedRequest

logger = init_logger(__name__)

GAIN_MEMORY = 0.2
"""Weight of the newest blend in what is known about their speed."""
MAX_TOUCHED = 2048
"""Chunks touched after a blend, donors and their contexts: a millisecond of the scheduler's."""
PROBE_EVERY = 32
"""Blends that would not pay by what is known; each so many is tried anyway: things change."""


class Refusal(StrEnum):
    """Why a prompt was not blended: the `reason` of `tierkv_blend_declined_total`."""

    NO_MATCH = "no_match"
    SHORT = "short"
    REPEATED = "repeated"
    """Served blended often enough: computed in full this time, and stored."""
    COST = "cost"
    LAST_BLOCK = "last_block"
    """Only the last, incomplete block would be approximate: its hash cannot be tainted."""
    MEMORY = "memory"
    GONE = "gone"
    """Donors could not be read, or there was no room for them in time."""
    CUT_SHORT = "cut_short"
    """vLLM admitted less than was offered."""


@dataclass(slots=True)
class BlendClaim:
    """A blend that was offered: the plan, and for each of its runs leases on the donors."""

    plan: BlendPlan
    tickets: list[LoadTicket]
    by_tier: dict[str, int] = field(default_factory=dict)
    """Reused tokens by the tier that held their donors; known from admission on."""

    def release(self) -> None:
        for ticket in self.tickets:
            ticket.release()
        self.tickets = []


@dataclass(slots=True)
class _Job:
    """A blend under way."""

    tracked: TrackedRequest
    claim: BlendClaim
    ranks_left: int
    was_approximate_from: int | None
    """An earlier blend's, before a preemption."""
    ok: bool = True


@dataclass(slots=True)
class _Query:
    """What is known about a request before it is admitted; found once, kept until then.

    Attributes:
        exact: tokens that are there exactly.
        asked_at: when; seconds of the Store's clock.
        plan: None if the prompt is not blended.
        claim: on the plan's donors; None before there was room for them.
        settled: all of them were read.
    """

    exact: int
    asked_at: float
    plan: BlendPlan | None
    claim: BlendClaim | None = None
    settled: bool = False

    @property
    def waits(self) -> bool:
        """For room."""
        return self.plan is not None and self.claim is None


class Planner:
    """See the module.

    Args:
        config: of the engine.
        store: opened.
        ranks: that must report each job.
        token_bytes: KV of one token on one rank.
        hash_block_tokens: tokens of one of vLLM's block hashes; None if it caches no prefixes.
        job_id: gives a new number for a job.
    """

    def __init__(
        self,
        config: BlendConfig,
        store: Store,
        *,
        ranks: int,
        token_bytes: int,
        hash_block_tokens: int | None,
        job_id: Callable[[], int],
    ) -> None:
        layout = store.layout
        self._config = config
        self._store = store
        self._counters = store.context.counters
        self._ranks = ranks
        self._token_bytes = token_bytes
        self._hash_block_tokens = hash_block_tokens
        self._job_id = job_id
        self._chunk_tokens = layout.chunk_tokens
        self._block_tokens = layout.block_tokens
        self.donors = DonorIndex(layout.chunk_tokens, config.max_donors, secrets.token_bytes(8))
        self._repeats = Repeats(config.exact_after)
        self._queries: dict[str, _Query] = {}
        self._room = Room(store)
        self._patience = max((tier.load_deadline for tier in store.config.lower), default=0.0)
        self._jobs: dict[int, _Job] = {}
        self._by_request: dict[str, int] = {}
        self._prepare: list[BlendJob] = []
        self._go: list[int] = []
        self._cancel: list[int] = []
        self._seconds_per_token: float | None = None
        self._unprofitable = 0
        self._shadows_left = 0
        self._random = random.Random(0)

    # What is stored

    def stored(self, chunks: Sequence[Chunk], first: int, scope: Scope) -> None:
        """These chunks, from number `first` of their chain on, are in DRAM: possible donors."""
        self.donors.add(chunks, first, scope)

    def recall(self, scope: Scope) -> int:
        """Make donors of what the tiers hold from an earlier run. Blocks: before the first request.

        Args:
            scope: of requests without a tenant. The others' root is not known yet.

        Returns:
            How many donors there are now.
        """
        if not self._config.recall_deadline:
            return 0
        found = self._store.recall(self._config.max_donors, self._config.recall_deadline)
        return self.donors.recall(found, scope)

    def reset(self) -> None:
        """Everything cached was forgotten, what was offered too."""
        for request_id in list(self._queries):
            self.forget(request_id)
        self.donors.clear()
        self._repeats.clear()

    # Before admission

    def offer(self, tracked: TrackedRequest, exact: int) -> BlendClaim | bool | None:
        """Whether the prompt can be blended behind its first `exact` tokens. Idempotent.

        Returns:
            The claim; True if that is not known yet; None if not.
        """
        request_id = tracked.request.request_id
        query = self._queries.get(request_id)
        if query is None or query.exact != exact:
            query = self._queries[request_id] = self._asked(tracked, exact, query)
        if query.plan is not None and query.claim is None:
            self._claim(tracked, query)
        if query.plan is None:
            return None
        if query.claim is None:
            return True
        if not query.settled:
            # All of them, settled or not: each has more to read when something has arrived.
            settled = [ticket.poll() for ticket in query.claim.tickets]
            if not all(settled):
                return True
            self._settle(request_id, query)
        if query.claim is not None and self._is_crowded(query.plan):
            return True
        return query.claim

    def _asked(self, tracked: TrackedRequest, exact: int, before: _Query | None) -> _Query:
        """A new question; one that was asked before with another beginning keeps its place."""
        request_id = tracked.request.request_id
        plan = self._plan(tracked, exact)
        if plan is not None and before is not None and before.waits:
            self._room.wants_others(request_id)
            return _Query(exact, before.asked_at, plan)
        self.forget(request_id)
        return _Query(exact, self._store.context.clock(), plan)

    def _claim(self, tracked: TrackedRequest, query: _Query) -> None:
        """Lease the donors and begin to read the others, once there is room for them."""
        plan, request_id = query.plan, tracked.request.request_id
        assert plan is not None
        answer = self._room.ask(request_id, plan.chunks, tracked.leased)
        if answer is Answer.NOW:
            chains = [[donor.chunk for donor in run.donors] for run in plan.runs]
            query.claim = BlendClaim(plan, self._store.load_all(chains))
            self._room.granted(request_id, query.claim.tickets)
        elif answer is Answer.NEVER:
            self._give_up(request_id, query, Refusal.MEMORY)
        elif self._store.context.clock() >= query.asked_at + self._patience:
            self._give_up(request_id, query, Refusal.GONE)

    def _settle(self, request_id: str, query: _Query) -> None:
        """The donors were read: keep the claim if they are all there."""
        assert query.claim is not None
        query.settled = True
        self._room.done(request_id)
        runs = zip(query.claim.plan.runs, query.claim.tickets, strict=True)
        if any(ticket.ready < len(run.donors) for run, ticket in runs):
            # Once: what is left of the donors is found by the next request.
            self._give_up(request_id, query, Refusal.GONE)

    def _give_up(self, request_id: str, query: _Query, reason: Refusal) -> None:
        self._refuse(reason)
        self._room.done(request_id)
        query.plan = None
        if query.claim is not None:
            query.claim.release()
            query.claim = None

    def _plan(self, tracked: TrackedRequest, exact: int) -> BlendPlan | None:
        mode = tracked.options.blend or self._config.mode
        if mode not in MODES or tracked.never_blend or tracked.media:
            return None
        request = tracked.request
        total = request.num_tokens
        if total - exact <= self._config.min_tokens:
            return None
        scope = tracked.chain.scope
        tokens = np.asarray(request.all_token_ids, dtype=np.int32)
        wished = mode_of(self._config, mode)
        # Of a run that goes on with another, the first tokens are computed anew: half at most.
        extension = max(MIN_EXTENSION, 2 * wished.anchor_tokens)
        runs = find_runs(self.donors, tokens, exact, scope, self._store.holds, extension)
        if not runs:
            self._refuse(Refusal.NO_MATCH)
            return None
        if sum(map(len, runs)) < self._config.min_tokens:
            self._refuse(Refusal.SHORT)
            return None
        plan = make_plan(exact, total, runs, wished)
        refusal = self._objection(tracked, plan)
        if refusal is not None:
            self._refuse(refusal)
            return None
        return plan

    def _objection(self, tracked: TrackedRequest, plan: BlendPlan) -> Refusal | None:
        request = tracked.request
        size = self._hash_block_tokens
        if size is not None and plan.first_approximate // size >= len(request.block_hashes):
            return Refusal.LAST_BLOCK
        if plan.end * self._token_bytes > self._config.max_prompt_bytes:
            return Refusal.MEMORY
        if tracked.chain.chunks and self._repeats.due(tracked.chain.chunks[-1].key):
            return Refusal.REPEATED
        if plan.reused < plan.recomputed:
            return Refusal.COST
        rate = self._store.prefill_rate()
        if rate and self._seconds_per_token and self._seconds_per_token * rate > 1:
            self._unprofitable += 1
            if self._unprofitable % PROBE_EVERY:
                return Refusal.COST
        return None

    def _is_crowded(self, plan: BlendPlan) -> bool:
        """Whether the drafts under way leave no memory for this one. They all come to an end."""
        drafted = sum(job.claim.plan.end for job in self._jobs.values())
        limit = self._config.max_prompt_bytes
        return drafted > 0 and (drafted + plan.end) * self._token_bytes > limit

    def _refuse(self, reason: Refusal) -> None:
        self._counters.add("tierkv_blend_declined_total", reason=reason)

    def forget(self, request_id: str) -> None:
        """Let go of what was offered to a request, if anything was."""
        query = self._queries.pop(request_id, None)
        self._room.done(request_id)
        if query is not None and query.claim is not None:
            query.claim.release()

    # From admission on

    def admitted(
        self, tracked: TrackedRequest, block_ids: Sequence[int], exact_ops: CopyOps
    ) -> None:
        """vLLM granted the claim that was offered last: begin.

        Args:
            block_ids: of the request.
            exact_ops: copies that bring the part that is loaded exactly.
        """
        request = tracked.request
        claim = self._queries.pop(request.request_id).claim
        assert claim is not None
        plan = claim.plan
        claim.by_tier = self._tokens_by_tier(claim)
        job_id = self._job_id()
        self._jobs[job_id] = _Job(tracked, claim, self._ranks, tracked.approximate_from)
        self._by_request[request.request_id] = job_id
        if self._hash_block_tokens is not None:
            tracked.taint = Taint.put(request, plan.first_approximate // self._hash_block_tokens)
        # Blended again after a preemption it may stand on its own approximate blocks: vLLM finds
        # them by their tainted hashes.
        first = plan.first_approximate
        earlier = tracked.approximate_from
        tracked.approximate_from = first if earlier is None else min(first, earlier)
        used = -(-plan.end // self._block_tokens)
        self._prepare.append(
            BlendJob(
                job_id,
                request.request_id,
                np.asarray(request.all_token_ids[: plan.end], dtype=np.int32),
                np.asarray(block_ids[:used], dtype=np.int32),
                plan.exact,
                self._pieces(claim),
                plan.fixed.astype(np.int32),
                plan.samples.astype(np.int32),
                plan.segments.astype(np.int32),
                plan.query.astype(np.int32),
                plan.extra,
                # What is compared follows the last token: it must have been computed.
                plan.last_is_computed and self._random.random() < self._config.shadow,
                exact_ops,
            )
        )

    def _pieces(self, claim: BlendClaim) -> np.ndarray:
        rows = []
        size = self._chunk_tokens
        for run, ticket in zip(claim.plan.runs, claim.tickets, strict=True):
            for slot, donor in zip(ticket.slots, run.donors, strict=False):
                start = donor.start + run.shift
                begin, end = max(start, run.begin), min(start + size, run.end)
                rows.append((slot, begin - start, end - begin, begin, run.shift))
        return np.asarray(rows, dtype=np.int32)

    def orders(self, idle: bool) -> BlendOrders | None:
        """What the workers have to do in this step; `idle`: no request waits for it."""
        idle = idle and not self._jobs
        if not (self._prepare or self._go or self._cancel or (idle and self._shadows_left)):
            return None
        orders = BlendOrders(tuple(self._prepare), tuple(self._go), tuple(self._cancel), idle)
        self._prepare, self._go, self._cancel = [], [], []
        return orders

    def hear(self, news: BlendNews) -> None:
        """What the workers report."""
        for job_id, (ranks, ok) in news.drafted.items():
            job = self._jobs.get(job_id)
            if job is None:
                continue
            job.ok &= ok
            job.ranks_left -= ranks
            if job.ranks_left == 0:
                (self._go if job.ok else self._cancel).append(job_id)
        for job_id, seconds in news.seconds.items():
            job = self._jobs.get(job_id)
            if job is not None:
                self._learn(job.claim.plan, seconds)
        for divergence, agree in news.shadows:
            self._counters.add("tierkv_blend_shadows_total", agree="yes" if agree else "no")
            self._counters.add("tierkv_blend_shadow_kl_nats_total", divergence)
        self._shadows_left = news.shadows_left

    def _learn(self, plan: BlendPlan, seconds: float) -> None:
        self._counters.add("tierkv_blend_seconds_total", seconds)
        per_token = seconds / (plan.end - plan.exact)
        known = self._seconds_per_token
        new = per_token if known is None else known + GAIN_MEMORY * (per_token - known)
        self._seconds_per_token = new

    def ended(self, request_id: str, ok: bool) -> BlendClaim | None:
        """The workers ended the load of this request.

        Returns:
            What was blended, for the accounts; None if it was an ordinary load.
        """
        job_id = self._by_request.pop(request_id, None)
        if job_id is None:
            return None
        job = self._jobs.pop(job_id)
        tracked = job.tracked
        job.claim.release()
        self._counters.add("tierkv_blend_requests_total", outcome="served" if ok else "failed")
        if ok:
            if tracked.chain.chunks:
                self._repeats.served(tracked.chain.chunks[-1].key)
            plan = job.claim.plan
            self._touch(plan)
            self._counters.add("tierkv_blend_tokens_total", plan.reused, kind="reused")
            self._counters.add("tierkv_blend_tokens_total", plan.recomputed, kind="recomputed")
            return job.claim
        tracked.never_blend = True
        tracked.approximate_from = job.was_approximate_from
        if tracked.taint is not None:
            tracked.taint.lift(tracked.request)
            tracked.taint = None
        return job.claim

    def _touch(self, plan: BlendPlan) -> None:
        """Keep what was of use, with its context: after a restart its place follows from that.

        In DRAM, where no place is ever lost, it was touched when it was leased.
        """
        used: dict[bytes, Chunk] = {}
        for run in plan.runs:
            first = run.donors[0]
            if len(used) + first.start // self._chunk_tokens + len(run.donors) > MAX_TOUCHED:
                continue
            donors = [*self.donors.context(first), *run.donors]
            used |= {donor.chunk.key: donor.chunk for donor in donors}
        self._store.touch_below(list(used.values()))

    @property
    def busy(self) -> bool:
        """Whether an idle engine must keep stepping."""
        return bool(self._jobs or self._prepare or self._go or self._cancel or self._shadows_left)

    def _tokens_by_tier(self, claim: BlendClaim) -> dict[str, int]:
        """Reused tokens by the tier that held their donors; recomputed ones are left out."""
        fixed = np.zeros(claim.plan.end, dtype=bool)
        fixed[claim.plan.fixed] = True
        split: dict[str, int] = {}
        for run, ticket in zip(claim.plan.runs, claim.tickets, strict=True):
            for donor, tier in zip(run.donors, ticket.sources, strict=False):
                start = donor.start + run.shift
                begin, end = max(start, run.begin), min(start + self._chunk_tokens, run.end)
                split[tier] = split.get(tier, 0) + int((~fixed[begin:end]).sum())
        # Which tokens are recomputed by choice is known only later: each tier gives its share.
        left, total = claim.plan.extra, sum(split.values())
        for tier, count in split.items():
            taken = min(left, -(-claim.plan.extra * count // total)) if total else 0
            split[tier], left = count - taken, left - taken
        return split

    def close(self) -> None:
        for request_id in list(self._queries):
            self.forget(request_id)
        for job in self._jobs.values():
            job.claim.release()
        self._jobs.clear()

    @property
    def pending(self) -> int:
        """Offers and jobs that must come back to zero when no request is left."""
        return len(self._queries) + len(self._jobs) + len(self._room)
