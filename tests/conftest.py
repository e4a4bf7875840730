# SPDX-License-Identifier: Apache-2.0
"""Fixtures for every test: the real model, made once a machine in the user's cache directory."""

from __future__ import annotations

from pathlib import Path

import pytest

from tierkv.demo.model import prepare_model, prepare_random_llama


@pytest.fixture(scope="session")
def model_dir() -> Path:
    """SmolLM2-135M-Instruct, bfloat16 safetensors; an engine in float32 passes dtype="float32"."""
    return prepare_model(print)


@pytest.fixture(scope="session")
def random_llama_dir() -> Path:
    """A tiny random Llama with 4 heads and 2 KV heads, for tensor parallelism of 2."""
    return prepare_random_llama(print)
