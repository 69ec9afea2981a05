"""C, encode: choose each segment's representation, then compute its CRC."""

from __future__ import annotations

from typing import ClassVar

import numpy as np

from orbitkv.cache.catalogue import Tier, Want
from orbitkv.graph import Lanes, Port, Ports
from orbitkv.objects import Bytes, Format, Segment, crc32, payload_offsets
from orbitkv.segment import PagedTensors
from orbitkv.stages.base import Outputs, StageContext
from orbitkv.stages.batch import EncodedBatch, EncodedObject, PageBatch, SealedBatch


class Encode:
    """Bring every segment into the form in which it will be stored: here, its original bytes.

    On a host the encoder's workspace is the pool memory that D will admit, so a byte is copied
    once on its way from the engine's page. What is resident already is not copied at all.

    In:  ``PageBatch``: slots of the engine's pages, host, any strides.
    Out: ``EncodedBatch``: raw segments at their places in pool memory, with their CRCs, which
         cost least while a segment is still in the cache.
    """

    inputs: ClassVar[Ports] = {"in": Port(PageBatch)}
    outputs: ClassVar[Ports] = {"out": Port(EncodedBatch)}
    lanes: ClassVar[Lanes] = frozenset({"stream", "host"})

    async def run(self, batch: PageBatch, ctx: StageContext) -> Outputs:
        """Wait for budget and pool memory, as long as it takes; then gather on the lane."""
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
        encoded = EncodedBatch(batch.part, catalogue, [], lease)
        try:
            homes = await catalogue.reserve_dram(
                wants, urgent=False, cancellation=batch.part.ticket.cancellation
            )
            assert homes is not None, "a wait without a limit has no end but success"
            for (key, _, _), home in zip(fresh, homes, strict=True):
                encoded.objects.append(EncodedObject(key, [], home))
            if homes:
                places = [(page_index, slots) for _, page_index, slots in fresh]
                await ctx.lane.run(_gather, batch.tensors, places, encoded.objects)
        except BaseException:
            encoded.release()
            raise
        return {"out": encoded}


class Crc32:
    """Compute the CRC-32 of every stored segment that has none yet.

    In:  ``EncodedBatch``.
    Out: ``SealedBatch``: nothing may change a payload from here on.
    """

    inputs: ClassVar[Ports] = {"in": Port(EncodedBatch)}
    outputs: ClassVar[Ports] = {
        "dram": Port(SealedBatch),
        "direct": Port(SealedBatch, optional=True),
    }
    lanes: ClassVar[Lanes] = frozenset({"stream", "host"})

    async def run(self, batch: EncodedBatch, ctx: StageContext) -> Outputs:
        """Compute on the lane what the encoder or a stage after it left open."""
        open_segments = [
            segment
            for entry in batch.objects
            for segment in entry.segments
            if segment.crc32 is None
        ]
        if open_segments:
            await ctx.lane.run(_seal, open_segments)
        return {"dram": SealedBatch(batch.part, batch.catalogue, batch.objects, batch.lease)}


def _gather(
    tensors: PagedTensors,
    places: list[tuple[int, tuple[int, ...]]],
    objects: list[EncodedObject],
) -> None:
    layouts: dict[tuple[int, ...], list[tuple[int, int, int]]] = {}
    for (page_index, slots), entry in zip(places, objects, strict=True):
        assert entry.home
        home = entry.home.memory
        assert home is not None
        layout = layouts.get(slots)
        if layout is None:
            lengths = [tensors.geometry.segment_nbytes[slot] for slot in slots]
            layout = list(zip(slots, payload_offsets(lengths), lengths, strict=True))
            layouts[slots] = layout
        block = tensors.block(slots, page_index)
        if block is not None:
            _payloads(home, layout[0][1], block)[:] = block
        for slot, offset, nbytes in layout:
            payload = home[offset : offset + nbytes]
            if block is None:
                run = tensors.run(slot, page_index)
                if run is not None:
                    payload[:] = run
                else:
                    page = tensors.segment(slot, page_index)
                    np.copyto(payload.view(page.dtype).reshape(page.shape), page)
            entry.segments.append(Segment(Format.RAW, payload, nbytes, 0, crc32(payload), offset))


def _payloads(image: Bytes, offset: int, block: Bytes) -> Bytes:
    """The part of an object's image that holds a block's payloads, in the block's shape."""
    slots, segment_nbytes = block.shape
    return image[offset : offset + slots * segment_nbytes].reshape(slots, segment_nbytes)


def _seal(segments: list[Segment]) -> None:
    for segment in segments:
        segment.crc32 = crc32(segment.payload)
