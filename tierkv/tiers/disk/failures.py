# SPDX-License-Identifier: Apache-2.0
"""What an exception of the blocking half means: the kind it is counted under, and one log line."""

from __future__ import annotations

import errno
import logging
from collections.abc import Callable

from tierkv.errors import ErrorKind, FormatError, GeometryError
from tierkv.tiers.disk.io import EndOfFileError, error_kind

logger = logging.getLogger(__name__)

LOG_EVERY = 10.0
"""Seconds between two log lines about the same kind of failure."""


def is_loss(error: Exception) -> bool:
    """Whether a failed load means that the chunk is gone, not only out of reach just now."""
    if isinstance(error, OSError):
        return error.errno == errno.EIO
    return isinstance(error, FormatError | EndOfFileError)


class Failures:
    """Owned by the I/O loop thread.

    Args:
        tier: name of the tier.
        clock: seconds, monotonic.
    """

    def __init__(self, tier: str, clock: Callable[[], float]) -> None:
        self._tier = tier
        self._clock = clock
        self._logged: dict[ErrorKind, float] = {}

    def report(self, operation: str, error: Exception) -> ErrorKind:
        """The kind to count `error` under; logs it, but not each of a series."""
        kind = _kind_of(error)
        now = self._clock()
        if now - self._logged.get(kind, float("-inf")) >= LOG_EVERY:
            self._logged[kind] = now
            trace = error if kind is ErrorKind.WORKER else None
            logger.warning("%s: %s failed: %s", self._tier, operation, error, exc_info=trace)
        return kind


def _kind_of(error: Exception) -> ErrorKind:
    if isinstance(error, FormatError):
        return error.kind
    if isinstance(error, EndOfFileError):
        return ErrorKind.FORMAT
    if isinstance(error, GeometryError):
        return ErrorKind.GEOMETRY
    return error_kind(error) if isinstance(error, OSError) else ErrorKind.WORKER
