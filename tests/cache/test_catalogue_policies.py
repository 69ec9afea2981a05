"""Catalogue and its policies, both tiers, against the same written again with plain lists."""

from __future__ import annotations

import asyncio
import functools
import itertools
import tempfile
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from orbitkv.cache.catalogue import Catalogue, Copy, Tier, Want
from orbitkv.cache.extents import ExtentStore
from orbitkv.cache.order import RetentionClass
from orbitkv.cache.pool import Pool
from orbitkv.cache.retention import Retention
from tests.builders import BLOCK, page_hash
from tests.cache.test_retention_model import PlainObject, PlainRetention

POOL_BLOCKS, SSD_BLOCKS = 6, 5
NAMES = 6
PROBATIONARY = RetentionClass.PROBATIONARY
ENDS = st.sampled_from(["resident", "resident", "leased", "hidden"])
"""How a new copy is left: findable, that and pinned, or as it was born."""
CHOICES = st.lists(st.integers(0, 2**16), min_size=1, max_size=5)


@dataclass(eq=False)
class PlainCopy:
    """What we know of one copy: a number for its name in the plain retention, and our pins."""

    number: int
    copy: Copy
    pins: int = 1
    hidden: bool = True
    source: PlainCopy | None = None

    @property
    def in_dram(self) -> bool:
        return self.copy.tier is Tier.DRAM


class CatalogueAgainstPlainLists(RuleBasedStateMachine):
    """Any sequence of calls leaves the same residents, classes, order, pins and counters."""

    compiled = False

    @initialize(
        percent=st.sampled_from([0, 80]),
        residents=st.integers(0, POOL_BLOCKS),
        on_ssd=st.integers(0, SSD_BLOCKS),
        left=st.integers(0, POOL_BLOCKS),
    )
    def open(self, percent: int, residents: int, on_ssd: int, left: int) -> None:
        self.loop = asyncio.new_event_loop()
        self.directory = tempfile.TemporaryDirectory()
        pool = Pool(POOL_BLOCKS * BLOCK, lock_memory=False)
        self.extents: ExtentStore[Copy] = ExtentStore(
            [Path(self.directory.name) / "ssd"], SSD_BLOCKS * BLOCK, persist=False
        )
        self.retention = Retention(pool.capacity_nbytes, percent, compiled=self.compiled)
        self.catalogue = Catalogue(pool, self.extents, self.retention)
        self.plain = PlainRetention(POOL_BLOCKS * percent // 100)
        self.alive: list[PlainCopy] = []
        self.counts: Counter[str] = Counter()
        self.numbers = itertools.count()
        self.waiting: asyncio.Task[list[Copy] | None] | None = None
        self.waiting_blocks = 0
        for name in range(residents):
            self.reserve([1], name, "resident")
            if name < on_ssd:
                self.write([-1], "resident")
        for name in range(left):  # so that SSD alone has some
            if each := self.findable(Tier.DRAM).get(page_hash(name)):
                self.catalogue.hide(each.copy)
                self.concealed(each)

    def teardown(self) -> None:
        if self.waiting:
            self.waiting.cancel()
            self.tick()
            self.waiting = None
        while held := [each for each in self.alive if self.ours(each)]:
            self.catalogue.unpin_all([each.copy for each in held])
            self.unpinned(held)
        self.compare()
        assert self.catalogue.leaks() == []
        self.catalogue.close()
        self.directory.cleanup()
        self.loop.close()

    # What we know ---------------------------------------------------------------------------

    def tick(self) -> None:
        async def ticks() -> None:
            for _ in range(5):
                await asyncio.sleep(0)

        self.loop.run_until_complete(ticks())

    def findable(self, tier: Tier) -> dict[bytes, PlainCopy]:
        found = [each for each in self.alive if not each.hidden and each.copy.tier is tier]
        assert len({each.copy.digest for each in found}) == len(found)
        return {each.copy.digest: each for each in found}

    def blocks_of(self, *, pinned: bool) -> int:
        """Blocks of DRAM that live, or those of them that are pinned."""
        some = [each for each in self.alive if each.in_dram and (each.pins or not pinned)]
        return sum(each.copy.nbytes for each in some) // BLOCK

    def has(self, **wanted: object) -> bool:
        return bool(self.some([0], **wanted))

    def some(self, choices: Iterable[int], **wanted: object) -> list[PlainCopy]:
        """Living copies of a kind, by numbers; one may come twice."""
        found = [
            each
            for each in self.alive
            if all(bool(getattr(each, name)) == value for name, value in wanted.items())
        ]
        return [found[choice % len(found)] for choice in choices] if found else []

    def ours(self, each: PlainCopy) -> int:
        """Pins of a copy that are not those of what is read from it."""
        return each.pins - sum(reader.source is each for reader in self.alive)

    def born(
        self, copies: Iterable[Copy], end: str = "hidden", source: PlainCopy | None = None
    ) -> None:
        new = [PlainCopy(next(self.numbers), copy, source=source) for copy in copies]
        assert all((each.copy.pins, each.copy.hidden) == (1, True) for each in new)
        self.alive += new
        if end != "hidden":
            self.admitted(new)
        if end == "resident":
            self.catalogue.unpin_all([each.copy for each in new])
            self.unpinned(new)

    def admitted(self, chosen: Iterable[PlainCopy]) -> None:
        admitted = self.catalogue.admit_all([each.copy for each in chosen])
        expected = []
        for each in chosen:
            source, each.source = each.source, None
            if source:
                self.unpinned([source])
            resident = self.findable(each.copy.tier).get(each.copy.digest)
            if resident is None:
                expected.append(each.copy)
                each.hidden = False
                if each.in_dram:
                    blocks = each.copy.nbytes // BLOCK
                    self.plain.lists[PROBATIONARY].append(
                        PlainObject(each.number, blocks, pinned=True)
                    )
            elif resident is not each:
                self.counts[f"duplicate_{each.copy.tier}"] += 1
        assert admitted == expected

    def unpinned(self, several: Iterable[PlainCopy]) -> None:
        for each in several:
            each.pins -= 1
            self.plain_pins(each)
            self.bury(each)

    def plain_pins(self, each: PlainCopy) -> None:
        if each.in_dram and not each.hidden:
            self.plain.pin([each.number], pinned=bool(each.pins))

    def bury(self, each: PlainCopy) -> None:
        """What is hidden and has no pin is gone, and so is its pin on what it was read from."""
        if each.hidden and not each.pins and each in self.alive:
            self.alive.remove(each)
            source, each.source = each.source, None
            if source:
                self.unpinned([source])

    def concealed(self, each: PlainCopy) -> None:
        if not each.hidden:
            if each.in_dram:
                self.plain.remove([each.number])
            each.hidden = True
            self.bury(each)

    def evicted(self, wanted_blocks: int | None) -> None:
        """Let go what an allocation has evicted: the first in order, and none too many."""
        gone = {each.number for each in self.alive if each.copy.hidden and not each.hidden}
        free = POOL_BLOCKS - self.blocks_of(pinned=False)
        if wanted_blocks is not None:
            assert len(gone) <= max(0, wanted_blocks - free)
        order = [number for _ in gone for number in self.plain.evict(1)]
        assert set(order) == gone, "another one should have gone"
        for each in [each for each in self.alive if each.number in gone]:
            assert not each.pins, "evicted under its reader"
            each.hidden = True
            self.bury(each)
        self.counts["evicted_dram"] += len(gone)

    def served(self) -> None:
        """Take what one who waits was granted; he waits only while too much is pinned."""
        if self.waiting is None:
            return
        self.tick()
        if not self.waiting.done():
            assert self.waiting_blocks > POOL_BLOCKS - self.blocks_of(pinned=True)
            return
        copies = self.waiting.result()
        assert copies
        self.evicted(self.waiting_blocks)
        self.born(copies)
        self.waiting = None

    # What is done ---------------------------------------------------------------------------

    def reserved(self, wants: list[Want], end: str, source: PlainCopy | None = None) -> bool:
        blocks = sum(each.nbytes for each in wants) // BLOCK
        fits = blocks <= POOL_BLOCKS - self.blocks_of(pinned=True) and self.waiting is None
        copies = self.loop.run_until_complete(
            self.catalogue.reserve_dram(wants, urgent=False, wait_s=0)
        )
        if copies is None:
            self.counts["pool_wait_expired"] += 1
            assert not fits or max(each.nbytes for each in wants) > BLOCK, "there was room"
        else:
            assert fits
        pieces = any(each.nbytes > BLOCK for each in wants)
        self.evicted((None if pieces else blocks) if fits else 0)
        self.born(copies or (), end, source)
        return copies is not None

    @rule(
        blocks=st.lists(st.sampled_from([1, 1, 1, 2]), min_size=1, max_size=3),
        first=st.integers(0, NAMES),
        end=ENDS,
    )
    def reserve(self, blocks: list[int], first: int, end: str) -> None:
        wants = [
            Want(page_hash((first + at) % NAMES), count * BLOCK, self.catalogue.next_generation())
            for at, count in enumerate(blocks)
        ]
        self.reserved(wants, end)

    @precondition(lambda self: self.waiting is None)
    @rule(blocks=st.integers(1, POOL_BLOCKS), first=st.integers(0, NAMES))
    def wait_for_memory(self, blocks: int, first: int) -> None:
        if any(each.source for each in self.alive):
            return
        wants = [
            Want(page_hash((first + at) % NAMES), BLOCK, self.catalogue.next_generation())
            for at in range(blocks)
        ]
        self.waiting_blocks = blocks
        self.waiting = self.loop.create_task(self.catalogue.reserve_dram(wants, urgent=False))
        self.served()

    @precondition(lambda self: self.waiting is None and self.has(in_dram=False, hidden=False))
    @rule(choices=CHOICES, end=ENDS)
    def read(self, choices: list[int], end: str) -> None:
        """As U does: the source's pin is the new copy's, until that is admitted or freed."""
        for source in self.some(choices[:1], in_dram=False, hidden=False):
            self.catalogue.pin(source.copy)
            source.pins += 1
            generation = self.catalogue.next_generation()
            want = Want(source.copy.digest, source.copy.nbytes, generation, source.copy)
            if not self.reserved([want], end, source):
                self.catalogue.unpin(source.copy)
                self.unpinned([source])

    @precondition(lambda self: self.has(in_dram=True, hidden=False))
    @rule(choices=CHOICES, end=ENDS)
    def write(self, choices: list[int], end: str) -> None:
        for source in self.some(choices[:1], in_dram=True, hidden=False):
            generation = self.catalogue.next_generation()
            want = Want(source.copy.digest, source.copy.nbytes, generation)
            extent = self.catalogue.reserve_ssd(want)
            for each in [e for e in self.alive if e.copy.hidden and not e.hidden]:
                assert not each.in_dram
                assert not each.pins, "overwritten under its reader"
                self.concealed(each)
                self.counts["evicted_ssd"] += 1
            self.born([extent] if extent else (), end)

    @precondition(lambda self: self.has(hidden=True))
    @rule(choices=CHOICES, in_dram=st.booleans())
    def admit(self, choices: list[int], *, in_dram: bool) -> None:
        self.admitted(self.some(choices, in_dram=in_dram, hidden=True))

    @precondition(lambda self: self.has(hidden=False))
    @rule(choices=CHOICES)
    def pin(self, choices: list[int]) -> None:
        chosen = [each for each in self.some(choices) if each.pins or not each.hidden]
        self.catalogue.pin_all([each.copy for each in chosen])
        for each in chosen:
            each.pins += 1
            self.plain_pins(each)

    @precondition(lambda self: self.has(pins=True))
    @rule(choices=CHOICES, one_by_one=st.booleans())
    def unpin(self, choices: list[int], *, one_by_one: bool) -> None:
        chosen = self.some(choices, pins=True)
        held = [e for at, e in enumerate(chosen) if chosen[:at].count(e) < self.ours(e)]
        if one_by_one:
            for each in held:
                self.catalogue.unpin(each.copy)
                self.unpinned([each])
                self.served()
        else:
            self.catalogue.unpin_all([each.copy for each in held])
            self.unpinned(held)
            self.served()

    @rule()
    def unpin_residents(self) -> None:
        """All at once, as leases end, so that eviction has some to choose from."""
        residents = [each for each in self.alive if not each.hidden]
        several = [each for each in residents for _ in range(self.ours(each))]
        self.catalogue.unpin_all([each.copy for each in several])
        self.unpinned(several)
        self.served()

    @precondition(lambda self: self.has(hidden=False))
    @rule(choices=CHOICES, name=st.sampled_from(["look_up", "touch", "reclaim"]))
    def use(self, choices: list[int], name: str) -> None:
        """Of either tier, findable or not: what is hidden or on SSD has no place in the order."""
        chosen = self.some(choices)
        getattr(self.catalogue, name)([each.copy for each in chosen])
        listed = [each.number for each in chosen if each.in_dram and not each.hidden]
        getattr(self.plain, name)(listed)

    @precondition(lambda self: self.has(hidden=False))
    @rule(choices=CHOICES, corrupt=st.booleans())
    def hide(self, choices: list[int], *, corrupt: bool) -> None:
        for each in self.some(choices[:1]):
            if corrupt:
                self.catalogue.hide_corrupt(each.copy)
                self.counts[f"corrupt_{each.copy.tier}"] += 1
            else:
                self.catalogue.hide(each.copy)
            self.concealed(each)
            self.served()

    @rule(name=st.integers(0, NAMES - 1))
    def hide_everywhere(self, name: int) -> None:
        self.catalogue.hide_everywhere(page_hash(name))
        for tier in Tier:
            if each := self.findable(tier).get(page_hash(name)):
                self.concealed(each)
        self.served()

    @rule(tier=st.sampled_from(Tier))
    def evict_unpinned(self, tier: Tier) -> None:
        gone = [each for each in self.findable(tier).values() if not each.pins]
        nbytes = sum(each.copy.nbytes for each in gone)
        assert self.catalogue.evict_unpinned(tier) == nbytes
        self.counts[f"evicted_{tier}"] += len(gone)
        for each in gone:
            self.concealed(each)

    @rule()
    def look_at_the_victim(self) -> None:
        """Who would go next; who is passed for that stays where he was."""
        found, victim = self.plain.victim(), self.catalogue._victim()
        seen = next((each.number for each in self.alive if each.copy is victim), None)
        assert seen == (found[1].handle if found else None)

    @rule(names=st.lists(st.integers(0, NAMES - 1), max_size=6))
    def query(self, names: list[int]) -> None:
        dram, ssd = self.findable(Tier.DRAM), self.findable(Tier.SSD)
        digests = [page_hash(name) for name in names]
        nearest = [dram.get(digest) or ssd.get(digest) for digest in digests]
        run = [each.copy for each in itertools.takewhile(bool, nearest) if each]
        assert self.catalogue.find_run(digests, tuple(Tier)) == run
        in_dram = [each.copy for each in itertools.takewhile(bool, map(dram.get, digests)) if each]
        assert self.catalogue.find_run(digests, (Tier.DRAM,)) == in_dram

    # What is to be equal --------------------------------------------------------------------

    @invariant()
    def compare(self) -> None:
        catalogue, plain = self.catalogue, self.plain
        by_number = {each.number: each for each in self.alive}
        listed = [by_number[e.handle].copy for kind in RetentionClass for e in plain.lists[kind]]
        assert list(catalogue.copies(Tier.DRAM)) == listed
        for tier in Tier:
            residents = {digest: each.copy for digest, each in self.findable(tier).items()}
            assert {copy.digest: copy for copy in catalogue.copies(tier)} == residents
            assert all(catalogue.find(digest, tier) is copy for digest, copy in residents.items())
            held = [each.copy for each in self.alive if each.pins and each.copy.tier is tier]
            shelf = catalogue._shelves[tier]
            assert shelf.pinned_nbytes == sum(copy.nbytes for copy in held)
            assert shelf.live == {each.copy for each in self.alive if each.copy.tier is tier}
        for each in self.alive:
            assert (each.copy.pins, each.copy.hidden) == (each.pins, each.hidden)
            assert (each.copy.handle >= 0) == (each.in_dram and not each.hidden)
            assert (each.copy.memory is not None) == each.in_dram
        assert catalogue.pool.used_nbytes == self.blocks_of(pinned=False) * BLOCK
        statistics = self.retention.statistics()
        for kind, residents_of in plain.lists.items():
            handles = self.retention.in_order(kind).tolist()
            assert [catalogue._by_handle[h] for h in handles] == [
                by_number[each.handle].copy for each in residents_of
            ]
            assert statistics.resident_nbytes[kind] == plain.blocks_of(kind) * BLOCK
        assert statistics.evicted == plain.evicted
        assert {name: getattr(statistics, name) for name in plain.counts} == plain.counts
        assert statistics.stale == 0, "the catalogue keeps no reference to what has left"
        assert statistics.protected_nbytes <= plain.limit_blocks * BLOCK
        assert +catalogue.counters == +self.counts


class CompiledCatalogueAgainstPlainLists(CatalogueAgainstPlainLists):
    """The same, compiled."""

    compiled = True


_SETTINGS = functools.partial(settings, stateful_step_count=50, deadline=None)
TestCatalogueAgainstPlainLists = CatalogueAgainstPlainLists.TestCase
TestCatalogueAgainstPlainLists.settings = _SETTINGS(max_examples=120)
TestCompiledCatalogueAgainstPlainLists = CompiledCatalogueAgainstPlainLists.TestCase
TestCompiledCatalogueAgainstPlainLists.settings = _SETTINGS(max_examples=40)
