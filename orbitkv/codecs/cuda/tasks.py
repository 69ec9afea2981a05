"""What kernels are given: slots, and the tasks of a batch, as ``common.cuh`` lays them out."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from orbitkv.codecs.cuda.crc_tables import zeros_crc32
from orbitkv.codecs.slots import Layout
from orbitkv.objects import Bytes, align_up
from orbitkv.segment import PagedTensors

SLOT = np.dtype(
    [
        ("base", "<u8"),
        ("page_stride", "<i8"),
        ("outer_stride", "<i8"),
        ("inner_stride", "<i8"),
        ("outer", "<u4"),
        ("inner", "<u4"),
        ("row_nbytes", "<u4"),
        ("access_nbytes", "<u4"),
    ]
)
TASK = np.dtype(
    [
        ("slot", "<u4"),
        ("page", "<u4"),
        ("payload", "<u8"),
        ("stored_nbytes", "<u4"),
        ("unit_first", "<u4"),
        ("unit_count", "<u4"),
        ("reserved", "<u4"),
    ]
)
WIDEST_ACCESS_NBYTES = 16
_WORD_NBYTES = 4
_TASK_NBYTES = TASK.itemsize + 3 * _WORD_NBYTES

Kernel = tuple[Any, ...]
"""Which kernels a segment needs: a name, and what they are instantiated for."""
RAW_KERNEL: Kernel = ("raw",)
Words = npt.NDArray[np.uint32]


def describe_slots(tensors: PagedTensors) -> npt.NDArray[np.void]:
    """Describe every slot of a registration for kernels: ``SLOT``[slots]."""
    described = np.zeros(len(tensors.geometry.slots), SLOT)
    for index in range(len(described)):
        pages = tensors.view(index)
        _, outer, inner, width = pages.shape
        page_stride, outer_stride, inner_stride, _ = pages.strides
        row_nbytes = width * pages.itemsize
        # Along an axis of one element there is no step, whatever its stride says.
        inner_stride = inner_stride if inner > 1 else row_nbytes
        outer_stride = outer_stride if outer > 1 else inner * inner_stride
        page_stride = page_stride if len(pages) > 1 else outer * outer_stride
        steps = (pages.ctypes.data, page_stride, outer_stride, inner_stride, row_nbytes)
        access_nbytes = functools.reduce(np.gcd, (*steps, WIDEST_ACCESS_NBYTES))
        described[index] = (*steps[:4], outer, inner, row_nbytes, access_nbytes)
    return described


@dataclass(frozen=True, slots=True)
class Launch:
    """Tasks that one kernel works on: ``order[first : first + count]``."""

    kernel: Kernel
    first: int
    count: int
    most_stored_nbytes: int


class Span(NamedTuple):
    """Device addresses of what a batch's kernels share."""

    slots: int
    tasks: int
    crcs: int
    faults: int
    order: int


@dataclass(frozen=True, slots=True, eq=False)
class Item:
    """One object in a batch.

    Attributes:
        image: Device address of its first byte.
    """

    layout: Layout
    page_index: int
    slots: tuple[int, ...]
    image: int


def tasks_nbytes(count: int) -> int:
    """Bytes of a batch's tasks and results, on the device and in the host's scratch."""
    return align_up(count * _TASK_NBYTES, 256)


class Tasks:
    """The tasks of one batch, in host memory that kernels read and write as well.

    Args:
        scratch: uint8[``tasks_nbytes``] or more, pinned host memory.
        address: Where the device has as many bytes for them.

    Attributes:
        tasks, crcs, faults, order: Views of ``scratch``.
        launches: One a kernel, over the task numbers in ``order``.
    """

    def __init__(
        self,
        scratch: Bytes,
        address: int,
        slots: int,
        items: Sequence[Item],
        units: Sequence[Sequence[int]],
    ) -> None:
        counts = [len(item.slots) for item in items]
        count = sum(counts)
        self.count = count
        ends = np.cumsum([TASK.itemsize * count, *(3 * [_WORD_NBYTES * count])]).tolist()
        self.tasks = scratch[: ends[0]].view(TASK)
        self.crcs: Words = scratch[ends[0] : ends[1]].view(np.uint32)
        self.faults: Words = scratch[ends[1] : ends[2]].view(np.uint32)
        self.order: Words = scratch[ends[2] : ends[3]].view(np.uint32)
        self.nbytes = ends[3]
        self.results = (ends[0], ends[2] - ends[0])
        self.span = Span(slots, address, *(address + end for end in ends[:3]))
        self.starts = [0, *np.cumsum(counts).tolist()]
        self.launches = self._fill(items, units)

    def _fill(self, items: Sequence[Item], units: Sequence[Sequence[int]]) -> list[Launch]:
        tasks, starts = self.tasks, self.starts
        by_kernel: dict[Kernel, list[Words]] = {}
        at = 0
        while at < len(items):
            layout, slots = items[at].layout, items[at].slots
            end = at + 1
            while end < len(items) and items[end].layout is layout:
                end += 1
            alike, first = items[at:end], starts[at]
            part = tasks[first : starts[end]].reshape(len(alike), len(slots))
            part["slot"] = slots
            part["page"] = np.array([item.page_index for item in alike], np.uint32)[:, None]
            images = np.array([item.image for item in alike], np.uint64)[:, None]
            part["payload"] = images + layout.rows["offset"]
            part["stored_nbytes"] = layout.rows["stored_nbytes"]
            part["reserved"] = 0
            numbers = np.arange(first, starts[end], dtype=np.uint32).reshape(part.shape)
            for kernel, positions in kernels_of(layout).items():
                by_kernel.setdefault(kernel, []).append(numbers[:, positions].reshape(-1))
            at = end
        for unit in units:
            first, end = starts[unit[0]], starts[unit[-1] + 1]
            tasks["unit_first"][first:end] = first
            tasks["unit_count"][first:end] = end - first
        self.faults[:] = 0
        launches, first = [], 0
        for kernel, parts in by_kernel.items():
            chosen = np.concatenate(parts)
            self.order[first : first + len(chosen)] = chosen
            most_nbytes = int(tasks["stored_nbytes"][chosen].max())
            launches.append(Launch(kernel, first, len(chosen), most_nbytes))
            first += len(chosen)
        return launches

    def expect_zeros(self) -> None:
        """Preset every CRC to that of as many zeros, so that kernels make it the payload's."""
        lengths, inverse = np.unique(self.tasks["stored_nbytes"], return_inverse=True)
        self.crcs[:] = np.array([zeros_crc32(int(nbytes)) for nbytes in lengths])[inverse]

    def expect(self, crcs: Words) -> None:
        """Preset every CRC so that kernels make it zero where the payload has the one given."""
        self.expect_zeros()
        self.crcs ^= crcs


@functools.lru_cache(maxsize=1024)
def kernels_of(layout: Layout) -> dict[Kernel, list[int]]:
    """Positions of a layout's segments by the kernel they need."""
    found: dict[Kernel, list[int]] = {}
    for position, place in enumerate(layout.places):
        kernel = place.codec.kernel if place.codec else RAW_KERNEL
        found.setdefault(kernel, []).append(position)
    return found
