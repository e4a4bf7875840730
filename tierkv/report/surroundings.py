# SPDX-License-Identifier: Apache-2.0
"""Where and with what something was measured; nothing that names a person, a host or a path."""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import tierkv
from tierkv.telemetry.build import build_labels


def versions() -> dict[str, str]:
    """Of TierKV and of what it stands on, as far as installed."""
    vllm = build_labels()["vllm"]
    found = {
        "tierkv": tierkv.__version__,
        "vllm": "not installed" if vllm == "none" else vllm,
        "python": platform.python_version(),
    }
    for distribution in ("torch", "transformers"):
        try:
            found[distribution] = version(distribution)
        except PackageNotFoundError:
            continue
    return found


def machine() -> dict[str, str | int]:
    """Processor, memory and system of this machine."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return {
        "cpu": _cpu_name(),
        "cpus_used": len(os.sched_getaffinity(0)),
        "memory_gib": round(memory / 2**30),
        "system": f"{platform.system()} {platform.machine()}",
    }


def machine_text(found: Mapping[str, Any]) -> str:
    """A machine in a few words."""
    return f"{found['cpu']}, {found['cpus_used']} CPUs, {found['memory_gib']} GiB"


def versions_text(found: Mapping[str, Any]) -> str:
    """Versions in a few words."""
    return ", ".join(f"{name} {number}" for name, number in found.items())


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return "unknown"
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor() or "unknown")
