"""E, the engine's pages: gathered on the way out, placed on the way back."""

from __future__ import annotations

import itertools
from typing import ClassVar

import numpy as np

from orbitkv.codecs.cuda.tasks import TaskTable
from orbitkv.codecs.cuda.workspace import DeviceStream
from orbitkv.errors import CorruptObject, EngineFault, Undecodable
from orbitkv.graph import Lanes, Port, Ports
from orbitkv.objects import Bytes, Segment
from orbitkv.stages.base import Lane, Outputs, StageContext, StreamLane
from orbitkv.stages.batch import DecodedBatch, PageBatch, PublishBatch


class GatherPages:
    """Wait for the engine's event, then describe where each segment lies.

    On a GPU it is the lane's stream that waits, and nobody else.

    In:  ``PublishBatch``: pages of one instance, by index.
    Out: ``PageBatch``: views of the engine's own memory; nothing is copied yet.
    """

    inputs: ClassVar[Ports] = {"in": Port(PublishBatch, entry=True)}
    outputs: ClassVar[Ports] = {"out": Port(PageBatch)}
    lanes: ClassVar[Lanes] = frozenset({"stream", "host"})

    async def run(self, batch: PublishBatch, ctx: StageContext) -> Outputs:
        """Gather once what the engine queued before its event is over."""
        await follow(batch.ready, ctx.lane, ctx.stream_of(batch.tensors))
        groups = batch.tensors.geometry.groups
        objects = tuple((key, page_index, groups[key.group]) for key, page_index in batch.pages)
        return {"out": PageBatch(batch.part, batch.tensors, objects, batch.nbytes)}


class PlacePages:
    """Hand restored pages to the engine.

    In:  ``DecodedBatch``: raw segments, host, mostly in their pages already; or what a GPU has
         been asked to write there, and will tell of.
    Out: nothing. The pages hold the saved bytes when the part is settled.
    """

    inputs: ClassVar[Ports] = {"in": Port(DecodedBatch)}
    outputs: ClassVar[Ports] = {}
    lanes: ClassVar[Lanes] = frozenset({"stream", "host"})

    async def run(self, batch: DecodedBatch, ctx: StageContext) -> Outputs:
        """Place what a decoder of the user's own left where it was; then settle."""
        if batch.workspace and batch.items:
            tasks = await batch.workspace.results()
            batch.part.ticket.ready = batch.workspace.ready
            batch.reject(_faults_of(tasks), ctx.log)
        if not batch.placed and batch.items:
            await ctx.lane.run(_place_all, batch)
        batch.settle()
        return {}


async def follow(ready: object | None, lane: Lane, stream: DeviceStream | None) -> None:
    """Let what a lane does next come after the engine's event.

    Raises:
        EngineFault: the event failed.
    """
    if ready is None:
        return
    # Of torch's, of CuPy's and of ours.
    handle = getattr(ready, "cuda_event", getattr(ready, "ptr", None))
    if stream and isinstance(handle, int):
        if handle:  # one that was never recorded has none, and holds nothing up
            stream.after(handle)
        return
    assert isinstance(lane, StreamLane)
    try:
        await lane.reached(ready)
    except Exception as error:
        raise EngineFault(f"the engine's event failed: {error!r}") from error


def _faults_of(tasks: TaskTable) -> dict[int, CorruptObject]:
    """What the GPU found wrong with each object."""
    faults: dict[int, CorruptObject] = {}
    if not (tasks.crcs.any() or tasks.faults.any()):
        return faults
    for index, (first, end) in enumerate(itertools.pairwise(tasks.starts)):
        damaged = np.flatnonzero(tasks.crcs[first:end])
        refused = np.flatnonzero(tasks.faults[first:end])
        if damaged.size:
            faults[index] = CorruptObject(f"segment {damaged[0]}: its crc32 is not the stored one")
        elif refused.size:
            faults[index] = Undecodable(f"segment {refused[0]}: a value that no encoder writes")
    return faults


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
