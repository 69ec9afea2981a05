"""Budget: bytes granted before they are used, and given back when the last use has ended."""

from __future__ import annotations

import asyncio

from orbitkv.errors import ImpossibleRequest


class Lease:
    """The right to some bytes of a budget, until released. Releasing twice is harmless."""

    __slots__ = ("_budget", "nbytes")

    def __init__(self, budget: Budget, nbytes: int) -> None:
        self._budget: Budget | None = budget
        self.nbytes = nbytes

    def release(self) -> None:
        """Give the bytes back. Only after the last DMA or I/O on them has ended."""
        budget, self._budget = self._budget, None
        if budget is not None:
            budget._give_back(self.nbytes)  # noqa: SLF001 - a lease is the budget's other half


class Budget:
    """At most ``capacity_nbytes`` leased at once, granted in the order of asking.

    Args:
        name: What it bounds, for errors: ``budget of node C``.
    """

    def __init__(self, name: str, capacity_nbytes: int) -> None:
        self.name = name
        self.capacity_nbytes = capacity_nbytes
        self.used_nbytes = 0
        self.peak_nbytes = 0
        self._waiting: dict[asyncio.Future[Lease], int] = {}

    async def acquire(self, nbytes: int) -> Lease:
        """Wait until ``nbytes`` are free and nobody waits before us.

        Raises:
            ImpossibleRequest: at once, when the whole budget is smaller.
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
        return Lease(self, nbytes)

    def _give_back(self, nbytes: int) -> None:
        self.used_nbytes -= nbytes
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
