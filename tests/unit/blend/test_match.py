# SPDX-License-Identifier: Apache-2.0
"""Runs of a prompt that donors cover: to the token, and only what a tier has."""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.unit.blend.library import CHUNK, NAMESPACE, SCOPE, Library, ids, words
from tierkv.blend.donors import MAX_VARIANTS
from tierkv.blend.match import (
    MAX_REPLACED,
    MAX_TRIES,
    MIN_EXTENSION,
    MIN_GROWTH,
    Run,
    find_runs,
)


def runs_of(
    library: Library, prompt: list[int], begin: int = 0, absent: frozenset[bytes] = frozenset()
) -> list[Run]:
    found = find_runs(library.index, ids(prompt), begin, SCOPE, lambda key: key not in absent)
    library.check(prompt, found, begin)
    return found


def spans(runs: list[Run]) -> list[tuple[int, int]]:
    return [(run.begin, run.end) for run in runs]


@pytest.mark.parametrize("length", [100, 300, 1000])
@pytest.mark.parametrize("seed", range(12))
def test_a_document_is_found_to_the_token_at_any_offset(length: int, seed: int) -> None:
    """Wherever it stood in the donor and wherever it stands now, but for its crumbs.

    A chunk's worth must be found whole to begin with: a document of fewer than two chunks less one
    token may hold none. What is left of it in a neighbouring chunk is loaded from 8 tokens on.
    """
    rng = Random(seed)
    library = Library()
    document = words(100 + seed, length)
    place, offset = rng.randrange(4096), rng.randrange(4096)
    library.serve(words(1, place) + document + words(2, CHUNK))
    runs = runs_of(library, words(3, offset) + document + words(4, 100))
    head = min(length, -place % CHUNK)
    whole, tail = divmod(length - head, CHUNK)
    if whole == 0:
        assert runs == []
        return
    (run,) = runs
    assert run.begin == offset + (0 if head >= MIN_GROWTH else head)
    assert run.end == offset + length - (0 if tail >= MIN_GROWTH else tail)
    assert run.shift == offset - place


def test_growth_ends_at_the_first_other_token_on_both_sides() -> None:
    library = Library()
    document = words(1, 6 * CHUNK)
    library.serve(document)
    for left in (8, 20, 63):
        for right in (8, 20, 63):
            piece = document[2 * CHUNK - left : 4 * CHUNK + right]
            prompt = words(2, 11) + piece + words(3, 50)
            assert spans(runs_of(library, prompt)) == [(11, 11 + len(piece))]


def test_crumbs_of_a_neighbouring_chunk_are_not_loaded() -> None:
    library = Library()
    document = words(1, 6 * CHUNK)
    library.serve(document)
    crumb = MIN_GROWTH - 1
    piece = document[2 * CHUNK - crumb : 4 * CHUNK + crumb]
    (run,) = runs_of(library, words(2, 11) + piece + words(3, 50))
    assert (run.begin, run.end) == (11 + crumb, 11 + crumb + 2 * CHUNK)
    assert len(run.donors) == 2


def test_an_edit_in_the_middle_costs_itself_and_no_more_than_its_chunk() -> None:
    library = Library()
    document = words(1, 10 * CHUNK)
    library.serve(document)
    replaced = list(document)
    replaced[300] += 1
    assert spans(runs_of(library, words(2, 5) + replaced)) == [(5, 305), (306, 645)]
    inserted = document[:300] + words(3, 7) + document[300:]
    # Behind the edit 20 tokens are left of its chunk: found by growing to the left.
    assert spans(runs_of(library, words(2, 5) + inserted)) == [(5, 305), (312, 652)]
    deleted = document[:300] + document[310:]
    assert spans(runs_of(library, words(2, 5) + deleted)) == [(5, 305), (305, 635)]


def test_a_document_that_stands_twice_is_reused_twice() -> None:
    library = Library()
    document = words(1, 4 * CHUNK)
    library.serve(words(2, 30) + document + words(3, 100))
    prompt = words(4, 50) + document + words(5, 33) + document + words(6, 20)
    assert [run.end - run.begin for run in runs_of(library, prompt)] == [256, 256]


def test_one_token_all_through_is_covered_again_and_again_by_the_same_few_chunks() -> None:
    library = Library()
    library.serve([7] * 1000)
    assert len(library.index) == MAX_VARIANTS
    at_a_time = MAX_VARIANTS * CHUNK
    runs = runs_of(library, words(1, 10) + [7] * 1000 + words(2, 10))
    assert spans(runs)[:3] == [(10 + i * at_a_time, 10 + (i + 1) * at_a_time) for i in range(3)]
    assert runs[-1].end > 10 + 1000 - CHUNK


def test_of_several_donors_the_one_that_reaches_furthest_is_taken() -> None:
    library = Library()
    document = words(1, 6 * CHUNK)
    library.serve(words(2, 64) + document[: 2 * CHUNK] + words(3, 64))
    library.serve(words(4, 128) + document)
    library.serve(words(5, 192) + document[: 3 * CHUNK])
    (run,) = runs_of(library, words(6, 21) + document)
    assert (run.begin, run.end, run.shift) == (21, 21 + 6 * CHUNK, 21 - 128)


@pytest.mark.parametrize("exact", [False, True])
def test_a_document_that_one_donor_has_in_part_is_gone_on_with_by_another(exact: bool) -> None:
    """The first donor's prompt ended in the middle of it, the other lacks its first token."""
    library = Library()
    document, other = words(1, 3 * CHUNK + 50), words(6, 2 * CHUNK)
    library.serve(document[: 3 * CHUNK])
    library.serve(words(2, 100) + document[1:] + words(3, CHUNK))
    library.serve(other)
    before = [] if exact else words(4, 21)
    prompt = before + document + other + words(5, 70)
    end = len(before) + 3 * CHUNK
    found = spans(runs_of(library, prompt, begin=end if exact else 0))
    rest = [(end, end + 50), (end + 50, end + 50 + 2 * CHUNK)]
    assert found == [*([] if exact else [(21, end)]), *rest]


def test_a_donor_that_has_all_takes_the_place_of_one_that_was_found_before_and_has_a_part() -> None:
    library = Library()
    one, two = words(1, 3 * CHUNK + 50), words(6, 2 * CHUNK)
    library.serve(words(7, CHUNK) + two + one[: 3 * CHUNK])
    # A window of this one begins later in the document than the other's first.
    library.serve(words(2, 100) + one + words(3, CHUNK))
    first, second = runs_of(library, words(4, 21) + two + one + words(5, 70))
    border = 21 + 2 * CHUNK
    assert (first.begin, first.end, first.shift) == (21, border + 3 * CHUNK, 21 - CHUNK)
    assert (second.begin, second.end) == (border + 3 * CHUNK, border + 3 * CHUNK + 50)
    (run,) = runs_of(library, words(4, 21) + one + words(5, 70))
    assert (run.begin, run.end, run.shift) == (21, 21 + 3 * CHUNK + 50, 21 - 100)


@pytest.mark.parametrize("own", [CHUNK - 1, CHUNK])
def test_a_little_behind_the_exact_beginning_does_not_make_the_text_behind_it_approximate(
    own: int,
) -> None:
    library = Library()
    beginning, document = words(1, 1000), words(2, 10 * CHUNK)
    library.serve(beginning + words(3, 300))
    library.serve(words(4, CHUNK) + document)
    prompt = beginning + words(5, own) + document + words(6, 60)
    found = spans(runs_of(library, prompt, begin=960))
    stub = [(960, 1000)] if own < CHUNK else []
    assert found == [*stub, (1000 + own, 1000 + own + 10 * CHUNK)]


def test_what_reaches_further_is_not_given_up_for_what_comes_later() -> None:
    library = Library()
    document = words(1, 309)
    library.serve(document[: 3 * CHUNK])
    library.serve(words(2, CHUNK) + document[182:] + words(3, CHUNK + 1))
    library.serve(document[197 : 197 + CHUNK])
    assert spans(runs_of(library, document + words(4, 50))) == [(0, 192), (192, 309)]


def test_crumbs_behind_covered_text_are_not_loaded() -> None:
    library = Library()
    document = words(1, 240)
    library.serve(document[: 3 * CHUNK])
    library.serve(words(2, CHUNK) + document[132:] + words(3, CHUNK))
    (_, second) = runs_of(library, document + words(4, 50))
    # The first chunk that reaches beyond 192 ends at 196.
    assert (second.begin, second.end) == (196, 240)
    assert len(second.donors) == 1


def test_repetitive_text_is_not_grown_again_and_again() -> None:
    library = Library()
    library.serve([7] * 4000)
    asked: list[bytes] = []

    def present(key: bytes) -> bool:
        asked.append(key)
        return True

    find_runs(library.index, ids([7] * 4000), 0, SCOPE, present)
    runs = 4000 // (MAX_VARIANTS * CHUNK)
    # Each of the few tries between two runs asks for each of the variants and for what follows it.
    assert len(asked) < runs * (MAX_TRIES + 1) * MAX_VARIANTS * (MAX_VARIANTS + 1)


def test_a_run_that_ends_early_is_gone_on_with_where_no_donor_has_all() -> None:
    library = Library()
    document = words(1, 6 * CHUNK)
    library.serve(document[: 3 * CHUNK])
    library.serve(words(2, 30) + document[CHUNK + 5 :] + words(3, CHUNK))
    prompt = words(4, 21) + document + words(5, 70)
    (first, second) = runs_of(library, prompt)
    assert (first.begin, first.end, first.shift) == (21, 21 + 3 * CHUNK, 21)
    assert (second.begin, second.end) == (21 + 3 * CHUNK, 21 + 6 * CHUNK)
    assert second.shift == 21 + CHUNK + 5 - 30


def test_a_run_is_not_gone_on_with_for_less_than_its_first_tokens_cost() -> None:
    library = Library()
    for more, begin, expected in ((MIN_EXTENSION - 1, 5, 1), (MIN_EXTENSION, 6, 2)):
        document = words(begin, 3 * CHUNK + more)
        library.serve(document[: 3 * CHUNK])
        library.serve(words(90 + begin, 30) + document[begin:] + words(80 + begin, CHUNK))
        assert len(runs_of(library, words(4, 21) + document + words(7, 70))) == expected


def test_of_equal_donors_the_one_with_more_text_before_it_is_taken() -> None:
    library = Library()
    document = words(1, 2 * CHUNK)
    for before in (128, 512, 64):
        library.serve(words(before, before) + document)
    (run,) = runs_of(library, words(6, 21) + document + words(7, 9))
    assert run.shift == 21 - 512


def test_a_run_goes_on_in_whichever_continuation_agrees_longest() -> None:
    library = Library()
    beginning = words(1, 2 * CHUNK)
    for seed in (2, 3, 4):
        library.serve(beginning + words(seed, 2 * CHUNK))
    prompt = beginning + words(3, 2 * CHUNK)[:100] + words(9, 50)
    assert spans(runs_of(library, words(8, 3) + prompt)) == [(3, 3 + 228)]


def test_absent_donors_are_neither_served_nor_kept() -> None:
    library = Library()
    document = words(1, 5 * CHUNK)
    chain = library.serve(document)
    gone = frozenset([chain.chunks[2].key])
    runs = runs_of(library, words(2, 3) + document, absent=gone)
    assert spans(runs) == [(3, 3 + 128), (3 + 192, 3 + 320)]
    assert len(library.index) == 4
    everything = frozenset(chunk.key for chunk in chain.chunks)
    assert runs_of(library, words(2, 3) + document, absent=everything) == []
    assert len(library.index) == 0


def test_an_absent_neighbour_ends_the_growth_and_another_donor_is_tried() -> None:
    library = Library()
    document = words(1, 4 * CHUNK)
    gone = library.serve(words(2, 128) + document)
    library.serve(words(3, 64) + document[: 2 * CHUNK])
    absent = frozenset(chunk.key for chunk in gone.chunks)
    (run,) = runs_of(library, words(4, 9) + document, absent=absent)
    assert (run.begin, run.end, run.shift) == (9, 9 + 128, 9 - 64)


def test_nothing_before_the_exact_part_is_touched() -> None:
    library = Library()
    document = words(1, 6 * CHUNK)
    library.serve(words(2, 10) + document)
    prompt = document + words(3, 40)
    runs = runs_of(library, prompt, begin=2 * CHUNK)
    assert runs[0].begin >= 2 * CHUNK
    # To the token: from the edge on, though the edge lies inside of a donor.
    assert spans(runs) == [(2 * CHUNK, 374)]


def test_another_tenant_finds_nothing() -> None:
    library = Library()
    document = words(1, 4 * CHUNK)
    library.serve(document, NAMESPACE.scope(salt="theirs"))
    assert runs_of(library, document) == []


def test_what_was_found_is_kept_longer_than_what_was_not() -> None:
    library = Library(max_chunks=4)
    wanted = words(1, CHUNK)
    library.serve(wanted)
    for seed in (2, 3, 4):
        library.serve(words(seed, CHUNK))
    assert len(runs_of(library, words(9, 5) + wanted)) == 1
    library.serve(words(5, CHUNK))
    assert len(runs_of(library, words(9, 5) + wanted)) == 1


def test_what_another_donor_took_the_place_of_is_not_kept_for_it() -> None:
    library = Library(max_chunks=10)
    document = words(1, 2 * CHUNK + 50)
    library.serve(document[: 2 * CHUNK])
    library.serve(words(2, 100) + document + words(3, CHUNK))
    in_part = len(library.index)
    (run,) = runs_of(library, words(4, 21) + document + words(5, 70))
    assert run.shift == 21 - 100
    # The oldest go first: the two chunks of the donor that had a part.
    for seed in range(10 - in_part + 2):
        library.serve(words(100 + seed, CHUNK))
    assert runs_of(library, words(4, 21) + document[CHUNK : 2 * CHUNK] + words(5, 70)) == []


def test_a_long_run_is_not_looked_for_again_for_one_seam_less() -> None:
    for length, runs in ((MAX_REPLACED, 1), (MAX_REPLACED + CHUNK, 2)):
        library = Library()
        document = words(length, length + 50)
        library.serve(document[:length])
        library.serve(words(2, 100) + document + words(3, CHUNK))
        assert len(runs_of(library, words(4, 21) + document + words(5, 70))) == runs


@st.composite
def libraries(draw: st.DrawFn) -> tuple[list[list[int]], list[int], int, int]:
    """Sequences and a prompt made of the same few pieces, of a tiny vocabulary; chunks of 4."""
    token = st.integers(0, 3)
    pieces = draw(st.lists(st.lists(token, min_size=1, max_size=14), min_size=1, max_size=4))
    order = st.lists(st.integers(0, len(pieces) - 1), min_size=1, max_size=5)

    def text() -> list[int]:
        return [t for i in draw(order) for t in pieces[i]]

    served = [text() for _ in range(draw(st.integers(1, 4)))]
    prompt = text()
    begin = draw(st.integers(0, len(prompt)))
    return served, prompt, begin, draw(st.integers(0, 2**16))


@settings(max_examples=200, deadline=None)
@given(libraries())
def test_every_run_is_what_its_donors_hold(
    case: tuple[list[list[int]], list[int], int, int],
) -> None:
    served, prompt, begin, seed = case
    library = Library(chunk=4)
    for tokens in served:
        library.serve(tokens)
    rng = Random(seed)
    absent = frozenset(key for key in library.sequences if rng.random() < 0.2)
    runs = runs_of(library, prompt, begin, absent)
    assert not any(donor.chunk.key in absent for run in runs for donor in run.donors)
    # Nothing that a present donor holds whole is left out between the runs.
    covered = {place for run in runs for place in range(run.begin, run.end)}
    texts = {
        tuple(tokens[start : start + 4])
        for key, (tokens, start) in library.sequences.items()
        if library.index._by_key.get(key) is not None
    }
    for at in range(begin, len(prompt) - 3):
        if tuple(prompt[at : at + 4]) in texts:
            assert covered & set(range(at, at + 4)), at
