# SPDX-License-Identifier: Apache-2.0
"""Which reused tokens are computed anew by choice."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tierkv_vllm.blend.forward import Attention, Scratch, choose

TOKENS = 400
NOTHING = torch.empty(0, dtype=torch.int64)


def mass(spread: dict[int, float], sharp: dict[int, float]) -> torch.Tensor:
    both = torch.zeros(2, TOKENS)
    for part, given in zip(both, (spread, sharp), strict=True):
        for place, value in given.items():
            part[place] = value
    return both


def test_passages_around_what_is_pointed_to_come_first_and_then_what_has_most_mass() -> None:
    spread = {300 + i: 10.0 + i for i in range(10)}
    sharp = {100: 4.0, 103: 3.0, 200: 2.0, 250: 1.0, 3: 0.5, 350: 0.1}
    # 103 lies in the passage around 100; 3 has too little before it; 350 is the fifth.
    passages = [*range(9), *range(90, 106), *range(190, 206), *range(240, 256)]
    chosen = choose(mass(spread, sharp), NOTHING, 0, len(passages) + 4)
    assert chosen.tolist() == [*passages, 306, 307, 308, 309]


def test_what_is_exact_or_computed_anyway_is_not_chosen() -> None:
    fixed = torch.tensor([95, 100, 101, 399])
    # The sharpest of all are fixed or exact; what is around those that are neither may be both.
    sharp = {100: 9.0, 30: 8.0, 104: 4.0, 52: 3.0}
    chosen = choose(mass({}, sharp), fixed, 50, 8 + 13, passages=2)
    assert chosen.tolist() == sorted([*range(50, 58), *range(94, 110), 399])


def test_passages_that_are_more_than_may_be_chosen_are_cut_to_what_has_most_mass() -> None:
    spread = {place: 1.0 + place / 1000 for place in range(90, 106)} | {300: 99.0}
    chosen = choose(mass(spread, {100: 1.0}), NOTHING, 0, 3, passages=1)
    assert chosen.tolist() == [103, 104, 105]


def test_one_head_that_points_outweighs_many_that_look_around() -> None:
    """First sums of attention, then sums of its fourth powers, over heads and rows."""
    model: Any = SimpleNamespace(layers=[None], heads=2)
    scratch = Scratch(model, 8, torch.zeros(2, 2, 8, 4))
    attention = Attention(scratch, torch.tensor([6, 7]), group=1, scale=1.0, watch=True)
    query = torch.zeros(2, 2, 4)  # two rows of two heads of one query head each
    query[0, 0, 0] = 50.0
    keys = torch.zeros(2, 8, 4)
    keys[0, 2, 0] = 1.0  # what the first head's first row looks for; all other rows look around
    mask = torch.zeros(2, 8)
    mask[0, 7] = -torch.inf
    sums, fourths = attention._watched(query, keys, mask)
    assert sums.tolist() == pytest.approx(
        [0.125 * 2 + 1 / 7] * 2 + [1.25 + 1 / 7] + [0.25 + 1 / 7] * 4 + [0.25]
    )
    around = 2 * 0.125**4 + (1 / 7) ** 4
    assert fourths[2].item() == pytest.approx(1 + around)
    assert fourths[0].item() == pytest.approx(around)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_what_a_head_points_to_shows_among_scores_that_have_much_in_common(
    dtype: torch.dtype,
) -> None:
    model: Any = SimpleNamespace(layers=[None], heads=1)
    scratch = Scratch(model, 4, torch.zeros(2, 1, 4, 4, dtype=dtype))
    attention = Attention(scratch, torch.tensor([3]), group=1, scale=0.5, watch=True)
    query = torch.tensor([[[800.0, 1.0, 0.0, 0.0]]], dtype=dtype)  # 400 for every key
    keys = torch.tensor([[[1.0, e, 0.0, 0.0] for e in (0.0, 1.0, 2.0, -1.0)]], dtype=dtype)
    sums, _ = attention._watched(query, keys, torch.zeros(1, 4, dtype=dtype))
    whole = sum(math.exp(e / 2) for e in (0, 1, 2, -1))
    expected = [math.exp(e / 2) / whole for e in (0, 1, 2, -1)]
    assert sums.tolist() == pytest.approx(expected, rel=1e-4)
