"""ANS on a GPU: lossless, laid out as objects are, and harmless whatever it is given."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from orbitkv.codecs.ans import AnsCodec
from orbitkv.codecs.base import SegmentSpec, reason_to_stay_raw
from orbitkv.codecs.cuda import ans
from orbitkv.codecs.cuda.ans import AnsDevice, AnsSegments, EncodePlan, cut, describe
from orbitkv.codecs.cuda.kernels import Launcher, Span
from orbitkv.codecs.cuda.tasks import SLOT, TASK
from orbitkv.codecs.nvcomp import Kind, Nvcomp, open_nvcomp
from orbitkv.config import KIB, MIB
from orbitkv.errors import Unavailable
from orbitkv.objects import (
    Format,
    RawReason,
    align_up,
    crc32,
    object_nbytes,
    payload_offsets,
)
from orbitkv.segment import DTYPE_NBYTES, Role

pytestmark = pytest.mark.gpu

UNDECODABLE = 8
UNTOUCHED = 0xA5
GUARD_NBYTES = 512
DAMAGED = 24  # segments of a batch of 64
DTYPES = ("bfloat16", "float16", "float8_e4m3fn", "float32")

Bytes = npt.NDArray[np.uint8]
Bound = AnsSegments | RawReason


@pytest.fixture(scope="session")
def nvcomp() -> Nvcomp:
    """The library that is installed, or the one which the environment names."""
    try:
        return open_nvcomp(os.environ.get("ORBITKV_NVCOMP_LIBRARY"))
    except Unavailable as error:
        pytest.skip(str(error))


@pytest.fixture(scope="session")
def machine(cupy: ModuleType, launchers: Launcher, nvcomp: Nvcomp) -> Machine:
    return Machine(cupy, launchers, AnsDevice(nvcomp))


def normal(nbytes: int, dtype: str, seed: int = 0) -> bytes:
    """Normal numbers, which ANS makes shorter."""
    elements = -(-nbytes // DTYPE_NBYTES[dtype])
    values = np.random.default_rng(seed).standard_normal(elements, np.float32)
    if dtype == "float32":  # with a mantissa of bfloat16's length, as order 0 finds nothing else
        words: npt.NDArray[Any] = values.view(np.uint32) & np.uint32(0xFFFF0000)
    elif dtype == "float16":
        words = values.astype(np.float16)
    else:
        words = (values.view(np.uint32) >> 16).astype(np.uint16)
        if dtype == "float8_e4m3fn":
            magnitude = np.clip((words.astype(np.int32) & 0x7FFF) // 16 - 960, 0, 0x7E)
            words = (magnitude | words >> 8 & 0x80).astype(np.uint8)
    return words.tobytes()[:nbytes]


def noise(nbytes: int, seed: int = 0) -> bytes:
    """What cannot be made shorter."""
    return np.random.default_rng(seed).bytes(nbytes)


@dataclass
class Encoded:
    """A batch of objects, and tasks whose payloads are offsets in their objects.

    Attributes:
        coded_nbytes: Length that each task's payload has, or would have, by ANS. 0: not coded.
    """

    tasks: npt.NDArray[np.void]
    results: npt.NDArray[np.void]
    crcs: npt.NDArray[np.uint32]
    images: list[bytes]
    counts: Sequence[int]
    coded_nbytes: list[int]

    def payloads(self) -> list[tuple[int, int, int]]:
        """Of each task: its object, offset and length."""
        owners = np.repeat(np.arange(len(self.counts)), self.counts).tolist()
        offsets, lengths = self.tasks["payload"].tolist(), self.tasks["stored_nbytes"].tolist()
        return list(zip(owners, offsets, lengths, strict=True))


@dataclass
class Decoded:
    segments: list[bytes]
    faults: list[int]
    crcs: list[int]


class Machine:
    """Does what the lanes do with a batch: gather, encode, sum; then sum, decode, scatter."""

    def __init__(self, cupy: ModuleType, launchers: Launcher, device: AnsDevice) -> None:
        self.cupy = cupy
        self.compiled = launchers._kernels
        self.device = device

    @property
    def stream(self) -> int:
        return int(self.cupy.cuda.get_current_stream().ptr)

    @property
    def kernels(self) -> Launcher:
        return self.compiled.on(self.stream)

    def room(self, nbytes: int) -> Any:  # noqa: ANN401 - an array of CuPy's
        """Device memory at a multiple of 4 KiB, with a guard behind it."""
        memory = self.cupy.full(nbytes + GUARD_NBYTES + 4096, UNTOUCHED, np.uint8)
        start = -int(memory.data.ptr) % 4096
        return memory[start : start + nbytes + GUARD_NBYTES]

    def upload(self, values: npt.NDArray[Any]) -> Any:  # noqa: ANN401 - as above
        memory = self.room(values.nbytes)
        memory[: values.nbytes] = self.cupy.asarray(values.reshape(-1).view(np.uint8))
        return memory

    def check_guards(self, *rooms: Any) -> None:  # noqa: ANN401 - as above
        for room in rooms:
            assert bool((room[-GUARD_NBYTES:] == UNTOUCHED).all()), "written behind a buffer"

    def pages(self, lengths: Sequence[int]) -> tuple[Any, npt.NDArray[np.void], list[int]]:
        """A page of one slot for each segment, guarded; where they are, as kernels take it."""
        offsets, end = [], 0
        for nbytes in lengths:
            offsets.append(end)
            end += align_up(nbytes, 512) + GUARD_NBYTES
        pages = self.room(end)
        slots = np.zeros(len(lengths), SLOT)
        for slot, nbytes, offset in zip(slots, lengths, offsets, strict=True):
            base = int(pages.data.ptr) + offset
            slot["base"] = base
            slot["page_stride"] = slot["outer_stride"] = slot["inner_stride"] = nbytes
            slot["outer"] = slot["inner"] = 1
            slot["row_nbytes"] = nbytes
            slot["access_nbytes"] = math.gcd(base, nbytes, 16)
        return pages, slots, offsets

    def encode(
        self,
        segments: Sequence[bytes],
        bound: Sequence[Bound],
        counts: Sequence[int],
        *,
        gathered: bool = True,
    ) -> Encoded:
        count, lengths = len(segments), [len(segment) for segment in segments]
        pages, slots, offsets = self.pages(lengths)
        for segment, offset in zip(segments, offsets, strict=True):
            values = np.frombuffer(segment, np.uint8)
            pages[offset : offset + len(segment)] = self.cupy.asarray(values)
        rows = describe(bound, lengths)
        plan = ans.plan_encode(self.device.nvcomp, rows, counts)
        shares = ans.encode_shares(self.device.nvcomp, rows)
        assert plan.descriptors_nbytes + plan.workspace_nbytes <= shares.sum() + ans.SLACK_NBYTES
        staging = self.room(int(sum(align_up(nbytes, 512) for nbytes in lengths)))
        staged = np.cumsum([0, *(align_up(nbytes, 512) for nbytes in lengths[:-1])])
        tasks = np.zeros(count, TASK)
        tasks["slot"] = tasks["unit_first"] = np.arange(count)
        tasks["payload"] = staged + int(staging.data.ptr)
        tasks["stored_nbytes"] = lengths
        tasks["unit_count"] = 1
        workspace = self.room(plan.workspace_nbytes)
        output = self.room(plan.most_output_nbytes)
        sources = staged + int(staging.data.ptr)
        if not gathered:
            sources = np.array(offsets) + int(pages.data.ptr)
        descriptors = np.zeros(plan.descriptors_nbytes, np.uint8)
        plan.fill(descriptors, sources, int(workspace.data.ptr))
        on_device = [
            self.upload(values)
            for values in (
                slots,
                tasks,
                descriptors,
                np.full(count, 0xDEADBEEF, np.uint32),
                np.zeros(count, np.uint32),
                np.zeros(count, ans.RESULT),
            )
        ]
        at = [int(memory.data.ptr) for memory in on_device]
        span = Span(slots=at[0], tasks=at[1], crcs=at[3], faults=at[4], order=0)
        if gathered:
            self.kernels.gather(span, 0, count, max(lengths))
        self.device.enqueue_encode(
            plan,
            self.stream,
            descriptors=at[2],
            tasks=at[1],
            crcs=at[3],
            results=at[5],
            workspace=int(workspace.data.ptr),
            output=int(output.data.ptr),
        )
        self.kernels.crc32(span, 0, count, max(lengths))
        self.check_guards(pages, staging, workspace, output, *on_device)
        tasks = on_device[1].get()[: tasks.nbytes].view(TASK)
        crcs = on_device[3].get()[: 4 * count].view(np.uint32)
        results = on_device[5].get()[: 8 * count].view(ans.RESULT)
        everything = output.get()
        images, start, first = [], 0, 0
        for tasks_of_object in counts:
            mine = slice(first, first + tasks_of_object)
            (nbytes,) = set(results["object_nbytes"][mine].tolist())
            tasks["payload"][mine] -= int(output.data.ptr) + start
            images.append(everything[start : start + nbytes].tobytes())
            start += nbytes
            first += tasks_of_object
        assert (everything[start:] == UNTOUCHED).all(), "written behind the last object"
        coded_nbytes = self.coded_nbytes(plan, workspace.get())
        return Encoded(tasks, results, crcs, images, counts, coded_nbytes)

    def coded_nbytes(self, plan: EncodePlan, workspace: Bytes) -> list[int]:
        """What payloads come to, from what nvCOMP said of each slice; 0 where it failed."""
        count, found = len(plan.owners), []
        at, _, status_at = plan.parts[2:5]
        lengths = workspace[at : at + 8 * count].view(np.uint64).astype(np.int64)
        statuses = workspace[status_at : status_at + 4 * count].view(np.int32)
        for row in plan.rows:
            mine = slice(int(row["slice_first"]), int(row["slice_first"]) + int(row["slices"]))
            head_nbytes = align_up(12 + 4 * int(row["slices"]), 16)
            coded = bool(row["word"] & 0xFF) and not statuses[mine].any()
            found.append((head_nbytes + int((-(-lengths[mine] // 16) * 16).sum())) * coded)
        return found

    def decode(
        self,
        encoded: Encoded,
        bound: Sequence[Bound],
        lengths: Sequence[int],
        *,
        images: Sequence[bytes] | None = None,
        expected_crcs: Sequence[int] | None = None,
    ) -> Decoded:
        """Decode into pages of their own; each segment is a unit."""
        images = encoded.images if images is None else images
        count = len(lengths)
        rows = describe(bound, lengths)
        raw = encoded.results["format"] == Format.RAW
        rows["word"][raw] = 0
        plan = ans.plan_decode(self.device.nvcomp, rows)
        shares = ans.decode_shares(self.device.nvcomp, rows)
        assert plan.descriptors_nbytes + plan.workspace_nbytes <= shares.sum() + ans.SLACK_NBYTES
        pages, slots, offsets = self.pages(lengths)
        arena = self.upload(np.frombuffer(b"".join(images), np.uint8))
        starts = np.cumsum([0, *(len(image) for image in images[:-1])])
        tasks = encoded.tasks.copy()
        tasks["payload"] += np.repeat(starts + int(arena.data.ptr), encoded.counts).astype(
            np.uint64
        )
        tasks["slot"] = tasks["unit_first"] = np.arange(count)
        tasks["unit_count"] = 1
        workspace = self.room(plan.workspace_nbytes)
        descriptors = np.zeros(plan.descriptors_nbytes, np.uint8)
        plan.fill(descriptors, int(workspace.data.ptr))
        wanted = encoded.crcs if expected_crcs is None else np.array(expected_crcs, np.uint32)
        on_device = [
            self.upload(values)
            for values in (slots, tasks, descriptors, wanted, np.zeros(count, np.uint32))
        ]
        at = [int(memory.data.ptr) for memory in on_device]
        span = Span(slots=at[0], tasks=at[1], crcs=at[3], faults=at[4], order=0)
        self.device.enqueue_expect(self.stream, tasks=at[1], crcs=at[3], count=count)
        self.kernels.crc32(span, 0, count, int(tasks["stored_nbytes"].max()))
        self.device.enqueue_decode(
            plan,
            self.stream,
            descriptors=at[2],
            tasks=at[1],
            crcs=at[3],
            faults=at[4],
            workspace=int(workspace.data.ptr),
        )
        self.kernels.scatter_raw(span, 0, count, max(lengths))
        self.check_guards(pages, arena, workspace, *on_device)
        seen = pages.get()
        segments = []
        for offset, nbytes in zip(offsets, lengths, strict=True):
            segments.append(seen[offset : offset + nbytes].tobytes())
            gap = seen[offset + nbytes : offset + align_up(nbytes, 512) + GUARD_NBYTES]
            assert (gap == UNTOUCHED).all(), "written behind a segment"
        crcs, faults = (memory.get()[: 4 * count].view(np.uint32) for memory in on_device[3:])
        return Decoded(segments, faults.tolist(), crcs.tolist())


def spec(nbytes: int, dtype: str) -> SegmentSpec:
    head_dim = nbytes // DTYPE_NBYTES[dtype]
    return SegmentSpec(dtype=dtype, role=Role.K, tokens=1, heads=1, head_dim=head_dim)


def check_images(encoded: Encoded, segments: Sequence[bytes], bound: Sequence[Bound]) -> None:
    """Layout, heads, padding and CRCs, for all but what is nvCOMP's own."""
    places = encoded.payloads()
    for number, image in enumerate(encoded.images):
        mine = [place for place in places if place[0] == number]
        lengths = [nbytes for _, _, nbytes in mine]
        assert [offset for _, offset, _ in mine] == payload_offsets(lengths)
        assert len(image) == object_nbytes(lengths)
        rest = np.frombuffer(image, np.uint8).copy()
        for _, offset, nbytes in mine:
            rest[offset : offset + nbytes] = 0
        assert not rest.any(), "padding"
    for index, (owner, offset, nbytes) in enumerate(places):
        payload = encoded.images[owner][offset : offset + nbytes]
        assert encoded.crcs[index] == crc32(payload)
        codec, coded_nbytes = bound[index], encoded.coded_nbytes[index]
        wanted = codec
        if isinstance(codec, AnsSegments):
            assert coded_nbytes, "nvCOMP failed"
            wanted = reason_to_stay_raw(coded_nbytes, len(segments[index])) or RawReason.CHOSEN
        assert encoded.results[index]["raw_reason"] == wanted
        if wanted:
            assert encoded.results[index]["format"] == Format.RAW
            assert payload == segments[index]
        else:
            assert isinstance(codec, AnsSegments)
            assert encoded.results[index]["format"] == Format.ANS
            assert nbytes == coded_nbytes <= codec.most_encoded_nbytes
            slices, slice_nbytes = cut(len(segments[index]))
            head = np.frombuffer(payload[: 12 + 4 * slices], np.uint32).astype(np.int64)
            assert head[:3].tolist() == [slices, slice_nbytes, codec.word]
            ends = align_up(12 + 4 * slices, 16) + np.cumsum(-(-head[3:] // 16) * 16)
            assert ends[-1] == nbytes


LENGTHS = (4096, 4100, 5000, 32 * KIB, 64 * KIB, 64 * KIB + 4, 100_004, 300_000, MIB + 516)


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_length_comes_back(machine: Machine, dtype: str) -> None:
    codec = AnsCodec(machine.device.nvcomp)
    odd = (4097, 70_001, 2 * 64 * KIB + 1) if dtype == "float8_e4m3fn" else ()
    lengths = (*LENGTHS, *odd)
    segments = [normal(nbytes, dtype, nbytes) for nbytes in lengths]
    segments += [noise(nbytes, nbytes) for nbytes in lengths]
    bound = [codec.bind(spec(nbytes, dtype)) for nbytes in lengths] * 2
    counts = (len(lengths), 1, len(lengths) - 1)
    for gathered in (True, False):
        encoded = machine.encode(segments, bound, counts, gathered=gathered)
        check_images(encoded, segments, bound)
        assert {Format.RAW} == set(encoded.results["format"][len(lengths) :].tolist()), "noise"
        decoded = machine.decode(encoded, bound, [len(one) for one in segments])
        assert decoded == Decoded(segments, [0] * len(segments), [0] * len(segments))
    # Of FP16's normal numbers nvCOMP saves about 12.5 %, so whether they are kept is its affair.
    if dtype != "float16":
        assert encoded.results["format"][LENGTHS.index(300_000)] == Format.ANS


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_longest_segment_comes_back(machine: Machine, dtype: str) -> None:
    nbytes = 16 * MIB
    bound = [AnsCodec(machine.device.nvcomp).bind(spec(nbytes, dtype))]
    segments = [normal(nbytes, dtype)]
    encoded = machine.encode(segments, bound, (1,))
    check_images(encoded, segments, bound)
    assert machine.decode(encoded, bound, [nbytes]) == Decoded(segments, [0], [0])


def test_normal_numbers_are_stored_by_a_third_shorter(machine: Machine) -> None:
    nbytes = 256 * KIB
    bound = [AnsCodec(machine.device.nvcomp).bind(spec(nbytes, "bfloat16"))] * 64
    segments = [normal(nbytes, "bfloat16", seed) for seed in range(64)]
    encoded = machine.encode(segments, bound, (64,))
    ratio = 64 * nbytes / float(encoded.tasks["stored_nbytes"].sum())
    assert 1.4 < ratio < 1.6


def test_special_values_come_back(machine: Machine) -> None:
    """Zeros, one value, NaN and infinity of every kind, all words there are."""
    words = np.arange(2**16, dtype=np.uint16)
    segments = [
        bytes(2**17),
        b"\x80\x3f" * 2**16,
        words.tobytes(),
        (words % 7 + 0x7F80).astype(np.uint16).tobytes(),
        (words[::-1] & 0x8000).astype(np.uint16).tobytes(),
    ]
    for dtype in DTYPES:
        bound = [AnsCodec(machine.device.nvcomp).bind(spec(2**17, dtype))] * len(segments)
        encoded = machine.encode(segments, bound, (len(segments),))
        check_images(encoded, segments, bound)
        decoded = machine.decode(encoded, bound, [2**17] * len(segments))
        assert decoded == Decoded(segments, [0] * 5, [0] * 5)


def mixture(machine: Machine) -> tuple[list[bytes], list[Bound], list[int]]:
    """Objects of every dtype, raw by nature, by declaration, and encoded."""
    rng = np.random.default_rng(3)
    codec = AnsCodec(machine.device.nvcomp)
    segments, bound, counts = [], [], []
    for seed in range(12):
        counts.append(int(rng.integers(1, 30)))
        for number in range(counts[-1]):
            dtype = DTYPES[int(rng.integers(0, 4))]
            nbytes = int(rng.choice([4096, 8192, 16 * KIB, 32 * KIB, 96 * KIB, 200_000]))
            segments.append(normal(nbytes, dtype, seed) if number % 3 else noise(nbytes, seed))
            declared = seed % 4 == 0 and number % 5 == 0
            bound.append(RawReason.OPAQUE_STATE if declared else codec.bind(spec(nbytes, dtype)))
    return segments, bound, counts


def test_a_mixture_comes_back_on_any_stream(machine: Machine) -> None:
    segments, bound, counts = mixture(machine)
    lengths = [len(segment) for segment in segments]
    with machine.cupy.cuda.Stream(non_blocking=True):
        encoded = machine.encode(segments, bound, counts)
        decoded = machine.decode(encoded, bound, lengths)
    check_images(encoded, segments, bound)
    assert decoded == Decoded(segments, [0] * len(segments), [0] * len(segments))
    formats = set(encoded.results["format"].tolist())
    assert formats == {Format.RAW, Format.ANS}


FORGED = {
    "no slice": (0, 0),
    "fewer slices": (0, 3),
    "more slices": (0, 5),
    "very many slices": (0, 2**32 - 1),
    "slices of nothing": (1, 0),
    "odd slices": (1, 50_177),
    "slices over 1 MiB": (1, MIB + 16),
    "another kind": (2, 5 | Kind.BYTES << 8),
    "another generation": (2, 4 | Kind.FLOAT16 << 8),
    "an empty slice": (3, 0),
    "a huge slice": (3, 2**32 - 1),
}


def test_a_forged_head_is_a_fault_of_its_segment_alone(machine: Machine) -> None:
    nbytes, count = 200_000, len(FORGED) + 2
    bound = [AnsCodec(machine.device.nvcomp).bind(spec(nbytes, "bfloat16"))] * count
    segments = [normal(nbytes, "bfloat16", seed) for seed in range(count)]
    encoded = machine.encode(segments, bound, (count,))
    image = np.frombuffer(encoded.images[0], np.uint8).copy()
    crcs = encoded.crcs.tolist()
    for index, (position, value) in enumerate(FORGED.values(), start=1):
        _, offset, stored_nbytes = encoded.payloads()[index]
        image[offset : offset + 64].view(np.uint32)[position] = value
        crcs[index] = crc32(image[offset : offset + stored_nbytes])
    decoded = machine.decode(
        encoded, bound, [nbytes] * count, images=[image.tobytes()], expected_crcs=crcs
    )
    assert decoded.crcs == [0] * count
    assert decoded.faults == [0, *([UNDECODABLE] * len(FORGED)), 0]
    assert (decoded.segments[0], decoded.segments[-1]) == (segments[0], segments[-1])
    assert set(decoded.segments[1:-1]) == {bytes([UNTOUCHED]) * nbytes}


def test_slices_of_another_kind_are_a_fault(machine: Machine) -> None:
    """Their heads claim to be of the kind that is asked for."""
    nbytes = 128 * KIB
    codec = AnsCodec(machine.device.nvcomp)
    wanted, stored = (codec.bind(spec(nbytes, dtype)) for dtype in ("bfloat16", "float8_e4m3fn"))
    assert isinstance(wanted, AnsSegments)
    segments = [normal(nbytes, "float8_e4m3fn")]
    encoded = machine.encode(segments, [stored], (1,))
    assert encoded.results["format"][0] == Format.ANS
    image = np.frombuffer(encoded.images[0], np.uint8).copy()
    _, offset, stored_nbytes = encoded.payloads()[0]
    image[offset : offset + 64].view(np.uint32)[2] = wanted.word
    crc = crc32(image[offset : offset + stored_nbytes])
    decoded = machine.decode(
        encoded, [wanted], [nbytes], images=[image.tobytes()], expected_crcs=[crc]
    )
    assert decoded.faults == [UNDECODABLE]


def test_another_crc_spares_nvcomp_and_the_page(machine: Machine) -> None:
    nbytes = 100_000
    bound = [AnsCodec(machine.device.nvcomp).bind(spec(nbytes, "float16"))] * 3
    segments = [normal(nbytes, "float16", seed) for seed in range(3)]
    encoded = machine.encode(segments, bound, (3,))
    image = np.frombuffer(encoded.images[0], np.uint8).copy()
    _, offset, stored_nbytes = encoded.payloads()[1]
    image[offset + 50 : offset + stored_nbytes] = 0xFF
    decoded = machine.decode(encoded, bound, [nbytes] * 3, images=[image.tobytes()])
    assert decoded.faults == [0, 0, 0]
    assert [bool(crc) for crc in decoded.crcs] == [False, True, False]
    assert decoded.segments == [segments[0], bytes([UNTOUCHED]) * nbytes, segments[2]]


def damage_payloads(machine: Machine, rounds: int) -> None:
    """Change bytes of payloads, not their CRCs, and look at the neighbours."""
    codec = AnsCodec(machine.device.nvcomp)
    rng = np.random.default_rng(rounds)
    shapes = [
        (DTYPES[index % 4], int(rng.choice([4096, 16 * KIB, 64 * KIB, 70_000])))
        for index in range(64)
    ]
    lengths = [nbytes for _, nbytes in shapes]
    segments = [normal(nbytes, dtype, index) for index, (dtype, nbytes) in enumerate(shapes)]
    bound = [codec.bind(spec(nbytes, dtype)) for dtype, nbytes in shapes]
    encoded = machine.encode(segments, bound, (64,))
    assert (encoded.results["format"] == Format.ANS).sum() >= DAMAGED
    places = encoded.payloads()
    for _ in range(rounds):
        image = np.frombuffer(encoded.images[0], np.uint8).copy()
        chosen = set(rng.choice(64, DAMAGED, replace=False).tolist())
        for index in chosen:
            _, offset, stored_nbytes = places[index]
            most = min(stored_nbytes, int(rng.choice([16, 64, 512, stored_nbytes])))
            at = offset + rng.choice(most, int(rng.integers(1, 9)), replace=False)
            image[at] ^= rng.integers(1, 256, len(at)).astype(np.uint8)
        decoded = machine.decode(encoded, bound, lengths, images=[image.tobytes()])
        assert not any(decoded.faults), "nvCOMP was shown a payload with another CRC"
        for index, (crc, segment) in enumerate(zip(decoded.crcs, decoded.segments, strict=True)):
            assert bool(crc) == (index in chosen)
            untouched = bytes([UNTOUCHED]) * lengths[index]
            assert segment == (untouched if index in chosen else segments[index])
    again = machine.decode(machine.encode(segments, bound, (64,)), bound, lengths)
    assert again == Decoded(segments, [0] * 64, [0] * 64), "the device is as good as before"


def test_damage_is_a_miss_and_harms_nothing_else(machine: Machine) -> None:
    damage_payloads(machine, 15)


@pytest.mark.soak
@pytest.mark.timeout(600)
def test_ten_thousand_damages_harm_nothing_else(machine: Machine) -> None:
    damage_payloads(machine, -(-10_000 // DAMAGED))
