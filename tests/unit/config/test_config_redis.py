# SPDX-License-Identifier: Apache-2.0
"""What a Redis section may say, and that no secret gets into a message."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from tierkv.config import SecretRef, TierKVConfig
from tierkv.config.dram import DramConfig
from tierkv.config.redis import RedisConfig


@pytest.mark.parametrize(
    ("url", "address", "database", "tls", "path"),
    [
        ("redis://127.0.0.1", ("127.0.0.1", 6379), 0, False, ""),
        ("redis://localhost:7000/3", ("localhost", 7000), 3, False, ""),
        ("redis://[::1]:7000", ("::1", 7000), 0, False, ""),
        ("rediss://cache.example:6380/0", ("cache.example", 6380), 0, True, ""),
        ("rediss://10.0.0.1/", ("10.0.0.1", 6379), 0, True, ""),
        ("unix:///run/redis.sock", ("", 6379), 0, False, "/run/redis.sock"),
    ],
)
def test_urls_are_understood(
    url: str, address: tuple[str, int], database: int, tls: bool, path: str
) -> None:
    config = RedisConfig(url=url)
    found = (config.address, config.database, config.uses_tls, config.socket_path)
    assert found == (address, database, tls, path)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"url": "http://h/0"}, "is not the address"),
        ({"url": "redis://127.0.0.1/x"}, "is not the address"),
        ({"url": "redis://127.0.0.1:0"}, "is not the address"),
        ({"url": "redis://127.0.0.1:70000"}, "is not the address"),
        ({"url": "redis://127.0.0.1/0?password=hunter2"}, "is not the address"),
        ({"url": "redis://127.0.0.1/#hunter2"}, "is not the address"),
        ({"url": "unix://host/run/redis.sock"}, "is not the address"),
        ({"url": "unix:///"}, "is not the address"),
        ({"url": "redis://ho st"}, "is not the address"),
        ({"url": "redis:///0"}, "names no host"),
        ({"url": "redis://u:hunter2@127.0.0.1"}, "holds a user or a password"),
        ({"url": "rediss://:hunter2@h"}, "holds a user or a password"),
        ({"url": "redis://10.0.0.1"}, "plaintext to 10.0.0.1"),
        ({"url": "redis://cache"}, "plaintext to cache"),
        ({"url": "redis://127.0.0.1", "tls_ca": "/ca"}, "tls_ca is of no use without TLS"),
        ({"url": "rediss://h", "tls_cert": "/c"}, "go together"),
        ({"url": "redis://127.0.0.1/1", "cluster": True}, "only database 0"),
        ({"url": "unix:///s", "cluster": True}, "reaches one server only"),
        ({"url": "redis://127.0.0.1", "key_prefix": "a{b}"}, "is not a key prefix"),
        ({"url": "redis://127.0.0.1", "key_prefix": "a:"}, "is not a key prefix"),
        ({"url": "redis://127.0.0.1", "key_prefix": "a b"}, "is not a key prefix"),
        ({"url": "redis://127.0.0.1", "password": "hunter2"}, "password"),
        ({"url": "redis://127.0.0.1", "max_connections": 2}, "max_connections"),
        ({"url": "redis://127.0.0.1", "pasword": "hunter2"}, "pasword"),
        (
            {"url": "redis://127.0.0.1", "sentinel": {"service": "m", "nodes": "localhost:1"}},
            "sentinel tells the address; write url: redis:///0",
        ),
        (
            {"url": "redis:///0", "sentinel": {"service": "m", "nodes": "a:1,b:2"}},
            "plaintext to a",
        ),
        (
            {"url": "rediss:///0", "cluster": True, "sentinel": {"service": "m", "nodes": "a"}},
            "exclude each other",
        ),
        ({"url": "rediss:///0", "sentinel": {"service": "m", "nodes": "a:x"}}, "list of addresses"),
        ({"url": "rediss:///0", "sentinel": {"service": "m", "nodes": ""}}, "list of addresses"),
        ({"url": "rediss:///0", "sentinel": {"service": "", "nodes": "a:1"}}, "service"),
    ],
)
def test_what_cannot_work_is_refused_and_no_secret_is_shown(
    options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValidationError) as caught:
        RedisConfig(**options)
    assert message in str(caught.value)
    assert "hunter2" not in str(caught.value)


def test_plaintext_to_another_machine_is_allowed_when_asked_for() -> None:
    assert RedisConfig(url="redis://cache:6380", insecure=True).address == ("cache", 6380)


def test_sentinels_are_listed_with_commas() -> None:
    config = RedisConfig(url="rediss:///2", sentinel={"service": "m", "nodes": "a:1, b ,[::1]:3"})
    assert config.sentinel is not None
    assert config.sentinel.addresses == (("a", 1), ("b", 26379), ("::1", 3))
    assert config.database == 2


def test_a_shared_tier_needs_the_key_secret() -> None:
    tiers = (DramConfig(capacity=1 << 30), RedisConfig(url="redis://localhost"))
    with pytest.raises(ValidationError, match="key_secret: missing"):
        TierKVConfig(tiers=tiers)
    TierKVConfig(tiers=tiers, key_secret=SecretRef(env="KEY"))
