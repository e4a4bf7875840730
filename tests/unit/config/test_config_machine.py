# SPDX-License-Identifier: Apache-2.0
"""What is asked of this machine: room, modes, owners, memory, secrets."""

from __future__ import annotations

import json
import os
from pathlib import Path
from types import SimpleNamespace

import pytest

from tierkv.config import InvalidConfig, LoadedConfig, load_config
from tierkv.config.memory import Memory

GIB = 1 << 30


@pytest.fixture(autouse=True)
def _this_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """100GiB free on every file system, 64GiB of memory of which 32 are free."""
    monkeypatch.chdir(tmp_path)
    room = SimpleNamespace(f_bavail=100 * GIB // 4096, f_frsize=4096)
    monkeypatch.setattr("tierkv.config.machine.os.statvfs", lambda path: room)
    monkeypatch.setattr("tierkv.config.memory.measure", lambda: Memory(64 * GIB, 32 * GIB, False))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    path = tmp_path / "kv"
    path.mkdir(mode=0o700)
    return path


def check(
    *paths: Path, dram: str = "1GiB", capacity: str = "10GiB", extra: str = "", head: str = ""
) -> LoadedConfig:
    lines = [head + "tiers:", f"  - {{type: dram, capacity: {dram}}}"]
    for number, path in enumerate(paths):
        lines += [f"  - type: disk\n    name: d{number}\n    path: {path}"]
        lines += [f"    capacity: {capacity}{extra}"]
    Path("t.yaml").write_text("\n".join(lines) + "\n")
    return load_config(Path("t.yaml"), environ={"SECRET": "s"}, check_machine=True)


def problem(*paths: Path, **changes: str) -> str:
    with pytest.raises(InvalidConfig) as caught:
        check(*paths, **changes)
    assert len(caught.value.problems) == 1
    return caught.value.problems[0]


# Directories


def test_a_directory_of_ones_own_is_fine(folder: Path) -> None:
    assert check(folder).warnings == []


def test_a_directory_that_can_be_made_is_fine(tmp_path: Path) -> None:
    check(tmp_path / "a" / "b")
    assert not (tmp_path / "a").exists(), "checking must change nothing"


def test_nothing_is_checked_unless_asked_for(tmp_path: Path) -> None:
    (tmp_path / "t.yaml").write_text(
        "tiers:\n  - {type: dram, capacity: 999TiB}\n"
        "  - {type: disk, path: /proc/nope, capacity: 999TiB}\n"
    )
    assert load_config(tmp_path / "t.yaml", environ={}).config.lower


@pytest.mark.parametrize("mode", [0o720, 0o702, 0o777])
def test_a_directory_that_others_can_write_to_is_refused(folder: Path, mode: int) -> None:
    folder.chmod(mode)
    assert problem(folder) == (
        f"t.yaml:5:11: tiers.1.disk.path: {folder} may be written by others "
        f"(mode {mode:04o}); run: chmod 700 {folder}"
    )


def test_of_a_shared_directory_a_subdirectory_is_advised(folder: Path) -> None:
    folder.chmod(0o1777)
    assert problem(folder).endswith(f"(mode 1777); give a directory in it, like {folder}/tierkv")


def test_a_directory_that_others_can_only_read_is_fine(folder: Path) -> None:
    folder.chmod(0o755)
    assert check(folder).warnings == []


def test_a_directory_of_somebody_else_is_refused(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tierkv.config.machine.os.geteuid", lambda: 4_000_000)
    assert " is owned by " in problem(folder)
    assert ", not by uid 4000000; run as " in problem(folder)


def test_a_directory_that_is_not_writable_is_refused(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tierkv.config.machine.os.access", lambda path, mode: False)
    assert problem(folder).endswith(
        f"{folder} is not writable (mode 0700); run: chmod 700 {folder}"
    )
    missing = problem(folder / "new")
    assert f"{folder}/new does not exist and {folder} is not writable for " in missing
    assert missing.endswith(f" {folder}/new")
    assert "; run: sudo install -d -m 700 -o " in missing


def test_a_file_is_no_directory(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    advice = f"{tmp_path}/file is not a directory; give the path of one"
    assert problem(tmp_path / "file").endswith(advice)
    assert problem(tmp_path / "file" / "below").endswith(advice)


def test_a_path_with_a_line_break_stays_on_its_line(folder: Path) -> None:
    folder.chmod(0o777)
    odd = folder.rename(folder.with_name("k\n\x1b[31mv"))
    text = problem(Path(json.dumps(str(odd))))
    assert text.startswith("t.yaml:5:11: tiers.1.disk.path: /")
    assert "/k\\n\\x1b[31mv may be written by others" in text
    assert text.isprintable()


def test_links_are_refused_as_the_tier_refuses_them(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(folder)
    (tmp_path / "broken").symlink_to(tmp_path / "nowhere")
    assert problem(tmp_path / "link").endswith(f"/link is a symbolic link; give {folder}")
    assert "cannot be reached (No such file or directory: " in problem(tmp_path / "broken")


# Room


def test_a_capacity_beyond_the_room_is_refused_with_what_would_fit(folder: Path) -> None:
    assert check(folder, capacity="99GiB").warnings == []
    assert problem(folder, capacity="100GiB") == (
        f"t.yaml:6:15: tiers.1.disk.capacity: 100GiB is more than the room in the file system of "
        f"{folder} (99GiB; min_free 1GiB is kept); set at most 99GiB, or free space"
    )


def test_min_free_is_kept_out_of_the_room(folder: Path) -> None:
    check(folder, capacity="50GiB", extra="\n    min_free: 50GiB")
    assert "(49GiB; min_free 51GiB is kept)" in problem(
        folder, capacity="50GiB", extra="\n    min_free: 51GiB"
    )


def test_without_any_room_no_capacity_is_advised(folder: Path) -> None:
    text = problem(folder, capacity="1MiB", extra="\n    min_free: 1TiB")
    assert text.endswith("(0KiB; min_free 1TiB is kept); free space")


def test_what_an_earlier_run_left_counts_as_room(folder: Path) -> None:
    namespace = folder / ("0" * 32 + "-v1")
    namespace.mkdir()
    slab = namespace / "slab"
    with slab.open("wb") as file:
        os.posix_fallocate(file.fileno(), 0, 64 << 20)
    # 100GiB free, 64MiB ours, 1GiB kept for others.
    check(folder, capacity=f"{99 * 1024 + 64}MiB")
    problem(folder, capacity=f"{99 * 1024 + 65}MiB")


def test_what_others_left_does_not_count_as_room(folder: Path) -> None:
    (folder / "photos").mkdir()
    for file in (folder / "film", folder / "photos" / "slab"):
        with file.open("wb") as out:
            os.posix_fallocate(out.fileno(), 0, 64 << 20)
    problem(folder, capacity=f"{99 * 1024 + 1}MiB")


def test_two_tiers_on_one_file_system_share_its_room(folder: Path, tmp_path: Path) -> None:
    check(folder, tmp_path / "other", capacity="49GiB")
    text = problem(folder, tmp_path / "other", capacity="50GiB")
    assert text.startswith("t.yaml:10:15: tiers.2.disk.capacity: 50GiB is more than the room")
    assert "(49GiB; min_free 1GiB is kept, 50GiB go to the tiers above)" in text


# Memory


def test_more_memory_than_there_is_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    assert problem(dram="64GiB") == (
        "t.yaml:2:28: tiers.0.dram.capacity: 64GiB is more than the memory of this machine "
        "(64GiB); set well below it, like 32GiB"
    )
    monkeypatch.setattr("tierkv.config.memory.measure", lambda: Memory(64 * GIB, 9 * GIB, True))
    assert "the memory of this control group" in problem(dram="65GiB")


def test_more_memory_than_is_free_now_is_a_warning() -> None:
    assert check(dram="32GiB").warnings == []
    assert check(dram="33GiB").warnings == [
        (
            "t.yaml:2:28: tiers.0.dram.capacity: 33GiB is more than the memory that is free now "
            "(32GiB in this machine); set less or stop what uses it"
        )
    ]


# Secrets


def test_the_machine_check_reads_the_secret(tmp_path: Path) -> None:
    file = tmp_path / "key"
    head = f"key_secret: {{file: {file}}}\n"
    assert problem(head=head).startswith(f"t.yaml:1:13: key_secret: {file}: No such file")
    file.write_bytes(b"abc")
    file.chmod(0o600)
    assert check(head=head).warnings == []
    file.chmod(0o640)
    assert check(head=head).warnings == [
        (
            f"t.yaml:1:20: key_secret.file: {file} may be read by others (mode 0640); "
            f"run: chmod 600 {file}"
        )
    ]
    assert check(head="key_secret: {env: SECRET}\n").warnings == []
