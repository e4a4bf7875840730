# SPDX-License-Identifier: Apache-2.0
"""What became of the prompt tokens of single requests: `tierkv why`, and `explain` in a response.

Counters cannot answer "why was this one slow". A bounded ring of the last requests can. It holds
ids, numbers and names of tiers; no prompt, no key. It leaves the process only through the stats
socket, which is its owner's.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Any, NamedTuple

KEPT = 512
"""Requests in the ring."""


class Part(NamedTuple):
    """Some of a prompt's tokens that had the same fate.

    Attributes:
        outcome: one of `tierkv.telemetry.catalog.OUTCOMES`.
        tier: where they came from, or which tier is to blame; "none" where no tier is meant.
        reason: more exactly why; "" if the outcome says it all.
        tokens: how many.
    """

    outcome: str
    tier: str
    reason: str
    tokens: int


@dataclass(frozen=True, slots=True)
class RequestRecord:
    """One request, once the fate of its prompt is known.

    Attributes:
        request_id: the engine's.
        time: when, in seconds since 1970.
        prompt_tokens: of the prompt.
        gpu_tokens: of those, held by the engine's own prefix cache.
        parts: the others, in the order of the prompt; their tokens add up to the rest.
        lookup_seconds: from the engine's first question to the answer.
        load_seconds: from admission to the end of the load; 0.0 without one.
    """

    request_id: str
    time: float
    prompt_tokens: int
    gpu_tokens: int
    parts: tuple[Part, ...]
    lookup_seconds: float = 0.0
    load_seconds: float = 0.0

    def as_dict(self) -> dict[str, Any]:
        """Plain values, for msgpack and JSON."""
        return {
            "request_id": self.request_id,
            "time": self.time,
            "prompt_tokens": self.prompt_tokens,
            "gpu_tokens": self.gpu_tokens,
            "parts": [part._asdict() for part in self.parts],
            "lookup_seconds": round(self.lookup_seconds, 6),
            "load_seconds": round(self.load_seconds, 6),
        }


class RequestLog:
    """The last requests, oldest first. Owned by one thread."""

    def __init__(self, kept: int = KEPT) -> None:
        self._ring: deque[RequestRecord] = deque(maxlen=kept)

    def add(self, record: RequestRecord) -> None:
        self._ring.append(record)

    def copy(self) -> tuple[RequestRecord, ...]:
        """As it is now; may be given to another thread."""
        return tuple(self._ring)
