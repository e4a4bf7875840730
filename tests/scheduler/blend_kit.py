# SPDX-License-Identifier: Apache-2.0
"""What the tests of any-text reuse share: prompts, settings, and what the rig has counted."""

from __future__ import annotations

from collections.abc import Callable

import torch

from tests.scheduler.blending import BlendRig
from tests.scheduler.conftest import text
from tests.scheduler.rig import Rig

MakeRig = Callable[..., BlendRig]
OFF = {"tierkv": {"blend": "off"}}
EXPLAIN = {"tierkv": {"explain": True}}

A, B = text(901, 200), text(902, 200)
FIRST = A + B + text(903, 30)
"""Leaves donors: 6 chunks, of B the first 184 tokens."""
SECOND = text(904, 40) + B + A + text(905, 40)
"""Holds B in [40, 240) and A in [240, 440) of 480."""
CHOSEN = round(0.06 * 384) + 384 // 16
"""Of the 384 tokens of SECOND that FIRST leaves: 6 % by choice, and passages."""


def counter(rig: Rig, name: str, *labels: str) -> dict[tuple[str, ...], int]:
    """One counter by some of its labels, zeros left out."""
    found: dict[tuple[str, ...], int] = {}
    for one in rig.connector._scheduler.store.context.counters.snapshot()[name]:
        if one["value"]:
            key = tuple(one["labels"][label] for label in labels)
            found[key] = found.get(key, 0) + int(one["value"])
    return found


def counted(rig: Rig) -> dict[tuple[str, ...], int]:
    """Query tokens by (outcome, tier), zeros left out."""
    return counter(rig, "tierkv_query_tokens_total", "outcome", "tier")


def held_by_vllm(rig: Rig) -> int:
    """Prompt tokens that vLLM's own prefix cache had, over all requests so far."""
    return counter(rig, "tierkv_gpu_hit_tokens_total").get((), 0)


def served(rig: Rig) -> int:
    return counter(rig, "tierkv_blend_requests_total", "outcome").get(("served",), 0)


def refused(rig: Rig) -> dict[str, int]:
    return {k: n for (k,), n in counter(rig, "tierkv_blend_declined_total", "reason").items()}


def kv_bytes(rig: Rig, request_id: str, rank: int = 0) -> torch.Tensor:
    """A running request's KV in all layers: int8 [layers, positions, heads, 2 x head size]."""
    state = rig.running[request_id]
    blocks, offsets = rig._places(state, 0, 0, len(state.blocks[0]) * rig.block_size)
    return torch.stack([cache[blocks, :, offsets] for _, cache in rig._layers(0, rank)])


def plan_by_hand() -> tuple[list[int], list[tuple[range, int]]]:
    """For SECOND behind FIRST: what is computed in any case, and donors' pieces with their shift.

    B's last 16 tokens were never stored: FIRST has 430 tokens, 6 whole chunks.
    """
    pieces = [(range(40, 224), -160), (range(240, 440), 240)]
    fixed = [*range(52), *range(224, 252), *range(440, 480)]
    return fixed, pieces


def exact_again(rig: BlendRig, name: str, prompt: list[int]) -> None:
    """The same prompt with exact KV only: the rig checks all that it attends to."""
    rig.generate(name, prompt, params=OFF)
