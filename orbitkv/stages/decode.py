"""R and V, the way back: upload, validate, decode."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar, NoReturn

import numpy as np
import numpy.typing as npt

from orbitkv.cache.catalogue import Copy
from orbitkv.codecs.base import SegmentCodec, Together
from orbitkv.codecs.cuda.ans_batch import AnsSlots
from orbitkv.codecs.cuda.tasks import Item
from orbitkv.codecs.cuda.workspace import AnsRestoring, Bridge, DeviceStream, Workspace
from orbitkv.codecs.slots import Layout, Place, SlotCodecs
from orbitkv.errors import CorruptObject, Undecodable
from orbitkv.graph import Lanes, Port, Ports
from orbitkv.objects import (
    CRC32_WORD,
    HEADER_NBYTES,
    ROW,
    ROW_NBYTES,
    Bytes,
    Format,
    Header,
    RawReason,
    Rows,
    read_header,
    read_sealed,
)
from orbitkv.segment import PagedTensors
from orbitkv.stages.base import Outputs, StageContext
from orbitkv.stages.batch import (
    DecodedBatch,
    ResidentBatch,
    RestoreBatch,
    UploadedBatch,
    ValidatedBatch,
)
from orbitkv.stages.dram import check_object, join_runs
from orbitkv.stages.engine import follow, place_object


class Upload:
    """Bring objects to where the decoder reads them: on a host, where they are.

    To a GPU the images go in one copy, or in as many as there are runs of them in the pool.

    In:  ``ResidentBatch``.
    Out: ``UploadedBatch``: on a GPU, images on their way into the arena.
    """

    inputs: ClassVar[Ports] = {"in": Port(ResidentBatch)}
    outputs: ClassVar[Ports] = {"out": Port(UploadedBatch)}
    lanes: ClassVar[Lanes] = frozenset({"stream", "host"})

    async def run(self, batch: ResidentBatch, ctx: StageContext) -> Outputs:
        """Nothing has to move on a host; a GPU's copy engine is started."""
        stream = ctx.stream_of(batch.tensors)
        batch.bridge = ctx.bridge_of(batch.tensors)
        if stream:
            await _upload(batch, stream, ctx.codecs(batch.tensors.geometry).together)
        return {"out": batch.become(UploadedBatch)}


class Validate:
    """Check header, table, lengths, CRCs and padding of each object before it is decoded.

    In:  ``UploadedBatch``.
    Out: ``ValidatedBatch``. A corrupt object is hidden, and its page left out as a miss.
    """

    inputs: ClassVar[Ports] = {"in": Port(UploadedBatch)}
    outputs: ClassVar[Ports] = {"out": Port(ValidatedBatch)}
    lanes: ClassVar[Lanes] = frozenset({"stream", "host"})

    async def prepare(self, batch: UploadedBatch, ctx: StageContext) -> Outputs:
        """Hand the batch over; on a GPU, the heads are checked now, and CRCs by its kernel."""
        if isinstance(batch.workspace, AnsRestoring):
            await _validate_together(batch, batch.workspace, ctx)
        elif batch.workspace:
            await _validate_on_device(batch, ctx)
        return {"out": batch.become(ValidatedBatch)}

    def run_item(self, batch: ValidatedBatch, index: int) -> None:
        """Check one object."""
        copy, destination = batch.items[index]
        segments = check_object(copy)
        geometry = batch.tensors.geometry
        wanted = [geometry.segment_nbytes[slot] for slot in destination.slot_indices]
        seen = [segment.original_nbytes for segment in segments]
        if seen != wanted:
            raise Undecodable(f"segments of {seen} bytes; accepted: {wanted}")
        batch.segments[index] = segments


class Decode:
    """Give each object's segments back to the engine's representation, in the engine's page.

    On a host a decoder writes where the engine will read, as soon as an object stands: a second
    pass over the bytes would cost as much as the first.

    In:  ``ValidatedBatch``.
    Out: ``DecodedBatch``. An object with a segment that this pipeline cannot undo is a miss of
         its page, and hidden: of no use here, it must not keep a new save from replacing it.
    """

    inputs: ClassVar[Ports] = {"in": Port(ValidatedBatch)}
    outputs: ClassVar[Ports] = {"out": Port(DecodedBatch)}
    lanes: ClassVar[Lanes] = frozenset({"stream", "host"})

    async def prepare(self, batch: ValidatedBatch, ctx: StageContext) -> Outputs:
        """Hand the batch over; from here on its pages are being written."""
        stream = ctx.stream_of(batch.tensors)
        await follow(batch.ready, ctx.lane, stream)
        decoded = batch.become(DecodedBatch)
        decoded.placed = True
        decoded.codecs = ctx.codecs(batch.tensors.geometry)
        if batch.workspace and batch.workspace.tasks:
            batch.workspace.decode()
        return {"out": decoded}

    def run_item(self, batch: DecodedBatch, index: int) -> None:
        """Decode one object's segments into its page."""
        segments = batch.segments[index]
        encoded = [position for position, s in enumerate(segments) if s.format != Format.RAW]
        if batch.bridge:
            _decode_bridged(batch, index, batch.bridge)
            return
        if encoded:
            _decode_segments(batch, index, encoded)
        place_object(batch, index, skip=frozenset(encoded))


def _decode_segments(batch: DecodedBatch, index: int, positions: list[int]) -> None:
    """Decode some of an object's segments, each straight into its slot where that is one run.

    Raises:
        Undecodable: a format, length or content that the manager's codec does not write.
    """
    assert batch.codecs
    _, destination = batch.items[index]
    tensors, page_index = batch.tensors, destination.page_index
    slots = [destination.slot_indices[position] for position in positions]
    segments = [batch.segments[index][position] for position in positions]
    # All of them before the first write: of a page with one that is strange, none is touched.
    codecs = [
        codec_for(segment.format, segment.stored_nbytes, batch.codecs, slot)
        for segment, slot in zip(segments, slots, strict=True)
    ]
    for position, segment, slot, codec in zip(positions, segments, slots, codecs, strict=True):
        page = tensors.segment(slot, page_index)
        is_run = tensors.run(slot, page_index) is not None
        target = page if is_run else np.empty(page.shape, page.dtype)
        try:
            codec.decode(segment.payload, target)
        except CorruptObject as error:
            # Its CRC stands, so every copy of it is like that: none may keep a new save out.
            raise Undecodable(f"segment {position}: {error}") from error
        if not is_run:
            np.copyto(page, target)


def _decode_bridged(batch: DecodedBatch, index: int, bridge: Bridge) -> None:
    """Bring segment by segment to a GPU whose budget holds no page, decoded on the host.

    Raises:
        Undecodable: a format, length or content that the manager's codec does not write.
    """
    assert batch.codecs
    _, destination = batch.items[index]
    codecs = [
        None
        if segment.format == Format.RAW
        else codec_for(segment.format, segment.stored_nbytes, batch.codecs, slot)
        for segment, slot in zip(batch.segments[index], destination.slot_indices, strict=True)
    ]
    for position, (segment, codec) in enumerate(zip(batch.segments[index], codecs, strict=True)):
        slot = destination.slot_indices[position]
        page = batch.tensors.segment(slot, destination.page_index)
        words = segment.payload
        if codec is not None:
            words = bridge.buffer[: segment.original_nbytes]
            try:
                codec.decode(segment.payload, words.view(page.dtype))
            except CorruptObject as error:
                raise Undecodable(f"segment {position}: {error}") from error
        bridge.put(words, page)


def codec_for(stored_format: int, nbytes: int, codecs: SlotCodecs, slot: int) -> SegmentCodec:
    """The codec that undoes an encoded segment of a slot, of ``nbytes`` as stored.

    Raises:
        Undecodable: its format or length is not one that the manager's codec writes.
    """
    codec = codecs.codec_of(slot)
    if codec is None or stored_format != codec.format:
        wanted = codec.format if codec else int(Format.RAW)
        raise Undecodable(f"format {stored_format}; this pipeline decodes {wanted}")
    if codec.encoded_nbytes is not None and nbytes != codec.encoded_nbytes:
        raise Undecodable(f"{nbytes} bytes stored; accepted: {codec.encoded_nbytes}")
    return codec


async def open_workspace(
    batch: RestoreBatch, stream: DeviceStream, together: Together | None
) -> None:
    """Wait for room in the arena for the images of a batch, and for its tasks."""
    objects = [destination.slot_indices for _, destination in batch.items]
    nbytes = [copy.nbytes for copy, _ in batch.items]
    if isinstance(together, AnsSlots):
        batch.workspace = await AnsRestoring.open_for(stream, together, objects, nbytes)
    else:
        batch.workspace = await Workspace.open(stream, nbytes, sum(map(len, objects)))
    batch.images = batch.workspace.images


async def _upload(batch: ResidentBatch, stream: DeviceStream, together: Together | None) -> None:
    """Start to copy the images, those of a page beside each other."""
    batch.sort_by_page()
    if not batch.items:
        return
    await open_workspace(batch, stream, together)
    assert batch.workspace
    pieces = zip(batch.images, batch.items, strict=True)
    pool = batch.catalogue.pool.address
    runs = join_runs((image, pool + copy.offset, copy.nbytes) for image, (copy, _) in pieces)
    batch.workspace.running = True
    stream.after(stream.copy(runs))


async def _heads_of(batch: UploadedBatch) -> list[Bytes]:
    """Header and table of each object: in pool memory, or fetched from where cuFile put them."""
    memories = [copy.memory for copy, _ in batch.items]
    found = [memory for memory in memories if memory is not None]
    if len(found) == len(memories):
        return found
    assert batch.workspace
    return await batch.workspace.fetch_heads(
        [HEADER_NBYTES + ROW_NBYTES * len(target.slot_indices) for _, target in batch.items]
    )


async def _validate_on_device(batch: UploadedBatch, ctx: StageContext) -> None:
    """Check heads on the host, and start the kernel that compares the CRCs."""
    workspace = batch.workspace
    assert workspace
    codecs = ctx.codecs(batch.tensors.geometry)
    layouts: list[Layout] = []
    crcs: list[npt.NDArray[np.uint32]] = []
    faults: dict[int, CorruptObject] = {}
    heads = await _heads_of(batch)
    for index, ((copy, destination), head) in enumerate(zip(batch.items, heads, strict=True)):
        try:
            layout, found = _check_head(head, copy, destination.slot_indices, codecs, batch.tensors)
        except CorruptObject as error:
            faults[index] = error
        else:
            layouts.append(layout)
            crcs.append(found)
    if faults:
        kept = _left_over(batch, faults)
        sound = [stays for index, stays in enumerate(kept) if index not in faults]
        layouts = [layout for layout, kept in zip(layouts, sound, strict=True) if kept]
        crcs = [found for found, kept in zip(crcs, sound, strict=True) if kept]
        await _reject(batch, faults, ctx)
    if not batch.items:
        return
    items = [
        Item(layout, destination.page_index, image)
        for layout, (_, destination), image in zip(layouts, batch.items, batch.images, strict=True)
    ]
    tasks = workspace.fill(batch.tensors.device_slots.address, items, batch.pages())
    tasks.expect(crcs)
    workspace.check()


async def _validate_together(
    batch: UploadedBatch, workspace: AnsRestoring, ctx: StageContext
) -> None:
    """Check heads on the host, the tables of all objects at once; start to compare the CRCs."""
    codecs = ctx.codecs(batch.tensors.geometry)
    together = codecs.together
    assert isinstance(together, AnsSlots)
    faults: dict[int, CorruptObject] = {}
    tables: list[Rows] = []
    heads = await _heads_of(batch)
    for index, ((copy, destination), head) in enumerate(zip(batch.items, heads, strict=True)):
        slots = destination.slot_indices
        try:
            table = np.frombuffer(_check_seal(head, copy).table, ROW)
            if len(table) != len(slots):
                _explain(head, copy, slots, codecs, batch.tensors)
        except CorruptObject as error:
            faults[index], table = error, np.zeros(len(slots), ROW)
        tables.append(table)
    if not batch.items:
        return
    rows = np.concatenate(tables)
    objects = [destination.slot_indices for _, destination in batch.items]
    sound = together.sound(objects, rows, [copy.nbytes for copy, _ in batch.items])
    for index in np.flatnonzero(~sound).tolist():
        copy, destination = batch.items[index]
        try:
            if index not in faults:
                _explain(heads[index], copy, destination.slot_indices, codecs, batch.tensors)
        except CorruptObject as error:
            faults[index] = error
    if faults:
        kept = _left_over(batch, faults)
        await _reject(batch, faults, ctx)
        if not batch.items:
            return
        rows = np.concatenate([table for table, stays in zip(tables, kept, strict=True) if stays])
        objects = [destination.slot_indices for _, destination in batch.items]
    workspace.describe(
        together.decode_shape(objects, rows["format"] == Format.RAW),
        batch.tensors.device_slots.address,
        rows,
        images=batch.images,
        pages=[destination.page_index for _, destination in batch.items],
        units=batch.pages(),
    )
    workspace.check()


async def _reject(
    batch: UploadedBatch, faults: Mapping[int, CorruptObject], ctx: StageContext
) -> None:
    """Go on without objects whose images are still on their way: their pins end with the copies."""
    assert batch.workspace
    await batch.workspace.stream.idle()
    batch.workspace.running = False
    batch.reject(faults, ctx.log)
    batch.workspace.running = bool(batch.items)


def _left_over(batch: UploadedBatch, faults: Mapping[int, CorruptObject]) -> list[bool]:
    """Tell of each item whether it stays: of a page with a fault the other objects go too."""
    lost = {batch.items[index][1].page_hash for index in faults}
    return [destination.page_hash not in lost for _, destination in batch.items]


def _check_seal(head: Bytes, copy: Copy) -> Header:
    """Check an object's header, and the CRC over it and its table; of the rows, nothing.

    Args:
        head: The object's first bytes, as far as its table should go, or further.

    Raises:
        CorruptObject: it is not what it should be.
    """
    header = read_sealed(head, key_digest=copy.digest, nbytes=copy.nbytes)
    if header.generation != copy.generation:
        raise CorruptObject(f"generation {header.generation}; accepted: {copy.generation}")
    return header


def _check_head(
    head: Bytes, copy: Copy, slots: tuple[int, ...], codecs: SlotCodecs, tensors: PagedTensors
) -> tuple[Layout, npt.NDArray[np.uint32]]:
    """Check an object's header and table; return its layout, and the CRCs that it tells.

    Raises:
        CorruptObject: it is not what it should be.
        Undecodable: it is not what this pipeline decodes into these slots.
    """
    header = _check_seal(head, copy)
    table = np.frombuffer(header.table, np.uint32).reshape(-1, ROW_NBYTES // 4).copy()
    crcs = table[:, CRC32_WORD].copy()
    table[:, CRC32_WORD] = 0
    bare = table.tobytes()
    for layout in codecs.layouts.values():  # as nearly every object is laid out
        # Another group's table may be the same byte for byte; its slots are not.
        if (
            layout.slots == slots
            and bare == layout.table_bytes
            and header.total_nbytes == layout.nbytes
        ):
            return layout, crcs
    places = []
    for slot, (row, codec) in zip(
        slots, _read_table(head, copy, slots, codecs, tensors), strict=True
    ):
        reason = RawReason.CHOSEN if codec else RawReason(row["raw_reason"])
        places.append(Place(slot, int(row["offset"]), int(row["original_nbytes"]), codec, reason))
    return Layout.of(tuple(places)), crcs


def _read_table(
    head: Bytes, copy: Copy, slots: tuple[int, ...], codecs: SlotCodecs, tensors: PagedTensors
) -> list[tuple[np.void, SegmentCodec | None]]:
    """Read an object's table row by row; give each ``ROW`` with what undoes it.

    Raises:
        CorruptObject: the table is not what it should be.
        Undecodable: it is not what this pipeline decodes into these slots.
    """
    rows = np.frombuffer(read_header(head, key_digest=copy.digest, nbytes=copy.nbytes).table, ROW)
    wanted = [tensors.geometry.segment_nbytes[slot] for slot in slots]
    seen = rows["original_nbytes"].tolist()
    if seen != wanted:
        raise Undecodable(f"segments of {seen} bytes; accepted: {wanted}")
    return [
        (
            row,
            None
            if row["format"] == Format.RAW
            else codec_for(int(row["format"]), int(row["stored_nbytes"]), codecs, slot),
        )
        for slot, row in zip(slots, rows, strict=True)
    ]


def _explain(
    head: Bytes, copy: Copy, slots: tuple[int, ...], codecs: SlotCodecs, tensors: PagedTensors
) -> NoReturn:
    """Raise for a table that is not one of these slots, by the first fault of its rows."""
    _read_table(head, copy, slots, codecs, tensors)
    raise Undecodable("a length that no encoder writes")
