# SPDX-License-Identifier: Apache-2.0
"""Everything that `tierkv.tiers.base` promises, as a pytest class for any tier.

    class TestMyTier(TierContract):
        @pytest.fixture(autouse=True)
        def medium(self, tmp_path):
            self.config = MyConfig(path=tmp_path / "kv")

        def make_tier(self):
            return MyTier(self.config)

Every test runs on a fresh medium (the fixture's) and in an event loop of its own.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

from tierkv.errors import ErrorKind
from tierkv.keys import Chunk
from tierkv.pages.layout import SlotLayout
from tierkv.testing.may_forget import MayForget
from tierkv.testing.samples import joined, make_chunks, make_parts, make_payload
from tierkv.tiers.base import Outcome, Presence, Result, Tier

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

T = TypeVar("T")

NAMESPACE = b"contract-test-ns"
GUARD_SECONDS = 60.0
"""Ends a test that hangs; no test depends on how long anything takes."""


class TierContract:
    """Subclass it, name the subclass `Test…`, implement `make_tier`."""

    layout: ClassVar[SlotLayout] = SlotLayout(
        chunk_tokens=8, block_tokens=4, block_bytes=3000, ranks=2
    )
    """Small, of two ranks, with padding at the end of each part."""

    survives_reopen: ClassVar[bool] = True
    """Whether chunks are found again by the next tier on the same medium."""

    least_chunks: ClassVar[int] = 16
    """So many chunks of `layout` fit at least."""

    def make_tier(self) -> Tier:
        """A new tier, not opened, on this test's medium. Called again after `close`: a restart."""
        raise NotImplementedError

    # -- helpers ---------------------------------------------------------------------------------

    def run(self, test: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """Run a test's coroutine in a loop of its own."""
        return asyncio.run(asyncio.wait_for(test(), GUARD_SECONDS))

    @asynccontextmanager
    async def opened(
        self, namespace: bytes = NAMESPACE, layout: SlotLayout | None = None
    ) -> AsyncIterator[Tier]:
        """A tier on this test's medium, open."""
        tier = self.make_tier()
        await tier.open(namespace, layout or self.layout)
        try:
            yield tier
        finally:
            await tier.close()

    async def presence(self, tier: Tier, key: bytes) -> Presence:
        """What the tier says about a key, asked as the Store asks."""
        if tier.lookup(key) is Presence.UNKNOWN:
            await tier.probe([key])
        return tier.lookup(key)

    async def saved(self, tier: Tier, *chunks: Chunk) -> None:
        """Save samples that must be taken."""
        for chunk in chunks:
            result = await tier.save(chunk, make_payload(chunk, self.layout))
            assert result.outcome is Outcome.DONE, result

    async def value(self, tier: Tier, chunk: Chunk) -> bytes | None:
        """The loaded value; None if the load was anything but DONE."""
        parts = make_parts(self.layout)
        result = await tier.load(chunk, parts)
        self.check_result(result)
        return joined(parts) if result.outcome is Outcome.DONE else None

    def expected(self, chunk: Chunk, version: int = 0) -> bytes:
        return joined(make_payload(chunk, self.layout, version=version))

    def check_result(self, result: Result) -> None:
        """`error` is set when FAILED, never when DONE or MISS."""
        if result.outcome is Outcome.FAILED:
            assert result.error is not None
        elif result.outcome is not Outcome.REFUSED:
            assert result.error is None

    # -- saving and loading ----------------------------------------------------------------------

    def test_a_fresh_tier_holds_nothing(self) -> None:
        async def test() -> None:
            chunk = make_chunks(1, self.layout)[0]
            async with self.opened() as tier:
                assert await self.presence(tier, chunk.key) is not Presence.HIT
                result = await tier.load(chunk, make_parts(self.layout))
                assert result == Result(Outcome.MISS)
                assert tier.usage().chunks == 0
                assert await tier.evict([chunk.key]) == 0
                assert await tier.clear() == 0
                await tier.touch([chunk.key])

        self.run(test)

    def test_what_was_saved_is_loaded_byte_for_byte(self) -> None:
        async def test() -> None:
            chunks = make_chunks(self.least_chunks, self.layout)
            async with self.opened() as tier:
                before = tier.usage()
                for chunk in chunks:
                    parts = make_payload(chunk, self.layout)
                    result = await tier.save(chunk, parts)
                    assert (result.outcome, result.error) == (Outcome.DONE, None)
                    assert result.nbytes > 0
                    assert joined(parts) == self.expected(chunk)
                for chunk in reversed(chunks):
                    assert await self.presence(tier, chunk.key) is Presence.HIT
                    parts = make_parts(self.layout)
                    result = await tier.load(chunk, parts)
                    assert (result.outcome, result.error) == (Outcome.DONE, None)
                    assert result.nbytes > 0
                    assert joined(parts) == self.expected(chunk)
                usage = tier.usage()
                assert usage.chunks == len(chunks)
                assert before.used_bytes < usage.used_bytes
                assert not usage.capacity_bytes or usage.used_bytes <= usage.capacity_bytes

        self.run(test)

    def test_nothing_is_visible_before_it_is_written(self) -> None:
        async def test() -> None:
            chunk = make_chunks(1, self.layout)[0]
            async with self.opened() as tier:
                saving = asyncio.create_task(tier.save(chunk, make_payload(chunk, self.layout)))
                while not saving.done():
                    if tier.lookup(chunk.key) is Presence.HIT:
                        assert await self.value(tier, chunk) == self.expected(chunk)
                    await asyncio.sleep(0)
                assert (await saving).outcome is Outcome.DONE
                assert await self.presence(tier, chunk.key) is Presence.HIT

        self.run(test)

    def test_saving_again_is_done_and_harmless(self) -> None:
        async def test() -> None:
            chunk = make_chunks(1, self.layout)[0]
            async with self.opened() as tier:
                await self.saved(tier, chunk)
                other = make_payload(chunk, self.layout, version=1)
                assert (await tier.save(chunk, other)).outcome is Outcome.DONE
                assert await self.value(tier, chunk) in (
                    self.expected(chunk),
                    self.expected(chunk, 1),
                )
                assert tier.usage().chunks == 1

        self.run(test)

    def test_the_caller_may_reuse_its_memory_as_soon_as_a_call_returned(self) -> None:
        async def test() -> None:
            first, second = make_chunks(2, self.layout)
            async with self.opened() as tier:
                parts = make_payload(first, self.layout)
                await tier.save(first, parts)
                for part in parts:
                    part[:] = bytes(len(part))
                assert await self.value(tier, first) == self.expected(first)
                parts = make_parts(self.layout)
                await tier.load(first, parts)
                for part in parts:
                    part[:] = b"\xee" * len(part)
                await self.saved(tier, second)
                assert await self.value(tier, first) == self.expected(first)
            assert set(joined(parts)) == {0xEE}

        self.run(test)

    def test_no_view_of_the_callers_memory_is_kept(self) -> None:
        async def test() -> None:
            chunk = make_chunks(1, self.layout)[0]
            async with self.opened() as tier:
                buffers = [bytearray(part) for part in make_payload(chunk, self.layout)]
                for operation in (tier.save, tier.load, tier.load):
                    parts = [memoryview(buffer) for buffer in buffers]
                    assert (await operation(chunk, parts)).outcome is Outcome.DONE
                    for part in parts:
                        part.release()
                    for buffer in buffers:
                        buffer.append(0)  # BufferError if somebody still looks at it
                        buffer.pop()
                assert b"".join(buffers) == self.expected(chunk)

        self.run(test)

    def test_memory_of_any_alignment_will_do(self) -> None:
        async def test() -> None:
            chunk = make_chunks(1, self.layout)[0]
            async with self.opened() as tier:
                size = self.layout.part_stride
                room = [bytearray(size + 2) for _ in range(self.layout.ranks)]
                parts = [memoryview(buffer)[1 : size + 1] for buffer in room]
                for part, value in zip(parts, make_payload(chunk, self.layout), strict=True):
                    part[:] = value
                assert (await tier.save(chunk, parts)).outcome is Outcome.DONE
                for part in parts:
                    part[:] = bytes(size)
                assert (await tier.load(chunk, parts)).outcome is Outcome.DONE
                assert joined(parts) == self.expected(chunk)
                assert {buffer[0] for buffer in room} == {buffer[-1] for buffer in room} == {0}

        self.run(test)

    def test_memory_of_another_size_is_refused_without_an_exception(self) -> None:
        async def test() -> None:
            first, second = make_chunks(2, self.layout)
            async with self.opened() as tier:
                await self.saved(tier, first)
                for parts in (
                    make_parts(replace(self.layout, ranks=self.layout.ranks + 1)),
                    make_parts(replace(self.layout, block_bytes=self.layout.block_bytes * 2)),
                    [],
                ):
                    assert (await tier.load(first, parts)).outcome is not Outcome.DONE
                    assert (await tier.save(second, parts)).outcome is not Outcome.DONE
                assert await self.presence(tier, second.key) is not Presence.HIT
                assert await self.value(tier, first) in (None, self.expected(first))

        self.run(test)

    # -- whose chunk it is -----------------------------------------------------------------------

    def test_other_token_ids_under_the_same_key_are_not_served(self) -> None:
        async def test() -> None:
            chunk = make_chunks(1, self.layout)[0]
            forged = replace(chunk, tokens=bytes(len(chunk.tokens)))
            async with self.opened() as tier:
                await self.saved(tier, chunk)
                result = await tier.load(forged, make_parts(self.layout))
                assert result == Result(Outcome.FAILED, ErrorKind.KEY_MISMATCH, result.nbytes)

        self.run(test)

    def test_another_key_is_not_served(self) -> None:
        async def test() -> None:
            first, second = make_chunks(2, self.layout)
            async with self.opened() as tier:
                await self.saved(tier, first)
                assert await self.presence(tier, second.key) is not Presence.HIT
                assert await self.value(tier, second) is None

        self.run(test)

    def test_another_namespace_sees_nothing(self) -> None:
        async def test() -> None:
            chunk = make_chunks(1, self.layout)[0]
            async with self.opened() as tier:
                await self.saved(tier, chunk)
            async with self.opened(namespace=b"another-test-ns!") as tier:
                assert await self.presence(tier, chunk.key) is not Presence.HIT
                assert await self.value(tier, chunk) is None
                assert tier.usage().chunks == 0

        self.run(test)

    def test_other_geometries_of_the_same_size_see_nothing(self) -> None:
        async def test() -> None:
            chunk = make_chunks(1, self.layout)[0]
            layout = self.layout
            bytes_a_token = layout.block_bytes // layout.block_tokens
            others = [
                replace(layout, block_tokens=1, block_bytes=bytes_a_token),
                replace(
                    layout,
                    block_tokens=layout.chunk_tokens,
                    block_bytes=bytes_a_token * layout.chunk_tokens,
                ),
                replace(layout, ranks=1, block_bytes=layout.slot_bytes // layout.blocks_per_chunk),
            ]
            for other in others:
                assert other.slot_bytes == layout.slot_bytes
                async with self.opened() as tier:
                    await self.saved(tier, chunk)
                async with self.opened(layout=other) as tier:
                    assert await self.presence(tier, chunk.key) is not Presence.HIT
                    assert await self.value(tier, chunk) is None

        self.run(test)

    # -- several at once -------------------------------------------------------------------------

    def test_many_may_load_one_chunk_at_once(self) -> None:
        async def test() -> None:
            chunk = make_chunks(1, self.layout)[0]
            async with self.opened() as tier:
                await self.saved(tier, chunk)
                values = await asyncio.gather(*[self.value(tier, chunk) for _ in range(20)])
                assert set(values) == {self.expected(chunk)}

        self.run(test)

    def test_many_may_save_one_chunk_at_once(self) -> None:
        async def test() -> None:
            chunk = make_chunks(1, self.layout)[0]
            async with self.opened() as tier:
                results = await asyncio.gather(
                    *[
                        tier.save(chunk, make_payload(chunk, self.layout, version=version))
                        for version in range(10)
                    ]
                )
                assert {result.outcome for result in results} == {Outcome.DONE}
                whole = [self.expected(chunk, version) for version in range(10)]
                assert await self.value(tier, chunk) in whole
                assert tier.usage().chunks == 1

        self.run(test)

    def test_loads_saves_and_evictions_at_once_never_give_wrong_bytes(self) -> None:
        async def test() -> None:
            chunks = make_chunks(2 * self.least_chunks, self.layout)
            model = MayForget()
            async with self.opened() as tier:

                async def work(step: int) -> None:
                    chunk = chunks[step * 7 % len(chunks)]
                    if step % 5 == 4:
                        await tier.evict([chunk.key])
                    elif step % 2:
                        model.saving(chunk.key, self.expected(chunk, step))
                        await tier.save(chunk, make_payload(chunk, self.layout, version=step))
                    else:
                        model.judge(chunk.key, await self.value(tier, chunk))

                for start in range(0, 200, 20):
                    await asyncio.gather(*[work(step) for step in range(start, start + 20)])
                for chunk in chunks:
                    model.judge(chunk.key, await self.value(tier, chunk))
            assert model.hits > 0

        self.run(test)

    def test_lookup_and_usage_answer_on_any_thread(self) -> None:
        async def test() -> None:
            chunks = make_chunks(4, self.layout)
            wrong: list[object] = []
            done = threading.Event()
            async with self.opened() as tier:
                await self.saved(tier, chunks[0])
                await self.presence(tier, chunks[0].key)

                def ask() -> None:
                    while not done.is_set():
                        if tier.lookup(chunks[0].key) is not Presence.HIT:
                            wrong.append("lost")
                        if not 1 <= tier.usage().chunks <= len(chunks):
                            wrong.append(tier.usage())

                thread = threading.Thread(target=ask)
                thread.start()
                try:
                    await self.saved(tier, *chunks)
                finally:
                    done.set()
                    thread.join()
            assert not wrong

        self.run(test)

    def test_a_cancelled_call_leaves_the_memory_alone_once_it_has_ended(self) -> None:
        async def test() -> None:
            chunks = make_chunks(8, self.layout)
            async with self.opened() as tier:
                await self.saved(tier, *chunks)
                given_back: list[list[memoryview]] = []
                for step in range(64):
                    parts = make_parts(self.layout)
                    task = asyncio.create_task(tier.load(chunks[step % 8], parts))
                    for _ in range(step % 4):
                        await asyncio.sleep(0)
                    task.cancel()
                    await asyncio.wait([task])
                    for part in parts:
                        part[:] = b"\xee" * len(part)
                    given_back.append(parts)
                for chunk in chunks:
                    assert await self.value(tier, chunk) == self.expected(chunk)
            assert {byte for parts in given_back for byte in set(joined(parts))} == {0xEE}

        self.run(test)

    # -- forgetting ------------------------------------------------------------------------------

    def test_what_was_evicted_is_not_served(self) -> None:
        async def test() -> None:
            first, second, third, unknown = make_chunks(4, self.layout)
            async with self.opened() as tier:
                await self.saved(tier, first, second, third)
                assert await tier.evict([first.key, unknown.key, third.key]) == 2
                for gone in (first, third):
                    assert await self.presence(tier, gone.key) is not Presence.HIT
                    assert await tier.load(gone, make_parts(self.layout)) == Result(Outcome.MISS)
                assert await self.value(tier, second) == self.expected(second)
                assert await tier.evict([first.key]) == 0
                other = make_payload(first, self.layout, version=1)
                assert (await tier.save(first, other)).outcome is Outcome.DONE
                assert await self.value(tier, first) == self.expected(first, 1)

        self.run(test)

    def test_a_save_that_ended_before_an_evict_began_is_evicted(self) -> None:
        async def test() -> None:
            chunk = make_chunks(1, self.layout)[0]
            async with self.opened() as tier:
                for version in range(10):
                    parts = make_payload(chunk, self.layout, version=version)
                    saving = asyncio.create_task(tier.save(chunk, parts))
                    await asyncio.sleep(0)
                    evicting = asyncio.create_task(tier.evict([chunk.key]))
                    await asyncio.wait([saving, evicting])
                    assert await self.value(tier, chunk) in (None, self.expected(chunk, version))
                    await tier.evict([chunk.key])
                    assert await self.value(tier, chunk) is None

        self.run(test)

    def test_clear_forgets_everything(self) -> None:
        async def test() -> None:
            chunks = make_chunks(5, self.layout)
            async with self.opened() as tier:
                await self.saved(tier, *chunks)
                assert await tier.clear() == 5
                for chunk in chunks:
                    assert await self.presence(tier, chunk.key) is not Presence.HIT
                    assert await self.value(tier, chunk) is None
                assert tier.usage().chunks == 0
                await self.saved(tier, *chunks)
                assert await self.value(tier, chunks[3]) == self.expected(chunks[3])

        self.run(test)

    def test_what_does_not_fit_makes_room_or_is_refused(self) -> None:
        async def test() -> None:
            chunks = make_chunks(8 * self.least_chunks, self.layout)
            async with self.opened() as tier:
                for chunk in chunks:
                    result = await tier.save(chunk, make_payload(chunk, self.layout))
                    assert result.outcome in (Outcome.DONE, Outcome.REFUSED)
                    usage = tier.usage()
                    assert not usage.capacity_bytes or usage.used_bytes <= usage.capacity_bytes
                values = [await self.value(tier, chunk) for chunk in chunks]
                for chunk, value in zip(chunks, values, strict=True):
                    assert value in (None, self.expected(chunk))
                assert sum(value is not None for value in values) >= self.least_chunks

        self.run(test)

    # -- restarts --------------------------------------------------------------------------------

    def test_reopening_finds_the_chunks_again(self) -> None:
        async def test() -> None:
            chunks = make_chunks(6, self.layout)
            async with self.opened() as tier:
                await self.saved(tier, *chunks)
                await tier.evict([chunks[0].key])
            for _ in range(3):
                tier = self.make_tier()
                report = await tier.open(NAMESPACE, self.layout)
                assert await self.value(tier, chunks[0]) is None
                for chunk in chunks[1:]:
                    value = await self.value(tier, chunk)
                    assert value in (None, self.expected(chunk))
                    assert not self.survives_reopen or value is not None
                assert not self.survives_reopen or report.recovered_chunks == 5
                await tier.close()

        self.run(test)

    def test_only_what_is_held_is_recalled(self) -> None:
        async def test() -> None:
            chunks = make_chunks(6, self.layout)
            async with self.opened() as tier:
                assert await tier.recall(10, GUARD_SECONDS) == []
                await self.saved(tier, *chunks)
                await tier.evict([chunks[1].key])
            async with self.opened() as tier:
                recalled = await tier.recall(10, GUARD_SECONDS)
                assert len({chunk.key for chunk in recalled}) == len(recalled)
                for chunk in recalled:
                    assert chunk in chunks
                    assert await self.presence(tier, chunk.key) is Presence.HIT
            async with self.opened(NAMESPACE[::-1]) as tier:
                assert await tier.recall(10, GUARD_SECONDS) == []
            async with self.opened() as tier:
                assert len(await tier.recall(2, GUARD_SECONDS)) <= 2

        self.run(test)

    def test_a_cleared_tier_is_empty_after_a_restart(self) -> None:
        async def test() -> None:
            chunks = make_chunks(3, self.layout)
            async with self.opened() as tier:
                await self.saved(tier, *chunks)
                await tier.clear()
            async with self.opened() as tier:
                assert [await self.value(tier, chunk) for chunk in chunks] == [None] * 3

        self.run(test)

    def test_a_closed_tier_serves_nothing_and_may_be_closed_again(self) -> None:
        async def test() -> None:
            chunk = make_chunks(1, self.layout)[0]
            tier = self.make_tier()
            await tier.open(NAMESPACE, self.layout)
            await self.saved(tier, chunk)
            await tier.close()
            await tier.close()
            assert tier.lookup(chunk.key) is not Presence.HIT
            assert await self.value(tier, chunk) is None
            other = make_chunks(1, self.layout, seed=1)[0]
            result = await tier.save(other, make_payload(other, self.layout))
            assert result.outcome in (Outcome.REFUSED, Outcome.FAILED)

        self.run(test)

    def test_closing_waits_for_what_is_in_flight(self) -> None:
        async def test() -> None:
            chunks = make_chunks(8, self.layout)
            tier = self.make_tier()
            await tier.open(NAMESPACE, self.layout)
            await self.saved(tier, *chunks[:4])
            buffers = [make_parts(self.layout) for _ in range(4)]
            running = [
                asyncio.create_task(tier.load(chunk, parts))
                for chunk, parts in zip(chunks, buffers, strict=False)
            ]
            running += [
                asyncio.create_task(tier.save(chunk, make_payload(chunk, self.layout)))
                for chunk in chunks[4:]
            ]
            await asyncio.sleep(0)
            await tier.close()
            results = await asyncio.gather(*running)
            for chunk, parts, result in zip(chunks, buffers, results, strict=False):
                if result.outcome is Outcome.DONE:
                    assert joined(parts) == self.expected(chunk)
            async with self.opened() as tier:
                for chunk in chunks:
                    assert await self.value(tier, chunk) in (None, self.expected(chunk))

        self.run(test)
