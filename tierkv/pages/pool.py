# SPDX-License-Identifier: Apache-2.0
"""The DRAM tier's memory: equal slots in memfds, mapped by the Store and by the workers.

    region of rank r = its part of slot 0 | of slot 1 | ...      `part_stride` bytes each

A worker maps (and on CUDA pins) its own region only; the Store maps all of them. Either side may
make the memory, the other attaches by a `RegionHandle`: in vLLM only workers can tell the scheduler
something before the first step, so there each worker makes its region and the Store attaches.

A memfd needs no room in /dev/shm, is nobody else's to open, and is gone with its last holder,
whatever ended it. Its size is sealed: were it cut short by anyone, every holder would die of SIGBUS
on the next access. Memory is taken from the machine page by page when first touched, not when a
region is made. Who reads or writes which slot, and when, is the callers' business: nothing here
locks.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from tierkv.errors import GeometryError, TierError
from tierkv.pages.layout import SlotLayout

_TIER = "dram"
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW
_MADV_POPULATE_WRITE = 23
"""Linux 5.14; Python's mmap has no name for it."""


@dataclass(frozen=True, slots=True)
class RegionHandle:
    """What another process needs to map one rank's region. Plain values: pickle, pack or log it.

    Attributes:
        path: the maker's descriptor, "/proc/<pid>/fd/<n>".
        size_bytes: of the whole memfd, to recognise it by.
        offset_bytes: where the region starts in it.
        slots: chunks that the pool holds.
        layout: sizes of a slot, all ranks.
    """

    path: str
    size_bytes: int
    offset_bytes: int
    slots: int
    layout: SlotLayout

    @property
    def region_bytes(self) -> int:
        return self.slots * self.layout.part_stride


class DramPool:
    """The Store's side: every rank's part of every slot.

    Args:
        layout: sizes of a slot.
        capacity_bytes: of all ranks together; what is left over after whole slots is not taken.

    Attributes:
        layout: as given.
        slots: how many there are.
        handles: by rank, for workers to attach to.

    Raises:
        GeometryError: the capacity holds no slot.
        TierError: the system gives no memfd or no address space of that size.

    Thread: `parts` any; the others the owner's.
    """

    layout: SlotLayout
    slots: int
    handles: tuple[RegionHandle, ...]

    def __init__(self, layout: SlotLayout, capacity_bytes: int) -> None:
        slots = _slots_in(layout, capacity_bytes)
        fd, mapping = _make(slots * layout.slot_bytes)
        first = _handle(fd, slots * layout.slot_bytes, slots, layout)
        step = first.region_bytes
        self.handles = tuple(
            RegionHandle(first.path, first.size_bytes, rank * step, slots, layout)
            for rank in range(layout.ranks)
        )
        views = [memoryview(mapping)[h.offset_bytes : h.offset_bytes + step] for h in self.handles]
        self._hold(fd, [mapping], views)

    @classmethod
    def attach(cls, handles: Sequence[RegionHandle]) -> DramPool:
        """A pool over regions that workers made.

        Args:
            handles: by rank.

        Raises:
            GeometryError: they do not make up one pool, or are not what they say.
            TierError: one cannot be opened or mapped.
        """
        if not handles or len(handles) != handles[0].layout.ranks:
            raise GeometryError(f"{len(handles)} regions do not make up a pool; all ranks must")
        if len({(handle.slots, handle.layout) for handle in handles}) > 1:
            raise GeometryError(f"workers made regions that differ: {handles}")
        pool = cls.__new__(cls)
        pool.handles = tuple(handles)
        pool._hold(-1, [], [])
        try:
            for handle in handles:
                mapping, skip = _attach(handle)
                pool._mappings.append(mapping)
                pool._regions.append(memoryview(mapping)[skip:])
        except BaseException:
            pool.close()
            raise
        return pool

    def _hold(self, fd: int, mappings: list[mmap.mmap], regions: list[memoryview]) -> None:
        self.layout = self.handles[0].layout
        self.slots = self.handles[0].slots
        self._fd = fd
        self._mappings = mappings
        self._regions = regions

    def parts(self, slot: int) -> tuple[memoryview, ...]:
        """The slot's memory, writable: one view of `part_stride` bytes a rank, 4 KiB-aligned.

        Hot path: about 0.2 µs a rank. The views keep the memory mapped after `close`.

        Raises:
            IndexError: no such slot.
            ValueError: the pool is closed.
        """
        if not 0 <= slot < self.slots:
            raise IndexError(f"slot {slot} of {self.slots}")
        stride = self.layout.part_stride
        start = slot * stride
        return tuple([region[start : start + stride] for region in self._regions])

    def close(self) -> None:
        """Let go of the memory; who else has mapped it keeps it. May be called twice."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
        for region in self._regions:
            region.release()
        for mapping in self._mappings:
            _unmap(mapping)


class PoolRegion:
    """A worker's side: one rank's part of every slot, mapped into this process.

    Made by `create` or `attach`.

    Attributes:
        array: uint8 [slots, part_stride], writable, shared with the Store.
        handle: for others to attach to.
        layout: sizes of a slot, all ranks.
        slots: how many there are.

    Thread: the worker's model thread.
    """

    def __init__(self, handle: RegionHandle, mapping: mmap.mmap, skip: int, fd: int) -> None:
        self.handle = handle
        self.layout = handle.layout
        self.slots = handle.slots
        flat = np.frombuffer(mapping, np.uint8, count=handle.region_bytes, offset=skip)
        self.array: npt.NDArray[np.uint8] = flat.reshape(handle.slots, -1)
        self._mapping = mapping
        self._skip = skip
        self._fd = fd
        self._populated = bytearray(handle.slots)

    @classmethod
    def create(cls, layout: SlotLayout, capacity_bytes: int) -> PoolRegion:
        """Make one rank's region; the other ranks make theirs from the same arguments.

        Args:
            layout: sizes of a slot, all ranks.
            capacity_bytes: of all ranks together.

        Raises:
            GeometryError, TierError: as for `DramPool`.
        """
        slots = _slots_in(layout, capacity_bytes)
        size = slots * layout.part_stride
        fd, mapping = _make(size)
        return cls(_handle(fd, size, slots, layout), mapping, 0, fd)

    @classmethod
    def attach(cls, handle: RegionHandle) -> PoolRegion:
        """Map a region that a `DramPool` made.

        Raises:
            GeometryError: the handle contradicts itself or what lies behind its path.
            TierError: the path cannot be opened or mapped.
        """
        return cls(handle, *_attach(handle), -1)

    def populate(self, slots: Iterable[int]) -> None:
        """Give these slots memory and page-table entries before they are written to.

        A slot's first use then costs one call instead of a fault for every 4 KiB (saves into fresh
        slots: 2.3 against 1.5 GB/s), and a machine without memory left is an error here instead
        of a SIGBUS in the middle of a copy. Free for slots that were populated before.

        Raises:
            OSError: there is no memory for them.
        """
        populated = self._populated
        for slot in slots:
            if not populated[slot]:
                self._populate(slot)
                populated[slot] = 1

    def _populate(self, slot: int) -> None:
        stride = self.layout.part_stride
        first = self._skip + slot * stride
        start = first - first % mmap.PAGESIZE
        try:
            self._mapping.madvise(_MADV_POPULATE_WRITE, start, first + stride - start)
        except OSError as error:
            # An older kernel does not know the call: the copy takes its faults one by one.
            if error.errno != errno.EINVAL:
                raise

    def close(self) -> None:
        """Let go of the memory; who else has mapped it keeps it. May be called twice.

        Close the mover first: arrays that others still hold keep the mapping alive.
        """
        self.array = np.empty((0, self.layout.part_stride), np.uint8)
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
        _unmap(self._mapping)


def _slots_in(layout: SlotLayout, capacity_bytes: int) -> int:
    slots = capacity_bytes // layout.slot_bytes
    if slots < 1:
        raise GeometryError(
            f"{_TIER}: capacity={capacity_bytes} bytes holds no chunk; set it to at least "
            f"{layout.slot_bytes} bytes or make chunk_tokens={layout.chunk_tokens} smaller"
        )
    return slots


def _make(size: int) -> tuple[int, mmap.mmap]:
    """A sealed memfd and a mapping of all of it."""
    try:
        fd = os.memfd_create("tierkv-pool", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(fd, size)
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)
            return fd, _map(fd, 0, size)
        except BaseException:
            os.close(fd)
            raise
    except (OSError, OverflowError) as error:
        raise TierError(
            f"no shared memory of {size} bytes: {error}; lower capacity", tier=_TIER
        ) from error


def _handle(fd: int, size: int, slots: int, layout: SlotLayout) -> RegionHandle:
    return RegionHandle(f"/proc/{os.getpid()}/fd/{fd}", size, 0, slots, layout)


def _attach(handle: RegionHandle) -> tuple[mmap.mmap, int]:
    """Map a region; also how many bytes the mapping has before it."""
    offset, length = handle.offset_bytes, handle.region_bytes
    if handle.slots < 1 or offset < 0 or offset % length or offset + length > handle.size_bytes:
        raise GeometryError(f"sizes in a region's handle do not agree: {handle}")
    # Parts are aligned to 4 KiB, mappings to the machine's page, which may be larger.
    skip = offset % mmap.ALLOCATIONGRANULARITY
    try:
        fd = os.open(handle.path, os.O_RDWR | os.O_CLOEXEC)
        try:
            # The maker's number may by now mean another file: only a sealed memfd of the very size
            # is ours.
            if os.fstat(fd).st_size != handle.size_bytes or not _is_sealed(fd):
                raise GeometryError(
                    f"{handle.path} is not the memory of {handle.size_bytes} bytes that its handle "
                    "describes; restart the engine"
                )
            return _map(fd, offset - skip, length + skip), skip
        finally:
            os.close(fd)
    except OSError as error:
        raise TierError(
            f"cannot map {handle.path}: {error}; scheduler and workers must share a machine, a "
            "user and a PID namespace",
            tier=_TIER,
        ) from error


def _map(fd: int, offset: int, size: int) -> mmap.mmap:
    mapping = mmap.mmap(fd, size, mmap.MAP_SHARED, offset=offset)
    # Either may be unknown to this kernel; both are only advice. Huge pages, where
    # /sys/kernel/mm/transparent_hugepage/shmem_enabled is "advise": first save into a slot 3.7
    # against 1.5 GB/s, first load by another process 12.9 against 8.9. No dump: a crashed engine
    # should not write the whole cache, which is text of users in other form, into its core file.
    for advice in (mmap.MADV_HUGEPAGE, mmap.MADV_DONTDUMP):
        with suppress(OSError):
            mapping.madvise(advice)
    return mapping


def _unmap(mapping: mmap.mmap) -> None:
    # A view is still in use, by a copy in flight perhaps: the mapping then goes with the last one.
    with suppress(BufferError):
        mapping.close()


def _is_sealed(fd: int) -> bool:
    try:
        return fcntl.fcntl(fd, fcntl.F_GET_SEALS) & _SEALS == _SEALS
    except OSError:
        return False
