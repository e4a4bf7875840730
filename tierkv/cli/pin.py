# SPDX-License-Identifier: Apache-2.0
"""`tierkv pin`: keep a prompt's chunks in DRAM whatever else comes by."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from pathlib import Path
from typing import Annotated, Any

import typer

from tierkv.cli import looking, output
from tierkv.cli.loading import JsonOption
from tierkv.errors import TierKVError

EXAMPLE = """\
  tierkv pin system-prompt.txt --server http://localhost:8000
  tierkv pin chat.json --server http://localhost:8000 --tenant acme
  tierkv pin --key 00112233445566778899aabbccddeeff --remove"""

JSON = {
    "chunks": "how many are pinned now, or were until now",
    "held": "how many of those that were meant each tier holds, by its name",
    "queued": "true, and nothing else: the engine is idle and does it before its next request",
}

TOKENIZE_SECONDS = 30.0


def pin(
    file: Annotated[
        Path | None,
        typer.Argument(
            metavar="FILE",
            help="A prompt: text, or .json with messages as for /v1/chat/completions.",
            show_default=False,
        ),
    ] = None,
    server: Annotated[
        str,
        typer.Option("--server", metavar="URL", help="The engine's API, which tokenizes FILE."),
    ] = "http://localhost:8000",
    tenant: Annotated[
        str | None,
        typer.Option("--tenant", help="The prompt's cache_salt.", show_default=False),
    ] = None,
    key: Annotated[
        list[str] | None,
        typer.Option("--key", metavar="HEX", help="A chunk's key, as tierkv ls shows it."),
    ] = None,
    everything: Annotated[
        bool, typer.Option("--all", help="All that is in DRAM now, up to half of it.")
    ] = False,
    remove: Annotated[bool, typer.Option("--remove", help="Unpin instead.")] = False,
    pid: looking.PidOption = None,
    as_json: JsonOption = False,
) -> None:
    """Keep chunks in DRAM, or with --remove let them go again.

    Pins what is in DRAM now, at most half of it; ask the prompt once before. Pins end with the
    engine. The engine needs `stats: {control: true}` in its configuration.
    """
    from tierkv.stats.client import only_engine

    if sum((file is not None, bool(key), everything)) != 1:
        raise typer.BadParameter("say what: exactly one of FILE, --key and --all")
    what: dict[str, Any] = {"all": True}
    if key:
        what = {"keys": key}
    engine = only_engine(pid)
    try:
        if file is not None:
            tokens = tokenize(file, server, engine.info["model"])
            what = {"tokens": tokens, "tenant": tenant}
        result = engine.request("unpin" if remove else "pin", **what)
    finally:
        engine.close()
    if as_json:
        output.result_json(result)
    elif result.get("queued"):
        output.result("queued: the engine is idle and does it before its next request")
    else:
        word = "unpinned" if remove else "pinned"
        output.result(f"{result['chunks']} chunks {word}")
        if not result["chunks"] and not remove:
            output.message("none of it is in DRAM; ask the prompt once, then pin it")


def tokenize(file: Path, server: str, model: str) -> list[int]:
    """The token ids of a prompt file, as the engine's own API makes them.

    Raises:
        TierKVError: the file or the server is not what it should be.
    """
    try:
        text = file.read_text(encoding="utf-8")
        body: dict[str, Any] = {"prompt": text}
        if file.suffix == ".json":
            told = json.loads(text)
            body = {"messages": told["messages"] if isinstance(told, dict) else told}
    except (OSError, ValueError, KeyError) as error:
        raise TierKVError(f"{file}: cannot be read as a prompt ({error})") from None
    if not server.startswith(("http://", "https://")):
        raise TierKVError(f"--server {server}: give an http:// or https:// address")
    url = f"{server.rstrip('/')}/tokenize"
    request = urllib.request.Request(
        url,
        json.dumps({"model": model, **body}).encode(),
        {"Content-Type": "application/json"},
    )
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(request, timeout=TOKENIZE_SECONDS) as response:
            tokens = json.load(response)["tokens"]
    except (OSError, ValueError, KeyError, urllib.error.URLError) as error:
        raise TierKVError(f"{url}: did not tokenize {file} ({error}); is --server right?") from None
    return [int(token) for token in tokens]
