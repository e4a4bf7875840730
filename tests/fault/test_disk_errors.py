# SPDX-License-Identifier: Apache-2.0
"""Errors from the kernel at the Nth call, short and lying calls, limits: a miss and a count."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.fault.disk_kit import (
    READS,
    RECORD_WRITES,
    Judge,
    Run,
    allocated,
    inject,
    make_config,
    strace_or_skip,
    work,
)

SEED = 77
OPTIONS: dict[str, Any] = {"seed": SEED, "steps": 60, "config": {"io_threads": 1}}


def judged(tmp_path: Path, calls: str, fault: str, **options: Any) -> dict[str, int]:
    """Run a child with the fault, judge it, restart without and judge again; its counts."""
    strace_or_skip()
    print(f"seed {SEED}, {calls}:{fault}")
    path, judge = tmp_path / "kv", Judge()
    run: Run = work(OPTIONS | {"path": str(path)} | options, inject(calls, fault))
    assert run.counts is not None, run
    judge.replay(run.lines)
    config = make_config(path)
    judge.reopen(config)
    assert allocated(path) <= config.capacity
    print(run.counts)
    return run.counts


def errors(counts: dict[str, int], operation: str) -> dict[str, int]:
    """How often an operation ended with each error kind."""
    found: dict[str, int] = {}
    for name, count in counts.items():
        words = name.split(" ")
        if words[0] == operation and len(words) == 3 and words[2] != "-":
            found[words[2]] = found.get(words[2], 0) + count
    return found


def test_a_failing_read_is_a_counted_miss(tmp_path: Path) -> None:
    # The first read of the thread is the probe for O_DIRECT.
    counts = judged(tmp_path, READS, "error=EIO:when=4..20+4")
    assert set(errors(counts, "load")) == {"eio"}
    assert not errors(counts, "save")
    assert counts["load done -"] > 0


def test_reads_that_all_fail_are_all_misses(tmp_path: Path) -> None:
    counts = judged(tmp_path, READS, "error=EIO:when=2+")
    assert set(errors(counts, "load")) == {"eio"}
    assert "load done -" not in counts
    assert counts["save done -"] > 0


@pytest.mark.parametrize("when", ["2", "3..9+2", "1+"])
def test_a_full_disk_refuses_saves_and_serves_loads(tmp_path: Path, when: str) -> None:
    counts = judged(tmp_path, RECORD_WRITES, f"error=ENOSPC:when={when}")
    assert errors(counts, "save") == {"enospc": 1}  # then it pauses, for longer than this run
    assert counts["save refused -"] > 0
    assert not errors(counts, "load")
    assert counts["table kept"]


def test_a_failing_write_is_a_counted_failure_and_leaves_nothing(tmp_path: Path) -> None:
    counts = judged(tmp_path, RECORD_WRITES, "error=EIO:when=2+3")
    assert set(errors(counts, "save")) == {"eio"}
    assert counts["save done -"] > 0
    assert counts["load done -"] > 0
    assert not errors(counts, "load")


def test_a_failing_write_of_the_table_serves_nothing_wrong(tmp_path: Path) -> None:
    # The first ones are the lock's, the slab's and the table's pages.
    counts = judged(tmp_path, "pwrite64", "error=EIO:when=5+4")
    assert set(errors(counts, "save")) == {"eio"}


def test_a_failing_sync_gives_the_table_up_and_is_not_tried_again(tmp_path: Path) -> None:
    counts = judged(tmp_path, "fdatasync", "error=EIO:when=1", odds=[6, 2, 2])
    assert not counts["table kept"]
    assert not errors(counts, "save")
    assert counts["load done -"] > 0


@pytest.mark.parametrize("claimed", [100, 4096, 28672, 1 << 20])
def test_reads_that_claim_bytes_they_did_not_move_are_not_believed(
    tmp_path: Path, claimed: int
) -> None:
    counts = judged(tmp_path, READS, f"retval={claimed}:when=3+2")
    assert set(errors(counts, "load")) <= {"eio", "checksum", "format", "key_mismatch"}
    assert errors(counts, "load")
    assert counts["save done -"] > 0


@pytest.mark.parametrize("claimed", [100, 4096, 28672])
def test_writes_that_claim_bytes_they_did_not_move_are_found_by_the_load(
    tmp_path: Path, claimed: int
) -> None:
    counts = judged(tmp_path, RECORD_WRITES, f"retval={claimed}:when=1+2")
    assert errors(counts, "load") or errors(counts, "save")


@pytest.mark.parametrize("direct_io", ["auto", "never"])
def test_a_limit_on_the_file_size_gives_a_true_short_write(tmp_path: Path, direct_io: str) -> None:
    # The slab was made before; now the process may write two slots and a half of it.
    print(f"seed {SEED}")
    path, judge = tmp_path / "kv", Judge()
    options = OPTIONS | {"path": str(path), "config": {"direct_io": direct_io}}
    judge.replay(work(options | {"steps": 1, "odds": [1, 0, 0]}).lines)
    limit = 4096 + 2 * 28672 + 12288
    run = work(options | {"limits": {"FSIZE": limit}, "first_version": 100})
    assert run.counts is not None, run
    judge.replay(run.lines)
    assert errors(run.counts, "save") == {"enospc": 1}
    assert run.counts["chunks"] <= 2
    judge.reopen(make_config(path))


def test_with_too_few_files_it_refuses_to_open_and_says_why(tmp_path: Path) -> None:
    path = tmp_path / "kv"
    run = work(OPTIONS | {"path": str(path), "limits": {"NOFILE": 12}})
    assert run.status == 0, run
    assert [line for line in run.lines if line.startswith("refused") and "Too many open" in line]
    run = work(OPTIONS | {"path": str(path), "limits": {"NOFILE": 32}})
    assert run.counts is not None
    assert run.counts["load done -"] > 0
