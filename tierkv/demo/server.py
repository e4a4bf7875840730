# SPDX-License-Identifier: Apache-2.0
"""One `vllm serve` as a child process that cannot be left behind by accident.

The server leads a process group of its own, so that stopping it stops the engine and the workers
too, and holds the reading end of a pipe whose writing end only this process has: when this process
ends in any way, `kill -9` included, the pipe closes and the server stops itself (see `launch`).
Everything the server writes (log, sockets, caches) goes below one directory.
"""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import httpx

from tierkv.demo.paths import DemoError, make_dir

START_TIMEOUT_S = 300.0
STOP_TIMEOUT_S = 60.0
"""Longer than a write-behind to disk of a few hundred MB takes."""
POLL_S = 0.1
LOG_LINES_SHOWN = 15
UNIX_SOCKET_PATH_BYTES = 107
VLLM_SOCKET_NAME_BYTES = 40
"""vLLM's sockets are called after a UUID."""


def cpu_binding() -> str:
    """All CPUs of this process in the form of `VLLM_CPU_OMP_THREADS_BIND`, such as `0-3,8`.

    vLLM's own choice differs with and without a connector (it leaves a core free for one), which
    would compare one core with two.
    """
    runs: list[list[int]] = []
    for cpu in sorted(os.sched_getaffinity(0)):
        if runs and cpu == runs[-1][-1] + 1:
            runs[-1].append(cpu)
        else:
            runs.append([cpu])
    return ",".join(str(r[0]) if len(r) == 1 else f"{r[0]}-{r[-1]}" for r in runs)


def server_environment(folder: Path, base: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Environment of a server that writes nothing outside `folder` and asks no network.

    Raises:
        DemoError: `folder` is too long a path for a UNIX socket.
    """
    if len(os.fsencode(folder / "tmp")) + VLLM_SOCKET_NAME_BYTES > UNIX_SOCKET_PATH_BYTES:
        raise DemoError(
            f"{folder}: too long a path for vLLM's sockets; set TIERKV_CACHE to a shorter one"
        )
    # A TierKV setting of the user's own would make the demo measure something else.
    inherited = {name: value for name, value in base.items() if not name.startswith("TIERKV_")}
    return {
        **inherited,
        "VLLM_CPU_OMP_THREADS_BIND": cpu_binding(),
        "TMPDIR": str(make_dir(folder / "tmp")),
        "XDG_CACHE_HOME": str(folder / "xdg-cache"),
        "XDG_CONFIG_HOME": str(folder / "xdg-config"),
        "TORCHINDUCTOR_CACHE_DIR": str(folder / "inductor"),
        "TRITON_CACHE_DIR": str(folder / "triton"),
        "HF_HOME": str(folder / "hf"),
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        "PYTHONDONTWRITEBYTECODE": "1",
        "PYTHONUNBUFFERED": "1",
    }


class Server:
    """One server process. Use as a context manager; the end of the block stops it.

    Args:
        name: for messages.
        arguments: what follows `vllm serve`.
        port: TCP port on 127.0.0.1.
        folder: everything the server writes goes below it, except what `arguments` says.
        log: file for its output; overwritten.
        environment: variables on top of `server_environment`.
    """

    def __init__(
        self,
        name: str,
        arguments: Sequence[str],
        *,
        port: int,
        folder: Path,
        log: Path,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self.name = name
        self.log = log
        self.url = f"http://127.0.0.1:{port}"
        own = ["--host", "127.0.0.1", "--port", str(port)]
        self._command = [
            sys.executable,
            *("-m", "tierkv.demo.launch", "--end-with-parent", "serve", *arguments, *own),
        ]
        self._environment = {**server_environment(folder), **(environment or {})}
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int | None:
        """Leader of the process group; None when not running."""
        return self._process.pid if self._process else None

    def start(self) -> None:
        """Start the process; returns at once. `wait_ready` follows."""
        with self.log.open("wb") as log:
            log.write(f"$ {shlex.join(self._command)}\n".encode())
            log.flush()
            self._process = subprocess.Popen(
                self._command,
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=self._environment,
                start_new_session=True,
            )

    def wait_ready(self, tick: Callable[[], None] = lambda: None) -> None:
        """Block until the server answers; call `tick` about ten times a second.

        Raises:
            DemoError: it ended or did not answer in time; shows the end of its log.
        """
        deadline = time.monotonic() + START_TIMEOUT_S
        with httpx.Client(trust_env=False, timeout=2.0) as client:
            while time.monotonic() < deadline:
                self.check_alive()
                try:
                    if client.get(f"{self.url}/health").status_code == httpx.codes.OK:
                        return
                except httpx.TransportError:
                    pass  # Not listening yet.
                tick()
                time.sleep(POLL_S)
        raise self.error(f"did not answer within {START_TIMEOUT_S:.0f} s")

    def check_alive(self) -> None:
        """Raise `DemoError` with the end of the log if the process has ended."""
        if self._process is None or (code := self._process.poll()) is None:
            return
        raise self.error(f"ended by itself (exit status {code})")

    def error(self, what: str) -> DemoError:
        """`what` as an error that names the log and shows its last lines."""
        try:
            lines = self.log.read_text(errors="replace").splitlines()[-LOG_LINES_SHOWN:]
        except OSError:
            lines = []
        shown = "\n".join(f"  | {line[:200]}" for line in lines)
        return DemoError(
            f"vllm serve ({self.name}): {what}; its log is {self.log}, which ends:\n{shown}"
        )

    def stop(self, timeout_s: float = STOP_TIMEOUT_S) -> bool:
        """Stop the whole process group and wait until it is gone. May be called twice.

        Args:
            timeout_s: how long it may take to end in order (TierKV writes to disk what is queued).

        Returns:
            False if it had to be killed.
        """
        process = self._process
        if process is None:
            return True
        _signal_group(process.pid, signal.SIGTERM)
        in_order = _wait_gone(process, timeout_s)
        if not in_order:
            # Python's resource trackers are spared at first: they remove the shared memory of
            # those just killed, and end by themselves.
            for pid in _group_members(process.pid):
                if not _is_resource_tracker(pid):
                    _signal_process(pid, signal.SIGKILL)
            if not _wait_gone(process, 5.0):
                _signal_group(process.pid, signal.SIGKILL)
                _wait_gone(process, 5.0)
        if process.stdin:
            process.stdin.close()
        self._process = None
        return in_order

    def keep(self) -> None:
        """Let the server outlive this process."""
        if self._process is None or self._process.stdin is None:
            raise DemoError(f"{self.name}: not running, so it cannot be kept; see {self.log}")
        self._process.stdin.write(b"keep")
        self._process.stdin.close()
        # Popen warns about a child that it did not see end.
        self._process.returncode = 0
        self._process = None

    def __enter__(self) -> Server:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        # After an error or Ctrl-C nobody waits for a write-behind.
        self.stop(STOP_TIMEOUT_S if kind is None else 5.0)


def _signal_process(pid: int, number: int) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, number)


def _signal_group(group: int, number: int) -> None:
    with suppress(ProcessLookupError):
        os.killpg(group, number)


def _group_members(group: int) -> list[int]:
    members = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            # The command name, in parentheses, may itself hold spaces and parentheses.
            state, _, pgrp = (entry / "stat").read_text().rpartition(")")[2].split()[:3]
        except OSError:
            continue  # It ended meanwhile.
        if int(pgrp) == group and state != "Z":
            members.append(int(entry.name))
    return members


def _is_resource_tracker(pid: int) -> bool:
    try:
        return b"multiprocessing.resource_tracker" in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False


def _wait_gone(process: subprocess.Popen[bytes], timeout_s: float) -> bool:
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        # The leader may end long before its workers.
        if process.poll() is not None and not _group_members(process.pid):
            return True
        time.sleep(POLL_S)
    return False
