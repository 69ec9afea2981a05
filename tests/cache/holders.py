"""What holds extents in tests of the store alone, in the place of the catalogue's copies."""

from __future__ import annotations

import asyncio
import itertools
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from orbitkv.cache.extents import ExtentStore
from tests.builders import BLOCK, page_hash

_VERSIONS = itertools.count()


@dataclass(eq=False)
class Holder:
    digest: bytes
    generation: int
    shard: int
    offset: int
    nbytes: int
    pins: int = 0

    @property
    def block(self) -> int:
        return self.offset // BLOCK


def placed(store: ExtentStore[Holder], name: object, blocks: int = 1) -> Holder:
    """Reserve, evict, hold and publish, as the catalogue does."""
    room = store.reserve(blocks * BLOCK)
    assert room, "no room"
    for evicted in room.evicted:
        store.withdraw(evicted)
        store.free(evicted)
    generation = store.first_generation + next(_VERSIONS)
    holder = Holder(page_hash(name), generation, room.shard, room.offset, blocks * BLOCK)
    store.hold(holder)
    store.publish(holder)
    return holder


def recovered(store: ExtentStore[Holder]) -> list[Holder]:
    """Take in what an earlier store left."""
    holders = [
        Holder(row.digest, row.generation, row.shard, row.offset, row.nbytes)
        for row in store.recovered()
    ]
    for holder in holders:
        store.hold(holder)
        store.publish(holder)
    return holders


def checkpoint(store: ExtentStore[Any]) -> int:
    """Write what has changed, without threads."""

    async def run(call: Callable[..., object], *args: object) -> None:
        call(*args)

    return asyncio.run(store.checkpoint(run))


def kill(store: ExtentStore[Any]) -> None:
    """Let go of the files as the end of a process does: nothing is written, nothing removed."""
    for shard in store._shards:
        os.close(shard.file.fd)
        shard.file._lock_file.close()
    store._closed = True


def index_of(path: Path) -> Path:
    return path.with_name(f"{path.name}.index")


def lock_of(path: Path) -> Path:
    return path.with_name(f"{path.name}.lock")
