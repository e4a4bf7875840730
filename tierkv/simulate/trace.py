# SPDX-License-Identifier: Apache-2.0
"""A trace of prompts as chains of chunk keys.

One JSON object a line, in the order of arrival, in the form of the public Mooncake traces:

    {"timestamp": 27482, "input_length": 6955, "output_length": 52, "hash_ids": [46, 47, 2353]}

`hash_ids` names the prompt's blocks of a fixed number of tokens; equal ids are equal text. The last
block may be partial: `input_length` tells. Without `input_length` all blocks count as whole. Other
fields are ignored. An id means its text *and all text before it*, whether or not whoever wrote
the trace had hashed it so.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tierkv.errors import TierKVError

MAX_LINE = 64 << 20
"""Bytes. A prompt of ten million blocks; what is longer is no trace."""


class TraceError(TierKVError):
    """The file is no trace; place, problem and remedy in one line."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """One request.

    Attributes:
        keys: of its whole chunks, first chunk first.
        tokens: of the whole prompt.
    """

    keys: list[bytes]
    tokens: int


@dataclass(frozen=True, slots=True)
class Trace:
    """All requests of a file.

    Attributes:
        name: of the file, without its directory.
        block_tokens: tokens of one block; a chunk is one block.
        prompts: in the order of arrival.
        distinct_chunks: how many different keys there are.
        seconds: from the first to the last arrival; 0 if it does not tell.
    """

    name: str
    block_tokens: int
    prompts: list[Prompt]
    distinct_chunks: int
    seconds: float

    @property
    def tokens(self) -> int:
        """Prompt tokens of all requests."""
        return sum(prompt.tokens for prompt in self.prompts)


def read_trace(file: Path, block_tokens: int) -> Trace:
    """Read a trace. About 2 µs a block.

    Raises:
        TraceError: unreadable, empty, or a line that is no request; the message has its number.
    """
    # (parent, id) to a number of its own, so that a key stands for the text before it too.
    nodes: dict[tuple[int, Any], int] = {}
    prompts = []
    stamps = []
    try:
        with file.open("rb") as lines:
            for number, request in _requests(file, lines):
                prompts.append(_prompt(request, block_tokens, nodes, f"{file}:{number}"))
                stamps.append(request.get("timestamp", 0))
    except OSError as error:
        raise TraceError(f"{file}: cannot be read ({error.strerror}); give another file") from error
    if not prompts:
        raise TraceError(f"{file}: no request in it; give a trace with one JSON object a line")
    distinct = len({key for prompt in prompts for key in prompt.keys})
    return Trace(file.name, block_tokens, prompts, distinct, _seconds(stamps))


def _requests(file: Path, lines: Iterable[bytes]) -> Iterator[tuple[int, dict[str, Any]]]:
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        if len(line) > MAX_LINE:
            raise TraceError(f"{file}:{number}: longer than {MAX_LINE >> 20} MiB; is it a trace?")
        try:
            request = json.loads(line)
        except ValueError:
            request = None
        if not isinstance(request, dict):
            raise TraceError(f"{file}:{number}: no JSON object; one request a line is expected")
        yield number, request


def _prompt(
    request: dict[str, Any], block_tokens: int, nodes: dict[tuple[int, Any], int], place: str
) -> Prompt:
    ids = request.get("hash_ids")
    if not isinstance(ids, list) or not all(type(block) in (int, str) for block in ids):
        raise TraceError(f"{place}: 'hash_ids' must be a list of numbers or texts")
    tokens = request.get("input_length", len(ids) * block_tokens)
    if type(tokens) is not int or tokens < 0:
        raise TraceError(f"{place}: 'input_length' must be a number of tokens")
    blocks = -(-tokens // block_tokens)
    if blocks != len(ids):
        raise TraceError(
            f"{place}: {len(ids)} hash_ids for {tokens} tokens, where blocks of {block_tokens} "
            f"tokens would be {blocks}; give the trace's own block size with --block-tokens"
        )
    keys = []
    node = -1
    for block in ids[: tokens // block_tokens]:
        node = nodes.setdefault((node, block), len(nodes))
        keys.append(node.to_bytes(8, "little"))
    return Prompt(keys, tokens)


def _seconds(stamps: list[Any]) -> float:
    if all(isinstance(stamp, int | float) for stamp in stamps):
        return float(max(stamps) - min(stamps)) / 1000
    return 0.0
