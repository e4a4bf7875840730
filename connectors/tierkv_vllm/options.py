# SPDX-License-Identifier: Apache-2.0
"""What one request may choose for itself, through vLLM's `kv_transfer_params`.

    {"kv_transfer_params": {"tierkv": {"load": false, "save": false}}}

A bad value never fails the request: it is named in the log and ignored.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from tierkv.telemetry.requests import RequestRecord

NAME = "tierkv"
BLEND_MODES = ("off", "fast", "balanced", "quality")


@dataclass(frozen=True, slots=True)
class RequestOptions:
    """Choices of one request.

    Attributes:
        load: take this prompt's KV from the tiers.
        save: keep this request's KV in the tiers.
        explain: tell in the response which tiers gave what, and why the rest was no hit. Off by
            default: it tells a tenant what is cached.
        blend: how text that was cached in another place is reused for this request: "off" for exact
            KV only, or a mode. None: as the engine's configuration says; where that says "off",
            nothing changes it.
    """

    load: bool = True
    save: bool = True
    explain: bool = False
    blend: str | None = None


def parse(params: Mapping[str, Any] | None) -> tuple[RequestOptions, list[str]]:
    """Read the request's options.

    Returns:
        The options, and one message for each value that was ignored.
    """
    raw = (params or {}).get(NAME)
    if raw is None:
        return RequestOptions(), []
    if not isinstance(raw, Mapping):
        problem = (
            f'kv_transfer_params.{NAME}: expected an object like {{"load": true, "save": true}}, '
            f"not {type(raw).__name__}; ignored"
        )
        return RequestOptions(), [problem]
    known = [f.name for f in fields(RequestOptions)]
    accepted: dict[str, Any] = {}
    problems = []
    for name, value in raw.items():
        where = f"kv_transfer_params.{NAME}.{str(name)[:40]}"
        if name not in known:
            problems.append(f"{where}: unknown; known are {', '.join(known)}; ignored")
        elif name == "blend":
            if value in BLEND_MODES:
                accepted[name] = value
            else:
                expected = ", ".join(BLEND_MODES)
                problems.append(f"{where}: {str(value)[:40]!r} is not one of {expected}; ignored")
        elif not isinstance(value, bool):
            problems.append(f"{where}: expected true or false, not {str(value)[:40]!r}; ignored")
        else:
            accepted[name] = value
    return RequestOptions(**accepted), problems


def explanation(record: RequestRecord | None) -> dict[str, Any] | None:
    """The `kv_transfer_params` of a response: what became of the prompt; None before that is known.

    The request id stays out: the response has its own.
    """
    if record is None:
        return None
    told = record.as_dict()
    del told["request_id"], told["time"]
    return {NAME: told}
