# SPDX-License-Identifier: Apache-2.0
"""What the scheduler's half remembers of one request, and where its prompt tokens ended up."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING

from tierkv.keys import ChunkChain
from tierkv.telemetry.counters import Counters
from tierkv_vllm.options import RequestOptions

if TYPE_CHECKING:
    from vllm.v1.request import Request

    from tierkv.store import LoadTicket


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
    """

    ticket: LoadTicket
    first_chunk: int
    start: int
    end: int = 0


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

    @property
    def may_load(self) -> bool:
        return self.declined is None and self.options.load and not self.never_load

    @property
    def may_save(self) -> bool:
        allowed = self.declined in (None, Declined.NO_READ) and self.options.save
        return allowed and not self.stale

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
    """

    def __init__(self, counters: Counters, chunk_tokens: int) -> None:
        self._counters = counters
        self._chunk_tokens = chunk_tokens

    def count(self, tracked: TrackedRequest, claim: Claim | None, ok: bool, rest: str) -> None:
        """Settle one request; further calls for it change nothing.

        Args:
            claim: what was loaded, if anything; `ok` tells whether it arrived.
            rest: why the run of hits ended ("" if it did not).
        """
        if tracked.counted:
            return
        tracked.counted = True
        total, local = tracked.request.num_prompt_tokens, tracked.local
        if tracked.declined is not None:
            self._add(total - local, "declined")
            return
        end = claim.end if claim is not None else local
        if claim is not None:
            for tier, tokens in tokens_by_tier(claim, self._chunk_tokens).items():
                self._add(tokens, "hit" if ok else "failed", tier, "exact" if ok else "none")
        # The last token is always computed, so a chunk that ends with it cannot be a whole hit.
        reachable = max(end, (total - 1) // self._chunk_tokens * self._chunk_tokens)
        self._add(reachable - end, rest or "miss")
        self._add(total - reachable, "tail")

    def _add(self, tokens: int, outcome: str, tier: str = "none", reuse: str = "none") -> None:
        if tokens > 0:
            self._counters.add(
                "tierkv_query_tokens_total", tokens, outcome=outcome, tier=tier, reuse=reuse
            )


def tokens_by_tier(claim: Claim, chunk_tokens: int) -> dict[str, int]:
    """Claimed tokens by the tier that held them when they were looked up."""
    split: dict[str, int] = {}
    for index, tier in enumerate(claim.ticket.sources):
        begin = (claim.first_chunk + index) * chunk_tokens
        tokens = min(begin + chunk_tokens, claim.end) - max(begin, claim.start)
        if tokens > 0:
            split[tier] = split.get(tier, 0) + tokens
    return split
