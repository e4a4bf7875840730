# SPDX-License-Identifier: Apache-2.0
"""Prompts that come back are computed in full after a while."""

from __future__ import annotations

import pytest

from tierkv.blend import repeats
from tierkv.blend.repeats import Repeats


def test_a_prompt_is_due_after_so_many_blended_servings() -> None:
    counts = Repeats(2)
    told = []
    for _ in range(4):
        told.append(counts.due(b"a"))
        counts.served(b"a")
    assert told == [False, False, True, True]
    assert not counts.due(b"b")
    counts.clear()
    assert not counts.due(b"a")


def test_zero_means_never() -> None:
    counts = Repeats(0)
    for _ in range(5):
        counts.served(b"a")
    assert not counts.due(b"a")


def test_memory_is_bounded_and_the_prompt_served_longest_ago_is_forgotten(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(repeats, "MAX_PROMPTS", 3)
    counts = Repeats(1)
    for key in (b"a", b"b", b"c", b"a", b"d"):
        counts.served(key)
    assert [counts.due(key) for key in (b"a", b"b", b"c", b"d")] == [True, False, True, True]
