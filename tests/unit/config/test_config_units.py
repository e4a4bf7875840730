# SPDX-License-Identifier: Apache-2.0
"""Sizes and durations: what is read, what is refused, and what the refusal advises."""

from __future__ import annotations

import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tierkv.config.units import (
    approximate_size,
    format_duration,
    format_size,
    parse_duration,
    parse_size,
)


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("1KiB", 1024),
        ("32GiB", 34_359_738_368),
        ("2TiB", 2_199_023_255_552),
        ("7MiB", 7_340_032),
        ("3kB", 3_000),
        ("500MB", 500_000_000),
        ("32GB", 32_000_000_000),
        ("0.1TB", 100_000_000_000),
        ("1.5 GiB", 1_610_612_736),
        ("0GiB", 0),
    ],
)
def test_a_size_is_read_to_the_byte(text: str, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize(
    ("text", "advice"),
    [
        ("32G", "32GiB or 32GB?"),
        ("32Gi", "32GiB or 32GB?"),
        ("32g", "32GiB or 32GB?"),
        ("1k", "1KiB or 1kB?"),
        ("32", "32GiB or 32GB?"),
        ("34359738368", "did you mean 32GiB?"),
        ("32gib", "did you mean 32GiB?"),
        ("5KB", "did you mean 5kB?"),
        ("32GiBs", "use one of KiB, MiB, GiB, TiB, kB, MB, GB, TB"),
        ("512B", "use one of KiB, MiB, GiB, TiB, kB, MB, GB, TB"),
        ("ten", "write a number and its unit, like 32GiB"),
        ("-1GiB", "write a number and its unit, like 32GiB"),
        ("1,5GiB", "write a number and its unit, like 32GiB"),
        ("١GiB", "write a number and its unit, like 32GiB"),
        ("", "write a number and its unit, like 32GiB"),
        ("0.0001kB", "use a smaller unit"),
        ("99999999TiB", "write less"),
    ],
)
def test_an_unclear_size_is_refused_with_what_to_write(text: str, advice: str) -> None:
    with pytest.raises(ValueError, match=r".") as caught:
        parse_size(text)
    assert str(caught.value).endswith(advice)


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("50ms", 0.05),
        ("5s", 5.0),
        ("10m", 600.0),
        ("24h", 86_400.0),
        ("7d", 604_800.0),
        ("1.5s", 1.5),
    ],
)
def test_a_duration_is_read_in_seconds(text: str, seconds: float) -> None:
    assert parse_duration(text) == seconds


@pytest.mark.parametrize(
    ("text", "advice"),
    [
        ("5", "5s or 5ms?"),
        ("5sec", "did you mean 5s?"),
        ("10 minutes", "did you mean 10m?"),
        ("2 hrs", "did you mean 2h?"),
        ("5S", "did you mean 5s?"),
        ("3w", "use one of ms, s, m, h, d"),
        ("00:05:00", "write a number and its unit, like 50ms, 5s or 10m"),
        ("PT5S", "write a number and its unit, like 50ms, 5s or 10m"),
    ],
)
def test_an_unclear_duration_is_refused_with_what_to_write(text: str, advice: str) -> None:
    with pytest.raises(ValueError, match=r".") as caught:
        parse_duration(text)
    assert str(caught.value).endswith(advice)


@given(st.integers(0, (1 << 63) - 1))
def test_a_written_size_is_read_back_exactly(size: int) -> None:
    assert parse_size(format_size(size)) == size


@given(st.integers(1, 10**9))
def test_a_written_duration_is_read_back_exactly(milliseconds: int) -> None:
    seconds = milliseconds / 1000
    assert parse_duration(format_duration(seconds)) == pytest.approx(seconds, rel=1e-9)


@given(st.text(max_size=40))
def test_no_text_breaks_the_parsers(text: str) -> None:
    for parse in (parse_size, parse_duration):
        with contextlib.suppress(ValueError):
            assert parse(text) >= 0


@pytest.mark.parametrize(
    ("size", "text"),
    [
        (1 << 40, "1TiB"),
        (3 << 29, "1536MiB"),
        (10**12, "1TB"),
        (1500, "1.5kB"),
        (12_345, "12.345kB"),
    ],
)
def test_a_size_is_written_short(size: int, text: str) -> None:
    assert format_size(size) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(2.0, "2s"), (0.05, "50ms"), (90.0, "90s"), (600.0, "10m"), (604800.0, "7d")],
)
def test_a_duration_is_written_in_the_largest_unit_that_divides_it(
    seconds: float, text: str
) -> None:
    assert format_duration(seconds) == text


def test_an_approximate_size_has_one_decimal() -> None:
    assert approximate_size(25_769_803_777) == "24GiB"
    assert approximate_size(1_610_612_736) == "1.5GiB"
    assert approximate_size(512) == "0.5KiB"
