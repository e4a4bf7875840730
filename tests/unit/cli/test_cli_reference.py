# SPDX-License-Identifier: Apache-2.0
"""The page of the command line says what the commands say; shells complete them."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.unit.cli.storage_kit import SPACE, chain, fill_disk
from tierkv.cli import reference
from tierkv.cli.app import run

PAGE = Path(__file__).resolve().parents[3] / "docs" / "reference" / "cli.md"


def test_the_page_is_up_to_date() -> None:
    assert PAGE.read_text() == reference.reference_text(), (
        "run: python -m tierkv.cli.reference > docs/reference/cli.md"
    )


@pytest.mark.parametrize(
    "command", ["bench tiers", "doctor", "du", "inspect KEY", "ls", "purge", "verify", "warm FILE"]
)
def test_each_command_has_a_section_with_its_fields(command: str) -> None:
    page = reference.reference_text()
    name, _, argument = command.partition(" ")
    if name == "bench":
        name, argument = "bench tiers", ""
    section = page.partition(f"## `tierkv {name}`")[2].partition("\n## ")[0]
    assert f"```\ntierkv {name}" in section
    assert "| Field of `--json` | Meaning |" in section
    assert not argument or f"| `{argument}` | required |" in section


@pytest.mark.parametrize(
    ("arguments", "module"),
    [
        (["ls"], "ls"),
        (["ls", "tiny-model"], "ls"),
        (["du"], "du"),
        (["inspect", "KEY"], "inspect"),
        (["verify"], "verify"),
        (["purge", "--all"], "purge"),
    ],
    ids=" ".join,
)
def test_the_fields_that_are_printed_are_the_documented_ones(
    arguments: list[str],
    module: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    chunks = chain(SPACE, 1)
    path = fill_disk(tmp_path, SPACE, chunks)
    words = [chunks[0].key.hex() if word == "KEY" else word for word in arguments]
    assert run([*words, "--path", str(path), "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    fields = importlib.import_module(f"tierkv.cli.{module}").JSON
    documented = {name for names in fields for name in names.split(", ")}
    assert printed.keys() <= documented
    text = " ".join(fields.values())
    for value in printed.values():
        for entry in value if isinstance(value, list) else []:
            for name in entry:
                assert f"`{name}`" in text or f"`{name}s`" in text or name == "place", name


def shell(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    code = "from tierkv.cli import main; main()"
    script = "import sys; sys.argv[0] = 'tierkv'; " + code
    return subprocess.run(
        [sys.executable, "-c", script, *arguments],
        capture_output=True, text=True, timeout=60, check=False,
        env={**os.environ, **variables},
    )  # fmt: skip


@pytest.mark.parametrize(
    ("typed", "words"),
    [("tierkv do", ["doctor"]), ("tierkv bench ", ["tiers"]), ("tierkv ls --li", ["--limit"])],
)
def test_a_shell_completes_commands_and_options(typed: str, words: list[str]) -> None:
    done = shell(
        COMP_WORDS=typed,
        COMP_CWORD=str(len(typed.split(" ")) - 1),
        _TIERKV_COMPLETE="complete_bash",
    )
    assert done.stdout.split() == words


def test_completion_installs_itself_for_bash(tmp_path: Path) -> None:
    done = shell(
        "--install-completion",
        HOME=str(tmp_path),
        _TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION="1",
    )
    if done.returncode:
        # Without a shell above it, typer wants to be told which.
        done = shell(
            "--install-completion",
            "bash",
            HOME=str(tmp_path),
            _TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION="1",
        )
    assert done.returncode == 0, done.stderr
    script = (tmp_path / ".bash_completions" / "tierkv.sh").read_text()
    assert "complete -o default -F _tierkv_completion tierkv" in script
    assert "tierkv.sh" in (tmp_path / ".bashrc").read_text()
