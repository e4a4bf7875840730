# SPDX-License-Identifier: Apache-2.0
"""What the demo concludes from samples that are known exactly."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from tierkv.demo import figures
from tierkv.demo.figures import Comparison, Spread
from tierkv.demo.phases import Phase, Record, Sample

Make = Callable[[Callable[[Sample], Sample]], Record]
Edit = Callable[..., Sample]


def failed(record: Record) -> list[str]:
    return [check.name for check in figures.checks(record) if not check.passed]


def test_spread_is_the_interquartile_range() -> None:
    assert Spread.of([1.0, 2.0, 3.0, 4.0, 100.0]) == Spread(3.0, 2.0, 5)
    assert Spread.of([7.0]) == Spread(7.0, 0.0, 1)


def test_ratios_pair_what_was_measured_side_by_side(record: Record) -> None:
    # Document 2 takes twice as long everywhere: unpaired, the ratios would spread.
    found = figures.ratios(record)
    assert {name: round(ratio.median, 6) for name, ratio in found.items()} == {
        "dram_over_apc": 1.2,
        "disk_over_dram": 1.5,
        "cold_over_none": 1.1,
        "none_over_dram": round(1 / 0.12, 6),
    }
    assert {name: ratio.repeats for name, ratio in found.items()} == {
        "dram_over_apc": 4,
        "disk_over_dram": 2,
        "cold_over_none": 2,
        "none_over_dram": 2,
    }
    assert all(ratio.spread < 1e-9 for ratio in found.values())


def test_a_run_in_which_everything_holds_passes_every_check(record: Record) -> None:
    assert failed(record) == []
    assert figures.answers_identical(record)


@pytest.mark.parametrize("phase", [Phase.DRAM, Phase.DISK])
def test_one_other_token_fails_the_run(phase: Phase, make_record: Make, edit: Edit) -> None:
    def change(sample: Sample) -> Sample:
        wrong = sample.phase is phase and sample.document == 2 and sample.turn == "restart-0"
        return edit(sample, token_ids=(2, 0, 8)) if wrong else sample

    record = make_record(change)
    assert not figures.answers_identical(record)
    assert failed(record) == [f"answers_{phase}"]


def test_flips_against_recomputing_are_counted_and_do_not_fail_the_run(
    make_record: Make, edit: Edit
) -> None:
    def change(sample: Sample) -> Sample:
        flip = sample.phase is Phase.NONE and sample.document == 1
        return edit(sample, token_ids=(9,)) if flip else sample

    record = make_record(change)
    assert failed(record) == []
    assert figures.compare(record, Phase.APC, Phase.NONE) == Comparison(1, 2)
    # DRAM answered question 0 twice for each document: in a warm round and after the restart.
    assert figures.compare(record, Phase.DRAM, Phase.NONE) == Comparison(2, 4)


def test_no_answers_to_compare_is_not_identical(record: Record) -> None:
    record.samples = [sample for sample in record.samples if sample.phase is not Phase.DISK]
    assert not figures.answers_identical(record)


@pytest.mark.parametrize("phase", [Phase.NONE, Phase.COLD, Phase.DRAM, Phase.DISK])
def test_hits_in_vllms_own_cache_fail_the_phases_that_must_not_have_them(
    record: Record, phase: Phase
) -> None:
    sample = record.of(phase)[0]
    record.samples.remove(sample)
    record.samples.append(replace(sample, hit_tokens={"gpu": 128}))
    assert failed(record) == [f"source_{phase}"]


def test_a_phase_with_hits_that_has_none_fails(record: Record) -> None:
    record.samples = [
        replace(s, hit_tokens={}) if s.phase is Phase.DISK else s for s in record.samples
    ]
    assert failed(record) == ["source_disk"]


def test_prefills_cut_in_another_way_fail_the_run(make_record: Make, edit: Edit) -> None:
    def change(sample: Sample) -> Sample:
        if sample.phase is not Phase.DISK:
            return sample
        return replace(edit(sample, cached_tokens=64), hit_tokens={"disk": 64})

    record = make_record(change)
    assert failed(record) == ["prefill_cut"]
