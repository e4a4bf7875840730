# SPDX-License-Identifier: Apache-2.0
"""The document of a recording."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from tierkv.config.units import approximate_size
from tierkv.report.document import Block, Document, Section, Table, Text
from tierkv.report.recording import Row
from tierkv.report.summary import Summary
from tierkv.report.surroundings import machine_text, versions_text
from tierkv.telemetry.rates import AVOIDABLE, NO_DATA, percent

MEANING = {
    "hit": "delivered",
    "miss": "not stored",
    "late": "a tier missed its load_deadline",
    "unavailable": "a tier is down, its breaker open",
    "skipped": "loading would have taken longer than computing",
    "failed": "promised, not delivered, computed",
    "recomputed": "inside a reused text, computed to repair it",
    "tail": "after the last whole chunk",
    "declined": "a request that TierKV does not serve",
}
STATES = ("closed", "half-open", "open")

ConfigValue = tuple[str, str, str]
"""Path, value as text, source."""


def build(
    summary: Summary,
    rows: Sequence[Row],
    config: Sequence[ConfigValue] = (),
    *,
    pictures: bool,
) -> Document:
    """The document.

    Args:
        summary: from `summarize`.
        rows: of the recording.
        config: values in effect, secrets as references.
        pictures: with plots.
    """
    history: list[Block] = []
    if pictures:
        from tierkv.report.history import plots

        history = [*plots(rows)]
    sections = [
        Section("In short", [_headline(summary), *(Text(line, bad) for line, bad in says(summary))])
    ]
    if history:
        sections.append(Section("Over time", history))
    sections.append(Section("Tiers", _tiers(summary)))
    sections.append(Section("What became of the query tokens", _outcomes(summary)))
    if troubles := _troubles(summary):
        sections.append(Section("Trouble", troubles))
    sections.append(Section("How it was made", _made(summary, config)))
    model = summary["engine"].get("model")
    title = f"TierKV: {model}" if model else "TierKV report"
    lead = (
        f"{_duration(summary['seconds'])} from {_when(summary['from'])} to "
        f"{_when(summary['to'])}, "
        f"{summary['intervals']:,} intervals; {summary['origin']}. The hit rate is hit tokens ÷ "
        "query tokens: the prompt tokens that the engine's own prefix cache did not hold."
    )
    return Document(title, lead, sections)


def _headline(summary: Summary) -> Table:
    rows = [
        ("hit rate", percent(summary["hit_rate"])),
        ("prefill avoided, GPU hits included", percent(summary["prefill_avoided"])),
        ("avoidable loss", percent(summary["avoidable"])),
        ("query tokens", _count(summary["query_tokens"])),
        ("hit tokens", _count(summary["hit_tokens"])),
        ("GPU hit tokens", _count(summary["gpu_hit_tokens"])),
        ("prefill saved, estimated", _seconds(summary["saved_prefill_seconds"])),
        ("waited for loads", _seconds(summary["load_seconds"])),
    ]
    return Table(("", ">in all"), rows)


def says(summary: Summary) -> Iterator[tuple[str, bool]]:
    """Sentences: what it means, and whether something is wrong."""
    if not summary["query_tokens"]:
        yield "No prompt came in this time, so there is no hit rate.", False
        return
    saved, waited = summary["saved_prefill_seconds"], summary["load_seconds"]
    if saved == 0 and waited:
        sentence = (
            f"Requests waited {_seconds(waited)} for loads. What that saved is not known: the "
            "engine computed too little for its speed to be measured."
        )
        yield sentence, False
    elif saved is not None and waited is not None and (saved or waited):
        pays = saved > waited
        verdict = "it pays" if pays else "it does not pay: look at slow tiers below"
        sentence = (
            f"TierKV saved about {_seconds(saved)} of prefill (estimated) and made requests wait "
            f"{_seconds(waited)} for loads: {verdict}."
        )
        yield sentence, not pays
    outcomes = summary["outcomes"] or {}
    lost = {name: outcomes[name] for name in AVOIDABLE if outcomes.get(name)}
    if lost:
        parts = ", ".join(f"{_count(tokens)} {name}" for name, tokens in lost.items())
        yield f"Avoidable: {parts}. Faster or healthier tiers would have made hits of these.", False
    misses = summary["misses"] or {}
    if sum(misses.values()):
        reason = max(misses, key=lambda name: misses[name])
        share = percent(misses[reason] / sum(misses.values()))
        yield f"Most misses are {reason.replace('_', ' ')} ({share} of missed tokens).", False
    for name, tier in summary["tiers"].items():
        state = tier["breaker_state"]
        if state:
            yield f"The breaker of tier {name} was {STATES[int(state)]}.", True
        if tier["errors"]:
            yield f"Tier {name} had {_count(tier['errors'])} errors.", True


def _tiers(summary: Summary) -> list[Block]:
    """A column for each tier: there are few, and many things to say of each."""
    tiers = summary["tiers"]
    if not tiers:
        return [Text("The recording does not tell of tiers.")]
    measures: dict[str, Callable[[Summary], str]] = {
        "hit rate": lambda tier: percent(tier["hit_rate"]),
        "hit tokens": lambda tier: _count(tier["hit_tokens"]),
        "used": lambda tier: _size(tier["used_bytes"]),
        "capacity": lambda tier: _size(tier["capacity_bytes"] or None),
        "read": lambda tier: _size(tier["load_bytes"]),
        "written": lambda tier: _size(tier["save_bytes"]),
        "one chunk's load, p50 / p99": lambda tier: _latencies(tier, "load"),
        "one chunk's save, p50 / p99": lambda tier: _latencies(tier, "save"),
        "evicted chunks": lambda tier: _count(tier["evicted_chunks"]),
        "errors": lambda tier: _count(tier["errors"]),
        "breaker, at worst": lambda tier: _state(tier["breaker_state"]),
    }
    rows = [[name, *map(tell, tiers.values())] for name, tell in measures.items()]
    bad = {"errors": "errors", "breaker, at worst": "breaker_state"}
    marked = frozenset(
        at
        for at, name in enumerate(measures)
        if name in bad and any(tier[bad[name]] for tier in tiers.values())
    )
    return [Table(("", *(f">{name}" for name in tiers)), rows, marked)]


def _outcomes(summary: Summary) -> list[Block]:
    total = summary["query_tokens"]
    outcomes = summary["outcomes"]
    if outcomes is None:
        return [Text("The recording does not tell.")]
    rows = [
        [name, _count(tokens), percent(tokens / total if total else None), MEANING.get(name, "")]
        for name, tokens in outcomes.items()
    ]
    blocks: list[Block] = [Table(("outcome", ">tokens", ">share", "meaning"), rows)]
    misses = summary["misses"]
    if misses is not None:
        missed = sum(misses.values())
        rows = [
            [reason.replace("_", " "), _count(n), percent(n / missed if missed else None)]
            for reason, n in misses.items()
        ]
        blocks.append(Table(("miss because", ">tokens", ">share of misses"), rows))
    return blocks


def _troubles(summary: Summary) -> list[Block]:
    """What went wrong, of what counters tell; nothing if nothing did."""
    titles = {
        "errors": "errors, by tier and kind",
        "saves_dropped": "saves dropped, by tier and reason",
        "declined": "requests declined, by reason",
    }
    blocks: list[Block] = []
    for name, title in titles.items():
        found = {what: count for what, count in (summary[name] or {}).items() if count}
        if found:
            rows = [[what, _count(count)] for what, count in found.items()]
            blocks.append(Table((title, ">count"), rows))
    return blocks


def _made(summary: Summary, config: Sequence[ConfigValue]) -> list[Block]:
    engine = ", ".join(f"{name} {value}" for name, value in summary["engine"].items())
    blocks: list[Block] = [
        Text(f"Engine: {engine}.") if engine else Text("The source does not name the engine."),
        Text(
            f"This report: {versions_text(summary['made_with'])}; on "
            f"{machine_text(summary['made_on'])}."
        ),
    ]
    if config:
        blocks.append(Table(("configuration", "value", "source"), [list(row) for row in config]))
    return blocks


# -- numbers -------------------------------------------------------------------------------------


def _count(number: float | None) -> str:
    return NO_DATA if number is None else f"{number:,.0f}"


def _size(nbytes: float | None) -> str:
    if nbytes is None:
        return NO_DATA
    return "0" if not nbytes else approximate_size(int(nbytes))


def _seconds(value: float | None) -> str:
    if value is None:
        return NO_DATA
    if value >= 100 or value == 0:
        return f"{value:,.0f} s"
    if value >= 1:
        return f"{value:.1f} s"
    return f"{value * 1e3:.3g} ms"


def _duration(seconds: float) -> str:
    whole = round(seconds)
    hours, minutes = whole // 3600, whole % 3600 // 60
    if hours:
        return f"{hours} h {minutes:02d} min"
    return f"{minutes} min {whole % 60:02d} s" if minutes else f"{whole} s"


def _state(state: float | None) -> str:
    return NO_DATA if state is None else STATES[int(state)]


def _when(text: str) -> str:
    return text.replace("T", " ").replace("+00:00", " UTC")


def _latencies(tier: Mapping[str, Any], op: str) -> str:
    median = tier[f"{op}_p50_s"]
    return NO_DATA if median is None else f"{_seconds(median)} / {_seconds(tier[f'{op}_p99_s'])}"
