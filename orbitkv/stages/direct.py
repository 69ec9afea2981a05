"""The batches of the direct route: whole ones at its ends, and slots of them between S and G."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from typing import Any

import structlog

from orbitkv.cache.catalogue import Catalogue, Copy, Tier, Want
from orbitkv.cache.direct import DirectRoute, Piece, Slot, SlotPool
from orbitkv.codecs.cuda.workspace import DeviceStream, Workspace
from orbitkv.codecs.slots import Layout
from orbitkv.errors import OrbitError, ShortRead
from orbitkv.segment import PagedTensors
from orbitkv.stages.batch import RestoreBatch
from orbitkv.stages.ticket import Part

_TURNS = 16  # of the loop: far more than a free node needs to take a batch from its queue


class DirectWriteBatch:
    """From C to G: the objects of a batch that D gets too, to be written past the host.

    The save does not end before this batch has. Whatever it leaves out goes by D and U.

    Args:
        route: Counts this job until it ends.
        workspace: Where the images lie; shared with D's batch.
        digests: Of each image.
        layouts: Of each image, where they are known beforehand.
        wanted: Digests of the objects that are to be on SSD.

    Attributes:
        ended: Ends when every write has, or none was begun.
        over: Nothing more is to be done.
    """

    part = None  # D settles the save's part; this batch only holds it

    def __init__(
        self,
        route: DirectRoute,
        publication: Part,
        catalogue: Catalogue,
        tensors: PagedTensors,
        workspace: Workspace,
        digests: Sequence[bytes],
        layouts: Sequence[Layout],
        wanted: AbstractSet[bytes],
    ) -> None:
        assert tensors.device is not None
        self.device = tensors.device
        self._route = route
        route.jobs.add(self)
        self.publication = publication
        self.catalogue = catalogue
        self.tensors = tensors
        self.workspace = workspace
        self.digests = tuple(digests)
        self.layouts = tuple(layouts)
        self.wanted = wanted
        loop = asyncio.get_running_loop()
        self.ended: asyncio.Future[None] = loop.create_future()
        self._taken: asyncio.Future[frozenset[bytes]] = loop.create_future()
        self._begun = False
        self.leave_workspace = workspace.share()
        publication.hold()

    @property
    def over(self) -> bool:
        """Whether it has ended."""
        return self.ended.done()

    @property
    def nbytes(self) -> int:
        """Bytes of the images in the save lane's arena."""
        return sum(layout.nbytes for layout in self.layouts)

    def begin(self) -> bool:
        """G turns to it. False where D could not wait so long, and has withdrawn it."""
        self._begun = True
        return not self.over

    def take(self, digests: frozenset[bytes]) -> None:
        """Say which objects have extents, and are this batch's to write."""
        self._taken.set_result(digests)

    async def taken(self) -> frozenset[bytes]:
        """What is written past the host: nothing where G does not turn to it now.

        G may have no place for it for as long as a disk takes. Where it has one, it comes within a
        few turns of the loop; D may be here before it, in one turn with what emitted both.
        """
        for _ in range(_TURNS):
            if self._begun or self.over:
                break
            await asyncio.sleep(0)
        else:
            self.end()
        return await asyncio.shield(self._taken)

    def end(self) -> None:
        """Every write has ended, or none was begun. Harmless twice."""
        if not self.over:
            self.ended.set_result(None)
            if not self._taken.done():
                self._taken.set_result(frozenset())
            self._route.jobs.discard(self)
            self.leave_workspace()
            self.publication.let_go()

    def abandon(self, error: OrbitError) -> None:  # noqa: ARG002 - the object is in DRAM all the same
        """Leave it to D and U: the edge was full, or the pipeline ends."""
        self.end()


class DirectWrites:
    """What G and S know of one batch that is being written: extents, hidden until all is there.

    Args:
        over: Called when the last piece has ended.

    Attributes:
        extents: Of each object, hidden and pinned.
    """

    def __init__(self, catalogue: Catalogue, over: Callable[[], None]) -> None:
        self.catalogue = catalogue
        self.extents: list[Copy] = []
        self._left_nbytes: list[int] = []
        self._failed: set[int] = set()
        self._open = 1  # G, which still cuts
        self._over = over

    def reserve(self, digest: bytes, nbytes: int) -> bool:
        """Take an extent for the next object; False where SSD has it already, or no room."""
        if self.catalogue.find(digest, Tier.SSD):
            return False
        want = Want(digest, nbytes, self.catalogue.next_generation())
        extent = self.catalogue.reserve_ssd(want)
        if extent is None:
            return False
        self.extents.append(extent)
        self._left_nbytes.append(nbytes)
        self.catalogue.pending_writes[digest] += 1
        return True

    def begin_piece(self) -> None:
        """Another piece is on its way."""
        self._open += 1

    def end_piece(self, piece: Piece, *, failed: bool) -> None:
        """A piece is on SSD, or is not and never will be."""
        for number, _, _, nbytes in piece.parts:
            self._left_nbytes[number] -= nbytes
            if failed:
                self._failed.add(number)
            if not self._left_nbytes[number]:
                self._conclude(number)
        self.end()

    def end(self) -> None:
        """One of those who are at work has done with it."""
        self._open -= 1
        if self._open:
            return
        for number, left_nbytes in enumerate(self._left_nbytes):
            if left_nbytes:  # the pipeline ended before all of it was cut
                self._failed.add(number)
                self._conclude(number)
        self._over()

    def _conclude(self, number: int) -> None:
        extent, counters = self.extents[number], self.catalogue.counters
        if number in self._failed:
            counters["ssd_write_faults"] += 1
        elif self.catalogue.admit(extent):
            counters["direct_writes"] += 1
            counters["direct_written_nbytes"] += extent.nbytes
        self.catalogue.end_pending(extent.digest)
        self.catalogue.unpin(extent)


@dataclass(slots=True, eq=False)
class StagedBatch:
    """From G to S: one slot of encoded bytes, padding zeroed, and where in a file they go.

    Attributes:
        filled: The event of ``stream`` after which the bytes are in the slot; None before it is
            asked for.
    """

    writes: DirectWrites
    piece: Piece
    slots: SlotPool
    slot: Slot
    stream: DeviceStream
    filled: Any = None
    part: None = None

    @property
    def nbytes(self) -> int:
        """Bytes of the slot that are used."""
        return self.piece.nbytes

    def end(self, *, failed: bool) -> None:
        """Give the slot back, once nothing reads or fills it any more."""
        self.slots.release(self.slot)
        self.writes.end_piece(self.piece, failed=failed)

    def abandon(self, error: OrbitError) -> None:  # noqa: ARG002 - the object is in DRAM all the same
        """Write nothing, once the slot has been filled."""
        self.stream.when_over(lambda: self.end(failed=True))


@dataclass(slots=True, eq=False)
class DirectReadBatch(RestoreBatch):
    """Submitted to a restore's S: copies on SSD that cuFile reads.

    Attributes:
        pieces_left: Pieces that G has not got yet.
        opening: Of its workspace, by whichever piece comes first.
        unread: What could not be read, by number of the item; told when all pieces have landed.
        ended_by: Why the batch ends once no piece is on its way any more.
    """

    pieces_left: int = 0
    opening: asyncio.Lock = field(default_factory=asyncio.Lock)
    unread: dict[int, OrbitError] = field(default_factory=dict)
    ended_by: OrbitError | None = None

    def abandon(self, error: OrbitError) -> None:
        """End the batch once no piece of it is on its way."""
        self.ended_by = self.ended_by or error
        if not self.pieces_left:
            RestoreBatch.abandon(self, self.ended_by)

    def leave_out_unread(self, log: structlog.stdlib.BoundLogger) -> None:
        """Make pages a miss of which something could not be read; hide what the file lacks."""
        self.catalogue.counters["direct_reads"] += len(self.items) - len(self.unread)
        for number, fault in self.unread.items():
            copy, destination = self.items[number]
            self.catalogue.counters["ssd_read_faults"] += 1
            log.warning("ssd_read_failed", fault=str(fault))
            if isinstance(fault, ShortRead):
                self.catalogue.hide_corrupt(copy)  # else no new save would repair it
            self.missed.add(destination.page_hash)
        self.keep_all_but_missed()


@dataclass(slots=True, eq=False)
class LandedBatch:
    """From S to G: one slot of stored bytes that nothing has checked, or that were not read."""

    batch: DirectReadBatch
    piece: Piece
    slots: SlotPool
    slot: Slot | None
    part: None = None

    @property
    def nbytes(self) -> int:
        """Bytes of the slot that are used."""
        return self.piece.nbytes

    def end(self) -> bool:
        """Give the slot back; True where it was the last of its batch. Harmless twice."""
        slot, self.slot = self.slot, None
        if slot is None:
            return False
        self.slots.release(slot)
        self.batch.pieces_left -= 1
        return not self.batch.pieces_left

    def abandon(self, error: OrbitError) -> None:
        """Let the whole batch end: all of it must be here."""
        self.end()
        self.batch.abandon(error)
