# SPDX-License-Identifier: Apache-2.0
"""The half of the connector beside vLLM's scheduler: what to load, what to save, and when.

Life of a request here: `on_new_request` hashes its prompt and lets the Store begin to read;
`matched_tokens` is asked, possibly many times, what can be loaded; `allocated` turns the answer
into a load job; `plan_step` emits jobs and notes what is computed; `loaded` and `saved` hear from
the workers; `finished` takes leave. Every way out gives leases and jobs back.

Saves run one step behind: step k+1 saves what steps up to k computed. By then the tokens are
accepted, the copy never stands before a first token, and a worker needs no queue. A block that was
freed meanwhile still holds its bytes until something writes it, and that is ordered behind the copy
by the plan's fences.

Threads and ownership. Everything runs on vLLM's scheduler thread; nothing here blocks. The Store
owns the only other thread.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
from vllm.logger import init_logger

from tierkv.keys import ChunkChain, Namespace
from tierkv.store import Store
from tierkv_vllm import identity, options
from tierkv_vllm.groups import Group
from tierkv_vllm.messages import CopyOps, LoadJob, StepPlan, WorkerReport
from tierkv_vllm.saves import BlockIds, Saves, Saving
from tierkv_vllm.tracking import Accounting, Claim, Declined, TrackedRequest, tokens_by_tier
from tierkv_vllm.watching import Watch

if TYPE_CHECKING:
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.request import Request

    from tierkv_vllm.blend.planner import Planner

logger = init_logger(__name__)

PATIENCE_TOKENS = 8192
"""Computed tokens of a prompt that may wait to be saved until its first token is out."""

NO_OPS: CopyOps = np.empty((0, 3), dtype=np.int32)


class SchedulerSide:
    """Plans every step of one engine.

    Args:
        store: opened; closed by `shutdown`.
        namespace: of the store.
        groups: KV cache groups of the engine.
        ranks: workers that must report each job.
        save_generated: keep the KV of generated tokens too, not only of prompts.
    """

    def __init__(
        self,
        store: Store,
        namespace: Namespace,
        groups: Sequence[Group],
        *,
        ranks: int,
        save_generated: bool,
    ) -> None:
        self.store = store
        self._namespace = namespace
        self._layout = store.layout
        self._groups = groups
        # What waits to be saved must not leave a window meanwhile.
        windows = [group.window for group in groups if group.window is not None]
        self._patience = min([PATIENCE_TOKENS, *windows])
        self._landing: dict[str, tuple[Request, int]] | None = {} if windows else None
        self._save_generated = save_generated
        self._counters = store.context.counters
        self._accounting = Accounting(store, self._layout.chunk_tokens)
        self._block_pool: BlockPool | None = None
        self._tier_types = {tier.name: tier.type for tier in store.config.tiers}
        self._requests: dict[str, TrackedRequest] = {}
        self._next_job = 0
        self._new_loads: list[LoadJob] = []
        self._loads: dict[str, tuple[TrackedRequest, Claim]] = {}
        # Last chunk of a load under way, and whose: who wants the very same waits for the copy,
        # and then shares vLLM's blocks instead of filling blocks of its own.
        self._arriving: dict[bytes, str] = {}
        self._leaving: list[Saving] = []
        self._saves = Saves(store, groups, ranks, self.new_job_id)
        self._step_blocks: set[int] = set()
        self._last_prefill: tuple[float, int, frozenset[str]] | None = None
        self._watch: Watch | None = None
        self._blend: Planner | None = None

    def watch(self, model: str) -> None:
        """Let this user's other processes look into the engine; `model` is its name for them."""
        watch = Watch(self.store, self._namespace, self._accounting.log, self.reset, model)
        self._watch = watch if watch.open() else None

    def blend_with(self, planner: Planner) -> None:
        """Reuse any text, not only prefixes."""
        self._blend = planner

    def bind_block_pool(self, pool: BlockPool) -> None:
        """Let arrivals see what vLLM's own prefix cache holds, so that it is not fetched again."""
        self._block_pool = pool

    # Arrival and lookup

    def on_new_request(self, request: Request) -> None:
        """A request joined the queue: hash its prompt and begin to read what lies below DRAM."""
        if self._watch is not None:
            self._watch.act()  # an idle engine has had no step to do it in
        tracked = self._track(request)
        if tracked.may_load and not request.skip_reading_prefix_cache:
            first = self._held_by_vllm(request) // self._layout.chunk_tokens
            self.store.prefetch(tracked.chain.chunks[first:])

    def matched_tokens(self, request: Request, local: int) -> tuple[int | None, bool]:
        """vLLM's question: how many tokens beyond `local` can be loaded, and do we know yet?

        Idempotent: asked in every step until the request is admitted.

        Returns:
            (None, False): not known yet, at most until the tiers' deadlines, of the exact part and
            then, if text from elsewhere is read, of room for it and of that. (0, False): nothing.
            (n, True): n tokens, verified in DRAM and leased, will be loaded asynchronously.
        """
        self.store.poll()
        tracked = self._track(request)
        tracked.local = local
        now = self.store.context.clock()
        tracked.asked_at = tracked.asked_at or now
        if not tracked.may_load or request.skip_reading_prefix_cache:
            tracked.drop_claim()
            return 0, False
        size = self._layout.chunk_tokens
        first = local // size
        if tracked.claim is None or tracked.claim.first_chunk != first:
            tracked.drop_claim()
            tracked.extend()
            # vLLM computes at least the last token; stopping at the last block boundary before
            # it cuts the prefill exactly as its own prefix cache does.
            wanted = tracked.chain.chunks[first : -(-self._reachable(request) // size)]
            tracked.claim = Claim(self.store.load(wanted), first, start=local)
        claim = tracked.claim
        if not claim.ticket.poll():
            return None, False
        tracked.answered_at = tracked.answered_at or now
        end = min((first + claim.ticket.ready) * size, self._reachable(request))
        claim.start, claim.end = local, max(local, end)
        if self._blend is not None:
            offer = self._blend.offer(tracked, claim.end)
            if offer is True:
                return None, False
            claim.blend = offer or None
        if claim.reach <= local:
            return 0, False
        if self._landing and self._too_crowded(request, end):
            return None, False
        if claim.blend is None and self._arriving.get(self._last_key(tracked, end)):
            return None, False
        return claim.reach - local, True

    def _last_key(self, tracked: TrackedRequest, end: int) -> bytes:
        return tracked.chain.chunks[-(-end // self._layout.chunk_tokens) - 1].key

    def _too_crowded(self, request: Request, end: int) -> bool:
        """Whether this load would take blocks that others need to go on after theirs.

        vLLM keeps blocks free for requests that load or have loaded, but counts too few for groups
        with a window: blocks that have left it pass for held ones. Such requests cannot be
        preempted, and would wait for each other's blocks for ever.
        """
        pool = self._block_pool
        if pool is None or self._landing is None:
            return False
        needed = sum(
            -(-request.num_tokens // group.block_tokens) - group.first_needed(end)
            for group in self._groups
        )
        for other, loaded in self._landing.values():
            needed += sum(
                -(-other.num_tokens // group.block_tokens) - loaded // group.block_tokens
                for group in self._groups
            )
        return needed > pool.get_num_free_blocks()

    def allocated(self, request: Request, block_ids: BlockIds, external: int) -> None:
        """vLLM admitted the request: turn the claim into a load job, or let go of it.

        If this raises with `external` > 0, the caller owes a `fail_load`: vLLM waits for exactly
        one report of a load that it admitted.
        """
        tracked = self._track(request)
        claim = tracked.claim
        if self._landing is not None:
            self._landing.pop(request.request_id, None)
        if self._blend is not None and (claim is None or claim.blend is None or not external):
            self._blend.forget(request.request_id)
        if external == 0:
            # Also called when a request goes on after its load: then it has been counted.
            ticket = claim.ticket if claim is not None else None
            self._accounting.count(tracked, None, False, ticket)
            tracked.drop_claim()
            return
        if claim is None or claim.reach == 0:
            raise RuntimeError("vLLM admitted a load that was not offered")
        self._step_blocks.update(*block_ids)
        if claim.blend is not None and claim.start + external != claim.reach:
            self._counters.add("tierkv_blend_declined_total", reason="cut_short")
            tracked.never_blend = True
            tracked.drop_claim()
            if self._blend is not None:
                self._blend.forget(request.request_id)
            self.fail_load(request)
            return
        if claim.blend is None:
            claim.end = claim.start + external
        ops = self._load_ops(claim, block_ids)
        tracked.loading, tracked.claim = True, None
        if self._landing is not None:
            self._landing[request.request_id] = (request, claim.end)
        tracked.load_began = self.store.context.clock()
        self._loads[request.request_id] = (tracked, claim)
        if claim.blend is None and self._block_pool is not None and self._block_pool.enable_caching:
            self._arriving[self._last_key(tracked, claim.end)] = request.request_id
        if claim.blend is not None and self._blend is not None:
            self._blend.admitted(tracked, block_ids[0], ops)
            return
        self._new_loads.append(LoadJob(self.new_job_id(), request.request_id, ops))

    def fail_load(self, request: Request) -> None:
        """Something went wrong while a load was admitted: have the workers report it failed."""
        self._track(request).loading = True
        self._new_loads.append(LoadJob(self.new_job_id(), request.request_id, NO_OPS))

    def _load_ops(self, claim: Claim, block_ids: BlockIds) -> CopyOps:
        slots = np.asarray(claim.ticket.slots, dtype=np.int32)
        parts = []
        for group, ids in zip(self._groups, block_ids, strict=True):
            first = max(claim.start // group.block_tokens, group.first_needed(claim.end))
            blocks = np.arange(first, claim.end // group.block_tokens)
            ops = np.empty((len(blocks), 3), dtype=np.int32)
            ops[:, 0] = slots[blocks // group.per_chunk - claim.first_chunk]
            ops[:, 1] = group.first_index + blocks % group.per_chunk
            ops[:, 2] = np.asarray(ids, dtype=np.int32)[blocks]
            parts.append(ops)
            group.count(self._counters, "load", len(ops))
        ops = np.concatenate(parts)
        if not ops[:, 2].all():
            raise RuntimeError("vLLM gave no block to a part of the load that is needed")
        return ops

    def hit_tokens_by_tier_type(self, request: Request) -> dict[str, int]:
        """Of the load that was just admitted, tokens by type of tier."""
        load = self._loads.get(request.request_id)
        if load is None:
            return {}
        split: dict[str, int] = {}
        for name, tokens in tokens_by_tier(load[1], self._layout.chunk_tokens).items():
            kind = self._tier_types[name]
            split[kind] = split.get(kind, 0) + tokens
        blend = load[1].blend
        if blend is not None:
            for name, tokens in blend.by_tier.items():
                kind = self._tier_types[name]
                split[kind] = split.get(kind, 0) + tokens
            # vLLM counts as a hit what the workers compute, too: no tier gave it.
            split[""] = load[1].reach - load[1].start - sum(split.values())
        return split

    # Each step

    def plan_step(self, output: SchedulerOutput) -> StepPlan:
        """Everything the workers have to do in this step. Called in every step, empty ones too."""
        self.store.poll()
        if self._watch is not None:
            self._watch.act()
        self._observe_prefill(output)
        saves = self._leaving
        self._leaving = []
        for request_id in output.preempted_req_ids or ():
            saves += self._preempted(request_id)
        admitted = self._follow_blocks(output)
        for request_id, scheduled in output.num_scheduled_tokens.items():
            tracked = self._requests.get(request_id)
            if tracked is None:
                continue
            tracked.computed = tracked.request.num_computed_tokens
            # vLLM lets a request share blocks that another one computes in this very step: what
            # an admitted request counts as computed may not exist before the step has run.
            if request_id not in admitted and not self._nears_first_token(tracked):
                saves += self._unsaved(tracked)
            tracked.step_began = tracked.computed
            tracked.computed += scheduled
        save = self._saves.begin(saves)
        fences = self._saves.fences(self._step_blocks, output)
        self._step_blocks = set()
        # Before the orders are taken: if this raises, they go out with the next plan.
        self._tell()
        return replace(self.plan_pending_loads(), save=save, fences=tuple(fences))

    def plan_pending_loads(self) -> StepPlan:
        """All that a plan needs when standing aside: vLLM waits for each load it admitted."""
        loads, self._new_loads = tuple(self._new_loads), []
        blend = self._blend.orders(idle=not self._requests) if self._blend is not None else None
        return StepPlan(loads=loads, blend=blend)

    def _follow_blocks(self, output: SchedulerOutput) -> set[str]:
        """Keep each request's block table as vLLM's workers see it.

        Returns:
            Requests that were admitted in this step.
        """
        for new in output.scheduled_new_reqs:
            if tracked := self._requests.get(new.req_id):
                tracked.blocks = tuple(map(list, new.block_ids))
            self._step_blocks.update(*new.block_ids)
        cached = output.scheduled_cached_reqs
        for request_id, new_ids in zip(cached.req_ids, cached.new_block_ids, strict=True):
            if new_ids is None:
                continue
            self._step_blocks.update(*new_ids)
            if tracked := self._requests.get(request_id):
                if request_id in cached.resumed_req_ids:
                    tracked.blocks = tuple(map(list, new_ids))
                else:
                    for known, ids in zip(tracked.blocks, new_ids, strict=True):
                        known += ids
        return {new.req_id for new in output.scheduled_new_reqs} | cached.resumed_req_ids

    def _nears_first_token(self, tracked: TrackedRequest) -> bool:
        """Somebody waits for the prompt's first token: its saves can come after it.

        Not without end: a long prompt would then be copied all at once.
        """
        backlog = tracked.computed - tracked.saved * self._layout.chunk_tokens
        return tracked.request.num_output_tokens == 0 and backlog < self._patience

    def _unsaved(self, tracked: TrackedRequest) -> list[Saving]:
        """Chunks whose KV is complete and not saved yet, with the request's blocks for them."""
        if not tracked.may_save or tracked.loading or not tracked.blocks:
            return []
        request = tracked.request
        # The last known token may just have been sampled: its KV is not computed yet. Draft
        # tokens that were rejected lie behind it.
        tokens = min(tracked.computed, request.num_tokens - 1)
        if not self._save_generated:
            tokens = min(tokens, request.num_prompt_tokens)
        if tracked.approximate_from is not None:
            tokens = min(tokens, tracked.approximate_from)
        full = tokens // self._layout.chunk_tokens
        if full <= tracked.saved:
            return []
        pairs = list(zip(self._groups, tracked.blocks, strict=True))
        if any(len(ids) < full * group.per_chunk for group, ids in pairs):
            return []
        first, tracked.saved = tracked.saved, full
        for group, ids in pairs:
            first = max(first, group.first_whole(tracked.step_began, ids))
        if full <= first:
            return []
        tracked.extend()
        blocks = [ids[first * group.per_chunk : full * group.per_chunk] for group, ids in pairs]
        return [Saving(tracked.chain.chunks[first:full], blocks, first, tracked.chain.scope)]

    # Reports of the workers

    def loaded(self, finished: Iterable[str], failed: Iterable[str]) -> None:
        """All ranks ended these requests' loads."""
        failures = set(failed)
        for request_id in finished:
            tracked, claim = self._loads.pop(request_id, (None, None))
            ok = request_id not in failures
            if tracked is None or claim is None:
                if (known := self._requests.get(request_id)) is not None:
                    known.loading, known.never_load = False, True
                continue
            tracked.loading = False
            key = self._last_key(tracked, claim.end) if claim.end else b""
            if self._arriving.get(key) == request_id:
                del self._arriving[key]
            if claim.blend is not None and self._blend is not None:
                self._blend.ended(request_id, ok)
            if not ok and self._landing is not None:
                self._landing.pop(request_id, None)
            self._accounting.count(tracked, claim, ok, claim.ticket)
            if ok and self._blend is not None:
                first, last = claim.first_chunk, claim.end // self._layout.chunk_tokens
                self._blend.stored(tracked.chain.chunks[first:last], first, tracked.chain.scope)
            if not ok and claim.blend is not None:
                # The exact part may be sound: it is offered again, by itself.
                tracked.computed = 0
            elif not ok:
                # Offered again it would fail again, and the request would never end.
                tracked.never_load = True
                tracked.computed = 0
                self._counters.add("tierkv_errors_total", tier="dram", kind="worker")
                last = -(-claim.end // self._layout.chunk_tokens)
                self.store.invalidate(tracked.chain.chunks[claim.first_chunk : last])
                logger.warning(
                    "TierKV: a load of %d tokens failed; the request is recomputed",
                    claim.end - claim.start,
                )
            claim.ticket.release()

    def saved(self, report: WorkerReport) -> None:
        """What the workers report of saves and blends."""
        if report.blend is not None and self._blend is not None:
            self._blend.hear(report.blend)
        for saving in self._saves.reported(report.saves):
            if self._blend is not None:
                self._blend.stored(saving.chunks, saving.first, saving.scope)
        self._tell()

    def _tell(self) -> None:
        if self._watch is not None:
            self._watch.tell(idle=not (self._requests or self._loads or self.has_work()))

    # Ways out

    def finished(self, request: Request) -> dict[str, Any] | None:
        """The request ended (done, aborted or failed); its blocks are about to be freed.

        Returns:
            What became of its prompt, if it asked to be told.
        """
        tracked = self._requests.pop(request.request_id, None)
        if self._landing is not None:
            self._landing.pop(request.request_id, None)
        if tracked is None:
            return None
        tracked.drop_claim()
        if self._blend is not None:
            self._blend.forget(request.request_id)
        if not tracked.loading:
            # Steps in flight may still be counted in num_computed_tokens; they were planned.
            tracked.computed = min(request.num_computed_tokens, tracked.computed)
            self._leaving += self._unsaved(tracked)
            self.store.touch(tracked.chain.chunks[: tracked.saved])
        return options.explanation(tracked.record) if tracked.options.explain else None

    def _preempted(self, request_id: str) -> list[Saving]:
        """Its blocks are gone, but until this step writes them they hold what it computed."""
        tracked = self._requests.get(request_id)
        if tracked is None:
            return []
        tracked.drop_claim()
        saves = self._unsaved(tracked)
        tracked.computed = 0
        tracked.blocks = ()
        return saves

    def reset(self) -> None:
        """Forget everything cached; copies in flight are discarded when they are reported.

        Requests alive now may hold KV of weights that were just replaced: they save no more.
        """
        for tracked in self._requests.values():
            tracked.drop_claim()
            tracked.stale = True
        self._leaving = []
        self.store.reset()
        if self._blend is not None:
            self._blend.reset()

    def has_work(self) -> bool:
        """Whether an otherwise idle engine must keep stepping for us."""
        blending = self._blend is not None and self._blend.busy
        return bool(self._saves or self._leaving or self._new_loads or blending)

    def shutdown(self) -> None:
        if self._watch is not None:
            self._watch.close()
        for tracked in self._requests.values():
            tracked.drop_claim()
        for _, claim in self._loads.values():
            claim.ticket.release()
        if self._blend is not None:
            self._blend.close()
        self._requests.clear()
        self._loads.clear()
        self.store.close()

    def snapshot(self) -> dict[str, int]:
        """Sizes of everything that must come back to zero when no request is left."""
        return {
            "requests": len(self._requests),
            "loads": len(self._loads) + len(self._new_loads),
            "saves": len(self._saves) + len(self._leaving),
            "blends": self._blend.pending if self._blend is not None else 0,
        }

    # Small helpers

    def _track(self, request: Request) -> TrackedRequest:
        tracked = self._requests.get(request.request_id)
        if tracked is not None and tracked.request is request:
            return tracked
        wishes, problems = options.parse(request.kv_transfer_params)
        for problem in problems:
            logger.warning("TierKV: request %s: %s", request.request_id, problem)
        chain = ChunkChain(identity.scope(self._namespace, request), self._layout.chunk_tokens)
        tracked = TrackedRequest(request, chain, wishes, declined=_declined(request, wishes))
        if request.mm_features:
            tracked.media = identity.media_extras(request, self._layout.chunk_tokens)
        if tracked.declined is not None:
            self._counters.add("tierkv_declined_requests_total", reason=str(tracked.declined))
        if tracked.may_load or tracked.may_save:
            tracked.extend()
        self._requests[request.request_id] = tracked
        return tracked

    def _held_by_vllm(self, request: Request) -> int:
        """Leading tokens of the prompt in vLLM's own prefix cache. Changes nothing there."""
        pool = self._block_pool
        if pool is None or any(g.block_tokens != pool.hash_block_size for g in self._groups):
            return 0
        held, groups = 0, list(range(len(self._groups)))
        for block_hash in request.block_hashes:
            if pool.get_cached_block(block_hash, groups) is None:
                break
            held += pool.hash_block_size
        return min(held, self._reachable(request))

    def _reachable(self, request: Request) -> int:
        """Where a hit can end at most: the last block boundary before the last token."""
        block = self._layout.block_tokens
        return (request.num_tokens - 1) // block * block

    def new_job_id(self) -> int:
        """Never the same twice."""
        self._next_job += 1
        return self._next_job

    def _observe_prefill(self, output: SchedulerOutput) -> None:
        """Tell the cost model how fast this engine computes, from steps that mostly prefill."""
        now = time.monotonic()
        if self._last_prefill is not None:
            began, tokens, who = self._last_prefill
            # If none of them goes on, the engine may have idled in between.
            if not who.isdisjoint(output.num_scheduled_tokens):
                self.store.observe_prefill(tokens, now - began)
            self._last_prefill = None
        tokens = output.total_num_scheduled_tokens
        # A step of a few tokens measures overhead, not speed.
        if tokens >= 256:
            self._last_prefill = (now, tokens, frozenset(output.num_scheduled_tokens))


def _declined(request: Request, wishes: options.RequestOptions) -> Declined | None:
    if request.prompt_embeds is not None or request.prompt_is_token_ids is not None:
        return Declined.PROMPT_EMBEDS
    if request.resumable:
        return Declined.STREAMING_INPUT
    if not (wishes.load or wishes.save):
        return Declined.OPTED_OUT
    return Declined.NO_READ if request.skip_reading_prefix_cache else None
