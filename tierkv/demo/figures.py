# SPDX-License-Identifier: Apache-2.0
"""What the samples say: medians, spreads, ratios of neighbours in time, and verdicts."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median, quantiles

from tierkv.demo.phases import Phase, Record, Sample

TITLES = {
    Phase.NONE: "(a) vLLM alone, recomputing",
    Phase.APC: "(b) vLLM's own prefix cache",
    Phase.COLD: "(c) TierKV, nothing cached",
    Phase.DRAM: "(d) TierKV from DRAM",
    Phase.DISK: "(e) TierKV from disk",
}
COLD_PHASES = (Phase.NONE, Phase.COLD)
HIT_TIER = {Phase.APC: "gpu", Phase.DRAM: "dram", Phase.DISK: "disk"}


@dataclass(frozen=True, slots=True)
class Spread:
    """Median of some figures, their interquartile range (0 for a single one), and how many."""

    median: float
    spread: float
    repeats: int

    @staticmethod
    def of(values: Sequence[float]) -> Spread:
        """Summarise `values`; at least one."""
        if len(values) == 1:
            return Spread(values[0], 0.0, 1)
        low, _, high = quantiles(values, n=4, method="inclusive")
        return Spread(median(values), high - low, len(values))


@dataclass(frozen=True, slots=True)
class Check:
    """Something that must hold, or the figures do not mean what they seem to.

    Attributes:
        name: stable, for machines.
        passed: whether it holds.
        detail: one sentence with the numbers.
    """

    name: str
    passed: bool
    detail: str


def ttft(record: Record) -> dict[Phase, Spread]:
    """Time to the first token by phase, seconds."""
    return {phase: Spread.of([s.answer.ttft_s for s in record.of(phase)]) for phase in Phase}


def hit_tokens(record: Record) -> dict[Phase, dict[str, int]]:
    """Prompt tokens that were not computed, by phase and tier, from the servers' own counters."""
    totals: dict[Phase, dict[str, int]] = {phase: {} for phase in Phase}
    for sample in record.samples:
        for tier, tokens in sample.hit_tokens.items():
            totals[sample.phase][tier] = totals[sample.phase].get(tier, 0) + tokens
    return totals


def ratios(record: Record) -> dict[str, Spread]:
    """Ratios of times to the first token, each of requests that were measured side by side."""
    return {
        "dram_over_apc": _paired(record, Phase.DRAM, Phase.APC),
        "disk_over_dram": _paired(record, Phase.DISK, Phase.DRAM),
        "cold_over_none": _paired(record, Phase.COLD, Phase.NONE),
        "none_over_dram": _none_over_dram(record),
    }


def _paired(record: Record, above: Phase, below: Phase) -> Spread:
    partner = {(s.document, s.turn): s.answer.ttft_s for s in record.of(below)}
    values = [
        sample.answer.ttft_s / partner[key]
        for sample in record.of(above)
        if (key := (sample.document, sample.turn)) in partner
    ]
    return Spread.of(values)


def _none_over_dram(record: Record) -> Spread:
    """By document: its one computation over the median of its loads."""
    loads: dict[int, list[float]] = {}
    for sample in record.of(Phase.DRAM):
        loads.setdefault(sample.document, []).append(sample.answer.ttft_s)
    values = [s.answer.ttft_s / median(loads[s.document]) for s in record.of(Phase.NONE)]
    return Spread.of(values)


@dataclass(frozen=True, slots=True)
class Comparison:
    """Answers of one phase against those of another, to the same questions.

    Attributes:
        same: answers that are equal token for token.
        of: answers compared.
    """

    same: int
    of: int


def compare(record: Record, phase: Phase, reference: Phase) -> Comparison:
    """Compare all answers of `phase` whose question `reference` answered too."""
    known = {(s.document, s.question): s for s in record.of(reference)}
    pairs = [
        (sample, known[key])
        for sample in record.of(phase)
        if (key := (sample.document, sample.question)) in known
    ]
    return Comparison(sum(a.answer.same_as(b.answer) for a, b in pairs), len(pairs))


def answers_identical(record: Record) -> bool:
    """Whether all answers from DRAM and from disk are those of vLLM's own prefix cache."""
    return all(
        (found := compare(record, phase, Phase.APC)).of > 0 and found.same == found.of
        for phase in (Phase.DRAM, Phase.DISK)
    )


def checks(record: Record) -> list[Check]:
    """Everything that must hold; the demo fails if one does not."""
    found = []
    for phase in (Phase.DRAM, Phase.DISK):
        same = compare(record, phase, Phase.APC)
        found.append(
            Check(
                f"answers_{phase}",
                same.of > 0 and same.same == same.of,
                f"{same.same} of {same.of} answers with {TITLES[phase]} are token for token those "
                "with vLLM's own prefix cache",
            )
        )
    hits = hit_tokens(record)
    found += [_source_check(phase, hits[phase], record.of(phase)) for phase in Phase]
    cut = {s.answer.cached_tokens for phase in HIT_TIER for s in record.of(phase)}
    found.append(
        Check(
            "prefill_cut",
            len(cut) == 1,
            f"cached tokens of a prompt: {_list(cut)}; the same number in every phase with hits "
            "means that prefills were cut in the same way",
        )
    )
    return found


def _source_check(phase: Phase, hits: Mapping[str, int], samples: Iterable[Sample]) -> Check:
    expected = sum(sample.answer.cached_tokens for sample in samples)
    tier = HIT_TIER.get(phase)
    told = ", ".join(f"{name} {tokens:,}" for name, tokens in hits.items()) or "none"
    detail = f"{TITLES[phase]}: hit tokens by tier: {told}"
    if tier is None:
        return Check(f"source_{phase}", not hits and not expected, f"{detail}; none expected")
    passed = expected > 0 and dict(hits) == {tier: expected}
    return Check(f"source_{phase}", passed, f"{detail}; expected: {tier} {expected:,}")


def _list(values: Iterable[int]) -> str:
    return ", ".join(f"{value:,}" for value in sorted(values))
