"""The few calls of the CUDA driver that every batch makes, without what a general binding adds.

A launch through CuPy costs the loop 30 us, one through here 4: a batch of 16 MiB has 300 us in all
to keep PCIe busy. None of these calls waits for the device, so they keep the GIL: to give it up and
take it back would cost more than the calls. CuPy still compiles, allocates and owns the context.
"""

from __future__ import annotations

import ctypes
import functools
import struct
from collections.abc import Sequence
from typing import Any

from orbitkv.errors import DeviceFault

_NO_TIMING = 2  # CU_EVENT_DISABLE_TIMING
_NOT_READY = 600  # CUDA_ERROR_NOT_READY


@functools.cache
def _library() -> ctypes.PyDLL:
    """Open the driver, once somebody has a GPU; with argument types, which ctypes cannot know."""
    library = ctypes.PyDLL("libcuda.so.1")
    pointer, number = ctypes.c_void_p, ctypes.c_uint
    library.cuLaunchKernel.argtypes = [pointer, *([number] * 7), pointer, pointer, pointer]
    library.cuMemcpyAsync.argtypes = [
        ctypes.c_uint64,
        ctypes.c_uint64,
        ctypes.c_size_t,
        pointer,
    ]
    library.cuMemsetD8Async.argtypes = [ctypes.c_uint64, ctypes.c_ubyte, ctypes.c_size_t, pointer]
    library.cuEventCreate.argtypes = [ctypes.POINTER(pointer), number]
    library.cuEventRecord.argtypes = [pointer, pointer]
    library.cuEventDestroy_v2.argtypes = [pointer]
    library.cuEventQuery.argtypes = [pointer]
    library.cuStreamWaitEvent.argtypes = [pointer, pointer, number]
    library.cuGetErrorString.argtypes = [ctypes.c_int, ctypes.POINTER(ctypes.c_char_p)]
    return library


def _check(doing: str, status: int) -> None:
    if status:
        text = ctypes.c_char_p()
        _library().cuGetErrorString(status, ctypes.byref(text))
        reason = text.value.decode() if text.value else "unknown error"
        raise DeviceFault(f"{doing}: {reason} (CUDA error {status})")


class Kernel:
    """A compiled kernel and room for its arguments. For one thread at a time.

    Args:
        function: The ``CUfunction``.
        arguments: Types of its parameters: ``Q`` for 64 bits, ``I`` for 32.
    """

    def __init__(self, name: str, function: int, arguments: str) -> None:
        self._name = name
        self._function = function
        self._pack = struct.Struct("=" + "".join(a if a == "Q" else "I4x" for a in arguments))
        self._room = (ctypes.c_uint64 * len(arguments))()
        start = ctypes.addressof(self._room)
        places = [start + 8 * index for index in range(len(arguments))]
        self._pointers = (ctypes.c_void_p * len(arguments))(*places)
        self._launch = _library().cuLaunchKernel

    def launch(self, blocks: int, threads: int, stream: int, *arguments: int) -> None:
        """Enqueue the kernel. Its context must be the current one."""
        self._pack.pack_into(self._room, 0, *arguments)
        status = self._launch(
            self._function, blocks, 1, 1, threads, 1, 1, 0, stream, self._pointers, None
        )
        if status:
            _check(f"kernel {self._name}", status)


def copy(runs: Sequence[tuple[int, int, int]], stream: int) -> None:
    """Enqueue copies, given as (target, source, bytes). Host memory must be pinned."""
    memcpy = _library().cuMemcpyAsync
    for target, source, nbytes in runs:
        status = memcpy(target, source, nbytes, stream)
        if status:
            _check(f"copy of {nbytes} bytes", status)


def clear(address: int, nbytes: int, stream: int) -> None:
    """Enqueue: zero device memory."""
    _check("memset", _library().cuMemsetD8Async(address, 0, nbytes, stream))


def wait_event(stream: int, event: int) -> None:
    """Let a stream go on only after an event."""
    _check("wait for an event", _library().cuStreamWaitEvent(stream, event, 0))


class Event:
    """A point in the work of a stream, which other streams and threads can wait for.

    Attributes:
        ptr: The ``CUevent``, which is a ``cudaEvent_t`` too.
    """

    __slots__ = ("_library", "ptr")

    def __init__(self, stream: int) -> None:
        """Record: mark what the stream has been given so far."""
        self._library: Any = _library()
        self.ptr: int = 0
        event = ctypes.c_void_p()
        _check("event", self._library.cuEventCreate(ctypes.byref(event), _NO_TIMING))
        self.ptr = event.value or 0
        _check("event", self._library.cuEventRecord(self.ptr, stream))

    @property
    def happened(self) -> bool:
        """Whether this point has been reached.

        Raises:
            DeviceFault: what had been enqueued before it failed.
        """
        status = self._library.cuEventQuery(self.ptr)
        if status and status != _NOT_READY:
            _check("work of the GPU", status)
        return not status

    def wait(self, stream: object = None) -> None:
        """Let a stream go on only after this point.

        Args:
            stream: A ``torch.cuda.Stream``, ``cupy.cuda.Stream`` or ``cudaStream_t``. None: the
                default stream.
        """
        handle = getattr(stream, "cuda_stream", getattr(stream, "ptr", stream))
        wait_event(handle if isinstance(handle, int) else 0, self.ptr)

    def __del__(self) -> None:
        if self.ptr:
            self._library.cuEventDestroy_v2(self.ptr)
