# SPDX-License-Identifier: Apache-2.0
"""How a whole namespace is forgotten on a server that gives no right to list its keys.

Every key holds a random word, the generation, which is itself kept under a key that all engines of
the namespace read. Who clears the namespace writes another word: all that was stored before has
then a name that nobody asks for, and goes by its TTL or by eviction. The others follow within
seconds. A word that was left is never taken up again, even if a failover brings it back.

Pure decisions; the tier does the talking.
"""

from __future__ import annotations

import re
import secrets
from collections import deque
from collections.abc import Callable
from enum import Enum

_WORD = re.compile(rb"[0-9a-f]{8}")
MAX_LEFT = 64


class Step(Enum):
    """What to do about the word that the server has."""

    NOTHING = 0
    ADOPTED = 1
    """Ours was replaced by the server's: forget what is known about keys."""
    OFFER = 2
    """Write ours unless somebody else has written one (SET NX), then read again."""
    IMPOSE = 3
    """Write ours."""


class Generation:
    """Owned by the event loop.

    Args:
        new_word: source of random words, 8 hexadecimal digits.
    """

    def __init__(self, new_word: Callable[[], str] = lambda: secrets.token_hex(4)) -> None:
        self.word: str | None = None
        """None until the server was reached for the first time: nothing can be named yet."""
        self._new_word = new_word
        self._left: deque[str] = deque(maxlen=MAX_LEFT)
        self._imposing = False

    def renew(self) -> str:
        """Leave the current word, and all words that the server may have, for a new one."""
        if self.word is not None:
            self._left.append(self.word)
        self.word = self._new_word()
        self._imposing = True
        return self.word

    def found(self, value: bytes | None) -> Step:
        """The server has `value`, None if nothing."""
        if self._imposing:
            return Step.IMPOSE
        if value is None:
            if self.word is None:
                self.word = self._new_word()
            return Step.OFFER
        if not _WORD.fullmatch(value):
            return Step.IMPOSE if self.word is not None else self._start_over()
        word = value.decode()
        if word == self.word:
            return Step.NOTHING
        if word in self._left:
            return Step.IMPOSE
        if self.word is not None:
            self._left.append(self.word)
        self.word = word
        return Step.ADOPTED

    def imposed(self, word: str) -> None:
        """The server has taken `word`."""
        if word == self.word:
            self._imposing = False

    def _start_over(self) -> Step:
        self.word = self._new_word()
        return Step.IMPOSE
