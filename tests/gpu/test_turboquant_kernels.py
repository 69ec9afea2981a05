"""TurboQuant's kernels: the CPU's bytes in every shape, and not one byte beside them."""

from __future__ import annotations

import itertools
import math
import re
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pytest

from orbitkv.codecs import SegmentSpec, tables
from orbitkv.codecs.cuda import kernels
from orbitkv.codecs.cuda.kernels import Launcher, Span, zeros_crc32
from orbitkv.codecs.cuda.tasks import SLOT, TASK
from orbitkv.codecs.host import TurboQuantSegments
from orbitkv.errors import CorruptObject
from orbitkv.segment import Role
from tests.codecs.reference import SEED, bound, words

pytestmark = pytest.mark.gpu

BITS = (4, 3)
HEAD_DIMS = (32, 64, 128, 256)
DTYPES = ("bfloat16", "float16")
UNDECODABLE = 8
GUARD_NBYTES = 256
MANY_ELEMENTS = 2**21

Array = npt.NDArray[Any]
Device = Callable[..., "Seen"]

every_variant = pytest.mark.parametrize(
    ("bits", "head_dim", "dtype"), list(itertools.product(BITS, HEAD_DIMS, DTYPES))
)


@dataclass(frozen=True)
class Part:
    """Segments of one slot: lengths and gaps of their axes in an engine's memory."""

    role: Role = Role.K
    outer: int = 3
    inner: int = 2
    pages: int = 2
    gaps_nbytes: tuple[int, int, int] = (0, 0, 0)  # after a page, an outer index, a row
    shift_nbytes: int = 0
    transposed: bool = False


# Rows end to end, apart, and so that they can be reached in 16, 8, 4, 2 bytes or 1 only.
LAYOUTS = (
    {},
    {"gaps_nbytes": (64, 0, 0)},
    {"gaps_nbytes": (0, 512, 32), "outer": 5, "inner": 7},
    {"gaps_nbytes": (0, 0, 48), "transposed": True, "outer": 4, "inner": 9},
    {"gaps_nbytes": (8, 8, 8), "outer": 1, "inner": 13},
    {"gaps_nbytes": (4, 0, 4), "outer": 11, "inner": 1},
    {"gaps_nbytes": (0, 2, 6), "shift_nbytes": 2},
    {"gaps_nbytes": (1, 3, 1), "shift_nbytes": 1, "transposed": True},
)


class Seen(NamedTuple):
    """What a kernel left behind."""

    memory: Array
    faults: Array
    crcs: Array


class Batch:
    """Pages and payloads in one memory with guards in between, filled with noise.

    Attributes:
        memory: uint8[n]; addresses are offsets into it.
        payloads: Of each task: its bytes, a view of the memory.
        codecs: Of each task: the CPU's.
        order: Task numbers, as a launch takes them: all, shuffled.
    """

    def __init__(self, parts: Sequence[Part], bits: int, head_dim: int, dtype: str) -> None:
        generator = np.random.default_rng(len(parts))
        self.bits, self.head_dim, self.is_half = bits, head_dim, dtype == "float16"
        self.codecs: list[TurboQuantSegments] = []
        self.slots = np.zeros(len(parts), SLOT)
        end = GUARD_NBYTES
        for number, part in enumerate(parts):
            spec = SegmentSpec(
                dtype=dtype,
                role=part.role,
                tokens=part.outer,
                heads=part.inner,
                head_dim=head_dim,
            )
            codec = bound(f"turboquant-{bits}", spec)
            assert isinstance(codec, TurboQuantSegments)
            self.codecs += [codec] * part.pages
            base = -(-end // 256) * 256 + part.shift_nbytes
            self.slots[number] = (base, *self._steps(part, base))
            end = base + part.pages * int(self.slots[number]["page_stride"]) + GUARD_NBYTES
        self.tasks = np.zeros(len(self.codecs), TASK)
        self.tasks["slot"] = [n for n, part in enumerate(parts) for _ in range(part.pages)]
        self.tasks["page"] = [page for part in parts for page in range(part.pages)]
        for task, codec in zip(self.tasks, self.codecs, strict=True):
            end = -(-end // 512) * 512
            task["payload"], task["stored_nbytes"] = end, codec.encoded_nbytes
            end += codec.encoded_nbytes + GUARD_NBYTES
        self.tasks["unit_first"] = np.arange(len(self.tasks))
        self.tasks["unit_count"] = 1
        self.order = generator.permutation(len(self.tasks)).astype(np.uint32)
        self.crcs = np.zeros(len(self.tasks), np.uint32)
        self.faults = np.zeros(len(self.tasks), np.uint32)
        self.memory = generator.integers(0, 256, end, np.uint8)

    def _steps(self, part: Part, base: int) -> tuple[int, ...]:
        row_nbytes = self.head_dim * (4 if part.role is Role.KV else 2)
        near, far = (part.outer, part.inner) if part.transposed else (part.inner, part.outer)
        near_stride = row_nbytes + part.gaps_nbytes[2]
        far_stride = near * near_stride + part.gaps_nbytes[1]
        page_stride = far * far_stride + part.gaps_nbytes[0]
        access_nbytes = math.gcd(base, page_stride, far_stride, near_stride, row_nbytes, 16)
        strides = (near_stride, far_stride) if part.transposed else (far_stride, near_stride)
        return (page_stride, *strides, part.outer, part.inner, row_nbytes, access_nbytes)

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

    def payload(self, number: int, memory: Array) -> Array:
        """A task's payload: uint8[stored_nbytes], a view."""
        task = self.tasks[number]
        return memory[int(task["payload"]) :][: self.codecs[number].encoded_nbytes]

    def scalars(self, number: int, memory: Array) -> Array:
        """A payload's norms, scales and minima: uint16, a view."""
        spec = self.codecs[number].spec
        return self.payload(number, memory)[spec.elements * self.bits // 8 :].view(np.uint16)

    def fill_pages(self, elements: Callable[[int, int], Array]) -> None:
        """Fill every segment with what ``elements`` gives for so many vectors of a task."""
        for number, codec in enumerate(self.codecs):
            page = self.page(number, self.memory)
            found = elements(number, codec.spec.vectors)
            page[:] = np.ascontiguousarray(found).view(np.uint8).reshape(page.shape)

    def segment(self, number: int) -> Array:
        """A task's elements, gathered: uint16[n]."""
        return np.ascontiguousarray(self.page(number, self.memory)).reshape(-1).view(np.uint16)

    def encoded(self) -> tuple[Array, Array]:
        """The memory after the CPU has encoded every segment, and the faults that it found."""
        memory = self.memory.copy()
        faults = np.zeros(len(self.tasks), np.int64)
        for number, codec in enumerate(self.codecs):
            source, payload = self.segment(number), np.zeros(codec.encoded_nbytes, np.uint8)
            addresses = (np.array((array.ctypes.data,)) for array in (source, payload))
            codec._encode(*addresses, faults[number : number + 1])
            self.payload(number, memory)[:] = payload
        return memory, faults

    def decoded(self) -> tuple[Array, Array]:
        """The memory after the CPU has decoded every payload, and what it refused."""
        memory = self.memory.copy()
        faults = np.zeros(len(self.tasks), np.int64)
        for number, codec in enumerate(self.codecs):
            segment = np.zeros(codec.spec.elements, np.uint16)
            try:
                codec.decode(self.payload(number, memory).copy(), segment)
            except CorruptObject:
                faults[number] = UNDECODABLE
            page = self.page(number, memory)
            page[:] = segment.view(np.uint8).reshape(page.shape)
        return memory, faults


@pytest.fixture
def device(cupy: ModuleType, launchers: Launcher, monkeypatch: pytest.MonkeyPatch) -> Device:
    """Encode or decode tasks of a batch; gives what that left behind."""

    def run(
        way: str,
        batch: Batch,
        first: int = 0,
        count: int | None = None,
        most_warps: int | None = None,
    ) -> Seen:
        memory = cupy.asarray(batch.memory)
        slots, tasks = batch.slots.copy(), batch.tasks.copy()
        slots["base"] += np.uint64(memory.data.ptr)
        tasks["payload"] += np.uint64(memory.data.ptr)
        presets = [zeros_crc32(int(nbytes)) for nbytes in tasks["stored_nbytes"]]
        crcs = batch.crcs if way == "decode" else np.array(presets, np.uint32)
        arrays = [
            cupy.asarray(array.view(np.uint8))
            for array in (slots, tasks, crcs, batch.faults, batch.order)
        ]
        span = Span(*(array.data.ptr for array in arrays))
        count = len(tasks) - first if count is None else count
        chosen = tasks["stored_nbytes"][batch.order[first : first + count]]
        kernel = ("turboquant", batch.bits, batch.head_dim, batch.is_half, SEED)
        launchers._kernels.load(kernel)
        if most_warps is not None:
            monkeypatch.setattr(launchers._kernels, "most_warps", most_warps)
        launch = getattr(launchers, f"{way}_turboquant")
        launch(span, first, count, int(chosen.max(initial=0)), kernel=kernel)
        found = [cupy.asnumpy(arrays[index]).view(np.uint32) for index in (3, 2)]
        return Seen(cupy.asnumpy(memory), *found)

    return run


def elements(vectors: int, head_dim: int, dtype: str, *, seed: int = 0) -> Array:
    """Vectors of every kind that can be encoded, one kind after the other: uint16[vectors, D]."""
    generator = np.random.default_rng([seed, vectors, head_dim])
    shape = (vectors, head_dim)
    values = generator.standard_normal(shape) * np.exp(generator.normal(0, 2, (vectors, 1)))
    kind = (np.arange(vectors) + 7 * seed) % 16
    one = generator.integers(0, head_dim, vectors)
    values[kind == 1] = generator.standard_t(2, shape)[kind == 1].clip(-1e3, 1e3)
    values[kind == 2] *= 2.0**-20  # FP16 scalars are subnormal
    values[kind == 3] *= 2.0**-26  # the norm is zero, or nearly so
    values[kind == 4] = 0
    values[kind == 5] = -0.0
    values[kind == 6] = generator.choice([0.0, -0.0, 1.0], shape)[kind == 6]
    values[kind == 7] = values[kind == 7][:, :1]  # all equal
    values[kind == 8, one[kind == 8]] = 60000  # nearly all that FP16 holds
    values[kind == 9, one[kind == 9]] = -3000
    values[kind == 10] = generator.integers(0, 31, shape)[kind == 10] / 2  # ties of V
    values[kind == 11] = generator.integers(-1, 2, shape)[kind == 11]  # K: zeros after rotation
    values[kind == 12] = values[kind == 12].clip(-1, 1) * 65504 / head_dim
    found = words(values.clip(-60000, 60000), dtype)
    infinite = 0x7C00 if dtype == "float16" else 0x7F80
    tiny = generator.integers(0, 0x10000, shape).astype(np.uint16)
    found[kind == 13] = (tiny & (0x8000 | infinite >> 5))[kind == 13]
    found[kind == 14] = (tiny & 0x80FF)[kind == 14]
    found[kind == 14, one[kind == 14]] = words(np.array([1.0]), dtype)
    return found


def everything(bits: int, head_dim: int, dtype: str) -> Batch:
    """Every role in every layout."""
    parts = [Part(role=role, **layout) for role in Role for layout in LAYOUTS]
    batch = Batch(parts, bits, head_dim, dtype)
    accesses = {int(slot["access_nbytes"]) for slot in batch.slots}
    assert accesses == {16, 8, 4, 2, 1}
    batch.fill_pages(lambda number, vectors: elements(vectors, head_dim, dtype, seed=number))
    return batch


def check_encoding(device: Device, batch: Batch, **how: int) -> Array:
    wanted, faults = batch.encoded()
    seen = device("encode", batch, **how)
    for number in np.flatnonzero(faults):  # what a refused segment's payload holds is nobody's
        batch.payload(number, wanted)[:] = batch.payload(number, seen.memory)
    assert (seen.faults == faults).all()
    assert (seen.memory == wanted).all()
    payloads = [batch.payload(number, wanted) for number in range(len(batch.tasks))]
    assert seen.crcs.tolist() == [zlib.crc32(payload) for payload in payloads]
    return faults


def check_decoding(device: Device, batch: Batch, **how: int) -> Array:
    wanted, faults = batch.decoded()
    seen = device("decode", batch, **how)
    for number in np.flatnonzero(faults):
        batch.page(number, wanted)[:] = batch.page(number, seen.memory)
    assert (seen.faults == faults).all()
    assert (seen.memory == wanted).all()
    return faults


def set_payloads(batch: Batch) -> None:
    """Put what the CPU encodes in place of the payloads, and noise in place of the pages."""
    wanted, faults = batch.encoded()
    assert not faults.any()
    generator = np.random.default_rng(0)
    batch.fill_pages(
        lambda _, vectors: generator.integers(0, 2**16, vectors * batch.head_dim, np.uint16)
    )
    for number in range(len(batch.tasks)):
        batch.payload(number, batch.memory)[:] = batch.payload(number, wanted)


@every_variant
def test_encoding_writes_the_cpus_bytes_in_every_layout(
    device: Device, bits: int, head_dim: int, dtype: str
) -> None:
    assert not check_encoding(device, everything(bits, head_dim, dtype)).any()


@every_variant
def test_decoding_writes_the_cpus_elements_in_every_layout(
    device: Device, bits: int, head_dim: int, dtype: str
) -> None:
    batch = everything(bits, head_dim, dtype)
    set_payloads(batch)
    assert not check_decoding(device, batch).any()


@every_variant
def test_any_codes_with_any_scalars_that_an_encoder_writes_decode_alike(
    device: Device, bits: int, head_dim: int, dtype: str
) -> None:
    batch = Batch([Part(role, outer=17, inner=5) for role in Role], bits, head_dim, dtype)
    generator = np.random.default_rng(0)
    for number, codec in enumerate(batch.codecs):
        rows = codec.spec.rows
        columns = [generator.integers(1, 0x7C00, rows, np.uint16) for _ in range(3)]
        columns[2] |= generator.integers(0, 2, rows, np.uint16) << 15
        chosen = {Role.K: columns[:1], Role.V: columns[1:], Role.KV: columns}[codec.spec.role]
        batch.scalars(number, batch.memory)[:] = np.concatenate(chosen)
    batch.scalars(0, batch.memory)[:3] = 0, 1, 0x7BFF
    assert not check_decoding(device, batch).any()


@every_variant
def test_many_ordinary_vectors_are_encoded_and_decoded_alike(
    device: Device, bits: int, head_dim: int, dtype: str
) -> None:
    rows = MANY_ELEMENTS // head_dim // 8
    parts = [Part(role, outer=rows, inner=1, pages=2) for role in (Role.K, Role.V, Role.KV)]
    batch = Batch(parts, bits, head_dim, dtype)
    generator = np.random.default_rng(0)

    def ordinary(_: int, vectors: int) -> Array:
        scale = np.exp(generator.normal(0, 1, (vectors, 1)))
        return words(generator.standard_normal((vectors, head_dim)) * scale, dtype)

    batch.fill_pages(ordinary)
    check_encoding(device, batch)
    set_payloads(batch)
    check_decoding(device, batch)


@pytest.mark.parametrize("most_warps", [1, 10**9])
@pytest.mark.parametrize(("bits", "head_dim"), [(4, 128), (3, 256)])
def test_a_warp_takes_one_step_or_many(
    device: Device, bits: int, head_dim: int, most_warps: int
) -> None:
    parts = [Part(role, outer=61, inner=3) for role in Role]
    batch = Batch(parts, bits, head_dim, "bfloat16")
    batch.fill_pages(lambda _, vectors: elements(vectors, head_dim, "bfloat16"))
    check_encoding(device, batch, most_warps=most_warps)
    set_payloads(batch)
    check_decoding(device, batch, most_warps=most_warps)


@every_variant
def test_segments_that_must_stay_raw_are_told_with_the_cpus_faults(
    device: Device, bits: int, head_dim: int, dtype: str
) -> None:
    parts = [Part(role, outer=5, inner=3, pages=12) for role in Role]
    batch = Batch(parts, bits, head_dim, dtype)
    infinite = 0x7C00 if dtype == "float16" else 0x7F80
    huge = words(np.array([65000.0 if dtype == "float16" else 3e38]), dtype)[0]
    generator = np.random.default_rng(0)

    def spoilt(number: int, vectors: int) -> Array:
        found = elements(vectors, head_dim, dtype, seed=number)
        row, column = generator.integers(0, vectors), generator.integers(0, head_dim - 1)
        sign = np.uint16(generator.integers(0, 2) << 15)
        kind = number % 12
        if kind in {1, 2, 3}:
            found[row, column] = infinite | sign | (0, 1, 0x7F)[kind - 1]
        elif kind in {4, 5}:
            found[row, column : column + 2] = huge | sign
        elif kind == 6:
            found[row, column : column + 2] = huge, infinite | sign
        elif kind == 7:
            found[0, 0], found[-1, -2:] = infinite | sign, huge | sign
        elif kind == 8:
            found[:] = generator.integers(0, 2**16, found.shape)
        elif kind == 9:
            found[row, column : column + 2] = huge, huge | 0x8000
        elif kind == 10:
            found[:] = infinite - 1
        return found

    batch.fill_pages(spoilt)
    faults = check_encoding(device, batch)
    assert set(faults) >= {0, 1, 4, 5} if dtype == "bfloat16" else {0, 1, 4}


@every_variant
def test_scalars_that_no_encoder_writes_are_refused_wherever_they_stand(
    device: Device, bits: int, head_dim: int, dtype: str
) -> None:
    parts = [Part(role, outer=5, inner=7, pages=18) for role in Role]
    batch = Batch(parts, bits, head_dim, dtype)
    batch.fill_pages(lambda number, vectors: elements(vectors, head_dim, dtype, seed=number))
    set_payloads(batch)
    for number in range(len(batch.tasks)):
        scalars = batch.scalars(number, batch.memory)
        bad = (0x7C00, 0x7E01, 0xFC00, 0xBC00, 0x0000, 0x8000)[number % 6]
        columns = len(scalars) // 35
        scalars[number // 6 % columns * 35 + (0, 34, 17)[number // 6 % 3]] = bad
    faults = check_decoding(device, batch)
    assert set(faults) == {0, UNDECODABLE}


@pytest.mark.parametrize("bits", BITS)
def test_a_unit_with_a_fault_that_is_known_already_is_not_touched(
    device: Device, bits: int
) -> None:
    batch = Batch([Part(Role.KV, outer=9, pages=140)], bits, 128, "bfloat16")
    batch.fill_pages(lambda number, vectors: elements(vectors, 128, "bfloat16", seed=number))
    set_payloads(batch)
    wanted, _ = batch.decoded()
    # Units of 1, 2, 4 and 133 tasks; all but the second have one at fault.
    for first, count in ((0, 1), (1, 2), (3, 4), (7, 133)):
        batch.tasks["unit_first"][first : first + count] = first
        batch.tasks["unit_count"][first : first + count] = count
    batch.crcs[[0, 139]] = 1 << 31, 7
    batch.faults[5] = UNDECODABLE
    for number in (0, *range(3, 140)):
        batch.page(number, wanted)[:] = batch.page(number, batch.memory)
    seen = device("decode", batch)
    assert (seen.memory == wanted).all()
    assert (seen.faults == batch.faults).all()


@pytest.mark.parametrize("way", ["encode", "decode"])
@pytest.mark.parametrize(("first", "count"), [(0, 1), (1, 2), (3, 33), (0, 256), (255, 1), (7, 0)])
def test_a_launch_works_on_its_part_of_the_order(
    device: Device, way: str, first: int, count: int
) -> None:
    batch = Batch([Part(Role.K, 1, 1, 128), Part(Role.V, 3, 3, 128)], 4, 64, "float16")
    batch.fill_pages(lambda number, vectors: elements(vectors, 64, "float16", seed=number))
    if way == "decode":
        set_payloads(batch)
    whole, _ = batch.encoded() if way == "encode" else batch.decoded()
    wanted = batch.memory.copy()
    part = batch.payload if way == "encode" else batch.page
    for number in batch.order[first : first + count]:
        part(number, wanted)[:] = part(number, whole)
    seen = device(way, batch, first, count)
    assert (seen.memory == wanted).all()
    assert not seen.faults.any()


@pytest.mark.parametrize("role", list(Role))
def test_a_payload_of_another_length_is_neither_written_nor_decoded(
    device: Device, role: Role
) -> None:
    batch = Batch([Part(role)], 4, 64, "float16")
    batch.tasks["stored_nbytes"] += np.array([1, -1], np.int64).astype(np.uint32)
    for way, fault in (("encode", 0), ("decode", UNDECODABLE)):
        seen = device(way, batch)
        assert (seen.memory == batch.memory).all()
        assert (seen.faults == fault).all()


@pytest.mark.parametrize("bits", BITS)
def test_constants_are_those_of_the_tables(bits: int) -> None:
    text = (Path(kernels.__file__).parent / "turboquant.cu").read_text(encoding="utf-8")
    found = [
        np.array([int(word, 16) for word in re.findall(r"0x\w+", row)], np.uint32).view(np.float32)
        for row in re.findall(r"(?:CENTROIDS|EDGES)\[\] = {(.*?)}", text, re.DOTALL)
    ]
    centroids, edges = found[:2] if bits == 4 else found[2:]
    assert (centroids == tables.CENTROIDS[bits]).all()
    assert (edges == tables.EDGES[bits]).all()
