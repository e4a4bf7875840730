# SPDX-License-Identifier: Apache-2.0
"""The rate of a scrub, and chains of chunks."""

from __future__ import annotations

from tierkv.inventory.base import StoredChunk
from tierkv.inventory.chains import below, tenant_root
from tierkv.inventory.scrub import Throttle
from tierkv.keys import ChunkChain, Namespace


class Time:
    """A clock that moves when somebody sleeps."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.slept: list[float] = []

    def clock(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.now += seconds


def test_reading_keeps_to_the_rate() -> None:
    time = Time()
    throttle = Throttle(100.0, time.clock, time.sleep)
    for _ in range(20):
        time.now += 0.1  # reading itself takes a while
        throttle.spend(50)
    # 1,000 bytes at 100 a second, from the first read on.
    assert abs(time.now - 1010.0) < 0.2
    assert all(seconds > 0 for seconds in time.slept)


def test_a_long_wait_earns_a_second_and_no_more() -> None:
    time = Time()
    throttle = Throttle(100.0, time.clock, time.sleep)
    time.now += 3600
    throttle.spend(100)  # what a second allows
    assert time.slept == []
    throttle.spend(100)
    assert time.slept == [1.0]


def test_without_a_rate_nobody_sleeps() -> None:
    time = Time()
    Throttle(None, time.clock, time.sleep).spend(1 << 40)
    assert time.slept == []


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
    found = below(tenant_root(space.digest.hex(), "a", secret), everything)
    assert {c.key for c in found} == {c.key for c in [*mine.chunks, *branch.chunks]}
    assert below(tenant_root(space.digest.hex(), "a", b"other"), everything) == []
    assert below(tenant_root(space.digest.hex(), "", secret), everything) == []


def test_what_follows_a_gap_is_not_found() -> None:
    space = Namespace({"model": "m"})
    chunks = stored(make_chain(space, list(range(20))))
    del chunks[2]
    found = below(tenant_root(space.digest.hex(), "", b""), chunks)
    assert [c.key for c in found] == [c.key for c in chunks[:2]]


def test_a_chain_that_bites_its_tail_ends() -> None:
    loop = [StoredChunk("n", bytes([n]), bytes([1 - n]), 1, 4, 1, 1, 0) for n in (0, 1)]
    assert len(below(b"\0", loop)) == 2
