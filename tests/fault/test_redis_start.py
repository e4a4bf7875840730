# SPDX-License-Identifier: Apache-2.0
"""What a server may be like when an engine starts: away, silent, of another mind about our rights.

Rows 19, 28 and 30 of the fault matrix, and what `check_server` tells an operator.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from redis import Redis

from tests.redis_kit import (
    CHUNKS,
    LAYOUT,
    NAMESPACE,
    Authority,
    RedisServer,
    connected,
    expected,
    free_port,
    load,
    make_config,
    needs_redis,
    opened,
    run,
    save,
    save_all,
    until,
)
from tierkv.config.base import SecretRef
from tierkv.errors import TierError
from tierkv.testing.proxy import FaultProxy, timeout
from tierkv.tiers.base import Outcome, TierReport
from tierkv.tiers.redis.check import Finding, check_server
from tierkv.tiers.redis.dial import RIGHTS
from tierkv.tiers.redis.tier import RedisTier

pytestmark = needs_redis

SECRET = "hunter2-do-not-print"


@pytest.fixture
def server(tmp_path: Path) -> Iterator[RedisServer]:
    with RedisServer(tmp_path / "redis") as server:
        yield server


@pytest.fixture
def password(tmp_path: Path) -> SecretRef:
    file = tmp_path / "password"
    file.write_text(SECRET + "\n")
    return SecretRef(file=file)


def refusal(**options: Any) -> str:
    """The error that opening a tier with this configuration ends with."""

    async def test() -> str:
        tier = RedisTier(make_config(**options))
        with pytest.raises(TierError) as caught:
            await tier.open(NAMESPACE, LAYOUT)
        await tier.close()
        assert caught.value.tier == "redis"
        return str(caught.value)

    message = run(test)
    assert SECRET not in message
    assert "\n" not in message
    return message


def findings(**options: Any) -> list[Finding]:
    async def test() -> list[Finding]:
        return await check_server(make_config(**options))

    found = run(test)
    assert not any(SECRET in finding.message for finding in found)
    return found


# -- away ----------------------------------------------------------------------------------------


def test_a_server_that_is_down_at_start_is_found_when_it_comes(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    server = RedisServer(tmp_path / "redis")

    async def test() -> TierReport:
        tier = RedisTier(make_config(server.url))
        report = await tier.open(NAMESPACE, LAYOUT)
        assert (await load(tier, CHUNKS[0]))[0].outcome is Outcome.REFUSED
        assert (await save(tier, CHUNKS[0])).outcome is Outcome.REFUSED
        assert await tier.clear() == 0
        server.start()
        await connected(tier)
        await save(tier, CHUNKS[0])
        assert (await load(tier, CHUNKS[0]))[1] == expected(CHUNKS[0])
        await tier.close()
        return report

    try:
        with caplog.at_level(logging.INFO, "tierkv"):
            report = run(test)
    finally:
        server.stop()
    [note] = report.notes
    assert note == (
        f"127.0.0.1:{server.port} cannot be reached: Connection refused; the engine starts "
        "without it, and it is tried again"
    )
    print(f"start-up took {report.seconds:.3f} s with the server down")
    warnings = [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert len(warnings) == 1
    assert "tried again in the background" in warnings[0].getMessage()


def test_a_server_that_is_silent_at_start_is_not_waited_for(server: RedisServer) -> None:
    async def test() -> TierReport:
        async with FaultProxy(("127.0.0.1", server.port)) as proxy:
            proxy.toxics.append(timeout(stream="both"))
            tier = RedisTier(make_config(f"redis://127.0.0.1:{proxy.port}"))
            report = await tier.open(NAMESPACE, LAYOUT)
            proxy.toxics.clear()
            await connected(tier)
            assert (await save(tier, CHUNKS[0])).outcome is Outcome.DONE
            await tier.close()
            return report

    report = run(test)
    [note] = report.notes
    assert "no answer within a second; the engine starts without it" in note
    print(f"start-up took {report.seconds:.3f} s with the server silent")


def test_a_name_that_does_not_resolve_is_tried_again_too() -> None:
    async def test() -> TierReport:
        tier = RedisTier(make_config("rediss://no-such-host.invalid:6380"))
        report = await tier.open(NAMESPACE, LAYOUT)
        await tier.close()
        return report

    assert "no-such-host.invalid:6380 cannot be reached" in run(test).notes[0]


def test_a_server_that_is_loading_its_data_is_unavailable_and_then_serves_it(
    tmp_path: Path,
) -> None:
    slowly = {"key-load-delay": "20000", "loading-process-events-interval-bytes": "1024"}
    with RedisServer(tmp_path / "redis", save="900 1") as server:

        async def fill() -> None:
            tier = await opened(make_config(server.url))
            await save_all(tier, CHUNKS)
            await tier.close()

        run(fill)
        server.cli("SAVE")
        server.stop()
        server.options |= slowly
        server.start(wait_for="Server initialized")

        async def test() -> None:
            tier = RedisTier(make_config(server.url))
            report = await tier.open(NAMESPACE, LAYOUT)
            assert "is not ready (LOADING)" in report.notes[0]
            assert (await load(tier, CHUNKS[0]))[0].outcome is Outcome.REFUSED
            await connected(tier)
            for chunk in CHUNKS:
                assert (await load(tier, chunk))[1] == expected(chunk)
            await tier.close()

        run(test)


# -- rights --------------------------------------------------------------------------------------


def test_the_documented_rights_are_enough(server: RedisServer, password: SecretRef) -> None:
    server.cli("ACL", "SETUSER", "kv", "on", f">{SECRET}", "~tierkv:*", "-@all", *RIGHTS.split())

    async def test() -> None:
        config = make_config(server.url, username="kv", password=password)
        tier = await opened(config)
        await save_all(tier, CHUNKS[:4])
        await tier.touch([CHUNKS[0].key])
        assert (await load(tier, CHUNKS[0]))[1] == expected(CHUNKS[0])
        assert await tier.evict([CHUNKS[0].key]) == 1
        assert await tier.clear() == 3
        await tier.look_after()
        await tier.close()
        assert [f for f in await check_server(config) if f.fatal] == []

    run(test)
    assert server.cli("ACL", "LOG") == ""


def test_a_wrong_password_stops_the_start_and_is_not_shown(
    server: RedisServer, password: SecretRef, caplog: pytest.LogCaptureFixture
) -> None:
    server.cli("ACL", "SETUSER", "kv", "on", ">other", "~*", "+@all")
    message = refusal(url=server.url, username="kv", password=password)
    assert message == (
        f"redis: 127.0.0.1:{server.port} does not take the password of user 'kv'; set username "
        "and password, or mend the user there"
    )
    [finding] = findings(url=server.url, username="kv", password=password)
    assert finding == Finding(message.removeprefix("redis: "), fatal=True)
    assert SECRET not in caplog.text


def test_a_password_where_none_is_wanted_stops_the_start(
    server: RedisServer, password: SecretRef
) -> None:
    assert "does not take the password" in refusal(url=server.url, password=password)


def test_a_missing_password_stops_the_start(tmp_path: Path) -> None:
    with RedisServer(tmp_path / "locked", requirepass=SECRET) as server:
        assert "set username and password" in refusal(url=server.url)


def test_a_password_file_that_is_not_there_stops_the_start(server: RedisServer) -> None:
    message = refusal(url=server.url, password=SecretRef(file="/no/such/file"))
    assert "/no/such/file: No such file or directory" in message


def test_a_user_that_needs_no_password_is_still_named(server: RedisServer) -> None:
    server.cli("ACL", "SETUSER", "kv", "on", "nopass", "~tierkv:*", "-@all", *RIGHTS.split())
    server.cli("ACL", "SETUSER", "default", "off")

    async def test() -> None:
        tier = await opened(make_config(server.url, username="kv"))
        assert (await save(tier, CHUNKS[0])).outcome is Outcome.DONE
        await tier.close()

    run(test)


def test_a_password_that_is_no_text_is_sent_as_it_is(tmp_path: Path) -> None:
    file = tmp_path / "password"
    file.write_bytes(b"\xff\xfesecret")

    async def test() -> None:
        with RedisServer(tmp_path / "node", **{"cluster-enabled": "yes"}) as node:
            node.cli("CLUSTER", "ADDSLOTSRANGE", "0", "16383")
            until(lambda: "cluster_state:ok" in node.cli("CLUSTER", "INFO"))
            node.cli("CONFIG", "SET", "requirepass", file.read_bytes())
            config = make_config(node.url[:-2], cluster=True, password=SecretRef(file=file))
            tier = await opened(config)
            assert (await save(tier, CHUNKS[0])).outcome is Outcome.DONE
            await tier.close()

    run(test)


def test_a_server_with_no_room_for_clients_is_tried_again(
    server: RedisServer, password: SecretRef
) -> None:
    server.cli("ACL", "SETUSER", "kv", "on", f">{SECRET}", "~*", "+@all")
    with Redis(port=server.port) as other:
        other.config_set("maxclients", 1)

        async def test() -> TierReport:
            tier = RedisTier(make_config(server.url, username="kv", password=password))
            report = await tier.open(NAMESPACE, LAYOUT)
            other.config_set("maxclients", 100)
            await connected(tier)
            assert (await save(tier, CHUNKS[0])).outcome is Outcome.DONE
            await tier.close()
            return report

        [note] = run(test).notes
    # It may hang up before it was asked anything.
    assert "takes no more connections; raise maxclients" in note or "closes the connection" in note


@pytest.mark.parametrize(
    ("says", "told"),
    [
        (b"-DENIED Redis is running in protected mode\r\n", "refuses (DENIED)"),
        (b"-ERR max number of clients reached\r\n", "takes no more connections; raise maxclients"),
        (b"-\x1b[2Jgotcha\nall is well\r\n", "refuses (UNKNOWN)"),
    ],
)
def test_what_a_stranger_says_at_once_is_told_but_not_repeated(
    password: SecretRef, says: bytes, told: str
) -> None:
    async def test() -> TierReport:
        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.read(1)
            writer.write(says * 2)
            await reader.read()
            writer.close()

        async with await asyncio.start_server(serve, "127.0.0.1") as stranger:
            port = stranger.sockets[0].getsockname()[1]
            tier = RedisTier(make_config(f"redis://127.0.0.1:{port}", password=password))
            report = await tier.open(NAMESPACE, LAYOUT)
            await tier.close()
        return report

    [note] = run(test).notes
    assert told in note
    assert note.isprintable()


def test_a_cluster_that_names_no_address_leads_nowhere() -> None:
    bad = b"127.0.0.1\x1b[31m"
    slots = b"*1\r\n*3\r\n:0\r\n:16383\r\n*2\r\n$%d\r\n%b\r\n:6379\r\n" % (len(bad), bad)

    async def test() -> TierReport:
        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            while request := await reader.read(4096):
                writer.write(slots if b"SLOTS" in request else b"+OK\r\n" * request.count(b"*"))
            writer.close()

        async with await asyncio.start_server(serve, "127.0.0.1") as stranger:
            port = stranger.sockets[0].getsockname()[1]
            tier = RedisTier(make_config(f"redis://127.0.0.1:{port}", cluster=True))
            report = await tier.open(NAMESPACE, LAYOUT)
            await tier.close()
        return report

    [note] = run(test).notes
    assert "the servers name an address that is none" in note


@pytest.mark.parametrize(
    ("missing", "fatal"), [("get", True), ("set", True), ("exists", True), ("ping", True)]
)
def test_a_missing_right_stops_the_start_and_names_the_remedy(
    server: RedisServer, password: SecretRef, missing: str, fatal: bool
) -> None:
    rights = [right for right in RIGHTS.split() if right != f"+{missing}"]
    server.cli("ACL", "SETUSER", "kv", "on", f">{SECRET}", "~tierkv:*", "-@all", *rights)
    message = refusal(url=server.url, username="kv", password=password)
    assert f"user 'kv' may not run {missing.upper()}" in message
    assert f"ACL SETUSER kv ~tierkv:* {RIGHTS}" in message


def test_other_keys_than_ours_are_no_right_at_all(server: RedisServer, password: SecretRef) -> None:
    server.cli("ACL", "SETUSER", "kv", "on", f">{SECRET}", "~other:*", "-@all", *RIGHTS.split())
    message = refusal(url=server.url, username="kv", password=password)
    assert "EXISTS and GET and SET" in message
    assert "on tierkv:*" in message


def test_without_info_and_pexpire_it_starts_and_says_so(
    server: RedisServer, password: SecretRef
) -> None:
    rights = [right for right in RIGHTS.split() if right not in ("+info", "+pexpire")]
    server.cli("ACL", "SETUSER", "kv", "on", f">{SECRET}", "~tierkv:*", "-@all", *rights)

    async def test() -> TierReport:
        tier = RedisTier(make_config(server.url, username="kv", password=password))
        report = await tier.open(NAMESPACE, LAYOUT)
        await connected(tier)
        await save(tier, CHUNKS[0])
        await tier.look_after()
        assert (await load(tier, CHUNKS[0]))[1] == expected(CHUNKS[0])
        await tier.close()
        return report

    [note] = run(test).notes
    assert "may not run INFO and PEXPIRE on tierkv:*" in note


# -- what the server is like ---------------------------------------------------------------------


def test_a_server_set_up_well_gives_no_finding(tmp_path: Path) -> None:
    options = {"maxmemory": "100mb", "maxmemory-policy": "allkeys-lru"}
    with RedisServer(tmp_path / "redis", **options) as server:
        assert findings(url=server.url) == []


@pytest.mark.parametrize(
    ("options", "ours", "message"),
    [
        ({}, {}, "has no maxmemory"),
        ({"maxmemory": "100mb"}, {}, "evicts nothing (noeviction)"),
        (
            {"maxmemory": "100mb", "maxmemory-policy": "volatile-lru"},
            {"ttl": None},
            "evicts only keys with a TTL",
        ),
    ],
)
def test_memory_settings_that_will_hurt_are_told(
    tmp_path: Path, options: dict[str, str], ours: dict[str, Any], message: str
) -> None:
    with RedisServer(tmp_path / "redis", **options) as server:
        [finding] = findings(url=server.url, **ours)
    assert message in finding.message
    assert not finding.fatal


def test_a_replica_is_told_apart(tmp_path: Path, server: RedisServer) -> None:
    well = {"maxmemory": "100mb", "maxmemory-policy": "allkeys-lru"}
    with RedisServer(tmp_path / "r", replicaof=f"127.0.0.1 {server.port}", **well) as replica:
        assert any("is a replica" in f.message for f in findings(url=replica.url))


def test_a_cluster_must_be_called_one_and_nothing_else_may(
    tmp_path: Path, server: RedisServer
) -> None:
    options = {"cluster-enabled": "yes"}
    with RedisServer(tmp_path / "c", **options) as node:
        assert "is a node of a cluster; set cluster: true" in refusal(url=node.url)
    assert "is no cluster; remove cluster: true" in refusal(url=server.url[:-2], cluster=True)


def test_no_server_at_all_is_a_finding() -> None:
    [finding] = findings(url=f"redis://127.0.0.1:{free_port()}")
    assert finding.fatal
    assert "cannot be reached: Connection refused" in finding.message


# -- TLS -----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("tls"))


@pytest.fixture(scope="module")
def tls_server(
    authority: Authority, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[RedisServer]:
    with authority.server(tmp_path_factory.mktemp("redis")) as server:
        yield server


def tls_url(server: RedisServer, host: str = "127.0.0.1") -> str:
    return f"rediss://{host}:{server.port}"


def test_values_go_both_ways_over_tls(tls_server: RedisServer, authority: Authority) -> None:
    async def test() -> None:
        tier = await opened(make_config(tls_url(tls_server), tls_ca=authority.ca))
        await save_all(tier, CHUNKS)
        for chunk in CHUNKS:
            assert (await load(tier, chunk))[1] == expected(chunk)
        await tier.close()

    run(test)


def test_a_certificate_that_is_not_trusted_stops_the_start(tls_server: RedisServer) -> None:
    message = refusal(url=tls_url(tls_server))
    assert "its certificate is not trusted" in message
    assert "set tls_ca" in message


def test_a_certificate_of_another_name_stops_the_start(
    tls_server: RedisServer, authority: Authority
) -> None:
    message = refusal(url=tls_url(tls_server, "localhost"), tls_ca=authority.ca)
    assert "its certificate is not trusted (Hostname mismatch" in message
    assert "url to a name that it holds" in message


def test_a_port_that_does_not_speak_tls_is_asked_about(server: RedisServer) -> None:
    async def test() -> TierReport:
        tier = RedisTier(make_config(tls_url(server)))
        report = await tier.open(NAMESPACE, LAYOUT)
        await tier.close()
        return report

    [note] = run(test).notes
    assert f"{tls_url(server)}: no answer within a second (is it the TLS port?)" in note


def test_a_client_certificate_is_shown_where_one_is_wanted(
    tmp_path: Path, authority: Authority
) -> None:
    wanted = authority.server(tmp_path / "redis")
    wanted.options["tls_auth_clients"] = "yes"
    with wanted as server:

        async def test() -> None:
            config = make_config(
                tls_url(server),
                tls_ca=authority.ca,
                tls_cert=authority.cert,
                tls_key=authority.key,
            )
            tier = await opened(config)
            assert (await save(tier, CHUNKS[0])).outcome is Outcome.DONE
            await tier.close()

        run(test)

        async def without() -> str:
            tier = RedisTier(make_config(tls_url(server), tls_ca=authority.ca))
            try:
                report = await tier.open(NAMESPACE, LAYOUT)
            except TierError as error:
                return str(error)
            await tier.close()
            return report.notes[0]  # its reason did not reach us before the connection was gone

        assert "does it want tls_cert and tls_key?" in run(without)


def test_tls_files_that_cannot_be_read_stop_the_start(tmp_path: Path) -> None:
    message = refusal(url="rediss://127.0.0.1:1", tls_ca=tmp_path / "none.pem")
    assert "none.pem: No such file or directory" in message
