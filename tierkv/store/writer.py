# SPDX-License-Identifier: Apache-2.0
"""Write-behind: copies DRAM chunks into one lower tier without anyone waiting for it.

Bounded: at most `capacity` chunks wait or are under way, each keeping a lease on its DRAM slot.
When there is no room the oldest waiting chunk is dropped. A chain is queued from its end, so what
is dropped first is what is useless without the rest.

Threads and ownership. Owned by the Store's scheduler thread; no lock. Its lane runs on the I/O loop
and needs no scheduler step to go on: an idle engine still writes what is queued. Who takes a job
out of the lane's queue has it: the loop to run it, or the writer to drop it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from tierkv.errors import ErrorKind
from tierkv.keys import Chunk
from tierkv.store.breaker import Breaker
from tierkv.store.dram import Dram
from tierkv.store.io_loop import Lane
from tierkv.store.jobs import Job
from tierkv.telemetry.counters import Counters


class Writer:
    """The queue of chunks to be written to one tier.

    Args:
        tier: its name, for the counters.
        policy: `write` of its configuration: why chunks get here.
        capacity: chunks, at least 1.
        save_deadline: seconds one write may take before it counts as a failure.
        holds: whether the tier has a key already.
        finished: told the job of every write that came back, first of all.
    """

    def __init__(
        self,
        tier: str,
        policy: str,
        capacity: int,
        save_deadline: float,
        dram: Dram,
        lane: Lane,
        breaker: Breaker,
        counters: Counters,
        holds: Callable[[bytes], bool],
        finished: Callable[[Job], None],
    ) -> None:
        self.policy = policy
        self.capacity = capacity
        self.pending: dict[bytes, Job] = {}
        """Waiting or under way, oldest first."""
        self._tier = tier
        self._save_deadline = save_deadline
        self._dram = dram
        self._lane = lane
        self._breaker = breaker
        self._counters = counters
        self._holds = holds
        self._finished = finished

    def offer(self, chunks: Sequence[Chunk], slots: Sequence[int]) -> None:
        """Queue what the tier lacks. The slots are READY; first chunk of the chain first."""
        wanted = [
            (chunk, slot)
            for chunk, slot in zip(chunks, slots, strict=True)
            if chunk.key not in self.pending and not self._holds(chunk.key)
        ]
        # More than fit would only push each other out.
        self._count_dropped(len(wanted) - self.capacity, "queue_full")
        batch: list[Job] = []
        for chunk, slot in reversed(wanted[: self.capacity]):
            if len(self.pending) >= self.capacity and not self._drop_oldest("queue_full"):
                self._count_dropped(1, "queue_full")
                continue
            permit = self._breaker.allow()
            if not permit:
                self._count_dropped(1, "unavailable")
                continue
            self._dram.index.lease(slot)
            job = Job(chunk, slot, permit, self.policy, self._done)
            self.pending[chunk.key] = job
            batch.append(job)
        self._lane.submit(batch)

    def forget(self, keys: Iterable[bytes]) -> None:
        """Drop these if they are still waiting."""
        for key in keys:
            job = self.pending.get(key)
            if job is not None and _take(self._lane, job):
                self._drop(job, "reset")

    def drop_waiting(self, reason: str, most: int | None = None) -> None:
        """Drop what is not under way yet, or the `most` oldest of it."""
        count = len(self._lane.queue) if most is None else most
        while count and self._drop_oldest(reason):
            count -= 1

    def check_deadlines(self, now: float) -> None:
        """Tell the breaker of writes that take too long. They keep their slot until they return."""
        for job in self.pending.values():
            if not job.started:
                break  # the lane takes them in this order
            if job.ended:  # and not applied yet
                continue
            if not job.overdue and now - job.started > self._save_deadline:
                job.overdue = True
                self._counters.add(
                    "tierkv_errors_total", tier=self._tier, kind=ErrorKind.TIMEOUT.value
                )
                self._breaker.failure(job.permit, ErrorKind.TIMEOUT)

    def _done(self, job: Job) -> None:
        self._finished(job)
        self._leave(job)

    def _drop_oldest(self, reason: str) -> bool:
        try:
            job = self._lane.queue.popleft()
        except IndexError:  # all of them are under way
            return False
        self._drop(job, reason)
        return True

    def _drop(self, job: Job, reason: str) -> None:
        self._breaker.unused(job.permit)
        self._count_dropped(1, reason)
        self._leave(job)

    def _leave(self, job: Job) -> None:
        if self.pending.get(job.chunk.key) is job:
            del self.pending[job.chunk.key]
        self._dram.index.release(job.slot)

    def _count_dropped(self, count: int, reason: str) -> None:
        if count > 0:
            self._counters.add("tierkv_saves_dropped_total", count, tier=self._tier, reason=reason)


def _take(lane: Lane, job: Job) -> bool:
    try:
        lane.queue.remove(job)
    except ValueError:  # under way
        return False
    return True
