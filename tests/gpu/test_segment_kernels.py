"""Kernels of segments, FP8 and CRCs: the bytes of the CPU, and not one beside them."""

from __future__ import annotations

import itertools
import math
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from orbitkv.codecs import RawReason, SegmentCodec, SegmentSpec, open_codec
from orbitkv.codecs.cuda.kernels import Launcher, Span, zeros_crc32
from orbitkv.codecs.cuda.tasks import SLOT, TASK, Launch
from orbitkv.segment import Role

pytestmark = pytest.mark.gpu

NONFINITE, OUT_OF_RANGE, SCALAR_OVERFLOW, UNDECODABLE = 1, 2, 4, 8
DTYPES = ("bfloat16", "float16")
MOST = {"bfloat16": 0x43E0, "float16": 0x5F00}
INFINITY = {"bfloat16": 0x7F80, "float16": 0x7C00}
GUARD_NBYTES = 256
WORDS = np.arange(2**16, dtype=np.uint16)

Array = npt.NDArray[Any]
Device = Callable[..., "Seen"]

both = pytest.mark.parametrize("dtype", DTYPES)


@dataclass(frozen=True)
class Part:
    """Segments of one slot: its axes, and the gaps between them in an engine's memory.

    Attributes:
        width_nbytes: Of a row.
        gaps_nbytes: After a page, after each outer index, after each row.
        shift_nbytes: Of the first page from a boundary of 256.
        transposed: The second axis is the outer one in memory.
    """

    outer: int = 3
    inner: int = 2
    width_nbytes: int = 256
    pages: int = 2
    gaps_nbytes: tuple[int, int, int] = (0, 0, 0)
    shift_nbytes: int = 0
    transposed: bool = False

    def __str__(self) -> str:
        gaps = "-".join(map(str, self.gaps_nbytes))
        order = "T" if self.transposed else ""
        return f"{self.outer}x{self.inner}x{self.width_nbytes}{order}+{gaps}@{self.shift_nbytes}"

    @property
    def nbytes(self) -> int:
        return self.outer * self.inner * self.width_nbytes


# What engines have: NHD and HND, packed or with K and V side by side, pages apart, rows apart; then
# what can be reached in 16, 8, 4, 2 bytes or 1 only, and lengths that fill no line and no piece.
LAYOUTS = (
    Part(16, 8, 256),
    Part(8, 16, 256, gaps_nbytes=(4096, 0, 0)),
    Part(16, 8, 512),
    Part(16, 8, 256, gaps_nbytes=(0, 0, 256)),
    Part(16, 8, 256, transposed=True),
    Part(5, 7, 192, gaps_nbytes=(64, 512, 32)),
    Part(4, 9, 48, gaps_nbytes=(0, 0, 16), transposed=True),
    Part(33, 3, 272, gaps_nbytes=(16, 0, 0)),
    Part(1, 13, 80, gaps_nbytes=(8, 8, 8), shift_nbytes=8),
    Part(64, 1, 200),
    Part(11, 5, 36, gaps_nbytes=(4, 0, 4)),
    Part(7, 11, 130, gaps_nbytes=(0, 2, 6), shift_nbytes=2),
    Part(3, 1, 2, gaps_nbytes=(6, 0, 2)),
    Part(1, 1, 6),
    Part(1, 1, 16),
    Part(1, 300, 14),
)
# Bytes of any width, for what is only copied.
ODD_LAYOUTS = (
    Part(3, 5, 77, gaps_nbytes=(1, 3, 1), shift_nbytes=1),
    Part(9, 1, 1, gaps_nbytes=(5, 0, 3), transposed=True),
    Part(1, 1, 100_001, pages=3),
)


@dataclass
class Seen:
    """What a kernel left behind."""

    memory: Array
    crcs: Array
    faults: Array


class Batch:
    """Pages and payloads in one memory with guards in between, filled with noise.

    Attributes:
        memory: uint8[n]; addresses are offsets into it.
        order: Task numbers, as a launch takes them: all, shuffled.
    """

    def __init__(self, parts: Sequence[Part], *, stored: Callable[[int], int] = int) -> None:
        generator = np.random.default_rng(len(parts))
        self.slots = np.zeros(len(parts), SLOT)
        end = GUARD_NBYTES
        for number, part in enumerate(parts):
            base = -(-end // 256) * 256 + part.shift_nbytes
            self.slots[number] = (base, *steps(part, base))
            end = base + part.pages * int(self.slots[number]["page_stride"]) + GUARD_NBYTES
        lengths = np.array([stored(part.nbytes) for part in parts for _ in range(part.pages)])
        self.tasks = np.zeros(len(lengths), TASK)
        self.tasks["slot"] = [n for n, part in enumerate(parts) for _ in range(part.pages)]
        self.tasks["page"] = [page for part in parts for page in range(part.pages)]
        self.tasks["stored_nbytes"] = lengths
        rooms = -(-(lengths + GUARD_NBYTES) // 512) * 512
        self.tasks["payload"] = -(-end // 512) * 512 + np.cumsum(rooms) - rooms
        self.tasks["unit_first"] = np.arange(len(lengths))
        self.tasks["unit_count"] = 1
        end = int(self.tasks["payload"][-1]) + int(rooms[-1])
        self.order = generator.permutation(len(lengths)).astype(np.uint32)
        presets = [zeros_crc32(int(nbytes)) for nbytes in lengths]
        self.crcs = np.array(presets, np.uint32)
        self.faults = np.zeros(len(lengths), np.uint32)
        self.memory = generator.integers(0, 256, end, np.uint8)

    def page(self, number: int, memory: Array) -> Array:
        """A task's segment in the engine's memory: uint8[outer, inner, row_nbytes], a view."""
        task = self.tasks[number]
        slot = self.slots[task["slot"]]
        start = int(slot["base"]) + int(task["page"]) * int(slot["page_stride"])
        return np.lib.stride_tricks.as_strided(
            memory[start:],
            (int(slot["outer"]), int(slot["inner"]), int(slot["row_nbytes"])),
            (int(slot["outer_stride"]), int(slot["inner_stride"]), 1),
        )

    def segment(self, number: int) -> Array:
        """A task's segment, gathered: uint8[n]."""
        return np.ascontiguousarray(self.page(number, self.memory)).reshape(-1)

    def payload(self, number: int, memory: Array) -> Array:
        """A task's payload: uint8[stored_nbytes], a view."""
        task = self.tasks[number]
        return memory[int(task["payload"]) :][: int(task["stored_nbytes"])]

    def fill_pages(self, words: Callable[[int, int], Array]) -> None:
        """Fill every segment with what ``words`` gives for a task's number and elements."""
        for number in range(len(self.tasks)):
            page = self.page(number, self.memory)
            found = words(number, page.size // 2)
            page[:] = np.ascontiguousarray(found).view(np.uint8).reshape(page.shape)

    def payload_crcs(self, memory: Array) -> Array:
        found = [zlib.crc32(self.payload(number, memory)) for number in range(len(self.tasks))]
        return np.array(found, np.uint32)


def steps(part: Part, base: int) -> tuple[int, ...]:
    """A slot's fields behind its base."""
    near, far = (part.outer, part.inner) if part.transposed else (part.inner, part.outer)
    near_stride = part.width_nbytes + part.gaps_nbytes[2]
    far_stride = near * near_stride + part.gaps_nbytes[1]
    page_stride = far * far_stride + part.gaps_nbytes[0]
    access_nbytes = math.gcd(base, page_stride, far_stride, near_stride, part.width_nbytes, 16)
    strides = (near_stride, far_stride) if part.transposed else (far_stride, near_stride)
    return (page_stride, *strides, part.outer, part.inner, part.width_nbytes, access_nbytes)


@pytest.fixture
def device(cupy: ModuleType, launchers: Launcher) -> Device:
    """Run a kernel, by the name of its launcher, on a batch; gives what it left behind."""

    def run(
        name: str, batch: Batch, first: int = 0, count: int | None = None, **more: bool
    ) -> Seen:
        memory = cupy.asarray(batch.memory)
        slots, tasks = batch.slots.copy(), batch.tasks.copy()
        slots["base"] += np.uint64(memory.data.ptr)
        tasks["payload"] += np.uint64(memory.data.ptr)
        arrays = [
            cupy.asarray(array.view(np.uint8))
            for array in (slots, tasks, batch.crcs, batch.faults, batch.order)
        ]
        span = Span(*(array.data.ptr for array in arrays))
        count = len(tasks) - first if count is None else count
        chosen = tasks["stored_nbytes"][batch.order[first : first + count]]
        getattr(launchers, name)(span, first, count, int(chosen.max(initial=0)), **more)
        crcs, faults = (cupy.asnumpy(array).view(np.uint32) for array in arrays[2:4])
        return Seen(cupy.asnumpy(memory), crcs, faults)

    return run


@pytest.fixture(params=[10**9, 1], ids=["short shares", "long shares"])
def _shares(
    request: pytest.FixtureRequest, launchers: Launcher, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Let warps have as few lines as there are, or as many, whatever the batch."""
    monkeypatch.setattr(launchers._kernels, "most_warps", request.param)


any_shares = pytest.mark.usefixtures("_shares")


def fp8(dtype: str, elements: int) -> SegmentCodec:
    """The CPU's codec for segments of so many elements."""
    spec = SegmentSpec(dtype=dtype, role=Role.K, tokens=elements, heads=1, head_dim=1)
    bound = open_codec("fp8", rotation_seed=0, on_compile=lambda _: None).bind(spec)
    assert not isinstance(bound, RawReason)
    return bound


def held(dtype: str) -> Array:
    """Every word that E4M3FN can hold: uint16[n]."""
    return WORDS[MOST[dtype] >= (WORDS & 0x7FFF)]


def encoded(dtype: str, segment: Array) -> Array:
    """The CPU's payload of a segment."""
    words = segment.view(np.uint16)
    payload = np.zeros(len(words), np.uint8)
    assert fp8(dtype, len(words)).encode(words, payload) == len(words)
    return payload


def decoded(dtype: str, payload: Array) -> Array:
    """The CPU's segment of a payload: uint8[n]."""
    words = np.zeros(len(payload), np.uint16)
    fp8(dtype, len(payload)).decode(payload.copy(), words)
    return words.view(np.uint8)


# Raw: every layout, every access, odd lengths.


@any_shares
@pytest.mark.parametrize("layout", [*LAYOUTS, *ODD_LAYOUTS], ids=str)
def test_segments_are_gathered_with_the_crcs_of_their_bytes(device: Device, layout: Part) -> None:
    batch = Batch([layout])
    wanted = batch.memory.copy()
    for number in range(len(batch.tasks)):
        batch.payload(number, wanted)[:] = batch.segment(number)
    seen = device("gather_raw", batch)
    assert (seen.memory == wanted).all()
    assert (seen.crcs == batch.payload_crcs(wanted)).all()
    assert not seen.faults.any()

    seen = device("gather", batch)
    assert (seen.memory == wanted).all()
    assert (seen.crcs == batch.crcs).all()
    assert not seen.faults.any()


@any_shares
@pytest.mark.parametrize("layout", [*LAYOUTS, *ODD_LAYOUTS], ids=str)
def test_segments_are_scattered_and_nothing_beside_them_is_touched(
    device: Device, layout: Part
) -> None:
    batch = Batch([layout])
    batch.crcs[:] = 0
    wanted = batch.memory.copy()
    for number in range(len(batch.tasks)):
        page = batch.page(number, wanted)
        page[:] = batch.payload(number, wanted).reshape(page.shape)
    seen = device("scatter_raw", batch)
    assert (seen.memory == wanted).all()
    assert not seen.crcs.any()
    assert not seen.faults.any()


def test_segments_of_every_layout_share_a_launch(device: Device) -> None:
    batch = Batch([*LAYOUTS, *ODD_LAYOUTS])
    wanted = batch.memory.copy()
    for number in range(len(batch.tasks)):
        batch.payload(number, wanted)[:] = batch.segment(number)
    seen = device("gather_raw", batch)
    assert (seen.memory == wanted).all()
    assert (seen.crcs == batch.payload_crcs(wanted)).all()

    batch.memory, batch.crcs[:] = wanted, 0
    for number in range(len(batch.tasks)):
        batch.page(number, batch.memory)[:] = 0xA5
    wanted = batch.memory.copy()
    for number in range(len(batch.tasks)):
        page = batch.page(number, wanted)
        page[:] = batch.payload(number, wanted).reshape(page.shape)
    assert (device("scatter_raw", batch).memory == wanted).all()


@pytest.mark.parametrize("count", [0, 1, 2, 3, 31, 32, 33, 255, 256])
def test_a_launch_works_on_its_own_tasks_only(device: Device, count: int) -> None:
    batch = Batch([Part(4, 2, 208, pages=262)])
    first = 5
    wanted = batch.memory.copy()
    crcs = batch.crcs.copy()
    for number in batch.order[first : first + count]:
        batch.payload(number, wanted)[:] = batch.segment(number)
        crcs[number] = zlib.crc32(batch.segment(number))
    seen = device("gather_raw", batch, first, count)
    assert (seen.memory == wanted).all()
    assert (seen.crcs == crcs).all()


# CRC alone.


@any_shares
def test_payloads_of_any_length_at_any_address_have_the_crc_of_zlib(device: Device) -> None:
    lengths = [*range(600), *(4096 * n + more for n in range(1, 5) for more in range(-17, 18))]
    lengths += [2**16, 2**18, 2**20 + 5, 2**16 * 128 + 3]
    batch = Batch([Part(1, 1, 1, pages=len(lengths))])
    batch.tasks["stored_nbytes"] = lengths
    rooms = np.array(lengths) + 64
    batch.tasks["payload"] = np.cumsum(rooms) - rooms
    batch.memory = np.random.default_rng(0).integers(0, 256, int(rooms.sum()), np.uint8)
    batch.crcs[:] = [zeros_crc32(nbytes) for nbytes in lengths]
    assert set(batch.tasks["payload"][:600] % 16) == set(range(16))
    seen = device("crc32", batch)
    assert (seen.crcs == batch.payload_crcs(batch.memory)).all()
    assert (seen.memory == batch.memory).all()

    batch.crcs ^= batch.payload_crcs(batch.memory)
    batch.tasks["payload"] += np.uint64(1)  # another alignment
    batch.tasks["stored_nbytes"][:] = 0
    assert (device("crc32", batch).crcs == batch.crcs).all()  # nothing to add, whatever was there


@any_shares
def test_a_crc_that_is_expected_becomes_zero_and_one_flipped_bit_does_not(device: Device) -> None:
    batch = Batch([Part(1, 1, 4096 + 48, pages=400)])
    expected = batch.payload_crcs(batch.memory)
    places = np.random.default_rng(0).integers(0, 8 * (4096 + 48), len(batch.tasks))
    batch.crcs ^= expected
    assert not device("crc32", batch).crcs.any()
    for number in range(1, len(batch.tasks), 2):
        place = int(places[number])
        batch.payload(number, batch.memory)[place // 8] ^= 1 << place % 8
    seen = device("crc32", batch).crcs
    assert not seen[0::2].any()
    assert seen[1::2].all()


# FP8.


@any_shares
@both
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_segments_are_encoded_as_on_the_cpu(device: Device, layout: Part, dtype: str) -> None:
    batch = Batch([layout], stored=lambda nbytes: nbytes // 2)
    generator = np.random.default_rng(layout.nbytes)
    batch.fill_pages(lambda _, elements: generator.choice(held(dtype), elements))
    wanted = batch.memory.copy()
    for number in range(len(batch.tasks)):
        batch.payload(number, wanted)[:] = encoded(dtype, batch.segment(number))
    seen = device("encode_fp8", batch, is_half=dtype == "float16")
    assert (seen.memory == wanted).all()
    assert (seen.crcs == batch.payload_crcs(wanted)).all()
    assert not seen.faults.any()


@any_shares
@both
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_payloads_are_decoded_as_on_the_cpu(device: Device, layout: Part, dtype: str) -> None:
    batch = Batch([layout], stored=lambda nbytes: nbytes // 2)
    batch.crcs[:] = 0
    wanted = batch.memory.copy()  # payloads are noise, so every code is there
    for number in range(len(batch.tasks)):
        page = batch.page(number, wanted)
        page[:] = decoded(dtype, batch.payload(number, batch.memory)).reshape(page.shape)
    seen = device("decode_fp8", batch, is_half=dtype == "float16")
    assert (seen.memory == wanted).all()
    assert not seen.crcs.any()
    assert not seen.faults.any()


@both
def test_every_word_that_fp8_can_hold_is_encoded_in_any_order(device: Device, dtype: str) -> None:
    words = held(dtype)
    batch = Batch([Part(1, 1, 2 * len(words), pages=9)], stored=lambda nbytes: nbytes // 2)
    generator = np.random.default_rng(0)
    orders = [words, words[::-1], *(generator.permutation(words) for _ in range(7))]
    batch.fill_pages(lambda number, _: orders[number])
    seen = device("encode_fp8", batch, is_half=dtype == "float16")
    assert not seen.faults.any()
    for number in range(len(batch.tasks)):
        wanted = encoded(dtype, batch.segment(number))
        assert (batch.payload(number, seen.memory) == wanted).all()
    assert (seen.crcs == batch.payload_crcs(seen.memory)).all()


@both
def test_every_code_is_decoded_in_any_place(device: Device, dtype: str) -> None:
    batch = Batch([Part(16, 16, 514)], stored=lambda nbytes: nbytes // 2)
    batch.crcs[:] = 0
    codes = np.arange(256, dtype=np.uint8)
    generator = np.random.default_rng(0)
    batch.payload(0, batch.memory)[: 257 * 256] = np.tile(codes, 257)  # NaN codes among others
    batch.payload(1, batch.memory)[: 256 * 256] = generator.choice(codes[0x7E:0x80], 2**16)
    seen = device("decode_fp8", batch, is_half=dtype == "float16")
    for number in range(2):
        wanted = decoded(dtype, batch.payload(number, batch.memory))
        assert (np.ascontiguousarray(batch.page(number, seen.memory)).reshape(-1) == wanted).all()


@both
def test_every_word_that_fp8_cannot_hold_is_told_wherever_it_is(device: Device, dtype: str) -> None:
    bad = WORDS[MOST[dtype] < (WORDS & 0x7FFF)]
    elements = 75  # two pieces of some lanes, one of others, and a tail
    batch = Batch([Part(1, 1, 2 * elements, pages=len(bad))], stored=lambda nbytes: nbytes // 2)
    generator = np.random.default_rng(0)
    segments = generator.choice(held(dtype), (len(bad), elements))
    segments[np.arange(len(bad)), generator.integers(0, elements, len(bad))] = bad
    batch.fill_pages(lambda number, _: segments[number])
    seen = device("encode_fp8", batch, is_half=dtype == "float16")
    nonfinite = (bad & 0x7FFF) >= INFINITY[dtype]
    assert (seen.faults == np.where(nonfinite, NONFINITE, OUT_OF_RANGE)).all()
    # What a refused payload holds is nobody's, but nothing beside it has been touched.
    for number in range(len(bad)):
        batch.payload(number, batch.memory)[:] = batch.payload(number, seen.memory)
    assert (seen.memory == batch.memory).all()


@both
@pytest.mark.parametrize("place", [0, 1, 7, 8, 511, 512, 4095, 4096, 50_000, 65_535, 65_541])
def test_one_nan_anywhere_is_told_and_outweighs_what_is_too_large(
    device: Device, dtype: str, place: int
) -> None:
    elements = 2**16 + 6
    batch = Batch([Part(1, 1, 2 * elements)], stored=lambda nbytes: nbytes // 2)
    segment = np.full(elements, 0x8000 | MOST[dtype], np.uint16)
    segment[place] = MOST[dtype] + 1
    nan = segment.copy()
    nan[elements - 1 - place] = 0x8000 | (INFINITY[dtype] + 1)
    batch.fill_pages(lambda number, _: (segment, nan)[number])
    seen = device("encode_fp8", batch, is_half=dtype == "float16").faults
    assert seen[0] == OUT_OF_RANGE
    assert seen[1] & NONFINITE
    reasons = [
        fp8(dtype, elements).encode(words, np.zeros(elements, np.uint8)) for words in (segment, nan)
    ]
    assert reasons == [RawReason.OUT_OF_RANGE, RawReason.NONFINITE]


@both
@pytest.mark.parametrize("elements", [*range(1, 18), 255, 256, 257, 511, 513, 4095, 4097])
def test_tails_are_encoded_and_decoded(device: Device, dtype: str, elements: int) -> None:
    batch = Batch([Part(1, 1, 2 * elements, pages=3)], stored=lambda nbytes: nbytes // 2)
    generator = np.random.default_rng(elements)
    batch.fill_pages(lambda _, count: generator.choice(held(dtype), count))
    wanted = batch.memory.copy()
    for number in range(len(batch.tasks)):
        batch.payload(number, wanted)[:] = encoded(dtype, batch.segment(number))
    seen = device("encode_fp8", batch, is_half=dtype == "float16")
    assert (seen.memory == wanted).all()
    assert (seen.crcs == batch.payload_crcs(wanted)).all()

    batch.memory, batch.crcs[:] = seen.memory, 0
    for number in range(len(batch.tasks)):
        page = batch.page(number, wanted)
        page[:] = decoded(dtype, batch.payload(number, wanted)).reshape(page.shape)
    assert (device("decode_fp8", batch, is_half=dtype == "float16").memory == wanted).all()


# Units.

WRITERS = {
    "scatter_raw": (1, {}),
    "decode_fp8 bfloat16": (2, {"is_half": False}),
    "decode_fp8 float16": (2, {"is_half": True}),
}
all_writers = pytest.mark.parametrize("writer", WRITERS)


def written(device: Device, writer: str, batch: Batch) -> Array:
    """Whether each task's page has been changed, all of it; one changed in part is a failure."""
    for number in range(len(batch.tasks)):
        batch.page(number, batch.memory)[:] = 0xA5  # which no payload gives
    seen = device(writer.split(maxsplit=1)[0], batch, **WRITERS[writer][1])
    found = np.zeros(len(batch.tasks), bool)
    for number in range(len(batch.tasks)):
        changed = batch.page(number, seen.memory).reshape(-1).view(np.uint16) != 0xA5A5
        assert changed.all() or not changed.any(), number
        found[number] = changed.all()
    assert (seen.crcs == batch.crcs).all()
    assert (seen.faults == batch.faults).all()
    return found


def unit_batch(writer: str, tasks: int, nbytes: int) -> Batch:
    factor = WRITERS[writer][0]
    batch = Batch([Part(1, 1, nbytes, pages=tasks)], stored=lambda stored: stored // factor)
    batch.crcs[:] = 0
    for number in range(tasks):
        batch.payload(number, batch.memory)[:] = 0x34
    return batch


@all_writers
@pytest.mark.parametrize("nbytes", [6, 2048, 40_006])
def test_one_bad_task_leaves_its_units_pages_as_they_were(
    device: Device, writer: str, nbytes: int
) -> None:
    batch = unit_batch(writer, 20, nbytes)
    firsts = np.array([0, 3, 3, 3 + 5, 15, 20])  # the second unit is empty
    for first, end in itertools.pairwise(firsts):
        batch.tasks["unit_first"][first:end] = first
        batch.tasks["unit_count"][first:end] = end - first
    batch.crcs[4] = 0x80000000
    batch.faults[19] = UNDECODABLE
    batch.faults[9] = NONFINITE | OUT_OF_RANGE | SCALAR_OVERFLOW  # of an encoder: none of ours
    wanted = np.ones(20, bool)
    wanted[3:8] = wanted[15:20] = False
    assert (written(device, writer, batch) == wanted).all()


@all_writers
@pytest.mark.parametrize("count", [1, 31, 32, 33, 128, 129, 300])
def test_the_bad_task_is_found_wherever_it_is_in_its_unit(
    device: Device, writer: str, count: int
) -> None:
    batch = unit_batch(writer, count + 2, 64)
    batch.tasks["unit_first"][1:-1] = 1
    batch.tasks["unit_count"][1:-1] = count
    wanted = np.zeros(count + 2, bool)
    wanted[[0, -1]] = True
    for place in sorted({0, count // 2, count - 1, min(127, count - 1), min(128, count - 1)}):
        batch.crcs[:], batch.faults[:] = 0, 0
        (batch.crcs if place % 2 else batch.faults)[1 + place] = UNDECODABLE
        assert (written(device, writer, batch) == wanted).all()
    batch.crcs[:], batch.faults[:] = 0, 0
    assert written(device, writer, batch).all()


# Around the kernels.


@pytest.mark.parametrize(
    ("kernel", "factor"), [(("raw",), 1), (("fp8", False), 2), (("fp8", True), 2)]
)
def test_a_launch_is_done_by_the_kernel_that_it_names(
    cupy: ModuleType, launchers: Launcher, kernel: tuple[Any, ...], factor: int
) -> None:
    generator = np.random.default_rng(0)
    words = generator.choice(held("float16" if kernel[-1] is True else "bfloat16"), (3, 4096))
    pages, payloads = cupy.asarray(words), cupy.zeros((3, 8192), np.uint8)
    slots, tasks = np.zeros(1, SLOT), np.zeros(3, TASK)
    slots[0] = (pages.data.ptr, 8192, 8192, 8192, 1, 1, 8192, 16)
    tasks["page"] = range(3)
    tasks["payload"] = payloads.data.ptr + 8192 * np.arange(3)
    tasks["stored_nbytes"] = 8192 // factor
    tasks["unit_count"] = 3
    crcs = np.full(3, zeros_crc32(8192 // factor), np.uint32)
    order = np.array([2, 0, 1], np.uint32)
    arrays = [
        cupy.asarray(array.view(np.uint8))
        for array in (slots, tasks, crcs, np.zeros(3, np.uint32), order)
    ]
    span = Span(*(array.data.ptr for array in arrays))
    launch = Launch(kernel, 0, 3, 8192 // factor)
    launchers.encode(span, launch)
    found = cupy.asnumpy(payloads)[:, : 8192 // factor]
    crcs = np.array([zlib.crc32(row.tobytes()) for row in found], np.uint32)
    assert (cupy.asnumpy(arrays[2]).view(np.uint32) == crcs).all()

    zeros = cupy.zeros(3, np.uint32)
    launchers.move(arrays[2].data.ptr, zeros.data.ptr, zeros.nbytes)
    pages[:] = 0
    launchers.decode(span, launch)
    back = cupy.asnumpy(pages)
    if kernel == ("raw",):
        assert (back == words).all()
    else:
        dtype = "float16" if kernel[1] else "bfloat16"
        assert (back.view(np.uint8).reshape(-1) == decoded(dtype, found.reshape(-1))).all()


@pytest.mark.parametrize("words", [0, 1, 2, 255, 257, 5000, 100_000])
def test_words_are_moved_and_no_others(cupy: ModuleType, launchers: Launcher, words: int) -> None:
    source = np.random.default_rng(words).integers(0, 2**32, words + 2).astype(np.uint32)
    there, here = cupy.asarray(source), cupy.zeros(words + 2, np.uint32)
    launchers.move(here.data.ptr + 4, there.data.ptr + 4, 4 * words)
    found = cupy.asnumpy(here)
    assert (found[1:-1] == source[1:-1]).all()
    assert (found[[0, -1]] == 0).all()


def test_a_launch_of_an_unknown_kernel_is_refused(launchers: Launcher) -> None:
    launch = Launch(("zip",), 0, 1, 1)
    for start in (launchers.encode, launchers.decode):
        with pytest.raises(ValueError, match=r"\('zip',\)"):
            start(Span(0, 0, 0, 0, 0), launch)
