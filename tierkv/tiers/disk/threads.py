# SPDX-License-Identifier: Apache-2.0
"""Blocking calls awaited from the I/O loop, such that memory is never given back under a thread.

A system call cannot be taken back. A coroutine that is cancelled while its thread reads into a
pool slot must not return before the thread is done, or the slot's next owner would be overwritten.

**Threads and ownership.** `Threads` starts up to `count` threads on demand, named after the tier,
and owns them until `shutdown`. All its methods are called on the I/O loop's thread.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, ParamSpec, TypeVar, cast

from aiofiles.ospath import wrap  # type: ignore[attr-defined]  # exported, but not in its stubs

P = ParamSpec("P")
T = TypeVar("T")


def _apply(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return function(*args, **kwargs)


_in_executor = wrap(_apply)


class _Job:
    """An executor for one call that remembers the call's future: aiofiles does not tell it."""

    __slots__ = ("_pool", "future")

    def __init__(self, pool: ThreadPoolExecutor) -> None:
        self._pool = pool
        self.future: Future[Any] | None = None

    def submit(self, function: Callable[..., Any], *args: Any) -> Future[Any]:
        self.future = self._pool.submit(function, *args)
        return self.future


class Threads:
    """The threads of one tier."""

    def __init__(self, count: int, name: str) -> None:
        self._pool = ThreadPoolExecutor(count, thread_name_prefix=name)

    async def call(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run `function` on a thread and wait until it is done, cancelled or not.

        A cancellation that comes after the function has begun is held back: the result is
        returned, and `asyncio.current_task().cancelling()` tells of it. Before that, the function
        is not run at all.

        Raises:
            asyncio.CancelledError: cancelled before a thread took the call.
        """
        job = _Job(self._pool)
        try:
            return cast(T, await _in_executor(function, *args, executor=job, **kwargs))
        except asyncio.CancelledError:
            if job.future is None or job.future.cancelled():
                raise
            ended = asyncio.wrap_future(job.future)
            while not ended.done():
                try:
                    await asyncio.wait((ended,))
                except asyncio.CancelledError:
                    continue
            return cast(T, ended.result())

    def shutdown(self) -> None:
        """Take no more calls; the threads end by themselves. Does not wait."""
        self._pool.shutdown(wait=False)
