# SPDX-License-Identifier: Apache-2.0
"""The worker's half: drafts a prompt's KV from donors, recomputes what matters, fills the blocks.

Two steps of the engine at least. In the first every rank drafts by itself and says whether it
could; only when all could does the scheduler let the job go on, since from then on ranks run the
model together and none may be missing. Each step does a bounded part. Blocks are written last: up
to then a job can fail and nothing has happened.

Threads and ownership. Everything runs on the worker's model thread, between two steps.
"""

from __future__ import annotations

import itertools
import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from vllm.logger import init_logger

from tierkv.errors import UnsupportedError
from tierkv.pages.pool import PoolRegion
from tierkv_vllm.blend.drift import Drift
from tierkv_vllm.blend.forward import (
    Scratch,
    ScratchMemory,
    attended,
    choose,
    most_at_once,
    recompute,
)
from tierkv_vllm.blend.messages import BlendJob, BlendNews, BlendOrders, Ended
from tierkv_vllm.blend.model import BlendModel

logger = init_logger(__name__)

MAX_SHADOWS = 4
"""Prompts that wait to be computed in full; further ones are let go."""


@dataclass(slots=True, eq=False)
class _Draft:
    job: BlendJob
    scratch: Scratch
    memory: Tensor
    seconds: float = 0.0


@dataclass(slots=True, eq=False)
class _Shadow:
    """A blended prompt's next-token distribution, to be compared with the full computation's."""

    tokens: Tensor
    blended: Tensor


class Runner:
    """See the module.

    Args:
        model: of this rank.
        region: this rank's part of the DRAM pool.
        max_tokens: recomputed in one step at most.
        in_lockstep: other ranks run the model together with this one.

    Raises:
        UnsupportedError: the pool does not hold this model's pages in a way that is known here.
    """

    def __init__(
        self,
        model: BlendModel,
        region: PoolRegion,
        max_tokens: int,
        *,
        in_lockstep: bool = False,
    ) -> None:
        self._model = model
        self._max_tokens = max_tokens
        self._in_lockstep = in_lockstep
        self._memory = ScratchMemory(model)
        self._drafts: dict[int, _Draft] = {}
        self._failed: dict[int, str] = {}
        self._active: deque[tuple[_Draft, Iterator[int]]] = deque()
        self._shadows: deque[_Shadow] = deque()
        self._shadow: Iterator[int] | None = None
        self._shadow_failed = False
        self._loading: dict[int, bool | None] = {}
        self._drafted: dict[int, tuple[int, bool]] = {}
        self._seconds: dict[int, float] = {}
        self._compared: list[tuple[float, bool]] = []
        layout, layers = region.layout, len(model.layers)
        page_bytes = model.layers[0].reader.page_elements * model.dtype.itemsize
        if layout.block_bytes != layers * page_bytes or layout.block_tokens != model.block_tokens:
            raise UnsupportedError("a block is stored in another way than one page a layer")
        flat = torch.from_numpy(region.array)[:, : layout.part_bytes]
        self._pool = flat.view(model.dtype).view(
            region.slots, layout.blocks_per_chunk, layers * model.heads, -1
        )
        self._chunk_tokens = layout.chunk_tokens

    # Each step

    def step(self, orders: BlendOrders | None) -> Ended:
        """Do a bounded part of the work. Called in every step, on all ranks alike."""
        ended = Ended()
        if orders is not None:
            for job in orders.prepare:
                self._prepare(job)
            for job_id in orders.go:
                draft = self._drafts.pop(job_id)
                self._active.append((draft, self._blend(draft)))
            for job_id in orders.cancel:
                request_id = self._failed.pop(job_id, None)
                if request_id is None:
                    draft = self._drafts.pop(job_id)
                    self._memory.give(draft.memory)
                    request_id = draft.job.request_id
                ended.finished.add(request_id)
                ended.failed.add(request_id)
        left = self._max_tokens
        while self._active and left > 0:
            draft, work = self._active[0]
            began = time.perf_counter()
            try:
                done = next(work, None)
            except Exception:
                # Nothing was written to the engine's blocks yet: the request is computed instead.
                logger.exception("TierKV: a blend failed")
                if self._in_lockstep:
                    # Others may be in the middle of a reduction: what this rank sends next would
                    # be taken for its part of it. Better no engine than wrong tokens.
                    raise
                ended.failed.add(draft.job.request_id)
                done = None
            draft.seconds += time.perf_counter() - began
            if done is None:
                self._active.popleft()
                self._seconds[draft.job.job_id] = draft.seconds
                self._memory.give(draft.memory)
                ended.finished.add(draft.job.request_id)
            else:
                left -= done
        if orders is not None and orders.idle and not self._active:
            self._compare()
        return ended

    def awaits_load(self, job_id: int) -> None:
        """This job's exact tokens are being copied: it is drafted when they have arrived too."""
        self._loading[job_id] = None

    def loaded(self, job_id: int, ok: bool) -> bool:
        """A copy ended. False if it was none of ours."""
        if job_id not in self._loading:
            return False
        self._loading[job_id] = ok
        self._tell_drafted(job_id)
        return True

    def news(self) -> BlendNews | None:
        """What happened since the last call; None if nothing did."""
        if not (self._drafted or self._seconds or self._compared or self._shadow_failed):
            return None
        self._shadow_failed = False
        news = BlendNews(self._drafted, self._seconds, tuple(self._compared), self._shadows_left)
        self._drafted, self._seconds, self._compared = {}, {}, []
        return news

    @property
    def _shadows_left(self) -> int:
        return len(self._shadows) + (self._shadow is not None)

    # Drafting

    def _prepare(self, job: BlendJob) -> None:
        began = time.perf_counter()
        try:
            with torch.inference_mode():
                memory = self._memory.take(len(job.tokens))
                scratch = self._draft(job, memory)
        except Exception as error:
            # Memory, most likely. The other ranks must hear of it before anyone runs the model.
            logger.warning("TierKV: a prompt is computed instead of blended: %s", error)
            self._failed[job.job_id] = job.request_id
        else:
            self._drafts[job.job_id] = _Draft(job, scratch, memory, time.perf_counter() - began)
        self._tell_drafted(job.job_id)

    def _tell_drafted(self, job_id: int) -> None:
        """Once the draft is made or could not be, and its exact tokens are there or never will."""
        drafted = job_id in self._drafts
        arrived = self._loading.get(job_id, True)
        if arrived is not None and (drafted or job_id in self._failed):
            self._loading.pop(job_id, None)
            self._drafted[job_id] = (1, drafted and arrived)

    def _draft(self, job: BlendJob, memory: Tensor) -> Scratch:
        model, size = self._model, self._chunk_tokens
        scratch = Scratch(model, len(job.tokens), memory)
        reader = model.layers[0].reader
        spare = None
        # What no donor has is computed, but the question may look at it before.
        for begin, end in _holes(job):
            scratch.keys[:, begin:end] = 0
            scratch.values[:, begin:end] = 0
        for slot, offset, count, begin, _ in job.pieces.tolist():
            pages = self._pool[slot].to(model.device)
            target = slice(begin, begin + count)
            if count == size:
                reader.read(pages, scratch.keys[:, target], scratch.values[:, target])
                continue
            if spare is None:
                spare = Scratch(model, size)
            reader.read(pages, spare.keys, spare.values)
            source = slice(offset, offset + count)
            scratch.keys[:, target] = spare.keys[:, source]
            scratch.values[:, target] = spare.values[:, source]
        for begin, end, by in _runs(job):
            for index, layer in enumerate(model.layers):
                if layer.rope is not None:
                    layer.rope.turn(scratch.layer(index)[0][:, begin:end], by)
        return scratch

    # Recomputing

    def _blend(self, draft: _Draft) -> Iterator[int]:
        """Yields how many tokens were computed since the last time."""
        job, scratch, model = draft.job, draft.scratch, self._model
        tokens = torch.from_numpy(job.tokens).to(model.device, torch.int64)
        chosen = torch.from_numpy(job.fixed).to(model.device, torch.int64)
        self._read_exact(job, scratch)
        if job.extra:
            query = torch.from_numpy(job.query).to(model.device, torch.int64)
            mass = model.summed_over_ranks(attended(model, scratch, tokens, query))
            chosen = choose(mass, chosen, job.exact, job.extra)
            yield len(query)
        hidden = None
        if len(chosen):
            segments = torch.from_numpy(job.segments).to(torch.int64)
            drift = Drift(model, segments, torch.from_numpy(job.samples).to(torch.int64))
            parts = self._passes(chosen, len(tokens))
            cuts = [0, *(int(part[0]) for part in parts[1:]), len(job.tokens)]
            for part, span in zip(parts, itertools.pairwise(cuts), strict=True):
                hidden = recompute(model, scratch, tokens, part, drift=drift.during(part, *span))
                yield len(part)
        self._fill(job, scratch)
        if job.shadow and hidden is not None and len(self._shadows) < MAX_SHADOWS:
            self._shadows.append(_Shadow(tokens, model.logits(hidden[-1:])[0]))

    def _passes(self, chosen: Tensor, tokens: int) -> Sequence[Tensor]:
        return torch.split(chosen, min(self._max_tokens, most_at_once(self._model, tokens)))

    def _read_exact(self, job: BlendJob, scratch: Scratch) -> None:
        model = self._model
        blocks = torch.from_numpy(job.block_ids[: job.exact // model.block_tokens])
        blocks = blocks.to(model.device, torch.int64)
        for index, layer in enumerate(model.layers):
            keys, values = scratch.layer(index)
            pages = layer.cache[blocks].flatten(2)
            layer.reader.read(pages, keys[:, : job.exact], values[:, : job.exact])

    def _fill(self, job: BlendJob, scratch: Scratch) -> None:
        model, size = self._model, self._model.block_tokens
        positions = torch.arange(job.exact, len(job.tokens), device=model.device)
        blocks = torch.from_numpy(job.block_ids).to(model.device, torch.int64)
        slots = blocks[positions // size] * size + positions % size
        for index, layer in enumerate(model.layers):
            keys, values = (
                part[:, job.exact :].transpose(0, 1).contiguous() for part in scratch.layer(index)
            )
            layer.module.impl.do_kv_cache_update(layer.module, keys, values, layer.cache, slots)

    # Shadows

    def _compare(self) -> None:
        if self._shadow is None and self._shadows:
            self._shadow = self._in_full(self._shadows.popleft())
        if self._shadow is None:
            return
        try:
            done = next(self._shadow, None)
        except Exception:
            logger.exception("TierKV: a blended prompt could not be computed in full")
            if self._in_lockstep:
                raise  # as for a blend
            done, self._shadow_failed = None, True
        if done is None:
            self._shadow = None

    def _in_full(self, shadow: _Shadow) -> Iterator[int]:
        model = self._model
        scratch = Scratch(model, len(shadow.tokens))
        everything = torch.arange(len(shadow.tokens), device=model.device)
        hidden = None
        for part in self._passes(everything, len(everything)):
            hidden = recompute(model, scratch, shadow.tokens, part)
            yield len(part)
        assert hidden is not None
        full = model.logits(hidden[-1:])[0].log_softmax(-1)
        blended = shadow.blended.log_softmax(-1)
        divergence = float((full.exp() * (full - blended)).sum())
        self._compared.append((max(0.0, divergence), bool(full.argmax() == blended.argmax())))


def _holes(job: BlendJob) -> Iterator[tuple[int, int]]:
    """(begin, end) of what lies between the pieces, before the first and behind the last."""
    at = job.exact
    for _, _, count, begin, _ in job.pieces.tolist():
        if begin > at:
            yield at, begin
        at = begin + count
    if at < len(job.tokens):
        yield at, len(job.tokens)


def _runs(job: BlendJob) -> Iterator[tuple[int, int, int]]:
    """(begin, end, shift) of neighbouring pieces that move by the same distance."""
    begin = end = by = None
    for _, _, count, start, shift in job.pieces.tolist():
        if begin is not None and (start, shift) == (end, by):
            end = start + count
            continue
        if begin is not None and end is not None and by is not None:
            yield begin, end, by
        begin, end, by = start, start + count, shift
    if begin is not None and end is not None and by is not None:
        yield begin, end, by
