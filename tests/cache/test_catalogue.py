"""Catalogue: what is findable stands, what is pinned stays, and who waits is served in turn."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from orbitkv.cache.catalogue import Catalogue, Copy, Tier, Want
from orbitkv.cache.extents import ExtentStore
from orbitkv.cache.pool import Pool
from orbitkv.errors import Cancelled, ImpossibleRequest
from tests.builders import BLOCK, page_hash
from tests.cache.holders import checkpoint, kill

BLOCKS = 8


def opened(extents: ExtentStore[Copy] | None = None, *, blocks: int = BLOCKS) -> Catalogue:
    return Catalogue(Pool(blocks * BLOCK, lock_memory=False), extents)


def want(name: object, blocks: int = 1, source: Copy | None = None) -> Want:
    return Want(page_hash(name), blocks * BLOCK, 1, source)


async def reserved(catalogue: Catalogue, *wants: Want) -> list[Copy]:
    copies = await catalogue.reserve_dram(wants, urgent=False)
    assert copies is not None
    return copies


async def admitted(catalogue: Catalogue, name: object, blocks: int = 1) -> Copy:
    """A findable copy that nobody reads."""
    (copy,) = await reserved(catalogue, want(name, blocks))
    assert catalogue.admit(copy)
    catalogue.unpin(copy)
    return copy


async def settle() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


@pytest.fixture
def extents(ssd_path: Path) -> Iterator[ExtentStore[Copy]]:
    store: ExtentStore[Copy] = ExtentStore([ssd_path], BLOCKS * BLOCK, persist=False)
    yield store
    store.close()


def test_reserved_copy_is_not_findable_before_it_is_admitted() -> None:
    async def scenario() -> None:
        catalogue = opened()
        (copy,) = await reserved(catalogue, want("a"))
        assert catalogue.find(copy.digest, Tier.DRAM) is None
        assert not catalogue.is_resident(copy.digest)
        assert catalogue.admit(copy)
        assert catalogue.find(copy.digest, Tier.DRAM) is copy
        assert catalogue.is_resident(copy.digest)
        catalogue.unpin(copy)
        assert catalogue.leaks() == []

    asyncio.run(scenario())


def test_copy_that_was_never_admitted_is_freed_with_its_last_pin() -> None:
    async def scenario() -> None:
        catalogue = opened()
        (copy,) = await reserved(catalogue, want("a", 3))
        catalogue.pin(copy)
        catalogue.unpin(copy)
        assert catalogue.pool.used_nbytes == 3 * BLOCK
        catalogue.unpin(copy)
        assert catalogue.pool.used_nbytes == 0
        assert copy.memory is None

    asyncio.run(scenario())


def test_second_copy_of_one_object_stays_hidden_and_is_counted() -> None:
    async def scenario() -> None:
        catalogue = opened()
        first = await admitted(catalogue, "a")
        (second,) = await reserved(catalogue, want("a"))
        assert not catalogue.admit(second)
        assert catalogue.find(first.digest, Tier.DRAM) is first
        catalogue.unpin(second)
        assert catalogue.pool.used_nbytes == BLOCK
        assert catalogue.counters["duplicate_dram"] == 1

    asyncio.run(scenario())


def test_eviction_takes_the_least_recently_used_that_nobody_reads() -> None:
    async def scenario() -> None:
        catalogue = opened(blocks=4)
        old, pinned, touched, young = [await admitted(catalogue, name) for name in range(4)]
        catalogue.pin(pinned)
        catalogue.touch([touched])
        catalogue.touch([old])
        catalogue.touch([pinned])  # the order is now: young, touched, old, pinned
        first, second = await reserved(catalogue, want("x"), want("y"))
        assert [copy.hidden for copy in (old, pinned, touched, young)] == [0, 0, 1, 1]
        assert catalogue.counters["evicted_dram"] == 2
        for copy in (pinned, first, second):
            catalogue.unpin(copy)
        assert catalogue.leaks() == []

    asyncio.run(scenario())


def test_copies_pinned_at_once_stay_until_each_was_unpinned_as_often() -> None:
    async def scenario() -> None:
        catalogue = opened(blocks=3)
        twice, once, free = [await admitted(catalogue, name) for name in range(3)]
        catalogue.pin_all([twice, once, twice])
        assert (twice.pins, once.pins, free.pins) == (2, 1, 0)
        assert await catalogue.reserve_dram([want("x", 2)], urgent=False, wait_s=0) is None
        waiting = asyncio.create_task(catalogue.reserve_dram([want("x", 2)], urgent=False))
        catalogue.unpin_all([twice])
        await settle()
        assert not waiting.done()
        assert not any(copy.hidden for copy in (twice, once, free)), "nothing goes in vain"
        catalogue.unpin_all([once, twice])
        (copy,) = await waiting or ()
        assert [copy.hidden for copy in (twice, once, free)] == [True, True, False]
        catalogue.unpin(copy)
        assert catalogue.leaks() == []

    asyncio.run(scenario())


def test_unpinning_what_is_not_pinned_is_a_bug() -> None:
    async def scenario() -> None:
        catalogue = opened()
        copy = await admitted(catalogue, "a")
        with pytest.raises(AssertionError, match="more often than pinned"):
            catalogue.unpin(copy)

    asyncio.run(scenario())


def test_a_run_ends_at_the_first_object_that_no_tier_has(extents: ExtentStore[Copy]) -> None:
    async def scenario() -> None:
        catalogue = opened(extents)
        first, both = await admitted(catalogue, 0), await admitted(catalogue, 1)
        on_ssd(catalogue, 1)
        third = on_ssd(catalogue, 2)
        await admitted(catalogue, 4)
        asked = iter([page_hash(name) for name in (0, 1, 2, 3, 4)])
        found = catalogue.find_run(asked, [Tier.DRAM, Tier.SSD])
        assert found == [first, both, third], "the nearest of each"
        assert next(asked) == page_hash(4), "what comes behind is not looked at"
        digests = [page_hash(name) for name in (0, 1, 2)]
        assert catalogue.find_run(digests, [Tier.DRAM]) == [first, both]
        assert catalogue.find_run(digests[2:], [Tier.DRAM]) == []

    asyncio.run(scenario())


def test_request_larger_than_the_pool_is_refused_at_once() -> None:
    async def scenario() -> None:
        catalogue = opened()
        with pytest.raises(ImpossibleRequest, match=f"{9 * BLOCK} bytes .* is {BLOCKS * BLOCK}"):
            await catalogue.reserve_dram([want("a", 8), want("b")], urgent=True)

    asyncio.run(scenario())


def test_nothing_is_evicted_for_a_request_that_would_not_fit_all_the_same() -> None:
    async def scenario() -> None:
        catalogue = opened()
        await admitted(catalogue, "resident", 3)
        (reader,) = await reserved(catalogue, want("read", 4))
        waiting = asyncio.create_task(
            catalogue.reserve_dram([want("large", 6)], urgent=False, wait_s=0.01)
        )
        assert await waiting is None
        assert catalogue.find(page_hash("resident"), Tier.DRAM)
        assert catalogue.counters["evicted_dram"] == 0
        assert catalogue.counters["pool_wait_expired"] == 1
        catalogue.unpin(reader)
        assert catalogue.leaks() == []

    asyncio.run(scenario())


def test_all_wants_are_granted_or_none() -> None:
    """Enough is free, but pinned copies leave it in pieces that are too small."""

    async def scenario() -> None:
        catalogue = opened()
        copies = [(await reserved(catalogue, want(index)))[0] for index in range(BLOCKS)]
        for copy in copies[::2]:
            catalogue.unpin(copy)
        assert catalogue.pool.used_nbytes == BLOCKS // 2 * BLOCK
        waiting = asyncio.create_task(
            catalogue.reserve_dram([want("small"), want("large", 2)], urgent=True)
        )
        await settle()
        assert not waiting.done()
        assert catalogue.pool.used_nbytes == BLOCKS // 2 * BLOCK
        catalogue.unpin(copies[1])
        await settle()
        granted = waiting.result()
        assert granted is not None
        for copy in (*granted, *copies[3::2]):
            catalogue.unpin(copy)
        assert catalogue.leaks() == []
        assert catalogue.pool.used_nbytes == 0

    asyncio.run(scenario())


def test_request_that_fits_never_waits_where_nothing_is_read() -> None:
    """What is evicted one by one leaves holes beside what was just allocated; then begin anew."""

    async def scenario() -> None:
        catalogue = opened()
        await admitted(catalogue, "resident")
        request = catalogue.reserve_dram(
            [want("a"), want("b", 3), want("c", 4)], urgent=False, wait_s=0.01
        )
        copies = await request
        assert copies is not None, "the whole pool is free, and the request waits for ever"
        for copy in copies:
            catalogue.unpin(copy)
        assert catalogue.leaks() == []

    asyncio.run(scenario())


def test_waiters_are_served_urgent_first_and_each_kind_in_the_order_of_asking() -> None:
    async def scenario() -> None:
        catalogue = opened(blocks=1)
        (held,) = await reserved(catalogue, want("held"))
        order: list[str] = []

        async def wait(name: str, *, urgent: bool) -> None:
            copies = await catalogue.reserve_dram([want(name)], urgent=urgent)
            assert copies is not None
            order.append(name)
            catalogue.unpin(copies[0])

        tasks = []
        for name in ("save 1", "read 1", "save 2", "read 2"):
            tasks.append(asyncio.create_task(wait(name, urgent=name.startswith("read"))))
            await settle()
        catalogue.unpin(held)
        await asyncio.gather(*tasks)
        assert order == ["read 1", "read 2", "save 1", "save 2"]
        assert catalogue.leaks() == []

    asyncio.run(scenario())


def test_save_does_not_overtake_a_waiting_demand_read() -> None:
    async def scenario() -> None:
        catalogue = opened(blocks=3)
        (held,) = await reserved(catalogue, want("held", 2))
        read = asyncio.create_task(catalogue.reserve_dram([want("read", 2)], urgent=True))
        await settle()
        save = asyncio.create_task(catalogue.reserve_dram([want("save")], urgent=False))
        await settle()
        assert not save.done(), "a block is free, but a demand read waits for two"
        catalogue.unpin(held)
        await settle()
        for task in (read, save):
            (copy,) = task.result() or ()
            catalogue.unpin(copy)
        assert catalogue.leaks() == []

    asyncio.run(scenario())


def test_expired_wait_lets_those_behind_it_go() -> None:
    async def scenario() -> None:
        catalogue = opened(blocks=3)
        (held,) = await reserved(catalogue, want("held", 2))
        read = asyncio.create_task(
            catalogue.reserve_dram([want("read", 2)], urgent=True, wait_s=0.01)
        )
        await asyncio.sleep(0)
        save = asyncio.create_task(catalogue.reserve_dram([want("save")], urgent=False))
        assert await read is None
        (copy,) = await save or ()
        catalogue.unpin(copy)
        catalogue.unpin(held)
        assert catalogue.leaks() == []

    asyncio.run(scenario())


def test_wait_of_no_time_ends_without_memory_and_takes_it_where_there_is_some() -> None:
    async def scenario() -> None:
        catalogue = opened(blocks=1)
        (held,) = await catalogue.reserve_dram([want("held")], urgent=True, wait_s=0) or ()
        assert await catalogue.reserve_dram([want("b")], urgent=True, wait_s=0) is None
        catalogue.unpin(held)
        assert catalogue.leaks() == []

    asyncio.run(scenario())


def test_waiter_cancelled_in_the_tick_of_its_grant_leaks_nothing() -> None:
    async def scenario() -> None:
        catalogue = opened(blocks=1)
        (held,) = await reserved(catalogue, want("held"))
        waiting = asyncio.create_task(catalogue.reserve_dram([want("b")], urgent=False))
        await settle()
        catalogue.unpin(held)
        waiting.cancel()
        await settle()
        assert waiting.cancelled()
        assert catalogue.leaks() == []
        assert catalogue.pool.used_nbytes == 0

    asyncio.run(scenario())


@pytest.mark.parametrize("granted_too", [False, True])
def test_request_cancelled_while_it_waits_gives_up_its_turn_and_what_it_was_granted(
    *, granted_too: bool
) -> None:
    async def scenario() -> None:
        catalogue = opened(blocks=2)
        (held,) = await reserved(catalogue, want("held", 2))
        cancelled = asyncio.get_running_loop().create_future()
        first = asyncio.create_task(
            catalogue.reserve_dram([want("a", 2)], urgent=False, cancellation=lambda: cancelled)
        )
        await settle()
        second = asyncio.create_task(catalogue.reserve_dram([want("b")], urgent=False))
        await settle()
        if granted_too:
            catalogue.unpin(held)
        cancelled.set_result(None)
        await settle()
        with pytest.raises(Cancelled):
            first.result()
        if not granted_too:
            assert not second.done()
            catalogue.unpin(held)
            await settle()
        (copy,) = second.result() or ()
        catalogue.unpin(copy)
        assert catalogue.leaks() == []
        assert catalogue.pool.used_nbytes == 0

    asyncio.run(scenario())


def test_source_of_a_cancelled_read_stays_with_its_caller(extents: ExtentStore[Copy]) -> None:
    async def scenario() -> None:
        catalogue = opened(extents, blocks=1)
        origin = await admitted(catalogue, "a")
        source = catalogue.reserve_ssd(want("a"))
        assert source
        catalogue.admit(source)  # and its pin is the reader's from here
        catalogue.pin(origin)
        waiting = asyncio.create_task(
            catalogue.reserve_dram([want("a", source=source)], urgent=True)
        )
        await settle()
        catalogue.unpin(origin)
        waiting.cancel()  # granted, and never taken
        await settle()
        assert source.pins == 1
        catalogue.unpin(source)
        assert catalogue.leaks() == []

    asyncio.run(scenario())


@pytest.mark.parametrize("admit", [True, False])
def test_loaded_copy_holds_its_source_until_it_is_admitted_or_freed(
    extents: ExtentStore[Copy], *, admit: bool
) -> None:
    async def scenario() -> None:
        catalogue = opened(extents)
        origin = await admitted(catalogue, "a")
        source = catalogue.reserve_ssd(want("a"))
        assert source
        catalogue.admit(source)
        catalogue.hide(origin)
        (loaded,) = await reserved(catalogue, want("a", source=source))
        catalogue.hide(source)
        assert extents.used_nbytes == BLOCK, "the extent is being read"
        if admit:
            catalogue.admit(loaded)
        else:
            catalogue.unpin(loaded)
        assert extents.used_nbytes == 0
        if admit:
            catalogue.unpin(loaded)
        assert catalogue.leaks() == []

    asyncio.run(scenario())


def test_hidden_copy_keeps_its_bytes_for_the_reader_that_has_it() -> None:
    async def scenario() -> None:
        catalogue = opened()
        copy = await admitted(catalogue, "a")
        catalogue.pin(copy)
        assert copy.memory is not None
        copy.memory[:] = 9
        catalogue.hide_corrupt(copy)
        catalogue.hide(copy)  # harmless
        assert catalogue.find(copy.digest, Tier.DRAM) is None
        others = await reserved(catalogue, want("b", BLOCKS - 1))
        assert others[0].memory is not None
        others[0].memory[:] = 1
        assert (copy.memory == 9).all()
        catalogue.unpin(copy)
        catalogue.unpin(others[0])
        assert catalogue.counters["corrupt_dram"] == 1
        assert catalogue.leaks() == []

    asyncio.run(scenario())


def test_shrunk_copy_gives_its_end_back_to_those_who_wait() -> None:
    async def scenario() -> None:
        catalogue = opened(blocks=4)
        (copy,) = await reserved(catalogue, want("a", 4))
        waiting = asyncio.create_task(catalogue.reserve_dram([want("b", 3)], urgent=False))
        await settle()
        assert not waiting.done()
        catalogue.shrink(copy, BLOCK)
        await settle()
        (other,) = waiting.result() or ()
        assert copy.memory is not None
        assert copy.nbytes == copy.memory.nbytes == BLOCK
        catalogue.unpin(copy)
        catalogue.unpin(other)
        assert catalogue.leaks() == []

    asyncio.run(scenario())


def test_ssd_extent_is_refused_where_all_is_read_and_else_evicts(
    extents: ExtentStore[Copy],
) -> None:
    async def scenario() -> None:
        catalogue = opened(extents)
        held = [catalogue.reserve_ssd(want(name, BLOCKS // 2)) for name in "ab"]
        assert all(held)
        third = want("c", BLOCKS // 2)
        assert catalogue.reserve_ssd(third) is None
        for copy in held:
            assert copy
            catalogue.admit(copy)
            catalogue.unpin(copy)
        extent = catalogue.reserve_ssd(third)
        assert extent
        assert catalogue.find(page_hash("a"), Tier.SSD) is None
        assert catalogue.find(page_hash("b"), Tier.SSD)
        assert catalogue.counters["evicted_ssd"] == 1
        catalogue.unpin(extent)
        assert catalogue.leaks() == []

    asyncio.run(scenario())


def test_evicting_all_leaves_what_is_read() -> None:
    async def scenario() -> None:
        catalogue = opened()
        kept, gone = await admitted(catalogue, "kept", 2), await admitted(catalogue, "gone", 3)
        catalogue.pin(kept)
        assert catalogue.evict_unpinned(Tier.DRAM) == 3 * BLOCK
        assert catalogue.copies(Tier.DRAM) == (kept,)
        assert gone.hidden
        catalogue.unpin(kept)
        assert catalogue.evict_unpinned(Tier.DRAM) == 2 * BLOCK
        assert catalogue.pool.used_nbytes == 0

    asyncio.run(scenario())


def on_ssd(catalogue: Catalogue, name: object, blocks: int = 1) -> Copy:
    """A findable copy on SSD that nobody reads."""
    generation = catalogue.next_generation()
    extent = catalogue.reserve_ssd(Want(page_hash(name), blocks * BLOCK, generation))
    assert extent
    assert catalogue.admit(extent)
    catalogue.unpin(extent)
    return extent


@pytest.mark.parametrize("end", [Catalogue.close, lambda catalogue: kill(catalogue.extents)])
def test_generations_are_never_used_twice(
    ssd_path: Path, end: Callable[[Catalogue], object]
) -> None:
    """Not even those that a killed manager used after its last checkpoint."""
    seen: set[int] = set()
    for name in range(3):
        catalogue = opened(ExtentStore([ssd_path], BLOCKS * BLOCK, persist=True))
        assert catalogue.leaks() == []
        for _ in range(3):
            generation = on_ssd(catalogue, (name, len(seen))).generation
            assert generation not in seen
            seen.add(generation)
        end(catalogue)


def test_recovered_objects_are_findable_and_overwritten_in_their_turn(ssd_path: Path) -> None:
    catalogue = opened(ExtentStore([ssd_path], 4 * BLOCK, persist=True))
    copies = [on_ssd(catalogue, name) for name in range(5)]
    catalogue.close()
    again = opened(ExtentStore([ssd_path], 4 * BLOCK, persist=True))
    for copy in copies[1:]:
        found = again.find(copy.digest, Tier.SSD)
        assert found
        assert (found.generation, found.offset) == (copy.generation, copy.offset)
        assert found.pins == 0
    on_ssd(again, "next")
    assert again.find(copies[1].digest, Tier.SSD) is None
    assert again.find(copies[2].digest, Tier.SSD)
    assert again.counters["evicted_ssd"] == 1
    assert again.leaks() == []
    again.close()


def test_object_that_two_shards_name_is_taken_once(tmp_path: Path) -> None:
    """Each was a store of its own before."""
    for name in "ab":
        catalogue = opened(ExtentStore([tmp_path / name], 4 * BLOCK, persist=True))
        on_ssd(catalogue, "twice")
        on_ssd(catalogue, name)
        catalogue.close()
    store: ExtentStore[Copy] = ExtentStore(
        [tmp_path / "a", tmp_path / "b"], 8 * BLOCK, persist=True
    )
    both = opened(store)
    assert len(both.copies(Tier.SSD)) == 3
    assert store.used_nbytes == 3 * BLOCK
    assert both.leaks() == []
    both.close()


def test_corrupt_generation_is_reclaimed_when_its_last_lease_ends(
    extents: ExtentStore[Copy],
) -> None:
    catalogue = opened(extents)
    corrupt = on_ssd(catalogue, "corrupt", 2)
    for _ in range(2):
        catalogue.pin(corrupt)
    catalogue.hide_corrupt(corrupt)
    assert catalogue.find(corrupt.digest, Tier.SSD) is None
    repaired = on_ssd(catalogue, "corrupt", 2)
    assert repaired.offset == 2 * BLOCK
    on_ssd(catalogue, "fills", 4)
    catalogue.unpin(corrupt)
    assert extents.used_nbytes == BLOCKS * BLOCK
    for blocks in (1, 2, 4, BLOCKS):
        lost = catalogue.reserve_ssd(want("over it", blocks))
        assert lost is None, "it is being read"
    catalogue.unpin(corrupt)
    assert extents.used_nbytes == (BLOCKS - 2) * BLOCK
    assert on_ssd(catalogue, "in its place").offset == corrupt.offset
    assert catalogue.find(repaired.digest, Tier.SSD) is repaired
    assert catalogue.leaks() == []


def test_hidden_object_is_not_in_the_next_checkpoint(ssd_path: Path) -> None:
    store: ExtentStore[Copy] = ExtentStore([ssd_path], BLOCKS * BLOCK, persist=True)
    catalogue = opened(store)
    corrupt, sound = on_ssd(catalogue, "corrupt"), on_ssd(catalogue, "sound")
    catalogue.pin(corrupt)
    catalogue.hide_corrupt(corrupt)
    checkpoint(store)
    kill(store)
    again = opened(ExtentStore([ssd_path], BLOCKS * BLOCK, persist=True))
    assert [copy.digest for copy in again.copies(Tier.SSD)] == [sound.digest]
    again.close()


class Waiter(NamedTuple):
    number: int
    urgent: bool
    blocks: int
    task: asyncio.Task[list[Copy] | None]


class CatalogueAgainstModel(RuleBasedStateMachine):
    """Any sequence of what its users do, with waiters that come, go, and are cancelled."""

    def __init__(self) -> None:
        super().__init__()
        self.loop = asyncio.new_event_loop()
        self.catalogue = opened()
        self.pins: dict[Copy, int] = {}  # the model: what we hold, until it is gone
        self.stamps: dict[Copy, int] = {}
        self.waiters: list[Waiter] = []
        self.granted = {True: 0, False: 0}  # the latest of each kind, by the order of asking
        self.asked = 0
        self.next_stamp = 1

    def teardown(self) -> None:
        for waiter in self.waiters:
            waiter.task.cancel()
        self._ticks(10)
        self._collect()
        for copy, pins in list(self.pins.items()):
            for _ in range(pins):
                self.catalogue.unpin(copy)
        self._ticks(10)
        assert self.catalogue.leaks() == []
        self.catalogue.evict_unpinned(Tier.DRAM)
        assert self.catalogue.pool.used_nbytes == 0
        self.loop.close()

    def _ticks(self, count: int) -> None:
        async def ticks() -> None:
            for _ in range(count):
                await asyncio.sleep(0)

        self.loop.run_until_complete(ticks())

    def _collect(self) -> None:
        """Take over what was granted."""
        for waiter in [w for w in self.waiters if w.task.done()]:
            self.waiters.remove(waiter)
            if waiter.task.cancelled():
                continue
            self.granted[waiter.urgent] = max(self.granted[waiter.urgent], waiter.number)
            for copy in waiter.task.result() or ():
                self._own(copy)

    def _own(self, copy: Copy) -> None:
        assert copy.hidden
        assert copy.pins == 1
        assert copy.memory is not None
        self.pins[copy] = 1
        self.stamps[copy] = self.next_stamp % 251
        copy.memory[:] = self.stamps[copy]
        self.next_stamp += 1

    def _pick(self, choice: int, *, hidden: bool | None = None, held: bool = True) -> Copy | None:
        found = [
            copy
            for copy, pins in self.pins.items()
            if (pins > 0 or not held) and hidden in (None, copy.hidden)
        ]
        return found[choice % len(found)] if found else None

    choices = st.integers(0, 2**16)

    @rule(
        blocks=st.lists(st.integers(1, 4), min_size=1, max_size=3),
        urgent=st.booleans(),
        name=st.integers(0, 5),
    )
    def reserve(self, blocks: list[int], *, urgent: bool, name: int) -> None:
        wants = [want((name, index), count) for index, count in enumerate(blocks)]
        if sum(blocks) > BLOCKS:
            return
        self.asked += 1
        task = self.loop.create_task(self.catalogue.reserve_dram(wants, urgent=urgent))
        self.waiters.append(Waiter(self.asked, urgent, sum(blocks), task))

    @rule(count=st.integers(1, 3))
    def tick(self, count: int) -> None:
        self._ticks(count)
        self._collect()

    @precondition(lambda self: self.waiters)
    @rule(choice=choices)
    def cancel(self, choice: int) -> None:
        self.waiters[choice % len(self.waiters)].task.cancel()

    @rule(choice=choices)
    def admit(self, choice: int) -> None:
        copy = self._pick(choice, hidden=True)
        if copy is None:
            return
        taken = self.catalogue.find(copy.digest, Tier.DRAM)
        assert self.catalogue.admit(copy) == (taken is None)

    @rule(choice=choices, blocks=st.integers(1, 3))
    def shrink(self, choice: int, blocks: int) -> None:
        copy = self._pick(choice, hidden=True)
        if copy and blocks * BLOCK <= copy.nbytes:
            self.catalogue.shrink(copy, blocks * BLOCK)

    @rule(choice=choices)
    def pin(self, choice: int) -> None:
        copy = self._pick(choice, held=False)
        if copy and (self.pins[copy] or not copy.hidden):
            self.catalogue.pin(copy)
            self.pins[copy] += 1

    @rule(choice=choices)
    def unpin(self, choice: int) -> None:
        if copy := self._pick(choice):
            self.pins[copy] -= 1
            self.catalogue.unpin(copy)

    @rule(choice=choices)
    def hide(self, choice: int) -> None:
        if copy := self._pick(choice, held=False):
            self.catalogue.hide(copy)

    @rule(choice=choices)
    def touch(self, choice: int) -> None:
        if copy := self._pick(choice, held=False):
            self.catalogue.touch([copy])

    @rule()
    def evict(self) -> None:
        self.catalogue.evict_unpinned(Tier.DRAM)

    @invariant()
    def what_lives_is_what_the_pool_has_given(self) -> None:
        shelf = self.catalogue._shelves[Tier.DRAM]
        assert self.catalogue.pool.used_nbytes == sum(copy.nbytes for copy in shelf.live)
        pinned = sum(copy.nbytes for copy in shelf.live if copy.pins)
        assert shelf.pinned_nbytes == pinned

    @invariant()
    def pinned_bytes_stay_and_hidden_ones_are_not_found(self) -> None:
        findable = set(self.catalogue.copies(Tier.DRAM))
        for copy, pins in list(self.pins.items()):
            assert copy.pins == pins
            assert (copy in findable) != copy.hidden
            if not pins and copy.hidden:
                assert copy.memory is None, "nobody reads it, nobody finds it, and it has bytes"
                del self.pins[copy]
                continue
            assert copy.memory is not None, "evicted under its reader"
            assert copy.memory.nbytes == copy.nbytes
            assert (copy.memory == self.stamps[copy]).all(), "bytes given out twice"

    @rule()
    def settle(self) -> None:
        """At rest nobody has been overtaken, and the first waits only for want of memory."""
        self._ticks(10)
        self._collect()
        for waiter in self.waiters:
            assert waiter.number > self.granted[waiter.urgent], "overtaken by one of its kind"
            assert not waiter.urgent or waiter.number > self.granted[False], "overtaken by a save"
        first = next((w for w in self.waiters if w.urgent), None) or next(iter(self.waiters), None)
        if first:
            pinned = self.catalogue._shelves[Tier.DRAM].pinned_nbytes
            assert pinned, "nothing is read, and yet somebody waits"
            if first.blocks == 1:
                assert pinned == BLOCKS * BLOCK, "a block may be had, and the first wants one"


CatalogueAgainstModel.TestCase.settings = settings(
    max_examples=120, stateful_step_count=40, deadline=None
)
test_catalogue_keeps_its_promises_in_any_sequence = CatalogueAgainstModel.TestCase


def test_pool_memory_is_a_view_of_the_pool() -> None:
    async def scenario() -> None:
        catalogue = opened()
        first, second = await reserved(catalogue, want("a"), want("b", 2))
        assert first.memory is not None
        assert second.memory is not None
        assert np.shares_memory(first.memory, catalogue.pool.memory)
        assert not np.shares_memory(first.memory, second.memory)
        catalogue.unpin(first)
        catalogue.unpin(second)

    asyncio.run(scenario())
