# SPDX-License-Identifier: Apache-2.0
"""Reads secrets from where the configuration says they are, at the moment they are needed."""

from __future__ import annotations

import os
from collections.abc import Mapping

from tierkv.config.base import SecretRef
from tierkv.errors import ConfigError

MAX_SECRET_BYTES = 64 << 10
"""More than any key or password; a reference to a log or a device is a mistake."""


def resolve_secret(ref: SecretRef, environ: Mapping[str, str] | None = None) -> bytes:
    """The secret that `ref` points to.

    Newlines at the end of a file are not part of it: editors put them there.

    Args:
        ref: exactly one of file and env is set.
        environ: variables; `os.environ` if None.

    Raises:
        ConfigError: not there, not readable, empty or absurdly large. Never holds the secret.

    Blocks on file I/O. Any thread.
    """
    if ref.env is not None:
        value = (os.environ if environ is None else environ).get(ref.env, "")
        if not value:
            raise ConfigError(f"secret: variable {ref.env} is not set; set it")
        return value.encode("utf-8", "surrogateescape")
    assert ref.file is not None  # SecretRef saw to it
    try:
        with open(ref.file, "rb") as file:
            secret = file.read(MAX_SECRET_BYTES + 1)
    except OSError as error:
        reason = error.strerror or type(error).__name__
        raise ConfigError(
            f"secret: {ref.file}: {reason}; create the file, readable by this user only"
        ) from None
    if len(secret) > MAX_SECRET_BYTES:
        raise ConfigError(f"secret: {ref.file}: larger than 64KiB; is this the secret?")
    secret = secret.rstrip(b"\r\n")
    if not secret:
        raise ConfigError(f"secret: {ref.file}: is empty; write the secret into it")
    return secret
