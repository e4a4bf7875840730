# SPDX-License-Identifier: Apache-2.0
"""Real Redis servers on loopback for tests, each a process of its own in a directory of its own.

Ends only what it started, by its process id. Debian's redis-server brings all of it:
`apt-get install redis-server`.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import socket
import subprocess
from collections.abc import Callable, Coroutine, Sequence
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


def free_port(least: int = 20000, most: int = 50000) -> int:
    """A port nobody listens on; the bus of a cluster node takes the one 10000 above."""
    while True:
        with socket.socket() as sock:
            sock.bind(("127.0.0.1", 0))
            port: int = sock.getsockname()[1]
        if least <= port < most:
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
        self.options = {"save": "", "appendonly": "no", "bind": "127.0.0.1", **options}
        self._sentinel = sentinel
        self._process: subprocess.Popen[str] | None = None

    def start(self) -> Self:
        """Start it and wait until it listens."""
        words = [str(REDIS_SERVER)]
        if self._sentinel:
            words += [str(self.folder / "redis.conf"), "--sentinel"]
        else:
            words += ["--port", str(self.port), "--dir", str(self.folder)]
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
            if "Ready to accept connections" in line or "Sentinel ID is" in line:
                return self
        raise AssertionError("redis-server ended:\n" + "".join(said))

    def kill(self, how: signal.Signals = signal.SIGKILL) -> None:
        """End it, or stop and continue it with SIGSTOP and SIGCONT."""
        assert self._process is not None
        self._process.send_signal(how)
        if how not in (signal.SIGSTOP, signal.SIGCONT):
            self._process.wait()

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
        done = subprocess.run(
            ["redis-cli", "-p", str(port or self.port), *words],
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

    def names(self) -> list[str]:
        """All keys but the generations', sorted."""
        names = self.cli("KEYS", "*").splitlines()
        return sorted(name for name in names if name and not name.endswith(":generation"))

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
