"""The io_uring lane, and the choice between it and threads.

The loop's thread owns the ring: it fills submission entries, hands those of one turn of the loop to
the kernel with one system call, and reaps completions in batches when the ring's eventfd wakes it.
"""

from __future__ import annotations

import asyncio
import ctypes
import errno
import itertools
import mmap
import os
from collections.abc import Callable, Iterable
from typing import Literal, cast

import numpy as np
import numpy.typing as npt

from orbitkv.errors import ConfigError, Unavailable
from orbitkv.runtime.liburing import (
    CQE,
    CQE_SHIFT,
    OP_READ,
    OP_READ_FIXED,
    OP_WRITE,
    SQE,
    SQE_ASYNC,
    SQE_SHIFT,
    SQE_USER_DATA,
    UINT32,
    IoVec,
    Liburing,
    Ring,
    probe_io_uring,
    uint_at,
)
from orbitkv.runtime.preadv import (
    Batch,
    Demand,
    Ended,
    FifoLane,
    Outcome,
    PreadLane,
    Verb,
    check_buffer,
    refusal,
)
from orbitkv.stages.base import Transfer

# A submit holds the loop while the kernel pins pages and cuts requests: 4 us for 64 KiB, but 45 us
# (registered) to 140 us for 4 MiB, and a copy on top if the file is not O_DIRECT. So what is large
# by itself goes to a kernel worker (IOSQE_ASYNC): 2 us here, the same bandwidth. That costs small
# operations a quarter of theirs; they stay inline, and a turn of the loop submits only so many as
# take about 35 us. Measured by benchmarks/bench_io_lane.py.
INLINE_NBYTES = 256 << 10
TURN_OPERATIONS = 8
RETRY_S = 0.001

MADV_POPULATE_WRITE = 23
POPULATE_NBYTES = 4 << 20
MOST_ENTRIES = 1 << 15  # of an io_uring, whatever the kernel
IOVEC_SHIFT = 30  # the kernel registers at most 1 GiB an iovec


class RingLane(FifoLane):
    """One io_uring on the loop, at least ``depth`` entries deep.

    Raises:
        ValueError: ``depth`` is not 1 to 32,768, the kernel's limit.
    """

    backend = "io_uring"

    def __init__(self, name: str, *, depth: int, demand: Demand | None = None) -> None:
        super().__init__(name, depth=depth, threads=1, demand=demand)
        if depth > MOST_ENTRIES:
            most = MOST_ENTRIES
            raise ValueError(f"lane {name!r}: depth is {depth}, an io_uring has {most} at most")
        self._ring: Ring | None = None
        self._region: npt.NDArray[np.uint8] | None = None
        self._region_start = self._region_end = 0  # addresses; equal: nothing is registered
        self._is_pinning = False
        self._user_data = itertools.count()
        self._taken: dict[int, tuple[Batch, int]] = {}  # by user_data, while the kernel has them
        self._unsent = 0  # entries filled that the kernel has not taken

    async def register_buffers(self, region: npt.NDArray[np.uint8]) -> bool:
        """Pin ``region`` (uint8[n]) for the lane's life, so that transfers need not pin pages.

        Await it once, before the first transfer. Transfers made meanwhile wait: the kernel holds
        the ring's lock while it pins (some 0.1 s a GiB), and a submit would stall the loop.

        Raises:
            RuntimeError: a region is registered, or transfers are in flight.
        """
        check_buffer(region)
        self._check_open()
        if self._region is not None or self._queued or self.in_flight:
            raise RuntimeError(f"lane {self.name!r}: register once, before the first transfer")
        self._is_pinning = True
        try:
            number = await self.run(self._pin, region)
        finally:
            self._is_pinning = False
            self._flush_soon()
        if number:
            self.buffers_refused = (
                f"cannot register {region.nbytes} bytes: {os.strerror(number)}"
                + (", see RLIMIT_MEMLOCK (ulimit -l)" if number == errno.ENOMEM else "")
            )
        return number == 0

    def _pin(self, region: npt.NDArray[np.uint8]) -> int:
        """Register ``region`` as iovecs of at most 1 GiB; gives 0 or an errno."""
        # Pinning holds the process's mmap lock, and for seconds if it must fault pages in: then any
        # thread that allocates waits, the loop's too. So they are faulted in before, in steps.
        first = region.ctypes.data & -mmap.PAGESIZE
        for start in range(first, region.ctypes.data + region.nbytes, POPULATE_NBYTES):
            end = min(start + POPULATE_NBYTES, region.ctypes.data + region.nbytes)
            if self._liburing.madvise(start, end - start, MADV_POPULATE_WRITE) != 0:
                break  # before Linux 5.14, or memory that pinning will refuse with a reason
        starts = range(0, region.nbytes, 1 << IOVEC_SHIFT)
        iovecs = (IoVec * len(starts))(
            *(
                IoVec(region.ctypes.data + start, min(1 << IOVEC_SHIFT, region.nbytes - start))
                for start in starts
            )
        )
        number = -int(self._liburing.register_buffers(self._ring, iovecs, len(iovecs)))
        if number == 0:  # transfers are held, so the loop does not look at these meanwhile
            self._region = region  # kept until the ring is gone
            self._region_start = region.ctypes.data
            self._region_end = self._region_start + region.nbytes
        return number

    def _open(self, loop: asyncio.AbstractEventLoop) -> None:
        self._liburing = Liburing()
        ring = self._liburing.open_ring(self.depth)
        eventfd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        result = self._liburing.register_eventfd(ring, eventfd)
        if result < 0:
            os.close(eventfd)
            self._liburing.queue_exit(ring)
            raise OSError(-result, f"{os.strerror(-result)}: cannot bind an eventfd to the ring")
        self._ring = ring
        self._sq = ring.sq  # views into ``ring``, as are all below
        self._sq_mask = uint_at(ring.sq.kring_mask).value
        self._sqes = (ctypes.c_ubyte * ((self._sq_mask + 1) << SQE_SHIFT)).from_address(
            ring.sq.sqes
        )
        self._cq_head = uint_at(ring.cq.khead)
        self._cq_mask = uint_at(ring.cq.kring_mask).value
        self._cqes = (ctypes.c_ubyte * ((self._cq_mask + 1) << CQE_SHIFT)).from_address(
            ring.cq.cqes
        )
        self._peeked = (ctypes.c_void_p * (self._cq_mask + 1))()
        self._eventfd = eventfd
        loop.add_reader(eventfd, self._reap)

    def _release(self) -> None:
        if self._ring is None:
            return
        self._loop.remove_reader(self._eventfd)
        self._liburing.queue_exit(self._ring)
        os.close(self._eventfd)
        self._ring = self._region = None

    def _issue(self) -> None:
        """Fill entries for what waits, up to one turn's worth, and submit them together."""
        first = tail = self._sq.sqe_tail
        room = TURN_OPERATIONS
        while self._has_work():
            verb = self._queued[0].verb
            if self._is_pinning and verb is not Verb.CALL:
                break
            if not room:
                self._flush_soon()
                break
            batch, positions = self._claim(room)
            room -= len(positions)
            if verb is Verb.CALL:
                for position in positions:
                    self._threads.submit(self._call, batch, position)
            else:
                self._fill(batch, positions, tail)
                tail += len(positions)
        if tail != first:
            self._sq.sqe_tail = tail & UINT32
            self._unsent += tail - first
        if self._unsent:
            self._submit()

    def _fill(self, batch: Batch, positions: range, tail: int) -> None:
        """Write the submission entries of transfers, from index ``tail`` of the ring on."""
        plain = OP_READ if batch.verb is Verb.READ else OP_WRITE
        for position in positions:
            fd, buffer, offset = cast("Transfer", batch.operations[position])
            nbytes = buffer.nbytes
            address = address_of(buffer)
            opcode, iovec = plain, 0
            if self._region_start <= address and address + nbytes <= self._region_end:
                start = address - self._region_start
                if start >> IOVEC_SHIFT == (start + nbytes - 1) >> IOVEC_SHIFT:  # in one iovec
                    opcode, iovec = plain - OP_READ + OP_READ_FIXED, start >> IOVEC_SHIFT
            user_data = next(self._user_data)
            self._taken[user_data] = (batch, position)
            SQE.pack_into(
                self._sqes,
                (tail & self._sq_mask) << SQE_SHIFT,
                opcode,
                SQE_ASYNC if nbytes > INLINE_NBYTES else 0,
                0,
                fd,
                offset,
                address,
                nbytes,
                0,
                user_data,
                iovec,
                0,
                0,
            )
            tail += 1

    def _submit(self) -> None:
        """Hand all filled entries to the kernel. Those it does not take now go again later."""
        result = self._liburing.submit(self._ring)
        if result >= 0:
            self._unsent -= result
            if self._unsent:
                self._flush_soon()
        elif result in (-errno.EAGAIN, -errno.EBUSY, -errno.EINTR):  # out of memory for a moment
            self._loop.call_later(RETRY_S, self._flush)
        else:
            self._take_back(-result)

    def _take_back(self, number: int) -> None:
        """Refuse the entries that the kernel did not take, and never will."""
        head = uint_at(self._sq.khead).value
        refused = [
            (*SQE_USER_DATA.unpack_from(self._sqes, (at & self._sq_mask) << SQE_SHIFT), -number)
            for at in range(head, head + self._unsent)
        ]
        # The kernel reads the tail during a submit only, so it may still be moved back.
        uint_at(self._sq.ktail).value = self._sq.sqe_head = self._sq.sqe_tail = head
        self._unsent = 0
        self._loop.call_soon(self._settle_results, refused)

    def _reap(self) -> None:
        """Settle every operation that has completed, and submit what waited for its place."""
        os.eventfd_read(self._eventfd)
        head = self._cq_head.value
        # The call orders our loads after the kernel's stores; the entries are then read in place.
        count = self._liburing.peek_batch_cqe(self._ring, self._peeked, self._cq_mask + 1)
        results = [
            CQE.unpack_from(self._cqes, (at & self._cq_mask) << CQE_SHIFT)
            for at in range(head, head + count)
        ]
        self._cq_head.value = (head + count) & UINT32
        self._settle_results(results)

    def _settle_results(self, results: Iterable[tuple[int, int]]) -> None:
        """Settle operations by user_data and result: bytes moved, or a negated errno."""
        ended: list[Ended] = []
        for user_data, result in results:
            batch, position = self._taken.pop(user_data)
            outcome: Outcome = result
            if result < 0:
                transfer = cast("Transfer", batch.operations[position])
                outcome = refusal(-result, batch.verb, transfer)
            ended.append((batch, position, outcome))
        self._settle(ended)


def open_io_lane(
    name: str,
    *,
    depth: int,
    backend: Literal["auto", "uring", "preadv"],
    log: Callable[..., object],
    demand: Demand | None = None,
) -> RingLane | PreadLane:
    """Choose the lane for this machine; ``start`` or ``async with`` then opens it.

    ``auto`` takes io_uring where it can be had. Otherwise it takes threads, and tells ``log`` once:
    ``log("io_uring_unavailable", lane=name, reason=..., instead="preadv")``.

    Raises:
        ConfigError: ``depth`` is more than an io_uring takes, whatever is chosen in the end.
        Unavailable: ``uring`` was asked for and cannot be had, with the reason.
    """
    if depth > MOST_ENTRIES:
        accepted = f"1 to {MOST_ENTRIES}, as an io_uring takes"
        raise ConfigError(f"lane {name!r}: depth {depth}; accepted: {accepted}")
    if backend == "preadv":
        return PreadLane(name, depth=depth, demand=demand)
    reason = probe_io_uring()
    if reason is None:
        return RingLane(name, depth=depth, demand=demand)
    if backend == "uring":
        raise Unavailable(f"lane {name!r}: io_uring cannot be used: {reason}")
    log("io_uring_unavailable", lane=name, reason=reason, instead=PreadLane.backend)
    return PreadLane(name, depth=depth, demand=demand)


def address_of(buffer: npt.NDArray[np.uint8]) -> int:
    """Give the address of a contiguous buffer; a writable one costs a third of ``ctypes.data``."""
    try:
        return ctypes.addressof(ctypes.c_char.from_buffer(buffer.data))
    except TypeError:  # read-only
        return buffer.ctypes.data
