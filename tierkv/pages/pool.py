# SPDX-License-Identifier: Apache-2.0
"""The DRAM tier's memory: for each rank a memfd that holds its part of every slot.

    region of rank r = rank r's part of slot 0 | of slot 1 | ...      `part_stride` bytes each

A worker makes its own region before the engine serves (on CUDA it pins it, which takes seconds),
and the Store maps the regions of all ranks. A memfd needs no room in /dev/shm, is nobody else's to
open, and is gone with its last holder, whatever ended it. Its size is sealed: were it cut short by
anyone, every holder would die of SIGBUS on the next access.

Memory is taken from the machine page by page when first touched, not when a region is made. Who
reads or writes which slot, and when, is the caller's business: nothing here locks.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
from collections.abc import Iterable, Sequence
from contextlib import ExitStack, closing, suppress
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
    """What another process needs to map a region. Plain values: may be pickled, packed or logged.

    Attributes:
        path: the maker's descriptor, "/proc/<pid>/fd/<n>".
        slots: chunks that it holds a part of.
        layout: sizes of a slot.
    """

    path: str
    slots: int
    layout: SlotLayout

    @property
    def size_bytes(self) -> int:
        return self.slots * self.layout.part_stride


class PoolRegion:
    """One rank's part of every slot, mapped into this process.

    Attributes:
        array: uint8 [slots, part_stride], writable, shared with whoever maps the same region; empty
            after `close`.
        handle: for others to map it, while its maker lives and holds it.
        layout: sizes of a slot.
        slots: how many there are.

    Thread: the owner's; in a worker its model thread.
    """

    def __init__(self, handle: RegionHandle, mapping: mmap.mmap, fd: int = -1) -> None:
        """Use `create` or `attach`.

        Args:
            handle: describes the region.
            mapping: all of it.
            fd: what the handle's path leads to, if that is this process's; closed with the region.
        """
        self.handle = handle
        self.layout = handle.layout
        self.slots = handle.slots
        flat = np.frombuffer(mapping, np.uint8)
        self.array: npt.NDArray[np.uint8] = flat.reshape(self.slots, self.layout.part_stride)
        self._mapping: mmap.mmap | None = mapping
        self._fd = fd
        self._populated = bytearray(self.slots)

    @classmethod
    def create(cls, layout: SlotLayout, capacity_bytes: int) -> PoolRegion:
        """Make one rank's region of a pool.

        Args:
            layout: sizes of a slot.
            capacity_bytes: upper bound of the whole pool, all ranks; what is left over after whole
                slots is not taken.

        Raises:
            GeometryError: the capacity holds no slot.
            TierError: the system gives no memfd or no address space of that size.
        """
        slots = capacity_bytes // layout.slot_bytes
        if slots < 1:
            raise GeometryError(
                f"{_TIER}: capacity={capacity_bytes} bytes holds no chunk; set it to at least "
                f"{layout.slot_bytes} bytes or make chunk_tokens={layout.chunk_tokens} smaller"
            )
        size = slots * layout.part_stride
        try:
            fd = os.memfd_create("tierkv-pool", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
            try:
                os.ftruncate(fd, size)
                fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)
                handle = RegionHandle(f"/proc/{os.getpid()}/fd/{fd}", slots, layout)
                return cls(handle, _map(fd, size), fd)
            except BaseException:
                os.close(fd)
                raise
        except (OSError, OverflowError, MemoryError) as error:
            raise TierError(
                f"no shared memory of {size} bytes: {error}; lower capacity", tier=_TIER
            ) from error

    @classmethod
    def attach(cls, handle: RegionHandle) -> PoolRegion:
        """Map a region that another process (or this one) has made.

        Raises:
            GeometryError: what lies behind the path is not the region that the handle describes.
            TierError: the path cannot be opened or mapped.
        """
        size = handle.size_bytes
        mapping = None
        try:
            fd = os.open(handle.path, os.O_RDWR | os.O_CLOEXEC)
            try:
                # The maker's number may by now mean another file: only a sealed memfd of the very
                # size is ours.
                if 0 < size == os.fstat(fd).st_size and _is_sealed(fd):
                    mapping = _map(fd, size)
            finally:
                os.close(fd)
        except OSError as error:
            raise TierError(
                f"cannot map {handle.path}: {error.strerror}; workers must run on the scheduler's "
                "machine, as its user and in its PID namespace",
                tier=_TIER,
            ) from error
        if mapping is None:
            raise GeometryError(
                f"{handle.path} is not the region of {size} bytes that its handle describes; "
                "restart the engine"
            )
        return cls(handle, mapping)

    def populate(self, slots: Iterable[int]) -> None:
        """Give these slots memory and page-table entries before they are written to.

        A slot's first use then costs one call instead of a fault for every 4 KiB (saves into fresh
        slots: 2.3 against 1.5 GB/s), and a machine without memory left is an error here instead
        of a SIGBUS in the middle of a copy. Free for slots that were populated before.

        Raises:
            OSError: there is no memory for them.
            IndexError: no such slot, or the region is closed.
        """
        populated = self._populated
        for slot in slots:
            if not populated[slot]:
                assert self._mapping is not None
                self._populate(self._mapping, slot)
                populated[slot] = 1

    def _populate(self, mapping: mmap.mmap, slot: int) -> None:
        stride = self.layout.part_stride
        first = slot * stride
        start = first - first % mmap.PAGESIZE
        try:
            mapping.madvise(_MADV_POPULATE_WRITE, start, first + stride - start)
        except OSError as error:
            # An older kernel does not know the call: the copy takes its faults one by one.
            if error.errno != errno.EINVAL:
                raise

    def close(self) -> None:
        """Let go of the memory; whoever else has mapped it keeps it. May be called twice.

        Close the mover first: arrays that others still hold keep the mapping alive.
        """
        self.array = np.empty((0, self.layout.part_stride), np.uint8)
        self._populated = bytearray()
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
        mapping, self._mapping = self._mapping, None
        if mapping is not None:
            # Refused while a view of it is in use: it then goes with the last one.
            with suppress(BufferError):
                mapping.close()


class DramPool:
    """All ranks' regions, beside the scheduler: where the Store finds a slot's bytes.

    Args:
        regions: one a rank, in order, all of one layout; closed with the pool. Ranks may have
            room for different numbers of slots: the least counts.

    Attributes:
        layout: sizes of a slot.
        slots: how many there are.

    Raises:
        GeometryError: the regions do not make a pool; they stay the caller's.

    Thread: `parts` any; the others the owner's.
    """

    def __init__(self, regions: Sequence[PoolRegion]) -> None:
        layouts = {region.layout for region in regions}
        paths = {region.handle.path for region in regions}
        if len(layouts) != 1 or not len(paths) == len(regions) == regions[0].layout.ranks:
            raise GeometryError(
                f"{len(regions)} regions with {len(paths)} paths and {len(layouts)} layouts do not "
                "make a pool; every rank must give one of its own, all of one layout"
            )
        self.layout = regions[0].layout
        self.slots = min(region.slots for region in regions)
        self._regions = list(regions)
        self._bytes = [region.array.reshape(-1).data for region in regions]

    @classmethod
    def create(cls, layout: SlotLayout, capacity_bytes: int) -> DramPool:
        """A pool of this process's own. Arguments and errors as for `PoolRegion.create`."""
        return cls._of(PoolRegion.create(layout, capacity_bytes) for _ in range(layout.ranks))

    @classmethod
    def attach(cls, handles: Sequence[RegionHandle]) -> DramPool:
        """Map the workers' regions. Errors as for `PoolRegion.attach` and `DramPool`.

        Args:
            handles: by rank.
        """
        return cls._of(map(PoolRegion.attach, handles))

    @classmethod
    def _of(cls, regions: Iterable[PoolRegion]) -> DramPool:
        """The pool of regions that are made on the way; none is left if one fails."""
        with ExitStack() as stack:
            pool = cls([stack.enter_context(closing(region)) for region in regions])
            stack.pop_all()
        return pool

    @property
    def handles(self) -> tuple[RegionHandle, ...]:
        """By rank, for others to map the same memory."""
        return tuple(region.handle for region in self._regions)

    def parts(self, slot: int) -> tuple[memoryview, ...]:
        """The slot's memory, writable: one view of `part_stride` bytes a rank, 4 KiB-aligned.

        Hot path: about 0.2 µs a rank. The views keep the memory mapped after `close`.

        Raises:
            IndexError: no such slot, or the pool is closed.
        """
        regions = self._bytes  # read once: another thread may be closing the pool
        if not regions or not 0 <= slot < self.slots:
            raise IndexError(f"slot {slot} of {self.slots if regions else 'a closed pool'}")
        stride = self.layout.part_stride
        start = slot * stride
        return tuple([region[start : start + stride] for region in regions])

    def close(self) -> None:
        """Let go of the memory; whoever else has mapped it keeps it. May be called twice."""
        self._bytes = []
        for region in self._regions:
            region.close()


def _map(fd: int, size: int) -> mmap.mmap:
    mapping = mmap.mmap(fd, size, mmap.MAP_SHARED)
    # Either may be unknown to this kernel; both are only advice. Huge pages, where
    # /sys/kernel/mm/transparent_hugepage/shmem_enabled is "advise": first save into a slot 3.7
    # against 1.5 GB/s, first load by another process 12.9 against 8.9. No dump: a crashed engine
    # should not write the whole cache, which is text of users in other form, into its core file.
    for advice in (mmap.MADV_HUGEPAGE, mmap.MADV_DONTDUMP):
        with suppress(OSError):
            mapping.madvise(advice)
    return mapping


def _is_sealed(fd: int) -> bool:
    try:
        return fcntl.fcntl(fd, fcntl.F_GET_SEALS) & _SEALS == _SEALS
    except OSError:
        return False
