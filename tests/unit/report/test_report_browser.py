# SPDX-License-Identifier: Apache-2.0
"""The page of a report in a real browser: wide and narrow, light and dark."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from PIL import Image

from tests.unit.report.recordings import day, write
from tierkv.cli.app import run

NAMES = ("chromium", "chromium-browser", "google-chrome")
BROWSER = next(filter(None, map(shutil.which, NAMES)), None)

pytestmark = pytest.mark.skipif(
    BROWSER is None, reason="chromium is not installed: make test-tools installs it"
)

# Asked inside the page. Only the test's copy has a script.
QUESTIONS = """
<script>
addEventListener("load", () => {
  const root = document.documentElement, style = getComputedStyle(document.body);
  const small = [...document.querySelectorAll("svg text")].filter(
    (text) => text.getBoundingClientRect().height < 8).length;
  const cut = [...document.querySelectorAll("svg")].filter((svg) => {
    const outer = svg.getBoundingClientRect();
    return [...svg.querySelectorAll("text")].some((text) => {
      const inner = text.getBoundingClientRect();
      return inner.left < outer.left - 1 || inner.right > outer.right + 1;
    });
  }).length;
  const svg = document.querySelector("svg text");
  root.dataset.answers = JSON.stringify({
    width: root.scrollWidth, view: root.clientWidth, small: small, cut: cut,
    text: style.color, page: style.backgroundColor, axes: getComputedStyle(svg).fill,
    pictures: document.querySelectorAll("figure svg").length,
    loaded: performance.getEntriesByType("resource").length,
  });
});
</script></body>"""


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("page")
    made = folder / "report.html"
    assert run(["report", str(write(folder / "day.jsonl", day())), "-o", str(made)]) == 0
    asked = folder / "asked.html"
    asked.write_text(made.read_text().replace("</body>", QUESTIONS))
    return asked


def browse(page: Path, *arguments: str) -> str:
    assert BROWSER is not None
    # Without a sandbox, which containers and root do not have; the page is our own.
    settings = ("--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage",
                "--hide-scrollbars", f"--user-data-dir={page.parent / 'profile'}")  # fmt: skip
    done = subprocess.run(
        [BROWSER, *settings, *arguments, page.as_uri()],
        capture_output=True, text=True, timeout=120, check=True,
    )  # fmt: skip
    return done.stdout


@pytest.mark.parametrize("dark", [False, True])
@pytest.mark.parametrize("width", [1280, 390])
def test_the_page_fits_and_can_be_read(page: Path, width: int, dark: bool) -> None:
    scheme = ["--blink-settings=preferredColorScheme=0"] if dark else []
    dom = browse(page, f"--window-size={width},900", "--dump-dom", *scheme)
    found = re.search(r'data-answers="([^"]*)"', dom)
    assert found is not None
    answers = json.loads(found[1].replace("&quot;", '"'))
    # Headless windows have a least width of their own.
    assert answers["width"] <= answers["view"], answers
    assert answers["pictures"] == 6
    assert answers["small"] == answers["cut"] == answers["loaded"] == 0, answers
    assert answers["axes"] == answers["text"]
    assert contrast(answers["text"], answers["page"]) > 7
    assert (luminance(answers["page"]) < 0.1) is dark


def test_the_screenshot_shows_the_plotted_colours(page: Path, tmp_path: Path) -> None:
    target = tmp_path / "page.png"
    browse(page, "--window-size=1280,1600", f"--screenshot={target}")
    with Image.open(target) as image:
        colours = image.convert("RGB").getcolors(1 << 24)
    assert colours is not None
    # The DRAM area, three quarters of its colour over white.
    dram = sum(count for count, colour in colours if near(colour, (98, 168, 129)))
    assert dram > 5000


def near(one: tuple[int, ...], other: tuple[int, ...]) -> bool:
    return all(abs(a - b) < 12 for a, b in zip(one, other, strict=True))


def luminance(colour: str) -> float:
    """Of `rgb(r, g, b)`, by WCAG 2."""
    parts = [int(n) / 255 for n in re.findall(r"\d+", colour)[:3]]
    r, g, b = (p / 12.92 if p <= 0.03928 else ((p + 0.055) / 1.055) ** 2.4 for p in parts)
    return 0.2126 * r + 0.7152 * g + 0.0722 * b


def contrast(one: str, other: str) -> float:
    bright, dim = sorted((luminance(one), luminance(other)), reverse=True)
    return (bright + 0.05) / (dim + 0.05)
