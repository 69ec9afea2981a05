"""Kernels of the codecs for one CPU core: the oracle of every other device's.

Importing this module imports numba, so nothing but ``orbitkv.codecs.host`` does, and late. Kernels
take addresses, so that one call serves many segments, whatever arrays hold them; callers have
checked every length. FP32 throughout, without fastmath: LLVM then neither reorders nor contracts.
``docs/codecs.md`` says what each computes, in which order. Loops are written for LLVM to
vectorise: fixed lengths, comparisons summed instead of branches, 16-bit lanes where they suffice.
"""

# ruff: noqa: ANN401 - numba finds the types, from what a kernel is first called with
# ruff: noqa: ARG001 - an intrinsic's arguments are types, some of which only have to be there
# ruff: noqa: PLR0913, PLR0917 - kernels take addresses, lengths and flags, not objects

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar, cast

import numba
import numpy as np
from llvmlite import ir  # type: ignore[import-untyped]
from numba import types
from numba.core import cgutils, event
from numba.extending import intrinsic
from numba.np.numpy_support import carray

from orbitkv.codecs.base import NONFINITE, OUT_OF_RANGE, SCALAR_OVERFLOW

Function = TypeVar("Function", bound=Callable[..., Any])

u8, u16, u32, i16, i32 = np.uint8, np.uint16, np.uint32, np.int16, np.int32
f32 = np.float32

# As words: the largest E4M3FN value, and infinity.
_MOST_BF16, _MOST_F16 = 0x43E0, 0x5F00
_INF_BF16, _INF_F16 = 0x7F80, 0x7C00
_MOST_HEAD_DIM = 256
_LANES = 16
_WIDE = 4  # bits of a code; the other codec has three
_SMALLEST_SCALE = 2.0**-24  # the smallest FP16 above zero
_LARGEST_F16 = 65504.0

_OPTIONS: dict[str, Any] = {
    "nogil": True,
    "error_model": "numpy",
    "boundscheck": False,
    "fastmath": False,
}


def kernel(function: Function) -> Function:
    """Compile on first call, keep the result on disk, release the GIL."""
    try:
        compiled = numba.njit(cache=True, **_OPTIONS)(function)
    except RuntimeError:  # nowhere to write: neither beside this file nor in the user's cache
        compiled = numba.njit(**_OPTIONS)(function)
    return cast("Function", compiled)


def part(function: Function) -> Function:
    """Compile into the kernels that call it, where lengths are constants and nothing overlaps."""
    return cast("Function", numba.njit(forceinline=True, **_OPTIONS)(function))


class _Announcement(event.Listener):
    """Passes on the first of numba's compilations that it hears of."""

    def __init__(self, announce: Callable[[], None]) -> None:
        self._announce: Callable[[], None] | None = announce

    def on_start(self, _: Any) -> None:
        """Hear that numba starts to compile something, which it did not find on disk."""
        if self._announce is not None:
            announce, self._announce = self._announce, None
            announce()

    def on_end(self, _: Any) -> None:
        """Hear that it has ended."""


@contextmanager
def announced(announce: Callable[[], None]) -> Iterator[None]:
    """Call ``announce`` before the first compilation within, if there is one."""
    with event.install_listener("numba:compile", _Announcement(announce)):
        yield


# What numba lacks: memory by address, scratch on the stack, bits of a float, and vectors.


_pointer_to: Any = types.CPointer
_on_stack: Any = cgutils.alloca_once


def _lowered(function: Callable[..., Any]) -> Callable[..., Any]:
    return cast("Callable[..., Any]", intrinsic(function))


@_lowered
def words_at(_: Any, address: Any) -> Any:
    """View an address as uint16."""

    def lower(_: Any, builder: Any, __: Any, args: Any) -> Any:
        return builder.inttoptr(args[0], ir.IntType(16).as_pointer())

    return _pointer_to(types.uint16)(types.int64), lower


@_lowered
def bytes_at(_: Any, address: Any) -> Any:
    """View an address as uint8."""

    def lower(_: Any, builder: Any, __: Any, args: Any) -> Any:
        return builder.inttoptr(args[0], ir.IntType(8).as_pointer())

    return _pointer_to(types.uint8)(types.int64), lower


@_lowered
def floats_at(_: Any, address: Any) -> Any:
    """View an address as float32."""

    def lower(_: Any, builder: Any, __: Any, args: Any) -> Any:
        return builder.inttoptr(args[0], ir.FloatType().as_pointer())

    return _pointer_to(types.float32)(types.int64), lower


@_lowered
def scratch_floats(_: Any) -> Any:
    """Float32[256] on the stack, aligned to 64 bytes."""

    def lower(_: Any, builder: Any, __: Any, ___: Any) -> Any:
        memory = _on_stack(builder, ir.ArrayType(ir.FloatType(), _MOST_HEAD_DIM))
        memory.align = 64
        return builder.bitcast(memory, ir.FloatType().as_pointer())

    return _pointer_to(types.float32)(), lower


@_lowered
def scratch_bytes(_: Any) -> Any:
    """Uint8[256] on the stack, aligned to 64 bytes."""

    def lower(_: Any, builder: Any, __: Any, ___: Any) -> Any:
        memory = _on_stack(builder, ir.ArrayType(ir.IntType(8), _MOST_HEAD_DIM))
        memory.align = 64
        return builder.bitcast(memory, ir.IntType(8).as_pointer())

    return _pointer_to(types.uint8)(), lower


@_lowered
def float_of(_: Any, bits: Any) -> Any:
    """Reinterpret a uint32 as a float32."""

    def lower(_: Any, builder: Any, __: Any, args: Any) -> Any:
        return builder.bitcast(args[0], ir.FloatType())

    return types.float32(types.uint32), lower


@_lowered
def bits_of(_: Any, value: Any) -> Any:
    """Reinterpret a float32 as a uint32."""

    def lower(_: Any, builder: Any, __: Any, args: Any) -> Any:
        return builder.bitcast(args[0], ir.IntType(32))

    return types.uint32(types.float32), lower


def _load_rows(builder: Any, pointer: Any, halvings: Any) -> tuple[Any, list[Any]]:
    base = builder.bitcast(pointer, ir.VectorType(ir.FloatType(), _LANES).as_pointer())
    places = [
        builder.gep(base, [ir.Constant(ir.IntType(32), index)])
        for index in range(2**halvings.count // _LANES)
    ]
    return places, [builder.load(place, align=64) for place in places]


def _shuffle(builder: Any, first: Any, second: Any, lanes: list[int]) -> Any:
    mask = ir.Constant(ir.VectorType(ir.IntType(32), _LANES), lanes)
    return builder.shuffle_vector(first, second, mask)


@_lowered
def transform(_: Any, values: Any, halvings: Any) -> Any:
    """Walsh-Hadamard transform in place, not scaled, of float32[2 ** len(halvings)].

    Rounds for h = D/2, D/4, ..., 1: elements i and i + h (bit h of i clear) become their sum and
    their difference.
    """

    def lower(_: Any, builder: Any, signature: Any, args: Any) -> Any:
        places, rows = _load_rows(builder, args[0], signature.args[1])
        step = len(rows) // 2
        while step:
            for index in range(len(rows)):
                if not index & step:
                    first, second = rows[index], rows[index + step]
                    rows[index] = builder.fadd(first, second)
                    rows[index + step] = builder.fsub(first, second)
            step //= 2
        step = _LANES // 2
        while step:
            crossed = [lane ^ step for lane in range(_LANES)]
            merged = [lane + _LANES if lane & step else lane for lane in range(_LANES)]
            for index, row in enumerate(rows):
                other = _shuffle(builder, row, row, crossed)
                sums, differences = builder.fadd(row, other), builder.fsub(other, row)
                rows[index] = _shuffle(builder, sums, differences, merged)
            step //= 2
        for place, row in zip(places, rows, strict=True):
            builder.store(row, place, align=64)
        return ir.Constant(ir.IntType(32), 0)

    return types.int32(values, halvings), lower


@_lowered
def sum_of_squares(_: Any, values: Any, halvings: Any) -> Any:
    """Sum the squares of float32[2 ** len(halvings)].

    Rounds for h = D/2, D/4, ..., 1: element i becomes the sum of elements i and i + h.
    """

    def lower(_: Any, builder: Any, signature: Any, args: Any) -> Any:
        _, rows = _load_rows(builder, args[0], signature.args[1])
        rows = [builder.fmul(row, row) for row in rows]
        while len(rows) > 1:
            half = len(rows) // 2
            rows = [builder.fadd(rows[i], rows[i + half]) for i in range(half)]
        step = _LANES // 2
        while step:
            other = _shuffle(builder, rows[0], rows[0], [i ^ step for i in range(_LANES)])
            rows[0] = builder.fadd(rows[0], other)
            step //= 2
        return builder.extract_element(rows[0], ir.Constant(ir.IntType(32), 0))

    return types.float32(values, halvings), lower


# Conversions, in integer arithmetic: the same on every processor, whatever its float modes.


@part
def half_of(value: Any) -> Any:
    """Round a float32 to FP16, to nearest even; from 65,520 on it becomes infinite."""
    bits = bits_of(value)
    magnitude = u32(bits & u32(0x7FFFFFFF))
    sign = u32(u32(bits >> u32(16)) & u32(0x8000))
    odd = u32(u32(magnitude >> u32(13)) & u32(1))
    normal = u32(u32(u32(magnitude - u32(112 << 23)) + u32(0xFFF) + odd) >> u32(13))
    # 0.5 has the smallest FP16 as its last bit, so adding it rounds.
    subnormal = u32(bits_of(f32(float_of(magnitude) + f32(0.5))) - u32(0x3F000000))
    half = normal if magnitude >= u32(113 << 23) else subnormal
    half = half if magnitude < u32(0x477FF000) else u32(_INF_F16)
    return u16(u32(half) | sign)


@part
def float_of_half(word: Any) -> Any:
    """Convert FP16 to float32: exact. Infinity and NaN become large numbers."""
    word = u32(word)
    magnitude = u32(word & u32(0x7FFF))
    sign = u32(u32(word & u32(0x8000)) << u32(16))
    normal = u32(u32(magnitude << u32(13)) + u32(112 << 23))
    subnormal = bits_of(f32(f32(i32(magnitude)) * f32(2.0**-24)))
    bits = normal if magnitude >= u32(0x400) else subnormal
    return float_of(u32(u32(bits) | sign))


@part
def float_of_word(word: Any, is_half: Any) -> Any:
    """Convert an element, FP16 or bfloat16, to float32: exact."""
    if is_half:
        return float_of_half(word)
    return float_of(u32(u32(word) << u32(16)))


@part
def load_floats(source: Any, signs: Any, is_half: Any, head_dim: Any, values: Any) -> None:
    """Read a vector as float32, each element with its sign flipped where ``signs`` says so."""
    words = carray(words_at(source), _MOST_HEAD_DIM)
    flips = carray(words_at(signs), _MOST_HEAD_DIM)
    if is_half:
        for i in range(head_dim):
            values[i] = float_of_half(u16(words[i] ^ flips[i]))
    else:
        for i in range(head_dim):
            values[i] = float_of(u32(u32(u16(words[i] ^ flips[i])) << u32(16)))


@part
def store_floats(values: Any, target: Any, is_half: Any, head_dim: Any) -> None:
    """Write a vector as words, rounded to nearest even, FP16 clamped to its finite range."""
    words = carray(words_at(target), _MOST_HEAD_DIM)
    if is_half:
        for i in range(head_dim):
            value = values[i]
            value = min(f32(_LARGEST_F16), value)
            value = max(f32(-_LARGEST_F16), value)
            words[i] = half_of(value)
    else:
        for i in range(head_dim):
            bits = bits_of(values[i])
            odd = u32(u32(bits >> u32(16)) & u32(1))
            words[i] = u16(u32(u32(bits + u32(0x7FFF)) + odd) >> u32(16))


# FP8. The 16-bit forms below hold a value and its rounding bits without loss: see docs/codecs.md.


@part
def fp8_of_bf16(source: Any, target: Any, elements: Any) -> Any:
    """Round bfloat16 to E4M3FN. Returns the largest magnitude, as a word."""
    words = carray(words_at(source), elements)
    codes = carray(bytes_at(target), elements)
    most = u16(0)
    for i in range(elements):
        word = words[i]
        magnitude = u16(word & u16(0x7FFF))
        most = max(most, magnitude)
        # Eight bits below the last one that is kept, in both cases.
        normal = u16(u16(magnitude << u16(4)) - u16(0xC000))
        right = u16(min(u16(u16(120) - u16(magnitude >> u16(7))), u16(15)))
        mantissa = u16(u16(u16(magnitude & u16(0x7F)) | u16(0x80)) << u16(3))
        wide = normal if magnitude >= u16(0x3C80) else u16(mantissa >> right)
        odd = u16(u16(wide >> u16(8)) & u16(1))
        code = u16(u16(u16(wide + u16(0x7F)) + odd) >> u16(8))
        codes[i] = u8(u16(code | u16(u16(word >> u16(8)) & u16(0x80))))
    return most


@part
def fp8_of_f16(source: Any, target: Any, elements: Any) -> Any:
    """Round FP16 to E4M3FN. Returns the largest magnitude, as a word."""
    words = carray(words_at(source), elements)
    codes = carray(bytes_at(target), elements)
    most = u16(0)
    for i in range(elements):
        word = words[i]
        magnitude = u16(word & u16(0x7FFF))
        most = max(most, magnitude)
        wide = u16(magnitude - u16(0x2000))
        odd = u16(u16(wide >> u16(7)) & u16(1))
        normal = u16(u16(u16(wide + u16(0x3F)) + odd) >> u16(7))
        right = u16(min(u16(u16(8) - u16(magnitude >> u16(10))), u16(15)))
        wide = u16(u16(u16(u16(magnitude & u16(0x3FF)) | u16(0x400)) << u16(4)) >> right)
        odd = u16(u16(wide >> u16(12)) & u16(1))
        subnormal = u16(u16(u16(wide + u16(0x7FF)) + odd) >> u16(12))
        code = normal if magnitude >= u16(0x2400) else subnormal
        codes[i] = u8(u16(code | u16(u16(word >> u16(8)) & u16(0x80))))
    return most


@part
def bf16_of_fp8(source: Any, target: Any, elements: Any) -> None:
    """Convert E4M3FN to bfloat16: exact; NaN becomes the quiet NaN of its sign."""
    codes = carray(bytes_at(source), elements)
    words = carray(words_at(target), elements)
    for i in range(elements):
        code = u16(codes[i])
        magnitude = u16(code & u16(0x7F))
        word = u16(u16(magnitude << u16(4)) + u16(0x3C00))
        word = u16(u16(magnitude << u16(5)) + u16(0x3B80)) if magnitude < u16(8) else word
        word = u16(u16(magnitude << u16(6)) + u16(0x3B00)) if magnitude < u16(4) else word
        word = u16(0x3B00) if magnitude < u16(2) else word
        word = u16(0) if magnitude < u16(1) else word
        word = u16(0x7FC0) if magnitude == u16(0x7F) else word
        words[i] = u16(word | u16(u16(code & u16(0x80)) << u16(8)))


@part
def f16_of_fp8(source: Any, target: Any, elements: Any) -> None:
    """Convert E4M3FN to FP16: exact; NaN becomes the quiet NaN of its sign."""
    codes = carray(bytes_at(source), elements)
    words = carray(words_at(target), elements)
    for i in range(elements):
        code = u16(codes[i])
        magnitude = u16(code & u16(0x7F))
        word = u16(u16(magnitude << u16(7)) + u16(0x2000))
        word = u16(u16(magnitude << u16(8)) + u16(0x1C00)) if magnitude < u16(8) else word
        word = u16(u16(magnitude << u16(9)) + u16(0x1800)) if magnitude < u16(4) else word
        word = u16(0x1800) if magnitude < u16(2) else word
        word = u16(0) if magnitude < u16(1) else word
        word = u16(0x7E00) if magnitude == u16(0x7F) else word
        words[i] = u16(word | u16(u16(code & u16(0x80)) << u16(8)))


@kernel
def fp8_encode(sources: Any, targets: Any, faults: Any, elements: Any, is_half: Any) -> None:
    """Encode segments. A segment with faults has been written too, and must be discarded."""
    for index in range(len(sources)):
        if is_half:
            most = i32(fp8_of_f16(sources[index], targets[index], elements))
            limit, infinity = i32(_MOST_F16), i32(_INF_F16)
        else:
            most = i32(fp8_of_bf16(sources[index], targets[index], elements))
            limit, infinity = i32(_MOST_BF16), i32(_INF_BF16)
        fault = NONFINITE if most >= infinity else OUT_OF_RANGE
        faults[index] = fault if most > limit else 0


@kernel
def fp8_decode(sources: Any, targets: Any, elements: Any, is_half: Any) -> None:
    """Decode segments."""
    for index in range(len(sources)):
        if is_half:
            f16_of_fp8(sources[index], targets[index], elements)
        else:
            bf16_of_fp8(sources[index], targets[index], elements)


# TurboQuant. ``halvings`` is a tuple whose length, a compile-time constant, is log2(head_dim).


@part
def pack_codes(codes: Any, target: Any, bits: Any, head_dim: Any) -> None:
    """Pack uint8[head_dim] codes into ``head_dim * bits / 8`` bytes. Spoils ``codes``."""
    packed = carray(bytes_at(target), _MOST_HEAD_DIM)
    half, quarter, eighth = head_dim >> 1, head_dim >> 2, head_dim >> 3
    if bits == _WIDE:
        for i in range(half):
            packed[i] = u8(codes[i] | u8(codes[i + half] << u8(4)))
        return
    for i in range(quarter):
        a, b = codes[i], codes[i + quarter]
        c, d = codes[i + 2 * quarter], codes[i + 3 * quarter]
        low = u8(u8(a & u8(3)) | u8(u8(b << u8(2)) & u8(12)))
        packed[i] = u8(low | u8(u8(u8(c << u8(4)) & u8(48)) | u8(d << u8(6))))
        high = u8(u8(u8(a >> u8(2)) & u8(1)) | u8(u8(b >> u8(1)) & u8(2)))
        codes[i] = u8(high | u8(u8(c & u8(4)) | u8(u8(d << u8(1)) & u8(8))))
    for i in range(eighth):
        packed[quarter + i] = u8(codes[i] | u8(codes[i + eighth] << u8(4)))


@part
def unpack_codes(source: Any, codes: Any, bits: Any, head_dim: Any) -> None:
    """Undo ``pack_codes``."""
    packed = carray(bytes_at(source), _MOST_HEAD_DIM)
    half, quarter, eighth = head_dim >> 1, head_dim >> 2, head_dim >> 3
    if bits == _WIDE:
        for i in range(half):
            codes[i] = u8(packed[i] & u8(15))
            codes[i + half] = u8(packed[i] >> u8(4))
        return
    for i in range(eighth):
        codes[i] = u8(packed[quarter + i] & u8(15))
        codes[i + eighth] = u8(packed[quarter + i] >> u8(4))
    for i in range(quarter):
        low, high = packed[i], codes[i]
        codes[i] = u8(u8(low & u8(3)) | u8(u8(high << u8(2)) & u8(4)))
        codes[i + quarter] = u8(u8(u8(low >> u8(2)) & u8(3)) | u8(u8(high << u8(1)) & u8(4)))
        codes[i + 2 * quarter] = u8(u8(u8(low >> u8(4)) & u8(3)) | u8(high & u8(4)))
        codes[i + 3 * quarter] = u8(u8(low >> u8(6)) | u8(u8(high >> u8(1)) & u8(4)))


@part
def encode_key(
    source: Any,
    target: Any,
    norm_at: Any,
    signs: Any,
    edges_at: Any,
    bits: Any,
    is_half: Any,
    halvings: Any,
) -> Any:
    """Encode one K vector. Returns faults."""
    head_dim = 1 << len(halvings)
    words = carray(words_at(source), _MOST_HEAD_DIM)
    edges = carray(floats_at(edges_at), 7)
    place = scratch_floats()
    values = carray(place, _MOST_HEAD_DIM)
    codes = carray(scratch_bytes(), _MOST_HEAD_DIM)
    most = u16(0)
    for i in range(head_dim):
        most = max(most, u16(words[i] & u16(0x7FFF)))
    load_floats(source, signs, is_half, head_dim, values)
    norm = half_of(f32(np.sqrt(sum_of_squares(place, halvings))))
    carray(words_at(norm_at), 1)[0] = norm
    length = float_of_half(norm)
    inverse = f32(f32(1.0) / length) if norm != u16(0) else f32(0.0)
    transform(place, halvings)
    if bits == _WIDE:
        for i in range(head_dim):
            scaled = bits_of(f32(f32(values[i] * inverse) + f32(0.0)))
            negative = i32(scaled >> u32(31))
            # Below zero an edge belongs to the bin above it, the one nearer to zero.
            magnitude = i32(i32(scaled & u32(0x7FFFFFFF)) - negative)
            above = i32(0)
            for j in range(7):
                above = i32(above + i32(magnitude >= i32(bits_of(edges[j]))))
            codes[i] = u8(i32(8) + above if negative == 0 else i32(7) - above)
    else:
        for i in range(head_dim):
            scaled = bits_of(f32(f32(values[i] * inverse) + f32(0.0)))
            negative = i32(scaled >> u32(31))
            magnitude = i32(i32(scaled & u32(0x7FFFFFFF)) - negative)
            above = i32(0)
            for j in range(3):
                above = i32(above + i32(magnitude >= i32(bits_of(edges[j]))))
            codes[i] = u8(i32(4) + above if negative == 0 else i32(3) - above)
    pack_codes(codes, target, bits, head_dim)
    fault = SCALAR_OVERFLOW if norm >= u16(_INF_F16) else 0
    infinity = u16(_INF_F16) if is_half else u16(_INF_BF16)
    return NONFINITE if most >= infinity else fault


@part
def decode_key(
    source: Any,
    norm_at: Any,
    target: Any,
    signs: Any,
    centroids_at: Any,
    bits: Any,
    is_half: Any,
    halvings: Any,
) -> Any:
    """Decode one K vector. Returns whether its norm is one that an encoder writes."""
    head_dim = 1 << len(halvings)
    levels = carray(floats_at(centroids_at), 8)
    flips = carray(words_at(signs), _MOST_HEAD_DIM)
    place = scratch_floats()
    values = carray(place, _MOST_HEAD_DIM)
    codes = carray(scratch_bytes(), _MOST_HEAD_DIM)
    unpack_codes(source, codes, bits, head_dim)
    # Selections instead of a table: they vectorise, gathers do not. Written out, so that the
    # centroids stay in registers.
    level0, level1, level2, level3 = levels[0], levels[1], levels[2], levels[3]
    if bits == _WIDE:
        level4, level5, level6, level7 = levels[4], levels[5], levels[6], levels[7]
        for i in range(head_dim):
            code = i32(codes[i])
            index = i32(code - i32(8)) if code >= i32(8) else i32(i32(7) - code)
            value = level1 if index == i32(1) else level0
            value = level2 if index == i32(2) else value
            value = level3 if index == i32(3) else value
            value = level4 if index == i32(4) else value
            value = level5 if index == i32(5) else value
            value = level6 if index == i32(6) else value
            value = level7 if index == i32(7) else value
            values[i] = value if code >= i32(8) else f32(-value)
    else:
        for i in range(head_dim):
            code = i32(codes[i])
            index = i32(code - i32(4)) if code >= i32(4) else i32(i32(3) - code)
            value = level1 if index == i32(1) else level0
            value = level2 if index == i32(2) else value
            value = level3 if index == i32(3) else value
            values[i] = value if code >= i32(4) else f32(-value)
    norm = carray(words_at(norm_at), 1)[0]
    total = sum_of_squares(place, halvings)
    factor = f32(float_of_half(norm) / f32(np.sqrt(f32(f32(head_dim) * total))))
    transform(place, halvings)
    for i in range(head_dim):
        scaled = bits_of(f32(values[i] * factor))
        # Adding zero turns -0 into 0.
        values[i] = f32(float_of(u32(scaled ^ u32(u32(flips[i]) << u32(16)))) + f32(0.0))
    store_floats(values, target, is_half, head_dim)
    return norm < u16(_INF_F16)


@part
def encode_value(
    source: Any,
    target: Any,
    scale_at: Any,
    minimum_at: Any,
    bits: Any,
    is_half: Any,
    halvings: Any,
) -> Any:
    """Encode one V vector. Returns faults."""
    head_dim = 1 << len(halvings)
    words = carray(words_at(source), _MOST_HEAD_DIM)
    codes = carray(scratch_bytes(), _MOST_HEAD_DIM)
    levels = f32(15.0) if bits == _WIDE else f32(7.0)
    # Words as integers that are ordered like the numbers.
    low, high = i16(0x7FFF), i16(-0x8000)
    for i in range(head_dim):
        word = i16(words[i])
        key = i16(word ^ i16(i16(word >> i16(15)) & i16(0x7FFF)))
        low, high = min(low, key), max(high, key)
    least = float_of_word(u16(i16(low ^ i16(i16(low >> i16(15)) & i16(0x7FFF)))), is_half)
    greatest = float_of_word(u16(i16(high ^ i16(i16(high >> i16(15)) & i16(0x7FFF)))), is_half)
    least = f32(least + f32(0.0))
    step = f32(f32(greatest - least) / levels)
    scale_half = half_of(max(f32(_SMALLEST_SCALE), step))
    minimum_half = half_of(least)
    carray(words_at(scale_at), 1)[0] = scale_half
    carray(words_at(minimum_at), 1)[0] = minimum_half
    scale, minimum = float_of_half(scale_half), float_of_half(minimum_half)
    inverse = f32(f32(1.0) / scale)
    for i in range(head_dim):
        value = float_of_word(words[i], is_half)
        above = f32(value - minimum)
        guess = f32(f32(above * inverse) + f32(0.5))
        guess = max(f32(0.0), guess)
        guess = min(levels, guess)
        code = i32(guess)
        # The guess is off by one at most; (code +- 1/2) * scale is exact, so this settles it.
        middle = f32(code)
        code = i32(code - i32(above < f32(f32(middle - f32(0.5)) * scale)))
        code = i32(code + i32(above >= f32(f32(middle + f32(0.5)) * scale)))
        code = max(code, i32(0))
        codes[i] = u8(min(code, i32(levels)))
    pack_codes(codes, target, bits, head_dim)
    infinity = i16(_INF_F16) if is_half else i16(_INF_BF16)
    overflow = u16(minimum_half & u16(0x7FFF)) >= u16(_INF_F16) or scale_half >= u16(_INF_F16)
    fault = SCALAR_OVERFLOW if overflow else 0
    return NONFINITE if high >= infinity or low <= i16(~infinity) else fault


@part
def decode_value(
    source: Any,
    scale_at: Any,
    minimum_at: Any,
    target: Any,
    bits: Any,
    is_half: Any,
    halvings: Any,
) -> Any:
    """Decode one V vector. Returns whether its scalars are such that an encoder writes."""
    head_dim = 1 << len(halvings)
    values = carray(scratch_floats(), _MOST_HEAD_DIM)
    codes = carray(scratch_bytes(), _MOST_HEAD_DIM)
    unpack_codes(source, codes, bits, head_dim)
    scale_half = carray(words_at(scale_at), 1)[0]
    minimum_half = carray(words_at(minimum_at), 1)[0]
    scale, minimum = float_of_half(scale_half), float_of_half(minimum_half)
    for i in range(head_dim):
        values[i] = f32(f32(f32(i32(codes[i])) * scale) + minimum)
    store_floats(values, target, is_half, head_dim)
    finite = u16(minimum_half & u16(0x7FFF)) < u16(_INF_F16)
    return finite and u16(0) < scale_half and scale_half < u16(_INF_F16)


@kernel
def turboquant_encode(
    sources: Any,
    targets: Any,
    faults: Any,
    rows: Any,
    has_k: Any,
    has_v: Any,
    bits: Any,
    is_half: Any,
    signs: Any,
    edges: Any,
    halvings: Any,
) -> None:
    """Encode segments. A segment with faults has been written too, and must be discarded."""
    head_dim = 1 << len(halvings)
    codes_nbytes = head_dim * bits >> 3
    for index in range(len(sources)):
        vector, target = sources[index], targets[index]
        norms = target + rows * codes_nbytes * (has_k + has_v)
        scales = norms + 2 * rows * has_k
        minima = scales + 2 * rows * has_v
        fault = 0
        for row in range(rows):
            if has_k:
                norm = norms + 2 * row
                fault |= encode_key(vector, target, norm, signs, edges, bits, is_half, halvings)
                vector, target = vector + 2 * head_dim, target + codes_nbytes
            if has_v:
                scale, minimum = scales + 2 * row, minima + 2 * row
                fault |= encode_value(vector, target, scale, minimum, bits, is_half, halvings)
                vector, target = vector + 2 * head_dim, target + codes_nbytes
        faults[index] = fault


@kernel
def turboquant_decode(
    sources: Any,
    targets: Any,
    rows: Any,
    has_k: Any,
    has_v: Any,
    bits: Any,
    is_half: Any,
    signs: Any,
    centroids: Any,
    halvings: Any,
) -> Any:
    """Decode segments. Returns the first one with scalars that no encoder writes, or -1."""
    head_dim = 1 << len(halvings)
    codes_nbytes = head_dim * bits >> 3
    first_bad = -1
    for index in range(len(sources)):
        source, vector = sources[index], targets[index]
        norms = source + rows * codes_nbytes * (has_k + has_v)
        scales = norms + 2 * rows * has_k
        minima = scales + 2 * rows * has_v
        good = True
        for row in range(rows):
            if has_k:
                norm = norms + 2 * row
                good &= decode_key(source, norm, vector, signs, centroids, bits, is_half, halvings)
                source, vector = source + codes_nbytes, vector + 2 * head_dim
            if has_v:
                scale, minimum = scales + 2 * row, minima + 2 * row
                good &= decode_value(source, scale, minimum, vector, bits, is_half, halvings)
                source, vector = source + codes_nbytes, vector + 2 * head_dim
        if not good and first_bad < 0:
            first_bad = index
    return first_bad
