"""Tensors of an engine in another process: exported by the client, mapped by the daemon.

Host memory is shared as a sealed memfd, GPU memory by CUDA IPC. Both sides describe a tensor by the
memory it lies in, an offset, a shape and strides, so that several layers may be views into one
allocation.
"""

from __future__ import annotations

import fcntl
import mmap
import os
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from orbitkv.errors import GeometryError, ProtocolError, Unavailable
from orbitkv.objects import align_up
from orbitkv.runtime.ipc import ExportedMemory, ImportedMemory, export_memory
from orbitkv.runtime.wire import MAX_DESCRIPTORS, Memory, Tensor
from orbitkv.segment import Axis, Geometry, PagedTensors, Words

Place = npt.NDArray[np.uint8] | ImportedMemory

_MEMORY_ALIGN_NBYTES = 4096
_TENSOR_ALIGN_NBYTES = 64
# Of words, for dtypes that numpy does not have.
_HELD_AS = {"bfloat16": "uint16", "float8_e4m3fn": "uint8"}


class SharedMemory:
    """Host memory that another process can map: a memfd that can no longer shrink.

    Pages of it that nobody has written take no memory.

    Attributes:
        bytes: uint8[nbytes], zeroed.
        descriptor: Of the memfd; the memory stays mapped when it is closed.
    """

    def __init__(self, nbytes: int) -> None:
        self.nbytes = align_up(nbytes, _MEMORY_ALIGN_NBYTES)
        self.descriptor = os.memfd_create("orbitkv", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(self.descriptor, self.nbytes)
            seals = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
            fcntl.fcntl(self.descriptor, fcntl.F_ADD_SEALS, seals)
            self.bytes = np.frombuffer(mmap.mmap(self.descriptor, self.nbytes), np.uint8)
        except BaseException:
            os.close(self.descriptor)
            raise
        self.address: int = self.bytes.ctypes.data

    def close(self) -> None:
        """Close the descriptor; the mapping goes with the last array on it."""
        descriptor, self.descriptor = self.descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)


def allocate_tensors(
    geometry: Geometry, pages: int
) -> tuple[SharedMemory, dict[str, npt.NDArray[Any]]]:
    """Zeroed tensors of a geometry in shared memory, page after page, a page's slots together.

    bfloat16 and float8_e4m3fn come as uint16 and uint8. Of a slot that declares strides, the
    layout may not be the declared one, which registration then says.
    """
    starts, page_nbytes = [], 0
    for nbytes in geometry.segment_nbytes:
        starts.append(page_nbytes)
        page_nbytes += align_up(nbytes, _TENSOR_ALIGN_NBYTES)
    memory = SharedMemory(pages * page_nbytes)
    tensors = {}
    for slot, start in zip(geometry.slots, starts, strict=True):
        dtype = np.dtype(_HELD_AS.get(slot.dtype, slot.dtype))
        axis = slot.axes.index(Axis.PAGE)
        inner = tuple(n for a, n in enumerate(geometry.shape(slot, 1)) if a != axis)
        array = np.ndarray(
            (pages, *inner),
            dtype,
            memory.bytes.data,
            start,
            (page_nbytes, *_contiguous(inner, dtype.itemsize)),
        )
        tensors[slot.name] = np.moveaxis(array, 0, axis)
    return memory, tensors


class Exported:
    """What a registration tells the daemon of an engine's tensors; closed when it has ended.

    Tensors in ``SharedMemory`` of the client's, and on a GPU, are shared as they are. Other host
    memory cannot be: it gets a mirror, to and from which moved pages are copied.

    Args:
        tensors: As registered, checked.
        known: Shared memory that the engine may have its tensors in.
    """

    def __init__(self, tensors: PagedTensors, known: Iterable[SharedMemory]) -> None:
        self.memories: list[Memory] = []
        self.tensors: list[Tensor] = []
        self.descriptors: list[int] = []
        self.mirror: Mirror | None = None
        views = [tensors.view(index) for index in range(len(tensors.geometry.slots))]
        if tensors.device is not None:
            self._export_device(tensors, views, tensors.device)
            return
        places = [(m.address, m.nbytes, m) for m in known if m.descriptor >= 0]
        homes = [_home(places, view) for view in views]
        if all(homes):
            memories = [home for home in homes if home]
        else:
            self.mirror = Mirror(tensors, views)
            memories, views = [self.mirror.memory] * len(views), self.mirror.views
        indices: dict[int, int] = {}
        for memory in memories:
            if indices.setdefault(memory.address, len(indices)) == len(self.memories):
                self.memories.append(Memory("shared", memory.nbytes))
                self.descriptors.append(memory.descriptor)
        if len(indices) > MAX_DESCRIPTORS:
            self.close()
            seen = f"tensors in {len(indices)} shared memories; accepted: {MAX_DESCRIPTORS}"
            raise GeometryError((seen,))
        for index, (memory, view) in enumerate(zip(memories, views, strict=True)):
            self._describe(tensors, index, view, indices[memory.address], memory.address)

    def close(self) -> None:
        """Give the mirror's memory back."""
        if self.mirror:
            self.mirror.memory.close()

    def _export_device(self, tensors: PagedTensors, views: Sequence[Words], ordinal: int) -> None:
        exported: list[ExportedMemory] = []
        for index, view in enumerate(views):
            address = view.ctypes.data
            places = [(memory.base, memory.nbytes, memory) for memory in exported]
            home = _home(places, view)
            if home is None:
                home = export_memory(ordinal, address)
                if _home([(home.base, home.nbytes, home)], view) is None:
                    slot = tensors.geometry.slots[index].name
                    raise GeometryError((f"slot {slot!r}: lies in several allocations",))
                exported.append(home)
                self.memories.append(Memory("cuda", home.nbytes, home.handle, home.bus_id))
            self._describe(tensors, index, view, exported.index(home), home.base)

    def _describe(
        self, tensors: PagedTensors, index: int, view: Words, memory: int, base: int
    ) -> None:
        slot = tensors.geometry.slots[index]
        axes = np.moveaxis(view, 0, slot.axes.index(Axis.PAGE))
        offset = view.ctypes.data - base
        self.tensors.append(Tensor(slot.name, memory, offset, axes.shape, axes.strides))


class Mirror:
    """Shared memory laid out like an engine's own, which cannot be shared.

    Attributes:
        views: For each slot words[page, ...], as ``PagedTensors.view``.
    """

    def __init__(self, tensors: PagedTensors, views: Sequence[Words]) -> None:
        self._tensors = tensors
        bounds = sorted((view.ctypes.data, _end(view)) for view in views)
        # Slots that lie among one another keep their distances; the others are put side by side.
        spans: list[list[int]] = []
        for start, end in bounds:
            if spans and start <= spans[-1][1]:
                spans[-1][1] = max(spans[-1][1], end)
            else:
                spans.append([start, end])
        places, nbytes = [], 0
        for start, end in spans:
            places.append((start, end - start, nbytes + start % _TENSOR_ALIGN_NBYTES))
            nbytes = align_up(places[-1][2] + end - start, _MEMORY_ALIGN_NBYTES)
        self.memory = SharedMemory(nbytes)
        self.views: list[Words] = []
        for view in views:
            address = view.ctypes.data
            start, _, offset = next(p for p in places if p[0] <= address < p[0] + p[1])
            at = offset + address - start
            self.views.append(
                np.ndarray(view.shape, view.dtype, self.memory.bytes.data, at, view.strides)
            )

    def take(self, pages: Iterable[int]) -> None:
        """Copy pages from the engine, on a thread that may block."""
        for page in pages:
            for slot, mirrored in enumerate(self.views):
                np.copyto(mirrored[page], self._tensors.segment(slot, page))

    def give(self, pages: Iterable[int]) -> None:
        """Copy pages to the engine, on a thread that may block."""
        for page in pages:
            for slot, mirrored in enumerate(self.views):
                np.copyto(self._tensors.segment(slot, page), mirrored[page])


class Imported:
    """An engine's tensors as the daemon sees them, open until ``close``. May block.

    Args:
        descriptors: One for each shared memory, in order; taken over, and closed.
        devices: Ordinals of the GPUs that tensors may be on; None: any.

    Attributes:
        shared: Shared memories that are mapped; each keeps a descriptor.

    Raises:
        ProtocolError: a tensor lies outside of its memory, or a memory may shrink under us.
        Unavailable: memory on a GPU that this daemon does not serve.
    """

    def __init__(
        self,
        geometry: Geometry,
        memories: Sequence[Memory],
        tensors: Sequence[Tensor],
        descriptors: Sequence[int],
        devices: frozenset[int] | None,
    ) -> None:
        self.tensors: dict[str, Any] = {}
        self.ordinal: int | None = None
        self._opened: list[ImportedMemory] = []
        self.shared = len(descriptors)
        waiting = list(descriptors)
        try:
            opened: list[Place] = []
            for memory in memories:
                descriptor = waiting.pop(0) if memory.kind == "shared" else None
                opened.append(self._open(memory, descriptor, devices))
            dtypes = {slot.name: _HELD_AS.get(slot.dtype, slot.dtype) for slot in geometry.slots}
            for tensor in tensors:
                self.tensors[tensor.slot] = self._place(tensor, opened, dtypes)
        except BaseException:
            self.close()
            raise
        finally:
            for descriptor in waiting:
                os.close(descriptor)

    def close(self) -> None:
        """Unmap host memory with the last array on it, and close GPU handles now."""
        self.tensors.clear()
        while self._opened:
            self._opened.pop().close()

    def _open(
        self, memory: Memory, descriptor: int | None, devices: frozenset[int] | None
    ) -> Place:
        if descriptor is not None:
            return _map(descriptor, memory.nbytes)
        if memory.kind != "cuda":
            raise ProtocolError(f"memory {memory.kind!r}; accepted: shared, cuda")
        opened = ImportedMemory(memory.handle, memory.nbytes, memory.bus_id)
        self._opened.append(opened)
        if devices is not None and opened.ordinal not in devices:
            served = ", ".join(map(str, sorted(devices)))
            raise Unavailable(f"tensors on cuda:{opened.ordinal}; accepted devices: {served}")
        self.ordinal = opened.ordinal
        return opened

    def _place(self, tensor: Tensor, opened: Sequence[Place], dtypes: Mapping[str, str]) -> object:
        if tensor.slot not in dtypes or tensor.slot in self.tensors:
            raise ProtocolError(f"tensor {tensor.slot!r}: not declared, or named twice")
        if not 0 <= tensor.memory < len(opened):
            raise ProtocolError(f"tensor {tensor.slot!r}: no memory {tensor.memory}")
        place, dtype = opened[tensor.memory], np.dtype(dtypes[tensor.slot])
        _check(tensor, place.nbytes, dtype.itemsize)
        if isinstance(place, ImportedMemory):
            return place.view(tensor.offset, tensor.shape, tensor.strides, dtype.name)
        return np.ndarray(tensor.shape, dtype, place.data, tensor.offset, tensor.strides)


def _map(descriptor: int, nbytes: int) -> npt.NDArray[np.uint8]:
    """Map a memfd; close the descriptor."""
    try:
        held_nbytes = os.fstat(descriptor).st_size
        # What its owner could cut off under a reader would kill the reader by SIGBUS.
        faults = (
            [] if _is_sealed(descriptor) else ["may shrink; accepted: a memfd sealed against it"]
        )
        if not 0 < nbytes <= held_nbytes:
            faults.append(f"has {held_nbytes} bytes; {nbytes} are named")
        if not faults:
            return np.frombuffer(mmap.mmap(descriptor, nbytes), np.uint8)
    except (OSError, ValueError) as error:
        faults = [f"cannot be mapped: {error}"]
    finally:
        os.close(descriptor)
    raise ProtocolError(f"shared memory {'; '.join(faults)}")


def _is_sealed(descriptor: int) -> bool:
    try:
        return bool(fcntl.fcntl(descriptor, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK)
    except OSError:  # it is no memfd
        return False


def _check(tensor: Tensor, nbytes: int, word_nbytes: int) -> None:
    where = f"tensor {tensor.slot!r}"
    if len(tensor.shape) != len(tensor.strides) or len(tensor.shape) != len(Axis):
        raise ProtocolError(f"{where}: shape {tensor.shape}, strides {tensor.strides}")
    numbers = (tensor.offset, *tensor.strides)
    if min(tensor.shape) < 1 or min(numbers) < 0 or any(n % word_nbytes for n in numbers):
        raise ProtocolError(
            f"{where}: offset {tensor.offset}, shape {tensor.shape}, strides {tensor.strides}; "
            f"accepted: multiples of {word_nbytes} bytes, none negative"
        )
    steps = zip(tensor.shape, tensor.strides, strict=True)
    end = tensor.offset + sum((n - 1) * stride for n, stride in steps) + word_nbytes
    if end > nbytes:
        raise ProtocolError(f"{where}: ends at byte {end} of a memory of {nbytes}")


def _home(places: Sequence[tuple[int, int, Any]], view: Words) -> Any:  # noqa: ANN401 - any place
    """The memory, of those given as (address, bytes, memory), that a view lies in as a whole."""
    start, end = view.ctypes.data, _end(view)
    return next((m for base, n, m in places if base <= start and end <= base + n), None)


def _end(view: Words) -> int:
    """Address behind the last byte of a view, whose strides are not negative."""
    steps = zip(view.shape, view.strides, strict=True)
    last: int = view.ctypes.data + sum((n - 1) * stride for n, stride in steps)
    return last + view.itemsize


def _contiguous(shape: Sequence[int], itemsize: int) -> tuple[int, ...]:
    strides = np.cumprod((itemsize, *reversed(shape[1:])))
    return tuple(int(stride) for stride in reversed(strides))
