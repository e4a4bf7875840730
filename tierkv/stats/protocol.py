# SPDX-License-Identifier: Apache-2.0
"""What the two ends of a stats socket say: requests and replies, one msgpack map each.

    frame    = length, 4 bytes big-endian | msgpack map
    request  = {"op": NAME, ...arguments}
    reply    = {"ok": true, "result": ...} or {"ok": false, "error": "one line with the remedy"}

    op         arguments   result
    info       -           who this is: pid, version, vllm, model, namespace, started, tiers, …
    snapshot   -           {"time", "idle", "metrics": tierkv.telemetry.counters.Snapshot}
    requests   last        the last requests, oldest first (tierkv.telemetry.requests)
    pin        what        keep chunks in DRAM
    unpin      what        let them go as others do
    purge      what, dry_run   forget chunks in all tiers

`what` is exactly one of `all: true`, `keys: [hexadecimal, ...]` and `tokens: [ids, ...]`, the
latter with `tenant` (vLLM's `cache_salt`) or without. The last three change something: they need
`stats: {control: true}` and run between two steps of the engine. Their result is {"chunks": how
many, "queued": true if the engine is idle: it is done before the engine's next lookup}.

Decoding is bounded in size and depth, and makes plain values only.
"""

from __future__ import annotations

import struct
from typing import Any

import msgpack

from tierkv.errors import TierKVError

VERSION = 1
MAX_REQUEST = 4 << 20
"""Bytes: the tokens of a long prompt."""
MAX_REPLY = 64 << 20
COMMANDS = ("pin", "unpin", "purge")
"""What changes something."""

_HEAD = struct.Struct(">I")


class StatsError(TierKVError):
    """An engine cannot be asked, or said no; the message is one line with the remedy."""


class FrameError(Exception):
    """Bytes that are no frame."""


def pack(message: dict[str, Any]) -> bytes:
    """A whole frame."""
    body: bytes = msgpack.packb(message)
    return _HEAD.pack(len(body)) + body


class Unpacker:
    """Frames out of a stream of bytes.

    Args:
        limit: bytes, of one frame at most.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._buffer = bytearray()

    def feed(self, data: bytes) -> list[dict[str, Any]]:
        """The messages that are complete now.

        Raises:
            FrameError: too long, or no msgpack map.
        """
        self._buffer += data
        messages = []
        while len(self._buffer) >= _HEAD.size:
            (length,) = _HEAD.unpack_from(self._buffer)
            if length > self._limit:
                raise FrameError(f"a frame of {length} bytes, {self._limit} are allowed")
            end = _HEAD.size + length
            if len(self._buffer) < end:
                break
            messages.append(_decode(bytes(self._buffer[_HEAD.size : end])))
            del self._buffer[:end]
        return messages


def _decode(body: bytes) -> dict[str, Any]:
    try:
        message = msgpack.unpackb(body, strict_map_key=False)
    except (ValueError, msgpack.exceptions.UnpackException) as error:
        raise FrameError(f"not msgpack: {error}") from None
    if not isinstance(message, dict) or not all(isinstance(key, str) for key in message):
        raise FrameError("not a map with names")
    return message
