# SPDX-License-Identifier: Apache-2.0
"""Variables in string values, put in after parsing so that a value can never become structure."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

from tierkv.config.tree import Node, Report, join

_DOLLAR = re.compile(r"\$(?:(\$)|\{([A-Za-z_][A-Za-z0-9_]*)(?::-([^}]*))?\})?")


def interpolate(node: Node, environ: Mapping[str, str], report: Report, path: str = "") -> set[str]:
    """Replace `${VAR}`, `${VAR:-default}` and `$$` in the string values of a tree, in place.

    As in a shell, the default stands in for a variable that is unset or empty.

    Args:
        node: the tree.
        environ: all variables.
        report: takes variables that are not set and dollars that mean nothing.
        path: dotted path of `node`.

    Returns:
        The names of all variables that the tree mentions.
    """
    if isinstance(node.value, dict):
        children: Iterable[tuple[str, Node]] = node.value.items()
    elif isinstance(node.value, list):
        children = ((str(index), child) for index, child in enumerate(node.value))
    else:
        return _interpolate_scalar(node, environ, report, path)
    used: set[str] = set()
    for key, child in children:
        used |= interpolate(child, environ, report, join(path, key))
    return used


def _interpolate_scalar(
    node: Node, environ: Mapping[str, str], report: Report, path: str
) -> set[str]:
    if not isinstance(node.value, str) or "$" not in node.value:
        return set()
    used: dict[str, None] = {}

    def complain(message: str) -> str:
        node.broken = True
        report(node.place, path, message)
        return ""

    def replace(match: re.Match[str]) -> str:
        dollar, name, default = match.groups()
        if dollar:
            return "$"
        if name is None:
            return complain("holds a single $; write ${NAME} for a variable, $$ for a dollar")
        used[name] = None
        value = environ.get(name)
        if value or (value is not None and default is None):
            return value
        if default is None:
            return complain(f"variable {name} is not set; set it, or write ${{{name}:-default}}")
        return str(default)

    node.written = node.value
    node.value = _DOLLAR.sub(replace, node.value)
    node.variables = tuple(used)
    return set(used)
