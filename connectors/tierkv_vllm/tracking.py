# SPDX-License-Identifier: Apache-2.0
"""What the scheduler's half remembers of one request, and where its prompt tokens ended up."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING

from tierkv.keys import Chunk, ChunkChain
from tierkv.telemetry.requests import Part, RequestLog, RequestRecord
from tierkv_vllm.options import RequestOptions

if TYPE_CHECKING:
    from vllm.v1.request import Request

    from tierkv.store import LoadTicket, Store
    from tierkv_vllm.blend.planner import BlendClaim
    from tierkv_vllm.blend.taint import Taint


class Declined(StrEnum):
    """Why a request loads nothing: the `reason` of `tierkv_declined_requests_total`."""

    PROMPT_EMBEDS = "prompt_embeds"
    """All such prompts have the same token ids."""
    STREAMING_INPUT = "streaming_input"
    """vLLM edits tokens it has already computed."""
    NO_READ = "no_read"
    """Prompt log-probabilities and the like need every position computed; it may still save."""
    OPTED_OUT = "opted_out"


@dataclass(slots=True)
class Claim:
    """Tokens promised to vLLM, with the leases that make the promise good.

    Attributes:
        ticket: leases on the chunks from `first_chunk` on.
        first_chunk: index of the first chunk that the ticket covers.
        start, end: tokens claimed, both multiples of the engine's block size; end is 0 while the
            ticket is not settled.
        blend: the claim goes on behind the exact tokens, to the end of this blend's plan.
    """

    ticket: LoadTicket
    first_chunk: int
    start: int
    end: int = 0
    blend: BlendClaim | None = None

    @property
    def reach(self) -> int:
        """Behind the last token claimed, blended ones included."""
        return self.end if self.blend is None else self.blend.plan.end


@dataclass(slots=True)
class TrackedRequest:
    """One request between its arrival and its end.

    Attributes:
        chain: keys of its full chunks; grows with generated tokens.
        computed: tokens whose KV exists once every step planned so far has run.
        saved: leading chunks that need no (further) save.
        blocks: ids of its engine blocks by KV cache group, as last told by vLLM; empty while it
            holds none.
        step_began: tokens computed before the last step that was planned for it. Blocks that
            have left a sliding window by then may hold anything.
        loading: a load writes its blocks right now.
        local: leading tokens that vLLM's own prefix cache held when it asked last.
        counted: its prompt tokens have been put under an outcome.
        stale: the caches were reset during its life; what it computes may be of the past.
        asked_at, answered_at: seconds, when vLLM first asked what can be loaded, and when that
            was known.
        load_began: seconds, when it was admitted with a load.
        record: what became of its prompt, once `counted`.
        approximate_from: first token whose KV is approximate, None if there is none. Nothing from
            there on is saved.
        taint: of its block hashes, while it has one.
        never_blend: a blend of it failed.
    """

    request: Request
    chain: ChunkChain
    options: RequestOptions
    media: dict[int, bytes] = field(default_factory=dict)
    declined: Declined | None = None
    claim: Claim | None = None
    computed: int = 0
    saved: int = 0
    blocks: tuple[list[int], ...] = ()
    step_began: int = 0
    loading: bool = False
    never_load: bool = False
    local: int = 0
    counted: bool = False
    stale: bool = False
    asked_at: float = 0.0
    answered_at: float = 0.0
    load_began: float = 0.0
    record: RequestRecord | None = None
    approximate_from: int | None = None
    taint: Taint | None = None
    never_blend: bool = False

    @property
    def may_load(self) -> bool:
        return self.declined is None and self.options.load and not self.never_load

    @property
    def may_save(self) -> bool:
        allowed = self.declined in (None, Declined.NO_READ) and self.options.save
        return allowed and not self.stale

    @property
    def leased(self) -> Sequence[Chunk]:
        """Chunks of its exact beginning that its claim holds in DRAM."""
        if self.claim is None:
            return ()
        first = self.claim.first_chunk
        return self.chain.chunks[first : first + self.claim.ticket.ready]

    def extend(self) -> None:
        """Bring the chain up to the tokens known now."""
        self.chain.extend(self.request.all_token_ids, self.media)

    def drop_claim(self) -> None:
        """Give the leases back, if there are any."""
        if self.claim is not None:
            self.claim.ticket.release()
            self.claim = None


class Accounting:
    """Puts every query token of a request under exactly one outcome, once.

    Query tokens are those that vLLM's own prefix cache did not hold at first admission; see
    `docs/reference/metrics.md`. The sum over outcomes equals `vllm:external_prefix_cache_queries`.

    Args:
        store: whose counters are raised, and which knows why something is missing.
        chunk_tokens: tokens in a chunk.

    Attributes:
        log: the last requests that were settled.
    """

    def __init__(self, store: Store, chunk_tokens: int) -> None:
        self.log = RequestLog()
        self._store = store
        self._counters = store.context.counters
        self._chunk_tokens = chunk_tokens
        self._unpriced = 0  # hit tokens from before the engine's speed was known

    def count(
        self, tracked: TrackedRequest, claim: Claim | None, ok: bool, ticket: LoadTicket | None
    ) -> None:
        """Settle one request; further calls for it change nothing.

        Args:
            claim: what was loaded, if anything; `ok` tells whether it arrived.
            ticket: of the lookup, settled; None if there was none.
        """
        if tracked.counted:
            return
        tracked.counted = True
        now = self._store.context.clock()
        parts = self._parts(tracked, claim, ok, ticket)
        for part in parts:
            self._add(part)
        local = min(tracked.local, tracked.request.num_prompt_tokens)
        self._counters.add("tierkv_gpu_hit_tokens_total", local)
        lookup = max(0.0, tracked.answered_at - tracked.asked_at)
        load = max(0.0, now - tracked.load_began) if claim is not None else 0.0
        if claim is not None and ok:
            self._price(claim.reach - claim.start, lookup + load)
        tracked.record = RequestRecord(
            tracked.request.request_id,
            time.time(),
            tracked.request.num_prompt_tokens,
            local,
            tuple(parts),
            lookup,
            load,
        )
        self.log.add(tracked.record)

    def _parts(
        self, tracked: TrackedRequest, claim: Claim | None, ok: bool, ticket: LoadTicket | None
    ) -> list[Part]:
        total, local = tracked.request.num_prompt_tokens, tracked.local
        if tracked.declined is not None:
            return _some(Part("declined", "none", str(tracked.declined), total - local))
        parts: list[Part] = []
        end = local
        if claim is not None:
            end = claim.reach
            for tier, tokens in tokens_by_tier(claim, self._chunk_tokens).items():
                parts.append(Part("hit", tier, "", tokens) if ok else _failed(tier, tokens))
            if claim.blend is not None:
                parts += _blended(claim.blend, ok)
        # The last token is always computed, so a chunk that ends with it cannot be a whole hit.
        reachable = max(end, (total - 1) // self._chunk_tokens * self._chunk_tokens)
        rest = ticket.rest if ticket is not None else "miss"
        if not tracked.options.load:
            parts += _some(Part("miss", "none", "opted_out", reachable - end))
        elif rest in ("", "miss"):
            parts += self._missing(tracked, end, reachable)
        elif ticket is not None:
            parts += _some(Part(rest, ticket.blame, ticket.error, reachable - end))
        return parts + _some(Part("tail", "none", "", total - reachable))

    def _missing(self, tracked: TrackedRequest, begin: int, end: int) -> list[Part]:
        """Tokens from `begin` to `end` that no tier had, by why not."""
        if begin >= end:
            return []
        size = self._chunk_tokens
        first = begin // size
        tokens: dict[tuple[str, str], int] = {}
        reasons = self._store.why_missing(tracked.chain.chunks[first : end // size])
        for index, why in enumerate(reasons, first):
            count = min(end, (index + 1) * size) - max(begin, index * size)
            tokens[why] = tokens.get(why, 0) + count
        return [Part("miss", tier, reason, count) for (reason, tier), count in tokens.items()]

    def _add(self, part: Part) -> None:
        outcome, tier, reason, tokens = part
        delivered = outcome in ("hit", "failed")
        self._counters.add(
            "tierkv_query_tokens_total",
            tokens,
            outcome=outcome,
            tier=tier if delivered else "none",
            reuse=_REUSE.get(reason, "exact") if outcome == "hit" else "none",
        )
        if outcome == "miss":
            self._counters.add("tierkv_miss_tokens_total", tokens, reason=reason, tier=tier)

    def _price(self, tokens: int, seconds: float) -> None:
        """What a hit took, and what it saved."""
        self._counters.add("tierkv_load_seconds_total", seconds)
        self._unpriced += tokens
        rate = self._store.prefill_rate()
        if rate:
            self._counters.add("tierkv_saved_prefill_seconds_total", self._unpriced / rate)
            self._unpriced = 0


ANY_TEXT = "any_text"
"""Reason of a hit that is no prefix."""
_REUSE = {ANY_TEXT: ANY_TEXT}


def _some(part: Part) -> list[Part]:
    return [part] if part.tokens > 0 else []


def _blended(blend: BlendClaim, ok: bool) -> list[Part]:
    """The tokens behind the exact ones: taken from donors, or computed by the workers."""
    plan = blend.plan
    if not ok:
        return [_failed("dram", plan.end - plan.exact)]
    parts = [Part("hit", tier, ANY_TEXT, n) for tier, n in blend.by_tier.items() if n]
    reused = sum(part.tokens for part in parts)
    return [*parts, Part("recomputed", "none", "", plan.end - plan.exact - reused)]


def _failed(tier: str, tokens: int) -> Part:
    """Promised and not delivered by the workers' copies."""
    return Part("failed", tier, "worker", tokens)


def tokens_by_tier(claim: Claim, chunk_tokens: int) -> dict[str, int]:
    """Claimed tokens by the tier that held them when they were looked up."""
    split: dict[str, int] = {}
    for index, tier in enumerate(claim.ticket.sources):
        begin = (claim.first_chunk + index) * chunk_tokens
        tokens = min(begin + chunk_tokens, claim.end) - max(begin, claim.start)
        if tokens > 0:
            split[tier] = split.get(tier, 0) + tokens
    return split
