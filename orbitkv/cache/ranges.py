"""FreeRanges: byte ranges of one region, allocated best fit, coalesced when freed."""

from __future__ import annotations

from sortedcontainers import SortedList

from orbitkv.objects import OBJECT_ALIGN_NBYTES, align_up


class FreeRanges:
    """The free bytes of a region of pool memory or of an arena, in blocks of 4 KiB.

    Allocation takes the smallest range that fits, lowest offset first; freeing merges with both
    neighbours. Each costs O(log n) in the number of free ranges.
    """

    def __init__(self, capacity_nbytes: int) -> None:
        self.capacity_nbytes = capacity_nbytes
        self.free_nbytes = 0
        self._length_at: dict[int, int] = {}
        self._start_before: dict[int, int] = {}
        self._by_length: SortedList[tuple[int, int]] = SortedList()
        if capacity_nbytes:
            self._add(0, capacity_nbytes)

    @property
    def largest_nbytes(self) -> int:
        """The largest allocation that would succeed now."""
        return int(self._by_length[-1][0]) if self._by_length else 0

    def allocate(self, nbytes: int) -> int | None:
        """Take ``nbytes``, rounded up to blocks; return their offset, or None if none fits."""
        nbytes = align_up(nbytes, OBJECT_ALIGN_NBYTES)
        index = self._by_length.bisect_left((nbytes, 0))
        if index == len(self._by_length):
            return None
        length, start = self._by_length[index]
        self._remove(start, length)
        if length > nbytes:
            self._add(start + nbytes, length - nbytes)
        return int(start)

    def free(self, start: int, nbytes: int) -> None:
        """Give a range back and merge it with its free neighbours."""
        nbytes = align_up(nbytes, OBJECT_ALIGN_NBYTES)
        end = start + nbytes
        following = self._length_at.get(end)
        if following is not None:
            self._remove(end, following)
            nbytes += following
        preceding = self._start_before.get(start)
        if preceding is not None:
            length = self._length_at[preceding]
            self._remove(preceding, length)
            start, nbytes = preceding, nbytes + length
        self._add(start, nbytes)

    def _add(self, start: int, length: int) -> None:
        self._length_at[start] = length
        self._start_before[start + length] = start
        self._by_length.add((length, start))
        self.free_nbytes += length

    def _remove(self, start: int, length: int) -> None:
        del self._length_at[start]
        del self._start_before[start + length]
        self._by_length.remove((length, start))
        self.free_nbytes -= length
