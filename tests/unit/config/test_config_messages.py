# SPDX-License-Identifier: Apache-2.0
"""Broken configurations and, word for word, what their authors are told."""

from __future__ import annotations

from pathlib import Path

import pytest

from tierkv.config import InvalidConfig, load_config
from tierkv.config.registry import TIER_MODELS

DRAM = "tiers:\n  - {type: dram, capacity: 1GiB}\n"


def cases() -> dict[str, tuple[str, list[str]]]:
    """Title to file and expected lines."""
    blocks = (Path(__file__).parent / "broken.txt").read_text().split("\n=== ")[1:]
    found = {}
    for block in blocks:
        title, _, rest = block.partition("\n")
        text, _, expected = rest.partition("\n>>>\n")
        expected = expected.replace("{types}", ", ".join(TIER_MODELS))
        expected = expected.replace("{types_or}", " or ".join(TIER_MODELS))
        found[title] = (text + "\n", expected.strip().splitlines())
    return found


CASES = cases()


@pytest.mark.parametrize("case", CASES)
def test_each_problem_is_one_line_with_place_path_and_remedy(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text, expected = CASES[case]
    monkeypatch.chdir(tmp_path)
    Path("t.yaml").write_text(text)
    with pytest.raises(InvalidConfig) as caught:
        load_config(Path("t.yaml"), environ={})
    assert list(caught.value.problems) == ["t.yaml:" + line for line in expected]
    assert str(caught.value) == "\n".join(caught.value.problems)


def test_the_problems_of_the_wrong_file_are_not_endless(tmp_path: Path) -> None:
    file = tmp_path / "t.yaml"
    file.write_text(DRAM + "".join(f"key{n}: 1\n" for n in range(200)))
    with pytest.raises(InvalidConfig) as caught:
        load_config(file, environ={})
    assert len(caught.value.problems) == 51
    assert caught.value.problems[-1] == "… and 150 more problems; mend these first"
    assert len(caught.value.details) == 200


SENTINEL = "geheim"


@pytest.mark.parametrize(
    "text",
    [
        f"key_secret: {SENTINEL}",
        f"key_secret: [{SENTINEL}]",
        f"key_secret: {{file: {SENTINEL}}}",
        f"key_secret: {{file: /x, env: '{SENTINEL} !'}}",
        f"key_secret: {{env: '{SENTINEL} !'}}",
        f"key_secret: {{value: {SENTINEL}}}",
        f"key_secret: {{file: {{x: {SENTINEL}}}}}",
        "key_secret: ${PASSWORD}",
        "key_secret: {file: '${PASSWORD}'}",
        f"pasword: {SENTINEL}",
        f"tiers: [{{type: dram, capacity: 1GiB, password: {SENTINEL}}}]",
        f"key_secret: !x {SENTINEL}",
        f"key_secret: &x {SENTINEL}",
        f"key_secret: {SENTINEL}\nkey_secret: {SENTINEL}",
        f"key_secret: '{SENTINEL}",
        f"key_secret: @{SENTINEL}",
        f"key_secret: {SENTINEL}: {SENTINEL}",
    ],
)
def test_a_misplaced_secret_is_never_printed(text: str, tmp_path: Path) -> None:
    file = tmp_path / "t.yaml"
    file.write_text(text + "\n")
    with pytest.raises(InvalidConfig) as caught:
        load_config(file, environ={"PASSWORD": SENTINEL}, check_machine=True)
    assert SENTINEL not in str(caught.value)
    assert SENTINEL not in repr(caught.value.details)


@pytest.mark.parametrize(
    "variable", ["TIERKV_KEY_SECRET", "TIERKV_KEY_SECRET__FILE", "TIERKV_KEY_SECRET__VALUE",
                 "TIERKV_PASSWORD", "TIERKV_TIERS__DRAM__PASSWORD"],
)  # fmt: skip
def test_a_secret_in_a_variable_is_never_printed(variable: str, tmp_path: Path) -> None:
    file = tmp_path / "t.yaml"
    file.write_text(DRAM)
    with pytest.raises(InvalidConfig) as caught:
        load_config(file, environ={variable: SENTINEL}, strict=True)
    assert str(caught.value).startswith(variable + ": ")
    assert SENTINEL not in str(caught.value)
