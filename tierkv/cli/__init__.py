# SPDX-License-Identifier: Apache-2.0
"""The command `tierkv`. Its libraries are an extra; without them it says what to install."""

from __future__ import annotations

import sys

INSTALL = "pip install 'tierkv[cli]'"


def main() -> None:
    """Entry point of the console script; leaves the process with the exit code."""
    try:
        from tierkv.cli.app import run
    except ModuleNotFoundError as error:
        # Only what the extra brings; anything else that is missing is a fault of ours.
        if (error.name or "").partition(".")[0] not in {"typer", "click", "rich", "shellingham"}:
            raise
        print(f"tierkv: the command line needs its extra; run: {INSTALL}", file=sys.stderr)
        sys.exit(2)
    sys.exit(run(sys.argv[1:]))
