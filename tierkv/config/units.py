# SPDX-License-Identifier: Apache-2.0
"""Sizes and durations with their unit always written, because a bare number is how caches get lost.

`32` may be bytes or gigabytes, `32G` may be 32·10⁹ or 32·2³⁰; libraries and engines disagree. So
text must say `32GiB` or `32GB`, `50ms` or `5s`. In Python a size is an int of bytes and a duration
a float of seconds, and both are taken as they are: only values that a person wrote (validation
context `WRITTEN`) are held to the rule.
"""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Callable
from typing import Annotated, Any

from pydantic import BeforeValidator, PlainSerializer, ValidationInfo, WithJsonSchema
from pydantic_core import PydanticCustomError

WRITTEN: dict[str, Any] = {"written": True}
"""Validation context of values that come from a file, a variable or a command line."""

SIZE_UNITS = {
    "KiB": 1 << 10,
    "MiB": 1 << 20,
    "GiB": 1 << 30,
    "TiB": 1 << 40,
    "kB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
}
DURATION_UNITS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}

SIZE_FORMAT, DURATION_FORMAT = "tierkv-size", "tierkv-duration"
"""`format` of the two in the JSON schema; validators pass over formats they do not know."""

MAX_SIZE = (1 << 63) - 1
"""Bytes. File offsets are signed 64-bit numbers."""

_TYPE = "must be a number and its unit, like {example}"
_NUMBER_AND_UNIT = re.compile(r"([0-9]{1,20}(?:\.[0-9]{1,9})?) ?([A-Za-z]*)")

_DURATION_WORDS = {
    **dict.fromkeys(("msec", "msecs", "millis", "milliseconds", "millisecond"), "ms"),
    **dict.fromkeys(("sec", "secs", "second", "seconds"), "s"),
    **dict.fromkeys(("min", "mins", "minute", "minutes"), "m"),
    **dict.fromkeys(("hr", "hrs", "hour", "hours"), "h"),
    **dict.fromkeys(("day", "days"), "d"),
}


def parse_size(text: str) -> int:
    """Bytes of `32GiB`, `1.5TB`, ...

    Raises:
        ValueError: no number, no unit, an unclear unit or more than 2⁶³-1 bytes; the message is
            for the user and ends with what to write.
    """
    number, unit = _split(text, "a size", "32GiB")
    if unit not in SIZE_UNITS:
        raise ValueError(f"{text!r} {_size_remedy(number, unit)}")
    # Exact also for fractions: 0.1TB is 10¹¹ bytes, not 99999999999.
    whole, _, fraction = number.partition(".")
    scale = int("1" + "0" * len(fraction))
    size, rest = divmod(int(whole + fraction) * SIZE_UNITS[unit], scale)
    if rest:
        raise ValueError(f"{text!r} is not a whole number of bytes; use a smaller unit")
    if size > MAX_SIZE:
        raise ValueError(f"{text!r} is more than 2^63-1 bytes; write less")
    return size


def parse_duration(text: str) -> float:
    """Seconds of `50ms`, `5s`, `10m`, `24h`, `7d`.

    Raises:
        ValueError: no number, no unit or an unknown unit; the message is for the user.
    """
    number, unit = _split(text, "a duration", "50ms, 5s or 10m")
    if unit not in DURATION_UNITS:
        raise ValueError(f"{text!r} {_duration_remedy(number, unit)}")
    seconds = float(number) * DURATION_UNITS[unit]
    # 50 * 0.001 is 0.05 only after rounding; a nanosecond is finer than anything that is timed.
    return round(seconds, 9)


def format_size(size: int) -> str:
    """The shortest way to write `size` that `parse_size` reads back exactly."""
    exact = [(size // factor, unit) for unit, factor in SIZE_UNITS.items() if size % factor == 0]
    if exact:
        # Of equally short ones the binary unit: SIZE_UNITS has those first, and min() keeps it.
        number, unit = min(exact, key=lambda pair: len(str(pair[0])))
        return f"{number}{unit}"
    return f"{size // 1000}.{size % 1000:03d}".rstrip("0") + "kB"


def approximate_size(size: int) -> str:
    """`size` with one decimal in the largest binary unit that gives at least 1; for messages."""
    for unit in ("TiB", "GiB", "MiB"):
        if size >= SIZE_UNITS[unit]:
            return f"{size / SIZE_UNITS[unit]:.1f}{unit}".replace(".0", "")
    return f"{size / SIZE_UNITS['KiB']:.1f}KiB".replace(".0", "")


def format_duration(seconds: float) -> str:
    """`seconds` in the largest unit that divides it: 2.0 is `2s`, 0.05 is `50ms`."""
    for unit in ("d", "h", "m", "s"):
        count = seconds / DURATION_UNITS[unit]
        if count >= 1 and count == int(count):
            return f"{int(count)}{unit}"
    return f"{seconds * 1000:.10g}ms"


def _split(text: str, what: str, example: str) -> tuple[str, str]:
    match = _NUMBER_AND_UNIT.fullmatch(text.strip())
    if match is None:
        shown = repr(text if len(text) <= 40 else text[:40] + "…")
        raise ValueError(f"{shown} is not {what}; write a number and its unit, like {example}")
    return match[1], match[2]


def _size_remedy(number: str, unit: str) -> str:
    names = ", ".join(SIZE_UNITS)
    if not unit:
        # 34359738368 was meant in bytes; 32 was not.
        in_bytes = int(number) if number.isdigit() else 0
        if in_bytes >= SIZE_UNITS["MiB"] and in_bytes <= MAX_SIZE:
            return f"has no unit; did you mean {format_size(in_bytes)}?"
        return f"has no unit; {number}GiB or {number}GB?"
    letter = unit[0].upper()
    if unit.lower() in {"k", "ki", "m", "mi", "g", "gi", "t", "ti"}:
        return f"has no clear unit; {number}{_binary(letter)} or {number}{_decimal(letter)}?"
    for known in SIZE_UNITS:
        if unit.lower() == known.lower():
            return f"has an unclear unit; did you mean {number}{known}?"
    return f"has an unknown unit; use one of {names}"


def _binary(letter: str) -> str:
    return f"{letter}iB"


def _decimal(letter: str) -> str:
    return "kB" if letter == "K" else f"{letter}B"


def _duration_remedy(number: str, unit: str) -> str:
    if not unit:
        return f"has no unit; {number}s or {number}ms?"
    meant = _DURATION_WORDS.get(unit.lower())
    if meant is None and unit.lower() in DURATION_UNITS:
        meant = unit.lower()
    if meant is None:
        near = difflib.get_close_matches(unit.lower(), _DURATION_WORDS, n=1)
        meant = _DURATION_WORDS[near[0]] if near else None
    if meant is not None:
        return f"has an unknown unit; did you mean {number}{meant}?"
    return f"has an unknown unit; use one of {', '.join(DURATION_UNITS)}"


def _written_text(
    value: Any, info: ValidationInfo, parse: Callable[[str], float], example: str
) -> Any:
    """Text through `parse`; bare numbers only from code."""
    if isinstance(value, bool) or value is None:
        raise PydanticCustomError("unit_type", _TYPE, {"example": example})
    if isinstance(value, str):
        try:
            return parse(value)
        except ValueError as error:
            raise PydanticCustomError("unit", "{reason}", {"reason": str(error)}) from None
    if isinstance(value, int | float):
        if not (info.context or {}).get("written"):
            return value
        if not math.isfinite(value):
            raise PydanticCustomError("unit_type", _TYPE, {"example": example})
        try:
            parse(str(value))
        except ValueError as error:
            # str(value) is what the YAML reader made of it; the quotes would be misleading.
            reason = str(error).replace(repr(str(value)), str(value), 1)
            raise PydanticCustomError("unit", "{reason}", {"reason": reason}) from None
    raise PydanticCustomError("unit_type", _TYPE, {"example": example})


def _size(value: Any, info: ValidationInfo) -> Any:
    return _written_text(value, info, parse_size, "32GiB")


def _duration(value: Any, info: ValidationInfo) -> Any:
    return _written_text(value, info, parse_duration, "5s")


Size = Annotated[
    int,
    BeforeValidator(_size),
    PlainSerializer(format_size, return_type=str, when_used="json"),
    WithJsonSchema(
        {
            "type": "string",
            "format": SIZE_FORMAT,
            "pattern": r"^[0-9]+(\.[0-9]+)? ?(KiB|MiB|GiB|TiB|kB|MB|GB|TB)$",
        }
    ),
]
"""Bytes. Written as `32GiB`, `500GB`."""

Duration = Annotated[
    float,
    BeforeValidator(_duration),
    PlainSerializer(format_duration, return_type=str, when_used="json"),
    WithJsonSchema(
        {
            "type": "string",
            "format": DURATION_FORMAT,
            "pattern": r"^[0-9]+(\.[0-9]+)? ?(ms|s|m|h|d)$",
        }
    ),
]
"""Seconds. Written as `50ms`, `5s`, `10m`, `24h`, `7d`."""
