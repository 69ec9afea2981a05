"""Catalogue: which object lies where, in which generation, and who still reads it."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from orbitkv.cache.admission import TinyLfu, WriteAdmission, WritePolicy, hashes_of
from orbitkv.cache.extents import ExtentStore
from orbitkv.cache.order import RetentionClass
from orbitkv.cache.pool import Pool
from orbitkv.cache.retention import Retention
from orbitkv.errors import Cancelled, ImpossibleRequest
from orbitkv.objects import Bytes


class Tier(StrEnum):
    """Where a copy of an object lies."""

    DRAM = "dram"
    SSD = "ssd"


@dataclass(frozen=True, slots=True)
class Want:
    """Room asked for: for which object, how much, and in which generation."""

    digest: bytes
    nbytes: int
    generation: int
    source: Copy | None = None


@dataclass(slots=True, eq=False)
class Copy:
    """One object's bytes in one tier. ``nbytes`` is a multiple of 4 KiB.

    A copy is born hidden and pinned by whoever fills it. ``Catalogue.admit`` makes it findable;
    when a hidden copy loses its last pin, its bytes are free again. So what is filled half-way,
    found corrupt or evicted under a reader needs no other care.

    Attributes:
        digest: Of its state key.
        offset: In the pool, or in the file of ``shard``.
        memory: uint8[nbytes] of the pool; None on SSD, and once freed.
        source: The copy that this one is being filled from, pinned until it is admitted or freed.
        write_queued: A write to SSD has been asked for and has not ended.
        handle: Retention's name of a findable copy in DRAM; -1 for every other one.
        skipped: Eviction has come to it while it was pinned, and passes it until it is not.
    """

    digest: bytes
    generation: int
    tier: Tier
    offset: int
    nbytes: int
    memory: Bytes | None = None
    source: Copy | None = None
    pins: int = 1
    hidden: bool = True
    write_queued: bool = False
    shard: int = 0
    handle: int = -1
    skipped: bool = False


@dataclass(slots=True, eq=False)
class Loading:
    """An object on its way from SSD, for all who want it.

    Attributes:
        copy: Where it will be; pin it to be sure of it.
        ended: Tells whether it was read. Nothing has checked it then.
    """

    copy: Copy
    ended: asyncio.Future[bool]


@dataclass(slots=True)
class _Shelf:
    """One tier's copies: the findable ones by key, and all that hold bytes."""

    findable: dict[bytes, Copy]
    live: set[Copy]
    pinned_nbytes: int = 0


class Catalogue:
    """All copies of all objects. Changed on the manager's loop alone.

    Args:
        pool: Memory of the DRAM tier.
        extents: Files of the SSD tier; None where there are none.
        retention: Which copy in DRAM goes first. None: the one that was used longest ago.
        write_policy: Which copies in DRAM are to be written to SSD.
        lfu: Judges who may take another's place in DRAM. None: everybody may.

    Attributes:
        counters: Events by name.
        pending_writes: Keys whose write to SSD has been asked for, or is under way.
        writes: Judges what is to be written to SSD.
        loading: Objects that are being read from SSD, by key.
    """

    def __init__(
        self,
        pool: Pool,
        extents: ExtentStore[Copy] | None,
        retention: Retention | None = None,
        *,
        write_policy: WritePolicy = WritePolicy.ALL,
        lfu: TinyLfu | None = None,
    ) -> None:
        self.pool = pool
        self.extents = extents
        self.lfu = lfu
        self.retention = retention or Retention(pool.capacity_nbytes, 0, compiled=False)
        self.counters: Counter[str] = Counter()
        self.pending_writes: Counter[bytes] = Counter()
        self.loading: dict[bytes, Loading] = {}
        self._by_handle: dict[int, Copy] = {}
        self._asked_to_go: Counter[RetentionClass | None] = Counter()  # evicted on request
        self._generation = extents.first_generation if extents else 0
        self._write_ended: dict[Copy, list[asyncio.Future[None]]] = {}
        self._shelves: Mapping[Tier, _Shelf] = {tier: _Shelf({}, set()) for tier in Tier}
        self._waiting: Mapping[bool, dict[asyncio.Future[list[Copy]], tuple[Want, ...]]] = {
            True: {},
            False: {},
        }
        self.writes = WriteAdmission[bytes](
            write_policy,
            resident=self._shelves[Tier.SSD].findable,
            pending=self.pending_writes,
        )
        if extents:
            self._recover(extents)

    def find(self, digest: bytes, tier: Tier) -> Copy | None:
        """The findable copy of an object in one tier."""
        return self._shelves[tier].findable.get(digest)

    def find_run(self, digests: Iterable[bytes], tiers: Sequence[Tier]) -> list[Copy]:
        """The findable copies of objects in order, up to the first that no tier has.

        Args:
            digests: Read no further than that object.
            tiers: Where to look, nearest first.
        """
        find, *finders = [self._shelves[tier].findable.get for tier in tiers]
        found: list[Copy] = []
        for digest in digests:
            copy = find(digest)
            if copy is None:
                copy = next(filter(None, (look(digest) for look in finders)), None)
                if copy is None:
                    break
            found.append(copy)
        return found

    def is_resident(self, digest: bytes) -> bool:
        """Whether any tier has the object."""
        return any(digest in shelf.findable for shelf in self._shelves.values())

    def copies(self, tier: Tier) -> tuple[Copy, ...]:
        """The findable copies of a tier; those in DRAM in the order in which they would go."""
        if tier is Tier.SSD:
            return tuple(self._shelves[tier].findable.values())
        handles = (h for kind in RetentionClass for h in self.retention.in_order(kind).tolist())
        return tuple(self._by_handle[handle] for handle in handles)

    def touch(self, copies: Sequence[Copy]) -> None:
        """Make copies in DRAM the most recently used ones of their class, in order."""
        self.retention.touch(_handles(copies))

    def look_up(self, copies: Sequence[Copy]) -> None:
        """Note that a foreground query returned copies in DRAM: demand, which alone protects."""
        self.retention.look_up(_handles(copies))

    def welcomes(self, digest: bytes, nbytes: int) -> bool:
        """Whether a new object may take the place of the one that would have to go for it."""
        if self.lfu is None or nbytes <= self.pool.largest_free_nbytes:
            return True
        victim = self._victim()
        if victim is None:
            return True
        return self.lfu.admits(*hashes_of([digest, victim.digest]).tolist())

    def reclaim(self, copies: Sequence[Copy]) -> None:
        """Let copies in DRAM go before all others: another tier or host holds them too."""
        self.retention.reclaim(_handles(copies))

    def next_generation(self) -> int:
        """A number that no version of any object has had."""
        self._generation += 1
        return self._generation

    def queue_write(self, copy: Copy) -> None:
        """Note that a write of this copy to SSD has been asked for."""
        copy.write_queued = True
        self.pending_writes[copy.digest] += 1

    def end_write(self, copy: Copy) -> None:
        """Note that no write of this copy is asked for any more, whether it was made or not."""
        if copy.write_queued:
            copy.write_queued = False
            self.end_pending(copy.digest)
        for ended in self._write_ended.pop(copy, ()):
            if not ended.done():
                ended.set_result(None)

    def end_pending(self, digest: bytes) -> None:
        """Note that one write of a key is not under way any more."""
        self.pending_writes[digest] -= 1
        if not self.pending_writes[digest]:
            del self.pending_writes[digest]

    def queued_writes(self) -> list[Copy]:
        """All copies, findable or not, whose write has been asked for and has not ended."""
        return [copy for copy in self._shelves[Tier.DRAM].live if copy.write_queued]

    async def written(self, copies: Sequence[Copy]) -> None:
        """Wait until each of these copies has had no write asked for."""
        for copy in reversed(copies):  # those who end last first: few have to be waited for
            if copy.write_queued:
                ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
                self._write_ended.setdefault(copy, []).append(ended)
                await ended

    async def reserve_dram(
        self,
        wants: Sequence[Want],
        *,
        urgent: bool,
        wait_s: float | None = None,
        cancellation: Callable[[], asyncio.Future[None]] | None = None,
    ) -> list[Copy] | None:
        """Take pool memory for all wants at once, or wait in turn until there is some.

        Nobody waits while holding a part of what he wants, so two who wait cannot block each
        other. What nobody reads is evicted, but only once that makes the whole request fit.

        Args:
            urgent: Go before those who are not: a demand read before a save.
            wait_s: Give up after this long. None: never.
            cancellation: Makes a future that ends when the request is cancelled.

        Returns:
            Hidden copies with one pin each, the caller's; None when ``wait_s`` ran out.

        Raises:
            ImpossibleRequest: at once, when the whole pool is smaller.
            Cancelled: the request was cancelled while it waited.
        """
        nbytes = sum(want.nbytes for want in wants)
        if nbytes > self.pool.capacity_nbytes:
            raise ImpossibleRequest(
                f"pool: {nbytes} bytes asked for; the pool is {self.pool.capacity_nbytes}"
            )
        ahead = self._waiting[True] or (not urgent and self._waiting[False])
        copies = None if ahead else self._allocate_all(wants)
        if copies is not None:
            return copies
        granted: asyncio.Future[list[Copy]] = asyncio.get_running_loop().create_future()
        self._waiting[urgent][granted] = tuple(wants)
        cancelled = cancellation() if cancellation else None
        awaited: list[asyncio.Future[Any]] = [granted, cancelled] if cancelled else [granted]
        try:
            await asyncio.wait(awaited, timeout=wait_s, return_when=asyncio.FIRST_COMPLETED)
        except asyncio.CancelledError:
            self._withdraw(granted, urgent=urgent)
            raise
        if cancelled is not None and cancelled.done():
            self._withdraw(granted, urgent=urgent)
            raise Cancelled("the request was cancelled while it waited for pool memory")
        if granted.done():
            return granted.result()
        self._withdraw(granted, urgent=urgent)
        self.counters["pool_wait_expired"] += 1
        return None

    def begin_loading(self, copies: Sequence[Copy]) -> list[Loading]:
        """Let others join the reads of these copies."""
        loop = asyncio.get_running_loop()
        loadings = [Loading(copy, loop.create_future()) for copy in copies]
        self.loading |= {loading.copy.digest: loading for loading in loadings}
        return loadings

    def end_loading(self, loadings: Sequence[Loading], stands: Sequence[bool]) -> None:
        """Tell those who joined which copies were read."""
        for loading, read in zip(loadings, stands, strict=True):
            if self.loading.get(loading.copy.digest) is loading:
                del self.loading[loading.copy.digest]
            loading.ended.set_result(read)

    def reserve_ssd(self, want: Want) -> Copy | None:
        """Take an extent, evicting what lies there; None where somebody reads that in every shard.

        Returns:
            A hidden copy with one pin, the caller's.
        """
        assert self.extents
        room = self.extents.reserve(want.nbytes)
        if room is None:
            return None
        for evicted in room.evicted:
            self.counters["evicted_ssd"] += 1
            self._conceal(evicted)
            self._free(evicted)
        copy = Copy(want.digest, want.generation, Tier.SSD, room.offset, want.nbytes)
        copy.shard = room.shard
        self.extents.hold(copy)
        return self._new_copy(copy)

    def admit(self, copy: Copy) -> bool:
        """Make a filled copy findable. False, and it stays hidden, where its tier has one."""
        return bool(self.admit_all([copy]))

    def admit_all(self, copies: Sequence[Copy]) -> list[Copy]:
        """Make filled copies of one tier findable, in order; give those that its tier had not."""
        admitted = []
        for copy in copies:
            self._let_source_go(copy)
            findable = self._shelves[copy.tier].findable
            if resident := findable.get(copy.digest):
                if resident is not copy:  # which others who share it have admitted
                    self.counters[f"duplicate_{copy.tier}"] += 1
                continue
            findable[copy.digest] = copy
            copy.hidden = False
            admitted.append(copy)
            if copy.tier is Tier.SSD:
                assert self.extents
                self.extents.publish(copy)
        if admitted and admitted[0].tier is Tier.DRAM:
            handles = self.retention.admit([copy.nbytes for copy in admitted], pinned=False)
            for copy, handle in zip(admitted, handles.tolist(), strict=True):
                copy.handle = handle
                self._by_handle[handle] = copy
        return admitted

    def shrink(self, copy: Copy, nbytes: int) -> None:
        """Give back what a hidden copy in DRAM does not need behind its first ``nbytes``."""
        assert copy.hidden
        assert copy.memory is not None
        excess_nbytes = copy.nbytes - nbytes
        if excess_nbytes:
            self._shelves[copy.tier].pinned_nbytes -= excess_nbytes
            self.pool.free(copy.offset + nbytes, excess_nbytes)
            copy.nbytes = nbytes
            copy.memory = copy.memory[:nbytes]
            self._serve()

    def pin(self, copy: Copy) -> None:
        """Keep a copy's bytes where they are until the matching ``unpin``."""
        self.pin_all((copy,))

    def pin_all(self, copies: Iterable[Copy]) -> None:
        """Pin each copy as often as it is named."""
        for copy in copies:
            if copy.pins == 0:
                self._shelves[copy.tier].pinned_nbytes += copy.nbytes
            copy.pins += 1

    def unpin(self, copy: Copy) -> None:
        """End one use of a copy's bytes. Only after its last DMA or I/O has ended."""
        self.unpin_all((copy,))

    def unpin_all(self, copies: Iterable[Copy]) -> None:
        """Unpin each copy as often as it is named; who waits for pool memory gets it after that."""
        ended = False
        for copy in copies:
            copy.pins = pins = copy.pins - 1
            if pins <= 0:
                assert pins == 0, "unpinned more often than pinned"
                ended = True
                self._shelves[copy.tier].pinned_nbytes -= copy.nbytes
                if copy.hidden:
                    self._free(copy)
                elif copy.skipped:
                    copy.skipped = False
                    self.retention.unpin([copy.handle])
        if ended:
            self._serve()

    def hide(self, copy: Copy) -> None:
        """Make one generation unfindable at once; its bytes go when the last pin does."""
        if copy.hidden:
            return
        self._conceal(copy)
        if copy.pins == 0:
            self._free(copy)
            self._serve()

    def hide_corrupt(self, copy: Copy) -> None:
        """Hide a generation whose bytes failed a check, and count it."""
        self.counters[f"corrupt_{copy.tier}"] += 1
        self.hide(copy)

    def hide_everywhere(self, digest: bytes) -> None:
        """Hide an object in every tier, so that a new save replaces it."""
        for shelf in self._shelves.values():
            if copy := shelf.findable.get(digest):
                self.hide(copy)

    def evict_unpinned(self, tier: Tier) -> int:
        """Hide every copy of a tier that nobody reads; return the bytes freed."""
        unpinned = [copy for copy in self.copies(tier) if copy.pins == 0]
        self.counters[f"evicted_{tier}"] += len(unpinned)
        if tier is Tier.DRAM:
            self._asked_to_go.update(self.retention.class_of(copy.handle) for copy in unpinned)
        for copy in unpinned:
            self.hide(copy)
        return sum(copy.nbytes for copy in unpinned)

    def policy_counters(self) -> dict[str, int]:
        """What the policies have decided, and the bytes that are protected now."""
        retained = self.retention.statistics()
        counted = {
            "promotions": retained.promotions,
            "demotions": retained.demotions,
            "protected_nbytes": retained.protected_nbytes,
            "ssd_writes_admitted": self.writes.admitted,
        }
        counted |= {
            f"evicted_{kind.name.lower()}": n + self._asked_to_go[kind]
            for kind, n in retained.evicted.items()
        }
        counted |= {f"ssd_skips_{reason}": n for reason, n in self.writes.skipped.items()}
        if self.lfu:
            counted |= {"lfu_admitted": self.lfu.admitted, "lfu_rejected": self.lfu.rejected}
        return counted

    def leaks(self) -> list[str]:
        """Everything that is not as it must be at rest: no pins, no bytes without an owner."""
        found = []
        used = {Tier.DRAM: self.pool.used_nbytes}
        if self.extents:
            used[Tier.SSD] = self.extents.used_nbytes
        for tier, used_nbytes in used.items():
            shelf = self._shelves[tier]
            findable_nbytes = sum(copy.nbytes for copy in shelf.findable.values())
            if used_nbytes != findable_nbytes:
                found.append(f"{tier}: {used_nbytes} bytes used, {findable_nbytes} findable")
            pins = sum(copy.pins for copy in shelf.live)
            if pins or shelf.pinned_nbytes:
                found.append(f"{tier}: {pins} pins on {shelf.pinned_nbytes} bytes")
        if self.loading or self.pending_writes:
            found.append(f"{len(self.loading)} loading, {len(self.pending_writes)} writes pending")
        if waiting := sum(map(len, self._waiting.values())):
            found.append(f"pool: {waiting} waiting")
        return found

    def close(self) -> None:
        """Close both tiers.

        Raises:
            StoreError: the SSD tier could not be left as it should be; it is closed all the same.
        """
        try:
            if self.extents:
                self.extents.close()
        finally:
            for copy in self._shelves[Tier.DRAM].live:
                copy.memory = None
            self.pool.close()

    def _recover(self, extents: ExtentStore[Copy]) -> None:
        """Make findable what earlier managers left on SSD; nothing of it has been read yet."""
        shelf = self._shelves[Tier.SSD]
        for row in extents.recovered():
            if row.digest in shelf.findable:  # in two shards that have not always been together
                continue
            copy = Copy(row.digest, row.generation, Tier.SSD, row.offset, row.nbytes)
            copy.shard, copy.pins, copy.hidden = row.shard, 0, False
            shelf.live.add(copy)
            shelf.findable[copy.digest] = copy
            extents.hold(copy)
            extents.publish(copy)

    def _new_copy(self, copy: Copy) -> Copy:
        shelf = self._shelves[copy.tier]
        shelf.live.add(copy)
        shelf.pinned_nbytes += copy.nbytes
        return copy

    def _free(self, copy: Copy) -> None:
        self._let_source_go(copy)
        self._shelves[copy.tier].live.remove(copy)
        if copy.tier is Tier.DRAM:
            copy.memory = None
            self.pool.free(copy.offset, copy.nbytes)
        else:
            assert self.extents
            self.extents.free(copy)

    def _conceal(self, copy: Copy) -> None:
        """Let nobody find a copy any more."""
        copy.hidden = True
        del self._shelves[copy.tier].findable[copy.digest]
        if copy.tier is Tier.SSD:
            assert self.extents
            self.extents.withdraw(copy)
        elif self._by_handle.pop(copy.handle, None):
            self.retention.remove([copy.handle])
        copy.handle = -1

    def _inherit(self, ousted: Copy) -> int:
        """Take over an ousted copy's range as it is, without a way through the free ranges."""
        self._shelves[ousted.tier].live.remove(ousted)
        ousted.memory = None
        return ousted.offset

    def _let_source_go(self, copy: Copy) -> None:
        source, copy.source = copy.source, None
        if source is not None:
            self.unpin(source)

    def _victim(self) -> Copy | None:
        """The copy in DRAM that retention lets go next; None where all are pinned.

        Retention hears of a pin only when it comes to that copy: most are never come to.
        """
        while (handle := self.retention.victim()) is not None:
            copy = self._by_handle[handle]
            if not copy.pins:
                return copy
            copy.skipped = True
            self.retention.pin([handle])
        return None

    def _oust_one(self) -> Copy | None:
        """Hide the copy in DRAM that retention lets go next, its bytes not yet freed."""
        copy = self._victim()
        if copy is not None:
            self.retention.evict(1)
            del self._by_handle[copy.handle]
            self.counters["evicted_dram"] += 1
            self._conceal(copy)
        return copy

    def _allocate_all(self, wants: Sequence[Want]) -> list[Copy] | None:
        """Allocate for every want or for none, evicting only where that is enough."""
        nbytes = sum(want.nbytes for want in wants)
        pinned_nbytes = self._shelves[Tier.DRAM].pinned_nbytes
        if nbytes > self.pool.capacity_nbytes - pinned_nbytes:
            return None
        offsets: list[int] = []
        evicted = False
        together = self.pool.allocate(nbytes)
        if together is not None:  # beside each other, so that a device copies them at once
            for want in wants:
                offsets.append(together)
                together += want.nbytes
        for want in wants[len(offsets) :]:
            offset = self.pool.allocate(want.nbytes)
            while offset is None and (ousted := self._oust_one()):
                evicted = True
                if ousted.nbytes == want.nbytes:
                    offset = self._inherit(ousted)  # as in a steady flow of equal pages
                else:
                    self._free(ousted)
                    offset = self.pool.allocate(want.nbytes)
            if offset is None:  # enough is free, in pieces too small
                for given_up, taken in zip(wants, offsets, strict=False):
                    self.pool.free(taken, given_up.nbytes)
                # What was evicted late may have joined what was taken early.
                return self._allocate_all(wants) if evicted else None
            offsets.append(offset)
        if len({want.nbytes for want in wants}) == 1:
            offsets.sort()
        return [
            self._new_copy(
                Copy(
                    want.digest,
                    want.generation,
                    Tier.DRAM,
                    offset,
                    want.nbytes,
                    self.pool.memory[offset : offset + want.nbytes],
                    want.source,
                )
            )
            for want, offset in zip(wants, offsets, strict=True)
        ]

    def _withdraw(self, granted: asyncio.Future[list[Copy]], *, urgent: bool) -> None:
        """End a wait without taking what may have been granted in the same tick."""
        if granted.done():
            for copy in granted.result():
                copy.source = None  # still the caller's to unpin
                self.unpin(copy)
        else:
            del self._waiting[urgent][granted]
            self._serve()

    def _serve(self) -> None:
        """Grant pool memory to those who wait: demand reads first, each in the order of asking."""
        for waiting in (self._waiting[True], self._waiting[False]):
            while waiting:
                granted, wants = next(iter(waiting.items()))
                copies = self._allocate_all(wants)
                if copies is None:
                    return
                del waiting[granted]
                granted.set_result(copies)


def _handles(copies: Sequence[Copy]) -> list[int]:
    return [copy.handle for copy in copies if copy.handle >= 0]
