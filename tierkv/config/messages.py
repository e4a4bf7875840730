# SPDX-License-Identifier: Apache-2.0
"""pydantic's errors as lines that a user can act on: place, key, what was read, what to write.

An error's location is followed through the tree to the node it is about. Values are shown as the
file has them, and never where a secret could stand: inside `{file: …}`/`{env: …}` references and
under unknown keys.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, get_args

from pydantic import ValidationError

from tierkv.config.base import Model, SecretRef
from tierkv.config.models import TierKVConfig
from tierkv.config.registry import TIER_MODELS
from tierkv.config.sources import closest, did_you_mean
from tierkv.config.tree import Node, Problem, clean, flow

TIER_EXAMPLE = "{type: dram, capacity: 8GiB}"

_BOUNDS = {
    "greater_than": ("gt", "must be more than"),
    "greater_than_equal": ("ge", "must be at least"),
    "less_than": ("lt", "must be less than"),
    "less_than_equal": ("le", "must be at most"),
}
_OWN = frozenset({"path_relative", "path_type", "tier_name", "unit_type", "int_type"})
"""Errors of our own validators whose text follows the value that was read."""

_INTEGERS = frozenset({"int_parsing", "int_from_float", "int_parsing_size"})
_NUMBERS = frozenset({"float_parsing", "float_type", "finite_number"})
_MAPPINGS = frozenset({"model_type", "model_attributes_type", "dict_type"})
_BOOLEANS = frozenset({"bool_parsing", "bool_type"})
_LISTS = frozenset({"tuple_type", "list_type"})
_ABOUT_UNITS = frozenset({"unit", "unit_type"})


@dataclass(slots=True)
class _Spot:
    """Where an error's location ends: the nearest node, what is missing below it, the model."""

    node: Node
    path: str
    found: bool
    broken: bool
    secret: bool
    key: str
    model: type[Model] | None


def problems_of(error: ValidationError, root: Node) -> Iterator[Problem]:
    """One problem for each error that is not about an already broken node, in pydantic's order."""
    items = error.errors(include_url=False, include_context=True, include_input=False)
    misspelled = {_meant(item["loc"], root) for item in items if item["type"] == "extra_forbidden"}
    for item in items:
        if item["type"] == "tier_arrangement":
            continue  # found before validation, with their places
        spot = _follow(item["loc"], root)
        # `capacty` is one mistake, not two; and what a refused key would have held is not known.
        known = item["type"] == "missing" and (item["loc"] in misspelled or spot.node.incomplete)
        if not spot.broken and not known:
            yield _problem(item["type"], item["msg"], item.get("ctx", {}), spot)


def _meant(loc: tuple[int | str, ...], root: Node) -> tuple[int | str, ...]:
    """The location that an unknown key was probably meant to have."""
    spot = _follow(loc, root)
    near = closest(spot.key, spot.model.model_fields) if spot.model else None
    return (*loc[:-1], near or "")


def _follow(loc: Sequence[int | str], root: Node) -> _Spot:
    spot = _Spot(root, "", True, root.broken, False, "", TierKVConfig)
    parts = list(loc)
    path: list[str] = []
    while parts:
        part = parts.pop(0)
        path.append(clean(str(part)))
        spot.key = str(part)
        child: Node | None = None
        value = spot.node.value
        if isinstance(part, int):
            child = value[part] if isinstance(value, list) and part < len(value) else None
            spot.model = None
            if parts:  # what follows an index is the discriminator's tag, no key of the file
                tag = str(parts.pop(0))
                path.append(tag)
                spot.model = TIER_MODELS.get(tag)
        else:
            child = spot.node.child(part)
            nested = _model_of(spot.model, part)
            if parts or nested is not None:
                spot.model = nested
            spot.secret = spot.secret or nested is SecretRef
        if child is None:
            spot.found = False
            break
        spot.node = child
        spot.broken = spot.broken or child.broken
    spot.path = ".".join(path)
    return spot


def _model_of(model: type[Model] | None, key: str) -> type[Model] | None:
    field = model.model_fields.get(key) if model else None
    candidates = (field.annotation, *get_args(field.annotation)) if field else ()
    for candidate in candidates:
        if isinstance(candidate, type) and issubclass(candidate, Model):
            return candidate
    return None


def _problem(kind: str, message: str, context: Mapping[str, Any], spot: _Spot) -> Problem:
    place, path = spot.node.place, spot.path
    if kind == "extra_forbidden":
        return Problem(spot.node.key_place, path, _unknown_key(spot))
    if kind == "missing":
        return Problem(place, path, _missing(spot))
    if kind in ("union_tag_not_found", "union_tag_invalid"):
        path = f"{path}.type"
        tag = spot.node.child("type")
        if tag is None:
            return Problem(place, path, f"missing; add type: {' or '.join(TIER_MODELS)}")
        near = did_you_mean(str(tag.value), TIER_MODELS)
        known = ", ".join(TIER_MODELS)
        return Problem(tag.place, path, f"{shown(tag)} is not a tier type ({known}){near}")
    if spot.secret:
        return Problem(place, path, _secret(kind, message))
    text = _value_problem(kind, message, context, spot)
    if spot.node.variables:
        names = ", ".join("${" + name + "}" for name in spot.node.variables)
        text += f" (the value comes from {names})"
    return Problem(place, path, text)


def _unknown_key(spot: _Spot) -> str:
    known = list(spot.model.model_fields) if spot.model else []
    near = did_you_mean(spot.key, known)
    return f"unknown key{near or '; the keys here: ' + ', '.join(known)}"


def _missing(spot: _Spot) -> str:
    return f"missing; add {spot.key}: {_example(spot) or '…'}"


def _example(spot: _Spot) -> str:
    """How a required key is written; "" for the others."""
    field = spot.model.model_fields.get(spot.key) if spot.model else None
    return flow(field.examples[0]) if field and field.is_required() and field.examples else ""


def _secret(kind: str, message: str) -> str:
    """Never with the value: people do write secrets where a reference belongs."""
    if kind in _MAPPINGS:
        return "a secret cannot stand here; write {file: PATH} or {env: NAME}"
    if kind == "string_pattern_mismatch":
        return "is not the name of a variable; letters, digits and underscores"
    if kind == "string_type":
        return "must be text"
    return message


def _value_problem(kind: str, message: str, context: Mapping[str, Any], spot: _Spot) -> str:
    node = spot.node
    if node.value is None or node.value == "":
        example = _example(spot)
        return f"is empty; give {f'a value, like {example}' if example else 'a value or remove it'}"
    if kind in _ABOUT_UNITS:
        return _unit(kind, message, node)
    if kind == "literal_error":
        return _not_a_choice(spot)
    if kind in _BOUNDS:
        name, words = _BOUNDS[kind]
        return f"{shown(node)} {words} {context[name]}"
    if kind in _INTEGERS:
        return f"{shown(node)} must be a whole number"
    if kind in _NUMBERS:
        return f"{shown(node)} must be a number, like 0.01"
    if kind in _BOOLEANS:
        return f"{shown(node)} must be true or false"
    if kind in _MAPPINGS:
        example = TIER_EXAMPLE if spot.path.startswith("tiers") else "{key: value}"
        return f"must be a mapping, like {example}"
    if kind in _LISTS:
        return f"must be a list, like [{TIER_EXAMPLE}]"
    if kind == "string_type":
        return f"{shown(node)} must be text"
    if kind in _OWN:
        return f"{shown(node)} {message}"
    return message


def _unit(kind: str, message: str, node: Node) -> str:
    if kind == "unit_type":
        return f"{message}, not {shown(node)}"
    # The message begins with the value as it was read; say so if the file has it otherwise.
    if node.written is not None and not isinstance(node.value, str):
        return f"{message} (the file says {clean(node.written)})"
    return message


def _not_a_choice(spot: _Spot) -> str:
    field = spot.model.model_fields.get(spot.key) if spot.model else None
    choices = [str(choice) for choice in get_args(field.annotation)] if field else []
    if spot.path == "version":
        unquoted = ", without quotes" if spot.node.value in choices else ""
        return f"is {shown(spot.node)}; this release reads version {', '.join(choices)}{unquoted}"
    near = did_you_mean(str(spot.node.value), choices) if isinstance(spot.node.value, str) else ""
    return f"{shown(spot.node)} is not one of {', '.join(choices)}{near}"


def shown(node: Node) -> str:
    """A value as it was read, fit for one line, and what YAML made of it if that surprises."""
    value = node.value
    if isinstance(value, dict):
        return "a mapping"
    if isinstance(value, list):
        return "a list"
    if isinstance(value, str):
        return repr(value if len(value) <= 60 else value[:60] + "…")
    if isinstance(value, bool):
        word = clean(node.written) if node.written else str(value).lower()
        return f"{word} (YAML reads it as {str(value).lower()}; for the word, use quotes)"
    if node.written is not None:
        return f"{clean(str(value))} (the file says {clean(node.written)})"
    return clean(str(value))
