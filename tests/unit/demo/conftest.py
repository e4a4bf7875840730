# SPDX-License-Identifier: Apache-2.0
"""A small run of the demo with invented, exactly known figures."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import pytest

from tierkv.demo.client import Answer
from tierkv.demo.phases import Phase, Record, Sample
from tierkv.demo.workload import Document

Change = Callable[[Sample], Sample]
TIMES = {Phase.NONE: 1.0, Phase.APC: 0.1, Phase.COLD: 1.1, Phase.DRAM: 0.12, Phase.DISK: 0.18}
TURNS = {
    Phase.NONE: ["first"],
    Phase.COLD: ["first"],
    Phase.APC: ["warm-0", "warm-1"],
    Phase.DRAM: ["warm-0", "warm-1", "restart-0"],
    Phase.DISK: ["restart-0"],
}
QUESTION = {"first": 0, "warm-0": 0, "warm-1": 1, "restart-0": 0}
TIER = {Phase.APC: "gpu", Phase.DRAM: "dram", Phase.DISK: "disk"}


def _make(change: Change = lambda sample: sample) -> Record:
    """Two documents; document 2 takes twice the time of document 1. `change` edits samples."""
    record = Record(documents=[Document(f"topic/{i}", "text") for i in range(3)])
    for phase, turns in TURNS.items():
        for turn in turns:
            cached = 128 if phase in TIER else 0
            hits = {TIER[phase]: cached} if cached else {}
            for document in (1, 2):
                tokens = (document, QUESTION[turn], 7)
                answer = Answer(TIMES[phase] * document, 200, cached, tokens, "an answer")
                record.samples.append(
                    change(Sample(phase, document, QUESTION[turn], turn, answer, hits))
                )
    return record


def _edit(sample: Sample, **changes: object) -> Sample:
    return dataclasses.replace(sample, answer=dataclasses.replace(sample.answer, **changes))


@pytest.fixture
def record() -> Record:
    """A run in which everything holds."""
    return _make()


@pytest.fixture
def make_record() -> Callable[[Change], Record]:
    """Makes a run with some samples changed."""
    return _make


@pytest.fixture
def edit() -> Callable[..., Sample]:
    """Gives a sample another answer: `edit(sample, token_ids=(1, 2))`."""
    return _edit
