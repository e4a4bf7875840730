# SPDX-License-Identifier: Apache-2.0
"""How much memory there is, by made-up /proc and /sys/fs/cgroup."""

from __future__ import annotations

from pathlib import Path

import pytest

from tierkv.config.memory import Memory, measure


@pytest.fixture
def system(tmp_path: Path) -> tuple[Path, Path]:
    proc, cgroup = tmp_path / "proc", tmp_path / "cgroup"
    (proc / "self").mkdir(parents=True)
    cgroup.mkdir()
    (proc / "meminfo").write_text("MemTotal: 1000 kB\nMemFree: 10 kB\nMemAvailable: 600 kB\n")
    return proc, cgroup


def write(folder: Path, **files: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name.replace("__", ".")).write_text(text)


def test_without_control_groups_the_machine_is_the_limit(system: tuple[Path, Path]) -> None:
    assert measure(*system) == Memory(1_024_000, 614_400, False)


def test_the_tightest_group_above_the_process_is_the_limit(system: tuple[Path, Path]) -> None:
    proc, cgroup = system
    (proc / "self" / "cgroup").write_text("0::/pod/box\n")
    write(cgroup / "pod", memory__max="500000\n", memory__current="200000\n")
    write(cgroup / "pod" / "box", memory__max="max\n", memory__current="100\n")
    write(cgroup / "pod", memory__stat="anon 1\ninactive_file 50000\n")
    assert measure(proc, cgroup) == Memory(500_000, 350_000, True)


def test_in_a_container_only_the_root_of_the_hierarchy_is_there(system: tuple[Path, Path]) -> None:
    proc, cgroup = system
    (proc / "self" / "cgroup").write_text("4:memory:/docker/abc\n3:cpuset:/\n0::/\n")
    write(
        cgroup / "memory",
        memory__limit_in_bytes="400000\n",
        memory__usage_in_bytes="390000\n",
        memory__stat="inactive_file 1\ntotal_inactive_file 90000\n",
    )
    assert measure(proc, cgroup) == Memory(400_000, 100_000, True)


def test_a_limit_beyond_the_machine_is_none(system: tuple[Path, Path]) -> None:
    proc, cgroup = system
    (proc / "self" / "cgroup").write_text("4:memory:/\n")
    write(
        cgroup / "memory", memory__limit_in_bytes="9223372036854771712", memory__usage_in_bytes="5"
    )
    assert measure(proc, cgroup) == Memory(1_024_000, 614_400, False)


def test_a_group_that_is_over_its_limit_has_nothing_free(system: tuple[Path, Path]) -> None:
    proc, cgroup = system
    (proc / "self" / "cgroup").write_text("0::/\n")
    write(cgroup, memory__max="1000", memory__current="2000")
    assert measure(proc, cgroup) == Memory(1000, 0, True)


def test_a_group_cannot_have_more_free_than_its_limit(system: tuple[Path, Path]) -> None:
    # The two files are read one after the other: the cache can have grown in between.
    proc, cgroup = system
    (proc / "self" / "cgroup").write_text("0::/\n")
    write(cgroup, memory__max="1000", memory__current="20", memory__stat="inactive_file 90")
    assert measure(proc, cgroup) == Memory(1000, 1000, True)
