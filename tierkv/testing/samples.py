# SPDX-License-Identifier: Apache-2.0
"""Chunks and payloads for tests. Every 64 bytes of a payload name the chunk they belong to."""

from __future__ import annotations

import mmap
from collections.abc import Sequence
from hashlib import blake2b

from tierkv.keys import Chunk, ChunkChain, Namespace
from tierkv.pages.layout import SlotLayout

_LINE_BYTES = 64


def make_chunks(count: int, layout: SlotLayout, *, seed: int = 0) -> list[Chunk]:
    """A chain of `count` chunks; another seed gives another chain."""
    chain = ChunkChain(Namespace({"test": "samples"}).scope(), layout.chunk_tokens)
    chain.extend([seed + n for n in range(count * layout.chunk_tokens)])
    return chain.chunks


def make_parts(layout: SlotLayout) -> list[memoryview]:
    """Zeroed memory for one chunk, aligned like a pool's slot."""
    return [memoryview(mmap.mmap(-1, layout.part_stride)) for _ in range(layout.ranks)]


def make_payload(chunk: Chunk, layout: SlotLayout, *, version: int = 0) -> list[memoryview]:
    """Parts filled with bytes that follow from key, version, rank and place: no two lines alike."""
    parts = make_parts(layout)
    for rank, part in enumerate(parts):
        origin = chunk.key + version.to_bytes(4, "little") + rank.to_bytes(2, "little")
        for start in range(0, len(part), _LINE_BYTES):
            line = origin + start.to_bytes(8, "little")
            part[start : start + _LINE_BYTES] = line + blake2b(line, digest_size=34).digest()
    return parts


def joined(parts: Sequence[memoryview]) -> bytes:
    """The parts' bytes, one after the other."""
    return b"".join(parts)
