"""Definitions that differ from the packaged ones run, and bring every byte back."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from orbitkv.cache.catalogue import Tier
from orbitkv.config import MIB, Config
from orbitkv.errors import ConfigError, GraphError, Unavailable
from orbitkv.graph import Graph
from orbitkv.objects import (
    USER_FORMATS,
    Format,
    RawReason,
    Segment,
    crc32,
    read_header,
    read_segments,
    write_object,
)
from orbitkv.pipeline import load_pipeline
from orbitkv.runtime.instance import Instance
from orbitkv.runtime.manager import Manager
from orbitkv.segment import HND, Geometry, ModelIdentity, Role, Slot
from orbitkv.stages.ticket import Failed, Miss, Outcome, Restored, Saved

EXAMPLES = Path(__file__).parents[2] / "pipelines" / "examples"
DEFINITIONS = sorted(path.stem for path in EXAMPLES.glob("*.toml"))
PAGES = 8
GEOMETRY = Geometry(
    16,
    tuple(
        Slot(
            name=f"{layer}.{role}",
            layer=layer,
            role=role,
            dtype="float16",
            heads=2,
            head_dim=64,
            axes=HND,
        )
        for layer in range(2)
        for role in (Role.K, Role.V)
    ),
)
SHAPE = GEOMETRY.shape(GEOMETRY.slots[0], PAGES)
Tensors = dict[str, np.ndarray[Any, Any]]


def definition(name: str) -> str:
    return str(EXAMPLES / f"{name}.toml")


def load(name: str) -> Graph:
    return load_pipeline(definition(name)).graph


@pytest.fixture(autouse=True)
def examples_on_path(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.syspath_prepend(str(EXAMPLES))
    yield
    sys.modules.pop("zstd_stage", None)


def compressible() -> Tensors:
    """Pages of few distinct values, another in each page and slot."""
    steps = np.arange(np.prod(SHAPE), dtype=np.int64).reshape(SHAPE)
    return {
        slot.name: (steps // 64 % 11 + index).astype(np.float16)
        for index, slot in enumerate(GEOMETRY.slots)
    }


def random_pages() -> Tensors:
    bits = np.random.default_rng(1).integers(0, 2**16, (len(GEOMETRY.slots), *SHAPE), np.uint16)
    return {slot.name: bits[i].view(np.float16) for i, slot in enumerate(GEOMETRY.slots)}


def zeros() -> Tensors:
    return {slot.name: np.zeros(SHAPE, np.float16) for slot in GEOMETRY.slots}


def words(tensors: Tensors, pages: Sequence[int]) -> list[bytes]:
    return [tensors[slot.name][page].tobytes() for slot in GEOMETRY.slots for page in pages]


def hashes(instance: Instance) -> list[bytes]:
    return instance.hash_pages(list(range(PAGES * GEOMETRY.page_tokens)))


def register(manager: Manager, tensors: Tensors) -> Instance:
    return manager.register(GEOMETRY, tensors, model=ModelIdentity("toy"))


def publish(manager: Manager, instance: Instance) -> Outcome:
    pages = [(page_hash, page) for page, page_hash in enumerate(hashes(instance))]
    return manager.publish(instance, pages).result(30)


def restore(manager: Manager, instance: Instance) -> tuple[Outcome, dict[Tier, int]]:
    lease = manager.query(instance, hashes(instance))
    target = {page_hash: page for page, page_hash in enumerate(lease.hashes)}
    return manager.restore(lease, target).result(30), lease.tiers()


def config(save: str, restore: str, **settings: Any) -> Config:  # noqa: ANN401 - as Config's own
    settings = {"pool_nbytes": 4 * MIB, "ssd_cache_capacity_nbytes": 4 * MIB, **settings}
    return Config(save_pipeline=save, restore_pipeline=restore, lock_memory=False, **settings)


def check_rest(manager: Manager) -> None:
    """Once what was queued for SSD is there, nobody holds anything."""
    manager.flush()
    assert manager.leaks() == []


def check_round_trip(manager: Manager, source: Tensors, *, tier: Tier = Tier.DRAM) -> None:
    """What was published from one engine's pages stands in another's, byte for byte."""
    giver, target = register(manager, source), zeros()
    saved = publish(manager, giver)
    assert isinstance(saved, Saved)
    assert len(saved.stored) == PAGES
    if tier is Tier.SSD:
        assert manager.flush(evict_dram=True).unwritten == 0
    taker = register(manager, target)
    outcome, tiers = restore(manager, taker)
    assert outcome == Restored(tuple(hashes(taker)), ())
    assert tiers[tier] == PAGES
    assert words(target, range(PAGES)) == words(source, range(PAGES))
    check_rest(manager)


@pytest.mark.parametrize("name", DEFINITIONS)
def test_every_example_is_a_definition_without_faults(name: str) -> None:
    assert load(name).name == name.replace(".", "-")


# DRAM only ---------------------------------------------------------------------------------


def test_dram_only_brings_every_byte_back() -> None:
    save, fetch = definition("dram-only.save"), definition("dram-only.restore")
    with Manager(config(save, fetch)) as manager:
        assert not any(manager.statistics().unavailable.values())
        check_round_trip(manager, random_pages())
        statistics = manager.statistics()
        assert set(statistics.nodes["save"]) == {"E", "C", "D"}
        assert set(statistics.nodes["restore"]) == {"D", "R", "E"}


def test_dram_only_draws_five_arrows_less_than_half_the_flowchart() -> None:
    chart = load("dram-only.save").chart | load("dram-only.restore").chart
    assert chart.arrows == (("E", "C"), ("C", "D"), ("D", "R"), ("R", "E"))


def test_dram_only_never_writes_an_ssd_that_is_configured(tmp_path: Path) -> None:
    save, fetch = definition("dram-only.save"), definition("dram-only.restore")
    with Manager(config(save, fetch, ssd_cache_paths=tmp_path / "ssd")) as manager:
        check_round_trip(manager, random_pages())
        manager.flush()
        assert manager.statistics().ssd_used_nbytes == 0
        check_rest(manager)


# zstd: stages of a user's own ----------------------------------------------------------------

ZSTD = (definition("zstd.save"), definition("zstd.restore"))


@pytest.mark.parametrize("tier", list(Tier))
@pytest.mark.parametrize("pages", [compressible, random_pages])
def test_zstd_brings_every_byte_back_from_every_tier(
    pages: Any,  # noqa: ANN401 - a function
    tier: Tier,
    tmp_path: Path,
) -> None:
    with Manager(config(*ZSTD, ssd_cache_paths=tmp_path / "ssd")) as manager:
        check_round_trip(manager, pages(), tier=tier)


def pool_used_nbytes(save: str, fetch: str, source: Tensors) -> int:
    with Manager(config(save, fetch)) as manager:
        check_round_trip(manager, source)
        return manager.statistics().pool_used_nbytes


def test_zstd_stores_fewer_bytes() -> None:
    plain = pool_used_nbytes("save", "restore", compressible())
    packed = pool_used_nbytes(*ZSTD, compressible())
    assert plain == PAGES * 5 * 4096
    assert packed == PAGES * 4096


def test_pages_that_do_not_compress_are_stored_raw_and_say_why() -> None:
    with Manager(config(*ZSTD)) as manager:
        check_round_trip(manager, random_pages())
        assert {(s.format, s.raw_reason) for s in stored_segments(manager)} == {
            (Format.RAW, RawReason.SAVES_TOO_LITTLE)
        }
        assert manager.statistics().pool_used_nbytes == PAGES * 5 * 4096
        check_rest(manager)


def test_compressed_segments_carry_the_users_format() -> None:
    with Manager(config(*ZSTD)) as manager:
        check_round_trip(manager, compressible())
        assert {s.format for s in stored_segments(manager)} == {USER_FORMATS[0]}
        check_rest(manager)


def test_pages_that_are_not_one_run_of_memory_are_compressed_too() -> None:
    with Manager(config(*ZSTD)) as manager:
        check_round_trip(manager, padded())
        assert {s.format for s in stored_segments(manager)} == {USER_FORMATS[0]}
        check_rest(manager)


def stored_segments(manager: Manager) -> list[Segment]:
    found = []
    for copy in manager.core.catalogue.copies(Tier.DRAM):
        assert copy.memory is not None
        found += read_segments(copy.memory, read_header(copy.memory, key_digest=copy.digest))
    return found


@pytest.mark.parametrize("tier", list(Tier))
def test_what_zstd_stored_is_a_miss_under_the_default_restore(tier: Tier, tmp_path: Path) -> None:
    target = zeros()
    with Manager(config(ZSTD[0], "restore", ssd_cache_paths=tmp_path / "ssd")) as manager:
        giver = register(manager, compressible())
        assert isinstance(publish(manager, giver), Saved)
        if tier is Tier.SSD:
            manager.flush(evict_dram=True)
        taker = register(manager, target)
        outcome, tiers = restore(manager, taker)
        assert tiers[tier] == PAGES
        assert outcome == Miss(tuple(hashes(taker)))
        assert not any(map(any, words(target, range(PAGES))))
        assert manager.statistics().counters["undecodable"] == PAGES
        check_rest(manager)


@pytest.mark.parametrize(
    "ssd",
    [
        False,
        True,
    ],
    ids=["dram", "ssd"],
)
def test_what_cannot_be_undone_here_makes_room_for_a_new_save(ssd: bool, tmp_path: Path) -> None:  # noqa: FBT001
    path = tmp_path / "ssd" if ssd else None
    with Manager(config(ZSTD[0], "restore", ssd_cache_paths=path)) as manager:
        giver = register(manager, compressible())
        assert isinstance(publish(manager, giver), Saved)
        manager.flush()
        assert isinstance(restore(manager, register(manager, zeros()))[0], Miss)
        again = publish(manager, giver)
        assert isinstance(again, Saved)
        assert len(again.stored) == PAGES
        check_rest(manager)


def test_what_the_default_saved_comes_back_through_zstd() -> None:
    with Manager(config("save", ZSTD[1])) as manager:
        check_round_trip(manager, compressible())


def reforge(manager: Manager, index: int, payload: bytes, original_nbytes: int) -> None:
    """Store another payload as the object's first segment, under CRCs that are right."""
    copy = manager.core.catalogue.copies(Tier.DRAM)[index]
    assert copy.memory is not None
    segments = read_segments(copy.memory, read_header(copy.memory))
    segments = [
        Segment(s.format, s.payload.copy(), s.original_nbytes, 0, s.crc32) for s in segments
    ]
    first = segments[0]
    first.payload = np.frombuffer(payload, np.uint8)
    first.original_nbytes, first.crc32 = original_nbytes, crc32(payload)
    write_object(copy.memory, segments, key_digest=copy.digest, generation=copy.generation)


@pytest.mark.parametrize("kind", ["no frame", "another length", "no length", "damaged"])
def test_a_stored_segment_that_zstd_cannot_undo_is_a_miss_of_that_page_alone(kind: str) -> None:
    import zstandard  # noqa: PLC0415 - the example's dependency, not the suite's

    compress = zstandard.ZstdCompressor().compress
    frame = compress(bytes(4096))
    no_length = zstandard.ZstdCompressor(write_content_size=False).compress(bytes(4096))
    payload = {
        "no frame": b"not a frame",
        "another length": compress(bytes(4095)),
        "no length": no_length,
        "damaged": frame[:-3] + b"\xff\xff\xff",
    }[kind]
    source, target = compressible(), zeros()
    with Manager(config(*ZSTD)) as manager:
        assert isinstance(publish(manager, register(manager, source)), Saved)
        reforge(manager, 3, payload, 4096)
        taker = register(manager, target)
        outcome, _ = restore(manager, taker)
        assert isinstance(outcome, Restored)
        assert len(outcome.missed) == 1
        missed = hashes(taker).index(outcome.missed[0])
        others = [page for page in range(PAGES) if page != missed]
        assert words(target, others) == words(source, others)
        assert not any(map(any, words(target, [missed])))
        check_rest(manager)


def test_options_of_the_example_reach_its_constructor(tmp_path: Path) -> None:
    text = Path(ZSTD[0]).read_text().replace("level = 3", "levle = 3")
    (tmp_path / "typo.toml").write_text(text)
    with pytest.raises(GraphError, match="options of stage 'zstd_stage:Compress'"):
        load_pipeline(tmp_path / "typo.toml")


def test_an_option_that_a_stage_refuses_is_a_fault_of_the_definition(tmp_path: Path) -> None:
    path = tmp_path / "level.toml"
    path.write_text(Path(ZSTD[0]).read_text().replace("level = 3", "level = 99"))
    with pytest.raises(GraphError, match="level"), Manager(config(str(path), "restore")):
        pass


def test_without_its_directory_on_the_path_the_example_says_what_is_missing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sys, "path", [p for p in sys.path if p != str(EXAMPLES)])
    with pytest.raises(GraphError, match="cannot be imported: ModuleNotFoundError"):
        load("zstd.save")


# Durable: other policies, and an arm that is required ----------------------------------------


def test_a_required_arm_that_cannot_run_refuses_to_start() -> None:
    with (
        pytest.raises(Unavailable, match="pipeline 'durable-save' cannot start: node U: no SSD"),
        Manager(config(definition("durable.save"), "restore")),
    ):
        pass


def test_durable_writes_every_page_through_a_queue_of_two(tmp_path: Path) -> None:
    settings = {"ssd_cache_paths": tmp_path / "ssd"}
    with Manager(config(definition("durable.save"), "restore", **settings)) as manager:
        check_round_trip(manager, random_pages(), tier=Tier.SSD)
        counters = manager.statistics().counters
        assert counters["ssd_writes"] == PAGES
        assert "ssd_writes_dropped" not in counters
        check_rest(manager)


# Mixed up ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("save", "fetch", "said"),
    [
        ("restore", "restore", "save_pipeline: 'restore' takes no pages to save"),
        ("save", "save", "restore_pipeline: 'save' has nothing to restore from"),
    ],
)
def test_definitions_in_each_others_place_refuse_to_start(save: str, fetch: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said), Manager(config(save, fetch)):
        pass


def test_definitions_of_one_name_are_told_apart(tmp_path: Path) -> None:
    for way in ("save", "restore"):
        text = Path(definition(f"dram-only.{way}")).read_text()
        (tmp_path / f"{way}.toml").write_text(text.replace(f"dram-only-{way}", "dram-only"))
    paths = str(tmp_path / "save.toml"), str(tmp_path / "restore.toml")
    with Manager(config(*paths)) as manager:
        assert {way: set(nodes) for way, nodes in manager.statistics().nodes.items()} == {
            "save": {"E", "C", "D"},
            "restore": {"D", "R", "E"},
        }


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A directory with stages of a user's own that misbehave."""
    (tmp_path / "own_stage.py").write_text(OWN)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield tmp_path
    sys.modules.pop("own_stage", None)


def altered(name: str, directory: Path, *changes: tuple[str, str]) -> str:
    """Path of an example in which some text is another."""
    text = (EXAMPLES / f"{name}.toml").read_text()
    for old, new in changes:
        assert old in text
        text = text.replace(old, new)
    path = directory / f"altered-{name}.toml"
    path.write_text(text)
    return str(path)


COMPRESS = '{ use = "zstd_stage:Compress", level = 3 }'


def test_a_fault_in_a_stage_of_a_users_own_fails_the_request_and_frees_everything(
    own: Path,
) -> None:
    save = altered("zstd.save", own, (COMPRESS, '"own_stage:Failing"'))
    with Manager(config(save, "restore")) as manager:
        instance = register(manager, padded())
        for _ in range(2):
            outcome = publish(manager, instance)
            assert isinstance(outcome, Failed)
            assert str(outcome.error) == "not today"
            assert manager.statistics().pool_used_nbytes == 0
            check_rest(manager)


def test_a_bug_in_a_stage_of_a_users_own_fails_every_request_and_frees_everything(
    own: Path,
) -> None:
    save = altered("zstd.save", own, (COMPRESS, '"own_stage:Buggy"'))
    with Manager(config(save, "restore")) as manager:
        instance = register(manager, padded())
        for _ in range(2):
            outcome = publish(manager, instance)
            assert isinstance(outcome, Failed)
            assert "ZeroDivisionError" in str(outcome.error)
            check_rest(manager)


def test_a_stage_amid_a_node_may_end_a_batch_and_emit_nothing(own: Path) -> None:
    fetch = altered("zstd.restore", own, ("zstd_stage:Decompress", "own_stage:Ending"))
    with Manager(config(ZSTD[0], fetch)) as manager:
        assert isinstance(publish(manager, register(manager, compressible())), Saved)
        target = zeros()
        taker = register(manager, target)
        outcome, _ = restore(manager, taker)
        assert isinstance(outcome, Failed)
        assert str(outcome.error) == "not now"
        check_rest(manager)
        outcome, _ = restore(manager, taker)
        assert outcome == Restored(tuple(hashes(taker)), ())


def test_a_decoder_that_gives_another_length_makes_a_miss_of_that_page_alone(own: Path) -> None:
    fetch = altered("zstd.restore", own, ("zstd_stage:Decompress", "own_stage:Short"))
    with Manager(config(ZSTD[0], fetch)) as manager:
        assert isinstance(publish(manager, register(manager, compressible())), Saved)
        outcome, _ = restore(manager, register(manager, zeros()))
        assert isinstance(outcome, Restored), outcome
        assert len(outcome.missed) == 1
        check_rest(manager)


@pytest.mark.parametrize("example", ["dram-only.save", "durable.save"])
def test_a_definition_needs_no_budget(example: str, tmp_path: Path) -> None:
    save = altered(example, tmp_path, (', budget = "64 MiB"', ""))
    with Manager(config(save, "restore", ssd_cache_paths=tmp_path / "ssd")) as manager:
        check_round_trip(manager, padded())


def padded() -> Tensors:
    """Compressible pages whose segments are not one run of memory."""
    found = {}
    for name, tensor in compressible().items():
        found[name] = np.zeros((*SHAPE[:-1], SHAPE[-1] + 8), np.float16)[..., : SHAPE[-1]]
        found[name][...] = tensor
    return found


OWN = """
from orbitkv.errors import OrbitError
from orbitkv.objects import Format
from zstd_stage import Compress, Decompress


class Failing(Compress):
    async def run(self, batch, ctx):
        raise OrbitError("not today")


class Buggy(Compress):
    def _compress(self, segment):
        return 1 // 0


class Ending(Decompress):
    ended = False

    async def run(self, batch, ctx):
        if self.ended:
            return await super().run(batch, ctx)
        self.ended = True
        batch.abandon(OrbitError("not now"))
        return {}


class Short(Decompress):
    calls = 0

    def _decompress(self, segment):
        self.calls += 1
        return (Format.RAW, b"short") if self.calls == 6 else super()._decompress(segment)
"""
