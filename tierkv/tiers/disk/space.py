# SPDX-License-Identifier: Apache-2.0
"""How long the slab may be: exact capacity, a floor of free space, older namespaces give way.

The slab is not preallocated to its capacity at start: it grows in steps as chunks come, so that
older namespaces keep their chunks until the room is really needed, and so that another program
that fills the disk is noticed before a write fails. Each step is preallocated whole
(`posix_fallocate`): a write into the slab then needs no room of its own.

All calls block; one at a time (the tier sees to it).
"""

from __future__ import annotations

import contextlib
import os

from tierkv.pages.layout import align_up
from tierkv.tiers.disk.directory import Directory
from tierkv.tiers.disk.recover import USED_BYTES, Files
from tierkv.tiers.disk.table import ENTRY_BYTES, PAGE_BYTES

STEP_BYTES = 256 << 20
"""Growth at once: some milliseconds of work, and two of ext4's largest extents."""

_EXTENT_BYTES = 32
"""Of metadata a slot: written and unwritten runs each take an entry of the file's extent tree."""

_FIXED_BYTES = 64 << 10
"""Lock file, directories, header pages, and the ends of files that are shorter than a block."""

_MARGIN_BYTES = 16 << 10
"""Part of `_FIXED_BYTES` that may not have been allocated yet when the slab grows."""


class Space:
    """Growth and shrinkage of one namespace's slab.

    Args:
        capacity: most bytes that the whole directory may take.
        min_free: bytes of the file system to leave to others.
        slot_bytes: of the slab, header included.
    """

    def __init__(
        self, directory: Directory, files: Files, *, capacity: int, min_free: int, slot_bytes: int
    ) -> None:
        self._directory = directory
        self._files = files
        self._capacity = capacity
        self._min_free = min_free
        self._slot_bytes = slot_bytes
        self._unit = slot_bytes + ENTRY_BYTES + USED_BYTES

    @staticmethod
    def most_slots(capacity: int, slot_bytes: int) -> int:
        """How many slots fit if this namespace has the directory to itself."""
        a_slot = slot_bytes + ENTRY_BYTES + USED_BYTES + _EXTENT_BYTES
        return max(0, (capacity - _FIXED_BYTES) // a_slot)

    @staticmethod
    def least_capacity(slot_bytes: int) -> int:
        """The smallest capacity with room for one slot, to the next KiB."""
        a_slot = slot_bytes + ENTRY_BYTES + USED_BYTES + _EXTENT_BYTES
        return align_up(_FIXED_BYTES + a_slot, 1024)

    def fit_capacity(self) -> list[str]:
        """Remove older namespaces until the directory is within its capacity; returns notes."""
        notes = []
        while self._directory.allocated_bytes() > self._capacity:
            name = self._remove_oldest()
            if name is None:
                break
            notes.append(f"{self._directory.path / name} removed: over the capacity")
        return notes

    def grow(self, slots: int, most_slots: int) -> int:
        """Make the slab longer than `slots` by a step.

        Returns:
            Its new number of slots; `slots` if there is no room.
        """
        step = min(most_slots - slots, max(1, STEP_BYTES // self._slot_bytes))
        while step > 0:
            fits = min(step, self._room(slots) // self._unit)
            if fits and self._allocate(slots, fits):
                return slots + fits
            if fits:
                step = fits // 2  # the file system has less than it says
            elif self._remove_oldest() is None:
                break
        return slots

    def excess(self) -> int:
        """How many slots to give back for the floor of free space; removes older namespaces."""
        while True:
            missing = self._min_free - self._directory.free_bytes()
            if missing <= 0:
                return 0
            if self._remove_oldest() is None:
                return -(-missing // self._slot_bytes)

    def cut(self, slots: int) -> None:
        """Give back all slots from `slots` on. None of them is in use."""
        os.ftruncate(self._files.table_fd, PAGE_BYTES + slots * ENTRY_BYTES)
        os.ftruncate(self._files.slab_fd, PAGE_BYTES + slots * self._slot_bytes)

    def _room(self, slots: int) -> int:
        margin = _MARGIN_BYTES + slots * _EXTENT_BYTES
        under_capacity = self._capacity - self._directory.allocated_bytes() - margin
        above_floor = self._directory.free_bytes() - self._min_free
        return max(0, min(under_capacity, above_floor))

    def _remove_oldest(self) -> str | None:
        for resident in self._directory.residents():
            if resident.name != self._files.name and self._directory.remove(resident.name):
                return resident.name
        return None

    def _allocate(self, slots: int, more: int) -> bool:
        slab_fd, table_fd = self._files.slab_fd, self._files.table_fd
        slab_end = PAGE_BYTES + slots * self._slot_bytes
        table_end = PAGE_BYTES + slots * ENTRY_BYTES
        try:
            os.posix_fallocate(slab_fd, slab_end, more * self._slot_bytes)
            os.posix_fallocate(table_fd, table_end, more * ENTRY_BYTES)
        except OSError:
            # Part of it may have been allocated.
            with contextlib.suppress(OSError):
                self.cut(slots)
            return False
        return True
