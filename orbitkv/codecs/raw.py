"""The codec ``none``: a segment's payload is its bytes."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from orbitkv.codecs.base import Addresses, SegmentSpec, Words
from orbitkv.errors import CorruptObject
from orbitkv.objects import Bytes, Format, RawReason, crc32

_STEP_NBYTES = 2**19  # stays in the second level cache between copy and CRC


def copy_with_crc32(source: Bytes, target: Bytes) -> int:
    """Copy bytes and compute their CRC-32 while they are in the cache.

    Args:
        source, target: uint8[n], host, contiguous, not overlapping.
    """
    if source.nbytes <= _STEP_NBYTES:
        np.copyto(target, source)
        return crc32(target)
    crc = 0
    for start in range(0, source.nbytes, _STEP_NBYTES):
        step = target[start : start + _STEP_NBYTES]
        step[:] = source[start : start + _STEP_NBYTES]
        crc = crc32(step, crc)
    return crc


def address_of(array: Words) -> int:
    """Where an array's first element lies."""
    address: int = array.__array_interface__["data"][0]
    return address


def check_segment(words: Words, original_nbytes: int) -> None:
    """Check that an array can be a segment.

    Raises:
        ValueError: saying what was seen and what is accepted.
    """
    if words.nbytes != original_nbytes:
        raise ValueError(f"segment of {words.nbytes} bytes; accepted: {original_nbytes}")
    flags = words.flags
    if not (flags.c_contiguous and flags.aligned):
        raise ValueError(
            "segment with gaps, or off its words' boundary; accepted: one run of words"
        )


def check_room(out: Bytes, encoded_nbytes: int) -> None:
    """Check that a payload can be written to ``out``.

    Raises:
        ValueError: saying what was seen and what is accepted.
    """
    if out.nbytes < encoded_nbytes:
        raise ValueError(f"room for {out.nbytes} bytes; accepted: {encoded_nbytes} or more")
    if not out.flags.c_contiguous:
        raise ValueError("room with gaps; accepted: one run of bytes")


def check_payload(payload: Bytes, encoded_nbytes: int) -> None:
    """Check a payload's length, before a byte of it is read.

    Raises:
        CorruptObject: saying what was seen and what is accepted.
    """
    if payload.nbytes != encoded_nbytes:
        raise CorruptObject(f"payload of {payload.nbytes} bytes; accepted: {encoded_nbytes}")


@dataclass(frozen=True)
class RawCodec:
    """Keeps segments as they are."""

    name = "none"
    identity = "none"
    format = Format.RAW
    protects_layers = False

    def bind(self, spec: SegmentSpec) -> RawSegments:
        """Take segments of any kind."""
        return RawSegments(spec)


@dataclass(frozen=True)
class RawSegments:
    """Copies segments of one spec."""

    spec: SegmentSpec
    format = Format.RAW
    kernel = ("raw",)

    @property
    def encoded_nbytes(self) -> int:
        """As long as the original."""
        return self.spec.original_nbytes

    def encode(self, words: Words, out: Bytes) -> int:
        """Copy one segment."""
        check_segment(words, self.encoded_nbytes)
        check_room(out, self.encoded_nbytes)
        out[: self.encoded_nbytes] = words.reshape(-1).view(np.uint8)
        return self.encoded_nbytes

    def encode_many(self, sources: Addresses, targets: Addresses) -> Mapping[int, RawReason]:
        """Copy segments."""
        self.decode_many(sources, targets)
        return {}

    def decode(self, payload: Bytes, out: Words) -> None:
        """Copy one payload back."""
        check_payload(payload, self.encoded_nbytes)
        check_segment(out, self.encoded_nbytes)
        out.reshape(-1).view(np.uint8)[:] = payload

    def decode_many(self, sources: Addresses, targets: Addresses) -> None:
        """Copy payloads back."""
        for source, target in zip(sources.tolist(), targets.tolist(), strict=True):
            ctypes.memmove(target, source, self.encoded_nbytes)
