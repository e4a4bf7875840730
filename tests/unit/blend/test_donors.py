# SPDX-License-Identifier: Apache-2.0
"""The index of donors: bounded, honest about what it knows, and apart for each tenant."""

from __future__ import annotations

from dataclasses import replace
from random import Random
from typing import Any

import numpy as np
import pytest

from tests.unit.blend.library import CHUNK, NAMESPACE, SCOPE, SEED, Library, ids, words
from tierkv.blend import donors as donors_module
from tierkv.blend.donors import MAX_VARIANTS, DonorIndex
from tierkv.blend.fingerprints import Fingerprints, Hashes
from tierkv.keys import Chunk, ChunkChain, Scope, TokenIds


def found(library: Library, prompt: list[int], scope: Scope = SCOPE) -> dict[int, int]:
    """Offsets of windows that donors have, with how many have them."""
    return {at: len(same) for at, same in library.index.hits(ids(prompt), 0, scope)}


def test_a_stored_chunk_is_found_wherever_it_stands() -> None:
    library = Library()
    document = words(1, 3 * CHUNK)
    library.serve(document)
    assert found(library, words(2, 37) + document + words(3, 50)) == {37: 1, 101: 1, 165: 1}
    assert found(library, words(4, 500)) == {}


def test_nothing_before_the_beginning_is_told() -> None:
    library = Library()
    document = words(1, 3 * CHUNK)
    library.serve(document)
    assert [at for at, _ in library.index.hits(ids(document), 1, SCOPE)] == [64, 128]


def test_prompts_shorter_than_a_chunk_and_empty_indexes_give_nothing() -> None:
    library = Library()
    assert found(library, words(1, 200)) == {}
    library.serve(words(1, CHUNK))
    assert found(library, words(1, CHUNK - 1)) == {}
    assert found(library, []) == {}


def test_the_index_never_holds_more_than_it_may_and_keeps_what_is_used() -> None:
    library = Library(max_chunks=10)
    kept = words(0, CHUNK)
    library.serve(kept)
    for seed in range(1, 40):
        library.serve(words(seed, CHUNK))
        assert len(library.index) <= 10
        ((_, (donor,)),) = list(library.index.hits(ids(kept), 0, SCOPE))
        library.index.used(donor)
    assert found(library, kept) == {0: 1}
    # The others that are left are the newest ones.
    assert [bool(found(library, words(seed, CHUNK))) for seed in range(29, 40)] == (
        [False] * 2 + [True] * 9
    )


def test_storing_again_keeps_a_donor_longer_and_counts_it_once() -> None:
    library = Library(max_chunks=2)
    library.serve(words(1, CHUNK))
    library.serve(words(2, CHUNK))
    library.serve(words(1, CHUNK))
    library.serve(words(3, CHUNK))
    assert found(library, words(1, CHUNK)) == {0: 1}
    assert found(library, words(2, CHUNK)) == {}


def test_one_text_in_many_contexts_is_kept_a_few_times_the_newest_ones() -> None:
    library = Library()
    piece = words(1, CHUNK)
    chains = [library.serve(words(10 + i, CHUNK) + piece) for i in range(MAX_VARIANTS + 3)]
    ((_, same),) = list(library.index.hits(ids(piece), 0, SCOPE))
    assert [d.chunk.key for d in same] == [c.chunks[1].key for c in chains[-MAX_VARIANTS:]]


def chain(tokens: list[int], scope: Scope = SCOPE, **more: Any) -> list[Chunk]:
    made = ChunkChain(scope, CHUNK)
    made.extend(tokens, **more)
    return made.chunks


def recalled(*chains: list[Chunk], max_chunks: int = 100) -> Library:
    """An index that learns of chains from an earlier run, in that order."""
    library = Library(max_chunks=max_chunks)
    library.index.recall([chunk for one in chains for chunk in one], SCOPE)
    return library


@pytest.mark.parametrize("portion", [2, 1000])
def test_what_an_earlier_run_left_has_its_places(
    monkeypatch: pytest.MonkeyPatch, portion: int
) -> None:
    monkeypatch.setattr(donors_module, "HASHED", portion)
    beginning, one, other = words(1, 2 * CHUNK), words(2, 3 * CHUNK), words(3, CHUNK)
    first, branch = chain(beginning + one), chain(beginning + other)
    library = recalled(first[::-1], branch[2:])
    assert len(library.index) == 6
    places = {
        at: donor.start
        for at, donors in library.index.hits(ids(one + other + beginning), 0, SCOPE)
        for donor in donors
    }
    assert places == {0: 128, 64: 192, 128: 256, 192: 128, 256: 0, 320: 64}


def test_what_cannot_be_placed_or_is_not_text_alone_is_no_donor() -> None:
    """A wrong place would turn keys by the wrong angle."""
    document = words(1, 5 * CHUNK)
    cut = chain(document)
    del cut[2]
    assert found(recalled(cut), document) == {0: 1, 64: 1}
    assert found(recalled(chain(document, NAMESPACE.scope(salt="x"))), document) == {}
    library = recalled(chain(document, extras={1: b"an image"}))
    assert len(library.index) == 4
    assert found(library, document) == {0: 1, 128: 1, 192: 1, 256: 1}
    told = chain(document)
    told[3] = replace(told[3], tokens=told[4].tokens)
    library = recalled(told)
    assert len(library.index) == 4
    assert found(library, document) == {0: 1, 64: 1, 128: 1, 256: 1}


def test_of_too_many_the_last_used_are_kept_and_each_counts_once() -> None:
    documents = [words(seed, 2 * CHUNK) for seed in range(5)]
    chains = [chain(document) for document in documents]
    library = recalled(*chains, *chains, max_chunks=5)
    assert [len(found(library, document)) for document in documents] == [2, 2, 1, 0, 0]
    library.index.clear()
    assert library.index.recall(chains[0], SCOPE) == 2
    assert library.index.recall(chains[0], SCOPE) == 2
    library.serve(documents[0])
    assert len(library.index) == 2


def test_a_donor_that_another_of_the_same_call_pushes_out_comes_back() -> None:
    library = Library()
    twice = chain(words(1, CHUNK) * 2)
    library.index.add(twice[1:], 1, SCOPE)
    for seed in range(2, MAX_VARIANTS + 1):
        library.index.add(chain(words(seed, CHUNK) + words(1, CHUNK))[1:], 1, SCOPE)
    library.index.add(twice, 0, SCOPE)
    ((_, same),) = list(library.index.hits(ids(words(1, CHUNK)), 0, SCOPE))
    assert [donor.chunk.key for donor in same][-2:] == [chunk.key for chunk in twice]


def test_a_donor_s_context_goes_back_as_far_as_it_is_known() -> None:
    library = Library()
    chunks = library.serve(words(1, 5 * CHUNK)).chunks
    last = library.index._by_key[chunks[4].key]
    assert [donor.chunk.key for donor in library.index.context(last)] == [
        chunk.key for chunk in chunks[:4]
    ]
    library.index.discard(chunks[1].key)
    assert [donor.start for donor in library.index.context(last)] == [2 * CHUNK, 3 * CHUNK]


def test_a_discarded_donor_is_gone_and_its_neighbours_are_not() -> None:
    library = Library()
    document = words(1, 3 * CHUNK)
    chain = library.serve(document)
    library.index.discard(chain.chunks[1].key)
    library.index.discard(chain.chunks[1].key)
    library.index.discard(b"never heard of..")
    assert found(library, document) == {0: 1, 128: 1}
    (first,) = dict(library.index.hits(ids(document), 0, SCOPE))[0]
    assert list(library.index.after(first)) == []
    library.serve(document)
    assert [d.start for d in library.index.after(first)] == [64]


def test_neighbours_are_those_of_the_chain() -> None:
    library = Library()
    document = words(1, 2 * CHUNK)
    library.serve(document + words(2, CHUNK))
    library.serve(document + words(3, CHUNK))
    ((_, (second,)), *_) = list(library.index.hits(ids(document), 1, SCOPE))
    before = library.index.before(second)
    assert before is not None
    assert before.start == 0
    assert library.index.before(before) is None
    after = library.index.after(second)
    assert sorted(d.tokens[0] for d in after) == sorted([words(2, 1)[0], words(3, 1)[0]])


def test_tenants_never_meet() -> None:
    library = Library()
    document = words(1, 2 * CHUNK)
    one, other = NAMESPACE.scope(salt="one"), NAMESPACE.scope(salt="other")
    library.serve(document, one)
    assert found(library, document, one) == {0: 1, 64: 1}
    assert found(library, document, other) == {}
    assert found(library, document) == {}


def test_tenants_never_meet_even_where_their_fingerprints_do(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(donors_module, "_salt", lambda scope: np.uint64(0))
    test_tenants_never_meet()


class EightBits(Fingerprints):
    """256 different hashes: everything collides."""

    def of(self, tokens: TokenIds) -> Hashes:
        return super().of(tokens) & np.uint64(0xFF << 56)


def test_colliding_fingerprints_serve_nothing_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(donors_module, "Fingerprints", EightBits)
    library = Library()
    for seed in range(200):
        library.serve(words(seed, CHUNK))
    # Nearly every window of other texts has donors of its hash, and not one of its text.
    for seed in range(1000, 1010):
        assert found(library, words(seed, 1000)) == {}
    # Those that are left are found as ever: at most as many as there is room for at a hash.
    left = [seed for seed in range(200) if found(library, words(seed, CHUNK))]
    assert left[-1] == 199
    assert len(left) == len(library.index) > 100


def test_the_filter_lets_everything_pass_that_is_there_after_any_history() -> None:
    """Against a plain dictionary, through growth, removals and overflowing counts."""
    rng = Random(5)
    index = DonorIndex(4, 3000, SEED)
    library = Library(chunk=4)
    library.index = index
    alive: dict[int, bytes] = {}
    for step in range(5000):
        if alive and rng.random() < 0.3:
            seed = rng.choice(list(alive))
            index.discard(alive.pop(seed))
        else:
            seed = step
            (chunk,) = library.serve(words(seed, 4)).chunks
            alive[seed] = chunk.key
            if len(alive) > 3000:
                alive.pop(next(iter(alive)))
    assert len(index) == len(alive)
    for seed in range(5000):
        assert (seed in alive) == bool(list(index.hits(ids(words(seed, 4)), 0, SCOPE))), seed


def test_few_windows_of_foreign_text_pass_the_filter() -> None:
    library = Library(chunk=4, max_chunks=100_000)
    for seed in range(2000):
        library.serve(words(seed, 4))
    hashes = library.index._fingerprints.of(ids(words(-1, 50_000)))
    assert len(library.index._filter.passing(hashes)) < 0.04 * len(hashes)


def test_clear_forgets_all_and_the_index_goes_on() -> None:
    library = Library()
    document = words(1, 2 * CHUNK)
    library.serve(document)
    library.index.clear()
    assert len(library.index) == 0
    assert found(library, document) == {}
    library.serve(document)
    assert found(library, document) == {0: 1, 64: 1}
