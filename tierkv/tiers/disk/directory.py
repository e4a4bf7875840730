# SPDX-License-Identifier: Apache-2.0
"""The tier's directory: who may touch it, what lies in it, how many bytes that takes.

    PATH/lock                              who uses the directory
    PATH/<namespace>-v<format>/slab        the chunks of one namespace, in slots
                              /table       what is in which slot
                              /used        when each slot was used last (a hint)
                              /about.json  what the namespace is, for people

Everything else in PATH is somebody else's: never read, counted or removed. Files are opened
relative to held directories and never through a link. All calls block.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import stat
from dataclasses import dataclass
from pathlib import Path

from tierkv.errors import TierError
from tierkv.tiers.disk.lock import LOCK_NAME, DirectoryLock

SLAB, TABLE, USED = FILES = ("slab", "table", "used")
ABOUT = "about.json"
_ALL_FILES = (*FILES, ABOUT)

_NAME = re.compile(r"[0-9a-f]{32}-v(0|[1-9][0-9]{0,4})")
_DIRECTORY_FLAGS = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_SECTOR = 512
"""Unit of `st_blocks`, whatever the file system's own block is."""


def directory_name(namespace: bytes, version: int) -> str:
    """Name of the directory that holds a namespace in a disk format."""
    return f"{namespace.hex()}-v{version}"


@dataclass(frozen=True, slots=True)
class Resident:
    """A namespace in the directory, of any format version.

    Attributes:
        name: of its directory.
        allocated_bytes: as the file system counts them.
        used_ns: wall clock of the last write to one of its files, which opening it is, too.
    """

    name: str
    allocated_bytes: int
    used_ns: int


class Directory:
    """PATH, locked. Made by `open`; used by one thread at a time."""

    def __init__(self, path: Path, tier: str, fd: int, lock: DirectoryLock) -> None:
        self.path = path
        self.fd = fd
        self._tier = tier
        self._lock = lock

    @classmethod
    def open(cls, path: Path, tier: str) -> Directory:
        """Make the directory if it is missing, check it, lock it.

        Raises:
            TierError: not a directory that we alone can write to, or in use (LockedError).
        """
        try:
            for missing in reversed([p for p in (path, *path.parents) if not p.exists()]):
                # A link that points nowhere does not exist, but cannot be made either.
                missing.mkdir(mode=0o700, exist_ok=True)
            if path.is_symlink():
                raise TierError(f"{path} is a symbolic link; set path: {path.resolve()}", tier=tier)
            fd = os.open(path, _DIRECTORY_FLAGS)
        except OSError as error:
            raise _unusable(path, error, tier) from error
        try:
            _check_owner(path, os.fstat(fd), tier)
            _check_mode(path, os.fstat(fd), tier)
            lock = DirectoryLock.take(fd, path, tier)
        except OSError as error:
            os.close(fd)
            raise _unusable(path, error, tier) from error
        except TierError:
            os.close(fd)
            raise
        return cls(path, tier, fd, lock)

    def open_namespace(self, name: str) -> int:
        """Make or open a namespace's directory; returns its descriptor, the caller's to close."""
        with contextlib.suppress(FileExistsError):
            os.mkdir(name, 0o700, dir_fd=self.fd)
        fd = os.open(name, _DIRECTORY_FLAGS, dir_fd=self.fd)
        try:
            _check_owner(self.path / name, os.fstat(fd), self._tier)
            _check_mode(self.path / name, os.fstat(fd), self._tier)
        except TierError:
            os.close(fd)
            raise
        return fd

    def open_file(self, directory: str, directory_fd: int, name: str, flags: int = 0) -> int:
        """Make or open a file of a namespace for reading and writing, mode 0600."""
        path = self.path / directory / name
        flags |= os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
        fd = os.open(name, flags, 0o600, dir_fd=directory_fd)
        found = os.fstat(fd)
        try:
            if not stat.S_ISREG(found.st_mode):
                raise TierError(f"{path} is no file; remove it", tier=self._tier)
            _check_owner(path, found, self._tier)
            if stat.S_IMODE(found.st_mode) != 0o600:
                os.fchmod(fd, 0o600)
        except (OSError, TierError):
            os.close(fd)
            raise
        return fd

    def residents(self) -> list[Resident]:
        """All namespaces here, the least recently used first."""
        measured = [self._measure(name) for name in os.listdir(self.fd) if _NAME.fullmatch(name)]
        found = [resident for resident in measured if resident is not None]
        return sorted(found, key=lambda resident: resident.used_ns)

    def allocated_bytes(self) -> int:
        """What the directory takes of the file system: our files and directories in it."""
        own = os.fstat(self.fd).st_blocks * _SECTOR + _blocks(LOCK_NAME, self.fd)
        return own + sum(resident.allocated_bytes for resident in self.residents())

    def free_bytes(self) -> int:
        """What the file system has left for us."""
        found = os.fstatvfs(self.fd)
        return found.f_bavail * found.f_frsize

    def remove(self, name: str) -> bool:
        """Delete a namespace; False if it could not be. Foreign files in its directory stay."""
        try:
            fd = os.open(name, _DIRECTORY_FLAGS, dir_fd=self.fd)
        except OSError:
            return False
        try:
            # The table first: a slab without its table is nothing, the other way it is damage.
            for file in (TABLE, USED, SLAB, ABOUT):
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(file, dir_fd=fd)
        except OSError:
            return False
        finally:
            os.close(fd)
        with contextlib.suppress(OSError):
            os.rmdir(name, dir_fd=self.fd)
        return True

    def rename(self, name: str, target: str) -> bool:
        """Give a namespace's directory another name; False if that is taken."""
        with contextlib.suppress(FileNotFoundError):
            os.stat(target, dir_fd=self.fd, follow_symlinks=False)
            return False
        os.rename(name, target, src_dir_fd=self.fd, dst_dir_fd=self.fd)
        return True

    def close(self) -> None:
        """Unlock and let go. Idempotent."""
        if self.fd >= 0:
            self._lock.release()
            os.close(self.fd)
            self.fd = -1

    def _measure(self, name: str) -> Resident | None:
        try:
            fd = os.open(name, _DIRECTORY_FLAGS, dir_fd=self.fd)
        except OSError as error:
            if error.errno in (errno.ENOTDIR, errno.ELOOP, errno.ENOENT):
                return None  # a file or link of that name, or gone
            raise  # not to be counted as nothing
        try:
            allocated, used_ns = os.fstat(fd).st_blocks * _SECTOR, 0
            for file in _ALL_FILES:
                with contextlib.suppress(FileNotFoundError):
                    found = os.stat(file, dir_fd=fd, follow_symlinks=False)
                    allocated += found.st_blocks * _SECTOR
                    used_ns = max(used_ns, found.st_mtime_ns)
            # Without any of our files it is nothing of ours.
            return Resident(name, allocated, used_ns) if used_ns else None
        finally:
            os.close(fd)


def _blocks(name: str, directory_fd: int) -> int:
    try:
        return os.stat(name, dir_fd=directory_fd, follow_symlinks=False).st_blocks * _SECTOR
    except FileNotFoundError:
        return 0


# KV at rest is as private as the prompt, and what others can write, others can forge.


def _check_owner(path: Path, found: os.stat_result, tier: str) -> None:
    own = os.geteuid()
    if found.st_uid != own:
        raise TierError(
            f"{path} belongs to uid {found.st_uid}, not to uid {own} of this process; "
            f"chown {own} {path}, or set path to another directory",
            tier=tier,
        )


def _check_mode(path: Path, found: os.stat_result, tier: str) -> None:
    if found.st_mode & 0o022:
        raise TierError(f"{path} can be written by others; chmod go-w {path}", tier=tier)


def _unusable(path: Path, error: OSError, tier: str) -> TierError:
    return TierError(
        f"{path} cannot be used ({error.strerror}); set path to a directory that uid "
        f"{os.geteuid()} can write to",
        tier=tier,
    )
