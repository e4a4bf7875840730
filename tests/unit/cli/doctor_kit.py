# SPDX-License-Identifier: Apache-2.0
"""A sound installation for the doctor, to be made unsound: real files, asked by a real Python.

Distributions are directories with metadata, as pip leaves them, found through PYTHONPATH by the
interpreter that the `vllm` script names.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import tierkv

PLUGIN = "[vllm.general_plugins]\ntierkv = tierkv_vllm:register\n"


def distribution(
    site: Path, name: str, version: str, *, requires: str = "", entry_points: str = ""
) -> None:
    """Install `name` as far as metadata goes; replaces another version."""
    remove(site, name)
    folder = site / f"{name.replace('-', '_')}-{version}.dist-info"
    folder.mkdir(parents=True)
    needs = f"Requires-Dist: {requires}\n" if requires else ""
    (folder / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n{needs}"
    )
    if entry_points:
        (folder / "entry_points.txt").write_text(entry_points)


def remove(site: Path, name: str) -> None:
    for folder in site.glob(f"{name.replace('-', '_')}-*.dist-info"):
        for file in folder.iterdir():
            file.unlink()
        folder.rmdir()


class Installation:
    """vLLM 0.32.0, torch and TierKV, with a `vllm` command, in a directory of their own."""

    def __init__(self, root: Path) -> None:
        self.site = root / "site"
        self.bin = root / "bin"
        self.bin.mkdir(parents=True)
        distribution(self.site, "vllm", "0.32.0")
        distribution(self.site, "torch", "2.13.0+cu130")
        distribution(self.site, "torchvision", "0.28.0+cu130", requires="torch==2.13.0")
        distribution(self.site, "tierkv", tierkv.__version__, entry_points=PLUGIN)
        # Isolated from what this test runs in: only the directory above is asked.
        python = self.bin / "python-alone"
        python.write_text(
            f'#!/bin/sh\nexec "{sys.executable}" -S "$@"\n',
        )
        python.chmod(0o755)
        self.command(f"#!{python}")

    def command(self, first_line: str) -> None:
        """Write the `vllm` script."""
        script = self.bin / "vllm"
        script.write_text(f"{first_line}\nfrom vllm.entrypoints.cli.main import main\nmain()\n")
        script.chmod(0o755)

    def environ(self) -> dict[str, str]:
        return {
            "PATH": f"{self.bin}:{os.environ['PATH']}",
            "PYTHONPATH": str(self.site),
        }
