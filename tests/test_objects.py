"""The object format: pinned by golden vectors, checked to the last bit before it is believed."""

from __future__ import annotations

import re
import runpy
import struct
import zlib
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from orbitkv.errors import CorruptObject
from orbitkv.objects import (
    USER_FORMATS,
    Bytes,
    Format,
    RawReason,
    Segment,
    check_payloads,
    crc32,
    object_nbytes,
    payload_offsets,
    read_header,
    read_segments,
    write_object,
)

unhurried = settings(deadline=None)  # a busy machine is no fault
ROOT = Path(__file__).parents[1]
OBJECTS = ROOT / "tests" / "golden" / "objects"
DOCUMENT = ROOT / "docs" / "format.md"
independent = SimpleNamespace(**runpy.run_path(str(OBJECTS.parent / "vectors.py")))
NAMES = sorted(independent.VECTORS)
KEY = bytes(range(32))


def golden(name: str) -> Bytes:
    return np.fromfile(OBJECTS / f"{name}.bin", np.uint8)


def segment(
    payload: bytes, *, kind: int = Format.RAW, original_nbytes: int | None = None
) -> Segment:
    original_nbytes = len(payload) if original_nbytes is None else original_nbytes
    stored = np.frombuffer(payload, np.uint8)
    return Segment(kind, stored, original_nbytes, RawReason.CHOSEN, crc32(stored))


def written(segments: list[Segment], *, generation: int = 1, key_digest: bytes = KEY) -> Bytes:
    image = np.full(object_nbytes([s.stored_nbytes for s in segments]), 0xA5, np.uint8)
    write_object(image, segments, key_digest=key_digest, generation=generation)
    return image


def read(image: Bytes, key_digest: bytes | None = None) -> list[Segment]:
    return check_payloads(image, read_header(image, key_digest=key_digest))


def refused(image: Bytes, key_digest: bytes | None = None) -> bool:
    try:
        read(image, key_digest)
    except CorruptObject:
        return True
    return False


def resealed(image: Bytes) -> Bytes:
    """Make the header's CRC right again, so that only what it covers can be found wrong."""
    image = image.copy()
    (count,) = struct.unpack_from("<I", image, 12)
    covered = image[:92].tobytes() + image[96 : 96 + 32 * count].tobytes()
    struct.pack_into("<I", image, 92, zlib.crc32(covered))
    return image


def forged(image: Bytes, layout: str, offset: int, value: int | bytes) -> Bytes:
    """Another value in one field, under a header CRC that is right."""
    image = image.copy()
    struct.pack_into(layout, image, offset, value)
    return resealed(image)


# Golden vectors ---------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
def test_golden_vectors_are_those_that_the_script_writes(name: str) -> None:
    assert golden(name).tobytes() == independent.write(independent.VECTORS[name])


@pytest.mark.parametrize("name", NAMES)
def test_what_is_written_equals_the_golden_vector_byte_for_byte(name: str) -> None:
    vector = independent.VECTORS[name]
    segments = [
        Segment(
            stored.format,
            np.frombuffer(stored.payload, np.uint8),
            stored.original_nbytes,
            stored.raw_reason,
            crc32(stored.payload),
        )
        for stored in vector.segments
    ]
    image = written(segments, generation=vector.generation, key_digest=vector.key_digest)
    assert image.tobytes() == golden(name).tobytes()


@pytest.mark.parametrize("name", NAMES)
def test_golden_vectors_read_back_as_what_they_hold(name: str) -> None:
    vector = independent.VECTORS[name]
    header = read_header(golden(name), key_digest=vector.key_digest)
    assert (header.generation, header.key_digest) == (vector.generation, vector.key_digest)
    seen = [
        independent.Stored(s.format, s.raw_reason, s.original_nbytes, s.payload.tobytes())
        for s in check_payloads(golden(name), header)
    ]
    assert seen == list(vector.segments)


def test_fields_lie_at_their_documented_offsets() -> None:
    first, second = b"\x11" * 700, b"\x22" * 100
    segments = [segment(first), segment(second, kind=200, original_nbytes=9000)]
    segments[0].raw_reason = RawReason.SAVES_TOO_LITTLE
    image = written(segments, generation=0x0102030405060708).tobytes()

    assert len(image) == 4096
    assert image[0:8] == b"OrbitKV\0"
    assert struct.unpack_from("<HHI", image, 8) == (2, 96, 2)
    assert struct.unpack_from("<QQ", image, 16) == (0x0102030405060708, 4096)
    assert image[32:64] == KEY
    assert image[64:92] == bytes(28)
    assert struct.unpack_from("<I", image, 92)[0] == zlib.crc32(image[:92] + image[96:160])
    assert struct.unpack_from("<BBHI", image, 96) == (0, 1, 0, zlib.crc32(first))
    assert struct.unpack_from("<QQQ", image, 104) == (700, 700, 512)
    assert struct.unpack_from("<BBHI", image, 128) == (200, 0, 0, zlib.crc32(second))
    assert struct.unpack_from("<QQQ", image, 136) == (9000, 100, 1536)
    assert image[512:1212] == first
    assert image[1536:1636] == second
    assert not any(image[160:512] + image[1212:1536] + image[1636:])


def test_crc_is_that_of_zlib() -> None:
    assert crc32(b"123456789") == zlib.crc32(b"123456789") == 0xCBF43926
    assert crc32(b"6789", crc32(b"12345")) == 0xCBF43926


def test_the_worked_example_of_the_document_is_the_golden_vector() -> None:
    image = golden("unaligned").tobytes()
    text = DOCUMENT.read_text(encoding="utf-8")
    lines = re.findall(r"^([0-9a-f]{8})  ((?:[0-9a-f]{2} ?)+)$", text, re.MULTILINE)
    assert len(lines) > 16
    for at, shown in lines:
        line = bytes.fromhex(shown)
        assert image[int(at, 16) :][: len(line)] == line


def test_the_document_gives_each_field_its_offset_and_length() -> None:
    text = DOCUMENT.read_text(encoding="utf-8")
    fields = [
        (int(a), int(n)) for a, n in re.findall(r"^\| (\d+) \| (\d+) \| `", text, re.MULTILINE)
    ]
    starts = [index for index, (offset, _) in enumerate(fields) if offset == 0]
    totals = (96, 32, 64, 56)  # an object's header and row, and those of an index
    assert len(starts) == len(totals)
    for start, end, total in zip(starts, [*starts[1:], len(fields)], totals, strict=True):
        at = 0
        for offset, nbytes in fields[start:end]:
            assert offset == at
            at += nbytes
        assert at == total


# Round trips ------------------------------------------------------------------------------

payloads = st.one_of(
    st.binary(max_size=1200),
    st.sampled_from((511, 512, 513, 4096)).map(lambda nbytes: b"\x5a" * nbytes),
)


@st.composite
def segment_lists(draw: st.DrawFn) -> list[Segment]:
    segments = []
    for payload in draw(st.lists(payloads, min_size=1, max_size=24)):
        kind = draw(st.sampled_from((Format.RAW, Format.ANS, USER_FORMATS[0], USER_FORMATS[-1])))
        original_nbytes = None if kind is Format.RAW else draw(st.integers(0, 2**40))
        segments.append(segment(payload, kind=kind, original_nbytes=original_nbytes))
    return segments


@unhurried
@given(segment_lists(), st.integers(0, 2**64 - 1), st.binary(min_size=32, max_size=32))
def test_objects_read_back_as_written_by_us_and_by_others(
    segments: list[Segment], generation: int, key_digest: bytes
) -> None:
    image = written(segments, generation=generation, key_digest=key_digest)
    header = read_header(image, key_digest=key_digest)
    assert (header.generation, header.total_nbytes) == (generation, image.nbytes)

    mine = [
        independent.Stored(s.format, s.raw_reason, s.original_nbytes, s.payload.tobytes())
        for s in check_payloads(image, header)
    ]
    theirs = independent.read(image.tobytes())
    assert mine == list(theirs.segments)
    assert [s.payload for s in theirs.segments] == [s.payload.tobytes() for s in segments]
    assert independent.write(theirs) == image.tobytes()


@unhurried
@given(segment_lists())
def test_an_object_is_whole_blocks_and_its_payloads_are_aligned(segments: list[Segment]) -> None:
    image = written(segments)
    lengths = [segment.stored_nbytes for segment in segments]
    assert image.nbytes % 4096 == 0
    assert [row.offset for row in read_header(image).rows] == payload_offsets(lengths)
    assert not any(offset % 512 for offset in payload_offsets(lengths))


def test_segments_are_views_of_the_object() -> None:
    image = golden("many")
    assert all(np.shares_memory(s.payload, image) for s in read(image))


def test_read_segments_gives_the_crc_of_the_table_uncompared() -> None:
    image = golden("single")
    image[512] ^= 1
    (only,) = read_segments(image, read_header(image))
    assert only.crc32 == zlib.crc32(golden("single")[512 : 512 + 1024].tobytes())


def test_a_segment_without_a_crc_is_not_stored() -> None:
    unsealed = segment(b"x")
    unsealed.crc32 = None
    with pytest.raises(ValueError, match="without a CRC"):
        write_object(np.empty(4096, np.uint8), [unsealed], key_digest=KEY, generation=1)


def test_an_object_is_not_written_where_it_has_no_room() -> None:
    with pytest.raises(ValueError, match="object of 8192 bytes in 4096 bytes"):
        write_object(np.empty(4096, np.uint8), [segment(bytes(5000))], key_digest=KEY, generation=1)


def test_an_object_without_segments_is_not_written() -> None:
    with pytest.raises(ValueError, match="0 segments; accepted: 1 to"):
        written([])


def test_an_object_with_too_many_segments_is_not_written() -> None:
    with pytest.raises(ValueError, match="segments"):
        written([segment(b"")] * (2**16 + 1))


@pytest.mark.parametrize("nbytes", [0, 5, 31, 33])
def test_a_key_digest_of_another_length_is_not_stored(nbytes: int) -> None:
    with pytest.raises(ValueError, match="digest"):
        written([segment(b"x")], key_digest=bytes(nbytes))


@unhurried
@given(st.data())
def test_payloads_that_lie_in_the_image_already_move_only_towards_its_start(
    data: st.DataObject,
) -> None:
    """As C leaves them: raw at their places, some replaced by shorter ones from elsewhere."""
    raw = data.draw(st.lists(st.binary(min_size=1, max_size=2000), min_size=1, max_size=12))
    offsets = payload_offsets([len(payload) for payload in raw])
    image = np.full(object_nbytes([len(payload) for payload in raw]) + 512, 0xA5, np.uint8)
    segments, wanted = [], []
    for payload, offset in zip(raw, offsets, strict=True):
        place = image[offset : offset + len(payload)]
        place[:] = np.frombuffer(payload, np.uint8)
        shorter = data.draw(st.none() | st.binary(max_size=len(payload) - 1))
        if shorter is None:
            segments.append(Segment(Format.RAW, place, len(payload), 0, crc32(place), offset))
            wanted.append(independent.Stored(0, 0, len(payload), payload))
        else:
            segments.append(segment(shorter, kind=200, original_nbytes=len(payload)))
            wanted.append(independent.Stored(200, 0, len(payload), shorter))
    nbytes = write_object(image, segments, key_digest=KEY, generation=3)
    alone = independent.write(independent.Vector(3, KEY, tuple(wanted)))
    assert image[:nbytes].tobytes() == alone
    assert (image[-512:] == 0xA5).all()


# Corruption -------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["single", "unaligned", "user-format"])
def test_every_flipped_bit_is_refused(name: str) -> None:
    """Header, table, payload and padding: exhaustively, with and without a key to compare."""
    image = golden(name)
    assert not refused(image)
    for at in range(image.nbytes):
        for bit in range(8):
            image[at] ^= 1 << bit
            assert refused(image), f"byte {at}, bit {bit}"
            image[at] ^= 1 << bit
    assert not refused(image)


@unhurried
@given(st.data())
def test_burst_errors_are_refused(data: st.DataObject) -> None:
    image = golden("many")
    at = data.draw(st.integers(0, image.nbytes - 1))
    burst = np.frombuffer(data.draw(st.binary(min_size=1, max_size=4)), np.uint8)
    before = image.copy()
    image[at : at + burst.size] ^= burst[: image.nbytes - at]
    assert refused(image) != np.array_equal(image, before)


def test_truncation_at_any_length_is_refused() -> None:
    image = golden("unaligned")
    for nbytes in range(image.nbytes):
        assert refused(image[:nbytes]), f"{nbytes} bytes"


def test_bytes_after_the_object_are_refused() -> None:
    for nbytes in (1, 512, 4096):
        assert refused(np.concatenate([golden("single"), np.zeros(nbytes, np.uint8)]))


@unhurried
@given(st.binary(max_size=9000))
def test_arbitrary_bytes_are_refused(image: bytes) -> None:
    assert refused(np.frombuffer(image, np.uint8))


def test_another_keys_digest_is_refused_by_name() -> None:
    image = written([segment(b"x")])
    assert len(read(image, KEY)) == 1
    with pytest.raises(CorruptObject, match="key digest"):
        read_header(image, key_digest=KEY[::-1])


HUGE = (0, 2**16 + 1, 2**20, 2**31, 2**32 - 1)
LONG = (2**40, 2**40 + 1, 2**53 + 1, 2**63 - 1, 2**63, 2**64 - 512, 2**64 - 1)


@pytest.mark.parametrize("segments", HUGE)
def test_a_count_of_segments_that_cannot_be_is_refused(segments: int) -> None:
    image = golden("single")
    struct.pack_into("<I", image, 12, segments)
    with pytest.raises(CorruptObject, match=f"segments {segments} in an object of 4096 bytes"):
        read_header(image)


@pytest.mark.parametrize("nbytes", LONG)
@pytest.mark.parametrize("offset", [104, 112, 120], ids=["original", "stored", "offset"])
@pytest.mark.parametrize("row", [0, 1, 4])
def test_forged_lengths_and_offsets_are_refused(row: int, offset: int, nbytes: int) -> None:
    assert refused(forged(golden("unaligned"), "<Q", 32 * row + offset, nbytes))


@pytest.mark.parametrize("nbytes", LONG)
def test_a_forged_total_is_refused(nbytes: int) -> None:
    assert refused(forged(golden("single"), "<Q", 24, nbytes))


def test_forged_lengths_whose_sum_wraps_are_refused() -> None:
    image = golden("unaligned")
    for row in range(5):
        struct.pack_into("<QQ", image, 104 + 32 * row, 2**63, 2**63)
    assert refused(resealed(image))


@unhurried
@given(st.data())
def test_any_forged_table_is_refused_or_says_what_it_holds(data: st.DataObject) -> None:
    """Under a right CRC a reader still believes nothing that does not follow from the lengths."""
    image = golden("unaligned")
    fields = [("<H", 8, 16), ("<H", 10, 16), ("<I", 12, 32), ("<Q", 24, 64)]
    for row in range(96, 256, 32):
        fields += [("<H", row + 2, 16), ("<I", row + 4, 32)]
        fields += [("<Q", row + at, 64) for at in (8, 16, 24)]
    for _ in range(data.draw(st.integers(1, 3))):
        layout, offset, bits = data.draw(st.sampled_from(fields))
        value = data.draw(st.integers(0, 2**bits - 1) | st.integers(0, 5000 % 2**bits))
        struct.pack_into(layout, image, offset, value)
    (count,) = struct.unpack_from("<I", image, 12)
    image = resealed(image) if count < 100 else image
    try:
        theirs = independent.read(image.tobytes())
    except AssertionError:
        assert refused(image)
    else:
        assert [s.payload.tobytes() for s in read(image)] == [s.payload for s in theirs.segments]


@pytest.mark.parametrize(
    ("layout", "offset", "value", "field"),
    [
        ("8s", 0, b"OrbitKX\0", "magic"),
        ("8s", 0, b"OrbitKV\1", "magic"),
        ("8s", 0, b"OrbitK\0\0", "magic"),
        ("<H", 8, 1, "version 1; accepted: 2"),
        ("<H", 8, 3, "version 3; accepted: 2"),
        ("<H", 10, 128, "header_nbytes 128; accepted: 96"),
        ("<Q", 24, 8192, "total_nbytes 8192; accepted: 4096"),
        ("<Q", 64, 1, "reserved"),
        ("<I", 88, 2**31, "reserved"),
        ("<H", 98, 1, "segment 0: offset 512, flags 1"),
        ("<Q", 104, 1023, "segment 0: raw, "),
        ("<Q", 112, 1023, "segment 0: raw, "),
        ("<Q", 120, 1024, "segment 0: offset 1024"),
    ],
)
def test_faults_name_the_field_what_was_seen_and_what_is_accepted(
    layout: str, offset: int, value: int | bytes, field: str
) -> None:
    with pytest.raises(CorruptObject, match=re.escape(field)):
        read(forged(golden("single"), layout, offset, value))


def test_corrupt_payloads_and_padding_are_named() -> None:
    for at, said in (
        (300, "before segment 0"),
        (512, "segment 0: crc32"),
        (4095, "after the last"),
    ):
        image = golden("unaligned")
        image[at] ^= 0x80
        with pytest.raises(CorruptObject, match=said):
            read(image)


@settings(deadline=None, max_examples=20)
@given(st.integers(-3, 3))
def test_an_object_at_any_address_reads_the_same(shift: int) -> None:
    image = golden("many")
    moved = np.zeros(image.nbytes + 8, np.uint8)[4 + shift :][: image.nbytes]
    moved[:] = image
    assert [s.payload.tobytes() for s in read(moved)] == [s.payload.tobytes() for s in read(image)]
