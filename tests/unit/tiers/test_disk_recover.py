# SPDX-License-Identifier: Apache-2.0
"""Restarts: what an earlier run left is taken over, set aside, begun anew or refused."""

from __future__ import annotations

import os
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from tests.unit.tiers.disk_kit import (
    CHUNKS,
    ENTRY_BYTES,
    FOLDER,
    LAYOUT,
    SLOT_BYTES,
    entry_offset,
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
from tierkv.errors import ErrorKind, TierError
from tierkv.tiers.base import Outcome


def reopen(path: Path, **options: object) -> tuple[list[int], tuple[str, ...], int]:
    """Numbers of the chunks that are served after a restart, the notes, the chunks recovered."""

    async def test() -> tuple[list[int], tuple[str, ...], int]:
        tier, report = await opened(make_config(path, **options))
        held = []
        for number, chunk in enumerate(CHUNKS):
            _, got = await load(tier, chunk)
            if got is not None:
                assert got == value(chunk)
                held.append(number)
        await tier.close()
        return held, report.notes, report.recovered_chunks

    return run(test)


def test_all_chunks_are_found_again_and_counted(tmp_path: Path) -> None:
    filled(make_config(tmp_path), 10)
    held, notes, recovered = reopen(tmp_path)
    assert (held, recovered) == (list(range(10)), 10)
    assert not [note for note in notes if "O_DIRECT" not in note]


def test_the_order_of_use_outlives_a_restart(tmp_path: Path) -> None:
    config = make_config(tmp_path, slots=6)

    async def test() -> None:
        tier, _ = await opened(config)
        for chunk in CHUNKS[:6]:
            await save(tier, chunk)
        await tier.touch([CHUNKS[0].key, CHUNKS[2].key])
        await tier.close()
        tier, _ = await opened(config)
        for chunk in CHUNKS[6:10]:
            await save(tier, chunk)
        held = [n for n in range(6) if (await load(tier, CHUNKS[n]))[1] is not None]
        assert held == [0, 2]  # 1, 3, 4, 5 made room, in the order of their writes
        await tier.close()

    run(test)


def test_recover_none_begins_empty(tmp_path: Path) -> None:
    filled(make_config(tmp_path), 3)
    held, notes, _ = reopen(tmp_path, recover="none")
    assert held == []
    assert not [note for note in notes if "O_DIRECT" not in note]
    assert reopen(tmp_path)[0] == []


def refuse(path: Path, match: str) -> None:
    async def test() -> None:
        with pytest.raises(TierError, match=match):
            await opened(make_config(path, recover="strict"))

    before = {file: file.read_bytes() for file in (path / "kv" / FOLDER).iterdir()}
    run(test)
    assert {file: file.read_bytes() for file in (path / "kv" / FOLDER).iterdir()} == before


def test_strict_takes_over_what_is_intact(tmp_path: Path) -> None:
    filled(make_config(tmp_path), 4)
    assert reopen(tmp_path, recover="strict")[0] == [0, 1, 2, 3]


def test_a_damaged_entry_is_dropped_or_refused(tmp_path: Path) -> None:
    config = make_config(tmp_path)
    filled(config, 4)
    flip(table(config), entry_offset(2) + 50)
    refuse(tmp_path, r"1 damaged entries.*recover: quiet")
    held, notes, recovered = reopen(tmp_path)
    assert (held, recovered) == ([0, 1, 3], 3)
    assert [note for note in notes if "1 damaged entries dropped" in note]


@pytest.mark.parametrize("name", ["slab", "table"])
def test_a_damaged_header_page_means_begun_anew_or_refused(tmp_path: Path, name: str) -> None:
    config = make_config(tmp_path)
    filled(config, 4)
    flip(config.path / FOLDER / name, 33)
    refuse(tmp_path, f"{name}: the header page does not match its checksum; remove it")
    held, notes, _ = reopen(tmp_path)
    assert held == []
    assert [note for note in notes if f"{name}: the header page" in note and "anew" in note]


def test_a_cut_slab_loses_what_was_cut(tmp_path: Path) -> None:
    config = make_config(tmp_path)
    filled(config, 4)
    os.truncate(slab(config), slot_offset(2) + 100)
    refuse(tmp_path, "2 beyond the end of the slab")
    assert reopen(tmp_path)[0] == [0, 1]

    async def grow() -> None:
        tier, _ = await opened(config)
        await save(tier, CHUNKS[7])
        await tier.close()

    run(grow)
    # The entries that pointed beyond the end do not come back with the room.
    held, _, recovered = reopen(tmp_path, recover="strict")
    assert (held, recovered) == ([0, 1, 7], 3)


def test_an_emptied_slab_holds_nothing(tmp_path: Path) -> None:
    config = make_config(tmp_path)
    filled(config, 4)
    os.truncate(slab(config), 0)
    assert reopen(tmp_path)[0] == []


def test_a_cut_table_loses_what_was_cut(tmp_path: Path) -> None:
    config = make_config(tmp_path)
    filled(config, 4)
    os.truncate(table(config), entry_offset(3) - 1)
    assert reopen(tmp_path)[0] == [0, 1]


def test_a_missing_table_means_empty(tmp_path: Path) -> None:
    config = make_config(tmp_path)
    filled(config, 4)
    table(config).unlink()
    assert reopen(tmp_path)[0] == []


def test_a_missing_file_of_uses_costs_nothing_but_the_order(tmp_path: Path) -> None:
    config = make_config(tmp_path)
    filled(config, 4)
    (config.path / FOLDER / "used").write_bytes(b"\xff" * 13)
    assert reopen(tmp_path)[0] == [0, 1, 2, 3]


@pytest.mark.parametrize("name", ["slab", "table"])
def test_a_file_of_another_run_is_noticed(tmp_path: Path, name: str) -> None:
    config, other = make_config(tmp_path), make_config(tmp_path / "other")
    filled(config, 4)
    filled(other, 2)
    shutil.copyfile(other.path / FOLDER / name, config.path / FOLDER / name)
    refuse(tmp_path, "slab and table do not belong together")
    held, notes, _ = reopen(tmp_path)
    assert held == []
    assert [note for note in notes if "do not belong together; begun anew" in note]


def test_an_older_copy_of_the_table_serves_nothing_wrong(tmp_path: Path) -> None:
    config = make_config(tmp_path, slots=4)
    filled(config, 4)
    old = table(config).read_bytes()

    async def test() -> None:
        tier, _ = await opened(config)
        for chunk in CHUNKS[4:7]:  # takes the slots of 0, 1, 2
            await save(tier, chunk)
        await tier.close()
        table(config).write_bytes(old)
        tier, report = await opened(config)
        assert report.recovered_chunks == 4
        for number in range(3):
            result, _ = await load(tier, CHUNKS[number])
            assert (result.outcome, result.error) == (Outcome.FAILED, ErrorKind.KEY_MISMATCH)
        assert (await load(tier, CHUNKS[3]))[1] == value(CHUNKS[3])
        await tier.close()

    run(test)


def test_a_slab_of_an_older_write_of_the_same_key_is_not_served(tmp_path: Path) -> None:
    config = make_config(tmp_path, slots=1)
    filled(config, 1)
    old = slab(config).read_bytes()

    async def test() -> None:
        tier, _ = await opened(config)
        await tier.evict([CHUNKS[0].key])
        await save(tier, CHUNKS[0], version=1)
        await tier.close()
        slab(config).write_bytes(old)
        tier, _ = await opened(config)
        result, _ = await load(tier, CHUNKS[0])
        assert (result.outcome, result.error) == (Outcome.FAILED, ErrorKind.FORMAT)
        await tier.close()

    run(test)


@pytest.mark.parametrize("name", ["slab", "table"])
@pytest.mark.parametrize("version", [0, 2, 9000])
def test_files_of_another_version_are_set_aside_and_kept(
    tmp_path: Path, name: str, version: int
) -> None:
    config = make_config(tmp_path, slots=80)
    filled(make_config(tmp_path, slots=4), 4)
    patch(config.path / FOLDER / name, 8, version.to_bytes(2, "little"))
    before = (config.path / FOLDER / "slab").read_bytes()
    held, notes, _ = reopen(tmp_path, slots=80, recover="strict")
    assert held == []
    aside = config.path / FOLDER.replace("-v1", f"-v{version}")
    assert [note for note in notes if f"{aside} is of disk format {version}" in note]
    assert (aside / "slab").read_bytes() == before
    filled(config, 4)
    assert reopen(tmp_path, slots=80)[0] == [0, 1, 2, 3]
    assert (aside / "slab").read_bytes() == before


def test_another_geometry_begins_anew_or_is_refused(tmp_path: Path) -> None:
    config = make_config(tmp_path)
    filled(config, 2)
    other = replace(LAYOUT, ranks=1)

    async def test() -> None:
        with pytest.raises(TierError, match="another geometry"):
            await opened(make_config(tmp_path, recover="strict"), layout=other)
        tier, report = await opened(config, layout=other)
        assert report.recovered_chunks == 0
        assert [note for note in report.notes if "another geometry; begun anew" in note]
        await tier.close()

    run(test)


def test_a_smaller_capacity_keeps_what_fits(tmp_path: Path) -> None:
    config = make_config(tmp_path, slots=10)
    filled(config, 10)
    held, notes, _ = reopen(tmp_path, slots=6)
    assert held == [0, 1, 2, 3, 4, 5]
    assert [note for note in notes if "cut to the capacity, 4 chunks dropped" in note]
    assert slab(config).stat().st_size == 4096 + 6 * SLOT_BYTES
    # Growing again brings nothing back from the dead.
    assert reopen(tmp_path, slots=10)[0] == [0, 1, 2, 3, 4, 5]


def test_a_larger_capacity_is_used(tmp_path: Path) -> None:
    filled(make_config(tmp_path, slots=4), 4)

    async def test() -> None:
        tier, _ = await opened(make_config(tmp_path, slots=8))
        for chunk in CHUNKS[4:8]:
            await save(tier, chunk)
        assert tier.usage().chunks == 8
        await tier.close()

    run(test)


def test_of_two_entries_of_one_key_the_older_is_void_even_after_an_evict(tmp_path: Path) -> None:
    config = make_config(tmp_path)
    filled(config, 1)
    first = table(config).read_bytes()[entry_offset(0) :][:ENTRY_BYTES]
    first_slot = slab(config).read_bytes()[slot_offset(0) :][:SLOT_BYTES]

    async def test() -> None:
        tier, _ = await opened(config)
        await save(tier, CHUNKS[1])
        await tier.evict([CHUNKS[0].key])
        await save(tier, CHUNKS[2])  # takes slot 0
        await save(tier, CHUNKS[0], version=1)  # slot 2, a later write
        await tier.evict([CHUNKS[2].key])
        await tier.close()
        # As if clearing slot 0 had been lost with the power.
        patch(table(config), entry_offset(0), first)
        patch(slab(config), slot_offset(0), first_slot)
        tier, report = await opened(config)
        assert report.recovered_chunks == 2
        assert (await load(tier, CHUNKS[0]))[1] == value(CHUNKS[0], 1)
        assert await tier.evict([CHUNKS[0].key]) == 1
        await tier.close()
        tier, report = await opened(config)
        assert (await load(tier, CHUNKS[0]))[1] is None
        assert report.recovered_chunks == 1
        await tier.close()

    run(test)
