"""D, encoded DRAM: the door by which objects become findable, and by which they leave again."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable, Sequence
from collections.abc import Set as AbstractSet
from typing import ClassVar

import numpy as np

from orbitkv.cache.catalogue import Copy, Want
from orbitkv.codecs.base import reason_of
from orbitkv.codecs.cuda.tasks import Words
from orbitkv.codecs.cuda.workspace import Bridge, Runs
from orbitkv.codecs.slots import Layout, lay_out
from orbitkv.errors import CorruptObject
from orbitkv.graph import Lanes, Port, Ports
from orbitkv.objects import (
    CRC32_WORD,
    Format,
    Header,
    RawReason,
    Segment,
    check_payloads,
    check_stored,
    crc32,
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
from orbitkv.stages.encode import learn_layouts


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
        # From the end, so that eviction takes a prefix's tail before its head.
        homes = [entry.home for entry in reversed(batch.objects) if entry.home]
        admitted = catalogue.admit_all(homes)[::-1]
        if not batch.codecs.chosen_raw:
            _count(batch, catalogue.counters)
        batch.release()
        batch.part.settle(done=batch.part.hashes)
        outputs: dict[str, WriteBatch | PeerBatch] = {}
        if "write" in ctx.live_outputs:
            unwritten = await _unwritten(batch, admitted, ctx)
            for copy in unwritten:
                catalogue.queue_write(copy)
            if unwritten:
                outputs["write"] = WriteBatch(catalogue, unwritten)
        if admitted and "peer" in ctx.live_outputs:
            outputs["peer"] = PeerBatch(catalogue, tuple(admitted))
        return outputs


class ServeDram:
    """Hand pinned objects on to R; admit those that U or P brought, once they stand.

    In:  ``fetch``: copies that are findable in DRAM.
         ``loaded``: copies in pool memory that nothing has checked.
    Out: ``ResidentBatch``, unless they are to stay here. A loaded object that fails a check hides
         the generation it came from.
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
            ctx.catalogue.admit_all([copy for copy, _ in reversed(batch.items)])
        if batch.stays:
            batch.settle()
            return {}
        return {"out": batch.become(ResidentBatch)}


async def _unwritten(
    batch: SealedBatch, admitted: Sequence[Copy], ctx: StageContext
) -> tuple[Copy, ...]:
    """What U is to write: what the policy wants, less what goes straight to SSD."""
    wanted: AbstractSet[bytes]
    if batch.direct is None:
        wanted = set(batch.catalogue.writes.save([copy.digest for copy in admitted]))
    else:
        wanted = batch.direct.wanted - await batch.direct.taken()
    left = tuple(copy for copy in admitted if copy.digest in wanted)
    if batch.tensors.device in ctx.direct.slots:
        batch.catalogue.counters["direct_refused"] += len(left)
    return left


async def _receive(batch: SealedBatch, ctx: StageContext) -> None:
    """Bring the images from the arena to pool memory, and complete them.

    The one wait for a batch on its way out: whether its segments were encoded at all is known when
    they are here. Only where a GPU tells their lengths, that comes first.
    """
    await learn_layouts(batch)
    pool, workspace = ctx.catalogue.pool.address, batch.workspace
    assert workspace
    homes = await _take_homes(batch, ctx)
    images = list(zip(homes, workspace.images, strict=True))
    await _copy([(pool + home.offset, image, home.nbytes) for home, image in images], batch)
    tasks = workspace.tasks
    assert tasks
    crcs = [tasks.crcs[first:end] for first, end in itertools.pairwise(tasks.starts)]
    if tasks.faults.any():
        refused = [
            np.flatnonzero(tasks.faults[first:end]).tolist()
            for first, end in itertools.pairwise(tasks.starts)
        ]
        await _receive_anew(batch, ctx, refused, crcs)
    for entry, found in zip(batch.objects, crcs, strict=True):
        assert entry.home
        assert entry.home.memory is not None
        assert entry.layout
        table = entry.layout.table.copy()
        table[:, CRC32_WORD] = found
        finish_object(
            entry.home.memory,
            table,
            payloads=entry.layout.payloads,
            key_digest=entry.key.digest,
            generation=entry.home.generation,
        )


async def _take_homes(batch: SealedBatch, ctx: StageContext) -> list[Copy]:
    """Take pool memory for all objects, as they are laid out now."""
    wants = [
        Want(entry.key.digest, entry.layout.nbytes, ctx.catalogue.next_generation())
        for entry in batch.objects
        if entry.layout
    ]
    homes = await ctx.catalogue.reserve_dram(
        wants, urgent=False, cancellation=batch.part.ticket.cancellation
    )
    assert homes is not None, "a wait without a limit has no end but success"
    for entry, home in zip(batch.objects, homes, strict=True):
        entry.home = home
    return homes


async def _copy(pieces: Runs, batch: SealedBatch) -> None:
    """Copy from the arena to pool memory, once the images have been made."""
    workspace = batch.workspace
    assert workspace
    workspace.running = True
    copied = workspace.stream.copy(join_runs(pieces), after=workspace.ready)
    await workspace.stream.reached(copied)
    workspace.running = False


async def _receive_anew(
    batch: SealedBatch, ctx: StageContext, refused: list[list[int]], crcs: list[Words]
) -> None:
    """Lay objects out again that have refused segments, and bring these from the pages, raw.

    What was encoded stands in the arena still, and no more of it is asked for: who held a part of
    it, and waited here for more, would wait for those who wait for D.

    Args:
        refused: Positions of the segments of each object that the codec refused.
        crcs: Of each object's segments; those of refused ones are made anew.
    """
    workspace, catalogue = batch.workspace, ctx.catalogue
    assert workspace
    assert workspace.tasks
    made: list[Layout] = []
    for entry, positions, first in zip(
        batch.objects, refused, workspace.tasks.starts, strict=False
    ):
        assert entry.layout
        made.append(entry.layout)
        if positions:
            raw = {p.slot: p.raw_reason for p in entry.layout.places if p.raw_reason}
            faults = workspace.tasks.faults[first:]
            raw |= {entry.slots[at]: reason_of(int(faults[at])) for at in positions}
            entry.layout = lay_out(batch.codecs, batch.tensors.geometry, entry.slots, raw)
    for entry in batch.objects:
        home, entry.home = entry.home, None
        assert home
        catalogue.unpin(home)  # all of them: who waits for pool memory must hold none
    homes = await _take_homes(batch, ctx)
    pieces: Runs = []
    for entry, home, image, old, positions in zip(
        batch.objects, homes, workspace.images, made, refused, strict=True
    ):
        start = catalogue.pool.address + home.offset
        if not positions:
            pieces.append((start, image, home.nbytes))
            continue
        assert entry.layout
        pieces += [
            (start + place.offset, image + was.offset, place.stored_nbytes)
            for at, (place, was) in enumerate(zip(entry.layout.places, old.places, strict=True))
            if at not in positions
        ]
    await _copy(pieces, batch)
    bridge = await ctx.lane.run(workspace.stream.bridge)
    await ctx.lane.run(_fetch_refused, batch, refused, crcs, bridge)


def _fetch_refused(
    batch: SealedBatch, refused: list[list[int]], crcs: list[Words], bridge: Bridge
) -> None:
    for entry, positions, found in zip(batch.objects, refused, crcs, strict=True):
        if not positions:
            continue
        assert entry.home
        assert entry.home.memory is not None
        assert entry.layout
        end = entry.layout.payloads.start
        for at, place in enumerate(entry.layout.places):
            entry.home.memory[end : place.offset] = 0
            end = place.offset + place.stored_nbytes
            if at in positions:
                payload = entry.home.memory[place.offset : end]
                bridge.fetch(batch.tensors.segment(place.slot, entry.page_index), payload)
                found[at] = crc32(payload)


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
    return check_payloads(copy.memory, _check_header(copy))


def _check_header(copy: Copy) -> Header:
    assert copy.memory is not None
    header = read_header(copy.memory, key_digest=copy.digest)
    if header.generation != copy.generation:
        raise CorruptObject(f"generation {header.generation}; accepted: {copy.generation}")
    return header


def _find_faults(batch: LoadedBatch) -> dict[int, CorruptObject]:
    faults = {}
    for index, (copy, _) in enumerate(batch.items):
        assert copy.memory is not None
        try:
            check_stored(copy.memory, _check_header(copy))
        except CorruptObject as error:
            faults[index] = error
    return faults
