# SPDX-License-Identifier: Apache-2.0
"""The three forms of the result (JSON, table, page) say the same and stand alone."""

from __future__ import annotations

import io
import json
import re
import xml.etree.ElementTree as ET
from collections.abc import Callable
from pathlib import Path

import pytest
from rich.console import Console

from tierkv.demo.page import render_page
from tierkv.demo.phases import Phase, Record, Sample
from tierkv.demo.plan import Plan
from tierkv.demo.result import Result, build_result, passed
from tierkv.demo.table import milliseconds, print_result

Make = Callable[[Callable[[Sample], Sample]], Record]
Edit = Callable[..., Sample]

PLAN = Plan(documents=2, rounds=2, restarts=1, answer_tokens=3)


def result_of(record: Record) -> Result:
    return build_result(record, PLAN, Path("/models/some-model"), 12.3)


def printed(result: Result) -> str:
    text = io.StringIO()
    print_result(result, Console(file=text, width=120))
    return text.getvalue()


@pytest.fixture
def result(record: Record) -> Result:
    return result_of(record)


@pytest.fixture
def broken(make_record: Make, edit: Edit) -> Result:
    """One answer from disk differs."""

    def change(sample: Sample) -> Sample:
        return edit(sample, token_ids=(0,)) if sample.phase is Phase.DISK else sample

    return result_of(make_record(change))


def test_the_json_has_the_promised_fields(result: Result) -> None:
    read = json.loads(json.dumps(result))
    assert set(read["ratios"]) == {
        "dram_over_apc",
        "disk_over_dram",
        "cold_over_none",
        "none_over_dram",
    }
    assert all(set(r) == {"median", "spread", "repeats"} for r in read["ratios"].values())
    assert read["answers_identical"] is True
    assert [phase["name"] for phase in read["phases"]] == ["none", "apc", "cold", "dram", "disk"]
    assert {"versions", "machine", "config"} <= set(read)


def test_a_phase_tells_median_spread_samples_and_hits(result: Result) -> None:
    disk = result["phases"][4]
    assert disk["ttft_median_s"] == pytest.approx((0.18 + 0.36) / 2)
    assert disk["hit_tokens"] == {"disk": 256}
    assert [sample["ttft_s"] for sample in disk["samples"]] == [0.18, 0.36]
    assert disk["over_none"] == pytest.approx(0.18)
    assert disk["over_apc"] == pytest.approx(1.8)


def test_only_the_name_of_the_model_is_told(result: Result) -> None:
    assert "/models" not in json.dumps(result)
    assert result["config"]["model"] == "some-model"


def test_the_result_fails_when_a_check_does(result: Result, broken: Result) -> None:
    assert passed(result)
    assert not passed(broken)
    assert broken["answers_identical"] is False


def test_the_table_shows_every_phase_and_says_that_answers_are_the_same(result: Result) -> None:
    text = printed(result)
    for title in ("(a)", "(b)", "(c)", "(d)", "(e)"):
        assert title in text
    assert "disk 256" in text
    assert "all 8 from DRAM and from disk are token for token" in text
    assert "FAILED" not in text


def test_the_table_says_what_failed(broken: Result) -> None:
    text = printed(broken)
    assert "FAILED: 0 of 2 answers with (e) TierKV from disk" in text
    assert "are token for token those with vLLM's own prefix cache." not in text


@pytest.mark.parametrize(("seconds", "text"), [(0.0614, "61.4"), (0.25, "250"), (2.5, "2,500")])
def test_milliseconds_have_a_decimal_only_where_it_means_something(
    seconds: float, text: str
) -> None:
    assert milliseconds(seconds) == text


def test_the_page_stands_alone(
    result: Result, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("MPLCONFIGDIR", str(tmp_path))
    page = render_page(result)
    assert "<script" not in page
    # Namespaces of SVG are names, not addresses: nothing is loaded.
    assert not re.search(r"""(src|href)\s*=\s*["'](?!#)""", page)
    assert "@import" not in page
    assert "url(http" not in page


def test_the_plot_has_a_dot_for_every_sample(
    result: Result, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("MPLCONFIGDIR", str(tmp_path))
    page = render_page(result)
    svg = ET.fromstring(page[page.index("<svg") : page.index("</svg>") + len("</svg>")])
    # Colour of the dots of (d): two documents, two warm rounds and one after the restart.
    dots = [
        e for e in svg.iter("{http://www.w3.org/2000/svg}use") if "#2e8b57" in e.get("style", "")
    ]
    assert len(dots) == 6


def test_the_page_names_what_failed(
    broken: Result, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("MPLCONFIGDIR", str(tmp_path))
    assert 'class="bad">FAILED: 0 of 2 answers' in render_page(broken)
