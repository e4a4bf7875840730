# SPDX-License-Identifier: Apache-2.0
"""A configuration that does not fit the engine stops it; the message names the value's place."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.scheduler.conftest import dram
from tests.scheduler.rig import Rig
from tierkv.errors import ConfigError

MakeRig = Callable[..., Rig]

ODD_CHUNK = (
    "{place}: chunk_tokens: 24 is not a multiple of vLLM's block size 16; set it to 16 or 32, "
    "or leave it out"
)
# Three layers of 16 tokens, 2 heads and 2 x 8 bytes are 1536 bytes a block. Four of them are a
# chunk, padded to 8192.
NO_CHUNK = (
    "{place}: tiers.dram.capacity: dram: capacity=4096 bytes holds no chunk; set it to at least "
    "8192 bytes or make chunk_tokens=64 smaller"
)


def test_chunk_tokens_that_are_no_multiple_of_the_block_size(make_rig: MakeRig) -> None:
    with pytest.raises(ConfigError) as raised:
        make_rig(dram(chunk_tokens=24))
    assert str(raised.value) == ODD_CHUNK.format(place="inline")


def test_dram_without_room_for_one_chunk(make_rig: MakeRig) -> None:
    with pytest.raises(ConfigError) as raised:
        make_rig(dram("4KiB"))
    assert str(raised.value) == NO_CHUNK.format(place="inline")


def test_the_line_of_the_file_is_named(make_rig: MakeRig, tmp_path: Path) -> None:
    file = tmp_path / "tierkv.yaml"
    tiers = json.dumps([{"type": "dram", "capacity": "1MiB"}])
    file.write_text(f"version: 1\nchunk_tokens: 24\ntiers: {tiers}\n")
    with pytest.raises(ConfigError) as raised:
        make_rig({"config": str(file)})
    assert str(raised.value) == ODD_CHUNK.format(place=f"{file}:2")
    file.write_text("version: 1\ntiers:\n  - type: dram\n    capacity: 4KiB\n")
    with pytest.raises(ConfigError) as raised:
        make_rig({"config": str(file)})
    assert str(raised.value) == NO_CHUNK.format(place=f"{file}:4")
