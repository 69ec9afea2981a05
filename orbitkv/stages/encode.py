"""C, encode: choose each segment's representation, then compute its CRC."""

from __future__ import annotations

from typing import ClassVar

import numpy as np

from orbitkv.cache.catalogue import Tier, Want
from orbitkv.codecs.base import SegmentCodec
from orbitkv.codecs.slots import Place, lay_out
from orbitkv.graph import Lanes, Port, Ports
from orbitkv.objects import Bytes, Format, RawReason, Segment, crc32
from orbitkv.stages.base import Outputs, StageContext
from orbitkv.stages.batch import EncodedBatch, EncodedObject, PageBatch, SealedBatch

_RAW = int(Format.RAW)


class Encode:
    """Bring every segment into the form in which it will be stored, by the manager's codec.

    A segment that the codec cannot take is stored raw, and says why.

    On a host the encoder's workspace is the pool memory that D will admit, so a byte is copied
    once on its way from the engine's page. What is resident already is not copied at all.

    In:  ``PageBatch``: slots of the engine's pages, host, any strides.
    Out: ``EncodedBatch``: segments at their places in pool memory.
    """

    inputs: ClassVar[Ports] = {"in": Port(PageBatch)}
    outputs: ClassVar[Ports] = {"out": Port(EncodedBatch)}
    lanes: ClassVar[Lanes] = frozenset({"stream", "host"})

    async def prepare(self, batch: PageBatch, ctx: StageContext) -> Outputs:
        """Wait for budget and pool memory, as long as it takes."""
        catalogue = ctx.catalogue
        object_nbytes = batch.tensors.geometry.object_nbytes
        fresh = [entry for entry in batch.objects if not catalogue.find(entry[0].digest, Tier.DRAM)]
        wants = [
            Want(key.digest, object_nbytes[key.group], catalogue.next_generation())
            for key, _, _ in fresh
        ]
        lease = None
        if ctx.budget:
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
        return {"out": EncodedBatch(batch.part, catalogue, batch.tensors, codecs, objects, lease)}

    def run_item(self, batch: EncodedBatch, index: int) -> None:
        """Gather or encode one object's segments to their places."""
        if batch.codecs.chosen_raw:
            self._gather(batch, batch.objects[index])
        else:
            self._encode(batch, batch.objects[index])

    def _gather(self, batch: EncodedBatch, entry: EncodedObject) -> None:
        tensors = batch.tensors
        home, page_index = entry.home.memory, entry.page_index
        assert home is not None
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
        home, geometry = entry.home.memory, batch.tensors.geometry
        assert home is not None
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
            payload = home[place.offset : place.offset + place.stored_nbytes]
            if place.codec is None:
                payload[:] = source
            entry.segments.append(
                Segment(
                    place.codec.format if place.codec else _RAW,
                    payload,
                    place.original_nbytes,
                    place.raw_reason,
                    offset=place.offset,
                )
            )


class Crc32:
    """Compute the CRC-32 of every stored segment.

    In:  ``EncodedBatch``.
    Out: ``SealedBatch``: nothing may change a payload from here on.
    """

    inputs: ClassVar[Ports] = {"in": Port(EncodedBatch)}
    outputs: ClassVar[Ports] = {
        "dram": Port(SealedBatch),
        "direct": Port(SealedBatch, optional=True),
    }
    lanes: ClassVar[Lanes] = frozenset({"stream", "host"})

    async def prepare(self, batch: EncodedBatch, ctx: StageContext) -> Outputs:
        """Hand the batch over as it is."""
        del ctx
        sealed = SealedBatch(
            batch.part, batch.catalogue, batch.tensors, batch.codecs, batch.objects, batch.lease
        )
        return {"dram": sealed}

    def run_item(self, batch: SealedBatch, index: int) -> None:
        """Seal one object's segments."""
        for segment in batch.objects[index].segments:
            segment.crc32 = crc32(segment.payload)


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
