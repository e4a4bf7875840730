# SPDX-License-Identifier: Apache-2.0
"""Secrets are read from where they are, and nothing of them gets into an error."""

from __future__ import annotations

from pathlib import Path

import pytest

from tierkv.config import SecretRef, resolve_secret
from tierkv.errors import ConfigError


def test_a_secret_is_read_without_the_newline_that_editors_add(tmp_path: Path) -> None:
    file = tmp_path / "key"
    file.write_bytes(b" se\ncret \xff\r\n\n")
    assert resolve_secret(SecretRef(file=file)) == b" se\ncret \xff"
    assert resolve_secret(SecretRef(env="KEY"), {"KEY": "wört"}) == "wört".encode()


def test_a_secret_comes_from_the_process_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TIERKV_TEST_KEY", "abc")
    assert resolve_secret(SecretRef(env="TIERKV_TEST_KEY")) == b"abc"


@pytest.mark.parametrize(
    ("content", "reason"),
    [(None, "No such file or directory; create the file"), (b"\n", "is empty; write the secret"),
     (b"geheim" * 20_000, "larger than 64KiB; is this the secret?")],
)  # fmt: skip
def test_a_secret_that_cannot_be_had_is_an_error_without_it(
    content: bytes | None, reason: str, tmp_path: Path
) -> None:
    file = tmp_path / "key"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(ConfigError) as caught:
        resolve_secret(SecretRef(file=file))
    assert reason in str(caught.value)
    assert "geheim" not in str(caught.value)


@pytest.mark.parametrize("environ", [{}, {"KEY": ""}])
def test_an_unset_variable_is_named(environ: dict[str, str]) -> None:
    with pytest.raises(ConfigError, match="secret: variable KEY is not set; set it"):
        resolve_secret(SecretRef(env="KEY"), environ)
