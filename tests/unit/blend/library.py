# SPDX-License-Identifier: Apache-2.0
"""Donors as ordinary serving leaves them: whole sequences, cut into chunks of their chain."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

import numpy as np

from tierkv.blend.donors import DonorIndex
from tierkv.blend.match import Run
from tierkv.keys import ChunkChain, Namespace, Scope, TokenIds

CHUNK = 64
NAMESPACE = Namespace({"model": "test"})
SCOPE = NAMESPACE.scope(salt=None)
SEED = b"12345678"


def words(seed: int, length: int, vocabulary: int = 50_000) -> list[int]:
    """Text that shares nothing with other seeds'."""
    rng = Random(seed)
    return [rng.randrange(vocabulary) for _ in range(length)]


def ids(tokens: Sequence[int]) -> TokenIds:
    return np.asarray(tokens, dtype=np.int32)


class Library:
    """An index, and all that was put into it, kept apart to compare with.

    Attributes:
        sequences: token lists by the key of each of their chunks, with the chunk's start.
    """

    def __init__(self, chunk: int = CHUNK, max_chunks: int = 10_000) -> None:
        self.chunk = chunk
        self.index = DonorIndex(chunk, max_chunks, SEED)
        self.sequences: dict[bytes, tuple[list[int], int]] = {}

    def serve(self, tokens: Sequence[int], scope: Scope = SCOPE) -> ChunkChain:
        """A prompt was computed and stored."""
        chain = ChunkChain(scope, self.chunk)
        chain.extend(list(tokens))
        self.index.add(chain.chunks, 0, scope)
        for number, chunk in enumerate(chain.chunks):
            self.sequences[chunk.key] = (list(tokens), number * self.chunk)
        return chain

    def check(self, prompt: Sequence[int], runs: Sequence[Run], begin: int = 0) -> None:
        """Ascending, disjoint, and every token is the donor's own at the shifted place."""
        behind = begin
        for run in runs:
            assert behind <= run.begin < run.end <= len(prompt)
            behind = run.end
            held: dict[int, int] = {}
            for donor in run.donors:
                tokens, start = self.sequences[donor.chunk.key]
                assert donor.start == start
                held |= {start + i: tokens[start + i] for i in range(self.chunk)}
            # The donors stand side by side in one sequence.
            starts = [donor.start for donor in run.donors]
            assert starts == list(
                range(starts[0], starts[0] + len(starts) * self.chunk, self.chunk)
            )
            for place in range(run.begin, run.end):
                assert held[place - run.shift] == prompt[place], place
