"""ANS on a GPU: how segments are cut into slices, and what is enqueued around nvCOMP.

A batch is *planned* on the host, which costs no device time and says how much memory it takes; then
its descriptors are *filled* in, uploaded by the caller with all else of the batch, and the work is
*enqueued* on a stream. Nothing waits, and only the caller knows when it is over.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, NoReturn, Protocol

import numpy as np
import numpy.typing as npt

from orbitkv.codecs.base import Addresses, SegmentSpec
from orbitkv.codecs.cuda import driver
from orbitkv.codecs.cuda.source import OPTIONS, source
from orbitkv.codecs.nvcomp import Kind, Nvcomp, Slices
from orbitkv.config import KIB, MIB
from orbitkv.errors import DeviceFault, Unavailable, Undecodable
from orbitkv.objects import (
    HEADER_NBYTES,
    OBJECT_ALIGN_NBYTES,
    PAYLOAD_ALIGN_NBYTES,
    ROW_NBYTES,
    Bytes,
    Format,
    RawReason,
    align_up,
)

SLICE_NBYTES = 64 * KIB  # longest that an encoder cuts
MOST_SLICE_NBYTES = MIB  # that a decoder takes
ADDRESS_ALIGN_NBYTES = 16

ROW = np.dtype(
    [
        ("address", "<u8"),
        ("original_nbytes", "<u4"),
        ("slice_nbytes", "<u4"),
        ("slice_first", "<u4"),
        ("slices", "<u4"),
        ("room_nbytes", "<u4"),
        ("word", "<u4"),
        ("object_first", "<u4"),
        ("object_count", "<u4"),
    ]
)
"""What kernels know of a task: ``AnsRow`` of ans.cu."""
RESULT = np.dtype(
    [("format", "u1"), ("raw_reason", "u1"), ("reserved", "<u2"), ("object_nbytes", "<u4")]
)
"""What an encoder made of a task, and how long its object is: ``AnsResult`` of ans.cu."""
SPARE = np.dtype(
    [("address", "<u8"), ("coded_nbytes", "<u8"), ("target", "<u8"), ("original_nbytes", "<u8")]
)
"""``AnsSpare`` of ans.cu."""

Rows = npt.NDArray[np.void]
_Indices = npt.NDArray[np.int64]

_RAW_KIND = 255  # sorts behind every kind
_ROOM_ALIGN_NBYTES = 256
_SPARE_NBYTES = 4 * KIB
_BLOCK = 256
_LAYOUT_BLOCK = 1024
_WARP = 32
_PARTS = 4  # as in ans.cu
# Beside slices and rooms: descriptors, then arrays that only the device writes.
_ENCODE_SLICE_NBYTES = (4 + 8 + 8 + 8) + (8 + 4 + 4)
_DECODE_SLICE_NBYTES = 5 * 8 + 4
SLACK_NBYTES = KIB  # of a batch: its parts start on boundaries


@dataclass(frozen=True, eq=False)
class AnsSegments:
    """ANS for segments of one spec. Their payloads' lengths depend on their values.

    Attributes:
        encoded_nbytes: None: no length is known beforehand.
        room_nbytes: Of a coded slice at worst.
    """

    spec: SegmentSpec
    kind: Kind
    nvcomp: Nvcomp
    room_nbytes: int
    format = Format.ANS
    encoded_nbytes = None

    @property
    def kernel(self) -> tuple[Any, ...]:
        """The kernels around nvCOMP, which are the same for every spec."""
        return ("ans", self.nvcomp)

    @property
    def most_encoded_nbytes(self) -> int:
        """Length that no payload exceeds: a longer one would save too little to be kept."""
        units = align_up(self.spec.original_nbytes, PAYLOAD_ALIGN_NBYTES) // PAYLOAD_ALIGN_NBYTES
        return units * 7 // 8 * PAYLOAD_ALIGN_NBYTES

    @property
    def word(self) -> int:
        """Generation and kind, as payloads and rows hold them."""
        return self.nvcomp.generation | self.kind << 8

    def encode(self, *_: object) -> NoReturn:
        """Refuse: the work of a GPU, a batch at a time."""
        raise Unavailable("storage codec 'ans': encodes on an NVIDIA GPU only")

    def decode(self, *_: object) -> NoReturn:
        """Refuse: the work of a GPU, a batch at a time."""
        raise Undecodable("storage codec 'ans': decodes on an NVIDIA GPU only")

    encode_many = encode
    decode_many = decode


def cut(original_nbytes: int) -> tuple[int, int]:
    """Slices of a segment, and bytes of each but the last: about alike, at most 64 KiB."""
    slices = -(-original_nbytes // SLICE_NBYTES)
    return slices, align_up(-(-original_nbytes // slices), PAYLOAD_ALIGN_NBYTES)


def describe(bound: Sequence[AnsSegments | RawReason], original_nbytes: Sequence[int]) -> Rows:
    """Describe every slot's segments: ``ROW``[slots], of which a batch takes one for each task.

    A segment that is to be raw after all (a stored one that is raw, one of another format, one for
    which there is no budget) has a ``word`` of its ``RawReason`` << 16.
    """
    rows = np.zeros(len(bound), ROW)
    for index, (one, nbytes) in enumerate(zip(bound, original_nbytes, strict=True)):
        row = rows[index]
        row["original_nbytes"] = nbytes
        row["slices"], row["slice_nbytes"] = cut(nbytes)
        if isinstance(one, RawReason):
            row["word"] = one << 16
        else:
            row["word"], row["room_nbytes"] = one.word, one.room_nbytes
    return rows


class Group(NamedTuple):
    """Slices of one kind: ``[first, first + slices)`` of a batch's."""

    kind: Kind
    first: int
    slices: int
    most_slice_nbytes: int
    temp_nbytes: int

    def of(
        self,
        sources: int,
        source_nbytes: int,
        targets: int,
        target_nbytes: int,
        statuses: int,
        temp: int,
    ) -> Slices:
        """Its part of the batch's arrays: of 8 bytes a slice, statuses of 4."""
        words, lengths = 4 * self.first, 8 * self.first
        return Slices(
            kind=self.kind,
            count=self.slices,
            sources=sources + lengths,
            source_nbytes=source_nbytes + lengths,
            targets=targets + lengths,
            target_nbytes=target_nbytes + lengths,
            statuses=statuses + words,
            temp=temp,
            temp_nbytes=self.temp_nbytes,
        )


@dataclass(frozen=True, eq=False)
class EncodePlan:
    """A batch to be encoded. It names no address, so it serves any batch of the same shape.

    Attributes:
        descriptors_nbytes: Bytes that ``fill`` writes, and that go up with the batch.
        workspace_nbytes: Device memory from the first enqueued kernel to the last.
        most_output_nbytes: Device memory for the objects, if every segment stays raw.
    """

    rows: Rows
    groups: tuple[Group, ...]
    descriptors_nbytes: int
    workspace_nbytes: int
    most_output_nbytes: int
    owners: _Indices
    slice_offsets: _Indices
    room_offsets: _Indices
    uploads: tuple[int, ...]
    parts: tuple[int, ...]

    def fill(self, out: Bytes, sources: Addresses, workspace: int) -> None:
        """Write the descriptors.

        Args:
            out: uint8[descriptors_nbytes or more], host, contiguous.
            sources: int64[tasks]: device addresses of the original bytes, multiples of 16: of
                gathered ones, or of an engine's page where a segment is one run.
            workspace: Device address, a multiple of 256.

        Raises:
            ValueError: an address is no such multiple.
        """
        sources = np.asarray(sources, np.int64)
        _check_addresses(sources, ADDRESS_ALIGN_NBYTES, "source")
        _check_addresses(np.array((workspace,)), _ROOM_ALIGN_NBYTES, "workspace")
        rows, owners = self.rows, self.owners
        count = len(owners)
        at_rows, at_owners, at_sources, at_nbytes, at_targets, _ = self.uploads
        out_rows = out[at_rows : at_rows + rows.nbytes].view(ROW)
        out_rows[:] = rows
        out_rows["address"] = sources
        out[at_owners : at_owners + 4 * count].view(np.uint32)[:] = owners
        lengths = [
            out[at : at + 8 * count].view(np.int64) for at in (at_sources, at_nbytes, at_targets)
        ]
        np.add(sources[owners], self.slice_offsets, out=lengths[0])
        rest_nbytes = rows["original_nbytes"][owners] - self.slice_offsets
        np.minimum(rest_nbytes, rows["slice_nbytes"][owners], out=lengths[1])
        np.add(self.room_offsets, workspace, out=lengths[2])


@dataclass(frozen=True, eq=False)
class DecodePlan:
    """A batch to be decoded. It names no address, so it serves any batch of the same shape.

    Attributes:
        descriptors_nbytes: Bytes that ``fill`` writes, and that go up with the batch.
        workspace_nbytes: Device memory from the first enqueued kernel to the last.
    """

    rows: Rows
    groups: tuple[Group, ...]
    descriptors_nbytes: int
    workspace_nbytes: int
    staging_offsets: _Indices
    parts: tuple[int, ...]

    def fill(self, out: Bytes, workspace: int) -> None:
        """Write the descriptors.

        Args:
            out: uint8[descriptors_nbytes or more], host, contiguous.
            workspace: Device address, a multiple of 512.

        Raises:
            ValueError: it is no such multiple.
        """
        _check_addresses(np.array((workspace,)), PAYLOAD_ALIGN_NBYTES, "workspace")
        out_rows = out[: self.rows.nbytes].view(ROW)
        out_rows[:] = self.rows
        out_rows["address"] = self.staging_offsets + workspace


def plan_encode(nvcomp: Nvcomp, rows: Rows, object_counts: Sequence[int]) -> EncodePlan:
    """Plan a batch of whole objects.

    Args:
        rows: ``ROW``[tasks], taken from ``describe``, in the order of the tasks.
        object_counts: Tasks of each object, which follow one another.

    Raises:
        ValueError: the counts do not add up, or an object is of 4 GiB or more.
    """
    counts = np.asarray(object_counts, np.int64)
    if len(counts) == 0 or int(counts.min()) <= 0 or int(counts.sum()) != len(rows):
        raise ValueError(f"objects of {object_counts} tasks; accepted: {len(rows)} in all")
    rows = rows.copy()
    firsts = np.cumsum(counts) - counts
    rows["object_first"] = np.repeat(firsts, counts)
    rows["object_count"] = np.repeat(counts, counts)
    payloads = np.add.reduceat(round_up(rows["original_nbytes"], PAYLOAD_ALIGN_NBYTES), firsts)
    heads = round_up(HEADER_NBYTES + ROW_NBYTES * counts, PAYLOAD_ALIGN_NBYTES)
    objects = round_up(heads + payloads, OBJECT_ALIGN_NBYTES)
    if int(objects.max()) >= 2**32:
        raise ValueError(f"object of {objects.max()} bytes; accepted: less than 4 GiB")

    kinds = _kinds(rows)
    order = _number_slices(rows, kinds)
    groups = _groups(rows, kinds, nvcomp.compress_temp_nbytes, SLICE_NBYTES)
    slices = rows["slices"][order]
    owners = np.repeat(order, slices)
    count = len(owners)
    indices = np.arange(count) - np.repeat(rows["slice_first"][order].astype(np.int64), slices)
    rooms = np.where(kinds == _RAW_KIND, 0, rows["room_nbytes"]).astype(np.int64)[owners]
    ends = np.cumsum(rooms)
    uploads = stack(ADDRESS_ALIGN_NBYTES, rows.nbytes, 4 * count, 8 * count, 8 * count, 8 * count)
    temp_nbytes = max((group.temp_nbytes for group in groups), default=0)
    parts = stack(
        ADDRESS_ALIGN_NBYTES,
        align_up(int(ends[-1]), _ROOM_ALIGN_NBYTES),
        align_up(temp_nbytes, _ROOM_ALIGN_NBYTES),
        *(8 * count, 8 * len(rows), 4 * count, 4 * count),
    )
    return EncodePlan(
        rows=rows,
        groups=groups,
        descriptors_nbytes=uploads[-1],
        workspace_nbytes=parts[-1],
        most_output_nbytes=int(objects.sum()),
        owners=owners,
        slice_offsets=indices * rows["slice_nbytes"][owners],
        room_offsets=ends - rooms,
        uploads=uploads,
        parts=parts,
    )


def plan_decode(nvcomp: Nvcomp, rows: Rows) -> DecodePlan:
    """Plan a batch. Tasks whose ``word`` says raw are left to others.

    Args:
        rows: ``ROW``[tasks], taken from ``describe``, in the order of the tasks.
    """
    rows = rows.copy()
    kinds = _kinds(rows)
    raw = kinds == _RAW_KIND
    rows["slices"][raw] = 0
    _number_slices(rows, kinds)
    groups = _groups(rows, kinds, nvcomp.decompress_temp_nbytes, MOST_SLICE_NBYTES)
    count = sum(group.slices for group in groups)
    staged = np.where(raw, 0, round_up(rows["original_nbytes"], PAYLOAD_ALIGN_NBYTES))
    ends = np.cumsum(staged)
    temp_nbytes = max((group.temp_nbytes for group in groups), default=0)
    parts = stack(
        ADDRESS_ALIGN_NBYTES,
        int(ends[-1]),
        align_up(temp_nbytes, _ROOM_ALIGN_NBYTES),
        *(8 * count, 8 * count, 8 * count, 8 * count, 8 * count, 4 * count),
    )
    return DecodePlan(
        rows=rows,
        groups=groups,
        descriptors_nbytes=align_up(rows.nbytes, ADDRESS_ALIGN_NBYTES),
        workspace_nbytes=parts[-1],
        staging_offsets=ends - staged,
        parts=parts,
    )


class AnsDevice:
    """nvCOMP and the kernels around it, for every stream of the device that is current.

    To make one takes the device's time: it codes and decodes a few KiB of each kind, so that a
    library which does not do what its version says is found before it is trusted.

    Raises:
        DeviceFault: nvCOMP does not give back what it was given, or the device failed.
    """

    def __init__(self, nvcomp: Nvcomp) -> None:
        import cupy  # noqa: PLC0415 - only where there is a GPU

        self.nvcomp = nvcomp
        module = cupy.RawModule(code=source("ans.cu"), options=OPTIONS)

        def kernel(name: str, addresses: int) -> driver.Kernel:
            function = module.get_function(name).kernel
            return driver.Kernel(name, int(function.ptr), "Q" * addresses + "I")

        self._layout = kernel("ans_layout", 8)
        self._pack = kernel("ans_pack", 9)
        self._expect = kernel("ans_expect", 2)
        self._unpack = kernel("ans_unpack", 9)
        self._judge = kernel("ans_judge", 6)
        self._held = module
        self._spare_memory, self._spares = self._make_spares(cupy)

    def enqueue_encode(
        self,
        plan: EncodePlan,
        stream: int,
        *,
        descriptors: int,
        tasks: int,
        crcs: int,
        results: int,
        workspace: int,
        output: int,
    ) -> None:
        """Encode a batch into whole objects, all but their headers and tables.

        Args:
            stream: A ``cudaStream_t``.
            descriptors: Of what ``plan.fill`` wrote: a multiple of 16.
            tasks: Of ``TASK``[tasks]: receives each one's payload and stored_nbytes.
            crcs: Of uint32[tasks]: receives the CRC of as many zero bytes, to which the CRC kernel
                adds the payload's.
            results: Of ``RESULT``[tasks].
            workspace: That was given to ``plan.fill``.
            output: Of the objects, one behind the other: a multiple of 4 KiB. All of them is
                written, their headers and tables as zeros.
        """
        count = len(plan.rows)
        rows, owners, sources, source_nbytes, targets, _ = (
            descriptors + offset for offset in plan.uploads
        )
        _, temp, coded, starts, statuses, offsets, _ = (workspace + offset for offset in plan.parts)
        for group in plan.groups:
            slices = group.of(sources, source_nbytes, targets, coded, statuses, temp)
            self.nvcomp.compress_async(slices, group.most_slice_nbytes, stream)
        self._layout.launch(
            *(1, _LAYOUT_BLOCK, stream),
            *(tasks, rows, coded, statuses, offsets, results, starts, output, count),
        )
        self._pack.launch(
            *(-(-count // _BLOCK) + _PARTS * len(plan.owners), _BLOCK, stream),
            *(tasks, rows, owners, targets, coded, offsets, results, starts, crcs, count),
        )

    def enqueue_expect(self, stream: int, *, tasks: int, crcs: int, count: int) -> None:
        """Preset CRCs so that the CRC kernel makes them zero where payloads have what they tell.

        Args:
            crcs: Of uint32[count]: those that are expected.
        """
        self._expect.launch(-(-count // _BLOCK), _BLOCK, stream, tasks, crcs, count)

    def enqueue_decode(
        self,
        plan: DecodePlan,
        stream: int,
        *,
        descriptors: int,
        tasks: int,
        crcs: int,
        faults: int,
        workspace: int,
    ) -> None:
        """Decode a batch into the workspace, behind the kernel that compared its CRCs.

        What was encoded and stands is then the payload of its task, as if it had been stored raw;
        what does not stand has a fault.

        The CRC is what guards nvCOMP: given a stream that is damaged behind a right CRC, 5.3 has
        been seen to end in cudaErrorIllegalAddress, which takes the whole process's context with
        it. So of a payload with another CRC, nvCOMP is not shown a byte.

        Args:
            stream: A ``cudaStream_t``.
            descriptors: Of what ``plan.fill`` wrote.
            tasks: Of ``TASK``[tasks]: payloads of those that were encoded are replaced.
            crcs: Of uint32[tasks]: zero where the CRC was met.
            faults: Of uint32[tasks]: receives ``UNDECODABLE``.
            workspace: That was given to ``plan.fill``.
        """
        if not plan.groups:
            return
        _, temp, sources, source_nbytes, targets, rooms, found, statuses, _ = (
            workspace + offset for offset in plan.parts
        )
        count = len(plan.rows)
        shape = (-(-count * _WARP // _BLOCK), _BLOCK, stream)
        spares = int(self._spares.data.ptr)
        self._unpack.launch(
            *shape,
            *(tasks, descriptors, crcs, faults, spares),
            *(sources, source_nbytes, targets, rooms, count),
        )
        for group in plan.groups:
            slices = group.of(sources, source_nbytes, targets, found, statuses, temp)
            self.nvcomp.decompress_async(slices, rooms + 8 * group.first, stream)
        self._judge.launch(*shape, *(tasks, descriptors, faults, rooms, found, statuses, count))

    def _make_spares(self, cupy: Any) -> tuple[list[Any], Any]:  # noqa: ANN401 - a module
        """Code a slice of each kind, and see that it decodes to what it was.

        Returns:
            The memory that spares point into, and ``SPARE``[kinds]: arrays of CuPy's.
        """
        pattern = (np.arange(_SPARE_NBYTES, dtype=np.int64) ** 2 >> 5).astype(np.uint8)
        original = cupy.asarray(pattern)
        memory, spares = [original], np.zeros(len(Kind), SPARE)
        stream = int(cupy.cuda.get_current_stream().ptr)
        for kind in Kind:
            sizes = (kind, 1, _SPARE_NBYTES, _SPARE_NBYTES)
            encode_temp_nbytes = self.nvcomp.compress_temp_nbytes(*sizes)
            decode_temp_nbytes = self.nvcomp.decompress_temp_nbytes(*sizes)
            temp = cupy.zeros(max(encode_temp_nbytes, decode_temp_nbytes, 1), np.uint8)
            room = cupy.zeros(self.nvcomp.max_output_nbytes(kind, _SPARE_NBYTES), np.uint8)
            target = cupy.zeros(_SPARE_NBYTES, np.uint8)
            # addresses and lengths of slice, room and target; length that decodes; two statuses
            columns = (original.data.ptr, _SPARE_NBYTES, room.data.ptr, -1, target.data.ptr)
            table = cupy.asarray(np.array((*columns, _SPARE_NBYTES, -1, -1), np.int64))
            at = [int(table.data.ptr) + 8 * column for column in range(8)]
            there = Slices(
                kind=kind,
                count=1,
                sources=at[0],
                source_nbytes=at[1],
                targets=at[2],
                target_nbytes=at[3],
                statuses=at[7],
                temp=int(temp.data.ptr),
                temp_nbytes=encode_temp_nbytes,
            )
            back = Slices(
                kind=kind,
                count=1,
                sources=at[2],
                source_nbytes=at[3],
                targets=at[4],
                target_nbytes=at[6],
                statuses=at[7] + 4,
                temp=int(temp.data.ptr),
                temp_nbytes=decode_temp_nbytes,
            )
            self.nvcomp.compress_async(there, _SPARE_NBYTES, stream)
            self.nvcomp.decompress_async(back, at[5], stream)
            result = table.get()  # waits
            statuses = result[7:].view(np.int32).tolist()
            if any(statuses) or result[6] != _SPARE_NBYTES or (target.get() != pattern).any():
                raise DeviceFault(
                    f"{self.nvcomp.path}: {_SPARE_NBYTES} bytes of {kind.name} came back as "
                    f"{result[6]}, not all of them the same; statuses {statuses}"
                )
            spares[kind] = (room.data.ptr, result[3], target.data.ptr, _SPARE_NBYTES)
            memory += (room, target)
        # Blocking, as other streams are not ordered after this one.
        return memory, cupy.asarray(spares.view(np.uint8), blocking=True)


def encode_shares(nvcomp: Nvcomp, rows: Rows) -> _Indices:
    """What each task adds to an ``EncodePlan``'s descriptors and workspace, at most.

    A plan needs no more than the sum and ``SLACK_NBYTES``.

    Returns:
        int64[tasks], bytes.
    """
    room_nbytes = rows["room_nbytes"].astype(np.int64)
    rooms = np.where(_kinds(rows) == _RAW_KIND, 0, room_nbytes)
    temps = _temp_shares(rows, nvcomp.compress_temp_nbytes, SLICE_NBYTES)
    return ROW.itemsize + 8 + rows["slices"] * (rooms + temps + _ENCODE_SLICE_NBYTES)


def decode_shares(nvcomp: Nvcomp, rows: Rows) -> _Indices:
    """What each task adds to a ``DecodePlan``'s descriptors and workspace, at most.

    A plan needs no more than the sum and ``SLACK_NBYTES``.

    Returns:
        int64[tasks], bytes.
    """
    temps = _temp_shares(rows, nvcomp.decompress_temp_nbytes, MOST_SLICE_NBYTES)
    staged = round_up(rows["original_nbytes"], PAYLOAD_ALIGN_NBYTES)
    coded = staged + rows["slices"] * (temps + _DECODE_SLICE_NBYTES)
    return ROW.itemsize + np.where(_kinds(rows) == _RAW_KIND, 0, coded)


class _TempNbytes(Protocol):
    def __call__(
        self, kind: Kind, slices: int, most_slice_nbytes: int, total_nbytes: int, /
    ) -> int: ...


def _temp_shares(rows: Rows, temp_nbytes: _TempNbytes, most_slice_nbytes: int) -> _Indices:
    """Temporary memory of a slice alone, which is more than its share."""
    kinds = _kinds(rows)
    shares = np.zeros(len(rows), np.int64)
    for kind in Kind:
        mine = kinds == kind
        if mine.any():
            shares[mine] = temp_nbytes(kind, 1, most_slice_nbytes, most_slice_nbytes)
    return shares


def _kinds(rows: Rows) -> _Indices:
    """Kind of each task's elements; ``_RAW_KIND`` of one that is raw."""
    words = rows["word"].astype(np.int64)
    return np.where(words & 0xFF, words >> 8 & 0xFF, _RAW_KIND)


def _number_slices(rows: Rows, kinds: _Indices) -> _Indices:
    """Set ``slice_first`` so that slices of one kind follow one another, raw ones last.

    Returns:
        The tasks in the order of their slices.
    """
    order = np.argsort(kinds, kind="stable")
    slices = rows["slices"][order].astype(np.int64)
    rows["slice_first"][order] = np.cumsum(slices) - slices
    return order


def _groups(
    rows: Rows, kinds: _Indices, temp_nbytes: _TempNbytes, most_slice_nbytes: int
) -> tuple[Group, ...]:
    groups = []
    first = 0
    for kind in Kind:
        mine = kinds == kind
        count = int(rows["slices"][mine].sum())
        if count:
            original_nbytes = rows["original_nbytes"][mine]
            total_nbytes = int(original_nbytes.sum(dtype=np.int64))
            longest_nbytes = int(np.minimum(rows["slice_nbytes"][mine], original_nbytes).max())
            needed_nbytes = temp_nbytes(kind, count, most_slice_nbytes, total_nbytes)
            groups.append(Group(kind, first, count, longest_nbytes, needed_nbytes))
            first += count
    return tuple(groups)


def round_up(nbytes: npt.NDArray[Any], alignment: int) -> _Indices:
    """Round each up to a multiple of ``alignment``."""
    return (nbytes.astype(np.int64) + (alignment - 1)) // alignment * alignment


def stack(alignment: int, *nbytes: int) -> tuple[int, ...]:
    """Offsets of parts that follow one another on boundaries, and their end."""
    offsets = [0]
    for part_nbytes in nbytes:
        offsets.append(align_up(offsets[-1] + part_nbytes, alignment))
    return tuple(offsets)


def _check_addresses(addresses: Addresses, alignment: int, name: str) -> None:
    if (addresses % alignment).any():
        bad = int(addresses[np.flatnonzero(addresses % alignment)[0]])
        raise ValueError(f"{name} at {bad:#x}; accepted: multiples of {alignment}")
