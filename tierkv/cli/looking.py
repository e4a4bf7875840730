# SPDX-License-Identifier: Apache-2.0
"""Options that the commands on running engines share."""

from __future__ import annotations

from typing import Annotated

import typer

UrlOption = Annotated[
    str | None,
    typer.Option(
        "--url",
        metavar="URL",
        help="A server's /metrics page instead of this user's engines.",
        show_default=False,
    ),
]
PidOption = Annotated[
    int | None,
    typer.Option(
        "--pid", metavar="PID", help="The engine with this process id.", show_default=False
    ),
]
