"""Pool: one region of page-aligned host memory that holds all encoded objects."""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Callable

import numpy as np

from orbitkv.cache.ranges import FreeRanges
from orbitkv.config import format_nbytes
from orbitkv.errors import ConfigError
from orbitkv.objects import OBJECT_ALIGN_NBYTES, Bytes, align_up


class Pool:
    """Host memory in one mapping, backed by huge pages and locked where the limits allow.

    Raises:
        ConfigError: the machine has less memory.

    Attributes:
        memory: uint8[capacity_nbytes], host, page-aligned.
        address: Of its first byte.
        unlocked_reason: Why the memory is not locked; None where it is, or was not asked to be.
    """

    def __init__(self, capacity_nbytes: int, *, lock_memory: bool) -> None:
        capacity_nbytes = align_up(capacity_nbytes, OBJECT_ALIGN_NBYTES)
        physical_nbytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        if capacity_nbytes > physical_nbytes:
            raise ConfigError(
                f"pool of {format_nbytes(capacity_nbytes)}; "
                f"this machine has {format_nbytes(physical_nbytes)}"
            )
        mapping = mmap.mmap(-1, capacity_nbytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        mapping.madvise(mmap.MADV_HUGEPAGE)
        self.memory: Bytes = np.frombuffer(mapping, np.uint8)
        self.address: int = self.memory.ctypes.data
        self.unlocked_reason = _lock(self.memory) if lock_memory else None
        self._ranges = FreeRanges(capacity_nbytes)
        self._unpin: Callable[[int], None] | None = None

    @property
    def capacity_nbytes(self) -> int:
        """All bytes of the pool."""
        return self._ranges.capacity_nbytes

    @property
    def used_nbytes(self) -> int:
        """Bytes allocated now, in whole 4 KiB blocks."""
        return self._ranges.capacity_nbytes - self._ranges.free_nbytes

    @property
    def largest_free_nbytes(self) -> int:
        """The largest allocation that would succeed without eviction."""
        return self._ranges.largest_nbytes

    def allocate(self, nbytes: int) -> int | None:
        """Take a range; return its offset, or None where no free one is long enough."""
        return self._ranges.allocate(nbytes)

    def free(self, offset: int, nbytes: int) -> None:
        """Give a range back. Only after the last DMA or I/O on it has ended."""
        self._ranges.free(offset, nbytes)

    def pin(self, register: Callable[[int, int], None], unregister: Callable[[int], None]) -> None:
        """Let a device copy from and to the pool by itself, until it is closed. Once is enough.

        Args:
            register, unregister: The device's calls, for an address and a number of bytes.
        """
        if self._unpin is None:
            register(self.address, self.memory.nbytes)
            self._unpin = unregister

    def close(self) -> None:
        """Drop the mapping; a view that somebody still holds keeps it alive until it goes."""
        unpin, self._unpin = self._unpin, None
        if unpin is not None:
            unpin(self.address)
        self.memory = np.empty(0, np.uint8)


def _lock(memory: Bytes) -> str | None:
    """Lock memory into RAM; return why not, in words, where the limit forbids it."""
    libc = ctypes.CDLL(None, use_errno=True)
    address = ctypes.c_void_p(memory.ctypes.data)
    if libc.mlock(address, ctypes.c_size_t(memory.nbytes)) == 0:
        return None
    reason = os.strerror(ctypes.get_errno())
    return f"mlock of {memory.nbytes} bytes: {reason}; raise the memlock limit (ulimit -l)"
