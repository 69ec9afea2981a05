"""Retention, admission and budgets as a manager's callers meet them."""

from __future__ import annotations

import errno
import time
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

import pytest

from orbitkv import Manager, Restored
from orbitkv.cache.catalogue import Tier
from orbitkv.errors import Closed
from orbitkv.stages.base import Transfer
from orbitkv.stages.ticket import Failed, Warmed
from tests.builders import (
    BLOCK,
    REST_S,
    WAIT_S,
    Engine,
    Gate,
    Lanes,
    counters,
    grouped_geometry,
    numbered,
    page_hash,
    rest,
)
from tests.conftest import ManagerFactory

POOL = 10  # objects


@pytest.fixture(params=[False, True], ids=["interpreted", "compiled"])
def small(request: pytest.FixtureRequest, open_manager: ManagerFactory) -> ManagerFactory:
    """Managers whose pool has room for ten pages, with the policies' loops run either way."""

    def open_small(**settings: object) -> Manager:
        chosen: dict[str, object] = {
            "pool_nbytes": POOL * BLOCK,
            "compile_policies": request.param,
        }
        return open_manager(**(chosen | settings))

    return open_small


def tally(manager: Manager) -> Counter[str]:
    return Counter(counters(manager))


def in_dram(engine: Engine, names: Iterable[bytes]) -> list[bool]:
    found = {copy.digest for copy in engine.manager.core.catalogue.copies(Tier.DRAM)}
    digest_of = engine.instance.digests[0]
    return [digest_of[name] in found for name in names]


def scan(engine: Engine, count: int) -> None:
    """Save pages that nobody will ask for."""
    for index in range(count):
        engine.save({page_hash(("scan", index)): 0})


def test_what_a_query_found_outlives_a_scan(small: ManagerFactory) -> None:
    engine = Engine.register(small(cache_protected_percent=50))
    names = list(numbered(4))
    engine.save(numbered(4))
    assert engine.hits(names) == 4
    scan(engine, 3 * POOL)
    assert in_dram(engine, names) == [True] * 4
    seen = tally(engine.manager)
    assert (seen["promotions"], seen["protected_nbytes"]) == (4, 4 * BLOCK)
    assert seen["evicted_protected"] == 0
    assert seen["evicted_probationary"] == 3 * POOL + 4 - POOL


def test_without_protection_a_scan_takes_what_was_found_too(small: ManagerFactory) -> None:
    engine = Engine.register(small())
    names = list(numbered(4))
    engine.save(numbered(4))
    assert engine.hits(names) == 4
    scan(engine, 3 * POOL)
    assert in_dram(engine, names) == [False] * 4


def test_protection_stays_within_its_share_and_lets_the_oldest_go(small: ManagerFactory) -> None:
    engine = Engine.register(small(cache_protected_percent=30))
    for index in range(5):
        engine.save({page_hash(index): 0})
        engine.hits([page_hash(index)])
    seen = tally(engine.manager)
    assert (seen["protected_nbytes"], seen["promotions"], seen["demotions"]) == (3 * BLOCK, 5, 2)
    scan(engine, 3 * POOL)
    assert in_dram(engine, map(page_hash, range(5))) == [False, False, True, True, True]


def test_protection_does_not_keep_a_full_pool_from_demand(small: ManagerFactory) -> None:
    engine = Engine.register(small(cache_protected_percent=100), pages=2 * POOL)
    names = numbered(POOL)
    engine.save(names)
    assert engine.hits(list(names)) == POOL
    engine.save(numbered(POOL, first=100))
    assert sum(in_dram(engine, names)) < POOL
    assert tally(engine.manager)["evicted_protected"] > 0


def test_saves_and_restores_alone_protect_nothing(small: ManagerFactory, ssd_path: Path) -> None:
    engine = Engine.register(small(cache_protected_percent=50, ssd_cache_paths=ssd_path))
    engine.save(numbered(3))
    engine.manager.flush(evict_dram=True)
    assert engine.manager.core.catalogue.copies(Tier.DRAM) == ()
    assert len(engine.restored(numbered(3))) == 3, "the query finds them on SSD, not in DRAM"
    assert tally(engine.manager)["promotions"] == 0
    scan(engine, 2 * POOL)
    assert in_dram(engine, numbered(3)) == [False] * 3


def test_a_prefix_is_evicted_from_its_tail(small: ManagerFactory) -> None:
    engine = Engine.register(small(cache_protected_percent=0), pages=POOL)
    names = list(numbered(POOL))
    engine.save(numbered(POOL))
    assert engine.hits(names) == POOL
    scan(engine, 4)
    assert in_dram(engine, names) == [True] * 6 + [False] * 4


def test_leased_pages_are_passed_and_go_in_their_turn_after_it(small: ManagerFactory) -> None:
    engine = Engine.register(small(), pages=POOL)
    names = list(numbered(POOL))
    engine.save(numbered(POOL))
    with engine.manager.query(engine.instance, names[:3]):
        scan(engine, 3 * POOL)
        assert in_dram(engine, names[:3]) == [True] * 3
    scan(engine, 3 * POOL)
    assert in_dram(engine, names[:3]) == [False] * 3


# What is written to SSD ------------------------------------------------------------------------


def writes(engine: Engine) -> int:
    engine_rest = rest(engine.manager)
    assert engine_rest == []
    return tally(engine.manager)["ssd_writes"]


def test_reuse_leaves_the_first_save_unwritten_and_writes_the_second(
    small: ManagerFactory, ssd_path: Path
) -> None:
    engine = Engine.register(small(ssd_cache_paths=ssd_path, ssd_write_policy="reuse"))
    engine.save({page_hash("a"): 0})
    assert writes(engine) == 0
    engine.save({page_hash("a"): 0})  # DRAM has it: filtered before, and no publication
    assert writes(engine) == 0
    scan(engine, POOL)
    assert in_dram(engine, [page_hash("a")]) == [False]
    engine.save({page_hash("a"): 0})
    assert writes(engine) == 1
    seen = tally(engine.manager)
    assert seen["ssd_skips_cold"] == POOL + 1
    assert seen["ssd_writes_dropped"] == 0, "a skip is no drop"


def test_reuse_writes_what_a_foreground_query_returns(
    small: ManagerFactory, ssd_path: Path
) -> None:
    engine = Engine.register(small(ssd_cache_paths=ssd_path, ssd_write_policy="reuse"))
    engine.save(numbered(3))
    assert engine.hits([page_hash(0), page_hash(1)]) == 2
    assert writes(engine) == 2
    engine.manager.prepare(engine.instance, list(numbered(3))).release()
    engine.manager.warm(engine.instance, list(numbered(3))).result(WAIT_S)
    assert writes(engine) == 2, "preparing and warming are no demand"
    assert engine.hits([page_hash(0)]) == 1
    assert writes(engine) == 2
    assert tally(engine.manager)["ssd_skips_resident"] == 1


def test_a_write_under_way_is_not_asked_for_again(
    open_manager: ManagerFactory, ssd_path: Path
) -> None:
    gate, lanes = Gate(), Lanes()
    lanes.before["ring:write"] = gate.pass_through
    engine = Engine.register(
        open_manager(lanes=lanes, ssd_cache_paths=ssd_path, ssd_write_policy="reuse")
    )
    engine.save({page_hash("a"): 0})
    assert engine.hits([page_hash("a")]) == 1
    gate.await_arrival()
    assert engine.hits([page_hash("a")]) == 1
    gate.open()
    assert writes(engine) == 1
    assert tally(engine.manager)["ssd_skips_pending"] == 1


def test_all_writes_every_new_page_and_nothing_for_a_query(
    small: ManagerFactory, ssd_path: Path
) -> None:
    engine = Engine.register(small(ssd_cache_paths=ssd_path))
    engine.save(numbered(3))
    assert writes(engine) == 3
    engine.hits(list(numbered(3)))
    assert writes(engine) == 3


def test_a_page_named_twice_in_one_save_is_one_publication(
    small: ManagerFactory, ssd_path: Path
) -> None:
    engine = Engine.register(small(ssd_cache_paths=ssd_path, ssd_write_policy="reuse"))
    engine.save([(page_hash("a"), 0), (page_hash("a"), 1)])
    seen = tally(engine.manager)
    assert (seen["ssd_skips_duplicate"], seen["ssd_skips_cold"]) == (1, 1)
    assert writes(engine) == 0


# Who may enter a full pool ---------------------------------------------------------------------


def test_lfu_keeps_what_is_asked_for_from_what_is_not(small: ManagerFactory) -> None:
    engine = Engine.register(small(enable_lfu_admission=True), pages=POOL)
    engine.save(numbered(POOL))
    for _ in range(3):
        assert engine.hits(list(numbered(POOL))) == POOL
    outcome = engine.save({page_hash("cold"): 0})
    assert outcome.dropped == (page_hash("cold"),)
    assert in_dram(engine, numbered(POOL)) == [True] * POOL
    seen = tally(engine.manager)
    assert (seen["lfu_rejected"], seen["lfu_admitted"]) == (1, 0)


def test_lfu_lets_in_what_was_asked_for_as_often(small: ManagerFactory) -> None:
    engine = Engine.register(small(enable_lfu_admission=True), pages=POOL)
    engine.save(numbered(POOL))
    for _ in range(2):
        assert engine.hits([page_hash("wanted")]) == 0, "found or not, it is asked for"
    assert engine.save({page_hash("wanted"): 0}).stored == (page_hash("wanted"),)
    assert tally(engine.manager)["lfu_admitted"] == 1


def test_lfu_asks_nobody_while_there_is_room(small: ManagerFactory) -> None:
    engine = Engine.register(small(enable_lfu_admission=True), pages=POOL)
    assert len(engine.save(numbered(POOL)).stored) == POOL
    assert tally(engine.manager)["lfu_rejected"] == 0


# Queries ---------------------------------------------------------------------------------------


def test_a_query_over_the_budget_is_a_miss_at_once(small: ManagerFactory) -> None:
    engine = Engine.register(small(query_budget_nbytes=3 * BLOCK))
    engine.save(numbered(5))
    assert engine.hits(list(numbered(4))) == 0
    assert engine.hits(list(numbered(3))) == 3
    seen = tally(engine.manager)
    assert (seen["query_oversized"], seen["query_budget_full"]) == (1, 0)


def test_what_leases_hold_is_missing_from_the_budget_until_each_ends(
    small: ManagerFactory,
) -> None:
    engine = Engine.register(small(query_budget_nbytes=3 * BLOCK))
    engine.save(numbered(5))
    first = engine.manager.query(engine.instance, list(numbered(2)))
    assert engine.hits(list(numbered(2))) == 0
    assert tally(engine.manager)["query_budget_full"] == 1
    assert engine.hits([page_hash(4)]) == 1, "one block is left"
    first.release()
    assert engine.hits(list(numbered(3))) == 3
    assert len(engine.restored(numbered(3))) == 3
    assert engine.hits(list(numbered(3))) == 3, "a restore that has ended holds nothing"


def test_a_restore_holds_the_budget_to_its_end(open_manager: ManagerFactory) -> None:
    gate, lanes = Gate(), Lanes()
    engine = Engine.register(open_manager(lanes=lanes, query_budget_nbytes=2 * BLOCK))
    engine.save(numbered(2))
    lanes.before["stream:restore"] = gate.pass_through
    lease = engine.manager.query(engine.instance, list(numbered(2)))
    ticket = engine.manager.restore(lease, numbered(2))
    gate.await_arrival()
    assert engine.hits([page_hash(0)]) == 0
    gate.open()
    assert isinstance(ticket.result(WAIT_S), Restored)
    assert engine.hits([page_hash(0)]) == 1


def test_one_instance_cannot_take_the_budget_of_all(small: ManagerFactory) -> None:
    manager = small(query_budget_nbytes=4 * BLOCK, query_instance_budget_nbytes=2 * BLOCK)
    one, other = Engine.register(manager, name="one"), Engine.register(manager, name="other")
    one.save(numbered(3))
    other.save(numbered(3, first=50))
    assert one.hits(list(numbered(3))) == 0
    with manager.query(one.instance, list(numbered(2))) as held:
        assert len(held.hashes) == 2
        assert one.hits([page_hash(2)]) == 0
        assert other.hits(list(numbered(2, first=50))) == 2
    manager.query(one.instance, list(numbered(2)))
    manager.unregister(one.instance)
    assert rest(manager) == [], "an instance that goes takes its claims along"


def test_a_lease_that_nobody_claims_ends_by_itself(small: ManagerFactory) -> None:
    engine = Engine.register(small(lease_ttl_s=0.05))
    engine.save(numbered(2))
    lease = engine.manager.query(engine.instance, list(numbered(2)))
    deadline = time.monotonic() + REST_S
    while engine.manager.leaks() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert engine.manager.leaks() == []
    assert tally(engine.manager)["leases_expired"] == 1
    with pytest.raises(Closed, match="the lease has expired; query again"):
        engine.manager.restore(lease, numbered(2))
    lease.release()


def test_a_lease_that_is_restored_in_time_does_not_expire(open_manager: ManagerFactory) -> None:
    gate, lanes = Gate(), Lanes()
    engine = Engine.register(open_manager(lanes=lanes, lease_ttl_s=0.1))
    engine.save(numbered(1))
    lanes.before["stream:restore"] = gate.pass_through
    ticket = engine.manager.restore(
        engine.manager.query(engine.instance, list(numbered(1))), numbered(1)
    )
    gate.await_arrival()
    time.sleep(0.2)
    gate.open()
    assert isinstance(ticket.result(WAIT_S), Restored)
    assert tally(engine.manager)["leases_expired"] == 0


# Warming and preparing -------------------------------------------------------------------------


def on_ssd(engine: Engine, count: int, *, first: int = 0) -> dict[bytes, int]:
    engine.save(numbered(count, first=first))
    engine.manager.flush(evict_dram=True)
    return numbered(count, first=first)


def test_warming_brings_to_dram_what_ssd_alone_has(small: ManagerFactory, ssd_path: Path) -> None:
    engine = Engine.register(small(ssd_cache_paths=ssd_path, cache_protected_percent=50))
    names = on_ssd(engine, 3)
    asked = [*names, page_hash("nowhere"), page_hash(0)]
    ticket = engine.manager.warm(engine.instance, asked)
    assert ticket.result(WAIT_S) == Warmed(tuple(names), (page_hash("nowhere"),))
    assert in_dram(engine, names) == [True] * 3
    seen = tally(engine.manager)
    assert (seen["ssd_reads"], seen["promotions"]) == (3, 0)
    assert rest(engine.manager) == [], "nobody owns what is warm"
    again = engine.manager.warm(engine.instance, list(names)).result(WAIT_S)
    assert again == Warmed(tuple(names), ())
    assert tally(engine.manager)["ssd_reads"] == 3
    engine.clear()
    assert len(engine.restored(names)) == 3


def test_preparing_leases_a_prefix_and_restores_it_from_dram(
    small: ManagerFactory, ssd_path: Path
) -> None:
    engine = Engine.register(small(ssd_cache_paths=ssd_path, cache_protected_percent=50))
    wanted = [engine.page(index) for index in range(3)]
    names = on_ssd(engine, 3)
    lease = engine.manager.prepare(engine.instance, [*names, page_hash("nowhere")])
    assert lease.hashes == tuple(names)
    assert lease.preparation is not None
    assert lease.preparation.result(WAIT_S) == Warmed(tuple(names), ())
    engine.clear()
    outcome = engine.manager.restore(lease, names).result(WAIT_S)
    assert isinstance(outcome, Restored)
    assert [engine.page(index) for index in range(3)] == wanted
    seen = tally(engine.manager)
    assert (seen["ssd_reads"], seen["promotions"]) == (3, 0)


def test_warming_keeps_no_more_of_ssd_than_its_next_batches(
    open_manager: ManagerFactory, ssd_path: Path
) -> None:
    gate, lanes = Gate(), Lanes()
    settings = {"pool_nbytes": 8 * BLOCK, "ssd_cache_capacity_nbytes": 300 * BLOCK}
    engine = Engine.register(
        open_manager(lanes=lanes, ssd_cache_paths=ssd_path, **settings), pages=8
    )
    names = []
    for first in range(0, 240, 8):
        names += on_ssd(engine, 8, first=first)
    lanes.before["ring:read"] = gate.pass_through
    ticket = engine.manager.warm(engine.instance, names)
    gate.await_arrival()
    held = sum(copy.pins > 0 for copy in engine.manager.core.catalogue.copies(Tier.SSD))
    assert 0 < held <= 120, "more than U and its queue have at once"
    gate.open()
    assert ticket.result(WAIT_S) == Warmed(tuple(names), ())
    assert rest(engine.manager) == []


def test_warming_that_is_cancelled_or_fails_leaves_nothing(
    open_manager: ManagerFactory, ssd_path: Path
) -> None:
    gate, lanes = Gate(), Lanes()
    engine = Engine.register(open_manager(lanes=lanes, ssd_cache_paths=ssd_path))
    names = on_ssd(engine, 3)
    lanes.before["ring:read"] = gate.pass_through
    ticket = engine.manager.warm(engine.instance, list(names))
    gate.await_arrival()
    ticket.cancel()
    gate.open()
    assert isinstance(ticket.result(WAIT_S), Failed)
    assert rest(engine.manager) == []
    lanes.on_read = lambda _: OSError(errno.EIO, "I/O error")
    outcome = engine.manager.warm(engine.instance, list(names)).result(WAIT_S)
    assert outcome == Warmed((), tuple(names))
    assert rest(engine.manager) == []


# Reads that several want -----------------------------------------------------------------------


def test_reads_of_the_same_objects_are_made_once(
    open_manager: ManagerFactory, ssd_path: Path
) -> None:
    gate, lanes = Gate(), Lanes()
    manager = open_manager(lanes=lanes, ssd_cache_paths=ssd_path)
    one = Engine.register(manager)
    other = Engine.register(manager, seed=None)
    wanted = [one.page(index) for index in range(3)]
    names = on_ssd(one, 3)
    one.clear()
    lanes.before["ring:read"] = gate.pass_through
    tickets = [
        manager.restore(manager.query(engine.instance, list(names)), names)
        for engine in (one, other)
    ]
    gate.await_arrival()
    time.sleep(0.1)
    gate.open()
    for ticket, engine in zip(tickets, (one, other), strict=True):
        assert isinstance(ticket.result(WAIT_S), Restored)
        assert [engine.page(index) for index in range(3)] == wanted
    seen = tally(manager)
    assert (seen["ssd_reads"], seen["ssd_reads_shared"]) == (3, 3)
    assert seen["duplicate_dram"] == 0


@pytest.mark.parametrize("leaves", ["the first", "the second"])
def test_who_shares_a_read_does_not_depend_on_who_goes_away(
    open_manager: ManagerFactory, ssd_path: Path, leaves: str
) -> None:
    gate, lanes = Gate(), Lanes()
    manager = open_manager(lanes=lanes, ssd_cache_paths=ssd_path)
    engine = Engine.register(manager, pages=16)
    wanted = [engine.page(index) for index in range(3)]
    names = on_ssd(engine, 3)
    lanes.before["ring:read"] = gate.pass_through
    first, second = (
        manager.restore(
            manager.query(engine.instance, list(names)),
            {name: index + at for name, index in names.items()},
        )
        for at in (4, 8)
    )
    gate.await_arrival()
    time.sleep(0.1)
    (first if leaves == "the first" else second).cancel()
    gate.open()
    gone, stayed = (first, second) if leaves == "the first" else (second, first)
    assert isinstance(gone.result(WAIT_S), Failed)
    assert isinstance(stayed.result(WAIT_S), Restored)
    at = 8 if leaves == "the first" else 4
    assert [engine.page(at + index) for index in range(3)] == wanted
    assert rest(manager) == []


def test_a_shared_read_that_fails_is_a_miss_for_all(
    open_manager: ManagerFactory, ssd_path: Path
) -> None:
    gate, lanes = Gate(), Lanes()
    manager = open_manager(lanes=lanes, ssd_cache_paths=ssd_path)
    engine = Engine.register(manager, pages=16)
    names = on_ssd(engine, 2)
    offset = engine.copy(page_hash(0), Tier.SSD).offset

    def fail_one(transfer: Transfer) -> OSError | None:
        return OSError(errno.EIO, "I/O error") if transfer.offset == offset else None

    lanes.on_read = fail_one
    lanes.before["ring:read"] = gate.pass_through
    tickets = [
        manager.restore(
            manager.query(engine.instance, list(names)),
            {name: index + at for name, index in names.items()},
        )
        for at in (4, 8)
    ]
    gate.await_arrival()
    time.sleep(0.1)
    gate.open()
    for ticket in tickets:
        outcome = ticket.result(WAIT_S)
        assert isinstance(outcome, Restored)
        assert (outcome.restored, outcome.missed) == ((page_hash(1),), (page_hash(0),))
    assert tally(manager)["ssd_read_faults"] == 1
    assert rest(manager) == []


def test_a_page_of_several_groups_is_found_only_whole(
    small: ManagerFactory, ssd_path: Path
) -> None:
    geometry = grouped_geometry()
    engine = Engine.register(
        small(ssd_cache_paths=ssd_path, cache_protected_percent=50), geometry=geometry
    )
    engine.save(numbered(2))
    assert engine.hits(list(numbered(2))) == 2
    assert tally(engine.manager)["promotions"] == 4, "both groups of both pages"
    engine.manager.flush(evict_dram=True)
    outcome = engine.manager.warm(engine.instance, list(numbered(2))).result(WAIT_S)
    assert outcome == Warmed(tuple(numbered(2)), ())
    assert len(engine.restored(numbered(2))) == 2
