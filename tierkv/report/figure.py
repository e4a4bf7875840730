# SPDX-License-Identifier: Apache-2.0
"""Pictures as inline SVG that fits the page around it, dark or light, and is the same each time.

Text stays text. Lines and letters of the axes take the colour of the page's text; what is plotted
has colours that can be told apart on black and on white, also by people who are colour blind.
"""

from __future__ import annotations

import io
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

PALETTE = ("#2e8b57", "#a66dbe", "#4c8bd0", "#c8901a", "#d1495b", "#7f7f7f", "#3aa5a0", "#a0763a")
"""For whatever is plotted, in this order."""

TIER_COLOURS = {"gpu": "#4c8bd0", "dram": "#2e8b57", "disk": "#a66dbe", "redis": "#c8901a"}
"""The same tier has the same colour in every picture."""

TEXT = "#010203"
"""Stands for the colour of the page's text until the SVG is written."""

_STYLE: dict[Any, Any] = {
    "svg.fonttype": "none",
    "svg.hashsalt": "tierkv",
    "font.family": "sans-serif",
    "font.size": 10,
    "text.color": TEXT,
    "axes.labelcolor": TEXT,
    "axes.edgecolor": TEXT,
    "axes.titlesize": 10,
    "axes.titlelocation": "left",
    "xtick.color": TEXT,
    "ytick.color": TEXT,
    "grid.color": TEXT,
    "grid.alpha": 0.15,
    "axes.grid": True,
    "axes.axisbelow": True,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "legend.frameon": False,
    "legend.fontsize": 9,
}


def tier_colour(name: str, position: int = 0) -> str:
    """The colour of a tier: by its name, or by its position among those with other names."""
    return TIER_COLOURS.get(name, PALETTE[(position + 4) % len(PALETTE)])


class Drawing:
    """A figure with one pair of axes, and `svg` once the `drawing` block has ended.

    Attributes:
        axes: to draw on.
        figure: which they are on.
        svg: the finished element.
    """

    axes: Axes
    figure: Figure
    svg: str = ""

    def legend(self) -> None:
        """What the colours mean, above the picture: on the left, where a phone shows it."""
        count = len(self.axes.get_legend_handles_labels()[0])
        if count:
            # Columns of equal height: with three rows of five, the third would stand alone.
            columns = -(-count // -(-count // 5))
            self.figure.legend(loc="outside upper left", ncols=columns)


@contextmanager
def drawing(name: str, height: float = 3.2, width: float = 8.0) -> Iterator[Drawing]:
    """Draw within the block.

    Args:
        name: of the picture, unique on its page: ids within an SVG count for the whole page.
        height: inches, of which the page's width has eight.
        width: inches.
    """
    from tierkv.demo.paths import cache_dir

    # Matplotlib keeps a list of fonts, by default among the user's own files.
    os.environ.setdefault("MPLCONFIGDIR", str(cache_dir() / "matplotlib"))
    import matplotlib as mpl
    from matplotlib.figure import Figure

    made = Drawing()
    with mpl.rc_context(_STYLE):
        made.figure = Figure(figsize=(width, height), layout="constrained")
        made.axes = made.figure.add_subplot()
        yield made
        target = io.StringIO()
        made.figure.savefig(target, format="svg", transparent=True, metadata={"Date": None})
    made.svg = _inline(target.getvalue(), name)


def _inline(text: str, name: str) -> str:
    """Without XML declaration and document type, in the page's colour, with ids of its own."""
    text = text[text.index("<svg") :].replace(TEXT, "currentColor")
    text = re.sub(r'\bid="', f'id="{name}-', text)
    text = re.sub(r'(href="#|url\(#)', rf"\g<1>{name}-", text)
    return text
