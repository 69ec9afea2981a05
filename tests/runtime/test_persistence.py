"""What outlives a manager, closed or killed: exact bytes or a miss, and never a byte of another."""

from __future__ import annotations

import asyncio
import contextlib
import mmap
import os
import random
import shutil
import signal
import struct
import subprocess
import sys
import time
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from orbitkv import Config, Manager
from orbitkv.cache import extents as extents_module
from orbitkv.cache.catalogue import Tier
from orbitkv.config import MIB
from orbitkv.errors import ConfigError, StoreError
from orbitkv.runtime import persistence
from tests.builders import (
    BLOCK,
    REST_S,
    WAIT_S,
    Engine,
    Gate,
    big_geometry,
    counters,
    ended,
    in_thread,
    numbered,
    page_hash,
    rest,
)
from tests.cache.holders import index_of, lock_of
from tests.conftest import ManagerFactory
from tests.runtime.keyed import Keyed

ROOT = Path(__file__).parents[2]
HEADER_NBYTES, ROW_NBYTES = 64, 56


@pytest.fixture
def kept(tmp_path: Path) -> dict[str, object]:
    """Settings of managers that follow one another on two shards."""
    return {
        "ssd_cache_paths": (tmp_path / "kv.0", tmp_path / "kv.1"),
        "ssd_persist": True,
        "ssd_checkpoint_interval_s": 0.01,
    }


def comes_to_count(manager: Manager, name: str, count: int) -> bool:
    """Whether a counter comes to be as high."""
    deadline = time.monotonic() + REST_S
    while counters(manager).get(name, 0) < count:
        if time.monotonic() > deadline:
            return False
        time.sleep(0.002)
    return True


def comes_to_be_saved(manager: Manager) -> bool:
    """Whether the index comes to hold all that has been published."""
    deadline = time.monotonic() + REST_S
    while any(shard.is_unsaved for shard in manager.core.catalogue.extents._shards):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.002)
    return True


def as_killed(paths: tuple[Path, ...], directory: Path) -> tuple[Path, ...]:
    """The files of a manager that runs, as they would be were it killed now."""
    directory.mkdir()
    for path in paths:
        for name in (path, index_of(path), lock_of(path)):
            shutil.copy(name, directory / name.name)
    return tuple(directory / path.name for path in paths)


# Closed, and opened again ----------------------------------------------------------------------


def test_persisted_pages_come_back_in_another_manager(
    open_manager: ManagerFactory, kept: dict[str, object]
) -> None:
    engine = Engine.register(open_manager(**kept))
    wanted = [engine.page(index) for index in range(4)]
    engine.save(numbered(4))
    engine.manager.flush()
    engine.manager.close()
    again = Engine.register(open_manager(**kept), seed=None)
    assert again.restored(numbered(4)) == tuple(numbered(4))
    assert [again.page(index) for index in range(4)] == wanted
    assert again.save({page_hash(0): 0}).resident == (page_hash(0),)


def test_persisted_pages_survive_a_smaller_capacity_as_far_as_they_fit(
    open_manager: ManagerFactory, ssd_path: Path
) -> None:
    settings = {"ssd_cache_paths": ssd_path, "ssd_persist": True}
    engine = Engine.register(open_manager(**settings))
    wanted = {page: engine.page(index) for page, index in numbered(8).items()}
    engine.save(numbered(8))
    engine.manager.flush()
    engine.manager.close()
    again = Engine.register(
        open_manager(**settings, ssd_cache_capacity_nbytes=3 * BLOCK), seed=None
    )
    found = [page for page in numbered(8) if again.hits([page])]
    assert len(found) == 3
    assert again.restored({page: i for i, page in enumerate(found)}) == tuple(found)
    assert [again.page(i) for i in range(3)] == [wanted[page] for page in found]
    again.manager.close()
    wide = Engine.register(open_manager(**settings, ssd_cache_capacity_nbytes=4 * MIB), seed=None)
    assert [page for page in numbered(8) if wide.hits([page])] == found


def sealed(index: bytes) -> bytes:
    """An index with the CRC of what it is now."""
    crc = zlib.crc32(index[HEADER_NBYTES:], zlib.crc32(index[: HEADER_NBYTES - 4]))
    return index[: HEADER_NBYTES - 4] + struct.pack("<I", crc) + index[HEADER_NBYTES:]


def with_rows(index: bytes, change: Callable[[list[bytes]], list[bytes]]) -> bytes:
    rows = index[HEADER_NBYTES:]
    cut = [rows[at : at + ROW_NBYTES] for at in range(0, len(rows), ROW_NBYTES)]
    return sealed(index[:HEADER_NBYTES] + b"".join(change(cut)))


def digests_swapped(rows: list[bytes]) -> list[bytes]:
    return [rows[-1 - i][:32] + row[32:] for i, row in enumerate(rows)]


def offsets_swapped(rows: list[bytes]) -> list[bytes]:
    return [row[:40] + rows[-1 - i][40:48] + row[48:] for i, row in enumerate(rows)]


def generations_swapped(rows: list[bytes]) -> list[bytes]:
    return [row[:32] + rows[-1 - i][32:40] + row[40:] for i, row in enumerate(rows)]


@pytest.mark.parametrize(
    "damage",
    [
        lambda index: index[: len(index) // 2],
        lambda index: index.replace(b"\0\0", b"\0\1"),
        lambda index: with_rows(index, digests_swapped),
        lambda index: with_rows(index, offsets_swapped),
        lambda index: with_rows(index, generations_swapped),
        lambda index: with_rows(
            index, lambda rows: [row[:48] + struct.pack("<Q", 2 * BLOCK) for row in rows]
        ),
    ],
    ids=[
        "cut off",
        "other numbers",
        "other digests",
        "other offsets",
        "other generations",
        "other lengths",
    ],
)
def test_damaged_index_is_a_cold_or_partial_start_and_never_wrong_bytes(
    open_manager: ManagerFactory, ssd_path: Path, damage: Callable[[bytes], bytes]
) -> None:
    settings = {"ssd_cache_paths": ssd_path, "ssd_persist": True}
    engine = Engine.register(open_manager(**settings))
    wanted = [engine.page(index) for index in range(4)]
    engine.save(numbered(4))
    engine.manager.flush()
    engine.manager.close()
    index_of(ssd_path).write_bytes(damage(index_of(ssd_path).read_bytes()))
    again = Engine.register(open_manager(**settings), seed=None)
    for page, index in numbered(4).items():
        if again.restored({page: index}):
            assert again.page(index) == wanted[index]
        else:
            assert again.is_clear(index)
    Engine.register(again.manager, seed=1).save(numbered(4))
    assert again.restored(numbered(4)) == tuple(numbered(4)), "a new save repairs it"
    assert [again.page(index) for index in range(4)] == wanted


@pytest.mark.parametrize(
    "damage",
    [
        lambda index: b"\xff" + index,
        lambda index: b"",
        lambda index: b'{"format": "orbitkv-ssd-index:1", "objects": []}',
    ],
    ids=["shifted", "empty", "an older format"],
)
def test_index_that_may_be_somebody_elses_refuses_the_start_and_all_is_left_alone(
    open_manager: ManagerFactory, ssd_path: Path, damage: Callable[[bytes], bytes]
) -> None:
    settings = {"ssd_cache_paths": ssd_path, "ssd_persist": True}
    engine = Engine.register(open_manager(**settings))
    engine.save(numbered(4))
    engine.manager.flush()
    engine.manager.close()
    index = index_of(ssd_path).read_bytes()
    index_of(ssd_path).write_bytes(damage(index))
    before = ssd_path.read_bytes()
    with pytest.raises(StoreError, match="not a store of ours; accepted"):
        open_manager(**settings)
    assert (ssd_path.read_bytes(), index_of(ssd_path).read_bytes()) == (before, damage(index))
    index_of(ssd_path).write_bytes(index)
    again = Engine.register(open_manager(**settings), seed=None)
    assert again.restored(numbered(4)) == tuple(numbered(4))


def test_index_whose_rows_changed_places_yields_misses(
    open_manager: ManagerFactory, ssd_path: Path
) -> None:
    """Every row is well-formed, and each names another object's extent."""
    settings = {"ssd_cache_paths": ssd_path, "ssd_persist": True}
    engine = Engine.register(open_manager(**settings))
    engine.save(numbered(2))
    engine.manager.flush()
    engine.manager.close()
    index_of(ssd_path).write_bytes(with_rows(index_of(ssd_path).read_bytes(), digests_swapped))
    again = Engine.register(open_manager(**settings), seed=None)
    assert again.hits([page_hash(0)]) == 1
    assert again.restored(numbered(2)) == ()
    assert again.is_clear(0)
    assert again.is_clear(1)
    assert counters(again.manager)["corrupt_ssd"] == 2
    assert again.manager.statistics().ssd_used_nbytes == 0


def test_what_close_could_not_leave_is_raised_once(
    open_manager: ManagerFactory, ssd_path: Path
) -> None:
    manager = open_manager(ssd_cache_paths=ssd_path, ssd_persist=True)
    Engine.register(manager).save(numbered(1))
    manager.flush()
    index_of(ssd_path).unlink()
    index_of(ssd_path).mkdir()
    with pytest.raises(StoreError, match="closing"):
        manager.close()
    manager.close()
    assert not lock_of(ssd_path).exists()


def test_store_that_was_not_to_persist_is_never_indexed(
    open_manager: ManagerFactory, kept: dict[str, object]
) -> None:
    manager = open_manager(**kept | {"ssd_persist": False})
    Engine.register(manager).save(numbered(4))
    manager.flush()
    time.sleep(0.05)
    assert not counters(manager).get("ssd_checkpoints")
    (directory,) = {path.parent for path in manager.config.ssd_cache_paths}
    assert sorted(path.name for path in directory.iterdir()) == [
        "kv.0",
        "kv.0.lock",
        "kv.1",
        "kv.1.lock",
    ]
    manager.close()
    assert list(directory.iterdir()) == []


# Checkpoints -----------------------------------------------------------------------------------


def test_what_a_checkpoint_has_seen_survives_a_kill(
    open_manager: ManagerFactory, kept: dict[str, object], tmp_path: Path
) -> None:
    engine = Engine.register(open_manager(**kept))
    wanted = [engine.page(index) for index in range(6)]
    engine.save(numbered(6))
    engine.manager.flush()
    assert comes_to_be_saved(engine.manager)
    paths = as_killed(engine.manager.config.ssd_cache_paths, tmp_path / "killed")
    again = Engine.register(open_manager(**kept | {"ssd_cache_paths": paths}), seed=None)
    assert set(again.restored(numbered(6))) == set(numbered(6))
    assert [again.page(index) for index in range(6)] == wanted


def test_extents_overwritten_after_the_last_checkpoint_are_misses_and_repaired(
    open_manager: ManagerFactory, kept: dict[str, object], tmp_path: Path
) -> None:
    """Large objects over small ones, and the other way."""
    manager = open_manager(**kept, ssd_cache_capacity_nbytes=20 * BLOCK)
    keyed = Keyed(manager)
    before = [0, 2, 4, 6, 1, 3]
    for key in before:  # one by one, for their order
        keyed.save([key])
        manager.flush(evict_dram=True)  # else it writes again what SSD has evicted
    assert comes_to_be_saved(manager)
    paths = manager.config.ssd_cache_paths
    indexes = [index_of(path).read_bytes() for path in paths]
    for key in (5, 8, 10, 12, 7, 14):
        keyed.save([key])
        manager.flush(evict_dram=True)
    manager.close()
    for path, index in zip(paths, indexes, strict=True):
        index_of(path).write_bytes(index)  # as if it had been killed before it wrote the next
    again = open_manager(**kept, ssd_cache_capacity_nbytes=20 * BLOCK)
    named = len(again.core.catalogue.copies(Tier.SSD))
    keyed = Keyed(again)
    hits = sum(keyed.restore([key]) for key in range(16))
    stale = counters(again)["corrupt_ssd"]
    assert hits + stale == named == len(before)
    assert (hits, stale) == (1, 5)
    keyed.save(before)
    assert keyed.restore(before) == len(before)


def test_generations_differ_from_those_of_a_killed_manager(
    open_manager: ManagerFactory, kept: dict[str, object], tmp_path: Path
) -> None:
    """Else an extent of the one could pass for that of the other."""
    engine = Engine.register(open_manager(**kept))
    paths = as_killed(engine.manager.config.ssd_cache_paths, tmp_path / "killed")
    engine.save(numbered(4))
    other = Engine.register(open_manager(**kept | {"ssd_cache_paths": paths}))
    other.save(numbered(4))
    seen = [e.copy(page, Tier.DRAM).generation for e in (engine, other) for page in numbered(4)]
    assert len(set(seen)) == 8


def test_manager_serves_while_a_checkpoint_is_written_and_close_waits_for_it(
    open_manager: ManagerFactory, kept: dict[str, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = Gate()
    real = extents_module.finish

    def slow(unfinished: Path, path: Path) -> None:
        gate.pass_through()
        real(unfinished, path)

    engine = Engine.register(open_manager(**kept))
    monkeypatch.setattr(extents_module, "finish", slow)
    engine.save(numbered(2))
    engine.manager.flush()
    gate.await_arrival()
    engine.save({page_hash("meanwhile"): 3})
    engine.manager.flush(evict_dram=True)
    assert engine.restored({page_hash("meanwhile"): 4}) == (page_hash("meanwhile"),)
    closing = in_thread(engine.manager.close)
    time.sleep(0.05)
    assert closing.is_alive()
    gate.open()
    assert ended(closing)
    monkeypatch.undo()
    again = Engine.register(open_manager(**kept), seed=None)
    assert again.hits([page_hash("meanwhile")]) == 1


def test_checkpoint_that_fails_is_counted_told_and_made_later(
    open_manager: ManagerFactory, kept: dict[str, object], caplog: pytest.LogCaptureFixture
) -> None:
    manager = open_manager(**kept)
    engine = Engine.register(manager)
    path = manager.config.ssd_cache_paths[0]
    unfinished = path.with_name(f"{path.name}.unfinished")
    assert comes_to_be_saved(manager)
    unfinished.mkdir()
    engine.save(numbered(2))
    manager.flush(evict_dram=True)
    assert comes_to_count(manager, "ssd_checkpoint_faults", 2)
    assert f"{path}: index: Is a directory" in caplog.text
    assert set(engine.restored(numbered(2))) == set(numbered(2))
    unfinished.rmdir()
    assert comes_to_be_saved(manager)


def test_start_that_is_cancelled_leaves_the_path_free(
    ssd_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = Gate()
    real = persistence._open

    def slow(config: Config) -> object:
        opened = real(config)
        gate.pass_through()
        return opened

    async def scenario() -> None:
        monkeypatch.setattr(persistence, "_open", slow)
        config = Config(
            pool_nbytes=BLOCK, ssd_cache_paths=ssd_path, ssd_cache_capacity_nbytes=BLOCK
        )
        opening = asyncio.create_task(persistence.open_tiers(config))
        await asyncio.to_thread(gate.await_arrival)
        opening.cancel()
        await asyncio.sleep(0.02)
        assert not opening.done(), "the thread has the files open"
        gate.open()
        with pytest.raises(asyncio.CancelledError):
            await opening

    asyncio.run(scenario())
    assert list(ssd_path.parent.iterdir()) == []


def descriptors_under(directory: Path) -> list[str]:
    found = []
    for descriptor in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):
            found.append(str(descriptor.readlink()))
    return [target for target in found if target.startswith(str(directory))]


@pytest.mark.parametrize("persist", [False, True])
@pytest.mark.parametrize("part", ["Retention", "TinyLfu", "Catalogue"])
def test_start_that_fails_behind_the_store_leaves_no_file_lock_or_memory(
    ssd_path: Path, monkeypatch: pytest.MonkeyPatch, part: str, *, persist: bool
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("a bug")

    pools: list[persistence.Pool] = []
    real = persistence.Pool

    def kept_pool(*args: int, **options: bool) -> persistence.Pool:
        pools.append(real(*args, **options))
        return pools[-1]

    config = Config(
        pool_nbytes=BLOCK,
        ssd_cache_paths=ssd_path,
        ssd_cache_capacity_nbytes=BLOCK,
        ssd_persist=persist,
        enable_lfu_admission=True,
        lock_memory=False,
    )
    monkeypatch.setattr(persistence, part, fail)
    monkeypatch.setattr(persistence, "Pool", kept_pool)
    with pytest.raises(RuntimeError, match="a bug"):
        persistence._open(config)
    assert descriptors_under(ssd_path.parent) == []
    assert not lock_of(ssd_path).exists()
    assert ssd_path.exists() == persist
    (pool,) = pools
    assert pool.memory.size == 0
    monkeypatch.undo()
    persistence._open(config).close()


def test_policies_are_compiled_only_where_numba_is(
    ssd_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "numba", None)
    monkeypatch.setattr(persistence, "driver_unavailable", lambda: None)
    settings = {"pool_nbytes": BLOCK, "ssd_cache_paths": ssd_path, "lock_memory": False}
    sized = settings | {"ssd_cache_capacity_nbytes": BLOCK}
    refused = "^compile_policies: True, and numba is not installed; accepted: .*False or None$"
    with pytest.raises(ConfigError, match=refused):
        persistence._open(Config(**sized, compile_policies=True))
    assert list(ssd_path.parent.iterdir()) == []
    for choice in (None, False):
        persistence._open(Config(**sized, compile_policies=choice)).close()


def test_object_longer_than_a_shard_is_told_once_and_served_from_dram(
    open_manager: ManagerFactory, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    manager = open_manager(
        ssd_cache_paths=[tmp_path / "a", tmp_path / "b"], ssd_cache_capacity_nbytes=4 * BLOCK
    )
    engine = Engine.register(manager)
    assert "ssd_group_too_large" not in caplog.text
    large = Engine.register(manager, geometry=big_geometry(4 * BLOCK))
    (nbytes,) = large.geometry.object_nbytes.values()
    assert caplog.text.count("ssd_group_too_large") == 1
    assert f"object_nbytes={nbytes} shard_nbytes={2 * BLOCK}" in caplog.text
    assert counters(manager)["ssd_groups_too_large"] == 1
    large.save({page_hash("large"): 0})
    assert manager.flush().unwritten == 1
    assert large.restored({page_hash("large"): 1}) == (page_hash("large"),)
    engine.save(numbered(1))
    assert manager.flush().unwritten == 1, "what fits is written"


def test_depth_that_no_io_uring_has_is_one_clear_refusal(
    open_manager: ManagerFactory, ssd_path: Path, tmp_path: Path
) -> None:
    for setting in ("ssd_write_inflight", "ssd_prefetch_inflight"):
        with pytest.raises(ConfigError, match=f"{setting}: 32769; accepted: None, or 1 to 32768"):
            Config(**{setting: 32769})
        assert Config(**{setting: 32768})
    source = (ROOT / "pipelines/save.toml").read_text()
    definition = tmp_path / "deep.toml"
    definition.write_text(source.replace('"ring:write", depth = 8', '"ring:write", depth = 32769'))
    with pytest.raises(ConfigError, match="depth 32769; accepted: 1 to 32768, as an io_uring"):
        open_manager(ssd_cache_paths=ssd_path, save_pipeline=str(definition))
    assert not ssd_path.exists()


# Shards under a manager ------------------------------------------------------------------------


def test_write_over_a_leased_extent_goes_to_another_shard_or_is_dropped_and_made_later(
    open_manager: ManagerFactory, tmp_path: Path
) -> None:
    paths = [tmp_path / "a", tmp_path / "b"]
    manager = open_manager(ssd_cache_paths=paths, ssd_cache_capacity_nbytes=4 * BLOCK)
    engine = Engine.register(manager)
    wanted = {page: engine.page(index) for page, index in numbered(8).items()}
    for page, index in numbered(4).items():
        engine.save({page: index})
        manager.flush(evict_dram=True)
    shards = [engine.copy(page, Tier.SSD).shard for page in numbered(4)]
    assert shards == [0, 0, 1, 1]
    lease = manager.query(engine.instance, [page_hash(0), page_hash(1)])
    assert len(lease.hashes) == 2
    for page, index in list(numbered(8).items())[4:6]:
        engine.save({page: index})
        manager.flush(evict_dram=True)
        assert engine.copy(page, Tier.SSD).shard == 1, "the shard whose turn it was is leased"
    assert "ssd_writes_no_room" not in counters(manager)
    other = manager.query(engine.instance, [page_hash(4), page_hash(5)])
    engine.save({page_hash(6): 6})
    assert manager.flush().unwritten == 1
    assert counters(manager)["ssd_writes_no_room"] >= 1
    engine.clear()
    assert set(manager.restore(lease, {page_hash(0): 0, page_hash(1): 1}).result(WAIT_S).restored)
    assert [engine.page(0), engine.page(1)] == [wanted[page_hash(0)], wanted[page_hash(1)]]
    other.release()
    assert manager.flush().unwritten > 0, "the restored pages are in DRAM, and SSD is small"
    assert engine.hits([page_hash(6)]) == 1


def test_restore_takes_pages_from_every_shard(open_manager: ManagerFactory, tmp_path: Path) -> None:
    paths = [tmp_path / name for name in "abc"]
    manager = open_manager(ssd_cache_paths=paths, ssd_cache_capacity_nbytes=9 * BLOCK)
    engine = Engine.register(manager)
    wanted = [engine.page(index) for index in range(8)]
    engine.save(numbered(8))
    assert manager.flush(evict_dram=True).unwritten == 0
    assert {engine.copy(page, Tier.SSD).shard for page in numbered(8)} == {0, 1, 2}
    engine.clear()
    assert set(engine.restored(numbered(8))) == set(numbered(8))
    assert [engine.page(index) for index in range(8)] == wanted
    manager.close()
    assert list(tmp_path.iterdir()) == []


# Soaks -----------------------------------------------------------------------------------------


def damage_for(seconds: float, manager: Manager) -> None:
    """Flip bits of the files, as no disk should; and undo what is written to a block meanwhile.

    Through the manager's own descriptors: the page cache and O_DIRECT do not go together.
    """
    extents = manager.core.catalogue.extents
    choose = random.Random(3)
    block = mmap.mmap(-1, BLOCK)
    end_s = time.monotonic() + seconds
    while time.monotonic() < end_s:
        fd = extents.fd(choose.randrange(len(extents.paths)))
        offset = choose.randrange(os.fstat(fd).st_size // BLOCK) * BLOCK
        os.preadv(fd, [block], offset)
        block[choose.randrange(BLOCK)] ^= 1 << choose.randrange(8)
        os.pwritev(fd, [block], offset)
        time.sleep(0.005)


def use_for(seconds: float, keyed: Keyed, seed: int, done: list[int]) -> None:
    choose = random.Random(seed)
    end_s = time.monotonic() + seconds
    hits = rounds = 0
    while time.monotonic() < end_s:
        rounds += 1
        keys = choose.choices(range(1000), k=choose.randint(1, 6))
        act = choose.random()
        if act < 0.4:
            keyed.save(keys)
        elif act < 0.5:
            keyed.manager.flush(evict_dram=choose.random() < 0.5)
        else:
            hits += keyed.restore(keys)
    done += [hits, rounds]


@pytest.mark.parametrize(
    "seconds",
    [20, pytest.param(300, marks=[pytest.mark.soak, pytest.mark.timeout(600)])],
)
def test_thousand_keys_in_a_pool_of_ten_never_yield_a_byte_of_another(
    open_manager: ManagerFactory, tmp_path: Path, seconds: float
) -> None:
    paths = tuple(tmp_path / name for name in "abc")
    manager = open_manager(
        pool_nbytes=10 * 4 * BLOCK, ssd_cache_paths=paths, ssd_cache_capacity_nbytes=600 * BLOCK
    )
    done: list[list[int]] = [[] for _ in range(2)]
    users = [
        in_thread(lambda each=each: use_for(seconds, Keyed(manager), each, done[each]))
        for each in range(2)
    ]
    damage_for(seconds, manager)
    for user in users:
        assert ended(user)
    assert all(len(counted) == 2 for counted in done), "a restored page did not hold its bytes"
    assert rest(manager) == []
    found = counters(manager)
    assert min(hits for hits, _ in done) > 0
    assert found["corrupt_ssd"] > 0
    assert found["evicted_ssd"] > 0
    assert found["evicted_dram"] > 0


@contextlib.contextmanager
def restarting(paths: tuple[Path, ...]) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-m", "tests.runtime.restarts", *map(str, paths)]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT
    ) as process:
        try:
            yield process
        finally:
            assert process.stdin
            process.stdin.close()


@pytest.mark.parametrize(
    "kills", [10, pytest.param(100, marks=[pytest.mark.soak, pytest.mark.timeout(600)])]
)
def test_every_hit_after_a_kill_at_a_random_point_is_exact(tmp_path: Path, kills: int) -> None:
    """Half of the kills come while the store is being opened, or what it has is being read."""
    choose = random.Random(kills)
    told = []
    with restarting((tmp_path / "kv.0", tmp_path / "kv.1")) as process:
        assert process.stdin
        assert process.stdout
        for kill in range(kills):
            process.stdin.write("\n")
            process.stdin.flush()
            told.append(process.stdout.readline().split())
            while told[-1][0] != "pid":
                told.append(process.stdout.readline().split())
            pid = int(told[-1][1])
            if kill % 2:
                time.sleep(choose.uniform(0, 0.3))
            else:
                while not any(words[0] == "hits" for words in told[-2:]):
                    told.append(process.stdout.readline().split())
                    assert told[-1][0] != "ended", "it failed by itself"
                time.sleep(choose.uniform(0.02, 0.3))
            os.kill(pid, signal.SIGKILL)
            while told[-1][0] != "ended":
                told.append(process.stdout.readline().split())
    assert [int(words[1]) for words in told if words[0] == "ended"] == [-signal.SIGKILL] * kills
    hits = [int(words[1]) for words in told if words[0] == "hits"]
    assert len(hits) >= kills // 2
    assert sum(hits[1:]) > len(hits), "what was saved does not outlive a kill"
