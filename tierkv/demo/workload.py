# SPDX-License-Identifier: Apache-2.0
"""Documents and questions: real text that every Python has, cut so that runs are comparable.

A document ends just after a block border, so that the whole prompt stays inside one further block:
what is cached is then the same number of whole blocks in every phase, the rest is computed in one
piece, and answers can be compared token for token.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pydoc_data.topics import topics

from tierkv.demo.paths import DemoError

QUESTIONS = (
    "What is the text above about?",
    "Which terms does the text define?",
    "What is a common mistake here?",
    "How would you explain it to a child?",
)
PIECES_OF_A_TOPIC = 3
PAST_BORDER_TOKENS = 2
"""The last token of a document may merge with what follows it; it must lie past the border."""

CountTokens = Callable[[str], int]


@dataclass(frozen=True, slots=True)
class Document:
    """A piece of Python's own documentation, and where it is from (`topic/piece`)."""

    name: str
    text: str

    def prompt(self, question: int) -> str:
        """The document and question number `question` about it."""
        return f"{self.text}\n\nQuestion: {QUESTIONS[question % len(QUESTIONS)]}\nAnswer:"


def build_documents(
    count_tokens: CountTokens,
    *,
    count: int,
    cached_tokens: int,
    block_tokens: int,
    answer_tokens: int,
) -> list[Document]:
    """`count` documents of a little more than `cached_tokens` tokens.

    Args:
        count_tokens: of the served model.
        count: how many.
        cached_tokens: a multiple of `block_tokens`; what a later request finds cached.
        block_tokens: of the engine.
        answer_tokens: longest answer; prompt and answer end before the next block does.

    Raises:
        DemoError: this Python or this tokenizer does not give enough of them.
    """
    documents: list[Document] = []
    for name, lines in _pieces(count_tokens, cached_tokens + PAST_BORDER_TOKENS):
        document = Document(name, "\n".join(lines))
        longest = max(count_tokens(document.prompt(q)) for q in range(len(QUESTIONS)))
        # A last line that is too long would carry the prompt into the next block.
        if longest + answer_tokens < cached_tokens + block_tokens:
            documents.append(document)
        if len(documents) == count:
            return documents
    raise DemoError(
        f"pydoc_data.topics of this Python gives {len(documents)} documents of {cached_tokens} "
        f"tokens, {count} are needed; try --quick, which needs fewer"
    )


def _pieces(count_tokens: CountTokens, tokens: int) -> Iterator[tuple[str, list[str]]]:
    """Pieces of the longest topics, each of the fewest lines that have `tokens` tokens."""
    for topic in sorted(topics, key=lambda name: (-len(topics[name]), name)):
        lines = topics[topic].splitlines()
        for piece in range(PIECES_OF_A_TOPIC):
            length = _fewest_lines(count_tokens, lines, tokens)
            if length is None:
                break
            yield f"{topic}/{piece + 1}", lines[:length]
            lines = lines[length:]


def _fewest_lines(count_tokens: CountTokens, lines: list[str], tokens: int) -> int | None:
    low, high = 0, 16
    while count_tokens("\n".join(lines[:high])) < tokens:
        if high >= len(lines):
            return None
        low, high = high, high * 2
    high = min(high, len(lines))
    while high - low > 1:
        middle = (low + high) // 2
        if count_tokens("\n".join(lines[:middle])) < tokens:
            low = middle
        else:
            high = middle
    return high
