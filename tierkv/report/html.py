# SPDX-License-Identifier: Apache-2.0
"""A document as one HTML file: no network, no script, dark and light, readable on paper."""

from __future__ import annotations

from importlib import resources
from importlib.util import find_spec
from pathlib import Path

from tierkv.errors import TierKVError
from tierkv.report.document import Code, Document, Plot, Table, Text

NEEDS = ("jinja2", "matplotlib")
"""What the extra `report` brings."""


def check_page(file: Path) -> None:
    """See that a page can be made and put there, before work is done for it.

    Raises:
        TierKVError: a package or the directory is missing.
    """
    missing = [name for name in NEEDS if find_spec(name) is None]
    if missing:
        raise TierKVError(f"a page needs {missing[0]}; run: pip install 'tierkv[report]'")
    if not file.absolute().parent.is_dir():
        raise TierKVError(f"{file}: no such directory; make it first, or choose another file")


def write_page(file: Path, document: Document) -> None:
    """Render the document into `file`.

    Raises:
        TierKVError: it cannot be written.
    """
    text = render(document)
    try:
        file.write_text(text, encoding="utf-8")
    except OSError as error:
        raise TierKVError(
            f"{file}: cannot be written ({error.strerror}); choose another file"
        ) from error


def render(document: Document) -> str:
    """The page as text. Everything but the pictures is escaped."""
    import jinja2

    template = resources.files("tierkv.report").joinpath("page.html.j2").read_text("utf-8")
    environment = jinja2.Environment(
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    kinds = {Text: "text", Table: "table", Plot: "plot", Code: "code"}
    environment.filters["kind"] = lambda block: kinds[type(block)]
    return environment.from_string(template).render(document=document)
