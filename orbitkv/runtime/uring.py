"""The io_uring lane, over the few calls of ``liburing.so.2`` that it needs.

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
import struct
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Literal, cast

import numpy as np
import numpy.typing as npt

from orbitkv.errors import Unavailable
from orbitkv.runtime.preadv import (
    Batch,
    Ended,
    FifoLane,
    Outcome,
    PreadLane,
    Verb,
    check_buffer,
    refusal,
)
from orbitkv.stages.base import Transfer

SONAME = "liburing.so.2"

# struct io_uring_sqe: opcode flags ioprio fd, offset, address, nbytes rw_flags, user_data,
# buf_index personality splice_fd, then 16 bytes that are zero
SQE = struct.Struct("<BBHiQQIIQHHi16x")
SQE_SHIFT = 6
SQE_USER_DATA = struct.Struct("<32xQ")
# struct io_uring_cqe: user_data, result, then 4 bytes of flags
CQE = struct.Struct("<Qi4x")
CQE_SHIFT = 4
UINT32 = 0xFFFF_FFFF

OP_READ_FIXED, OP_WRITE_FIXED, OP_READ, OP_WRITE = 4, 5, 22, 23
SQE_ASYNC = 1 << 4
FEAT_RW_CUR_POS = 1 << 3  # came with OP_READ and OP_WRITE, in Linux 5.6
SETUP_SUBMIT_ALL = 1 << 7  # a bad entry does not keep back the ones behind it
SETUP_COOP_TASKRUN = 1 << 8  # no interrupt per completion: epoll_wait collects them

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
IOVEC_SHIFT = 30  # the kernel registers at most 1 GiB an iovec


class SubmissionQueue(ctypes.Structure):
    """``struct io_uring_sq`` as every ``liburing.so.2`` has it."""

    _fields_ = (
        ("khead", ctypes.c_void_p),
        ("ktail", ctypes.c_void_p),
        ("kring_mask", ctypes.c_void_p),
        ("kring_entries", ctypes.c_void_p),
        ("kflags", ctypes.c_void_p),
        ("kdropped", ctypes.c_void_p),
        ("array", ctypes.c_void_p),
        ("sqes", ctypes.c_void_p),
        ("sqe_head", ctypes.c_uint),
        ("sqe_tail", ctypes.c_uint),
        ("ring_nbytes", ctypes.c_size_t),
        ("ring_address", ctypes.c_void_p),
        ("pad", ctypes.c_uint * 4),
    )


class CompletionQueue(ctypes.Structure):
    """``struct io_uring_cq`` as every ``liburing.so.2`` has it."""

    _fields_ = (
        ("khead", ctypes.c_void_p),
        ("ktail", ctypes.c_void_p),
        ("kring_mask", ctypes.c_void_p),
        ("kring_entries", ctypes.c_void_p),
        ("kflags", ctypes.c_void_p),
        ("koverflow", ctypes.c_void_p),
        ("cqes", ctypes.c_void_p),
        ("ring_nbytes", ctypes.c_size_t),
        ("ring_address", ctypes.c_void_p),
        ("pad", ctypes.c_uint * 4),
    )


class Ring(ctypes.Structure):
    """``struct io_uring``."""

    _fields_ = (
        ("sq", SubmissionQueue),
        ("cq", CompletionQueue),
        ("flags", ctypes.c_uint),
        ("ring_fd", ctypes.c_int),
        ("features", ctypes.c_uint),
        ("pad", ctypes.c_uint * 3),
    )


class IoVec(ctypes.Structure):
    """``struct iovec``."""

    _fields_ = (("address", ctypes.c_void_p), ("nbytes", ctypes.c_size_t))


class Liburing:
    """The functions of ``liburing.so.2`` that the lane calls; all are exported since 2.0.

    Results below 0 are negated errnos.

    Raises:
        OSError: ENOSYS, with the library that is missing or what it lacks.
    """

    def __init__(self) -> None:
        ring, uint = ctypes.POINTER(Ring), ctypes.c_uint
        try:
            # Submitting and peeking keep the GIL: they do not wait, and to get it back from a busy
            # thread takes longer than the call.
            brief = ctypes.PyDLL(SONAME)
            lengthy = ctypes.CDLL(SONAME)
        except OSError as error:
            raise OSError(
                errno.ENOSYS, f"cannot load {SONAME} ({error}); install liburing2 (Debian, Ubuntu)"
            ) from error
        try:
            self.queue_init = lengthy.io_uring_queue_init
            self.queue_exit = lengthy.io_uring_queue_exit
            self.register_eventfd = lengthy.io_uring_register_eventfd
            self.register_buffers = lengthy.io_uring_register_buffers
            self.madvise = ctypes.CDLL(None).madvise
            self.submit = brief.io_uring_submit
            self.peek_batch_cqe = brief.io_uring_peek_batch_cqe
        except AttributeError as error:
            raise OSError(errno.ENOSYS, f"{SONAME} is not usable: {error}") from error
        self.queue_init.argtypes = (uint, ring, uint)
        self.queue_exit.argtypes = (ring,)
        self.queue_exit.restype = None
        self.register_eventfd.argtypes = (ring, ctypes.c_int)
        self.register_buffers.argtypes = (ring, ctypes.POINTER(IoVec), uint)
        self.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
        self.submit.argtypes = (ring,)
        self.peek_batch_cqe.argtypes = (ring, ctypes.c_void_p, uint)
        self.peek_batch_cqe.restype = uint

    def open_ring(self, entries: int) -> Ring:
        """Set a ring up that takes ``entries`` operations at a time.

        Raises:
            OSError: with the kernel's errno, and in words who refuses and what to change.
        """
        ring = Ring()
        result = self.queue_init(entries, ring, SETUP_SUBMIT_ALL | SETUP_COOP_TASKRUN)
        if result == -errno.EINVAL:  # before Linux 5.19
            result = self.queue_init(entries, ring, 0)
        if result < 0:
            raise OSError(-result, why_refused(-result))
        if not ring.features & FEAT_RW_CUR_POS:
            self.queue_exit(ring)
            raise OSError(errno.ENOSYS, "io_uring reads and writes need Linux 5.6 or later")
        return ring


class RingLane(FifoLane):
    """One io_uring on the loop, at least ``depth`` entries deep.

    Raises:
        ValueError: ``depth`` is not 1 to 32,768, the kernel's limit.
    """

    backend = "io_uring"

    def __init__(self, name: str, *, depth: int) -> None:
        super().__init__(name, depth=depth, threads=1)
        if depth > 1 << 15:
            raise ValueError(f"lane {name!r}: depth is {depth}, an io_uring has 32768 at most")
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


def probe_io_uring() -> str | None:
    """Tell why a ``RingLane`` cannot be had here, in words; None if it can."""
    try:
        liburing = Liburing()
        liburing.queue_exit(liburing.open_ring(1))
    except OSError as error:
        return error.strerror
    return None


def open_io_lane(
    name: str,
    *,
    depth: int,
    backend: Literal["auto", "uring", "preadv"],
    log: Callable[..., object],
) -> RingLane | PreadLane:
    """Choose the lane for this machine; ``start`` or ``async with`` then opens it.

    ``auto`` takes io_uring where it can be had. Otherwise it takes threads, and tells ``log`` once:
    ``log("io_uring_unavailable", lane=name, reason=..., instead="preadv")``.

    Raises:
        Unavailable: ``uring`` was asked for and cannot be had, with the reason.
    """
    if backend == "preadv":
        return PreadLane(name, depth=depth)
    reason = probe_io_uring()
    if reason is None:
        return RingLane(name, depth=depth)
    if backend == "uring":
        raise Unavailable(f"lane {name!r}: io_uring cannot be used: {reason}")
    log("io_uring_unavailable", lane=name, reason=reason, instead=PreadLane.backend)
    return PreadLane(name, depth=depth)


def why_refused(number: int) -> str:
    """Say in words why the kernel did not set a ring up, and what would change that."""
    if number == errno.ENOSYS:
        return "this kernel has no io_uring, or a seccomp filter hides it"
    if number in (errno.EPERM, errno.EACCES):
        try:
            setting = Path("/proc/sys/kernel/io_uring_disabled").read_text().strip()
        except OSError:  # before Linux 6.6
            setting = "0"
        if setting == "0":
            return "not permitted: a seccomp filter or LSM forbids io_uring, as containers often do"
        return f"not permitted: kernel.io_uring_disabled is {setting}, wanted 0"
    if number == errno.ENOMEM:
        return "no memory for a ring: RLIMIT_MEMLOCK (ulimit -l) is too low for this kernel"
    return os.strerror(number)


def uint_at(address: int) -> ctypes.c_uint:
    """View the 32 bits that the ring shares with the kernel at ``address``."""
    return ctypes.c_uint.from_address(address)


def address_of(buffer: npt.NDArray[np.uint8]) -> int:
    """Give the address of a contiguous buffer; a writable one costs a third of ``ctypes.data``."""
    try:
        return ctypes.addressof(ctypes.c_char.from_buffer(buffer.data))
    except TypeError:  # read-only
        return buffer.ctypes.data
