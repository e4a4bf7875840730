# SPDX-License-Identifier: Apache-2.0
"""The same tokens with and without TierKV, and exactly as much taken from the cache as is there.

In float32: in bfloat16 a prefill that is cut elsewhere may round to another token by itself. Every
prompt is computed in pieces of at most 256 tokens, together with others, while the reference
computes each alone and whole.
"""

from __future__ import annotations

import pytest

from tests.engine.engines import CHUNK, Engine, Reference, cached_of, hit, tokens_of
from tests.engine.host import Host
from tests.engine.prompts import Texts

pytestmark = [pytest.mark.engine, pytest.mark.timeout(900)]

# Around multiples of the chunk (64) and of the block (32), shorter than either, longer than a step.
LENGTHS = [1, 5, 31, 32, 33, 63, 64, 65, 95, 96, 97, 127, 128, 129, 150, 191, 192, 193]
LENGTHS += [255, 256, 257, 319, 320, 321, 450, 511, 512, 513, 700]


def hits_since(engine: Engine, before: dict[tuple[str, str], int]) -> dict[str, int]:
    """Hit tokens by tier since `before`, an earlier `Host.counted`."""
    after = engine.run(Host.counted)
    return {
        tier: tokens - before.get((outcome, tier), 0)
        for (outcome, tier), tokens in after.items()
        if outcome == "hit" and tokens != before.get((outcome, tier), 0)
    }


def test_prompts_of_every_length_give_the_same_tokens_cold_and_from_dram(
    tiered: Engine, reference: Reference, texts: Texts
) -> None:
    prompts = [texts(i, length) for i, length in enumerate(LENGTHS)]
    with reference.meanwhile(prompts):
        cold = tiered.generate(prompts)
        tiered.forget()
        before = tiered.run(Host.counted)
        warm = tiered.generate(prompts)
    right = reference.tokens(prompts)
    assert tokens_of(cold) == right
    assert cached_of(cold) == [0] * len(LENGTHS)
    assert tokens_of(warm) == right
    assert cached_of(warm) == [hit(length) for length in LENGTHS]
    assert hits_since(tiered, before) == {"dram": sum(map(hit, LENGTHS))}


def test_hits_and_misses_in_one_batch_do_not_disturb_each_other(
    tiered: Engine, reference: Reference, texts: Texts
) -> None:
    known = [texts(40 + i, length) for i, length in enumerate([300, 129, 420, 64])]
    new = [texts(50 + i, length) for i, length in enumerate([310, 70, 400, 130])]
    # A known beginning that goes on differently.
    half = [known[0][:200] + texts(60, 90), known[2][:128] + texts(61, 40)]
    tiered.generate(known)
    tiered.forget()
    batch = [new[0], known[0], half[0], known[1], new[1], half[1], known[2], new[2], new[3]]
    batch.append(known[3])
    with reference.meanwhile(batch):
        answers = tiered.generate(batch)
    assert tokens_of(answers) == reference.tokens(batch)
    expected = [0, 300, 200, 129, 0, 128, 420, 0, 0, 64]
    assert cached_of(answers) == [
        hit(len(prompt), stored) for prompt, stored in zip(batch, expected, strict=True)
    ]


def test_prompts_with_one_beginning_in_one_batch(
    tiered: Engine, reference: Reference, texts: Texts
) -> None:
    beginning = texts(70, 200)
    batch = [beginning + texts(71 + i, 30 + 25 * i) for i in range(5)]
    with reference.meanwhile(batch):
        cold = tiered.generate(batch)
        tiered.forget()
        warm = tiered.generate(batch)
    right = reference.tokens(batch)
    assert tokens_of(cold) == right
    # vLLM shares the blocks that the first one computes.
    assert cached_of(cold) == [0, 192, 192, 192, 192]
    assert tokens_of(warm) == right
    assert cached_of(warm) == [hit(len(prompt)) for prompt in batch]


def test_a_chat_finds_its_own_answers(tiered: Engine, reference: Reference, texts: Texts) -> None:
    history, computed = texts(80, 120), 0
    for turn in range(3):
        with reference.meanwhile([history], 20):
            (answer,) = tiered.generate([history], 20)
        assert [answer.tokens] == reference.tokens([history], 20)
        assert answer.cached == hit(len(history), computed)
        # The last token of the answer was never fed back: it has no KV.
        computed = len(history) + 20 - 1
        history = history + list(answer.tokens) + texts(81 + turn, 45)
        tiered.forget()
    # The third turn finds a chunk that ends in the second one's answer.
    asked, answered = 120 + 20 + 45, 120 + 20 + 45 + 20 - 1
    assert answer.cached == answered // CHUNK * CHUNK > asked
