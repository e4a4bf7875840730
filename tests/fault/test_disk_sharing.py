# SPDX-License-Identifier: Apache-2.0
"""Two processes, one directory: the second is told who holds it, and a killed one holds nothing."""

from __future__ import annotations

from pathlib import Path

from tests.fault.disk_kit import Judge, make_config, start, work

SEED = 5
OPTIONS = {"seed": SEED, "steps": 10}


def test_the_second_process_is_refused_and_the_lock_of_a_killed_one_is_free(tmp_path: Path) -> None:
    print(f"seed {SEED}")
    path, judge = tmp_path / "kv", Judge()
    options = OPTIONS | {"path": str(path)}
    with start(options | {"stay": True}) as first:
        assert first.stdout is not None
        lines = [first.stdout.readline() for _ in range(3)]
        assert lines[0] == "opened 0\n"
        second = work(options)
        told = (
            f"refused disk: {path} is in use by process {first.pid}; give this engine a directory "
            f"of its own, such as path: {path}/engine-2"
        )
        assert second.lines == [told]
        beside = work(options | {"path": str(path / "engine-2")})
        assert beside.counts is not None
        first.kill()
        lines += first.stdout.readlines()
    judge.replay(line.rstrip("\n") for line in lines if line.endswith("\n"))
    third = work(options | {"first_version": 100})
    assert third.counts is not None
    judge.replay(third.lines)
    judge.reopen(make_config(path))
    assert judge.model.hits > 0
