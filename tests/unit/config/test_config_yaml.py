# SPDX-License-Identifier: Apache-2.0
"""The YAML that is read, the YAML that is refused, and that no file can do harm."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tierkv.config.loader import MAX_BYTES, Refused, parse, read_text
from tierkv.config.tree import Node, Place, Problem, find, plain


def parsed(text: str) -> tuple[Node, list[str]]:
    problems: list[str] = []
    root = parse(text, "f.yaml", lambda *parts: problems.append(str(Problem(*parts))))
    return root, problems


def refusal(text: str) -> str:
    with pytest.raises(Refused) as caught:
        parsed(text)
    return str(caught.value.problem)


def test_every_value_knows_its_line_and_column() -> None:
    root, problems = parsed("version: 1\ntiers:\n  - type: dram\n    capacity: 1GiB\n")
    assert problems == []
    assert plain(root) == {"version": 1, "tiers": [{"type": "dram", "capacity": "1GiB"}]}
    capacity = find(root, ("tiers", 0, "capacity"))
    assert capacity is not None
    assert capacity.place == Place("file", "f.yaml", 4, 15)
    assert capacity.key_place == Place("file", "f.yaml", 4, 5)


def test_scalars_are_what_yaml_1_1_makes_of_them_and_keep_their_spelling() -> None:
    root, _ = parsed("a: no\nb: 60:30\nc: 0777\nd: 1e3\ne: ~\nf: 2024-02-30\ng: 'no'\nh: 1.5\n")
    values = {"a": False, "b": 3630, "c": 511, "d": "1e3", "e": None, "f": "2024-02-30"}
    assert plain(root) == {**values, "g": "no", "h": 1.5}
    assert [root.value[key].written for key in "abcdgh"] == [
        "no",
        "60:30",
        "0777",
        None,
        None,
        None,
    ]


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("a: 1\nb: 2\na: 3\n", "f.yaml:3:1: a: duplicate key, first on line 1; keep one"),
        ("a: {b: 1, b: 2}", "f.yaml:1:11: a.b: duplicate key, first on line 1; keep one"),
        ("a: &x 1\n", "f.yaml:1:4: anchor '&x' is refused; remove it"),
        ("a: !!str 1\n", "f.yaml:1:4: tag '!!str' is refused; remove it"),
        ("a: !x {b: 1}\n", "f.yaml:1:4: tag '!x' is refused; remove it"),
        ("a:\n  <<: {b: 1}\n", "f.yaml:2:3: a: merge key '<<' is refused; write the keys out"),
        ("[a, b]: c\n", "f.yaml:1:1: a key must be a plain word; check the brackets"),
        ("a: " + "9" * 5000, "f.yaml:1:4: a: a number that cannot be read; write a smaller one"),
    ],
)
def test_what_a_configuration_does_not_need_is_refused_but_stepped_over(
    text: str, problem: str
) -> None:
    _, problems = parsed(text + "\nlast: !y z\n")
    assert problem in problems
    assert any("'!y'" in other for other in problems), "reading stopped at the first problem"


def test_of_two_equal_keys_the_first_is_kept() -> None:
    root, _ = parsed("a: 1\na: 2\n")
    assert plain(root) == {"a": 1}


def test_aliases_are_not_expanded() -> None:
    root, problems = parsed("a: &x [1, 2]\nb: *x\n")
    assert root.value["b"].broken
    assert root.value["b"].value is None
    assert problems[1] == "f.yaml:2:4: alias '*x' is refused; write it out"


def test_an_anchor_that_comes_twice_is_two_problems_and_no_end() -> None:
    _, problems = parsed("a: &x 1\nb: &x 2\nc: !y 3\n")
    assert [problem.split(": ")[0] for problem in problems] == [
        "f.yaml:1:4",
        "f.yaml:2:4",
        "f.yaml:3:4",
    ]


def test_an_alias_bomb_stays_small() -> None:
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]" for n in range(1, 45)]
    root, problems = parsed("\n".join(lines))
    nodes = sum(1 + len(child.value) for child in root.value.values())
    assert nodes == 45 * 10
    assert len(problems) == 45 + 44 * 9


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "f.yaml: is empty; 'tierkv config init' writes a sample"),
        ("# nothing\n", "f.yaml: is empty; 'tierkv config init' writes a sample"),
        (
            "- a\n",
            "f.yaml:1:1: must hold keys and values, like 'version: 1'; it holds something else",
        ),
        (
            "a:\n\t- b\n",
            (
                "f.yaml:2:1: not valid YAML: found character '\\t' that cannot start any token; "
                "indent with spaces, not tabs"
            ),
        ),
        (
            "a: 1\n---\nb: 1\n",
            (
                "f.yaml:2:1: not valid YAML: expected a single document in the stream, but found "
                "another document (in what begins on line 1); keep one document; remove the "
                "'---' line"
            ),
        ),
        (
            "a: 'b\n",
            (
                "f.yaml:2:1: not valid YAML: found unexpected end of stream (in what begins on "
                "line 1); a quote is not closed"
            ),
        ),
        ("a: b\x07\n", "f.yaml:1:5: character U+0007 is not allowed; remove it"),
    ],
)
def test_what_is_not_a_configuration_at_all_ends_the_reading(text: str, problem: str) -> None:
    assert refusal(text) == problem


@pytest.mark.parametrize("opening", ["[", "{a: ", "- "])
def test_deep_nesting_is_refused_before_it_can_exhaust_anything(opening: str) -> None:
    text = "x: " * (opening != "- ") + opening * 200_000
    assert refusal(text).endswith("is nested too deeply; a configuration has four levels")


def test_sixteen_levels_are_read_and_no_more() -> None:
    assert parsed("a: " + "[" * 14 + "1" + "]" * 14)[1] == []  # the mapping and the 1 count
    assert "is nested too deeply" in refusal("a: " + "[" * 15 + "1" + "]" * 15)


def test_a_file_beyond_a_mebibyte_is_refused_unread(tmp_path: Path) -> None:
    file = tmp_path / "big.yaml"
    file.write_bytes(b"#" * MAX_BYTES)
    assert len(read_text(file)) == 1_048_576
    file.write_bytes(b"#" * (MAX_BYTES + 1))
    with pytest.raises(Refused, match="is larger than 1MiB"):
        read_text(file)


def test_an_endless_file_is_refused() -> None:
    with pytest.raises(Refused, match="is larger than 1MiB"):
        read_text("/dev/zero")


def test_what_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(Refused, match=r"none\.yaml: no such file; give the path"):
        read_text(tmp_path / "none.yaml")
    with pytest.raises(Refused, match="is a directory; give the file in it"):
        read_text(tmp_path)
    with pytest.raises(Refused, match="cannot be read"):
        read_text("a\0b")
    broken = tmp_path / "latin.yaml"
    broken.write_bytes(b"a: 1\nb: \xe4\n")
    with pytest.raises(Refused, match=r"latin\.yaml:2:4: is not UTF-8; save it as UTF-8"):
        read_text(broken)


def test_a_byte_order_mark_and_windows_line_ends_are_read(tmp_path: Path) -> None:
    file = tmp_path / "windows.yaml"
    file.write_bytes(b"\xef\xbb\xbfa: 1\r\nb: 2\r\n")
    root, problems = parsed(read_text(file))
    assert (plain(root), problems) == ({"a": 1, "b": 2}, [])
    assert root.value["a"].key_place.column == 1
    assert root.value["b"].place.line == 2


def test_an_endless_key_is_printed_in_part() -> None:
    _, problems = parsed(f"{'k' * 500}: !x 1\n? {'k' * 500}\n: 2\n")
    assert problems[1] == f"f.yaml:2:3: {'k' * 60}…: duplicate key, first on line 1; keep one"


# Pieces of YAML, so that the fuzzing reaches further than the first syntax error.
STRUCTURE = ["a", "b: ", "- ", "\n", "  ", "{", "}", "[", "]", ",", "? ", "|\n", "---\n", "\t"]
REFUSED = ["&x ", "*x", "!!int ", "'", '"', "<<: ", "#", "1", "~", "%", "é", "${", "1_0:60"]


@given(
    st.lists(st.sampled_from(STRUCTURE + REFUSED), max_size=40).map("".join) | st.text(max_size=60)
)
def test_no_text_breaks_the_reader(text: str) -> None:
    try:
        root, problems = parsed(text)
    except Refused as refused:
        problems = [str(refused.problem)]
    else:
        assert isinstance(root.value, dict) or root.broken
    assert all("\n" not in problem for problem in problems)
