# SPDX-License-Identifier: Apache-2.0
"""Chains of chunks, followed from their root."""

from __future__ import annotations

from tierkv.chains import below, tenant_root
from tierkv.inventory.base import StoredChunk
from tierkv.keys import ChunkChain, Namespace


def stored(chain: ChunkChain) -> list[StoredChunk]:
    return [StoredChunk("n", c.key, c.parent, 1, 4, 1, 1, 0) for c in chain.chunks]


def make_chain(space: Namespace, tokens: list[int], **scope: str) -> ChunkChain:
    chain = ChunkChain(space.scope(**scope), 4)
    chain.extend(tokens)
    return chain


def test_a_tenant_s_chunks_are_those_below_its_root() -> None:
    secret = b"s" * 100  # longer than a key of the hash may be
    space = Namespace({"model": "m"}, secret)
    mine = make_chain(space, list(range(20)), tenant="a")
    branch = make_chain(space, [*range(8), 99, 98, 97, 96], tenant="a")
    others = make_chain(space, list(range(20)), tenant="b")
    with_lora = make_chain(space, list(range(20)), tenant="a", lora="x")
    everything = [*stored(mine), *stored(branch)[2:], *stored(others), *stored(with_lora)]
    found = list(below(tenant_root(space.digest.hex(), "a", secret), everything))
    numbered = [*enumerate(mine.chunks), *enumerate(branch.chunks)]
    assert {(n, c.key) for n, c in found} == {(n, c.key) for n, c in numbered}
    assert len(found) == 6
    assert not list(below(tenant_root(space.digest.hex(), "a", b"other"), everything))
    assert not list(below(tenant_root(space.digest.hex(), "", secret), everything))


def test_what_follows_a_gap_is_not_found() -> None:
    space = Namespace({"model": "m"})
    chunks = stored(make_chain(space, list(range(20))))
    del chunks[2]
    found = below(tenant_root(space.digest.hex(), "", b""), chunks)
    assert [(n, c.key) for n, c in found] == [(n, c.key) for n, c in enumerate(chunks[:2])]


def test_a_chain_that_bites_its_tail_ends() -> None:
    loop = [StoredChunk("n", bytes([n]), bytes([1 - n]), 1, 4, 1, 1, 0) for n in (0, 1)]
    assert len(list(below(b"\0", loop))) == 2
