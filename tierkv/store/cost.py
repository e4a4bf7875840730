# SPDX-License-Identifier: Apache-2.0
"""Whether loading pays: each tier's measured speed against the engine's measured prefill speed.

A hit that arrives later than recomputing would have is no gain, so it is skipped. Speeds are sums
that decay, amount over time, so that many small samples and few large ones weigh by their size.
A skipped tier is tried again now and then: its speed could not be measured otherwise.

Threads and ownership. Owned by the Store's scheduler thread; no lock.
"""

from __future__ import annotations

from dataclasses import dataclass, field

MIN_SAMPLES = 8
"""Before that many on both sides, nothing is skipped."""
MARGIN = 1.2
"""Loading must be that much slower: prefill takes the GPU from others, loading does not."""
RETRY_EVERY = 64
"""One in this many skips is loaded anyhow, to measure again."""
_DECAY = 0.98
"""Weight of the past against one sample; half is forgotten after about 34."""


@dataclass(slots=True)
class _Rate:
    samples: int = 0
    amount: float = 0.0
    seconds: float = 0.0

    def add(self, amount: float, seconds: float) -> None:
        self.samples += 1
        self.amount = self.amount * _DECAY + amount
        self.seconds = self.seconds * _DECAY + seconds

    @property
    def per_second(self) -> float:
        return self.amount / max(self.seconds, 1e-9)


@dataclass(slots=True)
class _TierCost:
    rate: _Rate = field(default_factory=_Rate)
    last_ended: float = float("-inf")
    skipped: int = 0


class CostModel:
    """See the module.

    Args:
        chunk_tokens: tokens in a chunk.
        chunk_bytes: bytes of a chunk in DRAM.
    """

    def __init__(self, chunk_tokens: int, chunk_bytes: int) -> None:
        self._chunk_tokens = chunk_tokens
        self._chunk_bytes = chunk_bytes
        self._prefill = _Rate()
        self._tiers: dict[str, _TierCost] = {}

    def observe_load(self, tier: str, started: float, ended: float) -> None:
        """One chunk was loaded. In the order of `ended`.

        Loads overlap: time that was counted for the load before is not counted again, so that the
        rate is what the tier delivers and not what one of many parallel loads gets.

        Args:
            started: seconds, when the tier was asked.
            ended: seconds, when it had answered.
        """
        cost = self._tiers.setdefault(tier, _TierCost())
        cost.rate.add(self._chunk_bytes, max(0.0, ended - max(started, cost.last_ended)))
        cost.last_ended = max(ended, cost.last_ended)

    def observe_prefill(self, tokens: int, seconds: float) -> None:
        """The engine computed `tokens` of prompts in `seconds`."""
        if tokens > 0 and seconds > 0:
            self._prefill.add(tokens, seconds)

    def bytes_per_second(self, tier: str) -> float | None:
        """What the tier delivers; None before it was measured."""
        cost = self._tiers.get(tier)
        return cost.rate.per_second if cost and cost.rate.samples >= MIN_SAMPLES else None

    def tokens_per_second(self) -> float | None:
        """What the engine computes; None before it was measured."""
        return self._prefill.per_second if self._prefill.samples >= MIN_SAMPLES else None

    def pays(self, tier: str, chunks: int) -> bool:
        """Whether loading `chunks` takes no longer than recomputing them. Changes nothing."""
        load_rate, prefill_rate = self.bytes_per_second(tier), self.tokens_per_second()
        if load_rate is None or prefill_rate is None:
            return True
        load_seconds = chunks * self._chunk_bytes / load_rate
        prefill_seconds = chunks * self._chunk_tokens / prefill_rate
        return load_seconds <= MARGIN * prefill_seconds

    def worth(self, tier: str, chunks: int) -> bool:
        """`pays`, but True once in `RETRY_EVERY` refusals. Ask once a load."""
        if self.pays(tier, chunks):
            return True
        cost = self._tiers[tier]
        cost.skipped += 1
        return cost.skipped % RETRY_EVERY == 0
