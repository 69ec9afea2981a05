"""The index of a persistent store: what a killed manager had published, and nothing worse."""

from __future__ import annotations

import asyncio
import errno
import os
import struct
import zlib
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from orbitkv.cache.checkpoint import (
    BLOCK_ROWS,
    COUNTER_BITS,
    INDEX_MAGIC,
    MAX_INCARNATION,
    ROW,
    IndexTable,
    Rows,
    in_ring_order,
)
from orbitkv.cache.extents import ExtentStore
from orbitkv.errors import StoreError
from tests.builders import BLOCK, page_hash
from tests.cache.holders import Holder, checkpoint, index_of, kill, lock_of, placed, recovered

CAPACITY_NBYTES = 16 * BLOCK
HEADER_NBYTES = 64
ROW_NBYTES = 56


def opened(*paths: Path, capacity_nbytes: int = CAPACITY_NBYTES) -> ExtentStore[Holder]:
    return ExtentStore(paths, capacity_nbytes, persist=True)


def names(holders: list[Holder]) -> list[tuple[bytes, int, int, int, int]]:
    return [(h.digest, h.generation, h.shard, h.offset, h.nbytes) for h in holders]


def left(path: Path, *blocks: int) -> list[Holder]:
    """What a store leaves behind that has published extents of so many blocks."""
    store = opened(path)
    holders = [placed(store, (len(blocks), index), count) for index, count in enumerate(blocks)]
    store.close()
    return holders


@pytest.mark.parametrize("end", [ExtentStore.close, lambda store: (checkpoint(store), kill(store))])
def test_published_extents_come_back_after_a_close_and_after_a_kill(
    tmp_path: Path, end: Callable[[ExtentStore[Holder]], object]
) -> None:
    paths = [tmp_path / name for name in "abc"]
    store = opened(*paths, capacity_nbytes=30 * BLOCK)
    holders = [placed(store, name, 3) for name in range(6)]
    withdrawn = holders.pop(1)
    store.withdraw(withdrawn)
    reserved = store.reserve(BLOCK)
    assert reserved, "an extent that is still being written is not published"
    end(store)
    again = opened(*paths, capacity_nbytes=30 * BLOCK)
    assert again.cold_reason is None
    found = recovered(again)
    assert sorted(names(found)) == sorted(names(holders))
    assert list(again.recovered()) == [], "once"
    assert again.used_nbytes == sum(holder.nbytes for holder in holders)
    again.close()


def test_placement_goes_on_where_it_was(ssd_path: Path) -> None:
    store = opened(ssd_path, capacity_nbytes=6 * BLOCK)
    for name in range(5):
        placed(store, name, 2)
    store.close()
    again = opened(ssd_path, capacity_nbytes=6 * BLOCK)
    assert [holder.block for holder in recovered(again)] == [4, 0, 2], "the oldest first"
    assert placed(again, "next", 2).block == 4
    again.close()


def test_index_is_not_written_again_where_nothing_has_changed(ssd_path: Path) -> None:
    store = opened(ssd_path)
    assert checkpoint(store) == 0
    holder = placed(store, "a")
    assert checkpoint(store) == 1
    assert checkpoint(store) == 0
    store.withdraw(holder)
    assert checkpoint(store) == 1
    kill(store)
    again = opened(ssd_path)
    assert recovered(again) == []
    again.close()


def test_generations_of_two_managers_never_meet(ssd_path: Path) -> None:
    """Also of those that were killed before their first checkpoint."""
    seen = []
    for _ in range(4):
        store = opened(ssd_path)
        seen.append(store.first_generation)
        kill(store)
    assert seen == [number << COUNTER_BITS for number in (1, 2, 3, 4)]


@pytest.mark.parametrize("is_killed", [False, True])
def test_generations_differ_from_those_of_a_manager_that_was_not_to_persist(
    ssd_path: Path, *, is_killed: bool
) -> None:
    """It drops the rows, which it makes untrue, and keeps the number while the file is there."""
    for _ in range(2):
        left(ssd_path, 1)
    store = ExtentStore[Holder]([ssd_path], CAPACITY_NBYTES, persist=False)
    assert store.first_generation == 3 << COUNTER_BITS
    assert recovered(store) == []
    placed(store, "a")
    if is_killed:
        kill(store)
    else:
        store.close()
        assert list(ssd_path.parent.iterdir()) == []
    again = opened(ssd_path)
    assert recovered(again) == []
    assert again.first_generation == (4 if is_killed else 1) << COUNTER_BITS
    again.close()


def filled(path: Path) -> None:
    """Something in every block, as earlier managers wrote it."""
    with path.open("r+b") as file:
        file.write(b"\xab" * CAPACITY_NBYTES)


@pytest.mark.parametrize("persist", [False, True])
@pytest.mark.parametrize(
    "damage",
    [
        lambda path: index_of(path).write_bytes(INDEX_MAGIC),
        lambda path: index_of(path).write_bytes(
            rewritten(index_of(path).read_bytes(), incarnation=MAX_INCARNATION)
        ),
        lambda path: (index_of(path).unlink(), lock_of(path).write_text("999999\n")),
    ],
    ids=["damaged", "of the last number", "gone"],
)
def test_bytes_of_which_no_index_tells_the_generations_are_gone_before_these_come_again(
    ssd_path: Path, damage: Callable[[Path], object], *, persist: bool
) -> None:
    left(ssd_path, 1)
    filled(ssd_path)
    damage(ssd_path)
    store = ExtentStore[Holder]([ssd_path], CAPACITY_NBYTES, persist=persist)
    assert ssd_path.read_bytes() == bytes(CAPACITY_NBYTES)
    assert ssd_path.stat().st_blocks * 512 >= CAPACITY_NBYTES
    store.close()


@pytest.mark.parametrize("persist", [False, True])
def test_bytes_of_which_an_index_tells_the_generations_stay(
    ssd_path: Path, *, persist: bool
) -> None:
    left(ssd_path, 1)
    filled(ssd_path)
    store = ExtentStore[Holder]([ssd_path], CAPACITY_NBYTES, persist=persist)
    assert ssd_path.read_bytes() == b"\xab" * CAPACITY_NBYTES
    store.close()


def test_number_of_a_manager_is_on_the_device_before_the_store_is_open(ssd_path: Path) -> None:
    store = opened(ssd_path)
    (incarnation,) = struct.unpack_from("<Q", index_of(ssd_path).read_bytes(), 16)
    assert incarnation << COUNTER_BITS == store.first_generation
    store.close()


def test_number_of_a_manager_is_above_those_of_all_its_shards(tmp_path: Path) -> None:
    a, b = tmp_path / "a", tmp_path / "b"
    for _ in range(5):
        opened(a).close()
    opened(b).close()
    for paths in ((a, b), (b,), (b, a)):
        store = opened(*paths)
        number = store.first_generation >> COUNTER_BITS
        store.close()
    assert number == 8


def test_store_of_too_many_managers_starts_anew(ssd_path: Path) -> None:
    left(ssd_path, 1)
    image = rewritten(index_of(ssd_path).read_bytes(), incarnation=MAX_INCARNATION)
    index_of(ssd_path).write_bytes(image)
    store = opened(ssd_path)
    assert recovered(store) == []
    assert store.first_generation == 1 << COUNTER_BITS
    assert f"{MAX_INCARNATION} managers" in str(store.cold_reason)
    store.close()


def test_lost_shard_costs_its_own_objects(tmp_path: Path) -> None:
    paths = [tmp_path / name for name in "abc"]
    for damage in (paths[1].unlink, lambda: index_of(paths[1]).write_bytes(INDEX_MAGIC + b"x")):
        store = opened(*paths, capacity_nbytes=6 * BLOCK)
        recovered(store)
        holders = [placed(store, name) for name in range(6)]
        store.close()
        damage()
        again = opened(*paths, capacity_nbytes=6 * BLOCK)
        assert again.cold_reason
        assert str(index_of(paths[1])) in again.cold_reason
        found = recovered(again)
        assert names(found) == names([h for h in holders if h.shard != 1])
        again.close()


def test_shards_may_be_named_in_another_order(tmp_path: Path) -> None:
    a, b = tmp_path / "a", tmp_path / "b"
    store = opened(a, b, capacity_nbytes=4 * BLOCK)
    holders = [placed(store, name) for name in range(4)]
    store.close()
    again = opened(b, a, capacity_nbytes=4 * BLOCK)
    found = {holder.digest: holder.shard for holder in recovered(again)}
    assert found == {holder.digest: 1 - holder.shard for holder in holders}
    again.close()


def test_smaller_capacity_keeps_what_still_fits(ssd_path: Path) -> None:
    near, _, _ = left(ssd_path, 2, 3, 4)
    store = opened(ssd_path, capacity_nbytes=4 * BLOCK)
    assert names(recovered(store)) == names([near])
    assert store.reserve(BLOCK)
    store.close()


def test_checkpoint_that_fails_leaves_the_one_before_and_is_tried_again(tmp_path: Path) -> None:
    paths = [tmp_path / "a", tmp_path / "b"]
    store = opened(*paths, capacity_nbytes=4 * BLOCK)
    first = placed(store, 0)
    checkpoint(store)
    for name in range(1, 4):
        placed(store, name)
    unfinished = paths[0].with_name("a.unfinished")
    unfinished.mkdir()
    with pytest.raises(StoreError, match=f"{paths[0]}: index: Is a directory"):
        checkpoint(store)
    unfinished.rmdir()
    assert index_of(paths[0]).read_bytes()[HEADER_NBYTES:][:32] == first.digest
    assert len(index_of(paths[1]).read_bytes()) == HEADER_NBYTES + 2 * ROW_NBYTES
    assert checkpoint(store) == 1
    kill(store)
    again = opened(*paths, capacity_nbytes=4 * BLOCK)
    assert len(recovered(again)) == 4
    again.close()


def rewritten(image: bytes, *, crc: bool = True, **changes: object) -> bytes:
    """An index with other fields, and the CRC of what it then is."""
    fields = [
        "magic",
        "version",
        "header_nbytes",
        "row_nbytes",
        "incarnation",
        "capacity",
        "cursor",
    ]
    head = list(struct.unpack_from("<8sHHIQQQQ12s", image))
    rows = bytearray(image[HEADER_NBYTES:])
    for name, value in changes.items():
        if name in fields:
            head[fields.index(name)] = value
        else:
            struct.pack_into(
                "<Q", rows, {"generation": 32, "offset": 40, "nbytes": 48}[name], value
            )
    packed = struct.pack("<8sHHIQQQQ12s", *head)
    seal = zlib.crc32(rows, zlib.crc32(packed)) if crc else 0
    return packed + struct.pack("<I", seal) + bytes(rows)


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        pytest.param(lambda image: image[:8], "8 bytes; accepted: 64 or more", id="its magic"),
        pytest.param(lambda image: image[:63], "63 bytes", id="cut in its head"),
        pytest.param(lambda image: image[:-9], "bytes; accepted", id="cut in its rows"),
        pytest.param(lambda image: image[:-ROW_NBYTES], "bytes; accepted", id="a row less"),
        pytest.param(lambda image: image + b"\0", "bytes; accepted", id="a byte more"),
        pytest.param(
            lambda i: rewritten(i, version=2), "version 2.*accepted: version 1", id="future"
        ),
        pytest.param(lambda i: rewritten(i, row_nbytes=64), "rows of 64 bytes", id="other rows"),
        pytest.param(lambda i: rewritten(i, crc=False), "crc32", id="another CRC"),
        pytest.param(lambda i: rewritten(i, offset=BLOCK + 1), "row 0", id="unaligned offset"),
        pytest.param(lambda i: rewritten(i, nbytes=BLOCK + 1), "row 0", id="unaligned length"),
        pytest.param(lambda i: rewritten(i, nbytes=0), "row 0", id="no bytes"),
        pytest.param(
            lambda i: rewritten(i, offset=2**64 - BLOCK), "row 0", id="an offset past all"
        ),
        pytest.param(lambda i: rewritten(i, nbytes=2**64 - BLOCK), "row 0", id="a length past all"),
        pytest.param(lambda i: rewritten(i, offset=CAPACITY_NBYTES), "row 0", id="past the end"),
        pytest.param(
            lambda i: rewritten(i, generation=2**64 - 1), "row 0", id="a generation to come"
        ),
        pytest.param(lambda i: rewritten(i, cursor=2**60), "cursor", id="a cursor past the end"),
        pytest.param(lambda i: rewritten(i, incarnation=2**60), "incarnation", id="no such number"),
    ],
)
def test_index_that_does_not_stand_is_a_cold_start_with_a_reason(
    ssd_path: Path, damage: Callable[[bytes], bytes], reason: str
) -> None:
    left(ssd_path, 2, 1)
    index_of(ssd_path).write_bytes(damage(index_of(ssd_path).read_bytes()))
    store = opened(ssd_path)
    assert recovered(store) == []
    assert store.used_nbytes == 0
    with pytest.raises(AssertionError, match=f"{index_of(ssd_path)} does not stand: .*{reason}"):
        raise AssertionError(store.cold_reason)
    placed(store, "a", 16)
    store.close()


@pytest.mark.parametrize(
    "damage",
    [
        pytest.param(lambda image: b"", id="empty"),
        pytest.param(lambda image: b'{"format": 1}' * 50, id="somebody else's"),
        pytest.param(lambda image: bytes(len(image)), id="zeros"),
        pytest.param(lambda image: b"\xff" + image, id="shifted"),
    ],
)
def test_index_that_does_not_begin_as_ours_is_refused_and_left_alone(
    ssd_path: Path, damage: Callable[[bytes], bytes]
) -> None:
    """It may be somebody's, and so may then the file beside it."""
    left(ssd_path, 2, 1)
    image = damage(index_of(ssd_path).read_bytes())
    index_of(ssd_path).write_bytes(image)
    with pytest.raises(StoreError, match=rf"{index_of(ssd_path)} \(it begins with .*{ssd_path} \("):
        opened(ssd_path)
    assert index_of(ssd_path).read_bytes() == image


@given(position=st.integers(0, HEADER_NBYTES + 2 * ROW_NBYTES - 1), bit=st.integers(0, 7))
def test_no_single_flipped_bit_of_an_index_passes(
    tmp_path_factory: pytest.TempPathFactory, position: int, bit: int
) -> None:
    ssd_path = tmp_path_factory.mktemp("flip") / "kv"
    left(ssd_path, 2, 1)
    image = bytearray(index_of(ssd_path).read_bytes())
    image[position] ^= 1 << bit
    index_of(ssd_path).write_bytes(image)
    if position < len(INDEX_MAGIC):
        with pytest.raises(StoreError, match="not a store of ours"):
            opened(ssd_path)
        return
    store = opened(ssd_path)
    assert store.cold_reason
    assert recovered(store) == []
    store.close()


def test_index_that_cannot_be_read_is_named_and_leaves_the_path_unlocked(ssd_path: Path) -> None:
    """Whatever keeps a store from opening, the next attempt must not find it in use."""
    left(ssd_path, 1)
    index_of(ssd_path).unlink()
    index_of(ssd_path).mkdir()
    named = (
        rf"{index_of(ssd_path)} \(a directory\), {ssd_path} \(.*\), not a store of ours; accepted"
    )
    with pytest.raises(StoreError, match=named):
        opened(ssd_path)
    assert not lock_of(ssd_path).exists()
    index_of(ssd_path).rmdir()
    ssd_path.unlink()  # without its index it is nothing that a store would take for its own
    opened(ssd_path).close()


def test_index_that_the_disk_does_not_give_is_named_with_what_helps(
    ssd_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    left(ssd_path, 1)
    real = os.fdopen

    def fail(fd: int, mode: str, **options: int) -> object:
        if mode == "rb":
            os.close(fd)
            raise OSError(errno.EIO, "Input/output error")
        return real(fd, mode, **options)

    monkeypatch.setattr(os, "fdopen", fail)
    helps = f"accepted: one that can be read, or neither it nor {ssd_path}$"
    with pytest.raises(StoreError, match=f"{index_of(ssd_path)}: Input/output error; {helps}"):
        opened(ssd_path)
    monkeypatch.undo()
    store = opened(ssd_path)
    assert len(recovered(store)) == 1
    store.close()


def test_index_does_not_outlive_a_store_that_was_not_to_persist(ssd_path: Path) -> None:
    left(ssd_path, 1)
    ExtentStore([ssd_path], CAPACITY_NBYTES, persist=False).close()
    store = opened(ssd_path)
    assert recovered(store) == []
    assert store.cold_reason is None
    store.close()


def rows_of(*extents: tuple[int, int, int]) -> Rows:
    """Rows of (generation, first block, blocks)."""
    return np.array(
        [(bytes(32), g, first * BLOCK, blocks * BLOCK) for g, first, blocks in extents], ROW
    )


extents = st.lists(st.tuples(st.integers(1, 9), st.integers(0, 12), st.integers(1, 5)), max_size=8)


@given(extents=extents, cursor=st.integers(0, 12))
def test_rows_of_a_copy_made_in_steps_come_apart(
    extents: list[tuple[int, int, int]], cursor: int
) -> None:
    """Two that overlap cannot both stand; nor can what lies over the cursor."""
    rows = in_ring_order(rows_of(*extents), capacity_nbytes=12 * BLOCK, cursor=cursor * BLOCK)
    kept = [(g, o // BLOCK, n // BLOCK) for _, g, o, n in rows.tolist()]
    blocks = [block for _, first, count in kept for block in range(first, first + count)]
    assert len(blocks) == len(set(blocks))
    assert all(not first < cursor < first + count <= 12 for _, first, count in kept)
    turns = [(first - cursor) % 12 for _, first, _ in kept]
    assert turns == sorted(turns)
    for extent in extents:
        _, first, count = extent
        if extent not in kept and first + count <= 12 and not first < cursor < first + count:
            assert (
                any(
                    other != extent
                    and g >= extent[0]
                    and start < first + count
                    and first < start + n
                    for other in extents
                    for g, start, n in [other]
                )
                or extents.count(extent) > 1
            )


def test_newer_of_two_extents_that_overlap_is_kept() -> None:
    rows = in_ring_order(
        rows_of((1, 0, 4), (3, 2, 2), (2, 4, 2)), capacity_nbytes=99 * BLOCK, cursor=0
    )
    assert rows["generation"].tolist() == [3, 2]


def test_copy_is_made_in_steps_of_a_megabyte_while_rows_change() -> None:
    table = IndexTable()
    for index in range(3 * BLOCK_ROWS):
        table.put(page_hash("any"), index, index * BLOCK, BLOCK)
    steps = table.copy_in_steps()
    first = next(steps)
    assert first.nbytes <= 2**20
    table.drop(0)
    table.drop(2 * BLOCK_ROWS * BLOCK)
    table.put(page_hash("late"), 7, 0, BLOCK)
    rest = np.concatenate(list(steps))
    assert first["nbytes"].all(), "a copy, which does not change any more"
    assert len(first) + len(rest) == 3 * BLOCK_ROWS
    assert (rest["nbytes"] == 0).sum() <= 1
    assert table.changes == 3 * BLOCK_ROWS + 3


def test_others_have_their_turn_while_a_checkpoint_is_copied(ssd_path: Path) -> None:
    async def scenario() -> None:
        store = opened(ssd_path, capacity_nbytes=3 * BLOCK_ROWS * BLOCK)
        for name in range(3 * BLOCK_ROWS):
            placed(store, name)
        turns = 0

        async def run(call: Callable[..., object], *args: object) -> None:
            assert turns >= 3
            placed(store, "published during the write")
            call(*args)

        async def others() -> None:
            nonlocal turns
            while True:
                turns += 1
                await asyncio.sleep(0)

        counting = asyncio.create_task(others())
        assert await store.checkpoint(run) == 1
        counting.cancel()
        assert await store.checkpoint(run) == 1, "what came after the copy is still unsaved"
        store.close()

    asyncio.run(scenario())
