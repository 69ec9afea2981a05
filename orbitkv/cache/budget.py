"""Budget: bytes granted before they are used, and given back when the last use has ended."""

from __future__ import annotations

import asyncio

import numpy as np

from orbitkv.errors import ImpossibleRequest
from orbitkv.objects import Bytes


class Lease:
    """The right to some bytes of an arena, until released. Releasing twice is harmless.

    Attributes:
        memory: uint8[nbytes], host; whatever it held before.
    """

    __slots__ = ("_arena", "memory", "nbytes")

    def __init__(self, arena: Arena, memory: Bytes, nbytes: int) -> None:
        self._arena: Arena | None = arena
        self.memory = memory[:nbytes]
        self.nbytes = nbytes

    def release(self) -> None:
        """Give the bytes back. Only after the last DMA or I/O on them has ended."""
        arena, self._arena = self._arena, None
        if arena is not None:
            arena._give_back(self)  # noqa: SLF001 - a lease is the arena's other half


class Arena:
    """Workspace of one node: at most ``capacity_nbytes`` leased at once, in the order of asking.

    Freed buffers are kept for the next batch, so that a steady flow allocates nothing. Growth
    lets a kept buffer go before it allocates a longer one.
    """

    def __init__(self, name: str, capacity_nbytes: int) -> None:
        self.name = name
        self.capacity_nbytes = capacity_nbytes
        self.used_nbytes = 0
        self.peak_nbytes = 0
        self.allocations = 0
        self._kept: list[Bytes] = []
        self._waiting: dict[asyncio.Future[Lease], int] = {}

    async def acquire(self, nbytes: int) -> Lease:
        """Wait until ``nbytes`` are free and nobody waits before us.

        Raises:
            ImpossibleRequest: at once, when the whole arena is smaller.
        """
        if nbytes > self.capacity_nbytes:
            raise ImpossibleRequest(
                f"{self.name}: {nbytes} bytes asked for; the budget is {self.capacity_nbytes}"
            )
        if not self._waiting and self.used_nbytes + nbytes <= self.capacity_nbytes:
            return self._grant(nbytes)
        granted: asyncio.Future[Lease] = asyncio.get_running_loop().create_future()
        self._waiting[granted] = nbytes
        try:
            return await granted
        except asyncio.CancelledError:
            if self._waiting.pop(granted, None) is None:
                granted.result().release()  # granted in the tick in which we were cancelled
            self._serve()
            raise

    def _grant(self, nbytes: int) -> Lease:
        self.used_nbytes += nbytes
        self.peak_nbytes = max(self.peak_nbytes, self.used_nbytes)
        long_enough = [index for index, kept in enumerate(self._kept) if kept.nbytes >= nbytes]
        if long_enough:
            return Lease(self, self._kept.pop(long_enough[0]), nbytes)
        if self._kept:
            self._kept.pop()
        self.allocations += 1
        return Lease(self, np.empty(nbytes, np.uint8), nbytes)

    def _give_back(self, lease: Lease) -> None:
        self.used_nbytes -= lease.nbytes
        whole = lease.memory.base if lease.memory.base is not None else lease.memory
        self._kept.append(whole)  # type: ignore[arg-type]  # the base of a Bytes view is Bytes
        while sum(kept.nbytes for kept in self._kept) > self.capacity_nbytes - self.used_nbytes:
            self._kept.pop(0)
        self._serve()

    def _serve(self) -> None:
        while self._waiting:
            granted, nbytes = next(iter(self._waiting.items()))
            if granted.cancelled():
                return  # its own task withdraws it, and serves the next
            if self.used_nbytes + nbytes > self.capacity_nbytes:
                return
            del self._waiting[granted]
            granted.set_result(self._grant(nbytes))
