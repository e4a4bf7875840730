# SPDX-License-Identifier: Apache-2.0
"""The same thing done by an engine with TierKV and by one without: the answers must be the same.

A scenario is a function of a host (and more); it uses what vLLM offers and returns plain values.
It runs without TierKV once, and with TierKV twice: with nothing cached, and with everything in
TierKV and nothing in vLLM's own cache.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tests.engine.engines import Engine
from tests.engine.host import Host

TOLERANCE = 2e-3
"""Of log probabilities: in float32 a prefill that is cut elsewhere moves them by about 1e-5."""


class Pair:
    """Two engines that differ in nothing but TierKV."""

    def __init__(self, on: Engine, off: Engine) -> None:
        self.on, self.off = on, off

    def same(self, scenario: Callable[..., Any], *arguments: Any, hits: bool = True) -> Any:
        """Compare, and return the right answers.

        Args:
            hits: whether the second run must load something.
        """
        self.off.begin(scenario, *arguments)
        try:
            try:
                cold = self.on.run(scenario, *arguments)
                self.on.run(settled)
                before = self.on.run(loaded_tokens)
                warm = self.on.run(scenario, *arguments)
                loaded = self.on.run(loaded_tokens) - before
            finally:
                right = self.off.result()
        except BaseException:
            # Others use the engines after this one.
            self.on.run(abandon)
            self.off.run(abandon)
            raise
        assert_same(cold, right, "cold")
        assert_same(warm, right, "warm")
        assert (loaded > 0) == hits, f"{loaded} tokens were loaded"
        self.on.run(settled)
        self.off.forget()
        return right


def settled(host: Host) -> None:
    """Nothing is left over, no block is referenced; then vLLM's own cache is emptied."""
    host.settle()
    left = host.leftovers()
    assert not any(left.values()), left
    pool = host.scheduler.kv_cache_manager.block_pool
    held = [b.block_id for b in pool.blocks if b.ref_cnt and not b.is_null]
    assert not held, f"blocks {held} are still referenced"
    host.forget()


def abandon(host: Host) -> None:
    """End whatever a scenario that failed has left running."""
    host.engine.abort_request(list(host.engine.output_processor.request_states), internal=True)


def loaded_tokens(host: Host) -> int:
    return sum(n for (outcome, _), n in host.counted().items() if outcome == "hit")


def assert_same(got: Any, right: Any, where: str) -> None:
    """Equal, but for the last digits of log probabilities."""
    if isinstance(right, float):
        assert abs(got - right) < TOLERANCE, f"{where}: {got} instead of {right}"
    elif isinstance(right, Mapping):
        assert got.keys() == right.keys(), f"{where}: {list(got)} instead of {list(right)}"
        for key in right:
            assert_same(got[key], right[key], f"{where}, {key}")
    elif isinstance(right, Sequence) and not isinstance(right, str):
        assert len(got) == len(right), f"{where}: {got} instead of {right}"
        for index, (a, b) in enumerate(zip(got, right, strict=True)):
            assert_same(a, b, f"{where}[{index}]")
    else:
        assert got == right, f"{where}: {got!r} instead of {right!r}"


def completions(outputs: Sequence[Any]) -> list[list[dict[str, Any]]]:
    """Everything comparable about the answers: by request, by sample."""
    return [[_completion(sample) for sample in output.outputs] for output in outputs]


def _completion(sample: Any) -> dict[str, Any]:
    found: dict[str, Any] = {
        "tokens": list(sample.token_ids),
        "finish": sample.finish_reason,
        "text": sample.text,
    }
    if sample.logprobs is not None:
        # Of the token that was taken: the order of the others may be a matter of rounding.
        found["logprobs"] = [
            float(step[token].logprob)
            for step, token in zip(sample.logprobs, sample.token_ids, strict=True)
        ]
    return found


def generate(host: Host, prompts: Sequence[Any], params: Any, **more: Any) -> list[Any]:
    """`LLM.generate` for token ids, or for vLLM's own prompt dictionaries."""
    inputs = [p if isinstance(p, dict) else {"prompt_token_ids": list(p)} for p in prompts]
    outputs = host.llm.generate(inputs, params, use_tqdm=False, **more)
    host.settle()
    return list(outputs)


def sampling(**options: Any) -> Any:
    from vllm import SamplingParams

    return SamplingParams(**{"temperature": 0, "max_tokens": 6, "ignore_eos": True, **options})
