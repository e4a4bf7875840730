# SPDX-License-Identifier: Apache-2.0
"""A configuration before validation: a tree of plain values, each of which knows its place.

The file, the environment and the inline mapping are laid into one such tree, the tree is validated
once, and every complaint is led back to the place that its value came from.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

_PLAIN = re.compile(r"[A-Za-z0-9/~._-][A-Za-z0-9/~._:+-]*(?<!:)")
"""Text that needs no quotes in YAML, not even in brackets; for examples, which hold no `no`."""

Kind: TypeAlias = Literal["file", "variable", "inline", "default"]


@dataclass(frozen=True, slots=True)
class Place:
    """Where a value stands.

    Attributes:
        kind: what sort of place it is.
        name: the file as it was given, the variable, or a word for the other two.
        line: from 1; 0 outside files.
        column: from 1; 0 outside files.
    """

    kind: Kind
    name: str
    line: int = 0
    column: int = 0

    def __str__(self) -> str:
        return f"{self.name}:{self.line}:{self.column}" if self.line else self.name

    @property
    def source(self) -> str:
        """The place as `config show` prints it."""
        return f"{self.name}:{self.line}" if self.line else self.name


INLINE = Place("inline", "inline")
DEFAULT = Place("default", "default")


@dataclass(frozen=True, slots=True)
class Problem:
    """One thing that is wrong, for one line of output.

    Attributes:
        place: where.
        path: dotted path of the key, "" for the whole.
        message: what is wrong and what to do; holds no secret.
    """

    place: Place
    path: str
    message: str

    def __str__(self) -> str:
        parts = (str(self.place), self.path, self.message)
        return printable(": ".join(part for part in parts if part))


Report: TypeAlias = Callable[[Place, str, str], None]
"""Takes place, path and message of a problem."""


@dataclass(slots=True)
class Node:
    """One value of the tree.

    Attributes:
        value: a scalar, `dict[str, Node]` or `list[Node]`.
        place: where the value begins.
        key_place: where its key begins; the value's own place for list items.
        written: a scalar as it stands in the file, where that differs from the value.
        variables: names of the variables whose values were put into a string.
        incomplete: a mapping of which a key was refused.
        broken: already complained about; errors at and below it are not repeated.
    """

    value: Any
    place: Place
    key_place: Place
    written: str | None = None
    variables: tuple[str, ...] = ()
    incomplete: bool = False
    broken: bool = False

    @property
    def source(self) -> str:
        """Where the value came from, as `config show` prints it."""
        if not self.variables:
            return self.place.source
        return f"{self.place.source} ({', '.join('${' + name + '}' for name in self.variables)})"

    def child(self, key: str) -> Node | None:
        """The value under `key`, if this is a mapping that has it."""
        found = self.value.get(key) if isinstance(self.value, dict) else None
        return found if isinstance(found, Node) else None


Keys: TypeAlias = Sequence[str | int]
"""The way from the root to a value: keys of mappings and indices of lists."""


def find(root: Node, keys: Keys) -> Node | None:
    """The node that `keys` lead to, or None."""
    node: Node | None = root
    for key in keys:
        if node is None:
            return None
        if isinstance(key, str):
            node = node.child(key)
        else:
            items = node.value if isinstance(node.value, list) else []
            node = items[key] if key < len(items) else None
    return node


def plain(node: Node) -> Any:
    """The tree as dicts, lists and scalars, for validation."""
    if isinstance(node.value, dict):
        return {key: plain(child) for key, child in node.value.items()}
    if isinstance(node.value, list):
        return [plain(child) for child in node.value]
    return node.value


def grow(value: Any, place: Place) -> Node:
    """A tree of which every part stands at the same `place`; the opposite of `plain`."""
    if isinstance(value, Mapping):
        return Node({str(key): grow(child, place) for key, child in value.items()}, place, place)
    if isinstance(value, list | tuple):
        return Node([grow(child, place) for child in value], place, place)
    return Node(value, place, place)


def join(path: str, key: str) -> str:
    """The dotted path of `key` below `path`, fit for printing."""
    return f"{path}.{clean(key)}" if path else clean(key)


def clean(key: str) -> str:
    """A key as it may be printed: no control characters, not endless."""
    text = printable(key)
    return text if len(text) <= 60 else text[:60] + "…"


def printable(text: str) -> str:
    """`text` on one line and without a character that could change a terminal."""
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() else repr(char)[1:-1] for char in text)


def flow(value: Any) -> str:
    """A value as one line of YAML, with quotes where YAML needs them in brackets."""
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{key}: {flow(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(flow, value)) + "]"
    if isinstance(value, str) and not _PLAIN.fullmatch(value):
        return json.dumps(value, ensure_ascii=False)
    return str(value).lower() if isinstance(value, bool) else str(value)
