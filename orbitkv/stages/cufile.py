"""S, the SSD by way of cuFile: straight from and to registered GPU memory."""

from __future__ import annotations

import asyncio
from collections import defaultdict, deque
from collections.abc import AsyncGenerator, Iterable
from typing import ClassVar

from orbitkv.cache.direct import SLOTS, cut_pieces
from orbitkv.config import Config
from orbitkv.errors import Cancelled, DirectFault, ShortRead, ShortWrite
from orbitkv.graph import Lanes, Port, Ports
from orbitkv.stages.base import FileLane, Outputs, StageContext
from orbitkv.stages.direct import DirectReadBatch, LandedBatch, StagedBatch
from orbitkv.stages.staging import LandRead, StageForWrite


class WriteCuFile:
    """Write one slot to its place in a file.

    In:  ``StagedBatch``, device.
    Out: nothing. An object is findable once all of its pieces are written, each in full.
    """

    inputs: ClassVar[Ports] = {"in": Port(StagedBatch)}
    outputs: ClassVar[Ports] = {}
    lanes: ClassVar[Lanes] = frozenset({"file"})

    @staticmethod
    def unavailable(config: Config) -> str | None:
        """What keeps G from writing keeps S from it."""
        return StageForWrite.unavailable(config)

    async def run(self, batch: StagedBatch, ctx: StageContext) -> Outputs:
        """Write once the slot has been filled; a fault abandons the objects in it."""
        lane, piece, gate = ctx.lane, batch.piece, ctx.direct.gate
        assert isinstance(lane, FileLane)
        await batch.stream.reached(batch.filled)
        moved_nbytes = 0
        try:
            if gate.closed_reason is None:
                moved_nbytes = await lane.write(piece.shard, batch.slot, piece.nbytes, piece.offset)
        except DirectFault as fault:
            gate.close(fault)
        else:
            if gate.closed_reason is None and moved_nbytes != piece.nbytes:
                short = ShortWrite(piece.offset, moved_nbytes, piece.nbytes)
                ctx.log.warning("ssd_write_failed", fault=str(short))
        batch.end(failed=moved_nbytes != piece.nbytes)
        return {}


class ReadCuFile:
    """Read extents into registered slots, those beside each other in the file at once.

    One batch of a GPU after the other, however deep the node: one that has landed in part holds
    room in the arena, and its other pieces must not wait behind another that waits for room.

    In:  ``DirectReadBatch``: copies on SSD, pinned.
    Out: ``LandedBatch``: one slot each.
    """

    inputs: ClassVar[Ports] = {"in": Port(DirectReadBatch, entry=True)}
    outputs: ClassVar[Ports] = {"out": Port(LandedBatch)}
    lanes: ClassVar[Lanes] = frozenset({"file"})

    def __init__(self) -> None:
        self._turns: defaultdict[int, asyncio.Lock] = defaultdict(asyncio.Lock)

    @staticmethod
    def unavailable(config: Config) -> str | None:
        """What keeps G from reading keeps S from it."""
        return LandRead.unavailable(config)

    async def split(self, batch: DirectReadBatch, ctx: StageContext) -> AsyncGenerator[Outputs]:
        """Read two pieces at a time. What cannot be read is told when all of them have landed."""
        device = batch.tensors.device
        assert device is not None
        async with self._turns[device]:
            slots = ctx.direct.slots[device]
            batch.sort_by_page()
            pieces = cut_pieces([copy for copy, _ in batch.items])
            batch.pieces_left = unsent = len(pieces)
            reading: deque[tuple[LandedBatch, asyncio.Task[None]]] = deque()
            try:
                while pieces or reading:
                    if pieces and len(reading) < SLOTS:
                        if batch.part.ticket.cancelled:
                            batch.ended_by = Cancelled("the request was cancelled")
                        landed = LandedBatch(batch, pieces.pop(0), slots, await slots.acquire())
                        reading.append((landed, asyncio.create_task(_read(landed, ctx))))
                        continue
                    landed, read = reading[0]
                    await asyncio.shield(read)
                    reading.popleft()
                    unsent -= 1
                    yield {"out": landed}
            finally:
                if reading:  # a slot is free when its transfer has ended, and not before
                    await drain(read for _, read in reading)
                for landed, _ in reading:
                    landed.end()
                batch.pieces_left -= unsent - len(reading)


async def drain(reads: Iterable[asyncio.Task[None]]) -> None:
    """Wait for transfers to end, even if the caller is cancelled once more."""
    under_way = set(reads)
    while under_way:
        try:
            _, under_way = await asyncio.wait(under_way)
        except asyncio.CancelledError:
            continue


async def _read(landed: LandedBatch, ctx: StageContext) -> None:
    """Read one piece, and note which objects it does not give."""
    batch, piece, slot = landed.batch, landed.piece, landed.slot
    lane, gate, counters = ctx.lane, ctx.direct.gate, ctx.catalogue.counters
    assert isinstance(lane, FileLane)
    assert slot
    moved_nbytes, fault = 0, batch.ended_by
    if gate.closed_reason is not None:
        fault = DirectFault(f"closed since: {gate.closed_reason}")
    if fault is None:
        try:
            moved_nbytes = await lane.read(piece.shard, slot, piece.nbytes, piece.offset)
        except DirectFault as failed:
            gate.close(failed)
            fault = failed
    if fault is not None:
        batch.unread |= dict.fromkeys((number for number, *_ in piece.parts), fault)
        return
    counters["direct_transfers"] += 1
    counters["direct_read_nbytes"] += moved_nbytes
    for number, _, at, nbytes in piece.parts:
        if at + nbytes > moved_nbytes:
            short = ShortRead(piece.offset, moved_nbytes, piece.nbytes)
            batch.unread.setdefault(number, short)
