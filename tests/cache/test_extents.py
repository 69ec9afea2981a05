"""The SSD file: opened as told or refused in words, for one manager, remembered only if asked."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
from pathlib import Path

import pytest

from orbitkv.cache import extents as extents_module
from orbitkv.cache.extents import INDEX_FORMAT, ExtentStore, IndexRow
from orbitkv.errors import StoreError
from tests.builders import BLOCK

CAPACITY_NBYTES = 16 * BLOCK
ROW = IndexRow("ab" * 32, 3, BLOCK, 2 * BLOCK)


def opened(
    path: Path, *, persist: bool = False, capacity_nbytes: int = CAPACITY_NBYTES
) -> ExtentStore:
    return ExtentStore(path, capacity_nbytes, persist=persist)


def index_of(path: Path) -> Path:
    return path.with_name(f"{path.name}.index")


def leave_index(path: Path, content: bytes) -> None:
    """A persistent store that was closed, whose index then holds ``content``."""
    opened(path, persist=True).close([ROW])
    index_of(path).write_bytes(content)


def test_file_has_its_length_and_blocks_from_the_start(ssd_path: Path) -> None:
    store = opened(ssd_path, capacity_nbytes=CAPACITY_NBYTES - 1)
    assert store.capacity_nbytes == CAPACITY_NBYTES
    assert ssd_path.stat().st_size == CAPACITY_NBYTES
    assert ssd_path.stat().st_blocks * 512 >= CAPACITY_NBYTES
    store.close([])


def test_file_lock_and_index_are_gone_after_close_without_persist(ssd_path: Path) -> None:
    opened(ssd_path).close([ROW])
    assert list(ssd_path.parent.iterdir()) == []


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
    opened(ssd_path).close([])  # the refusal left no lock behind


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
    store.close([])


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
    assert not fcntl.fcntl(store.fd, fcntl.F_GETFL) & os.O_DIRECT
    store.close([])


def test_file_is_opened_o_direct_where_the_filesystem_takes_it(ssd_path: Path) -> None:
    store = opened(ssd_path)
    direct = bool(fcntl.fcntl(store.fd, fcntl.F_GETFL) & os.O_DIRECT)
    assert direct == (store.buffered_reason is None)
    store.close([])


def test_refused_start_leaves_an_existing_store_as_it_was(ssd_path: Path) -> None:
    """Asking for more than the disk holds is a typing error; it must not cost the cache."""
    store = opened(ssd_path, persist=True)
    store.close([ROW])
    with ssd_path.open("r+b") as file:
        file.seek(BLOCK)
        file.write(b"kept")
    with pytest.raises(StoreError, match="capacity"):
        opened(ssd_path, persist=True, capacity_nbytes=2**50)
    assert ssd_path.exists(), "the refused start removed the file of the store before it"
    again = opened(ssd_path, persist=True)
    assert again.recovered == (ROW,)
    assert ssd_path.read_bytes()[BLOCK : BLOCK + 4] == b"kept"
    again.close([])


def test_second_store_on_one_path_is_refused_with_the_first_ones_pid(ssd_path: Path) -> None:
    first = opened(ssd_path)
    with pytest.raises(StoreError, match=f"in use by process {os.getpid()}"):
        opened(ssd_path)
    assert ssd_path.exists()
    first.close([])
    opened(ssd_path).close([])


def test_lock_of_a_killed_process_does_not_keep_the_next_out(ssd_path: Path) -> None:
    ssd_path.with_name(f"{ssd_path.name}.lock").write_text("999999\n")
    opened(ssd_path).close([])


def test_store_that_opens_while_another_closes_still_owns_the_path(
    ssd_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It opens the lock file, the other removes that file, and only then it takes its lock."""
    first = opened(ssd_path)
    real = fcntl.flock

    def close_first_before_locking(fd: object, operation: int) -> None:
        monkeypatch.setattr(extents_module.fcntl, "flock", real)
        first.close([])
        real(fd, operation)

    monkeypatch.setattr(extents_module.fcntl, "flock", close_first_before_locking)
    try:
        second = opened(ssd_path)
    except StoreError:
        return  # to refuse is safe as well
    try:
        with pytest.raises(StoreError, match="in use"):
            opened(ssd_path)
    finally:
        second.close([])


def test_persistent_store_gives_its_rows_and_their_extents_back(ssd_path: Path) -> None:
    opened(ssd_path, persist=True).close([ROW])
    store = opened(ssd_path, persist=True)
    assert store.recovered == (ROW,)
    assert store.cold_reason is None
    assert store.used_nbytes == ROW.nbytes
    assert store.allocate(BLOCK) == 0
    assert store.allocate(BLOCK) == ROW.offset + ROW.nbytes
    store.close([ROW])


def test_index_is_true_only_once(ssd_path: Path) -> None:
    """A process that is killed leaves no index, for its file is no longer what the index says."""
    opened(ssd_path, persist=True).close([ROW])
    store = opened(ssd_path, persist=True)
    assert not index_of(ssd_path).exists()
    store.close([])


def test_smaller_capacity_keeps_what_still_fits(ssd_path: Path) -> None:
    far = IndexRow("cd" * 32, 4, 8 * BLOCK, BLOCK)
    opened(ssd_path, persist=True).close([ROW, far])
    store = opened(ssd_path, persist=True, capacity_nbytes=4 * BLOCK)
    assert store.recovered == (ROW,)
    store.close([])


def test_rows_that_overlap_are_recovered_once(ssd_path: Path) -> None:
    overlapping = IndexRow("cd" * 32, 4, 2 * BLOCK, BLOCK)
    opened(ssd_path, persist=True).close([ROW, overlapping])
    store = opened(ssd_path, persist=True)
    assert store.recovered == (ROW,)
    store.close([])


GOOD_ROW = {"digest": "ab" * 32, "generation": 3, "offset": BLOCK, "nbytes": BLOCK}


def index_with(**changes: object) -> bytes:
    index = {"format": INDEX_FORMAT, "capacity_nbytes": CAPACITY_NBYTES, "objects": [GOOD_ROW]}
    return json.dumps(index | changes).encode()


def row_with(**changes: object) -> bytes:
    return index_with(objects=[GOOD_ROW | changes])


@pytest.mark.parametrize(
    "content",
    [
        pytest.param(b"", id="empty"),
        pytest.param(index_with()[:-9], id="cut off"),
        pytest.param(b"[]", id="another type"),
        pytest.param(b"null", id="null"),
        pytest.param(b"\xff\xfe" + index_with(), id="not UTF-8"),
        pytest.param(index_with().replace(b"digest", b"dige\xf3t"), id="a flipped high bit"),
        pytest.param(b"[" * 100_000, id="nested too deeply"),
        pytest.param(index_with(format="orbitkv-ssd-index:0"), id="another format"),
        pytest.param(index_with(objects=None), id="no rows"),
        pytest.param(index_with(objects=[[1, 2]]), id="rows of another type"),
        pytest.param(index_with(objects=[{"digest": "ab"}]), id="rows without fields"),
        pytest.param(row_with(more=1), id="a row with another field"),
        pytest.param(row_with(generation=2**64), id="generation above all"),
        pytest.param(row_with(digest="abcd"), id="digest of another length"),
        pytest.param(row_with(digest="xy"), id="digest that is no hex"),
        pytest.param(row_with(digest=5), id="digest that is no text"),
        pytest.param(row_with(offset=BLOCK + 1), id="unaligned offset"),
        pytest.param(row_with(offset=-BLOCK), id="negative offset"),
        pytest.param(row_with(offset=float(BLOCK)), id="offset that is no integer"),
        pytest.param(row_with(offset=str(BLOCK)), id="offset that is text"),
        pytest.param(row_with(nbytes=0), id="no bytes"),
        pytest.param(row_with(nbytes=float(BLOCK)), id="length that is no integer"),
        pytest.param(row_with(generation="3"), id="generation that is text"),
        pytest.param(row_with(generation=3.5), id="generation that is no integer"),
    ],
)
def test_damaged_index_is_a_cold_start_with_a_reason(ssd_path: Path, content: bytes) -> None:
    leave_index(ssd_path, content)
    store = opened(ssd_path, persist=True)
    assert store.recovered == ()
    assert store.cold_reason
    assert str(index_of(ssd_path)) in store.cold_reason
    assert store.used_nbytes == 0
    store.close([])


def test_row_past_the_end_of_the_file_is_left_out(ssd_path: Path) -> None:
    leave_index(ssd_path, row_with(offset=2**60))
    store = opened(ssd_path, persist=True)
    assert store.recovered == ()
    assert store.used_nbytes == 0
    store.close([])


def test_index_that_cannot_be_read_leaves_the_path_unlocked(ssd_path: Path) -> None:
    """Whatever keeps a store from opening, the next attempt must not find it in use."""
    opened(ssd_path, persist=True).close([])
    index_of(ssd_path).unlink()
    index_of(ssd_path).mkdir()
    with contextlib.suppress(OSError, StoreError):
        opened(ssd_path, persist=True).close([])
    if index_of(ssd_path).is_dir():
        index_of(ssd_path).rmdir()
    ssd_path.unlink()  # without its index it is nothing that a store would take for its own
    opened(ssd_path, persist=True).close([])


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


def test_what_a_killed_manager_left_is_taken_over(ssd_path: Path) -> None:
    ssd_path.write_bytes(b"old extents")
    ssd_path.with_name(f"{ssd_path.name}.lock").write_text("999999\n")
    opened(ssd_path).close([])
    assert list(ssd_path.parent.iterdir()) == []


def test_an_index_does_not_outlive_a_store_that_was_not_to_persist(ssd_path: Path) -> None:
    opened(ssd_path, persist=True).close([ROW])
    opened(ssd_path).close([])
    store = opened(ssd_path, persist=True)
    assert store.recovered == ()
    store.close([])
