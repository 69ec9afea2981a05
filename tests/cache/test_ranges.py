"""Free ranges: against a bitmap of blocks, which cannot be wrong."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from orbitkv.cache.ranges import FreeRanges
from tests.builders import BLOCK


def free_runs(free: list[bool]) -> list[tuple[int, int]]:
    """(length, start) of each maximal run of free blocks."""
    runs, start = [], None
    for index, is_free in enumerate([*free, False]):
        if is_free and start is None:
            start = index
        elif not is_free and start is not None:
            runs.append((index - start, start))
            start = None
    return runs


class RangesAgainstBitmap(RuleBasedStateMachine):
    @initialize(blocks=st.integers(1, 24))
    def open(self, blocks: int) -> None:
        self.ranges = FreeRanges(blocks * BLOCK)
        self.free = [True] * blocks
        self.taken: list[tuple[int, int]] = []

    def _take(self, start: int, blocks: int) -> None:
        assert all(self.free[start : start + blocks]), "handed out twice"
        self.free[start : start + blocks] = [False] * blocks
        self.taken.append((start, blocks))

    @rule(blocks=st.integers(1, 10), less_nbytes=st.integers(0, BLOCK - 1))
    def allocate(self, blocks: int, less_nbytes: int) -> None:
        """A length that is no multiple of a block is rounded up to one."""
        offset = self.ranges.allocate(blocks * BLOCK - less_nbytes)
        fitting = [run for run in free_runs(self.free) if run[0] >= blocks]
        if not fitting:
            assert offset is None
            return
        _, best = min(fitting)
        assert offset == best * BLOCK, "not the smallest that fits, lowest offset first"
        self._take(best, blocks)

    @precondition(lambda self: self.taken)
    @rule(choice=st.integers(0, 2**16))
    def give_back(self, choice: int) -> None:
        start, blocks = self.taken.pop(choice % len(self.taken))
        self.ranges.free(start * BLOCK, blocks * BLOCK)
        self.free[start : start + blocks] = [True] * blocks

    @invariant()
    def counts_and_largest_are_the_bitmaps(self) -> None:
        runs = free_runs(self.free)
        assert self.ranges.free_nbytes == sum(self.free) * BLOCK
        assert self.ranges.largest_nbytes == max(runs, default=(0, 0))[0] * BLOCK
        # Coalesced: as many ranges as there are maximal runs.
        assert sorted(self.ranges._by_length) == sorted((n * BLOCK, s * BLOCK) for n, s in runs)


RangesAgainstBitmap.TestCase.settings = settings(max_examples=120, deadline=None)
test_ranges_agree_with_a_bitmap = RangesAgainstBitmap.TestCase


def test_freeing_between_two_free_neighbours_makes_one_range() -> None:
    ranges = FreeRanges(3 * BLOCK)
    offsets = [ranges.allocate(BLOCK) for _ in range(3)]
    assert offsets == [0, BLOCK, 2 * BLOCK]
    ranges.free(0, BLOCK)
    ranges.free(2 * BLOCK, BLOCK)
    assert ranges.largest_nbytes == BLOCK
    ranges.free(BLOCK, BLOCK)
    assert ranges.largest_nbytes == ranges.free_nbytes == 3 * BLOCK


@pytest.mark.parametrize("capacity_nbytes", [0, BLOCK])
def test_nothing_larger_than_the_region_is_given(capacity_nbytes: int) -> None:
    ranges = FreeRanges(capacity_nbytes)
    assert ranges.allocate(capacity_nbytes + 1) is None
    assert ranges.free_nbytes == capacity_nbytes
