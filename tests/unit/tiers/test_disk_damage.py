# SPDX-License-Identifier: Apache-2.0
"""Whatever happens to the slab, a load gives the chunk's own bytes or a miss, and then forgets."""

from __future__ import annotations

import os
import random
from pathlib import Path

import pytest

from tests.unit.tiers.disk_kit import (
    CHUNKS,
    HEADER_BYTES,
    LAYOUT,
    SLOT_BYTES,
    filled,
    flip,
    load,
    make_config,
    opened,
    patch,
    run,
    save,
    slab,
    slot_offset,
    table,
    value,
)
from tierkv.errors import ErrorKind, FormatError
from tierkv.record import RecordFormat
from tierkv.testing.may_forget import MayForget
from tierkv.testing.samples import make_parts
from tierkv.tiers.base import Outcome, Presence, Result
from tierkv.tiers.disk import DiskTier

SEED = 20260730
NOT_SERVED = (Outcome.FAILED, Outcome.MISS)


def test_a_slot_torn_at_any_page_is_a_miss_and_is_given_up(tmp_path: Path) -> None:
    config = make_config(tmp_path)

    async def test() -> None:
        tier, _ = await opened(config)
        torn = 0
        for start in range(0, SLOT_BYTES, 4096):
            for junk in (bytes(SLOT_BYTES - start), os.urandom(SLOT_BYTES - start)):
                await save(tier, CHUNKS[0])
                whole = slab(config).read_bytes()
                place = slot_offset(0)
                assert whole[place + HEADER_BYTES :][: 2 * 12288] == value(CHUNKS[0])
                patch(slab(config), place + start, junk)
                result, _ = await load(tier, CHUNKS[0])
                assert result.outcome is Outcome.FAILED
                assert result.error in (ErrorKind.CHECKSUM, ErrorKind.FORMAT)
                assert tier.lookup(CHUNKS[0].key) is Presence.MISS
                assert (await load(tier, CHUNKS[0]))[0] == Result(Outcome.MISS)
                assert tier.usage().chunks == 0
                torn += 1
        assert torn == 2 * SLOT_BYTES // 4096
        await tier.close()
        tier, report = await opened(config)
        assert report.recovered_chunks == 0
        await tier.close()

    run(test)


def test_every_flipped_bit_of_a_header_on_disk_is_found(tmp_path: Path) -> None:
    config = make_config(tmp_path)
    filled(config, 1)
    place = slot_offset(0)

    async def test() -> None:
        # One bit a byte through the tier; `test_record` flips all bits of the same header.
        tier, _ = await opened(config)
        for offset in range(0, HEADER_BYTES, 7):
            await save(tier, CHUNKS[0])
            flip(slab(config), place + offset, offset % 8)
            result, _ = await load(tier, CHUNKS[0])
            assert result.outcome is Outcome.FAILED, offset
        await tier.close()

    run(test)


def test_ten_thousand_flipped_payload_bits_are_found(tmp_path: Path) -> None:
    config, draw = make_config(tmp_path), random.Random(SEED)
    print(f"seed {SEED}")
    filled(config, 1)
    record = RecordFormat(b"disk-test-space!", LAYOUT)
    slot = bytearray(slab(config).read_bytes()[slot_offset(0) :][:SLOT_BYTES])
    header = record.check(slot, CHUNKS[0])
    payload = memoryview(slot)[HEADER_BYTES:]
    record.check_payload(header, [payload])
    for _ in range(10_000):
        bit = draw.randrange(8 * len(payload))
        payload[bit // 8] ^= 1 << bit % 8
        with pytest.raises(FormatError) as caught:
            record.check_payload(header, [payload])
        assert caught.value.kind is ErrorKind.CHECKSUM
        payload[bit // 8] ^= 1 << bit % 8


def test_flipped_payload_bits_on_disk_are_not_served(tmp_path: Path) -> None:
    config, draw = make_config(tmp_path), random.Random(SEED)
    print(f"seed {SEED}")

    async def test() -> None:
        tier, _ = await opened(config)
        for _ in range(200):
            await save(tier, CHUNKS[0])
            offset = HEADER_BYTES + draw.randrange(2 * 12288)
            flip(slab(config), slot_offset(0) + offset, draw.randrange(8))
            result, _ = await load(tier, CHUNKS[0])
            assert (result.outcome, result.error) == (Outcome.FAILED, ErrorKind.CHECKSUM)
        await tier.close()

    run(test)


@pytest.mark.parametrize("restart", [False, True])
def test_swapped_slots_are_not_served(tmp_path: Path, restart: bool) -> None:
    config = make_config(tmp_path)
    filled(config, 4)

    async def test() -> None:
        tier, _ = await opened(config)
        if restart:
            await tier.close()
        data = slab(config).read_bytes()
        first, second = (data[slot_offset(slot) :][:SLOT_BYTES] for slot in (1, 2))
        patch(slab(config), slot_offset(1), second)
        patch(slab(config), slot_offset(2), first)
        if restart:
            tier, _ = await opened(config)
        for number in (1, 2):
            result, _ = await load(tier, CHUNKS[number])
            assert (result.outcome, result.error) == (Outcome.FAILED, ErrorKind.KEY_MISMATCH)
        for number in (0, 3):
            assert (await load(tier, CHUNKS[number]))[1] == value(CHUNKS[number])
        await tier.close()

    run(test)


@pytest.mark.parametrize("direct_io", ["auto", "never"])
@pytest.mark.parametrize("cut", [0, 1, 4096, HEADER_BYTES + 1, SLOT_BYTES - 1])
def test_a_slab_that_is_cut_under_a_live_tier_misses_and_heals(
    tmp_path: Path, direct_io: str, cut: int
) -> None:
    config = make_config(tmp_path, slots=3, direct_io=direct_io)

    async def test() -> None:
        tier, _ = await opened(config)
        for chunk in CHUNKS[:3]:
            await save(tier, chunk)
        os.truncate(slab(config), slot_offset(1) + cut)
        assert (await load(tier, CHUNKS[0]))[1] == value(CHUNKS[0])
        for number in (1, 2):
            assert tier.lookup(CHUNKS[number].key) is Presence.HIT
            result, _ = await load(tier, CHUNKS[number])
            assert result.outcome is Outcome.FAILED
            assert tier.lookup(CHUNKS[number].key) is Presence.MISS
            assert (await save(tier, CHUNKS[number])).outcome is Outcome.DONE
            assert (await load(tier, CHUNKS[number]))[1] == value(CHUNKS[number])
        await tier.close()

    run(test)


def test_an_entry_whose_slot_never_got_its_data_is_a_miss(tmp_path: Path) -> None:
    config = make_config(tmp_path)
    filled(config, 2)
    # Power loss: the table reached the disk, the slab did not.
    patch(slab(config), slot_offset(0), bytes(2 * SLOT_BYTES))

    async def test() -> None:
        tier, report = await opened(config)
        assert report.recovered_chunks == 2
        for chunk in CHUNKS[:2]:
            assert (await load(tier, chunk))[0].outcome is Outcome.FAILED
        await tier.close()

    run(test)


def test_power_loss_that_keeps_any_mixture_of_pages_serves_nothing_wrong(tmp_path: Path) -> None:
    """Pages of slab and table as of any moment, but none older than the last sync of the table."""
    config, draw = make_config(tmp_path, slots=4), random.Random(SEED)
    print(f"seed {SEED}")
    model = MayForget()
    states: list[tuple[bytes, bytes]] = []
    synced = 0

    async def write() -> None:
        nonlocal synced
        tier, _ = await opened(config)
        for step in range(30):
            chunk = CHUNKS[draw.randrange(7)]
            if step % 10 == 9:
                await tier.evict([chunk.key])
                model.evicted(chunk.key)
                synced = len(states)
            elif (await save(tier, chunk, version=step)).nbytes:
                model.saving(chunk.key, value(chunk, step))
            states.append((slab(config).read_bytes(), table(config).read_bytes()))
        await tier.close()

    async def judge() -> None:
        tier = DiskTier(config)
        await tier.open(b"disk-test-space!", LAYOUT)
        for chunk in CHUNKS[:7]:
            _, got = await load(tier, chunk)
            model.judge(chunk.key, got)
        await tier.close()

    run(write)
    for _ in range(100):
        # Most pages reached the disk; of the others some earlier content did.
        slabs = [states[draw.randrange(len(states))][0]] + [states[-1][0]] * 9
        mixed_slab = b"".join(
            draw.choice(slabs)[start : start + 4096] for start in range(0, len(slabs[0]), 4096)
        )
        tables = [states[draw.randrange(synced, len(states))][1]] + [states[-1][1]] * 2
        mixed_table = tables[0][:4096] + b"".join(
            draw.choice(tables)[start : start + 128] for start in range(4096, len(tables[0]), 128)
        )
        slab(config).write_bytes(mixed_slab)
        table(config).write_bytes(mixed_table)
        run(judge)
    print(f"{model.hits} hits, {model.misses} misses")
    assert model.hits > 50
    assert model.misses > 50


def test_parts_of_a_failed_load_may_hold_anything_but_the_tier_goes_on(tmp_path: Path) -> None:
    config = make_config(tmp_path)

    async def test() -> None:
        tier, _ = await opened(config)
        await save(tier, CHUNKS[0])
        flip(slab(config), slot_offset(0) + HEADER_BYTES)
        parts = make_parts(LAYOUT)
        assert (await tier.load(CHUNKS[0], parts)).outcome in NOT_SERVED
        assert (await tier.save(CHUNKS[0], parts)).outcome is Outcome.DONE
        assert (await tier.load(CHUNKS[0], parts)).outcome is Outcome.DONE
        await tier.close()

    run(test)
