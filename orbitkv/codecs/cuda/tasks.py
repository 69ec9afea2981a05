"""What kernels are given: slots, and the tasks of a batch, as ``common.cuh`` lays them out."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
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


def are_runs(described: npt.NDArray[np.void]) -> bool:
    """Whether every segment of ``SLOT``[slots] is one run, on a boundary of 16."""
    inner_nbytes = described["inner"] * described["row_nbytes"].astype(np.int64)
    dense = (described["inner_stride"] == described["row_nbytes"]) & (
        described["outer_stride"] == inner_nbytes
    )
    starts = described["base"].astype(np.int64) | described["page_stride"]
    return bool(np.all(dense & (starts % WIDEST_ACCESS_NBYTES == 0)))


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


class Item(NamedTuple):
    """One object in a batch.

    Attributes:
        image: Device address of its first byte.
    """

    layout: Layout
    page_index: int
    image: int


def tasks_nbytes(count: int) -> int:
    """Bytes of a batch's tasks and results, on the device and in the host's scratch."""
    return align_up(count * _TASK_NBYTES, 256)


class _Pattern:
    """What is the same in every batch of so many objects of one layout.

    Attributes:
        image: Tasks, CRCs of zeros, faults and order, as they lie in the scratch; of the tasks,
            page and image are to be added.
        kernels: Numbers of the tasks by the kernel they need, and the most that one of them stores.
    """

    def __init__(self, layout: Layout, objects: int) -> None:
        segments = len(layout.places)
        count = objects * segments
        self.image = np.zeros(count * _TASK_NBYTES, np.uint8)
        tasks, crcs, _, _ = _views(self.image, count)
        rows = tasks.reshape(objects, segments)
        rows["slot"] = [place.slot for place in layout.places]
        rows["payload"] = layout.rows["offset"]
        rows["stored_nbytes"] = layout.rows["stored_nbytes"]
        rows["unit_first"] = np.arange(objects)[:, None] * segments
        rows["unit_count"] = segments
        crcs.reshape(objects, segments)[:] = [
            zeros_crc32(place.stored_nbytes) for place in layout.places
        ]
        numbers = np.arange(count, dtype=np.uint32).reshape(objects, segments)
        positions: dict[Kernel, list[int]] = {}
        for position, place in enumerate(layout.places):
            kernel = place.codec.kernel if place.codec else RAW_KERNEL
            positions.setdefault(kernel, []).append(position)
        self.kernels: dict[Kernel, tuple[Words, int]] = {
            kernel: (
                numbers[:, chosen].reshape(-1),
                max(layout.places[position].stored_nbytes for position in chosen),
            )
            for kernel, chosen in positions.items()
        }
        self.launches = _write_order(self.kernels, _views(self.image, count)[3])


_pattern = functools.lru_cache(maxsize=1024)(_Pattern)


def _views(scratch: Bytes, count: int) -> tuple[npt.NDArray[np.void], Words, Words, Words]:
    """Tasks, CRCs, faults and order of a batch, in its scratch."""
    end = TASK.itemsize * count
    tasks = scratch[:end].view(TASK)
    words = scratch[end : end + 3 * _WORD_NBYTES * count].view(np.uint32)
    return tasks, words[:count], words[count : 2 * count], words[2 * count :]


def _write_order(kernels: Mapping[Kernel, tuple[Words, int]], order: Words) -> list[Launch]:
    launches, first = [], 0
    for kernel, (numbers, most_nbytes) in kernels.items():
        order[first : first + len(numbers)] = numbers
        launches.append(Launch(kernel, first, len(numbers), most_nbytes))
        first += len(numbers)
    return launches


class TaskTable:
    """Room for the tasks of one batch, in host memory that kernels read and write as well.

    Args:
        scratch: uint8[``tasks_nbytes``] or more, pinned host memory.
        address: Where the device has as many bytes for them.
        slots: Device address of the registration's slots.
        starts: Number of each object's first task, and of all tasks.

    Attributes:
        tasks, crcs, faults, order: Views of ``scratch``.
        results: Offset and length of CRCs and faults in it.
        span: Where the device has them.
    """

    def __init__(self, scratch: Bytes, address: int, slots: int, starts: list[int]) -> None:
        self.starts = starts
        self.count = count = starts[-1]
        self.tasks, self.crcs, self.faults, self.order = _views(scratch, count)
        self.nbytes = count * _TASK_NBYTES
        crcs_at = count * TASK.itemsize
        faults_at, order_at = crcs_at + 4 * count, crcs_at + 8 * count
        self.results = (crcs_at, 8 * count)
        self.span = Span(slots, address, address + crcs_at, address + faults_at, address + order_at)


class Tasks(TaskTable):
    """The tasks of one batch of objects of which layouts tell the lengths.

    CRCs are preset to those of zeros, so that kernels make them the payloads'.

    Args:
        units: Numbers of the items that stand or fall together, neighbours. None: each by itself.

    Attributes:
        launches: One a kernel, over the task numbers in ``order``.
    """

    def __init__(
        self,
        scratch: Bytes,
        address: int,
        slots: int,
        items: Sequence[Item],
        units: Sequence[Sequence[int]] | None = None,
    ) -> None:
        starts = [0]
        for item in items:
            starts.append(starts[-1] + len(item.layout.places))
        super().__init__(scratch, address, slots, starts)
        if all(item.layout is items[0].layout for item in items):
            pattern = _pattern(items[0].layout, len(items))
            scratch[: self.nbytes] = pattern.image
            self._place(0, items)
            self.launches = pattern.launches
        else:
            self.launches = self._fill(items)
        if units is not None and len(units) < len(items):
            for unit in units:
                first, end = self.starts[unit[0]], self.starts[unit[-1] + 1]
                self.tasks["unit_first"][first:end] = first
                self.tasks["unit_count"][first:end] = end - first

    def _place(self, first: int, items: Sequence[Item]) -> None:
        """Add pages and images to tasks of items of one layout."""
        segments = len(items[0].layout.places)
        rows = self.tasks[first : first + len(items) * segments].reshape(len(items), segments)
        rows["page"] = np.array([item.page_index for item in items], np.uint32)[:, None]
        rows["payload"] += np.array([item.image for item in items], np.uint64)[:, None]

    def _fill(self, items: Sequence[Item]) -> list[Launch]:
        """Put a batch of several layouts together from one object after the other."""
        kernels: dict[Kernel, list[tuple[Words, int]]] = {}
        for number, item in enumerate(items):
            first, end = self.starts[number], self.starts[number + 1]
            pattern = _pattern(item.layout, 1)
            tasks, crcs, faults, _ = _views(pattern.image, end - first)
            self.tasks[first:end], self.crcs[first:end] = tasks, crcs
            self.faults[first:end] = faults
            self.tasks["unit_first"][first:end] = first
            self._place(first, [item])
            for kernel, (numbers, most_nbytes) in pattern.kernels.items():
                kernels.setdefault(kernel, []).append((numbers + np.uint32(first), most_nbytes))
        merged = {
            kernel: (np.concatenate([n for n, _ in parts]), max(most for _, most in parts))
            for kernel, parts in kernels.items()
        }
        return _write_order(merged, self.order)

    def expect(self, crcs: Sequence[Words]) -> None:
        """Preset every CRC so that kernels make it zero where the payload has the one given."""
        self.crcs ^= np.concatenate(crcs)

    @property
    def most_stored_nbytes(self) -> int:
        """Most that one task stores."""
        return max(launch.most_stored_nbytes for launch in self.launches)
