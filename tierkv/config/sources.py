# SPDX-License-Identifier: Apache-2.0
"""Which value counts: the inline mapping over the environment over the file, value by value.

`TIERKV_TIERS__DISK__CAPACITY=2TiB` and `{"tiers": {"disk": {"capacity": "2TiB"}}}` address a tier
by its name, never by its position, so that inserting a tier cannot redirect a value. Each function
here changes the tree it is given and reports what cannot be placed; whether a value is of the right
type is left to the one validation that follows.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Mapping
from typing import Any, get_args

from tierkv.config.base import Model, SecretRef
from tierkv.config.loader import MAX_DEPTH
from tierkv.config.models import TierKVConfig
from tierkv.config.registry import TIER_MODELS
from tierkv.config.tree import INLINE, Kind, Node, Place, Report, clean, grow, join

PREFIX = "TIERKV_"
FILE_VARIABLE = "TIERKV_CONFIG"
"""Names the configuration file."""

_NO_VALUES = frozenset({FILE_VARIABLE, "TIERKV_CACHE"})
"""Variables of ours that are no values of the configuration; the second is the demo's."""

_FIXED = frozenset({"type", "name"})
"""What a tier is and how it is called decide where other values go, so they come from one place."""

_RANK: dict[Kind, int] = {"default": 0, "file": 1, "variable": 2, "inline": 3}


def overlay_environment(
    root: Node, environ: Mapping[str, str], mentioned: set[str], unknown: Callable[[str, str], None]
) -> None:
    """Lay every `TIERKV_…` variable over the tree, except over inline values.

    Args:
        root: changed in place.
        environ: all variables.
        mentioned: variables that the configuration itself refers to; they may be called anything.
        unknown: takes a variable that sets nothing, and why.
    """
    for variable in sorted(environ):
        if not variable.startswith(PREFIX) or variable in _NO_VALUES | mentioned:
            continue
        segments = variable[len(PREFIX) :].lower().split("__")
        why = _overlay(root, segments, grow(environ[variable], Place("variable", variable)))
        if why:
            unknown(variable, why)


def inline_tree(inline: Mapping[str, Any], report: Report) -> Node:
    """The inline mapping as a tree; what cannot have come from JSON is reported and `broken`."""
    root = grow({}, INLINE)
    for key, value in inline.items():
        reason = _not_plain(value, MAX_DEPTH)
        if reason:
            report(INLINE, clean(str(key)), reason)
        root.value[str(key)] = grow(None if reason else value, INLINE)
        root.value[str(key)].broken = bool(reason)
    return root


def overlay_inline(root: Node, inline: Node, report: Report) -> None:
    """Lay the inline tree over the other one.

    A list of tiers replaces the list that is there; a mapping changes the tiers that it names.
    """
    for key, node in inline.value.items():
        if key != "tiers" or isinstance(node.value, list) or node.broken:
            root.value[key] = node
        elif isinstance(node.value, dict):
            for name, fields in node.value.items():
                _overlay_inline_tier(root, name, fields, report)
        else:
            report(INLINE, "tiers", "must be a list of tiers, or a mapping from tier names")


def tier_name(entry: Node) -> str:
    """The name of a tier in the tree (default: its type), "" if it cannot be told."""
    for key in ("name", "type"):
        node = entry.child(key)
        if node is not None:
            return node.value if isinstance(node.value, str) and not node.broken else ""
    return ""


def closest(word: str, known: Iterable[str]) -> str | None:
    """The one of `known` that was probably meant."""
    # A person's typo is short; a hostile key of a megabyte would take difflib minutes.
    near = difflib.get_close_matches(word[:100].lower(), list(known), n=1, cutoff=0.7)
    return near[0] if near else None


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """`; did you mean 'x'?` for the closest of `known`, or nothing."""
    near = closest(word, known)
    return f"; did you mean {near!r}?" if near else ""


def _overlay_inline_tier(root: Node, name: str, fields: Node, report: Report) -> None:
    path = join("tiers", name)
    if not isinstance(fields.value, dict):
        report(INLINE, path, "must be a mapping of the values to change")
        return
    for field, node in fields.value.items():
        why = _overlay(root, ["tiers", name, field], node)
        if why:
            report(INLINE, join(path, field), why)


def _overlay(root: Node, segments: list[str], node: Node) -> str:
    """Put `node` where `segments` lead, unless a value of higher precedence stands there.

    Returns:
        Why the segments lead nowhere; "" if they do.
    """
    model: type[Model] = TierKVConfig
    parent = root
    if segments[0] == "tiers":
        found = _tier(root, segments)
        if found is None:  # the tier is wrong in itself, and its own error says more
            return ""
        if isinstance(found, str):
            return found
        parent, model = found
        segments = segments[2:]
        if segments[0] in _FIXED:
            return f"the {segments[0]} of a tier stands in its list; change it there"
    while True:
        key, *segments = segments
        if key not in model.model_fields:
            known = [name for name in model.model_fields if name not in _FIXED]
            near = did_you_mean(key, known)
            return f"unknown key {clean(key)!r}{near or '; the keys here: ' + ', '.join(known)}"
        if not segments:
            break
        nested = _nested_model(model, key)
        if nested is None:
            return f"{key!r} holds a single value; nothing can follow it"
        child = parent.child(key)
        if child is None or not isinstance(child.value, dict) or _replaces(nested, child, node):
            if child is not None and _outranks(child, node):
                return ""
            child = parent.value[key] = Node({}, node.place, node.key_place)
        parent, model = child, nested
    present = parent.child(key)
    if present is None or not _outranks(present, node):
        parent.value[key] = node
    return ""


def _outranks(present: Node, node: Node) -> bool:
    return _RANK[present.place.kind] > _RANK[node.place.kind]


def _replaces(nested: type[Model], child: Node, node: Node) -> bool:
    # {file: …} in the file and an env from a variable are not two halves of one reference.
    return nested is SecretRef and child.place.kind != node.place.kind


def _tier(root: Node, segments: list[str]) -> tuple[Node, type[Model]] | str | None:
    """The tier that `tiers`, name, field… mean; text: why there is none; None: cannot be told."""
    tiers = root.child("tiers")
    entries = tiers.value if tiers is not None and isinstance(tiers.value, list) else []
    # Of two equal names the first: the second is an error of its own.
    named = {tier_name(entry): entry for entry in reversed(entries)}
    named.pop("", None)
    if len(segments) < 3:
        example = next(reversed(named), "dram").upper()
        return f"name the tier and the key, like {PREFIX}TIERS__{example}__CAPACITY"
    entry = named.get(segments[1])
    if entry is None:
        near = did_you_mean(segments[1], named)
        known = ", ".join(reversed(named)) or "none"
        return f"no tier is named {clean(segments[1])!r}{near or f'; the tiers: {known}'}"
    kind = entry.child("type")
    model = TIER_MODELS.get(kind.value) if kind and isinstance(kind.value, str) else None
    return (entry, model) if model is not None else None


def _nested_model(model: type[Model], key: str) -> type[Model] | None:
    annotation = model.model_fields[key].annotation
    for candidate in (annotation, *get_args(annotation)):
        if isinstance(candidate, type) and issubclass(candidate, Model):
            return candidate
    return None


def _not_plain(value: Any, depth: int) -> str:
    """Why a value cannot have come from JSON, or ""."""
    if value is None or isinstance(value, str | int | float | bool):
        return ""
    if depth == 0:
        return "is nested too deeply; a configuration has four levels"
    if isinstance(value, Mapping):
        value = value.values()
    elif not isinstance(value, list | tuple):
        return "must be plain text, a number, a list or a mapping"
    return next(filter(None, (_not_plain(child, depth - 1) for child in value)), "")
