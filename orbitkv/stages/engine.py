"""E, the engine's pages: gathered on the way out, placed on the way back."""

from __future__ import annotations

from typing import ClassVar

import numpy as np

from orbitkv.errors import EngineFault
from orbitkv.graph import Lanes, Port, Ports
from orbitkv.objects import Bytes, Segment
from orbitkv.stages.base import Outputs, StageContext, StreamLane
from orbitkv.stages.batch import DecodedBatch, PageBatch, PublishBatch


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
    """Hand restored pages to the engine.

    In:  ``DecodedBatch``: raw segments, host; mostly in their pages already.
    Out: nothing. The pages hold the saved bytes when the part is settled.
    """

    inputs: ClassVar[Ports] = {"in": Port(DecodedBatch)}
    outputs: ClassVar[Ports] = {}
    lanes: ClassVar[Lanes] = frozenset({"stream", "host"})

    async def run(self, batch: DecodedBatch, ctx: StageContext) -> Outputs:
        """Place what a decoder of the user's own left where it was; then settle."""
        if not batch.placed and batch.items:
            await ctx.lane.run(_place_all, batch)
        batch.settle()
        return {}


def _place_all(batch: DecodedBatch) -> None:
    for index in range(len(batch.items)):
        place_object(batch, index)


def place_object(batch: DecodedBatch, index: int, skip: frozenset[int] = frozenset()) -> None:
    """Copy one object's raw segments into its page, all at once where their layouts allow it.

    Args:
        skip: Positions of segments that are in the page already.
    """
    (copy, destination), segments = batch.items[index], batch.segments[index]
    tensors, page_index = batch.tensors, destination.page_index
    block = tensors.block(destination.slot_indices, page_index)
    if block is not None and copy.memory is not None and not skip:
        payloads = _adjacent_payloads(copy.memory, segments, block.shape[1])
        if payloads is not None:
            block[:] = payloads
            return
    for position, slot in enumerate(destination.slot_indices):
        if position in skip:
            continue
        segment = segments[position]
        run = tensors.run(slot, page_index)
        if run is not None:
            run[:] = segment.payload
        else:
            page = tensors.segment(slot, page_index)
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
