"""Host I/O lanes: the queue that both lanes share, and the lane that is there everywhere.

A lane moves bytes between files and host memory with at most ``depth`` operations in flight; the
rest wait first in, first out. Ways to leave it early are few, and all of them are here:

- An operation that was submitted is never abandoned: its awaiter returns, or is cancelled, only
  after the kernel is done with the buffer.
- An operation that still waits in the lane is withdrawn when its awaiter is cancelled.
- ``close`` takes no new work, lets what is queued and in flight end, and then frees the lane.

Somebody waits for a read, nobody for a write: lanes that share a ``Demand`` hold their writes back
while any of them has reads.
"""

from __future__ import annotations

import asyncio
import os
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from enum import Enum
from types import TracebackType
from typing import Any, ParamSpec, Self, TypeVar, cast

import numpy as np
import numpy.typing as npt

from orbitkv.runtime.lanes import Submitted, drained
from orbitkv.stages.base import Transfer

P = ParamSpec("P")
T = TypeVar("T")

MAX_TRANSFER_NBYTES = 1 << 30  # read(2) stops at 2 GiB - 4 KiB, a registered iovec at 1 GiB
MAX_OFFSET = 1 << 63


@dataclass(frozen=True, slots=True)
class LaneStatistics:
    """What a lane has done since ``start``. ``submitted`` is the sum of the next three."""

    submitted: int
    completed: int
    failed: int
    in_flight: int
    read_nbytes: int
    written_nbytes: int
    peak_in_flight: int


class Verb(Enum):
    """What the operations of one batch do."""

    READ = "read"
    WRITE = "write"
    CALL = "call"


Operation = Transfer | Callable[[], Any]
Outcome = int | OSError | Future[Any]  # bytes moved, a refusal, or an ended host call
Ended = tuple["Batch", int, Outcome]  # an operation by its position, and what came of it


class Demand:
    """Reads that are queued or in flight, over all lanes of one manager.

    While there are any, a lane starts a write only when it has nothing in flight: one at a time.
    So a read never waits behind more than one write a lane that was started after it, and writes
    that go on are not lost: what waits too long is evicted before it is written.
    """

    def __init__(self) -> None:
        self._reads = 0
        self._lanes: list[FifoLane] = []

    @property
    def is_waiting(self) -> bool:
        """Whether somebody waits for a read."""
        return self._reads > 0

    def join(self, lane: FifoLane) -> None:
        """Tell this lane when its writes need not be held back any more."""
        self._lanes.append(lane)

    def __enter__(self) -> None:
        """Note that a read was asked for."""
        self._reads += 1

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Note that it has ended, whatever came of it."""
        self._reads -= 1
        if not self._reads:
            for lane in self._lanes:
                lane.resume()


class Batch:
    """Operations of one call, in order; ``operations[:issued]`` have been submitted."""

    __slots__ = ("issued", "operations", "outcomes", "settled", "unsettled", "verb")

    def __init__(
        self, verb: Verb, operations: Sequence[Operation], settled: asyncio.Future[None]
    ) -> None:
        self.verb = verb
        self.operations = operations  # also keeps the buffers alive until the kernel is done
        self.outcomes: list[Outcome | None] = [None] * len(operations)
        self.issued = 0
        self.unsettled = len(operations)
        self.settled = settled


class FifoLane:
    """The queue of a lane: order, depth, cancellation, statistics. Use on one loop only.

    A subclass submits from ``_issue`` what ``_claim`` hands it. When the kernel is done it calls
    ``_settle`` on the loop, or ``_tell`` on another thread.

    Args:
        demand: Of all lanes that hold their writes back for each other's reads. None: of this one.

    Raises:
        ValueError: ``depth`` is not positive; later, from a call, a transfer that no lane can do.
        RuntimeError: a call before ``start`` or after ``close``.
    """

    backend: str

    def __init__(
        self, name: str, *, depth: int, threads: int, demand: Demand | None = None
    ) -> None:
        if depth < 1:
            raise ValueError(f"lane {name!r}: depth is {depth}, wanted 1 or more")
        self.name = name
        self.depth = depth
        self.in_flight = 0
        self.buffers_refused: str | None = None
        self._demand = demand or Demand()
        self._demand.join(self)
        self._threads = ThreadPoolExecutor(threads, f"lane-{name}")  # starts them when needed
        self._ended: deque[Ended] = deque()
        self._loop: asyncio.AbstractEventLoop
        self._started = False
        self._closing = False
        self._flush_is_due = False
        self._queued: deque[Batch] = deque()
        self._at_rest: Submitted[None] | None = None
        self._submitted = self._completed = self._failed = self._peak_in_flight = 0
        self._read_nbytes = self._written_nbytes = 0

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.close()

    async def start(self) -> None:
        """Bind the lane to the running loop and open what it needs.

        Raises:
            OSError: the kernel refuses.
        """
        if self._started or self._closing:
            raise RuntimeError(f"lane {self.name!r} was started or closed before")
        self._loop = asyncio.get_running_loop()
        self._open(self._loop)
        self._started = True

    async def read_many(self, transfers: Sequence[Transfer]) -> list[int | OSError]:
        """Fill every buffer from its file. Gives per transfer the bytes moved, or the refusal.

        One call for many transfers costs one wake-up of the caller instead of many.
        """
        for transfer in transfers:
            check_transfer(transfer, into_buffer=True)
        with self._demand:
            return cast("list[int | OSError]", await self._run(Verb.READ, list(transfers)))

    async def write_many(self, transfers: Sequence[Transfer]) -> list[int | OSError]:
        """Write every buffer to its file. Gives per transfer the bytes moved, or the refusal."""
        for transfer in transfers:
            check_transfer(transfer, into_buffer=False)
        return cast("list[int | OSError]", await self._run(Verb.WRITE, list(transfers)))

    async def read(self, fd: int, target: npt.NDArray[np.uint8], offset: int) -> int:
        """Fill ``target`` (uint8[n]) from ``offset``; gives the bytes moved, fewer at the end.

        Raises:
            OSError: the kernel's refusal, with its errno.
        """
        return moved((await self.read_many((Transfer(fd, target, offset),)))[0])

    async def write(self, fd: int, source: npt.NDArray[np.uint8], offset: int) -> int:
        """Write ``source`` (uint8[n]) at ``offset``; gives the bytes moved, maybe fewer.

        Raises:
            OSError: the kernel's refusal, with its errno.
        """
        return moved((await self.write_many((Transfer(fd, source, offset),)))[0])

    async def run(self, fn: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Make a blocking host call (ftruncate, fsync) off the loop, in its turn.

        It takes its place in the queue but is no barrier: transfers before it may still be in
        flight, so await those first where their order matters.
        """
        outcomes = await self._run(Verb.CALL, [lambda: fn(*args, **kwargs)])
        return cast("Future[T]", outcomes[0]).result()

    async def register_buffers(self, region: npt.NDArray[np.uint8]) -> bool:
        """Pin ``region`` (uint8[n]) for the lane's life, so that transfers need not pin pages.

        False where that cannot be had, with the reason in ``buffers_refused``; the lane then
        works without.
        """
        self.buffers_refused = f"{self.backend} cannot register the {region.nbytes} bytes"
        return False

    async def close(self) -> None:
        """Let what is queued and in flight end, then free the lane. May be called again."""
        self._closing = True
        try:
            if self._queued or self.in_flight:
                if self._at_rest is None:
                    self._at_rest = Submitted(loop=self._loop)
                await drained(self._at_rest)
        finally:
            self._threads.shutdown(wait=False)  # at rest: they are idle
            self._release()

    def statistics(self) -> LaneStatistics:
        """Count what the lane has done since ``start``."""
        return LaneStatistics(
            submitted=self._submitted,
            completed=self._completed,
            failed=self._failed,
            in_flight=self.in_flight,
            read_nbytes=self._read_nbytes,
            written_nbytes=self._written_nbytes,
            peak_in_flight=self._peak_in_flight,
        )

    def _open(self, loop: asyncio.AbstractEventLoop) -> None:
        """Acquire what the lane needs from the kernel; nothing if it needs threads only."""

    def _issue(self) -> None:
        """Submit what is queued while depth is left, as much as one turn may."""
        raise NotImplementedError

    def _release(self) -> None:
        """Free what ``_open`` acquired, at rest. Must bear a second call."""

    def _check_open(self) -> None:
        if not self._started or self._closing:
            state = "closed" if self._closing else "not started"
            raise RuntimeError(f"lane {self.name!r} is {state}")

    async def _run(self, verb: Verb, operations: Sequence[Operation]) -> list[Outcome | None]:
        self._check_open()
        if not operations:
            return []
        batch = Batch(verb, operations, self._loop.create_future())
        self._queued.append(batch)
        self._flush_soon()
        try:
            await batch.settled
        except asyncio.CancelledError:
            self._withdraw(batch)
            if batch.unsettled:  # the future that was awaited is itself cancelled by now
                rest: Submitted[None] = Submitted(loop=self._loop)
                batch.settled = rest
                await drained(rest)
            raise
        return batch.outcomes

    def _flush_soon(self) -> None:
        """Submit after this turn of the loop, together with what else it queues."""
        if not self._flush_is_due:
            self._flush_is_due = True
            self._loop.call_soon(self._flush)

    def _flush(self) -> None:
        self._flush_is_due = False
        self._issue()

    def resume(self) -> None:
        """Submit what was held back."""
        if self._queued:
            self._flush_soon()

    def _has_work(self) -> bool:
        return bool(self._queued) and self._room() > 0

    def _room(self) -> int:
        """How many operations of the oldest batch may be submitted now."""
        held_back = self._demand.is_waiting and self._queued[0].verb is Verb.WRITE
        return (1 if held_back else self.depth) - self.in_flight

    def _claim(self, at_most: int) -> tuple[Batch, range]:
        """Claim operations of the oldest batch, by position; at least one if ``_has_work``."""
        batch = self._queued[0]
        first = batch.issued
        claimed = min(at_most, len(batch.operations) - first, self._room())
        batch.issued = first + claimed
        if batch.issued == len(batch.operations):
            self._queued.popleft()
        self._submitted += claimed
        self.in_flight += claimed
        self._peak_in_flight = max(self._peak_in_flight, self.in_flight)
        return batch, range(first, batch.issued)

    def _settle(self, ended: Sequence[Ended]) -> None:
        """Wake the awaiters of what the kernel is done with, and fill the depth it leaves."""
        self.in_flight -= len(ended)
        if self._queued:
            self._issue()  # first of all: the device would be idle during the rest
        for batch, position, outcome in ended:
            batch.outcomes[position] = outcome
            batch.unsettled -= 1
            if not batch.unsettled and not batch.settled.done():
                batch.settled.set_result(None)
            if not isinstance(outcome, int):
                if isinstance(outcome, OSError) or outcome.exception() is not None:
                    self._failed += 1
                    self._completed -= 1
            elif batch.verb is Verb.READ:
                self._read_nbytes += outcome
            else:
                self._written_nbytes += outcome
        self._completed += len(ended)
        self._note_rest()

    def _note_rest(self) -> None:
        if self._at_rest is not None and not self.in_flight and not self._queued:
            self._at_rest.set_result(None)
            self._at_rest = None

    def _withdraw(self, batch: Batch) -> None:
        """Forget what was not submitted; only then may its buffers be released."""
        if batch.issued < len(batch.operations):
            batch.unsettled -= len(batch.operations) - batch.issued
            self._queued.remove(batch)
            self._note_rest()

    def _call(self, batch: Batch, position: int) -> None:
        """Make a host call, on a thread; whatever comes of it, the loop hears."""
        operation = cast("Callable[[], Any]", batch.operations[position])
        ended: Future[Any] = Future()
        try:
            ended.set_result(operation())
        except BaseException as error:  # noqa: BLE001  the awaiter raises it, the thread lives on
            ended.set_exception(error)
        self._tell(batch, position, ended)

    def _tell(self, batch: Batch, position: int, outcome: Outcome) -> None:
        """Have the loop settle what ended on a thread."""
        self._ended.append((batch, position, outcome))
        self._loop.call_soon_threadsafe(self._settle_told)

    def _settle_told(self) -> None:
        if self._ended:
            ended = [self._ended.popleft() for _ in range(len(self._ended))]
            self._settle(ended)


class PreadLane(FifoLane):
    """``depth`` threads in ``preadv`` and ``pwritev``: works wherever Python does.

    Raises:
        ValueError: ``depth`` is not positive.
    """

    backend = "preadv"

    def __init__(self, name: str, *, depth: int, demand: Demand | None = None) -> None:
        super().__init__(name, depth=depth, threads=depth, demand=demand)

    def _issue(self) -> None:
        while self._has_work():
            batch, positions = self._claim(self.depth)
            work = self._call if batch.verb is Verb.CALL else self._move
            for position in positions:
                self._threads.submit(work, batch, position)

    def _move(self, batch: Batch, position: int) -> None:
        transfer = cast("Transfer", batch.operations[position])
        fd, buffer, offset = transfer
        call = os.preadv if batch.verb is Verb.READ else os.pwritev
        try:
            self._tell(batch, position, call(fd, (buffer.data,), offset))
        except OSError as error:
            self._tell(batch, position, refusal(error.errno or 0, batch.verb, transfer))


def check_transfer(transfer: Transfer, *, into_buffer: bool) -> None:
    """Refuse at the border what would otherwise move the wrong bytes.

    Raises:
        ValueError: says what the buffer or offset is, and what is wanted.
    """
    buffer = transfer.buffer
    check_buffer(buffer)
    if not 0 < buffer.nbytes <= MAX_TRANSFER_NBYTES:
        raise ValueError(f"buffer has {buffer.nbytes} bytes, wanted 1 to {MAX_TRANSFER_NBYTES}")
    if into_buffer and not buffer.flags.writeable:
        raise ValueError(f"buffer of {buffer.nbytes} bytes to read into is read-only")
    if not 0 <= transfer.offset < MAX_OFFSET:
        raise ValueError(f"offset is {transfer.offset}, wanted 0 to {MAX_OFFSET - 1}")


def check_buffer(buffer: npt.NDArray[np.uint8]) -> None:
    """Refuse host memory that is not one run of bytes.

    Raises:
        ValueError: says what it is, and what is wanted.
    """
    if buffer.dtype.char != "B" or buffer.ndim != 1 or not buffer.flags.c_contiguous:
        raise ValueError(
            f"buffer is {buffer.dtype}{list(buffer.shape)}, wanted contiguous uint8[n]"
        )


def moved(outcome: int | OSError) -> int:
    """Give the bytes that one transfer moved, or raise its refusal."""
    if isinstance(outcome, OSError):
        raise outcome
    return outcome


def refusal(number: int, verb: Verb, transfer: Transfer) -> OSError:
    """Build the error of a refused transfer: errno, and what was tried where."""
    return OSError(
        number,
        f"{os.strerror(number)}: {verb.value} of {transfer.buffer.nbytes} bytes"
        f" at offset {transfer.offset} of fd {transfer.fd}",
    )
