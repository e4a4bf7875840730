# SPDX-License-Identifier: Apache-2.0
"""What a user may have the running engine do through its stats socket: pin, unpin, purge.

What is meant is told as in `tierkv.stats.protocol`. Everything was sent by a process of the same
user, and is still checked: a bad value is an answer, never an exception in the scheduler.

Threads. Called on vLLM's scheduler thread, between two steps.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tierkv.keys import KEY_BYTES, ChunkChain, Namespace
from tierkv.store import Store

MAX_TOKENS = 1 << 20


class Control:
    """See the module.

    Args:
        reset: forgets everything, in the store and in what is under way.
    """

    def __init__(self, store: Store, namespace: Namespace, reset: Callable[[], None]) -> None:
        self._store = store
        self._namespace = namespace
        self._reset = reset

    def run(self, op: str, arguments: dict[str, Any]) -> dict[str, Any]:
        """Do one command.

        Raises:
            ValueError: it cannot be done; one line.
        """
        keys = self._keys(arguments)
        if op == "pin":
            return {"chunks": self._store.pin(keys), "held": self._store.held(keys)}
        if op == "unpin":
            return {"chunks": self._store.unpin(keys), "held": self._store.held(keys)}
        if op != "purge":
            raise ValueError(f"{op}: unknown command")
        held = self._store.held(keys)
        if not arguments.get("dry_run", False):
            if keys is None:
                self._reset()
            else:
                self._store.forget(keys)
        return {"chunks": max(held.values()), "held": held}

    def _keys(self, arguments: dict[str, Any]) -> list[bytes] | None:
        """The keys that are meant; None means all."""
        given = [name for name in ("all", "keys", "tokens") if arguments.get(name)]
        if len(given) != 1:
            raise ValueError("say what: exactly one of all, keys and tokens")
        if given == ["all"]:
            return None
        if given == ["keys"]:
            return _parsed(arguments["keys"])
        tokens, tenant = arguments["tokens"], arguments.get("tenant")
        if (
            not isinstance(tokens, list)
            or len(tokens) > MAX_TOKENS
            or not all(isinstance(token, int) and 0 <= token < 1 << 31 for token in tokens)
        ):
            raise ValueError(f"tokens: must be a list of at most {MAX_TOKENS} token ids")
        if tenant is not None and not isinstance(tenant, str):
            raise ValueError("tenant: must be text")
        size = self._store.layout.chunk_tokens
        chain = ChunkChain(self._namespace.scope(tenant=tenant), size)
        chain.extend(tokens)
        if not chain.chunks:
            raise ValueError(f"{len(tokens)} tokens are less than one chunk of {size}")
        return [chunk.key for chunk in chain.chunks]


def _parsed(texts: Any) -> list[bytes]:
    try:
        keys = [bytes.fromhex(text) for text in texts]
    except (TypeError, ValueError):
        raise ValueError("keys: must be a list of hexadecimal keys, see tierkv ls") from None
    if any(len(key) != KEY_BYTES for key in keys):
        raise ValueError(f"keys: a key has {2 * KEY_BYTES} hexadecimal digits")
    return keys
