# SPDX-License-Identifier: Apache-2.0
"""One engine a directory: an advisory lock that ends with its holder, however that ends.

`flock` belongs to the open file, and a forked child shares the open file: a worker that outlives
a killed engine would keep the directory locked. So children give their copy up right after fork.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import weakref
from pathlib import Path

from tierkv.errors import LockedError, TierError

LOCK_NAME = "lock"

_held: weakref.WeakSet[DirectoryLock] = weakref.WeakSet()


class DirectoryLock:
    """The lock of a directory. Made by `take`; used by one thread at a time."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        _held.add(self)

    @classmethod
    def take(cls, dir_fd: int, path: Path, tier: str) -> DirectoryLock:
        """Lock without waiting.

        Args:
            path: what the directory is called in messages.
            tier: name of the tier, for messages.

        Raises:
            LockedError: somebody holds it; `holder` is the pid they left in the file.
            TierError: the file system has no locks.
        """
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
        fd = os.open(LOCK_NAME, flags, 0o600, dir_fd=dir_fd)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = _read_pid(fd)
            os.close(fd)
            who = f"process {holder}" if holder else "another process"
            raise LockedError(
                f"{path} is in use by {who}; give this engine a directory of its own, such as "
                f"path: {path / 'engine-2'}",
                tier=tier,
                holder=holder,
            ) from None
        except OSError as error:
            os.close(fd)
            raise TierError(
                f"{path} cannot be locked ({error.strerror}); set path to a local file system",
                tier=tier,
            ) from error
        # Best effort: on a full disk the lock still holds, only its holder stays unnamed.
        with contextlib.suppress(OSError):
            os.ftruncate(fd, 0)
            os.pwrite(fd, b"%d\n" % os.getpid(), 0)
        return cls(fd)

    def release(self) -> None:
        """Let go. The file stays: removing it would race with the next holder. Idempotent."""
        _held.discard(self)
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def holder_of(dir_fd: int) -> int | None:
    """Who holds the lock of a directory, without touching it: not even for a moment, in which an
    engine that starts would find it taken.

    Returns:
        The pid that the holder left, 0 if it left none, None if nobody is seen to hold the lock.
        A holder in another container is not seen: the kernel lists only locks of our own.
    """
    try:
        fd = os.open(LOCK_NAME, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=dir_fd)
    except OSError:
        return None
    try:
        found = os.fstat(fd)
        device = f"{os.major(found.st_dev):02x}:{os.minor(found.st_dev):02x}:{found.st_ino}"
        with open("/proc/locks") as locks:
            held = any(" FLOCK " in line and f" {device} " in line for line in locks)
        return (_read_pid(fd) or 0) if held else None
    except OSError:
        return None
    finally:
        os.close(fd)


def _read_pid(fd: int) -> int | None:
    text = os.pread(fd, 32, 0).strip()
    return int(text) if text.isdigit() else None


def _release_in_child() -> None:
    for lock in list(_held):
        lock.release()


os.register_at_fork(after_in_child=_release_in_child)
