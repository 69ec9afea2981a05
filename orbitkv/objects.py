"""The object format, version 2: header, segment table, payloads, zero padding.

DRAM, SSD and peers hold the same bytes. ``docs/format.md`` gives every field; the layout is
canonical (each offset follows from the lengths), so a reader never trusts an offset it read.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from isal import isal_zlib

from orbitkv.errors import CorruptObject

MAGIC = b"OrbitKV\0"
VERSION = 2
PAYLOAD_ALIGN_NBYTES = 512
OBJECT_ALIGN_NBYTES = 4096
_ZEROS = bytes(OBJECT_ALIGN_NBYTES)
KEY_DIGEST_NBYTES = 32
MAX_SEGMENTS = 2**16
MAX_SEGMENT_NBYTES = 2**40

Bytes = npt.NDArray[np.uint8]
Rows = npt.NDArray[np.void]
Table = npt.NDArray[np.uint32]
"""A segment table as words: uint32[segments, 8], whose column ``CRC32_WORD`` holds the CRCs."""
CRC32_WORD = 1

# magic, version, header_nbytes, segments, generation, total_nbytes, key digest, 28 bytes of zero,
# and behind them the CRC-32 of these bytes and the table.
_HEADER = struct.Struct("<8sHHIQQ32s28s")
_CRC = struct.Struct("<I")
HEADER_NBYTES = _HEADER.size + _CRC.size
# format, raw_reason, flags, crc32, original_nbytes, stored_nbytes, offset
_ROW_FIELDS = "BBHIQQQ"
_ROW = struct.Struct("<" + _ROW_FIELDS)
ROW_NBYTES = _ROW.size
_RESERVED = bytes(28)
# The same row for numpy, where many are made or checked at once.
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


class Format(IntEnum):
    """Representation of one stored segment. 128 to 255 are for stages of the user's own."""

    RAW = 0
    ANS = 1
    FP8_E4M3FN = 2
    TURBOQUANT4 = 3
    TURBOQUANT3 = 4
    MANIFEST = 64  # JSON that describes the other segments; first in an .okv file, nowhere else


USER_FORMATS = range(128, 256)
_RAW = int(Format.RAW)


class RawReason(IntEnum):
    """Why a segment is stored raw. Raw is a result, not an error."""

    CHOSEN = 0
    SAVES_TOO_LITTLE = 1
    NONFINITE = 2
    OUT_OF_RANGE = 3
    SCALAR_OVERFLOW = 4
    UNSUPPORTED_DTYPE = 5
    UNSUPPORTED_LAYOUT = 6
    OVERSIZED = 7
    PROTECTED_LAYER = 8
    OPAQUE_STATE = 9
    NO_BUDGET = 10
    CODEC_FAILED = 11


# CRC-32 of IEEE 802.3, equal to ``zlib.crc32``; releases the GIL. Bound as it is: a call through a
# function of ours costs a twentieth of a 64 KiB segment's CRC.
crc32: Callable[..., int] = isal_zlib.crc32
crc32_combine: Callable[[int, int, int], int] = isal_zlib.crc32_combine


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
        crc32: Of ``payload``; None until it has been computed.
        offset: Where in its object's image the payload lies already; None: somewhere else.
    """

    format: int
    payload: Bytes
    original_nbytes: int
    raw_reason: int = RawReason.CHOSEN
    crc32: int | None = None
    offset: int | None = None

    @property
    def stored_nbytes(self) -> int:
        """Length of the payload."""
        return self.payload.nbytes


class Row(NamedTuple):
    """One row of the segment table, as stored."""

    format: int
    raw_reason: int
    flags: int
    crc32: int
    original_nbytes: int
    stored_nbytes: int
    offset: int


@dataclass(frozen=True, slots=True)
class Header:
    """What an object says of itself, after it has been checked.

    Attributes:
        table: The segment table's bytes, as stored.
    """

    generation: int
    total_nbytes: int
    key_digest: bytes
    table: bytes

    @property
    def rows(self) -> tuple[Row, ...]:
        """The segment table."""
        return tuple(Row._make(fields) for fields in _ROW.iter_unpack(self.table))


def object_nbytes(stored_nbytes: Sequence[int]) -> int:
    """Length of an object whose segments have these stored lengths."""
    offsets = payload_offsets(stored_nbytes)
    end = offsets[-1] + stored_nbytes[-1] if offsets else HEADER_NBYTES
    return align_up(end, OBJECT_ALIGN_NBYTES)


def payload_offsets(stored_nbytes: Sequence[int]) -> list[int]:
    """Offset of each payload in an object whose segments have these stored lengths."""
    offsets = []
    end = HEADER_NBYTES + ROW_NBYTES * len(stored_nbytes)
    for nbytes in stored_nbytes:
        offset = -(-end // PAYLOAD_ALIGN_NBYTES) * PAYLOAD_ALIGN_NBYTES
        offsets.append(offset)
        end = offset + nbytes
    return offsets


def write_object(
    image: Bytes, segments: Sequence[Segment], *, key_digest: bytes, generation: int
) -> int:
    """Lay an object out at the start of ``image``; every byte of it is written, padding with zeros.

    Payloads that lie in the image already are moved only where their place has changed, which
    it may only towards the start.

    Args:
        image: uint8[n], host, with room for the object.
        segments: With their CRCs.

    Returns:
        Length of the object: a multiple of 4 KiB.

    Raises:
        ValueError: no segments or too many, one has no CRC, the digest is not one of SHA-256, or
            ``image`` is too short.
    """
    if not 0 < len(segments) <= MAX_SEGMENTS:
        raise ValueError(f"object of {len(segments)} segments; accepted: 1 to {MAX_SEGMENTS}")
    if len(key_digest) != KEY_DIGEST_NBYTES:
        raise ValueError(f"key digest of {len(key_digest)} bytes; accepted: {KEY_DIGEST_NBYTES}")
    offsets = payload_offsets([segment.payload.nbytes for segment in segments])
    table_end = HEADER_NBYTES + ROW_NBYTES * len(segments)
    total_nbytes = align_up(offsets[-1] + segments[-1].payload.nbytes, OBJECT_ALIGN_NBYTES)
    if image.nbytes < total_nbytes:
        raise ValueError(f"object of {total_nbytes} bytes in {image.nbytes} bytes")
    rows: list[int] = []
    end = table_end
    for segment, offset in zip(segments, offsets, strict=True):
        if segment.crc32 is None:
            raise ValueError("segment without a CRC: the crc32 stage must run before it is stored")
        payload = segment.payload
        nbytes = payload.nbytes
        if offset > end:
            image[end:offset] = 0
        end = offset + nbytes
        if segment.offset != offset:
            image[offset:end] = payload
        rows += (
            segment.format,
            segment.raw_reason,
            0,
            segment.crc32,
            segment.original_nbytes,
            nbytes,
            offset,
        )
    image[end:total_nbytes] = 0
    table = struct.pack("<" + _ROW_FIELDS * len(segments), *rows)
    image[:table_end] = np.frombuffer(
        pack_head(table, total_nbytes, key_digest, generation), np.uint8
    )
    return total_nbytes


def pack_head(table: bytes, total_nbytes: int, key_digest: bytes, generation: int) -> bytes:
    """Header and table of an object, with the CRC over both.

    Args:
        table: The segment table, complete.
        total_nbytes: Of the object, a multiple of 4 KiB.
    """
    segments = len(table) // ROW_NBYTES
    head = _HEADER.pack(
        MAGIC,
        VERSION,
        HEADER_NBYTES,
        segments,
        generation,
        total_nbytes,
        key_digest,
        _RESERVED,
    )
    return head + _CRC.pack(crc32(table, crc32(head))) + table


def finish_object(
    image: Bytes, table: Table, *, payloads: range, key_digest: bytes, generation: int
) -> None:
    """Write header, table and the padding at both ends round payloads that lie in place.

    Args:
        image: uint8[total_nbytes], host; the padding between payloads is zero already.
        table: The segment table, complete.
        payloads: From the first payload's first byte to the last one's last.
    """
    head = pack_head(table.tobytes(), image.nbytes, key_digest, generation)
    image[: payloads.start] = np.frombuffer(head.ljust(payloads.start, b"\0"), np.uint8)
    if payloads.stop < image.nbytes:
        image[payloads.stop :] = 0


def read_header(
    image: Bytes, *, key_digest: bytes | None = None, nbytes: int | None = None
) -> Header:
    """Check an object's header and table, and nothing of its payloads.

    Args:
        image: uint8[n], host; the object's bytes and nothing after them.
        key_digest: The key that was asked for. None: any, for a reader of files.
        nbytes: Of the object, where ``image`` holds no more than its head.

    Raises:
        CorruptObject: naming the field, what was seen, and what is accepted.
    """
    header = read_sealed(image, key_digest=key_digest, nbytes=nbytes)
    end = HEADER_NBYTES + len(header.table)
    rows = enumerate(_ROW.iter_unpack(header.table))
    for index, (kind, _, flags, _, original_nbytes, stored_nbytes, offset) in rows:
        # Each offset follows from the lengths before it, so no two payloads can overlap.
        if offset != -(-end // PAYLOAD_ALIGN_NBYTES) * PAYLOAD_ALIGN_NBYTES or flags:
            raise CorruptObject(f"segment {index}: offset {offset}, flags {flags}")
        if kind == _RAW and stored_nbytes != original_nbytes:
            raise CorruptObject(
                f"segment {index}: raw, {stored_nbytes} of {original_nbytes} bytes stored"
            )
        if original_nbytes > MAX_SEGMENT_NBYTES:
            raise CorruptObject(f"segment {index}: original_nbytes {original_nbytes}")
        end = offset + stored_nbytes
    _expect("total_nbytes", header.total_nbytes, align_up(end, OBJECT_ALIGN_NBYTES))
    return header


def read_sealed(
    image: Bytes, *, key_digest: bytes | None = None, nbytes: int | None = None
) -> Header:
    """Check an object's header, and the CRC over it and its table; of the rows, nothing.

    Args:
        image: uint8[n], host.
        nbytes: Of the object, where ``image`` holds no more than its head.

    Raises:
        CorruptObject: naming the field, what was seen, and what is accepted.
    """
    if image.nbytes < HEADER_NBYTES:
        raise CorruptObject(f"{image.nbytes} bytes; accepted: {HEADER_NBYTES} or more")
    head = image[: _HEADER.size].tobytes()
    magic, version, header_nbytes, segments, generation, total_nbytes, digest, reserved = (
        _HEADER.unpack(head)
    )
    _expect("magic", magic, MAGIC)
    _expect("version", version, VERSION)
    _expect("header_nbytes", header_nbytes, HEADER_NBYTES)
    _expect("total_nbytes", total_nbytes, image.nbytes if nbytes is None else nbytes)
    _expect("reserved bytes", reserved, _RESERVED)
    table_end = HEADER_NBYTES + ROW_NBYTES * segments
    if not 0 < segments <= MAX_SEGMENTS or table_end > image.nbytes:
        raise CorruptObject(f"segments {segments} in an object of {image.nbytes} bytes")
    table = image[HEADER_NBYTES:table_end].tobytes()
    (stored_crc,) = _CRC.unpack(image[_HEADER.size : HEADER_NBYTES].tobytes())
    _expect("crc32 of header and table", crc32(table, crc32(head)), stored_crc)
    if key_digest is not None:
        _expect("key digest", digest.hex(), key_digest.hex())
    return Header(generation, total_nbytes, digest, table)


def _expect(field: str, seen: object, wanted: object) -> None:
    if seen != wanted:
        raise CorruptObject(f"{field} {seen!r}; accepted: {wanted!r}")


def read_segments(image: Bytes, header: Header) -> list[Segment]:
    """Return views of the payloads. Their CRCs are those of the table, not yet compared."""
    return [
        Segment(kind, image[offset : offset + stored], original, reason, crc, offset)
        for kind, reason, _, crc, original, stored, offset in _ROW.iter_unpack(header.table)
    ]


def check_payloads(image: Bytes, header: Header) -> list[Segment]:
    """Compare every payload's CRC with the table, and all padding with zero.

    Returns:
        Views of the payloads, in order.

    Raises:
        CorruptObject: naming the first segment or gap that differs.
    """
    check_stored(image, header)
    return read_segments(image, header)


def check_stored(image: Bytes, header: Header) -> None:
    """Compare every payload's CRC with the table, and all padding with zero.

    In one pass: the CRC over all of it follows from the payloads' and from that of zeros.

    Raises:
        CorruptObject: naming the first segment or gap that differs.
    """
    start = end = HEADER_NBYTES + len(header.table)
    wanted = 0
    for _, _, _, crc, _, stored_nbytes, offset in _ROW.iter_unpack(header.table):
        if gap_nbytes := offset - end:
            wanted = crc32_combine(wanted, crc32(_ZEROS[:gap_nbytes]), gap_nbytes)
        wanted = crc32_combine(wanted, crc, stored_nbytes)
        end = offset + stored_nbytes
    if gap_nbytes := image.nbytes - end:
        wanted = crc32_combine(wanted, crc32(_ZEROS[:gap_nbytes]), gap_nbytes)
    if crc32(image[start:]) != wanted:
        _name_difference(image, header)


def _name_difference(image: Bytes, header: Header) -> None:
    end = HEADER_NBYTES + len(header.table)
    for index, segment in enumerate(read_segments(image, header)):
        offset, seen = segment.offset or 0, crc32(segment.payload)
        if seen != segment.crc32:
            raise CorruptObject(f"segment {index}: crc32 {seen:08x}; stored {segment.crc32:08x}")
        if image[end:offset].any():
            raise CorruptObject(f"padding before segment {index} is not zero")
        end = offset + segment.stored_nbytes
    raise CorruptObject("padding after the last segment is not zero")
