# SPDX-License-Identifier: Apache-2.0
"""Processes on a disk tier, with faults from strace, and the judge of what they served."""

from __future__ import annotations

import asyncio
import json
import shutil
import subprocess
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest

from tierkv.config.disk import DiskConfig
from tierkv.pages.layout import SlotLayout
from tierkv.testing.may_forget import MayForget
from tierkv.testing.samples import make_chunks, make_parts, make_payload
from tierkv.tiers.base import Outcome, TierReport
from tierkv.tiers.disk import DiskTier

NAMESPACE = b"fault-test-space"
LAYOUT = SlotLayout(chunk_tokens=4, block_tokens=2, block_bytes=6000, ranks=2)
SLOT_BYTES = 4096 + 2 * 12288
CHUNKS = make_chunks(12, LAYOUT)
ROOT = Path(__file__).parents[2]
FOLDER = f"{NAMESPACE.hex()}-v1"
GUARD_SECONDS = 120
"""Ends a child that hangs; no test depends on how long anything takes."""

READS = "preadv,preadv2"
RECORD_WRITES = "pwritev,pwritev2"


def make_config(path: Path, slots: int = 6, **options: Any) -> DiskConfig:
    """Room for exactly `slots` chunks; fewer than there are, so that slots are reused."""
    capacity = 65536 + slots * (SLOT_BYTES + 128 + 8 + 32)
    return DiskConfig(**{"path": path, "capacity": capacity, "min_free": 0} | options)


def digest(parts: Iterable[memoryview]) -> str:
    return sha256(b"".join(parts)).hexdigest()


def strace_or_skip() -> None:
    if shutil.which("strace") is None:
        pytest.skip("NOT TESTED: strace is not installed (apt-get install strace)")
    probe = subprocess.run(["strace", "-o", "/dev/null", "true"], capture_output=True, check=False)
    if probe.returncode:
        pytest.skip(f"NOT TESTED: strace may not trace here: {probe.stderr.decode().strip()}")


def inject(calls: str, fault: str) -> list[str]:
    """The strace command that injects `fault`; `when=N` counts each call and each thread apart."""
    quiet = ["strace", "-f", "-qq", "-o", "/dev/null", f"-etrace={calls}"]
    if "signal=" not in fault:
        quiet.append("--seccomp-bpf")  # fast, but strace 6.1 then sends the signal only for when=1
    return [*quiet, f"-einject={calls}:{fault}"]


def start(options: dict[str, Any], strace: Sequence[str] = ()) -> subprocess.Popen[str]:
    """A child process (see `disk_child`)."""
    return subprocess.Popen(
        [*strace, sys.executable, "-m", "tests.fault.disk_child", json.dumps(options)],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


@dataclass
class Run:
    """A child that has ended: its lines, its status, and its counts if it came to its end."""

    lines: list[str]
    status: int
    counts: dict[str, int] | None = None


def work_each(trials: list[dict[str, Any]], strace: Sequence[str]) -> None:
    """Many children, one after the other, forked from one process; each writes to its `log`."""
    command = [*strace, sys.executable, "-m", "tests.fault.disk_child", json.dumps(trials)]
    subprocess.run(command, cwd=ROOT, timeout=GUARD_SECONDS, check=True)


def work(options: dict[str, Any], strace: Sequence[str] = ()) -> Run:
    """Start a child and wait for its end."""
    with start(options, strace) as child:
        try:
            output, _ = child.communicate(timeout=GUARD_SECONDS)
        except subprocess.TimeoutExpired:
            child.kill()
            raise
    run = Run(output.splitlines(), child.returncode)
    if run.lines and run.lines[-1].startswith("end "):
        run.counts = json.loads(run.lines[-1][4:])
    return run


@dataclass
class Judge:
    """What all children of a test may have left: `MayForget` over digests, outside the tier."""

    model: MayForget = field(default_factory=MayForget)

    def replay(self, lines: Iterable[str]) -> None:
        """Take over what a child said, and judge its loads."""
        for line in lines:
            word, *rest = line.split(" ")
            if word == "save":
                number, version = map(int, rest)
                value = digest(make_payload(CHUNKS[number], LAYOUT, version=version))
                self.model.saving(CHUNKS[number].key, value.encode())
            elif word == "evicted":
                self.model.evicted(CHUNKS[int(rest[0])].key)
            elif word == "loaded":
                got = None if rest[1] == "-" else rest[1].encode()
                self.model.judge(CHUNKS[int(rest[0])].key, got)

    def reopen(self, config: DiskConfig) -> tuple[TierReport, int]:
        """Open the directory here and judge every chunk; gives the report and how many hit."""

        async def look() -> tuple[TierReport, int]:
            tier = DiskTier(config)
            report = await tier.open(NAMESPACE, LAYOUT)
            hits = 0
            for chunk in CHUNKS:
                parts = make_parts(LAYOUT)
                result = await tier.load(chunk, parts)
                done = result.outcome is Outcome.DONE
                self.model.judge(chunk.key, digest(parts).encode() if done else None)
                hits += done
            await tier.close()
            return report, hits

        return asyncio.run(asyncio.wait_for(look(), GUARD_SECONDS))


def allocated(path: Path) -> int:
    """Bytes that the file system has given to the directory."""
    return sum(p.lstat().st_blocks * 512 for p in [path, *path.rglob("*")])


def files(path: Path) -> list[str]:
    """Everything below the tier's directory."""
    return sorted(str(p.relative_to(path)) for p in path.rglob("*"))


EXPECTED_FILES = [FOLDER, *(f"{FOLDER}/{name}" for name in ("slab", "table", "used")), "lock"]
