# SPDX-License-Identifier: Apache-2.0
"""Fixtures for every test: the real model, made once a machine in the user's cache directory."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tierkv.demo.model import prepare_model, prepare_random_llama


@pytest.fixture(scope="session", autouse=True)
def runtime_dir() -> Iterator[Path]:
    """Where engines under test put their stats sockets: out of the way of the user's own.

    A short name: what pytest makes is too long for a socket's path.
    """
    with tempfile.TemporaryDirectory(prefix="tkr-") as path:
        before = os.environ.get("XDG_RUNTIME_DIR")
        os.environ["XDG_RUNTIME_DIR"] = path
        yield Path(path)
        if before is None:
            del os.environ["XDG_RUNTIME_DIR"]
        else:
            os.environ["XDG_RUNTIME_DIR"] = before


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put `@pytest.mark.feature` into the results file; see `tests/compatibility.py`."""
    for item in items:
        for mark in item.iter_markers("feature"):
            item.user_properties.append(("feature", mark.args[0]))


@pytest.fixture(scope="session")
def model_dir() -> Path:
    """SmolLM2-135M-Instruct, bfloat16 safetensors; an engine in float32 passes dtype="float32"."""
    return prepare_model(print)


@pytest.fixture(scope="session")
def random_llama_dir() -> Path:
    """A tiny random Llama with 4 heads and 2 KV heads, for tensor parallelism of 2."""
    return prepare_random_llama(print)
