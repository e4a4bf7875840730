# SPDX-License-Identifier: Apache-2.0
"""What an operator should know about a server before it holds a cache; for start and for doctor.

Needs no right beyond those that the tier needs. Runs on the event loop.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterator
from dataclasses import dataclass

from tierkv.config.redis import RedisConfig
from tierkv.tiers.redis.commands import Reply, ReplyError, command
from tierkv.tiers.redis.dial import Dialer, DialError, Endpoint, rights_message
from tierkv.tiers.redis.link import Link, LinkLost
from tierkv.tiers.redis.topology import make_topology

LEAST_VERSION = (6, 2)
"""Older servers get no security fixes any more; users (ACL) begin with 6.0."""

CHECK_SECONDS = 5.0


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing about a server.

    Attributes:
        message: what is so and what to do, one line.
        fatal: the tier cannot be used like that (True), or should not be (False).
    """

    message: str
    fatal: bool = False


async def check_server(config: RedisConfig) -> list[Finding]:
    """Connect as the tier would, and look. Never raises; takes about `CHECK_SECONDS` at most.

    Finds: not reachable, wrong password, certificate not trusted, missing rights, plaintext to
    another machine, `noeviction`, no maxmemory, an old version, a replica that takes no writes, a
    cluster that is not configured as one.
    """
    try:
        topology = make_topology(config, Dialer(config), lambda node: None)
    except DialError as error:
        return [Finding(str(error), fatal=True)]
    findings: list[Finding] = []
    try:
        async with asyncio.timeout(CHECK_SECONDS):
            problem = await topology.start()
            if problem is not None:
                findings.append(Finding(str(problem), fatal=True))
            deadline = asyncio.get_running_loop().time() + CHECK_SECONDS
            for node in topology.nodes():
                link = node.control_link()
                if link is not None and node.endpoint is not None:
                    findings += await inspect(link, node.endpoint, config, deadline)
    except TimeoutError:
        findings.append(Finding("the server does not answer in time; is it busy?", fatal=True))
    finally:
        await topology.stop()
    return list(dict.fromkeys(findings))


async def inspect(
    link: Link, endpoint: Endpoint, config: RedisConfig, deadline: float
) -> list[Finding]:
    """What one server says of itself and of our rights there, in one round trip. Never raises."""
    key = config.key_prefix.encode() + b":check"
    tries = {
        "INFO": command(b"INFO"),
        "EXISTS": command(b"EXISTS", key),
        "GET": command(b"GET", key),
        "SET": command(b"SET", key, b"", b"PX", b"1"),
        "PEXPIRE": command(b"PEXPIRE", key, b"1"),
        "UNLINK": command(b"UNLINK", key),
    }
    try:
        replies = await link.ask(b"".join(tries.values()), len(tries), deadline)
    except LinkLost as lost:
        return [Finding(f"{endpoint} does not answer ({lost}); is it busy?")]
    answers = dict(zip(tries, replies, strict=True))
    findings = list(_about_rights(answers, endpoint, config))
    info = answers["INFO"]
    if isinstance(info, bytes):
        findings += _about_server(parse_info(info), endpoint, config)
    return findings


def parse_info(text: bytes) -> dict[str, str]:
    """The fields of INFO, sections thrown together."""
    fields = {}
    for line in text.decode("utf-8", "replace").splitlines():
        name, colon, value = line.partition(":")
        if colon:
            fields[name] = value
    return fields


def _about_rights(
    answers: dict[str, Reply], endpoint: Endpoint, config: RedisConfig
) -> Iterator[Finding]:
    denied = [
        name
        for name, reply in answers.items()
        if isinstance(reply, ReplyError) and reply.code in ("NOPERM", "NOAUTH")
    ]
    if denied:
        user = config.username or "default"
        what = " and ".join(denied) + f" on {config.key_prefix}:*"
        needed = set(denied) - {"INFO", "PEXPIRE", "UNLINK"}
        yield Finding(rights_message(str(endpoint), user, what, config), fatal=bool(needed))
    refused = answers["SET"]
    if isinstance(refused, ReplyError) and refused.code == "OOM":
        yield Finding(
            f"{endpoint} is full and evicts nothing: chunks are read but none is saved; "
            "run there: CONFIG SET maxmemory-policy allkeys-lru"
        )


def _about_server(
    info: dict[str, str], endpoint: Endpoint, config: RedisConfig
) -> Iterator[Finding]:
    is_cluster = info.get("cluster_enabled") == "1"
    if is_cluster and not config.cluster:
        yield Finding(f"{endpoint} is a node of a cluster; set cluster: true", fatal=True)
    version = re.match(r"([0-9]{1,4})\.([0-9]{1,4})", info.get("redis_version", ""))
    if version and (int(version[1]), int(version[2])) < LEAST_VERSION:
        yield Finding(
            f"{endpoint} is Redis {version[0]}, which gets no security fixes any more; update it"
        )
    policy = info.get("maxmemory_policy", "")
    if info.get("maxmemory") == "0":
        yield Finding(
            f"{endpoint} has no maxmemory: the cache grows until the machine is full; set "
            "maxmemory and maxmemory-policy allkeys-lru"
        )
    elif policy == "noeviction":
        yield Finding(
            f"{endpoint} evicts nothing (noeviction): when it is full, no chunk is saved any "
            "more; set maxmemory-policy allkeys-lru"
        )
    elif policy.startswith("volatile-") and config.ttl is None:
        yield Finding(
            f"{endpoint} evicts only keys with a TTL ({policy}), and chunks have none; set ttl, "
            "or maxmemory-policy allkeys-lru there"
        )
    if info.get("role") == "slave" and not config.sentinel:
        yield Finding(
            f"{endpoint} is a replica: chunks are read but none is saved; give the master's "
            "address, or sentinel"
        )
    if not endpoint.is_local and not config.uses_tls:
        yield Finding(
            f"plaintext to {endpoint}: everyone on the way can read and change the cache; use TLS"
        )
