# SPDX-License-Identifier: Apache-2.0
"""Reading traces: what a line means, and what is said about lines that mean nothing."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.unit.simulate.traces import write
from tierkv.simulate.trace import TraceError, read_trace

PUBLIC_FORM = """\
{"timestamp": 0, "input_length": 1100, "output_length": 5, "hash_ids": [0, 1, 2]}
{"timestamp": 2500, "input_length": 1024, "output_length": 5, "hash_ids": [0, 7]}

{"timestamp": 3000, "input_length": 80, "output_length": 5, "hash_ids": [9]}
"""


def test_the_public_form_is_read_without_its_partial_blocks(tmp_path: Path) -> None:
    file = tmp_path / "trace.jsonl"
    file.write_text(PUBLIC_FORM)
    trace = read_trace(file, 512)
    first, second, third = trace.prompts
    assert [prompt.tokens for prompt in trace.prompts] == [1100, 1024, 80]
    assert len(first.keys) == len(second.keys) == 2
    assert third.keys == []
    assert first.keys[0] == second.keys[0]
    assert first.keys[1] != second.keys[1]
    assert (trace.name, trace.tokens, trace.distinct_chunks) == ("trace.jsonl", 2204, 3)
    assert trace.seconds == 3.0


def test_an_id_stands_for_the_text_before_it_too(tmp_path: Path) -> None:
    requests = [{"hash_ids": ["a", "x"]}, {"hash_ids": ["b", "x"]}, {"hash_ids": ["x", "x"]}]
    trace = read_trace(write(tmp_path / "t.jsonl", requests), 16)
    assert len({key for prompt in trace.prompts for key in prompt.keys}) == 6
    assert trace.prompts[0].tokens == 32  # no input_length: whole blocks


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("not json", "no JSON object"),
        ("[1, 2]", "no JSON object"),
        ('{"input_length": 5}', "'hash_ids' must be"),
        ('{"hash_ids": [1, 2.5]}', "'hash_ids' must be"),
        ('{"hash_ids": [1], "input_length": "5"}', "'input_length' must be"),
        ('{"hash_ids": [1], "input_length": true}', "'input_length' must be"),
        ('{"hash_ids": [1, 2], "input_length": 5}', "blocks of 512 tokens would be 1; give"),
    ],
)
def test_a_bad_line_is_named_with_its_number(tmp_path: Path, line: str, said: str) -> None:
    file = tmp_path / "t.jsonl"
    file.write_text('{"hash_ids": [1], "input_length": 512}\n' + line + "\n")
    with pytest.raises(TraceError, match=r"t\.jsonl:2: ") as caught:
        read_trace(file, 512)
    assert said in str(caught.value)


def test_an_empty_or_missing_file_is_said(tmp_path: Path) -> None:
    (tmp_path / "empty").write_text("\n")
    with pytest.raises(TraceError, match="no request in it"):
        read_trace(tmp_path / "empty", 512)
    with pytest.raises(TraceError, match="No such file"):
        read_trace(tmp_path / "missing", 512)
