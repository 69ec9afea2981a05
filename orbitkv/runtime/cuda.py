"""CudaLane: a lane with a stream, an arena and a completion thread on each GPU that it serves.

CuPy is imported when the first device is opened, never before: it takes seconds, and what touches a
device raises where there is none.
"""

from __future__ import annotations

import asyncio
import contextlib
import queue
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from orbitkv.cache.pool import Pool
from orbitkv.codecs.base import MOST_SOURCE_NBYTES
from orbitkv.codecs.cuda import driver
from orbitkv.codecs.cuda.driver import Event
from orbitkv.codecs.cuda.kernels import Kernels, Launcher
from orbitkv.codecs.cuda.tasks import are_runs, describe_slots
from orbitkv.codecs.cuda.workspace import Runs, SharedRoom
from orbitkv.codecs.slots import SlotCodecs
from orbitkv.config import KIB, format_nbytes
from orbitkv.errors import DeviceFault, Unavailable
from orbitkv.objects import Bytes, RawReason, align_up
from orbitkv.probe import cuda_unavailable
from orbitkv.runtime.arena import Arena, as_fault
from orbitkv.runtime.lanes import HostLane, Submitted, drained
from orbitkv.segment import PagedTensors, Words

SCRATCH_NBYTES = 64 * KIB
# As long as an event is looked for on the loop before a thread waits for it: twice the way to that
# thread and back, and longer than a page of 2 MiB takes.
POLLED_S = 150e-6
_COPY_ANY_WAY = 4  # cudaMemcpyDefault: the addresses tell the direction
_PORTABLE = 1  # cudaHostRegisterPortable: pinned for every context


# Of the calling thread, which is one of ours: the device that was made current last.
_current = threading.local()


@contextlib.contextmanager
def faults(doing: str) -> Iterator[None]:
    """Turn what CUDA raises into a fault of the request."""
    import cupy  # noqa: PLC0415 - see above

    try:
        yield
    except (
        cupy.cuda.runtime.CUDARuntimeError,
        cupy.cuda.driver.CUDADriverError,
        cupy.cuda.memory.OutOfMemoryError,
    ) as error:
        raise DeviceFault(f"{doing}: {error}") from error


class Device:
    """One GPU, as all lanes share it: kernels, and the pool pinned for its copy engines.

    Opened and closed on a thread that may block.

    Raises:
        Unavailable: there is no such GPU, no CuPy, or the pool cannot be pinned.
    """

    def __init__(self, ordinal: int, pool: Pool) -> None:
        reason = cuda_unavailable()
        if reason:
            raise Unavailable(f"cuda:{ordinal}: {reason}")
        import cupy  # noqa: PLC0415 - see above

        self.ordinal = ordinal
        self.runtime = cupy.cuda.runtime
        self._cupy = cupy
        try:
            self.handle = cupy.cuda.Device(ordinal)
            with self.handle:
                pool.pin(self._register, self._unregister)
                self.kernels = Kernels(ordinal)
        except Exception as error:  # of CUDA, of NVRTC, or of a CuPy for another CUDA
            raise Unavailable(f"cuda:{ordinal}: {error}") from error

    def _register(self, address: int, nbytes: int) -> None:
        self.runtime.hostRegister(address, nbytes, _PORTABLE)

    def _unregister(self, address: int) -> None:
        # A context that died has let go of it.
        with contextlib.suppress(DeviceFault), faults("unpin the pool"):
            self.runtime.hostUnregister(address)

    def make_current(self) -> None:
        """Make the device the calling thread's. Costs nothing where it is already."""
        if getattr(_current, "ordinal", None) != self.ordinal:
            with faults(f"cuda:{self.ordinal}"):
                self.runtime.setDevice(self.ordinal)
            _current.ordinal = self.ordinal

    def open_stream(self, lane: str, arena_nbytes: int, run: Callable[..., Any]) -> DeviceStream:
        """Make a stream for a lane."""
        return DeviceStream(lane, self, arena_nbytes, run)

    def prepare(self, tensors: PagedTensors, codecs: SlotCodecs) -> None:
        """Tell kernels where the slots of a registration lie, and load what its codecs need."""
        # On a stream of its own: the default one would wait for what the engine does there.
        with faults(f"cuda:{self.ordinal}"), self.handle, self._cupy.cuda.Stream(non_blocking=True):
            described = describe_slots(tensors)
            tensors.device_slots = DeviceSlots(
                self._cupy.asarray(described.view(np.uint8), blocking=True), described
            )
            for codec in codecs.codecs:
                if not isinstance(codec, RawReason):
                    self.kernels.load(codec.kernel)


class DeviceSlots:
    """The slots of a registration in device memory.

    Attributes:
        address: Of ``SLOT``[slots].
        described: The same in host memory.
        are_runs: Every segment is one run of memory, on a boundary of 16.
    """

    def __init__(self, array: Any, described: npt.NDArray[np.void]) -> None:  # noqa: ANN401 - CuPy's
        self._array = array
        self.address = int(array.data.ptr)
        self.described = described
        self.are_runs = are_runs(described)


class DeviceMemory:
    """A memory pool of CuPy's for one arena: its limit is a second guard.

    Attributes:
        pool: Whose figures are those of the arena.
    """

    def __init__(self, device: Device, limit_nbytes: int) -> None:
        import cupy  # noqa: PLC0415 - see above

        self._device = device
        self._memory: Any = None
        self.pool = cupy.cuda.MemoryPool()
        self.pool.set_limit(size=align_up(limit_nbytes, 512))

    def allocate(self, nbytes: int) -> int:
        """Allocate; returns the address."""
        with faults(f"arena of {format_nbytes(nbytes)}"), self._device.handle:
            self._memory = self.pool.malloc(nbytes)
        return int(self._memory.ptr)

    def free(self) -> None:
        """Free what was allocated, if anything."""
        with faults("free an arena"), self._device.handle:
            self._memory = None
            self.pool.free_all_blocks()


class DeviceStream:
    """One lane's work on one GPU: kernels in order on a stream, bulk copies beside them.

    Copies have a stream of their own, ordered by events, so that the copy engines carry one batch
    while kernels make the next. Every method is to be called on the loop.

    Attributes:
        arena: Workspace of the lane's batches.
        shared: Room of it that batches take turns with.
    """

    def __init__(
        self, lane: str, device: Device, limit_nbytes: int, run: Callable[..., Any]
    ) -> None:
        import cupy  # noqa: PLC0415 - see above

        self.device = device
        self.name = f"{lane} on cuda:{device.ordinal}"
        self._run = run
        self._loop = asyncio.get_running_loop()
        with faults(self.name), device.handle:
            self._stream = cupy.cuda.Stream(non_blocking=True)
            self._copies = cupy.cuda.Stream(non_blocking=True)
        self._launcher = device.kernels.on(self._stream.ptr)
        memory = DeviceMemory(device, limit_nbytes)
        self.arena = Arena(f"arena of {self.name}", limit_nbytes, memory, run)
        self.shared = SharedRoom(self.arena)
        self._alloc_pinned = cupy.cuda.alloc_pinned_memory
        self._scratch: list[Bytes] = []
        self._ending: set[asyncio.Task[None]] = set()
        self._bridge: HostBridge | None = None
        self.scratch_out = 0
        self._awaited: queue.SimpleQueue[tuple[Event, Submitted[None]] | None]
        self._awaited = queue.SimpleQueue()
        name = f"orbitkv {self.name}"
        self._thread = threading.Thread(target=self._watch, name=name, daemon=True)
        self._thread.start()

    @property
    def kernels(self) -> Launcher:
        """Launches kernels, in order."""
        self.device.make_current()
        return self._launcher

    def after(self, event: int | Event) -> None:
        """Let everything enqueued from here on wait for an event of another stream."""
        self.device.make_current()
        driver.wait_event(self._stream.ptr, event.ptr if isinstance(event, Event) else event)

    def record(self) -> Event:
        """Mark what the stream has been given so far."""
        self.device.make_current()
        return Event(self._stream.ptr)

    def clear(self, address: int, nbytes: int) -> None:
        """Zero device memory, in order."""
        self.device.make_current()
        driver.clear(address, nbytes, self._stream.ptr)

    def copy(self, runs: Runs, after: Event | None = None) -> Event:
        """Copy runs of bytes, given as (target, source, bytes), beside the kernels.

        Host memory must be pinned. Returns the event after which all are done.
        """
        self.device.make_current()
        if after is not None:
            driver.wait_event(self._copies.ptr, after.ptr)
        driver.copy(runs, self._copies.ptr)
        return Event(self._copies.ptr)

    async def reached(self, event: Event) -> None:
        """Wait for an event, however long it takes, even if the caller is cancelled.

        Raises:
            DeviceFault: what had been enqueued before it failed.
        """
        self.device.make_current()
        cancelled = None
        until_s = time.perf_counter() + POLLED_S
        while not event.happened:
            if cancelled or time.perf_counter() > until_s:
                over: Submitted[None] = Submitted(loop=self._loop)
                self._awaited.put((event, over))
                await drained(over)
                break
            try:
                await asyncio.sleep(0)  # the loop goes on, and so do other threads
            except asyncio.CancelledError as error:
                cancelled = error
        if cancelled:
            raise cancelled

    async def take_scratch(self, nbytes: int) -> Bytes:
        """Pinned host memory of ``nbytes`` or more, to be given back once no kernel uses it."""
        self.scratch_out += 1
        if self._scratch and nbytes <= SCRATCH_NBYTES:
            return self._scratch.pop()
        try:
            scratch: Bytes = await self._run(self._pin_scratch, max(nbytes, SCRATCH_NBYTES))
        except BaseException:
            self.scratch_out -= 1
            raise
        return scratch

    def give_scratch(self, scratch: Bytes) -> None:
        """Give pinned memory back. What is longer than usual is freed."""
        self.scratch_out -= 1
        if scratch.nbytes == SCRATCH_NBYTES:
            self._scratch.append(scratch)

    def bridge(self) -> HostBridge:
        """What carries segments that the arena cannot hold: one, with one buffer, for the lane."""
        if self._bridge is None:
            self._bridge = HostBridge(self.name, self.device)
        return self._bridge

    async def idle(self) -> None:
        """Wait until everything enqueued so far, copies too, has ended or failed."""
        try:
            self.after(self.copy([]))
            event = self.record()
        except DeviceFault:
            await self._run(self._end_all)  # no event can be had; what was enqueued may still run
            return
        with contextlib.suppress(DeviceFault):
            await self.reached(event)

    def when_over(self, call: Callable[[], None]) -> None:
        """Call on the loop once everything enqueued so far, copies too, has ended or failed."""

        async def wait() -> None:
            try:
                await self.idle()
            finally:
                call()

        ending = self._loop.create_task(wait())
        self._ending.add(ending)
        ending.add_done_callback(self._ending.discard)

    async def close(self) -> None:
        """Wait for everything enqueued; then end the thread and free the arena."""
        while self._ending:
            await asyncio.wait(self._ending)
        self._awaited.put(None)
        await asyncio.to_thread(self._drain)
        await self.arena.close()
        self._scratch.clear()
        self._bridge = None

    def leaks(self) -> list[str]:
        """Workspace still leased: none at rest."""
        found = []
        if self.arena.used_nbytes:
            found.append(f"{self.arena.name}: {self.arena.used_nbytes} bytes")
        if self.scratch_out:
            found.append(f"scratch of {self.name}: {self.scratch_out} out")
        return found

    def _pin_scratch(self, nbytes: int) -> Bytes:
        with faults(f"scratch of {self.name}"), self.device.handle:
            memory = self._alloc_pinned(nbytes)
        return np.frombuffer(memory, np.uint8, nbytes)

    def _drain(self) -> None:
        self._thread.join()
        self._end_all()

    def _end_all(self) -> None:
        with contextlib.suppress(DeviceFault), faults(self.name), self.device.handle:
            self._copies.synchronize()
            self._stream.synchronize()

    def _watch(self) -> None:
        """Wait for one event after the other, without the GIL, and tell the loop."""
        synchronize = self.device.runtime.eventSynchronize  # gives up the GIL, spins while it waits
        while (entry := self._awaited.get()) is not None:
            event, over = entry
            try:
                self.device.make_current()
                with faults(self.name):
                    synchronize(event.ptr)
            except Exception as error:  # noqa: BLE001 - else whoever waits would wait for ever
                self._loop.call_soon_threadsafe(over.set_exception, as_fault(error))
            else:
                self._loop.call_soon_threadsafe(over.set_result, None)
            del entry, event, over  # else an idle lane keeps the last event alive


class HostBridge:
    """Segments to and from a GPU, one by one, on the lane's own thread.

    Attributes:
        buffer: uint8[16 MiB], pinned.
    """

    def __init__(self, name: str, device: Device) -> None:
        import cupy  # noqa: PLC0415 - see above

        self._name = f"bridge of {name}"
        self._device = device
        with faults(self._name), device.handle:
            self._stream = cupy.cuda.Stream(non_blocking=True)
            memory = cupy.cuda.alloc_pinned_memory(MOST_SOURCE_NBYTES)
        self.buffer: Bytes = np.frombuffer(memory, np.uint8, MOST_SOURCE_NBYTES)

    def fetch(self, segment: Words, target: Bytes) -> None:
        """Copy a segment, described in GPU memory, to contiguous pinned memory."""
        self._move(segment, target.ctypes.data, to_host=True)

    def put(self, source: Bytes, segment: Words) -> None:
        """Copy contiguous pinned memory to a segment in GPU memory."""
        self._move(segment, source.ctypes.data, to_host=False)

    def _move(self, segment: Words, host: int, *, to_host: bool) -> None:
        runtime, stream = self._device.runtime, self._stream.ptr
        outer, inner, width = segment.shape
        row_nbytes = width * segment.itemsize
        pitch = segment.strides[1] if inner > 1 else row_nbytes
        with faults(self._name), self._device.handle:
            try:
                for index in range(outer):
                    device = segment.ctypes.data + index * segment.strides[0]
                    here = (host + index * inner * row_nbytes, row_nbytes)
                    there = (device, pitch)
                    target, source = (here, there) if to_host else (there, here)
                    runtime.memcpy2DAsync(
                        *target, *source, row_nbytes, inner, _COPY_ANY_WAY, stream
                    )
            finally:
                runtime.streamSynchronize(stream)  # also of what was started before a fault


class CudaLane(HostLane):
    """A host lane that also has a stream on every GPU whose pages it moves.

    Args:
        arena_nbytes: Most device memory that the lane's batches may lease, on each GPU.
    """

    def __init__(self, name: str, arena_nbytes: int) -> None:
        super().__init__(name)
        self._arena_nbytes = arena_nbytes
        self._streams: dict[int, DeviceStream] = {}

    @property
    def streams(self) -> Mapping[int, DeviceStream]:
        """By ordinal, those that have been opened."""
        return self._streams

    def on(self, device: int) -> DeviceStream:
        """The lane's stream on a GPU that a registration has opened."""
        return self._streams[device]

    def open_device(self, device: Device) -> None:
        """Make a stream on a GPU, unless there is one."""
        if device.ordinal not in self._streams:
            self._streams[device.ordinal] = device.open_stream(
                self.name, self._arena_nbytes, self.run
            )

    async def close(self) -> None:
        """Drain every GPU, then the thread."""
        try:
            for stream in self._streams.values():
                await stream.close()
            self._streams.clear()
        finally:
            await super().close()
