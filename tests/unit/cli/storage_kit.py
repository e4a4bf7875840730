# SPDX-License-Identifier: Apache-2.0
"""Places with chunks in them for the commands that look at what is stored: made by the tiers."""

from __future__ import annotations

import asyncio
import tempfile
from contextlib import ExitStack
from pathlib import Path

from tests import redis_kit
from tests.redis_kit import RedisServer
from tests.unit.tiers import disk_kit
from tierkv.keys import Chunk, ChunkChain, Namespace
from tierkv.tiers.base import Outcome

ABOUT = {"model": "tiny-model", "engine": "vllm 0.32.0"}
SPACE = Namespace({"model": "tiny"}, b"secret", ABOUT)
OTHER = Namespace({"model": "other"}, b"secret")
LAYOUT = disk_kit.LAYOUT


def chain(space: Namespace, count: int, *, tenant: str | None = None, seed: int = 0) -> list[Chunk]:
    """Chunks that one request would have stored."""
    made = ChunkChain(space.scope(tenant=tenant), LAYOUT.chunk_tokens)
    made.extend([seed + n for n in range(count * LAYOUT.chunk_tokens)])
    return made.chunks


def fill_disk(path: Path, space: Namespace, *chains: list[Chunk], slots: int = 40) -> Path:
    """Save the chunks into the directory `path / "kv"`, as an engine would; returns that."""
    config = disk_kit.make_config(path, slots)

    async def fill() -> None:
        tier, _ = await disk_kit.opened(config, space.digest)
        if space.about:
            await tier.describe(space.about)
        for chunk in (chunk for each in chains for chunk in each):
            assert (await disk_kit.save(tier, chunk)).outcome is Outcome.DONE
        await tier.close()

    asyncio.run(fill())
    return config.path


def folder(path: Path, space: Namespace) -> Path:
    return path / f"{space.digest.hex()}-v1"


def slot_of(path: Path, space: Namespace, chunk: Chunk) -> int:
    """Where the table says that a chunk is, read as `format.md` has it."""
    table = (folder(path, space) / "table").read_bytes()
    entries = [table[at : at + 128] for at in range(4096, len(table), 128)]
    [slot] = [n for n, entry in enumerate(entries) if entry[:16] == chunk.key]
    return slot


def redis_of(kind: str, tmp_path: Path, stack: ExitStack) -> tuple[str, str]:
    """Start a server of this kind; URL and further keys of a tier on it."""
    if kind == "tls":
        authority = redis_kit.Authority(tmp_path / "ca")
        server = stack.enter_context(authority.server(tmp_path / "redis"))
        return f"rediss://127.0.0.1:{server.port}/0", f", tls_ca: {authority.ca}"
    if kind == "unix":
        # A short path: a socket's must fit into 107 bytes.
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="tk-"))
        path = f"{folder}/redis.sock"
        stack.enter_context(RedisServer(tmp_path / "redis", unixsocket=path))
        return f"unix://{path}", ""
    if kind == "sentinel":
        watched = stack.enter_context(redis_kit.WatchedRedis(tmp_path / "watched"))
        return "redis:///0", (
            f", sentinel: {{service: {watched.service}, nodes: '{watched.nodes}'}}"
        )
    cluster = stack.enter_context(redis_kit.RedisCluster(tmp_path / "cluster"))
    return f"redis://127.0.0.1:{cluster.servers[0].port}/0", ", cluster: true"
