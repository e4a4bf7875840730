# SPDX-License-Identifier: Apache-2.0
"""Asks Sentinel for the master and a cluster for its slots, by redis-py.

Nothing that a request waits for. Little patience, no second try: whoever called asks again later.

Threads and ownership. Belongs to the event loop. Each question is a task of its own, because
redis-py must not be interrupted: before version 8 it leaves its connections open then, and 8.1
swallows one cancellation of three (measured). Who is cancelled waits for the end of the question
first, which comes within `ASK_SECONDS` a server asked.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from redis.asyncio import Redis
from redis.asyncio.retry import Retry
from redis.asyncio.sentinel import Sentinel
from redis.backoff import NoBackoff
from redis.exceptions import AuthenticationError, NoPermissionError, RedisError, ResponseError

from tierkv.config.base import SecretRef
from tierkv.config.redis import RedisConfig, SentinelConfig, is_host
from tierkv.errors import ErrorKind
from tierkv.tiers.redis.dial import DialError, Endpoint, read_secret, rights_message

ASK_SECONDS = 0.5
"""For one sentinel or node to answer, before the next one is asked."""

SlotRange = tuple[int, int, Endpoint]
"""First slot, last slot, and the master that has them."""

T = TypeVar("T")

_NO_ANSWER = (RedisError, OSError, TimeoutError)


async def find_master(config: RedisConfig, watched: SentinelConfig) -> Endpoint:
    """The master that the first sentinel that knows one names.

    Raises:
        DialError: none of them names one; fatal if they do not take the password.
    """
    return await _to_the_end(_ask_sentinels(config, watched))


async def find_slots(config: RedisConfig, endpoint: Endpoint) -> list[SlotRange]:
    """Where a node of a cluster says that the slots are.

    Raises:
        DialError: it says nothing of use; fatal if waiting does not mend it.
    """
    return await _to_the_end(_ask_node(config, endpoint))


async def _to_the_end(question: Coroutine[Any, Any, T]) -> T:
    task = asyncio.create_task(question)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        await asyncio.wait([task])
        if not task.cancelled():
            task.exception()  # nobody else will look at it
        raise


async def _ask_sentinels(config: RedisConfig, watched: SentinelConfig) -> Endpoint:
    arguments = _client_arguments(config, watched.username, watched.password)
    sentinel: Any = Sentinel(list(watched.addresses), sentinel_kwargs=arguments)  # type: ignore[no-untyped-call]
    try:
        host, port = await sentinel.discover_master(watched.service)
    except AuthenticationError:
        raise DialError(
            f"the sentinels {watched.nodes} do not take the password; set sentinel.username and "
            "sentinel.password",
            ErrorKind.AUTH,
            fatal=True,
        ) from None
    except _NO_ANSWER as error:
        raise DialError(
            f"none of the sentinels {watched.nodes} names a master of {watched.service!r} "
            f"({type(error).__name__}); are they up, and is the service named so?",
            ErrorKind.EIO,
        ) from None
    finally:
        for client in sentinel.sentinels:
            await client.aclose()
    return _endpoint(str(host), int(port))


async def _ask_node(config: RedisConfig, endpoint: Endpoint) -> list[SlotRange]:
    user = config.username or "default"
    client: Any = Redis(
        host=endpoint.host,
        port=endpoint.port,
        **_client_arguments(config, config.username, config.password),
    )
    # As the server says it: what redis-py makes of it differs between its versions.
    client.set_response_callback("CLUSTER SLOTS", lambda reply, **_: reply)
    try:
        ranges = _ranges(await client.execute_command("CLUSTER SLOTS"), endpoint)
    except AuthenticationError:
        raise DialError(
            f"{endpoint} does not take the password of user {user!r}; set username and password, "
            "or mend the user there",
            ErrorKind.AUTH,
            fatal=True,
        ) from None
    except NoPermissionError:
        message = rights_message(str(endpoint), user, "CLUSTER SLOTS", config)
        raise DialError(message, ErrorKind.AUTH, fatal=True) from None
    except ResponseError as error:
        if "cluster support disabled" in str(error):
            message = f"{endpoint} is no cluster; remove cluster: true"
            raise DialError(message, ErrorKind.PROTOCOL, fatal=True) from None
        raise DialError(f"{endpoint} refuses CLUSTER SLOTS", ErrorKind.EIO) from None
    except (*_NO_ANSWER, LookupError, AttributeError, TypeError, ValueError) as error:
        raise DialError(
            f"{endpoint} does not tell the cluster's slots ({type(error).__name__})", ErrorKind.EIO
        ) from None
    finally:
        await client.aclose()
    if not ranges:
        raise DialError(f"{endpoint} knows of no slots yet", ErrorKind.EIO)
    return ranges


def _ranges(found: list[Any], asked: Endpoint) -> list[SlotRange]:
    ranges = []
    for first, last, master, *_ in found:
        host = (master[0] or b"").decode()  # none means: the one that you reached me by
        ranges.append((int(first), int(last), _endpoint(host or asked.host, int(master[1]))))
    return ranges


def _endpoint(host: str, port: int) -> Endpoint:
    """Where we are led, if that is an address at all: it is connected to, and shown to people."""
    if not is_host(host) or not 0 < port < 1 << 16:
        raise DialError("the servers name an address that is none", ErrorKind.PROTOCOL)
    return Endpoint(host, port)


def _client_arguments(
    config: RedisConfig, username: str | None, password: SecretRef | None
) -> dict[str, Any]:
    arguments: dict[str, Any] = {
        "protocol": 2,
        "socket_timeout": ASK_SECONDS,
        "socket_connect_timeout": ASK_SECONDS,
        "retry": Retry(NoBackoff(), 0),
        "username": username,
        "password": read_secret(password) if password is not None else None,
    }
    if config.uses_tls:
        files = {"ca_certs": config.tls_ca, "certfile": config.tls_cert, "keyfile": config.tls_key}
        arguments |= {f"ssl_{name}": str(path) for name, path in files.items() if path is not None}
        arguments |= {"ssl": True, "ssl_check_hostname": True}
    return arguments
