# SPDX-License-Identifier: Apache-2.0
"""`tierkv config show`: every value in effect and where it came from."""

from __future__ import annotations

from tierkv.cli import loading, output

EXAMPLE = """\
  TIERKV_TIERS__DRAM__CAPACITY=8GiB tierkv config show
  tierkv config show --config tierkv.yaml --json"""


def config_show(
    file: loading.FileArgument = None,
    config: loading.ConfigOption = None,
    as_json: loading.JsonOption = False,
) -> None:
    """Show every value in effect and its source.

    A source is file:line, a variable, or default. Secrets are shown as the references that they
    are. Values that an engine is given inline beat these; they are not known here.
    """
    from tierkv.config.values import effective_values

    loaded = loading.load(
        file, config, check_machine=False, json_list="values" if as_json else None
    )
    values = list(effective_values(loaded.config))
    if as_json:
        output.result_json(
            {
                **loading.success(loaded),
                "values": [
                    {
                        "path": item.path,
                        "value": item.value,
                        "text": item.text,
                        "source": loaded.sources[item.path],
                    }
                    for item in values
                ],
            }
        )
        return
    output.remarks(loaded.notes, loaded.warnings)
    widths = max(len(item.path) for item in values), max(len(item.text) for item in values)
    for item in values:
        source = loaded.sources[item.path]
        line = f"{item.path:<{widths[0]}}  {item.text:<{widths[1]}}  {source}"
        output.result(output.styled(line, "dim") if source == "default" else line)
