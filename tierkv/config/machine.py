# SPDX-License-Identifier: Apache-2.0
"""Whether this machine can do what a valid configuration asks: room, modes, owners, memory.

Needs no engine. It looks and changes nothing; what it finds can be otherwise a second later, so
the tiers check again when they open. Blocks on file system calls; any thread.
"""

from __future__ import annotations

import contextlib
import os
import pwd
import re
import shlex
import stat
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from tierkv.config import memory
from tierkv.config.base import Model, SecretRef
from tierkv.config.disk import DiskConfig
from tierkv.config.dram import DramConfig
from tierkv.config.models import TierKVConfig
from tierkv.config.secrets import resolve_secret
from tierkv.config.units import approximate_size, format_size
from tierkv.errors import ConfigError

_NAMESPACE = re.compile(r"[0-9a-f]{32}-v[0-9]{1,5}")
"""Directories of the disk tier in its own; see `tierkv.tiers.disk.directory`, which is above us."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that does not fit.

    Attributes:
        keys: the way to the value that is to blame.
        path: the same as text, with the type of the tier.
        message: what is wrong and what to do.
        fatal: it cannot work (True) or it probably should not be so (False).
    """

    keys: tuple[str | int, ...]
    path: str
    message: str
    fatal: bool = True


def check_machine(config: TierKVConfig, environ: Mapping[str, str]) -> Iterator[Finding]:
    """What of `config` does not fit this machine."""
    yield from _check_secrets(config, (), "", environ)
    growth: dict[int, int] = {}  # device to bytes that the tiers above will add to it
    for index, tier in enumerate(config.tiers):
        spot = _Spot(index, tier.type)
        yield from _check_secrets(tier, ("tiers", index), f"{spot.path}.", environ)
        if isinstance(tier, DramConfig):
            yield from _check_memory(tier, spot)
        elif isinstance(tier, DiskConfig):
            folder = _directory(tier.path)
            if isinstance(folder, str):
                yield spot.finding("path", folder)
            else:
                yield from _check_room(tier, folder, growth, spot)


@dataclass(frozen=True, slots=True)
class _Spot:
    """A tier of the configuration."""

    index: int
    kind: str

    @property
    def path(self) -> str:
        return f"tiers.{self.index}.{self.kind}"

    def finding(self, field: str, message: str, *, fatal: bool = True) -> Finding:
        keys = ("tiers", self.index, field)
        return Finding(keys, f"{self.path}.{field}", message, fatal)


def _check_secrets(
    model: Model, keys: tuple[str | int, ...], prefix: str, environ: Mapping[str, str]
) -> Iterator[Finding]:
    """Whether every secret that `model` refers to is there and is kept well."""
    for name in type(model).model_fields:
        value = getattr(model, name)
        if isinstance(value, SecretRef):
            yield from _check_secret(value, (*keys, name), prefix + name, environ)
        elif isinstance(value, Model):
            yield from _check_secrets(value, (*keys, name), f"{prefix}{name}.", environ)


def _check_secret(
    ref: SecretRef, keys: tuple[str | int, ...], path: str, environ: Mapping[str, str]
) -> Iterator[Finding]:
    try:
        resolve_secret(ref, environ)
    except ConfigError as error:
        yield Finding(keys, path, str(error).removeprefix("secret: "))
        return
    if ref.file is None:
        return
    mode = stat.S_IMODE(ref.file.stat().st_mode)
    if mode & 0o044:
        remedy = f"run: chmod 600 {_quoted(ref.file)}"
        message = f"{ref.file} may be read by others (mode {mode:04o}); {remedy}"
        yield Finding((*keys, "file"), f"{path}.file", message, fatal=False)


def _check_memory(tier: DramConfig, spot: _Spot) -> Iterator[Finding]:
    try:
        here = memory.measure()
    except OSError:
        return
    size = format_size(tier.capacity)
    owner = "this control group" if here.limited else "this machine"
    if tier.capacity >= here.total:
        yield spot.finding(
            "capacity",
            f"{size} is more than the memory of {owner} ({approximate_size(here.total)}); "
            f"set well below it, like {_below(here.total // 2)}",
        )
    elif tier.capacity > here.available:
        yield spot.finding(
            "capacity",
            f"{size} is more than the memory that is free now "
            f"({approximate_size(here.available)} in {owner}); set less or stop what uses it",
            fatal=False,
        )


def _directory(path: Path) -> Path | str:
    """The directory whose file system the tier will use, or why it cannot use any."""
    folder = path
    try:
        while not os.path.lexists(folder) and folder != folder.parent:
            folder = folder.parent
        found = folder.stat()
    except OSError as error:
        reason = error.strerror or type(error).__name__
        return f"{path} cannot be reached ({reason}: {folder}); give another path"
    if not stat.S_ISDIR(found.st_mode):
        return f"{folder} is not a directory; give the path of one"
    me = _user(os.geteuid())
    if folder != path:
        if os.access(folder, os.W_OK | os.X_OK):
            return folder
        return (
            f"{path} does not exist and {folder} is not writable for {me}; "
            f"run: sudo install -d -m 700 -o {me} {_quoted(path)}"
        )
    if path.is_symlink():
        return f"{path} is a symbolic link; give {path.resolve()}"
    if found.st_uid != os.geteuid():
        owner = _user(found.st_uid)
        return f"{path} is owned by {owner}, not by {me}; run as {owner}, or give another path"
    mode = stat.S_IMODE(found.st_mode)
    if mode & 0o022:
        # /tmp and its like belong to everybody and must stay so.
        shared = mode & stat.S_ISVTX
        own = f"give a directory in it, like {path / 'tierkv'}"
        remedy = own if shared else f"run: chmod 700 {_quoted(path)}"
        return f"{path} may be written by others (mode {mode:04o}); {remedy}"
    if not os.access(path, os.R_OK | os.W_OK | os.X_OK):
        return f"{path} is not writable (mode {mode:04o}); run: chmod 700 {_quoted(path)}"
    return path


def _check_room(
    tier: DiskConfig, folder: Path, growth: dict[int, int], spot: _Spot
) -> Iterator[Finding]:
    device = folder.stat().st_dev
    system = os.statvfs(folder)
    own = _allocated(tier.path)
    others = growth.get(device, 0)
    room = max(0, system.f_bavail * system.f_frsize + own - tier.min_free - others)
    growth[device] = others + max(0, tier.capacity - own)
    if tier.capacity <= room:
        return
    kept = f"min_free {format_size(tier.min_free)} is kept"
    if others:
        kept += f", {approximate_size(others)} go to the tiers above"
    remedy = f"set at most {_below(room)}, or free space" if room >= 1 << 20 else "free space"
    yield spot.finding(
        "capacity",
        f"{format_size(tier.capacity)} is more than the room in the file system of {folder} "
        f"({approximate_size(room)}; {kept}); {remedy}",
    )


def _allocated(folder: Path) -> int:
    """Bytes on disk of what an earlier run left in `folder`: the slabs count as room."""
    total = 0
    # It may not exist yet, or be changed under our eyes: then it is not there.
    with contextlib.suppress(OSError), os.scandir(folder) as entries:
        for entry in entries:
            if not entry.is_dir(follow_symlinks=False) or not _NAMESPACE.fullmatch(entry.name):
                continue
            with contextlib.suppress(OSError), os.scandir(entry.path) as files:
                total += sum(file.stat(follow_symlinks=False).st_blocks * 512 for file in files)
    return total


def _below(size: int) -> str:
    """A size of at most `size` that reads well: whole units, two digits at least."""
    for shift, unit in ((40, "TiB"), (30, "GiB"), (20, "MiB")):
        if size >> shift >= 10:
            return f"{size >> shift}{unit}"
    return f"{max(1, size >> 20)}MiB"


def _user(uid: int) -> str:
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return f"uid {uid}"


def _quoted(path: Path) -> str:
    return shlex.quote(str(path))
