# SPDX-License-Identifier: Apache-2.0
"""Keep approximate KV out of vLLM's own prefix cache.

vLLM enters a request's blocks into its prefix cache under `request.block_hashes`, which promise
exact KV. From the first block with an approximate token on, they are replaced by hashes that nobody
else can ask for; what follows chains from the last one, so all that is computed later is private
too. The request itself may find its own blocks again, after a preemption.
"""

from __future__ import annotations

import secrets
from dataclasses import dataclass
from hashlib import sha256
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vllm.v1.request import Request


@dataclass(frozen=True, slots=True)
class Taint:
    """What was replaced.

    Attributes:
        first: index of the first hash that was.
        originals: from there on.
    """

    first: int
    originals: tuple[bytes, ...]

    @classmethod
    def put(cls, request: Request, first: int) -> Taint:
        """Replace the hashes of a request from block `first` on, before vLLM publishes any."""
        hashes = request.block_hashes
        originals = tuple(hashes[first:])
        nonce = secrets.token_bytes(16)
        for index, original in enumerate(originals, first):
            hashes[index] = type(original)(sha256(nonce + original).digest()[: len(original)])
        return cls(first, originals)

    def lift(self, request: Request) -> None:
        """Put the originals back: the load failed, and nothing was published meanwhile."""
        hashes: list[Any] = request.block_hashes
        hashes[self.first : self.first + len(self.originals)] = self.originals
