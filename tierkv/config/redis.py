# SPDX-License-Identifier: Apache-2.0
"""Configuration of the Redis tier: one server, Sentinel or Cluster, shared by many engines."""

from __future__ import annotations

import ipaddress
import re
from typing import Annotated, ClassVar, Literal, Self
from urllib.parse import urlsplit

from pydantic import AfterValidator, Field, model_validator
from pydantic_core import PydanticCustomError

from tierkv.config.base import (
    AbsolutePath,
    Count,
    LowerTierConfig,
    Model,
    SecretRef,
    TierName,
)
from tierkv.config.units import Duration, Size

DEFAULT_PORT = 6379
SENTINEL_PORT = 26379

_PREFIX = re.compile(r"[A-Za-z0-9_.-]+(:[A-Za-z0-9_.-]+)*")
_HOST = re.compile(r"[A-Za-z0-9_.:-]*")
_DATABASE = re.compile(r"/?|/[0-9]{1,5}")
_SCHEMES = ("redis", "rediss", "unix")

Address = tuple[str, int]
"""Host and port."""


def is_loopback(host: str) -> bool:
    """Whether what is sent to `host` stays on this machine."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def is_host(host: str) -> bool:
    """Whether it can be the name or address of a machine."""
    return bool(host) and len(host) < 256 and _HOST.fullmatch(host) is not None


def _url(value: str) -> str:
    # Never with the value: people do put passwords into URLs.
    try:
        parts = urlsplit(value)
        port = DEFAULT_PORT if parts.port is None else parts.port
    except ValueError:
        port = 0
        parts = urlsplit("")
    if parts.username is not None or parts.password is not None:
        raise PydanticCustomError(
            "redis_url",
            "holds a user or a password; give them as username: NAME and password: {braces}",
            {"braces": "{file: PATH}"},
        )
    host = parts.hostname or ""
    wrong = parts.scheme not in _SCHEMES or parts.query or parts.fragment or not port
    if parts.scheme == "unix":
        wrong = wrong or bool(host) or not parts.path.startswith("/") or parts.path == "/"
    else:
        wrong = wrong or not _DATABASE.fullmatch(parts.path) or not _HOST.fullmatch(host)
    if wrong:
        raise PydanticCustomError(
            "redis_url",
            "is not the address of a Redis server; write rediss://HOST:PORT/DATABASE (TLS), "
            "redis://HOST:PORT/DATABASE or unix:///PATH",
        )
    return value


def _prefix(value: str) -> str:
    if len(value) > 64 or not _PREFIX.fullmatch(value):
        # Braces would be a hash tag: all keys of a cluster on one of its nodes.
        raise PydanticCustomError(
            "key_prefix",
            "is not a key prefix; at most 64 letters, digits, and _ . - with : between them",
        )
    return value


def _addresses(value: str) -> tuple[Address, ...]:
    found = []
    for entry in value.split(","):
        host, colon, port = entry.strip().rpartition(":")
        if not colon:
            host, port = port, str(SENTINEL_PORT)
        host = host.removeprefix("[").removesuffix("]")
        if not host or not _HOST.fullmatch(host) or not re.fullmatch("[0-9]{1,5}", port):
            raise ValueError(value)
        found.append((host, int(port)))
    return tuple(found)


def _nodes(value: str) -> str:
    try:
        _addresses(value)
    except ValueError:
        raise PydanticCustomError(
            "sentinel_nodes", "is not a list of addresses; write HOST:PORT,HOST:PORT"
        ) from None
    return value


class SentinelConfig(Model):
    """Where to ask which server is the master."""

    service: str = Field(
        min_length=1, examples=["tierkv"], description="Name of the master in Sentinel"
    )
    nodes: Annotated[str, AfterValidator(_nodes)] = Field(
        examples=["s1:26379,s2:26379,s3:26379"],
        description="The sentinels, HOST:PORT, with commas between them",
    )
    username: str | None = Field(None, description="User at the sentinels, if they want one")
    password: SecretRef | None = Field(
        None, description="Password at the sentinels, by reference, if they want one"
    )

    @property
    def addresses(self) -> tuple[Address, ...]:
        return _addresses(self.nodes)


class RedisConfig(LowerTierConfig):
    """A Redis or Valkey server that several engines share; Sentinel and Cluster too."""

    is_shared: ClassVar[bool] = True

    type: Literal["redis"] = Field("redis", description="What kind of tier this is")
    name: TierName = Field("redis", description="Names the tier in metrics and variables")
    url: Annotated[str, AfterValidator(_url)] = Field(
        examples=["rediss://cache:6380/0"],
        description="rediss://HOST:PORT/DATABASE (TLS), redis://… (plaintext), or unix:///PATH. "
        "With sentinel without a host, like rediss:///0",
    )
    username: str | None = Field(
        None, examples=["tierkv"], description="User of Redis's ACL; without one the default user"
    )
    password: SecretRef | None = Field(
        None,
        examples=[{"file": "/run/secrets/redis"}],
        description="Password, by reference: {file: PATH} or {env: NAME}",
    )
    tls_ca: AbsolutePath | None = Field(
        None,
        examples=["/etc/tierkv/ca.pem"],
        description="Certificates to trust instead of the system's; verification is always on",
    )
    tls_cert: AbsolutePath | None = Field(
        None, examples=["/etc/tierkv/client.pem"], description="Certificate of this client"
    )
    tls_key: AbsolutePath | None = Field(
        None, examples=["/etc/tierkv/client.key"], description="Key of that certificate"
    )
    insecure: bool = Field(
        False,
        description="Allow plaintext to another machine, where everyone on the way can read and "
        "change the cache",
    )
    sentinel: SentinelConfig | None = Field(
        None,
        examples=[{"service": "tierkv", "nodes": "s1:26379,s2:26379,s3:26379"}],
        description="Ask Sentinel for the master: {service: NAME, nodes: HOST:PORT,HOST:PORT}",
    )
    cluster: bool = Field(False, description="The server is a node of a Redis Cluster")
    key_prefix: Annotated[str, AfterValidator(_prefix)] = Field(
        "tierkv", description="What all keys begin with"
    )
    ttl: Duration | None = Field(
        86400.0,
        ge=1,
        description="Life of a chunk that nobody uses; renewed on use, at most once per quarter of "
        "it. Without one, chunks stay until the server evicts them",
    )
    miss_ttl: Duration = Field(
        1.0,
        gt=0,
        description="How long it is believed that a chunk is not there; another engine may have "
        "stored it since",
    )
    max_connections: Count = Field(
        8, ge=3, le=256, description="Connections to each server: loads, saves and small requests"
    )
    max_inflight: Size = Field(
        64 << 20,
        gt=0,
        description="Most bytes of loads that servers were asked for and have not sent yet",
    )

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        parts = urlsplit(self.url)
        tls = [name for name in ("tls_ca", "tls_cert", "tls_key") if getattr(self, name)]
        reason = ""
        if self.sentinel and self.cluster:
            reason = "sentinel and cluster exclude each other; keep one"
        elif self.scheme == "unix" and (self.sentinel or self.cluster):
            reason = "a unix socket reaches one server only; write url: redis://…"
        elif self.sentinel and (parts.hostname or parts.port):
            reason = f"url: sentinel tells the address; write url: {self.scheme}:///{self.database}"
        elif not self.sentinel and self.scheme != "unix" and not parts.hostname:
            reason = f"url: names no host; write url: {self.scheme}://HOST:PORT/{self.database}"
        elif self.cluster and self.database:
            reason = "url: a cluster has only database 0; remove the number"
        elif tls and not self.uses_tls:
            reason = f"{tls[0]} is of no use without TLS; write url: rediss://…"
        elif bool(self.tls_cert) != bool(self.tls_key):
            reason = "tls_cert and tls_key go together; give both"
        elif self.scheme == "redis" and not self.insecure:
            remote = [host for host, _ in self._named_addresses if not is_loopback(host)]
            if remote:
                reason = (
                    f"plaintext to {remote[0]}: everyone on the way could read and change the "
                    "cache; write url: rediss://…, or set insecure: true"
                )
        if reason:
            raise PydanticCustomError("redis_address", "{reason}", {"reason": reason})
        return self

    @property
    def reads_at_once(self) -> int:
        # Pipelined: enough for small chunks over a long way; `max_inflight` bounds large ones.
        return 8 * self.max_connections

    @property
    def _named_addresses(self) -> tuple[Address, ...]:
        return self.sentinel.addresses if self.sentinel else (self.address,)

    @property
    def scheme(self) -> str:
        return urlsplit(self.url).scheme

    @property
    def uses_tls(self) -> bool:
        return self.scheme == "rediss"

    @property
    def address(self) -> Address:
        """Host and port of `url`; of no meaning for unix sockets and with Sentinel."""
        parts = urlsplit(self.url)
        return parts.hostname or "", parts.port or DEFAULT_PORT

    @property
    def socket_path(self) -> str:
        """Path of the unix socket, "" if there is none."""
        return urlsplit(self.url).path if self.scheme == "unix" else ""

    @property
    def database(self) -> int:
        path = urlsplit(self.url).path
        return int(path[1:] or 0) if self.scheme != "unix" and len(path) > 1 else 0
