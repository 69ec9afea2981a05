"""R and V, the way back: upload, validate, decode."""

from __future__ import annotations

from typing import ClassVar

from orbitkv.errors import CorruptObject
from orbitkv.graph import Lanes, Port, Ports
from orbitkv.objects import Format, Segment
from orbitkv.stages.base import Outputs, StageContext
from orbitkv.stages.batch import (
    DecodedBatch,
    Destination,
    ResidentBatch,
    UploadedBatch,
    ValidatedBatch,
)
from orbitkv.stages.dram import check_each


class Upload:
    """Bring objects to where the decoder reads them: on a host, where they are.

    In:  ``ResidentBatch``.
    Out: ``UploadedBatch``.
    """

    inputs: ClassVar[Ports] = {"in": Port(ResidentBatch)}
    outputs: ClassVar[Ports] = {"out": Port(UploadedBatch)}
    lanes: ClassVar[Lanes] = frozenset({"stream", "host"})

    async def run(self, batch: ResidentBatch, ctx: StageContext) -> Outputs:  # noqa: ARG002
        """Nothing has to move on a host."""
        return {"out": batch.become(UploadedBatch)}


class Validate:
    """Check header, table, lengths, CRCs and padding of every object before any is decoded.

    In:  ``UploadedBatch``.
    Out: ``ValidatedBatch``. A corrupt object is hidden, and its page left out as a miss.
    """

    inputs: ClassVar[Ports] = {"in": Port(UploadedBatch)}
    outputs: ClassVar[Ports] = {"out": Port(ValidatedBatch)}
    lanes: ClassVar[Lanes] = frozenset({"stream", "host"})

    async def run(self, batch: UploadedBatch, ctx: StageContext) -> Outputs:
        """Check on the lane."""
        copies = [copy for copy, _ in batch.items]
        checked = await ctx.lane.run(check_each, copies) if copies else []
        items, segments = [], []
        for (copy, destination), result in zip(batch.items, checked, strict=True):
            if isinstance(result, CorruptObject):
                ctx.log.warning("object_corrupt", generation=copy.generation, fault=str(result))
                ctx.catalogue.hide_corrupt(copy)
                batch.miss(copy, destination)
            else:
                items.append((copy, destination))
                segments.append(result)
        batch.items, batch.segments = items, segments
        return {"out": batch.become(ValidatedBatch)}


class Decode:
    """Give segments back the engine's representation: here, raw segments are there already.

    In:  ``ValidatedBatch``.
    Out: ``DecodedBatch``. An object with a segment that this pipeline cannot undo, or of another
         length than its destination, is a miss of its page, and hidden: of no use here, it must
         not keep a new save from replacing it.
    """

    inputs: ClassVar[Ports] = {"in": Port(ValidatedBatch)}
    outputs: ClassVar[Ports] = {"out": Port(DecodedBatch)}
    lanes: ClassVar[Lanes] = frozenset({"stream", "host"})

    async def run(self, batch: ValidatedBatch, ctx: StageContext) -> Outputs:
        """Raw segments need no work, so nothing leaves the loop."""
        items, segments = [], []
        for (copy, destination), decoded in zip(batch.items, batch.segments, strict=True):
            if fault := _unplaceable(batch, destination, decoded):
                ctx.log.warning("object_undecodable", generation=copy.generation, fault=fault)
                ctx.catalogue.counters["undecodable"] += 1
                ctx.catalogue.hide_everywhere(copy.digest)
                batch.miss(copy, destination)
            else:
                items.append((copy, destination))
                segments.append(decoded)
        batch.items, batch.segments = items, segments
        return {"out": batch.become(DecodedBatch)}


def _unplaceable(
    batch: ValidatedBatch, destination: Destination, segments: list[Segment]
) -> str | None:
    geometry = batch.tensors.geometry
    wanted = [geometry.segment_nbytes[index] for index in destination.slot_indices]
    seen = [segment.payload.nbytes for segment in segments]
    unknown = {segment.format for segment in segments} - {Format.RAW}
    if unknown:
        return f"format {', '.join(map(str, sorted(unknown)))}; this pipeline decodes raw"
    return None if seen == wanted else f"segments of {seen} bytes; accepted: {wanted}"
