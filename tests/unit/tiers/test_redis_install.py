# SPDX-License-Identifier: Apache-2.0
"""Without the package redis everything else works, and asking for the tier says how to get it."""

from __future__ import annotations

import subprocess
import sys

PROGRAM = """
import sys

sys.modules["redis"] = None  # importing it fails, as if it were not installed
from tierkv.config.redis import RedisConfig
from tierkv.errors import ConfigError
from tierkv.store import Store
from tierkv.testing.proxy import FaultProxy
from tierkv.tiers.registry import make_tier

try:
    make_tier(RedisConfig(url="redis://127.0.0.1"))
except ConfigError as error:
    print(error)
"""


def test_the_missing_package_is_named_with_the_command_that_brings_it() -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("tiers: the redis tier needs redis")
    assert done.stdout.strip().endswith("which is not installed: pip install 'tierkv[redis]'")
