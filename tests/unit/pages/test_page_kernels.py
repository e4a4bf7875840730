# SPDX-License-Identifier: Apache-2.0
"""Gather and scatter kernels: right bytes in Triton's interpreter, and code for real GPUs.

The interpreter is chosen when a kernel is decorated, so a second copy of the module is loaded with
it switched on; other tests keep theirs. The compiler needs no GPU either: it accepts less than the
interpreter does, and only it shows that.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.unit.pages.engine_kv import EngineKV, Shape
from tierkv.pages.geometry import PageTable

triton = pytest.importorskip("triton", reason="the kernels need triton")


def _load_module(name: str) -> ModuleType:
    spec = importlib.util.find_spec("tierkv.pages.kernels")
    assert spec is not None
    assert spec.origin is not None
    copy = importlib.util.spec_from_file_location(name, spec.origin)
    assert copy is not None
    assert copy.loader is not None
    module = importlib.util.module_from_spec(copy)
    copy.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def kernels() -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_INTERPRET", "1")
        yield _load_module("interpreted_kernels")


def _rows(count: int, width: int) -> torch.Tensor:
    values = np.arange(count * width) % 239 + 1
    return torch.from_numpy(values.astype(np.uint8)).view(count, width)


@pytest.mark.parametrize("order", ["LB", "BL"])
@pytest.mark.parametrize(
    ("page", "pad"),
    [(8, 0), (7, 0), (24, 8), (24, 3), (1025, 0), (8192, 0), (8200, 8), (9001, 5)],
)
def test_blocks_are_gathered_in_the_order_asked_for(
    kernels: Any, order: str, page: int, pad: int
) -> None:
    kv = EngineKV(Shape(order, layers=2, blocks=5, page=page, pad=pad))
    kv.fill(kv.all_blocks())
    pages = kernels.DevicePages(PageTable.from_layers(kv.views))
    out = torch.zeros((6, kv.shape.block_bytes), dtype=torch.uint8)
    pages.gather(pages.upload(np.array([4, 0, 4, -1, 1])), out)
    for row, block in enumerate((4, 0, 4)):
        assert out[row].numpy().tobytes() == kv.block(block)
    assert not out[3].any()
    assert out[4].numpy().tobytes() == kv.block(1)
    assert not out[5].any()
    assert kv.bytes().tobytes() == kv.image(kv.all_blocks()).tobytes()


@pytest.mark.parametrize("order", ["LB", "BL"])
@pytest.mark.parametrize(
    ("page", "pad"),
    [(8, 0), (7, 0), (24, 8), (24, 3), (1025, 0), (8192, 0), (8200, 8), (9001, 5)],
)
def test_rows_are_scattered_to_their_blocks_and_nowhere_else(
    kernels: Any, order: str, page: int, pad: int
) -> None:
    kv = EngineKV(Shape(order, layers=2, blocks=5, page=page, pad=pad))
    kv.fill(kv.all_blocks())
    pages = kernels.DevicePages(PageTable.from_layers(kv.views))
    rows = _rows(4, kv.shape.block_bytes)
    pages.scatter(pages.upload(np.array([3, -1, 0])), rows)
    expected = kv.all_blocks() | {3: rows[0].numpy().tobytes(), 0: rows[2].numpy().tobytes()}
    assert kv.bytes().tobytes() == kv.image(expected).tobytes()
    assert torch.equal(rows, _rows(4, kv.shape.block_bytes))


def test_segments_of_different_page_sizes_go_through_one_launch(kernels: Any) -> None:
    wide, narrow = EngineKV(Shape("LB", page=9000)), EngineKV(Shape("BL", layers=2, page=16, pad=8))
    for kv in (wide, narrow):
        kv.fill(kv.all_blocks())
    table = PageTable.from_layers(wide.views + narrow.views)
    pages = kernels.DevicePages(table)
    out = torch.zeros((1, table.block_bytes), dtype=torch.uint8)
    pages.gather(pages.upload(np.array([6])), out)
    assert out[0].numpy().tobytes() == wide.block(6) + narrow.block(6)


@pytest.mark.parametrize(
    ("page", "start", "word"), [(24, 0, torch.int64), (20, 0, torch.uint8), (24, 4, torch.uint8)]
)
def test_bytes_move_in_words_where_sizes_and_addresses_allow(
    kernels: Any, page: int, start: int, word: torch.dtype
) -> None:
    kv = EngineKV(Shape("LB", page=page, start=start))
    assert kernels.DevicePages(PageTable.from_layers(kv.views))._word is word


SHAPES = st.builds(
    Shape,
    order=st.sampled_from(["LB", "BL"]),
    layers=st.integers(1, 4),
    blocks=st.integers(1, 6),
    page=st.one_of(st.integers(1, 50), st.sampled_from([64, 1024, 8200])),
    pad=st.sampled_from([0, 1, 8]),
    start=st.sampled_from([0, 1, 8]),
)


@settings(
    max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(shape=SHAPES, data=st.data())
def test_what_was_gathered_can_be_scattered_elsewhere(
    kernels: Any, shape: Shape, data: st.DataObject
) -> None:
    sources = data.draw(st.lists(st.integers(0, shape.blocks - 1), min_size=1, max_size=4))
    order = data.draw(st.permutations(range(shape.blocks)))
    targets = order[: len(sources)]
    sources = sources[: len(targets)]
    kv = EngineKV(shape)
    kv.fill(kv.all_blocks())
    pages = kernels.DevicePages(PageTable.from_layers(kv.views))
    rows = torch.zeros((len(sources), shape.block_bytes), dtype=torch.uint8)
    pages.gather(pages.upload(np.array(sources)), rows)
    kv.fill(kv.all_blocks(salt=77))
    pages.scatter(pages.upload(np.array(targets)), rows)
    moved = {target: kv.block(source) for source, target in zip(sources, targets, strict=True)}
    assert kv.bytes().tobytes() == kv.image(kv.all_blocks(salt=77) | moved).tobytes()


@pytest.mark.parametrize("word", ["i64", "u8"])
@pytest.mark.parametrize("is_gather", [True, False])
def test_the_compiler_makes_gpu_code_with_accesses_of_one_word(
    word: str, is_gather: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from triton.backends import backends
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    if "nvidia" not in backends:
        pytest.skip("this triton was built without its NVIDIA backend")
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    # Set, because Triton 3.9 warns about a default that will change; no floats here.
    monkeypatch.setenv("TRITON_DEFAULT_FP_FUSION", "1")
    source = ASTSource(
        _load_module("compiled_kernels")._move,
        {
            "runs": "*i64",
            "blocks": "*i32",
            "rows": f"*{word}",
            "block_bytes": "i32",
            "IS_GATHER": "constexpr",
            "WORDS": "constexpr",
        },
        {"IS_GATHER": is_gather, "WORDS": 1024},
    )
    code = triton.compile(source, target=GPUTarget("cuda", 80, 32)).asm["ptx"]
    bits = {"i64": "b64", "u8": "b8"}[word]
    assert f"st.global.{bits}" in code
    assert f"ld.global.{bits}" in code
    assert "st.global." not in code.replace(f"st.global.{bits}", "")
