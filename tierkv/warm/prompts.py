# SPDX-License-Identifier: Apache-2.0
"""Prompts from a file: plain lines, or requests of the OpenAI API, one JSON object a line."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tierkv.errors import ConfigError

MAX_FILE_BYTES = 1 << 30
"""More prompts than an engine computes in a day; a mistaken path is larger."""

CHAT, COMPLETION = "/v1/chat/completions", "/v1/completions"


@dataclass(frozen=True, slots=True)
class Request:
    """One prompt.

    Attributes:
        line: of the file, from 1.
        path: of the API.
        fields: as they stand in the file.
    """

    line: int
    path: str
    fields: Mapping[str, Any]

    def body(self, model: str, salt: str | None) -> tuple[str, dict[str, Any]]:
        """Where to send it, and what: for one token, not streamed."""
        body = {"model": model, **self.fields, "max_tokens": 1, "stream": False}
        for name in ("max_completion_tokens", "min_tokens", "stream_options", "n", "best_of"):
            body.pop(name, None)
        if salt is not None:
            body["cache_salt"] = salt
        return self.path, body


def read(file: Path, *, whole: bool) -> list[Request]:
    """The prompts in a file, `-` for stdin. Empty lines are none.

    Args:
        whole: all of it is one prompt.

    Raises:
        ConfigError: the file cannot be read, or a line is JSON but no request; names the line.
    """
    try:
        if str(file) == "-":
            text = sys.stdin.read(MAX_FILE_BYTES + 1)
        else:
            with open(file, encoding="utf-8") as source:
                text = source.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        raise ConfigError(f"{file}: {error.strerror}; give a file with prompts") from None
    except UnicodeDecodeError:
        raise ConfigError(f"{file}: is no UTF-8 text; give a file with prompts") from None
    if len(text) > MAX_FILE_BYTES:
        raise ConfigError(f"{file}: longer than 1GiB; split it")
    if whole:
        return [Request(1, COMPLETION, {"prompt": text})] if text.strip() else []
    lines = enumerate(text.split("\n"), start=1)
    return [_request(file, number, line) for number, line in lines if line.strip()]


def _request(file: Path, number: int, line: str) -> Request:
    if not line.lstrip().startswith("{"):
        return Request(number, COMPLETION, {"prompt": line.rstrip("\r")})
    place = f"{file}:{number}"
    try:
        fields = json.loads(line)
    except ValueError as error:
        raise ConfigError(
            f"{place}: begins like a JSON object and is none ({error}); mend it, or use --whole"
        ) from None
    if isinstance(fields.get("messages"), list):
        return Request(number, CHAT, fields)
    if isinstance(fields.get("prompt"), str | list):
        return Request(number, COMPLETION, fields)
    raise ConfigError(f'{place}: has neither "messages" nor "prompt"; add one of them')
