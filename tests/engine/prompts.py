# SPDX-License-Identifier: Apache-2.0
"""Real text as token ids, cut to exact lengths: Python's own documentation."""

from __future__ import annotations

from pathlib import Path
from pydoc_data.topics import topics

STEP = 613
"""Tokens between the beginnings of two texts: no two begin with the same words."""


class Texts:
    """Texts by number, as ids of one model's tokenizer."""

    def __init__(self, model: Path) -> None:
        from tokenizers import Tokenizer

        tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
        whole = "\n\n".join(topics[name] for name in sorted(topics))
        self._ids: list[int] = tokenizer.encode(whole, add_special_tokens=False).ids

    def __call__(self, number: int, length: int) -> list[int]:
        """The first `length` tokens of text `number`."""
        start = number * STEP
        assert start + length <= len(self._ids), f"there is no text {number}"
        return self._ids[start : start + length]
