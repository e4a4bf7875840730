# SPDX-License-Identifier: Apache-2.0
"""`tierkv simulate` as its user meets it."""

from __future__ import annotations

import json
import re
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

from tests.unit.simulate.traces import conversations, write
from tierkv.cli.app import run


@pytest.fixture
def trace(tmp_path: Path) -> str:
    return str(write(tmp_path / "talk.jsonl", conversations(7, 120)))


def arguments(trace: str, *more: str) -> list[str]:
    sizes = ["--dram", "80tokens,400tokens", "--disk", "none,800tokens"]
    return ["simulate", trace, "--block-tokens", "4", *sizes, *more]


def test_json_and_table_tell_the_same(trace: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(arguments(trace, "--json")) == 0
    result = json.loads(capsys.readouterr().out)
    assert len(result["points"]) == 2 * 2 * 2
    for point in result["points"]:
        parts = point["dram_hit_rate"] + point["disk_hit_rate"]
        assert point["hit_rate"] == pytest.approx(parts)
        assert point["hit_rate"] <= result["ceiling"]["hit_rate"]
        assert point["disk"] or not point["disk_hit_rate"]
    assert any(point["disk_hit_rate"] for point in result["points"])
    assert run(arguments(trace)) == 0
    printed = capsys.readouterr().out
    for point in result["points"]:
        assert f"{100 * point['hit_rate']:.1f} %" in printed
    for sentence in result["reading"]:
        assert " ".join(sentence.split()) in " ".join(printed.split())


def test_more_space_is_never_worse_for_lru(trace: str, capsys: pytest.CaptureFixture[str]) -> None:
    sizes = ",".join(f"{4 * chunks}tokens" for chunks in (1, 5, 20, 80, 320))
    command = ["simulate", trace, "--block-tokens", "4", "--dram", sizes, "--disk", "none"]
    assert run([*command, "--policies", "lru", "--json"]) == 0
    rates = [point["hit_rate"] for point in json.loads(capsys.readouterr().out)["points"]]
    assert rates == sorted(rates)
    assert rates[0] < rates[-1]


def test_a_model_turns_bytes_into_chunks(
    trace: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    heads = {"num_attention_heads": 4, "hidden_size": 256}
    config = {"num_hidden_layers": 2, "torch_dtype": "float16", **heads}
    (tmp_path / "config.json").write_text(json.dumps(config))  # 2 * 2 * 256 * 2 bytes a token
    command = ["simulate", trace, "--block-tokens", "4", "--model", str(tmp_path), "--json"]
    assert run([*command, "--dram", "1MiB", "--disk", "none", "--policies", "lru"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert (result["bytes_per_token"], result["chunk_bytes"]) == (2048, 8192)
    assert result["points"][0]["dram"] == {"text": "1MiB", "chunks": 128, "bytes": 1 << 20}


def test_by_default_capacities_suit_the_trace(
    trace: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["simulate", trace, "--block-tokens", "4", "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    alone = [p for p in result["points"] if p["disk"] is None and p["policy"] == "lru"]
    assert len(alone) == 6
    assert alone[0]["hit_rate"] < 0.5 * result["ceiling"]["hit_rate"]
    assert alone[-1]["hit_rate"] > 0.8 * result["ceiling"]["hit_rate"]
    assert all(p["disk"]["chunks"] > p["dram"]["chunks"] for p in result["points"] if p["disk"])


def test_the_page_stands_alone_and_has_a_line_for_each_series(
    trace: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page = tmp_path / "sizes.html"
    assert run(arguments(trace, "--html", str(page))) == 0
    text = page.read_text()
    assert "<script" not in text
    assert not re.search(r"""(src|href)\s*=\s*["'](?!#)""", text)
    svg = text[text.index("<svg") : text.index("</svg>") + len("</svg>")]
    written = " ".join(e.text or "" for e in ET.fromstring(svg).iter() if e.tag.endswith("text"))
    for label in ("lru, no disk", "s3fifo, + 800tokens", "unbounded", "capacity of DRAM"):
        assert label in written
    for cell in re.findall(r"[0-9.]+ %", capsys.readouterr().out):
        assert cell in text


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (["--dram", "4GiB"], "--dram: '4GiB' needs to know the model"),
        (["--dram", "none"], "at least one capacity"),
        (["--policies", "lfu"], "unknown eviction policy 'lfu'"),
        (["--disk", "80tokens"], "no disk is larger"),
        (["--model", ".", "--bytes-per-token", "5"], "not both"),
        (["--block-tokens", "512"], "give the trace's own block size"),
        (["--html", "missing/x.html"], "no such directory"),
    ],
)
def test_mistakes_are_one_line_with_the_remedy(
    trace: str, more: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(arguments(trace, *more)) in (1, 2)
    printed = capsys.readouterr()
    assert printed.out == ""
    assert said in " ".join(printed.err.split())
