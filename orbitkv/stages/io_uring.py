"""U, the SSD by way of DRAM: write what D admitted, read what a restore demands."""

from __future__ import annotations

from typing import ClassVar

from orbitkv.cache.catalogue import Copy, Tier, Want
from orbitkv.config import Config
from orbitkv.errors import OrbitError, ShortRead, ShortWrite
from orbitkv.graph import Lanes, Port, Ports
from orbitkv.objects import Bytes
from orbitkv.stages.base import IoLane, Outputs, StageContext, Transfer
from orbitkv.stages.batch import LoadedBatch, ReadBatch, WriteBatch


class WriteExtents:
    """Write objects to SSD extents; each is findable only after its last byte is written.

    In:  ``WriteBatch``: weak references; what is gone or on SSD already is skipped.
    Out: nothing. A fault abandons that object's write and frees its extent; others go on.
    """

    inputs: ClassVar[Ports] = {"in": Port(WriteBatch, entry=True)}
    outputs: ClassVar[Ports] = {}
    lanes: ClassVar[Lanes] = frozenset({"ring"})

    @staticmethod
    def unavailable(config: Config) -> str | None:
        """No SSD without a path."""
        return _no_ssd(config)

    async def run(self, batch: WriteBatch, ctx: StageContext) -> Outputs:
        """Write every object that is still there."""
        assert isinstance(ctx.lane, IoLane)
        assert ctx.catalogue.extents
        pairs = self._prepare(batch, ctx)
        try:
            fd = ctx.catalogue.extents.fd
            moved = await ctx.lane.write_many(
                [Transfer(fd, _memory(source), extent.offset) for source, extent in pairs]
            )
            for (source, extent), result in zip(pairs, moved, strict=True):
                fault = _fault(extent, result, ShortWrite)
                if source.hidden:
                    # Pinned, so not evicted: it was refused meanwhile, and so is its copy.
                    ctx.catalogue.counters["ssd_writes_dead"] += 1
                elif fault is None:
                    ctx.catalogue.admit(extent)
                    ctx.catalogue.counters["ssd_writes"] += 1
                    ctx.catalogue.counters["ssd_written_nbytes"] += extent.nbytes
                else:
                    ctx.catalogue.counters["ssd_write_faults"] += 1
                    ctx.log.warning("ssd_write_failed", fault=str(fault))
        finally:
            for source, extent in pairs:
                ctx.catalogue.end_write(source)
                ctx.catalogue.unpin(source)
                ctx.catalogue.unpin(extent)
        return {}

    def _prepare(self, batch: WriteBatch, ctx: StageContext) -> list[tuple[Copy, Copy]]:
        """Take strong references and extents; only now is anything kept from eviction."""
        catalogue = ctx.catalogue
        pairs = []
        for source in batch.copies:
            if source.hidden:
                catalogue.counters["ssd_writes_dead"] += 1
            elif catalogue.find(source.digest, Tier.SSD):
                catalogue.counters["ssd_writes_resident"] += 1
            elif extent := catalogue.reserve_ssd(source):
                catalogue.pin(source)
                pairs.append((source, extent))
                continue
            else:
                catalogue.counters["ssd_writes_no_room"] += 1
            catalogue.end_write(source)
        return pairs


class ReadExtents:
    """Read objects from SSD extents into pool memory.

    In:  ``ReadBatch``: copies on SSD, pinned.
    Out: ``LoadedBatch``: copies in DRAM, hidden, each holding on to the one it came from. What
         cannot be read, or gets no memory in time, is a miss.
    """

    inputs: ClassVar[Ports] = {"in": Port(ReadBatch, entry=True)}
    outputs: ClassVar[Ports] = {"out": Port(LoadedBatch)}
    lanes: ClassVar[Lanes] = frozenset({"ring"})

    @staticmethod
    def unavailable(config: Config) -> str | None:
        """No SSD without a path."""
        return _no_ssd(config)

    async def run(self, batch: ReadBatch, ctx: StageContext) -> Outputs:
        """Read every object, as far as pool memory can be had."""
        assert isinstance(ctx.lane, IoLane)
        assert ctx.catalogue.extents
        wants = [
            Want(source.digest, source.nbytes, source.generation, source)
            for source, _ in batch.items
        ]
        loaded = await ctx.catalogue.reserve_dram(
            wants,
            urgent=True,
            wait_s=ctx.config.pool_wait_s,
            cancellation=batch.part.ticket.cancellation,
        )
        if loaded is None:
            for source, destination in batch.items:
                batch.miss(source, destination)
            batch.items = []
            return {"out": batch.become(LoadedBatch)}
        # From here the batch holds the loaded copies, and each of them its source.
        destinations = [destination for _, destination in batch.items]
        batch.items = list(zip(loaded, destinations, strict=True))
        fd = ctx.catalogue.extents.fd
        moved = await ctx.lane.read_many(
            [Transfer(fd, _memory(copy), _source(copy).offset) for copy in loaded]
        )
        readable = []
        for (copy, destination), result in zip(batch.items, moved, strict=True):
            source = _source(copy)
            fault = _fault(source, result, ShortRead)
            if fault is None:
                ctx.catalogue.touch(source)
                readable.append((copy, destination))
                continue
            ctx.catalogue.counters["ssd_read_faults"] += 1
            ctx.log.warning("ssd_read_failed", fault=str(fault))
            ctx.catalogue.hide_corrupt(source)  # else no new save would repair it
            batch.miss(copy, destination)
        ctx.catalogue.counters["ssd_reads"] += len(readable)
        ctx.catalogue.counters["ssd_read_nbytes"] += sum(copy.nbytes for copy, _ in readable)
        batch.items = readable
        return {"out": batch.become(LoadedBatch)}


def _no_ssd(config: Config) -> str | None:
    return None if config.ssd_cache_paths else "no SSD path is configured (--ssd-cache-path)"


def _memory(copy: Copy) -> Bytes:
    assert copy.memory is not None
    return copy.memory


def _source(copy: Copy) -> Copy:
    assert copy.source is not None
    return copy.source


def _fault(
    copy: Copy, result: int | OSError, short: type[ShortRead | ShortWrite]
) -> OSError | OrbitError | None:
    """What went wrong with one transfer of a whole extent; None where nothing did."""
    if isinstance(result, OSError):
        return result
    return None if result == copy.nbytes else short(copy.offset, result, copy.nbytes)
