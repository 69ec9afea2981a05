"""C, encode: choose each segment's representation, then compute its CRC."""

from __future__ import annotations

from typing import ClassVar

import numpy as np

from orbitkv.cache.catalogue import Tier, Want
from orbitkv.codecs.base import SegmentCodec
from orbitkv.codecs.cuda.ans_batch import AnsSlots
from orbitkv.codecs.cuda.tasks import Item
from orbitkv.codecs.cuda.workspace import AnsSaving, Bridge, DeviceStream, Workspace
from orbitkv.codecs.slots import Place, lay_out
from orbitkv.graph import Lanes, Port, Ports
from orbitkv.objects import Bytes, Format, RawReason, Segment, crc32
from orbitkv.stages.base import Outputs, StageContext
from orbitkv.stages.batch import EncodedBatch, EncodedObject, PageBatch, SealedBatch
from orbitkv.stages.direct import DirectWriteBatch

_RAW = int(Format.RAW)


class Encode:
    """Bring every segment into the form in which it will be stored, by the manager's codec.

    A segment that the codec cannot take is stored raw, and says why.

    On a host the encoder's workspace is the pool memory that D will admit, so a byte is copied
    once on its way from the engine's page; on a GPU it is the lane's arena, and all objects of a
    batch are encoded at once. What is resident already is not copied at all.

    In:  ``PageBatch``: slots of the engine's pages, host or device, any strides.
    Out: ``EncodedBatch``: segments at their places in pool memory, or in the arena.
    """

    inputs: ClassVar[Ports] = {"in": Port(PageBatch)}
    outputs: ClassVar[Ports] = {"out": Port(EncodedBatch)}
    lanes: ClassVar[Lanes] = frozenset({"stream", "host"})

    async def prepare(self, batch: PageBatch, ctx: StageContext) -> Outputs:
        """Wait for room to encode into, as long as it takes; a GPU then starts at once."""
        stream = ctx.stream_of(batch.tensors)
        if stream:
            return {"out": await _encode_on_device(batch, ctx, stream)}
        catalogue = ctx.catalogue
        object_nbytes = batch.tensors.geometry.object_nbytes
        fresh = [entry for entry in batch.objects if not catalogue.find(entry[0].digest, Tier.DRAM)]
        wants = [
            Want(key.digest, object_nbytes[key.group], catalogue.next_generation())
            for key, _, _ in fresh
        ]
        lease, bridge = None, ctx.bridge_of(batch.tensors)
        if ctx.budget and not bridge:
            lease = await ctx.budget.acquire(sum(want.nbytes for want in wants))
        try:
            homes = await catalogue.reserve_dram(
                wants, urgent=False, cancellation=batch.part.ticket.cancellation
            )
        except BaseException:
            if lease:
                lease.release()
            raise
        assert homes is not None, "a wait without a limit has no end but success"
        objects = [
            EncodedObject(key, page_index, slots, home)
            for (key, page_index, slots), home in zip(fresh, homes, strict=True)
        ]
        codecs = ctx.codecs(batch.tensors.geometry)
        encoded = EncodedBatch(
            batch.part, catalogue, batch.tensors, codecs, objects, lease, bridge=bridge
        )
        return {"out": encoded}

    def run_item(self, batch: EncodedBatch, index: int) -> None:
        """Gather or encode one object's segments to their places."""
        if batch.bridge:
            _encode_bridged(batch, batch.objects[index], batch.bridge)
        elif batch.codecs.chosen_raw:
            self._gather(batch, batch.objects[index])
        else:
            self._encode(batch, batch.objects[index])

    def _gather(self, batch: EncodedBatch, entry: EncodedObject) -> None:
        tensors = batch.tensors
        home, page_index = _memory_of(entry), entry.page_index
        layout = batch.codecs.layouts[entry.key.group].places
        segments = entry.segments
        block = tensors.block(entry.slots, page_index)
        if block is not None:
            _payloads(home, layout[0].offset, block)[:] = block
        for slot, offset, nbytes, _, _ in layout:
            payload = home[offset : offset + nbytes]
            if block is None:
                run = tensors.run(slot, page_index)
                if run is not None:
                    payload[:] = run
                else:
                    page = tensors.segment(slot, page_index)
                    np.copyto(payload.view(page.dtype).reshape(page.shape), page)
            segments.append(Segment(_RAW, payload, nbytes, 0, None, offset))

    def _encode(self, batch: EncodedBatch, entry: EncodedObject) -> None:
        """Encode optimistically; where a segment must be raw, all behind it moves, so again."""
        home, geometry = _memory_of(entry), batch.tensors.geometry
        sources: list[Bytes] = []
        for slot in entry.slots:
            run = batch.tensors.run(slot, entry.page_index)
            if run is None:
                page = batch.tensors.segment(slot, entry.page_index)
                run = np.ascontiguousarray(page).reshape(-1).view(np.uint8)
            sources.append(run)
        layout = batch.codecs.layouts[entry.key.group].places
        raw: dict[int, RawReason] = {}
        while refused := _encode_into(home, layout, sources):
            raw |= {layout[position].slot: reason for position, reason in refused.items()}
            layout = lay_out(batch.codecs, geometry, entry.slots, raw).places
        for place, source in zip(layout, sources, strict=True):
            if place.codec is None:
                _payload(home, place)[:] = source
        entry.segments = _segments(home, layout)


class Crc32:
    """Compute the CRC-32 of every stored segment.

    In:  ``EncodedBatch``.
    Out: ``dram``: nothing may change a payload from here on.
         ``direct``: the same images of a GPU, where the direct route takes more.
    """

    inputs: ClassVar[Ports] = {"in": Port(EncodedBatch)}
    outputs: ClassVar[Ports] = {
        "dram": Port(SealedBatch),
        "direct": Port(DirectWriteBatch, optional=True),
    }
    lanes: ClassVar[Lanes] = frozenset({"stream", "host"})

    async def prepare(self, batch: EncodedBatch, ctx: StageContext) -> Outputs:
        """Hand the batch over; a GPU is asked for the CRCs that it finds, and what it refuses."""
        if batch.workspace:
            batch.workspace.fetch_results()
        direct = _open_direct(batch, ctx)
        sealed = SealedBatch(
            batch.part,
            batch.catalogue,
            batch.tensors,
            batch.codecs,
            batch.objects,
            batch.lease,
            batch.workspace,
            batch.bridge,
            direct,
        )
        return {"dram": sealed, "direct": direct} if direct else {"dram": sealed}

    def run_item(self, batch: SealedBatch, index: int) -> None:
        """Seal one object's segments."""
        for segment in batch.objects[index].segments:
            segment.crc32 = crc32(segment.payload)


def _open_direct(batch: EncodedBatch, ctx: StageContext) -> DirectWriteBatch | None:
    """What goes straight to SSD too, where that is in use; else D and U write it."""
    route, device = ctx.direct, batch.tensors.device
    if "direct" not in ctx.live_outputs or not batch.workspace or device is None:
        return None
    if not route.takes(device) or not route.has_place(device):
        return None
    digests = [entry.key.digest for entry in batch.objects]
    wanted = frozenset(batch.catalogue.writes.save(digests))
    return DirectWriteBatch(
        route,
        batch.part,
        batch.catalogue,
        batch.tensors,
        batch.workspace,
        digests,
        [entry.layout for entry in batch.objects if entry.layout],
        wanted,
    )


def _payload(home: Bytes, place: Place) -> Bytes:
    return home[place.offset : place.offset + place.stored_nbytes]


def _segments(home: Bytes, layout: tuple[Place, ...]) -> list[Segment]:
    return [
        Segment(
            place.codec.format if place.codec else _RAW,
            _payload(home, place),
            place.original_nbytes,
            place.raw_reason,
            offset=place.offset,
        )
        for place in layout
    ]


def _encode_bridged(batch: EncodedBatch, entry: EncodedObject, bridge: Bridge) -> None:
    """Fetch segment by segment from a GPU whose budget holds no page; FP8 needs no more than that.

    Every other codec would need room on the GPU: its segments are raw for want of budget.
    """
    home, geometry = _memory_of(entry), batch.tensors.geometry
    layout = batch.codecs.layouts[entry.key.group].places
    raw = {
        place.slot: RawReason.NO_BUDGET
        for place in layout
        if place.codec and place.codec.format != Format.FP8_E4M3FN
    }
    if raw:
        layout = lay_out(batch.codecs, geometry, entry.slots, raw).places
    while True:
        refused: dict[int, RawReason] = {}
        for place in layout:
            page = batch.tensors.segment(place.slot, entry.page_index)
            payload = _payload(home, place)
            if place.codec is None:
                bridge.fetch(page, payload)
                continue
            words = bridge.buffer[: place.original_nbytes]
            bridge.fetch(page, words)
            result = place.codec.encode(words.view(page.dtype), payload)
            if isinstance(result, RawReason):
                refused[place.slot] = result
        if not refused:
            break
        raw |= refused
        layout = lay_out(batch.codecs, geometry, entry.slots, raw).places
    entry.segments = _segments(home, layout)


def _memory_of(entry: EncodedObject) -> Bytes:
    assert entry.home
    assert entry.home.memory is not None
    return entry.home.memory


async def _encode_on_device(
    batch: PageBatch, ctx: StageContext, stream: DeviceStream
) -> EncodedBatch:
    """Enqueue the kernels that encode all objects of a batch, each at its place in its image."""
    codecs = ctx.codecs(batch.tensors.geometry)
    objects = [
        EncodedObject(key, page_index, slots, None, layout=codecs.layouts[key.group])
        for key, page_index, slots in batch.objects
        if not ctx.catalogue.find(key.digest, Tier.DRAM)
    ]
    encoded = EncodedBatch(batch.part, ctx.catalogue, batch.tensors, codecs, objects, None)
    if not objects:
        return encoded
    workspace = encoded.workspace = await _open_workspace(encoded, stream)
    try:
        _enqueue_encode(encoded)
    except BaseException:
        try:
            await stream.idle()  # a kernel that did start still reads the engine's pages
        finally:
            workspace.running = False
            encoded.release()
        raise
    return encoded


async def _open_workspace(batch: EncodedBatch, stream: DeviceStream) -> Workspace:
    together = batch.codecs.together
    if isinstance(together, AnsSlots):
        objects = [entry.slots for entry in batch.objects]
        gathered = not batch.tensors.device_slots.are_runs
        return await AnsSaving.open_for(stream, together.encode_shape(objects, gathered=gathered))
    image_nbytes = [entry.layout.nbytes for entry in batch.objects if entry.layout]
    segments = sum(len(entry.slots) for entry in batch.objects)
    return await Workspace.open(stream, image_nbytes, segments)


def _enqueue_encode(batch: EncodedBatch) -> None:
    workspace = batch.workspace
    assert workspace
    if isinstance(workspace, AnsSaving):
        pages = [entry.page_index for entry in batch.objects]
        workspace.encode(batch.tensors.device_slots, pages)
        return
    items = [
        Item(entry.layout, entry.page_index, image)
        for entry, image in zip(batch.objects, workspace.images, strict=True)
        if entry.layout
    ]
    tasks = workspace.fill(batch.tensors.device_slots.address, items)
    workspace.running = True
    stream = workspace.stream
    if any(item.layout.has_gaps for item in items):
        stream.clear(workspace.images[0], sum(item.layout.nbytes for item in items))
    workspace.send_tasks()
    for launch in tasks.launches:
        stream.kernels.encode(tasks.span, launch)


async def learn_layouts(batch: EncodedBatch) -> None:
    """Wait for a GPU to tell where segments lie, if nobody knew it beforehand."""
    if isinstance(batch.workspace, AnsSaving):
        layouts = await batch.workspace.encoded()
        for entry, layout in zip(batch.objects, layouts, strict=True):
            entry.layout = layout


def _encode_into(
    home: Bytes, layout: tuple[Place, ...], sources: list[Bytes]
) -> dict[int, RawReason]:
    """Encode all segments that have a codec, one call a codec; return those that must be raw."""
    start = home.ctypes.data
    together: dict[int, tuple[SegmentCodec, list[int]]] = {}
    for position, place in enumerate(layout):
        if place.codec is not None:
            together.setdefault(id(place.codec), (place.codec, []))[1].append(position)
    refused: dict[int, RawReason] = {}
    for codec, positions in together.values():
        found = codec.encode_many(
            np.array([sources[position].ctypes.data for position in positions], np.int64),
            np.array([start + layout[position].offset for position in positions], np.int64),
        )
        refused |= {positions[index]: reason for index, reason in found.items()}
    return refused


def _payloads(image: Bytes, offset: int, block: Bytes) -> Bytes:
    """The part of an object's image that holds a block's payloads, in the block's shape."""
    slots, segment_nbytes = block.shape
    return image[offset : offset + slots * segment_nbytes].reshape(slots, segment_nbytes)
