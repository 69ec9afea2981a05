"""A manager and its engine once more, one page a call: by its own objects, or by plain lists."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Container, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Protocol

from orbitkv.cache.admission import SkipReason, TinyLfu, WriteAdmission, WritePolicy
from orbitkv.cache.extents import ExtentStore
from orbitkv.cache.order import RetentionClass
from orbitkv.cache.retention import Retention
from orbitkv.runtime.simulate import Simulation, hashes_of_pages
from tests.builders import BLOCK
from tests.cache.holders import Holder
from tests.cache.test_admission import PlainSketch
from tests.cache.test_retention_model import PlainObject, PlainRetention

RECLAIMABLE, PROBATIONARY, PROTECTED = RetentionClass
HISTORY = 6  # keys, so that small traces overflow it
WIDTH = 8  # of the sketch, so that they make it age


class Dram(Protocol):
    """Which pages are in DRAM, and which leaves next."""

    def __contains__(self, page: object) -> bool: ...
    def look_up(self, page: int) -> None: ...
    def touch(self, page: int) -> None: ...
    def admit(self, page: int) -> None: ...
    def victim(self) -> int: ...
    def evict(self) -> None: ...
    def counted(self) -> dict[str, int]: ...


class Ring(Protocol):
    """Which pages are on SSD."""

    def __contains__(self, page: object) -> bool: ...
    def write(self, page: int) -> int: ...


class ObjectDram:
    """``Retention``, with a dictionary in the place of the catalogue."""

    def __init__(self, made: Simulation) -> None:
        self.retention = Retention(
            -(-made.pool_nbytes // BLOCK) * BLOCK, made.cache_protected_percent, compiled=False
        )
        self.nbytes = made.page_nbytes
        self.handles: dict[int, int] = {}

    def __contains__(self, page: object) -> bool:
        return page in self.handles

    def look_up(self, page: int) -> None:
        self.retention.look_up([self.handles[page]])

    def touch(self, page: int) -> None:
        self.retention.touch([self.handles[page]])

    def admit(self, page: int) -> None:
        (self.handles[page],) = self.retention.admit([self.nbytes], pinned=False).tolist()

    def victim(self) -> int:
        oldest = self.retention.victim()
        return next(page for page, handle in self.handles.items() if handle == oldest)

    def evict(self) -> None:
        victim = self.victim()
        (handle,) = self.retention.evict(self.nbytes).tolist()
        assert self.handles.pop(victim) == handle

    def counted(self) -> dict[str, int]:
        found = self.retention.statistics()
        assert found.stale == 0
        return {
            "evicted_reclaimable": found.evicted[RECLAIMABLE],
            "evicted_probationary": found.evicted[PROBATIONARY],
            "evicted_protected": found.evicted[PROTECTED],
            "promotions": found.promotions,
            "demotions": found.demotions,
        }


class PlainDram:
    """The same with lists; a page is its own handle."""

    def __init__(self, made: Simulation) -> None:
        blocks = -(-made.pool_nbytes // BLOCK)
        self.plain = PlainRetention(blocks * made.cache_protected_percent // 100)
        self.blocks = made.page_nbytes // BLOCK

    def __contains__(self, page: object) -> bool:
        return any(each.handle == page for each in itertools.chain(*self.plain.lists.values()))

    def look_up(self, page: int) -> None:
        self.plain.look_up([page])

    def touch(self, page: int) -> None:
        self.plain.touch([page])

    def admit(self, page: int) -> None:
        self.plain.lists[PROBATIONARY].append(PlainObject(page, self.blocks, pinned=False))

    def victim(self) -> int:
        found = self.plain.victim()
        assert found
        return found[1].handle

    def evict(self) -> None:
        assert len(self.plain.evict(self.blocks)) == 1

    def counted(self) -> dict[str, int]:
        return {
            "evicted_reclaimable": self.plain.evicted[RECLAIMABLE],
            "evicted_probationary": self.plain.evicted[PROBATIONARY],
            "evicted_protected": self.plain.evicted[PROTECTED],
            "promotions": self.plain.counts["promotions"],
            "demotions": self.plain.counts["demotions"],
        }


class ObjectRing:
    """``ExtentStore`` of one shard, with a dictionary in the place of the catalogue."""

    def __init__(self, store: ExtentStore[Holder], nbytes: int) -> None:
        self.store, self.nbytes = store, nbytes
        self.holders: dict[int, Holder] = {}

    def __contains__(self, page: object) -> bool:
        return page in self.holders

    def write(self, page: int) -> int:
        room = self.store.reserve(self.nbytes)
        assert room
        for evicted in room.evicted:
            self.store.free(evicted)
            del self.holders[evicted.generation]
        # The generation carries the page, so that who is evicted can be told.
        self.holders[page] = Holder(b"", page, room.shard, room.offset, self.nbytes)
        self.store.hold(self.holders[page])
        return len(room.evicted)


class PlainRing(list[int]):
    """The same as a list, the longest there first."""

    def __init__(self, pages: int) -> None:
        super().__init__()
        self.most = pages

    def write(self, page: int) -> int:
        evicted = len(self) == self.most
        if evicted:
            del self[0]
        self.append(page)
        return evicted


class PlainWrites:
    """The write policy with lists."""

    def __init__(self, policy: str, resident: Container[int]) -> None:
        self.policy, self.resident = policy, resident
        self.history: list[int] = []
        self.skipped = dict.fromkeys(SkipReason, 0)

    def save(self, pages: Sequence[int]) -> list[int]:
        (page,) = pages
        wanted = self.policy == "all" or page in self.history
        self.history = [each for each in self.history if each != page] + [page]
        self.history = self.history[-HISTORY:]
        return self.judge(page, wanted=wanted)

    def query(self, pages: Sequence[int]) -> list[int]:
        if self.policy == "all":
            return []
        return [each for page in pages for each in self.judge(page, wanted=True)]

    def judge(self, page: int, *, wanted: bool) -> list[int]:
        if page in self.resident:
            self.skipped[SkipReason.RESIDENT] += 1
            return []
        self.skipped[SkipReason.COLD] += not wanted
        return [page] * wanted


class PlainLfu:
    """Admission by the plain sketch."""

    def __init__(self) -> None:
        self.sketch = PlainSketch(WIDTH)

    def record(self, keys: Sequence[int]) -> None:
        for key in keys:
            self.sketch.record(key)

    def admits(self, candidate: int, victim: int) -> bool:
        return self.sketch.estimate(candidate) >= self.sketch.estimate(victim)


class OneByOne:
    """A manager and its engine: what a request does, in calls of one page each."""

    def __init__(
        self,
        made: Simulation,
        dram: Dram,
        ring: Ring,
        writes: WriteAdmission[int] | PlainWrites,
        lfu: TinyLfu | PlainLfu,
    ) -> None:
        self.made, self.dram, self.ring, self.writes, self.lfu = made, dram, ring, writes, lfu
        self.tail_first = made.recency == "tail-first"
        self.gpu: list[int] = []
        self.held = 0
        self.counts: Counter[str] = Counter()
        self.keys = hashes_of_pages(1000).tolist()

    def request(self, pages: list[int], tokens: int) -> None:
        first = list(itertools.takewhile(lambda page: page in self.gpu, pages))
        asked = pages[len(first) :]
        if self.made.enable_lfu_admission:
            self.lfu.record([self.keys[page] for page in asked])
        found = list(itertools.takewhile(lambda p: p in self.dram or p in self.ring, asked))
        in_dram = [page for page in found if page in self.dram]
        on_ssd = [page for page in found if page not in self.dram]
        self.counts["gpu_hit_blocks"] += len(first)
        self.counts["dram_hit_blocks"] += len(in_dram)
        self.counts["ssd_hit_blocks"] += len(on_ssd)
        hits = len(first) + len(found)
        self.counts["recomputed_tokens"] += tokens - min(tokens, hits * self.made.page_tokens)
        for page in self.last_first(in_dram):
            self.dram.look_up(page)
        for page in on_ssd:
            self.take_in(page)
        self.freshen(on_ssd)
        self.write(self.writes.query(in_dram))
        saved = []
        rest = asked[len(found) :]
        for page in [page for page in rest if self.is_missing(page)] if self.tail_first else rest:
            if not self.tail_first and page in self.dram:
                self.dram.touch(page)
            elif self.tail_first or self.is_missing(page):
                self.take_in(page)
                saved.append(page)
                if self.made.ssd_pages:
                    self.write(self.writes.save([page]))
        self.counts["saved_blocks"] += len(saved)
        self.freshen(saved)
        self.end_on_gpu(pages)

    def is_missing(self, page: int) -> bool:
        return page not in self.dram and page not in self.ring and self.is_welcome(page)

    def is_welcome(self, page: int) -> bool:
        if self.held < self.made.pool_pages or not self.made.enable_lfu_admission:
            return True
        if self.lfu.admits(self.keys[page], self.keys[self.dram.victim()]):
            return True
        self.counts["lfu_rejected"] += 1
        return False

    def take_in(self, page: int) -> None:
        if self.held == self.made.pool_pages:
            self.dram.evict()
        else:
            self.held += 1
        self.dram.admit(page)

    def freshen(self, pages: Iterable[int]) -> None:
        for page in self.last_first(list(pages)) if self.tail_first else list(pages)[:0]:
            if page in self.dram:
                self.dram.touch(page)

    def last_first(self, pages: list[int]) -> list[int]:
        return pages[::-1] if self.tail_first else pages

    def write(self, pages: list[int]) -> None:
        for page in pages if self.made.ssd_pages else ():
            self.counts["ssd_overwritten_blocks"] += self.ring.write(page)
            self.counts["ssd_write_blocks"] += 1

    def end_on_gpu(self, pages: list[int]) -> None:
        if self.made.gpu_pages == 0:
            return
        for page in pages:
            if page in self.gpu:
                self.gpu.remove(page)
            elif len(self.gpu) == self.made.gpu_pages:
                del self.gpu[0]
                self.counts["evicted_gpu"] += 1
            self.gpu.append(page)
        for page in self.last_first(pages) if self.tail_first else ():
            if page in self.gpu:
                self.gpu.remove(page)
                self.gpu.append(page)

    def figures(self) -> dict[str, int]:
        skips = self.writes.skipped if self.made.ssd_pages else Counter[SkipReason]()
        return {
            **self.counts,
            **self.dram.counted(),
            "skipped_resident": skips[SkipReason.RESIDENT],
            "skipped_cold": skips[SkipReason.COLD],
        }


def by_objects(made: Simulation, folder: Path) -> Iterator[OneByOne]:
    """With the objects that a manager has."""
    capacity_nbytes = max(made.ssd_cache_capacity_nbytes, BLOCK)
    store: ExtentStore[Holder] = ExtentStore([folder / "ssd"], capacity_nbytes, persist=False)
    try:
        ring = ObjectRing(store, made.page_nbytes)
        policy = WritePolicy(made.ssd_write_policy)
        writes = WriteAdmission(policy, resident=ring, pending=set[int]())
        yield OneByOne(made, ObjectDram(made), ring, writes, TinyLfu(WIDTH, compiled=False))
    finally:
        store.close()


def by_lists(made: Simulation) -> OneByOne:
    """With lists alone."""
    ring = PlainRing(made.ssd_pages)
    return OneByOne(
        made, PlainDram(made), ring, PlainWrites(made.ssd_write_policy, ring), PlainLfu()
    )
