# SPDX-License-Identifier: Apache-2.0
"""The rate of a scrub."""

from __future__ import annotations

from tierkv.inventory.scrub import Throttle


class Time:
    """A clock that moves when somebody sleeps."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.slept: list[float] = []

    def clock(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.now += seconds


def test_reading_keeps_to_the_rate() -> None:
    time = Time()
    throttle = Throttle(100.0, time.clock, time.sleep)
    for _ in range(20):
        time.now += 0.1  # reading itself takes a while
        throttle.spend(50)
    # 1,000 bytes at 100 a second, from the first read on.
    assert abs(time.now - 1010.0) < 0.2
    assert all(seconds > 0 for seconds in time.slept)


def test_a_long_wait_earns_a_second_and_no_more() -> None:
    time = Time()
    throttle = Throttle(100.0, time.clock, time.sleep)
    time.now += 3600
    throttle.spend(100)  # what a second allows
    assert time.slept == []
    throttle.spend(100)
    assert time.slept == [1.0]


def test_without_a_rate_nobody_sleeps() -> None:
    time = Time()
    Throttle(None, time.clock, time.sleep).spend(1 << 40)
    assert time.slept == []
