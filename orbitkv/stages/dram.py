"""D, encoded DRAM: the door by which objects become findable, and by which they leave again."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import ClassVar

from orbitkv.cache.catalogue import Copy, Want
from orbitkv.codecs.cuda.workspace import Runs
from orbitkv.errors import CorruptObject
from orbitkv.graph import Lanes, Port, Ports
from orbitkv.objects import (
    CRC32_WORD,
    Format,
    RawReason,
    Segment,
    check_payloads,
    finish_object,
    read_header,
    write_object,
)
from orbitkv.stages.base import Outputs, StageContext
from orbitkv.stages.batch import (
    EncodedObject,
    FetchBatch,
    LoadedBatch,
    PeerBatch,
    ResidentBatch,
    SealedBatch,
    WriteBatch,
)
from orbitkv.stages.encode import encode_again, learn_layouts


class StoreDram:
    """Complete each object in its pool memory, and admit it whole.

    From a GPU the images come in one copy, or in as many as the pool has free runs.

    In:  ``SealedBatch``: segments with their CRCs, host or device.
    Out: ``write``: what U should bring to SSD; ``peer``: what P should offer to other hosts.
         Both only where somebody takes it. The part is settled: the engine's pages are free.
    """

    inputs: ClassVar[Ports] = {"in": Port(SealedBatch)}
    outputs: ClassVar[Ports] = {
        "write": Port(WriteBatch, optional=True),
        "peer": Port(PeerBatch, optional=True),
    }
    lanes: ClassVar[Lanes] = frozenset({"stream", "host"})

    async def run(self, batch: SealedBatch, ctx: StageContext) -> Outputs:
        """Write headers, tables and padding on the lane; admit on the loop."""
        catalogue = ctx.catalogue
        if batch.objects and batch.workspace:
            await _receive(batch, ctx)
        elif batch.objects:
            lengths = await ctx.lane.run(_complete, batch.objects)
            for entry, nbytes in zip(batch.objects, lengths, strict=True):
                assert entry.home
                catalogue.shrink(entry.home, nbytes)
        admitted: list[Copy] = []
        # From the end, so that eviction takes a prefix's tail before its head.
        for entry in reversed(batch.objects):
            assert entry.home
            if catalogue.admit(entry.home):
                admitted.insert(0, entry.home)
        if not batch.codecs.chosen_raw:
            _count(batch, catalogue.counters)
        batch.release()
        batch.part.settle(done=batch.part.hashes)
        outputs: dict[str, WriteBatch | PeerBatch] = {}
        if admitted and "write" in ctx.live_outputs:
            for copy in admitted:
                catalogue.queue_write(copy)
            outputs["write"] = WriteBatch(catalogue, tuple(admitted))
        if admitted and "peer" in ctx.live_outputs:
            outputs["peer"] = PeerBatch(catalogue, tuple(admitted))
        return outputs


class ServeDram:
    """Hand pinned objects on to R; admit those that U or P brought, once they stand.

    In:  ``fetch``: copies that are findable in DRAM.
         ``loaded``: copies in pool memory that nothing has checked.
    Out: ``ResidentBatch``. A loaded object that fails a check hides the generation it came from.
    """

    inputs: ClassVar[Ports] = {
        "fetch": Port(FetchBatch, entry=True),
        "loaded": Port(LoadedBatch, optional=True),
    }
    outputs: ClassVar[Ports] = {"out": Port(ResidentBatch)}
    lanes: ClassVar[Lanes] = frozenset({"stream", "host"})

    async def run(self, batch: FetchBatch | LoadedBatch, ctx: StageContext) -> Outputs:
        """Check on the lane, admit on the loop."""
        if isinstance(batch, LoadedBatch):
            faults = await ctx.lane.run(_find_faults, batch)
            batch.reject(faults, ctx.log)
            for copy, _ in batch.items:
                ctx.catalogue.admit(copy)
        for copy, _ in batch.items:
            ctx.catalogue.touch(copy)
        return {"out": batch.become(ResidentBatch)}


async def _receive(batch: SealedBatch, ctx: StageContext) -> None:
    """Bring the images from the arena to pool memory, and complete them.

    The one wait for a batch on its way out: whether its segments were encoded at all is known when
    they are here. Only where a GPU tells their lengths, that comes first.
    """
    await learn_layouts(batch)
    while True:
        homes = await _copy_home(batch, ctx)
        assert batch.workspace
        tasks = batch.workspace.tasks
        assert tasks
        if not tasks.faults.any():
            break
        for entry, home in zip(batch.objects, homes, strict=True):
            entry.home = None
            ctx.catalogue.unpin(home)
        await encode_again(batch, tasks)
    first = 0
    for entry, home in zip(batch.objects, homes, strict=True):
        assert home.memory is not None
        assert entry.layout
        table = entry.layout.table.copy()
        table[:, CRC32_WORD] = tasks.crcs[first : first + len(table)]
        first += len(table)
        finish_object(
            home.memory,
            table,
            payloads=entry.layout.payloads,
            key_digest=entry.key.digest,
            generation=home.generation,
        )


async def _copy_home(batch: SealedBatch, ctx: StageContext) -> list[Copy]:
    """Take pool memory, and copy the images there once they have been made."""
    workspace, catalogue = batch.workspace, ctx.catalogue
    assert workspace
    wants = [
        Want(entry.key.digest, entry.layout.nbytes, catalogue.next_generation())
        for entry in batch.objects
        if entry.layout
    ]
    homes = await catalogue.reserve_dram(
        wants, urgent=False, cancellation=batch.part.ticket.cancellation
    )
    assert homes is not None, "a wait without a limit has no end but success"
    for entry, home in zip(batch.objects, homes, strict=True):
        entry.home = home
    pool, pairs = catalogue.pool.address, zip(homes, workspace.images, strict=True)
    copied = workspace.stream.copy(
        join_runs((pool + home.offset, image, home.nbytes) for home, image in pairs),
        after=workspace.ready,
    )
    await workspace.stream.reached(copied)
    workspace.running = False
    return homes


def join_runs(pieces: Iterable[tuple[int, int, int]]) -> Runs:
    """Join (target, source, bytes) that follow each other on both sides."""
    runs: Runs = []
    for target, source, nbytes in pieces:
        if runs:
            last_target, last_source, length = runs[-1]
            if target == last_target + length and source == last_source + length:
                runs[-1] = (last_target, last_source, length + nbytes)
                continue
        runs.append((target, source, nbytes))
    return runs


def _count(batch: SealedBatch, counters: Counter[str]) -> None:
    """Count what the codec made of the segments: bytes in and out, and each reason to stay raw."""
    for layout in (entry.layout for entry in batch.objects if entry.layout):
        for name, count in layout.counts:
            counters[name] += count
    for segment in (segment for entry in batch.objects for segment in entry.segments):
        if segment.format == Format.RAW:
            counters[f"raw_{RawReason(segment.raw_reason).name.lower()}"] += 1
        else:
            counters["encoded_segments"] += 1
            counters["encoded_original_nbytes"] += segment.original_nbytes
            counters["encoded_stored_nbytes"] += segment.stored_nbytes


def _complete(objects: list[EncodedObject]) -> list[int]:
    lengths = []
    for entry in objects:
        assert entry.home
        assert entry.home.memory is not None
        lengths.append(
            write_object(
                entry.home.memory,
                entry.segments,
                key_digest=entry.key.digest,
                generation=entry.home.generation,
            )
        )
    return lengths


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


def _find_faults(batch: LoadedBatch) -> dict[int, CorruptObject]:
    faults = {}
    for index, (copy, _) in enumerate(batch.items):
        try:
            check_object(copy)
        except CorruptObject as error:
            faults[index] = error
    return faults
