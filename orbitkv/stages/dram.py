"""D, encoded DRAM: the door by which objects become findable, and by which they leave again."""

from __future__ import annotations

from typing import ClassVar

from orbitkv.cache.catalogue import Copy, Tier, Want
from orbitkv.errors import CorruptObject
from orbitkv.graph import Port
from orbitkv.objects import Segment, check_payloads, object_nbytes, read_header, write_object
from orbitkv.segment import StateKey
from orbitkv.stages.base import Outputs, StageContext
from orbitkv.stages.batch import (
    FetchBatch,
    LoadedBatch,
    PeerBatch,
    ResidentBatch,
    SealedBatch,
    WriteBatch,
)

_Object = tuple[StateKey, tuple[Segment, ...]]


class StoreDram:
    """Take pool memory, lay each object out in it, and admit it whole.

    In:  ``SealedBatch``: segments with their CRCs, host.
    Out: ``write``: what U should bring to SSD; ``peer``: what P should offer to other hosts.
         Both only where somebody takes it. The part is settled: the engine's pages are free.
    """

    inputs: ClassVar = {"in": Port(SealedBatch)}
    outputs: ClassVar = {
        "write": Port(WriteBatch, optional=True),
        "peer": Port(PeerBatch, optional=True),
    }
    lanes: ClassVar = frozenset({"stream", "host"})

    async def run(self, batch: SealedBatch, ctx: StageContext) -> Outputs:
        """Store what DRAM does not have yet; wait for memory as long as it takes."""
        catalogue = ctx.catalogue
        fresh = [
            entry for entry in batch.objects if not catalogue.find(entry[0].digest, Tier.DRAM)
        ]
        wants = [
            Want(
                key.digest,
                object_nbytes([segment.stored_nbytes for segment in segments]),
                catalogue.next_generation(),
            )
            for key, segments in fresh
        ]
        copies = await catalogue.reserve_dram(wants, urgent=False) if wants else []
        assert copies is not None, "a wait without a limit has no end but success"
        try:
            if copies:
                await ctx.lane.run(_lay_out, fresh, copies)
            admitted = tuple(copy for copy in copies if catalogue.admit(copy))
        finally:
            for copy in copies:
                catalogue.unpin(copy)
        batch.release()
        batch.part.settle(done=(key.page_hash for key, _ in batch.objects))
        outputs: dict[str, WriteBatch | PeerBatch] = {}
        if admitted and "write" in ctx.live_outputs:
            for copy in admitted:
                copy.write_queued = True
            outputs["write"] = WriteBatch(catalogue, admitted)
        if admitted and "peer" in ctx.live_outputs:
            outputs["peer"] = PeerBatch(catalogue, admitted)
        return outputs


class ServeDram:
    """Hand pinned objects on to R; admit those that U or P brought, once they stand.

    In:  ``fetch``: copies that are findable in DRAM.
         ``loaded``: copies in pool memory that nothing has checked.
    Out: ``ResidentBatch``. A loaded object that fails a check hides the generation it came from.
    """

    inputs: ClassVar = {
        "fetch": Port(FetchBatch, entry=True),
        "loaded": Port(LoadedBatch, optional=True),
    }
    outputs: ClassVar = {"out": Port(ResidentBatch)}
    lanes: ClassVar = frozenset({"stream", "host"})

    async def run(self, batch: FetchBatch | LoadedBatch, ctx: StageContext) -> Outputs:
        """Check on the lane, admit on the loop."""
        if isinstance(batch, LoadedBatch):
            await self._admit(batch, ctx)
        for copy, _ in batch.items:
            ctx.catalogue.touch(copy)
        return {"out": batch.become(ResidentBatch)}

    async def _admit(self, batch: LoadedBatch, ctx: StageContext) -> None:
        checked = await ctx.lane.run(check_each, [copy for copy, _ in batch.items])
        standing = []
        for (copy, destination), result in zip(batch.items, checked, strict=True):
            if isinstance(result, CorruptObject):
                assert copy.source
                ctx.log.warning("object_corrupt", generation=copy.generation, fault=str(result))
                ctx.catalogue.hide_corrupt(copy.source)
                batch.miss(copy, destination)
            else:
                ctx.catalogue.admit(copy)
                standing.append((copy, destination))
        batch.items = standing


def _lay_out(objects: list[_Object], copies: list[Copy]) -> None:
    for (key, segments), copy in zip(objects, copies, strict=True):
        assert copy.memory is not None
        write_object(
            copy.memory, segments, key_digest=key.digest, generation=copy.generation
        )


def check_object(copy: Copy) -> list[Segment]:
    """Check a copy in DRAM as a whole, and return views of its segments.

    Raises:
        CorruptObject: it is another object or generation than it should be, or damaged.
    """
    assert copy.memory is not None
    header = read_header(copy.memory, key_digest=copy.digest)
    if header.generation != copy.generation:
        raise CorruptObject(f"generation {header.generation}; accepted: {copy.generation}")
    return check_payloads(copy.memory, header)


def check_each(copies: list[Copy]) -> list[list[Segment] | CorruptObject]:
    """Check many copies; one that is corrupt does not keep the others from being checked."""
    results: list[list[Segment] | CorruptObject] = []
    for copy in copies:
        try:
            results.append(check_object(copy))
        except CorruptObject as error:
            results.append(error)
    return results
