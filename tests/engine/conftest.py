# SPDX-License-Identifier: Apache-2.0
"""What every engine test shares: where it computes, and silence on the network."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from tierkv.demo.server import cpu_binding


@pytest.fixture(scope="session", autouse=True)
def engine_environment() -> Iterator[None]:
    """The same cores with and without a connector (vLLM would choose otherwise); no network."""
    wanted = {
        "VLLM_CPU_OMP_THREADS_BIND": cpu_binding(),
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
    }
    before = {name: os.environ.get(name) for name in wanted}
    os.environ.update(wanted)
    yield
    for name, value in before.items():
        if value is None:
            del os.environ[name]
        else:
            os.environ[name] = value
