# SPDX-License-Identifier: Apache-2.0
"""The keys of a Redis tier, listed by SCAN and read with redis-py.

Listing needs rights that a tier's own user has no use for, and SCAN shows other applications' key
names too: so an operator gives another user for the moment of the command, like
`TIERKV_TIERS__REDIS__USERNAME=admin tierkv ls`.

`PREFIX:NAMESPACE:SHAPE:GENERATION:KEY` are chunks. Those of another generation than the one under
`PREFIX:NAMESPACE:generation` were left behind by a `clear`: nobody asks for them, their TTL ends
them, and they count as allocated bytes alone.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from typing import Any

from redis import Redis, RedisCluster
from redis.backoff import NoBackoff
from redis.exceptions import AuthenticationError, NoPermissionError, RedisError
from redis.retry import Retry
from redis.sentinel import Sentinel

from tierkv.config.redis import RedisConfig
from tierkv.config.secrets import resolve_secret
from tierkv.errors import FormatError, TierError
from tierkv.inventory.base import Inventory, NamespaceSummary, Problem, StoredChunk
from tierkv.inventory.disk import as_about
from tierkv.record import MAX_HEADER_BYTES, RecordHeader, checksum, parse_header

SECONDS = 5.0
"""For each answer of the server."""

BATCH = 500
"""Keys in one pipelined request."""

RIGHTS = "+scan +strlen +getrange +get +set +unlink +info +ping"

_FIXED_BYTES = 144
"""Of a record, before the token ids: `docs/reference/format.md`."""

_CHUNK = re.compile(rb"([0-9a-f]{32}):[0-9a-f]{8}:([0-9a-f]{8}):([0-9a-f]{32})")
_NOTE = re.compile(rb"([0-9a-f]{32}):(?:generation|about)")


@dataclass(frozen=True, slots=True)
class _Key:
    """A chunk's key on the server."""

    name: bytes
    generation: bytes


class RedisInventory(Inventory):
    """See the module.

    Raises:
        TierError: the server cannot be reached, or does not let us in.
    """

    def __init__(self, config: RedisConfig) -> None:
        self.tier = config.name
        self.place = config.url
        self._config = config
        self._prefix = config.key_prefix.encode() + b":"
        self._client: Any = None
        with self._asking("PING"):
            self._client = connect(config)
            self._client.ping()

    # -- looking ---------------------------------------------------------------------------------

    def namespaces(self) -> list[NamespaceSummary]:
        with self._asking("SCAN, STRLEN and GETRANGE"):
            found = sorted(self._scan().items())
            return [self._summary(name, keys) for name, keys in found if keys]

    def chunks(self, namespace: str) -> Iterator[StoredChunk]:
        with self._asking("SCAN, STRLEN and GETRANGE"):
            keys = self._scan(namespace).get(namespace, [])
            current = self._generation(namespace)
            yield from self._read([key for key in keys if key.generation == current], namespace)

    def header(self, chunk: StoredChunk) -> RecordHeader:
        with self._asking("GETRANGE"):
            fixed = self._client.getrange(chunk.locator, 0, _FIXED_BYTES - 1)
            size = int.from_bytes(fixed[12:16], "little")
            return parse_header(self._client.getrange(chunk.locator, 0, _capped(size) - 1))

    def check(self, chunk: StoredChunk) -> Problem | None:
        with self._asking("GET"):
            value = self._client.get(chunk.locator)
        if value is None:
            return None  # evicted or expired meanwhile
        try:
            header = parse_header(value)
            if header.key != chunk.key or header.namespace.hex() != chunk.namespace:
                raise FormatError("the value is another chunk's")
            payload = memoryview(value)[header.header_bytes :]
            if len(payload) != header.stored_bytes:
                raise FormatError("the value is cut short")
            if checksum([payload]) != header.payload_checksum:
                raise FormatError("the payload does not match its checksum")
        except FormatError as error:
            return Problem(chunk.namespace, chunk.key.hex(), str(error), chunk.locator)
        return None

    def damage(self, namespace: str) -> list[Problem]:
        return []

    def _summary(self, namespace: str, keys: list[_Key]) -> NamespaceSummary:
        current = self._generation(namespace)
        chunks = list(self._read([key for key in keys if key.generation == current], namespace))
        left = sum(self._lengths([key.name for key in keys if key.generation != current]))
        created = [chunk.created_ns for chunk in chunks if chunk.created_ns]
        return NamespaceSummary(
            self.tier,
            namespace,
            namespace,
            self._about(namespace),
            chunks=len(chunks),
            chunk_bytes=sum(chunk.nbytes for chunk in chunks),
            allocated_bytes=left + sum(chunk.nbytes for chunk in chunks),
            tokens=sum(chunk.tokens for chunk in chunks),
            oldest_ns=min(created, default=None),
            newest_ns=max(created, default=None),
        )

    def _scan(self, namespace: str = "") -> dict[str, list[_Key]]:
        """Namespace to its chunks' keys; one walk over all keys of the server."""
        found: dict[str, dict[bytes, _Key]] = {}  # by name, since SCAN may tell a key twice
        pattern = self._prefix + (namespace.encode() + b":*" if namespace else b"*")
        for name in self._client.scan_iter(match=pattern, count=1000):
            rest = name[len(self._prefix) :]
            chunk, note = _CHUNK.fullmatch(rest), _NOTE.fullmatch(rest)
            if chunk:
                found.setdefault(chunk[1].decode(), {})[name] = _Key(name, chunk[2])
            elif note:
                found.setdefault(note[1].decode(), {})
        return {space: list(keys.values()) for space, keys in found.items()}

    def _read(self, keys: Sequence[_Key], namespace: str) -> Iterator[StoredChunk]:
        """What the values' first bytes say; keys that have gone meanwhile are left out."""
        for batch in _batches(keys):
            pipeline = self._client.pipeline(transaction=False)
            for key in batch:
                pipeline.getrange(key.name, 0, _FIXED_BYTES - 1)
                pipeline.strlen(key.name)
            answers = iter(pipeline.execute())
            for key, fixed, length in zip(batch, answers, answers, strict=False):
                if length:
                    yield StoredChunk(
                        namespace,
                        bytes.fromhex(key.name[-32:].decode()),
                        fixed[112:128],
                        length,
                        int.from_bytes(fixed[20:24], "little"),
                        int.from_bytes(fixed[64:72], "little") or None,
                        None,
                        key.name,
                    )

    def _lengths(self, names: Sequence[bytes]) -> Iterator[int]:
        for batch in _batches(names):
            pipeline = self._client.pipeline(transaction=False)
            for name in batch:
                pipeline.strlen(name)
            yield from pipeline.execute()

    def _generation(self, namespace: str) -> bytes:
        return self._client.get(self._prefix + namespace.encode() + b":generation") or b""

    def _about(self, namespace: str) -> dict[str, str]:
        text = self._client.get(self._prefix + namespace.encode() + b":about")
        try:
            return as_about(json.loads(text or b"{}"))
        except ValueError:
            return {}

    # -- removing --------------------------------------------------------------------------------

    def drop(self, problems: Sequence[Problem]) -> None:
        self._unlink([bytes(p.locator) for p in problems if isinstance(p.locator, bytes)])

    def remove(self, namespace: str, chunks: Sequence[StoredChunk] | None = None) -> int:
        if chunks is not None:
            return self._unlink([c.locator for c in chunks if isinstance(c.locator, bytes)])
        with self._asking("SCAN, SET and UNLINK"):
            keys = self._scan(namespace).get(namespace, [])
            current = self._generation(namespace)
            if current:
                # Engines follow within seconds, and believe nothing that they knew before.
                name = self._prefix + namespace.encode() + b":generation"
                self._client.set(name, secrets.token_hex(4), keepttl=True)
        self._unlink([key.name for key in keys])
        self._unlink([self._prefix + namespace.encode() + b":about"])
        return sum(key.generation == current for key in keys)

    def _unlink(self, names: Sequence[bytes]) -> int:
        removed = 0
        with self._asking("UNLINK"):
            for batch in _batches(names):
                pipeline = self._client.pipeline(transaction=False)
                for name in batch:
                    pipeline.unlink(name)
                removed += sum(pipeline.execute())
        return removed

    # --------------------------------------------------------------------------------------------

    @contextmanager
    def _asking(self, verbs: str) -> Iterator[None]:
        """Turn what redis-py raises into one line. It never holds what was sent."""
        place, user = self._config.url, self._config.username or "default"
        try:
            yield
        except NoPermissionError:
            variable = f"TIERKV_TIERS__{self.tier.upper()}__USERNAME"
            raise TierError(
                f"{place}: user {user!r} may not run {verbs}; set {variable} (and …__PASSWORD__"
                f"FILE) for this command to a user with ~{self._config.key_prefix}:* {RIGHTS}",
                tier=self.tier,
            ) from None
        except AuthenticationError:
            raise TierError(
                f"{place} does not take the password of user {user!r}; set username and password",
                tier=self.tier,
            ) from None
        except (RedisError, OSError) as error:
            reason = str(error).splitlines()[0] if str(error) else type(error).__name__
            raise TierError(
                f"{place}: {reason.rstrip('.')}; 'tierkv doctor' looks closer", tier=self.tier
            ) from None

    def close(self) -> None:
        if self._client is not None:
            self._client.close()
            self._client = None


def connect(config: RedisConfig) -> Any:
    """A client of redis-py for one server, Sentinel's master or a cluster; bytes in, bytes out.

    Raises:
        ConfigError: a secret cannot be read.
        RedisError: as redis-py says.
    """
    arguments: dict[str, Any] = {
        "username": config.username,
        "password": resolve_secret(config.password).decode() if config.password else None,
        "socket_timeout": SECONDS,
        "socket_connect_timeout": SECONDS,
        "retry": Retry(NoBackoff(), 0),
        "protocol": 2,
    }
    if config.uses_tls:
        arguments |= {
            "ssl": True,
            "ssl_ca_certs": None if config.tls_ca is None else str(config.tls_ca),
            "ssl_certfile": None if config.tls_cert is None else str(config.tls_cert),
            "ssl_keyfile": None if config.tls_key is None else str(config.tls_key),
        }
    host, port = config.address
    if config.cluster:
        return RedisCluster(host=host, port=port, **arguments)
    arguments["db"] = config.database
    if config.sentinel is not None:
        watched = config.sentinel
        asked = arguments | {
            "username": watched.username,
            "password": resolve_secret(watched.password).decode() if watched.password else None,
        }
        del asked["db"]
        sentinel: Any = Sentinel(list(watched.addresses), sentinel_kwargs=asked, **arguments)  # type: ignore[no-untyped-call]
        return sentinel.master_for(watched.service)
    if config.socket_path:
        del arguments["socket_connect_timeout"]
        return Redis(unix_socket_path=config.socket_path, **arguments)
    return Redis(host=host, port=port, **arguments)


def _capped(size: int) -> int:
    return min(max(size, _FIXED_BYTES), MAX_HEADER_BYTES)


def _batches(items: Iterable[Any]) -> Iterator[list[Any]]:
    iterator = iter(items)
    while batch := list(islice(iterator, BATCH)):
        yield batch
