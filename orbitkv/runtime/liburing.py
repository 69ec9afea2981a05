"""The few calls of ``liburing.so.2`` that a ring needs, and the structures they share with it."""

from __future__ import annotations

import ctypes
import errno
import os
import struct
from pathlib import Path

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


def probe_io_uring() -> str | None:
    """Tell why a ``RingLane`` cannot be had here, in words; None if it can."""
    try:
        liburing = Liburing()
        liburing.queue_exit(liburing.open_ring(1))
    except OSError as error:
        return error.strerror
    return None


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
