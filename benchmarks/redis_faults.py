# SPDX-License-Identifier: Apache-2.0
"""What each fault of a Redis server or of the way to it costs: the table in docs/reference.

    python benchmarks/redis_faults.py --json faults.json --markdown docs/reference/reliability.md

Real redis-servers on loopback, a proxy that makes the network bad, and a Store with its I/O thread
that is used as an engine uses it, with the default deadlines and breaker. For each fault: requests
for text that DRAM holds, for text that only Redis holds, and for new text, in turns, before it and
under it; then it ends, and requests go on until one is served from Redis again. Every byte handed
out is compared with what was saved.
"""
# ruff: noqa: E402

from __future__ import annotations

import sys
from pathlib import Path

# `redis.py` beside this file is called like a package that is needed: not from this folder.
sys.path[0] = str(Path(__file__).resolve().parent.parent)

import argparse
import json
import logging
import random
import re
import signal
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any

from redis import Redis

from benchmarks.redis_rig import Engine, ProxyThread, Served, Texts, opened
from tests.redis_kit import Authority, RedisServer, WatchedRedis
from tierkv.config import SecretRef
from tierkv.config.redis import RedisConfig
from tierkv.pages.layout import SlotLayout
from tierkv.testing.proxy import (
    Toxic,
    bandwidth,
    latency,
    limit_data,
    reset_peer,
    slicer,
    slow_close,
    timeout,
)
from tierkv.tiers.redis.dial import RIGHTS

LAYOUT = SlotLayout(chunk_tokens=64, block_tokens=16, block_bytes=12_288, ranks=2)
"""Values of 98 kB."""
CHUNKS = 4
"""In a text."""
HERE, THERE = 6, 40
"""Texts that DRAM holds for as long as they are asked for, and that it has no room for."""
SLOTS = 96
ROUNDS = 100
"""Requests of each kind before the fault, and under it."""
LEAST_SECONDS, MOST_SECONDS = 2.5, 5.0
"""Under the fault."""
HEAL_SECONDS = 60.0
ROUND_SECONDS = 0.01
GRACE_SECONDS = 0.25
"""On top of a deadline and a tenth of it: more is a request that hung."""
SEED = 7

START, END = "<!-- redis faults -->", "<!-- end of redis faults -->"


@dataclass(slots=True)
class Scene:
    """What a fault works on."""

    folder: Path
    server: RedisServer
    proxy: ProxyThread
    dice: random.Random
    on_round: Callable[[int], None] = lambda number: None

    def values(self) -> list[bytes]:
        """Names of all chunks."""
        return [name.encode() for name in self.server.names()]

    def direct(self) -> Redis:
        return Redis(port=self.server.port)


Inject = Callable[[Scene], AbstractContextManager[None]]


@dataclass(frozen=True, slots=True)
class Fault:
    """One row.

    Attributes:
        row: of the fault matrix.
        name: what goes wrong.
        inject: the fault begins when it is entered and ends when it is left.
        test: of the test suite, that covers it with its asserts.
        at_start: the engine starts under it.
        server: options of redis-server.
    """

    row: str
    name: str
    inject: Inject
    test: str
    at_start: bool = False
    server: dict[str, str] = field(default_factory=dict)


# -- faults --------------------------------------------------------------------------------------


def toxic(*toxics: Toxic) -> Inject:
    @contextmanager
    def inject(scene: Scene) -> Iterator[None]:
        scene.proxy.toxics(*toxics)
        yield
        scene.proxy.toxics()

    return inject


@contextmanager
def killed(scene: Scene) -> Iterator[None]:
    scene.server.kill()
    yield
    scene.server.start()


@contextmanager
def killed_often(scene: Scene) -> Iterator[None]:
    is_up = True

    def turn(number: int) -> None:
        nonlocal is_up
        if scene.dice.random() < 0.1:
            scene.server.kill() if is_up else scene.server.start()
            is_up = not is_up

    scene.on_round = turn
    yield
    scene.on_round = lambda number: None
    if not is_up:
        scene.server.start()


@contextmanager
def restarted_empty(scene: Scene) -> Iterator[None]:
    scene.server.kill()
    scene.server.start()
    yield


@contextmanager
def restarted_loading(scene: Scene) -> Iterator[None]:
    scene.server.cli("SAVE")
    scene.server.kill()
    scene.server.options |= {
        "key-load-delay": "10000",
        "loading-process-events-interval-bytes": "1024",
    }
    scene.server.start(wait_for="Server initialized")
    yield


@contextmanager
def stopped(scene: Scene) -> Iterator[None]:
    scene.server.kill(signal.SIGSTOP)
    yield
    scene.server.kill(signal.SIGCONT)


@contextmanager
def partitioned(scene: Scene) -> Iterator[None]:
    scene.proxy.set_down(True)
    yield
    scene.proxy.set_down(False)


def used_bytes(scene: Scene) -> int:
    with scene.direct() as client:
        return int(client.info("memory")["used_memory"])


def memory(share: float, policy: str) -> Inject:
    @contextmanager
    def inject(scene: Scene) -> Iterator[None]:
        scene.server.cli("CONFIG", "SET", "maxmemory-policy", policy)
        scene.server.cli("CONFIG", "SET", "maxmemory", str(int(used_bytes(scene) * share)))
        yield
        scene.server.cli("CONFIG", "SET", "maxmemory", "0")

    return inject


@contextmanager
def read_only(scene: Scene) -> Iterator[None]:
    with RedisServer(scene.folder / "other") as other:
        scene.server.cli("REPLICAOF", "127.0.0.1", str(other.port))
        yield
        scene.server.cli("REPLICAOF", "NO", "ONE")


def spoil(change: Callable[[Scene, Redis, list[bytes]], None]) -> Inject:
    @contextmanager
    def inject(scene: Scene) -> Iterator[None]:
        with scene.direct() as client:
            change(scene, client, scene.values())
        yield

    return inject


def flip_bits(scene: Scene, client: Redis, names: list[bytes]) -> None:
    for name in names:
        place = scene.dice.randrange(int(client.strlen(name)))
        byte = client.getrange(name, place, place)[0] ^ 1 << scene.dice.randrange(8)
        client.setrange(name, place, bytes([byte]))


def swap(scene: Scene, client: Redis, names: list[bytes]) -> None:
    for one, other in zip(names[::2], names[1::2], strict=False):
        client.rename(one, "aside")
        client.rename(other, one)
        client.rename("aside", other)


def delete(scene: Scene, client: Redis, names: list[bytes]) -> None:
    client.delete(*names[::2])


def lose_a_rank(scene: Scene, client: Redis, names: list[bytes]) -> None:
    for name in names:
        client.setrange(name, int(client.strlen(name)) - LAYOUT.part_stride, bytes(4096))


@contextmanager
def nothing(scene: Scene) -> Iterator[None]:
    yield


FAULTS = (
    Fault("10", "every value has a flipped bit", spoil(flip_bits), "test_a_flipped_bit_is_a_"),
    Fault("11", "values swapped in pairs", spoil(swap), "test_the_value_of_another_chunk_is_not_"),
    Fault("17", "half of all keys deleted", spoil(delete), "test_a_value_that_went_behind_our_"),
    Fault("31", "one rank's part zeroed", spoil(lose_a_rank), "test_a_flipped_bit_is_a_"),
    Fault("19", "down at start", killed, "test_a_server_that_is_down_at_start_", at_start=True),
    Fault("20", "killed", killed, "test_a_server_killed_in_the_middle_of_loads_"),
    Fault("20", "killed and started, often", killed_often, "test_kills_and_restarts_under_load_"),
    Fault("20", "stands still (SIGSTOP)", stopped, "test_a_server_that_stands_still_"),
    Fault("21", "latency 5 ms ± 2", toxic(latency(0.005, jitter=0.002)), "test_a_bad_network_"),
    Fault("21", "latency 50 ms ± 20", toxic(latency(0.05, jitter=0.02)), "test_a_bad_network_"),
    Fault("21", "latency 500 ms ± 100", toxic(latency(0.5, jitter=0.1)), "test_a_bad_network_"),
    Fault("22", "replies vanish", toxic(timeout()), "test_a_stall_in_the_middle_of_a_value_"),
    Fault("22", "requests vanish", toxic(timeout(stream="upstream")), "test_a_bad_network_"),
    Fault("23", "connections reset", toxic(reset_peer()), "test_a_bad_network_"),
    Fault("23", "cut within a value", toxic(limit_data(250_000)), "test_a_bad_network_"),
    Fault("23", "slices of 700 bytes", toxic(slicer(700)), "test_a_bad_network_"),
    Fault("23", "slow close", toxic(slow_close(0.5)), "test_a_bad_network_"),
    Fault(
        "24", "10 MB/s", toxic(bandwidth(10_000_000, stream="both")), "test_a_slow_network_is_not_"
    ),
    Fault("25", "partition", partitioned, "test_after_a_partition_it_heals_"),
    Fault("26", "full, noeviction", memory(1.0, "noeviction"), "test_a_full_server_pauses_saves_"),
    Fault("27", "evicts half", memory(0.5, "allkeys-lru"), "test_what_the_server_evicts_is_a_miss"),
    Fault("28", "restarted, empty", restarted_empty, "test_a_server_killed_in_the_middle_of_loads"),
    Fault(
        "28",
        "restarted, LOADING",
        restarted_loading,
        "test_a_server_that_is_loading_its_data_",
        server={"save": "900 1"},
    ),
    Fault("29", "becomes a read-only replica", read_only, "test_a_master_that_becomes_a_replica_"),
)


# -- measuring -----------------------------------------------------------------------------------


@dataclass(slots=True)
class Samples:
    """Seconds of requests, texts that Redis gave whole, and what was wrong."""

    here: list[float] = field(default_factory=list)
    there: list[float] = field(default_factory=list)
    hits: int = 0
    wrong: int = 0
    failed: int = 0

    def add(self, served: Served, into: list[float], patience: float) -> None:
        into.append(served.seconds)
        self.wrong += served.wrong
        self.failed += served.seconds > 1.1 * patience + GRACE_SECONDS


@dataclass(frozen=True, slots=True)
class Row:
    """What a fault cost. Times in ms; `healed_s` None: there was nothing to heal from."""

    row: str
    fault: str
    requests: int
    wrong_served: int
    failed_requests: int
    added_p99_dram_ms: float
    added_p99_redis_ms: float
    slowest_ms: float
    redis_hits: float
    healed_s: float | None
    test: str


class Load:
    """Requests in turns, to one engine."""

    def __init__(self, engine: Engine, scene: Scene, patience: float) -> None:
        self._engine = engine
        self._scene = scene
        self._patience = patience
        self._number = 0
        self.requests = 0

    def turn(self, into: Samples) -> Served:
        """One text of each kind; returns what became of the one that only Redis can have."""
        number = self._number = self._number + 1
        self._scene.on_round(number)
        here = self._request(f"here{number % HERE}", into, into.here)
        if here.sources != {"dram"} or here.rest:
            into.failed += 1  # DRAM's own hits depend on nobody
        there = self._request(f"there{number % THERE}", into, into.there)
        if number % 4 == 0:
            self._request(f"new{number}", into, [])
        into.hits += there.sources == {"redis"} and not there.rest
        time.sleep(ROUND_SECONDS)
        return there

    def _request(self, name: str, into: Samples, times: list[float]) -> Served:
        self.requests += 1
        served = self._engine.request(name)
        into.add(served, times, self._patience)
        return served

    def run(self, rounds: int, least: float = 0.0, into: Samples | None = None) -> Samples:
        """So many rounds and so many seconds at least, but `MOST_SECONDS` at most."""
        samples = Samples() if into is None else into
        begin, count = time.monotonic(), 0
        while (seconds := time.monotonic() - begin) < MOST_SECONDS:
            if count >= rounds and seconds >= least:
                break
            self.turn(samples)
            count += 1
        return samples

    def heal(self, into: Samples) -> float:
        """Seconds until a text is served from Redis again."""
        begin = time.monotonic()
        while time.monotonic() < begin + HEAL_SECONDS:
            served = self.turn(into)
            if served.sources == {"redis"} and not served.rest:
                return time.monotonic() - begin
        raise AssertionError("never healed")


def fill(config: RedisConfig, texts: Texts) -> None:
    """Have all texts in Redis that only it is to have."""
    with opened(Engine(texts, 2 * THERE * CHUNKS, config)) as engine:
        for number in range(THERE):
            engine.request(f"there{number}")
        assert engine.store.drain(30)


def prime(engine: Engine) -> None:
    """Have in DRAM what it is to have."""
    for number in range(HERE):
        engine.request(f"here{number}")


def p99_ms(seconds: list[float]) -> float:
    return sorted(seconds)[int(0.99 * (len(seconds) - 1))] * 1e3


def make_row(
    fault: Fault, load: Load, before: Samples, under: Samples, healed: float | None
) -> Row:
    return Row(
        row=fault.row,
        fault=fault.name,
        requests=load.requests,
        wrong_served=before.wrong + under.wrong,
        failed_requests=before.failed + under.failed,
        added_p99_dram_ms=round(p99_ms(under.here) - p99_ms(before.here), 2),
        added_p99_redis_ms=round(p99_ms(under.there) - p99_ms(before.there), 1),
        slowest_ms=round(max(under.here + under.there) * 1e3, 1),
        redis_hits=round(under.hits / len(under.there), 2),
        healed_s=None if healed is None else round(healed, 2),
        test=fault.test,
    )


def measure(fault: Fault, texts: Texts, folder: Path) -> Row:
    with RedisServer(folder / "redis", **fault.server) as server, ProxyThread(server.port) as proxy:
        scene = Scene(folder, server, proxy, random.Random(SEED))
        fill(RedisConfig(url=server.url), texts)
        config = RedisConfig(url=proxy.url)
        engine = Engine(texts, SLOTS, config)
        with ExitStack() as stack:
            if fault.at_start:
                without = stack.enter_context(opened(Engine(texts, SLOTS, None)))
                prime(without)
                before = Load(without, scene, config.load_deadline).run(ROUNDS)
                with fault.inject(scene):
                    stack.enter_context(opened(engine))
                    prime(engine)
                    load = Load(engine, scene, config.load_deadline)
                    under = load.run(ROUNDS, LEAST_SECONDS)
            else:
                stack.enter_context(opened(engine))
                prime(engine)
                load = Load(engine, scene, config.load_deadline)
                load.run(THERE)  # to warm up
                before = load.run(ROUNDS)
                with fault.inject(scene):
                    under = load.run(ROUNDS, LEAST_SECONDS)
            healing = Samples()
            healed = load.heal(healing)
            under.wrong += healing.wrong
            under.failed += healing.failed
    return make_row(fault, load, before, under, healed)


def refused_at_start(name: str, texts: Texts, url: str, **options: Any) -> Row:
    """The tier is left out, and the engine goes on without it."""
    test = {
        "wrong password": "test_a_wrong_password_stops_the_start_",
        "no right to GET": "test_a_missing_right_stops_the_start_",
        "untrusted certificate": "test_a_certificate_that_is_not_trusted_",
    }[name]
    fault = Fault("30", name, nothing, test)
    scene = Scene(Path(), None, None, random.Random(SEED))  # type: ignore[arg-type]
    with opened(Engine(texts, SLOTS, None)) as without:
        prime(without)
        before = Load(without, scene, 0.0).run(ROUNDS)
    engine = Engine(texts, SLOTS, RedisConfig(url=url, **options))
    report = engine.open()
    try:
        assert list(report.disabled) == ["redis"], report
        prime(engine)
        load = Load(engine, scene, 0.0)
        under = load.run(ROUNDS)
    finally:
        engine.store.close(0.0)
    return make_row(fault, load, before, under, None)


def refusals(texts: Texts, folder: Path) -> Iterator[Row]:
    secret = folder / "secret"
    secret.write_text("wrong")
    rights = [right for right in RIGHTS.split() if right != "+get"]
    with RedisServer(folder / "acl") as server:
        server.cli("ACL", "SETUSER", "kv", "on", ">right", "~*", "+@all")
        server.cli("ACL", "SETUSER", "less", "on", ">wrong", "~tierkv:*", "-@all", *rights)
        password = SecretRef(file=secret)
        where = {"url": server.url, "password": password}
        yield refused_at_start("wrong password", texts, username="kv", **where)
        yield refused_at_start("no right to GET", texts, username="less", **where)
    with Authority(folder / "tls").server(folder / "tls-redis") as server:
        url = f"rediss://127.0.0.1:{server.port}"
        yield refused_at_start("untrusted certificate", texts, url)


def failover(texts: Texts, folder: Path) -> Row:
    """Sentinel: the master dies, and its replica becomes the master."""
    fault = Fault("29", "master dies, Sentinel", nothing, "test_sentinel_is_followed_when_the_")
    with WatchedRedis(folder) as watched:
        sentinel: Any = {"service": watched.service, "nodes": watched.nodes}
        config = RedisConfig(url="redis:///0", sentinel=sentinel)
        fill(config, texts)
        scene = Scene(folder, watched.master, None, random.Random(SEED))  # type: ignore[arg-type]
        with opened(Engine(texts, SLOTS, config)) as engine:
            prime(engine)
            load = Load(engine, scene, config.load_deadline)
            load.run(THERE)
            before, under = load.run(ROUNDS), Samples()
            watched.master.kill()
            healed = load.heal(under)  # counted from the death on
            load.run(ROUNDS, into=under)
    return make_row(fault, load, before, under, healed)


def find_tests(rows: list[Row]) -> dict[str, list[str]]:
    """Row of the matrix to the names of its tests; every one must be there."""
    root = Path(__file__).resolve().parent.parent / "tests"
    code = "".join(path.read_text() for path in root.rglob("test_redis_*.py"))
    found: dict[str, list[str]] = {}
    for row in rows:
        names = re.findall(rf"def ({row.test}\w*)\(", code)
        assert names, f"no test {row.test} for row {row.row}"
        found.setdefault(row.row, []).extend(n for n in names if n not in found.get(row.row, ()))
    return found


def as_markdown(rows: list[Row]) -> str:
    columns = (
        *("row", "fault", "requests", "wrong served", "failed", "p99 added, DRAM hits"),
        *("p99 added, texts in Redis", "slowest", "Redis gave", "healed after"),
    )
    lines = [START, f"| {' | '.join(columns)} |", "|---:|---|" + "---:|" * (len(columns) - 2)]
    for row in rows:
        cells = (
            *(row.row, row.fault, row.requests, row.wrong_served, row.failed_requests),
            *(f"{row.added_p99_dram_ms:+.1f} ms", f"{row.added_p99_redis_ms:+.0f} ms"),
            *(f"{row.slowest_ms:.0f} ms", f"{row.redis_hits:.0%}"),
            "–" if row.healed_s is None else f"{row.healed_s:.1f} s",
        )
        lines.append(f"| {' | '.join(map(str, cells))} |")
    lines += ["", f"Seed {SEED}. Tests of the same faults, by row:", ""]
    for row, tests in find_tests(rows).items():
        lines.append(f"* {row}: {', '.join(f'`{test}`' for test in tests)}")
    return "\n".join([*lines, END])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path)
    parser.add_argument("--markdown", type=Path, help="replace the table in this file")
    parser.add_argument("--only", default="", help="faults whose name holds this")
    arguments = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # which stops what was started
    logging.getLogger("tierkv").setLevel(logging.CRITICAL)  # it complains, and rightly
    texts = Texts(LAYOUT, CHUNKS)
    rows = []
    with tempfile.TemporaryDirectory(prefix="tierkv-") as name:
        for number, fault in enumerate(FAULTS):
            if arguments.only in fault.name:
                rows.append(measure(fault, texts, Path(name) / str(number)))
                print(asdict(rows[-1]), flush=True)
        if not arguments.only:
            rows.append(failover(texts, Path(name) / "sentinel"))
            rows += refusals(texts, Path(name))
    rows.sort(key=lambda row: int(row.row))
    print(as_markdown(rows))
    if arguments.json:
        report = {"benchmark": "redis_faults", "seed": SEED, "rows": [asdict(row) for row in rows]}
        arguments.json.write_text(json.dumps(report, indent=2) + "\n")
    if arguments.markdown:
        text = arguments.markdown.read_text()
        head, tail = text[: text.index(START)], text[text.index(END) + len(END) :]
        arguments.markdown.write_text(head + as_markdown(rows) + tail)


if __name__ == "__main__":
    main()
