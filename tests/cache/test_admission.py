"""Admission: what is worth a write to SSD, and what is worth another's place in DRAM."""

from __future__ import annotations

import functools
import hashlib
from collections import Counter
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from orbitkv.cache.admission import (
    HISTORY_KEYS,
    SkipReason,
    TinyLfu,
    WriteAdmission,
    WritePolicy,
    hashes_of,
)

COLD, DUPLICATE = SkipReason.COLD, SkipReason.DUPLICATE
PENDING, RESIDENT = SkipReason.PENDING, SkipReason.RESIDENT


def opened(policy: str, *, resident: str = "", pending: str = "") -> WriteAdmission[str]:
    return WriteAdmission(WritePolicy(policy), resident=set(resident), pending=set(pending))


def skipped(admission: WriteAdmission[str]) -> dict[SkipReason, int]:
    return {reason: count for reason, count in admission.skipped.items() if count}


def test_all_writes_newly_saved_objects() -> None:
    admission = opened("all")
    assert admission.save("abc") == ["a", "b", "c"]
    assert admission.save("a") == ["a"]  # as after a write that was dropped
    assert admission.admitted == 4
    assert skipped(admission) == {}


def test_all_writes_nothing_for_a_query() -> None:
    admission = opened("all")
    assert admission.query("abc") == []
    assert skipped(admission) == {}


def test_reuse_writes_an_object_that_is_saved_again() -> None:
    admission = opened("reuse")
    assert admission.save("ab") == []
    assert skipped(admission) == {COLD: 2}
    assert admission.save("bc") == ["b"]
    assert skipped(admission) == {COLD: 3}
    assert admission.admitted == 1


def test_reuse_writes_what_a_foreground_query_returned() -> None:
    admission = opened("reuse")
    assert admission.save("ab") == []
    assert admission.query("a") == ["a"]
    assert admission.query("z") == ["z"]  # saved longer ago than the history reaches
    assert admission.admitted == 2


def test_query_is_no_publication() -> None:
    admission = opened("reuse")
    admission.query("a")
    assert admission.history == ()
    assert admission.save("a") == []
    assert admission.save("a") == ["a"]


def test_key_repeated_in_one_batch_makes_no_reuse() -> None:
    admission = opened("reuse")
    assert admission.save("aaba") == []
    assert skipped(admission) == {COLD: 2, DUPLICATE: 2}
    assert admission.save("aa") == ["a"]
    assert admission.query("aa") == ["a"]
    assert skipped(admission) == {COLD: 2, DUPLICATE: 4}
    assert opened("all").save("aa") == ["a"]


@pytest.mark.parametrize("policy", ["all", "reuse"])
def test_what_ssd_has_or_is_about_to_have_is_skipped(policy: str) -> None:
    admission = opened(policy, resident="r", pending="p")
    admission.save("rpn")
    assert admission.save("rpn") == ["n"]
    cold = {COLD: 1} if policy == "reuse" else {}
    assert skipped(admission) == {RESIDENT: 2, PENDING: 2} | cold


def test_resident_and_pending_are_skipped_for_a_query_too() -> None:
    admission = opened("reuse", resident="r", pending="p")
    assert admission.query("rpn") == ["n"]
    assert skipped(admission) == {RESIDENT: 1, PENDING: 1}


def test_save_of_what_ssd_has_is_a_publication() -> None:
    resident = {"a"}
    admission = WriteAdmission(WritePolicy.REUSE, resident=resident, pending=set())
    assert admission.save("a") == []
    resident.clear()
    assert admission.save("a") == ["a"]


def test_write_that_was_dropped_can_be_asked_for_again() -> None:
    pending: set[str] = set()
    admission = WriteAdmission(WritePolicy.REUSE, resident=set(), pending=pending)
    admission.save("a")
    pending.update(admission.save("a"))
    assert admission.save("a") == []
    pending.clear()
    assert admission.save("a") == ["a"]


def test_history_holds_the_last_16384_keys() -> None:
    admission: WriteAdmission[int] = WriteAdmission(WritePolicy.REUSE, resident=(), pending=())
    assert admission.save(range(HISTORY_KEYS)) == []
    assert admission.save([0]) == [0]
    assert admission.save([-1]) == []
    assert len(admission.history) == HISTORY_KEYS == 16_384
    assert admission.save([1]) == []  # the oldest then, and cold again
    assert admission.save([0]) == [0]  # saved a second time, so it was younger


@settings(deadline=None)
@given(
    batches=st.lists(
        st.tuples(st.booleans(), st.lists(st.integers(0, 9), max_size=6)), max_size=20
    ),
    reuse=st.booleans(),
    resident=st.sets(st.integers(0, 9), max_size=3),
    pending=st.sets(st.integers(0, 9), max_size=3),
)
def test_any_sequence_is_judged_as_by_plain_lists(
    *,
    batches: list[tuple[bool, list[int]]],
    reuse: bool,
    resident: set[int],
    pending: set[int],
) -> None:
    policy = WritePolicy.REUSE if reuse else WritePolicy.ALL
    admission = WriteAdmission(policy, resident=resident, pending=pending)
    saved: list[int] = []
    reasons: Counter[SkipReason] = Counter()
    for is_save, keys in batches:
        distinct = list(dict.fromkeys(keys))
        judged = is_save or reuse
        wanted = [key for key in distinct if not is_save or not reuse or key in saved]
        written = [key for key in wanted if key not in resident | pending] if judged else []
        assert (admission.save if is_save else admission.query)(keys) == written
        if judged:
            reasons[DUPLICATE] += len(keys) - len(distinct)
            reasons[RESIDENT] += len(resident.intersection(distinct))
            reasons[PENDING] += len((pending - resident).intersection(distinct))
            reasons[COLD] += len(set(distinct) - set(wanted) - resident - pending)
        if is_save:
            saved += distinct
    assert {reason: count for reason, count in admission.skipped.items() if count} == +reasons
    assert set(admission.history) == (set(saved) if reuse else set())


@pytest.fixture(params=[False, True], ids=["interpreted", "compiled"])
def sketch(request: pytest.FixtureRequest) -> Callable[[int], TinyLfu]:
    return functools.partial(TinyLfu, compiled=request.param)


def hashed(*names: object) -> list[int]:
    digests = [hashlib.sha256(str(name).encode()).digest() for name in names]
    return [int(key) for key in hashes_of(digests)]


def test_hash_is_of_the_digest_alone() -> None:
    digest = bytes(range(32))
    assert hashes_of([digest, digest[::-1]]).tolist() == [
        int.from_bytes(digest[:8], "little"),
        int.from_bytes(digest[:-9:-1], "little"),
    ]
    assert hashes_of([]).tolist() == []


def test_newcomer_needs_the_victims_frequency(sketch: Callable[[int], TinyLfu]) -> None:
    lfu = sketch(1000)
    once, thrice, never = hashed("once", "thrice", "never")
    lfu.record([once, thrice, thrice, thrice])
    assert lfu.estimates([never, once, thrice]).tolist() == [0, 1, 3]
    assert not lfu.admits(once, thrice)
    assert lfu.admits(thrice, once)
    assert lfu.admits(once, once)  # a tie admits
    assert not lfu.admits(never, once)
    assert (lfu.admitted, lfu.rejected) == (2, 2)


def test_scan_of_new_keys_ousts_nothing_that_is_asked_for(
    sketch: Callable[[int], TinyLfu],
) -> None:
    lfu = sketch(1000)
    hot, scan = hashed(*range(100)), hashed(*range(1000, 5000))
    for _ in range(4):
        lfu.record(hot)
    lfu.record(scan)
    admitted = sum(lfu.admits(new, hot[index % 100]) for index, new in enumerate(scan))
    assert admitted <= 4  # of 4,000


def test_counters_end_at_fifteen_and_halve_when_the_sample_is_full(
    sketch: Callable[[int], TinyLfu],
) -> None:
    lfu = sketch(1024)
    hot, warm, filler = hashed("hot", "warm", "filler")
    lfu.record([hot] * 30 + [warm] * 7)
    assert lfu.estimates([hot, warm]).tolist() == [16, 7]
    lfu.record([filler] * (8 * 1024 - 38))
    assert lfu.estimates([hot, warm]).tolist() == [16, 7]
    lfu.record([filler])
    assert lfu.estimates([hot, warm]).tolist() == [7, 3]  # and the doorkeeper has forgotten
    lfu.record([filler] * (4 * 1024))
    assert lfu.estimates([hot, warm]).tolist() == [3, 1]


def test_growth_changes_no_estimate(sketch: Callable[[int], TinyLfu]) -> None:
    lfu = sketch(1)
    keys = hashed(*range(2000))
    lfu.record(keys)
    lfu.record(keys[:700])
    before = lfu.estimates(keys).tolist()
    lfu.grow(10_000)
    assert lfu.estimates(keys).tolist() == before


@settings(deadline=None)
@given(
    draws=st.lists(st.integers(0, 40), max_size=400),
    cut=st.integers(0, 400),
    compiled=st.booleans(),
)
def test_estimate_is_never_too_low_and_does_not_depend_on_batches(
    *, draws: list[int], cut: int, compiled: bool
) -> None:
    keys = hashed(*range(41))
    drawn = [keys[index] for index in draws]
    whole, halves = TinyLfu(64, compiled=compiled), TinyLfu(64, compiled=not compiled)
    whole.record(np.array(drawn, np.int64))
    halves.record(drawn[:cut])
    halves.record(drawn[cut:])
    true = Counter(draws)
    estimates = whole.estimates(keys).tolist()
    assert estimates == halves.estimates(keys).tolist()
    assert all(estimates[index] >= min(true[index], 16) for index in range(41))


class PlainSketch:
    """The sketch again, with one number a counter and sets of places."""

    def __init__(self, width: int) -> None:
        self.width = width
        self.counters: Counter[tuple[int, int]] = Counter()
        self.door: set[int] = set()
        self.recorded = 0

    def places(self, key: int, modulus: int) -> list[int]:
        low, high = key & 0x7FFFFFFF, (key >> 32) & 0x7FFFFFFF | 1
        return [(low + probe * high) % modulus for probe in range(6)]

    def counts(self, key: int) -> dict[tuple[int, int], int]:
        rows = enumerate(self.places(key, self.width)[:4])
        return {place: self.counters[place] for place in rows}

    def known(self, key: int) -> bool:
        return self.door.issuperset(self.places(key, 32 * self.width)[4:])

    def estimate(self, key: int) -> int:
        return min(self.counts(key).values()) + self.known(key)

    def record(self, key: int) -> None:
        counts = self.counts(key)
        if not self.known(key):
            self.door.update(self.places(key, 32 * self.width)[4:])
        elif min(counts.values()) < 15:
            for place, count in counts.items():
                self.counters[place] += count == min(counts.values())
        self.recorded += 1
        if self.recorded == 8 * self.width:
            self.counters = Counter({place: n // 2 for place, n in self.counters.items()})
            self.door.clear()
            self.recorded //= 2


class AgainstPlainSketch(RuleBasedStateMachine):
    """Any sequence of records gives the same estimates, through ageing too."""

    @initialize(compiled=st.booleans())
    def open(self, *, compiled: bool) -> None:
        # Few keys of few places, so that they meet; half of them negative.
        self.keys = [
            (high << 32 | low) - 2**63 * (low % 2) for high in range(6) for low in range(5)
        ]
        self.lfu = TinyLfu(1024, compiled=compiled)
        self.plain = PlainSketch(1024)

    @rule(indexes=st.lists(st.integers(0, 29), max_size=20), repeat=st.sampled_from([1, 3, 1500]))
    def record(self, indexes: list[int], repeat: int) -> None:
        keys = [self.keys[index] for index in indexes] * repeat
        self.lfu.record(keys)
        for key in keys:
            self.plain.record(key)

    @invariant()
    def estimates_are_equal(self) -> None:
        assert self.lfu.estimates(self.keys).tolist() == list(map(self.plain.estimate, self.keys))


TestAgainstPlainSketch = AgainstPlainSketch.TestCase
TestAgainstPlainSketch.settings = settings(max_examples=15, stateful_step_count=8, deadline=None)
