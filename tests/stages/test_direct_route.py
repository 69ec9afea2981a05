"""The direct route: from a GPU's memory to SSD and back, past the host."""

# ruff: noqa: ANN401 - what stands for a lane's call takes what that takes

from __future__ import annotations

import asyncio
import itertools
import threading
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from orbitkv import Config, Manager, Miss, Restored, Saved
from orbitkv.cache.catalogue import Copy, Tier
from orbitkv.cache.direct import MOST_JOBS, SLOT_NBYTES, SlotPool, cut_pieces
from orbitkv.config import MIB
from orbitkv.errors import Cancelled, ConfigError, DirectFault, Unavailable
from orbitkv.objects import check_payloads, read_header
from orbitkv.probe import direct_unavailable, kvikio_unavailable
from orbitkv.runtime import devices
from orbitkv.runtime.cufile import CuFileLane
from orbitkv.segment import StateKey
from orbitkv.stages import staging
from orbitkv.stages.ticket import Failed, Ticket
from tests.builders import WAIT_S, counters, in_thread, numbered, page_hash, rest
from tests.conftest import ManagerFactory
from tests.emulated import EmulatedDevice, EmulatedFileLane
from tests.stages.test_both_devices import (
    CODECS,
    LAYOUTS,
    PAGES,
    Pages,
    ans,
    decoded,
    dense,
    geometry_of,
    opened,
    same,
)

__all__ = ["ans", "opened"]  # fixtures

BIG_TOKENS = 2048  # an object of more than two slots


@dataclass
class Route:
    """The kind of GPU, and the class of lanes that move its slots."""

    device: str
    lane: type[Any]
    monkeypatch: pytest.MonkeyPatch

    def meddle(self, verb: str, change: Callable[..., Awaitable[int]]) -> None:
        """Let ``change(original, lane, ...)`` stand for one of the lane's calls."""
        original = getattr(self.lane, verb)

        async def call(lane: object, *args: object) -> int:
            return await change(original, lane, *args)

        self.monkeypatch.setattr(self.lane, verb, call)

    def pause(self, verb: str) -> threading.Event:
        """Hold a call up, as if the disk did, until the event is set."""
        release = threading.Event()

        async def wait(original: Any, *args: Any) -> int:
            await asyncio.to_thread(release.wait, WAIT_S)
            return int(await original(*args))

        self.meddle(verb, wait)
        return release


@pytest.fixture(params=["emulated", pytest.param("cuda", marks=pytest.mark.gpu)])
def gpu(request: pytest.FixtureRequest) -> str:
    """A GPU, or what stands for one."""
    return str(request.param)


@pytest.fixture
def route(gpu: str, monkeypatch: pytest.MonkeyPatch) -> Route:
    """cuFile, or what stands for it."""
    if gpu == "cuda":
        if reason := kvikio_unavailable():
            pytest.skip(reason)
        return Route(gpu, CuFileLane, monkeypatch)
    monkeypatch.setattr(devices, "Device", EmulatedDevice)
    monkeypatch.setattr(devices, "CuFileLane", EmulatedFileLane)

    def unavailable(paths: tuple[Path, ...], backend: str) -> str | None:
        return None if paths and backend == "cufile" else "chosen otherwise"

    monkeypatch.setattr(staging, "direct_unavailable", unavailable)
    return Route(gpu, EmulatedFileLane, monkeypatch)


@pytest.fixture
def direct(opened: ManagerFactory, route: Route, ssd_path: Path) -> ManagerFactory:
    """Managers that write and read by cuFile."""

    def open_direct(**settings: object) -> Manager:
        chosen = {
            "ssd_cache_paths": ssd_path,
            "ssd_cache_capacity_nbytes": 64 * MIB,
            "ssd_backend": "cufile",
        }
        return opened(**(chosen | settings))

    del route
    return open_direct


def tally(engine: Pages) -> Counter[str]:
    return Counter(counters(engine.manager))


def engine_of(manager: Manager, route: Route, **shape: object) -> Pages:
    layout = str(shape.pop("layout", "hnd"))
    make, axes = LAYOUTS[layout]
    geometry = geometry_of(**(axes | shape))
    emulated = route.device == "emulated"
    return Pages(manager, geometry, make(geometry, route.device), emulated=emulated)


def ssd_copy(engine: Pages, page: bytes) -> Copy:
    digest = StateKey(engine.instance.namespace, page, "attention").digest
    copy = engine.manager.core.catalogue.find(digest, Tier.SSD)
    assert copy is not None
    return copy


def stored(engine: Pages, page: bytes, path: Path) -> tuple[Copy, np.ndarray]:
    copy = ssd_copy(engine, page)
    with path.open("rb") as file:
        file.seek(copy.offset)
        return copy, np.frombuffer(file.read(copy.nbytes), np.uint8)


def damage(engine: Pages, page: bytes, path: Path, at: int) -> None:
    copy = ssd_copy(engine, page)
    with path.open("r+b") as file:
        file.seek(copy.offset + at)
        byte = file.read(1)[0]
        file.seek(copy.offset + at)
        file.write(bytes([byte ^ 0x10]))


def evict_dram(engine: Pages) -> None:
    """As if all of DRAM had been needed meanwhile; nothing is written on the way."""

    async def evict() -> None:
        engine.manager.core.catalogue.evict_unpinned(Tier.DRAM)

    loop = engine.manager.core._loop
    asyncio.run_coroutine_threadsafe(evict(), loop).result(WAIT_S)


def publish(engine: Pages, name: bytes, index: int) -> Ticket:
    return engine.manager.publish(engine.instance, [(name, index)])


@pytest.mark.parametrize("codec", [*CODECS, "ans"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_pages_go_to_ssd_and_come_back_past_the_host(
    direct: ManagerFactory, route: Route, codec: str, layout: str
) -> None:
    engine = engine_of(direct(storage_codec=codec), route, layout=layout)
    before = engine.snapshot()
    assert len(engine.save(numbered(6)).stored) == 6
    seen = tally(engine)
    assert seen["direct_writes"] == 6
    assert seen["ssd_writes"] == 0
    evict_dram(engine)
    engine.poison()
    guard = engine.snapshot()
    moved = {name: 11 - index for name, index in numbered(5).items()}
    assert set(engine.restore(moved).restored) == set(moved)
    after = engine.snapshot()
    for index in range(5):
        assert same(after[11 - index], decoded(codec, engine.geometry, before[index])), index
    for index in range(7):
        assert same(after[index], guard[index]), f"page {index} was not named"
    seen = tally(engine)
    assert seen["direct_reads"] >= 1
    assert seen["ssd_reads"] == 0
    assert engine.manager.core.catalogue.copies(Tier.DRAM) == (), "the host was not to see them"


@pytest.mark.parametrize("codec", ["none", "fp8", "ans"])
def test_dram_keeps_the_same_bytes_for_hot_reuse_and_the_file_stands_by_itself(
    direct: ManagerFactory, route: Route, codec: str, ssd_path: Path
) -> None:
    engine = engine_of(direct(storage_codec=codec), route)
    engine.save(numbered(4))
    for name in numbered(4):
        copy, image = stored(engine, name, ssd_path)
        header = read_header(image, key_digest=copy.digest)
        assert header.generation == copy.generation
        check_payloads(image, header)  # every CRC, and all padding zero
        hot = engine.image(name)
        assert np.array_equal(hot[header.rows[0].offset :], image[header.rows[0].offset :])
    before = tally(engine)
    assert len(engine.restore(numbered(4)).restored) == 4
    assert tally(engine)["direct_reads"] == before["direct_reads"], "DRAM has them"


@pytest.mark.parametrize(
    ("writes", "reads"), [("cufile", "uring"), ("uring", "cufile"), ("cufile", "cufile")]
)
@pytest.mark.parametrize("codec", ["none", "turboquant-4"])
def test_either_route_reads_what_the_other_wrote(
    direct: ManagerFactory, route: Route, codec: str, writes: str, reads: str
) -> None:
    backend = "auto" if writes == "uring" else writes
    engine = engine_of(direct(storage_codec=codec, ssd_backend=backend, ssd_read_path=reads), route)
    before = engine.snapshot()
    engine.save(numbered(6))
    engine.manager.flush(evict_dram=True)
    engine.poison()
    assert len(engine.restore(numbered(6)).restored) == 6
    for index in range(6):
        assert same(engine.snapshot()[index], decoded(codec, engine.geometry, before[index]))
    seen = tally(engine)
    assert (seen["direct_writes"], seen["ssd_writes"]) == ((6, 0) if writes == "cufile" else (0, 6))
    assert (seen["direct_reads"] > 0) is (reads == "cufile")
    assert (seen["ssd_reads"] > 0) is (reads == "uring")


@pytest.mark.parametrize("codec", ["none", "fp8"])
def test_an_object_longer_than_a_slot_goes_in_pieces(
    direct: ManagerFactory, route: Route, codec: str
) -> None:
    settings = {"pool_nbytes": 64 * MIB, "ssd_cache_capacity_nbytes": 64 * MIB}
    engine = engine_of(direct(storage_codec=codec, **settings), route, page_tokens=BIG_TOKENS)
    assert engine.geometry.object_nbytes["attention"] > 2 * SLOT_NBYTES
    before = engine.snapshot()
    assert len(engine.save(numbered(3)).stored) == 3
    evict_dram(engine)
    engine.poison()
    assert len(engine.restore(numbered(3)).restored) == 3
    for index in range(3):
        assert same(engine.snapshot()[index], decoded(codec, engine.geometry, before[index]))
    assert tally(engine)["direct_writes"] == 3


@pytest.mark.parametrize("codec", ["fp8", "turboquant-4"])
def test_objects_with_refused_segments_go_by_dram_and_io_uring(
    direct: ManagerFactory, route: Route, codec: str
) -> None:
    engine = engine_of(direct(storage_codec=codec), route)
    engine.tensors["k2"][1, 0, 3, 5] = float("nan")
    engine.tensors["v3"][4, 2, 0, 0] = float("inf")
    before = engine.snapshot()
    engine.save(numbered(6))
    engine.manager.flush(evict_dram=True)
    seen = tally(engine)
    assert (seen["direct_writes"], seen["ssd_writes"]) == (4, 2)
    engine.poison()
    assert len(engine.restore(numbered(6)).restored) == 6, "raw and encoded in one restore"
    for index in range(6):
        assert same(engine.snapshot()[index], decoded(codec, engine.geometry, before[index]))


def test_ranges_beside_each_other_are_read_at_once(direct: ManagerFactory, route: Route) -> None:
    engine = engine_of(direct(), route)
    engine.save(numbered(6))
    evict_dram(engine)
    engine.restore(numbered(6))
    seen = tally(engine)
    assert (seen["direct_transfers"], seen["direct_reads"]) == (1, 6)


@pytest.mark.parametrize("codec", ["none", "fp8", "turboquant-4", "ans"])
@pytest.mark.parametrize("part", ["magic", "table", "payload", "last byte"])
def test_damage_is_a_miss_of_one_page_and_the_next_save_repairs_it(
    direct: ManagerFactory, route: Route, codec: str, part: str, ssd_path: Path
) -> None:
    engine = engine_of(direct(storage_codec=codec), route)
    before = engine.snapshot()
    engine.save(numbered(4))
    evict_dram(engine)
    _, image = stored(engine, page_hash(2), ssd_path)
    rows = read_header(image).rows
    end = rows[-1].offset + rows[-1].stored_nbytes
    at = {"magic": 0, "table": 70, "payload": rows[3].offset + 5, "last byte": end - 1}[part]
    damage(engine, page_hash(2), ssd_path, at)
    engine.poison()
    guard = engine.snapshot()
    outcome = engine.restore(numbered(4))
    assert isinstance(outcome, Restored)
    assert outcome.missed == (page_hash(2),)
    after = engine.snapshot()
    for index in (0, 1, 3):
        assert same(after[index], decoded(codec, engine.geometry, before[index]))
    assert same(after[2], guard[2]), "a page that is a miss was touched"
    assert engine.hits(page_hash(2)) == 0
    assert tally(engine)["corrupt_ssd"] == 1
    engine.save({page_hash(2): 0})
    evict_dram(engine)
    assert engine.restore({page_hash(2): 7}).missed == ()
    again = decoded(codec, engine.geometry, decoded(codec, engine.geometry, before[0]))
    assert same(engine.snapshot()[7], again)


def test_a_file_that_ends_early_is_a_miss_and_hidden(
    direct: ManagerFactory, route: Route, ssd_path: Path
) -> None:
    async def end_early(original: Any, lane: Any, shard: int, slot: Any, *where: int) -> int:
        nbytes, offset = where
        return min(nbytes, await original(lane, shard, slot, nbytes, offset), 100_000)

    engine = engine_of(direct(), route)
    engine.save(numbered(3))
    evict_dram(engine)
    nbytes = ssd_copy(engine, page_hash(0)).nbytes
    assert nbytes < 100_000 < 2 * nbytes
    route.meddle("read", end_early)
    outcome = engine.restore(numbered(3))
    assert isinstance(outcome, Restored)
    assert outcome.restored == (page_hash(0),)
    seen = tally(engine)
    assert (seen["ssd_read_faults"], seen["corrupt_ssd"]) == (2, 2)
    assert engine.hits(page_hash(1)) == 0
    assert seen["direct_faults"] == 0, "the route itself is sound"


def test_a_fault_of_cufile_is_a_miss_hides_nothing_and_closes_the_route(
    direct: ManagerFactory, route: Route
) -> None:
    async def fail(*_: Any) -> int:
        raise DirectFault("an I/O error")

    engine = engine_of(direct(), route)
    before = engine.snapshot()
    engine.save(numbered(3))
    evict_dram(engine)
    route.meddle("read", fail)
    engine.poison()
    assert isinstance(engine.restore(numbered(3)), Miss)
    seen = tally(engine)
    assert (seen["direct_faults"], seen["corrupt_ssd"]) == (1, 0)
    assert len(engine.restore(numbered(3)).restored) == 3, "U reads what S could not"
    assert same(engine.snapshot()[1], before[1])
    engine.save(numbered(2, first=50))
    engine.manager.flush()
    seen = tally(engine)
    assert (seen["direct_writes"], seen["ssd_writes"]) == (3, 2)
    assert seen["direct_refused"] == 2
    assert seen["direct_faults"] == 1


def test_a_write_that_fails_is_never_visible_and_io_uring_goes_on(
    direct: ManagerFactory, route: Route
) -> None:
    async def fail(*_: Any) -> int:
        raise DirectFault("no space left")

    engine = engine_of(direct(), route)
    route.meddle("write", fail)
    assert len(engine.save(numbered(3)).stored) == 3, "DRAM has them"
    seen = tally(engine)
    assert (seen["direct_writes"], seen["direct_faults"], seen["ssd_write_faults"]) == (0, 1, 3)
    assert engine.manager.core.catalogue.copies(Tier.SSD) == ()
    assert engine.manager.flush().unwritten == 0, "a flush writes what is not on SSD"
    assert tally(engine)["ssd_writes"] == 3


@pytest.mark.parametrize("verdict", ["short", "fault"])
def test_an_object_written_half_way_is_never_visible(
    direct: ManagerFactory, route: Route, verdict: str
) -> None:
    calls = []

    async def fail_later(original: Any, lane: Any, shard: int, slot: Any, *where: int) -> int:
        calls.append(where)
        nbytes, offset = where
        if len(calls) == 2:
            if verdict == "fault":
                raise DirectFault("an I/O error")
            nbytes -= 4096
        return int(await original(lane, shard, slot, nbytes, offset))

    settings = {"pool_nbytes": 64 * MIB, "ssd_cache_capacity_nbytes": 64 * MIB}
    engine = engine_of(direct(**settings), route, page_tokens=BIG_TOKENS)
    route.meddle("write", fail_later)
    assert len(engine.save({page_hash(0): 0}).stored) == 1
    assert engine.manager.core.catalogue.copies(Tier.SSD) == ()
    assert tally(engine)["ssd_write_faults"] == 1
    assert rest(engine.manager) == []


def test_a_save_ends_when_its_direct_writes_have(direct: ManagerFactory, route: Route) -> None:
    engine = engine_of(direct(), route)
    release = route.pause("write")
    ticket = publish(engine, page_hash(0), 0)
    with pytest.raises(TimeoutError):
        ticket.result(0.3)
    assert engine.hits(page_hash(0)) == 1, "D has it already"
    assert engine.manager.core.catalogue.copies(Tier.SSD) == ()
    release.set()
    assert ticket.result(WAIT_S) == Saved((page_hash(0),), (), ())
    assert len(engine.manager.core.catalogue.copies(Tier.SSD)) == 1


def test_a_slow_disk_holds_eight_jobs_and_no_other_save(
    direct: ManagerFactory, route: Route
) -> None:
    engine = engine_of(direct(), route)
    release = route.pause("write")
    tickets = [publish(engine, name, index) for name, index in numbered(PAGES).items()]
    for ticket in tickets[MOST_JOBS:]:
        assert isinstance(ticket.result(WAIT_S), Saved)
    assert not any(ticket.done for ticket in tickets[:MOST_JOBS])
    release.set()
    for ticket in tickets:
        assert isinstance(ticket.result(WAIT_S), Saved)
    engine.manager.flush()
    seen = tally(engine)
    assert seen["direct_refused"] == PAGES - MOST_JOBS
    assert (seen["direct_writes"], seen["ssd_writes"]) == (MOST_JOBS, PAGES - MOST_JOBS)


def test_a_direct_arena_without_room_leaves_a_batch_to_io_uring(
    direct: ManagerFactory, route: Route
) -> None:
    settings = {"storage_codec_budget_nbytes": 2 * MIB}
    engine = engine_of(direct(**settings), route, page_tokens=256)
    release = route.pause("write")
    tickets = [publish(engine, name, index) for name, index in numbered(4).items()]
    assert any(_soon(ticket) for ticket in tickets), "no save went past the full arena"
    release.set()
    for ticket in tickets:
        assert isinstance(ticket.result(WAIT_S), Saved)
    engine.manager.flush()
    seen = tally(engine)
    assert seen["direct_refused"] >= 1
    assert seen["direct_writes"] + seen["ssd_writes"] == 4


def _soon(ticket: Ticket) -> bool:
    try:
        ticket.result(1)
    except TimeoutError:
        return False
    return True


def held_up(engine: Pages, route: Route, verb: str) -> tuple[Ticket, threading.Event]:
    """A restore or a save of three pages whose transfer waits for the event."""
    if verb == "read":
        engine.save(numbered(3))
        evict_dram(engine)
    release = route.pause(verb)
    if verb == "read":
        lease = engine.manager.query(engine.instance, list(numbered(3)))
        ticket = engine.manager.restore(lease, numbered(3))
    else:
        ticket = engine.manager.publish(engine.instance, list(numbered(3).items()))
    with pytest.raises(TimeoutError):
        ticket.result(0.2)
    return ticket, release


@pytest.mark.parametrize("verb", ["read", "write"])
def test_cancelling_frees_nothing_before_its_transfer_has_ended(
    direct: ManagerFactory, route: Route, verb: str
) -> None:
    engine = engine_of(direct(), route)
    ticket, release = held_up(engine, route, verb)
    ticket.cancel()
    with pytest.raises(TimeoutError):
        ticket.result(0.2)
    release.set()
    outcome = ticket.result(WAIT_S)
    assert isinstance(outcome, Failed)
    assert isinstance(outcome.error, Cancelled)
    assert rest(engine.manager) == []


@pytest.mark.parametrize("verb", ["read", "write"])
@pytest.mark.parametrize("call", ["unregister", "close"])
def test_unregister_and_close_wait_for_direct_transfers(
    direct: ManagerFactory, route: Route, verb: str, call: str
) -> None:
    engine = engine_of(direct(), route)
    ticket, release = held_up(engine, route, verb)
    if call == "close":
        leaving = in_thread(engine.manager.close)
    else:
        leaving = in_thread(lambda: engine.manager.unregister(engine.instance))
    leaving.join(0.3)
    assert leaving.is_alive(), "it returned while a transfer was under way"
    release.set()
    leaving.join(WAIT_S)
    assert not leaving.is_alive()
    assert ticket.done


def test_an_ssd_without_room_leaves_the_page_in_dram(direct: ManagerFactory, route: Route) -> None:
    engine = engine_of(direct(ssd_cache_capacity_nbytes=4096), route)
    assert len(engine.save(numbered(2)).stored) == 2
    assert tally(engine)["direct_writes"] == 0
    assert len(engine.restore(numbered(2)).restored) == 2


def test_pages_that_no_arena_holds_go_by_io_uring(direct: ManagerFactory, route: Route) -> None:
    engine = engine_of(direct(storage_codec_budget_nbytes=65536), route)
    before = engine.snapshot()
    assert len(engine.save(numbered(2)).stored) == 2
    engine.manager.flush(evict_dram=True)
    engine.poison()
    assert len(engine.restore(numbered(2)).restored) == 2
    assert same(engine.snapshot()[1], before[1])
    seen = tally(engine)
    assert (seen["direct_writes"], seen["ssd_writes"]) == (0, 2)


def test_both_directions_at_once_keep_their_bytes_apart(
    direct: ManagerFactory, route: Route
) -> None:
    engine = engine_of(direct(storage_codec="fp8"), route)
    before = engine.snapshot()
    engine.save(numbered(6))
    for round_ in range(6):
        evict_dram(engine)
        lease = engine.manager.query(engine.instance, list(numbered(6)))
        assert len(lease.hashes) == 6
        back = engine.manager.restore(lease, {n: 6 + i for n, i in numbered(6).items()})
        fresh = numbered(6, first=100 * (round_ + 1))
        out = engine.manager.publish(engine.instance, list(fresh.items()))
        assert len(back.result(WAIT_S).restored) == 6  # type: ignore[union-attr]
        assert isinstance(out.result(WAIT_S), Saved)
        after = engine.snapshot()
        for index in range(6):
            assert same(after[6 + index], decoded("fp8", engine.geometry, before[index]))


def test_pages_on_a_host_are_refused_where_cufile_was_chosen(direct: ManagerFactory) -> None:
    geometry = geometry_of()
    with pytest.raises(ConfigError, match="'cufile', and tensors on the CPU; accepted: tensors on"):
        Pages(direct(), geometry, dense(geometry, "cpu"))


@pytest.mark.parametrize("setting", ["ssd_backend", "ssd_read_path"])
def test_cufile_that_cannot_be_had_is_refused_with_the_reason(
    ssd_path: Path, setting: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(staging, "direct_unavailable", lambda *_: "no driver; install one")
    settings: dict[str, Any] = {setting: "cufile", "ssd_cache_paths": (ssd_path,)}
    with pytest.raises(Unavailable, match=f"{setting} 'cufile': no driver; install one"):
        Manager(Config(pool_nbytes=MIB, lock_memory=False, **settings))
    assert list(ssd_path.parent.iterdir()) == []


def test_cufile_that_a_definition_leaves_out_is_refused(
    direct: ManagerFactory,
) -> None:
    with pytest.raises(Unavailable, match="'dram-only-save' has no 'write_cufile'"):
        direct(save_pipeline="pipelines/examples/dram-only.save.toml")


def test_what_was_not_chosen_is_told(tmp_path: Path) -> None:
    assert "no SSD path" in str(direct_unavailable((), "auto"))
    chosen = direct_unavailable((tmp_path / "a",), "uring")
    assert chosen == "uring was chosen; D and U serve instead"


@given(st.lists(st.tuples(st.integers(0, 1), st.integers(0, 3), st.integers(1, 2500)), min_size=1))
def test_pieces_cover_every_extent_once_and_none_is_longer_than_a_slot(
    sizes: list[tuple[int, int, int]],
) -> None:
    ends = [0, 0]
    extents = []
    for shard, gap, blocks in sizes:
        offset = ends[shard] + gap * 4096
        extents.append(Copy(b"", 1, Tier.SSD, offset, blocks * 4096, shard=shard))
        ends[shard] = offset + blocks * 4096
    covered: dict[int, list[tuple[int, int]]] = {}
    pieces = cut_pieces(extents)
    for piece in pieces:
        assert 0 < piece.nbytes <= SLOT_NBYTES
        at = 0
        for number, start, where, nbytes in piece.parts:
            assert where == at
            assert extents[number].offset + start == piece.offset + where
            assert extents[number].shard == piece.shard
            covered.setdefault(number, []).append((start, nbytes))
            at += nbytes
        assert at == piece.nbytes
    for number, extent in enumerate(extents):
        end = 0
        for start, nbytes in covered[number]:
            assert start == end
            end += nbytes
        assert end == extent.nbytes
    for one, other in itertools.pairwise(pieces):
        beside = (one.shard, one.offset + one.nbytes) == (other.shard, other.offset)
        assert not beside or one.nbytes == SLOT_NBYTES, "two that could have been one"


def test_slots_are_taken_in_turn_and_none_is_lost_to_whoever_gives_up() -> None:
    async def play() -> None:
        pool = SlotPool([object(), object()])  # type: ignore[list-item]
        first, second = await pool.acquire(), await pool.acquire()
        waiting = [asyncio.create_task(pool.acquire()) for _ in range(3)]
        await asyncio.sleep(0)
        pool.release(first)
        waiting[0].cancel()
        waiting[1].cancel()
        await asyncio.sleep(0)
        pool.release(second)
        got = await waiting[2]
        assert pool.taken == 1
        pool.release(got)
        assert pool.taken == 0

    asyncio.run(play())


def test_a_batch_that_has_landed_in_part_waits_for_none_that_has_no_room(
    direct: ManagerFactory, route: Route
) -> None:
    """A short batch leaves a gap in the arena that a third one does not fit into."""
    settings = {"pool_nbytes": 128 * MIB, "ssd_cache_capacity_nbytes": 128 * MIB}
    engine = engine_of(direct(**settings), route, page_tokens=BIG_TOKENS)
    runs = [numbered(count, first=100 * number) for number, count in enumerate((2, 3, 3))]
    for run in runs:
        engine.save(run)
    engine.manager.flush()
    evict_dram(engine)
    second_piece = ssd_copy(engine, page_hash(100)).offset + SLOT_NBYTES

    async def linger(original: Any, lane: Any, shard: int, slot: Any, *where: int) -> int:
        if where[1] == second_piece:
            await asyncio.sleep(0.3)
        return int(await original(lane, shard, slot, *where))

    route.meddle("read", linger)
    tickets = []
    for number, run in enumerate(runs):
        lease = engine.manager.query(engine.instance, list(run))
        tickets.append(engine.manager.restore(lease, {n: 3 * number + i for n, i in run.items()}))
    for ticket in tickets:
        assert isinstance(ticket.result(WAIT_S), Restored)
