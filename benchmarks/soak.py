# SPDX-License-Identifier: Apache-2.0
"""Random requests against one engine for as long as you like: nothing may leak, no token be wrong.

    python benchmarks/soak.py --minutes 30 --json soak.json

Prompts come from trees that branch anywhere; requests differ in length, tenant, priority, samples
and options; some are aborted at random, caches are reset now and then, and DRAM and disk are so
small that both evict all the time. After every round no block, lease, job or request may be left,
and every greedy answer is compared with an engine without TierKV and without any cache. Rounds are
numbered and seeded: a failure names its round, and `--first ROUND` repeats it.

Memory is sampled every few rounds. On the CPU vLLM itself grows for long, with TierKV or without:
oneDNN, which multiplies its matrices, keeps what it prepared for each batch size, here about 1 MiB
a size until it knows all of them. So the engine computes with every size before memory counts; then
it may fill up to a level, but not go on growing.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import os
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from random import Random
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from tests.engine.engines import REFERENCE_CPU, Engine, Reference, disk, options, tiers
from tests.engine.host import Host
from tests.engine.pairs import generate, loaded_tokens, sampling
from tierkv.demo.model import prepare_random_llama

VOCABULARY = 40_000
REQUESTS = 24
"""In a round."""
BATCH = 256
"""Tokens in a step at most."""
WARM_UP = 5
"""Rounds before memory and file descriptors are held against the engine."""
SAMPLE_EVERY = 10
"""Rounds."""
GROWTH = 2 << 20
"""Bytes by which the last third of the run may use more than the third before it. A leak goes on
growing; in 13,848 requests memory rose by 12 MB in the first quarter of the time and no more."""


@dataclass(frozen=True)
class Wish:
    """One request. `abort_at` is the step at which it is aborted; -1 if never."""

    name: str
    prompt: list[int]
    count: int
    salt: str | None
    priority: int
    abort_at: int
    options: dict[str, Any]

    @property
    def is_compared(self) -> bool:
        return self.abort_at < 0 and not self.options


def words(seed: int, length: int) -> list[int]:
    rng = Random(seed)
    return [rng.randrange(10, VOCABULARY) for _ in range(length)]


def wishes(number: int) -> list[Wish]:
    """The requests of a round, the same whenever it is repeated."""
    rng = Random(number)
    # A few trunks live for many rounds, so that there is something to hit.
    trunks = [words(number // 8 * 4 + i, 900) for i in range(4)]
    found = []
    for i in range(REQUESTS):
        trunk = rng.choice(trunks)
        prompt = trunk[: rng.randrange(0, 800)] + words(
            rng.randrange(1 << 30), rng.randrange(1, 90)
        )
        extra = rng.choice(
            [{}, {}, {}, {}, {"n": 3, "temperature": 0.8}, {"prompt_logprobs": 1},
             {"temperature": 1.0, "top_p": 0.8}, {"logprobs": 2, "stop_token_ids": [7]}]
        )  # fmt: skip
        abort_at = rng.randrange(40) if rng.random() < 0.15 else -1
        salt = rng.choice([None, None, None, "a", "b"])
        found.append(
            Wish(
                f"{number}.{i}",
                prompt,
                rng.randrange(1, 24),
                salt,
                rng.randrange(3),
                abort_at,
                extra,
            )
        )
    return found


def play(host: Host, number: int) -> dict[str, tuple[int, ...]]:
    """One round: answers by name. Raises if anything is left over."""
    rng = Random(number + 1)
    if rng.random() < 0.4:
        host.llm.reset_prefix_cache()
    if rng.random() < 0.03:
        host.forget(tiers=True)
    waiting, step = wishes(number), 0
    aborts: list[tuple[int, str]] = []
    answers: dict[str, tuple[int, ...]] = {}
    while waiting or host.engine.has_unfinished_requests():
        for _ in range(min(len(waiting), rng.randrange(4))):
            wish = waiting.pop(0)
            prompt = {"prompt_token_ids": wish.prompt}
            if wish.salt is not None:
                prompt["cache_salt"] = wish.salt
            params = sampling(max_tokens=wish.count, detokenize=False, **wish.options)
            host.engine.add_request(wish.name, prompt, params, priority=wish.priority)
            if wish.abort_at >= 0:
                aborts.append((step + wish.abort_at, wish.name))
        for output in host.engine.step():
            if output.finished:
                answers[output.request_id] = tuple(output.outputs[0].token_ids)
        due = [name for at, name in aborts if at <= step]
        aborts = [pair for pair in aborts if pair[0] > step]
        if due:
            host.engine.abort_request(due)
        step += 1
    host.settle()
    left = host.leftovers()
    assert not any(left.values()), f"round {number} leaves {left}"
    pool = host.scheduler.kv_cache_manager.block_pool
    held = [block.block_id for block in pool.blocks if block.ref_cnt and not block.is_null]
    assert not held, f"round {number}: blocks {held} are referenced"
    assert host.connector._aside is None, host.connector._aside
    return answers


def warm_up(host: Host) -> None:
    """Compute with every batch size, in the layers and (log probabilities) in the output."""
    wanted = sampling(max_tokens=1, prompt_logprobs=1, detokenize=False)
    for size in range(1, BATCH + 2):
        generate(host, [words(size, size)], wanted)


def resources(host: Host) -> tuple[int, int]:
    """File descriptors, and resident bytes that are in use and not the pool's."""
    # What was freed and the allocator keeps is no leak: vLLM's log probabilities of a prompt are
    # tens of MiB, and leave a heap full of holes.
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    fields = dict(
        line.split(":", 1)
        for line in Path("/proc/self/status").read_text().splitlines()
        if ":" in line
    )
    return len(os.listdir("/proc/self/fd")), int(fields["RssAnon"].split()[0]) * 1024


def counters(host: Host) -> dict[str, int]:
    return {
        "loaded_tokens": loaded_tokens(host),
        "evictions": sum(host.counter("tierkv_evictions_total", "tier").values()),
        "preemptions": int(sum(host.metrics("vllm:num_preemptions").values())),
        "errors": sum(host.counter("tierkv_errors_total", "tier").values()),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=30)
    parser.add_argument("--first", type=int, default=0, help="number of the first round")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    model = prepare_random_llama(print)
    with tempfile.TemporaryDirectory() as folder:
        result = soak(model, Path(folder), arguments.minutes, arguments.first)
    print(json.dumps(result, indent=1))
    if arguments.json:
        arguments.json.write_text(json.dumps(result, indent=1))
    sys.exit(1 if result["problems"] else 0)


def soak(model: Path, folder: Path, minutes: float, first: int) -> dict[str, Any]:
    common = {
        "max_model_len": 1024,
        "scheduling_policy": "priority",
        "max_num_batched_tokens": BATCH,
    }
    off = Engine(
        options(model, enable_prefix_caching=False, **common), folder / "off", REFERENCE_CPU
    )
    # 24 chunks in DRAM, 96 on disk; 63 blocks of 32 tokens in the engine.
    config = tiers("6MiB", disk(folder / "kv", capacity="24MiB"))
    on = Engine(options(model, config, num_gpu_blocks_override=64, **common), folder / "on")
    reference = Reference(off)
    problems: list[str] = []
    compared = skipped = 0
    on.run(warm_up)
    samples: list[tuple[int, int]] = []
    number, end = first, time.monotonic() + 60 * minutes
    while time.monotonic() < end and not problems:
        asked = [wish for wish in wishes(number) if wish.is_compared]
        on.begin(play, number)
        right = {}
        for wish in asked:
            try:
                (right[wish.name],) = reference.tokens([wish.prompt], wish.count)
            except AssertionError:
                skipped += 1  # rounding decides its answer
        answers = on.result()
        for wish in asked:
            if wish.name in right:
                compared += 1
                if answers[wish.name] != right[wish.name]:
                    problems.append(f"{wish.name}: {answers[wish.name]} not {right[wish.name]}")
        reference.forget()
        number += 1
        if (number - first - WARM_UP) % SAMPLE_EVERY == 0:
            samples.append(on.run(resources))
    samples.append(on.run(resources))
    files, resident = zip(*samples, strict=True)
    if files[-1] > files[0] + 2:
        problems.append(f"{files[-1]} file descriptors, {files[0]} after the warm-up")
    third = len(resident) // 3
    if third:
        before, last = (int(median(part)) for part in (resident[third:-third], resident[-third:]))
        if last > before + GROWTH:
            problems.append(f"{last} bytes resident in the last third, {before} in the one before")
    result = {
        "minutes": minutes,
        "rounds": number - first,
        "requests": (number - first) * REQUESTS,
        "compared": compared,
        "decided_by_rounding": skipped,
        "file_descriptors": files,
        "resident_bytes": resident,
        **on.run(counters),
        "problems": problems,
    }
    on.close()
    off.close()
    return result


if __name__ == "__main__":
    main()
