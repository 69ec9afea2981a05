"""Retention against the policy written again with plain lists."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from dataclasses import dataclass, field

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from orbitkv.cache.order import RetentionClass
from orbitkv.cache.retention import Retention
from tests.builders import BLOCK

RECLAIMABLE, PROBATIONARY, PROTECTED = RetentionClass
BLOCKS = 10


@dataclass
class PlainObject:
    handle: int
    blocks: int
    pinned: bool


@dataclass
class PlainRetention:
    """The policy again, from the documents, with lists alone."""

    limit_blocks: int
    lists: dict[RetentionClass, list[PlainObject]] = field(
        default_factory=lambda: {kind: [] for kind in RetentionClass}
    )
    counts: dict[str, int] = field(
        default_factory=lambda: dict.fromkeys(("promotions", "demotions", "stale"), 0)
    )
    evicted: dict[RetentionClass, int] = field(
        default_factory=lambda: dict.fromkeys(RetentionClass, 0)
    )

    def found(self, handles: Iterable[int]) -> Iterable[tuple[RetentionClass, PlainObject]]:
        for handle in handles:
            where = [
                (kind, each)
                for kind, residents in self.lists.items()
                for each in residents
                if each.handle == handle
            ]
            self.counts["stale"] += not where
            yield from where

    def blocks_of(self, kind: RetentionClass) -> int:
        return sum(each.blocks for each in self.lists[kind])

    def move(self, each: PlainObject, before: RetentionClass, after: RetentionClass) -> None:
        self.lists[before].remove(each)
        self.lists[after].append(each)

    def look_up(self, handles: list[int]) -> None:
        for kind, each in self.found(handles):
            if kind is PROTECTED:
                self.move(each, kind, PROTECTED)
            elif each.blocks > self.limit_blocks:
                self.move(each, kind, PROBATIONARY)
            else:
                while self.blocks_of(PROTECTED) + each.blocks > self.limit_blocks:
                    self.move(self.lists[PROTECTED][0], PROTECTED, PROBATIONARY)
                    self.counts["demotions"] += 1
                self.move(each, kind, PROTECTED)
                self.counts["promotions"] += 1

    def touch(self, handles: list[int]) -> None:
        for kind, each in self.found(handles):
            self.move(each, kind, kind)

    def reclaim(self, handles: list[int]) -> None:
        for kind, each in self.found(handles):
            if kind is not RECLAIMABLE:
                self.move(each, kind, RECLAIMABLE)
                self.counts["demotions"] += kind is PROTECTED

    def remove(self, handles: list[int]) -> None:
        for kind, each in self.found(handles):
            self.lists[kind].remove(each)

    def pin(self, handles: list[int], *, pinned: bool) -> None:
        for _, each in self.found(handles):
            each.pinned = pinned

    def victim(self) -> tuple[RetentionClass, PlainObject] | None:
        unpinned = (
            (kind, each)
            for kind, residents in self.lists.items()
            for each in residents
            if not each.pinned
        )
        return next(unpinned, None)

    def evict(self, blocks: int) -> list[int]:
        gone: list[int] = []
        while blocks > 0 and (found := self.victim()) is not None:
            kind, each = found
            self.lists[kind].remove(each)
            self.evicted[kind] += 1
            gone.append(each.handle)
            blocks -= each.blocks
        return gone


class AgainstPlainLists(RuleBasedStateMachine):
    """Any sequence of calls leaves the same residents, classes, order and counters."""

    compiled = False

    @initialize(percent=st.sampled_from([0, 10, 40, 80, 100]))
    def open(self, percent: int) -> None:
        self.retention = Retention(BLOCKS * BLOCK, percent, compiled=self.compiled)
        self.plain = PlainRetention(BLOCKS * percent // 100)
        self.given: list[int] = []

    def some(self, data: st.DataObject) -> list[int]:
        """Handles, mostly of resident objects and old ones; one may come twice."""
        residents = [each.handle for kind in RetentionClass for each in self.plain.lists[kind]]
        handles = residents[:4] + residents + self.given[-3:]
        return data.draw(st.lists(st.sampled_from(handles), max_size=4)) if handles else []

    @rule(blocks=st.lists(st.integers(1, 4), max_size=4), pinned=st.booleans())
    def save(self, blocks: list[int], *, pinned: bool) -> None:
        handles = self.retention.admit([count * BLOCK for count in blocks], pinned=pinned)
        for handle, count in zip(handles.tolist(), blocks, strict=True):
            self.plain.lists[PROBATIONARY].append(PlainObject(handle, count, pinned))
        assert not set(self.given) & set(handles.tolist())
        self.given += handles.tolist()

    @rule(data=st.data(), name=st.sampled_from(["look_up", "touch", "reclaim", "remove"]))
    def use(self, data: st.DataObject, name: str) -> None:
        handles = self.some(data)
        getattr(self.retention, name)(handles)
        getattr(self.plain, name)(handles)

    @rule(data=st.data())
    def lease(self, data: st.DataObject) -> None:
        handles = self.some(data)
        self.retention.pin(handles)
        self.plain.pin(handles, pinned=True)

    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        handles = self.some(data)
        self.retention.unpin(handles)
        self.plain.pin(handles, pinned=False)

    @rule(blocks=st.sampled_from([0, 1, 1, 1, 2, 6]))
    def evict(self, blocks: int) -> None:
        assert self.retention.evict(blocks * BLOCK).tolist() == self.plain.evict(blocks)

    @rule()
    def look_at_the_victim(self) -> None:
        found = self.plain.victim()
        assert self.retention.victim() == (None if found is None else found[1].handle)

    @rule()
    def clean_up(self) -> None:
        unpinned = [
            each.handle
            for residents in self.plain.lists.values()
            for each in residents
            if not each.pinned
        ]
        self.retention.remove(unpinned)
        self.plain.remove(unpinned)

    @invariant()
    def everything_is_equal(self) -> None:
        statistics, plain = self.retention.statistics(), self.plain
        for kind, residents in plain.lists.items():
            assert self.retention.in_order(kind).tolist() == [each.handle for each in residents]
            assert statistics.resident[kind] == len(residents)
            assert statistics.resident_nbytes[kind] == plain.blocks_of(kind) * BLOCK
            assert all(self.retention.class_of(each.handle) is kind for each in residents)
        assert statistics.protected_nbytes <= plain.limit_blocks * BLOCK
        assert statistics.evicted == plain.evicted
        assert {name: getattr(statistics, name) for name in plain.counts} == plain.counts
        queued = sum(map(len, self.retention._queued.values()))
        assert queued <= 3 * len(self.given)


class CompiledAgainstPlainLists(AgainstPlainLists):
    """The same, compiled."""

    compiled = True


_SETTINGS = functools.partial(settings, stateful_step_count=60, deadline=None)
TestAgainstPlainLists = AgainstPlainLists.TestCase
TestAgainstPlainLists.settings = _SETTINGS(max_examples=150)
TestCompiledAgainstPlainLists = CompiledAgainstPlainLists.TestCase
TestCompiledAgainstPlainLists.settings = _SETTINGS(max_examples=50)
