# SPDX-License-Identifier: Apache-2.0
"""How much memory this process may use: the machine's, or its control group's where that is less.

In a container /proc/meminfo shows the host; who trusts it is killed.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from pathlib import Path, PurePosixPath


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes.

    Attributes:
        total: most this process could ever have.
        available: what could be taken now without pushing others out.
        limited: a control group is what limits `total`, not the machine.
    """

    total: int
    available: int
    limited: bool


def measure(proc: Path = Path("/proc"), cgroup: Path = Path("/sys/fs/cgroup")) -> Memory:
    """The memory there is now. Reads a few small files; any thread.

    Raises:
        OSError: no /proc/meminfo; not Linux.
    """
    fields = _table(proc / "meminfo")
    if "MemTotal" not in fields:
        raise OSError(f"{proc / 'meminfo'} has no MemTotal")
    total = fields["MemTotal"] << 10
    available = fields.get("MemAvailable", fields.get("MemFree", 0)) << 10
    limited = False
    for limit, used in _limits(proc, cgroup):
        if limit < total:
            total, limited = limit, True
        available = min(available, max(0, limit - used))
    return Memory(total, available, limited)


def _limits(proc: Path, cgroup: Path) -> list[tuple[int, int]]:
    """Limit and use of every control group above this process, versions 1 and 2."""
    try:
        lines = (proc / "self" / "cgroup").read_text().splitlines()
    except OSError:
        return []
    found = []
    for line in lines:
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if controllers == "":
            names = (cgroup, "memory.max", "memory.current", "inactive_file")
        elif "memory" in controllers.split(","):
            root = cgroup / "memory"
            names = (root, "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
        else:
            continue
        # In a container the path is often the host's, and only its root is mounted: try each.
        inner = PurePosixPath(path.lstrip("/"))
        for part in (inner, *inner.parents):
            limit = _group(names[0] / part, *names[1:])
            if limit is not None:
                found.append(limit)
    return found


def _group(folder: Path, limit: str, usage: str, reclaimable: str) -> tuple[int, int] | None:
    try:
        bound = int((folder / limit).read_text())  # "max" is a ValueError: no limit here
        used = int((folder / usage).read_text())
    except (OSError, ValueError):
        return None
    with contextlib.suppress(OSError):
        # Page cache counts as use but is given back on demand.
        used -= _table(folder / "memory.stat").get(reclaimable, 0)
    return bound, max(0, used)


def _table(path: Path) -> dict[str, int]:
    """`name value` lines of a /proc or cgroup file; lines of another form are left out."""
    fields = {}
    for line in path.read_text().splitlines():
        name, *values = line.split()[:2] or ("",)
        if values and values[0].isdigit():
            fields[name.rstrip(":")] = int(values[0])
    return fields
