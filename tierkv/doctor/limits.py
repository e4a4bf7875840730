# SPDX-License-Identifier: Apache-2.0
"""What this process may have, as far as it matters."""

from __future__ import annotations

import contextlib
import os
import resource
from collections.abc import Iterator
from typing import Any

from tierkv.config import memory
from tierkv.config.units import approximate_size
from tierkv.doctor.finding import Finding, warning

LEAST_FILES = 1024
"""vLLM's sockets, a server's clients, and a few dozen of ours."""

LEAST_SHARED_BYTES = 256 << 20
"""vLLM's message queue between its workers takes 160 MiB in /dev/shm (10 chunks of 16 MiB)."""

SHARED = "/dev/shm"


def look(workers: int) -> Iterator[Finding]:
    """Limits that are too low.

    Args:
        workers: processes that vLLM would start to compute.
    """
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if files != resource.RLIM_INFINITY and files < LEAST_FILES:
        yield warning(
            "open-files",
            "ulimit -n",
            f"only {files} open files are allowed: a busy server runs out of them",
            "start the server after: ulimit -n 65536",
        )
    room = _shared_bytes()
    if workers > 1 and room is not None and room < LEAST_SHARED_BYTES:
        yield warning(
            "shared-memory",
            SHARED,
            f"has {approximate_size(room)} free, and vLLM's {workers} workers talk through it: "
            "they may die with a bus error",
            "start the container with --shm-size 1g, or --ipc host",
        )


def facts() -> dict[str, Any]:
    """The machine in numbers, for a bug report; bytes, None for no limit or not known."""
    total = available = None
    with contextlib.suppress(OSError):
        here = memory.measure()
        total, available = here.total, here.available
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    locked, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    unlimited = resource.RLIM_INFINITY
    return {
        "memory_bytes": total,
        "memory_available_bytes": available,
        # Of no consequence for CUDA, which pins memory without it; but people ask.
        "locked_memory_limit_bytes": None if locked == unlimited else locked,
        "open_files_limit": None if files == unlimited else files,
        "shared_memory_free_bytes": _shared_bytes(),
        "cpus": len(os.sched_getaffinity(0)),
    }


def _shared_bytes() -> int | None:
    try:
        found = os.statvfs(SHARED)
    except OSError:
        return None
    return found.f_bavail * found.f_frsize
