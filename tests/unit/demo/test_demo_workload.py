# SPDX-License-Identifier: Apache-2.0
"""Documents are cut so that every phase caches the same blocks and computes the same rest."""

from __future__ import annotations

import re
from itertools import combinations
from pydoc_data.topics import topics

import pytest

from tierkv.demo.paths import DemoError
from tierkv.demo.workload import QUESTIONS, Document, build_documents


def words(text: str) -> int:
    """A stand-in for a tokenizer: words and signs."""
    return len(re.findall(r"\w+|[^\w\s]", text))


def documents(count: int = 6, cached: int = 1024) -> list[Document]:
    return build_documents(
        words, count=count, cached_tokens=cached, block_tokens=128, answer_tokens=24
    )


def test_prompt_and_answer_end_inside_the_block_after_the_cached_ones() -> None:
    for document in documents():
        assert words(document.text) >= 1024
        for question in range(len(QUESTIONS)):
            assert words(document.prompt(question)) + 24 < 1024 + 128


def test_documents_have_no_common_beginning_of_a_block() -> None:
    made = documents(13)
    assert len(made) == 13
    for one, other in combinations(made, 2):
        assert one.text[:40] != other.text[:40]


def test_documents_are_real_text_in_its_order() -> None:
    for document in documents(3):
        topic = document.name.rpartition("/")[0]
        assert document.text in "\n".join(topics[topic].splitlines())


def test_documents_are_the_same_every_time() -> None:
    assert documents() == documents()


def test_every_question_gives_another_prompt_with_the_document_in_front() -> None:
    document = documents(1)[0]
    prompts = {document.prompt(question) for question in range(len(QUESTIONS))}
    assert len(prompts) == len(QUESTIONS)
    assert all(prompt.startswith(document.text) for prompt in prompts)
    assert document.prompt(len(QUESTIONS)) == document.prompt(0)


def test_too_many_documents_is_an_error_that_says_how_many_there_are() -> None:
    with pytest.raises(DemoError, match=r"gives \d+ documents of 50000 tokens, 2 are needed"):
        documents(2, cached=50_000)
