# SPDX-License-Identifier: Apache-2.0
"""kill -9 at every write, and at any time under load: old, new or a miss, and nothing left over."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from tests.fault.disk_kit import (
    EXPECTED_FILES,
    Judge,
    allocated,
    files,
    inject,
    make_config,
    strace_or_skip,
    work_each,
)

SEED = 4  # three evictions of chunks that are held are among its twelve steps
LOOPS = 20
STEPS = 12


@pytest.mark.parametrize(
    ("calls", "most"),
    [
        ("pwritev,pwritev2", 14),  # records
        ("pwrite64", 30),  # entries of the table, header pages, pid, times of use
        ("ftruncate", 6),
        ("fallocate", 4),
        ("fdatasync", 6),
    ],
)
def test_killed_at_each_call_in_turn_it_comes_back_with_old_new_or_nothing(
    tmp_path: Path, calls: str, most: int
) -> None:
    strace_or_skip()
    print(f"seed {SEED}")
    options = {"slots": 3, "io_threads": 1}
    trials = [
        {
            "path": str(tmp_path / str(number)),
            "log": str(tmp_path / f"{number}.log"),
            "seed": SEED,
            "steps": STEPS,
            "odds": [8, 1, 3],
            "config": options,
            "calls": calls,
            "harmless": most - number,
        }
        for number in range(1, most + 1)
    ]
    work_each(trials, inject(calls, f"signal=SIGKILL:when={most}"))
    ended, hits = [], 0
    for number in range(1, most + 1):
        path = tmp_path / str(number)
        lines = (tmp_path / f"{number}.log").read_text().splitlines()
        ended.append(bool(lines) and lines[-1].startswith("end "))
        judge = Judge()
        judge.replay(lines)
        # Strict: whatever the moment, a killed process leaves nothing damaged.
        report, served = judge.reopen(make_config(path, recover="strict", **options))
        assert report.recovered_chunks == served
        assert files(path) == EXPECTED_FILES
        assert allocated(path) <= make_config(path, **options).capacity
        hits += served
    points = ended.count(False)
    print(f"{calls}: {points} crash points, {hits} chunks served after them, 0 wrong")
    # Each number up to a last one was a crash point, so none was left out.
    assert 0 < points < most
    assert ended == [False] * points + [True] * (most - points)


def test_killed_under_load_again_and_again_it_never_serves_wrong_bytes(tmp_path: Path) -> None:
    print(f"seed {SEED}")
    draw, judge, path = random.Random(SEED), Judge(), tmp_path / "kv"
    trials = [
        {
            "path": str(path),
            "log": str(tmp_path / f"{loop}.log"),
            "seed": draw.randrange(1 << 30),
            "steps": 100_000,
            "first_version": loop * 100_000,
            "tasks": 6,
            "config": {"io_threads": 4},
            "kill_after": draw.randrange(60, 150),
        }
        for loop in range(LOOPS)
    ]
    work_each(trials, [])
    recovered = []
    for loop, trial in enumerate(trials):
        # What the dying process began to say is no line.
        *lines, _ = (tmp_path / f"{loop}.log").read_text().split("\n")
        assert len(lines) >= trial["kill_after"]
        assert not lines[-1].startswith("end ")
        recovered.append(int(lines[0].removeprefix("opened ")))
        judge.replay(lines)
    report, _ = judge.reopen(make_config(path))
    recovered = [*recovered[1:], report.recovered_chunks]
    assert files(path) == EXPECTED_FILES
    assert allocated(path) <= make_config(path).capacity
    print(
        f"{LOOPS} kills, {judge.model.hits} hits, 0 wrong; {sum(recovered)} of {6 * LOOPS} slots "
        f"held a chunk on restart"
    )
    assert sum(recovered) > LOOPS
    assert judge.model.hits > LOOPS
