# SPDX-License-Identifier: Apache-2.0
"""A scripted workload whose every hit and miss is known beforehand, seen in all places at once.

Each prompt has 300 tokens: four chunks of 64, and 44 more that make no chunk.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from tierkv_vllm.connector import TierKVConnector

from tests.scheduler.conftest import dram_and_disk, text
from tests.scheduler.movers import FailingMover
from tests.scheduler.rig import Rig
from tests.scheduler.test_reuse import forget_engine_cache
from tests.scheduler.test_ways_out import step_until, wrap_movers
from tierkv.cli import top_text
from tierkv.cli.top_view import Viewer
from tierkv.errors import ErrorKind
from tierkv.stats import client
from tierkv.stats.source import SocketSource, parse_page
from tierkv.telemetry import rates
from tierkv.telemetry.counters import Snapshot

MakeRig = Callable[..., Rig]

OUTCOMES = {
    ("hit", "dram"): 256.0,
    ("hit", "disk"): 256.0,
    ("miss", "none"): 256.0 * 7,
    ("skipped", "none"): 256.0,
    ("unavailable", "none"): 256.0,
    ("failed", "dram"): 256.0,
    ("declined", "none"): 300.0,
    ("tail", "none"): 44.0 * 12 + 12,
}
MISSES = {
    ("never_seen", "none"): 256.0 * 3,  # cold, salted, and under another name
    ("evicted", "disk"): 256.0,
    ("expired", "disk"): 256.0,
    ("invalid", "none"): 256.0,
    ("opted_out", "none"): 256.0,
}
GPU = 288.0


class Exporter:
    """What vLLM's API server makes of the connector's statistics."""

    def __init__(self, rig: Rig) -> None:
        self.registry = CollectorRegistry()
        kinds = {
            kind: partial(kind, registry=self.registry) for kind in (Counter, Gauge, Histogram)
        }
        names = ["model_name", "engine"]
        self._metrics: Any = TierKVConnector.build_prom_metrics(
            rig.config,
            kinds,
            names,
            {0: ["m", "0"]},  # type: ignore[arg-type]
        )
        self.metrics: dict[str, Any] = self._metrics._metrics
        connector = rig.connector
        collect = connector.get_kv_connector_stats

        def collected() -> Any:
            stats = collect()
            if stats is not None:
                self._metrics.observe(stats.data, 0)
            return stats

        connector.get_kv_connector_stats = collected

    def snapshot(self) -> Snapshot:
        (page,) = parse_page(generate_latest(self.registry).decode()).values()
        return page


@pytest.fixture
def engine(make_rig: MakeRig, tmp_path: Path) -> Iterator[tuple[Rig, client.Engine]]:
    extra = dram_and_disk(tmp_path / "kv")
    rig = make_rig({**extra, "stats": {"control": True}})
    path = rig.connector._scheduler._watch._server.path
    found = client.connect(path)
    yield rig, found
    found.close()


def test_gauges_are_right_on_a_page_that_several_api_servers_write(
    engine: tuple[Rig, client.Engine],
) -> None:
    # prometheus_client's own way would be a series for each process, most of them long outdated.
    gauges = [m for m in Exporter(engine[0]).metrics.values() if isinstance(m, Gauge)]
    assert {gauge._multiprocess_mode for gauge in gauges} == {"mostrecent"}


def ask(rig: Rig, found: client.Engine, op: str, **arguments: Any) -> Any:
    """Send a command while the engine steps."""
    answers: list[Any] = []
    thread = threading.Thread(target=lambda: answers.append(found.request(op, **arguments)))
    thread.start()
    while thread.is_alive():
        rig.step()
    return answers[0]


def run_script(rig: Rig, found: client.Engine) -> None:
    store = rig.connector._scheduler.store
    (disk,) = store._lowers
    a, b = text(1, 300), text(2, 300)

    def again(name: str, prompt: list[int], **more: Any) -> None:
        forget_engine_cache(rig)
        rig.generate(name, prompt, **more)
        assert store.drain()

    def only_on_disk(prompt: list[int]) -> None:
        # As if DRAM had given it up.
        for key in keys[tuple(prompt)]:
            store._dram.forget(key)

    keys: dict[tuple[int, ...], list[bytes]] = {}

    def remember(prompt: list[int]) -> None:
        keys[tuple(prompt)] = list(set(store._dram.index.keys()) - known)

    known: set[bytes] = set()
    again("cold", a)
    remember(a)
    known.update(keys[tuple(a)])
    rig.generate("gpu", a)
    again("exact", a)
    again("salted", a, salt="tenant")
    known.update(store._dram.index.keys())
    again("other", b)
    remember(b)

    only_on_disk(a)
    again("from disk", a)

    only_on_disk(a)
    store._cost.worth, store._cost.pays = (lambda *_: False), (lambda *_: False)
    again("skipped", a)
    del store._cost.worth, store._cost.pays

    only_on_disk(a)
    for _ in range(disk.config.breaker_failures):
        disk.breaker.failure(disk.breaker.allow(), ErrorKind.EIO)
    again("unavailable", a)
    disk.breaker.__init__(5, 5.0, store.context.clock)

    wrap_movers(rig, partial(FailingMover, fails_load=lambda job_id: True))
    again("failed", a)
    for worker in rig.workers:
        worker._worker._mover = worker._worker._mover._inner

    forget_engine_cache(rig)
    rig.generate("declined", a, prompt_logprobs=1)
    again("opted out", a, params={"tierkv": {"load": False}})

    # The disk gave it up after DRAM did.
    only_on_disk(b)
    disk_forgets(store, keys[tuple(b)])
    again("evicted", b)

    only_on_disk(b)
    disk_forgets(store, keys[tuple(b)])
    store._ghosts._tiers = tuple((name, 0.0) for name, _ in store._ghosts._tiers)
    again("expired", b)

    forget_engine_cache(rig)
    assert ask(rig, found, "purge", tokens=b)["held"] == {"dram": 4, "disk": 4}
    again("purged", b)


def disk_forgets(store: Any, keys: list[bytes]) -> None:
    """The disk tier loses chunks behind the Store's back."""
    (disk,) = store._lowers
    assert store._io.run(disk.tier.evict(keys)) == len(keys)


def checked(snapshot: Snapshot) -> None:
    tokens = rates.totals(snapshot, "tierkv_query_tokens_total", "outcome", "tier")
    assert {key: n for key, n in tokens.items() if n} == OUTCOMES
    misses = rates.totals(snapshot, "tierkv_miss_tokens_total", "reason", "tier")
    assert {key: n for key, n in misses.items() if n} == MISSES
    assert rates.total(snapshot, "tierkv_gpu_hit_tokens_total") == GPU
    assert rates.total(snapshot, "tierkv_declined_requests_total") == 1
    assert rates.total(snapshot, "tierkv_errors_total", tier="dram", kind="worker") == 1
    assert rates.total(snapshot, "tierkv_build_info") == 1


def test_every_count_is_right_on_the_socket_on_the_page_and_in_top(
    engine: tuple[Rig, client.Engine],
) -> None:
    rig, found = engine
    exporter = Exporter(rig)
    run_script(rig, found)
    # Two looks are compared: nothing may be written behind between them.
    assert rig.connector._scheduler.store.drain()
    drained_at = time.time()
    step_until(rig, lambda: found.request("snapshot")["time"] > drained_at, 1_000_000)
    told = found.request("snapshot")
    assert told["idle"]
    checked(told["metrics"])
    checked(exporter.snapshot())
    # The page and the socket say the same of everything, not only of what was foreseen.
    page = exporter.snapshot()
    for name, series in told["metrics"].items():
        assert sorted(map(repr, numbers(page[name]))) == sorted(map(repr, numbers(series))), name

    viewer = Viewer(found.info, "here")
    viewer.add(SocketSource(found).read(50))
    view = viewer.view()
    query = sum(OUTCOMES.values())
    assert view.session.query_tokens == query
    assert view.session.hit == 512 / query
    assert {tier.name: tier.hit_session for tier in view.tiers} == {
        "dram": 256 / query,
        "disk": 256 / query,
    }
    assert view.session.avoidable == 256 * 3 / query
    assert view.session.prefill_avoided == (512 + GPU) / (query + GPU)
    assert {(reason, tier): n for reason, tier, n in view.misses} == MISSES
    assert view.now.hit is None  # one look has no "now"
    assert view.requests is not None
    reasons = {request["request_id"]: top_text.reason(request) for request in view.requests}
    assert reasons == {
        "cold": "never seen",
        "gpu": "",
        "exact": "",
        "salted": "never seen",
        "other": "never seen",
        "from disk": "",
        "skipped": "skipped: disk",
        "unavailable": "unavailable: disk",
        "failed": "failed: dram, worker",
        "declined": "declined: no_read",
        "opted out": "opted out",
        "evicted": "evicted from disk",
        "expired": "expired in disk",
        "purged": "invalid",
    }
    for request in view.requests:
        parts = sum(part["tokens"] for part in request["parts"])
        assert parts + request["gpu_tokens"] == request["prompt_tokens"] == 300


def numbers(series: list[Any]) -> list[Any]:
    """Series without their order, floats rounded: a page's sums are added in another order."""
    rows = []
    for one in series:
        value = one["value"]
        if isinstance(value, dict):
            value = (value["count"], round(value["sum"], 6), value["buckets"])
        else:
            value = round(float(value), 6)
        rows.append((sorted(one["labels"].items()), value))
    return rows


def test_a_request_is_told_what_became_of_it_if_it_asks(engine: tuple[Rig, client.Engine]) -> None:
    rig, _ = engine
    told: dict[str, Any] = {}
    finished = rig.connector.request_finished_all_groups

    def spy(request: Any, blocks: Any) -> Any:
        result = finished(request, blocks)
        told[request.request_id] = result
        return result

    rig.connector.request_finished_all_groups = spy
    prompt = text(3, 300)
    rig.generate("cold", prompt, params={"tierkv": {"explain": True}})
    forget_engine_cache(rig)
    rig.generate("silent", prompt)
    forget_engine_cache(rig)
    rig.generate("warm", prompt + text(4, 100), params={"tierkv": {"explain": True}})
    assert told["silent"] == (False, None)
    assert told["cold"][1]["tierkv"]["parts"] == [
        {"outcome": "miss", "tier": "none", "reason": "never_seen", "tokens": 256},
        {"outcome": "tail", "tier": "none", "reason": "", "tokens": 44},
    ]
    held, explained = told["warm"]
    assert held is False
    assert explained["tierkv"].pop("lookup_seconds") >= 0
    assert explained["tierkv"].pop("load_seconds") > 0
    assert explained == {
        "tierkv": {
            "prompt_tokens": 400,
            "gpu_tokens": 0,
            "parts": [
                {"outcome": "hit", "tier": "dram", "reason": "", "tokens": 256},
                {"outcome": "miss", "tier": "none", "reason": "never_seen", "tokens": 128},
                {"outcome": "tail", "tier": "none", "reason": "", "tokens": 16},
            ],
        }
    }


def test_pinned_chunks_stay_when_others_push(make_rig: MakeRig) -> None:
    # 32 slots; ten documents of four chunks.
    from tests.scheduler.conftest import dram

    rig = make_rig(dram("256KiB", stats={"control": True}))
    found = client.connect(rig.connector._scheduler._watch._server.path)
    try:
        prompt, other = text(5, 300), text(6, 300)
        rig.generate("kept", prompt)
        rig.generate("given up", other)
        assert ask(rig, found, "pin", tokens=prompt) == {"chunks": 4, "held": {"dram": 4}}
        for i in range(10):
            rig.generate(f"push {i}", text(10 + i, 300))
        forget_engine_cache(rig)
        rig.generate("kept again", prompt)
        rig.generate("given up again", other)
        (kept, gone) = found.request("requests", last=2)
        assert [part["outcome"] for part in kept["parts"]] == ["hit", "tail"]
        assert top_text.reason(gone) == "evicted from dram"
        assert rates.total(found.request("snapshot")["metrics"], "tierkv_pinned_slots") == 4
        assert ask(rig, found, "unpin", all=True)["chunks"] == 4
        for i in range(10):
            rig.generate(f"push again {i}", text(10 + i, 300))
        forget_engine_cache(rig)
        rig.generate("gone at last", prompt)
        (request,) = found.request("requests", last=1)
        assert top_text.reason(request) == "evicted from dram"
    finally:
        found.close()


def test_an_idle_engine_does_what_it_was_told_when_it_is_stopped(
    make_rig: MakeRig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tierkv.stats.server.COMMAND_SECONDS", 0.0)
    extra = {**dram_and_disk(tmp_path / "kv"), "stats": {"control": True}}
    rig = make_rig(extra)
    rig.generate("cold", text(7, 300))
    found = client.connect(rig.connector._scheduler._watch._server.path)
    assert found.request("purge", all=True) == {"queued": True}
    found.close()
    rig.close()
    again = make_rig(extra)
    again.generate("after the purge", text(7, 300))
    (request,) = again.connector._scheduler._accounting.log.copy()
    assert [part.outcome for part in request.parts] == ["miss", "tail"]


def test_an_idle_engine_does_what_it_was_told_before_its_next_lookup(
    engine: tuple[Rig, client.Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tierkv.stats.server.COMMAND_SECONDS", 0.0)
    rig, found = engine
    prompt = text(7, 300)
    rig.generate("cold", prompt)
    forget_engine_cache(rig)
    assert found.request("purge", all=True) == {"queued": True}
    rig.generate("after the purge", prompt)
    (request,) = found.request("requests", last=1)
    assert [part["outcome"] for part in request["parts"]] == ["miss", "tail"]


@pytest.mark.parametrize(
    ("op", "arguments", "answer"),
    [
        ("purge", {}, "say what: exactly one of all, keys and tokens"),
        ("pin", {"all": True, "keys": ["00"]}, "say what: exactly one of all, keys and tokens"),
        ("pin", {"keys": ["zz"]}, "keys: must be a list of hexadecimal keys, see tierkv ls"),
        ("pin", {"keys": 3}, "keys: must be a list of hexadecimal keys, see tierkv ls"),
        ("pin", {"keys": ["00ff"]}, "keys: a key has 32 hexadecimal digits"),
        ("pin", {"tokens": ["a"]}, "tokens: must be a list of at most 1048576 token ids"),
        ("pin", {"tokens": [1] * 64, "tenant": 3}, "tenant: must be text"),
        ("unpin", {"tokens": [1, 2]}, "2 tokens are less than one chunk of 64"),
    ],
)
def test_a_command_that_cannot_be_done_is_refused_in_one_line(
    engine: tuple[Rig, client.Engine], op: str, arguments: dict[str, Any], answer: str
) -> None:
    rig, _ = engine
    with pytest.raises(ValueError, match=f"^{answer}$"):
        rig.connector._scheduler._watch._control.run(op, arguments)


def test_the_log_line_tells_the_hit_rate_by_its_one_definition() -> None:
    def row(outcome: str, tier: str, tokens: int) -> list[Any]:
        reuse = "exact" if outcome == "hit" else "none"
        return ["tierkv_query_tokens_total", [outcome, tier, reuse], tokens]

    hits = [row("hit", "dram", 480), row("hit", "disk", 120)]
    rest = [row("late", "none", 50), row("miss", "none", 350)]
    gpu = ["tierkv_gpu_hit_tokens_total", [], 500]
    stats = TierKVConnector.build_kv_connector_stats({"counters": [*hits, *rest, gpu]})
    assert stats is not None
    assert stats.reduce() == {
        "TierKV query tokens": 1000,
        "hit rate %": 60.0,
        "dram %": 48.0,
        "disk %": 12.0,
        "late %": 5.0,
        "prefill avoided %": 73.3,
    }
    missed = TierKVConnector.build_kv_connector_stats({"counters": [row("miss", "none", 10)]})
    assert missed is not None
    assert missed.reduce()["hit rate %"] == 0.0
    silent = TierKVConnector.build_kv_connector_stats({"counters": []})
    assert silent is not None
    assert silent.reduce() == {"TierKV query tokens": 0}


def test_saved_prefill_is_hit_tokens_over_the_engines_speed_also_for_earlier_hits(
    engine: tuple[Rig, client.Engine],
) -> None:
    rig, found = engine
    store = rig.connector._scheduler.store
    prompt = text(8, 300)
    rig.generate("cold", prompt)
    forget_engine_cache(rig)
    rig.generate("hit before its speed is known", prompt)
    counters = store.context.counters
    assert counters.get("tierkv_saved_prefill_seconds_total") == 0
    waited = counters.get("tierkv_load_seconds_total")
    assert waited > 0
    for _ in range(8):
        store.observe_prefill(1000, 0.5)
    forget_engine_cache(rig)
    rig.generate("hit", prompt)
    # Twice 256 tokens, at 2,000 a second.
    assert counters.get("tierkv_saved_prefill_seconds_total") == pytest.approx(0.256)
    assert counters.get("tierkv_load_seconds_total") > waited
    (request,) = found.request("requests", last=1)
    assert request["load_seconds"] > 0
