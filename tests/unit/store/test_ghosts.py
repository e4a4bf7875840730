# SPDX-License-Identifier: Apache-2.0
"""Why a chunk is missing: what the table of ghosts says, alone and within the Store."""

from __future__ import annotations

from hashlib import blake2b

from tests.unit.store.rig import Clock
from tierkv.store.ghosts import Ghosts

TIERS = (("dram", None), ("disk", None), ("redis", 60.0))


def key(number: int) -> bytes:
    return blake2b(number.to_bytes(8, "little"), digest_size=16).digest()


def test_what_no_tier_ever_had_was_never_seen() -> None:
    assert Ghosts(TIERS, Clock()).why(key(1)) == ("never_seen", "none")


def test_the_lowest_tier_that_had_it_gave_it_up() -> None:
    ghosts = Ghosts(TIERS, Clock())
    ghosts.had(key(1), 0)
    assert ghosts.why(key(1)) == ("evicted", "dram")
    ghosts.had(key(1), 1)
    assert ghosts.why(key(1)) == ("evicted", "disk")
    ghosts.had(key(1), 0)  # evicted from DRAM while it is on disk
    assert ghosts.why(key(1)) == ("evicted", "disk")
    assert ghosts.why(key(2)) == ("never_seen", "none")


def test_a_tier_with_a_time_to_live_let_it_expire_once_that_has_passed() -> None:
    clock = Clock()
    ghosts = Ghosts(TIERS, clock)
    ghosts.had(key(1), 2)
    clock.now += 59.9
    assert ghosts.why(key(1)) == ("evicted", "redis")
    ghosts.had(key(1), 0)  # leaving DRAM is no new life in Redis
    clock.now += 0.2
    assert ghosts.why(key(1)) == ("expired", "redis")
    ghosts.had(key(1), 2)
    assert ghosts.why(key(1)) == ("evicted", "redis")


def test_what_was_invalid_stays_so_until_it_is_seen_again() -> None:
    ghosts = Ghosts(TIERS, Clock())
    ghosts.had(key(1), 1)
    ghosts.invalid([key(1), key(2)])
    assert ghosts.why(key(1)) == ghosts.why(key(2)) == ("invalid", "none")
    ghosts.had(key(1), 0)
    assert ghosts.why(key(1)) == ("evicted", "dram")


def test_its_size_is_fixed_and_a_newer_key_takes_the_place_of_an_older_one() -> None:
    ghosts = Ghosts(TIERS, Clock(), places=16)
    for number in range(200):
        ghosts.had(key(number), 0)
    remembered = [n for n in range(200) if ghosts.why(key(n)) != ("never_seen", "none")]
    assert len(remembered) == 16
    assert 199 in remembered
    # The last in each place is the one that is remembered.
    places: dict[int, int] = {}
    for number in range(200):
        places[int.from_bytes(key(number)[:8], "little") % 16] = number
    assert remembered == sorted(places.values())


def test_all_can_be_forgotten() -> None:
    ghosts = Ghosts(TIERS, Clock())
    ghosts.had(key(1), 1)
    ghosts.forget_all()
    assert ghosts.why(key(1)) == ("never_seen", "none")
