# SPDX-License-Identifier: Apache-2.0
"""The Store's only thread: an asyncio loop that runs the coroutines of the tiers.

Threads and ownership. I/O loop thread: the event loop, each lane's `_running` and `_paused`, the
tiers' state. Crossing: `Lane.queue`, a deque that the scheduler thread fills at the right and that
both take from (its operations are atomic, so each job goes to exactly one of them), and
`IoLoop.done`, a SimpleQueue that the loop fills and the scheduler drains. No lock. Started by
`start()`, ended by `stop()`, which waits at most its timeout and may be called twice; a daemon, so
a tier that hangs cannot keep the process alive. If the loop dies, `alive` turns false: the lower
tiers are unavailable, one log line says why, the engine goes on.

Latency: handing over a batch costs the scheduler one `call_soon_threadsafe`, whatever its size;
the lane's workers take the next job without going through the loop's queue again; results are in
`done` as soon as the tier's coroutine returns.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from queue import SimpleQueue
from typing import Any, TypeVar

from tierkv.errors import ErrorKind
from tierkv.store.jobs import Errand, Job
from tierkv.tiers.base import Outcome, Result

logger = logging.getLogger(__name__)

T = TypeVar("T")

BUG = Result(Outcome.FAILED, ErrorKind.WORKER)
"""The answer that is assumed of a tier that raised or answered nonsense."""


class IoLoop:
    """The thread and its queue of finished jobs."""

    def __init__(self) -> None:
        self.done: SimpleQueue[Job | Errand] = SimpleQueue()
        self.alive = False
        """Whether jobs that are handed over now will run. Written by the thread, read by any."""
        self._loop = asyncio.new_event_loop()
        self._tasks: set[asyncio.Task[None]] = set()
        self._thread = threading.Thread(target=self._main, name="tierkv-io", daemon=True)

    def start(self) -> None:
        self.alive = True
        self._thread.start()

    def call(self, callback: Callable[..., object], *args: object) -> None:
        """Run `callback(*args)` on the loop soon. Never blocks; nothing happens after `stop`."""
        try:
            self._loop.call_soon_threadsafe(callback, *args)
        except RuntimeError:  # the loop is closed
            logger.debug("the I/O loop is closed; a call is dropped")

    def errand(self, errand: Errand, start: Callable[[], Awaitable[object]]) -> None:
        """Await `start()` on the loop; the errand comes back through `done`. Never blocks."""
        self.call(self._spawn, errand, start)

    def _spawn(self, errand: Errand, start: Callable[[], Awaitable[object]]) -> None:
        task = asyncio.get_running_loop().create_task(self._run_errand(errand, start))
        self._tasks.add(task)  # the loop itself keeps only weak references
        task.add_done_callback(self._tasks.discard)

    async def _run_errand(self, errand: Errand, start: Callable[[], Awaitable[object]]) -> None:
        try:
            await start()
            errand.ok = True
        except Exception as error:
            errand.error = error
        finally:
            errand.returned = True
            self.done.put(errand)

    def run(self, coroutine: Coroutine[Any, Any, T], timeout: float | None = None) -> T:
        """Run a coroutine on the loop and wait for it. Blocks: for the ends of a Store's life only.

        Raises:
            TimeoutError: it was not done in time; it is told to stop.
            RuntimeError: the loop does not run.
        """
        if not self.alive:
            coroutine.close()
            raise RuntimeError("the I/O loop does not run")
        future = asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        try:
            return future.result(timeout)
        except TimeoutError:
            future.cancel()
            raise

    def stop(self, timeout: float) -> bool:
        """End the thread. False if something in it hangs; it is then left behind."""
        if self._thread.is_alive():
            self.call(self._loop.stop)
            self._thread.join(timeout)
        elif not self._loop.is_closed():  # never started
            self._loop.close()
        return not self._thread.is_alive()

    def _main(self) -> None:
        try:
            self._loop.run_forever()
        except BaseException:
            logger.exception("the I/O loop died; the tiers below DRAM are unavailable")
        finally:
            self.alive = False
            # What still runs hangs, or `close` ran out of time: let it take its leave.
            tasks = asyncio.all_tasks(self._loop)
            for task in tasks:
                task.cancel()
            if tasks:
                self._loop.run_until_complete(asyncio.wait(tasks, timeout=0.5))
            self._loop.close()


class Lane:
    """Jobs of one kind for one tier, first come first served, a few at a time.

    Args:
        io: where it runs.
        operation: what to do with a job; a coroutine function of the loop's thread.
        limit: jobs under way at once.
        clock: seconds, monotonic; called on the loop's thread.
        who: for the log.
    """

    def __init__(
        self,
        io: IoLoop,
        operation: Callable[[Any], Awaitable[Result]],
        limit: int,
        clock: Callable[[], float],
        who: str,
    ) -> None:
        self.queue: deque[Any] = deque()
        self._io = io
        self._operation = operation
        self._limit = limit
        self._clock = clock
        self._who = who
        self._running = 0
        self._paused = 0
        self._tasks: set[asyncio.Task[None]] = set()
        self._idle: list[asyncio.Future[None]] = []
        self._bugs_logged: set[str] = set()

    def submit(self, jobs: Sequence[Job]) -> None:
        """Hand over a batch. Scheduler thread; never blocks."""
        if jobs:
            self.queue.extend(jobs)
            self._io.call(self._wake)

    async def drained(self) -> None:
        """Wait until nothing is queued or under way, `alone` included. Loop thread."""
        while self.queue or self._running or self._paused:
            await self._wait_idle()

    async def alone(self, action: Callable[[], Awaitable[object]]) -> None:
        """Run `action` while no job is under way; queued ones wait. Loop thread."""
        self._paused += 1
        try:
            while self._running:
                await self._wait_idle()
            await action()
        finally:
            self._paused -= 1
            self._wake()
            self._tell_idle()

    def _wake(self) -> None:
        loop = asyncio.get_running_loop()
        if self._paused:
            return
        for _ in range(min(self._limit - self._running, len(self.queue))):
            self._running += 1
            task = loop.create_task(self._work())
            self._tasks.add(task)  # the loop itself keeps only weak references
            task.add_done_callback(self._tasks.discard)

    async def _work(self) -> None:
        try:
            while not self._paused:
                try:
                    job = self.queue.popleft()
                except IndexError:
                    break
                await self._run(job)
        finally:
            self._running -= 1
            self._tell_idle()

    async def _run(self, job: Job) -> None:
        job.started = self._clock()
        try:
            result = await self._operation(job)
            if not isinstance(result, Result):
                raise TypeError(f"answered {result!r} instead of a Result")
            job.result = result
        except (Exception, asyncio.CancelledError) as error:
            task = asyncio.current_task()
            if isinstance(error, asyncio.CancelledError) and task is not None and task.cancelling():
                raise  # the loop ends
            job.result = BUG
            self._log_bug(error)
        finally:
            job.ended = self._clock()
            self._io.done.put(job)

    def _log_bug(self, error: BaseException) -> None:
        kind = type(error).__name__
        if kind not in self._bugs_logged and len(self._bugs_logged) < 16:
            self._bugs_logged.add(kind)
            logger.error(
                "%s raised; a tier must answer with a Result. Further %s are only counted",
                self._who,
                kind,
                exc_info=error,
            )

    def _tell_idle(self) -> None:
        if not self._running:
            for waiter in self._idle:
                if not waiter.done():
                    waiter.set_result(None)
            self._idle.clear()

    async def _wait_idle(self) -> None:
        waiter = asyncio.get_running_loop().create_future()
        self._idle.append(waiter)
        await waiter
