"""Constants of the codecs: Lloyd-Max centroids, bin edges and rotation signs.

All are part of the format. ``benchmarks/derive_centroids.py`` derives the centroids.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float32]

SIGNS_VERSION = 1
_U64 = 2**64 - 1


def _floats(*bits: int) -> Floats:
    values = np.array(bits, np.uint32).view(np.float32)
    values.flags.writeable = False
    return values


# FP32 bit patterns of the positive half, ascending, for N(0, 1); the other half mirrors it.
CENTROIDS: Mapping[int, Floats] = {
    3: _floats(0x3E7ADD6E, 0x3F41724A, 0x3FABED88, 0x40099F6E),
    4: _floats(
        *(0x3E038342, 0x3EC6BB0C, 0x3F282A1D, 0x3F71455E),
        *(0x3FA0CDAC, 0x3FCF1769, 0x400461C3, 0x402EC7B7),
    ),
}


def _edges(centroids: Floats) -> Floats:
    wide = centroids.astype(np.float64)
    edges = ((wide[1:] + wide[:-1]) / 2).astype(np.float32)
    edges.flags.writeable = False
    return edges


# Between neighbours of the positive half; with zero and their mirror images, all edges of the bins.
EDGES: Mapping[int, Floats] = {bits: _edges(half) for bits, half in CENTROIDS.items()}


def splitmix64(seed: int, index: int) -> int:
    """Output ``index`` of the SplitMix64 stream of ``seed``; both wrap at 2^64."""
    state = (seed + (index + 1) * 0x9E3779B97F4A7C15) & _U64
    state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _U64
    state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & _U64
    return state ^ (state >> 31)


def rotation_signs(seed: int, head_dim: int) -> npt.NDArray[np.uint16]:
    """Sign bits of the rotation, version 1: uint16[head_dim] of 0 or 0x8000 (negative)."""
    signs = [(splitmix64(seed, index) >> 63) << 15 for index in range(head_dim)]
    return np.array(signs, np.uint16)
