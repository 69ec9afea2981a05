"""G, registered GPU staging: where encoded bytes wait for cuFile, or land from it."""

from __future__ import annotations

import itertools
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from orbitkv.cache.catalogue import Copy
from orbitkv.cache.direct import cut_pieces
from orbitkv.codecs.cuda.tasks import Words
from orbitkv.codecs.cuda.workspace import AnsSaving, DeviceStream, Leased, Runs
from orbitkv.codecs.raw import address_of
from orbitkv.codecs.slots import Layout
from orbitkv.config import Config
from orbitkv.errors import DeviceFault
from orbitkv.graph import Lanes, Port, Ports
from orbitkv.objects import CRC32_WORD, pack_head
from orbitkv.probe import direct_unavailable
from orbitkv.stages.base import Outputs, StageContext
from orbitkv.stages.batch import UploadedBatch
from orbitkv.stages.decode import open_workspace
from orbitkv.stages.direct import DirectWriteBatch, DirectWrites, LandedBatch, StagedBatch
from orbitkv.stages.dram import join_runs


class StageForWrite:
    """Bring encoded objects to registered slots, with header, table and zeroed padding.

    The save lane's arena is held only until the images are in this lane's own: a slow disk does
    not hold publication up. What finds no room at once is left to D and U.

    In:  ``DirectWriteBatch``: images in the arena of the lane that encoded them.
    Out: ``StagedBatch``: one slot each.
    """

    inputs: ClassVar[Ports] = {"in": Port(DirectWriteBatch)}
    outputs: ClassVar[Ports] = {"out": Port(StagedBatch)}
    lanes: ClassVar[Lanes] = frozenset({"stream"})

    @staticmethod
    def unavailable(config: Config) -> str | None:
        """Whatever keeps writes from the direct route."""
        return direct_unavailable(config.ssd_cache_paths, config.ssd_backend)

    async def split(self, batch: DirectWriteBatch, ctx: StageContext) -> AsyncGenerator[Outputs]:
        """Take what is whole and finds room; then fill slot after slot."""
        stream = ctx.stream_of(batch.tensors)
        assert stream
        if not batch.begin():
            return
        room: Leased | None = None

        def over() -> None:
            if room:
                room.release()
            batch.end()

        writes = DirectWrites(batch.catalogue, over)
        try:
            images = await _whole_images(batch)
            if ctx.direct.takes(batch.device) and not batch.publication.ticket.cancelled:
                room = await stream.arena.acquire_now(sum(image.layout.nbytes for image in images))
            if room is None or not images:
                return
            images = [i for i in images if writes.reserve(i.digest, i.layout.nbytes)]
            batch.take(frozenset(extent.digest for extent in writes.extents))
            starts = await _bring(images, writes.extents, room.address, stream)
            batch.leave_workspace()
            slots = ctx.direct.slots[batch.device]
            for piece in cut_pieces(writes.extents):
                staged = StagedBatch(writes, piece, slots, await slots.acquire(), stream)
                writes.begin_piece()
                try:
                    staged.filled = stream.copy(
                        join_runs(
                            (staged.slot.address + at, starts[number] + start, nbytes)
                            for number, start, at, nbytes in piece.parts
                        )
                    )
                except BaseException as error:
                    staged.abandon(DeviceFault(repr(error)))
                    raise
                yield {"out": staged}
        finally:
            writes.end()


class LandRead:
    """Bring what S read to the arena, object beside object, where a decoder reads it.

    In:  ``LandedBatch``: one slot each.
    Out: ``UploadedBatch``, once all slots of a batch are there.
    """

    inputs: ClassVar[Ports] = {"in": Port(LandedBatch)}
    outputs: ClassVar[Ports] = {"out": Port(UploadedBatch)}
    lanes: ClassVar[Lanes] = frozenset({"stream"})

    @staticmethod
    def unavailable(config: Config) -> str | None:
        """Whatever keeps reads from the direct route."""
        backend = config.ssd_read_path or config.ssd_backend
        return direct_unavailable(config.ssd_cache_paths, backend)

    async def run(self, landed: LandedBatch, ctx: StageContext) -> Outputs:
        """Copy one slot; hand the batch on with its last."""
        batch, slot = landed.batch, landed.slot
        stream = ctx.stream_of(batch.tensors)
        assert stream
        assert slot
        parts = [part for part in landed.piece.parts if part[0] not in batch.unread]
        if parts:
            async with batch.opening:
                if not batch.workspace:
                    together = ctx.codecs(batch.tensors.geometry).together
                    await open_workspace(batch, stream, together)
            assert batch.workspace
            batch.workspace.running = True
            try:
                copied = stream.copy(
                    join_runs(
                        (batch.images[number] + start, slot.address + at, nbytes)
                        for number, start, at, nbytes in parts
                    )
                )
            except BaseException:
                await stream.idle()  # some of it may be under way
                raise
            await stream.reached(copied)
        if not landed.end():
            return {}
        if batch.workspace:
            batch.workspace.running = False
        if batch.ended_by:
            batch.abandon(batch.ended_by)
            return {}
        batch.leave_out_unread(ctx.log)
        return {"out": batch.become(UploadedBatch)}


@dataclass(frozen=True, slots=True)
class Image:
    """One encoded object in an arena.

    Attributes:
        crcs: Of each of its segments.
    """

    digest: bytes
    address: int
    layout: Layout
    crcs: Words


async def _whole_images(batch: DirectWriteBatch) -> list[Image]:
    """Wait for the GPU to tell which objects it encoded without a refused segment."""
    workspace = batch.workspace
    await workspace.stream.reached(workspace.ready)
    layouts: Sequence[Layout] = batch.layouts
    if isinstance(workspace, AnsSaving):
        layouts = await workspace.encoded()
    tasks = workspace.tasks
    assert tasks
    ranges = itertools.pairwise(tasks.starts)
    return [
        Image(digest, address, layout, tasks.crcs[first:end].copy())
        for digest, address, layout, (first, end) in zip(
            batch.digests, workspace.images, layouts, ranges, strict=True
        )
        if digest in batch.wanted and not tasks.faults[first:end].any()
    ]


async def _bring(
    images: Sequence[Image], extents: Sequence[Copy], room: int, stream: DeviceStream
) -> list[int]:
    """Copy images to this lane's arena, and complete them there; give where each starts."""
    starts = list(itertools.accumulate((i.layout.nbytes for i in images), initial=room))[:-1]
    pieces = [
        (start, image.address, image.layout.nbytes)
        for start, image in zip(starts, images, strict=True)
    ]
    edges_nbytes = sum(i.layout.nbytes - len(i.layout.payloads) for i in images)
    scratch = await stream.take_scratch(edges_nbytes)
    try:
        end, host = 0, address_of(scratch)
        edges: Runs = []
        for image, extent, start in zip(images, extents, starts, strict=True):
            payloads, nbytes = image.layout.payloads, image.layout.nbytes
            table = image.layout.table.copy()
            table[:, CRC32_WORD] = image.crcs
            head = pack_head(table.tobytes(), nbytes, image.digest, extent.generation)
            filled = head.ljust(payloads.start, b"\0") + bytes(nbytes - payloads.stop)
            scratch[end : end + len(filled)] = np.frombuffer(filled, np.uint8)
            edges.append((start, host + end, payloads.start))
            if payloads.stop < nbytes:
                tail = host + end + payloads.start
                edges.append((start + payloads.stop, tail, nbytes - payloads.stop))
            end += len(filled)
        await stream.reached(stream.copy([*join_runs(pieces), *edges]))
    except BaseException:
        await stream.idle()  # some of it may be under way
        raise
    finally:
        stream.give_scratch(scratch)
    return starts
