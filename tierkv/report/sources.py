# SPDX-License-Identifier: Apache-2.0
"""What a report can be made of, told apart by what is in it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tierkv.report import bench, recorded
from tierkv.report.document import Document
from tierkv.report.recording import Recording, SourceError, parse_recording, read_text
from tierkv.report.summary import summarize


@dataclass(frozen=True, slots=True)
class Report:
    """One result in its two forms.

    Attributes:
        value: for programs.
        page: with pictures, or None if no pictures were asked for.
        text: for a terminal.
    """

    value: dict[str, Any]
    page: Document | None
    text: Document


def from_file(file: Path, config: Sequence[recorded.ConfigValue], *, pictures: bool) -> Report:
    """Whatever is in the file: a recording, or the JSON of the demo, a benchmark or a simulation.

    Raises:
        SourceError: it is none of these.
    """
    text = read_text(file)
    try:
        value = json.loads(text)
    except ValueError:
        value = None
    if not isinstance(value, dict) or "query_tokens" in value:
        return from_recording(parse_recording(text, file.name), config, pictures=pictures)
    if "phases" in value and "answers_identical" in value:
        from tierkv.demo import page as demo

        page = demo.build(value, pictures=True) if pictures else None
        return Report(value, page, demo.build(value, pictures=False))
    if "points" in value and "ceiling" in value:
        from tierkv.simulate import document as simulation

        page = simulation.build(value, pictures=True) if pictures else None
        return Report(value, page, simulation.build(value, pictures=False))
    if bench.is_bench(value):
        page = bench.build(value, file.stem, pictures=True) if pictures else None
        return Report(value, page, bench.build(value, file.stem, pictures=False))
    raise SourceError(
        f"{file}: neither a recording ('tierkv stat --json') nor the JSON of 'tierkv demo', "
        "'tierkv simulate' or a benchmark"
    )


def from_recording(
    recording: Recording, config: Sequence[recorded.ConfigValue], *, pictures: bool
) -> Report:
    """Of what an engine did."""
    value = summarize(recording)
    rows = recording.rows
    page = recorded.build(value, rows, config, pictures=True) if pictures else None
    return Report(
        {**value, "rows": rows}, page, recorded.build(value, rows, config, pictures=False)
    )
