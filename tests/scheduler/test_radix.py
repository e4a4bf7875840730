# SPDX-License-Identifier: Apache-2.0
"""Trees of prompts that branch at arbitrary tokens, against a radix tree of single tokens.

The ideal cache would give back every token of the longest beginning that a prompt shares with
anything computed before. TierKV gives back whole chunks of it. Each prompt must get exactly what
rounding leaves; how much that loses in all, by the size of chunks, is printed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from random import Random

import pytest

from tests.scheduler.conftest import dram, text
from tests.scheduler.rig import Rig, expected_output
from tests.scheduler.test_reuse import counted, forget_engine_cache, idle

MakeRig = Callable[..., Rig]
Path = list[int]


class Radix:
    """Token by token: how much of a sequence was seen before."""

    def __init__(self) -> None:
        self._root: dict[int, object] = {}

    def known(self, tokens: Path) -> int:
        node, count = self._root, 0
        for token in tokens:
            child = node.get(token)
            if not isinstance(child, dict):
                return count
            node, count = child, count + 1
        return count

    def add(self, tokens: Path) -> None:
        node = self._root
        for token in tokens:
            node = node.setdefault(token, {})  # type: ignore[assignment]


def few_shot(rng: Random) -> Iterator[Path]:
    """Instructions, a choice of examples in changing order, a question."""
    head = text(1, 173)
    examples = [text(10 + i, rng.randrange(60, 140)) for i in range(4)]
    for i in range(14):
        chosen = rng.sample(examples, rng.randrange(1, 4))
        yield head + [t for example in chosen for t in example] + text(100 + i, 40)


def tree_of_thought(rng: Random) -> Iterator[Path]:
    """Every path down a tree whose nodes are thoughts of arbitrary length."""
    level = [text(2, 211)]
    for depth in range(3):
        level = [
            path + text(1000 + 100 * depth + 10 * i + j, rng.randrange(20, 130))
            for i, path in enumerate(level)
            for j in range(2)
        ]
        yield from level


def agents(rng: Random) -> Iterator[Path]:
    """Two agents with tools in common, each going on where it stopped, and forking now and then."""
    tools = text(3, 320)
    histories = [tools + text(4 + i, 57) for i in range(2)]
    for turn in range(8):
        for i, history in enumerate(histories):
            yield history
            said = expected_output(history, 6)
            histories[i] = history + said + text(2000 + 10 * turn + i, rng.randrange(15, 90))
        if turn % 3 == 2:
            yield histories[0][: rng.randrange(320, len(histories[0]))] + text(3000 + turn, 33)


def chat(rng: Random) -> Iterator[Path]:
    """One conversation whose every turn is stored whole: only the last chunk is ever lost."""
    history = text(5, 700)
    for turn in range(10):
        yield history
        history += expected_output(history, 6) + text(4000 + turn, rng.randrange(30, 120))


WORKLOADS = {"few-shot": few_shot, "tree of thought": tree_of_thought, "agents": agents}
WORKLOADS["chat"] = chat


@pytest.mark.feature("radix-style reuse: branches at arbitrary points")
@pytest.mark.parametrize("workload", WORKLOADS)
@pytest.mark.parametrize("chunk", [16, 32, 64, 128, 256])
def test_every_full_chunk_of_the_longest_shared_path_is_hit(
    make_rig: MakeRig, workload: str, chunk: int
) -> None:
    rig = make_rig(dram("16MiB", chunk_tokens=chunk), num_blocks=160, max_tokens=1024)
    radix, ideal, seen = Radix(), 0, 0
    for i, prompt in enumerate(WORKLOADS[workload](Random(7))):
        forget_engine_cache(rig)
        rig.generate(f"r{i}", prompt, 6)
        # The last token is always computed; the answer's last token has no KV.
        shared = min(radix.known(prompt), len(prompt) - 1)
        radix.add(prompt + expected_output(prompt, 6)[:-1])
        hits = counted(rig).get(("hit", "dram"), 0) - seen
        # A whole chunk that ends with the prompt is cut at the block before its last token.
        whole = min(radix_floor(shared + 1, len(prompt), chunk), (len(prompt) - 1) // 16 * 16)
        assert hits == whole, f"prompt {i} of {len(prompt)} tokens shares {shared}"
        ideal, seen = ideal + shared, seen + hits
    print(f"{workload}, chunks of {chunk}: {seen} of {ideal} tokens, loss {1 - seen / ideal:.1%}")
    assert seen > 0
    idle(rig)


def radix_floor(known: int, length: int, chunk: int) -> int:
    """Whole chunks; `known` counts the prompt's last token only if all of it was seen."""
    return (known if known == length else known - 1) // chunk * chunk
