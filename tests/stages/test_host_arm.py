"""The host arm's stages on real managers: what they store, when it is seen, what they leave out."""

from __future__ import annotations

import os
import random
import zlib
from pathlib import Path

import numpy as np
import pytest

from orbitkv.cache.catalogue import Copy, Tier
from orbitkv.codecs import reason_to_stay_raw
from orbitkv.config import MIB
from orbitkv.objects import USER_FORMATS, Format, RawReason, Segment, read_header
from orbitkv.segment import StateKey
from orbitkv.stages.base import StageContext
from orbitkv.stages.batch import EncodedBatch, ValidatedBatch
from orbitkv.stages.ticket import Failed, Miss, Restored
from tests.builders import (
    BLOCK,
    PLANS,
    WAIT_S,
    Engine,
    Gate,
    Lanes,
    big_geometry,
    counters,
    definition,
    numbered,
    page_hash,
    regions,
    rest,
)
from tests.conftest import ManagerFactory

ZLIB = USER_FORMATS[7]
SEGMENT_NBYTES = 64 * 1024


def with_codec(tmp_path: Path) -> dict[str, str]:
    """Definitions with a place for a codec in C and in R; what it does, PLANS say."""
    encode = '{ use = "tests.builders:PlannedEncode", plan = "encode" }'
    decode = '{ use = "tests.builders:PlannedDecode", plan = "decode" }'
    save = definition(tmp_path, "save", ('"encode", "crc32"', f'"encode", {encode}, "crc32"'))
    restore = definition(
        tmp_path,
        "restore",
        ('["upload", "validate", "decode"]', f'["upload", "validate", {decode}, "decode"]'),
    )
    return {"save_pipeline": save, "restore_pipeline": restore}


async def compress(batch: EncodedBatch, ctx: StageContext) -> None:
    await ctx.lane.run(batch.recode, lambda s: (ZLIB, zlib.compress(s.payload, 1)))


async def decompress(batch: ValidatedBatch, ctx: StageContext) -> None:
    def undo(segment: Segment) -> tuple[int, bytes] | None:
        return (Format.RAW, zlib.decompress(segment.payload)) if segment.format == ZLIB else None

    await ctx.lane.run(batch.recode, undo)


def compressible(engine: Engine) -> None:
    for tensor in engine.tensors.values():
        tensor[:] = np.arange(tensor.size, dtype=np.uint16).reshape(tensor.shape) % 7


def memory(copy: Copy) -> np.ndarray:
    assert copy.memory is not None
    return copy.memory


def test_stored_object_says_what_was_saved(open_manager: ManagerFactory) -> None:
    engine = Engine.register(open_manager())
    engine.save(numbered(3))
    generations = set()
    for page, index in numbered(3).items():
        copy = engine.copy(page, Tier.DRAM)
        header = read_header(memory(copy))
        key = StateKey(engine.instance.namespace, page, "attention")
        assert header.key_digest == key.digest == copy.digest
        assert header.total_nbytes == copy.nbytes == BLOCK
        generations.add(header.generation)
        saved, start = engine.page(index), 0
        for row, nbytes in zip(header.rows, engine.geometry.segment_nbytes, strict=True):
            payload = memory(copy)[row.offset : row.offset + nbytes].tobytes()
            assert payload == saved[start : start + nbytes]
            assert row.crc32 == zlib.crc32(payload)
            assert (row.format, row.raw_reason) == (Format.RAW, RawReason.CHOSEN)
            start += nbytes
        for name, span in regions(engine.geometry, BLOCK).items():
            if name.startswith("padding"):
                assert not memory(copy)[span.start : span.stop].any(), f"{name} is not zero"
    assert len(generations) == 3


def test_padding_is_zero_in_memory_that_held_something_else(open_manager: ManagerFactory) -> None:
    engine = Engine.register(open_manager())
    engine.manager.core.catalogue.pool.memory[:] = 0xA5
    engine.save(numbered(1))
    copy = engine.copy(page_hash(0), Tier.DRAM)
    for name, span in regions(engine.geometry, BLOCK).items():
        if name.startswith("padding"):
            assert not memory(copy)[span.start : span.stop].any(), name


def test_dram_and_ssd_hold_the_same_bytes(open_manager: ManagerFactory, ssd_path: Path) -> None:
    manager = open_manager(ssd_cache_paths=ssd_path)
    engine = Engine.register(manager)
    engine.save(numbered(4))
    manager.flush()
    for page in numbered(4):
        dram, ssd = engine.copy(page, Tier.DRAM), engine.copy(page, Tier.SSD)
        assert (dram.generation, dram.nbytes) == (ssd.generation, ssd.nbytes)
        assert ssd.offset % BLOCK == 0
        with ssd_path.open("rb") as file:
            assert os.pread(file.fileno(), ssd.nbytes, ssd.offset) == memory(dram).tobytes()


def test_object_is_not_found_before_it_is_whole(open_manager: ManagerFactory) -> None:
    lanes, gate = Lanes(), Gate()
    manager = open_manager(lanes=lanes)
    engine = Engine.register(manager)

    def hold_completion() -> None:
        if lanes.seen["stream:save"][-1] == "_complete":
            gate.pass_through()

    lanes.before["stream:save"] = hold_completion
    ticket = manager.publish(engine.instance, numbered(1).items())
    gate.await_arrival()
    hits, ended_early = engine.hits([page_hash(0)]), ticket.done
    gate.open()
    ticket.result(WAIT_S)
    assert (hits, ended_early) == (0, False)
    assert engine.hits([page_hash(0)]) == 1


def test_ssd_copy_is_not_found_before_its_last_byte_is_written(
    open_manager: ManagerFactory, ssd_path: Path
) -> None:
    lanes, gate = Lanes(), Gate()
    lanes.before["ring:write"] = gate.pass_through
    manager = open_manager(lanes=lanes, ssd_cache_paths=ssd_path)
    engine = Engine.register(manager)
    engine.save(numbered(1))
    gate.await_arrival()
    dram = engine.copy(page_hash(0), Tier.DRAM)
    found = manager.core.catalogue.find(dram.digest, Tier.SSD)
    used_nbytes = manager.statistics().ssd_used_nbytes
    gate.open()
    assert manager.flush().unwritten == 0
    assert found is None
    assert used_nbytes == BLOCK, "its extent is taken while the write is under way"
    assert engine.copy(page_hash(0), Tier.SSD)


def test_copy_being_written_is_not_evicted(
    open_manager: ManagerFactory, ssd_path: Path, tmp_path: Path
) -> None:
    lanes, gate = Lanes(), Gate()
    lanes.before["ring:write"] = gate.pass_through
    one_at_once = definition(tmp_path, "save", ("depth = 8", "depth = 1"))
    manager = open_manager(
        lanes=lanes, ssd_cache_paths=ssd_path, pool_nbytes=3 * BLOCK, save_pipeline=one_at_once
    )
    engine = Engine.register(manager)
    wanted = engine.page(0)
    engine.save({page_hash(0): 0})
    gate.await_arrival()
    for index in range(1, 8):
        engine.save({page_hash(index): index})
    in_dram = manager.core.catalogue.find(engine.copy(page_hash(0), Tier.DRAM).digest, Tier.DRAM)
    gate.open()
    manager.flush(evict_dram=True)
    assert in_dram is not None
    engine.clear()
    assert engine.restored({page_hash(0): 0})
    assert engine.page(0) == wanted


@pytest.mark.parametrize(
    ("stored_nbytes", "original_nbytes", "worth"),
    [
        (3584, 4096, True),
        (3585, 4096, False),  # its footprint is 4,096
        (3072, 4096, True),
        (4096, 4096, False),
        (5000, 4096, False),
        (1, 512, False),  # a footprint cannot fall below 512 bytes
        (512, 1024, True),
        (512, 513, True),
        (0, 1, False),
    ],
)
def test_representation_is_kept_only_if_its_footprint_saves_an_eighth(
    stored_nbytes: int, original_nbytes: int, *, worth: bool
) -> None:
    if stored_nbytes == 0:
        stored_nbytes = 1
    assert (reason_to_stay_raw(stored_nbytes, original_nbytes) is None) is worth


def test_users_codec_makes_objects_smaller_and_they_come_back(
    open_manager: ManagerFactory, ssd_path: Path, tmp_path: Path
) -> None:
    PLANS.update(encode=compress, decode=decompress)
    manager = open_manager(ssd_cache_paths=ssd_path, **with_codec(tmp_path))
    engine = Engine.register(manager, geometry=big_geometry(SEGMENT_NBYTES))
    compressible(engine)
    wanted = [engine.page(index) for index in range(4)]
    engine.save(numbered(4))
    assert manager.statistics().pool_used_nbytes == 4 * BLOCK, "the rest was not given back"
    header = read_header(memory(engine.copy(page_hash(0), Tier.DRAM)))
    (row,) = header.rows
    assert (row.format, row.original_nbytes) == (ZLIB, SEGMENT_NBYTES)
    assert row.stored_nbytes < SEGMENT_NBYTES // 8
    for evict in (False, True):
        manager.flush(evict_dram=evict)
        engine.clear()
        assert len(engine.restored(numbered(4))) == 4
        assert [engine.page(index) for index in range(4)] == wanted


def test_segment_that_a_codec_does_not_help_is_stored_raw_with_the_reason(
    open_manager: ManagerFactory, tmp_path: Path
) -> None:
    PLANS.update(encode=compress, decode=decompress)
    engine = Engine.register(
        open_manager(**with_codec(tmp_path)), geometry=big_geometry(SEGMENT_NBYTES)
    )
    wanted = engine.page(0)
    engine.save(numbered(1))
    (row,) = read_header(memory(engine.copy(page_hash(0), Tier.DRAM))).rows
    assert (row.format, row.raw_reason) == (Format.RAW, RawReason.SAVES_TOO_LITTLE)
    engine.clear()
    assert engine.restored(numbered(1))
    assert engine.page(0) == wanted


def test_flipped_bit_in_encoded_bytes_never_reaches_the_decoder(
    open_manager: ManagerFactory, tmp_path: Path
) -> None:
    decoded: list[int] = []

    async def count(batch: ValidatedBatch, ctx: StageContext) -> None:
        decoded.append(len(batch.items))
        await decompress(batch, ctx)

    PLANS.update(encode=compress, decode=count)
    engine = Engine.register(
        open_manager(**with_codec(tmp_path)), geometry=big_geometry(SEGMENT_NBYTES)
    )
    compressible(engine)
    choose = random.Random(5)
    for _ in range(30):
        engine.save(numbered(2))
        copy = engine.copy(page_hash(1), Tier.DRAM)
        (row,) = read_header(memory(copy)).rows
        position = row.offset + choose.randrange(row.stored_nbytes)
        memory(copy)[position] ^= 1 << choose.randrange(8)
        decoded.clear()
        outcome = engine.restore(numbered(2))
        assert outcome == Restored((page_hash(0),), (page_hash(1),))
        assert decoded == [1]


@pytest.mark.parametrize("tier", list(Tier))
def test_format_that_this_pipeline_does_not_undo_is_a_counted_miss_that_a_new_save_replaces(
    open_manager: ManagerFactory, tmp_path: Path, ssd_path: Path, tier: Tier
) -> None:
    PLANS["encode"] = compress
    engine = Engine.register(
        open_manager(ssd_cache_paths=ssd_path, **with_codec(tmp_path)),
        geometry=big_geometry(SEGMENT_NBYTES),
    )
    compressible(engine)
    wanted = [engine.page(index) for index in range(2)]
    engine.save(numbered(2))
    engine.manager.flush(evict_dram=tier is Tier.SSD)
    del PLANS["encode"]
    engine.clear()
    assert engine.restore(numbered(1)) == Miss((page_hash(0),))
    assert engine.is_clear(0)
    assert counters(engine.manager)["undecodable"] == 1
    assert engine.hits([page_hash(0)]) == 0, "of no use here, in whatever tier"
    assert engine.hits([page_hash(1)]) == 1
    compressible(engine)
    assert engine.save(numbered(1)).stored == (page_hash(0),)
    engine.clear()
    assert engine.restored(numbered(1)) == (page_hash(0),)
    assert engine.page(0) == wanted[0]


def test_decoder_that_gives_another_length_places_nothing(
    open_manager: ManagerFactory, tmp_path: Path
) -> None:
    async def cut(batch: ValidatedBatch, ctx: StageContext) -> None:
        batch.recode(lambda segment: (Format.RAW, zlib.decompress(segment.payload)[:-1]))

    PLANS.update(encode=compress, decode=cut)
    engine = Engine.register(
        open_manager(**with_codec(tmp_path)), geometry=big_geometry(SEGMENT_NBYTES)
    )
    compressible(engine)
    engine.save(numbered(1))
    engine.clear()
    outcome = engine.restore(numbered(1))
    assert isinstance(outcome, Failed | Miss)
    assert engine.is_clear(0)
    assert rest(engine.manager) == []


def test_objects_of_many_lengths_share_the_pool_and_the_file(
    open_manager: ManagerFactory, ssd_path: Path
) -> None:
    """Several geometries in one small manager: eviction, fragments, and never wrong bytes."""
    manager = open_manager(
        pool_nbytes=40 * BLOCK,
        ssd_cache_paths=ssd_path,
        ssd_cache_capacity_nbytes=2 * MIB,
        pool_wait_s=20.0,
    )
    engines = [
        Engine.register(
            manager, geometry=big_geometry(blocks * BLOCK), seed=blocks, name=str(blocks)
        )
        for blocks in (1, 3, 7, 12)
    ]
    wanted = [[engine.page(index) for index in range(8)] for engine in engines]
    choose = random.Random(11)
    for engine in engines:
        engine.save(numbered(8))
        manager.flush()
    for _ in range(60):
        which = choose.randrange(len(engines))
        engine, index = engines[which], choose.randrange(8)
        engine.clear()
        if engine.restored({page_hash(index): index}):
            assert engine.page(index) == wanted[which][index]
        else:
            assert engine.is_clear(index)
    assert counters(manager)["evicted_dram"] > 0
    assert not {"corrupt_dram", "corrupt_ssd"} & counters(manager).keys()
