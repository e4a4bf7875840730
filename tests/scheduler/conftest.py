# SPDX-License-Identifier: Apache-2.0
"""Fixtures for tests with vLLM's real scheduler and no model."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch

from tests.scheduler.blending import BlendRig
from tests.scheduler.rig import VOCAB, Rig, write_model

BLEND = {
    "mode": "balanced",
    "min_tokens": 64,
    "anchor_tokens": 12,
    "sample_every": 0,
    "recompute_ratio": 0.06,
}
"""No samples: every byte of a blended prompt can be foretold."""


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> Iterator[None]:
    """The rig's tensors are tiny: a team of threads a copy costs more than the copy."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="session")
def rig_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("rig") / "model")


@pytest.fixture
def make_blend(rig_model: Path) -> Iterator[Callable[..., BlendRig]]:
    """Make rigs with any-text reuse; all are closed at the end."""
    rigs: list[BlendRig] = []

    def make(config: dict[str, Any] | None = None, **options: Any) -> BlendRig:
        blend = {**BLEND, **options.pop("blend", {})}
        extra = {**(config or dram()), "blend": blend}
        rigs.append(BlendRig(rig_model, extra, **{"num_blocks": 200, **options}))
        return rigs[-1]

    yield make
    for rig in rigs:
        rig.close()


@pytest.fixture
def make_rig(rig_model: Path) -> Iterator[Callable[..., Rig]]:
    """Make rigs; all are closed at the end, and nothing may be left in any of them."""
    rigs: list[Rig] = []

    def make(extra: dict[str, Any] | None = None, **options: Any) -> Rig:
        rig = Rig(rig_model, extra if extra is not None else dram(), **options)
        rigs.append(rig)
        return rig

    yield make
    for rig in rigs:
        rig.close()


def dram(capacity: str = "2MiB", **more: Any) -> dict[str, Any]:
    """A configuration with DRAM alone: 256 chunks of 64 tokens unless told otherwise."""
    return {"version": 1, "tiers": [{"type": "dram", "capacity": capacity}], **more}


def dram_and_disk(
    path: Path, capacity: str = "2MiB", disk: str = "8MiB", **more: Any
) -> dict[str, Any]:
    """DRAM over a disk tier in `path`."""
    tiers = [
        {"type": "dram", "capacity": capacity},
        {"type": "disk", "path": str(path), "capacity": disk, "min_free": "1MiB", **more},
    ]
    return {"version": 1, "tiers": tiers}


def text(seed: int, length: int) -> list[int]:
    """A made-up document; different seeds share nothing."""
    rng = Random(seed)
    return [rng.randrange(1, VOCAB - 1) for _ in range(length)]
