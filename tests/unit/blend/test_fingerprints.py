# SPDX-License-Identifier: Apache-2.0
"""Window hashes against the formula written out in Python's own integers."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.blend.library import SEED, ids, words
from tierkv.blend.fingerprints import Fingerprints

MASK = (1 << 64) - 1
BASE = 0x9E3779B97F4A7C15


def splitmix(x: int) -> int:
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 & MASK
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB & MASK
    return x ^ (x >> 31)


def direct(window: list[int], seed: bytes) -> int:
    """The polynomial over the window alone: what the prefix sums must come to."""
    key = int.from_bytes(seed[:8], "little")
    total = sum(splitmix(token ^ key) * pow(BASE, j, 1 << 64) for j, token in enumerate(window))
    return splitmix(total & MASK)


@given(
    st.lists(st.integers(0, 2**31 - 1), min_size=1, max_size=60),
    st.integers(1, 20),
    st.binary(min_size=8, max_size=12),
)
def test_every_window_hashes_as_the_formula_says(
    tokens: list[int], window: int, seed: bytes
) -> None:
    got = Fingerprints(window, seed).of(ids(tokens)).tolist()
    count = max(0, len(tokens) - window + 1)
    assert got == [direct(tokens[i : i + window], seed) for i in range(count)]


def test_the_same_text_hashes_alike_at_any_place_of_a_long_prompt() -> None:
    prints = Fingerprints(64, SEED)
    piece = words(1, 64)
    alone = prints.of(ids(piece))[0]
    for place in (0, 1, 63, 4095, 100_000):
        prompt = words(2, place) + piece + words(3, 10)
        assert prints.of(ids(prompt))[place] == alone == direct(piece, SEED)


@pytest.mark.parametrize("change", [0, 31, 63])
def test_one_other_token_or_two_exchanged_ones_hash_differently(change: int) -> None:
    prints = Fingerprints(64, SEED)
    piece = words(4, 64)
    other = list(piece)
    other[change] += 1
    swapped = list(piece)
    swapped[change], swapped[change - 1] = swapped[change - 1], swapped[change]
    hashes = {int(prints.of(ids(p))[0]) for p in (piece, other, swapped)}
    assert len(hashes) == 3


def test_another_seed_gives_other_hashes() -> None:
    piece = ids(words(5, 64))
    assert Fingerprints(64, b"a" * 8).of(piece)[0] != Fingerprints(64, b"b" * 8).of(piece)[0]


def test_all_bits_of_a_hash_vary() -> None:
    """Low bits index tables and high bits the filter: neither may be stuck."""
    hashes = Fingerprints(64, SEED).of(ids(words(6, 4000)))
    for bit in range(64):
        share = float(np.mean(hashes >> np.uint64(bit) & np.uint64(1)))
        assert 0.4 < share < 0.6, bit


def test_growing_the_tables_changes_no_hash() -> None:
    tokens = ids(words(7, 3000))
    fresh = Fingerprints(16, SEED)
    grown = Fingerprints(16, SEED)
    for length in (16, 17, 100, 1024, 1025):
        assert (grown.of(tokens[:length]) == fresh.of(tokens)[: length - 15]).all()
