"""The batches that travel along the edges: one class an arrow's meaning."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from typing import Protocol, TypeVar

import numpy as np
import structlog

from orbitkv.cache.budget import Lease
from orbitkv.cache.catalogue import Catalogue, Copy
from orbitkv.codecs.base import reason_to_stay_raw
from orbitkv.codecs.cuda.workspace import Bridge, Workspace
from orbitkv.codecs.slots import Layout, SlotCodecs
from orbitkv.errors import CorruptObject, OrbitError, Unavailable, Undecodable
from orbitkv.objects import USER_FORMATS, Segment
from orbitkv.segment import PagedTensors, StateKey
from orbitkv.stages.ticket import Part

Recode = Callable[[Segment], tuple[int, bytes] | None]
R = TypeVar("R", bound="RestoreBatch")


@dataclass(slots=True, eq=False)
class PublishBatch:
    """Submitted to a save's E: pages to gather, after the engine's event.

    Attributes:
        pages: (key of one state group of the page, page index), at most 256 segments in all.
    """

    part: Part
    tensors: PagedTensors
    pages: tuple[tuple[StateKey, int], ...]
    ready: object | None
    nbytes: int

    def abandon(self, error: OrbitError) -> None:
        """Fail the part; nothing is held yet."""
        self.part.fail(error)


@dataclass(slots=True, eq=False)
class PageBatch:
    """From E to C: where the segments of each object lie in the engine's own memory.

    Attributes:
        objects: (key, page index, its slots). The pages stay the engine's, and must not change,
            until the part is settled.
    """

    part: Part
    tensors: PagedTensors
    objects: tuple[tuple[StateKey, int, tuple[int, ...]], ...]
    nbytes: int

    def abandon(self, error: OrbitError) -> None:
        """Fail the part; the engine's pages are read no more."""
        self.part.fail(error)


@dataclass(slots=True, eq=False)
class EncodedObject:
    """One object inside C, and on its way to D.

    Attributes:
        page_index, slots: Where its segments lie in the engine's pages.
        segments: What is stored of it; empty before ``encode``, and on a GPU.
        home: Pool memory that its raw segments lie in already, at their places: hidden, and
            pinned until the batch ends. On a GPU, D takes it.
        layout: Where its segments lie in its image in the arena of the GPU; None on a host. Where
            only the GPU tells, it is replaced when that has told.
    """

    key: StateKey
    page_index: int
    slots: tuple[int, ...]
    home: Copy | None
    segments: list[Segment] = field(default_factory=list)
    layout: Layout | None = None


@dataclass(slots=True, eq=False)
class EncodedBatch:
    """Inside C: the segments of each object in the form in which they will be stored.

    Attributes:
        lease: The node's budget that the batch keeps.
        workspace: Where the images lie on a GPU, as that of ``objects[i]`` at ``images[i]``.
        bridge: What a host fetches segments with, from pages that no GPU workspace can hold.
    """

    part: Part
    catalogue: Catalogue
    tensors: PagedTensors
    codecs: SlotCodecs
    objects: list[EncodedObject]
    lease: Lease | None
    workspace: Workspace | None = None
    bridge: Bridge | None = None

    def units(self) -> Sequence[Sequence[int]]:
        """Each object by itself; none where a GPU works on all of them at once."""
        return [] if self.workspace else [(index,) for index in range(len(self.objects))]

    @property
    def nbytes(self) -> int:
        """Pool memory, or arena, that the batch keeps until D has admitted or freed it."""
        return sum(
            entry.layout.nbytes if entry.layout else entry.home.nbytes if entry.home else 0
            for entry in self.objects
        )

    def reject(
        self, faults: Mapping[int, CorruptObject], log: structlog.stdlib.BoundLogger
    ) -> None:
        """A save has no items to spare: the first fault ends it."""
        del log
        raise next(iter(faults.values()))

    def recode(self, encode: Recode) -> None:
        """Change the representation of segments; the CRC of a changed one is to be made anew.

        Args:
            encode: Gives (format, stored bytes), or None to leave a segment as it is. A result
                whose 512 B aligned footprint saves less than 12.5 % of the original's is left.

        Raises:
            Unavailable: the segments are in GPU memory, where no host code reaches them.
        """
        if self.workspace:
            raise Unavailable("recode: the segments are in GPU memory; accepted: a host's")
        for segment in (segment for entry in self.objects for segment in entry.segments):
            encoded = encode(segment)
            if encoded is None:
                continue
            stored_format, payload = encoded
            if stored_format not in USER_FORMATS:
                accepted = f"{USER_FORMATS[0]} to {USER_FORMATS[-1]}"
                raise ValueError(f"recode to format {stored_format}; accepted: {accepted}")
            reason = reason_to_stay_raw(len(payload), segment.original_nbytes)
            if reason is None:
                segment.format = stored_format
                segment.payload = np.frombuffer(payload, np.uint8)
                segment.crc32 = segment.offset = None
            else:
                segment.raw_reason = reason

    def release(self) -> None:
        """Give up all pool memory that was not admitted, and the budget."""
        for entry in self.objects:
            if entry.home:
                self.catalogue.unpin(entry.home)
        self.objects = []
        if self.lease:
            self.lease.release()
        if self.workspace:
            self.workspace.release()

    def abandon(self, error: OrbitError) -> None:
        """Give everything up and fail the part, once no device uses any of it."""

        def end() -> None:
            self.release()
            self.part.fail(error)

        if self.workspace:
            self.workspace.end(end)
        else:
            end()


@dataclass(slots=True, eq=False)
class SealedBatch(EncodedBatch):
    """From C to D: every segment has its CRC.

    Attributes:
        direct: The batch of the direct route that has the same images. None: there is none.
    """

    direct: DirectWrite | None = None


class DirectWrite(Protocol):
    """What D has to know of a batch that goes straight to SSD."""

    @property
    def wanted(self) -> AbstractSet[bytes]:
        """Digests of the objects that are to be on SSD."""
        ...

    async def taken(self) -> AbstractSet[bytes]:
        """Those of them that the direct route writes."""
        ...


@dataclass(slots=True, eq=False)
class WriteBatch:
    """From D to U: objects to write to SSD.

    The references are weak: an object evicted before its turn is skipped. Nothing here is
    charged to the edge but the bytes it names, and dropping it leaves every write retryable.
    """

    catalogue: Catalogue
    copies: tuple[Copy, ...]
    part: None = None

    @property
    def nbytes(self) -> int:
        """Bytes that are to be written."""
        return sum(copy.nbytes for copy in self.copies)

    def abandon(self, error: OrbitError) -> None:  # noqa: ARG002 - nobody waits for the reason
        """Forget the writes; each may be queued again."""
        for copy in self.copies:
            self.catalogue.end_write(copy)
        self.catalogue.counters["ssd_writes_dropped"] += len(self.copies)


@dataclass(slots=True, eq=False)
class PeerBatch:
    """From D to P: objects to offer to other hosts. Weak references, like those of a write."""

    catalogue: Catalogue
    copies: tuple[Copy, ...]
    part: None = None

    @property
    def nbytes(self) -> int:
        """Bytes that are offered."""
        return sum(copy.nbytes for copy in self.copies)

    def abandon(self, error: OrbitError) -> None:  # noqa: ARG002 - nobody waits for the reason
        """Offer nothing; a later save offers again."""
        self.catalogue.counters["peer_offers_dropped"] += len(self.copies)


@dataclass(frozen=True, slots=True)
class Destination:
    """Where one object's segments go: slots of one page of one instance."""

    page_hash: bytes
    page_index: int
    slot_indices: tuple[int, ...]


@dataclass(slots=True, eq=False)
class RestoreBatch:
    """Objects on their way back to an engine. Every copy is pinned until the batch ends.

    Its subclasses are the same objects at the stations of their way; the names keep a definition
    from leaving a station out.

    Attributes:
        tensors: The instance's registered pages.
        items: (pinned copy, destination).
        segments: Of each item; empty before they have been validated.
        missed: Hashes that turned out not to be restorable; the rest goes on without them.
        placed: The decoder has written to the pages already, or a GPU will have.
        codecs: What undoes encoded segments; set by ``decode``.
        workspace: Where the images lie on a GPU.
        images: Device address of each item's image in it.
        bridge: What a host brings segments to pages with that no GPU workspace can hold.
        ready: The engine's event, before which its pages must not be written. None: now.
        stays: The objects are wanted in DRAM, and in no page: they go no further than D.
    """

    part: Part
    catalogue: Catalogue
    tensors: PagedTensors
    items: list[tuple[Copy, Destination]]
    segments: list[list[Segment]] = field(default_factory=list)
    missed: set[bytes] = field(default_factory=set)
    placed: bool = False
    codecs: SlotCodecs | None = None
    workspace: Workspace | None = None
    images: list[int] = field(default_factory=list)
    bridge: Bridge | None = None
    ready: object | None = None
    stays: bool = False

    def __post_init__(self) -> None:
        if not self.segments:
            self.segments = [[] for _ in self.items]

    def units(self) -> Sequence[Sequence[int]]:
        """Items for a host to work on: none where a GPU does."""
        return [] if self.workspace else self.pages()

    def pages(self) -> Sequence[Sequence[int]]:
        """The objects of each page together: a page is restored whole, or not touched."""
        pages: dict[bytes, list[int]] = {}
        for index, (_, destination) in enumerate(self.items):
            pages.setdefault(destination.page_hash, []).append(index)
        return list(pages.values())

    @property
    def nbytes(self) -> int:
        """Stored bytes of the objects."""
        return sum(copy.nbytes for copy, _ in self.items)

    def become(self, station: type[R]) -> R:
        """Hand everything over to the batch of the next station."""
        return station(
            self.part,
            self.catalogue,
            self.tensors,
            self.items,
            self.segments,
            self.missed,
            self.placed,
            self.codecs,
            self.workspace,
            self.images,
            self.bridge,
            self.ready,
            self.stays,
        )

    def reject(
        self, faults: Mapping[int, CorruptObject], log: structlog.stdlib.BoundLogger
    ) -> None:
        """Go on without objects that failed a check: their pages are misses.

        What failed is hidden: a corrupt generation at once, and one that cannot be decoded here
        in every tier, so that neither keeps a new save from replacing it.
        """
        for index, fault in faults.items():
            copy, destination = self.items[index]
            log.warning("object_refused", generation=copy.generation, fault=str(fault))
            if isinstance(fault, Undecodable):
                self.catalogue.counters["undecodable"] += 1
                self.catalogue.hide_everywhere(copy.digest)
            else:
                self.catalogue.hide_corrupt(copy.source or copy)
            self.missed.add(destination.page_hash)
        self.keep_all_but_missed()

    def keep_all_but_missed(self) -> None:
        """Give back the pins of missed pages, all objects of each, and go on without them."""
        kept = []
        for index, (copy, destination) in enumerate(self.items):
            if destination.page_hash in self.missed:
                self.catalogue.unpin(copy)
            else:
                kept.append(index)
        self._take(kept)

    def sort_by_page(self) -> None:
        """Put the objects of a page beside each other."""
        self._take([index for page in self.pages() for index in page])

    def _take(self, order: Sequence[int]) -> None:
        self.segments = [self.segments[index] for index in order]
        self.items = [self.items[index] for index in order]
        if self.images:
            self.images = [self.images[index] for index in order]

    def miss(self, copy: Copy, destination: Destination) -> None:
        """Leave one object out: its page is a miss, and its pin is given back."""
        self.missed.add(destination.page_hash)
        self.catalogue.unpin(copy)

    def settle(self) -> None:
        """Every page that is still here has been placed: give the pins back and say so."""
        done = {destination.page_hash for _, destination in self.items} - self.missed
        self._give_back()
        self.part.settle(done=done)

    def abandon(self, error: OrbitError) -> None:
        """Give the pins back and fail the part, once no device reads or writes any of it."""

        def end() -> None:
            self._give_back()
            self.part.fail(error)

        if self.workspace:
            self.workspace.end(end)
        else:
            end()

    def _give_back(self) -> None:
        for copy, _ in self.items:
            self.catalogue.unpin(copy)
        self.items.clear()
        if self.workspace:
            self.workspace.release()


class FetchBatch(RestoreBatch):
    """Submitted to a restore's D: copies in DRAM."""


class ReadBatch(RestoreBatch):
    """Submitted to a restore's U: copies on SSD."""


class LoadedBatch(RestoreBatch):
    """From U or P to D: copies in pool memory that nothing has checked, hidden until D admits."""


class ResidentBatch(RestoreBatch):
    """From D to R: copies in DRAM whose headers stood when they were admitted."""


class UploadedBatch(RestoreBatch):
    """Inside R: objects where the decoder reads them; on a host, the pool itself."""


class ValidatedBatch(RestoreBatch):
    """Inside R and V: objects whose lengths, formats and CRCs stand, as lists of segments."""

    def recode(self, decode: Recode) -> None:
        """Undo a representation: give (``Format.RAW``, original bytes), or None to leave it.

        A segment whose decoder raises CorruptObject, or gives another length than the original,
        stays as it is. Whatever is not raw at ``decode`` makes its page a miss.

        Raises:
            Unavailable: the segments are in GPU memory, where no host code reaches them.
        """
        if self.workspace:
            raise Unavailable("recode: the segments are in GPU memory; accepted: a host's")
        for segment in (segment for segments in self.segments for segment in segments):
            try:
                decoded = decode(segment)
            except CorruptObject:
                continue
            if decoded is not None and len(decoded[1]) == segment.original_nbytes:
                segment.format, segment.payload = decoded[0], np.frombuffer(decoded[1], np.uint8)
                segment.offset = None


class PeerReadBatch(RestoreBatch):
    """Submitted to a restore's P: objects that another host may have."""


class DecodedBatch(RestoreBatch):
    """From R or V to E: segments in the engine's own representation."""
