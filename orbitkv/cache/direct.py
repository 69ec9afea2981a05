"""The direct route between GPU memory and SSD: whether it is open, its slots, and its pieces.

What is written is cut into pieces of at most one registered slot; what is read comes in such
pieces too. A job is all pieces of one batch, and ends when the last of them has.
"""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import structlog

from orbitkv.cache.catalogue import Copy
from orbitkv.config import MIB
from orbitkv.errors import DirectFault

SLOT_NBYTES = 4 * MIB
SLOTS = 2  # a device and direction: one is filled while the other is emptied
MOST_JOBS = 8  # of a device, queued or active


class Slot(Protocol):
    """Registered GPU memory of ``SLOT_NBYTES``."""

    @property
    def address(self) -> int:
        """Device address."""
        ...


class SlotPool:
    """Slots of one GPU, taken in turn."""

    def __init__(self, slots: Iterable[Slot]) -> None:
        self._free = list(slots)
        self._count = len(self._free)
        self._waiting: deque[asyncio.Future[Slot]] = deque()

    async def acquire(self) -> Slot:
        """Wait in turn for a slot."""
        if self._free:
            return self._free.pop()
        granted: asyncio.Future[Slot] = asyncio.get_running_loop().create_future()
        self._waiting.append(granted)
        try:
            return await granted
        except asyncio.CancelledError:
            if granted.done() and not granted.cancelled():
                self.release(granted.result())  # granted in the tick in which we were cancelled
            raise

    def release(self, slot: Slot) -> None:
        """Give a slot back. Only after the last copy or transfer on it has ended."""
        while self._waiting:
            granted = self._waiting.popleft()
            if not granted.done():
                granted.set_result(slot)
                return
        self._free.append(slot)

    @property
    def taken(self) -> int:
        """Slots that are in use."""
        return self._count - len(self._free)


@dataclass(slots=True)
class Gate:
    """Whether new work takes the direct route: one for both directions of a manager.

    Attributes:
        closed_reason: Of a failure at run time; the gate stays closed until a restart.
    """

    counters: Counter[str]
    log: structlog.stdlib.BoundLogger
    closed_reason: str | None = None

    def close(self, fault: DirectFault) -> None:
        """Let nothing new through."""
        self.counters["direct_faults"] += 1
        if self.closed_reason is None:
            self.closed_reason = str(fault)
            self.log.error("direct_route_closed", reason=self.closed_reason)


class Job(Protocol):
    """Writes of one batch, queued or active."""

    @property
    def device(self) -> int:
        """Ordinal of the GPU."""
        ...

    @property
    def ended(self) -> asyncio.Future[None]:
        """Ends when the last of them has."""
        ...


@dataclass(slots=True)
class DirectRoute:
    """One direction of the direct route, as the stages of a pipeline see it.

    Attributes:
        slots: By the ordinal of the GPU.
        jobs: Writes queued or active.
    """

    gate: Gate
    slots: dict[int, SlotPool] = field(default_factory=dict)
    jobs: set[Job] = field(default_factory=set)

    def open_device(self, device: int, slots: Iterable[Slot]) -> None:
        """Take the slots of a GPU into use."""
        self.slots.setdefault(device, SlotPool(slots))

    def takes(self, device: int | None) -> bool:
        """Whether new work on a GPU's pages may go here."""
        return self.gate.closed_reason is None and device in self.slots

    def has_place(self, device: int) -> bool:
        """Whether another job of a GPU may be queued."""
        return sum(job.device == device for job in self.jobs) < MOST_JOBS

    async def written(self) -> None:
        """Wait until every job of now has ended."""
        if jobs := [job.ended for job in self.jobs]:
            await asyncio.wait(jobs)

    def leaks(self) -> list[str]:
        """Slots and jobs still in use: none at rest."""
        found = [
            f"direct slots of cuda:{device}: {pool.taken}"
            for device, pool in self.slots.items()
            if pool.taken
        ]
        if self.jobs:
            found.append(f"direct jobs: {len(self.jobs)}")
        return found


class Piece(NamedTuple):
    """One range of a file, and what it holds.

    Attributes:
        parts: (number of the object, offset in the object, offset in the piece, bytes).
    """

    shard: int
    offset: int
    nbytes: int
    parts: tuple[tuple[int, int, int, int], ...]


def cut_pieces(extents: Sequence[Copy]) -> list[Piece]:
    """Cut extents into ranges of at most a slot; those beside each other share one.

    Args:
        extents: On SSD. The pieces name them by their number, and come in the order of the file.
    """
    pieces: list[Piece] = []
    order = sorted(range(len(extents)), key=lambda n: (extents[n].shard, extents[n].offset))
    for number in order:
        extent, done_nbytes = extents[number], 0
        while done_nbytes < extent.nbytes:
            at = extent.offset + done_nbytes
            last = pieces[-1] if pieces else None
            if (
                last is None
                or (last.shard, last.offset + last.nbytes) != (extent.shard, at)
                or last.nbytes == SLOT_NBYTES
            ):
                last = Piece(extent.shard, at, 0, ())
                pieces.append(last)
            nbytes = min(extent.nbytes - done_nbytes, SLOT_NBYTES - last.nbytes)
            part = (number, done_nbytes, last.nbytes, nbytes)
            pieces[-1] = last._replace(nbytes=last.nbytes + nbytes, parts=(*last.parts, part))
            done_nbytes += nbytes
    return pieces
