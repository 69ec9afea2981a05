"""E, the engine's pages: gathered on the way out, placed on the way back."""

from __future__ import annotations

from typing import ClassVar

import numpy as np

from orbitkv.errors import EngineFault
from orbitkv.graph import Lanes, Port, Ports
from orbitkv.objects import Bytes, Segment
from orbitkv.segment import PagedTensors
from orbitkv.stages.base import Outputs, StageContext, StreamLane
from orbitkv.stages.batch import DecodedBatch, Destination, PageBatch, PublishBatch


class GatherPages:
    """Wait for the engine's event, then describe where each segment lies.

    In:  ``PublishBatch``: pages of one instance, by index.
    Out: ``PageBatch``: views of the engine's own memory; nothing is copied yet.
    """

    inputs: ClassVar[Ports] = {"in": Port(PublishBatch, entry=True)}
    outputs: ClassVar[Ports] = {"out": Port(PageBatch)}
    lanes: ClassVar[Lanes] = frozenset({"stream", "host"})

    async def run(self, batch: PublishBatch, ctx: StageContext) -> Outputs:
        """Gather once what the engine queued before its event is over."""
        if batch.ready is not None:
            assert isinstance(ctx.lane, StreamLane)
            try:
                await ctx.lane.reached(batch.ready)
            except Exception as error:
                raise EngineFault(f"the engine's event failed: {error!r}") from error
        groups = batch.tensors.geometry.groups
        objects = tuple((key, page_index, groups[key.group]) for key, page_index in batch.pages)
        return {"out": PageBatch(batch.part, batch.tensors, objects, batch.nbytes)}


class PlacePages:
    """Copy decoded segments into the pages they were asked for.

    In:  ``DecodedBatch``: raw segments, host.
    Out: nothing. The pages hold the saved bytes when the part is settled.
    """

    inputs: ClassVar[Ports] = {"in": Port(DecodedBatch)}
    outputs: ClassVar[Ports] = {}
    lanes: ClassVar[Lanes] = frozenset({"stream", "host"})

    async def run(self, batch: DecodedBatch, ctx: StageContext) -> Outputs:
        """Place every object of the pages that are not missed."""
        work = [
            (copy.memory, destination, segments)
            for (copy, destination), segments in zip(batch.items, batch.segments, strict=True)
            if destination.page_hash not in batch.missed
        ]
        if work:
            await ctx.lane.run(_place, batch.tensors, work)
        batch.settle()
        return {}


def _place(
    tensors: PagedTensors, work: list[tuple[Bytes | None, Destination, list[Segment]]]
) -> None:
    for image, destination, segments in work:
        page_index, slots = destination.page_index, destination.slot_indices
        block = tensors.block(slots, page_index)
        if block is not None and image is not None:
            payloads = _adjacent_payloads(image, segments, block.shape[1])
            if payloads is not None:
                block[:] = payloads
                continue
        for slot_index, segment in zip(slots, segments, strict=True):
            run = tensors.run(slot_index, page_index)
            if run is not None:
                run[:] = segment.payload
                continue
            page = tensors.segment(slot_index, page_index)
            np.copyto(page, segment.payload.view(page.dtype).reshape(page.shape))


def _adjacent_payloads(image: Bytes, segments: list[Segment], nbytes: int) -> Bytes | None:
    """View an object's payloads as uint8[segment, nbytes] where they lie side by side in it."""
    start = segments[0].offset
    if start is None:
        return None
    end = start + nbytes * len(segments)
    if any(s.offset != at for s, at in zip(segments, range(start, end, nbytes), strict=True)):
        return None
    return image[start:end].reshape(len(segments), nbytes)
