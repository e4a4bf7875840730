# SPDX-License-Identifier: Apache-2.0
"""The command line as its user meets it: output, exit codes, pipes, and how fast it starts."""

from __future__ import annotations

import importlib.util
import io
import json
import os
import stat
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import typer

import tierkv
from tierkv.cli import app, main, output
from tierkv.cli.app import run
from tierkv.errors import ConfigError, TierError

GOOD = "tiers:\n  - {type: dram, capacity: 1MiB}\n"
BAD = "tiers:\n  - {type: dram, capcity: 1MiB}\n"
TABLES = {(): app._Root, **{(name,): group for name, group in app.GROUP_CLASSES.items()}}
COMMANDS = [
    [*words, "--help"]
    for group, table in TABLES.items()
    for words in [[*group], *([*group, name] for name in table.commands_table)]
]


@pytest.fixture(autouse=True)
def _empty_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in list(os.environ):
        if name.startswith("TIERKV_") or name in ("NO_COLOR", "TERM"):
            monkeypatch.delenv(name)


def write(text: str, name: str = "t.yaml") -> str:
    Path(name).write_text(text)
    return name


def process(*arguments: str, code: str = "from tierkv.cli import main; main()", **settings: Any
            ) -> subprocess.CompletedProcess[str]:  # fmt: skip
    """A command line in a process of its own."""
    return subprocess.run(
        [sys.executable, "-c", code, *arguments],
        capture_output=True, text=True, timeout=60, check=False, **settings,
    )  # fmt: skip


# check


def test_a_good_file_is_ok_on_stdout_and_nothing_on_stderr(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert run(["check", write(GOOD)]) == 0
    assert capsys.readouterr() == ("t.yaml: ok, dram 1MiB\n", "")


def test_a_bad_file_is_2_with_its_problems_on_stderr(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["check", write(BAD)]) == 2
    problem = "t.yaml:2:18: tiers.0.dram.capcity: unknown key; did you mean 'capacity'?"
    assert capsys.readouterr() == ("", f"{problem}\n1 problem\n")


def test_check_prints_json_for_programs(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["check", "--json", write(BAD)]) == 2
    printed = capsys.readouterr()
    assert printed.err == ""
    assert json.loads(printed.out) == {
        "ok": False,
        "file": "t.yaml",
        "problems": [
            {
                "source": "file",
                "place": "t.yaml:2:18",
                "line": 2,
                "column": 18,
                "path": "tiers.0.dram.capcity",
                "message": "unknown key; did you mean 'capacity'?",
            }
        ],
        "notes": [],
        "warnings": [],
        "tiers": [],
    }
    assert run(["check", "--json", write(GOOD)]) == 0
    assert json.loads(capsys.readouterr().out) == {
        "ok": True,
        "file": "t.yaml",
        "problems": [],
        "notes": [],
        "warnings": [],
        "tiers": [{"type": "dram", "name": "dram", "capacity_bytes": 1048576}],
    }


def test_check_looks_at_the_machine_unless_told_not_to(capsys: pytest.CaptureFixture[str]) -> None:
    file = write(GOOD.replace("1MiB", "999TiB"))
    assert run(["check", file]) == 2
    assert "is more than the memory of" in capsys.readouterr().err
    assert run(["check", "--no-machine", file]) == 0


def test_check_finds_the_file_as_the_engine_does(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert run(["check"]) == 0
    printed = capsys.readouterr()
    assert printed.out.startswith("the default configuration: ok, dram ")
    assert printed.err.startswith("note: no configuration file")
    write(GOOD, "tierkv.yaml")
    assert run(["check"]) == 0
    assert capsys.readouterr().out.startswith("tierkv.yaml: ok")
    monkeypatch.setenv("TIERKV_CONFIG", write(GOOD, "other.yaml"))
    assert run(["check"]) == 0
    assert capsys.readouterr().out.startswith("other.yaml: ok")
    assert run(["check", "--config", write(GOOD, "third.yaml")]) == 0
    assert capsys.readouterr().out.startswith("third.yaml: ok")


def test_an_unknown_variable_is_an_error_in_check(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TIERKV_SAFE", "all")
    assert run(["check", write(GOOD)]) == 2
    expected = "TIERKV_SAFE: unknown key 'safe'; did you mean 'save'?\n"
    assert capsys.readouterr().err.startswith(expected)


def test_check_prints_the_schema(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["check", "--schema"]) == 0
    assert json.loads(capsys.readouterr().out)["title"] == "TierKV configuration"


def test_a_tier_is_shown_with_its_name_and_path(capsys: pytest.CaptureFixture[str]) -> None:
    disk = "  - {type: disk, name: nvme, path: /nowhere/kv, capacity: 2TB}\n"
    assert run(["check", "--no-machine", write(GOOD + disk)]) == 0
    assert capsys.readouterr().out == "t.yaml: ok, dram 1MiB; nvme (disk) 2TB in /nowhere/kv\n"


# config show


def test_show_prints_every_value_with_its_source(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TIERKV_SAVE", "prompt")
    assert run(["config", "show", write("key_secret: {env: KEY}\n" + GOOD)]) == 0
    rows = [line.split(maxsplit=2) for line in capsys.readouterr().out.splitlines()]
    assert ["stats.control", "false", "default"] in rows
    assert [row for row in rows if not row[0].startswith(("stats.", "blend."))] == [
        ["version", "1", "default"],
        ["key_secret.env", "KEY", "t.yaml:1"],
        ["chunk_tokens", "(not", "set)  default"],
        ["save", "prompt", "TIERKV_SAVE"],
        ["tiers.dram.type", "dram", "t.yaml:3"],
        ["tiers.dram.name", "dram", "default"],
        ["tiers.dram.capacity", "1MiB", "t.yaml:3"],
        ["tiers.dram.policy", "lru", "default"],
    ]


def test_show_prints_json_for_programs(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["config", "show", "--json", write(GOOD)]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert {key: printed[key] for key in ("ok", "file", "problems", "notes", "warnings")} == {
        "ok": True, "file": "t.yaml", "problems": [], "notes": [], "warnings": [],
    }  # fmt: skip
    assert {
        "path": "tiers.dram.capacity", "value": 1048576, "text": "1MiB", "source": "t.yaml:2",
    } in printed["values"]  # fmt: skip
    assert run(["config", "show", "--json", write(BAD)]) == 2
    printed = json.loads(capsys.readouterr().out)
    assert (printed["ok"], printed["values"], len(printed["problems"])) == (False, [], 1)


def test_no_secret_is_printed(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KEY", "geheim")
    file = write("key_secret: {env: KEY}\n" + GOOD)
    for arguments in (
        ["check", file],
        ["config", "show", file],
        ["config", "show", "--json", file],
    ):
        assert run(arguments) == 0
        assert "geheim" not in "".join(capsys.readouterr())


# config init


def test_init_writes_a_file_that_check_takes(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["config", "init"]) == 0
    assert capsys.readouterr().out.startswith("tierkv.yaml: written; ")
    assert stat.S_IMODE(Path("tierkv.yaml").stat().st_mode) & 0o177 == 0
    assert run(["check"]) == 0


def test_init_replaces_no_file_unless_told_to(capsys: pytest.CaptureFixture[str]) -> None:
    file = write("mine")
    assert run(["config", "init", file]) == 2
    assert Path(file).read_text() == "mine"
    assert capsys.readouterr().err.startswith(
        "t.yaml: exists already; give another name, or --force"
    )
    assert run(["config", "init", file, "--force"]) == 0
    assert "mine" not in Path(file).read_text()


def test_init_follows_no_link_that_waits_for_it() -> None:
    Path("link.yaml").symlink_to("target")
    assert run(["config", "init", "link.yaml"]) == 2
    assert not Path("target").exists()


def test_init_can_print(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["config", "init", "-"]) == 0
    assert "\nversion: 1\n" in capsys.readouterr().out
    assert list(Path().iterdir()) == []


def test_init_says_why_it_cannot_write(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["config", "init", "no/such/dir.yaml"]) == 1
    assert capsys.readouterr().err.startswith("no/such/dir.yaml: cannot be written (No such file")


# version


def test_version_names_what_a_bug_report_needs(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["--version"]) == 0
    assert capsys.readouterr().out == f"tierkv {tierkv.__version__}\n"
    assert run(["version"]) == 0
    assert f"tierkv {tierkv.__version__}\npython 3." in capsys.readouterr().out
    assert run(["version", "--json"]) == 0
    assert {"tierkv", "python", "vllm", "torch"} <= json.loads(capsys.readouterr().out).keys()


# Usage, errors, exit codes


@pytest.mark.parametrize("arguments", COMMANDS, ids=" ".join)
def test_each_help_ends_with_an_example(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(arguments) == 0
    text = capsys.readouterr().out
    example = text.rpartition("Example:\n\n")[2]
    assert all(line.startswith("    ") for line in example.splitlines())
    assert "    tierkv " in example or "tierkv config show" in example


@pytest.mark.parametrize(
    "arguments",
    [[], ["nix"], ["check", "--nix"], ["check", "a", "b"], ["config"], ["config", "nix"],
     ["check", "a", "--config", "b"]],
)  # fmt: skip
def test_wrong_usage_is_2_and_stays_off_stdout(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(arguments) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert "Usage: tierkv" in printed.err


@pytest.mark.parametrize(
    ("error", "code", "message"),
    [
        (ConfigError("a: b", "c: d"), 2, "a: b\nc: d\n"),
        (TierError("is gone; mount it", tier="disk"), 1, "tierkv: disk: is gone; mount it\n"),
        (KeyboardInterrupt(), 130, ""),
        (typer.Abort(), 130, ""),
        (BrokenPipeError(), 0, ""),
    ],
)
def test_an_error_of_a_command_becomes_a_line_and_an_exit_code(
    error: BaseException,
    code: int,
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def fail(*args: object, **kwargs: object) -> None:
        raise error

    monkeypatch.setattr("tierkv.cli.loading.load", fail)
    monkeypatch.setattr("tierkv.cli.output.silence", lambda: None)
    assert run(["check"]) == code
    assert capsys.readouterr().err.strip() == message.strip()


def test_a_mistake_of_ours_is_not_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: object, **kwargs: object) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr("tierkv.cli.loading.load", fail)
    with pytest.raises(ZeroDivisionError):
        run(["check"])


def test_every_command_of_the_tables_exists() -> None:
    for table in TABLES.values():
        for name, module in table.commands_table.items():
            assert importlib.util.find_spec(module), name


# Colour


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_colour_is_for_terminals_that_want_it(monkeypatch: pytest.MonkeyPatch) -> None:
    assert output.styled("x", "red", Terminal()) == "\033[31mx\033[0m"
    assert output.styled("x", "red", io.StringIO()) == "x"
    monkeypatch.setenv("TERM", "dumb")
    assert output.styled("x", "red", Terminal()) == "x"
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("NO_COLOR", "1")
    assert output.styled("x", "red", Terminal()) == "x"


# The process


def test_help_imports_nothing_heavy() -> None:
    code = (
        "import sys\nfrom tierkv.cli.app import run\n"
        "assert run(['--help']) == 0\n"
        "print(*sorted({name.partition('.')[0] for name in sys.modules}), file=sys.stderr)"
    )
    done = process(code=code)
    assert done.returncode == 0, done.stderr
    loaded = set(done.stderr.split())
    assert "typer" in loaded
    assert loaded & {"torch", "vllm", "numpy", "pydantic", "yaml", "httpx"} == set()


def closed_pipe(arguments: Sequence[str]) -> tuple[int, str]:
    """Exit code and stderr of a command whose stdout nobody reads."""
    reader, writer = os.pipe()
    os.close(reader)
    code = "from tierkv.cli import main; main()"
    try:
        done = subprocess.run(
            [sys.executable, "-c", code, *arguments],
            stdout=writer, stderr=subprocess.PIPE, text=True, timeout=60, check=False,
        )  # fmt: skip
    finally:
        os.close(writer)
    return done.returncode, done.stderr


@pytest.mark.parametrize(
    "arguments",
    [
        *(["check", "--schema"], ["config", "show", "t.yaml"], ["version"], ["--help"]),
        *(
            ["ls", "--path", ".", "--json"],
            ["doctor", "--config", "t.yaml"],
            ["purge", "--path", ".", "--all"],
        ),
    ],
    ids=" ".join,
)
def test_a_broken_pipe_is_quiet(arguments: list[str]) -> None:
    write(GOOD)
    assert closed_pipe(arguments) == (0, "")


def test_a_full_disk_behind_stdout_is_one_line() -> None:
    write(GOOD)
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-c", "from tierkv.cli import main; main()", "check", "t.yaml"],
            stdout=full, stderr=subprocess.PIPE, text=True, timeout=60, check=False,
        )  # fmt: skip
    assert done.returncode == 1
    assert done.stderr == (
        "tierkv: No space left on device: the output is cut short; free space for it\n"
    )


def test_a_terminal_that_cannot_write_every_character_breaks_nothing() -> None:
    file = write("tiers:\n  - {type: dram, capacity: “1GiB”}\n")
    done = process("check", file, env={**os.environ, "PYTHONIOENCODING": "ascii"})
    assert done.returncode == 2
    assert "'?1GiB?' is not a size" in done.stderr


def test_main_leaves_with_the_exit_code(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["tierkv", "check", write(BAD)])
    with pytest.raises(SystemExit) as caught:
        main()
    assert caught.value.code == 2
