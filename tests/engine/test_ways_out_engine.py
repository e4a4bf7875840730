# SPDX-License-Identifier: Apache-2.0
"""A real engine in trouble: requests aborted while KV is copied, caches reset.

The engine core runs in the test's own child process, where copies can be held up: a mover that is
late stands in for a GPU's streams, on which a copy may still be under way when a request ends.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import pytest

from tests.engine.engines import ANSWER, BLOCK, Engine, Reference, cached_of, hit, tokens_of
from tests.engine.host import Answer, Host, Prompt
from tests.engine.prompts import Texts
from tests.scheduler.movers import LateMover

pytestmark = [pytest.mark.engine, pytest.mark.timeout(900)]

Pages = npt.NDArray[np.uint8]


def hold_copies(host: Host) -> LateMover:
    """From now on copies happen at the last permitted moment."""
    mover = LateMover(host.worker_side._mover)
    host.worker_side._mover = mover
    return mover


def let_go(host: Host, mover: LateMover) -> None:
    mover.run(loads=True)
    host.worker_side._mover = mover._inner


def abort_during_load(host: Host, prompt: Prompt, other: Prompt) -> tuple[dict[str, int], Answer]:
    """Abort a request whose KV is being loaded, and run another one meanwhile."""
    mover = hold_copies(host)
    host.add("aborted", prompt, ANSWER)
    host.step_until(lambda: mover.waiting[1] == 1)
    host.engine.abort_request(["aborted"])
    host.step()
    during = host.leftovers()
    host.add("other", other, ANSWER)
    answer = host.step_until(lambda: "other" not in host.scheduler.requests)
    let_go(host, mover)
    answer |= host.run()
    return during, answer["other"]


def abort_during_save(host: Host, prompt: Prompt, others: Sequence[Prompt]) -> list[Answer]:
    """Abort a request whose KV is being saved; `others` take and overwrite its blocks."""
    mover = hold_copies(host)
    host.add("aborted", prompt, 100)
    host.step_until(lambda: mover.waiting[0] > 0)
    host.engine.abort_request(["aborted"])
    for i, other in enumerate(others):
        host.add(f"other {i}", other, ANSWER)
    answers = host.step_until(lambda: not host.scheduler.has_unfinished_requests())
    let_go(host, mover)
    host.run()
    host.settle()
    return [answers[f"other {i}"] for i in range(len(others))]


def pages_after_prefill(host: Host, prompt: Prompt, tokens: int) -> tuple[Pages, Answer]:
    """Every layer's bytes of the blocks with the first `tokens`, when the prompt is computed.

    Before that, all of the engine's KV memory is overwritten: what is there later was put there.
    """
    for layer in host.kv_tensors:
        layer.fill_(77.0)
    host.add("pages", prompt, 3)
    request = host.scheduler.requests[next(iter(host.scheduler.requests))]
    ended = host.step_until(lambda: request.num_output_tokens > 0)
    assert not ended
    blocks = host.blocks_of(prompt)[: tokens // BLOCK]
    pages = np.stack([layer[blocks].numpy().view(np.uint8) for layer in host.kv_tensors])
    (answer,) = host.run().values()
    host.settle()
    return pages, answer


def forget_all(host: Host) -> None:
    host.forget(tiers=True)


def nothing_left(engine: Engine) -> bool:
    return set(engine.run(Host.leftovers).values()) == {0}


def test_loaded_pages_are_the_saved_ones_byte_for_byte(tiered: Engine, texts: Texts) -> None:
    prompt = texts(100, 450)
    saved, cold = tiered.run(pages_after_prefill, prompt, hit(450))
    tiered.forget()
    loaded, warm = tiered.run(pages_after_prefill, prompt, hit(450))
    assert (cold.cached, warm.cached) == (0, hit(450))
    assert saved.shape[1] == hit(450) // BLOCK
    # No block is what the memory was filled with, and no two are the same.
    assert len({saved[:, i].tobytes() for i in range(saved.shape[1])}) == saved.shape[1]
    assert np.array_equal(saved, loaded)
    assert nothing_left(tiered)


def test_abort_in_the_middle_of_a_load(tiered: Engine, reference: Reference, texts: Texts) -> None:
    prompt, other = texts(102, 300), texts(103, 280)
    with reference.meanwhile([prompt, other]):
        tiered.generate([prompt])
        tiered.forget()
        during, answer = tiered.run(abort_during_load, prompt, other)
    # Until the copy has ended, nobody else may get its blocks; then everything comes back.
    assert during["vllm requests"] == 1
    assert during["blocks"] >= hit(300) // BLOCK
    assert during["leases"] > 0
    assert nothing_left(tiered)
    tiered.forget()
    again = tiered.generate([prompt, other])
    assert [answer.tokens, *tokens_of(again)] == reference.tokens([other, prompt, other])
    assert cached_of(again) == [hit(300), hit(280)]


def test_abort_in_the_middle_of_a_save(tiered: Engine, reference: Reference, texts: Texts) -> None:
    prompt = texts(105, 600)
    # Together more than the engine has room for: the aborted request's blocks are written again.
    others = [texts(106 + i, 580) for i in range(5)]
    with reference.meanwhile([*others, prompt]):
        answers = tiered.run(abort_during_save, prompt, others)
    assert tokens_of(answers) == reference.tokens(others)
    assert nothing_left(tiered)
    tiered.forget()
    (again,) = tiered.generate([prompt])
    assert [again.tokens] == reference.tokens([prompt])
    # What was complete when it was aborted is not lost: at least the first step's chunks.
    assert again.cached >= 256


def test_reset_of_the_connector_forgets_all_tiers(
    tiered: Engine, reference: Reference, texts: Texts
) -> None:
    prompt = texts(125, 300)
    tiered.generate([prompt])
    tiered.run(forget_all)
    (after,) = tiered.generate([prompt])
    assert after.cached == 0
    assert [after.tokens] == reference.tokens([prompt])
    # And it goes on caching.
    tiered.forget()
    (warm,) = tiered.generate([prompt])
    assert warm.cached == hit(300)
    assert [warm.tokens] == reference.tokens([prompt])
    assert nothing_left(tiered)
