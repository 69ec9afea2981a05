"""ANS around nvCOMP, on a CPU: the kernels compiled by g++, zlib in nvCOMP's place."""

from __future__ import annotations

import struct
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings

from orbitkv.codecs.ans import AnsCodec
from orbitkv.codecs.base import SegmentSpec, reason_to_stay_raw
from orbitkv.codecs.cuda import ans
from orbitkv.codecs.cuda.ans import AnsDevice, AnsSegments, cut, describe
from orbitkv.codecs.cuda.tasks import TASK
from orbitkv.codecs.nvcomp import Kind, Slices
from orbitkv.config import KIB, MIB
from orbitkv.errors import DeviceFault, Unavailable, Undecodable
from orbitkv.objects import (
    Format,
    RawReason,
    align_up,
    crc32,
    object_nbytes,
    payload_offsets,
)
from orbitkv.segment import Role
from tests.codecs.emulation import Cupy, Zlib, aligned, needs_compiler, numbers, store

pytestmark = needs_compiler
UNDECODABLE = 8


@dataclass
class Setup:
    cupy: Cupy
    nvcomp: Zlib
    device: AnsDevice


@pytest.fixture(scope="module")
def setup(tmp_path_factory: pytest.TempPathFactory) -> Setup:
    cupy = Cupy(tmp_path_factory.mktemp("kernels"))
    nvcomp = Zlib()
    return Setup(cupy, nvcomp, cupy.open(nvcomp))


def spec(nbytes: int, dtype: str = "bfloat16") -> SegmentSpec:
    width = {"bfloat16": 2, "float16": 2, "float32": 4, "float8_e4m3fn": 1}[dtype]
    return SegmentSpec(dtype=dtype, role=Role.K, tokens=1, heads=1, head_dim=nbytes // width)


def bound(nbytes: int, dtype: str = "bfloat16") -> AnsSegments | RawReason:
    return AnsCodec(Zlib()).bind(spec(nbytes, dtype))


def compressible(nbytes: int, seed: int = 0) -> bytes:
    return np.random.default_rng(seed).integers(0, 12, nbytes, np.uint8).tobytes()


def noise(nbytes: int, seed: int = 0) -> bytes:
    return np.random.default_rng(seed).bytes(nbytes)


@dataclass
class Encoded:
    tasks: np.ndarray
    results: np.ndarray
    crcs: np.ndarray
    objects: list[bytes]


def encode(
    setup: Setup, segments: Sequence[bytes], rows: np.ndarray, counts: Sequence[int]
) -> Encoded:
    """Encode one batch as the caller of ``AnsDevice`` would, with all memory watched."""
    plan = ans.plan_encode(setup.nvcomp, rows, counts)
    shares = ans.encode_shares(setup.nvcomp, rows)
    assert plan.descriptors_nbytes + plan.workspace_nbytes <= shares.sum() + ans.SLACK_NBYTES
    staging = aligned(sum(align_up(len(segment), 512) for segment in segments))
    sources, end = [], 0
    for segment in segments:
        staging[end : end + len(segment)] = np.frombuffer(segment, np.uint8)
        sources.append(staging.ctypes.data + end)
        end += align_up(len(segment), 512)
    kept = staging.copy()
    guard = 4096
    descriptors = aligned(plan.descriptors_nbytes + guard)
    workspace = aligned(plan.workspace_nbytes + guard)
    output = aligned(plan.most_output_nbytes + guard)
    tasks = np.zeros(len(rows), TASK)
    crcs = np.full(len(rows), 0xDEAD, np.uint32)
    results = np.full(8 * len(rows), 0xEE, np.uint8).view(ans.RESULT)
    plan.fill(descriptors, np.array(sources), workspace.ctypes.data)
    setup.nvcomp.allowed = [
        (memory.ctypes.data, memory.ctypes.data + memory.nbytes) for memory in (staging, workspace)
    ]
    setup.nvcomp.coded = 0
    setup.device.enqueue_encode(
        plan,
        0,
        descriptors=descriptors.ctypes.data,
        tasks=tasks.ctypes.data,
        crcs=crcs.ctypes.data,
        results=results.ctypes.data,
        workspace=workspace.ctypes.data,
        output=output.ctypes.data,
    )
    setup.nvcomp.allowed = []
    for memory in (descriptors, workspace, output):
        assert (memory[-guard:] == 0xA5).all()
    assert (staging == kept).all()
    firsts = [sum(counts[:index]) for index in range(len(counts))]
    objects, at = [], 0
    for first, count in zip(firsts, counts, strict=True):
        (total,) = set(results["object_nbytes"][first : first + count].tolist())
        tasks["payload"][first : first + count] -= output.ctypes.data + at
        objects.append(output[at : at + total].tobytes())
        at += total
    assert (output[at:] == 0xA5).all()
    return Encoded(tasks, results, crcs, objects)


def expected_payload(segment: bytes, kind: Kind) -> bytes:
    """What docs/codecs.md says, with zlib's coded slices."""
    slices, slice_nbytes = cut(len(segment))
    cuts = [segment[at : at + slice_nbytes] for at in range(0, len(segment), slice_nbytes)]
    assert len(cuts) == slices
    coded = [
        bytes((0x5A, kind)) + struct.pack("<I", len(one)) + zlib.compress(one, 1) for one in cuts
    ]
    head = struct.pack("<III", slices, slice_nbytes, 5 | kind << 8)
    parts = [head + b"".join(struct.pack("<I", len(one)) for one in coded), *coded]
    return b"".join(part + bytes(-len(part) % 16) for part in parts)


def check_encoded(
    encoded: Encoded,
    segments: Sequence[bytes],
    codecs: Sequence[AnsSegments | RawReason],
    counts: Sequence[int],
) -> None:
    first = 0
    for image, count in zip(encoded.objects, counts, strict=True):
        mine = range(first, first + count)
        stored, reasons = [], []
        for index in mine:
            codec, segment = codecs[index], segments[index]
            reason = codec if isinstance(codec, RawReason) else RawReason.CHOSEN
            payload = segment
            if not isinstance(codec, RawReason):
                coded = expected_payload(segment, codec.kind)
                reason = reason_to_stay_raw(len(coded), len(segment)) or reason
                payload = segment if reason else coded
                assert reason or len(coded) <= codec.most_encoded_nbytes
            stored.append(payload)
            reasons.append((reason, payload is segment))
        lengths = [len(payload) for payload in stored]
        assert encoded.tasks["stored_nbytes"][mine].tolist() == lengths
        assert encoded.tasks["payload"][mine].tolist() == payload_offsets(lengths)
        assert len(image) == object_nbytes(lengths)
        wanted = bytearray(len(image))
        for payload, offset in zip(stored, payload_offsets(lengths), strict=True):
            wanted[offset : offset + len(payload)] = payload
        assert image == bytes(wanted)
        for index, (reason, raw), payload in zip(mine, reasons, stored, strict=True):
            result = encoded.results[index]
            assert (result["format"], result["raw_reason"]) == (
                (Format.RAW, reason) if raw else (Format.ANS, 0)
            )
            assert encoded.crcs[index] == crc32(bytes(len(payload)))
        first += count


LENGTHS = (4096, 4098, 5000, 32 * KIB, 64 * KIB, 64 * KIB + 2, 100_002, 3 * 64 * KIB + 514)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float8_e4m3fn", "float32"])
@pytest.mark.parametrize("nbytes", [*LENGTHS, MIB + 4096])
def test_a_payload_is_as_documented(setup: Setup, dtype: str, nbytes: int) -> None:
    nbytes -= nbytes % 4 if dtype == "float32" else 0
    codec = bound(nbytes, dtype)
    segments = [compressible(nbytes), noise(nbytes), compressible(nbytes, 1)]
    rows = describe([codec] * 3, [nbytes] * 3)
    encoded = encode(setup, segments, rows, (3,))
    check_encoded(encoded, segments, [codec] * 3, (3,))
    assert [Format(one) for one in encoded.results["format"]] == [1, 0, 1]


def batches() -> st.SearchStrategy[list[list[tuple[int, str, int]]]]:
    """Objects of segments: length, dtype or reason, seed; odd seeds do not compress."""
    kinds = st.sampled_from(["bfloat16", "float8_e4m3fn", "float32", "raw"])
    segment = st.tuples(st.sampled_from(LENGTHS), kinds, st.integers(0, 9))
    return st.lists(st.lists(segment, min_size=1, max_size=5), min_size=1, max_size=4)


def realised(
    batch: Sequence[Sequence[tuple[int, str, int]]],
) -> tuple[list[bytes], list[AnsSegments | RawReason], list[int]]:
    segments, codecs = [], []
    for nbytes, kind, seed in (one for entry in batch for one in entry):
        length = nbytes - nbytes % 4
        segments.append((noise if seed % 2 else compressible)(length, seed))
        codecs.append(RawReason.OPAQUE_STATE if kind == "raw" else bound(length, kind))
    return segments, codecs, [len(entry) for entry in batch]


@settings(
    max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(batches())
def test_any_mixture_is_laid_out_as_objects_are_and_comes_back(
    setup: Setup, batch: list[list[tuple[int, str, int]]]
) -> None:
    segments, codecs, counts = realised(batch)
    rows = describe(codecs, [len(segment) for segment in segments])
    encoded = encode(setup, segments, rows, counts)
    check_encoded(encoded, segments, codecs, counts)
    decoded = decode(setup, encoded, rows, counts)
    assert decoded.faults == [0] * len(segments)
    assert decoded.segments == segments


def test_more_segments_than_threads_in_a_block(setup: Setup) -> None:
    counts = [1, 700, 3, 40, 600, 5]  # one begins behind the first 1,024
    segments = [compressible(4096, seed) for seed in range(8)]
    chosen = [segments[index % 8] for index in range(sum(counts))]
    codec = bound(4096)
    rows = describe([codec] * len(chosen), [4096] * len(chosen))
    check_encoded(encode(setup, chosen, rows, counts), chosen, [codec] * len(chosen), counts)


@dataclass
class Decoded:
    faults: list[int]
    segments: list[bytes]


def decode(
    setup: Setup,
    encoded: Encoded,
    rows: np.ndarray,
    counts: Sequence[int],
    damage: Callable[[np.ndarray, np.ndarray], None] | None = None,
    bad_crcs: Sequence[int] = (),
) -> Decoded:
    """Decode a batch; ``damage`` may change its arena and its tasks beforehand."""
    rows = rows.copy()
    raw = encoded.results["format"] == Format.RAW
    rows["word"][raw] = encoded.results["raw_reason"][raw].astype(np.uint32) << 16
    plan = ans.plan_decode(setup.nvcomp, rows)
    shares = ans.decode_shares(setup.nvcomp, rows)
    assert plan.descriptors_nbytes + plan.workspace_nbytes <= shares.sum() + ans.SLACK_NBYTES
    tasks = encoded.tasks.copy()
    arena = aligned(sum(map(len, encoded.objects)))
    at = first = 0
    for image, count in zip(encoded.objects, counts, strict=True):
        arena[at : at + len(image)] = np.frombuffer(image, np.uint8)
        tasks["payload"][first : first + count] += arena.ctypes.data + at
        at += len(image)
        first += count
    guard = 4096
    descriptors = aligned(plan.descriptors_nbytes + guard)
    workspace = aligned(plan.workspace_nbytes + guard)
    plan.fill(descriptors, workspace.ctypes.data)
    if damage:
        damage(arena, tasks)
    kept = arena.copy()
    crcs = np.zeros(len(rows), np.uint32)
    crcs[list(bad_crcs)] = 0x1234
    faults = np.zeros(len(rows), np.uint32)
    owned = [(memory.ctypes.data, memory.ctypes.data + memory.nbytes) for memory in (arena,)]
    owned.append((workspace.ctypes.data, workspace.ctypes.data + plan.workspace_nbytes))
    spares = setup.device._spares.values.view(ans.SPARE)
    for spare in spares:
        owned.append((int(spare["address"]), int(spare["address"] + spare["coded_nbytes"])))
        owned.append((int(spare["target"]), int(spare["target"]) + 4096))
    setup.nvcomp.allowed = owned
    setup.device.enqueue_decode(
        plan,
        0,
        descriptors=descriptors.ctypes.data,
        tasks=tasks.ctypes.data,
        crcs=crcs.ctypes.data,
        faults=faults.ctypes.data,
        workspace=workspace.ctypes.data,
    )
    setup.nvcomp.allowed = []
    for memory in (descriptors, workspace):
        assert (memory[-guard:] == 0xA5).all()
    assert (arena == kept).all(), "a decoder wrote into its payloads"
    if not raw.all():
        assert (tasks["stored_nbytes"] == rows["original_nbytes"]).all()
    everything = np.concatenate([arena, workspace])
    places = [
        int(task["payload"]) - arena.ctypes.data
        if is_raw
        else int(task["payload"]) - workspace.ctypes.data + len(arena)
        for task, is_raw in zip(tasks, raw, strict=True)
    ]
    segments = [
        everything[place : place + int(row["original_nbytes"])].tobytes()
        for place, row in zip(places, rows, strict=True)
    ]
    return Decoded(faults.tolist(), segments)


@pytest.mark.parametrize("nbytes", [3 * 64 * KIB, 64 * KIB])
@pytest.mark.parametrize("failure", [(19, 100), (0, 0), (0, 2**32 + 100), (0, 66_561), (-1, 100)])
def test_what_cannot_be_coded_is_raw_and_says_so(
    setup: Setup, failure: tuple[int, int], nbytes: int
) -> None:
    segments = [compressible(nbytes, seed) for seed in range(3)]
    codec = bound(nbytes)
    rows = describe([codec] * 3, [nbytes] * 3)
    setup.nvcomp.failing = {4 if nbytes > 64 * KIB else 1: failure}  # a slice of the second
    try:
        encoded = encode(setup, segments, rows, (3,))
    finally:
        setup.nvcomp.failing = {}
    reasons = encoded.results["raw_reason"].tolist()
    assert reasons == [0, RawReason.CODEC_FAILED, 0]
    assert encoded.tasks["stored_nbytes"][1] == nbytes
    assert decode(setup, encoded, rows, (3,)).segments == segments


def test_a_segment_may_be_raw_for_any_reason_of_its_caller(setup: Setup) -> None:
    codec = bound(8192)
    rows = describe([codec] * 2, [8192] * 2)
    rows["word"][1] = RawReason.NO_BUDGET << 16
    encoded = encode(setup, [compressible(8192)] * 2, rows, (2,))
    assert encoded.results["raw_reason"].tolist() == [0, RawReason.NO_BUDGET]
    assert encoded.results["format"].tolist() == [Format.ANS, Format.RAW]


def test_slices_are_alike_and_no_longer_than_64_kib() -> None:
    for nbytes in (*range(4096, 300_000, 97), 16 * MIB, 16 * MIB - 1, 8 * MIB + 1):
        slices, slice_nbytes = cut(nbytes)
        assert slice_nbytes <= 64 * KIB
        assert slice_nbytes % 512 == 0
        assert slices == -(-nbytes // slice_nbytes) == -(-nbytes // (64 * KIB))


THREE = [compressible(200_000, seed) for seed in range(3)]


def three(setup: Setup) -> tuple[Encoded, np.ndarray]:
    rows = describe([bound(200_000)] * 3, [200_000] * 3)
    return encode(setup, THREE, rows, (3,)), rows


def words_at(arena: np.ndarray, offset: int) -> np.ndarray:
    return arena[offset : offset + 64].view(np.uint32)


FORGED = {
    "no slice": (0, 0),
    "fewer slices": (0, 3),
    "more slices": (0, 5),
    "very many slices": (0, 2**32 - 1),
    "slices of nothing": (1, 0),
    "odd slices": (1, 50_177),
    "short slices": (1, 16),
    "slices over 1 MiB": (1, MIB + 16),
    "another cut": (1, 65_536 * 2),
    "another kind": (2, 5),
    "another generation": (2, 6 | Kind.FLOAT16 << 8),
    "a raw reason": (2, 5 | Kind.FLOAT16 << 8 | 1 << 16),
    "an empty slice": (3, 0),
    "a huge slice": (3, 2**32 - 1),
    "a negative slice": (4, 2**32 - 16),
}


@pytest.mark.parametrize("name", FORGED)
def test_a_forged_head_is_a_fault_of_its_segment_alone(setup: Setup, name: str) -> None:
    position, value = FORGED[name]
    encoded, rows = three(setup)
    offset = int(encoded.tasks["payload"][1])

    def forge(arena: np.ndarray, tasks: np.ndarray) -> None:
        assert words_at(arena, offset)[:3].tolist() == [4, 50_176, 5 | 1 << 8]
        words_at(arena, offset)[position] = value

    decoded = decode(setup, encoded, rows, (3,), forge)
    assert decoded.faults == [0, UNDECODABLE, 0]
    assert [decoded.segments[0], decoded.segments[2]] == [THREE[0], THREE[2]]


@pytest.mark.parametrize("stored_nbytes", [0, 1, 15, 16, 17, 32, 4096, -16, -1])
def test_another_stored_length_is_a_fault(setup: Setup, stored_nbytes: int) -> None:
    encoded, rows = three(setup)
    true_nbytes = int(encoded.tasks["stored_nbytes"][1])

    def forge(arena: np.ndarray, tasks: np.ndarray) -> None:
        at_end = stored_nbytes < 0
        tasks["stored_nbytes"][1] = true_nbytes + stored_nbytes if at_end else stored_nbytes

    assert decode(setup, encoded, rows, (3,), forge).faults == [0, UNDECODABLE, 0]


def test_a_segment_with_another_crc_is_not_decoded_and_not_faulted_twice(setup: Setup) -> None:
    encoded, rows = three(setup)

    def scramble(arena: np.ndarray, tasks: np.ndarray) -> None:
        offset = int(encoded.tasks["payload"][1])
        arena[offset : offset + 4096] = 0xFF

    decoded = decode(setup, encoded, rows, (3,), scramble, bad_crcs=[1])
    assert decoded.faults == [0, 0, 0], "its CRC tells"
    assert [decoded.segments[0], decoded.segments[2]] == [THREE[0], THREE[2]]


def test_damage_inside_a_coded_slice_is_a_fault_of_its_segment(setup: Setup) -> None:
    encoded, rows = three(setup)

    def scramble(arena: np.ndarray, tasks: np.ndarray) -> None:
        offset = int(encoded.tasks["payload"][1])
        arena[offset + 2000 : offset + 2100] ^= 0xFF

    decoded = decode(setup, encoded, rows, (3,), scramble)
    assert decoded.faults == [0, UNDECODABLE, 0]
    assert [decoded.segments[0], decoded.segments[2]] == [THREE[0], THREE[2]]


def handmade(segment: bytes, slice_nbytes: int, lengths: Sequence[int]) -> Encoded:
    """A payload of a single segment, whose coded slices hold these lengths of it; 0: no byte."""
    slices = [segment[index * slice_nbytes :][:nbytes] for index, nbytes in enumerate(lengths)]
    coded = [
        bytes((0x5A, Kind.FLOAT16)) + struct.pack("<I", len(one)) + zlib.compress(one, 6)
        if one
        else b""
        for one in slices
    ]
    head = struct.pack("<III", len(coded), slice_nbytes, 5 | 1 << 8)
    parts = [head + b"".join(struct.pack("<I", len(one)) for one in coded), *coded]
    payload = b"".join(part + bytes(-len(part) % 16) for part in parts)
    tasks = np.zeros(1, TASK)
    tasks["payload"], tasks["stored_nbytes"] = 512, len(payload)
    results = np.zeros(1, ans.RESULT)
    results["format"] = Format.ANS
    image = bytes(512) + payload + bytes(-len(payload) % 4096)
    return Encoded(tasks, results, np.zeros(1, np.uint32), [image])


LONG = compressible(300_000, 3)


@pytest.mark.parametrize("slice_nbytes", [60_416, 160_000, 65_552, 299_984, 300_000, MIB])
def test_other_cuts_are_read(setup: Setup, slice_nbytes: int) -> None:
    """Payloads of fewer, longer slices than an encoder of today cuts."""
    rest, lengths = len(LONG), []
    while rest:
        lengths.append(min(slice_nbytes, rest))
        rest -= lengths[-1]
    decoded = decode(
        setup,
        handmade(LONG, slice_nbytes, lengths),
        describe([bound(len(LONG))], [len(LONG)]),
        (1,),
    )
    assert decoded.faults == [0]
    assert decoded.segments == [LONG]


@pytest.mark.parametrize("slice_nbytes", [MIB + 16, 2 * MIB, 160_001, 30_000, 512])
def test_cuts_that_no_decoder_takes_are_faults(setup: Setup, slice_nbytes: int) -> None:
    lengths = [slice_nbytes] * (len(LONG) // slice_nbytes)
    lengths += [len(LONG) % slice_nbytes] if len(LONG) % slice_nbytes else []
    rows = describe([bound(len(LONG))], [len(LONG)])
    assert decode(setup, handmade(LONG, slice_nbytes, lengths), rows, (1,)).faults == [UNDECODABLE]


@pytest.mark.parametrize(
    "lengths",
    [(160_000, 139_999), (160_000, 1), (160_000, 0), (159_999, 140_000), (160_001, 140_000)],
)
def test_a_slice_that_decodes_to_another_length_is_a_fault(
    setup: Setup, lengths: tuple[int, int]
) -> None:
    decoded = decode(
        setup,
        handmade(LONG, 160_000, lengths),
        describe([bound(len(LONG))], [len(LONG)]),
        (1,),
    )
    assert decoded.faults == [UNDECODABLE]


@pytest.mark.parametrize("seed", range(4))
def test_random_damage_touches_nothing_else(setup: Setup, seed: int) -> None:
    rng = np.random.default_rng(seed)
    encoded, rows = three(setup)
    offset, stored = (int(encoded.tasks[name][1]) for name in ("payload", "stored_nbytes"))
    for _ in range(25):
        low = 0 if rng.random() < 0.5 else 64
        places = offset + rng.integers(0, low or stored, rng.integers(1, 4))

        def damage(arena: np.ndarray, tasks: np.ndarray, places: np.ndarray = places) -> None:
            arena[places] ^= rng.integers(1, 256, len(places)).astype(np.uint8)

        decoded = decode(setup, encoded, rows, (3,), damage)
        assert decoded.faults[0] == decoded.faults[2] == 0
        assert [decoded.segments[0], decoded.segments[2]] == [THREE[0], THREE[2]]
        assert decoded.faults[1] == UNDECODABLE or len(decoded.segments[1]) == 200_000


def test_kernels_and_numpy_agree_on_every_layout(setup: Setup) -> None:
    for name, dtype in (("AnsRow", ans.ROW), ("AnsResult", ans.RESULT), ("AnsSpare", ans.SPARE)):
        assert setup.cupy.layout_of(name, dtype.names) == (
            dtype.itemsize,
            *(dtype.fields[field][1] for field in dtype.names),
        )


def test_a_library_that_does_not_give_back_what_it_got_is_refused(setup: Setup) -> None:
    class Wrong(Zlib):
        def decompress_async(self, slices: Slices, room_nbytes: int, stream: int) -> None:
            super().decompress_async(slices, room_nbytes, stream)
            store(int(numbers(slices.targets, 1)[0]), b"wrong")

    with pytest.raises(DeviceFault, match=r"4096 bytes of BYTES came back"):
        setup.cupy.open(Wrong())


def test_segments_are_taken_from_4_kib_to_16_mib() -> None:
    assert bound(4094) is RawReason.UNSUPPORTED_LAYOUT
    assert isinstance(bound(4096), AnsSegments)
    assert isinstance(bound(16 * MIB), AnsSegments)
    assert bound(16 * MIB + 2) is RawReason.OVERSIZED


def test_a_host_neither_encodes_nor_decodes() -> None:
    codec = bound(4096)
    assert isinstance(codec, AnsSegments)
    assert codec.encoded_nbytes is None
    segment = np.zeros(4096, np.uint8)
    for encode in (codec.encode, codec.encode_many):
        with pytest.raises(Unavailable, match="encodes on an NVIDIA GPU only"):
            encode(segment, segment)
    for decode_one in (codec.decode, codec.decode_many):
        with pytest.raises(Undecodable, match="decodes on an NVIDIA GPU only"):
            decode_one(segment, segment)


def test_the_identity_tells_payload_and_coded_slices() -> None:
    assert AnsCodec(Zlib()).identity == "ans, 1, nvCOMP 5"


def test_addresses_are_checked(setup: Setup) -> None:
    rows = describe([bound(8192)], [8192])
    plan = ans.plan_encode(setup.nvcomp, rows, (1,))
    out = np.zeros(plan.descriptors_nbytes, np.uint8)
    with pytest.raises(ValueError, match="source at 0x1008; accepted: multiples of 16"):
        plan.fill(out, np.array((0x1008,)), 0x1000)
    with pytest.raises(ValueError, match="workspace at 0x1080; accepted: multiples of 256"):
        plan.fill(out, np.array((0x1000,)), 0x1080)
    with pytest.raises(ValueError, match="workspace at 0x1100; accepted: multiples of 512"):
        ans.plan_decode(setup.nvcomp, rows).fill(out, 0x1100)


@pytest.mark.parametrize("counts", [(), (1,), (2, 2), (0, 3), (4, -1)])
def test_objects_must_hold_all_tasks(setup: Setup, counts: tuple[int, ...]) -> None:
    rows = describe([bound(8192)] * 3, [8192] * 3)
    with pytest.raises(ValueError, match=r"accepted: 3 in all"):
        ans.plan_encode(setup.nvcomp, rows, counts)
