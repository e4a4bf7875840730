# SPDX-License-Identifier: Apache-2.0
"""`tierkv warm`: send prompts through a running engine, to have their KV stored."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tierkv.cli import columns, loading, output, progress
from tierkv.errors import ConfigError, TierKVError

if TYPE_CHECKING:
    from tierkv.warm.sending import Report

EXAMPLE = """\
  tierkv warm prompts.txt
  tierkv warm chats.jsonl --url http://gpu-1:8000 --concurrency 16
  cat manual.txt | tierkv warm - --whole"""

JSON = {
    "ok": "whether all were answered",
    "prompts": "that were answered",
    "prompt_tokens, cached_tokens": "of those, as the server counts; cached ones were there",
    "seconds": "from the first request to the last answer",
    "failures": "list of `line` (of the file) and `reason`",
}

MOST_SHOWN = 10
"""Failures told one by one."""


def warm(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="Prompts; - is stdin.")],
    url: Annotated[
        str, typer.Option("--url", help="Where the engine's OpenAI API is.")
    ] = "http://localhost:8000",
    model: Annotated[
        str | None,
        typer.Option("--model", help="As the engine serves it.  [default: the first it lists]"),
    ] = None,
    concurrency: Annotated[
        int, typer.Option("--concurrency", min=1, max=1024, help="Requests at once.")
    ] = 4,
    whole: Annotated[
        bool, typer.Option("--whole", help="The file is one prompt, not one a line.")
    ] = False,
    salt: Annotated[
        str | None,
        typer.Option("--salt", help="cache_salt of the requests: the tenant to warm for."),
    ] = None,
    api_key: Annotated[
        str,
        typer.Option(
            "--api-key-env", metavar="NAME", help="Variable that holds the API key, if one is set."
        ),
    ] = "OPENAI_API_KEY",
    timeout: Annotated[
        float, typer.Option("--timeout", min=1, help="Seconds for each request.")
    ] = 600.0,
    as_json: loading.JsonOption = False,
) -> None:
    """Fill a cache: send prompts to a running engine.

    Each is sent for a single token. FILE has one prompt a line. A line that is a JSON object is a
    request of the OpenAI API: with "messages" it is a chat, with "prompt" (text or token ids) a
    completion; other fields are sent along, but for max_tokens, which is 1. Exit code 1 if a
    request failed.
    """
    try:
        from tierkv.warm import prompts, sending
    except ModuleNotFoundError as missing:
        if missing.name != "httpx":
            raise
        raise TierKVError("warm needs httpx; run: pip install 'tierkv[cli]'") from missing
    requests = prompts.read(file, whole=whole)
    if not requests:
        raise ConfigError(f"{file}: no prompt in it; write one a line")
    target = sending.Target(url, os.environ.get(api_key, ""), timeout)
    with sending.Sender(target) as sender:
        served = model or sender.first_model()
        bodies = [request.body(served, salt) for request in requests]
        with progress.bar("warming", len(bodies)) as done:
            report = sender.send_all(bodies, concurrency, done)
    _print(report, [request.line for request in requests], as_json)
    if report.failures:
        raise typer.Exit(1)


def _print(report: Report, lines: list[int], as_json: bool) -> None:
    rate = report.prompt_tokens / report.seconds if report.seconds else 0.0
    if as_json:
        output.result_json(
            {
                "ok": not report.failures,
                "prompts": report.prompts,
                "prompt_tokens": report.prompt_tokens,
                "cached_tokens": report.cached_tokens,
                "seconds": round(report.seconds, 3),
                "failures": [
                    {"line": lines[number], "reason": reason} for number, reason in report.failures
                ],
            }
        )
        return
    for number, reason in report.failures[:MOST_SHOWN]:
        output.message(f"line {lines[number]}: {reason}")
    if len(report.failures) > MOST_SHOWN:
        output.message(f"… and {len(report.failures) - MOST_SHOWN} more failures")
    cached = f" ({report.cached_tokens:,} of them cached)" if report.cached_tokens else ""
    output.result(
        f"{columns.count(report.prompts, 'prompt')}, "
        f"{columns.count(report.prompt_tokens, 'token')}{cached} in {report.seconds:.1f} s, "
        f"{rate:,.0f} tokens/s, {columns.count(len(report.failures), 'failure')}"
    )
