"""FP8: every value of every input format, against ml_dtypes."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from orbitkv.codecs import RawReason, SegmentCodec
from orbitkv.errors import CorruptObject
from tests.codecs.reference import DTYPES, bound, decoded, encoded, reason, spec

ALL = np.arange(2**16, dtype=np.uint16)
MAGNITUDE = ALL & 0x7FFF
MOST = {"bfloat16": 0x43E0, "float16": 0x5F00}
INFINITY = {"bfloat16": 0x7F80, "float16": 0x7C00}

both = pytest.mark.parametrize("dtype", DTYPES)


def codec(dtype: str, elements: int) -> SegmentCodec:
    return bound("fp8", spec(dtype, tokens=elements, heads=1, head_dim=1))


@both
def test_every_value_up_to_448_rounds_as_ml_dtypes_does(dtype: str) -> None:
    held = ALL[MOST[dtype] >= MAGNITUDE]
    wide = held.view(DTYPES[dtype]).astype(np.float32)
    wanted = wide.astype(ml_dtypes.float8_e4m3fn).view(np.uint8)
    assert (encoded(codec(dtype, len(held)), held) == wanted).all()


@both
def test_every_code_decodes_as_ml_dtypes_does(dtype: str) -> None:
    codes = np.arange(256, dtype=np.uint8)
    wide = codes.view(ml_dtypes.float8_e4m3fn).astype(np.float32)
    wanted = wide.astype(DTYPES[dtype]).view(np.uint16)
    assert (decoded(codec(dtype, 256), codes) == wanted).all()


@both
def test_every_code_but_nan_survives_decode_and_encode(dtype: str) -> None:
    codes = np.array([code for code in range(256) if code & 0x7F != 0x7F], np.uint8)
    both_ways = codec(dtype, len(codes))
    assert (encoded(both_ways, decoded(both_ways, codes)) == codes).all()


@both
def test_every_value_that_fp8_cannot_hold_makes_its_segment_raw(dtype: str) -> None:
    one = codec(dtype, 1)
    sources = ALL.ctypes.data + 2 * np.arange(2**16, dtype=np.int64)
    room = np.empty(2**16, np.uint8)
    targets = room.ctypes.data + np.arange(2**16, dtype=np.int64)
    found = one.encode_many(sources, targets)
    for wanted, words in (
        (RawReason.NONFINITE, ALL[INFINITY[dtype] <= MAGNITUDE]),
        (RawReason.OUT_OF_RANGE, ALL[(MOST[dtype] < MAGNITUDE) & (INFINITY[dtype] > MAGNITUDE)]),
    ):
        assert {index for index, seen in found.items() if seen is wanted} == set(words.tolist())


@both
@pytest.mark.parametrize("elements", [1, 2, 15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 129, 1000])
def test_tails_are_encoded_and_nothing_past_them_is_touched(dtype: str, elements: int) -> None:
    generator = np.random.default_rng(elements)
    held = ALL[MOST[dtype] >= MAGNITUDE]
    source = generator.choice(held, elements + 1)[1:]  # also off any vector's boundary
    out = np.full(elements + 64, 0xA5, np.uint8)
    assert codec(dtype, elements).encode(source, out[1:]) == elements
    wide = source.view(DTYPES[dtype]).astype(np.float32)
    assert (out[1 : 1 + elements] == wide.astype(ml_dtypes.float8_e4m3fn).view(np.uint8)).all()
    assert (np.delete(out, range(1, 1 + elements)) == 0xA5).all()

    back = np.full(elements + 64, 0xA5A5, np.uint16)
    codec(dtype, elements).decode(out[1 : 1 + elements], back[1 : 1 + elements])
    assert (np.delete(back, range(1, 1 + elements)) == 0xA5A5).all()


@both
@pytest.mark.parametrize("place", [0, 1, 31, 32, 99])
def test_one_nan_anywhere_is_found_and_outweighs_what_is_too_large(dtype: str, place: int) -> None:
    segment = np.zeros(100, np.uint16)
    segment[50] = MOST[dtype] + 1
    assert reason(codec(dtype, 100), segment) is RawReason.OUT_OF_RANGE
    segment[place] = 0x8000 | (INFINITY[dtype] + 1)
    assert reason(codec(dtype, 100), segment) is RawReason.NONFINITE


@both
@pytest.mark.parametrize("nbytes", [0, 99, 101])
def test_a_payload_of_another_length_is_corrupt(dtype: str, nbytes: int) -> None:
    with pytest.raises(CorruptObject, match=f"payload of {nbytes} bytes; accepted: 100"):
        codec(dtype, 100).decode(np.zeros(nbytes, np.uint8), np.empty(100, np.uint16))
