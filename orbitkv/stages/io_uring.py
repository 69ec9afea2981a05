"""U, the SSD by way of DRAM: write what D admitted, read what a restore demands."""

from __future__ import annotations

import asyncio
from collections import deque
from typing import ClassVar, cast

from orbitkv.cache.catalogue import Catalogue, Copy, Loading, Tier, Want
from orbitkv.config import Config
from orbitkv.errors import OrbitError, ShortRead, ShortWrite
from orbitkv.graph import Lanes, Port, Ports
from orbitkv.objects import Bytes
from orbitkv.stages.base import IoLane, Outputs, StageContext, Transfer
from orbitkv.stages.batch import Destination, LoadedBatch, ReadBatch, WriteBatch


class WriteExtents:
    """Write objects to SSD extents; each is findable only after its last byte is written.

    At most as many objects as the node is deep are kept from eviction and written at once, over
    all of its batches.

    In:  ``WriteBatch``: weak references; what is gone or on SSD already is skipped.
    Out: nothing. A fault abandons that object's write and frees its extent; others go on.
    """

    inputs: ClassVar[Ports] = {"in": Port(WriteBatch, entry=True)}
    outputs: ClassVar[Ports] = {}
    lanes: ClassVar[Lanes] = frozenset({"ring"})

    def __init__(self) -> None:
        self._places: asyncio.Semaphore | None = None

    @staticmethod
    def unavailable(config: Config) -> str | None:
        """No SSD without a path."""
        return _no_ssd(config)

    async def run(self, batch: WriteBatch, ctx: StageContext) -> Outputs:
        """Write every object that is still there when its turn comes."""
        lane, depth = cast("IoLane", ctx.lane), ctx.node.depth
        places = self._places = self._places or asyncio.Semaphore(depth)
        waiting = deque(batch.copies)

        async def write_on() -> None:
            try:
                while waiting:
                    await _write(waiting.popleft(), lane, ctx)
            finally:
                places.release()

        try:
            async with asyncio.TaskGroup() as writers:
                while waiting:
                    await places.acquire()
                    # Cancelled before it begins, it keeps its place: the pipeline is at its end.
                    writers.create_task(write_on())
                    await asyncio.sleep(0)  # it takes the oldest object, if there still is one
        except ExceptionGroup as bugs:
            raise bugs.exceptions[0] from None
        finally:
            batch.copies = tuple(waiting)  # what is abandoned, if this did not end well
        return {}


async def _write(source: Copy, lane: IoLane, ctx: StageContext) -> None:
    """Take an extent and a strong reference, write, and make the copy on SSD findable."""
    catalogue, extents = ctx.catalogue, ctx.catalogue.extents
    assert extents
    try:
        extent = _extent_for(source, catalogue)
        if extent is None:
            return
        catalogue.pin(source)
        try:
            transfer = Transfer(extents.fd(extent.shard), _memory(source), extent.offset)
            (moved,) = await lane.write_many([transfer])
            fault = _fault(extent, moved, ShortWrite)
            if source.hidden:
                # Pinned, so not evicted: it was refused meanwhile, and so is its copy.
                catalogue.counters["ssd_writes_dead"] += 1
            elif fault is None:
                catalogue.admit(extent)
                catalogue.counters["ssd_writes"] += 1
                catalogue.counters["ssd_written_nbytes"] += extent.nbytes
            else:
                catalogue.counters["ssd_write_faults"] += 1
                ctx.log.warning("ssd_write_failed", fault=str(fault))
        finally:
            catalogue.unpin(source)
            catalogue.unpin(extent)
    finally:
        catalogue.end_write(source)


def _extent_for(source: Copy, catalogue: Catalogue) -> Copy | None:
    """Reserve room on SSD; None, and counted, where there is nothing to write or no room."""
    if source.hidden:
        catalogue.counters["ssd_writes_dead"] += 1
    elif catalogue.find(source.digest, Tier.SSD):
        catalogue.counters["ssd_writes_resident"] += 1
    elif extent := catalogue.reserve_ssd(Want(source.digest, source.nbytes, source.generation)):
        return extent
    else:
        catalogue.counters["ssd_writes_no_room"] += 1
    return None


class ReadExtents:
    """Read objects from SSD extents into pool memory.

    What another batch is reading is not read again: both get the same copy.

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
        """Read every object that nobody else is reading, as far as pool memory can be had."""
        catalogue = ctx.catalogue
        wanted, batch.items = batch.items, []
        joined: list[tuple[Loading, Destination]] = []
        own: list[tuple[Copy, Destination]] = []
        for source, destination in wanted:
            if resident := catalogue.find(source.digest, Tier.DRAM):
                catalogue.pin(resident)
                catalogue.unpin(source)
                batch.items.append((resident, destination))  # it came while this batch waited
            elif loading := catalogue.loading.get(source.digest):
                catalogue.pin(loading.copy)
                catalogue.unpin(source)
                joined.append((loading, destination))
            else:
                own.append((source, destination))
        catalogue.counters["ssd_reads_shared"] += len(joined)
        try:
            if own:
                await _read(batch, own, ctx)
        finally:
            batch.items += [(loading.copy, destination) for loading, destination in joined]
        # Whoever reads these waits for nobody, so two who share reads cannot block each other.
        stands = [await asyncio.shield(loading.ended) for loading, _ in joined]
        for (loading, destination), read in zip(joined, stands, strict=True):
            if not read:
                batch.items.remove((loading.copy, destination))
                batch.miss(loading.copy, destination)
        batch.segments = [[] for _ in batch.items]
        return {"out": batch.become(LoadedBatch)}


async def _read(batch: ReadBatch, items: list[tuple[Copy, Destination]], ctx: StageContext) -> None:
    """Read objects into pool memory; add those that could be to the batch, the others are misses.

    From here on the batch holds the loaded copies, and each of them its source.
    """
    catalogue, lane = ctx.catalogue, cast("IoLane", ctx.lane)
    extents = catalogue.extents
    assert extents
    try:
        loaded = await catalogue.reserve_dram(
            [Want(s.digest, s.nbytes, s.generation, s) for s, _ in items],
            urgent=not batch.stays,
            wait_s=ctx.config.pool_wait_s,
            cancellation=batch.part.ticket.cancellation,
        )
    except BaseException:
        batch.items += items
        raise
    if loaded is None:
        for source, destination in items:
            batch.miss(source, destination)
        return
    read = [(copy, destination) for copy, (_, destination) in zip(loaded, items, strict=True)]
    batch.items += read
    stands = [False] * len(loaded)
    loadings = catalogue.begin_loading(loaded)
    try:
        moved = await lane.read_many(
            [
                Transfer(extents.fd(source.shard), _memory(copy), source.offset)
                for copy, source in zip(loaded, map(_source, loaded), strict=True)
            ]
        )
        for index, ((copy, destination), result) in enumerate(zip(read, moved, strict=True)):
            source = _source(copy)
            fault = _fault(source, result, ShortRead)
            stands[index] = fault is None
            if fault is not None:
                catalogue.counters["ssd_read_faults"] += 1
                ctx.log.warning("ssd_read_failed", fault=str(fault))
                catalogue.hide_corrupt(source)  # else no new save would repair it
                batch.items.remove((copy, destination))
                batch.miss(copy, destination)
    finally:
        catalogue.end_loading(loadings, stands)
    catalogue.counters["ssd_reads"] += sum(stands)
    catalogue.counters["ssd_read_nbytes"] += sum(
        copy.nbytes for copy, stood in zip(loaded, stands, strict=True) if stood
    )


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
