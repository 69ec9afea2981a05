"""The object format, version 2: header, segment table, payloads, zero padding.

DRAM, SSD and peers hold the same bytes. ``docs/format.md`` gives every field; the layout is
canonical (each offset follows from the lengths), so a reader never trusts an offset it read.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import numpy as np
import numpy.typing as npt
from isal import isal_zlib

from orbitkv.errors import CorruptObject

MAGIC = b"OrbitKV\0"
VERSION = 2
PAYLOAD_ALIGN_NBYTES = 512
OBJECT_ALIGN_NBYTES = 4096
MAX_SEGMENTS = 2**16
MAX_SEGMENT_NBYTES = 2**40

Bytes = npt.NDArray[np.uint8]

HEADER = np.dtype(
    [
        ("magic", "S8"),
        ("version", "<u2"),
        ("header_nbytes", "<u2"),
        ("segments", "<u4"),
        ("generation", "<u8"),
        ("total_nbytes", "<u8"),
        ("key_digest", "V32"),
        ("reserved", "V28"),
        ("crc32", "<u4"),
    ]
)
ROW = np.dtype(
    [
        ("format", "u1"),
        ("raw_reason", "u1"),
        ("flags", "<u2"),
        ("crc32", "<u4"),
        ("original_nbytes", "<u8"),
        ("stored_nbytes", "<u8"),
        ("offset", "<u8"),
    ]
)
_CRC_OFFSET = HEADER.fields["crc32"][1]  # type: ignore[index]


class Format(IntEnum):
    """Representation of one stored segment. 128 to 255 are for stages of the user's own."""

    RAW = 0
    ANS = 1
    FP8_E4M3FN = 2
    TURBOQUANT4 = 3
    TURBOQUANT3 = 4


USER_FORMATS = range(128, 256)


class RawReason(IntEnum):
    """Why a segment is stored raw. Raw is a result, not an error."""

    CHOSEN = 0
    SAVES_TOO_LITTLE = 1


def crc32(payload: Bytes | bytes | memoryview, crc: int = 0) -> int:
    """CRC-32 of IEEE 802.3, equal to ``zlib.crc32``; releases the GIL."""
    return isal_zlib.crc32(payload, crc)


def align_up(nbytes: int, alignment: int) -> int:
    """Round up to a multiple of ``alignment``."""
    return -(-nbytes // alignment) * alignment


@dataclass(slots=True)
class Segment:
    """One segment on its way to or from an object.

    Attributes:
        format: A ``Format``, or a number of ``USER_FORMATS``.
        payload: Stored bytes, uint8[stored_nbytes], host, contiguous.
        original_nbytes: Length of the engine's bytes, whatever the format.
        crc32: Of ``payload``; None until the crc32 stage has seen it.
    """

    format: int
    payload: Bytes
    original_nbytes: int
    raw_reason: int = RawReason.CHOSEN
    crc32: int | None = None

    @property
    def stored_nbytes(self) -> int:
        """Length of the payload."""
        return self.payload.nbytes


@dataclass(frozen=True, slots=True)
class Header:
    """What an object says of itself, after it has been checked.

    Attributes:
        table: Rows of dtype ``ROW``, one a segment; a view of the object's own bytes.
    """

    generation: int
    total_nbytes: int
    key_digest: bytes
    table: npt.NDArray[Any]


def object_nbytes(stored_nbytes: Sequence[int]) -> int:
    """Length of an object whose segments have these stored lengths."""
    end = HEADER.itemsize + ROW.itemsize * len(stored_nbytes)
    for nbytes in stored_nbytes:
        end = align_up(end, PAYLOAD_ALIGN_NBYTES) + nbytes
    return align_up(end, OBJECT_ALIGN_NBYTES)


def write_object(
    image: Bytes, segments: Sequence[Segment], *, key_digest: bytes, generation: int
) -> None:
    """Lay an object out in ``image``, every byte of which is written, padding with zeros.

    Args:
        image: uint8[object_nbytes(...)], host.
        segments: With their CRCs.

    Raises:
        ValueError: a segment has no CRC, or ``image`` has another length.
    """
    table = np.zeros(len(segments), ROW)
    table["format"] = [segment.format for segment in segments]
    table["raw_reason"] = [segment.raw_reason for segment in segments]
    table["crc32"] = [_sealed(segment) for segment in segments]
    table["original_nbytes"] = [segment.original_nbytes for segment in segments]
    table["stored_nbytes"] = stored = np.array([s.stored_nbytes for s in segments], np.int64)
    offsets, total_nbytes = _canonical_layout(stored)
    table["offset"] = offsets
    if image.nbytes != total_nbytes:
        raise ValueError(f"object of {total_nbytes} bytes in {image.nbytes} bytes")
    header = np.zeros(1, HEADER)
    header["magic"] = MAGIC
    header["version"] = VERSION
    header["header_nbytes"] = HEADER.itemsize
    header["segments"] = len(segments)
    header["generation"] = generation
    header["total_nbytes"] = total_nbytes
    header["key_digest"] = np.void(key_digest)
    head = header.view(np.uint8)
    header["crc32"] = crc32(table.view(np.uint8), crc32(head[:_CRC_OFFSET]))
    end = HEADER.itemsize + table.nbytes
    image[: HEADER.itemsize] = head
    image[HEADER.itemsize : end] = table.view(np.uint8)
    for segment, offset in zip(segments, offsets.tolist(), strict=True):
        if offset > end:
            image[end:offset] = 0
        end = offset + segment.stored_nbytes
        image[offset:end] = segment.payload
    image[end:] = 0


def _sealed(segment: Segment) -> int:
    if segment.crc32 is None:
        raise ValueError("segment without a CRC: the crc32 stage must run before it is stored")
    return segment.crc32


def _canonical_layout(stored_nbytes: npt.NDArray[np.int64]) -> tuple[npt.NDArray[np.int64], int]:
    """Offset of each payload, and the total length, both of which follow from the lengths."""
    first = align_up(HEADER.itemsize + ROW.itemsize * len(stored_nbytes), PAYLOAD_ALIGN_NBYTES)
    spans = -(-stored_nbytes // PAYLOAD_ALIGN_NBYTES) * PAYLOAD_ALIGN_NBYTES
    offsets = first + np.cumsum(spans) - spans
    end = int(offsets[-1] + stored_nbytes[-1]) if len(stored_nbytes) else first
    return offsets, align_up(end, OBJECT_ALIGN_NBYTES)


def read_header(image: Bytes, *, key_digest: bytes | None = None) -> Header:
    """Check an object's header and table, and nothing of its payloads.

    Args:
        image: uint8[n], host; the object's bytes and nothing after them.
        key_digest: The key that was asked for. None: any, for a reader of files.

    Raises:
        CorruptObject: naming the field, what was seen, and what is accepted.
    """
    if image.nbytes < HEADER.itemsize:
        raise CorruptObject(f"{image.nbytes} bytes; accepted: {HEADER.itemsize} or more")
    header = image[: HEADER.itemsize].view(HEADER)[0]
    _expect("magic", header["magic"].ljust(8, b"\0"), MAGIC)
    _expect("version", int(header["version"]), VERSION)
    _expect("header_nbytes", int(header["header_nbytes"]), HEADER.itemsize)
    _expect("total_nbytes", int(header["total_nbytes"]), image.nbytes)
    segments = int(header["segments"])
    table_end = HEADER.itemsize + ROW.itemsize * segments
    if not 0 < segments <= MAX_SEGMENTS or table_end > image.nbytes:
        raise CorruptObject(f"segments {segments} in an object of {image.nbytes} bytes")
    body = image[HEADER.itemsize : table_end]
    seen = crc32(body, crc32(image[:_CRC_OFFSET]))
    _expect("header crc32", seen, int(header["crc32"]))
    if key_digest is not None:
        _expect("key digest", bytes(header["key_digest"]).hex(), key_digest.hex())
    table = body.view(ROW)
    if table["stored_nbytes"].max() > image.nbytes:
        raise CorruptObject(f"stored_nbytes {table['stored_nbytes'].max()} in {image.nbytes} bytes")
    if table["original_nbytes"].max() > MAX_SEGMENT_NBYTES:
        raise CorruptObject(f"original_nbytes {table['original_nbytes'].max()}")
    offsets, total_nbytes = _canonical_layout(table["stored_nbytes"].astype(np.int64))
    _expect("total_nbytes", image.nbytes, total_nbytes)
    if not np.array_equal(offsets, table["offset"]):
        raise CorruptObject("offsets are not those that follow from the stored lengths")
    raw = table["format"] == Format.RAW
    if not np.array_equal(table["stored_nbytes"][raw], table["original_nbytes"][raw]):
        raise CorruptObject("a raw segment is stored with another length than its own")
    if table["flags"].any() or any(bytes(header["reserved"])):
        raise CorruptObject("reserved bits are set")
    return Header(int(header["generation"]), total_nbytes, bytes(header["key_digest"]), table)


def _expect(field: str, seen: object, wanted: object) -> None:
    if seen != wanted:
        raise CorruptObject(f"{field} {seen!r}; accepted: {wanted!r}")


def read_segments(image: Bytes, header: Header) -> list[Segment]:
    """Return views of the payloads. Their CRCs are those of the table, not yet compared."""
    table = header.table
    columns = (table[name].tolist() for name in ("format", "raw_reason", "crc32"))
    lengths = (table[name].tolist() for name in ("original_nbytes", "stored_nbytes", "offset"))
    return [
        Segment(kind, image[offset : offset + stored], original, reason, crc)
        for kind, reason, crc, original, stored, offset in zip(*columns, *lengths, strict=True)
    ]


def check_payloads(image: Bytes, header: Header) -> list[Segment]:
    """Compare every payload's CRC with the table, and all padding with zero.

    Returns:
        Views of the payloads, in order.

    Raises:
        CorruptObject: naming the first segment or gap that differs.
    """
    end = HEADER.itemsize + header.table.nbytes
    segments = read_segments(image, header)
    offsets = header.table["offset"].tolist()
    for index, (segment, offset) in enumerate(zip(segments, offsets, strict=True)):
        if offset > end and image[end:offset].any():
            raise CorruptObject(f"padding before segment {index} is not zero")
        seen = crc32(segment.payload)
        if seen != segment.crc32:
            raise CorruptObject(f"segment {index}: crc32 {seen:08x}; stored {segment.crc32:08x}")
        end = offset + segment.stored_nbytes
    if image[end:].any():
        raise CorruptObject("padding after the last segment is not zero")
    return segments
