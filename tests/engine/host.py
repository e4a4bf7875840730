# SPDX-License-Identifier: Apache-2.0
"""The process in which an engine under test lives: vLLM's `LLM`, and how a test reaches into it.

With vLLM's engine core in the same process (the default here) a test can step it, put a mover that
is late in its way, and look at its memory. Work comes as (function, arguments) over a connection:
the function is called with the host first, so that tests keep what they do to an engine beside
what they expect of it.
"""

from __future__ import annotations

import os
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

Prompt = Sequence[int]

STEP_LIMIT = 1_000_000
"""Far more than any wait for a disk takes: steps in which nothing can run are short."""


@dataclass(frozen=True, slots=True)
class Answer:
    """What came back for one prompt.

    Attributes:
        tokens: generated ids.
        cached: prompt tokens that were not computed, by vLLM's count.
        margin: least distance of the two likeliest tokens' log probabilities over all steps; 0
            where it was not asked for. Where it is tiny, rounding decides.
    """

    tokens: tuple[int, ...]
    cached: int
    margin: float = 0.0


class Host:
    """One engine.

    Args:
        options: of `vllm.LLM`.
    """

    def __init__(self, options: Mapping[str, Any]) -> None:
        from vllm import LLM

        self.llm = LLM(**options)
        self.engine = self.llm.llm_engine

    def generate(
        self,
        prompts: Sequence[Prompt],
        count: int,
        params: Mapping[str, Any] | None = None,
        margins: bool = False,
    ) -> list[Answer]:
        """Greedy answers of exactly `count` tokens, all prompts at once; then nothing is left."""
        sampling = self.sampling(count, params, margins)
        inputs = [{"prompt_token_ids": list(prompt)} for prompt in prompts]
        outputs = self.llm.generate(inputs, sampling, use_tqdm=False)
        self.settle()
        return [_answer(output) for output in outputs]

    def sampling(
        self, count: int, params: Mapping[str, Any] | None = None, margins: bool = False
    ) -> Any:
        from vllm import SamplingParams

        return SamplingParams(
            temperature=0,
            max_tokens=count,
            ignore_eos=True,
            detokenize=False,
            logprobs=2 if margins else None,
            extra_args={"kv_transfer_params": params} if params is not None else None,
        )

    def add(self, request_id: str, prompt: Prompt, count: int) -> None:
        """Queue a request; `step` runs it."""
        self.engine.add_request(
            request_id, {"prompt_token_ids": list(prompt)}, self.sampling(count)
        )

    def step(self) -> dict[str, Answer]:
        """One engine step; the answers that it ended."""
        return {out.request_id: _answer(out) for out in self.engine.step() if out.finished}

    def step_until(self, condition: Callable[[], bool]) -> dict[str, Answer]:
        """Step until it holds; the answers that ended meanwhile."""
        ended: dict[str, Answer] = {}
        for _ in range(STEP_LIMIT):
            if condition():
                return ended
            ended |= self.step()
        raise AssertionError(f"not after {STEP_LIMIT} steps")

    def run(self) -> dict[str, Answer]:
        """Step until no request is left, and nothing for the connector to do."""
        return self.step_until(lambda: not self.scheduler.has_requests())

    def settle(self) -> None:
        """Let the connector end its copies and the store its writes.

        An engine core in a process of its own does that by itself.
        """
        if self.is_in_process:
            self.run()
            if self.side is not None:
                assert self.side.store.drain(60.0)

    def forget(self, *, tiers: bool = False) -> None:
        """Empty vLLM's own prefix cache, and with `tiers` TierKV's."""
        assert self.llm.reset_prefix_cache(reset_connector=tiers)

    def metrics(self, name: str) -> dict[tuple[str, ...], float]:
        """A metric of vLLM's page by the values of TierKV's labels, zeros left out."""
        own = ("model_name", "engine")
        return {
            tuple(value for label, value in metric.labels.items() if label not in own): metric.value
            for metric in self.llm.get_metrics()
            if metric.name == name and metric.value
        }

    def close(self) -> None:
        self.engine.engine_core.shutdown()

    # With the engine core in this process

    @property
    def is_in_process(self) -> bool:
        return hasattr(self.engine.engine_core, "engine_core")

    @property
    def core(self) -> Any:
        return self.engine.engine_core.engine_core

    @property
    def scheduler(self) -> Any:
        return self.core.scheduler

    @property
    def connector(self) -> Any:
        """The scheduler's half; None without TierKV."""
        return self.scheduler.connector

    @property
    def side(self) -> Any:
        """What the connector drives; None without TierKV or where it stands aside."""
        return self.connector._scheduler if self.connector is not None else None

    @property
    def worker_side(self) -> Any:
        from vllm.distributed.kv_transfer import get_kv_transfer_group

        return get_kv_transfer_group()._worker

    @property
    def kv_tensors(self) -> list[Any]:
        """The engine's KV memory, one tensor a layer, blocks first."""
        return list(self.core.model_executor.driver_worker.worker.model_runner.kv_caches)

    def blocks_of(self, prompt_start: Prompt) -> list[int]:
        """Engine blocks of the one living request whose prompt begins so."""
        (request,) = [
            request
            for request in self.scheduler.requests.values()
            if request.prompt_token_ids[: len(prompt_start)] == list(prompt_start)
        ]
        return list(self.scheduler.kv_cache_manager.get_block_ids(request.request_id)[0])

    def counted(self) -> dict[tuple[str, str], int]:
        """Query tokens by (outcome, tier), zeros left out."""
        series = self.side.store.snapshot()["tierkv_query_tokens_total"]
        return {
            (one["labels"]["outcome"], one["labels"]["tier"]): int(one["value"])
            for one in series
            if one["value"]
        }

    def counter(self, name: str, *labels: str) -> dict[tuple[str, ...], int]:
        """One of TierKV's counters by some of its labels, zeros left out."""
        found: dict[tuple[str, ...], int] = {}
        for one in self.side.store.snapshot()[name]:
            if one["value"]:
                key = tuple(one["labels"][label] for label in labels)
                found[key] = found.get(key, 0) + int(one["value"])
        return found

    def leftovers(self) -> dict[str, int]:
        """What must be zero when nothing runs: requests, jobs, leases, blocks in use."""
        pool = self.scheduler.kv_cache_manager.block_pool
        return {
            **self.side.snapshot(),
            "leases": int(self.side.store.snapshot()["tierkv_leased_slots"][0]["value"]),
            "vllm requests": len(self.scheduler.requests),
            # One block is vLLM's null block.
            "blocks": pool.num_gpu_blocks - 1 - pool.get_num_free_blocks(),
        }


def _answer(output: Any) -> Answer:
    completion = output.outputs[0]
    margins = []
    for step in completion.logprobs or ():
        best, second = sorted((entry.logprob for entry in step.values()), reverse=True)[:2]
        margins.append(best - second)
    return Answer(
        tuple(completion.token_ids), output.num_cached_tokens or 0, min(margins, default=0.0)
    )


def serve(
    connection: Connection, log: Path, environment: Mapping[str, str], options: Mapping[str, Any]
) -> None:
    """Body of the process: make the engine, do as told until the other side hangs up.

    Replies are (ok, value or traceback); the first one tells whether the engine started.
    """
    # A group of its own, so that vLLM's processes can be ended with it.
    os.setpgid(0, 0)
    with log.open("ab", buffering=0) as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    os.environ.update(environment)
    host: Host | None = None
    try:
        host = Host(options)
        connection.send((True, os.getpid()))
    except BaseException:
        connection.send((False, traceback.format_exc()))
        return
    while True:
        try:
            function, arguments = connection.recv()
        except EOFError:
            return
        try:
            reply = (True, function(host, *arguments))
        except BaseException:
            traceback.print_exc()
            reply = (False, traceback.format_exc())
        connection.send(reply)
