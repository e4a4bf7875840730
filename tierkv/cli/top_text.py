# SPDX-License-Identifier: Apache-2.0
"""`tierkv top` as lines of text, for a screen of any size and for a pipe.

Colour is never the only carrier: whatever is red or yellow also says so in words.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from rich.text import Text

from tierkv.cli import numbers
from tierkv.cli.top_view import BlendView, TierView, View
from tierkv.telemetry.rates import NO_DATA

REASONS = {
    "never_seen": "never seen",
    "evicted": "evicted from",
    "expired": "expired in",
    "invalid": "invalid",
    "saving": "being saved",
    "opted_out": "opted out",
}

_NOT_LOST = ("hit", "tail", "recomputed")
"""Outcomes of tokens that were served, or that no cache could serve."""

SORTS: dict[str, Callable[[dict[str, Any]], float]] = {
    "newest": lambda request: -float(request["time"]),
    "longest prompt": lambda request: -float(request["prompt_tokens"]),
    "most missed": lambda request: -float(lost(request)),
    "slowest": lambda request: -float(request["lookup_seconds"] + request["load_seconds"]),
}


def lost(request: dict[str, Any]) -> int:
    """Prompt tokens that were no hit though a chunk of them could have been."""
    parts = request["parts"]
    return sum(part["tokens"] for part in parts if part["outcome"] not in _NOT_LOST)


def cached(request: dict[str, Any], tier: str) -> int:
    """Prompt tokens that came from a tier."""
    parts = request["parts"]
    return sum(p["tokens"] for p in parts if p["outcome"] == "hit" and p["tier"] == tier)


def reason(request: dict[str, Any]) -> str:
    """Why most of what was lost was lost, in a few words."""
    found = [part for part in request["parts"] if part["outcome"] not in _NOT_LOST]
    if not found:
        return ""
    part = max(found, key=lambda part: part["tokens"])
    return told(part["outcome"], part["reason"], part["tier"])


def told(outcome: str, why: str, tier: str) -> str:
    """`evicted from disk`, `late: disk`, `failed: disk, checksum`."""
    named = "" if tier == "none" else tier
    if outcome == "miss":
        text = REASONS.get(why, why)
        return f"{text} {named}" if named else text.removesuffix(" from").removesuffix(" in")
    detail = ", ".join(word for word in (named, why) if word)
    return f"{outcome}: {detail}" if detail else outcome


def screen(view: View, width: int, height: int, sort: str = "newest") -> list[Text]:
    """All lines, at most `height` of them, each at most `width` cells."""
    lines = [*_head(view, width), Text(), *_tiers(view, width), Text(), *_misses(view)]
    if view.blend is not None:
        lines.append(_blend(view.blend))
    lines.append(Text())
    lines += _requests(view, width, max(1, height - len(lines) - 1), sort)
    for line in lines:
        line.truncate(width, overflow="ellipsis")
    return lines[:height]


def plain(view: View, width: int) -> str:
    """The same for a pipe."""
    return "\n".join(line.plain.rstrip() for line in screen(view, width, 1000))


def _head(view: View, width: int) -> list[Text]:
    info = view.info
    title = Text.assemble(
        ("TierKV ", "bold"), str(info.get("version", "")), "  ", (str(info.get("model")), "bold")
    )
    title.append(f"  {view.origin}")
    if view.up is not None:
        title.append(f"  up {numbers.age(view.up)}")
    if view.idle:
        title.append(f"  idle for {numbers.age(view.age)}", "dim")
    elif view.age > 3:
        title.append(f"  no step for {numbers.age(view.age)}", "yellow")
    now, session = view.now, view.session
    rate = Text.assemble(
        "hit rate ",
        (f"{numbers.share(now.hit)}%", "bold green") if now.hit is not None else (NO_DATA, "bold"),
        " now",
    )
    if now.hit is not None:
        rate.append(" = " + " + ".join(f"{t.name} {numbers.share(t.hit_now)}" for t in view.tiers))
    rate.append("    session ")
    rate.append(_percent(session.hit), "bold")
    # Hits that saved nothing: the engine has not computed enough yet for its speed to be known.
    known = view.saved or not view.loading
    saved = numbers.seconds(view.saved) if known else NO_DATA
    gpu = Text.assemble(
        "prefill avoided ",
        (_percent(session.prefill_avoided), "bold"),
        f" (gpu {_percent(session.gpu)})   avoidable ",
        (_percent(session.avoidable), "yellow" if session.avoidable else ""),
        f"   saved {saved} for {numbers.seconds(view.loading)} wait",
    )
    return [title, rate, gpu]


def _percent(rate: float | None) -> str:
    return NO_DATA if rate is None else f"{numbers.share(rate)}%"


_COLUMNS = (
    *(("tier", 6), ("used/capacity", 13), ("now%", 5), ("all%", 5), ("load", 7)),
    *(("save", 7), ("p50", 6), ("p99", 6), ("queue", 5), ("err", 4), ("state", 6)),
)


def _tiers(view: View, width: int) -> list[Text]:
    room = width - sum(size + 1 for _, size in _COLUMNS) - 1
    beside = room >= 20
    head = Text(_cells([name for name, _ in _COLUMNS]), "reverse")
    if beside:
        head.append("  hit tokens/s".ljust(room + 2))
    else:
        head.append(" " * max(0, width - head.cell_len))
    lines = [head]
    for tier in view.tiers:
        line = _tier(tier)
        if beside:
            line.append("  ")
            line.append(numbers.sparkline(tier.history, room), "cyan")
        lines.append(line)
    if not beside:
        lines.append(Text())
        for tier in view.tiers:
            shown = numbers.sparkline(tier.history, width - 32)
            peak = max((v for v in tier.history if v is not None), default=None)
            line = Text(f"{tier.name:<7.7} ")
            line.append(shown, "cyan")
            line.append(f"  {numbers.count(_last(tier.history)):>5} hit tok/s")
            line.append(f" {'≤' + numbers.count(peak) if peak is not None else '':>6}", "dim")
            lines.append(line)
    return lines


def _last(values: Sequence[float | None]) -> float | None:
    return values[-1] if values else None


def _cells(cells: Sequence[str]) -> str:
    sized = zip(cells, _COLUMNS, strict=True)
    return " ".join(
        cell[:size].ljust(size) if at == 0 else cell.rjust(size)
        for at, (cell, (_, size)) in enumerate(sized)
    )


def _tier(tier: TierView) -> Text:
    line = Text(
        _cells(
            [
                tier.name,
                numbers.filled(tier.used, tier.capacity),
                numbers.share(tier.hit_now),
                numbers.share(tier.hit_session),
                numbers.speed(tier.load),
                numbers.speed(tier.save),
                numbers.seconds(tier.p50),
                numbers.seconds(tier.p99),
                numbers.count(tier.queue),
                numbers.count(tier.errors),
                tier.breaker or NO_DATA,
            ]
        )
    )
    if tier.breaker in ("open", "half"):
        line.stylize("red" if tier.breaker == "open" else "yellow", line.cell_len - 6)
    if tier.errors:
        line.stylize("red", line.cell_len - 11, line.cell_len - 7)
    return line


def _misses(view: View) -> list[Text]:
    session = view.session
    shown = [
        f"{name} {_percent(session.outcome(name))}"
        for name in sorted(session.outcomes, key=lambda name: -session.outcomes[name])
        if name != "hit" and session.outcomes[name]
    ]
    first = Text.assemble(("no hit   ", "bold"), "  ".join(shown) or NO_DATA)
    total = sum(tokens for _, _, tokens in view.misses)
    why = [
        f"{told('miss', why, tier)} {numbers.share(tokens / total)}%"
        for why, tier, tokens in view.misses
    ]
    return [first, Text.assemble(("misses   ", "bold"), " · ".join(why) or NO_DATA)]


def _blend(blend: BlendView) -> Text:
    parts = [f"{numbers.count(blend.served)} prompts blended"]
    if blend.failed:
        parts.append(f"{numbers.count(blend.failed)} failed")
    parts += [
        f"{numbers.count(blend.declined)} not",
        f"reused {numbers.count(blend.reused)}, anew {numbers.count(blend.recomputed)} tok",
        numbers.seconds(blend.seconds),
    ]
    if blend.kl is not None:
        same = numbers.share(blend.agreed / blend.shadows)
        parts.append(f"shadows {same}% same, KL {blend.kl:.2g}")
    return Text.assemble(("any text ", "bold"), " · ".join(parts))


def _requests(view: View, width: int, height: int, sort: str) -> list[Text]:
    if view.requests is None:
        return [Text("requests: not on a metrics page; run tierkv top on its machine", "dim")]
    tiers = [tier.name for tier in view.tiers]
    narrow = width < 100
    names = ["age", "prompt", "gpu", *tiers, "lost", "wait"][narrow:]
    wide, cell = (12, 6) if narrow else (36 if width >= 120 else 14, 7)
    head = Text(" ".join([f"{'request':<{wide}}", *(f"{name[:cell]:>{cell}}" for name in names)]))
    head.append("  why")
    head.append(" " * max(0, width - head.cell_len))
    head.stylize("reverse")
    lines = [head]
    chosen = sorted(view.requests, key=SORTS[sort])[: max(0, height - 1)]
    newest = max((float(request["time"]) for request in view.requests), default=0.0)
    for request in chosen:
        cells = [
            numbers.age(newest + view.age - request["time"]),
            numbers.count(request["prompt_tokens"]),
            numbers.count(request["gpu_tokens"]),
            *(numbers.count(cached(request, tier)) for tier in tiers),
            numbers.count(lost(request)),
            numbers.seconds(request["lookup_seconds"] + request["load_seconds"]),
        ][narrow:]
        line = Text(f"{_short(request['request_id'], wide):<{wide}} ")
        line.append(" ".join(f"{text:>{cell}}" for text in cells))
        line.append(f"  {reason(request)}")
        lines.append(line)
    if not view.requests:
        lines.append(Text("no request yet", "dim"))
    return lines


def _short(name: str, width: int) -> str:
    """Clean, and short by its middle: the end tells ids apart as the beginning does."""
    text = "".join(char if char.isprintable() else "?" for char in name)
    if len(text) <= width:
        return text
    tail = (width - 1) // 2
    return f"{text[: width - 1 - tail]}…{text[-tail:]}"
