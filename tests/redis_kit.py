# SPDX-License-Identifier: Apache-2.0
"""Real Redis servers on loopback for tests, each a process of its own in a directory of its own.

Ends only what it started, by its process id. Debian's redis-server brings all of it:
`apt-get install redis-server`.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any, Self, TypeVar

import pytest

from tierkv.config.redis import RedisConfig
from tierkv.keys import Chunk
from tierkv.pages.layout import SlotLayout
from tierkv.testing.samples import joined, make_chunks, make_parts, make_payload
from tierkv.tiers.base import Outcome, Presence, Result
from tierkv.tiers.redis.tier import RedisTier

T = TypeVar("T")

NAMESPACE = b"redis-test-space"
LAYOUT = SlotLayout(chunk_tokens=4, block_tokens=2, block_bytes=6000, ranks=2)
RECORD_BYTES = 168 + 2 * 12288
"""144 fixed, 4 token ids of 4 bytes, 8 for the checksum; then two parts of 12000, padded."""
CHUNKS = make_chunks(64, LAYOUT)
GUARD_SECONDS = 60.0

REDIS_SERVER = shutil.which("redis-server")
needs_redis = pytest.mark.skipif(
    REDIS_SERVER is None, reason="no redis-server here: apt-get install redis-server"
)


PORTS = range(10240, 22000)
"""Below those that the kernel gives to connections (from 32768 on), with `BUS` added too: else one
of ours may take a port between the look at it and the server's start."""
BUS = 10000
"""The bus of a cluster node takes the port so far above."""


def free_port() -> int:
    """A port nobody listens on, nor on the one for its bus."""
    while True:
        port = random.choice(PORTS)
        with contextlib.suppress(OSError), socket.socket() as one, socket.socket() as other:
            one.bind(("127.0.0.1", port))
            other.bind(("127.0.0.1", port + BUS))
            return port


class RedisServer:
    """One redis-server. `with RedisServer(tmp_path) as server:`

    Args:
        folder: for its files; made if missing.
        options: as on its command line, without the dashes.
        sentinel: run it as a sentinel, with `folder / "redis.conf"`.
    """

    def __init__(self, folder: Path, *, sentinel: bool = False, **options: str) -> None:
        assert REDIS_SERVER is not None
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        self.port = int(options.pop("port", 0)) or free_port()
        self.options = {
            "save": "",
            "appendonly": "no",
            "bind": "127.0.0.1",
            "repl-diskless-sync-delay": "0",  # a replica would wait 5 s for its first copy
            **options,
        }
        self._sentinel = sentinel
        self._process: subprocess.Popen[str] | None = None

    def start(self, wait_for: str = "Ready to accept connections") -> Self:
        """Start it and wait until it says so: that it is ready, unless told otherwise."""
        words = [str(REDIS_SERVER)]
        if self._sentinel:
            words += [str(self.folder / "redis.conf"), "--sentinel"]
        else:
            plain = 0 if "tls_port" in self.options else self.port
            words += ["--port", str(plain), "--dir", str(self.folder)]
            for name, value in self.options.items():
                words += [
                    f"--{name.replace('_', '-')}",
                    *([value] if value == "" else value.split()),
                ]
        self._process = subprocess.Popen(words, stdout=subprocess.PIPE, text=True)
        assert self._process.stdout is not None
        said = []
        for line in self._process.stdout:
            said.append(line)
            if wait_for in line or "Sentinel ID is" in line:
                return self
        self.stop()
        raise AssertionError("redis-server ended:\n" + "".join(said))

    def kill(self, how: signal.Signals = signal.SIGKILL) -> None:
        """End it, or stop and continue it with SIGSTOP and SIGCONT."""
        assert self._process is not None
        self._process.send_signal(how)
        if how not in (signal.SIGSTOP, signal.SIGCONT):
            self.stop()

    def stop(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            if process.poll() is None:
                process.kill()
                process.wait()
            assert process.stdout is not None
            process.stdout.close()

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.stop()

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}/0"

    def cli(self, *words: str | bytes, port: int | None = None) -> str:
        """What redis-cli prints for a command."""
        where = ["-p", str(port or self.port)]
        if "unixsocket" in self.options and port is None:
            where = ["-s", self.options["unixsocket"]]
        done = subprocess.run(
            ["redis-cli", *where, *words],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            check=True,
            timeout=20,
            env={"PATH": os.environ["PATH"]},
        )
        return done.stdout.decode("utf-8", "replace").strip()

    def set_value(self, name: str, value: bytes) -> None:
        """SET, with any bytes."""
        subprocess.run(
            ["redis-cli", "-p", str(self.port), "-x", "SET", name],
            input=value,
            stdout=subprocess.DEVNULL,
            check=True,
            timeout=20,
        )

    def value(self, name: str) -> bytes:
        """GET, with any bytes."""
        done = subprocess.run(
            ["redis-cli", "-p", str(self.port), "--raw", "GET", name],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            check=True,
            timeout=20,
        )
        return done.stdout[:-1]  # redis-cli ends its output with a newline

    def names(self) -> list[str]:
        """All keys that hold chunks, sorted."""
        names = self.cli("KEYS", "*").splitlines()
        others = (":generation", ":about")
        return sorted(name for name in names if name and not name.endswith(others))

    def name_of(self, chunk: Chunk) -> str:
        """The key on the server that holds the chunk."""
        [name] = [name for name in self.names() if name.endswith(chunk.key.hex())]
        return name


def make_config(url: str, **options: Any) -> RedisConfig:
    return RedisConfig(url=url, **options)


def run(test: Callable[[], Coroutine[Any, Any, T]]) -> T:
    """Run a test's coroutine in a loop of its own."""
    return asyncio.run(asyncio.wait_for(test(), GUARD_SECONDS))


async def opened(config: RedisConfig, **arguments: Any) -> RedisTier:
    """A tier that is open and has all its connections."""
    tier = RedisTier(config, **arguments)
    await tier.open(NAMESPACE, LAYOUT)
    await connected(tier)
    return tier


async def connected(tier: RedisTier) -> None:
    """Wait until every connection is there and the generation is known."""
    assert tier.talk is not None
    topology = tier.talk.topology
    while not (
        topology.nodes()
        and all(
            len(lane.links) == lane.size
            for node in topology.nodes()
            for lane in (node.control, node.loads, node.saves)
        )
        and tier.is_ready
    ):
        await asyncio.sleep(0.005)


async def save(tier: RedisTier, chunk: Chunk, version: int = 0) -> Result:
    return await tier.save(chunk, make_payload(chunk, LAYOUT, version=version))


async def load(tier: RedisTier, chunk: Chunk) -> tuple[Result, bytes]:
    """The result, and the bytes in the slot whatever the result is."""
    parts = make_parts(LAYOUT)
    return await tier.load(chunk, parts), joined(parts)


async def save_all(tier: RedisTier, chunks: Sequence[Chunk]) -> None:
    results = await asyncio.gather(*[save(tier, chunk) for chunk in chunks])
    assert {result.outcome for result in results} == {Outcome.DONE}, results


async def ask(tier: RedisTier, keys: Sequence[bytes]) -> list[Presence]:
    """What the tier says, asked as the Store asks."""
    await tier.probe(keys)
    return [tier.lookup(key) for key in keys]


def expected(chunk: Chunk, version: int = 0) -> bytes:
    return joined(make_payload(chunk, LAYOUT, version=version))


class Authority:
    """Certificates for tests, by openssl: an authority, and a key pair that it has signed."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.ca, self.cert, self.key = (folder / n for n in ("ca.pem", "cert.pem", "key.pem"))
        ca_key, request, names = (folder / n for n in ("ca.key", "request.pem", "names"))
        names.write_text("subjectAltName=IP:127.0.0.1\n")
        new = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes"]
        self._openssl("req", "-x509", *new, "-subj", "/CN=ca", "-keyout", ca_key, "-out", self.ca)
        self._openssl("req", *new, "-subj", "/CN=redis", "-keyout", self.key, "-out", request)
        signed = ["-CA", self.ca, "-CAkey", ca_key, "-CAcreateserial", "-days", "2"]
        self._openssl("x509", "-req", "-in", request, *signed, "-extfile", names, "-out", self.cert)

    @staticmethod
    def _openssl(*words: str | Path) -> None:
        done = subprocess.run(["openssl", *map(str, words)], capture_output=True, timeout=20)
        assert done.returncode == 0, done.stderr.decode()

    def server(self, folder: Path, **options: str) -> RedisServer:
        """A server that speaks TLS alone and wants no client certificate; not started."""
        port = str(free_port())
        return RedisServer(
            folder,
            port=port,
            tls_port=port,
            tls_cert_file=str(self.cert),
            tls_key_file=str(self.key),
            tls_ca_cert_file=str(self.ca),
            tls_auth_clients="no",
            **options,
        )


class RedisCluster:
    """Three masters, the first one with a replica, all on loopback."""

    SLOTS = ((0, 5460), (5461, 10922), (10923, 16383))

    def __init__(self, folder: Path, **options: str) -> None:
        options = {"cluster-enabled": "yes", "cluster-node-timeout": "1000", **options}
        self.servers = [RedisServer(folder / str(n), **options) for n in range(4)]

    def __enter__(self) -> Self:
        try:
            for server in self.servers:
                server.start()
            self._join()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for server in self.servers:
            server.stop()

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.servers[1].port}"

    def _join(self) -> None:
        first = self.servers[0]
        for server, (low, high) in zip(self.servers, self.SLOTS, strict=False):
            server.cli("CLUSTER", "ADDSLOTSRANGE", str(low), str(high))
        for epoch, server in enumerate(self.servers, 1):
            server.cli("CLUSTER", "SET-CONFIG-EPOCH", str(epoch))
            first.cli("CLUSTER", "MEET", "127.0.0.1", str(server.port))
        until(lambda: all(s.cli("CLUSTER", "NODES").count("connected") == 4 for s in self.servers))
        until(
            lambda: (
                self.servers[3].cli("CLUSTER", "REPLICATE", first.cli("CLUSTER", "MYID")) == "OK"
            )
        )
        until(lambda: all("cluster_state:ok" in s.cli("CLUSTER", "INFO") for s in self.servers))
        until(lambda: "master_link_status:up" in self.servers[3].cli("INFO", "replication"))

    def names(self) -> dict[int, list[str]]:
        """Keys of each master, but the generation."""
        return {n: self.servers[n].names() for n in range(3)}


class WatchedRedis:
    """A master, a replica and three sentinels that fail over within a second or two."""

    service = "kv"

    def __init__(self, folder: Path) -> None:
        self.master = RedisServer(folder / "master")
        self.replica = RedisServer(folder / "replica", replicaof=f"127.0.0.1 {self.master.port}")
        self.sentinels = [RedisServer(folder / f"sentinel{n}", sentinel=True) for n in range(3)]

    def __enter__(self) -> Self:
        try:
            self.master.start()
            self.replica.start()
            until(lambda: "master_link_status:up" in self.replica.cli("INFO", "replication"))
            for sentinel in self.sentinels:
                (sentinel.folder / "redis.conf").write_text(
                    f"port {sentinel.port}\nbind 127.0.0.1\ndir {sentinel.folder}\n"
                    f"sentinel monitor {self.service} 127.0.0.1 {self.master.port} 2\n"
                    f"sentinel down-after-milliseconds {self.service} 500\n"
                    f"sentinel failover-timeout {self.service} 1000\n"
                )
                sentinel.start()
            until(lambda: all(self._is_set_up(sentinel) for sentinel in self.sentinels))
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for server in (*self.sentinels, self.replica, self.master):
            server.stop()

    def _is_set_up(self, sentinel: RedisServer) -> bool:
        seen = sentinel.cli("SENTINEL", "MASTER", self.service)
        fields = dict(zip(seen.splitlines()[::2], seen.splitlines()[1::2], strict=False))
        return fields.get("num-slaves") == "1" and fields.get("num-other-sentinels") == "2"

    def at(self, address: str) -> RedisServer:
        """The server that listens there."""
        [server] = [s for s in (self.master, self.replica) if address.endswith(f":{s.port}")]
        return server

    @property
    def nodes(self) -> str:
        return ",".join(f"127.0.0.1:{sentinel.port}" for sentinel in self.sentinels)


def until(is_so: Callable[[], bool], seconds: float = 30.0) -> None:
    """Ask again and again until it is so."""
    end = time.monotonic() + seconds
    while True:
        # A server that changes its role closes connections, that of redis-cli too.
        with contextlib.suppress(subprocess.CalledProcessError):
            if is_so():
                return
        assert time.monotonic() < end, "never came about"
        time.sleep(0.02)


async def eventually(is_so: Callable[[], Awaitable[bool]]) -> None:
    """Ask again and again until it is so; `run` ends what never comes about."""
    while not await is_so():
        await asyncio.sleep(0.02)
