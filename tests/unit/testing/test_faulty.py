# SPDX-License-Identifier: Apache-2.0
"""FaultyTier does what its odds say, the same for the same seed, and its lies are caught."""

from __future__ import annotations

import asyncio
from collections import Counter

import pytest

from tierkv.keys import Chunk
from tierkv.pages.layout import SlotLayout
from tierkv.testing.faulty import FaultyTier, InjectedError, Odds
from tierkv.testing.may_forget import MayForget
from tierkv.testing.memory import MemoryTier
from tierkv.testing.recording import Call, RecordingTier
from tierkv.testing.samples import joined, make_chunks, make_parts, make_payload
from tierkv.tiers.base import Outcome, Presence, Result

LAYOUT = SlotLayout(chunk_tokens=4, block_tokens=2, block_bytes=1000)
CHUNKS = make_chunks(20, LAYOUT)


async def trial(odds: Odds, seed: int) -> tuple[FaultyTier, list[str]]:
    """Save and load every chunk once; what came of it, in order."""
    tier = FaultyTier(MemoryTier(), seed, odds)
    await tier.open(b"n" * 16, LAYOUT)
    events = []
    for chunk in CHUNKS:
        for operation in (tier.save, tier.load):
            try:
                parts = (
                    make_payload(chunk, LAYOUT) if operation == tier.save else make_parts(LAYOUT)
                )
                result = await operation(chunk, parts)
                events.append(f"{result.outcome} {result.error}")
            except InjectedError as error:
                events.append(str(error))
    await tier.close()
    return tier, events


def test_one_seed_gives_one_run() -> None:
    odds = Odds(load_fails=0.3, load_raises=0.1, save_fails=0.2, save_refused=0.2, save_raises=0.1)
    first, events = asyncio.run(trial(odds, 5))
    again, same = asyncio.run(trial(odds, 5))
    other, different = asyncio.run(trial(odds, 6))
    assert events == same
    assert first.injected == again.injected
    assert events != different
    assert all(first.injected[fault] for fault in ("load_fails", "save_fails", "save_refused"))
    assert other.seed == 6


@pytest.mark.parametrize(
    ("fault", "seen"),
    [
        ("load_fails", "failed"),
        ("load_raises", "load, seed 1"),
        ("save_fails", "failed"),
        ("save_refused", "refused"),
        ("save_raises", "save, seed 1"),
        ("save_forgotten", "miss"),
    ],
)
def test_a_certain_fault_strikes_every_time(fault: str, seen: str) -> None:
    tier, events = asyncio.run(trial(Odds(**{fault: 1.0}), 1))
    assert tier.injected == Counter({fault: 20})
    assert sum(event.startswith(seen) for event in events) == 20


def test_without_odds_nothing_is_injected() -> None:
    tier, events = asyncio.run(trial(Odds(), 1))
    assert not tier.injected
    assert events == ["done None"] * 40


def test_a_hanging_call_goes_on_when_released() -> None:
    async def test() -> None:
        tier = FaultyTier(MemoryTier(), 1, Odds(save_hangs=1.0, load_hangs=1.0))
        await tier.open(b"n" * 16, LAYOUT)
        saving = asyncio.create_task(tier.save(CHUNKS[0], make_payload(CHUNKS[0], LAYOUT)))
        await asyncio.sleep(0)
        assert not saving.done()
        assert tier.lookup(CHUNKS[0].key) is Presence.MISS
        tier.release()
        assert (await saving).outcome is Outcome.DONE
        assert (await tier.load(CHUNKS[0], make_parts(LAYOUT))).outcome is Outcome.DONE

    asyncio.run(asyncio.wait_for(test(), 60))


@pytest.mark.parametrize("lie", ["lie_flip", "lie_misdirect"])
def test_the_model_catches_a_lie(lie: str) -> None:
    async def test() -> int:
        model, lies = MayForget(), 0
        tier = FaultyTier(MemoryTier(), 3, Odds(**{lie: 1.0}))
        await tier.open(b"n" * 16, LAYOUT)
        for chunk in CHUNKS:
            parts = make_payload(chunk, LAYOUT)
            model.saving(chunk.key, joined(parts))
            await tier.save(chunk, parts)
        for chunk in CHUNKS:
            parts = make_parts(LAYOUT)
            result = await tier.load(chunk, parts)
            try:
                model.judge(chunk.key, joined(parts) if result.outcome is Outcome.DONE else None)
            except AssertionError:
                lies += 1
        return lies

    assert asyncio.run(test()) >= (20 if lie == "lie_flip" else 15)


def test_the_model_allows_each_saved_value_and_no_evicted_one() -> None:
    model = MayForget()
    model.judge(b"k", None)
    model.saving(b"k", b"one")
    model.saving(b"k", b"two")
    model.judge(b"k", b"one")
    model.judge(b"k", b"two")
    model.judge(b"k", None)
    for wrong in (b"onf", b"tw", b"", b"onetwo"):
        with pytest.raises(AssertionError, match="wrong bytes under 6b"):
            model.judge(b"k", wrong)
    model.evicted(b"k")
    with pytest.raises(AssertionError):
        model.judge(b"k", b"one")
    model.saving(b"k", b"three")
    model.cleared()
    with pytest.raises(AssertionError):
        model.judge(b"k", b"three")
    assert (model.hits, model.misses) == (8, 2)


def test_every_call_is_recorded_with_what_came_of_it() -> None:
    async def test() -> list[Call]:
        tier = RecordingTier(MemoryTier())
        first, second = CHUNKS[:2]
        await tier.open(b"n" * 16, LAYOUT)
        assert tier.lookup(first.key) is Presence.MISS
        await tier.save(first, make_payload(first, LAYOUT))
        assert await tier.load(second, make_parts(LAYOUT)) == Result(Outcome.MISS)
        await tier.touch([first.key])
        await tier.probe([second.key])
        await tier.describe({"model": "m"})
        assert await tier.recall(10, 1.0) == []
        assert await tier.evict([first.key, second.key]) == 1
        assert await tier.clear() == 0
        assert tier.usage().chunks == 0
        await tier.close()
        assert tier.keys_of("evict") == [first.key, second.key]
        return tier.calls

    first, second = CHUNKS[0].key, CHUNKS[1].key
    assert asyncio.run(test()) == [
        Call("open"),
        Call("save", (first,), Outcome.DONE),
        Call("load", (second,), Outcome.MISS),
        Call("touch", (first,)),
        Call("probe", (second,)),
        Call("describe"),
        Call("recall"),
        Call("evict", (first, second)),
        Call("clear"),
        Call("close"),
    ]


class Telling(MemoryTier):
    """Knows some text from earlier."""

    async def recall(self, most: int, seconds: float) -> list[Chunk]:
        return CHUNKS[:most]


def test_what_a_tier_tells_passes_through_the_wrappers() -> None:
    async def test() -> None:
        recording = RecordingTier(FaultyTier(Telling(), 1, Odds()))
        assert await recording.recall(2, 1.0) == CHUNKS[:2]
        assert recording.keys_of("recall") == [chunk.key for chunk in CHUNKS[:2]]

    asyncio.run(test())


def test_payloads_name_their_chunk_in_every_line() -> None:
    part = make_payload(CHUNKS[3], LAYOUT, version=7)[0]
    lines = {bytes(part[start : start + 64]) for start in range(0, len(part), 64)}
    assert len(lines) == len(part) // 64
    assert all(line.startswith(CHUNKS[3].key + b"\x07\0\0\0") for line in lines)
    assert joined(make_payload(CHUNKS[3], LAYOUT)) != bytes(part)
