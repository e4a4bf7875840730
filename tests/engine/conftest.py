# SPDX-License-Identifier: Apache-2.0
"""What every engine test shares: where it computes, and silence on the network."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.engine.engines import REFERENCE_CPU, Engine, Reference, disk, options, tiers
from tests.engine.prompts import Texts
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


Start = Callable[..., Engine]


@pytest.fixture(scope="session")
def texts(model_dir: Path) -> Texts:
    """Real text, cut to any length. Tests share engines: each uses numbers of its own."""
    return Texts(model_dir)


@pytest.fixture(scope="session")
def reference(model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Reference]:
    """The right answers of the real model, in float32."""
    log = tmp_path_factory.mktemp("plain") / "log"
    engine = Engine(options(model_dir, enable_prefix_caching=False), log, REFERENCE_CPU)
    yield Reference(engine)
    engine.close()


@pytest.fixture(scope="session")
def small_reference(
    random_llama_dir: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Reference]:
    """The right answers of the small random model, which computes twenty times as fast."""
    log = tmp_path_factory.mktemp("small") / "log"
    engine = Engine(options(random_llama_dir, enable_prefix_caching=False), log, REFERENCE_CPU)
    yield Reference(engine)
    engine.close()


@pytest.fixture(scope="session")
def shared_disk(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Directory of the disk tier of `tiered`."""
    return tmp_path_factory.mktemp("shared") / "kv"


@pytest.fixture(scope="session")
def tiered(
    model_dir: Path, shared_disk: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Engine]:
    """The real model in float32 with TierKV, DRAM and disk; prompts are computed in pieces."""
    config = tiers("512MiB", disk(shared_disk))
    log = tmp_path_factory.mktemp("tiered") / "log"
    engine = Engine(options(model_dir, config, max_num_batched_tokens=256), log)
    yield engine
    engine.close()


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Start engines (arguments of `options`); those still there at the end are killed."""
    engines: list[Engine] = []

    def begin(
        model: Path, *arguments: Any, environment: dict[str, str] | None = None, **more: Any
    ) -> Engine:
        log = tmp_path / f"engine-{len(engines)}.log"
        engines.append(Engine(options(model, *arguments, **more), log, environment))
        return engines[-1]

    yield begin
    for engine in engines:
        engine.kill()
