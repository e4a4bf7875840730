# SPDX-License-Identifier: Apache-2.0
"""Where stats sockets lie, so that nobody has to configure it: one directory a user, 0700.

`$XDG_RUNTIME_DIR/tierkv` where there is one, else `tierkv-UID` in the temporary directory. An
engine and a shell need not share that variable, so who looks for engines looks in both places.
A socket is called after its process: `PID.sock`, `PID-2.sock` for a second engine in it.
"""

from __future__ import annotations

import os
import re
import socket
import stat
from pathlib import Path
from tempfile import gettempdir

from tierkv.stats.protocol import StatsError

_SOCKET = re.compile(r"(\d+)(?:-\d+)?\.sock")
_MAX_PATH = 107
"""Bytes that fit into `sun_path` on Linux, without the zero at its end."""


def candidates() -> list[Path]:
    """Directories in which engines of this user may be, the preferred one first."""
    places = [Path(gettempdir()) / f"tierkv-{os.getuid()}"]
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    if runtime and os.path.isabs(runtime):
        places.insert(0, Path(runtime) / "tierkv")
    return places


def make_directory() -> Path:
    """The first candidate that can be used, made if need be.

    Raises:
        StatsError: there is none; says why.
    """
    why = ""
    for directory in candidates():
        try:
            # Not `parents`: a runtime directory that the system did not make is not one.
            directory.mkdir(mode=0o700, exist_ok=True)
        except OSError as error:
            why = f"{directory}: {error.strerror}"
            continue
        why = _distrust(directory)
        if not why:
            return directory
    raise StatsError(f"no place for the stats socket: {why}; set XDG_RUNTIME_DIR or TMPDIR")


def _distrust(directory: Path) -> str:
    """Why a directory must not be used; "" if it may be."""
    found = os.lstat(directory)
    if not stat.S_ISDIR(found.st_mode):
        return f"{directory} is no directory"
    if found.st_uid != os.getuid():
        return f"{directory} belongs to another user"
    if found.st_mode & 0o077:
        return f"{directory} is open to others; run: chmod 700 {directory}"
    if len(os.fsencode(directory)) + len("/.1234567890-99.sock") > _MAX_PATH:
        return f"{directory} is too long a path for a socket"
    return ""


def bind(directory: Path) -> tuple[socket.socket, Path]:
    """A listening socket under a name of its own, 0600.

    It gets its name when it listens already, so that nobody takes it for a stale one.

    Raises:
        OSError: it cannot be made.
    """
    remove_stale(directory)
    pid = os.getpid()
    temporary = directory / f".{pid}"
    temporary.unlink(missing_ok=True)
    server = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
    try:
        server.bind(str(temporary))
        os.chmod(temporary, 0o600)
        server.listen(16)
        path = directory / f"{pid}.sock"
        number = 1
        while path.exists():
            number += 1
            path = directory / f"{pid}-{number}.sock"
        temporary.rename(path)
    except OSError:
        server.close()
        raise
    return server, path


def find() -> list[Path]:
    """Sockets of the running engines of this user, in the order of their pids."""
    found = []
    for directory in candidates():
        try:
            if not _distrust(directory):
                found += remove_stale(directory)
        except OSError:
            continue
    return sorted(found, key=lambda path: (pid_of(path), path.name))


def pid_of(path: Path) -> int:
    """The process that a socket's name tells, 0 if it tells none."""
    match = _SOCKET.fullmatch(path.name)
    return int(match[1]) if match else 0


def remove_stale(directory: Path) -> list[Path]:
    """Remove sockets that nobody listens on any more; the others."""
    alive = []
    for path in directory.iterdir():
        if not _SOCKET.fullmatch(path.name):
            continue
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
            probe.settimeout(1.0)
            try:
                probe.connect(str(path))
            except (ConnectionRefusedError, FileNotFoundError):
                path.unlink(missing_ok=True)
                continue
            except OSError:  # busy, or not to be opened: its owner's business
                pass
        alive.append(path)
    return alive
