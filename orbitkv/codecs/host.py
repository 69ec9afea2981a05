"""FP8 and TurboQuant on a CPU core: checks and lengths around the kernels of ``cpu``."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from orbitkv.codecs import cpu, tables
from orbitkv.codecs.base import Addresses, SegmentSpec, Words, reason_of
from orbitkv.codecs.raw import address_of, check_payload, check_room, check_segment
from orbitkv.errors import CorruptObject
from orbitkv.objects import Bytes, Format, RawReason
from orbitkv.segment import Role

HEAD_DIMS = (32, 64, 128, 256)
_HALF = {"bfloat16": False, "float16": True}
_FORMATS = {4: Format.TURBOQUANT4, 3: Format.TURBOQUANT3}


class _Segments(ABC):
    """What the codecs of this module share: one segment is many of which there is one."""

    kernel: tuple[Any, ...]

    def __init__(self, spec: SegmentSpec, format_: Format, encoded_nbytes: int) -> None:
        self.spec = spec
        self.format = format_
        self.encoded_nbytes = encoded_nbytes
        self._original_nbytes = spec.original_nbytes

    def encode(self, words: Words, out: Bytes) -> int | RawReason:
        """Encode one segment."""
        check_segment(words, self._original_nbytes)
        check_room(out, self.encoded_nbytes)
        if not out.flags.writeable:
            raise ValueError("read-only room; accepted: writable")
        target = address_of(out)
        if target % 2:  # kernels write FP16 scalars as words
            apart = np.empty(self.encoded_nbytes, np.uint8)
            result = self.encode(words, apart)
            out[: self.encoded_nbytes] = apart
            return result
        reasons = self.encode_many(np.array((address_of(words),)), np.array((target,)))
        return reasons[0] if reasons else self.encoded_nbytes

    def decode(self, payload: Bytes, out: Words) -> None:
        """Decode one payload."""
        check_payload(payload, self.encoded_nbytes)
        check_segment(out, self._original_nbytes)
        if not out.flags.writeable:
            raise ValueError("read-only segment; accepted: writable")
        source = address_of(payload)
        if source % 2 or not payload.flags.c_contiguous:
            payload = payload.copy()
            source = address_of(payload)
        self.decode_many(np.array((source,)), np.array((address_of(out),)))

    def encode_many(self, sources: Addresses, targets: Addresses) -> Mapping[int, RawReason]:
        """Encode segments."""
        sources, targets = _paired(sources, targets)
        faults = np.empty(len(sources), np.int64)
        self._encode(sources, targets, faults)
        if not np.count_nonzero(faults):
            return {}
        return {int(index): reason_of(int(faults[index])) for index in np.flatnonzero(faults)}

    def decode_many(self, sources: Addresses, targets: Addresses) -> None:
        """Decode payloads whose lengths have been checked."""
        bad = self._decode(*_paired(sources, targets))
        if bad >= 0:
            raise CorruptObject(f"payload {bad}: a norm, scale or minimum out of its range")

    def load(self, on_compile: Callable[[str], None], message: str) -> None:
        """Load the kernels, or compile them and say so, by a call without segments."""
        nothing = np.empty(0, np.int64)
        with cpu.announced(lambda: on_compile(message)):
            self._encode(nothing, nothing, nothing)
            self._decode(nothing, nothing)

    @abstractmethod
    def _encode(self, sources: Addresses, targets: Addresses, faults: Addresses) -> None:
        """Call the kernel; ``faults`` receives its bits for each segment."""

    @abstractmethod
    def _decode(self, sources: Addresses, targets: Addresses) -> int:
        """Call the kernel. Returns the first payload that no encoder writes, or -1."""


def _paired(sources: Addresses, targets: Addresses) -> tuple[Addresses, Addresses]:
    """Bring addresses into the one form that kernels are compiled for."""
    if len(sources) != len(targets):
        raise ValueError(f"{len(sources)} sources; accepted: as many as targets, {len(targets)}")
    return np.ascontiguousarray(sources, np.int64), np.ascontiguousarray(targets, np.int64)


@dataclass(frozen=True)
class Fp8Codec:
    """E4M3FN, rounded to nearest even: one byte an element, whatever the layout."""

    on_compile: Callable[[str], None]
    name = "fp8"
    identity = "fp8"
    format = Format.FP8_E4M3FN
    protects_layers = False

    def bind(self, spec: SegmentSpec) -> Fp8Segments | RawReason:
        """Take bfloat16 and float16."""
        if spec.dtype == "float8_e4m3fn":
            return RawReason.SAVES_TOO_LITTLE
        if spec.dtype not in _HALF:
            return RawReason.UNSUPPORTED_DTYPE
        bound = Fp8Segments(spec)
        bound.load(self.on_compile, "compiling the kernels of fp8, once for this processor")
        return bound


class Fp8Segments(_Segments):
    """FP8 for segments of one spec."""

    def __init__(self, spec: SegmentSpec) -> None:
        super().__init__(spec, Format.FP8_E4M3FN, spec.elements)
        self._is_half = _HALF[spec.dtype]
        self.kernel = ("fp8", self._is_half)

    def _encode(self, sources: Addresses, targets: Addresses, faults: Addresses) -> None:
        cpu.fp8_encode(sources, targets, faults, self.encoded_nbytes, self._is_half)

    def _decode(self, sources: Addresses, targets: Addresses) -> int:
        cpu.fp8_decode(sources, targets, self.encoded_nbytes, self._is_half)
        return -1


class TurboQuantCodec:
    """K: norm, signs, Walsh-Hadamard, Lloyd-Max. V: uniform in each vector's range."""

    protects_layers = True

    def __init__(self, name: str, rotation_seed: int, on_compile: Callable[[str], None]) -> None:
        self.name = name
        self.identity = f"{name}, signs {tables.SIGNS_VERSION}, seed {rotation_seed}"
        self.bits = int(name.removeprefix("turboquant-"))
        self.format = _FORMATS[self.bits]
        self.rotation_seed = rotation_seed
        self.on_compile = on_compile

    def bind(self, spec: SegmentSpec) -> TurboQuantSegments | RawReason:
        """Take bfloat16 and float16 in heads of 32, 64, 128 or 256, ``dim`` innermost."""
        if spec.dtype not in _HALF:
            return RawReason.UNSUPPORTED_DTYPE
        if spec.head_dim not in HEAD_DIMS or not spec.row_major:
            return RawReason.UNSUPPORTED_LAYOUT
        signs = tables.rotation_signs(self.rotation_seed, spec.head_dim)
        bound = TurboQuantSegments(spec, self.bits, signs)
        bound.kernel = (
            "turboquant",
            self.bits,
            spec.head_dim,
            _HALF[spec.dtype],
            self.rotation_seed,
        )
        what = f"turboquant for heads of {spec.head_dim}"
        bound.load(self.on_compile, f"compiling the kernels of {what}, once for this processor")
        return bound


class TurboQuantSegments(_Segments):
    """TurboQuant for segments of one spec.

    Args:
        signs: uint16[head_dim], from ``tables.rotation_signs``.
    """

    def __init__(self, spec: SegmentSpec, bits: int, signs: npt.NDArray[np.uint16]) -> None:
        has_k, has_v = int(spec.role is not Role.V), int(spec.role is not Role.K)
        codes_nbytes = spec.elements * bits // 8
        scalars_nbytes = 2 * spec.rows * (has_k + 2 * has_v)
        super().__init__(spec, _FORMATS[bits], codes_nbytes + scalars_nbytes)
        self._layout = (spec.rows, has_k, has_v, bits, _HALF[spec.dtype])
        self._tables = (signs, tables.EDGES[bits], tables.CENTROIDS[bits])  # kept: used by address
        self._signs, self._edges, self._centroids = (address_of(table) for table in self._tables)
        self._halvings = (0,) * (spec.head_dim.bit_length() - 1)

    def _encode(self, sources: Addresses, targets: Addresses, faults: Addresses) -> None:
        cpu.turboquant_encode(
            sources, targets, faults, *self._layout, self._signs, self._edges, self._halvings
        )

    def _decode(self, sources: Addresses, targets: Addresses) -> int:
        return int(
            cpu.turboquant_decode(
                sources, targets, *self._layout, self._signs, self._centroids, self._halvings
            )
        )
