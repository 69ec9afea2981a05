"""ExtentStore: preallocated SSD files, each a ring of 4 KiB aligned extents."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

import numpy as np

from orbitkv.cache.checkpoint import (
    COUNTER_BITS,
    MAX_INCARNATION,
    ROW,
    IndexTable,
    Rows,
    SavedIndex,
    finish,
    in_ring_order,
    read_index,
    write_unfinished,
)
from orbitkv.cache.shard import ShardFile, check_distinct, check_paths, check_room, told
from orbitkv.config import MIB
from orbitkv.errors import StoreError
from orbitkv.objects import KEY_DIGEST_NBYTES, OBJECT_ALIGN_NBYTES, align_up

# As much as one transfer of merged neighbours takes.
RUN_NBYTES = 4 * MIB


class Extent(Protocol):
    """Whoever holds an extent, as the store sees it. ``nbytes`` is a multiple of 4 KiB."""

    digest: bytes
    generation: int
    shard: int
    offset: int
    nbytes: int
    pins: int


E = TypeVar("E", bound=Extent)


@dataclass(frozen=True, slots=True)
class Room(Generic[E]):
    """Where a new extent goes.

    Attributes:
        evicted: What lies there, the oldest first. It is to be freed before the room is held.
    """

    shard: int
    offset: int
    evicted: list[E]


class IndexRow(NamedTuple):
    """One object that an earlier manager left. What it claims is verified when it is read."""

    digest: bytes
    generation: int
    shard: int
    offset: int
    nbytes: int


class _Ring(Generic[E]):
    """The extents of one shard, placed one after the other, round and round.

    What the cursor comes upon next has been there longest, so extents are held in that order.
    """

    def __init__(self, capacity_nbytes: int, cursor: int) -> None:
        self.capacity_nbytes = capacity_nbytes
        self.cursor = cursor
        self.used_nbytes = 0
        self._held: OrderedDict[int, E] = OrderedDict()
        self._blocker: E | None = None

    def claim(self, nbytes: int) -> tuple[int, list[E]] | None:
        """Move the cursor over the next ``nbytes``.

        An extent does not go round the end: what is left there is passed over, and whatever it
        still holds goes too, or a small object there might never be overwritten.

        Returns:
            The offset, and all extents that are overwritten or passed over; None, and nothing has
            changed, where one of them is pinned or the shard is smaller.
        """
        if nbytes > self.capacity_nbytes:
            return None
        passed_nbytes = self.capacity_nbytes - self.cursor
        offset = self.cursor
        reach_nbytes = nbytes
        if nbytes > passed_nbytes:
            offset, reach_nbytes = 0, passed_nbytes + nbytes
        if self._still_blocks(reach_nbytes):
            return None
        evicted = []
        for extent in self._held.values():
            if self._ahead_nbytes(extent) >= reach_nbytes:
                break
            if extent.pins:
                self._blocker = extent
                return None
            evicted.append(extent)
        self.cursor = offset + nbytes
        return offset, evicted

    def hold(self, extent: E) -> None:
        """Take in what was placed last."""
        assert extent.offset not in self._held, "what lay here has not been freed"
        self._held[extent.offset] = extent
        self.used_nbytes += extent.nbytes

    def free(self, extent: E) -> None:
        """Let an extent go, wherever it lies."""
        del self._held[extent.offset]
        self.used_nbytes -= extent.nbytes

    def _ahead_nbytes(self, extent: E) -> int:
        return (extent.offset - self.cursor) % self.capacity_nbytes

    def _still_blocks(self, reach_nbytes: int) -> bool:
        """Whether what stopped the last claim stops this one: a long lease costs one look."""
        blocker = self._blocker
        if blocker is None or not blocker.pins or self._held.get(blocker.offset) is not blocker:
            return False
        return self._ahead_nbytes(blocker) < reach_nbytes


class _Shard(Generic[E]):
    """One file with its ring, and its index where the store is persistent."""

    def __init__(self, file: ShardFile, ring: _Ring[E], table: IndexTable | None) -> None:
        self.file = file
        self.ring = ring
        self.table = table

    @property
    def is_unsaved(self) -> bool:
        """Whether the index on the device lacks a change."""
        return self.table is not None and self.table.changes != self.table.saved_changes

    def save(self, incarnation: int, pieces: Sequence[Rows]) -> None:
        """Write the index, whole or not at all."""
        self.prepare(incarnation, pieces)
        finish(self.file.unfinished_path, self.file.index_path)

    def prepare(self, incarnation: int, pieces: Sequence[Rows]) -> None:
        """Write the index beside the one that stands."""
        write_unfinished(
            self.file.unfinished_path,
            incarnation=incarnation,
            capacity_nbytes=self.ring.capacity_nbytes,
            cursor=self.ring.cursor,
            pieces=pieces,
        )

    def put_back(self, index: SavedIndex | None) -> None:
        """Write the index as it was found, as far as that goes: a fault is on its way already."""
        with contextlib.suppress(OSError):
            if index is None:
                if self.file.is_empty:  # else it marks the file, which was emptied, as ours
                    self.file.index_path.unlink(missing_ok=True)
                return
            write_unfinished(
                self.file.unfinished_path,
                incarnation=index.incarnation,
                capacity_nbytes=index.capacity_nbytes,
                cursor=index.cursor,
                pieces=[index.rows],
            )
            finish(self.file.unfinished_path, self.file.index_path)


class ExtentStore(Generic[E]):
    """The SSD tier's files, for one manager at a time.

    Each shard is a ring. Neighbours in a sequence of reservations are neighbours in a file for
    ``RUN_NBYTES`` (or a whole shard), so that one transfer can carry them; then the next shard has
    its turn, so that the shards work side by side and fill alike.

    A reservation looks at no more extents than it evicts, and one beyond them.

    Args:
        paths: One file a shard. Their directories must exist.
        capacity_nbytes: Of all shards together, in equal parts, each rounded up to 4 KiB.
        persist: Keep an index of what is published in ``PATH.index`` and leave it, with the file,
            at ``close``; read the one that was left.

    Attributes:
        first_generation: Below every generation of this manager, above every one that a file of
            its shards holds.
        buffered_reason: Where O_DIRECT is not in use, and why; None where it is.
        cold_reason: Of which shards nothing was recovered although there was an index, and why.

    Raises:
        StoreError: a path cannot be used, is in use or somebody else's, or a filesystem is too
            small. Every shard is left as it was found, but for one that has no index that stands:
            what nobody could find may be gone from it.
    """

    def __init__(self, paths: Sequence[Path], capacity_nbytes: int, *, persist: bool) -> None:
        self.paths = tuple(paths)
        self.first_generation = 0
        self.cold_reason: str | None = None
        self._incarnation = 0
        self._closed = False
        self._shards: list[_Shard[E]] = []
        self._recovered: list[Rows] = []
        self._turn = 0
        self._run_nbytes = 0
        nbytes = align_up(-(-capacity_nbytes // len(paths)), OBJECT_ALIGN_NBYTES)
        check_paths(paths)
        with ExitStack() as undo:
            files = []
            for path in paths:
                files.append(ShardFile(path))
                undo.callback(files[-1].abandon)
            check_distinct(files)
            check_room(files, nbytes)
            indexes = self._read_indexes(files)
            for file in files:
                file.grow(nbytes)
            for file, index in zip(files, indexes, strict=True):
                self._add_shard(file, index, nbytes, persist=persist)
            # From here on nothing fails unless a filesystem does.
            self._begin_incarnation(indexes, undo, persist=persist)
            for file in files:
                file.shrink(nbytes)
            undo.pop_all()
        reasons = [file.buffered_reason for file in files if file.buffered_reason]
        self.buffered_reason = "; ".join(reasons) or None

    @property
    def capacity_nbytes(self) -> int:
        """Bytes of all files."""
        return sum(shard.ring.capacity_nbytes for shard in self._shards)

    @property
    def shard_nbytes(self) -> int:
        """Bytes of each file. No extent is longer."""
        return self._shards[0].ring.capacity_nbytes

    @property
    def shard_used_nbytes(self) -> tuple[int, ...]:
        """Bytes of reserved and published extents, by shard."""
        return tuple(shard.ring.used_nbytes for shard in self._shards)

    @property
    def used_nbytes(self) -> int:
        """Bytes of reserved and published extents."""
        return sum(self.shard_used_nbytes)

    def fd(self, shard: int) -> int:
        """Descriptor of a shard's file, open for reading and writing."""
        return self._shards[shard].file.fd

    def reserve(self, nbytes: int) -> Room[E] | None:
        """Find room behind what was placed last; None where no shard has any.

        Room is what nobody has pinned. Where the shard whose turn it is has none, the others are
        tried in turn.

        Args:
            nbytes: A multiple of 4 KiB.
        """
        most_nbytes = min(RUN_NBYTES, self.shard_nbytes)
        if self._run_nbytes and self._run_nbytes + nbytes > most_nbytes:
            self._take_turn(self._turn + 1)
        for step in range(len(self._shards)):
            turn = (self._turn + step) % len(self._shards)
            shard = self._shards[turn]
            claimed = shard.ring.claim(nbytes)
            if claimed is not None:
                if step:
                    self._take_turn(turn)
                self._run_nbytes += nbytes
                if shard.table is not None:
                    shard.table.changes += 1  # the cursor's
                return Room(turn, *claimed)
        return None

    def hold(self, extent: E) -> None:
        """Take in the holder of the room that was reserved, or recovered, last of its shard."""
        self._shards[extent.shard].ring.hold(extent)

    def publish(self, extent: E) -> None:
        """Put an extent into the next checkpoint: it can be read to its last byte."""
        table = self._shards[extent.shard].table
        if table is not None:
            table.put(extent.digest, extent.generation, extent.offset, extent.nbytes)

    def withdraw(self, extent: E) -> None:
        """Leave a published extent out of the next checkpoint: nobody is to find it any more."""
        table = self._shards[extent.shard].table
        if table is not None:
            table.drop(extent.offset)

    def free(self, extent: E) -> None:
        """Give an extent back. Only after the last read or write of it has ended."""
        self._shards[extent.shard].ring.free(extent)

    def recovered(self) -> Iterator[IndexRow]:
        """What earlier managers left, once, in the order in which it is to be held."""
        while self._recovered:
            shard = len(self._shards) - len(self._recovered)
            rows = self._recovered.pop(0)
            digests = rows["digest"].tobytes()
            fields = (rows[name].tolist() for name in ("generation", "offset", "nbytes"))
            starts = range(0, len(digests), KEY_DIGEST_NBYTES)
            for start, generation, offset, nbytes in zip(starts, *fields, strict=True):
                digest = digests[start : start + KEY_DIGEST_NBYTES]
                yield IndexRow(digest, generation, shard, offset, nbytes)

    async def checkpoint(self, run: Callable[..., Awaitable[Any]]) -> int:
        """Write the index of every shard that has changed since its last one.

        The loop copies a megabyte at a time, and others have their turns between. One checkpoint
        at a time.

        Args:
            run: Runs what blocks, off the loop.

        Returns:
            Indexes written.

        Raises:
            StoreError: one could not be written; the one before it stands, and the others are.
        """
        written, faults = 0, []
        for shard in self._shards:
            table = shard.table
            if table is None or not shard.is_unsaved:
                continue
            changes, pieces = table.changes, []
            for piece in table.copy_in_steps():
                pieces.append(piece)
                await asyncio.sleep(0)
            try:
                await run(shard.save, self._incarnation, pieces)
            except OSError as error:
                faults.append(f"ssd path {shard.file.path}: index: {error.strerror}")
            else:
                table.saved_changes = changes
                written += 1
        if faults:
            raise StoreError("; ".join(faults))
        return written

    def close(self) -> None:
        """Close the files: removed, or left with an index of what is published. Idempotent.

        Raises:
            StoreError: a file could not be removed, or an index not be written; all files are
                closed all the same.
        """
        if self._closed:
            return
        self._closed = True
        faults = []
        for shard in self._shards:
            try:
                try:
                    if shard.table is not None:
                        os.fsync(shard.file.fd)
                        if shard.is_unsaved:
                            shard.save(self._incarnation, list(shard.table.copy_in_steps()))
                finally:
                    shard.file.close(remove=shard.table is None)
            except OSError as error:
                faults.append(f"ssd path {shard.file.path}: closing: {error.strerror}")
        if faults:
            raise StoreError("; ".join(faults))

    def _take_turn(self, shard: int) -> None:
        self._turn = shard % len(self._shards)
        self._run_nbytes = 0

    def _read_indexes(self, files: Sequence[ShardFile]) -> list[SavedIndex | None]:
        """Read what there is, and number this manager. What does not stand is a cold start."""
        indexes: list[SavedIndex | None] = []
        reasons = []
        for file in files:
            try:
                indexes.append(read_index(file.index_path, alone=file.is_new))
            except ValueError as error:
                reasons.append(f"index {file.index_path} does not stand: {error}")
                indexes.append(None)
        self._incarnation = 1 + max(index.incarnation if index else 0 for index in indexes)
        if self._incarnation > MAX_INCARNATION:
            reasons.append(f"{MAX_INCARNATION} managers have had the store")
            self._incarnation, indexes = 1, [None] * len(files)
        self.cold_reason = "; ".join(reasons) or None
        return indexes

    def _add_shard(
        self, file: ShardFile, index: SavedIndex | None, nbytes: int, *, persist: bool
    ) -> None:
        rows, cursor = np.empty(0, ROW), 0
        if persist and index:
            rows, cursor = index.rows, index.cursor if index.cursor <= nbytes else 0
        table = IndexTable() if persist else None
        self._shards.append(_Shard(file, _Ring(nbytes, cursor), table))
        self._recovered.append(in_ring_order(rows, capacity_nbytes=nbytes, cursor=cursor))

    def _begin_incarnation(
        self, indexes: Sequence[SavedIndex | None], undo: ExitStack, *, persist: bool
    ) -> None:
        """Write this manager's number to every shard before its first byte is.

        No generation then names two versions of an object in one file. Where no index tells which
        numbers a file has seen, its bytes go. So a store that is not to persist needs a number
        only for files that one was to; it drops their rows, which it makes untrue.
        """
        is_numbered = persist or any(indexes)
        if is_numbered:
            for shard, rows in zip(self._shards, self._recovered, strict=True):
                with told(shard.file.unfinished_path):
                    shard.prepare(self._incarnation, [rows])
        for shard, index in zip(self._shards, indexes, strict=True):
            if index is None and not shard.file.is_empty:
                shard.file.empty(shard.ring.capacity_nbytes)
        if not is_numbered:
            for shard in self._shards:
                with told(shard.file.index_path):
                    shard.file.forget_index()
            return
        self.first_generation = self._incarnation << COUNTER_BITS
        for shard, index in zip(self._shards, indexes, strict=True):
            undo.callback(shard.put_back, index)
            with told(shard.file.index_path):
                finish(shard.file.unfinished_path, shard.file.index_path)
