"""Batches of ANS: where their parts lie on the device and in the host's scratch.

Every step works on arrays of a batch's segments, as a loop over 256 of them would take longer than
the GPU does.
"""

from __future__ import annotations

import itertools
from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

from orbitkv.codecs.cuda import ans
from orbitkv.codecs.cuda.ans import AnsSegments, DecodePlan, EncodePlan, describe
from orbitkv.codecs.cuda.tasks import TASK, TaskTable, tasks_nbytes
from orbitkv.codecs.nvcomp import Nvcomp
from orbitkv.codecs.slots import Layout
from orbitkv.config import KIB
from orbitkv.objects import (
    HEADER_NBYTES,
    OBJECT_ALIGN_NBYTES,
    PAYLOAD_ALIGN_NBYTES,
    ROW,
    ROW_NBYTES,
    Bytes,
    Format,
    RawReason,
    Rows,
    align_up,
    object_nbytes,
)

T = TypeVar("T")
Slots = tuple[int, ...]
_Indices = npt.NDArray[np.int64]

_MOST_OBJECT_NBYTES = 2**32 - 1
_NEVER_NBYTES = 2**62  # more than any budget
_MOST_SHAPES = 256
_TASK_NBYTES = TASK.itemsize + 3 * 4 + ans.RESULT.itemsize
_SLACK_NBYTES = ans.SLACK_NBYTES + 3 * KIB  # of a batch: its parts start on boundaries
_LEAST_PAYLOAD_NBYTES = 16


class EncodeShape(NamedTuple):
    """What is the same in every batch of such objects on a save.

    Attributes:
        slots: Of each task.
        firsts, counts: Of each object: its first task, and how many it has.
        staged: Of each task: offset of its gathered segment. None: the pages are read directly.
        parts: Offsets of workspace, gathered segments and block in device memory, and their end.
        block: Offsets of descriptors, results and the table of tasks in the block, and their end.
    """

    plan: EncodePlan
    slots: _Indices
    firsts: _Indices
    counts: _Indices
    staged: _Indices | None
    parts: tuple[int, ...]
    block: tuple[int, ...]

    @property
    def shared_nbytes(self) -> int:
        """Device memory from the first kernel to the last, beside the objects."""
        return self.parts[-1]

    @property
    def output_nbytes(self) -> int:
        """Device memory for the objects, if every segment stays raw."""
        return self.plan.most_output_nbytes

    @property
    def scratch_nbytes(self) -> int:
        """Pinned host memory."""
        return self.block[-1]


class DecodeShape(NamedTuple):
    """What is the same in every batch of such objects on a restore."""

    plan: DecodePlan
    slots: _Indices
    counts: _Indices


class AnsSlots:
    """ANS for the slots of a geometry.

    Args:
        bound: Of each slot.
        segment_nbytes: Of each slot.

    Attributes:
        most_stored: Of each slot: length that no payload exceeds. 0: segments are always raw.
    """

    def __init__(
        self,
        nvcomp: Nvcomp,
        bound: Sequence[AnsSegments | RawReason],
        segment_nbytes: Sequence[int],
    ) -> None:
        self._nvcomp = nvcomp
        self.segment_nbytes = np.array(segment_nbytes, np.int64)
        # One that is too long for a table of 32 bits is too long for any batch.
        self._rows = describe(bound, np.minimum(self.segment_nbytes, _MOST_OBJECT_NBYTES).tolist())
        self._encode_shares = ans.encode_shares(nvcomp, self._rows)
        self._decode_shares = ans.decode_shares(nvcomp, self._rows)
        self.most_stored = np.array(
            [0 if isinstance(one, RawReason) else one.most_encoded_nbytes for one in bound],
            np.int64,
        )
        self._shapes: OrderedDict[Hashable, Any] = OrderedDict()

    def encode_nbytes(self, slots: Slots, *, gathered: bool) -> int:
        """Device memory that an object takes beside its image while it is encoded, at most."""

        def count() -> int:
            chosen = self.segment_nbytes[list(slots)]
            if object_nbytes(chosen.tolist()) > _MOST_OBJECT_NBYTES:
                return _NEVER_NBYTES
            staged = int(ans.round_up(chosen, PAYLOAD_ALIGN_NBYTES).sum()) if gathered else 0
            shares = int(self._encode_shares[list(slots)].sum())
            return shares + staged + _TASK_NBYTES * len(slots) + _SLACK_NBYTES

        return self._kept(("encode_nbytes", gathered, slots), count)

    def decode_nbytes(self, slots: Slots) -> int:
        """Device memory that an object takes beside its image while it is decoded, at most."""

        def count() -> int:
            shares = int(self._decode_shares[list(slots)].sum())
            return shares + _TASK_NBYTES * len(slots) + _SLACK_NBYTES

        return self._kept(("decode_nbytes", slots), count)

    def encode_shape(self, objects: Sequence[Slots], *, gathered: bool) -> EncodeShape:
        """Plan a save of whole objects, given as their slots."""
        key = ("encode", gathered, *objects)
        return self._kept(key, lambda: self._plan_encode(objects, gathered=gathered))

    def decode_shape(self, objects: Sequence[Slots], raw: npt.NDArray[np.bool_]) -> DecodeShape:
        """Plan a restore of whole objects, of whose segments some are raw."""
        key = ("decode", raw.tobytes(), *objects)
        return self._kept(key, lambda: self._plan_decode(objects, raw))

    def sound(
        self, objects: Sequence[Slots], rows: Rows, total_nbytes: Sequence[int]
    ) -> npt.NDArray[np.bool_]:
        """Tell of each object whether its segment table is one that a save of its slots writes.

        Args:
            rows: Tables of all objects, ``ROW``[tasks], one row a slot.
            total_nbytes: Of each object.
        """
        counts = np.array([len(chosen) for chosen in objects], np.int64)
        firsts = np.cumsum(counts) - counts
        chosen = np.array([slot for one in objects for slot in one], np.int64)
        stored, raw = rows["stored_nbytes"], rows["format"] == Format.RAW
        coded = (rows["format"] == Format.ANS) & (stored >= _LEAST_PAYLOAD_NBYTES)
        coded &= stored <= self.most_stored[chosen].astype(np.uint64)
        good = rows["original_nbytes"] == self.segment_nbytes[chosen].astype(np.uint64)
        good &= np.where(raw, stored == rows["original_nbytes"], coded) & (rows["flags"] == 0)
        # Each offset follows from the lengths before it, as in objects.read_header.
        ends = np.where(good, rows["offset"] + stored, 0).astype(np.int64)
        before = np.empty(len(rows), np.int64)
        before[1:] = ends[:-1]
        before[firsts] = HEADER_NBYTES + ROW_NBYTES * counts
        good &= rows["offset"] == ans.round_up(before, PAYLOAD_ALIGN_NBYTES).astype(np.uint64)
        whole = ans.round_up(ends[firsts + counts - 1], OBJECT_ALIGN_NBYTES)
        fits: npt.NDArray[np.bool_] = np.logical_and.reduceat(good, firsts)
        fits &= whole == np.array(total_nbytes, np.int64)
        return fits

    def _kept(self, key: Hashable, make: Callable[[], T]) -> T:
        """What was made for a key before, unless others were asked for since."""
        found: T | None = self._shapes.pop(key, None)
        if found is None:
            found = make()
        self._shapes[key] = found
        if len(self._shapes) > _MOST_SHAPES:
            self._shapes.popitem(last=False)
        return found

    def _plan_encode(self, objects: Sequence[Slots], *, gathered: bool) -> EncodeShape:
        slots = np.array([slot for chosen in objects for slot in chosen], np.int64)
        counts = np.array([len(chosen) for chosen in objects], np.int64)
        plan = ans.plan_encode(self._nvcomp, self._rows[slots], counts.tolist())
        tasks, staged, staging_nbytes = len(slots), None, 0
        if gathered:
            lengths = ans.round_up(self.segment_nbytes[slots], PAYLOAD_ALIGN_NBYTES)
            ends = np.cumsum(lengths)
            staged, staging_nbytes = ends - lengths, int(ends[-1])
        results_nbytes = ans.RESULT.itemsize * tasks
        block = ans.stack(16, plan.descriptors_nbytes, results_nbytes, tasks_nbytes(tasks))
        parts = ans.stack(PAYLOAD_ALIGN_NBYTES, plan.workspace_nbytes, staging_nbytes, block[-1])
        return EncodeShape(plan, slots, np.cumsum(counts) - counts, counts, staged, parts, block)

    def _plan_decode(self, objects: Sequence[Slots], raw: npt.NDArray[np.bool_]) -> DecodeShape:
        slots = np.array([slot for chosen in objects for slot in chosen], np.int64)
        rows = self._rows[slots]
        rows["word"][raw] = 0
        counts = np.array([len(chosen) for chosen in objects], np.int64)
        return DecodeShape(ans.plan_decode(self._nvcomp, rows), slots, counts)


class AnsEncoding(TaskTable):
    """One batch on a save, from filling its scratch to reading its results.

    Args:
        scratch: uint8[shape.scratch_nbytes] or more, pinned, aligned to 16.
        host: Its address.
        shared: Device address of ``shape.shared_nbytes``, a multiple of 512.
        output: Device address of ``shape.output_nbytes``, a multiple of 4 KiB.
        slots: Device address of the registration's slots.
    """

    def __init__(
        self,
        shape: EncodeShape,
        scratch: Bytes,
        host: int,
        *,
        shared: int,
        output: int,
        slots: int,
    ) -> None:
        self.shape = shape
        self._workspace, self._staging, self._block = (shared + at for at in shape.parts[:3])
        at = shape.block[2]
        starts = [*shape.firsts.tolist(), len(shape.slots)]
        super().__init__(scratch[at:], self._block + at, slots, starts)
        self.span = self.span._replace(order=0)
        self._scratch, self._host, self._output = scratch, host, output
        self._most_nbytes = int(shape.plan.rows["original_nbytes"].max())

    def fill(self, described: npt.NDArray[np.void], pages: Sequence[int]) -> None:
        """Write what goes up.

        Args:
            described: ``SLOT``[slots] of the registration.
            pages: Page index of each object.
        """
        shape, tasks = self.shape, self.tasks
        page_of = np.repeat(np.array(pages, np.int64), shape.counts)
        if shape.staged is None:
            chosen = described[shape.slots]
            sources = chosen["base"].astype(np.int64)
            sources += chosen["page_stride"] * page_of
        else:
            sources = shape.staged + self._staging
            tasks["slot"], tasks["page"] = shape.slots, page_of
            tasks["payload"] = sources
            tasks["stored_nbytes"] = shape.plan.rows["original_nbytes"]
        shape.plan.fill(self._scratch, sources, self._workspace)
        self.faults[:] = 0  # which no kernel finds: what cannot be coded is raw

    def enqueue(self, kernels: Any) -> None:  # noqa: ANN401 - a ``Launcher``, or a test's
        """Start everything up to the CRCs."""
        shape, gathered = self.shape, self.shape.staged is not None
        results_at, tasks_at = shape.block[1:3]
        end = tasks_at + self.tasks.nbytes if gathered else results_at
        kernels.move(self._block, self._host, end)
        if gathered:
            kernels.gather(self.span, 0, self.count, self._most_nbytes)
        kernels.encode_ans(
            shape.plan,
            descriptors=self._block,
            tasks=self.span.tasks,
            crcs=self.span.crcs,
            results=self._block + results_at,
            workspace=self._workspace,
            output=self._output,
        )
        kernels.crc32(self.span, 0, self.count, self._most_nbytes)

    def fetch(self, kernels: Any) -> None:  # noqa: ANN401 - as above
        """Start to bring results, tasks and CRCs."""
        results_at, tasks_at = self.shape.block[1:3]
        nbytes = tasks_at + self.tasks.nbytes + self.crcs.nbytes - results_at
        kernels.move(self._host + results_at, self._block + results_at, nbytes)

    def layouts(self) -> list[Layout]:
        """Read what has been brought: where the objects' segments lie."""
        shape, results_at = self.shape, self.shape.block[1]
        end = results_at + ans.RESULT.itemsize * self.count
        results = self._scratch[results_at:end].view(ans.RESULT)
        image_nbytes = results["object_nbytes"][shape.firsts].astype(np.int64)
        starts = np.cumsum(image_nbytes) - image_nbytes + self._output
        rows = np.zeros(self.count, ROW)
        rows["format"], rows["raw_reason"] = results["format"], results["raw_reason"]
        rows["original_nbytes"] = shape.plan.rows["original_nbytes"]
        rows["stored_nbytes"] = self.tasks["stored_nbytes"]
        rows["offset"] = self.tasks["payload"].astype(np.int64) - np.repeat(starts, shape.counts)
        return [Layout(rows[first:end]) for first, end in itertools.pairwise(self.starts)]


class AnsDecoding(TaskTable):
    """One batch on a restore: its tasks, then its descriptors, in the scratch and on the device.

    Args:
        scratch: uint8[``decoding_nbytes``] or more, pinned, aligned to 16.
        host: Its address.
        shared: Device address of ``decode_nbytes`` of all objects, a multiple of 512.
        slots: Device address of the registration's slots.
    """

    def __init__(
        self, shape: DecodeShape, scratch: Bytes, host: int, *, shared: int, slots: int
    ) -> None:
        self.shape = shape
        self._scratch, self._host, self._workspace = scratch, host, shared
        self._block = shared + align_up(shape.plan.workspace_nbytes, PAYLOAD_ALIGN_NBYTES)
        super().__init__(scratch, self._block, slots, [0, *np.cumsum(shape.counts).tolist()])
        self.span = self.span._replace(order=0)
        self._descriptors_at = tasks_nbytes(self.count)
        self._most_stored_nbytes = 0
        self._most_original_nbytes = int(shape.plan.rows["original_nbytes"].max())

    def fill(
        self,
        rows: Rows,
        images: Sequence[int],
        pages: Sequence[int],
        units: Sequence[Sequence[int]],
    ) -> None:
        """Write what goes up.

        Args:
            rows: Segment tables of all objects, ``ROW``[tasks].
            images, pages: Of each object: device address, and page index.
            units: Numbers of the objects that stand or fall together, neighbours.
        """
        shape, tasks = self.shape, self.tasks
        tasks["slot"] = shape.slots
        tasks["page"] = np.repeat(np.array(pages, np.uint32), shape.counts)
        tasks["payload"] = rows["offset"] + np.repeat(np.array(images, np.uint64), shape.counts)
        tasks["stored_nbytes"] = rows["stored_nbytes"]
        for unit in units:
            first, end = self.starts[unit[0]], self.starts[unit[-1] + 1]
            tasks["unit_first"][first:end] = first
            tasks["unit_count"][first:end] = end - first
        self.crcs[:] = rows["crc32"]
        self.faults[:] = 0
        shape.plan.fill(self._scratch[self._descriptors_at :], self._workspace)
        self._most_stored_nbytes = int(rows["stored_nbytes"].max())

    def check(self, kernels: Any) -> None:  # noqa: ANN401 - a ``Launcher``, or a test's
        """Start to compare the CRCs."""
        end = self._descriptors_at + self.shape.plan.descriptors_nbytes
        kernels.move(self._block, self._host, end)
        kernels.expect_ans(tasks=self.span.tasks, crcs=self.span.crcs, count=self.count)
        kernels.crc32(self.span, 0, self.count, self._most_stored_nbytes)

    def decode(self, kernels: Any) -> None:  # noqa: ANN401 - as above
        """Start to decode, and to write the pages whose segments all stand."""
        kernels.decode_ans(
            self.shape.plan,
            descriptors=self._block + self._descriptors_at,
            tasks=self.span.tasks,
            crcs=self.span.crcs,
            faults=self.span.faults,
            workspace=self._workspace,
        )
        kernels.scatter_raw(self.span, 0, self.count, self._most_original_nbytes)


def decoding_nbytes(count: int) -> int:
    """Scratch of a batch of so many segments on a restore."""
    return tasks_nbytes(count) + align_up(ans.ROW.itemsize * count, 16)
