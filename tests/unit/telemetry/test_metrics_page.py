# SPDX-License-Identifier: Apache-2.0
"""The metrics page says what the catalogue says."""

from __future__ import annotations

from pathlib import Path

from tierkv.telemetry.catalog import OUTCOMES
from tierkv.telemetry.reference import reference_text

PAGE = Path(__file__).parents[3] / "docs" / "reference" / "metrics.md"


def test_the_page_is_up_to_date() -> None:
    command = "python -m tierkv.telemetry.reference > docs/reference/metrics.md"
    assert PAGE.read_text() == reference_text(), f"run: {command}"


def test_every_outcome_is_explained() -> None:
    for outcome in OUTCOMES:
        assert f"| `{outcome}` |" in PAGE.read_text()
