# SPDX-License-Identifier: Apache-2.0
"""What is said to a Redis server and what it may answer: RESP2, the part of it that we use.

Pure functions and values; any thread.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TypeAlias

from tierkv.errors import ErrorKind


@dataclass(frozen=True, slots=True)
class ReplyError:
    """The server's refusal of one command: a value, since most are expected.

    Attributes:
        code: its first word: OOM, LOADING, MOVED, ...
        text: the rest. May repeat what was sent: never shown for AUTH.
    """

    code: str
    text: str


_CODE = re.compile(r"[A-Z0-9_]{1,32}")


def parse_error(line: bytes) -> ReplyError:
    """What an error reply says, without the `-` before it.

    Its first word is shown to people, so it must be one: nobody's control characters in our log.
    """
    code, _, text = line.decode("ascii", "replace").partition(" ")
    return ReplyError(code if _CODE.fullmatch(code) else "UNKNOWN", text)


Reply: TypeAlias = int | bytes | ReplyError | None
"""An integer, a status or bulk string, nil, or an error. For a bulk string that went into a sink:
its length."""


def command(*words: bytes) -> bytes:
    """One command as it goes over the wire."""
    return b"*%d\r\n" % len(words) + b"".join(
        [b"$%d\r\n%b\r\n" % (len(word), word) for word in words]
    )


def pipeline(name: bytes, keys: Iterable[bytes], *more: bytes) -> bytes:
    """The same command for each key, in one buffer. About 0.5 µs a key."""
    head = b"*%d\r\n$%d\r\n%b\r\n" % (2 + len(more), len(name), name)
    tail = b"".join(b"$%d\r\n%b\r\n" % (len(word), word) for word in more)
    return b"".join([b"%b$%d\r\n%b\r\n%b" % (head, len(key), key, tail) for key in keys])


def set_head(key: bytes, value_bytes: int, ttl_ms: int | None) -> tuple[bytes, bytes]:
    """What stands before and after the value of a SET, so that the value itself is not copied.

    Args:
        ttl_ms: life of the value, None for ever.
    """
    words = 3 if ttl_ms is None else 5
    head = b"*%d\r\n$3\r\nSET\r\n$%d\r\n%b\r\n$%d\r\n" % (words, len(key), key, value_bytes)
    if ttl_ms is None:
        return head, b"\r\n"
    life = b"%d" % ttl_ms
    return head, b"\r\n$2\r\nPX\r\n$%d\r\n%b\r\n" % (len(life), life)


NO_LINK = ReplyError("NOLINK", "no connection to the server")
"""Stands for a reply where there is nobody to ask."""

_UNAVAILABLE = frozenset(
    {"NOLINK", "LOADING", "MASTERDOWN", "CLUSTERDOWN", "TRYAGAIN", "BUSY", "UNKILLABLE"}
)
_NOT_PERMITTED = frozenset({"NOAUTH", "NOPERM", "WRONGPASS"})
_NO_WRITES = frozenset({"OOM", "READONLY", "MISCONF", "NOREPLICAS"})


def is_unavailable(error: ReplyError) -> bool:
    """The server is there but cannot serve just now: no error of anybody."""
    return error.code in _UNAVAILABLE


def refuses_writes(error: ReplyError) -> bool:
    """The server serves reads but takes no writes just now."""
    return error.code in _NO_WRITES


def is_redirect(error: ReplyError) -> bool:
    """A cluster node says that another one has, or is about to have, the key's slot."""
    return error.code in ("MOVED", "ASK")


def kind_of(error: ReplyError) -> ErrorKind:
    """Under which kind an error reply is counted."""
    if error.code in _NOT_PERMITTED:
        return ErrorKind.AUTH
    if error.code == "WRONGTYPE":  # somebody's list or hash under our key
        return ErrorKind.FORMAT
    return ErrorKind.PROTOCOL
