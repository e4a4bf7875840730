# SPDX-License-Identifier: Apache-2.0
"""The circuit breaker through every edge, and no two probes however calls overlap."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from tests.unit.store.rig import Clock
from tierkv.errors import ErrorKind
from tierkv.store.breaker import Breaker, State


def make(failures: int = 3, probe_after: float = 5.0) -> tuple[Breaker, Clock]:
    clock = Clock()
    return Breaker(failures, probe_after, clock), clock


def opened() -> tuple[Breaker, Clock]:
    breaker, clock = make(failures=1)
    breaker.failure(breaker.allow(), ErrorKind.EIO)
    assert breaker.state is State.OPEN
    return breaker, clock


def test_it_opens_at_the_configured_number_of_failures_in_a_row() -> None:
    breaker, _ = make(failures=3)
    for _ in range(2):
        breaker.failure(breaker.allow(), ErrorKind.EIO)
        assert breaker.state is State.CLOSED
    breaker.failure(breaker.allow(), ErrorKind.TIMEOUT)
    assert breaker.state is State.OPEN
    assert breaker.allow() == 0


def test_an_answer_in_between_starts_the_count_anew() -> None:
    breaker, _ = make(failures=2)
    for _ in range(5):
        breaker.failure(breaker.allow(), ErrorKind.EIO)
        breaker.success(breaker.allow())
    assert breaker.state is State.CLOSED


@pytest.mark.parametrize(
    ("kind", "opens"),
    [
        (ErrorKind.EIO, True),
        (ErrorKind.TIMEOUT, True),
        (ErrorKind.AUTH, True),
        (ErrorKind.PROTOCOL, True),
        (ErrorKind.WORKER, True),
        (ErrorKind.CHECKSUM, False),
        (ErrorKind.KEY_MISMATCH, False),
        (ErrorKind.GEOMETRY, False),
        (ErrorKind.FORMAT, False),
        (ErrorKind.ENOSPC, False),
    ],
)
def test_a_tier_that_answers_badly_is_not_a_tier_that_does_not_answer(
    kind: ErrorKind, opens: bool
) -> None:
    breaker, _ = make(failures=2)
    for _ in range(10):
        if permit := breaker.allow():
            breaker.failure(permit, kind)
    assert (breaker.state is State.OPEN) == opens


def test_it_stays_open_until_the_time_and_then_lets_one_probe_through() -> None:
    breaker, clock = opened()
    clock.now += 4.999
    assert not breaker.would_allow()
    assert breaker.allow() == 0
    clock.now += 0.001
    assert breaker.would_allow()
    assert breaker.state is State.OPEN  # asking changes nothing
    assert breaker.allow() != 0
    assert breaker.state is State.HALF_OPEN
    assert not breaker.would_allow()
    assert breaker.allow() == 0


def test_a_probe_that_is_answered_closes_it() -> None:
    breaker, clock = opened()
    clock.now += 5
    breaker.success(breaker.allow())
    assert breaker.state is State.CLOSED
    assert breaker.allow() != 0


def test_a_probe_that_fails_opens_it_again_for_as_long() -> None:
    breaker, clock = opened()
    clock.now += 5
    breaker.failure(breaker.allow(), ErrorKind.EIO)
    assert breaker.state is State.OPEN
    clock.now += 4.9
    assert breaker.allow() == 0
    clock.now += 0.1
    assert breaker.allow() != 0


def test_a_probe_that_was_not_made_leaves_room_for_another_at_once() -> None:
    breaker, clock = opened()
    clock.now += 5
    breaker.unused(breaker.allow())
    assert breaker.state is State.OPEN
    assert breaker.allow() != 0


def test_an_unused_permit_of_a_closed_breaker_changes_nothing() -> None:
    breaker, _ = make()
    breaker.unused(breaker.allow())
    assert breaker.state is State.CLOSED


def test_stragglers_from_before_it_opened_move_nothing() -> None:
    breaker, clock = make(failures=1)
    old = [breaker.allow() for _ in range(4)]
    breaker.failure(old[0], ErrorKind.EIO)
    breaker.success(old[1])
    assert breaker.state is State.OPEN
    clock.now += 5
    probe = breaker.allow()
    breaker.failure(old[2], ErrorKind.EIO)
    assert breaker.state is State.HALF_OPEN
    breaker.success(old[3])
    assert breaker.state is State.HALF_OPEN
    breaker.success(probe)
    assert breaker.state is State.CLOSED


class BreakerMachine(RuleBasedStateMachine):
    """Calls overlap and end in any order."""

    def __init__(self) -> None:
        super().__init__()
        self.breaker, self.clock = make(failures=2, probe_after=5.0)
        self.running: list[int] = []
        self.probe: int | None = None
        self.opened_at = 0.0

    @rule()
    def call(self) -> None:
        before = self.breaker.state
        expected = before is State.CLOSED or (
            before is State.OPEN and self.clock.now - self.opened_at >= 5.0
        )
        assert self.breaker.would_allow() == expected
        permit = self.breaker.allow()
        assert bool(permit) == expected
        if permit:
            self.running.append(permit)
            if before is not State.CLOSED:
                assert self.probe is None, "a second probe while the first is under way"
                self.probe = permit

    @precondition(lambda self: self.running)
    @rule(data=st.data(), how=st.sampled_from(["success", "failure", "bad", "unused"]))
    def end(self, data: st.DataObject, how: str) -> None:
        permit = self.running.pop(data.draw(st.integers(0, len(self.running) - 1)))
        before, is_probe = self.breaker.state, permit == self.probe
        if how == "success":
            self.breaker.success(permit)
        elif how == "failure":
            self.breaker.failure(permit, ErrorKind.EIO)
        elif how == "bad":
            self.breaker.failure(permit, ErrorKind.CHECKSUM)
        else:
            self.breaker.unused(permit)
        after = self.breaker.state
        if is_probe:
            self.probe = None
            assert before is State.HALF_OPEN
            assert after is (State.CLOSED if how in ("success", "bad") else State.OPEN)
        elif before is not State.CLOSED:
            assert after is before, "a straggler moved it"
        if after is State.OPEN and before is not State.OPEN:
            self.opened_at = self.clock.now - (5.0 if how == "unused" else 0.0)

    @rule(seconds=st.sampled_from([1.0, 2.5, 5.0]))
    def wait(self, seconds: float) -> None:
        self.clock.now += seconds

    @invariant()
    def half_open_means_one_probe(self) -> None:
        assert (self.breaker.state is State.HALF_OPEN) == (self.probe is not None)


TestBreakerMachine = BreakerMachine.TestCase
TestBreakerMachine.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)
