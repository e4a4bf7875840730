# SPDX-License-Identifier: Apache-2.0
"""The cost model: skips only what was measured to be slower, and looks again now and then."""

from __future__ import annotations

import pytest

from tierkv.store.cost import CostModel

CHUNK_BYTES = 1_000_000
CHUNK_TOKENS = 64


def model(load_seconds: float, prefill_seconds: float, samples: int = 8) -> CostModel:
    """Each chunk took so long to load, one after the other, and so long to compute."""
    cost = CostModel(CHUNK_TOKENS, CHUNK_BYTES)
    for n in range(samples):
        cost.observe_load("disk", n * 10.0, n * 10.0 + load_seconds)
        cost.observe_prefill(CHUNK_TOKENS, prefill_seconds)
    return cost


@pytest.mark.parametrize(
    ("load", "prefill", "worth"),
    [(1.0, 2.0, True), (1.0, 1.0, True), (1.19, 1.0, True), (1.21, 1.0, False), (9.0, 1.0, False)],
)
def test_a_load_pays_unless_it_takes_a_fifth_longer_than_recomputing(
    load: float, prefill: float, worth: bool
) -> None:
    assert model(load, prefill).worth("disk", 10) is worth


def test_before_eight_measurements_on_both_sides_nothing_is_skipped() -> None:
    assert model(9.0, 1.0, samples=7).worth("disk", 10)
    cost = model(9.0, 1.0, samples=7)
    cost.observe_prefill(CHUNK_TOKENS, 1.0)
    assert cost.worth("disk", 10)
    cost.observe_load("disk", 0.0, 9.0)
    assert not cost.worth("disk", 10)


def test_every_sixty_fourth_skip_is_a_load_that_measures_again() -> None:
    cost = model(9.0, 1.0)
    answers = [cost.worth("disk", 10) for _ in range(200)]
    assert [n for n, answer in enumerate(answers, 1) if answer] == [64, 128, 192]


def test_asking_whether_it_pays_uses_nothing_up() -> None:
    cost = model(9.0, 1.0)
    assert not any(cost.pays("disk", 10) for _ in range(200))
    assert [cost.worth("disk", 10) for _ in range(64)].index(True) == 63


def test_a_tier_that_became_fast_is_found_out() -> None:
    cost = model(9.0, 1.0)
    for n in range(100):
        cost.observe_load("disk", 1000.0 + n, 1000.0 + n + 0.1)
    assert cost.worth("disk", 10)


def test_loads_that_overlap_are_measured_together() -> None:
    cost = CostModel(CHUNK_TOKENS, CHUNK_BYTES)
    for n in range(80):  # eight at a time, each batch takes one second
        cost.observe_load("disk", float(n // 8), float(n // 8 + 1))
    assert cost.bytes_per_second("disk") == pytest.approx(8 * CHUNK_BYTES, rel=0.1)


def test_time_in_which_nothing_was_loaded_does_not_count() -> None:
    cost = CostModel(CHUNK_TOKENS, CHUNK_BYTES)
    for n in range(20):
        cost.observe_load("disk", n * 1000.0, n * 1000.0 + 0.5)
    assert cost.bytes_per_second("disk") == pytest.approx(2 * CHUNK_BYTES)


def test_tiers_are_measured_apart() -> None:
    cost = model(9.0, 1.0)
    assert not cost.worth("disk", 1)
    assert cost.worth("redis", 1)
    assert cost.bytes_per_second("redis") is None


def test_a_clock_that_stands_still_or_a_step_of_nothing_breaks_nothing() -> None:
    cost = model(0.0, 1.0)
    assert cost.worth("disk", 10)
    cost.observe_prefill(0, 1.0)
    cost.observe_prefill(64, 0.0)
    assert cost.tokens_per_second() == pytest.approx(CHUNK_TOKENS)
