# SPDX-License-Identifier: Apache-2.0
"""Numbers for people, short: what is not known is –, never 0."""

from __future__ import annotations

from collections.abc import Sequence

from tierkv.telemetry.rates import NO_DATA

_SIZES = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")
_BARS = "▁▂▃▄▅▆▇█"


def share(rate: float | None) -> str:
    """`71.4` of a hundred."""
    return NO_DATA if rate is None else f"{100 * rate:.1f}"


def count(number: float | None) -> str:
    """`950`, `12.3k`, `4.56M`."""
    if number is None:
        return NO_DATA
    for unit in ("", "k", "M", "G"):
        if number < 999.5 or unit == "G":
            return f"{number:.0f}" if not unit or number >= 100 else f"{_three(number)}{unit}"
        number /= 1000
    raise AssertionError("unreachable")


def speed(bytes_per_second: float | None) -> str:
    """`912M/s`: decimal, as disks and networks are sold."""
    return NO_DATA if bytes_per_second is None else f"{_decimal(bytes_per_second)}/s"


def seconds(value: float | None) -> str:
    """`140us`, `1.1ms`, `2.5s`."""
    if value is None:
        return NO_DATA
    if value == 0:
        return "0"
    for unit, size in (("us", 1e-6), ("ms", 1e-3)):
        if value < 999.5 * size:
            return f"{_three(value / size)}{unit}"
    return f"{_three(value)}s" if value < 1000 else f"{value:.0f}s"


def age(value: float | None) -> str:
    """`12s`, `3m05s`, `3h12m`, `4d02h`."""
    if value is None:
        return NO_DATA
    whole = max(0, int(value))  # clocks of two machines differ
    for small, large, size in (("s", "m", 60), ("m", "h", 3600), ("h", "d", 86400)):
        if small == "s" and whole < 60:
            return f"{whole}s"
        if whole < size * (60 if large != "h" else 24) or large == "d":
            rest = whole % size // (size // (24 if large == "d" else 60))
            return f"{whole // size}{large}{rest:02d}{small}"
    raise AssertionError("unreachable")


def filled(used: float, capacity: float) -> str:
    """`30.1/32 GiB`; without a known capacity only what is used."""
    unit = 0
    while max(used, capacity) >= 1000 * 1024**unit and unit < len(_SIZES) - 1:
        unit += 1
    whole = f"/{_three(capacity / 1024**unit)}" if capacity else ""
    return f"{_three(used / 1024**unit)}{whole} {_SIZES[unit]}"


def sparkline(values: Sequence[float | None], width: int) -> str:
    """The newest `width` values; a space where there is none, the lowest bar where it is zero."""
    shown = list(values)[-width:]
    top = max((value for value in shown if value is not None), default=0) or 1
    line = "".join(" " if value is None else _BARS[min(7, int(value / top * 8))] for value in shown)
    return line.rjust(width)


def _decimal(number: float) -> str:
    for unit in ("", "k", "M", "G"):
        if number < 999.5 or unit == "G":
            return f"{_three(number)}{unit}"
        number /= 1000
    raise AssertionError("unreachable")


def _three(number: float) -> str:
    """Three digits: 9.12, 91.2, 912; 32 rather than 32.0."""
    if number >= 99.95:
        return f"{number:.0f}"
    text = f"{number:.1f}" if number >= 9.995 else f"{number:.2f}"
    return text.rstrip("0").rstrip(".")
