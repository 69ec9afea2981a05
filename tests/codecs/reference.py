"""TurboQuant in float64, written from the formulas alone, and helpers of the codecs' tests.

Matrices instead of butterflies, distances instead of edges: it shares no shortcut with the kernels.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
import scipy.linalg

from orbitkv.codecs import RawReason, SegmentCodec, SegmentSpec, open_codec, tables
from orbitkv.segment import Role

NEAR_EDGE = 1e-6
SEED = 7
DTYPES = {"bfloat16": np.dtype(ml_dtypes.bfloat16), "float16": np.dtype(np.float16)}

Array = npt.NDArray[Any]


def spec(dtype: str = "bfloat16", role: Role = Role.K, **changes: object) -> SegmentSpec:
    shape: dict[str, Any] = {"tokens": 4, "heads": 2, "head_dim": 128} | changes
    return SegmentSpec(dtype=dtype, role=role, **shape)


def bound(
    name: str, of: SegmentSpec, *, seed: int = SEED, on_compile: Callable[[str], None] | None = None
) -> SegmentCodec:
    quiet = on_compile or (lambda _: None)
    found = open_codec(name, rotation_seed=seed, on_compile=quiet).bind(of)
    assert not isinstance(found, RawReason)
    return found


def words(values: Array, dtype: str) -> npt.NDArray[np.uint16]:
    """Round to the dtype, and view as words."""
    with np.errstate(over="ignore"):
        return np.ascontiguousarray(values).astype(DTYPES[dtype]).view(np.uint16)


def wide(found: npt.NDArray[np.uint16], dtype: str) -> npt.NDArray[np.float64]:
    return found.view(DTYPES[dtype]).astype(np.float64)


def encoded(codec: SegmentCodec, segment: Array) -> npt.NDArray[np.uint8]:
    out = np.full(codec.encoded_nbytes, 0xA5, np.uint8)
    assert codec.encode(segment, out) == codec.encoded_nbytes
    return out


def reason(codec: SegmentCodec, segment: Array) -> RawReason:
    found = codec.encode(segment, np.empty(codec.encoded_nbytes, np.uint8))
    assert isinstance(found, RawReason)
    return found


def decoded(codec: SegmentCodec, payload: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint16]:
    out = np.full(codec.spec.elements, 0xA5A5, np.uint16)
    codec.decode(payload, out)
    return out


def round_trip(codec: SegmentCodec, segment: Array) -> npt.NDArray[np.uint16]:
    return decoded(codec, encoded(codec, segment))


def unpacked(packed: npt.NDArray[np.uint8], bits: int, head_dim: int) -> Array:
    """Codes of one vector, bit by bit."""
    codes = np.zeros(head_dim, np.int64)
    for i in range(head_dim):
        if bits == 4:
            byte = int(packed[i % (head_dim // 2)])
            codes[i] = byte >> (4 if i >= head_dim // 2 else 0) & 15
            continue
        quarter, rest = divmod(i, head_dim // 4)
        low = int(packed[rest]) >> 2 * quarter & 3
        upper, place = divmod(rest, head_dim // 8)
        high = int(packed[head_dim // 4 + place]) >> 4 * upper + quarter & 1
        codes[i] = low | high << 2
    return codes


def parsed(payload: npt.NDArray[np.uint8], of: SegmentSpec, bits: int) -> tuple[Array, Array]:
    """Codes, int64[vectors, head_dim], and scalars, float16: norms, scales, minima."""
    nbytes = of.head_dim * bits // 8
    packed = payload[: of.vectors * nbytes].reshape(of.vectors, nbytes)
    codes = np.stack([unpacked(row, bits, of.head_dim) for row in packed])
    return codes, payload[packed.size :].view(np.float16)


@cache
def rotation(seed: int, head_dim: int) -> npt.NDArray[np.float64]:
    """``H diag(s) / sqrt(D)``: orthonormal."""
    flips = tables.rotation_signs(seed, head_dim)
    signs = np.where(flips == 0, 1.0, -1.0)
    matrix: npt.NDArray[np.float64] = scipy.linalg.hadamard(head_dim) * signs
    return matrix / np.sqrt(head_dim)


def levels(bits: int, head_dim: int) -> npt.NDArray[np.float64]:
    """Centroids of the quantiser for N(0, 1/D), ascending."""
    half = tables.CENTROIDS[bits].astype(np.float64)
    return np.concatenate([-half[::-1], half]) / np.sqrt(head_dim)


def key_codes(
    k: Array, norms: Array, bits: int, *, seed: int = SEED
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float64]]:
    """Nearest centroids of float64[n, D], and each element's distance from the nearest edge."""
    head_dim = k.shape[1]
    y = (k / norms.astype(np.float64)[:, None]) @ rotation(seed, head_dim).T
    c = levels(bits, head_dim)
    nearest = np.abs(y[:, :, None] - c).argmin(2)
    edges = (c[1:] + c[:-1]) / 2
    return nearest, np.abs(y[:, :, None] - edges).min(2)


def key_values(codes: Array, norms: Array, bits: int, *, seed: int = SEED) -> Array:
    c = levels(bits, codes.shape[1])[codes]
    unit = c / np.linalg.norm(c, axis=1, keepdims=True)
    return (unit @ rotation(seed, codes.shape[1])) * norms.astype(np.float64)[:, None]


def value_codes(
    v: Array, scales: Array, minima: Array, bits: int
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float64]]:
    """Codes of float64[n, D], and each element's distance from the nearest edge, in steps."""
    scale, minimum = (x.astype(np.float64)[:, None] for x in (scales, minima))
    steps = (v - minimum) / scale + 0.5
    codes = np.trunc(steps).clip(0, 2**bits - 1).astype(np.int64)
    return codes, np.abs(steps - np.round(steps))


def value_values(codes: Array, scales: Array, minima: Array) -> Array:
    return codes * scales.astype(np.float64)[:, None] + minima.astype(np.float64)[:, None]


def relative_mse(back: Array, original: Array) -> float:
    return float(((back - original) ** 2).sum() / (original**2).sum())
