"""E, the engine's pages: gathered on the way out, placed on the way back."""

from __future__ import annotations

from typing import ClassVar

import numpy as np

from orbitkv.errors import EngineFault
from orbitkv.graph import Lanes, Port, Ports
from orbitkv.objects import Segment
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
            (destination, segments)
            for (_, destination), segments in zip(batch.items, batch.segments, strict=True)
            if destination.page_hash not in batch.missed
        ]
        if work:
            await ctx.lane.run(_place, batch.tensors, work)
        batch.settle()
        return {}


def _place(tensors: PagedTensors, work: list[tuple[Destination, list[Segment]]]) -> None:
    for destination, segments in work:
        for slot_index, segment in zip(destination.slot_indices, segments, strict=True):
            run = tensors.run(slot_index, destination.page_index)
            if run is not None:
                run[:] = segment.payload
                continue
            page = tensors.segment(slot_index, destination.page_index)
            np.copyto(page, segment.payload.view(page.dtype).reshape(page.shape))
