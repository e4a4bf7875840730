# SPDX-License-Identifier: Apache-2.0
"""Negative entries: how long, how many, and when they are forgiven."""

from __future__ import annotations

from tests.unit.store.rig import Clock
from tierkv.store.negative import NegativeTable


def test_a_key_that_failed_is_not_asked_for_until_its_time_is_over() -> None:
    clock = Clock()
    table = NegativeTable(clock)
    assert not table.blocked(b"a")
    table.failed(b"a")
    assert table.blocked(b"a")
    assert not table.blocked(b"b")
    clock.now += 4.999
    assert table.blocked(b"a")
    clock.now += 0.001
    assert not table.blocked(b"a")


def test_the_time_doubles_while_it_keeps_failing_up_to_five_minutes() -> None:
    clock = Clock()
    table = NegativeTable(clock)
    times = []
    for _ in range(9):
        table.failed(b"a")
        start = clock.now
        while table.blocked(b"a"):
            clock.now += 1
        times.append(clock.now - start)
    assert times == [5, 10, 20, 40, 80, 160, 300, 300, 300]


def test_a_key_that_was_delivered_starts_anew() -> None:
    clock = Clock()
    table = NegativeTable(clock)
    table.failed(b"a")
    table.failed(b"a")
    table.forgive(b"a")
    assert not table.blocked(b"a")
    table.failed(b"a")
    clock.now += 5
    assert not table.blocked(b"a")


def test_it_is_bounded_and_the_oldest_failure_gives_way() -> None:
    table = NegativeTable(Clock(), capacity=3)
    for key in (b"a", b"b", b"c", b"a", b"d"):
        table.failed(key)
    assert len(table) == 3
    assert [key for key in (b"a", b"b", b"c", b"d") if table.blocked(key)] == [b"a", b"c", b"d"]


def test_clearing_forgives_everything() -> None:
    table = NegativeTable(Clock())
    table.failed(b"a")
    table.clear()
    assert not table.blocked(b"a")
    assert len(table) == 0
