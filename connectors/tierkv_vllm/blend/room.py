# SPDX-License-Identifier: Apache-2.0
"""Which prompts may begin to read their donors into DRAM, where it is too small for all at once.

All or nothing, and one after the other: a blend has no use for a part of its donors, and prompts
that held some while they wait for room would wait for each other. What they do hold is the exact
beginning that they have found: if many of those fill DRAM, the first in the line waits in vain, up
to its deadline.

Thread: vLLM's scheduler thread.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from enum import Enum

from tierkv.keys import Chunk
from tierkv.store import LoadTicket, Store


class Answer(Enum):
    """Of `Room.ask`."""

    NOW = 0
    LATER = 1
    NEVER = 2
    """They do not fit, whoever lets go of what."""


class Room:
    """See the module.

    Args:
        store: opened.
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        # Requests that wait, the first of them first, each with a chunk that it lacks, if known.
        self._line: dict[str, Chunk | None] = {}
        # Loads that may not have taken all the slots yet that they were granted.
        self._granted: dict[str, Sequence[LoadTicket]] = {}

    def ask(
        self, request_id: str, donors: Callable[[], Iterable[Chunk]], own: Sequence[Chunk]
    ) -> Answer:
        """Whether there is room for all of these; then the caller loads them at once.

        Args:
            donors: gives the chunks.
            own: chunks that the request holds in any case.
        """
        line = self._line
        ahead = next(iter(line), request_id) != request_id
        lacked = line.get(request_id)
        if ahead and lacked is not None and self._store.demand([lacked]).missing:
            return Answer.LATER  # not all counted again in every step, however many wait
        demand = self._store.demand(donors(), own)
        if demand.reads > demand.most:
            return Answer.NEVER
        if demand.missing and (ahead or demand.reads + self._promised() > demand.room):
            lacking = set(demand.missing)
            line[request_id] = next(chunk for chunk in donors() if chunk.key in lacking)
            return Answer.LATER
        line.pop(request_id, None)
        return Answer.NOW

    def _promised(self) -> int:
        return sum(ticket.unclaimed for those in self._granted.values() for ticket in those)

    def wants_others(self, request_id: str) -> None:
        """The request's donors are others from now on; it keeps its place, if it has one."""
        if request_id in self._line:
            self._line[request_id] = None

    def granted(self, request_id: str, tickets: Sequence[LoadTicket]) -> None:
        """The loads that were begun upon `Answer.NOW`."""
        self._granted[request_id] = tickets

    def done(self, request_id: str) -> None:
        """All of them are there, or the request does not want them any more. Idempotent."""
        self._line.pop(request_id, None)
        self._granted.pop(request_id, None)

    def __len__(self) -> int:
        """Requests that wait or are being read for."""
        return len(self._line.keys() | self._granted.keys())
