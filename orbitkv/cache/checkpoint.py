"""Checkpoint: an index of what one shard holds, kept for a copy and read back after a restart."""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from orbitkv.errors import StoreError
from orbitkv.objects import OBJECT_ALIGN_NBYTES, crc32

INDEX_MAGIC = b"OrbitIX\0"
INDEX_VERSION = 1
# Generations of one manager count in the low bits; the number of the manager stands above them.
COUNTER_BITS = 44
MAX_INCARNATION = 2 ** (64 - COUNTER_BITS) - 1
BLOCK_ROWS = 2**14

# magic, version, header_nbytes, row_nbytes, incarnation, capacity_nbytes, cursor, rows, 12 bytes of
# zero, and behind them the CRC-32 of these bytes and the rows.
_HEADER = struct.Struct("<8sHHIQQQQ12s")
_CRC = struct.Struct("<I")
_HEADER_NBYTES = _HEADER.size + _CRC.size
# digest, generation, offset, nbytes
_ROW = struct.Struct("<32sQQQ")
_ROW_NBYTES = _ROW.size
ROW = np.dtype([("digest", "V32"), ("generation", "<u8"), ("offset", "<u8"), ("nbytes", "<u8")])
_FREE_ROW = bytes(_ROW_NBYTES)

Rows = npt.NDArray[np.void]


@dataclass(frozen=True, slots=True)
class SavedIndex:
    """What the index of one shard says.

    Attributes:
        incarnation: Number of the manager that wrote it; every later one has a higher.
        capacity_nbytes: Of the shard, then.
        cursor: Where the next extent was to be placed.
        rows: ``ROW`` of each published object, in no order.
    """

    incarnation: int
    capacity_nbytes: int
    cursor: int
    rows: Rows


class IndexTable:
    """Rows of what one shard has published, in blocks, so that a copy can be made in steps.

    Attributes:
        changes: How often a row was put in or dropped, or the cursor has moved.
        saved_changes: The same when the last copy was begun that has been written.
    """

    def __init__(self) -> None:
        self.changes = 0
        self.saved_changes = 0
        self._blocks: list[npt.NDArray[np.uint8]] = []
        self._slots: dict[int, int] = {}
        self._free: list[int] = []

    def put(self, digest: bytes, generation: int, offset: int, nbytes: int) -> None:
        """Add the row of an extent that was published."""
        if not self._free:
            first = len(self._blocks) * BLOCK_ROWS
            self._blocks.append(np.zeros(BLOCK_ROWS * _ROW_NBYTES, np.uint8))
            self._free = list(range(first + BLOCK_ROWS - 1, first - 1, -1))
        slot = self._slots[offset] = self._free.pop()
        block, row = divmod(slot, BLOCK_ROWS)
        place = row * _ROW_NBYTES
        _ROW.pack_into(self._blocks[block].data, place, digest, generation, offset, nbytes)
        self.changes += 1

    def drop(self, offset: int) -> None:
        """Take the row of an extent away."""
        slot = self._slots.pop(offset)
        block, row = divmod(slot, BLOCK_ROWS)
        place = row * _ROW_NBYTES
        self._blocks[block].data[place : place + _ROW_NBYTES] = _FREE_ROW
        self._free.append(slot)
        self.changes += 1

    def copy_in_steps(self) -> Iterator[Rows]:
        """Copy the rows, block by block.

        Rows may change between two steps. What the copy then holds twice, or no longer, is told
        apart by its generation when it is read.
        """
        block = 0
        while block < len(self._blocks):
            yield self._blocks[block].copy().view(ROW)
            block += 1


def write_unfinished(
    path: Path, *, incarnation: int, capacity_nbytes: int, cursor: int, pieces: Sequence[Rows]
) -> None:
    """Write an index beside the place where it shall be, down to the device.

    Args:
        pieces: Rows; those of no bytes are left out.

    Raises:
        OSError: it could not be written.
    """
    occupied = [piece[piece["nbytes"] > 0] for piece in pieces]
    rows = sum(map(len, occupied))
    head = _HEADER.pack(
        INDEX_MAGIC,
        INDEX_VERSION,
        _HEADER_NBYTES,
        _ROW_NBYTES,
        incarnation,
        capacity_nbytes,
        cursor,
        rows,
        bytes(12),
    )
    crc = crc32(head)
    for piece in occupied:
        crc = crc32(piece.view(np.uint8), crc)
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC
    with os.fdopen(os.open(path, flags, 0o666), "wb") as file:
        file.write(head + _CRC.pack(crc))
        for piece in occupied:
            file.write(piece.view(np.uint8).data)
        file.flush()
        os.fsync(file.fileno())


def finish(unfinished: Path, path: Path) -> None:
    """Put a written index in the place of the one before it, down to the device.

    Raises:
        OSError: it could not be put there; the one before it stands.
    """
    unfinished.replace(path)
    directory = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)


def read_index(path: Path, *, alone: bool) -> SavedIndex | None:
    """Read an index; None where there is none.

    Args:
        alone: The file that it is of is gone.

    Raises:
        StoreError: the file cannot be read at all.
        ValueError: it is damaged, somebody else's, or of another version.
    """
    try:
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC
        with os.fdopen(os.open(path, flags), "rb") as file:
            head = file.read(_HEADER_NBYTES)
            found_nbytes = os.fstat(file.fileno()).st_size
            if len(head) < _HEADER_NBYTES:
                raise ValueError(f"{found_nbytes} bytes; accepted: {_HEADER_NBYTES} or more")
            index, crc = _read_head(head, found_nbytes)
            rows = np.fromfile(file, ROW)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise StoreError(
            f"ssd index {path}: {error.strerror}; "
            f"accepted: one that can be read, or neither it nor {path.with_suffix('')}"
        ) from error
    if alone:
        raise ValueError("the file that it is of is gone")
    seen = crc32(rows.view(np.uint8), crc32(head[: _HEADER.size]))
    if seen != crc:
        raise ValueError(f"crc32 {seen:08x}; stored {crc:08x}")
    _check_rows(rows, index)
    return SavedIndex(index.incarnation, index.capacity_nbytes, index.cursor, rows)


def _read_head(head: bytes, found_nbytes: int) -> tuple[SavedIndex, int]:
    """Check an index's head; return it, still without rows, and the CRC."""
    magic, version, header_nbytes, row_nbytes, incarnation, capacity_nbytes, cursor, rows, zeros = (
        _HEADER.unpack_from(head)
    )
    if magic != INDEX_MAGIC:
        raise ValueError(f"magic {magic!r}; accepted: {INDEX_MAGIC!r}")
    if (version, header_nbytes, row_nbytes) != (INDEX_VERSION, _HEADER_NBYTES, _ROW_NBYTES):
        seen = f"version {version}, header {header_nbytes}, rows of {row_nbytes} bytes"
        accepted = f"version {INDEX_VERSION}, {_HEADER_NBYTES} and {_ROW_NBYTES} bytes"
        raise ValueError(f"{seen}; accepted: {accepted}")
    wanted_nbytes = _HEADER_NBYTES + rows * _ROW_NBYTES
    if found_nbytes != wanted_nbytes:
        raise ValueError(f"{found_nbytes} bytes; accepted: {wanted_nbytes}")
    if incarnation > MAX_INCARNATION or cursor > capacity_nbytes or any(zeros):
        raise ValueError(f"incarnation {incarnation}, cursor {cursor} of {capacity_nbytes}")
    index = SavedIndex(incarnation, capacity_nbytes, cursor, np.empty(0, ROW))
    return index, _CRC.unpack_from(head, _HEADER.size)[0]


def _check_rows(rows: Rows, index: SavedIndex) -> None:
    """Raise ValueError where a row cannot name an extent of the shard."""
    offset, nbytes = rows["offset"], rows["nbytes"]
    sound = (offset % OBJECT_ALIGN_NBYTES == 0) & (nbytes % OBJECT_ALIGN_NBYTES == 0)
    sound &= (nbytes > 0) & (offset <= index.capacity_nbytes)
    sound &= nbytes <= index.capacity_nbytes - np.minimum(offset, index.capacity_nbytes)
    sound &= rows["generation"] >> COUNTER_BITS <= index.incarnation
    if not sound.all():
        row = int(np.argmin(sound))
        raise ValueError(
            f"row {row}: generation {rows['generation'][row]}, "
            f"extent of {nbytes[row]} bytes at {offset[row]}"
        )


def in_ring_order(rows: Rows, *, capacity_nbytes: int, cursor: int) -> Rows:
    """Sort rows by when their extents are overwritten, from ``cursor`` on.

    Left out is what reaches past the end or over the cursor, and of two that overlap the older:
    a copy made in steps may have met both.
    """
    end = rows["offset"] + rows["nbytes"]
    rows = rows[(end <= capacity_nbytes) & ~((rows["offset"] < cursor) & (end > cursor))]
    rows = rows[np.argsort(rows["offset"])]
    if np.any(rows["offset"][:-1] + rows["nbytes"][:-1] > rows["offset"][1:]):
        rows = rows[_newest_apart(rows)]
    first = int(np.searchsorted(rows["offset"], cursor))
    return np.concatenate([rows[first:], rows[:first]])


def _newest_apart(rows: Rows) -> list[int]:
    """Of rows in the order of their offsets, which to keep so that no two overlap."""
    start, generation = rows["offset"].tolist(), rows["generation"].tolist()
    end = (rows["offset"] + rows["nbytes"]).tolist()
    kept: list[int] = []
    for row in range(len(rows)):
        while kept and end[kept[-1]] > start[row] and generation[kept[-1]] < generation[row]:
            kept.pop()
        if not kept or end[kept[-1]] <= start[row]:
            kept.append(row)
    return kept
