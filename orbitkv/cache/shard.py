"""ShardFile: one file of the SSD tier, locked for one manager at a time."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import shutil
import stat
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO

from orbitkv.cache.checkpoint import INDEX_MAGIC
from orbitkv.config import format_nbytes
from orbitkv.errors import StoreError

_UNFINISHED_SUFFIX = ".unfinished"
_SUFFIXES = ("", ".index", _UNFINISHED_SUFFIX, ".lock")
_PID_NBYTES = 10


class ShardFile:
    """One file, opened as found; only ``grow``, ``empty``, ``shrink`` and ``close`` change it.

    What lies at its names is ours where we can tell, or the path is refused:

    - a lock that is empty, or holds one number;
    - an index that begins as ours do, also where it is unfinished, and was cut off or is empty;
    - a file that is empty, or lies beside an index of ours or a lock with a number, which a killed
      manager has left.

    No link is followed.

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
        _, self.index_path, self.unfinished_path, self._lock_path = _names(path)
        self._lock_file, self._found_lock = _lock(path, self._lock_path)
        self._is_signed = False
        try:
            self._refuse_others()
            self._sign()
            self.is_new = not os.path.lexists(path)
            self.fd, self.buffered_reason = _open(path, is_new=self.is_new)
        except BaseException:
            self._unlock_as_found()
            raise
        self._found_nbytes = os.fstat(self.fd).st_size

    @property
    def identity(self) -> tuple[int, int]:
        """Device and inode of the file."""
        found = os.fstat(self.fd)
        return found.st_dev, found.st_ino

    @property
    def is_empty(self) -> bool:
        """No byte was found in it, so none of an earlier manager's is."""
        return not self._found_nbytes

    @property
    def allocated_nbytes(self) -> int:
        """What the file takes of its filesystem now."""
        return os.fstat(self.fd).st_blocks * 512

    def grow(self, nbytes: int) -> None:
        """Make the file at least as long, and take its blocks now where the filesystem can.

        Raises:
            StoreError: the filesystem has no room.
        """
        with told(self.path):
            if os.fstat(self.fd).st_size < nbytes:
                os.ftruncate(self.fd, nbytes)
            try:
                os.posix_fallocate(self.fd, 0, nbytes)
            except OSError as error:
                if error.errno not in (errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL):
                    raise

    def empty(self, nbytes: int) -> None:
        """Put zeros in the place of all that was found, down to the device.

        Raises:
            StoreError: the filesystem fails, or others have taken its room meanwhile.
        """
        with told(self.path):
            os.ftruncate(self.fd, 0)
            self.grow(nbytes)
            os.fsync(self.fd)

    def shrink(self, nbytes: int) -> None:
        """Cut off what an earlier, longer store had behind ``nbytes``.

        Raises:
            StoreError: the filesystem fails.
        """
        with told(self.path):
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
            self._unlock()

    def abandon(self) -> None:
        """Give the path up as it was found, as far as that goes: a fault is on its way already."""
        with contextlib.suppress(OSError):
            if self.is_new:
                self.path.unlink(missing_ok=True)
            elif os.fstat(self.fd).st_size > self._found_nbytes:
                os.ftruncate(self.fd, self._found_nbytes)
            self.unfinished_path.unlink(missing_ok=True)
        os.close(self.fd)
        self._unlock_as_found()

    def forget_index(self) -> None:
        """Remove the index: what it is of is gone."""
        self.index_path.unlink(missing_ok=True)
        self.unfinished_path.unlink(missing_ok=True)

    def _refuse_others(self) -> None:
        """Refuse what somebody else has at our names: a store would overwrite and remove it.

        Raises:
            StoreError: naming every such file.
        """
        others: list[str] = []
        heads: list[bytes | None] = []
        for path in (self.index_path, self.unfinished_path):
            try:
                heads.append(_head(path))
            except OSError as error:
                heads.append(None)
                others.append(f"{path} ({error.strerror})")
        index, unfinished = heads
        if index is not None and index != INDEX_MAGIC:
            others.append(f"{self.index_path} (it begins with {index!r})")
        if unfinished is not None and not INDEX_MAGIC.startswith(unfinished):
            others.append(f"{self.unfinished_path} (it begins with {unfinished!r})")
        lock = self._found_lock
        if lock is not None and not _is_our_lock(lock):
            others.append(f"{self._lock_path} (it begins with {lock!r})")
        known = index == INDEX_MAGIC or (bool(lock) and _is_our_lock(lock or b""))
        with told(self.path), contextlib.suppress(FileNotFoundError):
            found = self.path.lstat()
            if not stat.S_ISREG(found.st_mode):
                others.append(f"{self.path} ({_kind(found.st_mode)})")
            elif found.st_size and not known:
                others.append(f"{self.path} ({found.st_size} bytes)")
        if others:
            raise _not_ours(self.path, others)

    def _sign(self) -> None:
        """Write our pid into the lock, in one write: it marks as ours what a kill leaves behind."""
        self._is_signed = True
        with told(self._lock_path):
            os.pwrite(self._lock_file.fileno(), _signature(os.getpid()), 0)
            os.fsync(self._lock_file.fileno())

    def _unlock(self) -> None:
        """Let others in."""
        self._lock_path.unlink(missing_ok=True)
        self._lock_file.close()

    def _unlock_as_found(self) -> None:
        """Let others in; a lock that was found marks what a killed manager left as ours."""
        if self._found_lock is None:
            self._unlock()
            return
        if self._is_signed:
            with contextlib.suppress(OSError):
                if self._found_lock:
                    os.pwrite(self._lock_file.fileno(), _signature(int(self._found_lock)), 0)
                else:
                    os.ftruncate(self._lock_file.fileno(), 0)
        self._lock_file.close()


@contextlib.contextmanager
def told(path: Path) -> Iterator[None]:
    """Turn an OSError into a StoreError that names ``path``."""
    try:
        yield
    except OSError as error:
        raise StoreError(f"ssd path {path}: {error.strerror}") from error


def check_paths(paths: Sequence[Path]) -> None:
    """Refuse paths that cannot be those of files, or share one or what is kept beside it.

    Raises:
        StoreError: naming the path, or both.
    """
    for path in paths:
        if "\0" in str(path) or not path.name:
            raise StoreError(f"ssd path {str(path)!r}; accepted: the path of a file")
        with told(path):  # such as a name on the way that is too long
            if not path.parent.is_dir():
                raise StoreError(f"ssd path {path}: no directory {path.parent}; create it first")
            most_nbytes = os.pathconf(path.parent, "PC_NAME_MAX") - len(_UNFINISHED_SUFFIX)
            name_nbytes = len(os.fsencode(path.name))
            if name_nbytes > most_nbytes:
                raise StoreError(
                    f"ssd path {path}: a name of {name_nbytes} bytes; accepted: up to {most_nbytes}"
                )
            if path.is_dir():
                example = path / "kv"
                raise StoreError(
                    f"ssd path {path}: a directory; accepted: a file, such as {example}"
                )
    owners: dict[Path, int] = {}
    for shard, path in enumerate(paths):
        for name in _names(path.parent.resolve() / path.name):
            owner = owners.setdefault(name, shard)
            if owner != shard:
                raise _shared(path, paths[owner])


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


def check_room(files: Sequence[ShardFile], nbytes: int) -> None:
    """Refuse a length of each file that their filesystems cannot hold together.

    Raises:
        StoreError: naming the first path for which nothing is left.
    """
    free_nbytes: dict[int, int] = {}
    for file in files:
        device, _ = file.identity
        with told(file.path):
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


def _not_ours(path: Path, others: Sequence[str]) -> StoreError:
    return StoreError(
        f"ssd path {path}: there is {', '.join(others)}, not a store of ours; "
        "accepted: nothing there, or what a manager left there"
    )


def _names(path: Path) -> tuple[Path, ...]:
    """A shard's file and what lies beside it: index, unfinished index and lock."""
    return tuple(path.with_name(path.name + suffix) for suffix in _SUFFIXES)


def _head(path: Path) -> bytes | None:
    """As many first bytes of a regular file as the magic has; None where nothing is.

    Raises:
        OSError: it cannot be read; ``strerror`` says what it is, where it is no such file.
    """
    try:
        fd = _opened(path, os.O_RDONLY)
    except FileNotFoundError:
        return None
    try:
        return os.pread(fd, len(INDEX_MAGIC), 0)
    finally:
        os.close(fd)


def _opened(path: Path, flags: int) -> int:
    """Open a regular file that is there.

    Raises:
        OSError: it cannot be opened; ``strerror`` says what it is, where it is no such file.
    """
    mode = path.lstat().st_mode
    if not stat.S_ISREG(mode):
        raise OSError(errno.EINVAL, _kind(mode))
    return os.open(path, flags | os.O_NOFOLLOW | os.O_CLOEXEC)


def _kind(mode: int) -> str:
    if stat.S_ISDIR(mode):
        return "a directory"
    return "a link" if stat.S_ISLNK(mode) else "no regular file"


def _signature(pid: int) -> bytes:
    """All are of one length, so that one is written over another at once."""
    return b"%-*d\n" % (_PID_NBYTES, pid)


def _is_our_lock(text: bytes) -> bool:
    return not text or (text.endswith(b"\n") and text.rstrip(b" \n").isdigit())


def _lock(path: Path, lock_path: Path) -> tuple[IO[bytes], bytes | None]:
    """Keep a second manager off the file; its refusal names the first one's pid.

    Returns:
        The lock, not yet signed, and the first bytes of a lock file that was there, at least one
        more than a signature has; None where there was none.
    """
    while True:
        try:
            lock_file, is_new = _open_lock(lock_path)
        except OSError as error:
            if os.path.lexists(lock_path):
                raise _not_ours(path, [f"{lock_path} ({error.strerror})"]) from error
            raise StoreError(
                f"ssd path {path}: {error.strerror}; accepted: a writable path"
            ) from error
        if lock_file is None:
            continue  # an owner that closes has just removed it
        try:
            fcntl.flock(lock_file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            with lock_file:
                text = lock_file.read(_PID_NBYTES + 2)
            owner = text.decode().strip() if text and _is_our_lock(text) else "unknown"
            raise StoreError(f"ssd path {path}: in use by process {owner}") from error
        # An owner that closed meanwhile has removed the file that we hold: then take the new one.
        held = os.fstat(lock_file.fileno())
        if (held.st_dev, held.st_ino) == _identity(lock_path):
            return lock_file, None if is_new else lock_file.read(_PID_NBYTES + 2)
        lock_file.close()


def _open_lock(lock_path: Path) -> tuple[IO[bytes] | None, bool]:
    """Open a lock file, or make one: whether it is new. None where it has gone meanwhile."""
    flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        return os.fdopen(os.open(lock_path, flags, 0o666), "r+b", buffering=0), True
    except FileExistsError:
        pass
    try:
        return os.fdopen(_opened(lock_path, os.O_RDWR), "r+b", buffering=0), False
    except FileNotFoundError:
        return None, False


def _identity(path: Path) -> tuple[int, int] | None:
    """Device and inode of what a path names now; None where there is nothing."""
    try:
        found = path.lstat()
    except FileNotFoundError:
        return None
    return found.st_dev, found.st_ino


def _open(path: Path, *, is_new: bool) -> tuple[int, str | None]:
    flags = os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC
    if is_new:
        flags |= os.O_CREAT | os.O_EXCL
    try:
        try:
            return os.open(path, flags | os.O_DIRECT, 0o600), None
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
        # What refused O_DIRECT may have made the file all the same.
        fd = os.open(path, flags & ~os.O_EXCL, 0o600)
    except OSError as error:
        raise StoreError(f"ssd path {path}: {error.strerror}; accepted: a writable path") from error
    return fd, f"{path}: the filesystem refuses O_DIRECT: reads may be cached"
