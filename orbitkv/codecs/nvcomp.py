"""nvCOMP's batched ANS by its C ABI: thin calls that enqueue on a stream and return.

nvCOMP compresses a batch of *slices*, each on its own (its word is chunk). All addresses are device
addresses, as integers. Nothing here waits for the device, and every call releases the GIL.

Two ABIs are known: 5.3 and later 5.x, and 6.0. They differ in the numbers of the types, in two
names, in alignment, and in the coded bytes themselves: neither reads what the other wrote.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, NamedTuple

from orbitkv.errors import DeviceFault, Unavailable
from orbitkv.probe import nvcomp_candidates

MOST_ALIGNMENT_NBYTES = 16  # of slices and of coded slices: what our payloads give
MOST_TEMP_ALIGNMENT_NBYTES = 256
_REMEDY = "pip install nvidia-libnvcomp-cu13==5.3.0.16 (-cu12 for a driver older than 580)"
_ACCEPTED = "accepted: nvCOMP 5.3 to 5.9, 6.0"
_PREFIX = "nvcompBatchedANS"
_STATUSES: Mapping[int, str] = {
    10: "InvalidValue",
    11: "NotSupported",
    12: "CannotDecompress",
    13: "BadChecksum",
    14: "CannotVerifyChecksums",
    15: "OutputBufferTooSmall",
    16: "WrongHeaderLength",
    17: "Alignment",
    18: "ChunkSizeTooLarge",
    19: "CannotCompress",
    20: "WrongInputLength",
    21: "BatchSizeTooLarge",
    22: "SubChunkCountTooLarge",
    23: "SubChunkCountTooSmall",
    24: "OutputBufferAlignmentTooSmall",
    1000: "CudaError",
    10000: "Internal",
}


class Kind(IntEnum):
    """What nvCOMP takes the elements for. The numbers are ours: payloads hold them."""

    BYTES = 0
    FLOAT16 = 1  # every 16-bit float, bfloat16 too
    FLOAT8_E4M3 = 2


class Alignments(NamedTuple):
    """What addresses must be multiples of, in bytes."""

    input: int
    output: int
    temp: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Slices:
    """A batch of slices of one kind: device addresses of what is to be known of each.

    Attributes:
        sources, targets: Of uint64[count]: addresses. Compressed slices need a room of
            ``max_output_nbytes``.
        source_nbytes: Of uint64[count]: lengths.
        target_nbytes: Of uint64[count]: receives the lengths that were written.
        statuses: Of int32[count]: receives 0, or what went wrong with the slice.
        temp: Temporary memory, as much as ``compress_temp_nbytes`` or its counterpart says.
    """

    kind: Kind
    count: int
    sources: int
    source_nbytes: int
    targets: int
    target_nbytes: int
    statuses: int
    temp: int
    temp_nbytes: int


class Properties(ctypes.Structure):
    """``nvcompProperties_t``."""

    _fields_ = (("version", ctypes.c_uint32), ("cudart_version", ctypes.c_uint32))


class CompressOptions(ctypes.Structure):
    """``nvcompBatchedANSCompressOpts_t``: 64 bytes. What we do not set is zero in both ABIs."""

    _fields_ = (
        ("algorithm", ctypes.c_int),
        ("data_type", ctypes.c_int),
        ("reserved", ctypes.c_char * 56),
    )


class DecompressOptions(ctypes.Structure):
    """``nvcompBatchedANSDecompressOpts_t``: 64 bytes."""

    _fields_ = (
        ("backend", ctypes.c_int),
        ("data_type", ctypes.c_int),
        ("reserved", ctypes.c_char * 56),
    )


class AlignmentRequirements(ctypes.Structure):
    """``nvcompAlignmentRequirements_t``."""

    _fields_ = (
        ("input", ctypes.c_size_t),
        ("output", ctypes.c_size_t),
        ("temp", ctypes.c_size_t),
    )


@dataclass(frozen=True, slots=True)
class _Abi:
    """What a major version fixes.

    Attributes:
        versions: Of ``nvcompGetProperties``: 5.3.0 is 5300.
        types: ``nvcompType_t`` of each kind.
        temp_suffix: Of the calls that give the size of temporary memory.
        temp_takes_stream: Whether these have a stream as their last argument.
    """

    generation: int
    versions: range
    types: Mapping[Kind, int]
    temp_suffix: str
    temp_takes_stream: bool


# The types are named on both sides: the kernel for a type is faster than the one that looks for it
# in the stream, and refuses another type.
_ABIS = (
    _Abi(
        generation=5,
        versions=range(5300, 6000),
        types={Kind.BYTES: 1, Kind.FLOAT16: 9, Kind.FLOAT8_E4M3: 10},
        temp_suffix="Async",
        temp_takes_stream=False,
    ),
    _Abi(
        generation=6,
        versions=range(6000, 6100),
        types={Kind.BYTES: 1, Kind.FLOAT16: 10, Kind.FLOAT8_E4M3: 9},
        temp_suffix="",
        temp_takes_stream=True,
    ),
)

_SIZE = ctypes.c_size_t
_POINTER = ctypes.c_void_p
_SIZE_OUT = ctypes.POINTER(ctypes.c_size_t)
_ALIGNMENTS_OUT = ctypes.POINTER(AlignmentRequirements)


class Nvcomp:
    """An opened library whose ABI is known.

    Attributes:
        path: What the loader was given.
        version: As ``5.3.0``.
        generation: Of its coded bytes: 5 or 6.
    """

    def __init__(self, path: str, version: int, abi: _Abi, library: Any) -> None:  # noqa: ANN401
        self.path = path
        self.version = version_text(version)
        self.generation = abi.generation
        self._takes_stream = abi.temp_takes_stream
        self._compress_options = {
            kind: CompressOptions(0, number) for kind, number in abi.types.items()
        }
        self._decompress_options = {
            kind: DecompressOptions(0, number) for kind, number in abi.types.items()
        }
        stream = (_POINTER,) if abi.temp_takes_stream else ()
        temp = f"GetTempSize{abi.temp_suffix}"
        compress, decompress = CompressOptions, DecompressOptions
        self._compress_temp = _bind(
            library, f"Compress{temp}", _SIZE, _SIZE, compress, _SIZE_OUT, _SIZE, *stream
        )
        self._decompress_temp = _bind(
            library, f"Decompress{temp}", _SIZE, _SIZE, decompress, _SIZE_OUT, _SIZE, *stream
        )
        self._compress_alignments = _bind(
            library, "CompressGetRequiredAlignments", compress, _ALIGNMENTS_OUT
        )
        self._decompress_alignments = _bind(
            library, "DecompressGetRequiredAlignments", decompress, _ALIGNMENTS_OUT
        )
        self._max_output = _bind(
            library, "CompressGetMaxOutputChunkSize", _SIZE, compress, _SIZE_OUT
        )
        # uncompressed addresses and lengths, the longest, count; temp and its length;
        # compressed addresses and lengths; options, statuses, stream
        self._compress = _bind(
            library,
            "CompressAsync",
            *(_POINTER, _POINTER, _SIZE, _SIZE),
            *(_POINTER, _SIZE),
            *(_POINTER, _POINTER),
            *(compress, _POINTER, _POINTER),
        )
        # compressed addresses and lengths, rooms, lengths found, count; temp and its length;
        # uncompressed addresses; options, statuses, stream
        self._decompress = _bind(
            library,
            "DecompressAsync",
            *(_POINTER, _POINTER, _POINTER, _POINTER, _SIZE),
            *(_POINTER, _SIZE),
            _POINTER,
            *(decompress, _POINTER, _POINTER),
        )

    def compress_alignments(self, kind: Kind) -> Alignments:
        """What slices, rooms and temporary memory must be aligned to."""
        found = AlignmentRequirements()
        code = self._compress_alignments(self._compress_options[kind], ctypes.byref(found))
        _check("CompressGetRequiredAlignments", code)
        return Alignments(found.input, found.output, found.temp)

    def decompress_alignments(self, kind: Kind) -> Alignments:
        """What coded slices, targets and temporary memory must be aligned to."""
        found = AlignmentRequirements()
        code = self._decompress_alignments(self._decompress_options[kind], ctypes.byref(found))
        _check("DecompressGetRequiredAlignments", code)
        return Alignments(found.input, found.output, found.temp)

    def max_output_nbytes(self, kind: Kind, slice_nbytes: int) -> int:
        """Length of the room that a coded slice needs. Touches no device."""
        found = _SIZE()
        options = self._compress_options[kind]
        _check(
            "CompressGetMaxOutputChunkSize",
            self._max_output(slice_nbytes, options, ctypes.byref(found)),
        )
        return found.value

    def compress_temp_nbytes(
        self, kind: Kind, slices: int, most_slice_nbytes: int, total_nbytes: int
    ) -> int:
        """Temporary device memory that ``compress_async`` needs. Touches no device."""
        found = _SIZE()
        code = self._compress_temp(
            slices,
            most_slice_nbytes,
            self._compress_options[kind],
            ctypes.byref(found),
            total_nbytes,
            *((None,) if self._takes_stream else ()),
        )
        _check("CompressGetTempSize", code)
        return found.value

    def decompress_temp_nbytes(
        self, kind: Kind, slices: int, most_slice_nbytes: int, total_nbytes: int
    ) -> int:
        """Temporary device memory that ``decompress_async`` needs. Touches no device."""
        found = _SIZE()
        code = self._decompress_temp(
            slices,
            most_slice_nbytes,
            self._decompress_options[kind],
            ctypes.byref(found),
            total_nbytes,
            *((None,) if self._takes_stream else ()),
        )
        _check("DecompressGetTempSize", code)
        return found.value

    def compress_async(self, slices: Slices, most_slice_nbytes: int, stream: int) -> None:
        """Enqueue the compression of slices, the longest of which has ``most_slice_nbytes``.

        Raises:
            DeviceFault: nothing was enqueued.
        """
        code = self._compress(
            slices.sources,
            slices.source_nbytes,
            most_slice_nbytes,
            slices.count,
            slices.temp,
            slices.temp_nbytes,
            slices.targets,
            slices.target_nbytes,
            self._compress_options[slices.kind],
            slices.statuses,
            stream,
        )
        _check("CompressAsync", code)

    def decompress_async(self, slices: Slices, room_nbytes: int, stream: int) -> None:
        """Enqueue the decompression of coded slices.

        Args:
            room_nbytes: Of uint64[count]: how much room there is at the targets.

        Raises:
            DeviceFault: nothing was enqueued.
        """
        code = self._decompress(
            slices.sources,
            slices.source_nbytes,
            room_nbytes,
            slices.target_nbytes,
            slices.count,
            slices.temp,
            slices.temp_nbytes,
            slices.targets,
            self._decompress_options[slices.kind],
            slices.statuses,
            stream,
        )
        _check("DecompressAsync", code)


def open_nvcomp(library: str | None) -> Nvcomp:
    """Open nvCOMP and make sure that its ABI is known. Touches no device.

    Args:
        library: A path or a name for the loader, which never silently becomes another. None: the
            pip package's library, then the loader's.

    Raises:
        Unavailable: what was looked for, what was seen, and what to install.
    """
    faults = []
    for candidate in nvcomp_candidates(library):
        try:
            return _open(candidate)
        except _UnusableError as fault:
            faults.append(f"{candidate}: {fault}")
    raise Unavailable(
        f"storage codec 'ans': no usable nvCOMP: {'; '.join(faults)}; {_ACCEPTED}; "
        f"to get it: {_REMEDY}"
    )


def version_text(version: int) -> str:
    """Render nvCOMP's 5300 as 5.3.0."""
    return f"{version // 1000}.{version % 1000 // 100}.{version % 100}"


class _UnusableError(Exception):
    """One candidate, and what is wrong with it."""


def _open(candidate: str) -> Nvcomp:
    try:
        library = ctypes.CDLL(candidate)
    except OSError as error:
        raise _UnusableError(f"cannot be opened ({error})") from error
    properties = Properties()
    try:
        code = library.nvcompGetProperties(ctypes.byref(properties))
    except AttributeError as error:
        raise _UnusableError("has no nvcompGetProperties") from error
    if code:
        raise _UnusableError(f"nvcompGetProperties returned {status_text(code)}")
    abi = next((abi for abi in _ABIS if properties.version in abi.versions), None)
    if abi is None:
        raise _UnusableError(f"is of version {version_text(properties.version)}")
    try:
        opened = Nvcomp(candidate, properties.version, abi, library)
    except AttributeError as error:
        raise _UnusableError(
            f"is of version {version_text(properties.version)} and lacks a symbol ({error})"
        ) from error
    _check_alignments(opened)
    return opened


def _check_alignments(opened: Nvcomp) -> None:
    for kind in Kind:
        try:
            found = (opened.compress_alignments(kind), opened.decompress_alignments(kind))
        except DeviceFault as fault:
            raise _UnusableError(f"{kind.name}: {fault}") from fault
        most = max(max(one.input, one.output) for one in found)
        most_temp = max(one.temp for one in found)
        if most > MOST_ALIGNMENT_NBYTES or most_temp > MOST_TEMP_ALIGNMENT_NBYTES:
            raise _UnusableError(
                f"{kind.name}: wants buffers at multiples of {most} and temporary memory of "
                f"{most_temp} bytes; accepted: up to {MOST_ALIGNMENT_NBYTES} and "
                f"{MOST_TEMP_ALIGNMENT_NBYTES}"
            )


def _bind(library: Any, name: str, *arguments: Any) -> Any:  # noqa: ANN401 - ctypes
    function = getattr(library, _PREFIX + name)
    function.argtypes = arguments
    function.restype = ctypes.c_int
    return function


def status_text(code: int) -> str:
    """Render a status as number and name."""
    return f"{code} (nvcompError{_STATUSES[code]})" if code in _STATUSES else f"{code} (unknown)"


def _check(name: str, code: int) -> None:
    if code:
        raise DeviceFault(f"{_PREFIX}{name} returned {status_text(code)}")
