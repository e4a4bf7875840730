# SPDX-License-Identifier: Apache-2.0
"""What is believed of the server's last word, for how long, and the shared generation."""

from __future__ import annotations

import itertools

import pytest

from tierkv.tiers.base import Presence
from tierkv.tiers.redis.generation import Generation, Step
from tierkv.tiers.redis.verdicts import Verdicts


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


def test_nothing_is_known_at_first(clock: Clock) -> None:
    verdicts = Verdicts(clock, 1.0)
    assert verdicts.presence(b"k") is Presence.UNKNOWN
    assert len(verdicts) == 0


def test_not_there_is_believed_for_a_moment_only(clock: Clock) -> None:
    verdicts = Verdicts(clock, 1.0)
    verdicts.miss(b"k")
    assert verdicts.presence(b"k") is Presence.MISS
    clock.now += 0.99
    assert verdicts.presence(b"k") is Presence.MISS
    clock.now += 0.02
    assert verdicts.presence(b"k") is Presence.UNKNOWN


def test_there_is_believed_until_it_proves_wrong(clock: Clock) -> None:
    verdicts = Verdicts(clock, 1.0)
    verdicts.hit(b"k", 0.0)
    clock.now += 1e6
    assert verdicts.presence(b"k") is Presence.HIT
    verdicts.miss(b"k")
    assert verdicts.presence(b"k") is Presence.MISS
    assert len(verdicts) == 0


def test_a_hit_ends_a_miss_at_once(clock: Clock) -> None:
    verdicts = Verdicts(clock, 1.0)
    verdicts.miss(b"k")
    verdicts.hit(b"k", 0.0)
    assert verdicts.presence(b"k") is Presence.HIT


def test_renewal_is_due_when_its_time_has_come_and_only_for_hits(clock: Clock) -> None:
    verdicts = Verdicts(clock, 1.0)
    verdicts.hit(b"k", 110.0)
    assert not verdicts.is_due(b"k")
    clock.now = 110.0
    assert verdicts.is_due(b"k")
    verdicts.renewed(b"k", 120.0)
    assert not verdicts.is_due(b"k")
    verdicts.renewed(b"other", 0.0)
    assert not verdicts.is_due(b"other")
    assert verdicts.presence(b"other") is Presence.UNKNOWN


def test_both_tables_are_bounded_and_the_oldest_go(clock: Clock) -> None:
    verdicts = Verdicts(clock, 1e9, max_hits=80, max_misses=80)
    for n in range(1000):
        verdicts.hit(b"h%d" % n, 0.0)
        verdicts.miss(b"m%d" % n)
        assert len(verdicts) <= 80
    assert verdicts.presence(b"h999") is Presence.HIT
    assert verdicts.presence(b"m999") is Presence.MISS
    assert verdicts.presence(b"h900") is Presence.UNKNOWN
    assert verdicts.presence(b"m900") is Presence.UNKNOWN
    assert sum(verdicts.presence(b"m%d" % n) is Presence.MISS for n in range(1000)) <= 80


def test_clear_forgets_both(clock: Clock) -> None:
    verdicts = Verdicts(clock, 1.0)
    verdicts.hit(b"h", 0.0)
    verdicts.miss(b"m")
    verdicts.clear()
    assert [verdicts.presence(key) for key in (b"h", b"m")] == [Presence.UNKNOWN] * 2


class Server:
    """The one key that engines agree on."""

    def __init__(self) -> None:
        self.value: bytes | None = None

    def settle(self, generation: Generation) -> list[Step]:
        """Do what the tier does, until there is nothing left to do."""
        steps = []
        while True:
            step = generation.found(self.value)
            steps.append(step)
            if step in (Step.NOTHING, Step.ADOPTED):
                return steps
            assert generation.word is not None
            if step is Step.IMPOSE or self.value is None:
                self.value = generation.word.encode()
                if step is Step.IMPOSE:
                    generation.imposed(generation.word)


def engines(count: int) -> list[Generation]:
    numbers = itertools.count(1)
    return [Generation(lambda: f"{next(numbers):08x}") for _ in range(count)]


def test_the_first_engine_names_the_generation_and_the_others_follow() -> None:
    server, (first, second) = Server(), engines(2)
    assert first.word is None
    assert server.settle(first) == [Step.OFFER, Step.NOTHING]
    assert server.settle(second) == [Step.ADOPTED]
    assert first.word == second.word == "00000001"


def test_who_loses_the_race_to_name_it_follows() -> None:
    server, (first, second) = Server(), engines(2)
    assert second.found(None) is Step.OFFER  # its offer comes too late:
    server.settle(first)
    assert server.settle(second) == [Step.ADOPTED]
    assert second.word == first.word


def test_a_renewed_generation_spreads() -> None:
    server, (first, second) = Server(), engines(2)
    server.settle(first)
    server.settle(second)
    old = first.word
    new = first.renew()
    assert new != old
    assert server.settle(first) == [Step.IMPOSE, Step.NOTHING]
    assert server.settle(second) == [Step.ADOPTED]
    assert second.word == new


def test_a_word_that_was_left_is_not_taken_up_again() -> None:
    server, (first, second) = Server(), engines(2)
    server.settle(first)
    server.settle(second)
    before = server.value
    first.renew()
    server.settle(first)
    server.settle(second)
    server.value = before  # a failover lost the last write
    assert server.settle(second) == [Step.IMPOSE, Step.NOTHING]
    assert server.settle(first) == [Step.NOTHING]
    assert server.value != before


def test_forgetting_before_the_server_was_reached_counts_once_it_is() -> None:
    server, (first, second) = Server(), engines(2)
    server.settle(first)
    second.renew()
    assert server.settle(second) == [Step.IMPOSE, Step.NOTHING]
    assert server.value == second.word.encode() != first.word.encode()  # type: ignore[union-attr]


def test_an_empty_server_gets_the_old_word_back() -> None:
    server, (first,) = Server(), engines(1)
    server.settle(first)
    word, server.value = first.word, None
    assert server.settle(first) == [Step.OFFER, Step.NOTHING]
    assert first.word == word


@pytest.mark.parametrize("value", [b"", b"g", b"x" * 100_000, b"0000000G", b"00000001\n"])
def test_a_word_that_is_none_is_replaced(value: bytes) -> None:
    server, (fresh, settled) = Server(), engines(2)
    server.settle(settled)
    for generation in (fresh, settled):
        server.value = value
        assert server.settle(generation) == [Step.IMPOSE, Step.NOTHING]
        assert server.value == generation.word.encode()  # type: ignore[union-attr]
