# SPDX-License-Identifier: Apache-2.0
"""Every byte and every token of a blended prompt, beside vLLM's real scheduler.

See `blending.py`: approximate bytes that reach somebody else fail the rig's own check.
"""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import pytest
import torch

from tests.scheduler.blend_kit import (
    CHOSEN,
    FIRST,
    SECOND,
    A,
    B,
    MakeRig,
    counted,
    counter,
    kv_bytes,
    plan_by_hand,
    refused,
    served,
)
from tests.scheduler.blending import MARK, turned
from tests.scheduler.conftest import dram_and_disk, text
from tests.scheduler.rig import HEAD_SIZE, expected_output, kv_of, prefix_states
from tests.scheduler.test_counting import Exporter
from tests.scheduler.test_reuse import forget_engine_cache, idle
from tests.scheduler.test_ways_out import step_until
from tierkv.cli.top_view import Viewer
from tierkv.stats import client
from tierkv.stats.source import SocketSource
from tierkv.telemetry import rates


@pytest.mark.parametrize("ranks", [1, 2])
def test_every_byte_of_a_blended_prompt_comes_from_where_the_plan_says(
    make_blend: MakeRig, ranks: int
) -> None:
    rig = make_blend(ranks=ranks)
    rig.generate("first", FIRST)
    rig.add("second", SECOND, 4)
    step_until(rig, lambda: "second" in rig.running)
    fixed, pieces = plan_by_hand()
    kept = [place for piece, _ in pieces for place in piece if place not in fixed]
    # The rig's model attends the more to a token the later it stands.
    kept = kept[:-CHOSEN]
    for rank in range(ranks):
        got = kv_bytes(rig, "second", rank)
        for layer in range(len(got)):
            donors = kv_of(prefix_states(FIRST), layer, rank)
            wanted = torch.full_like(got[layer, : len(SECOND)], MARK)
            own = kv_of(prefix_states(SECOND), layer, rank)
            wanted[:40] = own[:40]
            for piece, shift in pieces:
                for place in piece:
                    if place in kept:
                        wanted[place] = donors[place - shift]
                        wanted[place, :, :HEAD_SIZE] += turned(shift)
            assert torch.equal(got[layer, : len(SECOND)], wanted), (rank, layer)
    rig.run()
    assert rig.outputs["second"] == expected_output(SECOND, 4)
    idle(rig)


def test_the_time_of_a_blend_is_counted_and_learnt(make_blend: MakeRig) -> None:
    rig = make_blend()
    rig.generate("first", FIRST)
    rig.generate("second", SECOND)
    assert served(rig) == 1
    scheduler = rig.connector._scheduler
    (spent,) = scheduler.store.context.counters.snapshot()["tierkv_blend_seconds_total"]
    assert spent["value"] > 0
    assert scheduler._blend._seconds_per_token == pytest.approx(spent["value"] / len(SECOND))


def test_accounts_add_up(make_blend: MakeRig) -> None:
    rig = make_blend()
    rig.generate("first", FIRST)
    before = counted(rig)
    assert before == {("miss", "none"): 384, ("tail", "none"): 46}
    rig.generate("second", SECOND)
    fixed, _ = plan_by_hand()
    recomputed = len(fixed) + CHOSEN
    assert counted(rig) == {
        **before,
        ("hit", "dram"): 480 - recomputed,
        ("recomputed", "none"): recomputed,
    }
    assert sum(counted(rig).values()) == rig.queries == len(FIRST) + len(SECOND)
    assert rig.hits == len(SECOND)
    by_reuse = counter(rig, "tierkv_query_tokens_total", "outcome", "reuse")
    assert by_reuse["hit", "any_text"] == 480 - recomputed
    assert ("hit", "exact") not in by_reuse
    assert counter(rig, "tierkv_blend_tokens_total", "kind") == {
        ("reused",): 480 - recomputed,
        ("recomputed",): recomputed,
    }
    assert counter(rig, "tierkv_blend_requests_total", "outcome") == {("served",): 1}
    # The first one had nothing to be compared with.
    assert refused(rig) == {"no_match": 1}


def test_socket_page_and_top_tell_the_same_of_a_blended_prompt(make_blend: MakeRig) -> None:
    rig = make_blend()
    exporter = Exporter(rig)
    rig.generate("first", FIRST)
    rig.generate("second", SECOND)
    rig.step()
    fixed, _ = plan_by_hand()
    anew = len(fixed) + CHOSEN
    reused = len(SECOND) - anew
    with closing(client.connect(rig.connector._scheduler._watch._server.path)) as engine:
        viewer = Viewer(engine.info, "here")
        viewer.add(SocketSource(engine).read(50))
        on_socket = engine.request("snapshot")["metrics"]
    for metrics in (on_socket, exporter.snapshot()):
        tokens = rates.totals(metrics, "tierkv_query_tokens_total", "outcome", "tier", "reuse")
        assert {key: n for key, n in tokens.items() if n} == {
            ("miss", "none", "none"): 384,
            ("tail", "none", "none"): 46,
            ("hit", "dram", "any_text"): reused,
            ("recomputed", "none", "none"): anew,
        }
        blended = rates.totals(metrics, "tierkv_blend_tokens_total", "kind")
        assert blended == {("reused",): reused, ("recomputed",): anew}
        assert rates.total(metrics, "tierkv_blend_requests_total", outcome="served") == 1
        assert rates.total(metrics, "tierkv_blend_declined_total", reason="no_match") == 1
    view = viewer.view()
    assert view.blend is not None
    assert (view.blend.served, view.blend.failed, view.blend.declined) == (1, 0, 1)
    assert (view.blend.reused, view.blend.recomputed, view.blend.kl) == (reused, anew, None)
    assert view.session.hit == reused / (len(FIRST) + len(SECOND))
    assert [tier.hit_session for tier in view.tiers] == [view.session.hit]
    (second,) = [one for one in view.requests or () if one["request_id"] == "second"]
    parts = [(part["outcome"], part["tier"], part["tokens"]) for part in second["parts"]]
    assert sorted(parts) == [("hit", "dram", reused), ("recomputed", "none", anew)]
    idle(rig)


def test_exact_text_comes_first_and_is_counted_apart(make_blend: MakeRig) -> None:
    rig = make_blend()
    beginning = text(910, 200)
    rig.generate("first", FIRST)
    rig.generate("beginning", beginning)
    forget_engine_cache(rig)
    # 192 exact tokens are loaded, and the rest is blended behind them, in one claim.
    rig.generate("both", beginning[:192] + B + A[:100] + text(911, 20))
    by_reuse = counter(rig, "tierkv_query_tokens_total", "outcome", "reuse")
    assert by_reuse["hit", "exact"] == 192
    assert by_reuse["hit", "any_text"] > 200
    assert sum(counted(rig).values()) == rig.queries
    assert rig.blended["both"] == 192
    assert rig.runners[0].jobs["both"].exact == 192
    idle(rig)


def test_engine_blocks_that_are_there_already_are_used_as_they_are(make_blend: MakeRig) -> None:
    rig = make_blend()
    beginning = text(912, 100)
    rig.generate("first", FIRST)
    rig.generate("beginning", beginning)
    rig.generate("both", beginning + B + A + text(913, 20))
    # Six blocks of vLLM's own; the first 4 tokens of what follows are computed.
    assert rig.runners[0].jobs["both"].exact == 96
    assert rig.blended["both"] == 100
    idle(rig)


def test_donors_on_disk_are_read_and_counted_for_it(make_blend: MakeRig, tmp_path: Path) -> None:
    rig = make_blend(dram_and_disk(tmp_path / "kv", capacity="160KiB"))
    side = rig.connector._scheduler
    rig.generate("first", FIRST)
    assert side.store.drain()
    # DRAM has room for 26 chunks: others push the donors out.
    for i in range(12):
        rig.generate(f"other {i}", text(914_000 + i, 200))
        assert side.store.drain()
    in_dram = [side.store._dram.index.get(key) for key in rig.planner.donors._by_key]
    assert in_dram[:6] == [None] * 6
    rig.add("second", SECOND, 4)
    step_until(rig, lambda: "second" in rig.finished, 100_000)
    rig.run()
    assert rig.outputs["second"] == expected_output(SECOND, 4)
    assert served(rig) == 1
    by_tier = counter(rig, "tierkv_query_tokens_total", "outcome", "tier", "reuse")
    assert by_tier["hit", "disk", "any_text"] == 360 - CHOSEN
    idle(rig)
