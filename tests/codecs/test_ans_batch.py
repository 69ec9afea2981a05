"""Batches of ANS: what they need of a GPU's memory, and which stored tables are sound."""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import Awaitable, Callable

import numpy as np
import pytest

from orbitkv.codecs.ans import AnsCodec
from orbitkv.codecs.base import GpuCodec, SegmentSpec
from orbitkv.codecs.cuda.ans_batch import AnsSlots, decoding_nbytes
from orbitkv.codecs.cuda.tasks import SLOT, TASK, are_runs, tasks_nbytes
from orbitkv.codecs.cuda.workspace import SharedRoom
from orbitkv.codecs.raw import RawCodec
from orbitkv.codecs.slots import bind_slots
from orbitkv.config import KIB, MIB
from orbitkv.errors import ImpossibleRequest
from orbitkv.objects import (
    ROW,
    Format,
    RawReason,
    Rows,
    align_up,
    object_nbytes,
    payload_offsets,
)
from orbitkv.runtime.cuda import Arena
from orbitkv.segment import Geometry, Role, Slot
from tests.codecs.emulation import Cupy, Zlib, aligned, needs_compiler
from tests.emulated import EmulatedMemory

LENGTHS = (2048, 4096, 6 * KIB, 64 * KIB, 200_000, 3 * MIB)


def slots_of(lengths: tuple[int, ...], dtype: str = "bfloat16") -> AnsSlots:
    codec = AnsCodec(Zlib())
    bound = [
        codec.bind(SegmentSpec(dtype=dtype, role=Role.K, tokens=1, heads=1, head_dim=nbytes // 2))
        for nbytes in lengths
    ]
    return codec.bind_together(bound, lengths)


@pytest.mark.parametrize("gathered", [False, True])
@pytest.mark.parametrize("seed", range(8))
def test_a_batch_takes_no_more_than_its_objects_were_said_to(seed: int, *, gathered: bool) -> None:
    slots = slots_of(LENGTHS)
    rng = np.random.default_rng(seed)
    objects = [
        tuple(rng.integers(0, len(LENGTHS), int(rng.integers(1, 60))).tolist())
        for _ in range(int(rng.integers(1, 6)))
    ]
    shape = slots.encode_shape(objects, gathered=gathered)
    said = sum(slots.encode_nbytes(one, gathered=gathered) for one in objects)
    assert shape.shared_nbytes <= said
    assert shape.output_nbytes == sum(object_nbytes([LENGTHS[s] for s in one]) for one in objects)
    count = sum(map(len, objects))
    for share in (0.0, 0.5, 1.0):
        plan = slots.decode_shape(objects, rng.random(count) < share).plan
        needed = align_up(plan.workspace_nbytes, 512) + tasks_nbytes(count)
        assert needed + plan.descriptors_nbytes <= sum(map(slots.decode_nbytes, objects))
        assert tasks_nbytes(count) + plan.descriptors_nbytes <= decoding_nbytes(count)


def test_a_plan_is_made_once_for_each_shape() -> None:
    slots = slots_of(LENGTHS)
    objects = [(1, 2, 3), (1, 2, 3)]
    shape = slots.encode_shape(objects, gathered=False)
    assert slots.encode_shape(list(objects), gathered=False) is shape
    assert slots.encode_shape(objects, gathered=True) is not shape
    raw = np.zeros(6, bool)
    back = slots.decode_shape(objects, raw)
    assert slots.decode_shape(objects, raw.copy()) is back
    raw[4] = True
    assert slots.decode_shape(objects, raw) is not back


def test_segments_of_4_gib_are_for_no_batch() -> None:
    slots = slots_of((2**32, 4096))
    assert slots.encode_nbytes((0, 1), gathered=False) > 2**60
    assert slots.encode_nbytes((1,), gathered=False) < MIB


def table(slots: AnsSlots, chosen: tuple[int, ...], stored: list[int]) -> Rows:
    rows = np.zeros(len(chosen), ROW)
    rows["original_nbytes"] = [LENGTHS[slot] for slot in chosen]
    rows["stored_nbytes"] = stored
    rows["format"] = np.where(rows["stored_nbytes"] == rows["original_nbytes"], 0, Format.ANS)
    rows["offset"] = payload_offsets(stored)
    return rows


OBJECTS = [(0, 2, 3), (2,), (3, 4, 1)]
STORED = [[2048, 5120, 64 * KIB], [6 * KIB], [30 * KIB, 160_000, 4096]]


def tables(slots: AnsSlots) -> tuple[Rows, list[int]]:
    rows = [table(slots, one, stored) for one, stored in zip(OBJECTS, STORED, strict=True)]
    return np.concatenate(rows), [object_nbytes(stored) for stored in STORED]


def test_tables_that_a_save_writes_are_sound() -> None:
    slots = slots_of(LENGTHS)
    assert slots.sound(OBJECTS, *tables(slots)).tolist() == [True, True, True]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("format", Format.RAW),
        ("format", Format.FP8_E4M3FN),
        ("format", 200),
        ("flags", 1),
        ("original_nbytes", 64 * KIB - 2),
        ("original_nbytes", 2**63),
        ("stored_nbytes", 0),
        ("stored_nbytes", 15),
        ("stored_nbytes", 30 * KIB + 512),
        ("stored_nbytes", 57 * KIB),
        ("stored_nbytes", 2**64 - 512),
        ("offset", 512),
        ("offset", 1024),
        ("offset", 2**64 - 512),
    ],
)
def test_a_table_that_no_save_writes_is_told_from_the_others(field: str, value: int) -> None:
    slots = slots_of(LENGTHS)
    rows, nbytes = tables(slots)
    rows[field][4 if field != "offset" else 5] = value  # of the third object
    assert slots.sound(OBJECTS, rows, nbytes).tolist() == [True, True, False]


def test_a_raw_segment_of_a_slot_that_is_never_coded_must_be_raw() -> None:
    slots = slots_of(LENGTHS)
    rows, nbytes = tables(slots)
    rows["format"][0] = Format.ANS
    assert slots.sound(OBJECTS, rows, nbytes).tolist() == [False, True, True]


def test_another_total_length_is_not_sound() -> None:
    slots = slots_of(LENGTHS)
    rows, nbytes = tables(slots)
    nbytes[1] += 4096
    assert slots.sound(OBJECTS, rows, nbytes).tolist() == [True, False, True]


def test_layouts_are_those_of_a_budget_that_holds_no_page() -> None:
    fields = {"role": Role.K, "dtype": "bfloat16", "heads": 2}
    geometry = Geometry(
        32,
        (
            Slot(name="a", layer=0, head_dim=64, **fields),  # type: ignore[arg-type]
            Slot(name="b", layer=1, head_dim=16, **fields),  # type: ignore[arg-type]
        ),
    )
    bound = bind_slots(AnsCodec(Zlib()), geometry, protect=False)
    assert isinstance(bound.together, AnsSlots)
    assert not bound.chosen_raw
    layout = bound.layouts["attention"]
    assert [place.codec for place in layout.places] == [None, None]
    reasons = [place.raw_reason for place in layout.places]
    assert reasons == [RawReason.NO_BUDGET, RawReason.UNSUPPORTED_LAYOUT]
    assert layout.nbytes == geometry.object_nbytes["attention"]
    assert bind_slots(RawCodec(), geometry, protect=False).together is None


def test_only_ans_needs_a_gpu() -> None:
    assert isinstance(AnsCodec(Zlib()), GpuCodec)
    assert not isinstance(RawCodec(), GpuCodec)


@pytest.mark.parametrize(
    ("changes", "runs"),
    [
        ({}, True),
        ({"base": 4096 + 8}, False),
        ({"page_stride": 8192 + 8}, False),
        ({"page_stride": -8192}, True),
        ({"inner_stride": 256}, False),
        ({"outer_stride": 2048}, False),
    ],
)
def test_runs_are_told_from_what_must_be_gathered(changes: dict[str, int], *, runs: bool) -> None:
    described = np.zeros(2, SLOT)
    described["base"], described["page_stride"] = 4096, 8192
    described["outer"], described["inner"], described["row_nbytes"] = 4, 8, 128
    described["inner_stride"], described["outer_stride"] = 128, 1024
    for name, value in changes.items():
        described[name][1] = value
    assert are_runs(described) is runs


@needs_compiler
def test_expected_crcs_are_preset_by_zeros_of_each_length(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    device = Cupy(tmp_path_factory.mktemp("kernels")).open(Zlib())
    lengths = [16, 512, 4112, 57_344, 65_536, 1_000_000, *range(16, 16 * 300, 16)]
    tasks = aligned(TASK.itemsize * len(lengths)).view(TASK)
    tasks["stored_nbytes"] = lengths
    crcs = np.arange(len(lengths), dtype=np.uint32)
    device.enqueue_expect(0, tasks=tasks.ctypes.data, crcs=crcs.ctypes.data, count=len(lengths))
    wanted = [index ^ zlib.crc32(bytes(nbytes)) for index, nbytes in enumerate(lengths)]
    assert crcs.tolist() == wanted


# Shared room -----------------------------------------------------------------------------------


def scenario(work: Callable[[Arena, SharedRoom], Awaitable[None]], limit_nbytes: int) -> None:
    async def run(call: Callable[..., object], *args: object) -> object:
        return call(*args)

    async def main() -> None:
        arena = Arena("arena of a test", limit_nbytes, EmulatedMemory(limit_nbytes), run)
        async with asyncio.timeout(20):
            await work(arena, SharedRoom(arena))
        assert arena.used_nbytes == 0
        await arena.close()

    asyncio.run(main())


def test_batches_share_what_the_first_has_leased_until_the_last_is_over() -> None:
    async def work(arena: Arena, room: SharedRoom) -> None:
        own, part = await room.acquire(MIB, 2 * MIB)
        assert arena.used_nbytes == 3 * MIB
        second, same = await room.acquire(MIB, MIB)
        assert same is part
        assert arena.used_nbytes == 4 * MIB
        assert len({own.address, second.address, part.address}) == 3
        own.release()
        part.release()
        assert arena.used_nbytes == 3 * MIB
        second.release()
        same.release()
        assert arena.used_nbytes == 0
        again, fresh = await room.acquire(MIB, MIB)
        assert fresh is not part
        assert arena.used_nbytes == 2 * MIB
        again.release()
        fresh.release()

    scenario(work, 8 * MIB)


def test_a_batch_that_needs_more_waits_for_all_of_its_own() -> None:
    async def work(arena: Arena, room: SharedRoom) -> None:
        own, part = await room.acquire(MIB, MIB)
        waiting = asyncio.create_task(room.acquire(MIB, 6 * MIB))
        await asyncio.sleep(0.01)
        behind = asyncio.create_task(room.acquire(MIB, MIB))
        await asyncio.sleep(0.01)
        assert not waiting.done()
        own.release()
        part.release()  # else nobody would ever go on: the arena is too small for both
        larger, other = await waiting
        last, shared = await behind
        assert shared is other
        for held in (larger, other, last, shared):
            held.release()

    scenario(work, 8 * MIB)


def test_what_waits_for_room_keeps_none_from_growing() -> None:
    async def work(arena: Arena, room: SharedRoom) -> None:
        own, part = await room.acquire(MIB, MIB)
        large = asyncio.create_task(arena.acquire(7 * MIB))
        await asyncio.sleep(0.01)
        behind = asyncio.create_task(room.acquire(MIB, MIB))
        await asyncio.sleep(0.01)
        own.release()
        part.release()
        (await large).release()
        for held in await behind:
            held.release()

    scenario(work, 8 * MIB)


def test_a_cancelled_wait_leaves_nothing() -> None:
    async def work(arena: Arena, room: SharedRoom) -> None:
        own, part = await room.acquire(MIB, 6 * MIB)
        waiting = [asyncio.create_task(room.acquire(2 * MIB, n * MIB)) for n in (1, 6)]
        await asyncio.sleep(0.01)
        for task in waiting:
            task.cancel()
        await asyncio.wait(waiting)
        own.release()
        part.release()

    scenario(work, 8 * MIB)


def test_more_than_the_arena_is_refused_at_once() -> None:
    async def work(arena: Arena, room: SharedRoom) -> None:
        with pytest.raises(ImpossibleRequest):
            await room.acquire(4 * MIB, 5 * MIB)

    scenario(work, 8 * MIB)


def test_a_range_is_cut_and_each_part_given_back_alone() -> None:
    async def work(arena: Arena, room: SharedRoom) -> None:
        lease = await arena.acquire(3 * MIB)
        rest = lease.split(MIB)
        assert rest.address == lease.address + MIB
        assert (lease.nbytes, rest.nbytes) == (MIB, 2 * MIB)
        rest.release()
        rest.release()
        assert arena.used_nbytes == MIB
        lease.release()

    scenario(work, 8 * MIB)
