# SPDX-License-Identifier: Apache-2.0
"""Every position of a blended prompt has exactly one source."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.unit.blend.library import CHUNK, SCOPE, Library, ids, words
from tierkv.blend.match import Run, find_runs
from tierkv.blend.plan import (
    MODES,
    QUERY_TOKENS,
    SEGMENT_TOKENS,
    TAIL_TOKENS,
    BlendPlan,
    Mode,
    make_plan,
    mode_of,
)
from tierkv.config.blend import BlendConfig


def run(begin: int, end: int, shift: int = 0) -> Run:
    return Run(begin, end, shift, ())


def by_hand(plan: BlendPlan, mode: Mode) -> list[int]:
    """The positions computed in any case, one by one, where the end of the prompt is blended."""
    asks_from = asks_to = plan.end
    if round(mode.ratio * sum(map(len, plan.runs))):
        behind = plan.end - plan.runs[-1].end
        asks_from = plan.end - (min(behind, 32) if behind >= 8 else 32)
    sampled = set(samples_by_hand(plan, mode))
    fixed = []
    for place in range(plan.exact, plan.end):
        inside = [r for r in plan.runs if r.begin <= place < r.end]
        anchored = bool(inside) and place < inside[0].begin + mode.anchor_tokens
        if not inside or anchored or place in sampled or asks_from <= place < asks_to:
            fixed.append(place)
    return fixed


def samples_by_hand(plan: BlendPlan, mode: Mode) -> list[int]:
    """In the middle of each of so many equal parts of a segment."""
    samples = []
    for begin, end in plan.segments.tolist():
        count = round(Fraction(end - begin, mode.sample_every)) if mode.sample_every else 0
        if count > 1:
            part = Fraction(end - begin, count)
            samples += [int(begin + part / 2 + i * part) for i in range(count)]
    return samples


@st.composite
def prompts(draw: st.DrawFn) -> tuple[int, int, list[Run], Mode]:
    exact = draw(st.integers(0, 300))
    at, runs = exact, []
    for _ in range(draw(st.integers(1, 5))):
        at += draw(st.integers(0, 90))
        end = at + draw(st.integers(1, 200))
        runs.append(run(at, end))
        at = end
    tokens = at + draw(st.integers(0, TAIL_TOKENS - 1))
    mode = Mode(
        draw(st.integers(0, 40)),
        draw(st.sampled_from([0, 1, 7, 32, 500])),
        draw(st.sampled_from([0.0, 0.05, 0.5, 1.0])),
    )
    return exact, tokens, runs, mode


@given(prompts())
def test_every_position_is_reused_once_or_recomputed(
    case: tuple[int, int, list[Run], Mode],
) -> None:
    exact, tokens, runs, mode = case
    plan = make_plan(exact, tokens, runs, mode)
    assert (plan.exact, plan.end) == (exact, tokens)
    assert plan.fixed.tolist() == by_hand(plan, mode)
    assert plan.samples.tolist() == samples_by_hand(plan, mode)
    reusable = set(range(exact, tokens)) - set(plan.fixed.tolist())
    # What is not computed anew lies in exactly one run.
    assert all(sum(r.begin <= p < r.end for r in runs) == 1 for p in reusable)
    assert 0 <= plan.extra <= len(reusable)
    assert plan.reused + plan.recomputed == tokens - exact
    covered = sum(map(len, runs))
    chosen = round(mode.ratio * covered)
    chosen += min(64, covered // 16) if chosen else 0  # four passages of 16 tokens
    assert plan.extra == min(len(reusable), chosen)
    # Who chooses is computed anew; where nothing is to be chosen, nobody chooses.
    behind = tokens - runs[-1].end
    asking = (min(behind, 32) if behind >= 8 else 32) if chosen else 0
    assert plan.query.tolist() == list(range(max(exact, tokens - asking), tokens))


@pytest.mark.parametrize(
    ("tail", "asks"),
    [(0, (368, 400)), (7, (375, 407)), (8, (400, 408)), (31, (400, 431)), (90, (458, 490))],
)
def test_the_question_asks_and_not_the_document_before_it(tail: int, asks: tuple[int, int]) -> None:
    plan = make_plan(0, 400 + tail, [run(0, 400)], Mode(12, 0, 0.06))
    assert plan.query.tolist() == list(range(*asks))


def test_the_engine_computes_what_is_far_behind_the_last_run() -> None:
    plan = make_plan(64, 2000, [run(100, 400)], Mode(12, 0, 0.06))
    assert plan.end == 400 + TAIL_TOKENS
    # What follows the runs stands for the question.
    assert plan.query.tolist() == list(range(400, 400 + QUERY_TOKENS))
    assert plan.fixed.tolist() == [*range(64, 112), *range(400, 656)]
    assert plan.extra == 18 + 300 // 16


@pytest.mark.parametrize(("tail", "end"), [(0, 400), (1, 401), (256, 656), (257, 656)])
def test_a_tail_is_blended_along_up_to_its_limit(tail: int, end: int) -> None:
    assert make_plan(0, 400 + tail, [run(0, 400)], MODES["fast"]).end == end


def test_runs_side_by_side_have_an_anchor_each() -> None:
    plan = make_plan(0, 300, [run(0, 100), run(100, 250)], Mode(8, 0, 0.0))
    expected = [*range(8), *range(100, 108), *range(250, 300)]
    assert plan.fixed.tolist() == expected
    assert plan.reused == 300 - len(expected)


def test_exactness_ends_where_the_first_run_begins() -> None:
    assert make_plan(64, 300, [run(70, 300)], MODES["fast"]).first_approximate == 70


def test_all_may_be_recomputed() -> None:
    plan = make_plan(64, 300, [run(70, 300)], Mode(12, 0, 1.0))
    assert (plan.reused, plan.recomputed) == (0, 236)


def test_the_pieces_of_a_found_plan_name_one_donor_place_for_each_position() -> None:
    library = Library()
    one, two = words(1, 300), words(2, 300)
    library.serve(words(3, 77) + one + words(4, 100))
    library.serve(words(5, 13) + two + words(6, 100))
    prompt = words(7, 70) + two + words(8, 10) + one + words(9, 40)
    runs = find_runs(library.index, ids(prompt), 0, SCOPE, lambda key: True)
    plan = make_plan(0, len(prompt), runs, MODES["balanced"])
    places: dict[int, int] = {}
    for r in plan.runs:
        for donor in r.donors:
            begin = max(r.begin, donor.start + r.shift)
            end = min(r.end, donor.start + r.shift + CHUNK)
            for place in range(begin, end):
                assert place not in places
                places[place] = int(donor.tokens[place - r.shift - donor.start])
    kept = set(range(plan.exact, plan.end)) - set(plan.fixed.tolist())
    assert kept <= places.keys()
    assert all(places[place] == prompt[place] for place in places)


def test_a_mode_is_the_configured_one_with_the_configured_values() -> None:
    config = BlendConfig(mode="balanced", anchor_tokens=5, sample_every=9, recompute_ratio=0.3)
    assert mode_of(config) == Mode(5, 9, 0.3)
    assert mode_of(config, "balanced") == Mode(5, 9, 0.3)
    # A request that wants another mode gets that mode as it is.
    assert mode_of(config, "quality") == MODES["quality"]
    assert mode_of(BlendConfig(mode="fast")) == MODES["fast"]
    assert mode_of(BlendConfig(mode="fast", anchor_tokens=0, sample_every=0)) == Mode(0, 0, 0.0)


def test_long_runs_are_cut_into_equal_parts_that_drift_alike() -> None:
    runs = [run(10, 100), run(100, 890), run(892, 900 + 3 * SEGMENT_TOKENS), run(2500, 2508)]
    plan = make_plan(0, 3000, runs, Mode(8, 32, 0.0))
    # Behind the anchors, 782 tokens are nearer to two parts of 512 than to one.
    expected = [(18, 100), (108, 499), (499, 890)]
    expected += [(900 + i * SEGMENT_TOKENS, 900 + (i + 1) * SEGMENT_TOKENS) for i in range(3)]
    assert [tuple(part) for part in plan.segments.tolist()] == expected


def test_a_segment_too_short_for_two_samples_has_none() -> None:
    mode = Mode(4, 128, 0.0)
    for length, samples in ((4 + 191, []), (4 + 192, [52, 148]), (4 + 256, [68, 196])):
        plan = make_plan(0, 300, [run(0, length)], mode)
        assert plan.samples.tolist() == samples
        assert set(samples) <= set(plan.fixed.tolist())


@settings(max_examples=30)
@given(st.integers(1, 4000))
def test_modes_differ_in_how_much_they_recompute(length: int) -> None:
    counts = [
        make_plan(0, length + 40, [run(0, length)], MODES[name]).recomputed
        for name in ("fast", "balanced", "quality")
    ]
    assert counts == sorted(counts)
    if length >= 1500:  # of fewer, the passages are a larger share
        shares = np.array(counts) - 32 - 8  # the question
        assert (shares / length < [0.05, 0.135, 0.2]).all()
