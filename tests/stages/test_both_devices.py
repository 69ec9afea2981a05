"""One contract for CPU and GPU: what is saved comes back, and nothing else is touched."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from orbitkv import Geometry, Manager, Miss, Restored, Role, Saved, Slot
from orbitkv.cache.catalogue import Tier
from orbitkv.codecs import open_codec
from orbitkv.codecs.ans import AnsCodec, open_ans
from orbitkv.codecs.cuda.ans import AnsDevice
from orbitkv.codecs.slots import bind_slots
from orbitkv.config import KIB, MIB
from orbitkv.errors import ConfigError, Unavailable
from orbitkv.objects import (
    HEADER_NBYTES,
    ROW,
    Format,
    RawReason,
    check_payloads,
    crc32,
    read_header,
    read_segments,
)
from orbitkv.probe import cuda_unavailable
from orbitkv.runtime import core, devices
from orbitkv.runtime.instance import Instance
from orbitkv.segment import HND, NHD, StateKey
from tests.builders import WAIT_S, counters, flip_memory, model, numbered, page_hash, rest
from tests.codecs.emulation import Cupy, Planes
from tests.conftest import ManagerFactory
from tests.emulated import EmulatedDevice, OnGpu

PAGES = 12
CODECS = ("none", "fp8", "turboquant-4", "turboquant-3")
EXACT = ("none", "ans")
INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}


def open_device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "cuda" and (reason := cuda_unavailable()):
        pytest.skip(reason)
    if request.param == "emulated":
        monkeypatch.setattr(devices, "Device", EmulatedDevice)
    return str(request.param)


@pytest.fixture(params=["cpu", "emulated", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Where the engine's pages are."""
    return open_device(request, monkeypatch)


@pytest.fixture(params=["emulated", pytest.param("cuda", marks=pytest.mark.gpu)])
def gpu(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """A GPU, or what stands for one."""
    return open_device(request, monkeypatch)


def place_of(device: str) -> str:
    return "cuda" if device == "cuda" else "cpu"


def slots_of(layers: int, **shape: object) -> tuple[Slot, ...]:
    roles = (Role.KV,) if shape.pop("packed", False) else (Role.K, Role.V)
    fields: dict[str, Any] = {"dtype": "bfloat16", "heads": 3, "head_dim": 64} | shape
    return tuple(
        Slot(name=f"{role}{layer}", layer=layer, role=role, **fields)
        for layer in range(layers)
        for role in roles
    )


def geometry_of(layers: int = 6, page_tokens: int = 16, **shape: object) -> Geometry:
    return Geometry(page_tokens, slots_of(layers, **shape))


def dense(geometry: Geometry, device: str) -> dict[str, torch.Tensor]:
    made = {}
    for slot in geometry.slots:
        shape = geometry.shape(slot, PAGES)
        made[slot.name] = torch.randn(shape, dtype=torch.float32, device=place_of(device)).to(
            getattr(torch, slot.dtype)
        )
    return made


def cross_layer(geometry: Geometry, device: str) -> dict[str, torch.Tensor]:
    """Each page's slots side by side in one allocation."""
    first = geometry.slots[0]
    _, *inner = geometry.shape(first, 1)
    block = torch.randn((PAGES, len(geometry.slots), *inner), device=place_of(device)).to(
        getattr(torch, first.dtype)
    )
    return {slot.name: block[:, index] for index, slot in enumerate(geometry.slots)}


def padded(geometry: Geometry, device: str) -> dict[str, torch.Tensor]:
    """Rows with gaps between them, and a page stride that is no multiple of the page."""
    made = {}
    for slot in geometry.slots:
        pages, outer, inner, width = geometry.shape(slot, PAGES)
        room = torch.randn((pages, outer + 1, inner + 1, width + 8), device=place_of(device))
        made[slot.name] = room.to(getattr(torch, slot.dtype))[:, :outer, :inner, :width]
    return made


LAYOUTS = {
    "hnd": (dense, {"axes": HND}),
    "nhd": (dense, {"axes": NHD}),
    "packed": (dense, {"packed": True}),
    "half": (dense, {"dtype": "float16"}),
    "cross-layer": (cross_layer, {"packed": True}),
    "padded": (padded, {"axes": NHD}),
    "odd": (dense, {"heads": 5, "head_dim": 32, "page_tokens": 7}),
}


class Pages:
    """A registered engine whose pages are torch tensors on either device."""

    def __init__(
        self,
        manager: Manager,
        geometry: Geometry,
        tensors: Mapping[str, torch.Tensor],
        *,
        emulated: bool = False,
    ) -> None:
        self.manager = manager
        self.geometry = geometry
        self.tensors = dict(tensors)
        held = {n: OnGpu(t) if emulated else t for n, t in self.tensors.items()}
        self.instance: Instance = manager.register(geometry, held, model=model())
        if self.on_gpu:
            torch.cuda.synchronize()

    @property
    def on_gpu(self) -> bool:
        return next(iter(self.tensors.values())).is_cuda

    def words(self, slot: Slot, page: int) -> torch.Tensor:
        view = self.tensors[slot.name].select(slot.axes.index("page"), page)
        return view.view(INTEGERS[view.element_size()])

    def snapshot(self) -> list[list[np.ndarray]]:
        """Every segment's words, by page and slot."""
        if self.on_gpu:
            torch.cuda.synchronize()
        return [
            [self.words(slot, page).cpu().numpy().copy() for slot in self.geometry.slots]
            for page in range(PAGES)
        ]

    def poison(self, value: int = 0x5A) -> None:
        for page in range(PAGES):
            for slot in self.geometry.slots:
                self.words(slot, page).fill_(value)
        if self.on_gpu:
            torch.cuda.synchronize()

    def save(self, pages: Mapping[bytes, int], ready: object = None) -> Saved:
        ticket = self.manager.publish(self.instance, list(pages.items()), ready=ready)
        outcome = ticket.result(WAIT_S)
        assert isinstance(outcome, Saved), outcome
        return outcome

    def restore(self, pages: Mapping[bytes, int]) -> Restored | Miss:
        lease = self.manager.query(self.instance, list(pages))
        wanted = {name: pages[name] for name in lease.hashes}
        outcome = self.manager.restore(lease, wanted).result(WAIT_S)
        assert isinstance(outcome, Restored | Miss), outcome
        return outcome

    def hits(self, page: bytes) -> int:
        with self.manager.query(self.instance, [page]) as lease:
            return len(lease.hashes)

    def image(self, page: bytes) -> np.ndarray:
        copy = self.manager.core.catalogue.find(
            StateKey(self.instance.namespace, page, "attention").digest, Tier.DRAM
        )
        assert copy is not None
        assert copy.memory is not None
        return copy.memory


def same(left: list[np.ndarray], right: list[np.ndarray]) -> bool:
    return all(np.array_equal(a, b) for a, b in zip(left, right, strict=True))


def decoded(codec: str, geometry: Geometry, page: list[np.ndarray]) -> list[np.ndarray]:
    """What the CPU codec alone makes of a page."""
    if codec in EXACT:
        return page
    opened = open_codec(codec, rotation_seed=0, on_compile=print)
    bound = bind_slots(opened, geometry, protect=opened.protects_layers)
    made = []
    for index, words in enumerate(page):
        slot_codec = bound.codec_of(index)
        source = np.ascontiguousarray(words).view(f"u{words.itemsize}")
        if slot_codec is not None:
            payload = np.zeros(slot_codec.encoded_nbytes, np.uint8)
            if slot_codec.encode(source, payload) == slot_codec.encoded_nbytes:
                source = np.empty_like(source)
                slot_codec.decode(payload, source)
        made.append(source.view(words.dtype))
    return made


@pytest.fixture(scope="session")
def ans(tmp_path_factory: pytest.TempPathFactory) -> AnsDevice:
    """A CPU in a GPU's place, and zlib in nvCOMP's."""
    return Cupy(tmp_path_factory.mktemp("kernels")).open(Planes())


@pytest.fixture
def opened(
    open_manager: ManagerFactory, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> ManagerFactory:
    def open_larger(**settings: object) -> Manager:
        if settings.get("storage_codec") == "ans":
            serve_ans(request, monkeypatch)
        return open_manager(**({"pool_nbytes": 32 * MIB} | settings))

    return open_larger


def serve_ans(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let managers have ANS where the test's pages are, or skip it."""
    chosen = request.node.callspec.params
    device = chosen.get("device", chosen.get("gpu"))
    if device == "cuda":
        library = os.environ.get("ORBITKV_NVCOMP_LIBRARY")
        try:
            codec = open_ans(library)
        except Unavailable as error:
            pytest.skip(str(error))
    elif shutil.which("g++") is None:
        pytest.skip("no g++")
    else:
        made = request.getfixturevalue("ans")
        monkeypatch.setattr(EmulatedDevice, "ans", made)
        codec = AnsCodec(made.nvcomp)
    monkeypatch.setattr(core, "open_codec", lambda *_, **__: codec)


@pytest.mark.parametrize("codec", [*CODECS, "ans"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_pages_come_back_as_the_cpu_codec_makes_them(
    opened: ManagerFactory, device: str, codec: str, layout: str
) -> None:
    make, shape = LAYOUTS[layout]
    geometry = geometry_of(**shape)
    engine = Pages(
        opened(storage_codec=codec), geometry, make(geometry, device), emulated=device == "emulated"
    )
    before = engine.snapshot()
    assert len(engine.save(numbered(6)).stored) == 6
    engine.poison()
    guard = engine.snapshot()
    moved = {name: 11 - index for name, index in numbered(5).items()}
    assert set(engine.restore(moved).restored) == set(moved)
    after = engine.snapshot()
    for index in range(5):
        assert same(after[11 - index], decoded(codec, geometry, before[index])), index
    for index in range(7):
        assert same(after[index], guard[index]), f"page {index} was not named"


@pytest.mark.parametrize("codec", CODECS)
def test_what_one_device_saves_the_other_restores(
    opened: ManagerFactory, device: str, codec: str
) -> None:
    manager = opened(storage_codec=codec)
    geometry = geometry_of()
    here = Pages(manager, geometry, dense(geometry, device), emulated=device == "emulated")
    there = Pages(manager, geometry, dense(geometry, "cpu"))
    before = here.snapshot()
    here.save(numbered(4))
    assert len(there.restore(numbered(4)).restored) == 4
    for index in range(4):
        assert same(there.snapshot()[index], decoded(codec, geometry, before[index]))
    before = there.snapshot()
    later = numbered(4, first=100)
    there.save(later)
    assert len(here.restore(later).restored) == 4
    for index in range(4):
        assert same(here.snapshot()[index], decoded(codec, geometry, before[index]))


@pytest.mark.parametrize("codec", ["fp8", "turboquant-4"])
def test_refused_segments_are_raw_and_exact_and_say_why(
    opened: ManagerFactory, device: str, codec: str
) -> None:
    geometry = geometry_of()
    engine = Pages(
        opened(storage_codec=codec),
        geometry,
        dense(geometry, device),
        emulated=device == "emulated",
    )
    engine.tensors["k2"][1, 0, 3, 5] = float("nan")
    engine.tensors["v3"][1, 2, 0, 0] = 1e30
    engine.tensors["v2"][4, 0, 0, 1] = float("-inf")
    before = engine.snapshot()
    engine.save(numbered(6))
    rows = read_header(engine.image(page_hash(1))).rows
    by_name = {slot.name: row for slot, row in zip(geometry.slots, rows, strict=True)}
    assert by_name["k2"].format == Format.RAW
    assert by_name["k2"].raw_reason == RawReason.NONFINITE
    over = RawReason.OUT_OF_RANGE if codec == "fp8" else RawReason.SCALAR_OVERFLOW
    assert by_name["v3"].raw_reason == over
    assert by_name["v2"].format != Format.RAW
    engine.poison()
    engine.restore(numbered(6))
    for index in range(6):
        assert same(engine.snapshot()[index], decoded(codec, geometry, before[index]))
    seen = counters(engine.manager)
    assert seen["raw_nonfinite"] == 2
    assert seen[f"raw_{over.name.lower()}"] == 1


def forge(image: np.ndarray, segment: int, **fields: int) -> None:
    """Change a row of an object's table, under a right CRC."""
    header = read_header(image)
    at = HEADER_NBYTES + ROW.itemsize * segment
    row = image[at : at + ROW.itemsize].view(ROW)
    for name, value in fields.items():
        row[name] = value
    seal = HEADER_NBYTES - 4
    end = HEADER_NBYTES + len(header.table)
    value = crc32(image[HEADER_NBYTES:end], crc32(image[:seal]))
    image[seal:HEADER_NBYTES] = np.array([value], "<u4").view(np.uint8)


def damage_payload(image: np.ndarray) -> None:
    segment = read_segments(image, read_header(image))[3]
    assert segment.offset is not None
    flip_memory(image, segment.offset + segment.stored_nbytes - 1, 6)


def damage_head(image: np.ndarray) -> None:
    flip_memory(image, 20, 1)


def forge_format(image: np.ndarray) -> None:
    forge(image, 4, format=200)


def forge_length(image: np.ndarray) -> None:
    forge(image, 4, original_nbytes=2)


def forge_crc(image: np.ndarray) -> None:
    forge(image, 0, crc32=1)


@pytest.mark.parametrize("codec", [*CODECS, "ans"])
@pytest.mark.parametrize(
    "damage", [damage_payload, damage_head, forge_format, forge_length, forge_crc]
)
def test_damage_is_a_miss_of_that_page_and_its_neighbours_come_back(
    opened: ManagerFactory, device: str, codec: str, damage: Callable[[np.ndarray], None]
) -> None:
    geometry = geometry_of()
    engine = Pages(
        opened(storage_codec=codec),
        geometry,
        dense(geometry, device),
        emulated=device == "emulated",
    )
    before = engine.snapshot()
    engine.save(numbered(5))
    damage(engine.image(page_hash(2)))
    engine.poison()
    guard = engine.snapshot()
    outcome = engine.restore(numbered(5))
    assert outcome.missed == (page_hash(2),)
    after = engine.snapshot()
    for index in (0, 1, 3, 4):
        assert same(after[index], decoded(codec, geometry, before[index]))
    assert same(after[2], guard[2])
    assert engine.save({page_hash(2): 1}).stored == (page_hash(2),), "it keeps a new save out"


@pytest.mark.parametrize("codec", EXACT)
def test_both_directions_at_once(opened: ManagerFactory, device: str, codec: str) -> None:
    geometry = geometry_of()
    manager = opened(storage_codec=codec)
    engine = Pages(manager, geometry, dense(geometry, device), emulated=device == "emulated")
    before = engine.snapshot()
    engine.save(numbered(6))
    instance = engine.instance
    for attempt in range(20):
        leases = [manager.query(instance, list(numbered(3, first=first))) for first in (0, 3)]
        targets = [{page_hash(first + n): 6 + first + n for n in range(3)} for first in (0, 3)]
        tickets = [
            manager.restore(lease, target) for lease, target in zip(leases, targets, strict=True)
        ]
        fresh = numbered(6, first=100 * (attempt + 1))
        tickets.append(manager.publish(instance, list(fresh.items())))
        outcomes = [ticket.result(WAIT_S) for ticket in tickets]
        assert [len(outcome.restored) for outcome in outcomes[:2]] == [3, 3]
        after = engine.snapshot()
        assert all(same(after[6 + index], before[index]) for index in range(6))
        engine.restore({name: index + 6 for name, index in fresh.items()})
        assert all(same(engine.snapshot()[6 + index], before[index]) for index in range(6))


@pytest.mark.parametrize("codec", EXACT)
def test_many_batches_and_more_segments_than_one_takes(
    opened: ManagerFactory, device: str, codec: str
) -> None:
    geometry = geometry_of(layers=300, heads=1, head_dim=32, page_tokens=2)
    manager = opened(storage_codec=codec)
    engine = Pages(manager, geometry, dense(geometry, device), emulated=device == "emulated")
    before = engine.snapshot()
    assert len(engine.save(numbered(PAGES)).stored) == PAGES
    engine.poison()
    assert len(engine.restore(numbered(PAGES)).restored) == PAGES
    assert all(map(same, engine.snapshot(), before))


@pytest.mark.parametrize("codec", EXACT)
def test_a_full_pool_evicts_and_goes_on(opened: ManagerFactory, device: str, codec: str) -> None:
    geometry = geometry_of(page_tokens=64)
    manager = opened(storage_codec=codec, pool_nbytes=4 * geometry.object_nbytes["attention"])
    engine = Pages(manager, geometry, dense(geometry, device), emulated=device == "emulated")
    for attempt in range(8):
        before = engine.snapshot()
        pages = numbered(PAGES, first=100 * attempt)
        engine.save(pages)
        found = 0
        for name, index in pages.items():
            if engine.restore({name: 0}).missed or not engine.hits(name):
                continue
            found += 1
            assert same(engine.snapshot()[0], before[index])
        assert found >= 3


@pytest.mark.parametrize("codec", ["fp8", "ans"])
def test_pages_come_back_from_ssd(
    opened: ManagerFactory, device: str, ssd_path: Path, codec: str
) -> None:
    geometry = geometry_of()
    engine = Pages(
        opened(storage_codec=codec, ssd_cache_paths=ssd_path, ssd_cache_capacity_nbytes=8 * MIB),
        geometry,
        dense(geometry, device),
        emulated=device == "emulated",
    )
    before = engine.snapshot()
    engine.save(numbered(6))
    assert engine.manager.flush(evict_dram=True).unwritten == 0
    engine.poison()
    assert len(engine.restore(numbered(6)).restored) == 6
    for index in range(6):
        assert same(engine.snapshot()[index], decoded(codec, geometry, before[index]))


@pytest.mark.parametrize("codec", EXACT)
def test_cancelled_requests_leave_nothing_behind(
    opened: ManagerFactory, device: str, codec: str
) -> None:
    geometry = geometry_of(page_tokens=64)
    manager = opened(storage_codec=codec)
    engine = Pages(manager, geometry, dense(geometry, device), emulated=device == "emulated")
    engine.save(numbered(6))
    for attempt in range(30):
        lease = engine.manager.query(engine.instance, list(numbered(6)))
        tickets = [
            engine.manager.restore(lease, {n: i + 6 for n, i in numbered(6).items()}),
            engine.manager.publish(
                engine.instance, list(numbered(6, first=1000 * attempt + 10).items())
            ),
        ]
        for ticket in tickets:
            ticket.cancel()
        for ticket in tickets:
            ticket.result(WAIT_S)
    assert rest(engine.manager) == []


def test_tensors_of_several_devices_are_refused(opened: ManagerFactory) -> None:
    if reason := cuda_unavailable():
        pytest.skip(reason)
    geometry = geometry_of(layers=1)
    tensors = dense(geometry, "cpu") | {"k0": dense(geometry, "cuda")["k0"]}
    with pytest.raises(Exception, match="several devices"):
        opened().register(geometry, tensors, model=model())


@pytest.mark.gpu
def test_saved_bytes_are_those_after_the_engines_event(opened: ManagerFactory) -> None:
    geometry = geometry_of()
    engine = Pages(opened(), geometry, dense(geometry, "cuda"))
    stream = torch.cuda.Stream()
    for attempt in range(5):
        with torch.cuda.stream(stream):
            torch.cuda._sleep(50_000_000)
            for tensor in engine.tensors.values():
                tensor.fill_(attempt + 1)
            written = torch.cuda.Event()
            written.record(stream)
        pages = numbered(3, first=10 * attempt)
        ticket = engine.manager.publish(engine.instance, list(pages.items()), ready=written)
        assert isinstance(ticket.result(WAIT_S), Saved)
        engine.poison()
        engine.restore(pages)
        torch.cuda.synchronize()
        for index in range(3):
            for slot in geometry.slots:
                assert (engine.tensors[slot.name][index] == attempt + 1).all()


@pytest.mark.gpu
def test_restored_pages_are_read_by_another_stream_through_the_event(
    opened: ManagerFactory,
) -> None:
    geometry = geometry_of(page_tokens=64)
    engine = Pages(opened(), geometry, dense(geometry, "cuda"))
    before = engine.tensors["k3"][:6].clone()
    engine.save(numbered(6))
    stream = torch.cuda.Stream()
    for _ in range(20):
        engine.poison()
        outcome = engine.restore(numbered(6))
        assert isinstance(outcome, Restored)
        assert outcome.ready is not None
        outcome.ready.wait(stream)
        with torch.cuda.stream(stream):
            read = engine.tensors["k3"][:6].clone()
        stream.synchronize()
        assert torch.equal(read, before)


@pytest.mark.parametrize("codec", [*CODECS, "ans"])
def test_arenas_stay_within_the_budget(opened: ManagerFactory, gpu: str, codec: str) -> None:
    budget_nbytes = MIB
    geometry = geometry_of(page_tokens=64)
    manager = opened(storage_codec=codec, storage_codec_budget_nbytes=budget_nbytes)
    engine = Pages(manager, geometry, dense(geometry, gpu), emulated=gpu == "emulated")
    for attempt in range(5):
        pages = numbered(PAGES, first=100 * attempt)
        engine.save(pages)
        engine.restore(pages)
        for lane in manager.core.devices.streams:
            for stream in lane.streams.values():
                memory = stream.arena.memory
                if gpu == "cuda":
                    assert memory.pool.total_bytes() <= budget_nbytes
                else:
                    assert memory.held.nbytes <= budget_nbytes
    manager.close()
    assert not any(lane.streams for lane in manager.core.devices.streams)


@pytest.mark.parametrize("codec", [*CODECS, "ans"])
@pytest.mark.parametrize("layout", ["hnd", "padded", "packed"])
def test_pages_that_no_arena_holds_pass_through_the_host(
    opened: ManagerFactory, gpu: str, codec: str, layout: str
) -> None:
    make, shape = LAYOUTS[layout]
    geometry = geometry_of(**shape)
    manager = opened(storage_codec=codec, storage_codec_budget_nbytes=16 * KIB)
    engine = Pages(manager, geometry, make(geometry, gpu), emulated=gpu == "emulated")
    next(iter(engine.tensors.values()))[2].fill_(float("nan"))
    before = engine.snapshot()
    engine.save(numbered(5))
    engine.poison()
    guard = engine.snapshot()
    outcome = engine.restore({name: 11 - index for name, index in numbered(5).items()})
    assert len(outcome.restored) == 5
    after = engine.snapshot()
    needs_room = codec == "ans" or codec.startswith("turboquant")
    kept = "none" if needs_room else codec
    for index in range(5):
        assert same(after[11 - index], decoded(kept, geometry, before[index]))
        assert same(after[index], guard[index])
    assert bool(counters(manager).get("raw_no_budget")) == needs_room


@pytest.mark.timeout(600)
@pytest.mark.parametrize("codec", EXACT)
@pytest.mark.parametrize("device", [pytest.param("cuda", marks=pytest.mark.gpu)], indirect=True)
def test_memory_is_flat_over_ten_thousand_cycles(
    opened: ManagerFactory, device: str, codec: str
) -> None:
    geometry = geometry_of(layers=2)
    manager = opened(storage_codec=codec, pool_nbytes=4 * MIB)
    engine = Pages(manager, geometry, dense(geometry, device))

    def used() -> tuple[int, int]:
        free_nbytes, total_nbytes = torch.cuda.mem_get_info()
        resident = int(Path("/proc/self/statm").read_text().split()[1]) * 4 * KIB
        return total_nbytes - free_nbytes, resident

    for attempt in range(10_000):
        if attempt == 1000:
            before = used()
        pages = {page_hash(attempt): attempt % PAGES}
        engine.save(pages)
        engine.restore(pages)
    after = used()
    assert after[0] == before[0]
    assert after[1] - before[1] < 4 * MIB


# What is ANS's own ------------------------------------------------------------------------------


def ans_engine(opened: ManagerFactory, gpu: str, geometry: Geometry, **settings: object) -> Pages:
    manager = opened(storage_codec="ans", **settings)
    return Pages(manager, geometry, dense(geometry, gpu), emulated=gpu == "emulated")


def test_ans_stores_normal_numbers_shorter_and_the_rest_raw(
    opened: ManagerFactory, gpu: str
) -> None:
    """32 KiB of bfloat16 a segment, but for two: one of random words, one too short to be coded."""
    slots = slots_of(3, heads=4, head_dim=128)
    short = Slot(name="short", layer=3, role=Role.K, dtype="bfloat16", heads=1, head_dim=8)
    geometry = Geometry(32, (*slots, short))
    engine = ans_engine(opened, gpu, geometry)
    words = np.random.default_rng(1).integers(0, 2**16, geometry.shape(slots[2], 1)[1:], np.uint16)
    engine.words(slots[2], 1).copy_(torch.from_numpy(words.view(np.int16)))
    before = engine.snapshot()
    engine.save(numbered(6))
    for index in range(6):
        rows = read_header(engine.image(page_hash(index))).rows
        formats = [row.format for row in rows]
        wanted = [Format.ANS] * 6 + [Format.RAW]
        if index == 1:
            wanted[2] = Format.RAW
            assert rows[2].raw_reason == RawReason.SAVES_TOO_LITTLE
        assert formats == wanted
        assert rows[6].raw_reason == RawReason.UNSUPPORTED_LAYOUT
        check_payloads(engine.image(page_hash(index)), read_header(engine.image(page_hash(index))))
    engine.poison()
    assert len(engine.restore(numbered(6)).restored) == 6
    assert all(map(same, engine.snapshot()[:6], before[:6]))
    seen = counters(engine.manager)
    assert seen["encoded_segments"] == 35
    assert seen["raw_saves_too_little"] == 1
    assert seen["raw_unsupported_layout"] == 6
    assert seen["encoded_original_nbytes"] == 35 * 32 * KIB
    assert seen["encoded_original_nbytes"] > 1.2 * seen["encoded_stored_nbytes"]


def test_ans_takes_pages_of_several_groups_and_dtypes(opened: ManagerFactory, gpu: str) -> None:
    fields: dict[str, Any] = {"heads": 4, "head_dim": 64}
    geometry = Geometry(
        32,
        (
            Slot(name="a", layer=0, role=Role.K, dtype="bfloat16", **fields),
            Slot(name="b", layer=0, role=Role.V, dtype="float16", **fields),
            Slot(name="c", layer=1, role=Role.KV, dtype="float32", group="recurrent", **fields),
            Slot(name="d", layer=2, role=Role.KV, dtype="bfloat16", group="recurrent", **fields),
        ),
    )
    engine = ans_engine(opened, gpu, geometry)
    before = engine.snapshot()
    assert len(engine.save(numbered(6)).stored) == 6
    flip_memory(engine.image(page_hash(2)), 4096, 1)
    engine.poison()
    guard = engine.snapshot()
    outcome = engine.restore(numbered(6))
    assert outcome.missed == (page_hash(2),), "both groups of a page, or none"
    after = engine.snapshot()
    assert all(same(after[index], before[index]) for index in (0, 1, 3, 4, 5))
    assert same(after[2], guard[2])


def test_ans_refuses_tensors_of_a_host(opened: ManagerFactory, gpu: str) -> None:
    manager = opened(storage_codec="ans")
    geometry = geometry_of(layers=1)
    with pytest.raises(ConfigError, match="'ans', and tensors on the CPU"):
        manager.register(geometry, dense(geometry, "cpu"), model=model())


def test_ans_segments_are_a_miss_where_the_budget_holds_no_page(
    opened: ManagerFactory, gpu: str, ssd_path: Path
) -> None:
    """Saved under one budget, found on SSD under another."""
    geometry = geometry_of()
    kept = {"ssd_cache_paths": ssd_path, "ssd_cache_capacity_nbytes": 8 * MIB, "ssd_persist": True}
    first = ans_engine(opened, gpu, geometry, **kept)
    first.save(numbered(3))
    assert first.manager.flush().unwritten == 0
    first.manager.close()
    second = ans_engine(opened, gpu, geometry, storage_codec_budget_nbytes=16 * KIB, **kept)
    before = second.snapshot()
    assert set(second.restore(numbered(3)).missed) == set(numbered(3))
    assert len(second.save(numbered(3)).stored) == 3, "they keep a new save out"
    second.poison()
    assert len(second.restore(numbered(3)).restored) == 3
    assert all(map(same, second.snapshot()[:3], before[:3]))


def test_random_damage_to_ans_payloads_is_a_miss_of_its_page(
    opened: ManagerFactory, gpu: str
) -> None:
    """CRCs are left as they are; nvCOMP is not shown a byte of what they do not fit."""
    geometry = geometry_of(layers=2)
    engine = ans_engine(opened, gpu, geometry)
    rng = np.random.default_rng(5)
    before = engine.snapshot()
    sources = numbered(6)
    moved = {name: 6 + index for name, index in sources.items()}
    engine.save(sources)
    for _ in range(30):
        damaged = [page_hash(int(n)) for n in rng.choice(6, int(rng.integers(1, 4)), replace=False)]
        for name in damaged:
            image = engine.image(name)
            rows = read_header(image).rows
            row = rows[int(rng.integers(len(rows)))]
            places = rng.choice(row.stored_nbytes, int(rng.integers(1, 9)), replace=False)
            image[row.offset + places] ^= rng.integers(1, 256, len(places)).astype(np.uint8)
        outcome = engine.restore(moved)
        assert set(outcome.missed) == set(damaged)
        after = engine.snapshot()
        for name, index in sources.items():
            assert name in damaged or same(after[moved[name]], before[index])
        assert set(engine.save({name: sources[name] for name in damaged}).stored) == set(damaged)
