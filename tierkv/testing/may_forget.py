# SPDX-License-Identifier: Apache-2.0
"""The model of every tier: entries may vanish, they never change.

It keeps a set of values a key, because the same chunk computed twice may differ in its last bits
(other batch shapes, other kernels): both versions are right, a mixture is not. With concurrent
callers, `saving` is called when a save begins and `evicted` when an evict has returned: then every
value that could be right at some point in between is allowed.
"""

from __future__ import annotations


class MayForget:
    """Owned by the test's thread."""

    def __init__(self) -> None:
        self._possible: dict[bytes, set[bytes]] = {}
        self.hits = 0
        self.misses = 0

    def saving(self, key: bytes, value: bytes) -> None:
        """From now on a load of `key` may give `value`."""
        self._possible.setdefault(key, set()).add(value)

    def evicted(self, key: bytes) -> None:
        """From now on a load of `key` gives nothing until it is saved again."""
        self._possible.pop(key, None)

    def cleared(self) -> None:
        """As `evicted`, for all keys."""
        self._possible.clear()

    def judge(self, key: bytes, got: bytes | None) -> None:
        """Check what a load gave; None is a miss.

        Raises:
            AssertionError: the tier lied.
        """
        if got is None:
            self.misses += 1
            return
        self.hits += 1
        possible = self._possible.get(key, set())
        assert got in possible, (
            f"served {len(got)} wrong bytes under {key.hex()}, beginning {got[:64].hex()}; "
            f"{len(possible)} values were possible"
        )
