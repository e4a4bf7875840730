# SPDX-License-Identifier: Apache-2.0
"""The Redis tier keeps the contract of `tierkv.tiers.base`, on a real server; over TLS too."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings

from tests.redis_kit import REDIS_SERVER, Authority, RedisServer, needs_redis
from tierkv.config.redis import RedisConfig
from tierkv.testing.contract import TierContract
from tierkv.testing.machine import tier_machine
from tierkv.tiers.base import Tier
from tierkv.tiers.redis.tier import RedisTier

pytestmark = needs_redis


class RedisContract(TierContract):
    survives_reopen = False
    """It does (test_redis_tier.py), but nobody can say at start how many chunks are there."""

    config: RedisConfig

    def make_tier(self) -> Tier:
        return RedisTier(self.config)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    with RedisServer(tmp_path_factory.mktemp("redis")) as server:
        yield server


class TestRedis(RedisContract):
    @pytest.fixture(autouse=True)
    def medium(self, server: RedisServer) -> None:
        server.cli("FLUSHALL")
        self.config = RedisConfig(url=server.url)


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("tls"))


@pytest.fixture(scope="module")
def tls_server(
    authority: Authority, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[RedisServer]:
    folder = tmp_path_factory.mktemp("redis")
    with authority.server(folder, unixsocket=str(folder / "socket")) as server:
        yield server


class TestRedisOverTls(RedisContract):
    @pytest.fixture(autouse=True)
    def medium(self, tls_server: RedisServer, authority: Authority) -> None:
        tls_server.cli("FLUSHALL")
        self.config = RedisConfig(url=f"rediss://127.0.0.1:{tls_server.port}", tls_ca=authority.ca)


class Medium:
    """One server for all runs of the state machine, emptied for each."""

    server: RedisServer | None = None
    folder: Path

    @classmethod
    def fresh(cls) -> RedisServer:
        if cls.server is None:
            cls.folder = Path(tempfile.mkdtemp())
            cls.server = RedisServer(cls.folder).start()
        cls.server.cli("FLUSHALL")
        return cls.server

    @classmethod
    def end(cls) -> None:
        if cls.server is not None:
            cls.server.stop()
            shutil.rmtree(cls.folder)


@pytest.fixture(scope="module", autouse=True)
def end_of_medium() -> Iterator[None]:
    yield
    Medium.end()


if REDIS_SERVER is not None:
    Machine = tier_machine(Medium.fresh, lambda server: RedisTier(RedisConfig(url=server.url)))
    TestMachine = Machine.TestCase
    TestMachine.settings = settings(max_examples=10, stateful_step_count=30, deadline=None)
