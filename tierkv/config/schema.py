# SPDX-License-Identifier: Apache-2.0
"""The JSON schema of the file, for editors; pydantic's, made to say what a file may really hold.

pydantic describes Python values. A file has written units, variables in any scalar, tiers that must
name their type, and no reason to write null. The loader remains the judge: a schema cannot know
that names are unique or that a directory exists.
"""

from __future__ import annotations

import json
from typing import Any

from tierkv.config.models import TierKVConfig
from tierkv.config.registry import TIER_MODELS
from tierkv.config.units import DURATION_FORMAT, SIZE_FORMAT, format_duration, format_size

_VARIABLE = "Variable"
_RENAMED = {"gt": "exclusiveMinimum", "ge": "minimum", "le": "maximum"}


def json_schema() -> dict[str, Any]:
    """The schema as plain data, in JSON Schema 2020-12."""
    # A copy: equal parts of pydantic's can be one object, and the parts are changed here.
    schema = json.loads(json.dumps(TierKVConfig.model_json_schema()))
    definitions = schema.pop("$defs")
    for definition in (schema, *definitions.values()):
        definition.pop("title", None)
        for name, field in definition["properties"].items():
            definition["properties"][name] = _field(field)
    for model in TIER_MODELS.values():
        definition = definitions[model.__name__]
        definition["required"] = ["type", *definition["required"]]
    schema["properties"]["tiers"]["items"].pop("discriminator", None)
    definitions[_VARIABLE] = {
        "type": "string",
        "pattern": r"\$\{",
        "description": "A string that takes the value of a variable: ${NAME} or ${NAME:-default}",
    }
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "TierKV configuration",
        **schema,
        "$defs": definitions,
    }


def schema_text() -> str:
    """The schema as the file `configs/tierkv.schema.json` has it."""
    return json.dumps(json_schema(), indent=2, ensure_ascii=False) + "\n"


def _field(field: dict[str, Any]) -> dict[str, Any]:
    field.pop("title", None)
    present = [option for option in field.pop("anyOf", []) if option != {"type": "null"}]
    for option in present:
        field.update(option)
    for ours, theirs in _RENAMED.items():
        if ours in field:
            field[theirs] = field.pop(ours)
    if field.get("default", "") is None:
        del field["default"]
    if "default" in field and field.get("format") == SIZE_FORMAT:
        field["default"] = format_size(field["default"])
    if "default" in field and field.get("format") == DURATION_FORMAT:
        field["default"] = format_duration(field["default"])
    if "const" in field:
        for key in ("type", "enum"):  # older releases of pydantic say the same twice
            field.pop(key, None)
        return field
    if field.get("type") in ("string", "integer", "number", "boolean"):
        # What describes the key stays outside; what restricts the value is one of two ways.
        about: dict[str, Any] = {
            key: field.pop(key) for key in ("description", "default", "examples") if key in field
        }
        return {**about, "anyOf": [field, {"$ref": f"#/$defs/{_VARIABLE}"}]}
    return field
