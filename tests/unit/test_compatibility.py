# SPDX-License-Identifier: Apache-2.0
"""The matrix says "same" of a row only if every test of it has passed."""

from __future__ import annotations

from pathlib import Path

from tests.compatibility import PAGE, page, rows

RESULTS = """<testsuites><testsuite>
<testcase name="a"><properties><property name="feature" value="beams"/></properties></testcase>
<testcase name="b"><properties><property name="feature" value="beams"/></properties>
<failure message="no"/></testcase>
<testcase name="c"><properties><property name="feature" value="drafts: stands aside"/></properties>
</testcase>
<testcase name="d"><properties><property name="feature" value="sleep"/></properties>
<skipped message="no GPU"/></testcase>
<testcase name="e"/>
</testsuite></testsuites>"""


def test_rows_are_what_their_tests_were(tmp_path: Path) -> None:
    (tmp_path / "results.xml").write_text(RESULTS)
    found = rows([tmp_path / "results.xml"])
    assert found == {
        "beams": ["passed", "failed"],
        "drafts: stands aside": ["passed"],
        "sleep": ["skipped"],
    }
    text = page(found, "0.32.0")
    assert "| beams | failed | 2 |" in text
    assert "| drafts | stands aside, counted | 1 |" in text
    assert "| sleep | skipped | 1 |" in text
    assert "| vLLM 0.30, 0.31, 0.33 | signatures and names only |" in text


def test_the_committed_page_has_green_rows_only() -> None:
    lines = [line for line in PAGE.read_text().splitlines() if line.startswith("| ")]
    table = [line.split(" | ")[1] for line in lines[1 : lines.index("| feature | why |")]]
    assert set(table) <= {"same", "stands aside, counted"}
    assert len(table) >= 37
