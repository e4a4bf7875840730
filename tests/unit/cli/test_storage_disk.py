# SPDX-License-Identifier: Apache-2.0
"""`ls`, `du`, `inspect`, `verify` and `purge` on directories that the real disk tier has filled."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

import pytest

from tests.unit.cli.storage_kit import (
    LAYOUT,
    OTHER,
    SPACE,
    chain,
    fill_disk,
    folder,
    slot_of,
)
from tests.unit.tiers import disk_kit
from tierkv.cli.app import run
from tierkv.inventory.disk import DiskInventory
from tierkv.keys import Chunk
from tierkv.stats.publisher import Publisher
from tierkv.stats.server import StatsServer
from tierkv.telemetry.counters import Counters

Captured = pytest.CaptureFixture[str]
RECORD = 4096 + 2 * 12288
"""Bytes of a record: header page, two padded parts."""


@pytest.fixture(autouse=True)
def _own_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in list(os.environ):
        if name.startswith("TIERKV_"):
            monkeypatch.delenv(name)


def read(capsys: Captured, *arguments: str, code: int = 0) -> Any:
    """What a command prints as JSON."""
    assert run([*arguments, "--json"]) == code
    return json.loads(capsys.readouterr().out)


def loads(path: Path, chunks: list[Chunk]) -> list[bool]:
    """Which of the chunks an engine would get."""

    async def load_all() -> list[bool]:
        tier, _ = await disk_kit.opened(disk_kit.make_config(path.parent), SPACE.digest)
        found = [(await disk_kit.load(tier, chunk))[1] == disk_kit.value(chunk) for chunk in chunks]
        await tier.close()
        return found

    return asyncio.run(load_all())


# ls


def test_ls_shows_namespaces_with_their_models(tmp_path: Path, capsys: Captured) -> None:
    path = fill_disk(tmp_path, OTHER, chain(OTHER, 2), slots=6)
    fill_disk(tmp_path, SPACE, chain(SPACE, 3))
    assert run(["ls", "--path", str(path)]) == 0
    printed = capsys.readouterr()
    head, first, second = printed.out.splitlines()
    assert head.split() == [
        *("tier", "namespace", "model", "chunks", "tokens", "size", "used", "oldest", "newest")
    ]
    # The one used last comes first.
    assert first.split()[:6] == ["disk", SPACE.digest.hex()[:12], "tiny-model", "3", "12", "84KiB"]
    assert second.split()[:6] == ["disk", OTHER.digest.hex()[:12], "–", "2", "8", "56KiB"]
    assert printed.err == ""


def test_ls_as_json_has_the_same_in_bytes_and_ns(tmp_path: Path, capsys: Captured) -> None:
    path = fill_disk(tmp_path, SPACE, chain(SPACE, 3))
    printed = read(capsys, "ls", "--path", str(path))
    assert printed["places"] == [{"tier": "disk", "place": str(path), "in_use_by": None}]
    [space] = printed["namespaces"]
    assert space["namespace"] == SPACE.digest.hex()
    assert space["about"] == {"model": "tiny-model", "engine": "vllm 0.32.0"}
    assert (space["chunks"], space["tokens"], space["chunk_bytes"]) == (3, 12, 3 * RECORD)
    on_disk = sum(f.stat().st_blocks * 512 for f in folder(path, SPACE).iterdir())
    assert space["allocated_bytes"] == on_disk + folder(path, SPACE).stat().st_blocks * 512
    assert space["oldest_ns"] < space["newest_ns"] <= space["used_ns"]


def test_ls_of_a_namespace_lists_its_chunks_by_last_use(tmp_path: Path, capsys: Captured) -> None:
    chunks = chain(SPACE, 4)
    path = fill_disk(tmp_path, SPACE, chunks)
    for wanted in ("tiny-model", SPACE.digest.hex()[:4], SPACE.digest.hex().upper()):
        printed = read(capsys, "ls", wanted, "--path", str(path), "--limit", "3")
        assert printed["total"] == 4
        assert [c["key"] for c in printed["chunks"]] == [c.key.hex() for c in chunks[:0:-1]]
    assert run(["ls", "tiny-model", "--path", str(path), "--limit", "1"]) == 0
    printed_text = capsys.readouterr()
    assert printed_text.out.splitlines()[1].split()[:4] == [
        "disk",
        chunks[3].key.hex(),
        "4",
        "28KiB",
    ]
    assert printed_text.err == "3 more; --limit shows them\n"


def test_ls_beside_an_engine_says_so_and_takes_nothing(tmp_path: Path, capsys: Captured) -> None:
    config = disk_kit.make_config(tmp_path)

    async def look() -> None:
        tier, _ = await disk_kit.opened(config, SPACE.digest)
        await disk_kit.save(tier, disk_kit.CHUNKS[0])
        assert run(["ls", "--path", str(config.path)]) == 0
        printed = capsys.readouterr()
        assert printed.err == f"disk: in use by process {os.getpid()}: a moment's picture\n"
        assert printed.out.splitlines()[1].split()[3] == "1"
        assert run(["verify", "--path", str(config.path)]) == 0
        capsys.readouterr()
        for command in (["verify", "--repair"], ["purge", "--all", "--yes"]):
            code = run([*command, "--path", str(config.path)])
            told = capsys.readouterr().err
            if command[0] == "purge":
                assert code == 1
                assert f"is in use by process {os.getpid()}, which cannot be asked; stop" in told
            else:
                assert code == 0  # nothing is damaged, so nothing had to be taken
        result, value = await disk_kit.load(tier, disk_kit.CHUNKS[0])
        assert value == disk_kit.value(disk_kit.CHUNKS[0]), result
        await tier.close()

    asyncio.run(look())


def test_ls_without_a_lower_tier_says_what_to_give(capsys: Captured) -> None:
    Path("tierkv.yaml").write_text("tiers:\n  - {type: dram, capacity: 1MiB}\n")
    assert run(["ls"]) == 2
    assert capsys.readouterr().err == (
        "tierkv.yaml: no tier below DRAM, so nothing is stored outside of running engines; give "
        "--config FILE or --path DIR\n"
    )


def test_a_directory_that_is_not_there_is_one_line_and_1(tmp_path: Path, capsys: Captured) -> None:
    missing = tmp_path / "missing"
    assert run(["ls", "--path", str(missing)]) == 1
    assert capsys.readouterr().err == (
        f"tierkv: disk: {missing} cannot be read (No such file or directory); give the tier's "
        "directory\n"
    )
    assert not missing.exists()


def test_an_empty_directory_is_said_to_be_empty(tmp_path: Path, capsys: Captured) -> None:
    (tmp_path / "kv").mkdir(mode=0o700)
    (tmp_path / "kv" / "notes.txt").write_text("mine")
    assert run(["ls", "--path", str(tmp_path / "kv")]) == 0
    assert capsys.readouterr() == ("", f"disk: nothing is cached in {tmp_path / 'kv'}\n")


def test_tiers_come_from_the_configuration(tmp_path: Path, capsys: Captured) -> None:
    path = fill_disk(tmp_path, SPACE, chain(SPACE, 1))
    Path("tierkv.yaml").write_text(
        "tiers:\n  - {type: dram, capacity: 1MiB}\n"
        f"  - {{type: disk, name: nvme, path: {path}, capacity: 1GiB}}\n"
    )
    [space] = read(capsys, "ls")["namespaces"]
    assert space["tier"] == "nvme"
    assert run(["ls", "--tier", "ssd"]) == 2
    expected = "tierkv.yaml: no tier is named 'ssd'; those below DRAM: nvme\n"
    assert capsys.readouterr().err == expected


def test_other_versions_and_damage_are_named(tmp_path: Path, capsys: Captured) -> None:
    path = fill_disk(tmp_path, SPACE, chain(SPACE, 1), slots=6)
    fill_disk(tmp_path, OTHER, chain(OTHER, 1))
    folder(path, OTHER).rename(path / f"{OTHER.digest.hex()}-v2")
    disk_kit.flip(folder(path, SPACE) / "slab", 100)
    assert run(["ls", "--path", str(path)]) == 0
    told = capsys.readouterr().err
    assert "cannot be read: disk format 2, this version reads 1" in told
    assert "cannot be read: damaged: the header page does not match its checksum" in told


def test_a_manifest_that_is_no_manifest_hides_only_the_name(
    tmp_path: Path, capsys: Captured
) -> None:
    path = fill_disk(tmp_path, SPACE, chain(SPACE, 1))
    for text in ("[]", "{", '{"model": "a\\u001b[31mb"}', '{"model": 3}', ""):
        (folder(path, SPACE) / "about.json").write_text(text)
        [space] = read(capsys, "ls", "--path", str(path))["namespaces"]
        assert (space["model"], space["chunks"]) == (None, 1), text


# du


def test_du_adds_up(tmp_path: Path, capsys: Captured) -> None:
    path = fill_disk(tmp_path, OTHER, chain(OTHER, 2), slots=6)
    fill_disk(tmp_path, SPACE, chain(SPACE, 3))
    [tier] = read(capsys, "du", "--path", str(path))["tiers"]
    assert tier["chunks"] == 5
    assert tier["chunk_bytes"] == 5 * RECORD
    assert tier["allocated_bytes"] == sum(n["allocated_bytes"] for n in tier["namespaces"])
    assert tier["capacity_bytes"] is None
    Path("tierkv.yaml").write_text(
        "tiers:\n  - {type: dram, capacity: 1MiB}\n"
        f"  - {{type: disk, path: {path}, capacity: 1GiB}}\n"
    )
    assert run(["du"]) == 0
    last = capsys.readouterr().out.splitlines()[-1]
    assert last.startswith("disk: ")
    assert f" of 1GiB (0%) in {path}; its file system has " in last


# inspect


def test_inspect_shows_header_and_chain(tmp_path: Path, capsys: Captured) -> None:
    chunks = chain(SPACE, 3)
    path = fill_disk(tmp_path, SPACE, chunks)
    prefix = chunks[1].key.hex()[:8]
    [found] = read(capsys, "inspect", prefix, "--path", str(path))["chunks"]
    assert found["key"] == chunks[1].key.hex()
    assert found["parent"] == chunks[0].key.hex()
    assert (found["parent_stored"], found["children_stored"]) == (True, 1)
    assert (found["damage"], found["model"]) == (None, "tiny-model")
    header = found["header"]
    assert header["content_key"] == chunks[1].content_key.hex()
    assert (header["codec"], header["ranks"], header["part_bytes"]) == ("raw", 2, 12000)
    assert "token_ids" not in found
    [found] = read(capsys, "inspect", prefix, "--tokens", "--path", str(path))["chunks"]
    assert found["token_ids"] == [4, 5, 6, 7]


def test_inspect_prints_no_token_unless_asked(tmp_path: Path, capsys: Captured) -> None:
    chunks = chain(SPACE, 1, seed=77000)
    path = fill_disk(tmp_path, SPACE, chunks)
    assert run(["inspect", chunks[0].key.hex(), "--path", str(path)]) == 0
    text = capsys.readouterr().out
    assert "77000" not in text
    assert "payload     intact" in text
    assert run(["inspect", chunks[0].key.hex(), "--path", str(path), "--tokens"]) == 0
    assert "token ids   77000 77001 77002 77003" in capsys.readouterr().out


def test_inspect_of_a_damaged_chunk_is_3(tmp_path: Path, capsys: Captured) -> None:
    chunks = chain(SPACE, 2)
    path = fill_disk(tmp_path, SPACE, chunks)
    slot = slot_of(path, SPACE, chunks[1])
    disk_kit.flip(folder(path, SPACE) / "slab", disk_kit.slot_offset(slot) + 9000)
    assert run(["inspect", chunks[1].key.hex(), "--path", str(path)]) == 3
    assert "payload     damaged: the payload does not match its checksum" in capsys.readouterr().out
    assert run(["inspect", chunks[0].key.hex(), "--path", str(path)]) == 0


@pytest.mark.parametrize(
    ("key", "code", "told"),
    [
        ("nothex", 2, "'nothex' is no key: give 4 to 32 hexadecimal digits"),
        ("abc", 2, "'abc' is no key"),
        ("00000000", 1, "no stored chunk's key begins with 00000000; 'tierkv ls NAMESPACE'"),
    ],
)
def test_inspect_of_no_key_says_so(
    tmp_path: Path, capsys: Captured, key: str, code: int, told: str
) -> None:
    path = fill_disk(tmp_path, SPACE, chain(SPACE, 1))
    assert run(["inspect", key, "--path", str(path)]) == code
    assert told in capsys.readouterr().err


# verify


def test_verify_finds_nothing_in_a_sound_directory(tmp_path: Path, capsys: Captured) -> None:
    path = fill_disk(tmp_path, SPACE, chain(SPACE, 5))
    before = {f: f.read_bytes() for f in folder(path, SPACE).iterdir()}
    printed = read(capsys, "verify", "--path", str(path))
    assert (printed["ok"], printed["chunks"], printed["bytes"]) == (True, 5, 5 * RECORD)
    assert {f: f.read_bytes() for f in folder(path, SPACE).iterdir()} == before


def test_verify_does_not_call_an_empty_directory_intact(tmp_path: Path, capsys: Captured) -> None:
    assert run(["verify", "--path", str(tmp_path)]) == 0
    assert capsys.readouterr().out.endswith(": nothing to check\n")


DAMAGES = {
    "payload": ("slab", lambda slot: disk_kit.slot_offset(slot) + 4096 + 500, "the payload does"),
    "last byte": ("slab", lambda slot: disk_kit.slot_offset(slot) + RECORD - 1, "the payload does"),
    "header": ("slab", lambda slot: disk_kit.slot_offset(slot) + 100, "the header does not"),
    "magic": ("slab", lambda slot: disk_kit.slot_offset(slot), "no record begins here"),
    "entry": ("table", lambda slot: disk_kit.entry_offset(slot) + 3, "the entry is damaged"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_verify_finds_each_damage_and_repair_drops_it(
    tmp_path: Path, capsys: Captured, damage: str
) -> None:
    chunks = chain(SPACE, 5)
    path = fill_disk(tmp_path, SPACE, chunks)
    file, offset, reason = DAMAGES[damage]
    disk_kit.flip(folder(path, SPACE) / file, offset(slot_of(path, SPACE, chunks[2])))
    printed = read(capsys, "verify", "--path", str(path), code=3)
    assert (printed["ok"], printed["repaired"], len(printed["problems"])) == (False, False, 1)
    assert printed["problems"][0]["reason"].startswith(reason)
    if file == "slab":
        assert printed["problems"][0]["what"] == chunks[2].key.hex()
    assert run(["verify", "--repair", "--path", str(path)]) == 3
    assert ": 1 damaged, dropped" in capsys.readouterr().out
    assert read(capsys, "verify", "--path", str(path))["chunks"] == 4
    assert loads(path, chunks) == [True, True, False, True, True]


def test_verify_finds_a_swap_of_two_slots(tmp_path: Path, capsys: Captured) -> None:
    chunks = chain(SPACE, 3)
    path = fill_disk(tmp_path, SPACE, chunks)
    slab = folder(path, SPACE) / "slab"
    data = slab.read_bytes()
    first, second = (disk_kit.slot_offset(slot_of(path, SPACE, c)) for c in chunks[:2])
    disk_kit.patch(slab, first, data[second : second + RECORD])
    disk_kit.patch(slab, second, data[first : first + RECORD])
    printed = read(capsys, "verify", "--path", str(path), code=3)
    assert [p["reason"] for p in printed["problems"]] == ["the slot holds another chunk"] * 2


def test_verify_drops_a_namespace_whose_header_page_is_bad(
    tmp_path: Path, capsys: Captured
) -> None:
    path = fill_disk(tmp_path, SPACE, chain(SPACE, 2), slots=6)
    fill_disk(tmp_path, OTHER, chain(OTHER, 2))
    disk_kit.flip(folder(path, SPACE) / "table", 40)
    assert run(["verify", "--repair", "--path", str(path)]) == 3
    assert not folder(path, SPACE).exists()
    assert folder(path, OTHER).exists()
    capsys.readouterr()
    assert read(capsys, "verify", "--path", str(path))["chunks"] == 2


def test_verify_leaves_other_versions_alone(tmp_path: Path, capsys: Captured) -> None:
    path = fill_disk(tmp_path, SPACE, chain(SPACE, 2))
    later = path / f"{SPACE.digest.hex()}-v2"
    folder(path, SPACE).rename(later)
    assert run(["verify", "--repair", "--path", str(path)]) == 0
    assert later.exists()


@pytest.mark.parametrize("rate", ["200", "fast", "0MiB/s", "200Mbit/s"])
def test_a_rate_that_is_none_is_refused(rate: str, tmp_path: Path, capsys: Captured) -> None:
    assert run(["verify", "--path", str(tmp_path), "--rate", rate]) == 2
    assert "rate" in capsys.readouterr().err


# purge


def test_purge_only_shows_unless_told_to(tmp_path: Path, capsys: Captured) -> None:
    chunks = chain(SPACE, 3)
    path = fill_disk(tmp_path, SPACE, chunks)
    assert run(["purge", "--all", "--path", str(path)]) == 0
    printed = capsys.readouterr()
    assert printed.out.splitlines()[1].split()[:5] == [
        *("disk", SPACE.digest.hex()[:12], "tiny-model", "all", "3")
    ]
    assert printed.err == "nothing was changed; --yes purges this\n"
    assert loads(path, chunks) == [True] * 3


def test_purge_of_a_namespace_leaves_the_others(tmp_path: Path, capsys: Captured) -> None:
    chunks = chain(SPACE, 3)
    path = fill_disk(tmp_path, SPACE, chunks, slots=6)
    fill_disk(tmp_path, OTHER, chain(OTHER, 2))
    wanted = OTHER.digest.hex()[:8]
    printed = read(capsys, "purge", "--namespace", wanted, "--yes", "--path", str(path))
    assert printed["done"]
    assert [t["chunks"] for t in printed["targets"]] == [2]
    assert not folder(path, OTHER).exists()
    assert loads(path, chunks) == [True] * 3


def test_purge_of_a_tenant_takes_its_chunks_and_no_other(tmp_path: Path, capsys: Captured) -> None:
    mine, yours, nobodys = (chain(SPACE, 3, tenant=t) for t in ("mine", "yours", None))
    path = fill_disk(tmp_path, SPACE, mine, yours, nobodys)
    secret = tmp_path / "secret"
    secret.write_text("secret\n")
    Path("tierkv.yaml").write_text(
        f"key_secret: {{file: {secret}}}\ntiers:\n  - {{type: dram, capacity: 1MiB}}\n"
        f"  - {{type: disk, path: {path}, capacity: 1GiB}}\n"
    )
    printed = read(capsys, "purge", "--tenant", "mine", "--yes")
    assert [t["chunks"] for t in printed["targets"]] == [3]
    assert loads(path, [*mine, *yours, *nobodys]) == [False] * 3 + [True] * 6
    assert [t["chunks"] for t in read(capsys, "purge", "--tenant", "", "--yes")["targets"]] == [3]
    assert loads(path, [*yours, *nobodys]) == [True] * 3 + [False] * 3
    # Without the secret a tenant's chunks cannot be told from others'.
    assert read(capsys, "purge", "--tenant", "yours", "--path", str(path))["targets"] == []


def test_purge_of_a_key_takes_what_follows_and_wipes_it(tmp_path: Path, capsys: Captured) -> None:
    chunks = chain(SPACE, 4)
    path = fill_disk(tmp_path, SPACE, chunks)
    slots = [slot_of(path, SPACE, chunk) for chunk in chunks]
    key = chunks[2].key.hex()[:10]
    printed = read(capsys, "purge", "--key", key, "--yes", "--path", str(path))
    assert [t["chunks"] for t in printed["targets"]] == [2]
    data = (folder(path, SPACE) / "slab").read_bytes()
    records = [
        data[start : start + RECORD] for start in (disk_kit.slot_offset(slot) for slot in slots)
    ]
    assert [record == bytes(RECORD) for record in records] == [False, False, True, True]
    assert loads(path, chunks) == [True, True, False, False]


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["--all", "--tenant", "a"],
        ["--key", "abcd", "--all"],
        ["--key", "abcd", "--tenant", "a"],
    ],
)
def test_purge_wants_to_know_what(arguments: list[str], tmp_path: Path, capsys: Captured) -> None:
    assert run(["purge", *arguments, "--path", str(tmp_path)]) == 2
    assert capsys.readouterr().out == ""


def test_purge_of_nothing_says_so(tmp_path: Path, capsys: Captured) -> None:
    path = fill_disk(tmp_path, SPACE, chain(SPACE, 1))
    assert run(["purge", "--tenant", "nobody", "--path", str(path), "--yes"]) == 0
    assert capsys.readouterr().out == "nothing stored matches\n"
    assert run(["purge", "--namespace", "ffff", "--path", str(path), "--yes"]) == 2


def test_the_directory_of_a_copy_can_be_read_too(tmp_path: Path, capsys: Captured) -> None:
    path = fill_disk(tmp_path, SPACE, chain(SPACE, 2))
    shutil.copytree(path, tmp_path / "copy")
    assert read(capsys, "ls", "--path", str(tmp_path / "copy"))["namespaces"][0]["chunks"] == 2
    assert LAYOUT.ranks == 2


@pytest.mark.parametrize("everything", [True, False])
def test_an_engine_that_has_the_directory_is_asked_to_forget(
    everything: bool, tmp_path: Path, capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[str, dict[str, Any]]] = []
    chunks = chain(SPACE, 3)

    async def look(socket_folder: str) -> None:
        monkeypatch.setenv("XDG_RUNTIME_DIR", socket_folder)
        config = disk_kit.make_config(tmp_path)
        tier, _ = await disk_kit.opened(config, SPACE.digest)
        for chunk in chunks:
            await disk_kit.save(tier, chunk)
        publisher = Publisher(Counters().snapshot, list)
        server = StatsServer(publisher, {"namespace": SPACE.digest.hex()}, control=True)
        server.start()

        def answer(op: str, arguments: dict[str, Any]) -> dict[str, Any]:
            asked.append((op, arguments))
            return {"chunks": 1}

        arguments = ["--all"] if everything else ["--key", chunks[1].key.hex()]
        purging = asyncio.create_task(
            asyncio.to_thread(run, ["purge", *arguments, "--yes", "--path", str(config.path)])
        )
        while not purging.done():
            publisher.run_commands(answer)
            await asyncio.sleep(0)
        assert await purging == 0
        server.close()
        await tier.close()

    # A short path: the socket's own must fit into 107 bytes.
    with tempfile.TemporaryDirectory(prefix="tk-") as socket_folder:
        asyncio.run(look(socket_folder))
    assert capsys.readouterr().out.endswith("purged\n")
    keys = [chunk.key.hex() for chunk in chunks[1:]]
    assert asked == [("purge", {"all": True} if everything else {"keys": keys})]


def test_purge_does_not_call_done_what_an_idle_engine_has_yet_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    monkeypatch.setattr("tierkv.stats.server.COMMAND_SECONDS", 0.0)

    async def look(socket_folder: str) -> None:
        monkeypatch.setenv("XDG_RUNTIME_DIR", socket_folder)
        config = disk_kit.make_config(tmp_path)
        tier, _ = await disk_kit.opened(config, SPACE.digest)
        await disk_kit.save(tier, chain(SPACE, 1)[0])
        publisher = Publisher(Counters().snapshot, list)
        server = StatsServer(publisher, {"namespace": SPACE.digest.hex()}, control=True)
        server.start()
        purge = ["purge", "--all", "--yes", "--path", str(config.path)]
        assert await asyncio.to_thread(run, purge) == 0
        assert await asyncio.to_thread(run, [*purge, "--json"]) == 0
        server.close()
        await tier.close()

    with tempfile.TemporaryDirectory(prefix="tk-") as socket_folder:
        asyncio.run(look(socket_folder))
    out = capsys.readouterr().out
    text, told = out[: out.index("{")], json.loads(out[out.index("{") :])
    assert "queued: the engine is idle" in text
    assert "purged" not in text
    assert (told["done"], told["queued"]) == (False, True)


@pytest.mark.parametrize("entry", [bytes(128), b"\7" * 128], ids=["cleared", "of another chunk"])
def test_what_an_engine_overwrites_just_now_is_not_damaged(tmp_path: Path, entry: bytes) -> None:
    """The engine clears a slot's entry, writes the slot, and writes the new entry."""
    chunks = chain(SPACE, 2)
    path = fill_disk(tmp_path, SPACE, chunks)
    with DiskInventory(path) as inventory:
        listed = {chunk.key: chunk for chunk in inventory.chunks(folder(path, SPACE).name)}
        slot = slot_of(path, SPACE, chunks[0])
        disk_kit.patch(folder(path, SPACE) / "slab", disk_kit.slot_offset(slot), bytes(RECORD))
        problem = inventory.check(listed[chunks[0].key])
        assert problem is not None
        assert problem.reason == "no record begins here: the magic is missing"
        disk_kit.patch(folder(path, SPACE) / "table", disk_kit.entry_offset(slot), entry)
        assert inventory.check(listed[chunks[0].key]) is None
        assert inventory.check(listed[chunks[1].key]) is None


def test_a_slab_that_is_cut_short_is_damaged(tmp_path: Path, capsys: Captured) -> None:
    chunks = chain(SPACE, 3)
    path = fill_disk(tmp_path, SPACE, chunks)
    slot = max(slot_of(path, SPACE, chunk) for chunk in chunks)
    os.truncate(folder(path, SPACE) / "slab", disk_kit.slot_offset(slot) + RECORD // 2)
    [problem] = read(capsys, "verify", "--path", str(path), code=3)["problems"]
    assert problem["what"] == f"entry {slot} of table"


# What the tier leaves for people


def test_the_manifest_is_private_and_goes_with_its_namespace(tmp_path: Path) -> None:
    path = fill_disk(tmp_path, SPACE, chain(SPACE, 1))
    manifest = folder(path, SPACE) / "about.json"
    assert json.loads(manifest.read_text()) == {"model": "tiny-model", "engine": "vllm 0.32.0"}
    assert manifest.stat().st_mode & 0o777 == 0o600
    assert run(["purge", "--all", "--yes", "--path", str(path)]) == 0
    assert [entry.name for entry in path.iterdir()] == ["lock"]


def test_a_directory_that_is_full_serves_without_a_manifest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> int:
        raise OSError(28, "No space left on device")

    async def look() -> None:
        tier, _ = await disk_kit.opened(disk_kit.make_config(tmp_path), SPACE.digest)
        with monkeypatch.context() as patch:
            patch.setattr("tierkv.tiers.disk.volume.os.pwrite", full)
            await tier.describe({"model": "m"})
        await disk_kit.save(tier, disk_kit.CHUNKS[0])
        assert (await disk_kit.load(tier, disk_kit.CHUNKS[0]))[1] is not None
        await tier.close()

    asyncio.run(look())
