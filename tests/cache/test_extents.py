"""The SSD files: opened as told or refused in words, for one manager, each a ring of extents."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from orbitkv.cache import extents as extents_module
from orbitkv.cache import shard as shard_module
from orbitkv.cache.checkpoint import INDEX_MAGIC
from orbitkv.cache.extents import RUN_NBYTES, ExtentStore
from orbitkv.errors import StoreError
from tests.builders import BLOCK
from tests.cache.holders import Holder, index_of, kill, lock_of, placed, recovered

CAPACITY_NBYTES = 16 * BLOCK


def opened(
    *paths: Path, persist: bool = False, capacity_nbytes: int = CAPACITY_NBYTES
) -> ExtentStore[Holder]:
    return ExtentStore(paths, capacity_nbytes, persist=persist)


def contents(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.iterdir()}


def unfinished_of(path: Path) -> Path:
    return path.with_name(f"{path.name}.unfinished")


@pytest.fixture
def paths(tmp_path: Path) -> list[Path]:
    return [tmp_path / f"kv.{index}" for index in range(3)]


def test_file_has_its_length_and_blocks_from_the_start(ssd_path: Path) -> None:
    store = opened(ssd_path, capacity_nbytes=CAPACITY_NBYTES - 1)
    assert store.capacity_nbytes == CAPACITY_NBYTES
    assert ssd_path.stat().st_size == CAPACITY_NBYTES
    assert ssd_path.stat().st_blocks * 512 >= CAPACITY_NBYTES
    store.close()


def test_file_lock_and_index_are_gone_after_close_without_persist(ssd_path: Path) -> None:
    store = opened(ssd_path)
    placed(store, "a")
    store.close()
    assert list(ssd_path.parent.iterdir()) == []
    store.close()  # harmless


def test_missing_directory_is_named(tmp_path: Path) -> None:
    path = tmp_path / "none" / "kv"
    with pytest.raises(StoreError, match=f"no directory {path.parent}"):
        opened(path)


def test_directory_instead_of_a_file_is_refused_with_an_example(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match=f"{tmp_path}: a directory; .*{tmp_path / 'kv'}"):
        opened(tmp_path)


def test_path_under_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(StoreError, match="no directory"):
        opened(tmp_path / "file" / "kv")


def test_path_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match=r"/proc/orbitkv: .*; accepted: a writable path"):
        opened(Path("/proc/orbitkv"))


def test_unwritable_file_in_a_writable_directory_is_refused(
    ssd_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.open

    def deny(path: object, flags: int, mode: int = 0o777) -> int:
        if path == ssd_path:
            raise PermissionError(errno.EACCES, "Permission denied")
        return real(path, flags, mode)

    monkeypatch.setattr(os, "open", deny)
    with pytest.raises(StoreError, match="Permission denied; accepted: a writable path"):
        opened(ssd_path)
    monkeypatch.undo()
    opened(ssd_path).close()  # the refusal left no lock behind


def test_capacity_above_the_free_disk_names_both(ssd_path: Path) -> None:
    with pytest.raises(StoreError, match=r"capacity 1024 TiB; free on that filesystem: .* [GT]iB"):
        opened(ssd_path, capacity_nbytes=2**50)
    assert list(ssd_path.parent.iterdir()) == [], "a refused start left something behind"


def test_disk_that_fills_up_during_preallocation_is_a_store_error(
    ssd_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(fd: int, offset: int, nbytes: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(StoreError, match="No space left on device"):
        opened(ssd_path)
    assert list(ssd_path.parent.iterdir()) == []


def test_filesystem_that_cannot_preallocate_serves_all_the_same(
    ssd_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unsupported(fd: int, offset: int, nbytes: int) -> None:
        raise OSError(errno.EOPNOTSUPP, "Operation not supported")

    monkeypatch.setattr(os, "posix_fallocate", unsupported)
    store = opened(ssd_path)
    assert ssd_path.stat().st_size == CAPACITY_NBYTES
    store.close()


def test_refused_o_direct_falls_back_and_says_so(
    ssd_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.open

    def refuse_direct(path: object, flags: int, mode: int = 0o777) -> int:
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument")
        return real(path, flags, mode)

    monkeypatch.setattr(os, "open", refuse_direct)
    store = opened(ssd_path)
    assert store.buffered_reason
    assert "O_DIRECT" in store.buffered_reason
    assert not fcntl.fcntl(store.fd(0), fcntl.F_GETFL) & os.O_DIRECT
    store.close()


def test_file_is_opened_o_direct_where_the_filesystem_takes_it(ssd_path: Path) -> None:
    store = opened(ssd_path)
    direct = bool(fcntl.fcntl(store.fd(0), fcntl.F_GETFL) & os.O_DIRECT)
    assert direct == (store.buffered_reason is None)
    store.close()


def test_refused_start_leaves_an_existing_store_as_it_was(ssd_path: Path) -> None:
    """Asking for more than the disk holds is a typing error; it must not cost the cache."""
    store = opened(ssd_path, persist=True)
    holder = placed(store, "kept")
    store.close()
    with ssd_path.open("r+b") as file:
        file.write(b"kept")
    before = contents(ssd_path.parent)
    with pytest.raises(StoreError, match="capacity"):
        opened(ssd_path, persist=True, capacity_nbytes=2**50)
    assert contents(ssd_path.parent) == before
    again = opened(ssd_path, persist=True)
    assert [found.digest for found in recovered(again)] == [holder.digest]
    again.close()


def test_second_store_on_one_path_is_refused_with_the_first_ones_pid(ssd_path: Path) -> None:
    first = opened(ssd_path)
    with pytest.raises(StoreError, match=f"in use by process {os.getpid()}"):
        opened(ssd_path)
    assert ssd_path.exists()
    first.close()
    opened(ssd_path).close()


def test_lock_of_a_killed_process_does_not_keep_the_next_out(ssd_path: Path) -> None:
    lock_of(ssd_path).write_text("999999\n")
    opened(ssd_path).close()


def test_store_that_opens_while_another_closes_still_owns_the_path(
    ssd_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It opens the lock file, the other removes that file, and only then it takes its lock."""
    first = opened(ssd_path)
    real = fcntl.flock

    def close_first_before_locking(fd: object, operation: int) -> None:
        monkeypatch.setattr(shard_module.fcntl, "flock", real)
        first.close()
        real(fd, operation)

    monkeypatch.setattr(shard_module.fcntl, "flock", close_first_before_locking)
    try:
        second = opened(ssd_path)
    except StoreError:
        return  # to refuse is safe as well
    try:
        with pytest.raises(StoreError, match="in use"):
            opened(ssd_path)
    finally:
        second.close()


def test_a_file_of_somebody_elses_is_neither_used_nor_removed(ssd_path: Path) -> None:
    ssd_path.write_text("precious")
    for persist in (False, True):
        with pytest.raises(StoreError, match="not a store of ours; accepted"):
            opened(ssd_path, persist=persist)
    assert ssd_path.read_text() == "precious"
    assert list(ssd_path.parent.iterdir()) == [ssd_path]


def test_a_link_or_a_pipe_is_neither_used_nor_removed(ssd_path: Path) -> None:
    target = ssd_path.with_name("target")
    target.write_text("precious")
    ssd_path.symlink_to(target)
    with pytest.raises(StoreError, match="not a store of ours"):
        opened(ssd_path)
    ssd_path.unlink()
    os.mkfifo(ssd_path)
    with pytest.raises(StoreError, match="not a store of ours"):
        opened(ssd_path)
    assert target.read_text() == "precious"


def text(path: Path, content: bytes) -> None:
    path.write_bytes(content)


def link(path: Path) -> None:
    path.symlink_to(path.with_name("precious"))


MADE: dict[str, tuple[Callable[[Path], object], str]] = {
    "text": (lambda path: text(path, b"[[package]]\n" * 5), "it begins with|60 bytes"),
    "a number and more": (lambda path: text(path, b"12\n34\n"), "it begins with|6 bytes"),
    "a link": (link, "a link"),
    "a link to nothing": (lambda path: path.symlink_to(path.with_name("none")), "a link"),
    "a directory": (Path.mkdir, "a directory"),
    "a pipe": (os.mkfifo, "no regular file"),
}


@pytest.mark.parametrize("persist", [False, True])
@pytest.mark.parametrize("made", MADE)
@pytest.mark.parametrize("name_of", [index_of, unfinished_of, lock_of])
def test_what_lies_at_a_name_of_the_store_and_is_not_ours_is_named_and_left_alone(
    ssd_path: Path, name_of: Callable[[Path], Path], made: str, *, persist: bool
) -> None:
    """Beside a free path, and beside a store that has been left."""
    precious = ssd_path.with_name("precious")
    precious.write_bytes(b"precious")
    make, kind = MADE[made]
    for is_left in (False, True):
        if is_left:
            store = opened(ssd_path, persist=True)
            holder = placed(store, "kept")
            store.close()
        name = name_of(ssd_path)
        kept = ssd_path.with_name("kept")
        with contextlib.suppress(FileNotFoundError):
            name.rename(kept)
        make(name)
        found = name.lstat()
        before = sorted(path.name for path in ssd_path.parent.iterdir())
        text_before = name.read_bytes() if name.is_file() else None
        with pytest.raises(StoreError, match=rf"{name}[: (]*({kind}).*; accepted: "):
            opened(ssd_path, persist=persist)
        assert sorted(path.name for path in ssd_path.parent.iterdir()) == before
        assert (name.lstat().st_ino, name.lstat().st_size) == (found.st_ino, found.st_size)
        assert text_before is None or name.read_bytes() == text_before
        assert precious.read_bytes() == b"precious"
        name.rmdir() if made == "a directory" else name.unlink()
        with contextlib.suppress(FileNotFoundError):
            kept.rename(name)
    again = opened(ssd_path, persist=True)
    assert [found.digest for found in recovered(again)] == [holder.digest]
    again.close()


@pytest.mark.parametrize("persist", [False, True])
@pytest.mark.parametrize(
    ("name_of", "content"),
    [
        (lock_of, b""),
        (lock_of, b"a lock of another program\n"),
        (lock_of, b"123 and more\n"),
        (index_of, b""),
        (index_of, b"chapter 1"),
        (index_of, INDEX_MAGIC[:7]),
        (unfinished_of, INDEX_MAGIC),
    ],
)
def test_what_lies_beside_a_file_of_somebody_elses_does_not_make_it_ours(
    ssd_path: Path, name_of: Callable[[Path], Path], content: bytes, *, persist: bool
) -> None:
    ssd_path.write_bytes(b"my thesis")
    name_of(ssd_path).write_bytes(content)
    before = contents(ssd_path.parent)
    with pytest.raises(StoreError, match=r"kv.ssd \(9 bytes\), not a store of ours; accepted"):
        opened(ssd_path, persist=persist)
    assert contents(ssd_path.parent) == before


def test_removing_what_a_refusal_names_helps(ssd_path: Path) -> None:
    """All of it is named at once: without its index a file is nobody's that a store would take."""
    opened(ssd_path, persist=True).close()
    index_of(ssd_path).unlink()
    index_of(ssd_path).mkdir()
    unfinished_of(ssd_path).write_bytes(b"x")
    named = rf"{index_of(ssd_path)} \(a directory\), {unfinished_of(ssd_path)} .*, {ssd_path} \("
    with pytest.raises(StoreError, match=named):
        opened(ssd_path, persist=True)
    index_of(ssd_path).rmdir()
    unfinished_of(ssd_path).unlink()
    ssd_path.unlink()
    opened(ssd_path, persist=True).close()


@pytest.mark.parametrize("begun", [b"", INDEX_MAGIC[:3], INDEX_MAGIC + b"\1"])
def test_index_that_a_killed_manager_had_begun_is_taken_over(ssd_path: Path, begun: bytes) -> None:
    store = opened(ssd_path, persist=True)
    holder = placed(store, "kept")
    store.close()
    unfinished_of(ssd_path).write_bytes(begun)
    again = opened(ssd_path, persist=True)
    assert [found.digest for found in recovered(again)] == [holder.digest]
    again.close()
    assert not unfinished_of(ssd_path).exists()


def test_index_is_not_written_through_a_link_that_came_later(ssd_path: Path) -> None:
    precious = ssd_path.with_name("precious")
    precious.write_bytes(b"precious")
    store = opened(ssd_path, persist=True)
    placed(store, "a")
    unfinished_of(ssd_path).symlink_to(precious)
    with pytest.raises(StoreError, match="closing"):
        store.close()
    assert precious.read_bytes() == b"precious"


def test_lock_holds_the_pid_at_every_moment_so_that_a_kill_leaves_the_file_ours(
    ssd_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ssd_path.write_bytes(b"old extents")
    for left_by in (b"999999\n", b"4194304   \n"):
        lock_of(ssd_path).write_bytes(left_by)
        store = opened(ssd_path)
        assert int(lock_of(ssd_path).read_bytes()) == os.getpid()
        kill(store)
    monkeypatch.setattr(os, "ftruncate", lambda *_: pytest.fail("a moment without a pid"))
    before = contents(ssd_path.parent)
    with pytest.raises(StoreError, match="capacity"):
        opened(ssd_path, capacity_nbytes=2**50)
    assert contents(ssd_path.parent) == before


@pytest.mark.parametrize("name_nbytes", [244, 245, 251, 255, 256, 300])
@pytest.mark.parametrize("persist", [False, True])
def test_name_that_leaves_no_room_for_those_beside_it_is_refused(
    tmp_path: Path, name_nbytes: int, *, persist: bool
) -> None:
    path = tmp_path / ("é" * (name_nbytes // 2) + "a" * (name_nbytes % 2))
    if name_nbytes <= 244:
        opened(path, persist=persist).close()
        return
    with pytest.raises(StoreError, match=f"a name of {name_nbytes} bytes; accepted: up to 244"):
        opened(path, persist=persist)
    assert list(tmp_path.iterdir()) == []


def test_directory_whose_name_is_too_long_is_a_store_error(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="File name too long"):
        opened(tmp_path / ("a" * 300) / "kv")


def test_what_a_killed_manager_left_is_taken_over(ssd_path: Path) -> None:
    ssd_path.write_bytes(b"old extents")
    lock_of(ssd_path).write_text("999999\n")
    opened(ssd_path).close()
    assert list(ssd_path.parent.iterdir()) == []


def test_refused_start_keeps_the_mark_of_what_a_killed_manager_left(ssd_path: Path) -> None:
    """Without its lock file the next start would take it for somebody else's."""
    ssd_path.write_bytes(b"old extents")
    lock_of(ssd_path).write_text("999999\n")
    with pytest.raises(StoreError, match="capacity"):
        opened(ssd_path, capacity_nbytes=2**50)
    assert ssd_path.read_bytes() == b"old extents"
    assert int(lock_of(ssd_path).read_text()) == 999999
    opened(ssd_path).close()


def test_file_that_may_not_be_removed_is_emptied_at_close(
    ssd_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = opened(ssd_path)
    real = Path.unlink

    def refuse(path: Path, *, missing_ok: bool = False) -> None:
        if path == ssd_path:
            raise PermissionError(errno.EACCES, "Permission denied")
        real(path, missing_ok=missing_ok)

    monkeypatch.setattr(Path, "unlink", refuse)
    store.close()
    monkeypatch.undo()
    assert contents(ssd_path.parent) == {ssd_path.name: b""}
    opened(ssd_path).close()


# Shards ----------------------------------------------------------------------------------------


def test_capacity_is_shared_in_equal_parts(paths: list[Path]) -> None:
    store = opened(*paths, capacity_nbytes=10 * BLOCK)
    assert store.paths == tuple(paths)
    assert [path.stat().st_size for path in paths] == [4 * BLOCK] * 3
    assert store.capacity_nbytes == 12 * BLOCK
    assert len({store.fd(shard) for shard in range(3)}) == 3
    holder = placed(store, "a", 2)
    assert store.shard_used_nbytes == (2 * BLOCK, 0, 0)
    assert store.used_nbytes == 2 * BLOCK
    store.withdraw(holder)
    store.free(holder)
    assert store.used_nbytes == 0
    store.close()
    assert contents(paths[0].parent) == {}


@pytest.mark.parametrize("shard", range(3))
def test_second_store_is_refused_at_each_shard_and_leaves_all_as_they_are(
    paths: list[Path], shard: int
) -> None:
    first = opened(paths[shard], persist=True)
    before = contents(paths[0].parent)
    with pytest.raises(StoreError, match=f"{paths[shard]}: in use by process {os.getpid()}"):
        opened(*paths)
    assert contents(paths[0].parent) == before
    first.close()
    opened(*paths).close()


@pytest.mark.parametrize("persist", [False, True])
@pytest.mark.parametrize("shard", range(3))
def test_refused_start_leaves_every_shard_as_it_was(
    paths: list[Path], monkeypatch: pytest.MonkeyPatch, shard: int, *, persist: bool
) -> None:
    """The disk fills up at one of them; and the others are not cut to the smaller capacity."""
    store = opened(*paths, persist=True)
    for name in range(5):
        placed(store, name)
    store.close()
    before = contents(paths[0].parent)
    calls = []

    def full(fd: int, offset: int, nbytes: int) -> None:
        calls.append(fd)
        if len(calls) == shard + 1:
            raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    for capacity_nbytes in (3 * BLOCK, 48 * BLOCK):
        calls.clear()
        with pytest.raises(StoreError, match=f"{paths[shard]}: No space left on device"):
            opened(*paths, persist=persist, capacity_nbytes=capacity_nbytes)
        assert contents(paths[0].parent) == before


def test_index_that_cannot_be_written_refuses_to_start_and_leaves_the_others(
    paths: list[Path],
) -> None:
    opened(*paths, persist=True).close()
    before = contents(paths[0].parent)
    unfinished = unfinished_of(paths[1])
    unfinished.mkdir()
    for persist in (False, True):
        with pytest.raises(StoreError, match=rf"{unfinished} \(a directory\), not a store of ours"):
            opened(*paths, persist=persist)
    unfinished.rmdir()
    assert contents(paths[0].parent) == before


@pytest.mark.parametrize("persist", [False, True])
@pytest.mark.parametrize("shard", range(3))
@pytest.mark.parametrize("step", ["write_unfinished", "finish"])
def test_disk_that_fails_while_indexes_are_written_costs_no_shard(
    paths: list[Path], monkeypatch: pytest.MonkeyPatch, step: str, shard: int, *, persist: bool
) -> None:
    """Of a store that was to persist, and is now opened as one that is and as one that is not."""
    store = opened(*paths, persist=True)
    holders = [placed(store, name) for name in range(5)]
    store.close()
    before = contents(paths[0].parent)
    real = getattr(extents_module, step)
    calls: list[Path] = []

    def fail(path: Path, *args: Path, **index: object) -> None:
        calls.append(path)
        if len(calls) == shard + 1:
            raise OSError(errno.EIO, "Input/output error")
        real(path, *args, **index)

    monkeypatch.setattr(extents_module, step, fail)
    with pytest.raises(StoreError, match=f"{paths[shard]}.*: Input/output error"):
        opened(*paths, persist=persist)
    assert contents(paths[0].parent) == before
    monkeypatch.undo()
    again = opened(*paths, persist=True)
    assert {found.digest for found in recovered(again)} == {h.digest for h in holders}
    again.close()


def test_disk_that_fails_at_the_last_step_of_a_start_is_a_store_error(
    paths: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    opened(*paths, persist=True).close()
    before = contents(paths[0].parent)

    def fail(fd: int, nbytes: int) -> None:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, "ftruncate", fail)
    for persist in (False, True):
        with pytest.raises(StoreError, match=f"{paths[0]}: Input/output error"):
            opened(*paths, persist=persist)
        assert contents(paths[0].parent) == before


def test_shard_without_an_index_is_still_ours_after_a_start_that_failed(
    paths: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    opened(*paths, persist=True).close()
    index_of(paths[1]).write_bytes(INDEX_MAGIC + b"damaged")
    real = extents_module.finish

    def fail(unfinished: Path, path: Path) -> None:
        if path == index_of(paths[2]):
            raise OSError(errno.EIO, "Input/output error")
        real(unfinished, path)

    monkeypatch.setattr(extents_module, "finish", fail)
    with pytest.raises(StoreError, match="Input/output error"):
        opened(*paths, persist=True)
    monkeypatch.undo()
    opened(*paths, persist=True).close()


def test_capacity_that_the_shards_of_one_filesystem_cannot_hold_together_is_refused(
    paths: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each by itself would fit, and a sparse file would tell only when it is written."""
    monkeypatch.setattr(shard_module.shutil, "disk_usage", lambda path: _Free())
    with pytest.raises(StoreError, match=f"{paths[2]}: capacity 16 KiB; free .*: 8 KiB"):
        opened(*paths, capacity_nbytes=12 * BLOCK)
    assert contents(paths[0].parent) == {}
    opened(*paths[:2], capacity_nbytes=8 * BLOCK).close()


class _Free:
    free = 10 * BLOCK


def linked_directory(path: Path) -> Path:
    alias = path.parent / "alias"
    alias.symlink_to(path.parent, target_is_directory=True)
    return alias / path.name


def hard_link(path: Path) -> Path:
    path.touch()
    alias = path.with_name("alias")
    alias.hardlink_to(path)
    return alias


@pytest.mark.parametrize(
    "other",
    [
        lambda path: path,
        lambda path: path.parent / "none" / ".." / path.name,
        linked_directory,
        hard_link,
        lock_of,
        lambda path: path.with_name(f"{path.name}.index"),
    ],
    ids=["itself", "dots", "a linked directory", "a hard link", "its lock", "its index"],
)
def test_two_shards_in_one_file_are_refused_by_whatever_names(
    ssd_path: Path, other: object
) -> None:
    (ssd_path.parent / "none").mkdir()
    alias = other(ssd_path)  # type: ignore[operator]
    before = sorted(path.name for path in ssd_path.parent.iterdir())
    with pytest.raises(StoreError, match=f"ssd path {alias}: a file of {ssd_path}; accepted"):
        opened(ssd_path, alias)
    assert sorted(path.name for path in ssd_path.parent.iterdir()) == before


def test_close_goes_on_after_a_shard_that_fails_and_names_it(paths: list[Path]) -> None:
    store = opened(*paths, persist=True)
    placed(store, "a")
    index = paths[0].with_name(f"{paths[0].name}.index")
    index.unlink()
    index.mkdir()
    with pytest.raises(StoreError, match=f"{paths[0]}: closing: Is a directory"):
        store.close()
    assert not any(lock_of(path).exists() for path in paths)
    store.close()


# Placement -------------------------------------------------------------------------------------


def test_sequence_of_extents_is_adjacent_and_goes_round(ssd_path: Path) -> None:
    store = opened(ssd_path, capacity_nbytes=6 * BLOCK)
    holders = [placed(store, name, 2) for name in range(3)]
    assert [holder.block for holder in holders] == [0, 2, 4]
    assert placed(store, "next", 1).block == 0
    assert store.used_nbytes == 5 * BLOCK, "the oldest was evicted whole"
    store.close()


def test_shards_take_turns_by_runs_that_one_transfer_carries(tmp_path: Path) -> None:
    store = opened(tmp_path / "a", tmp_path / "b", capacity_nbytes=8 * RUN_NBYTES)
    third = RUN_NBYTES // 3 // BLOCK
    holders = [placed(store, name, third) for name in range(12)]
    assert [holder.shard for holder in holders] == [0, 0, 0, 1, 1, 1] * 2
    by_shard = [[h for h in holders if h.shard == shard] for shard in range(2)]
    for run in by_shard:
        assert [h.offset for h in run] == [index * third * BLOCK for index in range(6)]
    assert len(set(store.shard_used_nbytes)) == 1
    store.close()


def test_pinned_extent_is_not_overwritten_and_the_others_are_tried(paths: list[Path]) -> None:
    store = opened(*paths, capacity_nbytes=6 * BLOCK)
    first = [placed(store, name, 2) for name in range(3)]
    assert [holder.shard for holder in first] == [0, 1, 2], (
        "a full shard lets the next have its turn"
    )
    first[0].pins = first[1].pins = 1
    assert placed(store, "a", 2).shard == 2
    for shard in store._shards:
        for holder in shard.ring._held.values():
            holder.pins = 1
    used = store.used_nbytes
    assert store.reserve(BLOCK) is None
    assert store.used_nbytes == used
    first[1].pins = 0
    assert placed(store, "b", 1).shard == 1
    store.close()


def test_nothing_is_evicted_for_what_a_pinned_extent_keeps_out(ssd_path: Path) -> None:
    store = opened(ssd_path, capacity_nbytes=6 * BLOCK)
    holders = [placed(store, name, 2) for name in range(3)]
    holders[1].pins = 1
    assert store.reserve(4 * BLOCK) is None
    assert store.used_nbytes == 6 * BLOCK
    assert placed(store, "fits before it", 2).block == 0
    store.close()


def test_what_is_passed_over_at_the_end_is_not_immortal(ssd_path: Path) -> None:
    """Objects of three blocks never fit into the last one, so nothing would ever replace it."""
    store = opened(ssd_path, capacity_nbytes=7 * BLOCK)
    for name in range(2):
        placed(store, name, 3)
    small = placed(store, "small", 1)
    assert small.block == 6
    for name in range(2):
        placed(store, name, 3)
    placed(store, "round again", 3)
    assert store.used_nbytes == 6 * BLOCK
    assert small.offset not in store._shards[0].ring._held
    store.close()


def test_extent_that_goes_round_evicts_what_it_covers_beside_what_it_passes_over(
    ssd_path: Path,
) -> None:
    store = opened(ssd_path, capacity_nbytes=7 * BLOCK)
    for name, blocks in enumerate((2, 2, 1)):
        placed(store, name, blocks)
    assert placed(store, "round", 3).block == 0
    assert store.used_nbytes == 4 * BLOCK, "of three, the youngest is left"
    store.close()


def test_extent_larger_than_a_shard_has_no_room(paths: list[Path]) -> None:
    store = opened(*paths, capacity_nbytes=6 * BLOCK)
    assert store.reserve(3 * BLOCK) is None
    assert placed(store, "a", 2).block == 0
    store.close()


class _Counted(Holder):
    """Counts how often the store looks at it."""

    looks = 0

    def __getattribute__(self, name: str) -> object:
        if name == "offset":
            _Counted.looks += 1
        return super().__getattribute__(name)


def looks_per_reservation(path: Path, extents: int) -> float:
    store = opened(path, capacity_nbytes=extents * BLOCK)
    _Counted.looks = 0
    for index in range(3 * extents):
        room = store.reserve(BLOCK)
        assert room
        for evicted in room.evicted:
            store.free(evicted)
        store.hold(_Counted(b"", index, room.shard, room.offset, BLOCK))
    store.close()
    return _Counted.looks / (3 * extents)


def test_reservation_costs_the_same_in_a_large_store(ssd_path: Path) -> None:
    assert looks_per_reservation(ssd_path, 4096) <= looks_per_reservation(ssd_path, 64) * 1.05 < 10


def test_reservation_that_a_lease_keeps_out_costs_one_look_a_shard(ssd_path: Path) -> None:
    store = opened(ssd_path, capacity_nbytes=1024 * BLOCK)
    for index in range(1024):
        room = store.reserve(BLOCK)
        assert room
        store.hold(_Counted(b"", index, room.shard, room.offset, BLOCK, pins=index == 512))
    assert store.reserve(1024 * BLOCK) is None
    _Counted.looks = 0
    for _ in range(100):
        assert store.reserve(1024 * BLOCK) is None
    assert _Counted.looks <= 300
    store.close()


def test_what_is_freed_while_the_cursor_is_elsewhere_leaves_room_for_its_turn(
    ssd_path: Path,
) -> None:
    store = opened(ssd_path, capacity_nbytes=4 * BLOCK)
    holders = [placed(store, name) for name in range(4)]
    store.withdraw(holders[1])
    store.free(holders[1])
    assert placed(store, "a", 2).block == 0, "one evicted, one free"
    assert store.used_nbytes == 4 * BLOCK
    store.close()


def test_leftovers_of_killed_managers_are_taken_over_shard_by_shard(paths: list[Path]) -> None:
    for persist in (False, True):
        store = opened(*paths, persist=persist)
        placed(store, "a")
        kill(store)
    store = opened(*paths, capacity_nbytes=6 * BLOCK)
    assert store.used_nbytes == 0
    assert [path.stat().st_size for path in paths] == [2 * BLOCK] * 3
    store.close()
    assert contents(paths[0].parent) == {}
