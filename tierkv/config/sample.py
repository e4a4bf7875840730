# SPDX-License-Identifier: Apache-2.0
"""The commented file of `tierkv config init`, written from the models.

What is needed to start stands there; every other key stands behind a `#`, with its meaning and its
default, or an example if it has none.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterator
from typing import Any

from tierkv.config.base import Model
from tierkv.config.models import TierKVConfig
from tierkv.config.registry import TIER_MODELS
from tierkv.config.schema import json_schema
from tierkv.config.tree import flow

_WIDTH = 96
_HEAD = """\
# TierKV configuration. A # right before a key, like #save, hides a default, or an example where
# there is none: take the # away to change it. Sizes and durations have units (32GiB, 50ms).
# 'tierkv check' validates this file, 'tierkv config show' prints what is in effect.
"""


def sample_text(dram_capacity: str) -> str:
    """The file's content.

    Args:
        dram_capacity: written size of the DRAM tier, the one value that depends on the machine.
    """
    schema = json_schema()
    definitions = schema["$defs"]
    lines = [_HEAD, "version: 1", ""]
    for key in TierKVConfig.model_fields:
        if key not in ("version", "tiers"):
            lines += _field(TierKVConfig, key, schema["properties"][key], active=False)
            lines.append("")
    lines += _comment(schema["properties"]["tiers"]["description"])
    lines.append("tiers:")
    for kind, model in TIER_MODELS.items():
        properties = definitions[model.__name__]["properties"]
        tier = [f"- type: {kind}"]
        for key in sorted(properties, key=lambda name, model=model: not _needed(model, name)):  # type: ignore[misc]
            if key != "type":
                example = dram_capacity if (kind, key) == ("dram", "capacity") else ""
                tier += (
                    "  " + line
                    for line in _field(
                        model, key, properties[key], active=_needed(model, key), example=example
                    )
                )
        lines += ("  " + line for line in _comment(definitions[model.__name__]["description"]))
        # Only memory is there for certain; the other tiers are behind a # as a whole.
        lines += ("  " + ("" if kind == "dram" else "#") + line for line in tier)
        lines.append("")
    return "\n".join(lines[:-1]) + "\n"


def _needed(model: type[Model], key: str) -> bool:
    return model.model_fields[key].is_required()


def _field(
    model: type[Model], key: str, field: dict[str, Any], *, active: bool, example: str = ""
) -> Iterator[str]:
    examples = model.model_fields[key].examples or ["…"]
    value = example or field.get("default", examples[0])
    if isinstance(value, dict):
        value = {name: item for name, item in value.items() if item is not None}
    yield from _comment(field["description"])
    yield f"{'' if active else '#'}{key}: {flow(value)}"


def _comment(text: str) -> list[str]:
    return ["# " + line for line in textwrap.wrap(" ".join(text.split()), _WIDTH)]
