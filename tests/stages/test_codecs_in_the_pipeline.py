"""The manager's codec in nodes C and R: what comes back is what the codec alone would make."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from orbitkv import Failed, Miss, Restored
from orbitkv.cache.catalogue import Tier
from orbitkv.codecs import open_codec
from orbitkv.codecs.slots import bind_slots
from orbitkv.errors import ConfigError, Unavailable
from orbitkv.objects import Format, RawReason, check_payloads, read_header, write_object
from orbitkv.segment import HND, NHD, Axis, Geometry, Role, Slot
from tests.builders import Engine, numbered, page_hash
from tests.conftest import ManagerFactory

CODECS = ("fp8", "turboquant-4", "turboquant-3")
LAYERS, PAGES, TOKENS = 6, 4, 16


def geometry(
    *,
    dtype: str = "bfloat16",
    head_dim: int = 64,
    axes: tuple[Axis, ...] = HND,
    packed: bool = False,
) -> Geometry:
    roles = (Role.KV,) if packed else (Role.K, Role.V)
    slots = tuple(
        Slot(
            name=f"{layer}.{role}",
            layer=layer,
            role=role,
            dtype=dtype,
            heads=2,
            head_dim=head_dim,
            axes=axes,
        )
        for layer in range(LAYERS)
        for role in roles
    )
    return Geometry(TOKENS, slots)


def normal_words(shape: tuple[int, ...], dtype: str, seed: int) -> np.ndarray:
    values = np.random.default_rng(seed).normal(size=shape).astype(np.float32)
    if dtype == "float16":
        return values.astype(np.float16)
    return (values.view(np.uint32) >> 16).astype(np.uint16)


def engine_of(manager: object, made: Geometry, *, seed: int | None = 1) -> Engine:
    engine = Engine.register.__func__(Engine, manager, pages=PAGES, seed=None, geometry=made)  # type: ignore[attr-defined]
    if seed is not None:
        for number, slot in enumerate(made.slots):
            tensor = engine.tensors[slot.name]
            words = normal_words(tensor.shape, slot.dtype, seed + number)
            tensor.view(words.dtype)[:] = words
    return engine


def settings(codec: str) -> dict[str, object]:
    return {"storage_codec": codec, "pool_nbytes": 2**22, "ssd_cache_capacity_nbytes": 2**22}


def expected_page(made: Geometry, source: Engine, index: int, codec_name: str) -> list[bytes]:
    """Each segment of a page after the codec alone has had it, by its public pair."""
    codec = open_codec(codec_name, rotation_seed=0, on_compile=lambda _: None)
    bound = bind_slots(codec, made, protect=codec.protects_layers)
    found = []
    for number, slot in enumerate(made.slots):
        axis = slot.axes.index(Axis.PAGE)
        words = np.ascontiguousarray(np.take(source.tensors[slot.name], index, axis))
        words = words.view(np.uint16)
        segment_codec = bound.codec_of(number)
        if segment_codec is not None:
            payload = np.zeros(segment_codec.encoded_nbytes, np.uint8)
            if not isinstance(segment_codec.encode(words, payload), RawReason):
                segment_codec.decode(payload, words)
        found.append(words.tobytes())
    return found


@pytest.fixture
def tensors_are_words(monkeypatch: pytest.MonkeyPatch) -> None:
    """numpy has no bfloat16: its tensors are uint16 words."""
    from tests import builders  # noqa: PLC0415

    def words_of(made: Geometry, pages: int, *, seed: int | None = 1) -> dict[str, np.ndarray]:
        del seed
        kinds = {"bfloat16": np.uint16, "float16": np.float16, "float32": np.float32}
        return {s.name: np.zeros(made.shape(s, pages), kinds[s.dtype]) for s in made.slots}

    monkeypatch.setattr(builders, "tensors_of", words_of)


pytestmark = pytest.mark.usefixtures("tensors_are_words")


@pytest.mark.parametrize("tier", [Tier.DRAM, Tier.SSD])
@pytest.mark.parametrize("shape", ["hnd", "nhd", "packed", "float16"])
@pytest.mark.parametrize("codec", CODECS)
def test_a_restored_page_is_what_the_codec_alone_makes_of_it(
    open_manager: ManagerFactory, ssd_path: Path, codec: str, shape: str, tier: Tier
) -> None:
    made = {
        "hnd": geometry(),
        "nhd": geometry(axes=NHD),
        "packed": geometry(packed=True),
        "float16": geometry(dtype="float16"),
    }[shape]
    manager = open_manager(ssd_cache_paths=ssd_path, **settings(codec))
    source, target = engine_of(manager, made), engine_of(manager, made, seed=None)
    source.save(numbered(PAGES))
    manager.flush(evict_dram=tier is Tier.SSD)
    assert len(target.restored(numbered(PAGES))) == PAGES
    for index in range(PAGES):
        assert target.page(index) == b"".join(expected_page(made, source, index, codec))
    counters = manager.statistics().counters
    assert counters["encoded_stored_nbytes"] < counters["encoded_original_nbytes"] * 0.6


def test_pages_strided_in_memory_are_encoded_like_any_other(open_manager: ManagerFactory) -> None:
    axes = (Axis.HEAD, Axis.PAGE, Axis.TOKEN, Axis.DIM)
    made = geometry(axes=axes)
    manager = open_manager(**settings("turboquant-4"))
    source, target = engine_of(manager, made), engine_of(manager, made, seed=None)
    source.save(numbered(PAGES))
    assert len(target.restored(numbered(PAGES))) == PAGES
    expected = b"".join(expected_page(made, source, 1, "turboquant-4"))
    assert target.page(1) == expected


@pytest.mark.parametrize("codec", CODECS[1:])
def test_the_outer_two_layers_stay_exact_under_turboquant(
    open_manager: ManagerFactory, codec: str
) -> None:
    manager = open_manager(**settings(codec))
    made = geometry()
    source, target = engine_of(manager, made), engine_of(manager, made, seed=None)
    source.save(numbered(PAGES))
    target.restored(numbered(PAGES))
    exact = {
        slot.layer
        for slot in made.slots
        if (source.tensors[slot.name] == target.tensors[slot.name]).all()
    }
    assert exact == {0, 1, LAYERS - 2, LAYERS - 1}
    assert manager.statistics().counters["raw_protected_layer"] == 8 * PAGES


def test_segments_that_a_codec_cannot_take_are_raw_and_counted_by_reason(
    open_manager: ManagerFactory,
) -> None:
    manager = open_manager(**settings("fp8"))
    made = geometry()
    source, target = engine_of(manager, made), engine_of(manager, made, seed=None)
    nan, infinite, large = 0x7FC1, 0xFF80, 0x43E1  # 450
    source.tensors["0.k"][0, 0, 0, 0] = nan
    source.tensors["2.v"][0, 1, 3, 7] = infinite
    source.tensors["5.v"][1, 1, 15, 63] = large
    source.save(numbered(PAGES))
    assert len(target.restored(numbered(PAGES))) == PAGES
    for name, page in (("0.k", 0), ("2.v", 0), ("5.v", 1)):
        assert (target.tensors[name][page] == source.tensors[name][page]).all()
    counters = manager.statistics().counters
    assert (counters["raw_nonfinite"], counters["raw_out_of_range"]) == (2, 1)
    header = read_header(source.copy(page_hash(0), Tier.DRAM).memory)  # type: ignore[arg-type]
    formats = {(row.format, row.raw_reason) for row in header.rows}
    assert formats == {(Format.FP8_E4M3FN, 0), (Format.RAW, RawReason.NONFINITE)}


@pytest.mark.parametrize(
    ("made", "reason"),
    [
        (geometry(head_dim=48), "raw_unsupported_layout"),
        (geometry(dtype="float32"), "raw_unsupported_dtype"),
    ],
)
def test_geometries_that_a_codec_does_not_know_are_stored_exactly(
    open_manager: ManagerFactory, made: Geometry, reason: str
) -> None:
    manager = open_manager(**settings("turboquant-4"))
    source = Engine.register(manager, pages=PAGES, geometry=made)
    for tensor in source.tensors.values():
        tensor[:] = np.random.default_rng(2).normal(size=tensor.shape).astype(tensor.dtype)
    before = [source.page(index) for index in range(PAGES)]
    source.save(numbered(PAGES))
    source.clear()
    assert len(source.restored(numbered(PAGES))) == PAGES
    assert [source.page(index) for index in range(PAGES)] == before
    assert manager.statistics().counters[reason] == 4 * PAGES


def test_managers_of_other_settings_never_share_a_namespace(open_manager: ManagerFactory) -> None:
    names = [
        engine_of(
            open_manager(storage_codec=codec, rotation_seed=seed), geometry()
        ).instance.namespace
        for codec, seed in (
            ("none", 0),
            ("fp8", 0),
            ("turboquant-4", 0),
            ("turboquant-4", 1),
            ("turboquant-3", 0),
        )
    ]
    assert len(set(names)) == len(names)
    exact = open_manager(storage_codec="none", rotation_seed=9)
    assert engine_of(exact, geometry()).instance.namespace == names[0], "a seed nobody uses"


@pytest.mark.parametrize("tier", [Tier.DRAM, Tier.SSD])
def test_a_payload_that_no_encoder_writes_is_a_miss_of_that_page(
    open_manager: ManagerFactory, ssd_path: Path, tier: Tier
) -> None:
    """The CRC is made anew, so that only the decoder can notice."""
    manager = open_manager(ssd_cache_paths=ssd_path, **settings("turboquant-4"))
    made = geometry()
    source, target = engine_of(manager, made), engine_of(manager, made, seed=None)
    source.save(numbered(PAGES))
    copy = source.copy(page_hash(1), Tier.DRAM)
    assert copy.memory is not None
    segments = check_payloads(copy.memory, read_header(copy.memory))
    encoded = next(s for s in segments if s.format != Format.RAW)
    encoded.payload[-2:] = 0xFF  # an FP16 NaN where a norm or minimum is
    from orbitkv.objects import crc32  # noqa: PLC0415

    encoded.crc32 = crc32(encoded.payload)
    write_object(copy.memory, segments, key_digest=copy.digest, generation=copy.generation)
    damaged = copy.memory.tobytes()
    manager.flush(evict_dram=tier is Tier.SSD)
    if tier is Tier.SSD:  # what was written before is whole: put the damage there too
        extent = source.copy(page_hash(1), Tier.SSD)
        with ssd_path.open("r+b") as file:
            file.seek(extent.offset)
            file.write(damaged)
    outcome = target.restore(numbered(PAGES))
    assert isinstance(outcome, Restored)
    assert outcome.missed == (page_hash(1),)
    source.save(numbered(PAGES))
    assert len(target.restored(numbered(PAGES))) == PAGES, "a new save repairs it"


def test_an_object_of_another_codec_is_never_read_for_ours(
    open_manager: ManagerFactory, ssd_path: Path
) -> None:
    manager = open_manager(ssd_cache_paths=ssd_path, ssd_persist=True, **settings("fp8"))
    engine_of(manager, geometry()).save(numbered(PAGES))
    manager.flush()
    manager.close()
    other = open_manager(ssd_cache_paths=ssd_path, ssd_persist=True, **settings("turboquant-4"))
    outcome = engine_of(other, geometry(), seed=None).restore(numbered(PAGES))
    assert isinstance(outcome, Miss | Failed)
    assert not isinstance(outcome, Failed)


@pytest.mark.parametrize(
    ("name", "error", "said"),
    [
        ("ans", Unavailable, "nvCOMP"),
        ("zip", ConfigError, "accepted: none, fp8, turboquant-4, turboquant-3, ans"),
    ],
)
def test_a_codec_that_cannot_be_had_refuses_to_start(
    open_manager: ManagerFactory, name: str, error: type[Exception], said: str
) -> None:
    with pytest.raises(error, match=said):
        open_manager(storage_codec=name)


def test_state_that_is_not_attentions_stays_exact_under_turboquant(
    open_manager: ManagerFactory,
) -> None:
    slots = tuple(
        Slot(
            name=f"{layer}",
            layer=layer,
            role=Role.KV,
            dtype="bfloat16",
            heads=1,
            head_dim=64,
            group="recurrent" if layer == 3 else "attention",
        )
        for layer in range(LAYERS + 1)
    )
    made = Geometry(TOKENS, slots)
    manager = open_manager(**settings("turboquant-4"))
    source, target = engine_of(manager, made), engine_of(manager, made, seed=None)
    source.save(numbered(PAGES))
    target.restored(numbered(PAGES))
    assert (target.tensors["3"] == source.tensors["3"]).all()
    assert (target.tensors["2"] != source.tensors["2"]).any()
    assert manager.statistics().counters["raw_opaque_state"] == PAGES
