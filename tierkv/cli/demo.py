# SPDX-License-Identifier: Apache-2.0
"""`tierkv demo`: the main job with a real model and a real server, measured on this machine."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from tierkv.cli import output
from tierkv.errors import TierKVError

EXAMPLE = """\
  tierkv demo --quick
  tierkv demo --json demo.json --html demo.html
  tierkv demo --keep --port 8000"""

NEEDS = {"httpx", "jinja2", "matplotlib", "rich"}
"""What the extra `demo` brings and this process imports."""


def demo(
    quick: Annotated[
        bool, typer.Option("--quick", help="Fewer documents and repeats: two minutes.")
    ] = False,
    json: Annotated[
        Path | None, typer.Option("--json", metavar="FILE", help="Write the result as JSON.")
    ] = None,
    html: Annotated[
        Path | None, typer.Option("--html", metavar="FILE", help="Write the result as a page.")
    ] = None,
    model: Annotated[
        Path | None,
        typer.Option("--model", metavar="DIR", help="A local model instead of SmolLM2-135M."),
    ] = None,
    keep: Annotated[
        bool, typer.Option("--keep", help="Leave the last server running; says how to talk to it.")
    ] = False,
    port: Annotated[
        int | None,
        typer.Option("--port", min=1, max=65535, help="Of the TierKV server; default: a free one."),
    ] = None,
    plain: Annotated[bool, typer.Option("--plain", help="No bars, no colour.")] = False,
) -> None:
    """Serve a small model with and without TierKV, and compare the time to the first token.

    Starts `vllm serve`, asks about long documents in five phases (recomputing, vLLM's own prefix
    cache, TierKV cold, from DRAM, and from disk after a restart), and checks that the answers are
    the same, token for token. About six minutes on two cores. Everything it makes lies in
    $TIERKV_CACHE, by default ~/.cache/tierkv. Exit code 1 if an answer differs or a hit is missing.
    """
    try:
        from tierkv.demo.run import Options, run_demo
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] not in NEEDS:
            raise
        raise TierKVError(
            f"the demo needs {error.name}; run: pip install 'tierkv[demo]'"
        ) from error
    options = Options(quick, model, json, html, keep, port, plain)
    if not run_demo(options):
        output.message("tierkv: the demo failed: see FAILED above")
        raise typer.Exit(1)
