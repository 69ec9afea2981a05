"""C, encode: choose each segment's representation, then compute its CRC."""

from __future__ import annotations

from typing import ClassVar

import numpy as np

from orbitkv.cache.catalogue import Tier, Want
from orbitkv.graph import Lanes, Port, Ports
from orbitkv.objects import Bytes, Format, Segment, crc32
from orbitkv.stages.base import Outputs, StageContext
from orbitkv.stages.batch import EncodedBatch, EncodedObject, PageBatch, SealedBatch

_RAW = int(Format.RAW)


class Encode:
    """Bring every segment into the form in which it will be stored: here, its original bytes.

    On a host the encoder's workspace is the pool memory that D will admit, so a byte is copied
    once on its way from the engine's page. What is resident already is not copied at all.

    In:  ``PageBatch``: slots of the engine's pages, host, any strides.
    Out: ``EncodedBatch``: raw segments at their places in pool memory.
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
        return {"out": EncodedBatch(batch.part, catalogue, batch.tensors, objects, lease)}

    def run_item(self, batch: EncodedBatch, index: int) -> None:
        """Gather one object's segments to their places."""
        entry, tensors = batch.objects[index], batch.tensors
        home, page_index = entry.home.memory, entry.page_index
        assert home is not None
        layout = tensors.geometry.layouts[entry.key.group]
        segments = entry.segments
        block = tensors.block(entry.slots, page_index)
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
            segments.append(Segment(_RAW, payload, nbytes, 0, None, offset))


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
        sealed = SealedBatch(batch.part, batch.catalogue, batch.tensors, batch.objects, batch.lease)
        return {"dram": sealed}

    def run_item(self, batch: SealedBatch, index: int) -> None:
        """Seal one object's segments."""
        for segment in batch.objects[index].segments:
            segment.crc32 = crc32(segment.payload)


def _payloads(image: Bytes, offset: int, block: Bytes) -> Bytes:
    """The part of an object's image that holds a block's payloads, in the block's shape."""
    slots, segment_nbytes = block.shape
    return image[offset : offset + slots * segment_nbytes].reshape(slots, segment_nbytes)
