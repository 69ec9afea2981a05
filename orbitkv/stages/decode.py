"""R and V, the way back: upload, validate, decode."""

from __future__ import annotations

from typing import ClassVar

import numpy as np

from orbitkv.errors import CorruptObject, Undecodable
from orbitkv.graph import Lanes, Port, Ports
from orbitkv.objects import Format
from orbitkv.stages.base import Outputs, StageContext
from orbitkv.stages.batch import DecodedBatch, ResidentBatch, UploadedBatch, ValidatedBatch
from orbitkv.stages.dram import check_object
from orbitkv.stages.engine import place_object


class Upload:
    """Bring objects to where the decoder reads them: on a host, where they are.

    In:  ``ResidentBatch``.
    Out: ``UploadedBatch``.
    """

    inputs: ClassVar[Ports] = {"in": Port(ResidentBatch)}
    outputs: ClassVar[Ports] = {"out": Port(UploadedBatch)}
    lanes: ClassVar[Lanes] = frozenset({"stream", "host"})

    async def run(self, batch: ResidentBatch, ctx: StageContext) -> Outputs:
        """Nothing has to move on a host."""
        del ctx
        return {"out": batch.become(UploadedBatch)}


class Validate:
    """Check header, table, lengths, CRCs and padding of each object before it is decoded.

    In:  ``UploadedBatch``.
    Out: ``ValidatedBatch``. A corrupt object is hidden, and its page left out as a miss.
    """

    inputs: ClassVar[Ports] = {"in": Port(UploadedBatch)}
    outputs: ClassVar[Ports] = {"out": Port(ValidatedBatch)}
    lanes: ClassVar[Lanes] = frozenset({"stream", "host"})

    async def prepare(self, batch: UploadedBatch, ctx: StageContext) -> Outputs:
        """Hand the batch over as it is."""
        del ctx
        return {"out": batch.become(ValidatedBatch)}

    def run_item(self, batch: ValidatedBatch, index: int) -> None:
        """Check one object."""
        copy, destination = batch.items[index]
        segments = check_object(copy)
        geometry = batch.tensors.geometry
        wanted = [geometry.segment_nbytes[slot] for slot in destination.slot_indices]
        seen = [segment.original_nbytes for segment in segments]
        if seen != wanted:
            raise Undecodable(f"segments of {seen} bytes; accepted: {wanted}")
        batch.segments[index] = segments


class Decode:
    """Give each object's segments back to the engine's representation, in the engine's page.

    On a host a decoder writes where the engine will read, as soon as an object stands: a second
    pass over the bytes would cost as much as the first.

    In:  ``ValidatedBatch``.
    Out: ``DecodedBatch``. An object with a segment that this pipeline cannot undo is a miss of
         its page, and hidden: of no use here, it must not keep a new save from replacing it.
    """

    inputs: ClassVar[Ports] = {"in": Port(ValidatedBatch)}
    outputs: ClassVar[Ports] = {"out": Port(DecodedBatch)}
    lanes: ClassVar[Lanes] = frozenset({"stream", "host"})

    async def prepare(self, batch: ValidatedBatch, ctx: StageContext) -> Outputs:
        """Hand the batch over; from here on its pages are being written."""
        decoded = batch.become(DecodedBatch)
        decoded.placed = True
        decoded.codecs = ctx.codecs(batch.tensors.geometry)
        return {"out": decoded}

    def run_item(self, batch: DecodedBatch, index: int) -> None:
        """Decode one object's segments into its page."""
        segments = batch.segments[index]
        encoded = [position for position, s in enumerate(segments) if s.format != Format.RAW]
        if encoded:
            _decode_segments(batch, index, encoded)
        place_object(batch, index, skip=frozenset(encoded))


def _decode_segments(batch: DecodedBatch, index: int, positions: list[int]) -> None:
    """Decode some of an object's segments, each straight into its slot where that is one run.

    Raises:
        Undecodable: a format, length or content that the manager's codec does not write.
    """
    assert batch.codecs
    _, destination = batch.items[index]
    tensors, page_index = batch.tensors, destination.page_index
    for position in positions:
        segment, slot = batch.segments[index][position], destination.slot_indices[position]
        codec = batch.codecs.codec_of(slot)
        if codec is None or segment.format != codec.format:
            wanted = codec.format if codec else int(Format.RAW)
            raise Undecodable(f"format {segment.format}; this pipeline decodes {wanted}")
        if segment.stored_nbytes != codec.encoded_nbytes:
            seen = segment.stored_nbytes
            raise Undecodable(f"{seen} bytes stored; accepted: {codec.encoded_nbytes}")
        page = tensors.segment(slot, page_index)
        is_run = tensors.run(slot, page_index) is not None
        target = page if is_run else np.empty(page.shape, page.dtype)
        try:
            codec.decode(segment.payload, target)
        except CorruptObject as error:
            # Its CRC stands, so every copy of it is like that: none may keep a new save out.
            raise Undecodable(f"segment {position}: {error}") from error
        if not is_run:
            np.copyto(page, target)
