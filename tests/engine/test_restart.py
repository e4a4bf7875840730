# SPDX-License-Identifier: Apache-2.0
"""What an engine finds on disk: its own cache after a restart, another one's, a damaged one, or a
directory that is not for it. It serves in every case, and never with wrong tokens."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from tests.engine.engines import (
    Engine,
    Reference,
    cached_of,
    disk,
    hit,
    options,
    tiers,
    tokens_of,
)
from tests.engine.host import Answer, Host
from tests.engine.prompts import Texts
from tests.engine.test_ways_out_engine import Pages, pages_after_prefill

pytestmark = [pytest.mark.engine, pytest.mark.timeout(900)]

Start = Callable[..., Engine]
OFF = {"tierkv": {"load": False, "save": False}}
LENGTHS = [300, 257, 450]


@dataclass(frozen=True)
class Saved:
    """What an engine left on disk.

    Attributes:
        directory: of the disk tier. Read only: tests work on copies.
        prompts: whose KV is there.
        pages: bytes of the first prompt's KV when it was computed.
    """

    directory: Path
    prompts: list[list[int]]
    pages: Pages

    def copy(self, target: Path) -> Path:
        return shutil.copytree(self.directory, target)


@pytest.fixture(scope="module")
def saved(model_dir: Path, texts: Texts, tmp_path_factory: pytest.TempPathFactory) -> Saved:
    folder = tmp_path_factory.mktemp("saved")
    prompts = [texts(130 + i, length) for i, length in enumerate(LENGTHS)]
    engine = Engine(options(model_dir, tiers("256MiB", disk(folder / "kv"))), folder / "log")
    try:
        pages, _ = engine.run(pages_after_prefill, prompts[0], hit(LENGTHS[0]))
        engine.generate(prompts[1:])
    finally:
        engine.close()
    return Saved(folder / "kv", prompts, pages)


def flip_bytes_of(directory: Path, prompt: Sequence[int]) -> None:
    """Change some bytes in the middle of the KV of the prompt's first chunk."""
    (slab,) = directory.glob("*/slab")
    content = bytearray(slab.read_bytes())
    # A record holds its token ids before its payload.
    at = content.index(np.asarray(prompt[:64], dtype="<i4").tobytes()) + 1_000_000
    content[at : at + 8] = bytes(byte ^ 0xFF for byte in content[at : at + 8])
    slab.write_bytes(content)


def with_and_without(host: Host, prompts: Sequence[Sequence[int]]) -> list[list[Answer]]:
    """The prompts as they come, and then past all caches: the engine's own right answers."""
    first = host.generate(prompts, 8)
    host.forget()
    return [first, host.generate(prompts, 8, OFF)]


@pytest.mark.feature("restart: the disk tier keeps the cache")
def test_a_restarted_engine_hits_on_disk_and_a_damaged_chunk_is_a_miss(
    start: Start, saved: Saved, reference: Reference, model_dir: Path, tmp_path: Path
) -> None:
    directory = saved.copy(tmp_path / "kv")
    flip_bytes_of(directory, saved.prompts[1])
    engine = start(model_dir, tiers("256MiB", disk(directory)))
    # The bytes that went to disk are those that come back into the engine's memory.
    with reference.meanwhile(saved.prompts):
        pages, first = engine.run(pages_after_prefill, saved.prompts[0], hit(LENGTHS[0]))
        rest = engine.generate(saved.prompts[1:])
    assert np.array_equal(pages, saved.pages)
    right = reference.tokens(saved.prompts)
    assert [first.tokens, *tokens_of(rest)] == [right[0][:3], *right[1:]]
    assert [first.cached, *cached_of(rest)] == [hit(LENGTHS[0]), 0, hit(LENGTHS[2])]
    assert engine.run(Host.counted)["hit", "disk"] == hit(LENGTHS[0]) + hit(LENGTHS[2])
    errors = engine.run(Host.counter, "tierkv_errors_total", "tier", "kind")
    assert errors == {("disk", "checksum"): 1}
    # The miss was computed and saved again: now it is a hit, and a right one.
    engine.forget()
    again = engine.generate(saved.prompts)
    assert tokens_of(again) == right
    assert cached_of(again) == [hit(length) for length in LENGTHS]
    engine.close()


@pytest.mark.parametrize("change", [{"block_size": 128}, {"dtype": "bfloat16"}], ids=str)
def test_an_engine_of_another_geometry_finds_nothing(
    start: Start, saved: Saved, model_dir: Path, tmp_path: Path, change: dict[str, object]
) -> None:
    directory = saved.copy(tmp_path / "kv")
    engine = start(model_dir, tiers("64MiB", disk(directory)), **change)
    tokens, right = engine.run(with_and_without, saved.prompts)
    assert cached_of(tokens) == [0] * len(LENGTHS)
    assert tokens_of(tokens) == tokens_of(right)
    assert engine.run(Host.counter, "tierkv_errors_total", "tier", "kind") == {}
    # Its own KV lies beside the other's.
    assert len(list(directory.glob("*/slab"))) == 2


def test_an_engine_without_its_disk_tiers_serves_from_dram_and_says_why(
    start: Start,
    tiered: Engine,
    shared_disk: Path,
    reference: Reference,
    texts: Texts,
    model_dir: Path,
    tmp_path: Path,
) -> None:
    prompt = texts(135, 300)
    tiered.generate([prompt])
    file = tmp_path / "file"
    file.write_text("not a directory")
    config = tiers(
        "64MiB", disk(shared_disk, name="taken"), disk(file / "kv", name="blocked", min_free="2MiB")
    )
    second = start(model_dir, config)
    (cold,) = second.generate([prompt])
    second.forget()
    (warm,) = second.generate([prompt])
    assert [cold.tokens, warm.tokens] == reference.tokens([prompt] * 2)
    assert (cold.cached, warm.cached) == (0, hit(300))
    taken, blocked = (
        next(line for line in second.log.splitlines() if f"TierKV: {name} is left out" in line)
        for name in ("taken", "blocked")
    )
    assert f"{shared_disk} is in use by process {tiered.pid}; give this engine a directory" in taken
    assert f"{file / 'kv'} cannot be used (Not a directory); set path to a directory" in blocked
    # The first one never noticed.
    tiered.forget()
    (first,) = tiered.generate([prompt])
    assert first.cached == hit(300)
