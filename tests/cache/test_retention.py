"""Retention: what goes first, what demand protects, and what a lease does not change."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orbitkv.cache import order
from orbitkv.cache.order import RetentionClass
from orbitkv.cache.retention import Retention
from orbitkv.errors import ConfigError, ImpossibleRequest
from tests.builders import BLOCK

RECLAIMABLE, PROBATIONARY, PROTECTED = RetentionClass
BLOCKS = 10


@pytest.fixture(params=[False, True], ids=["interpreted", "compiled"])
def opened(request: pytest.FixtureRequest) -> Callable[[int], Retention]:
    """Retention of ten blocks with a share for protected objects, in both ways to run it."""
    return lambda percent: Retention(BLOCKS * BLOCK, percent, compiled=request.param)


def admitted(retention: Retention, *blocks: int) -> list[int]:
    lengths = [count * BLOCK for count in blocks]
    return [int(handle) for handle in retention.admit(lengths, pinned=False)]


def listed(retention: Retention, kind: RetentionClass) -> list[int]:
    return [int(handle) for handle in retention.in_order(kind)]


def evicted(retention: Retention, blocks: int = 1) -> list[int]:
    return [int(handle) for handle in retention.evict(blocks * BLOCK)]


def test_new_and_ordinarily_restored_objects_are_probationary(
    opened: Callable[[int], Retention],
) -> None:
    retention = opened(80)
    first, second = admitted(retention, 1, 1)
    retention.touch([first])
    assert listed(retention, PROBATIONARY) == [second, first]
    assert retention.statistics().protected_nbytes == 0


def test_foreground_lookup_promotes(opened: Callable[[int], Retention]) -> None:
    retention = opened(80)
    first, second, third = admitted(retention, 1, 1, 2)
    retention.look_up([third, first])
    assert listed(retention, PROTECTED) == [third, first]
    assert listed(retention, PROBATIONARY) == [second]
    retention.look_up([third])  # protected already: more recent, and no second promotion
    assert listed(retention, PROTECTED) == [first, third]
    statistics = retention.statistics()
    assert (statistics.promotions, statistics.demotions) == (2, 0)
    assert statistics.protected_nbytes == 3 * BLOCK


def test_nothing_but_a_lookup_promotes(opened: Callable[[int], Retention]) -> None:
    retention = opened(100)
    (handle,) = admitted(retention, 1)
    retention.touch([handle])
    retention.pin([handle])
    retention.unpin([handle])
    retention.reclaim([handle])
    retention.touch([handle])
    assert retention.victim() == handle
    assert retention.statistics().promotions == 0
    assert retention.class_of(handle) is RECLAIMABLE


def test_promotion_demotes_the_oldest_protected_within_the_byte_limit(
    opened: Callable[[int], Retention],
) -> None:
    retention = opened(50)
    oldest, old, young, scan = admitted(retention, 2, 1, 2, 1)
    retention.look_up([oldest, old, young])
    assert retention.statistics().protected_nbytes == 5 * BLOCK
    retention.look_up([scan])
    assert listed(retention, PROTECTED) == [old, young, scan]
    assert listed(retention, PROBATIONARY) == [oldest]
    (newest,) = admitted(retention, 2)
    retention.look_up([newest])
    assert listed(retention, PROTECTED) == [young, scan, newest]
    assert listed(retention, PROBATIONARY) == [oldest, old]  # the demoted one is most recent
    statistics = retention.statistics()
    assert (statistics.promotions, statistics.demotions) == (5, 2)
    assert statistics.protected_nbytes == 5 * BLOCK


def test_object_larger_than_the_segment_is_not_promoted(
    opened: Callable[[int], Retention],
) -> None:
    retention = opened(50)
    small, large, other = admitted(retention, 1, 6, 1)
    retention.look_up([small])
    retention.look_up([large])
    assert listed(retention, PROTECTED) == [small]
    assert listed(retention, PROBATIONARY) == [other, large]  # used all the same
    assert retention.statistics().demotions == 0


def test_eviction_visits_reclaimable_then_probationary_then_protected(
    opened: Callable[[int], Retention],
) -> None:
    retention = opened(80)
    a, b, c, d, e, f = admitted(retention, 1, 1, 1, 1, 1, 1)
    retention.look_up([a, b])
    retention.reclaim([f, e])
    assert retention.victim() == f
    assert [evicted(retention)[0] for _ in range(6)] == [f, e, c, d, a, b]
    assert retention.statistics().evicted == {RECLAIMABLE: 2, PROBATIONARY: 2, PROTECTED: 2}
    assert retention.victim() is None
    assert evicted(retention) == []


def test_eviction_takes_no_more_than_is_wanted(opened: Callable[[int], Retention]) -> None:
    retention = opened(80)
    a, b, c = admitted(retention, 2, 3, 1)
    assert evicted(retention, 0) == []
    assert evicted(retention, 3) == [a, b]
    assert evicted(retention, 100) == [c]


def test_pinned_objects_are_skipped_and_keep_their_place(
    opened: Callable[[int], Retention],
) -> None:
    retention = opened(80)
    a, b, c, d, e = admitted(retention, 1, 1, 1, 1, 1)
    retention.pin([a, b, d])
    assert evicted(retention) == [c]
    assert evicted(retention) == [e]
    assert evicted(retention) == []
    (f,) = admitted(retention, 1)
    retention.unpin([d])
    retention.unpin([b])
    assert listed(retention, PROBATIONARY) == [a, b, d, f]
    assert evicted(retention, 9) == [b, d, f]
    retention.unpin([a])
    assert evicted(retention) == [a]


def test_protection_does_not_prevent_eviction_and_overrides_no_lease(
    opened: Callable[[int], Retention],
) -> None:
    retention = opened(100)
    a, b = admitted(retention, 1, 1)
    retention.look_up([a, b])
    retention.pin([a])
    assert evicted(retention, 2) == [b]
    retention.unpin([a])
    assert evicted(retention, 2) == [a]


def test_stale_reference_protects_no_replacement(opened: Callable[[int], Retention]) -> None:
    retention = opened(80)
    (before,) = admitted(retention, 1)
    assert evicted(retention) == [before]
    (after,) = admitted(retention, 1)  # in the same row
    assert after != before
    for use in (retention.look_up, retention.reclaim, retention.pin, retention.remove):
        use([before])
    assert listed(retention, PROBATIONARY) == [after]
    assert retention.class_of(before) is None
    assert retention.statistics().stale == 4
    assert evicted(retention) == [after]


def test_replica_demotion_and_cleanup_update_the_protected_count(
    opened: Callable[[int], Retention],
) -> None:
    retention = opened(80)
    a, b, c = admitted(retention, 1, 2, 3)
    retention.look_up([a, b, c])
    retention.reclaim([b, b])
    statistics = retention.statistics()
    assert (statistics.protected_nbytes, statistics.demotions) == (4 * BLOCK, 1)
    retention.pin([c])
    retention.remove([c, a])
    statistics = retention.statistics()
    assert statistics.protected_nbytes == 0
    assert statistics.resident == {RECLAIMABLE: 1, PROBATIONARY: 0, PROTECTED: 0}
    assert set(statistics.evicted.values()) == {0}


def test_replica_that_demand_asks_for_is_protected(opened: Callable[[int], Retention]) -> None:
    retention = opened(80)
    (replica,) = admitted(retention, 1)
    retention.reclaim([replica])
    retention.look_up([replica])
    assert listed(retention, PROTECTED) == [replica]


@given(uses=st.lists(st.tuples(st.sampled_from("lts"), st.integers(0, 12)), max_size=60))
def test_without_protection_it_is_a_plain_lru(uses: list[tuple[str, int]]) -> None:
    retention, plain = Retention(6 * BLOCK, 0, compiled=False), OrderedDict[int, int]()
    for use, key in uses:
        if key in plain:
            plain.move_to_end(key)
            (retention.look_up if use == "l" else retention.touch)([plain[key]])
        elif use == "s":
            if len(plain) == 6:
                assert evicted(retention) == [plain.popitem(last=False)[1]]
            (plain[key],) = admitted(retention, 1)
    assert listed(retention, PROBATIONARY) == list(plain.values())
    statistics = retention.statistics()
    assert statistics.promotions == statistics.protected_nbytes == 0


def test_order_outlives_growth(opened: Callable[[int], Retention]) -> None:
    retention = opened(80)
    handles = []
    for first in range(0, 20_000, 500):
        handles += admitted(retention, *[1 + index % 3 for index in range(first, first + 500)])
    assert len(set(handles)) == 20_000
    assert listed(retention, PROBATIONARY) == handles
    assert evicted(retention, 10**6) == handles


class CountingWords:
    """Words that count how often one is read."""

    def __init__(self, words: memoryview[int]) -> None:
        self.words = words
        self.reads = 0

    def __getitem__(self, at: int) -> int:
        self.reads += 1
        return self.words[at]

    def __setitem__(self, at: int, value: int) -> None:
        self.words[at] = value


def test_ten_thousand_pinned_at_the_end_do_not_slow_eviction() -> None:
    """Work is counted, not timed: words read for each eviction, once the pinned were passed."""
    retention = Retention(BLOCK, 0, compiled=False)
    pinned = admitted(retention, *[1] * 10_000)
    retention.pin(pinned)
    admitted(retention, *[1] * 2_000)
    evicted(retention)
    assert retention._state[order.TURN] == 10_000
    rows = CountingWords(retention._rows)
    retention._lists = (rows, retention._state)  # type: ignore[assignment]
    retention._passing = (rows, retention._state, retention._turns)  # type: ignore[assignment]
    for _ in range(1_000):
        assert len(evicted(retention)) == 1
    assert rows.reads < 1_000 * 20
    rows.reads = 0
    for handle in pinned[:500]:  # the oldest is released, and taken while 9,500 are pinned still
        retention.unpin([handle])
        assert evicted(retention) == [handle]
    assert rows.reads < 500 * 40
    rows.reads = 0
    retention.unpin(pinned[:499:-1])
    assert evicted(retention, 9_500) == pinned[500:]
    assert rows.reads < 9_500 * 40
    assert retention._state[order.TURN] == 10_000  # nobody was passed twice


def test_objects_pinned_again_while_queued_are_not_lost() -> None:
    retention = Retention(BLOCK, 0, compiled=False)
    a, b = admitted(retention, 1, 1)
    retention.pin([a])
    assert evicted(retention) == [b]
    retention.unpin([a])
    retention.pin([a])
    assert retention.victim() is None
    retention.unpin([a])
    retention.unpin([a])
    assert retention.victim() == a
    assert sum(map(len, retention._queued.values())) == 1
    assert evicted(retention) == [a]


def test_use_of_a_queued_object_makes_it_recent() -> None:
    retention = Retention(BLOCK, 0, compiled=False)
    a, b, c, d = admitted(retention, 1, 1, 1, 1)
    retention.pin([a])
    assert evicted(retention) == [b]
    retention.unpin([a])
    retention.touch([a])
    assert retention.victim() == c
    retention.pin([a, c])
    assert retention.victim() == d
    retention.unpin([a, c])
    assert evicted(retention, 3) == [c, d, a]


def test_row_of_a_queued_object_that_left_can_be_used_again() -> None:
    retention = Retention(BLOCK, 0, compiled=False)
    a, b, c = admitted(retention, 1, 1, 1)
    retention.pin([a])
    assert evicted(retention) == [b]
    retention.unpin([a])
    retention.remove([a])
    (d,) = admitted(retention, 1)
    retention.reclaim([d])
    retention.pin([d])
    assert retention.victim() == c
    retention.unpin([d])
    assert evicted(retention, 2) == [d, c]


@pytest.mark.parametrize("nbytes", [0, -BLOCK, BLOCK + 1, 2**26 * BLOCK])
def test_length_that_is_not_whole_blocks_is_refused(nbytes: int) -> None:
    retention = Retention(BLOCK, 0, compiled=False)
    with pytest.raises(ValueError, match=f"object of {nbytes} bytes; accepted: a multiple of 4096"):
        retention.admit([BLOCK, nbytes], pinned=False)
    assert retention.statistics().resident[PROBATIONARY] == 0


def test_more_objects_than_rows_can_count_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    retention = Retention(BLOCK, 0, compiled=False)
    handles = admitted(retention, 1, 2)
    monkeypatch.setattr(order, "MAX_ROWS", 1000)
    with pytest.raises(ImpossibleRequest, match="resident objects; accepted: 1000"):
        admitted(retention, *[1] * 1000)
    assert listed(retention, PROBATIONARY) == handles
    assert evicted(retention, 3) == handles


@pytest.mark.parametrize("percent", [-1, 101])
def test_share_out_of_range_is_refused(percent: int) -> None:
    with pytest.raises(ConfigError, match=f"cache_protected_percent {percent}; accepted: 0 to 100"):
        Retention(BLOCK, percent, compiled=False)
