"""The embedded manager: what engines ask of it, from any thread or loop, and what it refuses."""

from __future__ import annotations

import asyncio
import os
import random
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch

from orbitkv import Config, Manager
from orbitkv.cache.catalogue import Tier
from orbitkv.config import MIB
from orbitkv.errors import (
    Closed,
    DestinationError,
    GeometryError,
    GraphError,
    ImpossibleRequest,
    OrbitError,
    StoreError,
    Unavailable,
)
from orbitkv.segment import NHD, Role
from orbitkv.stages.ticket import Miss, Outcome, Restored, Saved
from tests.builders import (
    BLOCK,
    TOY_OBJECT_NBYTES,
    WAIT_S,
    Engine,
    Gate,
    Lanes,
    big_geometry,
    comes_to_refuse,
    comes_to_wait,
    counters,
    definition,
    ended,
    grouped_geometry,
    in_thread,
    model,
    numbered,
    page_hash,
    rest,
    slot,
    tensors_of,
    toy_geometry,
    toy_geometry_of_slots,
)
from tests.conftest import ManagerFactory

BACKENDS = ["auto", "preadv"]


# What goes out comes back ----------------------------------------------------------------------


def test_saved_pages_come_back_from_dram_byte_for_byte(open_manager: ManagerFactory) -> None:
    engine = Engine.register(open_manager())
    wanted = [engine.page(index) for index in range(8)]
    assert set(engine.save(numbered(8)).stored) == set(numbered(8))
    engine.clear()
    assert engine.restored(numbered(8)) == tuple(numbered(8))
    assert [engine.page(index) for index in range(8)] == wanted


@pytest.mark.parametrize("backend", BACKENDS)
def test_saved_pages_come_back_from_ssd_byte_for_byte(
    open_manager: ManagerFactory, ssd_path: Path, backend: str
) -> None:
    manager = open_manager(ssd_cache_paths=ssd_path, ssd_backend=backend)
    engine = Engine.register(manager)
    wanted = [engine.page(index) for index in range(8)]
    engine.save(numbered(8))
    flushed = manager.flush(evict_dram=True)
    assert (flushed.unwritten, flushed.evicted_nbytes) == (0, 8 * TOY_OBJECT_NBYTES)
    engine.clear()
    with manager.query(engine.instance, list(numbered(8))) as lease:
        assert lease.tiers() == {Tier.DRAM: 0, Tier.SSD: 8}
    assert engine.restored(numbered(8)) == tuple(numbered(8))
    assert [engine.page(index) for index in range(8)] == wanted
    with manager.query(engine.instance, list(numbered(8))) as lease:
        assert lease.tiers() == {Tier.DRAM: 8, Tier.SSD: 0}, "a demand read promotes"


def test_pages_may_go_to_other_places_than_they_came_from(open_manager: ManagerFactory) -> None:
    engine = Engine.register(open_manager())
    wanted = [engine.page(index) for index in range(8)]
    engine.save(numbered(8))
    engine.clear()
    destinations = {page: 7 - index for page, index in numbered(8).items()}
    engine.restored(destinations)
    assert [engine.page(index) for index in range(8)] == wanted[::-1]


def test_one_restore_mixes_tiers(open_manager: ManagerFactory, ssd_path: Path) -> None:
    manager = open_manager(ssd_cache_paths=ssd_path)
    engine = Engine.register(manager)
    wanted = [engine.page(index) for index in range(6)]
    pages = numbered(6)
    engine.save({page: index for page, index in pages.items() if index % 2})
    manager.flush(evict_dram=True)
    engine.save({page: index for page, index in pages.items() if not index % 2})
    engine.clear()
    lease = manager.query(engine.instance, list(pages))
    assert lease.tiers() == {Tier.DRAM: 3, Tier.SSD: 3}
    outcome = manager.restore(lease, pages).result(WAIT_S)
    assert isinstance(outcome, Restored)
    assert set(outcome.restored) == set(pages)
    assert [engine.page(index) for index in range(6)] == wanted


def test_request_of_many_batches_is_one_ticket(
    open_manager: ManagerFactory, ssd_path: Path
) -> None:
    """More segments and more bytes than one batch takes, and more than the queues hold."""
    manager = open_manager(
        pool_nbytes=48 * MIB, ssd_cache_paths=ssd_path, ssd_cache_capacity_nbytes=48 * MIB
    )
    engine = Engine.register(manager, pages=40, geometry=big_geometry(MIB))
    wanted = [hash(engine.page(index)) for index in range(40)]
    engine.save(numbered(40))
    nodes = manager.statistics().nodes["save"]
    assert nodes["E"].batches > 1
    manager.flush(evict_dram=True)
    engine.clear()
    assert set(engine.restored(numbered(40))) == set(numbered(40))
    assert [hash(engine.page(index)) for index in range(40)] == wanted


def test_strided_torch_tensors_and_packed_slots_come_back(open_manager: ManagerFactory) -> None:
    manager = open_manager()
    geometry = toy_geometry_of_slots(
        slot("k0", 0, Role.K, axes=NHD, dtype="bfloat16"),
        slot("kv1", 1, Role.KV, dtype="float32"),
        page_tokens=4,
    )
    pages = 5
    both = torch.randn(pages, 4, 2, 2, 8).to(torch.bfloat16)  # K and V side by side: strided
    packed = torch.randn(2, pages, 4, 16).transpose(0, 1)
    tensors = {"k0": both[:, :, 0], "kv1": packed}
    instance = manager.register(geometry, tensors, model=model())
    pairs = numbered(pages)
    assert len(manager.publish(instance, pairs.items()).result(WAIT_S).stored) == pages  # type: ignore[union-attr]
    saved = {name: tensor.clone() for name, tensor in tensors.items()}
    untouched = both[:, :, 1].clone()
    for tensor in tensors.values():
        tensor.zero_()
    lease = manager.query(instance, list(pairs))
    manager.restore(lease, pairs).result(WAIT_S)
    for name, tensor in tensors.items():
        assert torch.equal(tensor.view(torch.uint8), saved[name].view(torch.uint8))
    assert torch.equal(both[:, :, 1], untouched), "what was not registered was written to"


def test_pages_of_equal_content_and_other_hashes_are_objects_of_their_own(
    open_manager: ManagerFactory,
) -> None:
    engine = Engine.register(open_manager(), seed=None)
    assert len(engine.save(numbered(2)).stored) == 2
    assert engine.manager.statistics().pool_used_nbytes == 2 * TOY_OBJECT_NBYTES


def test_what_is_resident_is_not_copied_again(open_manager: ManagerFactory) -> None:
    engine = Engine.register(open_manager())
    engine.save(numbered(2))
    before = engine.manager.statistics().nodes["save"]["E"].batches
    saved = engine.save(numbered(3))
    assert (saved.stored, set(saved.resident)) == ((page_hash(2),), set(numbered(2)))
    assert set(engine.save(numbered(3)).resident) == set(numbered(3))
    assert engine.manager.statistics().nodes["save"]["E"].batches == before + 1


def test_empty_requests_end_at_once(open_manager: ManagerFactory) -> None:
    engine = Engine.register(open_manager())
    assert engine.save([]) == Saved((), (), ())
    assert engine.restore({}) == Miss(())
    with engine.manager.query(engine.instance, []) as lease:
        assert lease.hashes == ()


def test_outcome_names_pages_in_the_order_asked_for(open_manager: ManagerFactory) -> None:
    engine = Engine.register(open_manager())
    pages = list(numbered(8))
    assert engine.save({page: index for index, page in enumerate(pages[:4])}).stored == tuple(
        pages[:4]
    )
    saved = engine.save(numbered(8))
    assert saved == Saved(tuple(pages[4:]), tuple(pages[:4]), ())
    assert engine.restored(numbered(8)) == tuple(pages)


def test_one_hash_for_two_pages_is_saved_once_from_the_first(open_manager: ManagerFactory) -> None:
    engine = Engine.register(open_manager())
    first = engine.page(3)
    assert engine.save([(page_hash("x"), 3), (page_hash("x"), 5)]).stored == (page_hash("x"),)
    engine.restored({page_hash("x"): 0})
    assert engine.page(0) == first


def test_ready_event_is_waited_for_before_a_page_is_read(open_manager: ManagerFactory) -> None:
    engine = Engine.register(open_manager())
    ready = threading.Event()
    ticket = engine.manager.publish(engine.instance, [(page_hash(0), 0)], ready=ready)
    engine.tensors["k0"][0] = 3  # the engine is still writing
    wanted = engine.page(0)
    assert not ticket.done
    ready.set()
    assert isinstance(ticket.result(WAIT_S), Saved)
    engine.clear()
    engine.restored({page_hash(0): 0})
    assert engine.page(0) == wanted


# Query and leases ------------------------------------------------------------------------------


def test_query_stops_at_the_first_page_that_is_not_there(open_manager: ManagerFactory) -> None:
    engine = Engine.register(open_manager())
    pages = list(numbered(6))
    engine.save({pages[index]: index for index in (0, 1, 3, 4)})
    with engine.manager.query(engine.instance, pages) as lease:
        assert lease.hashes == tuple(pages[:2])
    assert engine.hits(pages[2:]) == 0
    assert engine.hits(pages[3:]) == 2


def test_leased_pages_are_not_evicted_and_others_are(open_manager: ManagerFactory) -> None:
    engine = Engine.register(open_manager(pool_nbytes=4 * BLOCK))
    wanted = [engine.page(index) for index in range(2)]
    engine.save(numbered(4))
    lease = engine.manager.query(engine.instance, [page_hash(0), page_hash(1)])
    engine.save({page_hash("new 1"): 6, page_hash("new 2"): 7})
    assert engine.hits([page_hash(2)]) == engine.hits([page_hash(3)]) == 0
    engine.clear()
    outcome = engine.manager.restore(lease, numbered(2)).result(WAIT_S)
    assert isinstance(outcome, Restored)
    assert [engine.page(index) for index in range(2)] == wanted


def test_restore_of_a_part_of_a_lease_lets_the_rest_go(open_manager: ManagerFactory) -> None:
    engine = Engine.register(open_manager())
    engine.save(numbered(3))
    lease = engine.manager.query(engine.instance, list(numbered(3)))
    outcome = engine.manager.restore(lease, {page_hash(1): 7}).result(WAIT_S)
    assert outcome == Restored((page_hash(1),), ())
    assert engine.manager.leaks() == []


def test_lease_may_be_released_twice_and_after_a_restore(open_manager: ManagerFactory) -> None:
    engine = Engine.register(open_manager())
    engine.save(numbered(1))
    lease = engine.manager.query(engine.instance, list(numbered(1)))
    lease.release()
    lease.release()
    with engine.manager.query(engine.instance, list(numbered(1))) as lease:
        engine.manager.restore(lease, numbered(1)).result(WAIT_S)
    assert engine.manager.leaks() == []
    with pytest.raises(Closed, match="released or restored before"):
        engine.manager.restore(lease, numbered(1))


def test_two_leases_of_one_page_each_keep_it(open_manager: ManagerFactory) -> None:
    engine = Engine.register(open_manager(pool_nbytes=2 * BLOCK))
    engine.save(numbered(1))
    leases = [engine.manager.query(engine.instance, list(numbered(1))) for _ in range(2)]
    leases[0].release()
    engine.save({page_hash("a"): 1})
    engine.save({page_hash("b"): 2})
    assert engine.hits(list(numbered(1))) == 1
    leases[1].release()


def test_page_asked_for_twice_in_one_query_is_restored_once(open_manager: ManagerFactory) -> None:
    engine = Engine.register(open_manager())
    engine.save(numbered(1))
    lease = engine.manager.query(engine.instance, [page_hash(0), page_hash(0)])
    outcome = engine.manager.restore(lease, {page_hash(0): 1}).result(WAIT_S)
    assert outcome == Restored((page_hash(0),), ())
    assert engine.page(1) == engine.page(0)


# Bad input -------------------------------------------------------------------------------------


@pytest.mark.parametrize("index", [-1, 8, 2**40])
def test_page_index_out_of_range_is_refused_and_nothing_is_saved(
    open_manager: ManagerFactory, index: int
) -> None:
    engine = Engine.register(open_manager())
    with pytest.raises(DestinationError, match=f"page index {index}; accepted: 0 to 7"):
        engine.manager.publish(engine.instance, [(page_hash(0), 0), (page_hash(1), index)])
    assert engine.hits([page_hash(0)]) == 0


def test_page_index_that_comes_twice_is_refused(open_manager: ManagerFactory) -> None:
    engine = Engine.register(open_manager())
    with pytest.raises(DestinationError, match="page index 3 comes twice"):
        engine.manager.publish(engine.instance, [(page_hash(0), 3), (page_hash(1), 3)])


@pytest.mark.parametrize("index", [1.0, 1.5, "1", None])
def test_page_index_that_is_no_integer_is_refused_and_hurts_nobody_else(
    open_manager: ManagerFactory, index: object
) -> None:
    engine = Engine.register(open_manager())
    with pytest.raises((DestinationError, TypeError)):
        engine.manager.publish(engine.instance, [(page_hash(0), index)]).result(WAIT_S)  # type: ignore[list-item]
    assert engine.save({page_hash(1): 1}).stored == (page_hash(1),), "the pipeline has stopped"
    lease = engine.manager.query(engine.instance, [page_hash(1)])
    with pytest.raises((DestinationError, TypeError)):
        engine.manager.restore(lease, {page_hash(1): index}).result(WAIT_S)  # type: ignore[dict-item]
    lease.release()
    assert engine.restored({page_hash(1): 2}) == (page_hash(1),)


def test_numpy_integers_are_page_indices(open_manager: ManagerFactory) -> None:
    engine = Engine.register(open_manager())
    assert engine.save({page_hash(0): np.int64(3)}).stored
    assert engine.restored({page_hash(0): np.int32(5)}) == (page_hash(0),)
    assert engine.page(5) == engine.page(3)


def test_ready_that_nobody_can_wait_for_is_refused_and_hurts_nobody_else(
    open_manager: ManagerFactory,
) -> None:
    engine = Engine.register(open_manager())
    for ready in (object(), asyncio.Event()):  # the second waits for nobody but a coroutine
        with pytest.raises(TypeError, match=r"accepted: an event that a thread can wait\(\) for"):
            engine.manager.publish(engine.instance, [(page_hash(0), 0)], ready=ready)
    assert engine.save({page_hash(1): 1}).stored


def test_every_destination_is_checked_before_a_byte_moves(open_manager: ManagerFactory) -> None:
    engine = Engine.register(open_manager())
    engine.save(numbered(3))
    engine.clear()
    pages = list(numbered(3))
    lease = engine.manager.query(engine.instance, pages)
    for bad, fault in (
        ({pages[0]: 0, pages[1]: 8}, "page index 8; accepted: 0 to 7"),
        ({pages[0]: 0, pages[1]: -1}, "page index -1"),
        ({pages[0]: 0, pages[1]: 0}, "page index 0 comes twice"),
        (
            {pages[0]: 0, page_hash("other"): 1},
            f"{page_hash('other').hex()[:16]}.*not in the lease",
        ),
    ):
        with pytest.raises(DestinationError, match=fault):
            engine.manager.restore(lease, bad)
    assert all(engine.is_clear(index) for index in range(8))
    assert engine.manager.restore(lease, numbered(3)).result(WAIT_S) == Restored(tuple(pages), ())


def test_instance_of_another_manager_is_not_registered_here(open_manager: ManagerFactory) -> None:
    engine, other = Engine.register(open_manager()), open_manager()
    engine.save(numbered(1))
    lease = engine.manager.query(engine.instance, list(numbered(1)))
    with pytest.raises(Closed, match="not registered here"):
        other.publish(engine.instance, [(page_hash(0), 0)])
    with pytest.raises(Closed, match="not registered here"):
        other.query(engine.instance, [page_hash(0)])
    with pytest.raises(Closed, match="not registered here"):
        other.restore(lease, numbered(1))
    with pytest.raises(Closed, match="not registered here"):
        other.unregister(engine.instance)
    lease.release()


def test_unregistered_instance_takes_no_more_work_and_its_leases_end(
    open_manager: ManagerFactory,
) -> None:
    engine = Engine.register(open_manager())
    engine.save(numbered(1))
    lease = engine.manager.query(engine.instance, list(numbered(1)))
    engine.manager.unregister(engine.instance)
    assert engine.manager.leaks() == []
    for call in (
        lambda: engine.manager.publish(engine.instance, [(page_hash(0), 0)]),
        lambda: engine.manager.query(engine.instance, [page_hash(0)]),
        lambda: engine.manager.restore(lease, numbered(1)),
        lambda: engine.manager.unregister(engine.instance),
    ):
        with pytest.raises(Closed, match="not registered here"):
            call()
    lease.release()


def test_destinations_are_those_of_the_leases_own_instance(open_manager: ManagerFactory) -> None:
    """A small instance's lease does not reach the pages that only the large one has."""
    manager = open_manager()
    large, small = Engine.register(manager, pages=8), Engine.register(manager, pages=2)
    large.save(numbered(3))
    lease = manager.query(small.instance, list(numbered(3)))
    assert len(lease.hashes) == 3, "equal namespaces share objects"
    with pytest.raises(DestinationError, match="page index 5; accepted: 0 to 1"):
        manager.restore(lease, {page_hash(0): 5})
    assert isinstance(manager.restore(lease, {page_hash(2): 1}).result(WAIT_S), Restored)
    assert small.page(1) == large.page(2)


def test_tensor_other_than_declared_is_refused_with_every_difference(
    open_manager: ManagerFactory,
) -> None:
    manager = open_manager()
    geometry = toy_geometry()
    tensors = tensors_of(geometry, 4)
    tensors["k0"] = tensors["k0"].astype(np.float32)
    tensors["v0"] = tensors["v0"][..., ::2]
    tensors["k1"] = tensors["k1"][:3]
    with pytest.raises(GeometryError) as caught:
        manager.register(geometry, tensors, model=model())
    faults = " ".join(caught.value.faults)
    assert all(
        name in faults for name in ("'k0': dtype", "'v0': shape", "'v0': stride", "'k1' has 3")
    )
    declared = toy_geometry(strides=(1000, 100, 10, 1))
    with pytest.raises(GeometryError, match=r"strides .*; declared \(1000, 100, 10, 1\)"):
        manager.register(declared, tensors_of(declared, 4), model=model())


def test_pool_too_small_for_one_page_is_told_at_registration(open_manager: ManagerFactory) -> None:
    manager = open_manager(pool_nbytes=2 * BLOCK)
    with pytest.raises(
        ImpossibleRequest, match=rf"takes {3 * BLOCK} bytes; too small for it: pool: {2 * BLOCK}$"
    ):
        Engine.register(manager, geometry=big_geometry(2 * BLOCK))
    Engine.register(manager, geometry=big_geometry(BLOCK))


def test_codec_budget_too_small_for_one_page_is_told_at_registration(
    open_manager: ManagerFactory,
) -> None:
    manager = open_manager(storage_codec_budget_nbytes=BLOCK)
    with pytest.raises(ImpossibleRequest, match=f"too small for it: pipeline .*: {BLOCK}$"):
        Engine.register(manager, geometry=big_geometry(BLOCK))
    Engine.register(manager)


@pytest.mark.parametrize(
    "edge",
    [
        '{ from = "E",        to = "C", items = 2, bytes = "128 MiB" }',
        '{ from = "C.dram",   to = "D", items = 4, bytes = "64 MiB" }',
        '{ from = "D.write",  to = "U", items = 64, bytes = "256 MiB", on_full = "drop" }',
    ],
    ids=["E > C", "C > D", "D > U"],
)
def test_save_edge_too_small_for_one_page_is_told_at_registration(
    open_manager: ManagerFactory, tmp_path: Path, ssd_path: Path, edge: str
) -> None:
    small = edge.replace("128 MiB", "4 KiB").replace("64 MiB", "4 KiB").replace("256 MiB", "4 KiB")
    save = definition(tmp_path, "save", (edge, small))
    manager = open_manager(save_pipeline=save, ssd_cache_paths=ssd_path)
    with pytest.raises(ImpossibleRequest, match=f"too small for it: pipeline .*: {BLOCK}$"):
        Engine.register(manager, geometry=big_geometry(BLOCK))


@pytest.mark.parametrize(
    "part",
    [
        '{ from = "D", to = "R", items = 4, bytes = "64 MiB" }',
        '{ from = "R", to = "E", items = 4, bytes = "64 MiB" }',
        'stages = ["serve"], lane = "stream:restore", entry = { items = 2, bytes = "64 MiB" }',
    ],
    ids=["D > R", "R > E", "entry of D"],
)
def test_restore_edge_too_small_for_one_page_is_told_at_registration(
    open_manager: ManagerFactory, tmp_path: Path, part: str
) -> None:
    """Else every page could be saved, and none ever restored."""
    small = part.replace("64 MiB", "4 KiB").replace("32 MiB", "4 KiB")
    restore = definition(tmp_path, "restore", (part, small))
    manager = open_manager(restore_pipeline=restore)
    with pytest.raises(ImpossibleRequest, match=f"too small for it: pipeline .*: {BLOCK}$"):
        Engine.register(manager, geometry=big_geometry(BLOCK))


def test_ssd_too_small_for_one_page_serves_from_dram_and_says_what_is_unwritten(
    open_manager: ManagerFactory, ssd_path: Path
) -> None:
    manager = open_manager(ssd_cache_paths=ssd_path, ssd_cache_capacity_nbytes=BLOCK)
    engine = Engine.register(manager, geometry=big_geometry(BLOCK))
    engine.save(numbered(2))
    assert manager.flush().unwritten == 2
    assert counters(manager)["ssd_writes_no_room"] >= 2
    assert len(engine.restored(numbered(2))) == 2


def test_pool_larger_than_the_machine_is_refused_in_words() -> None:
    with pytest.raises(OrbitError, match="pool"):
        Manager(Config(pool_nbytes=2**60, lock_memory=False))


# The pool under pressure -----------------------------------------------------------------------


def test_publish_waits_for_leased_memory_and_then_goes_on(open_manager: ManagerFactory) -> None:
    engine = Engine.register(open_manager(pool_nbytes=2 * BLOCK))
    engine.save(numbered(2))
    lease = engine.manager.query(engine.instance, list(numbered(2)))
    wanted = engine.page(5)
    ticket = engine.manager.publish(engine.instance, [(page_hash("new"), 5)])
    assert comes_to_wait(engine.manager, 1)
    assert not ticket.done
    lease.release()
    assert ticket.result(WAIT_S) == Saved((page_hash("new"),), (), ())
    engine.clear()
    engine.restored({page_hash("new"): 0})
    assert engine.page(0) == wanted


def test_request_larger_than_the_pool_is_saved_batch_by_batch(
    open_manager: ManagerFactory,
) -> None:
    engine = Engine.register(open_manager(pool_nbytes=3 * BLOCK))
    saved = engine.save(numbered(8))
    assert set(saved.stored) == set(numbered(8))
    assert engine.manager.statistics().pool_used_nbytes <= 3 * BLOCK


@pytest.mark.parametrize("wait_s", [0.0, 0.05])
def test_demand_read_without_memory_in_time_is_a_counted_miss(
    open_manager: ManagerFactory, ssd_path: Path, wait_s: float
) -> None:
    manager = open_manager(pool_nbytes=2 * BLOCK, ssd_cache_paths=ssd_path, pool_wait_s=wait_s)
    engine = Engine.register(manager)
    engine.save({page_hash("on ssd"): 0})
    manager.flush(evict_dram=True)
    engine.save(numbered(2, first=5))
    manager.flush()  # else U may still read what is to be evicted
    lease = manager.query(engine.instance, list(numbered(2, first=5)))
    assert engine.restore({page_hash("on ssd"): 7}) == Miss((page_hash("on ssd"),))
    assert counters(manager)["pool_wait_expired"] == 1
    lease.release()
    assert engine.restored({page_hash("on ssd"): 7}) == (page_hash("on ssd"),), "SSD is intact"
    assert engine.page(7) == engine.page(0)


def test_demand_read_goes_before_saves_that_wait(
    open_manager: ManagerFactory, ssd_path: Path
) -> None:
    manager = open_manager(pool_nbytes=BLOCK, ssd_cache_paths=ssd_path)
    engine = Engine.register(manager)
    engine.save({page_hash("on ssd"): 0})
    manager.flush(evict_dram=True)
    engine.save({page_hash("held"): 1})
    manager.flush()
    held = manager.query(engine.instance, [page_hash("held")])
    save = manager.publish(engine.instance, [(page_hash("new"), 2)])
    assert comes_to_wait(manager, 1)
    demanded = manager.query(engine.instance, [page_hash("on ssd")])
    read = manager.restore(demanded, {page_hash("on ssd"): 7})
    assert comes_to_wait(manager, 2)
    order: list[str] = []
    read.when_done(lambda: order.append("read"))
    save.when_done(lambda: order.append("save"))
    held.release()
    assert isinstance(read.result(WAIT_S), Restored)
    assert isinstance(save.result(WAIT_S), Saved)
    assert order == ["read", "save"]


# Namespaces, groups, threads -------------------------------------------------------------------


def test_namespaces_with_equal_hashes_never_see_each_others_bytes(
    open_manager: ManagerFactory, ssd_path: Path
) -> None:
    manager = open_manager(ssd_cache_paths=ssd_path)
    left = Engine.register(manager, seed=1, name="left")
    right = Engine.register(manager, seed=2, name="right")
    wanted = left.page(0), right.page(0)
    assert wanted[0] != wanted[1]
    left.save(numbered(1))
    assert right.hits([page_hash(0)]) == 0
    right.save(numbered(1))
    for evict in (False, True):
        manager.flush(evict_dram=evict)
        left.clear()
        right.clear()
        left.restored(numbered(1))
        right.restored(numbered(1))
        assert (left.page(0), right.page(0)) == wanted


@pytest.mark.parametrize("threads", [2, 8])
def test_threads_that_publish_the_same_page_make_one_object(
    open_manager: ManagerFactory, ssd_path: Path, threads: int
) -> None:
    manager = open_manager(ssd_cache_paths=ssd_path)
    engines = [Engine.register(manager) for _ in range(threads)]
    together = threading.Barrier(threads)

    def publish(engine: Engine) -> Outcome:
        together.wait(WAIT_S)
        return manager.publish(engine.instance, [(page_hash(0), 3)]).result(WAIT_S)

    with ThreadPoolExecutor(threads) as pool:
        outcomes = list(pool.map(publish, engines))
    assert all(isinstance(outcome, Saved) and not outcome.dropped for outcome in outcomes)
    manager.flush()
    statistics = manager.statistics()
    assert statistics.pool_used_nbytes == statistics.ssd_used_nbytes == TOY_OBJECT_NBYTES
    wanted = engines[0].page(3)
    engines[0].clear()
    engines[0].restored({page_hash(0): 0})
    assert engines[0].page(0) == wanted


def test_publishes_that_race_before_either_is_resident_are_both_saved(
    open_manager: ManagerFactory,
) -> None:
    """Both tickets pass the filter, and meet again at D's door."""
    engine = Engine.register(open_manager())
    ready = threading.Event()
    tickets = [
        engine.manager.publish(engine.instance, [(page_hash(0), index)], ready=ready)
        for index in (2, 2, 2)
    ]
    ready.set()
    assert [ticket.result(WAIT_S) for ticket in tickets] == [Saved((page_hash(0),), (), ())] * 3
    assert engine.manager.statistics().pool_used_nbytes == TOY_OBJECT_NBYTES


def test_page_is_a_hit_only_if_every_state_group_of_it_is_there(
    open_manager: ManagerFactory, ssd_path: Path
) -> None:
    manager = open_manager(ssd_cache_paths=ssd_path)
    engine = Engine.register(manager, geometry=grouped_geometry())
    wanted = engine.page(0)
    engine.save(numbered(2))
    with manager.query(engine.instance, list(numbered(2))) as lease:
        assert lease.tiers()[Tier.DRAM] == 4
    manager.flush()
    lost = [engine.copy(page_hash(0), tier, "recurrent") for tier in Tier]
    for copy in lost:
        on_loop(manager, partial(manager.core.catalogue.hide, copy))
    assert engine.hits(list(numbered(2))) == 0
    assert engine.hits([page_hash(1)]) == 1
    saved = engine.save(numbered(2))
    assert saved == Saved((page_hash(0),), (page_hash(1),), ())
    engine.clear()
    assert engine.restored(numbered(1)) == (page_hash(0),)
    assert engine.page(0) == wanted


def on_loop(manager: Manager, call: Callable[[], object]) -> None:
    """Change state where it may be changed."""

    async def work() -> None:
        call()

    manager._call(work())


def test_methods_may_be_called_from_sixteen_threads_at_once(
    open_manager: ManagerFactory, ssd_path: Path
) -> None:
    manager = open_manager(
        pool_nbytes=24 * BLOCK,
        ssd_cache_paths=ssd_path,
        ssd_cache_capacity_nbytes=256 * BLOCK,
        pool_wait_s=20.0,
    )
    source = Engine.register(manager, pages=32)
    wanted = [source.page(index) for index in range(32)]

    def work(seed: int) -> int:
        choose = random.Random(seed)
        engine = Engine.register(manager, pages=4, seed=None)
        restored = 0
        for _ in range(12):
            picked = choose.sample(range(32), 3)
            ticket = manager.publish(source.instance, [(page_hash(i), i) for i in picked])
            if choose.random() < 0.3:
                ticket.cancel()
            if choose.random() < 0.2:
                manager.flush(evict_dram=choose.random() < 0.5)
            lease = manager.query(engine.instance, [page_hash(i) for i in picked])
            if choose.random() < 0.2:
                lease.release()
                continue
            places = dict(zip(lease.hashes, range(3), strict=False))
            outcome = manager.restore(lease, places).result(WAIT_S)
            assert isinstance(outcome, Restored | Miss), outcome
            for page in outcome.restored if isinstance(outcome, Restored) else ():
                index = next(i for i in picked if page_hash(i) == page)
                assert engine.page(places[page]) == wanted[index], "wrong bytes"
                restored += 1
            ticket.result(WAIT_S)
            manager.statistics()
        manager.unregister(engine.instance)
        return restored

    with ThreadPoolExecutor(16) as pool:
        counts = list(pool.map(work, range(16)))
    assert sum(counts) > 0
    manager.flush()
    assert rest(manager) == []


# On a loop of the caller's ---------------------------------------------------------------------


def test_every_method_has_a_twin_for_an_event_loop(ssd_path: Path) -> None:
    async def scenario() -> None:
        config = Config(
            pool_nbytes=MIB,
            ssd_cache_paths=ssd_path,
            ssd_cache_capacity_nbytes=MIB,
            lock_memory=False,
        )
        geometry = toy_geometry()
        tensors = tensors_of(geometry, 4)
        async with Manager(config) as manager:
            instance = await manager.register_async(geometry, tensors, model=model())
            saved = await (await manager.publish_async(instance, numbered(4).items()))
            assert isinstance(saved, Saved)
            flushed = await manager.flush_async(evict_dram=True)
            assert flushed.unwritten == 0
            kept = {name: tensor.copy() for name, tensor in tensors.items()}
            for tensor in tensors.values():
                tensor[:] = 0
            lease = await manager.query_async(instance, list(numbered(4)))
            outcome = await (await manager.restore_async(lease, numbered(4)))
            assert outcome == Restored(tuple(numbered(4)), ())
            for name, tensor in tensors.items():
                assert np.array_equal(tensor.view(np.uint16), kept[name].view(np.uint16))
            with pytest.raises(DestinationError):
                await manager.publish_async(instance, [(page_hash(9), 99)])
            await manager.unregister_async(instance)
            assert manager.leaks() == []
        with pytest.raises(Closed):
            await manager.query_async(instance, [])
        await manager.close_async()

    asyncio.run(scenario())


def test_two_loops_may_use_one_manager(open_manager: ManagerFactory) -> None:
    manager = open_manager()

    async def work(name: str) -> Outcome:
        geometry = toy_geometry()
        tensors = tensors_of(geometry, 4)
        instance = await manager.register_async(geometry, tensors, model=model(name))
        tickets = [await manager.publish_async(instance, [(page_hash(i), i)]) for i in range(4)]
        await asyncio.gather(*(wait(ticket) for ticket in tickets))
        lease = await manager.query_async(instance, list(numbered(4)))
        return await (await manager.restore_async(lease, numbered(4)))

    async def wait(ticket: object) -> Outcome:
        return await ticket  # type: ignore[misc]

    with ThreadPoolExecutor(2) as pool:
        outcomes = list(pool.map(lambda name: asyncio.run(work(name)), ("left", "right")))
    assert all(isinstance(outcome, Restored) and not outcome.missed for outcome in outcomes)


def test_query_whose_caller_was_cancelled_leaves_no_lease(open_manager: ManagerFactory) -> None:
    """The manager has answered, and the answer finds nobody: nobody could ever release it."""
    engine = Engine.register(open_manager())
    engine.save(numbered(1))

    async def scenario() -> None:
        query = asyncio.create_task(engine.manager.query_async(engine.instance, [page_hash(0)]))
        await asyncio.sleep(0)
        engine.manager.statistics()  # blocks this loop until the manager has answered both
        query.cancel()
        with pytest.raises(asyncio.CancelledError):
            await query

    asyncio.run(scenario())
    assert rest(engine.manager) == []


def test_call_cancelled_before_the_manager_began_leaves_nothing(
    open_manager: ManagerFactory,
) -> None:
    """Warnings are errors here, so a coroutine that was never awaited fails the test."""
    engine = Engine.register(open_manager())
    gate = Gate()
    engine.manager._loop.call_soon_threadsafe(gate.pass_through)
    gate.await_arrival()

    async def scenario() -> None:
        query = asyncio.create_task(engine.manager.query_async(engine.instance, [page_hash(0)]))
        await asyncio.sleep(0)
        query.cancel()
        await asyncio.sleep(0)
        gate.open()
        with pytest.raises(asyncio.CancelledError):
            await query

    try:
        asyncio.run(scenario())
    finally:
        gate.open()
    assert rest(engine.manager) == []


def test_methods_refuse_to_be_called_from_the_managers_own_loop(
    open_manager: ManagerFactory,
) -> None:
    engine = Engine.register(open_manager())
    caught: list[BaseException] = []

    def call() -> None:
        try:
            engine.manager.statistics()
        except RuntimeError as error:
            caught.append(error)

    ready = threading.Event()
    ticket = engine.manager.publish(engine.instance, [(page_hash(0), 0)], ready=ready)
    ticket.when_done(call)
    ready.set()
    ticket.result(WAIT_S)
    engine.manager.leaks()
    assert "own loop" in str(caught[0])


# Start and end ---------------------------------------------------------------------------------


def test_unregister_waits_for_what_is_under_way(open_manager: ManagerFactory) -> None:
    engine = Engine.register(open_manager())
    ready = threading.Event()
    ticket = engine.manager.publish(engine.instance, [(page_hash(0), 0)], ready=ready)
    leaving = in_thread(lambda: engine.manager.unregister(engine.instance))
    assert comes_to_refuse(engine)
    assert leaving.is_alive(), "left while a page was still to be read"
    assert not ticket.done
    ready.set()
    assert ended(leaving)
    assert isinstance(ticket.result(0), Saved)


def test_close_may_be_called_twice_and_from_many_threads(open_manager: ManagerFactory) -> None:
    manager = open_manager()
    closing = [in_thread(manager.close) for _ in range(8)]
    assert all(ended(thread) for thread in closing)
    manager.close()
    assert not manager._thread.is_alive()


def test_close_may_be_called_while_another_thread_is_at_the_end_of_it(
    open_manager: ManagerFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The loop is closed, and the manager's thread still lives."""
    manager, gate = open_manager(), Gate()
    monkeypatch.setattr(manager, "_refuse_calls", gate.pass_through)
    first = in_thread(manager.close)
    gate.await_arrival()
    answers: list[object] = []

    def close() -> None:
        try:
            answers.append(manager.close())  # type: ignore[func-returns-value]
        except RuntimeError as error:
            answers.append(error)

    second = in_thread(close)
    left_early = ended_soon(second)
    gate.open()
    assert ended(first)
    assert ended(second)
    assert answers == [None]
    assert not left_early, "closed, said the second, before it was"


def test_closed_manager_refuses_every_call(open_manager: ManagerFactory) -> None:
    engine = Engine.register(open_manager())
    engine.save(numbered(1))
    manager, instance = engine.manager, engine.instance
    lease = manager.query(instance, list(numbered(1)))
    manager.close()
    for call in (
        lambda: manager.register(engine.geometry, engine.tensors, model=model()),
        lambda: manager.publish(instance, [(page_hash(0), 0)]),
        lambda: manager.query(instance, [page_hash(0)]),
        lambda: manager.restore(lease, numbered(1)),
        lambda: manager.unregister(instance),
        manager.flush,
        manager.statistics,
    ):
        with pytest.raises(Closed):
            call()
    lease.release()


def test_close_with_work_in_flight_ends_all_of_it_and_leaves_nothing(
    open_manager: ManagerFactory, ssd_path: Path
) -> None:
    lanes = Lanes()
    gates = {name: Gate() for name in ("stream:save", "ring:write", "ring:read")}
    manager = open_manager(lanes=lanes, ssd_cache_paths=ssd_path, pool_nbytes=8 * BLOCK)
    engine = Engine.register(manager)
    engine.save(numbered(2))
    manager.flush(evict_dram=True)
    engine.clear()
    lanes.before = {name: gate.pass_through for name, gate in gates.items()}
    lease = manager.query(engine.instance, [page_hash(0)])
    reading = manager.restore(lease, {page_hash(0): 0})
    gates["ring:read"].await_arrival()
    saving = [manager.publish(engine.instance, [(page_hash(f"x{i}"), i)]) for i in range(6)]
    gates["stream:save"].await_arrival()
    unused = manager.query(engine.instance, [page_hash(1)])
    closing = in_thread(manager.close)
    assert not ended_soon(closing), "closed under a lane that was at work"
    for gate in gates.values():
        gate.open()
    assert ended(closing)
    outcomes = [ticket.result(0) for ticket in (reading, *saving)]
    assert len(outcomes) == 7
    assert isinstance(outcomes[0], Restored)
    assert list(ssd_path.parent.glob("kv.ssd*")) == []
    assert manager.core.catalogue.leaks() == []
    assert manager.core._save.leaks() == manager.core._fetch.leaks() == []
    assert unused.spent
    assert all(lane.closed == 1 for lane in lanes.opened)


def ended_soon(thread: threading.Thread) -> bool:
    """Whether it ends although it must not; it gets a moment to do so."""
    thread.join(0.05)
    return not thread.is_alive()


def test_close_answers_those_who_still_wait_for_a_flush(
    open_manager: ManagerFactory, ssd_path: Path
) -> None:
    lanes, gate = Lanes(), Gate()
    lanes.before["ring:write"] = gate.pass_through
    manager = open_manager(lanes=lanes, ssd_cache_paths=ssd_path)
    engine = Engine.register(manager)
    engine.save(numbered(4))
    answers: list[object] = []

    def flush() -> None:
        try:
            answers.append(manager.flush())
        except BaseException as error:  # noqa: BLE001 - its kind is what is asked
            answers.append(error)

    flushing = in_thread(flush)
    gate.await_arrival()
    closing = in_thread(manager.close)
    gate.open()
    assert ended(closing)
    assert ended(flushing)
    assert not isinstance(answers[0], BaseException) or isinstance(answers[0], Closed), answers


def test_close_ends_a_publish_that_waits_for_leased_memory(open_manager: ManagerFactory) -> None:
    engine = Engine.register(open_manager(pool_nbytes=BLOCK))
    engine.save(numbered(1))
    engine.manager.query(engine.instance, list(numbered(1)))
    ticket = engine.manager.publish(engine.instance, [(page_hash("new"), 1)])
    assert comes_to_wait(engine.manager, 1)
    engine.manager.close()
    assert isinstance(ticket.result(0), Saved), "close releases the leases, so it could go on"


def test_manager_is_a_context_manager_that_closes_on_an_error() -> None:
    with pytest.raises(ZeroDivisionError), Manager(Config(pool_nbytes=BLOCK)) as manager:
        raise ZeroDivisionError
    assert not manager._thread.is_alive()


def test_faulty_definition_refuses_to_start_with_every_fault(
    tmp_path: Path, ssd_path: Path
) -> None:
    save = definition(
        tmp_path, "save", ('"gather"', '"gathr"'), ("items = 4", "items = 0"), ("depth", "dept")
    )
    with pytest.raises(GraphError) as caught:
        Manager(Config(save_pipeline=save, ssd_cache_paths=ssd_path))
    assert len(caught.value.faults) >= 3
    assert not ssd_path.exists()


# What this machine does not have ---------------------------------------------------------------


def test_without_a_path_the_ssd_arm_is_off_with_the_reason_and_dram_works(
    open_manager: ManagerFactory,
) -> None:
    engine = Engine.register(open_manager())
    unavailable = engine.manager.statistics().unavailable
    assert "no SSD path" in unavailable["save"]["U"]
    assert "no SSD path" in unavailable["restore"]["U"]
    engine.save(numbered(3))
    flushed = engine.manager.flush()
    assert flushed.unwritten == 0, "there is no SSD that could lack anything"
    assert len(engine.restored(numbered(3))) == 3


def test_direct_and_peer_arms_are_off_with_a_reason_where_nothing_gives_them(
    open_manager: ManagerFactory, ssd_path: Path
) -> None:
    unavailable = open_manager(ssd_cache_paths=ssd_path).statistics().unavailable
    assert set(unavailable["save"]) == {"G", "S", "P"}
    assert set(unavailable["restore"]) == {"G", "S", "P", "V"}
    assert all(reason for reasons in unavailable.values() for reason in reasons.values())


@pytest.mark.parametrize(
    ("pipeline", "node"), [("save", "S"), ("save", "P"), ("restore", "S"), ("restore", "V")]
)
def test_required_node_that_cannot_run_refuses_to_start_with_the_reason(
    tmp_path: Path, ssd_path: Path, pipeline: str, node: str
) -> None:
    required = definition(tmp_path, pipeline, (f"{node} = {{ ", f"{node} = {{ required = true, "))
    settings = {f"{pipeline}_pipeline": required}
    with pytest.raises(Unavailable, match=f"'{pipeline}' cannot start: node {node}: .{{10,}}"):
        Manager(
            Config(
                ssd_cache_paths=ssd_path, pool_nbytes=MIB, ssd_cache_capacity_nbytes=MIB, **settings
            )
        )  # type: ignore[arg-type]
    assert list(tmp_path.glob("kv.ssd*")) == [], "a refused start left something behind"


def test_required_ssd_without_a_path_refuses_to_start(tmp_path: Path) -> None:
    required = definition(tmp_path, "save", ("U = { ", "U = { required = true, "))
    with pytest.raises(Unavailable, match="node U: no SSD path"):
        Manager(Config(save_pipeline=required, pool_nbytes=MIB))


def test_definition_that_needs_a_users_stage_that_is_not_here_says_why(tmp_path: Path) -> None:
    save = definition(
        tmp_path,
        "save",
        ('"encode", "crc32"', '"encode", "tests.builders:NeedsWhatIsNotHere", "crc32"'),
    )
    with pytest.raises(Unavailable, match="node C: no quantum memory in this machine"):
        Manager(Config(save_pipeline=save, pool_nbytes=MIB))


def test_explicit_backend_that_cannot_be_had_refuses_to_start(
    ssd_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("orbitkv.runtime.uring.probe_io_uring", lambda: "forbidden here")
    settings = {"ssd_cache_paths": ssd_path, "ssd_cache_capacity_nbytes": MIB, "pool_nbytes": MIB}
    with pytest.raises(Unavailable, match="io_uring cannot be used: forbidden here"):
        Manager(Config(ssd_backend="uring", **settings))  # type: ignore[arg-type]
    assert not ssd_path.exists()
    with Manager(Config(ssd_backend="auto", **settings)) as manager:  # type: ignore[arg-type]
        engine = Engine.register(manager)
        engine.save(numbered(2))
        assert manager.flush(evict_dram=True).unwritten == 0
        assert len(engine.restored(numbered(2))) == 2


# The SSD file ----------------------------------------------------------------------------------


def test_ssd_file_is_gone_after_close(open_manager: ManagerFactory, ssd_path: Path) -> None:
    manager = open_manager(ssd_cache_paths=ssd_path)
    assert ssd_path.exists()
    manager.close()
    assert list(ssd_path.parent.iterdir()) == []


def test_second_manager_on_one_path_is_refused_with_the_first_ones_pid(
    open_manager: ManagerFactory, ssd_path: Path
) -> None:
    engine = Engine.register(open_manager(ssd_cache_paths=ssd_path))
    script = f"""
from pathlib import Path
from orbitkv import Config, Manager, OrbitError
try:
    path = Path({str(ssd_path)!r})
    Manager(Config(pool_nbytes=4096, ssd_cache_paths=path, ssd_cache_capacity_nbytes=4096))
except OrbitError as error:
    print(type(error).__name__, error)
"""
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=WAIT_S
    )
    assert done.stdout.strip() == f"StoreError ssd path {ssd_path}: in use by process {os.getpid()}"
    with pytest.raises(StoreError, match=f"in use by process {os.getpid()}"):
        Manager(
            Config(pool_nbytes=BLOCK, ssd_cache_paths=ssd_path, ssd_cache_capacity_nbytes=BLOCK)
        )
    engine.save(numbered(2))
    assert engine.manager.flush(evict_dram=True).unwritten == 0
    assert len(engine.restored(numbered(2))) == 2


@pytest.mark.parametrize(
    ("path", "fault"),
    [
        ("{tmp}/none/kv", "no directory .*/none"),
        ("{tmp}", "a directory"),
        ("{tmp}/file/kv", "no directory"),
        ("/proc/orbitkv", "accepted: a writable path"),
    ],
)
def test_ssd_path_that_cannot_be_used_refuses_to_start(
    tmp_path: Path, path: str, fault: str
) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(StoreError, match=fault):
        Manager(
            Config(
                pool_nbytes=BLOCK,
                ssd_cache_paths=Path(path.format(tmp=tmp_path)),
                ssd_cache_capacity_nbytes=BLOCK,
            )
        )


def test_ssd_capacity_above_the_free_disk_refuses_to_start_and_names_both(ssd_path: Path) -> None:
    with pytest.raises(StoreError, match=r"capacity 1024 TiB; free on that filesystem: \d"):
        Manager(
            Config(pool_nbytes=BLOCK, ssd_cache_paths=ssd_path, ssd_cache_capacity_nbytes=2**50)
        )


@pytest.mark.skipif(not os.path.ismount("/dev/shm"), reason="no tmpfs at /dev/shm")
@pytest.mark.parametrize("backend", BACKENDS)
def test_ssd_on_tmpfs_serves_whether_or_not_it_takes_o_direct(
    open_manager: ManagerFactory, backend: str
) -> None:
    path = Path("/dev/shm") / f"orbitkv-test-{os.getpid()}"
    engine = Engine.register(open_manager(ssd_cache_paths=path, ssd_backend=backend))
    wanted = engine.page(0)
    engine.save(numbered(1))
    assert engine.manager.flush(evict_dram=True).unwritten == 0
    engine.clear()
    assert engine.restored(numbered(1))
    assert engine.page(0) == wanted
    engine.manager.close()
    assert not path.exists()


@pytest.mark.parametrize("backend", BACKENDS)
def test_filesystem_that_refuses_o_direct_serves_buffered(
    open_manager: ManagerFactory, ssd_path: Path, monkeypatch: pytest.MonkeyPatch, backend: str
) -> None:
    real = os.open

    def refuse_direct(path: object, flags: int, mode: int = 0o777) -> int:
        if flags & os.O_DIRECT:
            raise OSError(22, "Invalid argument")
        return real(path, flags, mode)  # type: ignore[arg-type]

    monkeypatch.setattr(os, "open", refuse_direct)
    engine = Engine.register(open_manager(ssd_cache_paths=ssd_path, ssd_backend=backend))
    wanted = engine.page(0)
    engine.save(numbered(1))
    assert engine.manager.flush(evict_dram=True).unwritten == 0
    engine.clear()
    assert engine.restored(numbered(1))
    assert engine.page(0) == wanted


def test_full_ssd_evicts_what_nobody_reads(open_manager: ManagerFactory, ssd_path: Path) -> None:
    manager = open_manager(ssd_cache_paths=ssd_path, ssd_cache_capacity_nbytes=3 * BLOCK)
    engine = Engine.register(manager)
    for page, index in numbered(6).items():
        engine.save({page: index})
        manager.flush(evict_dram=True)
    on_ssd = [page for page in numbered(6) if engine.hits([page])]
    assert on_ssd == list(numbered(3, first=3))
    assert counters(manager)["evicted_ssd"] == 3


# A slow disk -----------------------------------------------------------------------------------


def test_slow_ssd_never_stalls_publication_and_flush_writes_what_was_dropped(
    open_manager: ManagerFactory, ssd_path: Path, tmp_path: Path
) -> None:
    lanes, gate = Lanes(), Gate()
    lanes.before["ring:write"] = gate.pass_through
    narrow = 'to = "U", items = 2, bytes = "256 MiB"'
    save = definition(
        tmp_path,
        "save",
        ('to = "U", items = 64, bytes = "256 MiB"', narrow),
        ("depth = 8", "depth = 1"),
    )
    manager = open_manager(lanes=lanes, ssd_cache_paths=ssd_path, save_pipeline=save)
    engine = Engine.register(manager, pages=16)
    try:
        for page, index in numbered(16).items():
            assert engine.save({page: index}).stored == (page,)
        gate.await_arrival()
        manager.statistics()
        edge = next(c for c in manager.statistics().channels["save"] if "write" in c.name)
        assert edge.items == 2
        assert edge.dropped_items == counters(manager)["ssd_writes_dropped"] == 16 - 3
    finally:
        gate.open()
    assert manager.flush(evict_dram=True).unwritten == 0
    wanted = [engine.page(index) for index in range(16)]
    engine.clear()
    assert engine.restored(numbered(16)) == tuple(numbered(16))
    assert [engine.page(index) for index in range(16)] == wanted


def test_write_of_an_object_that_was_evicted_meanwhile_is_skipped(
    open_manager: ManagerFactory, ssd_path: Path
) -> None:
    lanes, gate = Lanes(), Gate()
    lanes.before["ring:write"] = gate.pass_through
    save_depth_one = open_manager(lanes=lanes, ssd_cache_paths=ssd_path, pool_nbytes=10 * BLOCK)
    engine = Engine.register(save_depth_one, pages=32)
    try:
        for page, index in numbered(32).items():
            engine.save({page: index})
    finally:
        gate.open()
    assert engine.manager.flush().unwritten == 0
    found = counters(engine.manager)
    assert found["ssd_writes_dead"] > 0
    assert found["ssd_writes_dead"] + found["ssd_writes"] >= 32


@pytest.mark.parametrize("index", [True, False, np.True_])
def test_truth_is_no_page_index(open_manager: ManagerFactory, index: object) -> None:
    engine = Engine.register(open_manager())
    with pytest.raises(DestinationError, match="accepted: integers"):
        engine.save({page_hash(0): index})  # type: ignore[dict-item]
    assert engine.save({page_hash(0): 1}).stored


@pytest.mark.parametrize("strange", ["a hash", 7, None])
def test_page_hashes_are_bytes(open_manager: ManagerFactory, strange: object) -> None:
    engine = Engine.register(open_manager())
    with pytest.raises(DestinationError, match="accepted: bytes"):
        engine.manager.query(engine.instance, [strange])  # type: ignore[list-item]
    with pytest.raises(DestinationError, match="accepted: bytes"):
        engine.manager.publish(engine.instance, [(strange, 0)])  # type: ignore[list-item]


def test_synchronize_is_what_waits_where_an_event_has_it(open_manager: ManagerFactory) -> None:
    """As with a CUDA event, whose ``wait`` only orders a stream."""
    calls: list[str] = []

    class StreamEvent:
        def wait(self) -> None:
            calls.append("wait")

        def synchronize(self) -> None:
            calls.append("synchronize")

    engine = Engine.register(open_manager())
    pages = [(page_hash(0), 0)]
    engine.manager.publish(engine.instance, pages, ready=StreamEvent()).result(WAIT_S)
    assert calls == ["synchronize"]


def test_eviction_takes_a_saved_prefix_from_its_tail(open_manager: ManagerFactory) -> None:
    engine = Engine.register(open_manager(pool_nbytes=6 * BLOCK), pages=8)
    engine.save(numbered(5))
    engine.save({page_hash("another"): 5, page_hash("third"): 6})
    assert engine.hits(list(numbered(5))) == 4


def test_two_slots_on_one_memory_are_refused(open_manager: ManagerFactory) -> None:
    geometry = toy_geometry()
    tensors = tensors_of(geometry, 4)
    tensors["v0"] = tensors["k0"]
    with pytest.raises(GeometryError, match="'k0' and 'v0' begin at one address"):
        open_manager().register(geometry, tensors, model=model())


def test_what_was_bound_to_a_geometry_goes_with_its_last_instance(
    open_manager: ManagerFactory,
) -> None:
    manager = open_manager()
    one, other = Engine.register(manager), Engine.register(manager, name="other")
    with pytest.raises(ImpossibleRequest):
        Engine.register(manager, geometry=big_geometry(2 * MIB))
    assert len(manager.core._bound) == 1
    manager.unregister(one.instance)
    assert len(other.save(numbered(2)).stored) == 2
    manager.unregister(other.instance)
    assert manager.core._bound == {}
