"""The SSD tier against a plain, slow model: blocks, a cursor a shard, and who stands on each."""

from __future__ import annotations

import copy as copies
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from orbitkv.cache import extents as extents_module
from orbitkv.cache.catalogue import Catalogue, Copy, Tier, Want
from orbitkv.cache.extents import ExtentStore
from orbitkv.cache.pool import Pool
from tests.builders import BLOCK, page_hash
from tests.cache.holders import checkpoint, kill

SHARDS = 2
BLOCKS = 7
RUN_BLOCKS = 3


@dataclass
class Item:
    """One version of an object in the model."""

    name: int
    generation: int
    shard: int
    first: int
    blocks: int
    pins: int = 1
    published: bool = False
    hidden: bool = False


@dataclass
class Model:
    blocks: list[list[Item | None]] = field(
        default_factory=lambda: [[None] * BLOCKS for _ in range(SHARDS)]
    )
    cursors: list[int] = field(default_factory=lambda: [0] * SHARDS)
    turn: int = 0
    run: int = 0

    def items(self) -> list[Item]:
        found: list[Item] = []
        for shard in self.blocks:
            for item in shard:
                if item is not None and not any(item is other for other in found):
                    found.append(item)
        return found

    def find(self, name: int) -> Item | None:
        named = [i for i in self.items() if i.name == name and i.published and not i.hidden]
        assert len(named) <= 1
        return named[0] if named else None

    def claim(self, shard: int, blocks: int) -> int | None:
        """First block of the room, with all that stood there or was passed over gone."""
        if blocks > BLOCKS:
            return None
        cursor = self.cursors[shard]
        wraps = cursor + blocks > BLOCKS
        first = 0 if wraps else cursor
        wanted = [*range(cursor, BLOCKS if wraps else cursor), *range(first, first + blocks)]
        there = [item for block in wanted if (item := self.blocks[shard][block])]
        if any(item.pins for item in there):
            return None
        for item in there:
            self.remove(item)
        self.cursors[shard] = first + blocks
        return first

    def remove(self, item: Item) -> None:
        shard = self.blocks[item.shard]
        shard[:] = [None if other is item else other for other in shard]

    def reserve(self, name: int, generation: int, blocks: int) -> Item | None:
        if self.run and self.run + blocks > RUN_BLOCKS:
            self.turn, self.run = (self.turn + 1) % SHARDS, 0
        for shard in [(self.turn + step) % SHARDS for step in range(SHARDS)]:
            first = self.claim(shard, blocks)
            if first is None:
                continue
            if shard != self.turn:
                self.turn, self.run = shard, 0
            self.run += blocks
            item = Item(name, generation, shard, first, blocks)
            self.blocks[shard][first : first + blocks] = [item] * blocks
            return item
        return None

    def after_restart(self) -> Model:
        """What the next manager finds of what this one had published."""
        kept = copies.deepcopy(self)
        for item in kept.items():
            if item.hidden or not item.published:
                kept.remove(item)
            item.pins = 0
        kept.turn = kept.run = 0
        return kept


class SsdAgainstModel(RuleBasedStateMachine):
    """Any sequence of what stages, leases, faults and restarts do with extents."""

    run_nbytes: ClassVar[int] = extents_module.RUN_NBYTES

    @initialize(persist=st.booleans())
    def open(self, *, persist: bool) -> None:
        extents_module.RUN_NBYTES = RUN_BLOCKS * BLOCK
        self.persist = self.is_numbered = persist
        self.directory = tempfile.TemporaryDirectory()
        self.paths = [Path(self.directory.name) / str(shard) for shard in range(SHARDS)]
        self.model = Model()
        self.saved = Model()  # as of the last checkpoint
        self.written: dict[tuple[int, int], tuple[int, int]] = {}  # (shard, block): what lies there
        self.generations: dict[int, int] = {}
        self.held: list[tuple[Item, Copy]] = []
        self._open()

    def _open(self) -> None:
        self.store: ExtentStore[Copy] = ExtentStore(
            self.paths, SHARDS * BLOCKS * BLOCK, persist=self.persist
        )
        self.catalogue = Catalogue(Pool(BLOCK, lock_memory=False), self.store)
        self.held = []

    def teardown(self) -> None:
        extents_module.RUN_NBYTES = self.run_nbytes
        for item, copy in self.held:
            for _ in range(item.pins):
                self.catalogue.unpin(copy)
        assert self.catalogue.leaks() == []
        self.catalogue.close()
        self.directory.cleanup()

    def _unpublished(self) -> list[tuple[Item, Copy]]:
        return [pair for pair in self.held if not pair[0].published]

    choices = st.integers(0, 2**16)

    @rule(name=st.integers(0, 9), blocks=st.integers(1, BLOCKS + 1))
    def reserve(self, name: int, blocks: int) -> None:
        generation = self.catalogue.next_generation()
        assert generation not in self.generations
        self.generations[generation] = name
        want = Want(page_hash(name), blocks * BLOCK, generation)
        extent = self.catalogue.reserve_ssd(want)
        item = self.model.reserve(name, generation, blocks)
        assert (extent is None) == (item is None)
        if extent is None or item is None:
            return
        assert (extent.shard, extent.offset) == (item.shard, item.first * BLOCK)
        assert extent.hidden
        self.held.append((item, extent))
        for block in range(item.first, item.first + blocks):  # its write begins
            self.written[item.shard, block] = (generation, block - item.first)

    @rule(name=st.integers(0, 9), blocks=st.integers(1, 4))
    def write(self, name: int, blocks: int) -> None:
        """All of a write, with nothing between."""
        self.reserve(name, blocks)
        if self.held and not self.held[-1][0].published:
            self.publish(len(self._unpublished()) - 1)

    @rule(choice=choices)
    def publish(self, choice: int) -> None:
        """Its write has ended; then whoever wrote it lets go."""
        writing = self._unpublished()
        if not writing:
            return
        item, copy = writing[choice % len(writing)]
        taken = self.model.find(item.name)
        assert self.catalogue.admit(copy) == (taken is None)
        item.published, item.hidden = True, taken is not None
        self._unpin(item, copy)

    @rule(name=st.integers(0, 9))
    def lease(self, name: int) -> None:
        item = self.model.find(name)
        if item is None:
            return
        copy = self.catalogue.find(page_hash(name), Tier.SSD)
        assert copy
        self.catalogue.pin(copy)
        item.pins += 1
        if not any(held is item for held, _ in self.held):
            self.held.append((item, copy))

    @rule(choice=choices)
    def release(self, choice: int) -> None:
        """A lease ends, or a write fails."""
        if self.held:
            self._unpin(*self.held[choice % len(self.held)])

    def _unpin(self, item: Item, copy: Copy) -> None:
        self.catalogue.unpin(copy)
        item.pins -= 1
        if not item.pins:
            self.held = [pair for pair in self.held if pair[0] is not item]
            if item.hidden or not item.published:
                self.model.remove(item)

    @rule(name=st.integers(0, 9))
    def corrupt(self, name: int) -> None:
        item = self.model.find(name)
        copy = self.catalogue.find(page_hash(name), Tier.SSD)
        if item is None or copy is None:
            return
        self.catalogue.hide_corrupt(copy)
        item.hidden = True
        if not item.pins:
            self.model.remove(item)

    @rule()
    def save_index(self) -> None:
        checkpoint(self.store)
        if self.persist:
            self.saved = self.model.after_restart()

    @rule(closes=st.booleans(), persist=st.booleans())
    def restart(self, *, closes: bool, persist: bool) -> None:
        if closes:
            if self.persist:
                self.saved = self.model.after_restart()
            self.catalogue.close()
        else:
            kill(self.store)
            self.catalogue.pool.close()
        if not self.is_numbered or (closes and not self.persist):
            # Its bytes are gone, and only then a generation may come again.
            self.written, self.generations = {}, {}
            self.is_numbered = False
        self.persist = persist
        self.is_numbered |= persist
        if not persist:
            self.saved = Model()
        self.model = copies.deepcopy(self.saved)
        self._open()
        # As a restore does: what does not stand is hidden, and what stands is what was named.
        for item in self.model.items():
            copy = self.catalogue.find(page_hash(item.name), Tier.SSD)
            assert copy
            there = [
                self.written.get((item.shard, item.first + block)) for block in range(item.blocks)
            ]
            if there != [(copy.generation, block) for block in range(item.blocks)]:
                self.catalogue.hide_corrupt(copy)
                self.model.remove(item)
            else:
                assert self.generations[copy.generation] == item.name

    @invariant()
    def what_is_findable_is_where_the_model_says(self) -> None:
        found = {
            (copy.digest, copy.generation, copy.shard, copy.offset, copy.nbytes)
            for copy in self.catalogue.copies(Tier.SSD)
        }
        assert found == {
            (page_hash(i.name), i.generation, i.shard, i.first * BLOCK, i.blocks * BLOCK)
            for i in self.model.items()
            if i.published and not i.hidden
        }

    @invariant()
    def no_two_overlap_and_used_is_their_sum(self) -> None:
        live = self.catalogue._shelves[Tier.SSD].live
        blocks = [
            (copy.shard, block)
            for copy in live
            for block in range(copy.offset // BLOCK, (copy.offset + copy.nbytes) // BLOCK)
        ]
        assert len(blocks) == len(set(blocks))
        assert self.store.used_nbytes == len(blocks) * BLOCK
        assert self.store.shard_used_nbytes == tuple(
            sum(item is not None for item in shard) * BLOCK for shard in self.model.blocks
        )

    @invariant()
    def nothing_pinned_has_been_overwritten(self) -> None:
        for item, copy in self.held:
            assert copy.pins == item.pins > 0
            for block in range(item.blocks):
                there = self.written[item.shard, item.first + block]
                assert there == (copy.generation, block), "given out under its reader"


SsdAgainstModel.TestCase.settings = settings(max_examples=60, stateful_step_count=60, deadline=None)
test_ssd_tier_agrees_with_a_model_in_any_sequence = pytest.mark.timeout(300)(
    SsdAgainstModel.TestCase
)
