# SPDX-License-Identifier: Apache-2.0
"""A GPU's streams and events without a GPU, which runs what is queued in any order it may.

Work is a closure in a stream's queue. A seeded generator picks which stream goes on, so that an
order that events do not force is soon broken. Stands in for `torch.cuda` in the mover's module.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from tierkv.pages.geometry import PageTable


class Mark:
    def __init__(self) -> None:
        self.is_passed = False


class Stream:
    def __init__(self, cuda: FakeCuda) -> None:
        self.queue: deque[Callable[[], object] | tuple[str, Mark]] = deque()
        self._cuda = cuda

    def wait_event(self, event: Event) -> None:
        if event.mark:
            self.queue.append(("wait", event.mark))

    def record_event(self) -> Event:
        event = Event(self._cuda)
        event.record(self)
        return event

    def synchronize(self) -> None:
        while self.queue:
            assert self._cuda.step()

    def is_runnable(self) -> bool:
        if not self.queue:
            return False
        head = self.queue[0]
        return not isinstance(head, tuple) or head[0] == "mark" or head[1].is_passed

    def advance(self) -> None:
        head = self.queue.popleft()
        if not isinstance(head, tuple):
            head()
        elif head[0] == "mark":
            head[1].is_passed = True


class Event:
    def __init__(self, cuda: FakeCuda) -> None:
        self.mark: Mark | None = None
        self._cuda = cuda

    def record(self, stream: Stream | None = None) -> None:
        self.mark = Mark()
        (stream or self._cuda.current).queue.append(("mark", self.mark))

    def query(self) -> bool:
        return self.mark is None or self.mark.is_passed

    def elapsed_time(self, end: Event) -> float:
        if not (self.mark and self.mark.is_passed and end.mark and end.mark.is_passed):
            raise RuntimeError("both events must be recorded and over")
        return 2.0


class FakeCuda:
    """As much of `torch.cuda` as the mover uses, and the hands of the device: `step`, `run`."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self._streams: list[Stream] = []
        self.compute = self.Stream()
        self.current = self.compute
        self.registered: list[int] = []
        self.register_error = 0

    def Stream(self) -> Stream:
        self._streams.append(Stream(self))
        return self._streams[-1]

    def Event(self, enable_timing: bool = False) -> Event:
        return Event(self)

    def current_stream(self, device: object = None) -> Stream:
        return self.current

    @contextmanager
    def stream(self, stream: Stream) -> Iterator[None]:
        outer, self.current = self.current, stream
        yield
        self.current = outer

    def device(self, device: object) -> Any:
        return nullcontext()

    def cudart(self) -> FakeCuda:
        return self

    def cudaHostRegister(self, address: int, size: int, flags: int) -> int:
        if not self.register_error:
            self.registered.append(address)
        return self.register_error

    def cudaHostUnregister(self, address: int) -> int:
        self.registered.remove(address)
        return 0

    def launch(self, work: Callable[[], object]) -> None:
        self.current.queue.append(work)

    def step(self) -> bool:
        """Let one stream do one thing; False if none can."""
        ready = [stream for stream in self._streams if stream.is_runnable()]
        if ready:
            self._random.choice(ready).advance()
        return bool(ready)

    def run(self) -> None:
        while self.step():
            pass
        assert not any(stream.queue for stream in self._streams), "streams wait for each other"


class FakePages:
    """Stands in for the kernels: the same copies, queued."""

    def __init__(self, cuda: FakeCuda, table: PageTable) -> None:
        self._cuda = cuda
        self._table = table

    def upload(self, block_ids: npt.NDArray[np.integer]) -> list[int]:
        ids: list[int] = []
        self._cuda.launch(lambda: ids.extend(block_ids.tolist()))
        return ids

    def gather(self, blocks: list[int], out: torch.Tensor) -> None:
        self._cuda.launch(lambda: self._move(blocks, out, is_gather=True))

    def scatter(self, blocks: list[int], rows: torch.Tensor) -> None:
        self._cuda.launch(lambda: self._move(blocks, rows, is_gather=False))

    def _move(self, blocks: list[int], rows: torch.Tensor, *, is_gather: bool) -> None:
        for row, block in zip(rows, blocks, strict=False):
            if block < 0:
                continue
            for segment in self._table.segments:
                runs = segment.view[:, block]
                kept = row[segment.offset : segment.offset + runs.numel()].view(runs.shape)
                if is_gather:
                    kept.copy_(runs)
                else:
                    runs.copy_(kept)
