# SPDX-License-Identifier: Apache-2.0
"""The rig with any-text reuse: TierKV's real planner and runner around a model without weights.

A donor's bytes are those of its own place, so reused KV is wrong in the rig by the rig's own check,
and so is everything computed on top of it (`MARK`). The check is told which requests may attend to
such bytes, and from which position on. Whoever else meets one fails where it happens: approximate
KV in vLLM's prefix cache, in a tier, or in another tenant's prompt cannot go unnoticed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from tierkv_vllm.blend import runner as runner_module
from tierkv_vllm.blend.pages import PageReader, _interleaved
from tierkv_vllm.blend.runner import Runner
from tierkv_vllm.worker import WorkerSide
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.outputs import ModelRunnerOutput

from tests.scheduler.rig import HEAD_SIZE, HEADS, Rig, kv_of, prefix_states
from tierkv.pages.pool import PoolRegion

MARK = 127
"""A byte that the rig's model never gives: KV that was computed over approximate KV."""


def turned(by: int) -> int:
    """What a move adds to each byte of a key: stands for the rotation."""
    return by % 7


class Rope:
    def turn(self, keys: torch.Tensor, by: int) -> None:
        keys += turned(by)


class Backend:
    """Writes pages as the rig does."""

    def do_kv_cache_update(
        self,
        layer: Any,
        key: torch.Tensor,
        value: torch.Tensor,
        cache: torch.Tensor,
        slots: torch.Tensor,
    ) -> None:
        size = cache.shape[2]
        cache[slots // size, :, slots % size] = torch.cat([key, value], dim=-1)


@dataclass
class Model:
    """What a runner needs of a model.

    Attributes:
        first: first reused position of the prompt that is being blended; all before it is exact.
    """

    caches: dict[str, torch.Tensor]
    rank: int
    first: int = 0
    heads: int = HEADS
    dims: int = HEAD_SIZE
    block_tokens: int = 16
    dtype: torch.dtype = torch.int8
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    group: int = 1
    scale: float = 1.0
    layers: list[Any] = field(default_factory=list)

    def __post_init__(self) -> None:
        reader = PageReader(self.heads, self.block_tokens, self.dims, self.dtype, _interleaved)
        module = SimpleNamespace(impl=Backend())
        self.layers = [
            SimpleNamespace(module=module, cache=cache, reader=reader, rope=Rope())
            for cache in self.caches.values()
        ]

    def summed_over_ranks(self, values: torch.Tensor) -> torch.Tensor:
        return values

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return torch.zeros(len(hidden), 5)


def attended(model: Model, scratch: Any, tokens: torch.Tensor, query: torch.Tensor) -> torch.Tensor:
    """The later a token stands, the more it is attended to."""
    return torch.arange(len(tokens), dtype=torch.float32).expand(2, -1)


def recompute(
    model: Model, scratch: Any, tokens: torch.Tensor, chosen: torch.Tensor, **_: Any
) -> torch.Tensor:
    """Exact KV for chosen tokens before the first reused one, marks for the others."""
    states = prefix_states(tokens.tolist())
    for index in range(len(model.layers)):
        keys, values = scratch.layer(index)
        kv = kv_of([states[i] for i in chosen.tolist()], index, model.rank).transpose(0, 1).clone()
        kv[:, chosen >= model.first] = MARK
        keys[:, chosen], values[:, chosen] = kv[..., :HEAD_SIZE], kv[..., HEAD_SIZE:]
    return torch.zeros(len(chosen), 1)


class RigRunner(Runner):
    """The real runner with the rig's model; tells the rig which requests it has blended."""

    def __init__(self, model: Model, region: PoolRegion, max_tokens: int) -> None:
        super().__init__(model, region, max_tokens)  # type: ignore[arg-type]
        self.blended: dict[str, int] = {}
        self.jobs: dict[str, Any] = {}

    def _blend(self, draft: Any) -> Iterator[int]:
        first = int(draft.job.pieces[0][3])
        work = super()._blend(draft)
        while True:
            self._model.first = first  # type: ignore[attr-defined]
            done = next(work, None)
            if done is None:
                break
            yield done
        name = draft.job.request_id
        self.blended[name] = min(first, self.blended.get(name, first))
        self.jobs[name] = draft.job


@dataclass
class BlendRig(Rig):
    """A rig whose workers blend.

    Attributes:
        runners: of the ranks.
        recompute: what stands for the model's forward pass.
    """

    runners: list[RigRunner] = field(default_factory=list)
    recompute: Callable[..., Any] = recompute

    def _make_workers(self) -> None:
        opened = self.runners

        def open_blending(side: WorkerSide, caches: dict[str, torch.Tensor]) -> tuple[str, ...]:
            config = side._loaded.config.blend
            if config.mode == "off" or side._region is None:
                return ()
            model = Model(caches, len(opened) // self.replicas, block_tokens=self.block_size)
            opened.append(RigRunner(model, side._region, config.max_blend_tokens_per_step))
            side._runner = opened[-1]
            return ()

        with mock.patch.object(WorkerSide, "_open_blending", open_blending):
            super()._make_workers()

    @property
    def planner(self) -> Any:
        return self.connector._scheduler._blend

    @property
    def blended(self) -> dict[str, int]:
        """First approximate position of each request that was blended."""
        return self.runners[0].blended

    def _execute(self, plan: SchedulerOutput, rank: int) -> ModelRunnerOutput:
        forward = mock.patch.multiple(runner_module, recompute=self.recompute, attended=attended)
        with forward, torch.inference_mode():
            return super()._execute(plan, rank)

    def _check(self, request_id: str, state: Any, states: list[int], rank: int) -> None:
        first = self.blended.get(request_id, state.computed)
        super()._check(
            request_id, replace(state, computed=min(first, state.computed)), states, rank
        )

    def _forward(self, plan: SchedulerOutput, rank: int) -> dict[str, list[int]]:
        sampled = super()._forward(plan, rank)
        for request_id, count in plan.num_scheduled_tokens.items():
            first = self.blended.get(request_id)
            state = self.running[request_id]
            end = state.computed + count
            if first is None or end <= first:
                continue
            blocks, offsets = self._places(state, 0, max(first, state.computed), end)
            for _, cache in self._layers(0, rank):
                cache[blocks, :, offsets] = MARK
        return sampled
