"""Codecs: pure encode and decode pairs over segments, without I/O and without state."""

from __future__ import annotations

from collections.abc import Callable

from orbitkv.codecs.base import (
    Addresses,
    Codec,
    SegmentCodec,
    SegmentSpec,
    reason_to_stay_raw,
)
from orbitkv.codecs.raw import RawCodec, copy_with_crc32
from orbitkv.errors import ConfigError, Unavailable
from orbitkv.objects import RawReason

HOST_CODECS = ("none", "fp8", "turboquant-4", "turboquant-3")

__all__ = [
    "HOST_CODECS",
    "Addresses",
    "Codec",
    "RawCodec",
    "RawReason",
    "SegmentCodec",
    "SegmentSpec",
    "copy_with_crc32",
    "open_codec",
    "reason_to_stay_raw",
]


def open_codec(name: str, *, rotation_seed: int, on_compile: Callable[[str], None]) -> Codec:
    """Choose a codec by name.

    Args:
        rotation_seed: Of TurboQuant's signs, 0 to 2^64 - 1. Other codecs do not use it.
        on_compile: Told in one line, before kernels are compiled, on the thread that waits for
            them. That happens at ``bind``, once for this processor and release of the kernels;
            the result is kept on disk.

    Raises:
        ConfigError: no codec has this name, or the seed is out of range.
        Unavailable: the codec needs what this machine lacks.
    """
    if not 0 <= rotation_seed < 2**64:
        raise ConfigError(f"rotation seed: {rotation_seed}; accepted: 0 to 2^64 - 1")
    if name == "none":
        return RawCodec()
    if name == "ans":
        raise Unavailable(
            "storage codec 'ans': needs an NVIDIA GPU and nvCOMP (libnvcomp.so.5, from the package "
            "nvidia-libnvcomp-cu13), and this release encodes on the CPU only; "
            f"accepted: {', '.join(HOST_CODECS)}"
        )
    if name not in HOST_CODECS:
        raise ConfigError(f"storage codec: {name!r}; accepted: {', '.join(HOST_CODECS)}")
    try:
        from orbitkv.codecs import host  # noqa: PLC0415 - imports numba, which `none` must not pay
    except ImportError as error:
        raise Unavailable(
            f"storage codec {name!r}: numba cannot be imported ({error}); "
            "to get it: pip install numba"
        ) from error
    if name == "fp8":
        return host.Fp8Codec(on_compile)
    return host.TurboQuantCodec(name, rotation_seed, on_compile)
