# SPDX-License-Identifier: Apache-2.0
"""`tierkv simulate`: how much DRAM and disk would pay off for prompts like these."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tierkv.cli import loading, output, progress

if TYPE_CHECKING:
    from tierkv.simulate.capacity import Capacity, Scale

EXAMPLE = """\
  tierkv simulate trace.jsonl --model /models/Llama-3.1-8B
  tierkv simulate trace.jsonl --bytes-per-token 131072 --dram 64GiB,256GiB --disk none,4TiB
  tierkv simulate trace.jsonl --dram 1Mtokens,8Mtokens --disk none --html sizes.html"""


class Write(StrEnum):
    """When a chunk is written to disk."""

    THROUGH = "through"
    ON_REUSE = "on_reuse"


def simulate(
    trace: Annotated[
        Path,
        typer.Argument(
            metavar="TRACE",
            readable=False,  # the reader says more about a file that cannot be read
            help="Prompts, one JSON object a line, with hash_ids and input_length.",
        ),
    ],
    block_tokens: Annotated[
        int,
        typer.Option("--block-tokens", min=1, help="Tokens of one hash id of the trace."),
    ] = 512,
    bytes_per_token: Annotated[
        int | None,
        typer.Option(
            "--bytes-per-token",
            min=1,
            help="Bytes of KV a token of the model takes, all layers. [default: from --model]",
            show_default=False,
        ),
    ] = None,
    model: Annotated[
        Path | None,
        typer.Option("--model", metavar="DIR", help="A model's directory; its config.json is read"),
    ] = None,
    dram: Annotated[
        str,
        typer.Option(
            "--dram",
            metavar="LIST",
            help="DRAM capacities, like 64GiB,256GiB or 4Mtokens. [default: by the trace]",
            show_default=False,
        ),
    ] = "",
    disk: Annotated[
        str,
        typer.Option(
            "--disk",
            metavar="LIST",
            help="Disk capacities, like none,4TiB. [default: none, and one by the trace]",
            show_default=False,
        ),
    ] = "",
    policies: Annotated[
        str, typer.Option("--policies", metavar="LIST", help="Eviction policies of both tiers.")
    ] = "lru,s3fifo",
    write: Annotated[
        Write, typer.Option("--write", help="When a chunk goes to disk, as in the configuration.")
    ] = Write.THROUGH,
    as_json: loading.JsonOption = False,
    html: Annotated[
        Path | None,
        typer.Option("--html", metavar="FILE", help="Also write a page with a plot."),
    ] = None,
) -> None:
    """Replay a trace through the real index and policies, and print the hit rate by capacity.

    No KV is moved and no engine is needed. The hit rate is hit tokens ÷ prompt tokens with an empty
    prefix cache in the engine. Capacities in bytes need --model or --bytes-per-token.
    """
    from tierkv.simulate.capacity import Scale
    from tierkv.simulate.capacity import bytes_per_token as of_model
    from tierkv.simulate.document import build
    from tierkv.simulate.sweep import combinations
    from tierkv.simulate.sweep import simulate as run
    from tierkv.simulate.trace import read_trace

    if html is not None:
        from tierkv.report.html import check_page, write_page

        check_page(html)
    if model is not None and bytes_per_token is not None:
        raise typer.BadParameter("give --model or --bytes-per-token, not both")
    scale = Scale(block_tokens, of_model(model) if model is not None else bytes_per_token)
    names = _policies(policies)
    prompts = read_trace(trace, block_tokens)
    drams, disks = scale.sweep(prompts.distinct_chunks)
    wanted = combinations(
        names,
        _capacities("--disk", disk, scale) if disk else [None, *disks],
        _drams(dram, scale) if dram else drams,
    )
    if not wanted:
        raise typer.BadParameter("--dram and --disk: no disk is larger than the DRAM above it")
    with progress.bar("replaying", len(wanted)) as step:
        result = run(prompts, scale, wanted, write.value, lambda: step(1))
    if html is not None:
        write_page(html, build(result, pictures=True))
    if as_json:
        output.result_json(result)
    else:
        from tierkv.report.console import make_console, show

        show(build(result, pictures=False), make_console())
    if html is not None:
        output.message(f"Page: {html}")


def _capacities(option: str, text: str, scale: Scale) -> list[Capacity | None]:
    """A list as written; None for `none`."""
    found: list[Capacity | None] = []
    for part in text.split(","):
        try:
            found.append(None if part.strip() in ("none", "0") else scale.parse(part))
        except ValueError as error:
            raise typer.BadParameter(f"{option}: {error}") from None
    return found


def _drams(text: str, scale: Scale) -> list[Capacity]:
    found = [capacity for capacity in _capacities("--dram", text, scale) if capacity is not None]
    if not found:
        raise typer.BadParameter("--dram: at least one capacity is needed")
    return found


def _policies(text: str) -> list[str]:
    from tierkv.policies import make_policy

    names = list(dict.fromkeys(name.strip() for name in text.split(",")))
    for name in names:
        make_policy(name, 1)  # ConfigError if there is none
    return names
