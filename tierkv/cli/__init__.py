# SPDX-License-Identifier: Apache-2.0
"""The command `tierkv`. Commands live one a module and import what is heavy when they run."""

from __future__ import annotations

import sys


def main() -> None:
    """Entry point of the console script; leaves the process with the exit code."""
    from tierkv.cli.app import run

    sys.exit(run(sys.argv[1:]))
