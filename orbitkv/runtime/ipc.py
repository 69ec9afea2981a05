"""CUDA IPC: an engine's GPU memory and events, as another process opens them.

A handle names an allocation's base, so a tensor is a handle, an offset and strides. Everything here
is called with CuPy installed, and may block: never on a loop.
"""

from __future__ import annotations

import contextlib
import ctypes
from collections import deque
from dataclasses import dataclass
from typing import Any

from orbitkv.errors import DeviceFault, Unavailable
from orbitkv.probe import cuda_unavailable

_PEER_ACCESS = 1  # cudaIpcMemLazyEnablePeerAccess
_EVENT_FLAGS = 2 | 4  # cudaEventDisableTiming | cudaEventInterprocess
_HANDLE_NBYTES = 64
_REMEDY = (
    "accepted: memory of cudaMalloc; of torch's expandable segments and of cudaMallocAsync nothing "
    "can be exported: set PYTORCH_CUDA_ALLOC_CONF=expandable_segments:False,backend:native"
)


def _cupy() -> Any:  # noqa: ANN401 - a module without stubs
    reason = cuda_unavailable()
    if reason:
        raise Unavailable(f"tensors on a GPU: {reason}")
    import cupy  # noqa: PLC0415 - only a process that moves GPU pages pays for its import

    return cupy


@dataclass(frozen=True, slots=True)
class ExportedMemory:
    """One allocation that another process may open.

    Attributes:
        base: Device address of its first byte, here.
        handle: ``cudaIpcMemHandle_t``.
        bus_id: PCI bus id of the GPU.
    """

    base: int
    nbytes: int
    handle: bytes
    bus_id: str


def export_memory(ordinal: int, address: int) -> ExportedMemory:
    """Export the whole allocation that an address lies in.

    Raises:
        Unavailable: there is no CuPy or driver here.
        DeviceFault: memory of this kind cannot be exported, and what to do.
    """
    cupy = _cupy()
    with cupy.cuda.Device(ordinal):
        _take_context(cupy.cuda.runtime, ordinal)
        base, nbytes = _address_range(address)
        try:
            handle = bytes(cupy.cuda.runtime.ipcGetMemHandle(base))
        except Exception as error:  # of CUDA, in a class of CuPy's own
            raise DeviceFault(
                f"cuda:{ordinal}: memory at {base:#x} cannot be exported ({error}); {_REMEDY}"
            ) from error
        return ExportedMemory(base, nbytes, handle, cupy.cuda.runtime.deviceGetPCIBusId(ordinal))


def _take_context(runtime: Any, ordinal: int) -> None:  # noqa: ANN401 - CuPy's
    """Make a device's context the thread's, for the driver; the runtime's calls do so late."""
    runtime.setDevice(ordinal)
    runtime.free(0)


def _address_range(address: int) -> tuple[int, int]:
    """Base and length of the allocation that an address lies in; its device must be current."""
    driver = ctypes.CDLL("libcuda.so.1")
    base, nbytes = ctypes.c_uint64(), ctypes.c_size_t()
    status = driver.cuMemGetAddressRange_v2(
        ctypes.byref(base), ctypes.byref(nbytes), ctypes.c_uint64(address)
    )
    if status:
        raise DeviceFault(f"no allocation at {address:#x} (CUDA error {status}); {_REMEDY}")
    return base.value, nbytes.value


class ImportedMemory:
    """Another process's allocation, open until ``close``.

    Attributes:
        ordinal: Of the GPU, in this process.
        address: Of the allocation's first byte, here.
    """

    def __init__(self, handle: bytes, nbytes: int, bus_id: str) -> None:
        if len(handle) != _HANDLE_NBYTES:
            raise DeviceFault(f"a handle of {len(handle)} bytes; accepted: {_HANDLE_NBYTES}")
        self._cupy = _cupy()
        runtime = self._cupy.cuda.runtime
        try:
            self.ordinal = int(runtime.deviceGetByPCIBusId(bus_id))
        except Exception as error:  # of CUDA, in a class of CuPy's own
            raise Unavailable(f"the GPU {bus_id!r} is not one of this daemon's: {error}") from error
        self.nbytes = nbytes
        with self._cupy.cuda.Device(self.ordinal):
            try:
                self.address = int(runtime.ipcOpenMemHandle(handle, _PEER_ACCESS))
            except Exception as error:
                raise DeviceFault(f"memory on {bus_id} cannot be opened: {error}") from error
            _take_context(runtime, self.ordinal)
            base, held_nbytes = _address_range(self.address)
        # A small allocation may be opened with the block that the driver cut it from.
        if self.address + nbytes > base + held_nbytes:
            self.close()
            seen = f"{nbytes} bytes are named; {base + held_nbytes - self.address} are there"
            raise DeviceFault(f"memory on {bus_id}: {seen}")

    def view(
        self, offset: int, shape: tuple[int, ...], strides: tuple[int, ...], dtype: str
    ) -> Any:  # noqa: ANN401 - a cupy.ndarray
        """View a part as a ``cupy.ndarray``; the caller has checked that it lies inside."""
        cupy = self._cupy
        memory = cupy.cuda.UnownedMemory(self.address, self.nbytes, self, self.ordinal)
        pointer = cupy.cuda.MemoryPointer(memory, offset)
        return cupy.ndarray(shape, dtype, memptr=pointer, strides=strides)

    def close(self) -> None:
        """Close the handle. Only after the last kernel or copy on the memory has ended."""
        with contextlib.suppress(Exception), self._cupy.cuda.Device(self.ordinal):
            self._cupy.cuda.runtime.ipcCloseMemHandle(self.address)  # a dead context has done it


class _SharedEvent:
    """An event that another process may wait for, recorded again and again."""

    __slots__ = ("handle", "ptr")

    def __init__(self, runtime: Any) -> None:  # noqa: ANN401 - CuPy's
        self.ptr = int(runtime.eventCreateWithFlags(_EVENT_FLAGS))
        self.handle = bytes(runtime.ipcGetEventHandle(self.ptr))


class EventExporter:
    """Turns an engine's events into ones that the daemon can wait for.

    An engine's own event was mostly not made for other processes. So a stream waits for it, and an
    event that was is recorded behind.
    """

    def __init__(self, ordinal: int) -> None:
        self._cupy = _cupy()
        self._ordinal = ordinal
        with self._cupy.cuda.Device(ordinal):
            self._stream = self._cupy.cuda.Stream(non_blocking=True)
        self._free: deque[_SharedEvent] = deque()

    def record_after(self, event: int) -> _SharedEvent:
        """Record an event behind an engine's ``cudaEvent_t``; ``give_back`` it in the end."""
        runtime = self._cupy.cuda.runtime
        try:
            with self._cupy.cuda.Device(self._ordinal):
                shared = self._free.popleft() if self._free else _SharedEvent(runtime)
                runtime.streamWaitEvent(self._stream.ptr, event)
                runtime.eventRecord(shared.ptr, self._stream.ptr)
        except Exception as error:  # of CUDA, in a class of CuPy's own
            raise DeviceFault(f"cuda:{self._ordinal}: the event cannot be exported: {error}") from (
                error
            )
        return shared

    def give_back(self, shared: _SharedEvent) -> None:
        """Let an event be recorded again. Only once the request that named it has ended."""
        self._free.append(shared)

    def close(self) -> None:
        """Destroy all events that were given back."""
        with contextlib.suppress(Exception), self._cupy.cuda.Device(self._ordinal):
            while self._free:
                self._cupy.cuda.runtime.eventDestroy(self._free.popleft().ptr)


class ImportedEvent:
    """Another process's event. Streams wait for it by ``ptr``, threads by ``wait``."""

    def __init__(self, handle: bytes, ordinal: int) -> None:
        if len(handle) != _HANDLE_NBYTES:
            raise DeviceFault(f"an event of {len(handle)} bytes; accepted: {_HANDLE_NBYTES}")
        self._cupy = _cupy()
        self._ordinal = ordinal
        try:
            with self._cupy.cuda.Device(ordinal):
                self.ptr = int(self._cupy.cuda.runtime.ipcOpenEventHandle(handle))
        except Exception as error:  # of CUDA, in a class of CuPy's own
            raise DeviceFault(f"cuda:{ordinal}: the event cannot be opened: {error}") from error

    def wait(self) -> None:
        """Block until the event has happened; for pages that no stream reaches."""
        with self._cupy.cuda.Device(self._ordinal):
            self._cupy.cuda.runtime.eventSynchronize(self.ptr)

    def close(self) -> None:
        """Destroy this process's end of the event."""
        with contextlib.suppress(Exception), self._cupy.cuda.Device(self._ordinal):
            self._cupy.cuda.runtime.eventDestroy(self.ptr)


class PastEvent:
    """``Restored.ready`` of a daemon's restore: it had happened before the daemon told of it."""

    ptr = 0

    def wait(self, stream: object = None) -> None:
        """Let a stream go on at once: there is nothing left to wait for."""
        del stream
