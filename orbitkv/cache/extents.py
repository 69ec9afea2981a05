"""ExtentStore: one preallocated SSD file, given out in 4 KiB aligned extents."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import shutil
import stat
from collections.abc import Iterable
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO

from orbitkv.cache.ranges import FreeRanges
from orbitkv.config import format_nbytes
from orbitkv.errors import StoreError
from orbitkv.objects import KEY_DIGEST_NBYTES, OBJECT_ALIGN_NBYTES, align_up

MAX_GENERATION = 2**63 - 1
INDEX_FORMAT = "orbitkv-ssd-index:1"


@dataclass(frozen=True, slots=True)
class IndexRow:
    """One object that a closed store left behind. What it claims is verified when it is read."""

    digest: str
    generation: int
    offset: int
    nbytes: int

    def check(self) -> None:
        """Raise ValueError or TypeError where the row cannot name an extent."""
        if len(bytes.fromhex(self.digest)) != KEY_DIGEST_NBYTES:
            raise ValueError(f"digest {self.digest!r}")
        if not all(type(value) is int for value in (self.generation, self.offset, self.nbytes)):
            raise TypeError(f"extent of {self.nbytes!r} bytes at {self.offset!r}")
        aligned = not (self.offset % OBJECT_ALIGN_NBYTES or self.nbytes % OBJECT_ALIGN_NBYTES)
        least, most = min(self.offset, self.generation), max(self.offset, self.generation)
        if not aligned or least < 0 or most > MAX_GENERATION or self.nbytes < 1:
            raise ValueError(f"extent of {self.nbytes} bytes at {self.offset}")


class ExtentStore:
    """The SSD tier's file, for one manager at a time.

    Args:
        path: The file. Its directory must exist.
        capacity_nbytes: Length of the file, rounded up to 4 KiB.
        persist: Keep the file at ``close``, and read the index that an earlier one left.

    Attributes:
        fd: Open for reading and writing, O_DIRECT where the filesystem takes it.
        buffered_reason: Why O_DIRECT is not in use; None where it is.
        recovered: What an earlier store left, its extents taken; empty unless ``persist``.
        cold_reason: Why nothing was recovered although there was an index; None otherwise.

    Raises:
        StoreError: the path cannot be used, is in use, or the filesystem is too small.
    """

    def __init__(self, path: Path, capacity_nbytes: int, *, persist: bool) -> None:
        self.path = path
        self._persist = persist
        self._index_path = path.with_name(f"{path.name}.index")
        self._lock_path = path.with_name(f"{path.name}.lock")
        self._ranges = FreeRanges(align_up(capacity_nbytes, OBJECT_ALIGN_NBYTES))
        self.cold_reason: str | None = None
        left_behind = _is_left_behind(path, self._lock_path, self._index_path)
        self._lock_file = _lock(path, self._lock_path)
        with ExitStack() as undo:
            undo.callback(self._unlock)
            if not left_behind:
                raise StoreError(
                    f"ssd path {path}: there is a file that is not a store of ours; "
                    "accepted: a path where nothing is, or what a manager left there"
                )
            if not path.exists():
                undo.callback(path.unlink, missing_ok=True)
            self.fd, self.buffered_reason = _open(path)
            undo.callback(os.close, self.fd)
            _preallocate(self.fd, path, self._ranges.capacity_nbytes)
            self.recovered = tuple(self._recover()) if persist else ()
            if not persist:
                self._index_path.unlink(missing_ok=True)  # what follows makes it untrue
            undo.pop_all()

    @property
    def capacity_nbytes(self) -> int:
        """Bytes of the file."""
        return self._ranges.capacity_nbytes

    @property
    def used_nbytes(self) -> int:
        """Bytes of reserved and published extents."""
        return self._ranges.capacity_nbytes - self._ranges.free_nbytes

    def allocate(self, nbytes: int) -> int | None:
        """Take an extent; return its offset, or None where no free range is long enough."""
        return self._ranges.allocate(nbytes)

    def free(self, offset: int, nbytes: int) -> None:
        """Give an extent back. Only after the last read or write of it has ended."""
        self._ranges.free(offset, nbytes)

    def close(self, published: Iterable[IndexRow]) -> None:
        """Close the file: removed, or left with an index of what is published.

        Raises:
            StoreError: the index could not be written; the file is closed all the same.
        """
        try:
            self._leave(published)
        except OSError as error:
            raise StoreError(f"ssd path {self.path}: closing: {error.strerror}") from error
        finally:
            os.close(self.fd)
            self._unlock()

    def _leave(self, published: Iterable[IndexRow]) -> None:
        if self._persist:
            os.fsync(self.fd)
            index = {
                "format": INDEX_FORMAT,
                "capacity_nbytes": self.capacity_nbytes,
                "objects": [asdict(row) for row in published],
            }
            unfinished = self._index_path.with_suffix(".unfinished")
            unfinished.write_text(json.dumps(index))
            unfinished.replace(self._index_path)
        else:
            self.path.unlink(missing_ok=True)

    def _recover(self) -> Iterable[IndexRow]:
        """Take the extents of an index, which is then removed: it is true only once.

        A damaged index is a cold start, not a fault: every object in it can be computed again.
        """
        try:
            index_bytes = self._index_path.read_bytes()
        except FileNotFoundError:
            return
        except OSError as error:
            raise StoreError(
                f"ssd index {self._index_path}: {error.strerror}; remove it"
            ) from error
        self._index_path.unlink()
        try:
            rows = _parse_index(index_bytes)
        except (ValueError, TypeError, KeyError, RecursionError) as error:
            self.cold_reason = f"index {self._index_path} is damaged: {error!r}"
            return
        for row in sorted(rows, key=lambda row: row.offset):
            # A smaller file than before no longer holds the extents past its end.
            if self._ranges.reserve(row.offset, row.nbytes):
                yield row

    def _unlock(self) -> None:
        self._lock_path.unlink(missing_ok=True)
        self._lock_file.close()


def _parse_index(index_bytes: bytes) -> list[IndexRow]:
    index = json.loads(index_bytes)
    if index["format"] != INDEX_FORMAT:
        raise ValueError(f"format {index['format']!r}; accepted: {INDEX_FORMAT!r}")
    rows = [IndexRow(**fields) for fields in index["objects"]]
    for row in rows:
        row.check()
    return rows


def _is_left_behind(path: Path, lock_path: Path, index_path: Path) -> bool:
    """Whether a path is free, or holds what a manager of ours left: closed or killed.

    Anything else is somebody's own file, which a store would overwrite and remove.
    """
    try:
        found = path.lstat()
    except FileNotFoundError:
        return True
    except (OSError, ValueError):
        return True  # opening it tells why it cannot be used
    if not stat.S_ISREG(found.st_mode):
        return path.is_dir()  # told as such by the lock
    return not found.st_size or lock_path.exists() or index_path.exists()


def _lock(path: Path, lock_path: Path) -> IO[str]:
    """Keep a second manager off the file; its refusal names the first one's pid."""
    if "\0" in str(path) or not path.name:
        raise StoreError(f"ssd path {str(path)!r}; accepted: the path of a file")
    if not path.parent.is_dir():
        raise StoreError(f"ssd path {path}: no directory {path.parent}; create it first")
    if path.is_dir():
        raise StoreError(f"ssd path {path}: a directory; accepted: a file, such as {path / 'kv'}")
    while True:
        try:
            lock_file = lock_path.open("a+")
        except OSError as error:
            accepted = "a writable path"
            raise StoreError(f"ssd path {path}: {error.strerror}; accepted: {accepted}") from error
        try:
            fcntl.flock(lock_file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            lock_file.seek(0)
            owner = lock_file.read().strip() or "unknown"
            lock_file.close()
            raise StoreError(f"ssd path {path}: in use by process {owner}") from error
        # An owner that closed meanwhile has removed the file that we hold: then take the new one.
        held = os.fstat(lock_file.fileno())
        if (held.st_dev, held.st_ino) == _identity(lock_path):
            break
        lock_file.close()
    lock_file.truncate(0)
    lock_file.write(f"{os.getpid()}\n")
    lock_file.flush()
    return lock_file


def _identity(path: Path) -> tuple[int, int] | None:
    """Device and inode of what a path names now; None where there is nothing."""
    try:
        found = path.stat()
    except FileNotFoundError:
        return None
    return found.st_dev, found.st_ino


def _open(path: Path) -> tuple[int, str | None]:
    flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC
    try:
        try:
            return os.open(path, flags | os.O_DIRECT, 0o600), None
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
        return os.open(path, flags, 0o600), "the filesystem refuses O_DIRECT: reads may be cached"
    except OSError as error:
        raise StoreError(f"ssd path {path}: {error.strerror}; accepted: a writable path") from error


def _preallocate(fd: int, path: Path, capacity_nbytes: int) -> None:
    """Set the file's length, and take its blocks now where the filesystem can."""
    allocated_nbytes = os.fstat(fd).st_blocks * 512
    free_nbytes = shutil.disk_usage(path.parent).free + allocated_nbytes
    if capacity_nbytes > free_nbytes:
        raise StoreError(
            f"ssd path {path}: capacity {format_nbytes(capacity_nbytes)}; "
            f"free on that filesystem: {format_nbytes(free_nbytes)}"
        )
    try:
        os.ftruncate(fd, capacity_nbytes)
        os.posix_fallocate(fd, 0, capacity_nbytes)
    except OSError as error:
        if error.errno not in (errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL):
            raise StoreError(f"ssd path {path}: {error.strerror}") from error
