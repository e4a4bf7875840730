# SPDX-License-Identifier: Apache-2.0
"""What `tierkv top` shows, as values: from samples of one engine to rates, tiers and histories.

No terminal here. What is not known is None; only what is zero is 0.
"""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass, field
from typing import Any

from tierkv.stats.source import Sample
from tierkv.telemetry import rates
from tierkv.telemetry.catalog import BY_NAME
from tierkv.telemetry.counters import Snapshot

WINDOW = 10.0
"""Seconds that "now" looks back."""
HISTORY = 240
"""Intervals in a sparkline at most."""
BREAKER = {0.0: "closed", 1.0: "half", 2.0: "open"}


@dataclass(frozen=True, slots=True)
class TierView:
    """One tier.

    Attributes:
        hit_now, hit_session: its part of the hit rate.
        load, save: bytes a second from and to it; what is saved to DRAM is not known.
        p50, p99: seconds of one load: in the window if it had any, else of the session.
        queue: chunks waiting for or in I/O.
        history: hit tokens a second, oldest first; None where nothing was asked for.
    """

    name: str
    used: float
    capacity: float
    hit_now: float | None
    hit_session: float | None
    load: float | None
    save: float | None
    p50: float | None
    p99: float | None
    queue: float | None
    breaker: str | None
    errors: float
    history: list[float | None]


@dataclass(frozen=True, slots=True)
class BlendView:
    """Reuse of text from other places, since the engine's start.

    Attributes:
        served, failed, declined: prompts.
        reused, recomputed: tokens of blended prompts.
        seconds: that workers spent on it.
        shadows: blended prompts that were computed in full too; `agreed` of them gave the same
            next token; `kl` nats is their mean divergence, None without shadows.
    """

    served: float
    failed: float
    declined: float
    reused: float
    recomputed: float
    seconds: float
    shadows: float
    agreed: float
    kl: float | None


@dataclass(frozen=True, slots=True)
class View:
    """One engine.

    Attributes:
        up: seconds since its start; None if not known.
        age: seconds since its numbers were true.
        idle: it has nothing to do; None if not known.
        now, session: token rates in the window, and since the engine's start.
        misses: (reason, tier, tokens), most first, of the session.
        saved, loading: seconds of prefill saved, and of waiting for loads, in the session.
        requests: newest first; None if the source does not tell.
        blend: None where nothing was ever blended or declined.
    """

    info: dict[str, Any]
    origin: str
    up: float | None
    age: float
    idle: bool | None
    now: rates.TokenRates
    session: rates.TokenRates
    tiers: list[TierView]
    misses: list[tuple[str, str, float]]
    saved: float
    loading: float
    requests: list[dict[str, Any]] | None
    blend: BlendView | None


@dataclass(slots=True)
class Viewer:
    """Remembers what it needs of earlier samples of one engine."""

    info: dict[str, Any]
    origin: str
    _samples: deque[Sample] = field(default_factory=deque)
    _history: dict[str, deque[float | None]] = field(default_factory=dict)

    def add(self, sample: Sample) -> None:
        """Take the next sample; of an idle engine it may be the same again."""
        if self._samples and sample.time > self._samples[-1].time:
            step = rates.difference(sample.metrics, self._samples[-1].metrics)
            self._note(step, sample.time - self._samples[-1].time)
        elif self._samples:
            for values in self._history.values():
                values.append(None)
        self._samples.append(sample)
        while len(self._samples) > 2 and self._samples[1].time <= sample.time - WINDOW:
            self._samples.popleft()

    def _note(self, step: Snapshot, seconds: float) -> None:
        found = rates.rates(step)
        for name in rates.tier_names(step):
            values = self._history.setdefault(name, deque(maxlen=HISTORY))
            speed = found.hits.get(name, 0) / seconds
            values.append(speed if found.query_tokens else None)

    def view(self, now: float | None = None) -> View:
        """What is to be shown. At least one sample was added."""
        now = time.time() if now is None else now
        newest, oldest = self._samples[-1], self._samples[0]
        seconds = newest.time - oldest.time
        if newest.idle and now - newest.time > WINDOW:
            seconds = 0.0  # nothing happened in the window
        step = rates.difference(newest.metrics, oldest.metrics) if seconds else {}
        session, recent = rates.rates(newest.metrics), rates.rates(step)
        started = self.info.get("started")
        misses = rates.totals(newest.metrics, "tierkv_miss_tokens_total", "reason", "tier")
        return View(
            self.info,
            self.origin,
            now - started if started is not None else None,
            max(0.0, now - newest.time),
            newest.idle,
            recent,
            session,
            [
                self._tier(name, newest.metrics, step, seconds, recent, session)
                for name in rates.tier_names(newest.metrics)
            ],
            sorted(
                ((reason, tier, n) for (reason, tier), n in misses.items() if n),
                key=lambda row: -row[2],
            ),
            rates.total(newest.metrics, "tierkv_saved_prefill_seconds_total"),
            rates.total(newest.metrics, "tierkv_load_seconds_total"),
            newest.requests[::-1] if newest.requests is not None else None,
            _blend(newest.metrics),
        )

    def _tier(
        self,
        name: str,
        whole: Snapshot,
        step: Snapshot,
        seconds: float,
        recent: rates.TokenRates,
        session: rates.TokenRates,
    ) -> TierView:
        has_io = name != rates.tier_names(whole)[0]  # the first is DRAM: nothing is moved to it

        def speed(op: str) -> float | None:
            if not seconds:
                return None
            if not has_io:
                hit = self.info.get("chunk_bytes", 0) / self.info.get("chunk_tokens", 1)
                return recent.hits.get(name, 0) * hit / seconds if hit and op == "load" else None
            return rates.total(step, "tierkv_io_bytes_total", tier=name, op=op) / seconds

        durations = rates.histogram(step, _SECONDS, tier=name, op="load")
        if durations is None or not durations["count"]:
            durations = rates.histogram(whole, _SECONDS, tier=name, op="load")
        bounds = BY_NAME[_SECONDS].buckets
        return TierView(
            name,
            rates.total(whole, "tierkv_used_bytes", tier=name),
            rates.total(whole, "tierkv_capacity_bytes", tier=name),
            recent.hit_of(name),
            session.hit_of(name),
            speed("load"),
            speed("save"),
            rates.quantile(durations, bounds, 0.5),
            rates.quantile(durations, bounds, 0.99),
            rates.total(whole, "tierkv_queue_depth", tier=name) if has_io else None,
            BREAKER.get(rates.total(whole, "tierkv_breaker_state", tier=name)) if has_io else None,
            rates.total(whole, "tierkv_errors_total", tier=name),
            list(self._history.get(name, ())),
        )


_SECONDS = "tierkv_io_duration_seconds"


def _blend(metrics: Snapshot) -> BlendView | None:
    def total(name: str, **labels: str) -> float:
        return rates.total(metrics, f"tierkv_blend_{name}_total", **labels)

    if not total("requests") + total("declined"):
        return None
    shadows = total("shadows")
    return BlendView(
        total("requests", outcome="served"),
        total("requests", outcome="failed"),
        total("declined"),
        total("tokens", kind="reused"),
        total("tokens", kind="recomputed"),
        total("seconds"),
        shadows,
        total("shadows", agree="yes"),
        rates.ratio(total("shadow_kl_nats"), shadows),
    )
