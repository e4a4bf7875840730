# SPDX-License-Identifier: Apache-2.0
"""What comes back, from which tier, and how it is counted. The rig checks every byte by itself."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.scheduler.conftest import dram, dram_and_disk, text
from tests.scheduler.rig import Rig, expected_output

MakeRig = Callable[..., Rig]


def counted(rig: Rig) -> dict[tuple[str, str], int]:
    """Query tokens by (outcome, tier), zeros left out."""
    snapshot = rig.connector._scheduler.store.context.counters.snapshot()
    return {
        (series["labels"]["outcome"], series["labels"]["tier"]): int(series["value"])
        for series in snapshot["tierkv_query_tokens_total"]
        if series["value"]
    }


def forget_engine_cache(rig: Rig) -> None:
    """Empty vLLM's own prefix cache; TierKV's stays."""
    assert rig.scheduler.reset_prefix_cache()


def idle(rig: Rig) -> None:
    """No request, job or lease is left, and all engine blocks are free."""
    side = rig.connector._scheduler
    assert side.store.drain()
    assert not any(side.snapshot().values()), side.snapshot()
    assert side.store.snapshot()["tierkv_leased_slots"][0]["value"] == 0
    assert rig.free_blocks() == rig.num_blocks - 1


def test_a_prompt_comes_back_from_dram_when_the_engine_has_forgotten_it(make_rig: MakeRig) -> None:
    rig = make_rig()
    prompt = text(1, 300)
    rig.generate("cold", prompt)
    forget_engine_cache(rig)
    rig.generate("warm", prompt)
    # 300 tokens: 4 chunks of 64 and 44 more; the answer made no fifth chunk.
    assert counted(rig) == {
        ("miss", "none"): 256,
        ("tail", "none"): 44 + 44,
        ("hit", "dram"): 256,
    }
    idle(rig)


def test_nothing_is_loaded_that_the_engine_holds_itself(make_rig: MakeRig) -> None:
    rig = make_rig()
    prompt = text(2, 300)
    rig.generate("cold", prompt)
    rig.generate("warm", prompt)
    # vLLM holds 18 blocks = 288 tokens; 12 are queried again and make no chunk.
    assert counted(rig) == {("miss", "none"): 256, ("tail", "none"): 44 + 12}


def test_a_hit_begins_where_the_engines_own_hit_ends_inside_a_chunk(make_rig: MakeRig) -> None:
    rig = make_rig(num_blocks=64)
    prompt = text(3, 300)
    rig.generate("cold", prompt)
    forget_engine_cache(rig)
    # 96 tokens = 1.5 chunks: too short for a load of the second chunk, so it is computed.
    rig.generate("short", prompt[:100])
    before = counted(rig)
    rig.generate("long", prompt)
    after = counted(rig)
    # The engine holds 96 tokens itself; 160 more come from chunks 1 (its second half), 2 and 3.
    assert after["hit", "dram"] - before["hit", "dram"] == 256 - 96
    idle(rig)


def test_shared_beginnings_hit_up_to_the_last_common_chunk(make_rig: MakeRig) -> None:
    rig = make_rig()
    shared = text(4, 200)
    rig.generate("first", shared + text(5, 100))
    forget_engine_cache(rig)
    rig.generate("second", shared + text(6, 100))
    assert counted(rig)["hit", "dram"] == 192


@pytest.mark.parametrize(("length", "hit"), [(64, 48), (65, 64), (128, 112), (129, 128), (63, 0)])
def test_a_hit_ends_at_the_last_block_before_the_last_token(
    make_rig: MakeRig, length: int, hit: int
) -> None:
    rig = make_rig()
    prompt = text(7, length)
    rig.generate("cold", prompt)
    forget_engine_cache(rig)
    rig.generate("warm", prompt)
    assert counted(rig).get(("hit", "dram"), 0) == hit


def test_generated_tokens_are_reused_in_the_next_turn(make_rig: MakeRig) -> None:
    rig = make_rig()
    prompt = text(8, 100)
    rig.generate("turn 1", prompt, 100)
    forget_engine_cache(rig)
    turn2 = prompt + expected_output(prompt, 100) + text(9, 30)
    rig.generate("turn 2", turn2)
    # 199 tokens of turn 1 have KV (the last one sampled has none): three whole chunks.
    assert counted(rig)["hit", "dram"] == 192


def test_generated_tokens_are_not_kept_with_save_prompt(make_rig: MakeRig) -> None:
    rig = make_rig(dram(save="prompt"))
    prompt = text(8, 100)
    rig.generate("turn 1", prompt, 100)
    forget_engine_cache(rig)
    rig.generate("turn 2", prompt + expected_output(prompt, 100) + text(9, 30))
    assert counted(rig)["hit", "dram"] == 64


def test_a_restarted_engine_finds_its_cache_on_disk(make_rig: MakeRig, tmp_path: Path) -> None:
    config = dram_and_disk(tmp_path / "kv")
    prompt = text(10, 500)
    first = make_rig(config)
    first.generate("cold", prompt)
    first.close()
    second = make_rig(config)
    second.generate("restarted", prompt)
    assert counted(second)["hit", "disk"] == 448
    forget_engine_cache(second)
    second.generate("again", prompt)
    assert counted(second)["hit", "dram"] == 448
    assert counted(second)["hit", "disk"] == 448
    idle(second)


def test_what_dram_evicted_comes_back_from_disk(make_rig: MakeRig, tmp_path: Path) -> None:
    # 32 slots of 8 KiB for six documents of 7 chunks; half of them may wait to be written.
    rig = make_rig(dram_and_disk(tmp_path / "kv", capacity="256KiB"))
    documents = [text(20 + i, 450) for i in range(6)]
    for i, document in enumerate(documents):
        rig.generate(f"cold {i}", document)
        forget_engine_cache(rig)
        assert rig.connector._scheduler.store.drain()
    for i, document in enumerate(documents):
        rig.generate(f"warm {i}", document)
        forget_engine_cache(rig)
    seen = counted(rig)
    # Cycling through more than fits, LRU has always just evicted what comes next.
    assert seen["hit", "disk"] + seen.get(("hit", "dram"), 0) == 6 * 448
    assert seen["hit", "disk"] >= 3 * 448
    idle(rig)


def test_tenants_never_share(make_rig: MakeRig) -> None:
    rig = make_rig()
    prompt = text(11, 300)
    rig.generate("a", prompt, salt="tenant a")
    forget_engine_cache(rig)
    rig.generate("b", prompt, salt="tenant b")
    rig.generate("none", prompt)
    assert ("hit", "dram") not in counted(rig)
    forget_engine_cache(rig)
    rig.generate("a again", prompt, salt="tenant a")
    assert counted(rig)["hit", "dram"] == 256


def test_a_request_may_opt_out_of_loading_or_saving(make_rig: MakeRig) -> None:
    rig = make_rig()
    prompt, other = text(12, 300), text(13, 300)
    rig.generate("unsaved", prompt, params={"tierkv": {"save": False}})
    forget_engine_cache(rig)
    rig.generate("miss", prompt)
    assert ("hit", "dram") not in counted(rig)
    forget_engine_cache(rig)
    rig.generate("unloaded", prompt, params={"tierkv": {"load": False}})
    assert ("hit", "dram") not in counted(rig)
    forget_engine_cache(rig)
    rig.generate("hit", prompt)
    assert counted(rig)["hit", "dram"] == 256
    rig.generate("neither", other, params={"tierkv": {"load": False, "save": False}})
    forget_engine_cache(rig)
    rig.generate("still unknown", other)
    assert counted(rig)["hit", "dram"] == 256


@pytest.mark.parametrize(
    "params", [{"tierkv": 3}, {"tierkv": {"lod": True, "save": "no"}}, {"x": 1}]
)
def test_bad_request_options_are_ignored(make_rig: MakeRig, params: dict[str, Any]) -> None:
    rig = make_rig()
    prompt = text(14, 300)
    rig.generate("cold", prompt, params=params)
    forget_engine_cache(rig)
    rig.generate("warm", prompt, params=params)
    assert counted(rig)["hit", "dram"] == 256


def test_requests_that_need_every_position_computed_load_nothing_but_save(
    make_rig: MakeRig,
) -> None:
    rig = make_rig()
    prompt = text(15, 300)
    rig.generate("cold", prompt)
    forget_engine_cache(rig)
    rig.generate("logprobs", prompt, prompt_logprobs=1)
    assert ("hit", "dram") not in counted(rig)
    assert counted(rig)["declined", "none"] == 300


def test_without_prefix_caching_hits_come_from_tierkv_alone(make_rig: MakeRig) -> None:
    rig = make_rig(prefix_caching=False)
    prompt = text(16, 300)
    rig.generate("cold", prompt)
    rig.generate("warm", prompt)
    assert counted(rig)["hit", "dram"] == 256
    idle(rig)


def test_two_ranks_load_and_save_their_own_parts(make_rig: MakeRig, tmp_path: Path) -> None:
    config = dram_and_disk(tmp_path / "kv")
    prompt = text(17, 300)
    first = make_rig(config, ranks=2)
    first.generate("cold", prompt)
    forget_engine_cache(first)
    first.generate("warm", prompt)
    assert counted(first)["hit", "dram"] == 256
    first.close()
    second = make_rig(config, ranks=2)
    second.generate("restarted", prompt)
    assert counted(second)["hit", "disk"] == 256
    second.close()
    single = make_rig(config, ranks=1)
    single.generate("other geometry", prompt)
    assert ("hit", "disk") not in counted(single)


def test_counts_agree_with_vllms_own(make_rig: MakeRig) -> None:
    rig = make_rig()
    for i in range(6):
        rig.generate(f"r{i}", text(30 + i % 3, 150 + 40 * (i % 2)))
        if i % 2:
            forget_engine_cache(rig)
    outcomes = counted(rig)
    hits = sum(n for (outcome, _), n in outcomes.items() if outcome == "hit")
    assert rig.queries == sum(outcomes.values())
    assert rig.hits == hits > 0
