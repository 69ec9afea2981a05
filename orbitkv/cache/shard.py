"""ShardFile: one file of the SSD tier, locked for one manager at a time."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import shutil
import stat
from collections.abc import Sequence
from pathlib import Path
from typing import IO

from orbitkv.config import format_nbytes
from orbitkv.errors import StoreError


class ShardFile:
    """One file, opened as it is found; only ``grow``, ``shrink`` and ``close`` change it.

    Args:
        path: The file. Its directory must exist. Beside it lie its lock, and an index where the
            store is persistent.

    Attributes:
        fd: Open for reading and writing, O_DIRECT where the filesystem takes it.
        buffered_reason: Why O_DIRECT is not in use; None where it is.
        is_new: There was no file before.

    Raises:
        StoreError: the path cannot be used, is in use, or holds somebody else's file.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.index_path = path.with_name(f"{path.name}.index")
        self.unfinished_path = path.with_name(f"{path.name}.unfinished")
        self._lock_path = path.with_name(f"{path.name}.lock")
        ours = _is_left_behind(path, self._lock_path, self.index_path)
        self._lock_file, self._lock_was_there = _lock(path, self._lock_path)
        try:
            self.is_new = not path.exists()
            self.fd, self.buffered_reason = _open(path, ours=ours)
        except BaseException:
            self._unlock(keep_lock_file=self._lock_was_there)
            raise
        self._found_nbytes = os.fstat(self.fd).st_size

    @property
    def identity(self) -> tuple[int, int]:
        """Device and inode of the file."""
        found = os.fstat(self.fd)
        return found.st_dev, found.st_ino

    @property
    def allocated_nbytes(self) -> int:
        """What the file takes of its filesystem now."""
        return os.fstat(self.fd).st_blocks * 512

    def grow(self, nbytes: int) -> None:
        """Make the file at least as long, and take its blocks now where the filesystem can.

        Raises:
            StoreError: the filesystem has no room.
        """
        try:
            if self._found_nbytes < nbytes:
                os.ftruncate(self.fd, nbytes)
            os.posix_fallocate(self.fd, 0, nbytes)
        except OSError as error:
            if error.errno not in (errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL):
                raise StoreError(f"ssd path {self.path}: {error.strerror}") from error

    def shrink(self, nbytes: int) -> None:
        """Cut off what an earlier, longer store had behind ``nbytes``."""
        os.ftruncate(self.fd, nbytes)

    def close(self, *, remove: bool) -> None:
        """Give the path up. With ``remove`` nothing is left there but, at worst, an empty file.

        Raises:
            OSError: what is to be removed cannot be; the path is given up all the same.
        """
        try:
            if remove:
                try:
                    self.path.unlink(missing_ok=True)
                except PermissionError:
                    os.ftruncate(self.fd, 0)
                self.forget_index()
        finally:
            os.close(self.fd)
            self._unlock(keep_lock_file=False)

    def abandon(self) -> None:
        """Give the path up as it was found, as far as that goes: a fault is on its way already."""
        with contextlib.suppress(OSError):
            if self.is_new:
                self.path.unlink(missing_ok=True)
            elif os.fstat(self.fd).st_size > self._found_nbytes:
                os.ftruncate(self.fd, self._found_nbytes)
            self.unfinished_path.unlink(missing_ok=True)
        os.close(self.fd)
        self._unlock(keep_lock_file=self._lock_was_there)

    def forget_index(self) -> None:
        """Remove the index, which is not true, or no longer."""
        self.index_path.unlink(missing_ok=True)
        self.unfinished_path.unlink(missing_ok=True)

    def _unlock(self, *, keep_lock_file: bool) -> None:
        """Let others in. A lock file that was found marks what a killed manager left as ours."""
        if not keep_lock_file:
            self._lock_path.unlink(missing_ok=True)
        self._lock_file.close()


def check_paths(paths: Sequence[Path]) -> None:
    """Refuse paths that cannot be those of files, each another.

    Raises:
        StoreError: naming the path.
    """
    for path in paths:
        if "\0" in str(path) or not path.name:
            raise StoreError(f"ssd path {str(path)!r}; accepted: the path of a file")
        if not path.parent.is_dir():
            raise StoreError(f"ssd path {path}: no directory {path.parent}; create it first")
        if path.is_dir():
            example = path / "kv"
            raise StoreError(f"ssd path {path}: a directory; accepted: a file, such as {example}")


def check_distinct(files: Sequence[ShardFile]) -> None:
    """Refuse two shards in one file, by whatever names.

    Raises:
        StoreError: naming both.
    """
    owners: dict[tuple[int, int], ShardFile] = {}
    for file in files:
        owner = owners.setdefault(file.identity, file)
        if owner is not file:
            raise _shared(file.path, owner.path)


def check_names(paths: Sequence[Path]) -> None:
    """Refuse a shard whose file is another's, or what another keeps beside its own.

    Raises:
        StoreError: naming both.
    """
    owners: dict[Path, int] = {}
    for shard, path in enumerate(paths):
        for suffix in ("", ".index", ".unfinished", ".lock"):
            name = path.parent.resolve() / (path.name + suffix)
            owner = owners.setdefault(name, shard)
            if owner != shard:
                raise _shared(path, paths[owner])


def check_room(files: Sequence[ShardFile], nbytes: int) -> None:
    """Refuse a length of each file that their filesystems cannot hold together.

    Raises:
        StoreError: naming the first path for which nothing is left.
    """
    free_nbytes: dict[int, int] = {}
    for file in files:
        device, _ = file.identity
        free_nbytes.setdefault(device, shutil.disk_usage(file.path.parent).free)
        free_nbytes[device] += file.allocated_nbytes
        if nbytes > free_nbytes[device]:
            raise StoreError(
                f"ssd path {file.path}: capacity {format_nbytes(nbytes)}; "
                f"free on that filesystem: {format_nbytes(free_nbytes[device])}"
            )
        free_nbytes[device] -= nbytes


def _shared(path: Path, owner: Path) -> StoreError:
    return StoreError(f"ssd path {path}: a file of {owner}; accepted: a file for each shard")


def _is_left_behind(path: Path, lock_path: Path, index_path: Path) -> bool:
    """Whether a path is free, or holds what a manager of ours left: closed or killed.

    Anything else is somebody's own file, which a store would overwrite and remove.
    """
    try:
        found = path.lstat()
    except FileNotFoundError:
        return True
    except OSError:
        return True  # opening it tells why it cannot be used
    if not stat.S_ISREG(found.st_mode):
        return False
    return not found.st_size or lock_path.exists() or index_path.exists()


def _lock(path: Path, lock_path: Path) -> tuple[IO[str], bool]:
    """Keep a second manager off the file; its refusal names the first one's pid.

    Returns:
        The lock, and whether a killed manager had left the lock's file.
    """
    while True:
        was_there = lock_path.exists()
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
    return lock_file, was_there


def _identity(path: Path) -> tuple[int, int] | None:
    """Device and inode of what a path names now; None where there is nothing."""
    try:
        found = path.stat()
    except FileNotFoundError:
        return None
    return found.st_dev, found.st_ino


def _open(path: Path, *, ours: bool) -> tuple[int, str | None]:
    if not ours:
        raise StoreError(
            f"ssd path {path}: there is a file that is not a store of ours; "
            "accepted: a path where nothing is, or what a manager left there"
        )
    flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC
    try:
        try:
            return os.open(path, flags | os.O_DIRECT, 0o600), None
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
        fd = os.open(path, flags, 0o600)
    except OSError as error:
        raise StoreError(f"ssd path {path}: {error.strerror}; accepted: a writable path") from error
    return fd, f"{path}: the filesystem refuses O_DIRECT: reads may be cached"
