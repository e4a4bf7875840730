# SPDX-License-Identifier: Apache-2.0
"""Where the words of a command go: results to stdout, messages to stderr, colour to terminals.

Colour is never the only carrier, and there is none with NO_COLOR, in a pipe or on a dumb terminal.
"""

from __future__ import annotations

import json
import logging
import os
import sys
from collections.abc import Iterable
from typing import Any, Literal, TextIO

_STYLES = {"bold": "1", "dim": "2", "red": "31", "green": "32", "yellow": "33"}
Style = Literal["bold", "dim", "red", "green", "yellow"]


def prepare() -> None:
    """Let no terminal's encoding turn a message into an exception."""
    for stream in (sys.stdout, sys.stderr):
        reconfigure = getattr(stream, "reconfigure", None)
        if reconfigure is not None:
            reconfigure(errors="replace")


def silence() -> None:
    """The reader has gone: drop what is still buffered, so that nothing is printed at exit."""
    devnull = os.open(os.devnull, os.O_WRONLY)
    os.dup2(devnull, sys.stdout.fileno())
    os.close(devnull)


def quiet() -> None:
    """Keep what tiers log off the terminal: the command tells it, once and with its remedy."""
    logging.getLogger("tierkv").addHandler(logging.NullHandler())


def styled(text: str, style: Style, stream: TextIO | None = None) -> str:
    """`text` in a style, if `stream` (default: stdout) shows styles."""
    stream = sys.stdout if stream is None else stream
    if os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb" or not stream.isatty():
        return text
    return f"\033[{_STYLES[style]}m{text}\033[0m"


def result(text: str) -> None:
    """One line of what was asked for.

    Raises:
        BrokenPipeError: the reader has gone; `run` makes that quiet.
    """
    print(text, flush=True)


def result_json(value: Any) -> None:
    """What was asked for, for programs."""
    result(json.dumps(value, indent=2, ensure_ascii=False))


def message(text: str) -> None:
    """One line to the user beside the result."""
    print(text, file=sys.stderr, flush=True)


def problems(lines: Iterable[str]) -> None:
    """Problems of a configuration, one line each, the place in bold."""
    for line in lines:
        place, colon, rest = line.partition(": ")
        message(styled(place, "bold", sys.stderr) + colon + rest)


def remarks(notes: Iterable[str], warnings: Iterable[str]) -> None:
    """What `load_config` has to say beside its result."""
    for text in notes:
        message(f"{styled('note', 'bold', sys.stderr)}: {text}")
    for text in warnings:
        message(f"{styled('warning', 'yellow', sys.stderr)}: {text}")
