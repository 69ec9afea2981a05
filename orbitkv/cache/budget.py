"""Budget: bytes granted before they are used, and given back when the last use has ended.

``Budget`` is waited for; ``Quota`` is not: what does not fit now is refused.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Hashable

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


class Quota:
    """At most so many bytes claimed at once, by all owners and by each of them.

    Args:
        capacity_nbytes: Of all owners together.
        each_nbytes: Of one owner.
    """

    def __init__(self, capacity_nbytes: int, each_nbytes: int) -> None:
        self.capacity_nbytes = capacity_nbytes
        self.each_nbytes = min(each_nbytes, capacity_nbytes)
        self.used_nbytes = 0
        self._used_by: Counter[Hashable] = Counter()

    def used_by(self, owner: Hashable) -> int:
        """Bytes that one owner has claimed."""
        return self._used_by[owner]

    def claim(self, owner: Hashable, nbytes: int) -> Claim | None:
        """Take bytes now; None where they are not free. More than ``each_nbytes`` never are."""
        free_nbytes = self.capacity_nbytes - self.used_nbytes
        if nbytes > min(free_nbytes, self.each_nbytes - self._used_by[owner]):
            return None
        self._add(owner, nbytes)
        return Claim(self, owner, nbytes)

    def _add(self, owner: Hashable, nbytes: int) -> None:
        self.used_nbytes += nbytes
        self._used_by[owner] += nbytes
        if not self._used_by[owner]:
            del self._used_by[owner]


class Claim:
    """Bytes of a quota, until released. Releasing twice is harmless."""

    __slots__ = ("_quota", "nbytes", "owner")

    def __init__(self, quota: Quota, owner: Hashable, nbytes: int) -> None:
        self._quota: Quota | None = quota
        self.owner = owner
        self.nbytes = nbytes

    def release(self) -> None:
        """Give the bytes back."""
        quota, self._quota = self._quota, None
        if quota is not None:
            quota._add(self.owner, -self.nbytes)  # noqa: SLF001 - a claim is the quota's other half
