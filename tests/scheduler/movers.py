# SPDX-License-Identifier: Apache-2.0
"""Movers that behave as a GPU's streams may: late, out of order, or badly."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from random import Random

from tierkv.pages.mover import Finished, Ops, PageMover


class LateMover(PageMover):
    """Copies when the test says so, or when a fence or `close` forces it; saves before nothing.

    A real stream may run a copy at any moment between its submission and its fence. This one runs
    it at the last permitted moment, which is where missing fences show.

    Attributes:
        hold: while true, `poll` ends nothing by itself.
    """

    def __init__(self, inner: PageMover) -> None:
        self._inner = inner
        self.notes: tuple[str, ...] = ()
        self.hold = True
        self._saves: dict[int, Ops] = {}
        self._loads: dict[int, Ops] = {}

    def save(self, job_id: int, ops: Ops) -> None:
        self._saves[job_id] = ops

    def load(self, job_id: int, ops: Ops) -> None:
        self._loads[job_id] = ops

    def poll(self) -> list[Finished]:
        if not self.hold:
            self.run(loads=True)
        return self._inner.poll()

    def fence(self, job_ids: Iterable[int]) -> None:
        for job_id in job_ids:
            if job_id in self._saves:
                self._inner.save(job_id, self._saves.pop(job_id))

    def run(self, *, loads: bool = False, saves: bool = True) -> None:
        """Let everything submitted so far happen."""
        for job_id in list(self._saves) if saves else ():
            self._inner.save(job_id, self._saves.pop(job_id))
        for job_id in list(self._loads) if loads else ():
            self._inner.load(job_id, self._loads.pop(job_id))

    @property
    def waiting(self) -> tuple[int, int]:
        """Saves and loads that have not run."""
        return len(self._saves), len(self._loads)

    def close(self) -> None:
        self.run(loads=True)
        self._inner.close()


class RandomMover(LateMover):
    """Ends each copy after a random number of polls. Seeded."""

    def __init__(self, inner: PageMover, seed: int) -> None:
        super().__init__(inner)
        self._rng = Random(seed)

    def poll(self) -> list[Finished]:
        for pending, start in ((self._saves, self._inner.save), (self._loads, self._inner.load)):
            for job_id in list(pending):
                if self._rng.random() < 0.4:
                    start(job_id, pending.pop(job_id))
        return self._inner.poll()


class FailingMover(LateMover):
    """Fails the jobs that the test picks, without copying anything; the rest runs at once."""

    def __init__(
        self,
        inner: PageMover,
        *,
        fails_load: Callable[[int], bool] = lambda job_id: False,
        fails_save: Callable[[int], bool] = lambda job_id: False,
    ) -> None:
        super().__init__(inner)
        self._fails_load, self._fails_save = fails_load, fails_save
        self._failed: list[Finished] = []

    def save(self, job_id: int, ops: Ops) -> None:
        if self._fails_save(job_id):
            self._failed.append(Finished(job_id, False, 0, 0.0, "d2h"))
        else:
            self._inner.save(job_id, ops)

    def load(self, job_id: int, ops: Ops) -> None:
        if self._fails_load(job_id):
            self._failed.append(Finished(job_id, False, 0, 0.0, "h2d"))
        else:
            self._inner.load(job_id, ops)

    def poll(self) -> list[Finished]:
        failed, self._failed = self._failed, []
        return failed + self._inner.poll()
