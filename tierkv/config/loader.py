# SPDX-License-Identifier: Apache-2.0
"""YAML with line numbers, and without the parts of YAML that surprise or attack.

The file is composed with PyYAML's SafeLoader into nodes, never constructed into objects. What a
configuration does not need is refused: duplicate keys (PyYAML keeps the last), anchors and aliases
(a few lines can expand to half a million nodes), tags, merge keys, more than one document, more
than `MAX_BYTES`, more than `MAX_DEPTH` levels.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import yaml

from tierkv.config.tree import Node, Place, Problem, Report, clean, join

MAX_BYTES = 1 << 20
MAX_DEPTH = 16
"""Levels of nesting; a configuration has four."""

_TAG = "tag:yaml.org,2002:"

_REMEDIES = (
    # What PyYAML says, and what to do about it.
    ("'\\t'", "indent with spaces, not tabs"),
    ("mapping values are not allowed", "check the indentation, and quote values that hold ': '"),
    ("expected <block end>", "check the indentation of this line"),
    ("could not find expected ':'", "a key needs ': ' after it"),
    ("but got '{'", "in brackets, ${NAME} needs quotes"),
    ("expected ',' or", "a comma is missing, or a bracket is not closed"),
    ("unexpected end of stream", "a quote is not closed"),
    ("cannot start any token", "put the value in quotes"),
    ("unknown escape", "use single quotes, in which a backslash is a backslash"),
    ("another document", "keep one document; remove the '---' line"),
)


class Refused(Exception):
    """The file cannot be read any further; `problem` says why."""

    def __init__(self, problem: Problem) -> None:
        super().__init__(str(problem))
        self.problem = problem


def read_text(path: str | os.PathLike[str]) -> str:
    """The content of a configuration file.

    Raises:
        Refused: missing, unreadable, too large or not UTF-8.
    """
    name = os.fspath(path)
    try:
        with open(path, "rb") as file:
            data = file.read(MAX_BYTES + 1)
    except FileNotFoundError:
        raise _refused(
            name,
            "no such file; give the path of a configuration, or write one with "
            "'tierkv config init'",
        ) from None
    except IsADirectoryError:
        raise _refused(name, "is a directory; give the file in it") from None
    except PermissionError:
        raise _refused(name, "may not be read; check its owner and mode") from None
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or "not a path"
        raise _refused(name, f"cannot be read ({reason}); check the path") from None
    if len(data) > MAX_BYTES:
        raise _refused(name, "is larger than 1MiB; is this the configuration?")
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        column = error.start - data.rfind(b"\n", 0, error.start)
        raise Refused(
            Problem(Place("file", name, line, column), "", "is not UTF-8; save it as UTF-8")
        ) from None


def parse(text: str, name: str, report: Report) -> Node:
    """The tree of a YAML text.

    Args:
        text: the file's content.
        name: how messages call the file.
        report: takes what is refused but can be stepped over; the node is then `broken`.

    Raises:
        Refused: not YAML, not a mapping, or nested too deeply.
    """
    try:
        composer = _Composer(text, name, report)
        root = composer.get_single_node()
    except yaml.reader.ReaderError as error:
        raise Refused(_unprintable(error, text, name)) from None
    except yaml.MarkedYAMLError as error:
        raise Refused(_syntax(error, name)) from None
    except RecursionError:  # not reached below MAX_DEPTH; a safety net for the scanner
        raise _refused(name, "is nested too deeply; a configuration has four levels") from None
    if root is None:
        raise _refused(name, "is empty; 'tierkv config init' writes a sample")
    if not isinstance(root, yaml.MappingNode) and id(root) not in composer.broken:
        place = composer.place(root.start_mark)
        raise Refused(
            Problem(
                place, "", "must hold keys and values, like 'version: 1'; it holds something else"
            )
        )
    return _Converter(composer, report).convert(root, "")


class _Composer(yaml.SafeLoader):
    """SafeLoader that refuses anchors, aliases, tags and depth while it composes nodes."""

    def __init__(self, text: str, name: str, report: Report) -> None:
        super().__init__(text)
        self.file_name = name
        self.broken: set[int] = set()
        self._report = report
        self._depth = 0

    def place(self, mark: yaml.Mark) -> Place:
        return Place("file", self.file_name, mark.line + 1, mark.column + 1)

    def compose_node(self, parent: yaml.Node | None, index: Any) -> Any:
        event: Any = self.peek_event()  # type: ignore[no-untyped-call]
        mark: Any = event.start_mark
        place = self.place(mark)
        if isinstance(event, yaml.AliasEvent):
            self.get_event()  # type: ignore[no-untyped-call]
            self._report(place, "", f"alias {_shown(f'*{event.anchor}')} is refused; write it out")
            node: Any = yaml.ScalarNode(_TAG + "null", "", mark, mark)
            self.broken.add(id(node))
            return node
        refused = False
        if event.anchor is not None:
            # The node itself is fine; only aliases of it are not.
            self._report(place, "", f"anchor {_shown(f'&{event.anchor}')} is refused; remove it")
            event.anchor = None
        if event.tag is not None:
            self._report(
                place, "", f"tag {_shown(event.tag.replace(_TAG, '!!'))} is refused; remove it"
            )
            event.tag, refused = None, True
        self._depth += 1
        if self._depth > MAX_DEPTH:
            raise Refused(
                Problem(place, "", "is nested too deeply; a configuration has four levels")
            )
        node = super().compose_node(parent, index)
        self._depth -= 1
        if refused:
            self.broken.add(id(node))
        return node


class _Converter:
    """Turns PyYAML's nodes into ours; scalars by SafeLoader's own rules, keys by ours."""

    def __init__(self, composer: _Composer, report: Report) -> None:
        self._composer = composer
        self._report = report
        self._scalars: dict[str, Callable[[yaml.ScalarNode], Any]] = {
            _TAG + "int": composer.construct_yaml_int,
            _TAG + "float": composer.construct_yaml_float,
            _TAG + "bool": composer.construct_yaml_bool,
            _TAG + "null": composer.construct_yaml_null,
            # Everything else, timestamps too, stays the text that it is.
        }

    def convert(self, node: yaml.Node, path: str) -> Node:
        place = self._composer.place(node.start_mark)
        result = Node(None, place, place, broken=id(node) in self._composer.broken)
        if isinstance(node, yaml.MappingNode):
            result.value = self._mapping(node, path)
            result.incomplete = len(result.value) < len(node.value)
        elif isinstance(node, yaml.SequenceNode):
            result.value = [
                self.convert(item, join(path, str(index))) for index, item in enumerate(node.value)
            ]
        else:
            self._scalar(node, result, path)
        return result

    def _mapping(self, node: yaml.MappingNode, path: str) -> dict[str, Node]:
        entries: dict[str, Node] = {}
        for key_node, value_node in node.value:
            place = self._composer.place(key_node.start_mark)
            if id(key_node) in self._composer.broken:
                continue
            if not isinstance(key_node, yaml.ScalarNode):
                self._report(place, path, "a key must be a plain word; check the brackets")
                continue
            key = key_node.value
            if key_node.tag == _TAG + "merge":
                self._report(place, path, "merge key '<<' is refused; write the keys out")
                continue
            child = self.convert(value_node, join(path, key))
            child.key_place = place
            if key in entries:
                first = entries[key].key_place.line
                self._report(
                    place, join(path, key), f"duplicate key, first on line {first}; keep one"
                )
                entries[key].broken = True
                continue
            entries[key] = child
        return entries

    def _scalar(self, node: yaml.Node, result: Node, path: str) -> None:
        construct = self._scalars.get(node.tag)
        if construct is None:
            result.value = node.value
            return
        assert isinstance(node, yaml.ScalarNode)
        try:
            result.value = construct(node)
        except (ValueError, OverflowError):
            self._report(result.place, path, "a number that cannot be read; write a smaller one")
            result.broken = True
            return
        if str(result.value) != node.value:
            result.written = node.value


def _shown(text: str) -> str:
    return "'" + clean(text) + "'"


def _refused(name: str, message: str) -> Refused:
    return Refused(Problem(Place("file", name), "", message))


def _syntax(error: yaml.MarkedYAMLError, name: str) -> Problem:
    mark = error.problem_mark or error.context_mark
    place = Place("file", name, mark.line + 1, mark.column + 1) if mark else Place("file", name)
    said = (error.problem or error.context or "cannot be parsed").strip()
    # "but found another document" has its first half in the context.
    if said.startswith("but ") and error.context:
        said = f"{error.context.strip()}, {said}"
    context = error.context_mark
    if context is not None and mark is not None and context.line != mark.line:
        said += f" (in what begins on line {context.line + 1})"
    remedy = next((text for part, text in _REMEDIES if part in said), "check this line")
    return Problem(place, "", f"not valid YAML: {said}; {remedy}")


def _unprintable(error: yaml.reader.ReaderError, text: str, name: str) -> Problem:
    before = text[: error.position]
    line = before.count("\n") + 1
    column = error.position - before.rfind("\n")
    code = error.character if isinstance(error.character, int) else ord(error.character[:1])
    return Problem(
        Place("file", name, line, column), "", f"character U+{code:04X} is not allowed; remove it"
    )
