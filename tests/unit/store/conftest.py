# SPDX-License-Identifier: Apache-2.0
"""Fixtures for tests of the Store."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest

from tests.unit.store.rig import Rig


@pytest.fixture
def make_rig() -> Iterator[Callable[..., Rig]]:
    """Make rigs; all are closed at the end, and nothing may be left in any of them."""
    rigs: list[Rig] = []

    def make(*args: object, **options: object) -> Rig:
        rigs.append(Rig(*args, **options))  # type: ignore[arg-type]
        return rigs[-1]

    yield make
    with ExitStack() as stack:
        for rig in rigs:
            stack.callback(rig.close)


@pytest.fixture
def no_thread_is_left() -> Iterator[None]:
    before = set(threading.enumerate())
    yield
    for thread in set(threading.enumerate()) - before:
        thread.join(10)  # a disk tier's threads end by themselves soon after
    assert set(threading.enumerate()) <= before
