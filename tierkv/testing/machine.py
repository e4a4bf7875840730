# SPDX-License-Identifier: Apache-2.0
"""Random operations on a tier, judged by MayForget: a hypothesis state machine for any tier.

    TestMachine = tier_machine(make_medium, make_tier)

where `make_medium()` gives something fresh and `make_tier(medium)` a tier on it, not opened.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from tierkv.pages.layout import SlotLayout
from tierkv.testing.may_forget import MayForget
from tierkv.testing.samples import joined, make_chunks, make_parts, make_payload
from tierkv.tiers.base import Outcome, Presence, Tier

LAYOUT = SlotLayout(chunk_tokens=4, block_tokens=2, block_bytes=1000, ranks=2)
CHUNKS = make_chunks(12, LAYOUT)

M = TypeVar("M")
T = TypeVar("T")
numbers = st.integers(0, len(CHUNKS) - 1)


def tier_machine(
    make_medium: Callable[[], M], make_tier: Callable[[M], Tier]
) -> type[RuleBasedStateMachine]:
    """The state machine's class; its `TestCase` is what pytest collects."""

    class TierMachine(RuleBasedStateMachine):
        @initialize()
        def start(self) -> None:
            self.runner = asyncio.Runner()
            self.medium = make_medium()
            self.model = MayForget()
            self.versions = 0
            self.open()

        def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
            return self.runner.run(coroutine)

        def open(self) -> None:
            self.tier = make_tier(self.medium)
            self.run(self.tier.open(b"state-machine-ns", LAYOUT))

        @rule(number=numbers)
        def save(self, number: int) -> None:
            chunk, version = CHUNKS[number], self.versions
            self.versions += 1
            parts = make_payload(chunk, LAYOUT, version=version)
            self.model.saving(chunk.key, joined(parts))
            self.run(self.tier.save(chunk, parts))

        @rule(wanted=st.lists(numbers, min_size=1, max_size=4))
        def load(self, wanted: list[int]) -> None:
            async def load_all() -> None:
                await asyncio.gather(*[self.load_one(number) for number in wanted])

            self.run(load_all())

        async def load_one(self, number: int) -> None:
            chunk, parts = CHUNKS[number], make_parts(LAYOUT)
            before = self.tier.lookup(chunk.key)
            result = await self.tier.load(chunk, parts)
            if before is Presence.MISS:
                assert result.outcome is Outcome.MISS
            done = result.outcome is Outcome.DONE
            self.model.judge(chunk.key, joined(parts) if done else None)

        @rule(wanted=st.lists(numbers, max_size=4))
        def touch(self, wanted: list[int]) -> None:
            self.run(self.tier.touch([CHUNKS[number].key for number in wanted]))

        @rule(wanted=st.lists(numbers, max_size=3))
        def evict(self, wanted: list[int]) -> None:
            keys = [CHUNKS[number].key for number in wanted]
            held = self.run(self.tier.evict(keys))
            assert 0 <= held <= len(set(keys))
            for key in keys:
                self.model.evicted(key)
                assert self.tier.lookup(key) is not Presence.HIT

        @rule()
        def clear(self) -> None:
            before = self.tier.usage().chunks
            assert self.run(self.tier.clear()) == before
            self.model.cleared()

        @rule()
        def restart(self) -> None:
            self.run(self.tier.close())
            self.open()

        @invariant()
        def is_bounded(self) -> None:
            if not hasattr(self, "tier"):
                return
            usage = self.tier.usage()
            assert not usage.capacity_bytes or usage.used_bytes <= usage.capacity_bytes

        def teardown(self) -> None:
            if hasattr(self, "tier"):
                self.run(self.tier.close())
                self.runner.close()

    return TierMachine
