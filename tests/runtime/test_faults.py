"""Faults put in from inside: each yields a miss or one clear error, and never wrong bytes."""

from __future__ import annotations

import asyncio
import errno
import os
import random
import threading
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from orbitkv import Config, Manager
from orbitkv.cache.catalogue import Tier
from orbitkv.config import MIB
from orbitkv.errors import Cancelled, OrbitError, StageFault
from orbitkv.stages.base import StageContext, Transfer
from orbitkv.stages.batch import EncodedBatch, ValidatedBatch
from orbitkv.stages.ticket import Failed, Miss, Outcome, Restored, Saved, Ticket
from tests.builders import (
    BLOCK,
    PLANS,
    WAIT_S,
    Engine,
    Gate,
    Lanes,
    Plan,
    big_geometry,
    comes_to_refuse,
    comes_to_wait,
    counters,
    definition,
    ended,
    flip_file,
    flip_memory,
    grouped_geometry,
    in_thread,
    numbered,
    page_hash,
    regions,
    rest,
    toy_geometry,
)
from tests.conftest import ManagerFactory

BACKENDS = ["auto", "preadv"]
PAGES = 5
VICTIM = 2


def refusal(number: int) -> OSError:
    return OSError(number, os.strerror(number))


def victim_offset(engine: Engine, tier: Tier = Tier.SSD) -> int:
    return engine.copy(page_hash(VICTIM), tier).offset


def others(pages: int = PAGES) -> list[bytes]:
    return [page_hash(index) for index in range(pages) if index != VICTIM]


def check_only_the_victim_misses(
    engine: Engine, wanted: list[bytes], *, pages: int = PAGES
) -> None:
    """Restore all pages but for a prefix's sake each by itself, so that one miss hides no other."""
    engine.clear()
    leases = [engine.manager.query(engine.instance, [page]) for page in numbered(pages)]
    found = [lease.hashes for lease in leases]
    assert found[VICTIM], "the damage must not be known before somebody reads"
    outcomes = [
        engine.manager.restore(lease, {page_hash(index): index}).result(WAIT_S)
        for index, lease in enumerate(leases)
    ]
    for index, outcome in enumerate(outcomes):
        if index == VICTIM:
            assert outcome == Miss((page_hash(VICTIM),))
            assert engine.is_clear(VICTIM), "a miss must leave its destination untouched"
        else:
            assert outcome == Restored((page_hash(index),), ())
            assert engine.page(index) == wanted[index]


def check_one_restore_leaves_out_the_victim(
    engine: Engine, wanted: list[bytes], *, pages: int = PAGES
) -> None:
    engine.clear()
    lease = engine.manager.query(engine.instance, list(numbered(pages)))
    assert len(lease.hashes) == pages
    outcome = engine.manager.restore(lease, numbered(pages)).result(WAIT_S)
    assert isinstance(outcome, Restored), outcome
    assert outcome.missed == (page_hash(VICTIM),)
    assert sorted(outcome.restored) == sorted(others(pages))
    for index in range(pages):
        if index == VICTIM:
            assert engine.is_clear(index)
        else:
            assert engine.page(index) == wanted[index]
    assert engine.hits([page_hash(VICTIM)]) == 0


# Writing to SSD --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "result",
    [refusal(errno.ENOSPC), refusal(errno.EIO), refusal(errno.EINVAL), 0, 512, BLOCK - 1],
    ids=["ENOSPC", "EIO", "EINVAL", "nothing written", "short write", "one byte short"],
)
def test_failed_write_is_abandoned_and_written_by_a_later_flush(
    open_manager: ManagerFactory, ssd_path: Path, result: int | OSError
) -> None:
    lanes = Lanes()
    manager = open_manager(lanes=lanes, ssd_cache_paths=ssd_path)
    engine = Engine.register(manager)
    wanted = [engine.page(index) for index in range(PAGES)]
    victim = []

    def fail_one(transfer: Transfer) -> int | OSError | None:
        victim[:] = victim or [transfer.buffer.ctypes.data]
        return result if transfer.buffer.ctypes.data in victim else None

    lanes.on_write = fail_one
    engine.save(numbered(PAGES))
    flushed = manager.flush()
    assert flushed.unwritten == 1
    statistics = manager.statistics()
    assert statistics.ssd_used_nbytes == (PAGES - 1) * BLOCK, "the extent was not freed"
    assert counters(manager)["ssd_write_faults"] >= 1
    assert counters(manager)["ssd_writes"] == PAGES - 1
    assert manager.leaks() == []
    lanes.on_write = None
    assert manager.flush(evict_dram=True).unwritten == 0
    all_come_back(engine, wanted)


def test_ssd_that_refuses_every_write_never_hurts_what_dram_serves(
    open_manager: ManagerFactory, ssd_path: Path
) -> None:
    lanes = Lanes(on_write=lambda transfer: refusal(errno.EIO))
    manager = open_manager(lanes=lanes, ssd_cache_paths=ssd_path)
    engine = Engine.register(manager)
    for index in range(PAGES):
        engine.save({page_hash(index): index})
        assert manager.flush().unwritten == index + 1
    assert manager.statistics().ssd_used_nbytes == 0
    assert len(engine.restored(numbered(PAGES))) == PAGES


def test_lane_that_fails_as_a_whole_is_a_bug_that_stops_saves_and_nothing_else(
    open_manager: ManagerFactory, ssd_path: Path
) -> None:
    lanes = Lanes()

    def broken(transfer: Transfer) -> int | OSError | None:
        raise ZeroDivisionError("a bug in a lane")

    manager = open_manager(lanes=lanes, ssd_cache_paths=ssd_path)
    engine = Engine.register(manager)
    engine.save(numbered(PAGES))
    manager.flush()
    lanes.on_write = broken
    engine.save({page_hash("x"): 6})
    manager.flush()
    outcome = manager.publish(engine.instance, [(page_hash("y"), 7)]).result(WAIT_S)
    assert isinstance(outcome, Failed)
    assert isinstance(outcome.error, StageFault)
    assert len(engine.restored(numbered(PAGES))) == PAGES, "restores go on"
    assert rest(manager) == []


# Writeback -------------------------------------------------------------------------------------


def test_disk_that_fills_up_in_the_middle_of_a_batch_keeps_what_was_written_before(
    open_manager: ManagerFactory, ssd_path: Path
) -> None:
    lanes, seen = Lanes(), []

    def full_after_two(transfer: Transfer) -> int | OSError | None:
        seen.append(transfer.offset)
        return refusal(errno.ENOSPC) if len(seen) > 2 else None

    lanes.on_write = full_after_two
    manager = open_manager(lanes=lanes, ssd_cache_paths=ssd_path)
    engine = Engine.register(manager)
    wanted = [engine.page(index) for index in range(PAGES)]
    engine.save(numbered(PAGES))
    assert comes_to_count(manager, "ssd_write_faults", PAGES - 2)
    assert rest(manager) == []
    assert len(seen) == PAGES
    assert manager.statistics().ssd_used_nbytes == 2 * BLOCK
    lanes.on_write = None
    assert manager.flush(evict_dram=True).unwritten == 0
    all_come_back(engine, wanted)


def test_failed_write_of_a_page_that_was_evicted_is_made_good_by_the_next_save(
    open_manager: ManagerFactory, ssd_path: Path
) -> None:
    lanes = Lanes(on_write=lambda transfer: refusal(errno.EIO))
    manager = open_manager(lanes=lanes, ssd_cache_paths=ssd_path)
    engine = Engine.register(manager)
    engine.save(numbered(1))
    assert manager.flush(evict_dram=True).unwritten == 1
    assert engine.hits([page_hash(0)]) == 0
    lanes.on_write = None
    assert engine.save(numbered(1)).stored == (page_hash(0),)
    assert comes_to_count(manager, "ssd_writes", 1)
    assert engine.copy(page_hash(0), Tier.SSD)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("inflight", [1, 2, 8])
def test_writes_pin_no_more_objects_than_may_be_written_at_once(
    open_manager: ManagerFactory, ssd_path: Path, backend: str, inflight: int
) -> None:
    lanes, pinned = Lanes(), []
    manager = open_manager(
        lanes=lanes, ssd_cache_paths=ssd_path, ssd_write_inflight=inflight, ssd_backend=backend
    )
    engine = Engine.register(manager, pages=64)

    def count(transfer: Transfer) -> None:
        copies = manager.core.catalogue.copies(Tier.DRAM)
        pinned.append(sum(copy.pins > 0 for copy in copies))

    lanes.on_write = count
    for first in (0, 20):
        engine.save({page_hash(first + index): first + index for index in range(20)})
    assert manager.flush().unwritten == 0
    assert len(pinned) == 40
    assert max(pinned) == inflight


def test_saturated_queue_counts_each_write_once_and_every_one_can_be_made_later(
    open_manager: ManagerFactory, ssd_path: Path
) -> None:
    """One object in U, one batch on the edge, the rest dropped; then what waits is evicted."""
    lanes, gate = Lanes(), Gate()
    lanes.before["ring:write"] = gate.pass_through
    manager = open_manager(
        lanes=lanes,
        pool_nbytes=4 * BLOCK,
        ssd_cache_paths=ssd_path,
        ssd_write_inflight=1,
        ssd_write_queue_depth=1,
    )
    engine = Engine.register(manager)
    engine.save({page_hash(0): 0})
    gate.await_arrival()
    for index in range(1, 4):
        engine.save({page_hash(index): index})
    queued = engine.copy(page_hash(1), Tier.DRAM)
    assert counters(manager)["ssd_writes_dropped"] == 2
    for index in range(4, 7):  # takes the room of all but the one that is being written
        engine.save({page_hash(index): index})
    assert queued.hidden
    assert queued.memory is None, "a queued write kept the memory of an evicted object"
    assert engine.hits([page_hash(0)]) == 1
    gate.open()
    assert comes_to_count(manager, "ssd_writes_dead", 1)
    assert counters(manager)["ssd_writes"] == 1
    assert counters(manager)["ssd_writes_dropped"] == 2 + 3
    assert manager.flush().unwritten == 0
    engine.save({page_hash(1): 1})  # one that was dead
    engine.save({page_hash(2): 2})  # one that was dropped, and evicted since
    assert manager.flush().unwritten == 0
    assert all(engine.copy(page_hash(index), Tier.SSD) for index in (0, 1, 2, 4, 5, 6))


def test_what_runs_is_the_definition_with_the_settings_in_it(
    open_manager: ManagerFactory, ssd_path: Path
) -> None:
    manager = open_manager(
        ssd_cache_paths=ssd_path,
        ssd_write_inflight=3,
        ssd_prefetch_inflight=5,
        ssd_write_queue_depth=7,
    )
    save = manager.core._save.graph
    assert save.nodes["U"].depth == 3
    assert save.into("U")[0].max_items == 7
    depths = {lane.name: lane.depth for lane in manager.core._io_lanes}
    assert depths == {"ring:write": 3, "ring:read": 5}


def test_pages_on_several_ssd_files_pass_through_registered_memory(
    open_manager: ManagerFactory, tmp_path: Path
) -> None:
    manager = open_manager(
        ssd_cache_paths=(tmp_path / "a", tmp_path / "b"),
        ssd_cache_capacity_nbytes=8 * BLOCK,
        lock_memory=True,
    )
    engine = Engine.register(manager, pages=8)
    wanted = [engine.page(index) for index in range(8)]
    engine.save(numbered(8))
    assert manager.flush(evict_dram=True).unwritten == 0
    assert {engine.copy(page_hash(index), Tier.SSD).shard for index in range(8)} == {0, 1}
    all_come_back(engine, wanted)


def test_demand_read_holds_writes_back_to_one_at_a_time(
    open_manager: ManagerFactory, ssd_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    manager = open_manager(ssd_cache_paths=ssd_path, ssd_backend="preadv")
    engine = Engine.register(manager, pages=24)
    engine.save(numbered(1))
    manager.flush(evict_dram=True)
    reading, writing = Gate(), Gate()
    writing.open()
    pread, pwrite = os.preadv, os.pwritev
    counting = threading.Lock()
    at_once = [0, 0]  # now, at most

    def held_preadv(fd: int, buffers: list[memoryview], offset: int) -> int:
        reading.pass_through()
        return pread(fd, buffers, offset)

    def counted_pwritev(fd: int, buffers: list[memoryview], offset: int) -> int:
        with counting:
            at_once[0] += 1
            at_once[1] = max(at_once)
        try:
            writing.pass_through()
            return pwrite(fd, buffers, offset)
        finally:
            with counting:
                at_once[0] -= 1

    monkeypatch.setattr(os, "preadv", held_preadv)
    monkeypatch.setattr(os, "pwritev", counted_pwritev)
    ticket = manager.restore(manager.query(engine.instance, [page_hash(0)]), {page_hash(0): 23})
    reading.await_arrival()
    engine.save({page_hash(index): index for index in range(1, 12)})
    assert manager.flush().unwritten == 0, "writes were starved by a read that does not end"
    assert at_once == [0, 1]
    writing = Gate()
    engine.save({page_hash(index): index for index in range(12, 23)})
    writing.await_arrival()
    reading.open()
    assert isinstance(ticket.result(WAIT_S), Restored)
    assert comes_true(lambda: at_once[0] == 8), "the depth of the lane is not used again"
    writing.open()
    assert manager.flush().unwritten == 0


def comes_to_count(manager: Manager, name: str, count: int) -> bool:
    return comes_true(lambda: counters(manager).get(name, 0) == count)


def comes_true(holds: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + WAIT_S
    while not holds():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.002)
    return True


# Reading from SSD ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "result",
    [refusal(errno.EIO), refusal(errno.EINVAL), 0, 512, BLOCK - 1],
    ids=["EIO", "EINVAL", "nothing read", "short read", "one byte short"],
)
def test_failed_read_is_a_miss_of_exactly_that_page(
    open_manager: ManagerFactory, ssd_path: Path, result: int | OSError
) -> None:
    lanes = Lanes()
    manager = open_manager(lanes=lanes, ssd_cache_paths=ssd_path)
    engine = Engine.register(manager)
    wanted = [engine.page(index) for index in range(PAGES)]
    engine.save(numbered(PAGES))
    manager.flush(evict_dram=True)
    offset = victim_offset(engine)
    lanes.on_read = lambda transfer: result if transfer.offset == offset else None
    check_one_restore_leaves_out_the_victim(engine, wanted)
    assert counters(manager)["ssd_read_faults"] == 1
    lanes.on_read = None
    repaired(engine, wanted)


def all_come_back(engine: Engine, wanted: list[bytes]) -> None:
    """Every page is restored into an empty engine, byte for byte."""
    pages = len(wanted)
    engine.clear()
    assert set(engine.restored(numbered(pages))) == set(numbered(pages))
    assert [engine.page(index) for index in range(pages)] == wanted


def repaired(engine: Engine, wanted: list[bytes], *, pages: int = PAGES) -> None:
    """Publish the pages again, from an instance that still has them; all are then restored."""
    source = Engine.register(engine.manager, pages=pages, geometry=engine.geometry)
    for tensor in source.tensors.values():
        tensor[:] = 0
    for index in range(pages):
        fill(source, index, wanted[index])
    source.save(numbered(pages))
    all_come_back(engine, wanted)
    engine.manager.unregister(source.instance)


def fill(engine: Engine, index: int, page: bytes) -> None:
    """Put bytes that ``Engine.page`` gave into a page."""
    start = 0
    for item, nbytes in zip(engine.geometry.slots, engine.geometry.segment_nbytes, strict=True):
        view = engine.tensors[item.name][index]
        view.reshape(-1).view("uint8")[:] = list(page[start : start + nbytes])
        start += nbytes


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("left", [0, BLOCK, VICTIM * BLOCK + 512, (PAGES - 1) * BLOCK + 4000])
def test_truncated_ssd_file_yields_misses_and_never_wrong_bytes(
    open_manager: ManagerFactory, ssd_path: Path, backend: str, left: int
) -> None:
    manager = open_manager(ssd_cache_paths=ssd_path, ssd_backend=backend)
    engine = Engine.register(manager)
    wanted = [engine.page(index) for index in range(PAGES)]
    engine.save(numbered(PAGES))
    manager.flush(evict_dram=True)
    extents = [engine.copy(page_hash(index), Tier.SSD) for index in range(PAGES)]
    os.truncate(ssd_path, left)
    engine.clear()
    for index, extent in enumerate(extents):
        placed = engine.restored({page_hash(index): index})
        assert bool(placed) == (extent.offset + extent.nbytes <= left)
        assert engine.page(index) == wanted[index] if placed else engine.is_clear(index)
    repaired(engine, wanted)
    assert manager.flush(evict_dram=True).unwritten == 0
    engine.clear()
    assert len(engine.restored(numbered(PAGES))) == PAGES


def test_ssd_file_that_lost_its_bytes_yields_misses(
    open_manager: ManagerFactory, ssd_path: Path
) -> None:
    """Holes read as zeros, and zeros are no object."""
    manager = open_manager(ssd_cache_paths=ssd_path)
    engine = Engine.register(manager)
    engine.save(numbered(PAGES))
    manager.flush(evict_dram=True)
    os.truncate(ssd_path, 0)
    os.truncate(ssd_path, MIB)
    engine.clear()
    assert engine.restored(numbered(PAGES)) == ()
    assert all(engine.is_clear(index) for index in range(PAGES))
    assert counters(manager)["corrupt_ssd"] == PAGES


def test_extent_that_holds_another_object_yields_a_miss(
    open_manager: ManagerFactory, ssd_path: Path
) -> None:
    """Whole, sound, and not what was asked for: the key's digest tells."""
    manager = open_manager(ssd_cache_paths=ssd_path)
    engine = Engine.register(manager)
    wanted = [engine.page(index) for index in range(PAGES)]
    engine.save(numbered(PAGES))
    manager.flush(evict_dram=True)
    other = engine.copy(page_hash(0), Tier.SSD).offset
    with ssd_path.open("r+b") as file:
        file.seek(other)
        image = file.read(BLOCK)
        file.seek(victim_offset(engine))
        file.write(image)
        file.flush()
        os.fsync(file.fileno())
    check_one_restore_leaves_out_the_victim(engine, wanted)


def test_older_generation_in_an_extent_yields_a_miss(
    open_manager: ManagerFactory, ssd_path: Path
) -> None:
    """The right key, whole and sound, but from before the page was saved anew."""
    manager = open_manager(ssd_cache_paths=ssd_path)
    engine = Engine.register(manager)
    wanted = [engine.page(index) for index in range(PAGES)]
    engine.save(numbered(PAGES))
    manager.flush(evict_dram=True)
    copy = engine.copy(page_hash(VICTIM), Tier.SSD)
    copy.generation += 100
    check_one_restore_leaves_out_the_victim(engine, wanted)


def test_dram_restore_ends_while_a_read_from_ssd_has_not_begun(
    open_manager: ManagerFactory, ssd_path: Path
) -> None:
    lanes, gate = Lanes(), Gate()
    manager = open_manager(lanes=lanes, ssd_cache_paths=ssd_path)
    engine = Engine.register(manager)
    wanted = [engine.page(index) for index in range(2)]
    engine.save({page_hash("on ssd"): 0})
    manager.flush(evict_dram=True)
    engine.save({page_hash("in dram"): 1})
    engine.clear()
    lanes.before["ring:read"] = gate.pass_through
    lease = manager.query(engine.instance, [page_hash("on ssd")])
    slow = manager.restore(lease, {page_hash("on ssd"): 4})
    gate.await_arrival()
    assert engine.restored({page_hash("in dram"): 5}) == (page_hash("in dram"),)
    assert engine.page(5) == wanted[1]
    assert not slow.done
    gate.open()
    assert isinstance(slow.result(WAIT_S), Restored)
    assert engine.page(4) == wanted[0]


@pytest.mark.parametrize("pause", ["before", "after"])
def test_unregister_during_a_read_returns_only_when_all_of_it_has_drained(
    open_manager: ManagerFactory, ssd_path: Path, pause: str
) -> None:
    """Before the read is submitted, and when it is over but nobody has been told."""
    lanes, gate = Lanes(), Gate()
    manager = open_manager(lanes=lanes, ssd_cache_paths=ssd_path)
    engine = Engine.register(manager)
    engine.save(numbered(3))
    manager.flush(evict_dram=True)
    getattr(lanes, pause)["ring:read"] = gate.pass_through
    ticket = manager.restore(manager.query(engine.instance, list(numbered(3))), numbered(3))
    gate.await_arrival()
    leaving = in_thread(lambda: manager.unregister(engine.instance))
    assert comes_to_refuse(engine)
    assert leaving.is_alive(), "left while a read into its pages was under way"
    gate.open()
    assert ended(leaving)
    assert isinstance(ticket.result(0), Restored)
    assert manager.leaks() == []


def test_cancel_after_the_disk_is_done_but_before_that_is_told_places_nothing(
    open_manager: ManagerFactory, ssd_path: Path
) -> None:
    lanes, gate = Lanes(), Gate()
    manager = open_manager(lanes=lanes, ssd_cache_paths=ssd_path)
    engine = Engine.register(manager)
    engine.save(numbered(2))
    manager.flush(evict_dram=True)
    engine.clear()
    lanes.after["ring:read"] = gate.pass_through
    ticket = manager.restore(manager.query(engine.instance, list(numbered(2))), numbered(2))
    gate.await_arrival()
    ticket.cancel()
    held = manager.statistics().pool_used_nbytes
    ended_early = ticket.done
    gate.open()
    assert not ended_early
    assert held == 2 * BLOCK, "memory was freed before the lane had told of the read's end"
    assert cancelled(ticket)
    assert rest(manager) == []
    assert all(engine.is_clear(index) for index in range(2))
    lanes.after.clear()
    assert len(engine.restored(numbered(2))) == 2


@pytest.mark.parametrize("codec", ["none", "fp8"])
def test_corrupt_object_on_ssd_is_repaired_by_the_next_save_whatever_it_is_stored_as(
    open_manager: ManagerFactory, ssd_path: Path, codec: str
) -> None:
    manager = open_manager(ssd_cache_paths=ssd_path, storage_codec=codec)
    engine = Engine.register(manager, geometry=toy_geometry(page_tokens=256))
    for tensor in engine.tensors.values():  # what E4M3 holds exactly
        tensor[:] = np.arange(tensor.size).reshape(tensor.shape) % 17 - 8
    wanted = [engine.page(index) for index in range(PAGES)]
    engine.save(numbered(PAGES))
    stored = engine.copy(page_hash(VICTIM), Tier.DRAM).nbytes
    assert (stored < len(wanted[0])) == (codec == "fp8")
    manager.flush(evict_dram=True)
    flip_file(ssd_path, victim_offset(engine) + 700, 4)
    check_one_restore_leaves_out_the_victim(engine, wanted)
    repaired(engine, wanted)
    assert manager.flush(evict_dram=True).unwritten == 0
    engine.clear()
    assert engine.restored({page_hash(VICTIM): 0}) == (page_hash(VICTIM),)
    assert engine.page(0) == wanted[VICTIM]


# One flipped bit -------------------------------------------------------------------------------

REGIONS = tuple(regions(toy_geometry(), BLOCK))
PER_REGION = 6


def sampled(region: str) -> list[tuple[int, int]]:
    """The first and last byte of a region and some between, with a bit of each."""
    span = regions(toy_geometry(), BLOCK)[region]
    choose = random.Random(region)
    positions = {span[0], span[-1], *(choose.choice(span) for _ in range(PER_REGION))}
    return [(position, choose.randrange(8)) for position in sorted(positions)]


@pytest.mark.parametrize("region", REGIONS)
def test_flipped_bit_in_dram_is_a_miss_of_exactly_that_page_and_a_new_save_repairs_it(
    open_manager: ManagerFactory, region: str
) -> None:
    engine = Engine.register(open_manager(), pages=PAGES)
    wanted = [engine.page(index) for index in range(PAGES)]
    engine.save(numbered(PAGES))
    for count, (position, bit) in enumerate(sampled(region), start=1):
        memory = engine.copy(page_hash(VICTIM), Tier.DRAM).memory
        assert memory is not None
        flip_memory(memory, position, bit)
        check_one_restore_leaves_out_the_victim(engine, wanted)
        assert counters(engine.manager)["corrupt_dram"] == count
        repaired(engine, wanted)
    assert engine.manager.statistics().pool_used_nbytes == PAGES * BLOCK


@pytest.mark.parametrize("region", REGIONS)
def test_flipped_bit_on_ssd_is_a_miss_of_exactly_that_page_and_a_new_save_repairs_it(
    open_manager: ManagerFactory, ssd_path: Path, region: str
) -> None:
    manager = open_manager(ssd_cache_paths=ssd_path)
    engine = Engine.register(manager, pages=PAGES)
    wanted = [engine.page(index) for index in range(PAGES)]
    engine.save(numbered(PAGES))
    for count, (position, bit) in enumerate(sampled(region), start=1):
        assert manager.flush(evict_dram=True).unwritten == 0
        flip_file(ssd_path, victim_offset(engine) + position, bit)
        check_one_restore_leaves_out_the_victim(engine, wanted)
        assert counters(manager)["corrupt_ssd"] == count
        repaired(engine, wanted)
    assert manager.flush().unwritten == 0
    assert manager.statistics().ssd_used_nbytes == PAGES * BLOCK


def test_flipped_bit_hides_no_neighbour_asked_for_by_itself(open_manager: ManagerFactory) -> None:
    engine = Engine.register(open_manager(), pages=PAGES)
    wanted = [engine.page(index) for index in range(PAGES)]
    engine.save(numbered(PAGES))
    memory = engine.copy(page_hash(VICTIM), Tier.DRAM).memory
    assert memory is not None
    flip_memory(memory, 600, 3)
    check_only_the_victim_misses(engine, wanted)


def test_corrupt_dram_copy_leaves_the_sound_one_on_ssd(
    open_manager: ManagerFactory, ssd_path: Path
) -> None:
    manager = open_manager(ssd_cache_paths=ssd_path)
    engine = Engine.register(manager, pages=PAGES)
    wanted = engine.page(VICTIM)
    engine.save(numbered(PAGES))
    manager.flush()
    memory = engine.copy(page_hash(VICTIM), Tier.DRAM).memory
    assert memory is not None
    flip_memory(memory, 513, 0)
    engine.clear()
    assert engine.restored({page_hash(VICTIM): 0}) == ()
    assert engine.restored({page_hash(VICTIM): 0}) == (page_hash(VICTIM),)
    assert engine.page(0) == wanted


def test_corrupt_copy_stays_with_its_readers_and_each_of_them_misses(
    open_manager: ManagerFactory,
) -> None:
    engine = Engine.register(open_manager(), pages=PAGES)
    engine.save(numbered(PAGES))
    leases = [engine.manager.query(engine.instance, [page_hash(VICTIM)]) for _ in range(3)]
    memory = engine.copy(page_hash(VICTIM), Tier.DRAM).memory
    assert memory is not None
    flip_memory(memory, 100, 7)
    for lease in leases:
        outcome = engine.manager.restore(lease, {page_hash(VICTIM): 0}).result(WAIT_S)
        assert outcome == Miss((page_hash(VICTIM),))
    assert counters(engine.manager)["corrupt_dram"] == 3
    assert engine.manager.statistics().pool_used_nbytes == (PAGES - 1) * BLOCK


@pytest.mark.parametrize("tier", list(Tier))
def test_page_with_one_corrupt_state_group_is_a_miss_as_a_whole(
    open_manager: ManagerFactory, ssd_path: Path, tier: Tier
) -> None:
    """No group of a page is placed where another one of it is missing."""
    manager = open_manager(ssd_cache_paths=ssd_path)
    engine = Engine.register(manager, geometry=grouped_geometry())
    wanted = [engine.page(index) for index in range(3)]
    engine.save(numbered(3))
    manager.flush(evict_dram=tier is Tier.SSD)
    copy = engine.copy(page_hash(1), tier, "recurrent")
    if tier is Tier.DRAM:
        assert copy.memory is not None
        flip_memory(copy.memory, 700, 1)
    else:
        flip_file(ssd_path, copy.offset + 700, 1)
    engine.clear()
    outcome = engine.restore(numbered(3))
    assert outcome == Restored((page_hash(0), page_hash(2)), (page_hash(1),))
    assert engine.is_clear(1)
    assert [engine.page(0), engine.page(2)] == [wanted[0], wanted[2]]


# Cancelling ------------------------------------------------------------------------------------


def cancelled(ticket: Ticket) -> bool:
    outcome = ticket.result(WAIT_S)
    return isinstance(outcome, Failed) and isinstance(outcome.error, Cancelled)


def test_publish_cancelled_before_submission_saves_nothing(open_manager: ManagerFactory) -> None:
    engine = Engine.register(open_manager())
    first_may_go = threading.Event()
    first = engine.manager.publish(engine.instance, [(page_hash(0), 0)], ready=first_may_go)
    second = engine.manager.publish(engine.instance, [(page_hash(1), 1)])
    second.cancel()
    first_may_go.set()
    assert cancelled(second)
    assert isinstance(first.result(WAIT_S), Saved)
    assert engine.hits([page_hash(0)]) == 1
    assert engine.hits([page_hash(1)]) == 0


def test_cancel_waits_for_submitted_work_of_a_publish(open_manager: ManagerFactory) -> None:
    lanes, gate = Lanes(), Gate()
    manager = open_manager(lanes=lanes)
    engine = Engine.register(manager)
    lanes.before["stream:save"] = gate.pass_through
    ticket = manager.publish(engine.instance, [(page_hash(0), 0)])
    gate.await_arrival()
    ticket.cancel()
    held = manager.statistics().pool_used_nbytes
    ended_early = ticket.done
    gate.open()
    assert not ended_early, "the lane was still reading the engine's page"
    assert held == BLOCK, "the pool memory was given up under the lane's hands"
    assert cancelled(ticket)
    assert rest(manager) == []
    assert manager.statistics().pool_used_nbytes == 0
    assert engine.save(numbered(1)).stored


def test_publish_cancelled_after_its_end_stays_saved(open_manager: ManagerFactory) -> None:
    engine = Engine.register(open_manager())
    ticket = engine.manager.publish(engine.instance, numbered(1).items())
    ticket.result(WAIT_S)
    ticket.cancel()
    assert isinstance(ticket.result(0), Saved)
    assert engine.hits([page_hash(0)]) == 1


def test_publish_cancelled_between_its_batches_keeps_what_is_whole(
    open_manager: ManagerFactory,
) -> None:
    lanes, gate = Lanes(), Gate()
    manager = open_manager(lanes=lanes, pool_nbytes=64 * MIB)
    engine = Engine.register(manager, pages=40, geometry=big_geometry(MIB))
    lanes.before["stream:save"] = gate.pass_through
    ticket = manager.publish(engine.instance, numbered(40).items())
    gate.await_arrival()
    ticket.cancel()
    gate.open()
    assert cancelled(ticket)
    assert rest(manager) == []
    saved = [index for index in range(40) if engine.hits([page_hash(index)])]
    wanted = {index: hash(engine.page(index)) for index in saved}
    assert len(saved) < 40
    engine.clear()
    for index in saved:
        assert engine.restored({page_hash(index): index})
        assert hash(engine.page(index)) == wanted[index]


def test_cancel_ends_a_publish_that_waits_for_pool_memory(open_manager: ManagerFactory) -> None:
    """Waiting is not submitted work: it must not go on until somebody else frees memory."""
    engine = Engine.register(open_manager(pool_nbytes=BLOCK))
    engine.save(numbered(1))
    lease = engine.manager.query(engine.instance, [page_hash(0)])
    ticket = engine.manager.publish(engine.instance, [(page_hash("new"), 1)])
    assert comes_to_wait(engine.manager, 1)
    ticket.cancel()
    try:
        outcome = ticket.result(5.0)
    finally:
        lease.release()
    assert isinstance(outcome, Failed)
    assert isinstance(outcome.error, Cancelled)
    assert engine.hits([page_hash(0)]) == 1, "nothing was evicted for what was cancelled"


def test_cancel_ends_a_demand_read_that_waits_for_pool_memory(
    open_manager: ManagerFactory, ssd_path: Path
) -> None:
    manager = open_manager(pool_nbytes=BLOCK, ssd_cache_paths=ssd_path, pool_wait_s=3600.0)
    engine = Engine.register(manager)
    engine.save({page_hash("on ssd"): 0})
    manager.flush(evict_dram=True)
    engine.save(numbered(1))
    manager.flush()
    held = manager.query(engine.instance, [page_hash(0)])
    lease = manager.query(engine.instance, [page_hash("on ssd")])
    ticket = manager.restore(lease, {page_hash("on ssd"): 7})
    assert comes_to_wait(manager, 1)
    ticket.cancel()
    try:
        outcome = ticket.result(5.0)
    finally:
        held.release()
    assert isinstance(outcome, Failed)
    assert isinstance(outcome.error, Cancelled)


@pytest.mark.parametrize("lane", ["ring:read", "stream:restore"])
def test_cancel_waits_for_submitted_io_of_a_restore(
    open_manager: ManagerFactory, ssd_path: Path, lane: str
) -> None:
    lanes, gate = Lanes(), Gate()
    manager = open_manager(lanes=lanes, ssd_cache_paths=ssd_path)
    engine = Engine.register(manager)
    engine.save(numbered(2))
    manager.flush(evict_dram=True)
    engine.clear()
    lanes.before[lane] = gate.pass_through
    lease = manager.query(engine.instance, list(numbered(2)))
    ticket = manager.restore(lease, numbered(2))
    gate.await_arrival()
    ticket.cancel()
    held = manager.statistics()
    ended_early = ticket.done
    gate.open()
    assert not ended_early
    assert held.pool_used_nbytes == 2 * BLOCK, "memory was freed under the read"
    assert cancelled(ticket)
    assert rest(manager) == []
    assert all(engine.is_clear(index) for index in range(2)), "cancelled before a page was placed"
    assert engine.hits(list(numbered(2))) == 2
    assert len(engine.restored(numbered(2))) == 2


def test_restore_cancelled_before_submission_places_nothing(open_manager: ManagerFactory) -> None:
    lanes, gate = Lanes(), Gate()
    manager = open_manager(lanes=lanes)
    engine = Engine.register(manager)
    engine.save(numbered(2))
    engine.clear()
    lanes.before["stream:restore"] = gate.pass_through
    first = manager.restore(manager.query(engine.instance, [page_hash(0)]), {page_hash(0): 0})
    gate.await_arrival()
    second = manager.restore(manager.query(engine.instance, [page_hash(1)]), {page_hash(1): 1})
    second.cancel()
    gate.open()
    assert cancelled(second)
    assert isinstance(first.result(WAIT_S), Restored)
    assert engine.is_clear(1)


def test_cancel_while_pages_are_placed_is_told_only_when_the_last_is(
    open_manager: ManagerFactory,
) -> None:
    lanes, gate = Lanes(), Gate()
    manager = open_manager(lanes=lanes)
    engine = Engine.register(manager)
    wanted = engine.page(0)
    engine.save(numbered(1))
    engine.clear()
    calls: list[str] = []

    def hold_the_last() -> None:
        calls.append("call")
        if lanes.seen["stream:restore"][-1] == "run_items":
            gate.pass_through()

    lanes.before["stream:restore"] = hold_the_last
    ticket = manager.restore(manager.query(engine.instance, [page_hash(0)]), numbered(1))
    gate.await_arrival()
    ticket.cancel()
    ended_early = ticket.done
    gate.open()
    assert not ended_early, "the page was still being written"
    assert cancelled(ticket)
    assert engine.page(0) in (wanted, bytes(len(wanted)))
    assert engine.restored(numbered(1))


def test_restore_cancelled_after_its_end_stays_restored(open_manager: ManagerFactory) -> None:
    engine = Engine.register(open_manager())
    engine.save(numbered(1))
    lease = engine.manager.query(engine.instance, list(numbered(1)))
    ticket = engine.manager.restore(lease, numbered(1))
    ticket.result(WAIT_S)
    ticket.cancel()
    assert isinstance(ticket.result(0), Restored)


def test_cancel_at_any_point_leaves_nothing_and_yields_no_wrong_bytes(
    open_manager: ManagerFactory, ssd_path: Path
) -> None:
    """Gates at the n-th step of each lane in turn: cancel there, for publish and for restore."""
    lanes = Lanes()
    manager = open_manager(lanes=lanes, ssd_cache_paths=ssd_path)
    engine = Engine.register(manager)
    wanted = [engine.page(index) for index in range(4)]

    def cancel_at(lane: str, step: int, start: Callable[[], Ticket]) -> Outcome:
        gate, left = Gate(), [step]

        def count() -> None:
            left[0] -= 1
            if left[0] == 0:
                gate.pass_through()

        lanes.before = {lane: count}
        ticket = start()
        ticket.when_done(gate.arrived.set)  # a step that never comes
        gate.await_arrival()
        ticket.cancel()
        gate.open()
        outcome = ticket.result(WAIT_S)
        lanes.before = {}
        assert rest(manager) == []
        return outcome

    source = Engine.register(manager, seed=1)
    for step in range(1, 4):
        for lane in ("stream:save", "ring:write"):
            name = f"{lane}{step}"
            pages = {page_hash((name, index)): index for index in range(4)}
            cancel_at(lane, step, lambda: manager.publish(source.instance, pages.items()))  # noqa: B023
            manager.flush()
            for page, index in pages.items():
                if engine.restored({page: index}):
                    assert engine.page(index) == wanted[index]
            manager.flush(evict_dram=True)
        for lane in ("ring:read", "stream:restore"):
            source.save(numbered(4))
            manager.flush(evict_dram=lane == "ring:read")
            engine.clear()
            lease = manager.query(engine.instance, list(numbered(4)))
            assert len(lease.hashes) == 4
            outcome = cancel_at(lane, step, lambda: manager.restore(lease, numbered(4)))  # noqa: B023
            for index in range(4):
                assert engine.page(index) == wanted[index] or engine.is_clear(index)
            assert isinstance(outcome, Failed | Restored)


# Stages that fail ------------------------------------------------------------------------------


def with_planned_stages(tmp_path: Path) -> dict[str, str]:
    save = definition(
        tmp_path,
        "save",
        (
            '"encode", "crc32"',
            '"encode", { use = "tests.builders:PlannedEncode", plan = "save" }, "crc32"',
        ),
    )
    planned = '{ use = "tests.builders:PlannedDecode", plan = "restore" }'
    restore = definition(
        tmp_path,
        "restore",
        ('["upload", "validate", "decode"]', f'["upload", "validate", {planned}, "decode"]'),
    )
    return {"save_pipeline": save, "restore_pipeline": restore}


def raising(error: BaseException, *, when: bytes | None = None) -> Plan:
    async def plan(batch: EncodedBatch | ValidatedBatch, ctx: StageContext) -> None:
        if when is None or when in batch.part.hashes:
            raise error

    return plan


@pytest.mark.parametrize("direction", ["save", "restore"])
def test_orbit_error_in_a_users_stage_fails_that_request_only(
    open_manager: ManagerFactory, tmp_path: Path, direction: str
) -> None:
    manager = open_manager(**with_planned_stages(tmp_path))
    engine = Engine.register(manager)
    if direction == "restore":
        engine.save(numbered(3))
    PLANS[direction] = raising(OrbitError("not this page"), when=page_hash(1))
    outcomes = []
    for index in range(3):
        page = {page_hash(index): index}
        if direction == "save":
            outcomes.append(manager.publish(engine.instance, page.items()).result(WAIT_S))
        else:
            outcomes.append(engine.restore(page))
    good = Saved if direction == "save" else Restored
    assert [type(outcome) for outcome in outcomes] == [good, Failed, good]
    assert str(outcomes[1].error) == "not this page"
    assert rest(manager) == []
    PLANS.clear()
    assert engine.save(numbered(3))
    assert len(engine.restored(numbered(3))) == 3, "what is stored has not been touched"


@pytest.mark.parametrize("direction", ["save", "restore"])
@pytest.mark.parametrize("error", [ZeroDivisionError("a bug"), StopIteration(), AssertionError()])
def test_bug_in_a_users_stage_fails_all_tickets_and_the_manager_still_closes(
    open_manager: ManagerFactory, tmp_path: Path, direction: str, error: BaseException
) -> None:
    manager = open_manager(**with_planned_stages(tmp_path))
    engine = Engine.register(manager)
    engine.save(numbered(4))
    PLANS[direction] = raising(error)
    tickets = []
    for index in range(4):
        if direction == "save":
            tickets.append(manager.publish(engine.instance, [(page_hash(f"n{index}"), index)]))
        else:
            lease = manager.query(engine.instance, [page_hash(index)])
            tickets.append(manager.restore(lease, {page_hash(index): index}))
    outcomes = [ticket.result(WAIT_S) for ticket in tickets]
    assert all(isinstance(outcome, Failed) for outcome in outcomes)
    assert [type(outcome.error) for outcome in outcomes] == [StageFault] * 4  # type: ignore[union-attr]
    PLANS.clear()
    late = manager.publish(engine.instance, [(page_hash("late"), 0)]).result(WAIT_S)
    assert isinstance(late, Failed if direction == "save" else Saved)
    assert rest(manager) == []
    closing = in_thread(manager.close)
    assert ended(closing)


def test_bug_on_a_lane_while_others_wait_fails_every_ticket_with_a_stage_fault(
    open_manager: ManagerFactory, tmp_path: Path
) -> None:
    """More requests than the queues hold, so that some wait at every station."""
    manager = open_manager(**with_planned_stages(tmp_path))
    engine = Engine.register(manager, pages=24)
    gate = Gate()

    async def fail_on_the_lane(batch: EncodedBatch, ctx: StageContext) -> None:
        def work() -> None:
            gate.pass_through()
            raise ZeroDivisionError("a bug")

        await ctx.lane.run(work)

    PLANS["save"] = fail_on_the_lane
    tickets = [manager.publish(engine.instance, [(page_hash(index), index)]) for index in range(24)]
    gate.await_arrival()
    gate.open()
    outcomes = [ticket.result(WAIT_S) for ticket in tickets]
    assert {type(outcome) for outcome in outcomes} == {Failed}
    assert {type(outcome.error) for outcome in outcomes} == {StageFault}  # type: ignore[union-attr]
    assert rest(manager) == []


def test_stop_iteration_on_a_lane_hangs_nobody(
    open_manager: ManagerFactory, tmp_path: Path
) -> None:
    manager = open_manager(**with_planned_stages(tmp_path))
    engine = Engine.register(manager)

    async def next_of_nothing(batch: EncodedBatch, ctx: StageContext) -> None:
        await ctx.lane.run(next, iter(()))

    PLANS["save"] = next_of_nothing
    outcome = manager.publish(engine.instance, numbered(1).items()).result(5.0)
    assert isinstance(outcome, Failed)
    assert isinstance(outcome.error, StageFault)


def test_flush_ends_after_a_bug_has_stopped_the_save_pipeline(
    open_manager: ManagerFactory, tmp_path: Path, ssd_path: Path
) -> None:
    lanes, gate = Lanes(), Gate()
    lanes.before["ring:write"] = gate.pass_through
    manager = open_manager(lanes=lanes, ssd_cache_paths=ssd_path, **with_planned_stages(tmp_path))
    engine = Engine.register(manager, pages=16)
    for page, index in numbered(12).items():
        engine.save({page: index})
    gate.await_arrival()
    PLANS["save"] = raising(ZeroDivisionError("a bug"))
    failed = manager.publish(engine.instance, [(page_hash("x"), 13)]).result(WAIT_S)
    assert isinstance(failed, Failed)
    gate.open()
    flushed: list[object] = []
    flushing = in_thread(lambda: flushed.append(manager.flush()))
    assert ended(flushing), "flush waits for writes that nobody will make"
    assert rest(manager) == []
    assert len(engine.restored(numbered(12))) == 12


def test_ready_event_that_fails_fails_that_request_only(open_manager: ManagerFactory) -> None:
    """A device's error reaches us here; the next request may be of another engine."""

    class Broken:
        def wait(self) -> None:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")

    engine = Engine.register(open_manager())
    outcome = engine.manager.publish(engine.instance, [(page_hash(0), 0)], ready=Broken()).result(
        WAIT_S
    )
    assert isinstance(outcome, Failed)
    assert engine.save({page_hash(1): 1}).stored == (page_hash(1),)


def test_async_caller_sees_the_fault_as_an_outcome(tmp_path: Path) -> None:
    async def scenario() -> None:
        config = Config(pool_nbytes=MIB, lock_memory=False, **with_planned_stages(tmp_path))  # type: ignore[arg-type]
        async with Manager(config) as manager:
            engine = await asyncio.to_thread(Engine.register, manager)
            PLANS["save"] = raising(ZeroDivisionError("a bug"))
            ticket = await manager.publish_async(engine.instance, numbered(1).items())
            outcome = await ticket
            assert isinstance(outcome, Failed)
            assert isinstance(outcome.error, StageFault)

    asyncio.run(scenario())


def test_close_while_a_stage_waits_for_memory_of_a_stopped_reader_hangs_nobody(
    open_manager: ManagerFactory, tmp_path: Path
) -> None:
    """The restore pipeline stops on a bug while it holds pool memory that a save waits for."""
    manager = open_manager(pool_nbytes=BLOCK, **with_planned_stages(tmp_path))
    engine = Engine.register(manager)
    engine.save(numbered(1))
    PLANS["restore"] = raising(ZeroDivisionError("a bug"))
    lease = manager.query(engine.instance, [page_hash(0)])
    waiting = manager.publish(engine.instance, [(page_hash("new"), 1)])
    assert comes_to_wait(manager, 1)
    assert isinstance(manager.restore(lease, numbered(1)).result(WAIT_S), Failed)
    assert isinstance(waiting.result(WAIT_S), Saved), "the failed restore kept its pins"


def test_work_submitted_while_the_manager_closes_ends_as_closed(
    open_manager: ManagerFactory,
) -> None:
    engine = Engine.register(open_manager())
    ready = threading.Event()
    ticket = engine.manager.publish(engine.instance, [(page_hash(0), 0)], ready=ready)
    closing = in_thread(engine.manager.close)
    assert comes_to_refuse(engine)
    ready.set()
    assert ended(closing)
    assert isinstance(ticket.result(0), Saved)


@pytest.mark.parametrize(
    "error",
    [asyncio.CancelledError(), SystemExit(3), KeyboardInterrupt()],
    ids=lambda error: type(error).__name__,
)
def test_what_would_end_a_loop_ends_only_the_pipeline_when_a_stage_raises_it(
    open_manager: ManagerFactory, tmp_path: Path, error: BaseException
) -> None:
    manager = open_manager(**with_planned_stages(tmp_path))
    engine = Engine.register(manager)

    async def fail(batch: EncodedBatch, ctx: StageContext) -> None:
        raise error

    PLANS["save"] = fail
    for index in range(2):  # the second meets a pipeline that has stopped, and does not wait
        outcome = manager.publish(engine.instance, [(page_hash(index), index)]).result(WAIT_S)
        assert isinstance(outcome, Failed)
        assert isinstance(outcome.error, StageFault)
    assert rest(manager) == []
