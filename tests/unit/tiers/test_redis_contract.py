# SPDX-License-Identifier: Apache-2.0
"""The Redis tier keeps the contract of `tierkv.tiers.base`, on a real server."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.redis_kit import RedisServer, needs_redis
from tierkv.config.redis import RedisConfig
from tierkv.testing.contract import TierContract
from tierkv.tiers.base import Tier
from tierkv.tiers.redis.tier import RedisTier

pytestmark = needs_redis


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    with RedisServer(tmp_path_factory.mktemp("redis")) as server:
        yield server


class TestRedis(TierContract):
    survives_reopen = False
    """It does (test_redis_tier.py); but nobody can say at start how many chunks are there."""

    @pytest.fixture(autouse=True)
    def medium(self, server: RedisServer) -> None:
        server.cli("FLUSHALL")
        self.config = RedisConfig(url=server.url)

    def make_tier(self) -> Tier:
        return RedisTier(self.config)
