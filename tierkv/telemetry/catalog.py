# SPDX-License-Identifier: Apache-2.0
"""Every metric once: the reference page, the exporter, the dashboards and the tests read this list.

Labels hold no request id, key, path or user data. All their values are listed here, so that every
series exists from the start, at zero; only the names of tiers come from the configuration.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import product

from tierkv.errors import ErrorKind
from tierkv.telemetry.build import build_labels


class Kind(StrEnum):
    """Prometheus type."""

    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


@dataclass(frozen=True, slots=True)
class Label:
    """One label and what it may say.

    Attributes:
        name: as in Prometheus.
        values: fixed values.
        tiers: the names of the configured tiers are allowed too.
        fact: what the one value is, where it depends on what is installed.
    """

    name: str
    values: tuple[str, ...] = ()
    tiers: bool = False
    fact: str = ""


@dataclass(frozen=True, slots=True)
class Metric:
    """One metric.

    Attributes:
        name: full name, base unit and `_total` included.
        kind: see `Kind`.
        help: one sentence.
        labels: in the order in which `Counters` keeps their values.
        buckets: upper bounds of a histogram, ascending, without infinity.
    """

    name: str
    kind: Kind
    help: str
    labels: tuple[Label, ...] = ()
    buckets: tuple[float, ...] = ()

    def series(self, tiers: Sequence[str]) -> Iterator[tuple[str, ...]]:
        """Every combination of label values, given the names of the tiers."""
        return product(*((*label.values, *(tiers if label.tiers else ())) for label in self.labels))


OUTCOMES = (
    "hit",
    "miss",
    "late",
    "unavailable",
    "skipped",
    "failed",
    "recomputed",
    "tail",
    "declined",
)
"""Where each query token ends up; exactly one of these."""

MISS_REASONS = ("never_seen", "evicted", "expired", "invalid", "saving", "opted_out")
"""Why a token under the outcome `miss` was not stored; exactly one of these."""

BLEND_REFUSALS = (
    "no_match",
    "short",
    "repeated",
    "cost",
    "last_block",
    "memory",
    "gone",
    "cut_short",
)
"""Why a prompt was not blended; see `tierkv_vllm.blend.planner`."""

_SECONDS = (*(n * 10.0**power for power in range(-4, 1) for n in (1, 2, 5)), 10.0)

_TIER = Label("tier", tiers=True)
_OP = Label("op", ("load", "save"))

_BUILD = build_labels()

CATALOG: tuple[Metric, ...] = (
    Metric(
        "tierkv_query_tokens_total",
        Kind.COUNTER,
        "Prompt tokens that the engine's own prefix cache lacked, by what became of them.",
        (
            Label("outcome", OUTCOMES),
            Label("tier", ("none",), tiers=True),
            Label("reuse", ("exact", "any_text", "none")),
        ),
    ),
    Metric(
        "tierkv_miss_tokens_total",
        Kind.COUNTER,
        "The tokens under the outcome miss, by why they were not stored.",
        (Label("reason", MISS_REASONS), Label("tier", ("none",), tiers=True)),
    ),
    Metric(
        "tierkv_gpu_hit_tokens_total",
        Kind.COUNTER,
        "Prompt tokens that the engine's own prefix cache held, of the same requests.",
    ),
    Metric(
        "tierkv_saved_prefill_seconds_total",
        Kind.COUNTER,
        "Time to compute the hit tokens, estimated from the engine's own prefill speed.",
    ),
    Metric(
        "tierkv_load_seconds_total",
        Kind.COUNTER,
        "Time that requests with a hit waited for it: from the first lookup to its end, and from "
        "admission to the end of the load.",
    ),
    Metric(
        "tierkv_lookup_chunks_total",
        Kind.COUNTER,
        "Chunks asked for at admission, by what each tier asked said.",
        (_TIER, Label("result", ("hit", "miss", "pending", "unavailable"))),
    ),
    Metric("tierkv_chunks", Kind.GAUGE, "Chunks held.", (_TIER,)),
    Metric("tierkv_used_bytes", Kind.GAUGE, "Bytes in use on the tier's medium.", (_TIER,)),
    Metric("tierkv_capacity_bytes", Kind.GAUGE, "Most bytes the tier may use.", (_TIER,)),
    Metric(
        "tierkv_io_bytes_total",
        Kind.COUNTER,
        "Bytes moved to and from the media of the tiers below DRAM.",
        (_TIER, _OP),
    ),
    Metric(
        "tierkv_io_duration_seconds",
        Kind.HISTOGRAM,
        "Time of one chunk's load from or save to a tier below DRAM, queueing excluded.",
        (_TIER, _OP),
        _SECONDS,
    ),
    Metric(
        "tierkv_queue_depth",
        Kind.GAUGE,
        "Chunks waiting for or in I/O.",
        (_TIER, _OP),
    ),
    Metric(
        "tierkv_inflight_bytes",
        Kind.GAUGE,
        "Bytes of DRAM slots waiting for or in I/O.",
        (_TIER, _OP),
    ),
    Metric("tierkv_leased_slots", Kind.GAUGE, "DRAM slots that a copy or I/O keeps from eviction."),
    Metric("tierkv_pinned_slots", Kind.GAUGE, "DRAM slots that a user keeps from eviction."),
    Metric(
        "tierkv_moves_total",
        Kind.COUNTER,
        "Chunks copied from one tier to another, by what caused it.",
        (
            Label("source", tiers=True),
            Label("target", tiers=True),
            Label("reason", ("load", "prefetch", "through", "on_reuse", "on_evict")),
        ),
    ),
    Metric(
        "tierkv_evictions_total",
        Kind.COUNTER,
        "Chunks a tier gave up.",
        (_TIER, Label("reason", ("capacity", "invalid", "reset"))),
    ),
    Metric(
        "tierkv_saves_dropped_total",
        Kind.COUNTER,
        "Chunks that were to be saved and were not.",
        (
            _TIER,
            Label(
                "reason",
                ("no_slot", "queue_full", "unavailable", "refused", "failed", "reset", "shutdown"),
            ),
        ),
    ),
    Metric(
        "tierkv_errors_total",
        Kind.COUNTER,
        "Operations on a tier that failed.",
        (_TIER, Label("kind", tuple(kind.value for kind in ErrorKind))),
    ),
    Metric(
        "tierkv_declined_requests_total",
        Kind.COUNTER,
        "Requests that ran as if TierKV were absent.",
        (Label("reason", ("prompt_embeds", "streaming_input", "no_read", "opted_out")),),
    ),
    Metric(
        "tierkv_aside",
        Kind.GAUGE,
        "1 while the engine serves without TierKV, by why: what it runs cannot be served, the "
        "cache could not be opened, or something in TierKV raised. The log says more.",
        (Label("reason", ("unsupported", "not_opened", "error")),),
    ),
    Metric(
        "tierkv_engine_blocks_total",
        Kind.COUNTER,
        "Engine blocks planned to be copied from and to DRAM, by how far their layers look back.",
        (_OP, Label("attention", ("full", "window"))),
    ),
    Metric(
        "tierkv_breaker_state",
        Kind.GAUGE,
        "Whether the tier is asked: 0 closed (yes), 1 half-open (one probe), 2 open (no).",
        (_TIER,),
    ),
    Metric(
        "tierkv_build_info",
        Kind.GAUGE,
        "1; the labels tell what runs.",
        (
            Label("version", (_BUILD["version"],), fact="of TierKV"),
            Label("vllm", (_BUILD["vllm"],), fact="its version"),
            Label("record_format", (_BUILD["record_format"],), fact="its version"),
        ),
    ),
    Metric(
        "tierkv_blend_requests_total",
        Kind.COUNTER,
        "Prompts that reused text from another place.",
        (Label("outcome", ("served", "failed")),),
    ),
    Metric(
        "tierkv_blend_declined_total",
        Kind.COUNTER,
        "Prompts that might have reused text from another place and did not.",
        (Label("reason", BLEND_REFUSALS),),
    ),
    Metric(
        "tierkv_blend_tokens_total",
        Kind.COUNTER,
        "Tokens of blended prompts: taken from donors, or computed anew.",
        (Label("kind", ("reused", "recomputed")),),
    ),
    Metric(
        "tierkv_blend_seconds_total",
        Kind.COUNTER,
        "Time that workers spent on blending; of several, the slowest one's.",
    ),
    Metric(
        "tierkv_blend_shadows_total",
        Kind.COUNTER,
        "Blended prompts computed in full too, by whether the most likely next token was the same.",
        (Label("agree", ("yes", "no")),),
    ),
    Metric(
        "tierkv_blend_shadow_kl_nats_total",
        Kind.COUNTER,
        "Divergence of the next token's distribution from the full computation's, summed over "
        "shadows.",
    ),
)

BY_NAME: dict[str, Metric] = {metric.name: metric for metric in CATALOG}
