# SPDX-License-Identifier: Apache-2.0
"""`tierkv why`: what became of the prompt tokens of the last requests, and why."""

from __future__ import annotations

import time
from typing import Annotated, Any

import typer

from tierkv.cli import looking, output
from tierkv.cli.loading import JsonOption

EXAMPLE = """\
  tierkv why
  tierkv why --last 1 --json"""

JSON = {
    "pid": "of the engine",
    "requests": "oldest first: `request_id`, `time`, `prompt_tokens`, `gpu_tokens`, "
    "`lookup_seconds`, `load_seconds`, and `parts`: list of `outcome`, `tier`, `reason`, `tokens`",
}


def why(
    last: Annotated[
        int, typer.Option("--last", "-n", min=1, max=512, help="How many requests.")
    ] = 20,
    pid: looking.PidOption = None,
    as_json: JsonOption = False,
) -> None:
    """Tell for each of the last requests what hit, in which tier, and why the rest did not.

    An engine remembers its last 512 requests. No prompt is kept.
    """
    from tierkv.stats.client import only_engine

    engine = only_engine(pid)
    try:
        requests = engine.request("requests", last=last)
    finally:
        engine.close()
    if as_json:
        output.result_json({"pid": engine.info["pid"], "requests": requests})
        return
    if not requests:
        output.message("no request yet; send one and ask again")
        return
    for number, request in enumerate(requests):
        if number:
            output.result("")
        for line in lines(request):
            output.result(line)


def lines(request: dict[str, Any]) -> list[str]:
    """One request: a line for it, and one for each fate that its tokens had."""
    from tierkv.cli import numbers
    from tierkv.cli.top_text import told

    total = request["prompt_tokens"]
    when = time.strftime("%H:%M:%S", time.localtime(request["time"]))
    name = "".join(char if char.isprintable() else "?" for char in request["request_id"])
    head = output.styled(f"{when}  {name}", "bold")
    waited = numbers.seconds(request["lookup_seconds"])
    loaded = numbers.seconds(request["load_seconds"])
    rows = [f"{head}  {total} prompt tokens, lookup {waited}, load {loaded}"]

    def row(tokens: int, what: str) -> None:
        rows.append(f"  {tokens:>8}  {100 * tokens / max(1, total):5.1f}%  {what}")

    if request["gpu_tokens"]:
        row(request["gpu_tokens"], "gpu: the engine's own prefix cache")
    for part in request["parts"]:
        outcome, tier = part["outcome"], part["tier"]
        if outcome == "hit":
            approximate = ", text from another place" if part["reason"] == "any_text" else ""
            row(part["tokens"], f"hit: {tier}{approximate}")
        elif outcome == "tail":
            row(part["tokens"], "tail: less than a chunk, or the last token")
        elif outcome == "recomputed":
            row(part["tokens"], "recomputed: between and inside the reused text, to repair it")
        elif outcome == "miss":
            row(part["tokens"], f"miss: {told(outcome, part['reason'], tier)}")
        else:
            row(part["tokens"], told(outcome, part["reason"], tier))
    return rows
