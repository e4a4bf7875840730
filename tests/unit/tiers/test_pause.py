# SPDX-License-Identifier: Apache-2.0
"""Pause: twice as long each time, bounded, and over when it worked."""

from __future__ import annotations

from tierkv.tiers.pause import Pause


def test_a_pause_doubles_up_to_a_minute_and_starts_short_again() -> None:
    now = 0.0
    pause = Pause(lambda: now)
    assert pause.is_over
    lengths = []
    for _ in range(6):
        start = now
        pause.begin()
        while not pause.is_over:
            now += 1
        lengths.append(now - start)
    assert lengths == [5, 10, 20, 40, 60, 60]
    pause.begin()
    pause.reset()
    assert pause.is_over
    pause.begin()
    now += 5
    assert pause.is_over
