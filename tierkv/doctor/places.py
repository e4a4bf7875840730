# SPDX-License-Identifier: Apache-2.0
"""Directories of disk tiers: on which file system, how fast, and who else may read them.

Whether there is room, and whether we may write, `tierkv.config.machine` says.
"""

from __future__ import annotations

import errno
import os
import re
import shlex
import stat
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from tierkv.config.disk import DiskConfig
from tierkv.doctor.finding import Finding, warning
from tierkv.pages.layout import ALIGNMENT
from tierkv.tiers.disk.io import aligned_buffer

IN_MEMORY = frozenset({"tmpfs", "ramfs"})
OVER_THE_NETWORK = re.compile(r"nfs4?|cifs|smb3|smbfs|9p|ceph|lustre|gpfs|glusterfs|afs|fuse\..*")

SLOW_BYTES_PER_S = 200e6
"""A current model has some 100 KB of KV a token, and even a small GPU computes 2,000 a second."""

SAMPLE_BYTES = 32 << 20
SAMPLE_STEP = 4 << 20
MOST_SECONDS = 2.0
"""After that the disk is slow, whatever the rest would give."""


def look_at(tier: DiskConfig, clock: Callable[[], float] = time.perf_counter) -> Iterator[Finding]:
    """What there is to say about the tier's directory, or the one that it would be made in."""
    folder = tier.path
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    if not folder.is_dir():
        return
    yield from _privacy(tier.path)
    kind = file_system(folder)
    if kind in IN_MEMORY:
        yield warning(
            "disk-in-memory",
            str(tier.path),
            f"lies on {kind}, which is memory: nothing survives a restart of the machine, and it "
            "takes the room that DRAM could use",
            "set path to a directory on a disk, or leave the tier out and give DRAM more",
        )
    elif kind == "overlay":
        yield warning(
            "disk-in-container",
            str(tier.path),
            "lies in the container's own layer (overlay), which is slow and goes with it",
            "mount a volume there",
        )
    elif OVER_THE_NETWORK.fullmatch(kind):
        yield warning(
            "disk-network",
            str(tier.path),
            f"lies on {kind}, a file system over the network: slower than most prefills, and its "
            "locks may not keep two engines apart",
            "set path to a local disk; to share a cache between machines, use a redis tier",
        )
    yield from _input_output(tier, folder, kind, clock)


def file_system(folder: Path) -> str:
    """Name of the file system that a directory is on, "" if it cannot be told."""
    try:
        lines = Path("/proc/self/mountinfo").read_text().splitlines()
        device = folder.stat().st_dev
        resolved = folder.resolve()
    except OSError:
        return ""
    wanted = f"{os.major(device)}:{os.minor(device)}"
    best, kind = -1, ""
    for line in lines:
        fields, _, rest = line.partition(" - ")
        point = Path(re.sub(r"\\(\d{3})", lambda m: chr(int(m[1], 8)), fields.split()[4]))
        # The device number decides, but on btrfs, whose own numbers are not in the list.
        fits = resolved.is_relative_to(point)
        rank = len(point.parts) + (1000 if fields.split()[2] == wanted else 0)
        if fits and rank >= best:
            best, kind = rank, rest.split()[0]
    return kind


def _privacy(path: Path) -> Iterator[Finding]:
    try:
        mode = stat.S_IMODE(path.stat().st_mode)
        inner = [
            entry for folder in path.iterdir() if folder.is_dir() for entry in folder.iterdir()
        ]
        loose = [each for each in inner if stat.S_IMODE(each.lstat().st_mode) & 0o044]
    except OSError:
        return  # not there yet, or not ours: told elsewhere
    if mode & 0o055 and not mode & 0o022:
        yield warning(
            "disk-readable",
            str(path),
            f"may be looked into by others (mode {mode:04o})",
            f"run: chmod 700 {shlex.quote(str(path))}",
        )
    if loose:
        yield warning(
            "disk-readable",
            str(loose[0]),
            "may be read by others; stored KV is as private as the prompt it was made from",
            f"run: chmod -R go= {shlex.quote(str(path))}",
        )


def _input_output(
    tier: DiskConfig, folder: Path, kind: str, clock: Callable[[], float]
) -> Iterator[Finding]:
    flags = os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC
    try:
        fd = os.open(folder, flags, 0o600)
    except OSError:
        return  # no files without a name here, or no right to write: nothing can be said
    os.close(fd)
    try:
        fd = os.open(folder, flags | os.O_DIRECT, 0o600)
    except OSError as error:
        if tier.direct_io == "auto" and error.errno == errno.EINVAL:
            yield _no_direct_io(tier, kind)
        return
    try:
        rate = _reading_rate(fd, clock)
    except OSError as error:
        if tier.direct_io == "auto" and error.errno == errno.EINVAL:
            yield _no_direct_io(tier, kind)
        return
    finally:
        os.close(fd)
    if rate < SLOW_BYTES_PER_S and kind not in IN_MEMORY:
        yield warning(
            "disk-slow",
            str(tier.path),
            f"reads {rate / 1e6:.0f} MB/s just now: computing may be faster than loading, and such "
            "loads are skipped",
            "set path to a faster disk (NVMe); 'tierkv bench tiers' measures it properly",
        )


def _no_direct_io(tier: DiskConfig, kind: str) -> Finding:
    return warning(
        "disk-direct-io",
        str(tier.path),
        f"{kind or 'the file system'} has no O_DIRECT: chunks pass through the page cache, which "
        "takes memory and a copy",
        "set path to ext4 or xfs, or set direct_io: never if that is meant",
    )


def _reading_rate(fd: int, clock: Callable[[], float]) -> float:
    """Bytes a second of a small sample, read as the tier reads."""
    buffer = aligned_buffer(SAMPLE_STEP)
    buffer[:] = os.urandom(ALIGNMENT) * (SAMPLE_STEP // ALIGNMENT)
    started, written = clock(), 0
    while written < SAMPLE_BYTES and clock() - started < MOST_SECONDS:
        written += os.pwrite(fd, buffer, written)
    started, done = clock(), 0
    while done < written:
        done += os.preadv(fd, [buffer], done)
        if clock() - started > MOST_SECONDS:
            break
    return done / max(clock() - started, 1e-9)
