"""Codecs: pure encode and decode pairs over segments, without I/O and without state."""

from __future__ import annotations

from collections.abc import Callable

from orbitkv.codecs.base import (
    Addresses,
    Codec,
    SegmentCodec,
    SegmentSpec,
    length_of,
    reason_to_stay_raw,
)
from orbitkv.codecs.raw import RawCodec, copy_with_crc32
from orbitkv.config import STORAGE_CODECS
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
    "length_of",
    "open_codec",
    "open_host_codec",
    "reason_to_stay_raw",
]


def open_host_codec(name: str, *, rotation_seed: int, on_compile: Callable[[str], None]) -> Codec:
    """Choose a codec by name, for segments that are in host memory.

    Raises:
        ConfigError, Unavailable: as ``open_codec``, or the codec works on a GPU only.
    """
    if name == "ans":
        raise Unavailable(
            "storage codec 'ans': needs an NVIDIA GPU, and files are encoded on the CPU; "
            f"accepted: {', '.join(HOST_CODECS)}"
        )
    return open_codec(name, rotation_seed=rotation_seed, on_compile=on_compile)


def open_codec(
    name: str,
    *,
    rotation_seed: int,
    on_compile: Callable[[str], None],
    nvcomp_library: str | None = None,
) -> Codec:
    """Choose a codec by name.

    Args:
        rotation_seed: Of TurboQuant's signs, 0 to 2^64 - 1. Other codecs do not use it.
        on_compile: Told in one line, before kernels are compiled, on the thread that waits for
            them. That happens at ``bind``, once for this processor and release of the kernels;
            the result is kept on disk.
        nvcomp_library: Of ``ans``: a path, or a name for the loader. None: the pip package's
            library, then the loader's.

    Raises:
        ConfigError: no codec has this name, or the seed is out of range.
        Unavailable: the codec needs what this machine lacks.
    """
    if not 0 <= rotation_seed < 2**64:
        raise ConfigError(f"rotation seed: {rotation_seed}; accepted: 0 to 2^64 - 1")
    if name == "none":
        return RawCodec()
    if name == "ans":
        from orbitkv.codecs.ans import open_ans  # noqa: PLC0415 - only where it was asked for

        return open_ans(nvcomp_library)
    if name not in HOST_CODECS:
        raise ConfigError(f"storage codec: {name!r}; accepted: {', '.join(STORAGE_CODECS)}")
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
