"""Two stages of a user's own: zstd on the host, in C on the way out, in R on the way back."""

from typing import ClassVar

import zstandard

from orbitkv.graph import Port
from orbitkv.objects import USER_FORMATS, Format, Segment
from orbitkv.stages.base import Outputs, StageContext
from orbitkv.stages.batch import EncodedBatch, ValidatedBatch

ZSTD = USER_FORMATS[0]  # any of them, as long as both stages mean the same by it


class Compress:
    """Compress every raw segment, where that saves enough."""

    inputs: ClassVar = {"in": Port(EncodedBatch)}
    outputs: ClassVar = {"out": Port(EncodedBatch)}
    lanes: ClassVar = frozenset({"host", "stream"})

    def __init__(self, *, level: int = 3) -> None:
        self._zstd = zstandard.ZstdCompressor(level=level)

    async def run(self, batch: EncodedBatch, ctx: StageContext) -> Outputs:
        """Off the loop, on the node's lane: it takes its time."""
        await ctx.lane.run(batch.recode, self._compress)
        return {"out": batch}

    def _compress(self, segment: Segment) -> tuple[int, bytes] | None:
        if segment.format != Format.RAW:
            return None  # leave what another stage has encoded
        return ZSTD, self._zstd.compress(segment.payload.data)


class Decompress:
    """Give the segments that ``Compress`` made their original bytes back."""

    inputs: ClassVar = {"in": Port(ValidatedBatch)}
    outputs: ClassVar = {"out": Port(ValidatedBatch)}
    lanes: ClassVar = frozenset({"host", "stream"})

    async def run(self, batch: ValidatedBatch, ctx: StageContext) -> Outputs:
        """Their CRCs stand, so what does not decompress was never ours: a miss, not a fault."""
        await ctx.lane.run(batch.recode, self._decompress)
        return {"out": batch}

    def _decompress(self, segment: Segment) -> tuple[int, bytes] | None:
        if segment.format != ZSTD:
            return None
        try:
            if zstandard.frame_content_size(segment.payload.data) != segment.original_nbytes:
                return None  # nor would we allocate what a stranger's header asks for
            return Format.RAW, zstandard.decompress(segment.payload.data)
        except zstandard.ZstdError:
            return None
