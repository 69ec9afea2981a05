"""Arena: device memory of one lane, bounded by the codec budget, leased to batches in ranges."""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import Callable
from typing import Any, Protocol

from orbitkv.cache.ranges import FreeRanges
from orbitkv.config import MIB
from orbitkv.errors import DeviceFault, ImpossibleRequest
from orbitkv.objects import OBJECT_ALIGN_NBYTES, align_up

_GROWTH_NBYTES = 2 * MIB


def as_fault(error: Exception) -> DeviceFault:
    """Tell whatever failed on a device as a fault of the request."""
    return error if isinstance(error, DeviceFault) else DeviceFault(repr(error))


class ArenaMemory(Protocol):
    """One allocation of a device's memory at a time."""

    def allocate(self, nbytes: int) -> int:
        """Allocate; returns the address. Raises DeviceFault where the device has no more."""
        ...

    def free(self) -> None:
        """Free what was allocated, if anything."""
        ...


class ArenaLease:
    """A range of an arena, until released. Releasing twice is harmless.

    Attributes:
        address: Device address, a multiple of 4 KiB.
    """

    __slots__ = ("_arena", "_offset", "address", "nbytes")

    def __init__(self, arena: Arena, offset: int, nbytes: int) -> None:
        self._arena: Arena | None = arena
        self._offset = offset
        self.address = arena.address + offset
        self.nbytes = nbytes

    def split(self, nbytes: int) -> ArenaLease:
        """Keep the first ``nbytes``, a multiple of 4 KiB; return the rest as a range of its own."""
        assert self._arena, "a range that was given back"
        rest = ArenaLease(self._arena, self._offset + nbytes, self.nbytes - nbytes)
        self.nbytes = nbytes
        return rest

    def release(self) -> None:
        """Give the range back. Only after the last kernel or copy on it has ended."""
        arena, self._arena = self._arena, None
        if arena is not None:
            arena.free(self._offset, self.nbytes)


class Arena:
    """Device memory of one lane: one allocation, grown to what batches need, leased in ranges.

    Args:
        name: For errors: ``arena of stream:save on cuda:0``.
        limit_nbytes: Most that it may ever be.
        memory: Of the device, for this arena alone.
        run: Runs what blocks, off the loop.
    """

    def __init__(
        self, name: str, limit_nbytes: int, memory: ArenaMemory, run: Callable[..., Any]
    ) -> None:
        self.name = name
        self.limit_nbytes = limit_nbytes
        self.address = 0
        self.memory = memory
        self._run = run
        self._ranges = FreeRanges(0)
        self._waiting: deque[tuple[asyncio.Future[ArenaLease], int]] = deque()
        self._growing: asyncio.Task[None] | None = None

    @property
    def capacity_nbytes(self) -> int:
        """What is allocated now."""
        return self._ranges.capacity_nbytes

    @property
    def used_nbytes(self) -> int:
        """What is leased now."""
        return self._ranges.capacity_nbytes - self._ranges.free_nbytes

    async def acquire(self, nbytes: int) -> ArenaLease:
        """Wait until a range of ``nbytes`` is free and nobody waits before us.

        Raises:
            ImpossibleRequest: at once, when the limit is smaller.
            DeviceFault: the device has no memory left.
        """
        if nbytes > self.limit_nbytes:
            raise ImpossibleRequest(
                f"{self.name}: {nbytes} bytes asked for; the budget is {self.limit_nbytes}"
            )
        nbytes = max(nbytes, OBJECT_ALIGN_NBYTES)
        if lease := self.lease(nbytes):
            return lease
        granted: asyncio.Future[ArenaLease] = asyncio.get_running_loop().create_future()
        self._waiting.append((granted, nbytes))
        self._serve()
        try:
            return await granted
        except asyncio.CancelledError:
            if granted.done() and not granted.cancelled() and not granted.exception():
                granted.result().release()  # granted in the tick in which we were cancelled
            self._serve()
            raise

    def lease(self, nbytes: int) -> ArenaLease | None:
        """A range, if one is free now and nobody waits for it."""
        return None if self._waiting or self._growing else self._free_range(nbytes)

    async def acquire_now(self, nbytes: int) -> ArenaLease | None:
        """A range, unless it had to wait for somebody else's; only growth is waited for.

        Raises:
            DeviceFault: the device has no memory left.
        """
        nbytes = max(nbytes, OBJECT_ALIGN_NBYTES)
        while self._growing:
            await asyncio.wait([self._growing])
        lease = self.lease(nbytes)
        idle = not (self.used_nbytes or self._waiting)
        if lease is None and idle and nbytes <= self.limit_nbytes:
            return await self.acquire(nbytes)
        return lease

    def free(self, offset: int, nbytes: int) -> None:
        """Take a range back."""
        self._ranges.free(offset, nbytes)
        self._serve()

    async def close(self) -> None:
        """Free the memory. Only once nothing is leased."""
        if self._growing:
            await asyncio.wait([self._growing])
        with contextlib.suppress(DeviceFault):  # a dead context has freed it
            await self._run(self.memory.free)

    def _serve(self) -> None:
        while self._waiting and self._growing is None:
            granted, nbytes = self._waiting[0]
            if granted.done():  # its caller was cancelled
                self._waiting.popleft()
                continue
            lease = self._free_range(nbytes)
            if lease is None:
                if not self.used_nbytes:
                    self._growing = asyncio.create_task(self._grow(self._wanted_nbytes(nbytes)))
                return
            self._waiting.popleft()
            granted.set_result(lease)

    def _free_range(self, nbytes: int) -> ArenaLease | None:
        """A range that is free now; none while the arena is to grow first."""
        if not self.used_nbytes and self.capacity_nbytes < self._wanted_nbytes(nbytes):
            return None
        offset = self._ranges.allocate(nbytes)
        return None if offset is None else ArenaLease(self, offset, nbytes)

    def _wanted_nbytes(self, nbytes: int) -> int:
        """Room for two batches like this one, so that one is made while the other leaves."""
        rounded = align_up(2 * align_up(nbytes, OBJECT_ALIGN_NBYTES), _GROWTH_NBYTES)
        return min(self.limit_nbytes // OBJECT_ALIGN_NBYTES * OBJECT_ALIGN_NBYTES, rounded)

    async def _grow(self, nbytes: int) -> None:
        """Free first: two arenas at once would be more than the budget."""
        self._ranges = FreeRanges(0)
        try:
            self.address = await self._run(self._replace, nbytes)
        except Exception as error:  # noqa: BLE001 - else nobody would ever be served again
            granted, _ = self._waiting.popleft()
            fault = (
                error if isinstance(error, DeviceFault) else DeviceFault(f"{self.name}: {error!r}")
            )
            if not granted.done():
                granted.set_exception(fault)
        else:
            self._ranges = FreeRanges(nbytes)
        self._growing = None
        self._serve()

    def _replace(self, nbytes: int) -> int:
        self.memory.free()
        return self.memory.allocate(nbytes)
