# SPDX-License-Identifier: Apache-2.0
"""Writes the reference page of the configuration from the models, so that it cannot be out of date.

python -m tierkv.config.reference > docs/reference/configuration.md
"""

from __future__ import annotations

import sys
from typing import Any

from tierkv.config.base import SecretRef
from tierkv.config.blend import BlendConfig
from tierkv.config.registry import TIER_MODELS
from tierkv.config.schema import json_schema
from tierkv.config.stats import StatsConfig
from tierkv.config.tree import flow
from tierkv.config.units import DURATION_FORMAT, DURATION_UNITS, SIZE_FORMAT, SIZE_UNITS

_HEAD = """\
# Configuration

<!-- Generated from the models. Do not edit; run:
     python -m tierkv.config.reference > docs/reference/configuration.md -->

TierKV reads one YAML file. This is a whole one:

```yaml
version: 1
tiers:
  - {{type: dram, capacity: 32GiB}}
  - {{type: disk, path: /var/lib/tierkv, capacity: 1TiB}}
```

`tierkv config init` writes a commented one, `tierkv check` validates it and looks whether this
machine can do what it asks, `tierkv config show` prints every value with its source.

## Where values come from

The file is the one named by `--config`; else, in an engine, by `config` in its inline mapping; else
by the variable `TIERKV_CONFIG`; else `./tierkv.yaml`. Without any, TierKV uses DRAM only: a quarter
of the free memory, at most 16GiB, and says so.

Each value is taken from the first of these that has it:

1. the inline mapping, in vLLM `kv_connector_extra_config`;
2. a variable, like `TIERKV_TIERS__DISK__CAPACITY=2TiB`;
3. the file;
4. the default.

**Inline.** `{{"config": "tierkv.yaml", "tiers": {{"disk": {{"capacity": "2TiB"}}}}}}` changes
single values of a file. A list, `{{"tiers": [{{"type": "dram", "capacity": "8GiB"}}]}}`, is the
whole configuration: then only a file that `config` names is read.

**Variables.** Two underscores lead one level down. Tiers are addressed by their name, which is
their type unless you give another, never by their position. A `TIERKV_` variable that means
nothing is an error in `tierkv check` and a warning in an engine. `type` and `name` of a tier
cannot be set this way.

**In strings** of the file and of the inline mapping, `${{NAME}}` and `${{NAME:-default}}` stand for
variables, the default also for empty ones; `$$` is a dollar. They are put in after the YAML was
read: a value cannot become structure.

## How values are written

- **Sizes** have a unit: {sizes}. `32G` and bare numbers are refused: 32GiB or 32GB?
- **Durations** have a unit: {durations}.
- **Paths** are absolute; `~/` is your home.
- **Secrets** are references: `{{file: PATH}}` or `{{env: NAME}}`. A secret itself is refused.
- Duplicate keys, anchors, aliases, merge keys, tags, several documents, and files larger than 1MiB
  are refused.

An error is one line, `file:line:column: key: what is wrong; what to do`, and you get all of them at
once. In it, tiers are counted from 0.
"""

_TAIL = """\
## What a request chooses for itself

In the body of a request to vLLM, under `kv_transfer_params`:

```json
{"model": "…", "prompt": "…", "kv_transfer_params": {"tierkv": {"load": true, "save": false}}}
```

| Key | Values | Default | Meaning |
|---|---|---|---|
| `load` | `true`, `false` | `true` | take this prompt's KV from the tiers |
| `save` | `true`, `false` | `true` | keep this request's KV in the tiers |
| `explain` | `true`, `false` | `false` | tell in the response what became of the prompt's \
tokens, under `kv_transfer_params`: it also tells what is cached |
| `blend` | `off`, `fast`, `balanced`, `quality` | as configured | reuse of any text in this \
request; nothing while the engine's `blend.mode` is `off` |

A value that means nothing is named in the engine's log and ignored; the request is served.

## Output for programs

`tierkv check --json` prints one object:

| Key | Value |
|---|---|
| `ok` | whether there is no problem |
| `file` | the file that was read, or null |
| `tiers` | list of `type`, `name`, `capacity_bytes` (null where the tier has none); empty unless \
`ok` |
| `problems` | list of `source` (`file`, `variable`, `inline`, `default`), `place`, `line` and \
`column` (0 outside files), `path`, `message` |
| `notes`, `warnings` | lists of sentences |

`tierkv config show --json` prints the same without `tiers`, and `values`: a list of `path`, `value`
(bytes, seconds, text or null), `text` (as a file has it) and `source`.

Both leave with 0 if all is well and 2 if there are problems.
"""


SECTIONS = {"stats": StatsConfig, "blend": BlendConfig}


def reference_text() -> str:
    """The page, Markdown."""
    schema = json_schema()
    definitions = schema["$defs"]
    parts = [
        _HEAD.format(
            sizes=", ".join(f"`{unit}`" for unit in SIZE_UNITS),
            durations=", ".join(f"`{unit}`" for unit in DURATION_UNITS),
        ),
        "## Top level\n",
        _table(schema, definitions),
    ]
    for section, model in SECTIONS.items():
        definition = definitions[model.__name__]
        parts += [
            f"## `{section}`\n",
            definition["description"].splitlines()[0] + "\n",
            _table(definition, definitions),
        ]
    for kind, model in TIER_MODELS.items():
        definition = definitions[model.__name__]
        parts += [
            f"## Tier `{kind}`\n",
            definition["description"].splitlines()[0] + "\n",
            _table(definition, definitions),
        ]
    parts.append(_TAIL)
    return "\n".join(parts)


def _table(definition: dict[str, Any], definitions: dict[str, Any]) -> str:
    rows = ["| Key | Values | Default | Meaning |", "|---|---|---|---|"]
    required = definition.get("required", [])
    for key, field in definition["properties"].items():
        values = _values(field, definitions)
        default = "required" if key in required else _default(field)
        rows.append(f"| `{key}` | {values} | {default} | {_cell(field['description'])}. |")
    return "\n".join(rows) + "\n"


def _default(field: dict[str, Any]) -> str:
    return f"`{flow(field['default'])}`" if "default" in field else "not set"


def _values(field: dict[str, Any], definitions: dict[str, Any]) -> str:
    if "const" in field:
        return f"`{field['const']}`"
    if field.get("type") == "array":
        return "list of tiers"
    if "$ref" in field:
        name = field["$ref"].rpartition("/")[2]
        if name == SecretRef.__name__:
            return "`{file: PATH}` or `{env: NAME}`"
        return "mapping of " + ", ".join(f"`{key}`" for key in definitions[name]["properties"])
    kind = field["anyOf"][0]
    if "enum" in kind:
        return ", ".join(f"`{choice}`" for choice in kind["enum"])
    if kind["type"] == "boolean":
        return "`true`, `false`"
    if kind["type"] in ("integer", "number"):
        return f"{kind['minimum']} to {kind['maximum']}"
    return {SIZE_FORMAT: "size", DURATION_FORMAT: "duration", "path": "path"}.get(
        kind.get("format", ""), "text"
    )


def _cell(text: str) -> str:
    return text.replace("|", "\\|").rstrip(".")


if __name__ == "__main__":
    sys.stdout.write(reference_text())
