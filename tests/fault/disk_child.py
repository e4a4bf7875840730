# SPDX-License-Identifier: Apache-2.0
"""A process that works on a disk tier and says on standard output what it does, line by line.

    python -m tests.fault.disk_child '{"path": "...", "seed": 1, "steps": 20, ...}'

Given a list of such objects it forks a process for each, one after the other.

It says what it begins (`save 3 17`) and what came of it (`saved 3 17 done -`). Whoever reads that
knows what the tier may hold, whenever the process dies. The last line is `end` and a JSON object.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import resource
import signal
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from tests.fault.disk_kit import CHUNKS, LAYOUT, NAMESPACE, digest, make_config
from tierkv.errors import TierError
from tierkv.testing.samples import make_parts, make_payload
from tierkv.tiers.base import Outcome
from tierkv.tiers.disk import DiskTier
from tierkv.tiers.disk.volume import Volume


def say(*words: object) -> None:
    # One unbuffered write a line: a killed process has said all it did.
    os.write(1, (" ".join(map(str, words)) + "\n").encode())


class Work:
    """Seeded operations, `tasks` at a time, never two on one key."""

    def __init__(self, tier: DiskTier, options: dict[str, Any]) -> None:
        self.tier = tier
        self.random = random.Random(options["seed"])
        self.odds = options.get("odds", [6, 4, 1])
        self.counts: Counter[str] = Counter()
        self.busy: set[int] = set()

    async def work(self, steps: Iterator[int]) -> None:
        for step in steps:
            number = self.random.choice([n for n in range(len(CHUNKS)) if n not in self.busy])
            operation = self.random.choices([self.save, self.load, self.evict], self.odds)[0]
            self.busy.add(number)
            await operation(number, step)
            self.busy.discard(number)

    async def save(self, number: int, version: int) -> None:
        chunk = CHUNKS[number]
        say("save", number, version)
        result = await self.tier.save(chunk, make_payload(chunk, LAYOUT, version=version))
        say("saved", number, version, result.outcome, result.error or "-")
        self.counts[f"save {result.outcome} {result.error or '-'}"] += 1

    async def load(self, number: int, _: int) -> None:
        parts = make_parts(LAYOUT)
        result = await self.tier.load(CHUNKS[number], parts)
        got = digest(parts) if result.outcome is Outcome.DONE else "-"
        say("loaded", number, got, result.outcome, result.error or "-")
        self.counts[f"load {result.outcome} {result.error or '-'}"] += 1

    async def evict(self, number: int, _: int) -> None:
        held = await self.tier.evict([CHUNKS[number].key])
        say("evicted", number)
        self.counts["evicted"] += held


async def main(options: dict[str, Any]) -> None:
    for name, limit in options.get("limits", {}).items():
        number = getattr(resource, f"RLIMIT_{name}")
        resource.setrlimit(number, (limit, resource.getrlimit(number)[1]))
    tier = DiskTier(make_config(Path(options["path"]), **options.get("config", {})))
    try:
        report = await tier.open(NAMESPACE, LAYOUT)
    except TierError as error:
        say("refused", error)
        return
    say("opened", report.recovered_chunks)
    work = Work(tier, options)
    first = options.get("first_version", 0)
    steps = iter(range(first, first + options["steps"]))
    await asyncio.gather(*[work.work(steps) for _ in range(options.get("tasks", 1))])
    if options.get("stay"):
        sys.stdin.readline()
    counts = work.counts | {"chunks": tier.usage().chunks, "table kept": tier._volume.persistent}
    await tier.close()
    say("end", json.dumps(counts))


HARMLESS: dict[str, Callable[[int], object]] = {
    "pwritev,pwritev2": lambda fd: os.pwritev(fd, [b"x"], 0),
    "pwrite64": lambda fd: os.pwrite(fd, b"x", 0),
    "ftruncate": lambda fd: os.ftruncate(fd, 1),
    "fallocate": lambda fd: os.posix_fallocate(fd, 0, 1),
    "fdatasync": os.fdatasync,
}
"""One call of each kind that changes nothing of the tier's."""


def advance_counter(calls: str, times: int) -> None:
    """Make harmless calls on the tier's thread before it opens.

    strace kills at the Nth call, the same N for all trials; the more of them are harmless, the
    earlier the tier's own call that is hit.
    """
    opening = Volume.open

    def late(*args: Any) -> Any:
        scratch = os.memfd_create("scratch")
        for _ in range(times):
            HARMLESS[calls](scratch)
        os.close(scratch)
        return opening(*args)

    Volume.open = late  # type: ignore[method-assign, assignment]


def fork_each(trials: list[dict[str, Any]]) -> None:
    for trial in trials:
        said, saying = os.pipe()
        child = os.fork()
        if child == 0:
            os.dup2(saying, 1)
            os.close(said)
            if "calls" in trial:
                advance_counter(trial["calls"], trial["harmless"])
            asyncio.run(main(trial))
            os._exit(0)
        os.close(saying)
        with open(said) as lines, open(trial["log"], "w") as log:
            for number, line in enumerate(lines, 1):
                log.write(line)
                if number == trial.get("kill_after"):
                    os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


if __name__ == "__main__":
    given = json.loads(sys.argv[1])
    if isinstance(given, list):
        fork_each(given)
    else:
        asyncio.run(main(given))
