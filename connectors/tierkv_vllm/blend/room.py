# SPDX-License-Identifier: Apache-2.0
"""Which prompts may begin to read their donors into DRAM, where it is too small for all at once.

All or nothing, and one after the other: a blend has no use for a part of its donors, and prompts
that held some while they wait for room would wait for each other.

Thread: vLLM's scheduler thread.
"""

from __future__ import annotations

from collections.abc import Iterable

from tierkv.keys import Chunk
from tierkv.store import Store


class Room:
    """See the module.

    Args:
        store: opened.
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        # Requests that wait, the first of them first.
        self._line: dict[str, None] = {}
        # By request: chunks that it may read and had no slot yet when it began.
        self._promised: dict[str, int] = {}

    def ask(self, request_id: str, donors: Iterable[Chunk]) -> bool | None:
        """Whether there is room for all of these; if so, the caller loads them at once.

        Returns:
            None: there never will be.
        """
        line = self._line
        ahead = next(iter(line), request_id) != request_id
        if ahead and request_id in line:
            return False  # not counted again in every step, however many wait
        demand = self._store.demand(donors)
        if demand.reads > demand.most:
            line.pop(request_id, None)
            return None
        promised = sum(self._promised.values())
        if demand.reads and (ahead or demand.reads + promised > demand.room):
            line[request_id] = None
            return False
        line.pop(request_id, None)
        return True

    def begun(self, request_id: str, donors: Iterable[Chunk]) -> None:
        """They are being loaded: what of them has no slot yet is promised."""
        reads = self._store.demand(donors).reads
        if reads:
            self._promised[request_id] = reads

    def done(self, request_id: str) -> None:
        """All of them are there, or the request does not want them any more. Idempotent."""
        self._line.pop(request_id, None)
        self._promised.pop(request_id, None)

    def __len__(self) -> int:
        """Requests that wait or were promised something."""
        return len(self._line.keys() | self._promised.keys())
