# SPDX-License-Identifier: Apache-2.0
"""Every exception that TierKV raises on purpose.

    TierKVError
    ├── ConfigError       the configuration cannot be used; carries every problem found, by place
    ├── GeometryError     sizes, layouts or tables that do not fit together; never guessed around
    ├── FormatError       bytes that are not a record of this format (`kind` says in which way)
    ├── TierError         a tier cannot be opened; `tier=` and a remedy
    │   └── LockedError   another process owns the directory; `holder=` is its pid
    └── UnsupportedError  the host engine or model cannot be served; TierKV stands aside

Expected outcomes (a miss, a full queue, a late load) are values, not exceptions: see
`tierkv.tiers.base`.
"""

from __future__ import annotations

from enum import StrEnum


class ErrorKind(StrEnum):
    """Why an operation on a tier failed; the `kind` label of `tierkv_errors_total`."""

    CHECKSUM = "checksum"
    KEY_MISMATCH = "key_mismatch"
    GEOMETRY = "geometry"
    FORMAT = "format"
    ENOSPC = "enospc"
    EIO = "eio"
    TIMEOUT = "timeout"
    AUTH = "auth"
    PROTOCOL = "protocol"
    WORKER = "worker"


class TierKVError(Exception):
    """Base of the tree. The message is one line and ends with what to do about it."""


class ConfigError(TierKVError):
    """The configuration cannot be used.

    Args:
        problems: one line each, `place: path: problem; remedy`. The message joins them by newlines.
    """

    def __init__(self, *problems: str) -> None:
        super().__init__("\n".join(problems))
        self.problems = problems


class GeometryError(TierKVError):
    """Sizes, layouts or tables that do not fit together."""


class FormatError(TierKVError):
    """Bytes read from a tier that are not what they should be."""

    def __init__(self, message: str, *, kind: ErrorKind = ErrorKind.FORMAT) -> None:
        super().__init__(message)
        self.kind = kind


class TierError(TierKVError):
    """A tier cannot be opened or has to be given up."""

    def __init__(self, message: str, *, tier: str) -> None:
        super().__init__(f"{tier}: {message}")
        self.tier = tier


class LockedError(TierError):
    """Another process owns the tier's directory."""

    def __init__(self, message: str, *, tier: str, holder: int | None) -> None:
        super().__init__(message, tier=tier)
        self.holder = holder


class UnsupportedError(TierKVError):
    """The host engine, its configuration or its model cannot be served."""
