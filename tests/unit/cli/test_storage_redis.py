# SPDX-License-Identifier: Apache-2.0
"""`ls`, `du`, `inspect`, `verify` and `purge` on a redis-server that the tier has filled."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from tests import redis_kit
from tests.redis_kit import CHUNKS, LAYOUT, NAMESPACE, RECORD_BYTES, RedisServer, needs_redis
from tests.unit.cli.storage_kit import redis_of
from tierkv.cli.app import run
from tierkv.config import load_config
from tierkv.config.redis import RedisConfig
from tierkv.tiers.redis.tier import RedisTier

pytestmark = needs_redis

Captured = pytest.CaptureFixture[str]
ABOUT = {"model": "tiny-model"}


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    with RedisServer(tmp_path_factory.mktemp("redis")) as server:
        yield server


@pytest.fixture
def server(running: RedisServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RedisServer:
    """An empty server, and a configuration that names it."""
    running.cli("FLUSHALL")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SECRET", "s")
    configure(running.url)
    return running


def configure(url: str, more: str = "") -> None:
    Path("tierkv.yaml").write_text(
        "key_secret: {env: SECRET}\ntiers:\n  - {type: dram, capacity: 1MiB}\n"
        f"  - {{type: redis, url: '{url}'{more}}}\n"
    )


def with_tier(server: RedisServer, work: Callable[[RedisTier], Any]) -> Any:
    """Await `work` on a tier that is open."""

    async def session() -> Any:
        tier = await redis_kit.opened(redis_kit.make_config(server.url))
        try:
            return await work(tier)
        finally:
            await tier.close()

    return redis_kit.run(session)


def fill(server: RedisServer, count: int) -> None:
    async def work(tier: RedisTier) -> None:
        await tier.describe(ABOUT)
        await redis_kit.save_all(tier, CHUNKS[:count])
        while server.cli("EXISTS", f"tierkv:{NAMESPACE.hex()}:about") != "1":
            await tier.probe([CHUNKS[0].key])

    with_tier(server, work)


def read(capsys: Captured, *arguments: str, code: int = 0) -> Any:
    assert run([*arguments, "--json"]) == code
    return json.loads(capsys.readouterr().out)


def held(server: RedisServer, count: int) -> list[bool]:
    async def work(tier: RedisTier) -> list[bool]:
        return [(await redis_kit.load(tier, c))[1] == redis_kit.expected(c) for c in CHUNKS[:count]]

    return with_tier(server, work)  # type: ignore[no-any-return]


def test_ls_and_du_show_what_the_tier_has_stored(server: RedisServer, capsys: Captured) -> None:
    server.cli("SET", "somebody:elses", "x")
    fill(server, 5)
    [space] = read(capsys, "ls")["namespaces"]
    assert (space["namespace"], space["model"]) == (NAMESPACE.hex(), "tiny-model")
    assert (space["chunks"], space["tokens"]) == (5, 5 * LAYOUT.chunk_tokens)
    assert space["chunk_bytes"] == space["allocated_bytes"] == 5 * RECORD_BYTES
    assert space["oldest_ns"] <= space["newest_ns"]
    assert run(["ls"]) == 0
    line = capsys.readouterr().out.splitlines()[1]
    assert line.split()[:5] == ["redis", NAMESPACE.hex()[:12], "tiny-model", "5", "20"]
    [tier] = read(capsys, "du")["tiers"]
    assert (tier["place"], tier["chunks"]) == (server.url, 5)


def test_what_a_clear_left_behind_counts_but_is_no_chunk(
    server: RedisServer, capsys: Captured
) -> None:
    fill(server, 5)
    server.cli("SET", f"tierkv:{NAMESPACE.hex()}:generation", "0123abcd")
    [space] = read(capsys, "ls")["namespaces"]
    assert (space["chunks"], space["allocated_bytes"]) == (0, 5 * RECORD_BYTES)


def test_inspect_reads_the_header(server: RedisServer, capsys: Captured) -> None:
    fill(server, 3)
    [found] = read(capsys, "inspect", CHUNKS[1].key.hex()[:10], "--tokens")["chunks"]
    assert found["parent"] == CHUNKS[0].key.hex()
    assert (found["damage"], found["parent_stored"], found["children_stored"]) == (None, True, 1)
    assert found["header"]["content_key"] == CHUNKS[1].content_key.hex()
    assert found["token_ids"] == list(range(4, 8))


@pytest.mark.parametrize(
    ("at", "reason"),
    [
        (-1, "the payload does not match its checksum"),
        (100, "the header does not match its checksum"),
        (0, "no record begins here: the magic is missing"),
    ],
)
def test_verify_finds_a_changed_byte_and_repair_drops_it(
    server: RedisServer, capsys: Captured, at: int, reason: str
) -> None:
    fill(server, 4)
    assert read(capsys, "verify")["chunks"] == 4
    name = server.name_of(CHUNKS[2])
    value = bytearray(server.value(name))
    value[at] ^= 1
    server.set_value(name, bytes(value))
    printed = read(capsys, "verify", code=3)
    assert [p["reason"] for p in printed["problems"]] == [reason]
    assert run(["verify", "--repair"]) == 3
    capsys.readouterr()
    assert read(capsys, "verify")["chunks"] == 3
    assert held(server, 4) == [True, True, False, True]


def test_verify_finds_a_value_under_a_wrong_key(server: RedisServer, capsys: Captured) -> None:
    fill(server, 2)
    server.set_value(server.name_of(CHUNKS[0]), server.value(server.name_of(CHUNKS[1])))
    [problem] = read(capsys, "verify", code=3)["problems"]
    assert (problem["what"], problem["reason"]) == (
        CHUNKS[0].key.hex(), "the value is another chunk's",
    )  # fmt: skip


def test_purge_shows_then_takes_the_namespace_and_nothing_else(
    server: RedisServer, capsys: Captured
) -> None:
    server.cli("SET", "somebody:elses", "x")
    server.cli("SET", "tierkv:note", "x")
    fill(server, 4)
    assert run(["purge", "--namespace", "tiny-model"]) == 0
    assert capsys.readouterr().err == "nothing was changed; --yes purges this\n"
    assert held(server, 4) == [True] * 4
    printed = read(capsys, "purge", "--namespace", "tiny-model", "--yes")
    assert [t["chunks"] for t in printed["targets"]] == [4]
    assert server.names() == ["somebody:elses", "tierkv:note"]
    assert read(capsys, "ls")["namespaces"] == []


def test_an_engine_that_runs_serves_nothing_of_a_purged_namespace(
    server: RedisServer, capsys: Captured
) -> None:
    async def work(tier: RedisTier) -> None:
        await redis_kit.save_all(tier, CHUNKS[:4])
        generation = f"tierkv:{NAMESPACE.hex()}:generation"
        before = server.cli("GET", generation)
        assert run(["purge", "--all", "--yes"]) == 0
        capsys.readouterr()
        # Other engines follow this; what one of them saves just now gets a name nobody asks for.
        assert server.cli("GET", generation) != before
        assert int(server.cli("PTTL", generation)) > 0
        for chunk in CHUNKS[:4]:
            result, _ = await redis_kit.load(tier, chunk)
            assert result.outcome.value == "miss"
        await tier.look_after()
        await redis_kit.save_all(tier, CHUNKS[:2])

    with_tier(server, work)
    assert held(server, 4) == [True, True, False, False]


def test_purge_of_a_key_takes_what_follows(server: RedisServer, capsys: Captured) -> None:
    fill(server, 4)
    printed = read(capsys, "purge", "--key", CHUNKS[2].key.hex(), "--yes")
    assert [t["chunks"] for t in printed["targets"]] == [2]
    assert held(server, 4) == [True, True, False, False]


def test_a_user_without_the_right_to_list_is_told_which(
    server: RedisServer, capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(server, 1)
    rights = "+get +set +exists +unlink +ping +hello +info +pexpire"
    server.cli("ACL", "SETUSER", "tier", "on", ">geheim", "~tierkv:*", "-@all", *rights.split())
    monkeypatch.setenv("PW", "geheim")
    configure(server.url, ", username: tier, password: {env: PW}")
    assert run(["ls"]) == 1
    told = capsys.readouterr().err
    assert "user 'tier' may not run SCAN" in told
    assert "TIERKV_TIERS__REDIS__USERNAME" in told
    assert "geheim" not in told
    monkeypatch.setenv("PW", "falsch")
    assert run(["ls"]) == 1
    assert "does not take the password of user 'tier'" in capsys.readouterr().err
    server.cli("ACL", "DELUSER", "tier")


def test_a_server_that_is_not_there_does_not_hide_the_other_tiers(
    server: RedisServer, capsys: Captured, tmp_path: Path
) -> None:
    Path("tierkv.yaml").write_text(
        "key_secret: {env: SECRET}\ntiers:\n  - {type: dram, capacity: 1MiB}\n"
        f"  - {{type: disk, path: {tmp_path / 'kv'}, capacity: 1GiB}}\n"
        f"  - {{type: redis, url: 'redis://127.0.0.1:{redis_kit.free_port()}/0'}}\n"
    )
    (tmp_path / "kv").mkdir(mode=0o700)
    assert run(["ls"]) == 1
    told = capsys.readouterr().err.splitlines()
    assert len(told) == 2
    assert told[0].startswith("tierkv: redis: redis://127.0.0.1:")
    assert told[0].endswith("'tierkv doctor' looks closer")
    assert told[1] == f"disk: nothing is cached in {tmp_path / 'kv'}"


def test_what_the_tier_says_of_itself_outlives_its_chunks(server: RedisServer) -> None:
    fill(server, 1)
    name = f"tierkv:{NAMESPACE.hex()}:about"
    assert json.loads(server.value(name)) == ABOUT
    chunk_ms, about_ms = (
        int(server.cli("PTTL", each)) for each in (server.name_of(CHUNKS[0]), name)
    )
    assert 0 < chunk_ms <= 86_400_000 < about_ms <= 4 * 86_400_000


def test_without_a_ttl_it_stays_and_is_said_once(server: RedisServer) -> None:
    async def session() -> None:
        tier = await redis_kit.opened(redis_kit.make_config(server.url, ttl=None))
        await tier.describe(ABOUT)
        name = f"tierkv:{NAMESPACE.hex()}:about"
        while server.cli("EXISTS", name) != "1":
            await tier.probe([CHUNKS[0].key])
        assert server.cli("PTTL", name) == "-1"
        await tier.close()

    redis_kit.run(session)


# Servers of every kind


@pytest.mark.parametrize("kind", ["tls", "unix", "sentinel", "cluster"])
def test_each_kind_of_server_is_looked_at_and_purged(
    kind: str, tmp_path: Path, capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SECRET", "s")
    with ExitStack() as stack:
        url, more = redis_of(kind, tmp_path, stack)
        configure(url, more)
        [config] = load_config(Path("tierkv.yaml")).config.lower
        assert isinstance(config, RedisConfig)

        async def session() -> None:
            tier = await redis_kit.opened(config)
            await tier.describe(ABOUT)
            await redis_kit.save_all(tier, CHUNKS[:12])
            await tier.close()

        redis_kit.run(session)
        [space] = read(capsys, "ls")["namespaces"]
        assert (space["chunks"], space["chunk_bytes"]) == (12, 12 * RECORD_BYTES)
        printed = read(capsys, "verify")
        assert (printed["ok"], printed["chunks"]) == (True, 12)
        assert read(capsys, "purge", "--all", "--yes")["targets"][0]["chunks"] == 12
        assert read(capsys, "ls")["namespaces"] == []
