# SPDX-License-Identifier: Apache-2.0
"""One thing that was found: what, where, and what to do about it."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Self


class Level(StrEnum):
    """How bad it is."""

    ERROR = "error"
    """It will not work like that."""
    WARNING = "warning"
    """It works, but worse than it could, or less safely."""


@dataclass(frozen=True, slots=True)
class Finding:
    """See the module.

    Attributes:
        check: a stable name of what was looked at, for programs: `config`, `disk-direct-io`, ...
        level: how bad.
        where: file and line, directory, server, variable, flag.
        what: is so.
        remedy: what to do, as an order.
    """

    check: str
    level: Level
    where: str
    what: str
    remedy: str

    @classmethod
    def of(cls, check: str, level: Level, where: str, message: str) -> Self:
        """From a message of the kind `what; what to do`."""
        what, semicolon, remedy = message.rpartition("; ")
        return (
            cls(check, level, where, what, remedy)
            if semicolon
            else cls(check, level, where, message, "")
        )


def error(check: str, where: str, what: str, remedy: str) -> Finding:
    return Finding(check, Level.ERROR, where, what, remedy)


def warning(check: str, where: str, what: str, remedy: str) -> Finding:
    return Finding(check, Level.WARNING, where, what, remedy)
