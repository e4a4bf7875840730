# SPDX-License-Identifier: Apache-2.0
"""Which reused tokens are computed anew by choice."""

from __future__ import annotations

from contextlib import suppress
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tierkv_vllm.blend.forward import Attention, Scratch, choose
from torch.nn.functional import scaled_dot_product_attention

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


def attention(tokens: int, positions: torch.Tensor, **options: Any) -> tuple[Attention, Scratch]:
    """Of four layers of two heads of four dims; the scratch holds zeros."""
    model: Any = SimpleNamespace(layers=[None] * 4, heads=2)
    scratch = Scratch(model, tokens, torch.zeros(2, 8, tokens, 4))
    return Attention(scratch, positions, **options), scratch


def test_one_head_that_points_outweighs_many_that_look_around() -> None:
    """First sums of attention, then sums of its fourth powers, over heads and rows."""
    attend, scratch = attention(8, torch.tensor([6, 7]), group=1, scale=1.0, watch=True)
    query = torch.zeros(2, 2, 4)  # two rows of two heads of one query head each
    query[1, 0, 0] = 50.0
    scratch.layer(2)[0][0, 2, 0] = 1.0  # what the first head's last row looks for
    nothing = torch.zeros(2, 2, 4)
    for layer in range(4):  # of which the third is watched, and the fourth not even run
        with suppress(Exception):
            attend(layer, query, nothing, nothing)
    assert attend.mass is not None
    sums, fourths = attend.mass
    # Token 7 is seen by the last row alone.
    assert sums.tolist() == pytest.approx(
        [2 / 7 + 1 / 8] * 2 + [2 / 7 + 1 / 8 + 1] + [2 / 7 + 1 / 8] * 4 + [1 / 8]
    )
    around = 2 / 7**4 + 1 / 8**4
    assert fourths[2].item() == pytest.approx(1 + around)
    assert fourths[0].item() == pytest.approx(around)


@pytest.mark.parametrize("memory", [64 << 20, 6000])
def test_scattered_tokens_attend_to_all_before_them_as_pytorch_computes_it(
    memory: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tierkv_vllm.blend.forward.SCORES_BYTES", memory)
    random, first, group = torch.Generator().manual_seed(1), 5, 3
    positions = torch.cat([torch.arange(5, 9), torch.randperm(90, generator=random)[:70] + 9])
    positions = positions.sort().values
    attend, scratch = attention(100, positions, group=group, scale=0.7, first=first)
    scratch.keys.normal_(generator=random)
    scratch.values.normal_(generator=random)
    query = torch.randn(len(positions), 2 * group, 4, generator=random)
    key, value = torch.randn(2, len(positions), 2, 4, generator=random)
    keys, values = (part.clone() for part in scratch.layer(1))
    keys[:, positions], values[:, positions] = key.transpose(0, 1), value.transpose(0, 1)
    places = torch.arange(100)
    visible = (places <= positions[:, None]) & (places >= first)
    right = scaled_dot_product_attention(
        query.transpose(0, 1), keys.repeat_interleave(group, 0),
        values.repeat_interleave(group, 0), visible, scale=0.7,
    ).transpose(0, 1)  # fmt: skip
    assert torch.allclose(attend(1, query, key, value), right, atol=1e-6)
    assert torch.equal(scratch.layer(1)[0], keys)
    assert torch.equal(scratch.layer(1)[1], values)
    assert not torch.equal(scratch.layer(0)[0], keys)
