# SPDX-License-Identifier: Apache-2.0
"""Which stored chunks can lend their KV: the index that matching asks.

A donor is a chunk that ordinary serving stored, in the context in which it was computed; nothing is
stored a second time for this. The index only remembers what was stored. Whether a tier still has
it is asked when a match is made, so evictions need no notice here; the index itself is bounded
and forgets what was found or added longest ago.

Tenants never meet: a window hashes differently in each scope, and a donor counts only if the
prompt's text has its content key, which holds the scope.

Thread: the scheduler's.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from tierkv.blend.fingerprints import Fingerprints, Hashes
from tierkv.chains import below
from tierkv.keys import Chunk, Scope, TokenIds

_Key = TypeVar("_Key", bytes, int)

MAX_VARIANTS = 4
"""Donors of the same text in other contexts that are kept; the oldest makes room."""
FILTER_SLOTS_PER_CHUNK = 32
"""Of the filter in front of the index: about 3 % of the windows that match nothing pass it."""
_MIN_FILTER_BITS = 16
HASHED = 1024
"""Chunks that are hashed at once: 64 times as many positions make a few MiB of arrays."""


@dataclass(frozen=True, slots=True, eq=False)
class Donor:
    """One stored chunk.

    Attributes:
        chunk: its keys and text.
        start: position of its first token in the sequence in which it was computed.
        tokens: int32 [chunk tokens].
        fingerprint: of its text in its scope.
    """

    chunk: Chunk
    start: int
    tokens: TokenIds
    fingerprint: int


class DonorIndex:
    """See the module.

    Args:
        chunk_tokens: tokens in a chunk.
        max_chunks: donors kept at most; each takes about 1 KiB and its text's 4 bytes a token.
        seed: of the fingerprints.
    """

    def __init__(self, chunk_tokens: int, max_chunks: int, seed: bytes) -> None:
        self.chunk_tokens = chunk_tokens
        self._max_chunks = max_chunks
        self._fingerprints = Fingerprints(chunk_tokens, seed)
        self._by_key: OrderedDict[bytes, Donor] = OrderedDict()
        self._by_print: dict[int, list[Donor]] = {}
        self._children: dict[bytes, list[Donor]] = {}
        self._filter = _Filter()

    def __len__(self) -> int:
        return len(self._by_key)

    def add(self, chunks: Sequence[Chunk], first: int, scope: Scope) -> None:
        """These were stored.

        Args:
            chunks: consecutive ones of a chain.
            first: index of the first of them in its chain.
            scope: of the chain.
        """
        self._insert(chunks, range(first, first + len(chunks)), scope)

    def recall(self, chunks: Sequence[Chunk], scope: Scope) -> int:
        """These were stored by an earlier run.

        Their places are found by following the chains from the scope's root. Left out is what
        cannot be reached from there, and what has not exactly its text for its key (images).

        Args:
            chunks: the most recently used first.
            scope: whose.

        Returns:
            How many donors there are now.
        """
        told = {chunk.key: chunk for chunk in reversed(chunks)}
        numbers = {chunk.key: number for number, chunk in below(scope.root, told.values())}
        known = [
            chunk
            for key, chunk in told.items()
            if key in numbers and scope.chunk_key(chunk.parent, chunk.tokens) == key
        ]
        for at in range(0, len(known), HASHED):
            portion = known[at : at + HASHED]
            self._insert(portion, [numbers[chunk.key] for chunk in portion], scope)
        return len(self)

    def _insert(self, chunks: Sequence[Chunk], numbers: Sequence[int], scope: Scope) -> None:
        if all(chunk.key in self._by_key for chunk in chunks):  # hot path: they were loaded again
            for chunk in chunks:
                self._by_key.move_to_end(chunk.key)
            return
        size = self.chunk_tokens
        text = np.frombuffer(b"".join(chunk.tokens for chunk in chunks), "<i4")
        prints = (self._fingerprints.of(text)[::size] ^ _salt(scope)).tolist()
        for chunk, number, fingerprint in zip(chunks, numbers, prints, strict=True):
            if chunk.key in self._by_key:
                self._by_key.move_to_end(chunk.key)
                continue
            tokens = np.frombuffer(chunk.tokens, "<i4")
            donor = Donor(chunk, number * size, tokens, fingerprint)
            variants = self._by_print.setdefault(fingerprint, [])
            if len(variants) >= MAX_VARIANTS:
                self.discard(variants[0].chunk.key)
                variants = self._by_print.setdefault(fingerprint, [])
            variants.append(donor)
            self._by_key[chunk.key] = donor
            self._children.setdefault(chunk.parent, []).append(donor)
            self._filter.add(fingerprint)
        while len(self._by_key) > self._max_chunks:
            self.discard(next(iter(self._by_key)))

    def discard(self, key: bytes) -> None:
        """Forget a donor, if it is known."""
        donor = self._by_key.pop(key, None)
        if donor is None:
            return
        _take(self._by_print, donor.fingerprint, donor)
        _take(self._children, donor.chunk.parent, donor)
        self._filter.remove(donor.fingerprint)

    def clear(self) -> None:
        """Forget all."""
        self._by_key.clear()
        self._by_print.clear()
        self._children.clear()
        self._filter = _Filter()

    def hits(
        self,
        tokens: TokenIds,
        begin: int,
        scope: Scope,
        skip: Callable[[int], bool] = lambda offset: False,
    ) -> Iterator[tuple[int, list[Donor]]]:
        """Windows of the prompt that donors have, text compared, in ascending order.

        Args:
            skip: tells of offsets that are of no interest by now: their text is not hashed.

        Yields:
            Offset of the window's first token, and its donors.
        """
        hashes = self._fingerprints.of(tokens[begin:])
        if not len(hashes) or not self._by_key:
            return
        hashes ^= _salt(scope)
        size = self.chunk_tokens
        passed = self._filter.passing(hashes)
        for at, fingerprint in zip(passed.tolist(), hashes[passed].tolist(), strict=True):
            donors = self._by_print.get(fingerprint)
            if not donors or skip(begin + at):
                continue
            window = tokens[begin + at : begin + at + size].astype("<i4", copy=False).tobytes()
            content = scope.content_key(window)
            same = [donor for donor in donors if donor.chunk.content_key == content]
            if same:
                yield begin + at, same

    def after(self, donor: Donor) -> Sequence[Donor]:
        """Donors whose text was computed right behind this one's."""
        return self._children.get(donor.chunk.key, ())

    def before(self, donor: Donor) -> Donor | None:
        """The donor right before this one in its context."""
        return self._by_key.get(donor.chunk.parent)

    def context(self, donor: Donor) -> list[Donor]:
        """The donors before this one in its context, as far back as they are known; first first."""
        found: list[Donor] = []
        before = self.before(donor)
        while before is not None:
            found.append(before)
            before = self.before(before)
        return found[::-1]

    def used(self, donor: Donor) -> None:
        """It was of use: keep it longer."""
        if donor.chunk.key in self._by_key:
            self._by_key.move_to_end(donor.chunk.key)


def _salt(scope: Scope) -> np.uint64:
    return np.uint64(int.from_bytes(scope.content_root[:8], "little"))


def _take(table: dict[_Key, list[Donor]], key: _Key, donor: Donor) -> None:
    donors = table[key]
    donors.remove(donor)
    if not donors:
        del table[key]


class _Filter:
    """Counts of fingerprints by their high bits: zero means that there is none."""

    def __init__(self) -> None:
        self._prints: dict[int, int] = {}
        self._bits = 0
        self._counts: npt.NDArray[np.uint8] = np.zeros(1, np.uint8)

    def add(self, fingerprint: int) -> None:
        self._prints[fingerprint] = self._prints.get(fingerprint, 0) + 1
        wanted = max(_MIN_FILTER_BITS, (len(self._prints) * FILTER_SLOTS_PER_CHUNK).bit_length())
        if wanted > self._bits:
            self._rebuild(wanted)
        elif self._prints[fingerprint] == 1:
            self._raise(fingerprint)

    def remove(self, fingerprint: int) -> None:
        left = self._prints.pop(fingerprint) - 1
        if left:
            self._prints[fingerprint] = left
            return
        slot = fingerprint >> (64 - self._bits)
        # A count that reached its end is not known any more: it stays.
        if self._counts[slot] < 255:
            self._counts[slot] -= 1

    def passing(self, hashes: Hashes) -> npt.NDArray[np.int64]:
        """Indices of the hashes that may be known."""
        slots = (hashes >> np.uint64(64 - self._bits)).astype(np.int64)
        return np.flatnonzero(self._counts[slots])

    def _raise(self, fingerprint: int) -> None:
        slot = fingerprint >> (64 - self._bits)
        if self._counts[slot] < 255:
            self._counts[slot] += 1

    def _rebuild(self, bits: int) -> None:
        self._bits = bits
        self._counts = np.zeros(1 << bits, np.uint8)
        for fingerprint in self._prints:
            self._raise(fingerprint)
