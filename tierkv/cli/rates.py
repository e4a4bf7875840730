# SPDX-License-Identifier: Apache-2.0
"""Rates as they are written on a command line: `200MiB/s`, or `none`."""

from __future__ import annotations

import typer


def parse_rate(text: str) -> float | None:
    """Bytes a second; None for `none`.

    Raises:
        typer.BadParameter: it is neither.
    """
    from tierkv.config.units import parse_size

    if text.strip().lower() == "none":
        return None
    try:
        rate = parse_size(text.strip().removesuffix("/s"))
    except ValueError as error:
        raise typer.BadParameter(f"{error}; a rate is written like 200MiB/s, or none") from None
    if rate == 0:
        raise typer.BadParameter("the rate must be more than 0")
    return float(rate)
