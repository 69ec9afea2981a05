"""Retention: which resident object goes first when its tier is full."""

from __future__ import annotations

import heapq
import mmap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from orbitkv.cache import order
from orbitkv.cache.compiled import Words, loops, view
from orbitkv.cache.order import RetentionClass
from orbitkv.errors import ConfigError, ImpossibleRequest
from orbitkv.objects import OBJECT_ALIGN_NBYTES

Handles = npt.NDArray[np.int64]
"""int64[n], host. A handle names one admitted object, and no other one after it has left."""


@dataclass(frozen=True, slots=True)
class RetentionStatistics:
    """A snapshot. Bytes are whole 4 KiB blocks.

    Attributes:
        promotions: Objects that became protected.
        demotions: Objects that were protected, and went to another class.
        stale: References to objects that had left, ignored.
        resident, resident_nbytes, evicted: By class.
    """

    promotions: int
    demotions: int
    stale: int
    resident: Mapping[RetentionClass, int]
    resident_nbytes: Mapping[RetentionClass, int]
    evicted: Mapping[RetentionClass, int]

    @property
    def protected_nbytes(self) -> int:
        """Bytes of the protected segment."""
        return self.resident_nbytes[RetentionClass.PROTECTED]


_CLASSES = tuple(map(int, RetentionClass))
_MOST_EVICTED = 4096  # by one call of a loop
_NOTHING: Handles = np.empty(0, np.int64)
_FIRST_ROWS = 512
_ROW_NBYTES, _TURN_NBYTES = 4 * order.WORDS, 8
_ALL_PERCENT = 100


class Retention:
    """Replacement order of one tier: segmented LRU, bounded by bytes. Changed on one thread alone.

    Recency is the order in which objects last became the most recent of their class: by being
    admitted, touched, looked up, demoted or reclaimed. Pins do not change it. A pinned object keeps
    its place, may be promoted and demoted, and is only skipped by eviction; once unpinned it
    is as old as it was. So a transfer that nobody asked for refreshes nothing.

    Args:
        capacity_nbytes: Of the tier.
        protected_percent: Share of it that protected objects may have, 0 to 100. 0: a plain LRU.
        compiled: Run loops compiled; the constructor then compiles or loads them.

    Raises:
        ConfigError: ``protected_percent`` is out of range.
    """

    def __init__(self, capacity_nbytes: int, protected_percent: int, *, compiled: bool) -> None:
        if not 0 <= protected_percent <= _ALL_PERCENT:
            raise ConfigError(f"cache_protected_percent {protected_percent}; accepted: 0 to 100")
        self._compiled = compiled
        self._loops = loops(order.LOOPS, compiled=compiled)
        self._queued: Mapping[int, list[tuple[int, int]]] = {k: [] for k in RetentionClass}
        self._state_array = np.zeros(order.STATE_WORDS, np.int64)
        self._state = self._state_array.data
        limit_nbytes = capacity_nbytes * protected_percent // _ALL_PERCENT
        self._state[order.LIMIT] = limit_nbytes // OBJECT_ALIGN_NBYTES
        self._state[order.FRESH] = order.FIRST
        # Private and anonymous: what is not touched takes no memory, and growing copies nothing.
        self._row_map, self._turn_map = (
            mmap.mmap(-1, _FIRST_ROWS * nbytes, mmap.MAP_PRIVATE)
            for nbytes in (_ROW_NBYTES, _TURN_NBYTES)
        )
        self._look()
        for kind in RetentionClass:
            end = kind * order.WORDS
            self._rows[end + order.PREV] = self._rows[end + order.NEXT] = end
            self._state[order.HAND + kind] = end
        if compiled:
            self._load()

    def admit(self, nbytes: Sequence[int], *, pinned: bool) -> Handles:
        """Take in objects of so many bytes, in order, as the most recent probationary ones.

        Raises:
            ValueError: an object's length is not a positive multiple of 4 KiB; none is taken in.
        """
        blocks = []
        for length in nbytes:
            if not 0 < length <= order.MAX_NBYTES or length % OBJECT_ALIGN_NBYTES:
                raise ValueError(
                    f"object of {length} bytes; accepted: a multiple of {OBJECT_ALIGN_NBYTES}, "
                    f"up to {order.MAX_NBYTES}"
                )
            blocks.append(length // OBJECT_ALIGN_NBYTES)
        fresh = self._state[order.FRESH] // order.WORDS + len(nbytes)
        if fresh > self._capacity_rows:
            self._grow(2 * fresh)
        out = np.empty(len(nbytes), np.int64)
        marks = order.PINNED if pinned else 0
        self._loops.admit(*self._lists, self._batch(blocks), marks, self._view(out))
        return out

    def look_up(self, handles: Sequence[int] | Handles) -> None:
        """Promote, in order, what a foreground prefix lookup found. Nothing else promotes.

        An object that the protected segment could not hold becomes the most recent probationary
        one instead. Where room is needed, the oldest protected objects become probationary.
        """
        self._loops.look_up(*self._lists, self._batch(handles))

    def touch(self, handles: Sequence[int] | Handles) -> None:
        """Make objects the most recent of their own class, in order."""
        self._loops.touch(*self._lists, self._batch(handles))

    def reclaim(self, handles: Sequence[int] | Handles) -> None:
        """Make replicas reclaimable, in order: another tier or host holds them too."""
        kind = int(RetentionClass.RECLAIMABLE)
        self._loops.reclaim(*self._lists, self._batch(handles), kind)

    def remove(self, handles: Sequence[int] | Handles) -> None:
        """Take out what was replaced, hidden or cleaned up, pinned or not. Not counted."""
        self._loops.remove(*self._lists, self._batch(handles))

    def pin(self, handles: Sequence[int] | Handles) -> None:
        """Let eviction skip objects until ``unpin``. The owner counts them, not we."""
        self._loops.pin(*self._lists, self._batch(handles))

    def unpin(self, handles: Sequence[int] | Handles) -> None:
        """Let eviction take objects again, each in the place that it has had all along."""
        out = np.empty(len(handles), np.int64)
        count = self._loops.unpin(*self._lists, self._batch(handles), self._view(out))
        for row in out[:count].tolist():
            kind = self._rows[row + order.MARKS] & order.CLASS
            heapq.heappush(self._queued[kind], (self._turns[row // order.WORDS], row))

    def victim(self) -> int | None:
        """The object that eviction would take next; None where all are pinned."""
        for kind in _CLASSES:
            row = self._oldest_queued(kind)
            if row is None:
                row = self._loops.advance(*self._passing, kind)
            if row != kind * order.WORDS:
                return self._handle(row)
        return None

    def evict(self, nbytes: int) -> Handles:
        """Evict until so many bytes are free, or all that is left is pinned; return what left."""
        wanted = -(-nbytes // OBJECT_ALIGN_NBYTES)
        evicted: list[Handles] = []
        for kind in _CLASSES:
            while wanted > 0 and (row := self._oldest_queued(kind)) is not None:
                heapq.heappop(self._queued[kind])
                evicted.append(np.array((self._handle(row),), np.int64))
                wanted -= self._loops.forget(*self._lists, row)
                self._state[order.EVICTED + kind] += 1
            while wanted > 0 and (count := self._state[order.COUNT + kind]):
                out = np.empty(min(wanted, count, _MOST_EVICTED) + 1, np.int64)
                wanted = self._loops.evict(*self._passing, kind, wanted, self._view(out))
                evicted.append(out[: out[-1]])
                if len(evicted[-1]) < len(out) - 1:
                    break  # what is left is pinned
            if wanted <= 0:
                break
        return evicted[0] if len(evicted) == 1 else np.concatenate((_NOTHING, *evicted))

    def reserve(self, objects: int) -> None:
        """Have room for so many objects, so that their admission moves no array.

        Raises:
            ImpossibleRequest: more than a tier can hold.
        """
        rows = objects + order.FIRST // order.WORDS
        if rows > self._capacity_rows:
            self._grow(rows)

    @property
    def arrays(self) -> tuple[Words, Words, Words]:
        """Rows, state and turns, for a loop that is run by others. To be let go before growth."""
        return self._passing

    def class_of(self, handle: int) -> RetentionClass | None:
        """Class of an object; None where it has left."""
        row = (handle & order.ROW_MASK) * order.WORDS
        if order.FIRST <= row < self._state[order.FRESH] and self._handle(row) == handle:
            return RetentionClass(self._rows[row + order.MARKS] & order.CLASS)
        return None

    def in_order(self, kind: RetentionClass) -> Handles:
        """All objects of a class, pinned ones too, oldest first."""
        out = np.empty(self._state[order.COUNT + kind], np.int64)
        self._loops.in_order(self._lists[0], int(kind), self._view(out))
        return out

    def statistics(self) -> RetentionStatistics:
        """Take a snapshot."""
        state = self._state
        return RetentionStatistics(
            promotions=state[order.PROMOTIONS],
            demotions=state[order.DEMOTIONS],
            stale=state[order.STALE],
            resident={k: state[order.COUNT + k] for k in RetentionClass},
            resident_nbytes={k: state[order.SUM + k] * OBJECT_ALIGN_NBYTES for k in RetentionClass},
            evicted={k: state[order.EVICTED + k] for k in RetentionClass},
        )

    def _oldest_queued(self, kind: int) -> int | None:
        """Row of the oldest object that was passed while it was pinned, and is not pinned now.

        Nothing is passed before the queues of its class and of those before it are empty. So a row
        that is marked as queued has one element, its own; what was used or has left is dropped.
        """
        queued = self._queued[kind]
        while queued:
            row = queued[0][1]
            marks = self._rows[row + order.MARKS]
            if marks & order.QUEUED and not marks & order.PINNED:
                return row
            self._rows[row + order.MARKS] = marks & ~order.QUEUED
            heapq.heappop(queued)
        return None

    def _batch(self, handles: Sequence[int] | Handles) -> Sequence[int] | Handles:
        """Handles as loops take them: an array where they are compiled, else Python's integers."""
        if self._compiled:
            return np.asarray(handles, np.int64)
        return handles.tolist() if isinstance(handles, np.ndarray) else handles

    def _view(self, words: npt.NDArray[Any]) -> Words:
        return view(words, compiled=self._compiled)

    def _handle(self, row: int) -> int:
        return self._rows[row + order.USES] * order.ROW_SPAN + row // order.WORDS

    def _grow(self, rows: int) -> None:
        if rows > order.MAX_ROWS:
            raise ImpossibleRequest(f"{rows} resident objects; accepted: {order.MAX_ROWS}")
        del self._rows, self._turns, self._lists, self._passing  # a mapping must not be seen now
        try:
            self._row_map.resize(rows * _ROW_NBYTES)
            self._turn_map.resize(rows * _TURN_NBYTES)
        finally:
            self._look()

    def _look(self) -> None:
        links = np.frombuffer(self._row_map, np.int32)
        turns = np.frombuffer(self._turn_map, np.int64)
        self._rows, self._turns = links.data, turns.data
        self._lists = (self._view(links), self._view(self._state_array))
        self._passing = (*self._lists, self._view(turns))
        self._capacity_rows = min(len(links) // order.WORDS, len(turns))

    def _load(self) -> None:
        """Compile every loop, or load it from disk, by a call without objects."""
        one = np.zeros(1, np.int64)
        none, made, lists = one[:0], self._loops, self._lists
        made.admit(*lists, none, 0, none)
        for loop in (made.look_up, made.touch, made.remove, made.pin):
            loop(*lists, none)
        made.reclaim(*lists, none, int(RetentionClass.RECLAIMABLE))
        made.unpin(*lists, none, none)
        made.evict(*self._passing, order.PROBATIONARY, 0, one)
        made.advance(*self._passing, order.PROBATIONARY)
        made.in_order(lists[0], order.PROBATIONARY, none)
