# SPDX-License-Identifier: Apache-2.0
"""Names in the configuration become policies; unknown ones are told what there is."""

from __future__ import annotations

import pytest

from tierkv.errors import ConfigError
from tierkv.policies import KNOWN_POLICIES, EvictionPolicy, make_policy


@pytest.mark.parametrize("name", sorted(KNOWN_POLICIES))
def test_every_known_name_makes_an_empty_policy_of_the_capacity(name: str) -> None:
    policy = make_policy(name, 3)
    assert isinstance(policy, EvictionPolicy)
    assert (policy.capacity, len(policy)) == (3, 0)


@pytest.mark.parametrize("name", sorted(KNOWN_POLICIES))
def test_a_policy_of_one_slot_works(name: str) -> None:
    policy = make_policy(name, 1)
    policy.insert(0, b"a")
    assert policy.victim(lambda s: True) == 0
    policy.insert(0, b"b")
    policy.remove(0)
    assert len(policy) == 0
    assert policy.victim(lambda s: True) is None


def test_an_unknown_name_lists_the_known_ones() -> None:
    with pytest.raises(ConfigError, match=r"'fifo'; choose one of lru, s3fifo$"):
        make_policy("fifo", 3)
