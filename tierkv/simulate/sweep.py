# SPDX-License-Identifier: Apache-2.0
"""Every combination of policy, disk and DRAM: the hit rate of each, and what it means, as data."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from tierkv.simulate.capacity import Capacity, Scale
from tierkv.simulate.replay import Found, Replay
from tierkv.simulate.trace import Trace

SCHEMA = 1
"""Raised when a field changes its meaning or goes."""
MOST = 0.9
"""The share of the ceiling from which more space is called not worth much."""

Result = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Combination:
    """One replay."""

    policy: str
    disk: Capacity | None
    dram: Capacity


def combinations(
    policies: Sequence[str], disks: Sequence[Capacity | None], drams: Sequence[Capacity]
) -> list[Combination]:
    """Each policy with each disk over each DRAM, but for disks no larger than the DRAM above."""
    return [
        Combination(policy, disk, dram)
        for policy in policies
        for disk in disks
        for dram in drams
        if disk is None or disk.chunks > dram.chunks
    ]


def ceiling(trace: Trace) -> int:
    """Hit tokens if nothing was ever given up: what no capacity and no policy can exceed."""
    seen: set[bytes] = set()
    tokens = 0
    for prompt in trace.prompts:
        hits = _leading(prompt.keys, seen) * trace.block_tokens
        tokens += min(hits, max(0, prompt.tokens - 1))
        seen.update(prompt.keys)
    return tokens


def _leading(keys: Sequence[bytes], seen: set[bytes]) -> int:
    for count, key in enumerate(keys):
        if key not in seen:
            return count
    return len(keys)


def replay(trace: Trace, wanted: Combination, write: str) -> Found:
    """The whole trace with one combination. About a second for 300,000 chunks."""
    # Slots beyond what the trace has would only take memory.
    dram = min(wanted.dram.chunks, trace.distinct_chunks or 1)
    disk = min(wanted.disk.chunks, trace.distinct_chunks) if wanted.disk is not None else 0
    tiers = Replay(dram, disk, wanted.policy, write)
    for prompt in trace.prompts:
        tiers.request(prompt, trace.block_tokens)
    return tiers.found


def simulate(
    trace: Trace,
    scale: Scale,
    wanted: Sequence[Combination],
    write: str,
    step: Callable[[], None] = lambda: None,
) -> Result:
    """Replay every combination.

    Args:
        trace: what is asked.
        scale: from tokens to bytes.
        wanted: from `combinations`.
        write: when chunks go to disk.
        step: called after each replay.
    """
    total = max(1, trace.tokens)
    points = []
    for one in wanted:
        points.append(_point(one, replay(trace, one, write), total, scale))
        step()
    most = ceiling(trace)
    result: Result = {
        "schema": SCHEMA,
        "what": "tierkv simulate: hit rate of a trace by capacity and policy",
        "trace": {
            "name": trace.name,
            "requests": len(trace.prompts),
            "prompt_tokens": trace.tokens,
            "block_tokens": trace.block_tokens,
            "distinct_chunks": trace.distinct_chunks,
            "seconds": trace.seconds,
        },
        "bytes_per_token": scale.bytes_per_token,
        "chunk_bytes": scale.chunk_bytes,
        "write": write,
        "ceiling": {
            "hit_rate": most / total,
            "hit_tokens": most,
            "chunks": trace.distinct_chunks,
            "text": scale.of_chunks(trace.distinct_chunks),
        },
        "points": points,
    }
    result["reading"] = list(_reading(result))
    return result


def _point(one: Combination, found: Found, total: int, scale: Scale) -> dict[str, Any]:
    size = scale.chunk_bytes
    return {
        "policy": one.policy,
        "dram": _capacity(one.dram),
        "disk": None if one.disk is None else _capacity(one.disk),
        "hit_rate": (found.dram_tokens + found.disk_tokens) / total,
        "dram_hit_rate": found.dram_tokens / total,
        "disk_hit_rate": found.disk_tokens / total,
        "hit_tokens": found.dram_tokens + found.disk_tokens,
        "disk_read_chunks": found.disk_reads,
        "disk_written_chunks": found.disk_writes,
        "disk_read_bytes": None if size is None else found.disk_reads * size,
        "disk_written_bytes": None if size is None else found.disk_writes * size,
    }


def _capacity(capacity: Capacity) -> dict[str, Any]:
    return {"text": capacity.text, "chunks": capacity.chunks, "bytes": capacity.nbytes}


def _reading(result: Result) -> Iterator[str]:
    """What the figures say, in sentences."""
    most = result["ceiling"]["hit_rate"]
    yield (
        f"Without any bound, {percent(most)} of the prompt tokens would be hits; that would take "
        f"room for {result['ceiling']['chunks']:,} chunks, {result['ceiling']['text']}."
    )
    if not most:
        yield "Nothing repeats from the start of a prompt: no cache of prefixes can help here."
        return
    alone = [point for point in result["points"] if point["disk"] is None]
    if alone:
        yield _dram_sentence(alone, most)
    below = [point for point in result["points"] if point["disk"] is not None]
    if below and alone:
        yield _disk_sentence(below, alone)
    yield from _policy_sentence(result["points"])


def _dram_sentence(alone: Sequence[dict[str, Any]], most: float) -> str:
    enough = [point for point in alone if point["hit_rate"] >= MOST * most]
    if enough:
        least = min(enough, key=lambda point: (point["dram"]["chunks"], -point["hit_rate"]))
        return (
            f"DRAM alone gets nine tenths of that from {least['dram']['text']} on "
            f"({least['policy']}: {percent(least['hit_rate'])})."
        )
    best = max(alone, key=lambda point: point["hit_rate"])
    return (
        f"DRAM alone does not get nine tenths of that: {best['dram']['text']} "
        f"({best['policy']}) gives {percent(best['hit_rate'])}."
    )


def _disk_sentence(below: Sequence[dict[str, Any]], alone: Sequence[dict[str, Any]]) -> str:
    """What the best disk adds to the smallest DRAM that was tried with one."""
    least = min(point["dram"]["chunks"] for point in below)
    best = max(
        (point for point in below if point["dram"]["chunks"] == least),
        key=lambda point: (point["hit_rate"], -point["disk"]["chunks"]),
    )
    without = max(
        (point["hit_rate"] for point in alone if point["dram"]["chunks"] == least), default=0.0
    )
    return (
        f"A disk of {best['disk']['text']} under {best['dram']['text']} of DRAM gives "
        f"{percent(best['hit_rate'])} ({best['policy']}), where that DRAM alone gives "
        f"{percent(without)}."
    )


def _policy_sentence(points: Sequence[dict[str, Any]]) -> Iterator[str]:
    rates: dict[tuple[Any, Any], dict[str, float]] = {}
    for point in points:
        place = point["dram"]["chunks"], point["disk"] and point["disk"]["chunks"]
        rates.setdefault(place, {})[point["policy"]] = point["hit_rate"]
    both = [found for found in rates.values() if {"lru", "s3fifo"} <= found.keys()]
    if both:
        gains = [found["s3fifo"] - found["lru"] for found in both]
        ahead = sum(gain > 0 for gain in gains)
        yield (
            f"s3fifo is ahead of lru in {ahead} of {len(gains)} combinations; its difference lies "
            f"between {100 * min(gains):+.1f} and {100 * max(gains):+.1f} points."
        )


def percent(share: float) -> str:
    """`share` of 1 with a decimal."""
    return f"{100 * share:.1f} %"
