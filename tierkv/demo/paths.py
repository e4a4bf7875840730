# SPDX-License-Identifier: Apache-2.0
"""Where the demo keeps its files: everything below one directory that can be deleted whole."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from fcntl import LOCK_EX, LOCK_NB, flock
from pathlib import Path

from tierkv.errors import TierKVError


class DemoError(TierKVError):
    """The demo cannot go on. The message is what the user reads: what, where, what to do."""


def cache_dir(env: Mapping[str, str] = os.environ) -> Path:
    """`$TIERKV_CACHE`, else `$XDG_CACHE_HOME/tierkv`, else `~/.cache/tierkv`; not created here."""
    if own := env.get("TIERKV_CACHE"):
        return Path(own).expanduser().absolute()
    # The XDG specification says to ignore a relative path.
    base = env.get("XDG_CACHE_HOME", "")
    root = Path(base) if base.startswith("/") else Path("~/.cache").expanduser()
    return root / "tierkv"


def make_dir(path: Path) -> Path:
    """Create `path` with its parents.

    Raises:
        DemoError: it cannot be created or written; names the variable that moves it.
    """
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise DemoError(
            f"{path}: cannot be created ({error.strerror}); set TIERKV_CACHE to a writable one"
        ) from error
    if not os.access(path, os.W_OK | os.X_OK):
        raise DemoError(f"{path}: not writable; set TIERKV_CACHE to a writable directory")
    return path


@contextmanager
def locked(path: Path, *, wait: bool) -> Iterator[None]:
    """Hold an exclusive lock on the file `path`; the kernel lets go when the process dies.

    Raises:
        DemoError: `wait` is false and another process holds it.
    """
    with path.open("a") as file:
        try:
            flock(file, LOCK_EX if wait else LOCK_EX | LOCK_NB)
        except BlockingIOError as error:
            raise DemoError(
                f"{path}: held by another run; wait for it, or set TIERKV_CACHE to another one"
            ) from error
        yield
