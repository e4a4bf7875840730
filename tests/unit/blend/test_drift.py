# SPDX-License-Identifier: Apache-2.0
"""What all tokens of a piece have drifted by is found from a sample and added to the rest."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from tierkv_vllm.blend.drift import BASES_AT_ONCE, Drift
from tierkv_vllm.blend.forward import Scratch, attended
from tierkv_vllm.blend.rope import Rope

HEADS, DIMS, TOKENS = 2, 16, 200
NEOX = Rope(torch.tensor([1.0, 0.3, 0.05, 0.01, 0.002, 0.9, 0.4, 0.08]), neox=True)
PAIRS = Rope(NEOX.frequencies, neox=False)
PARTIAL = Rope(NEOX.frequencies[:4], neox=True)
PARTIAL_PAIRS = Rope(NEOX.frequencies[:3], neox=False)
ROPES = {
    "neox": NEOX, "gptj": PAIRS, "partial": PARTIAL, "partial gptj": PARTIAL_PAIRS, "none": None,
}  # fmt: skip


def model(rope: Rope | None, dtype: torch.dtype = torch.float32) -> Any:
    return SimpleNamespace(layers=[SimpleNamespace(rope=rope)], device="cpu", dtype=dtype)


def turned(key: np.ndarray, position: int, rope: Rope | None) -> np.ndarray:
    """One key [dims] at a position, as complex numbers."""
    if rope is None:
        return key
    out = key.astype(np.float64)
    count = len(rope.frequencies)
    for pair, frequency in enumerate(rope.frequencies.double().tolist()):
        a, b = (pair, pair + count) if rope.neox else (2 * pair, 2 * pair + 1)
        z = complex(out[a], out[b]) * np.exp(1j * frequency * position)
        out[a], out[b] = z.real, z.imag
    return out


def at_positions(base: np.ndarray, rope: Rope | None) -> torch.Tensor:
    """[heads, tokens, dims] of keys as they are at position 0, or one shift [heads, dims]."""
    if base.ndim == 2:
        base = base[:, None].repeat(TOKENS, 1)
    rows = [[turned(key, p, rope) for p, key in enumerate(head)] for head in base]
    return torch.tensor(np.array(rows), dtype=torch.float32)


def some(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape)


def rows_of(full: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
    return full[:, chosen].transpose(0, 1).contiguous()


def correct(
    rope: Rope | None,
    segments: list[tuple[int, int]],
    samples: list[int],
    chosen: list[int],
    fresh: tuple[torch.Tensor, torch.Tensor],
    draft: tuple[torch.Tensor, torch.Tensor],
    span: tuple[int, int] = (0, TOKENS),
) -> bool:
    """Whether there was anything to learn; the draft is changed."""
    drift = Drift(model(rope, draft[0].dtype), torch.tensor(segments), torch.tensor(samples))
    picked = torch.tensor(chosen)
    one = drift.during(picked, *span)
    if one is None:
        return False
    one.correct(0, *draft, rows_of(fresh[0], picked), rows_of(fresh[1], picked))
    return True


@pytest.mark.parametrize("kind", ROPES)
def test_a_drift_that_all_tokens_have_in_common_is_taken_away(kind: str) -> None:
    rope = ROPES[kind]
    keys, values = some(1, HEADS, TOKENS, DIMS), some(2, HEADS, TOKENS, DIMS)
    segments = [(10, 90), (90, 180)]
    draft_keys, draft_values = keys.copy(), values.copy()
    for number, (begin, end) in enumerate(segments):
        # Before the rotation it is the same for every token of a segment.
        draft_keys[:, begin:end] -= some(10 + number, HEADS, 1, DIMS)
        draft_values[:, begin:end] -= some(20 + number, HEADS, 1, DIMS)
    fresh = at_positions(keys, rope), torch.tensor(values, dtype=torch.float32)
    draft = at_positions(draft_keys, rope), torch.tensor(draft_values, dtype=torch.float32)
    samples = [17, 40, 71, 100, 150]
    chosen = sorted([*samples, 3, 11, 95, 190])
    before = [part.clone() for part in draft]
    assert correct(rope, segments, samples, chosen, fresh, draft)
    for part, right, was in zip(draft, fresh, before, strict=True):
        torch.testing.assert_close(part[:, 10:180], right[:, 10:180], atol=1e-4, rtol=0)
        # Nothing else is touched.
        assert torch.equal(part[:, :10], was[:, :10])
        assert torch.equal(part[:, 180:], was[:, 180:])


def test_the_mean_counts_as_far_as_the_samples_agree() -> None:
    samples = [20, 50, 80]
    gaps = some(5, HEADS, len(samples), DIMS) + 0.5
    values = some(6, HEADS, TOKENS, DIMS)
    draft_values = torch.tensor(values, dtype=torch.float32)
    fresh = values.copy()
    fresh[:, samples] += gaps
    keys = torch.zeros(HEADS, TOKENS, DIMS)
    before = draft_values.clone()
    fresh_values = torch.tensor(fresh, dtype=torch.float32)
    correct(NEOX, [(10, 90)], samples, samples, (keys, fresh_values), (keys.clone(), draft_values))
    for head in range(HEADS):
        mean = gaps[head].mean(0)
        # Variance of a mean of three, summed over dimensions.
        error = gaps[head].var(0, ddof=1).sum() / 3
        power = (mean**2).sum()
        wanted = mean * power / (power + error)
        assert 0.2 < power / (power + error) < 0.98
        moved = (draft_values - before)[head, 10:90].numpy()
        np.testing.assert_allclose(moved, np.broadcast_to(wanted, moved.shape), atol=1e-5)


def test_samples_that_have_not_drifted_change_no_bit() -> None:
    values = torch.tensor(some(7, HEADS, TOKENS, DIMS), dtype=torch.bfloat16)
    keys = torch.tensor(some(8, HEADS, TOKENS, DIMS), dtype=torch.bfloat16)
    draft = keys.clone(), values.clone()
    samples = [20, 50, 80]
    assert correct(NEOX, [(10, 90)], samples, samples, (keys, values), draft)
    assert torch.equal(draft[0], keys)
    assert torch.equal(draft[1], values)


def test_one_sample_alone_is_not_trusted() -> None:
    fresh, keys = torch.ones(HEADS, TOKENS, DIMS), torch.zeros(HEADS, TOKENS, DIMS)
    draft = keys.clone(), keys.clone()
    assert not correct(None, [(10, 90)], [30], [30, 40], (fresh, fresh), draft)
    # Of two segments the one with enough samples is corrected.
    samples = [30, 100, 120]
    assert correct(None, [(10, 90), (90, 180)], samples, samples, (fresh, fresh), draft)
    assert torch.equal(draft[1][:, :90], keys[:, :90])
    assert torch.equal(draft[1][:, 90:180], fresh[:, 90:180])


def test_nothing_is_sampled_in_a_mode_without_samples() -> None:
    none = torch.empty(0, dtype=torch.int64)
    assert Drift(model(NEOX), torch.tensor([[0, 90]]), none).during(none, 0, 90) is None


def test_a_segment_that_two_passes_share_is_corrected_once_by_each_for_its_part() -> None:
    values = torch.tensor(some(9, HEADS, TOKENS, DIMS), dtype=torch.float32)
    keys = torch.zeros(HEADS, TOKENS, DIMS)
    draft = keys.clone(), values - 1
    samples = [20, 30, 60, 70]
    for chosen, span in (([20, 30, 40], (0, 55)), ([55, 60, 70, 95], (55, TOKENS))):
        assert correct(NEOX, [(10, 90)], samples, chosen, (keys, values), draft, span)
        end = min(span[1], 90)
        torch.testing.assert_close(draft[1][:, 10:end], values[:, 10:end])
        torch.testing.assert_close(draft[1][:, end:], values[:, end:] - 1)


def test_more_segments_than_fit_into_memory_together_are_all_corrected() -> None:
    keys = some(30, HEADS, TOKENS, DIMS)
    segments = [(begin, begin + 8) for begin in range(0, 8 * (BASES_AT_ONCE + 3), 8)]
    draft_keys = keys.copy()
    for number, (begin, end) in enumerate(segments):
        draft_keys[:, begin:end] -= some(40 + number, HEADS, 1, DIMS)
    fresh, draft = at_positions(keys, NEOX), at_positions(draft_keys, NEOX)
    values = torch.zeros(HEADS, TOKENS, DIMS)
    samples = [place for begin, _ in segments for place in (begin + 1, begin + 6)]
    assert correct(NEOX, segments, samples, samples, (fresh, values), (draft, values.clone()))
    torch.testing.assert_close(draft, fresh, atol=1e-4, rtol=0)


def test_watching_what_the_question_attends_to_leaves_the_draft_to_be_compared() -> None:
    layers = 6

    def forward(tokens: Any, positions: torch.Tensor, attend: Any) -> None:
        for layer in range(layers):
            query = torch.ones(len(positions), HEADS, DIMS)
            attend(layer, query, query * 2, query * 3)

    watched: Any = SimpleNamespace(
        layers=[None] * layers, heads=HEADS, dims=DIMS, group=1, scale=1.0, device="cpu",
        dtype=torch.float32, forward=forward,
    )  # fmt: skip
    scratch = Scratch(watched, TOKENS)
    scratch.keys += torch.tensor(some(50, *scratch.keys.shape))
    scratch.values += torch.tensor(some(51, *scratch.values.shape))
    before = scratch.keys.clone(), scratch.values.clone()
    mass = attended(watched, scratch, torch.zeros(TOKENS), torch.arange(180, TOKENS))
    assert mass[:TOKENS].sum() > 0
    assert torch.equal(scratch.keys, before[0])
    assert torch.equal(scratch.values, before[1])
