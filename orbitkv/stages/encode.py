"""C, encode: choose each segment's representation, then compute its CRC."""

from __future__ import annotations

from typing import ClassVar

import numpy as np

from orbitkv.graph import Port
from orbitkv.objects import Bytes, Format, Segment, crc32
from orbitkv.segment import StateKey
from orbitkv.stages.base import Outputs, StageContext
from orbitkv.stages.batch import EncodedBatch, PageBatch, SealedBatch, Words


class Encode:
    """Bring every segment into the form in which it will be stored: here, its original bytes.

    In:  ``PageBatch``: strided views of the engine's pages, host.
    Out: ``EncodedBatch``. A segment that is one run of memory stays where it is; another is
         gathered into the node's arena, which therefore needs a budget.
    """

    inputs: ClassVar = {"in": Port(PageBatch)}
    outputs: ClassVar = {"out": Port(EncodedBatch)}
    lanes: ClassVar = frozenset({"stream", "host"})

    async def run(self, batch: PageBatch, ctx: StageContext) -> Outputs:
        """Encode on the lane only what has to move."""
        scattered_nbytes = sum(
            view.nbytes for _, views in batch.objects for view in views if not _is_run(view)
        )
        if not scattered_nbytes:
            return {"out": EncodedBatch(batch.part, _encode(batch, None), None)}
        assert ctx.arena, "the pipeline gives node C a budget"
        lease = await ctx.arena.acquire(scattered_nbytes)
        try:
            objects = await ctx.lane.run(_encode, batch, lease.memory)
        except BaseException:
            lease.release()
            raise
        return {"out": EncodedBatch(batch.part, objects, lease)}


class Crc32:
    """Compute the CRC-32 of every stored segment.

    In:  ``EncodedBatch``.
    Out: ``SealedBatch``: nothing may change a payload from here on.
    """

    inputs: ClassVar = {"in": Port(EncodedBatch)}
    outputs: ClassVar = {"dram": Port(SealedBatch), "direct": Port(SealedBatch, optional=True)}
    lanes: ClassVar = frozenset({"stream", "host"})

    async def run(self, batch: EncodedBatch, ctx: StageContext) -> Outputs:
        """Compute on the lane."""
        if batch.objects:
            await ctx.lane.run(_seal, batch)
        return {"dram": SealedBatch(batch.part, batch.objects, batch.lease)}


def _is_run(view: Words) -> bool:
    return view.flags.c_contiguous


def _encode(
    batch: PageBatch, scratch: Bytes | None
) -> tuple[tuple[StateKey, tuple[Segment, ...]], ...]:
    used_nbytes = 0
    objects = []
    for key, views in batch.objects:
        segments = []
        for view in views:
            if _is_run(view):
                payload = view.reshape(-1).view(np.uint8)
            else:
                assert scratch is not None
                payload = scratch[used_nbytes : used_nbytes + view.nbytes]
                np.copyto(payload.view(view.dtype).reshape(view.shape), view)
                used_nbytes += view.nbytes
            segments.append(Segment(Format.RAW, payload, view.nbytes))
        objects.append((key, tuple(segments)))
    return tuple(objects)


def _seal(batch: EncodedBatch) -> None:
    for _, segments in batch.objects:
        for segment in segments:
            if segment.crc32 is None:
                segment.crc32 = crc32(segment.payload)
