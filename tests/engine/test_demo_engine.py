# SPDX-License-Identifier: Apache-2.0
"""The demo with a real vLLM: what it promises, and that it leaves nothing behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.engine, pytest.mark.timeout(1500)]


@pytest.fixture
def short_path() -> Iterator[Path]:
    """A directory with a short name: pytest's own are too long for UNIX sockets below them."""
    with tempfile.TemporaryDirectory(prefix="tk-") as path:
        yield Path(path)


def wait_until(condition: Callable[[], bool]) -> None:
    """Return when `condition` holds; a run that hangs is ended by pytest-timeout."""
    tick = threading.Event()
    while not condition():
        tick.wait(0.1)


def processes_with(text: str) -> list[int]:
    """Living processes that have `text` in their environment."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            try:
                # A process that has ended and was not waited for has no environment left.
                if text.encode() in (entry / "environ").read_bytes():
                    found.append(int(entry.name))
            except OSError:
                continue
    return found


def shared_memory_of(processes: list[int]) -> set[Path]:
    """Files of shared memory that the processes have mapped."""
    lines = "".join(Path(f"/proc/{pid}/maps").read_text() for pid in processes).splitlines()
    return {Path(line.split()[5]) for line in lines if " /dev/shm/" in line}


def start_demo(short_path: Path, model_dir: Path, *arguments: str) -> subprocess.Popen[str]:
    environment = {
        **os.environ,
        "TIERKV_CACHE": str(short_path / "cache"),
        "HOME": str(short_path / "home"),
        "TMPDIR": str(short_path / "tmp"),
    }
    for name in ("home", "tmp"):
        (short_path / name).mkdir()
    command = [sys.executable, "-c", "from tierkv.cli import main; main()", "demo", "--quick"]
    return subprocess.Popen(
        [*command, "--plain", "--model", str(model_dir), *arguments],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def left_behind(short_path: Path) -> list[str]:
    """Files outside the cache directory, and directories in it that only a run needs."""
    outside = [*(short_path / "home").rglob("*"), *(short_path / "tmp").rglob("*")]
    inside = [path for path in (short_path / "cache" / "demo").glob("*") if path.is_dir()]
    return [str(path) for path in [*outside, *inside]]


def test_the_demo_holds_what_it_promises(short_path: Path, model_dir: Path) -> None:
    target = short_path / "demo.json"
    demo = start_demo(short_path, model_dir, "--json", str(target))
    out, messages = demo.communicate()
    assert demo.returncode == 0, out + messages
    result: dict[str, Any] = json.loads(target.read_text())
    assert result["answers_identical"]
    assert all(check["passed"] for check in result["checks"]), result["checks"]
    hits = {phase["name"]: set(phase["hit_tokens"]) for phase in result["phases"]}
    expected = {"apc": {"gpu"}, "dram": {"dram"}, "disk": {"disk"}, "none": set(), "cold": set()}
    assert hits == expected
    assert "FAILED" not in out
    assert processes_with(str(short_path)) == []
    assert left_behind(short_path) == []


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=["ctrl-c", "terminate"])
def test_an_interrupted_demo_leaves_no_process_and_no_file(
    short_path: Path, model_dir: Path, number: signal.Signals
) -> None:
    demo = start_demo(short_path, model_dir)
    assert demo.stderr is not None
    # Servers are up and a request is being answered.
    while "for the first time" not in demo.stderr.readline():
        assert demo.poll() is None
    shared = shared_memory_of(processes_with(str(short_path)))
    assert shared
    demo.send_signal(number)
    _, messages = demo.communicate()
    assert demo.returncode == 130, messages
    assert "interrupted" in messages
    assert processes_with(str(short_path)) == []
    assert left_behind(short_path) == []
    assert [path for path in shared if path.exists()] == []


def test_the_servers_of_a_killed_demo_end_by_themselves(short_path: Path, model_dir: Path) -> None:
    demo = start_demo(short_path, model_dir)
    # Both servers have been started, and none is ready yet.
    wait_until(lambda: len(processes_with(str(short_path / "cache" / "demo" / "tmp"))) >= 2)
    demo.kill()
    demo.communicate()
    wait_until(lambda: processes_with(str(short_path)) == [])
