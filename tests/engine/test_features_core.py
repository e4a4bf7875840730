# SPDX-License-Identifier: Apache-2.0
"""What vLLM offers to requests, the same with TierKV as without: tokens, log probabilities, ends.

One small random model in float32, two engines for all rows: with TierKV, and without.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.engine.engines import CHUNK, REFERENCE_CPU, Engine, hit, options, tiers
from tests.engine.host import Host, Prompt
from tests.engine.pairs import Pair, completions, generate, loaded_tokens, sampling, settled
from tests.engine.prompts import Texts

pytestmark = [pytest.mark.engine, pytest.mark.timeout(120)]

MAX_LEN = 1600
STEP = 1024
"""Tokens of one step. Prompts of requests with a seed must not be cut: vLLM 0.32 on the CPU raises
"CPU Generator does not use offset" for them, with TierKV or without."""


@pytest.fixture(scope="module")
def pair(random_llama_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    logs = tmp_path_factory.mktemp("core")
    common: dict[str, Any] = {
        "skip_tokenizer_init": False,
        "scheduling_policy": "priority",
        "max_num_batched_tokens": STEP,
        "max_model_len": MAX_LEN,
        "num_gpu_blocks_override": 64,
        "max_logprobs": 8,
    }
    off = Engine(options(random_llama_dir, **common), logs / "off", REFERENCE_CPU)
    try:
        on = Engine(options(random_llama_dir, tiers("512MiB"), **common), logs / "on")
    except BaseException:
        off.kill()
        raise
    yield Pair(on, off)
    on.close()
    off.close()


def greedy(host: Host, prompts: list[Prompt], **more: Any) -> Any:
    return completions(generate(host, prompts, sampling(logprobs=2, **more)))


def feature(row: str) -> pytest.MarkDecorator:
    return pytest.mark.feature(row)


@feature("chunked prefill")
@feature("block size 32")
def test_prompts_longer_than_a_step(pair: Pair, texts: Texts) -> None:
    pair.same(greedy, [texts(0, 700), texts(1, 520), texts(2, STEP + 200)])


@feature("very short prompts; prompts of exactly k chunks")
def test_prompts_around_every_boundary(pair: Pair, texts: Texts) -> None:
    lengths = [1, 2, 31, 32, 33, 63, 64, 65, 127, 128, 129, 192, 256]
    pair.same(greedy, [texts(5 + i, length) for i, length in enumerate(lengths)])


@feature("max-model-len edge")
def test_prompts_that_fill_the_context(pair: Pair, texts: Texts) -> None:
    full = pair.same(edges, texts(20, MAX_LEN - 1), texts(22, MAX_LEN - 6))
    assert [sample[0]["finish"] for sample in full] == ["length", "length"]


def edges(host: Host, last: Prompt, six: Prompt) -> Any:
    first = generate(host, [last], sampling(max_tokens=1, logprobs=1))
    # More than there is room for: the context ends the answer.
    return completions(first + generate(host, [six], sampling(max_tokens=6, logprobs=1)))


@feature("automatic prefix caching on")
def test_vllms_own_cache_and_tierkv_share_a_prompt(pair: Pair, texts: Texts) -> None:
    pair.same(one_after_the_other, [texts(25, 300), texts(25, 450), texts(25, 290)])


def one_after_the_other(host: Host, prompts: list[Prompt]) -> Any:
    return [greedy(host, [prompt]) for prompt in prompts]


@feature("parallel sampling n>1")
def test_parallel_samples_of_one_prompt(pair: Pair, texts: Texts) -> None:
    right = pair.same(parallel, [texts(30, 203), texts(31, 90)])
    assert len(right[0]) == 4
    assert len({tuple(sample["tokens"]) for sample in right[0]}) > 1


def parallel(host: Host, prompts: list[Prompt]) -> Any:
    params = sampling(n=4, temperature=0.9, seed=7, logprobs=1, max_tokens=40)
    return [completions(generate(host, [prompt], params))[0] for prompt in prompts]


@feature("beam search")
def test_beam_search(pair: Pair, texts: Texts) -> None:
    pair.same(beams, [texts(35, 150), texts(36, 270)])


def beams(host: Host, prompts: list[Prompt]) -> Any:
    from vllm.sampling_params import BeamSearchParams

    params = BeamSearchParams(beam_width=3, max_tokens=8, ignore_eos=True)
    inputs = [{"prompt_token_ids": list(prompt)} for prompt in prompts]
    outputs = host.llm.beam_search(inputs, params)
    host.settle()
    return [
        [(list(beam.tokens), float(beam.cum_logprob)) for beam in output.sequences]
        for output in outputs
    ]


@feature("shared prefixes in one batch")
def test_prompts_that_share_beginnings(pair: Pair, texts: Texts) -> None:
    trunk = texts(40, 260)
    pair.same(greedy, [trunk[: 60 * i] + texts(41 + i, 50) for i in range(5)])


@feature("mixed decoding parameters in one batch")
def test_different_parameters_in_one_batch(pair: Pair, texts: Texts) -> None:
    right = pair.same(mixed, [texts(50 + i, 70 + 10 * i) for i in range(7)])
    assert right[6][0]["finish"] == "stop"


def mixed(host: Host, prompts: list[Prompt]) -> Any:
    likely = generate(host, [prompts[6]], sampling(max_tokens=3))[0].outputs[0].token_ids[2]
    params = [
        sampling(logprobs=2),
        sampling(temperature=0.7, top_p=0.9, seed=1, max_tokens=9),
        sampling(temperature=1.2, top_k=20, seed=2),
        sampling(repetition_penalty=1.3, presence_penalty=0.5, max_tokens=12),
        sampling(logit_bias={5: 3.0, 9: -100.0}, logprobs=1),
        sampling(temperature=0.8, min_p=0.05, seed=3, n=2),
        sampling(stop_token_ids=[likely], max_tokens=20),
    ]
    return completions(generate(host, prompts, params))


@feature("prompt logprobs")
def test_prompt_logprobs_are_computed_and_complete(pair: Pair, texts: Texts) -> None:
    # Every position has to be computed: nothing may be loaded.
    right = pair.same(prompt_logprobs, texts(60, 200), hits=False)
    assert len(right[0]) == 200


def prompt_logprobs(host: Host, prompt: Prompt) -> Any:
    (output,) = generate(host, [prompt], sampling(prompt_logprobs=1, logprobs=1))
    taken = [
        float(step[token].logprob)
        for step, token in zip(output.prompt_logprobs[1:], list(prompt)[1:], strict=True)
    ]
    return [[0.0, *taken], completions([output])]


@feature("structured output")
def test_structured_output(pair: Pair, texts: Texts) -> None:
    right = pair.same(structured, [texts(65, 140), texts(66, 200)])
    assert right[0][0]["text"] in ("yes", "no", "perhaps")
    assert right[1][0]["text"].startswith("id-")


def structured(host: Host, prompts: list[Prompt]) -> Any:
    from vllm.sampling_params import StructuredOutputsParams

    wanted = [
        StructuredOutputsParams(choice=["yes", "no", "perhaps"]),
        StructuredOutputsParams(regex=r"id-[0-9]{4}-[a-f]{3}"),
    ]
    params = [sampling(max_tokens=24, ignore_eos=False, structured_outputs=w) for w in wanted]
    return completions(generate(host, prompts, params))


@feature("cache_salt tenants")
def test_tenants_get_the_same_answers_and_share_nothing(pair: Pair, texts: Texts) -> None:
    prompt = texts(70, 300)
    pair.same(salted, prompt, ["a", "b", None])
    # "a" and "b" each own a copy now; "c" has none.
    before = pair.on.run(loaded_tokens)
    pair.on.run(salted, prompt, ["c"])
    assert pair.on.run(loaded_tokens) == before
    pair.on.run(settled)
    pair.on.run(salted, prompt, ["c"])
    assert pair.on.run(loaded_tokens) - before == hit(300)
    pair.on.run(settled)


def salted(host: Host, prompt: Prompt, salts: list[str | None]) -> Any:
    prompts = [
        {"prompt_token_ids": list(prompt), **({"cache_salt": salt} if salt else {})}
        for salt in salts
    ]
    return completions(generate(host, prompts, sampling(logprobs=1)))


@feature("priority scheduling with preemption")
def test_urgent_requests_preempt_others(pair: Pair, texts: Texts) -> None:
    # 63 blocks of 32 tokens for 2,016 tokens; these come to about 2,500.
    pair.same(urgent, [texts(80 + i, 330) for i in range(5)], [texts(86, 500), texts(87, 300)])
    for engine in (pair.on, pair.off):
        assert sum(engine.run(Host.metrics, "vllm:num_preemptions").values()) > 0


def urgent(host: Host, patient: list[Prompt], pressing: list[Prompt]) -> Any:
    for i, prompt in enumerate(patient):
        host.engine.add_request(
            f"patient {i}",
            {"prompt_token_ids": list(prompt)},
            sampling(max_tokens=60, detokenize=False),
            priority=5,
        )
    ended: dict[str, Any] = {}
    for _ in range(12):
        ended |= host.step()
    for i, prompt in enumerate(pressing):
        host.engine.add_request(
            f"pressing {i}",
            {"prompt_token_ids": list(prompt)},
            sampling(max_tokens=8, detokenize=False),
            priority=0,
        )
    ended |= host.run()
    host.settle()
    return {name: list(answer.tokens) for name, answer in sorted(ended.items())}


@feature("abort and disconnect in the middle")
def test_requests_that_are_aborted_at_any_point(pair: Pair, texts: Texts) -> None:
    pair.same(aborting, [texts(90 + i, 200 + 40 * i) for i in range(6)])


def aborting(host: Host, prompts: list[Prompt]) -> Any:
    ended: dict[str, Any] = {}
    for i, prompt in enumerate(prompts):
        host.add(f"r{i}", prompt, 20)
    for steps, victim in ((0, "r0"), (1, "r1"), (2, "r2"), (8, "r4")):
        for _ in range(steps):
            ended |= host.step()
        host.engine.abort_request([victim])
    ended |= host.run()
    host.settle()
    return {name: list(ended[name].tokens) for name in ("r3", "r5")}


@feature("n requests for the same uncached prompt at once")
def test_the_same_prompt_many_times_at_once(pair: Pair, texts: Texts) -> None:
    prompts = [texts(100, 500)] * 6
    pair.same(greedy, prompts)
    # Computed once: one copy of it is stored, and the others shared vLLM's blocks.
    pair.on.run(Host.forget)
    before = pair.on.run(chunks)
    fresh = [texts(101, 500)] * 6
    pair.on.run(greedy, fresh)
    assert pair.on.run(chunks) - before == 500 // CHUNK
    pair.on.run(settled)


def chunks(host: Host) -> int:
    return int(host.side.store.snapshot()["tierkv_chunks"][0]["value"])


@feature("streaming")
def test_streamed_answers_come_token_by_token(pair: Pair, texts: Texts) -> None:
    right = pair.same(streamed, texts(110, 260))
    assert [len(delta) for delta in right] == [1] * 8


def streamed(host: Host, prompt: Prompt) -> Any:
    from vllm.sampling_params import RequestOutputKind

    params = sampling(max_tokens=8, output_kind=RequestOutputKind.DELTA)
    host.engine.add_request("stream", {"prompt_token_ids": list(prompt)}, params)
    deltas = []
    while host.engine.has_unfinished_requests():
        for output in host.engine.step():
            deltas += [list(sample.token_ids) for sample in output.outputs if sample.token_ids]
    host.settle()
    return deltas


@feature("multi-turn chat with generated text reused")
def test_turns_of_a_chat(pair: Pair, texts: Texts) -> None:
    pair.same(chat, texts(115, 120), [texts(116 + i, 40) for i in range(3)])


def chat(host: Host, history: Prompt, turns: list[Prompt]) -> Any:
    said, history = [], list(history)
    for turn in turns:
        (output,) = generate(host, [history], sampling(max_tokens=30))
        answer = list(output.outputs[0].token_ids)
        said.append(answer)
        history += answer + list(turn)
        host.forget()
    return said


@feature("reset_prefix_cache")
def test_a_reset_of_all_caches_forgets_tierkvs_too(pair: Pair, texts: Texts) -> None:
    prompt = texts(120, 300)
    right = pair.same(greedy, [prompt])
    pair.on.run(reset_all)
    before = pair.on.run(loaded_tokens)
    again = pair.on.run(greedy, [prompt])
    assert pair.on.run(loaded_tokens) == before
    assert again[0][0]["tokens"] == right[0][0]["tokens"]
    pair.on.run(settled)


def reset_all(host: Host) -> None:
    host.forget(tiers=True)


@feature("PagedAttention's sharing: reference counts")
def test_blocks_are_shared_and_let_go_of(pair: Pair, texts: Texts) -> None:
    pair.same(greedy, [texts(125, 290)])
    # Loaded blocks, shared by four samples of each prompt while they run.
    shared = pair.on.run(references, texts(125, 290))
    assert shared == 4
    pair.on.run(settled)


def references(host: Host, prompt: Prompt) -> int:
    """Most references to the first loaded block while four samples of a prompt run."""
    params = sampling(n=4, temperature=0.9, seed=3, max_tokens=12)
    host.engine.add_request("shared", {"prompt_token_ids": list(prompt)}, params)
    most = 0
    manager = host.scheduler.kv_cache_manager
    while host.engine.has_unfinished_requests():
        host.engine.step()
        for request_id in host.scheduler.requests:
            blocks = manager.get_blocks(request_id).blocks[0]
            most = max([most, *(block.ref_cnt for block in blocks[:1])])
    host.settle()
    return most


def test_sleep_mode_is_not_there_on_this_platform() -> None:
    from vllm.platforms import current_platform

    # vLLM refuses it itself; on a platform that has it, this row needs a test.
    assert not current_platform.is_sleep_mode_available()
