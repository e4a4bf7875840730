# SPDX-License-Identifier: Apache-2.0
"""`tierkv check`: is this configuration valid, and can this machine do what it asks?"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from tierkv.cli import loading, output

if TYPE_CHECKING:
    from tierkv.config import TierConfig

EXAMPLE = """\
  tierkv check tierkv.yaml
  tierkv check --no-machine configs/local-disk.yaml"""


def check(
    file: loading.FileArgument = None,
    config: loading.ConfigOption = None,
    machine: Annotated[
        bool,
        typer.Option(
            "--machine/--no-machine",
            help="Also check room, owners and modes on this machine.",
        ),
    ] = True,
    as_json: loading.JsonOption = False,
    schema: Annotated[
        bool, typer.Option("--schema", help="Print the JSON schema of the file, and leave.")
    ] = False,
) -> None:
    """Validate a configuration, and whether this machine can do it.

    Every problem is one line with its place and its remedy. Exit code 0 if all is well, 2 if not.
    Changes nothing.
    """
    if schema:
        from tierkv.config.schema import schema_text

        output.result(schema_text().rstrip("\n"))
        return
    loaded = loading.load(
        file, config, check_machine=machine, json_list="tiers" if as_json else None
    )
    tiers = loaded.config.tiers
    if as_json:
        output.result_json(
            {
                **loading.success(loaded),
                "tiers": [
                    {
                        "type": tier.type,
                        "name": tier.name,
                        "capacity_bytes": getattr(tier, "capacity", None),
                    }
                    for tier in tiers
                ],
            }
        )
        return
    output.remarks(loaded.notes, loaded.warnings)
    name = loaded.file or "the default configuration"
    output.result(f"{name}: {output.styled('ok', 'green')}, {'; '.join(map(_tier, tiers))}")


def _tier(tier: TierConfig) -> str:
    from tierkv.config.units import format_size

    label = tier.name if tier.name == tier.type else f"{tier.name} ({tier.type})"
    capacity = getattr(tier, "capacity", None)  # a server knows its own
    size = "" if capacity is None else f" {format_size(capacity)}"
    place = getattr(tier, "path", None) or getattr(tier, "url", None)
    return label + size + (f" in {place}" if place else "")
