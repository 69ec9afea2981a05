"""Launches the kernels, each on CuPy's current stream. Nothing here waits for the device."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np

from orbitkv.codecs.cuda import crc_tables
from orbitkv.codecs.cuda.crc_tables import LINE_NBYTES, zeros_crc32
from orbitkv.codecs.cuda.tasks import Launch, Span

__all__ = ["OPTIONS", "Kernels", "Span", "source", "zeros_crc32"]

OPTIONS = ("--std=c++17", "--fmad=false")  # each operation rounds by itself, as docs/codecs.md says

_HERE = Path(__file__).parent
_INCLUDE = re.compile(r'^#include "(\w+\.cuh)"\n', re.MULTILINE)

# As in pages.cuh.
_BLOCK_WARPS = 8
_SM_BLOCKS = 4

_BLOCK = (32 * _BLOCK_WARPS,)
_FEWEST_LINES, _MOST_LINES = 8, 32  # of a warp: all its loads at once, or less to do around them
_MOVE_BLOCKS = 8


def source(name: str) -> str:
    """A file of kernels with what it includes in its place, each header once.

    CuPy keeps compiled kernels by their text, so a changed header has to change the text.
    """
    seen: set[str] = set()

    def inlined(file: str) -> str:
        def include(match: re.Match[str]) -> str:
            header = match[1]
            if header in seen:
                return ""
            seen.add(header)
            return inlined(header)

        text = (_HERE / file).read_text(encoding="utf-8")
        return _INCLUDE.sub(include, text).replace("#pragma once\n", "")

    return inlined(name)


class Kernels:
    """The kernels of one device, which must be the current one here and at every launch.

    A launch covers ``count`` tasks of a span, from ``span.order[first]`` on; none of them stores
    more than ``most_stored_nbytes``.

    CRCs are preset: on a save to ``zeros_crc32`` of the bytes stored, on a restore to that XOR the
    one that is expected. Kernels make of it the payload's, or zero where that was expected.
    """

    def __init__(self, device: int) -> None:
        import cupy  # noqa: PLC0415 - only where there is a GPU

        self._cupy = cupy
        # Blocking, as launches may come on any stream.
        self._crc_tables = cupy.asarray(crc_tables.device_tables(), blocking=True)
        self._crc_tables_at = np.uint64(self._crc_tables.data.ptr)
        attributes = cupy.cuda.Device(device).attributes
        self._most_warps = _BLOCK_WARPS * _SM_BLOCKS * int(attributes["MultiProcessorCount"])
        segments, fp8, crc32, move = (
            self._module(name) for name in ("segments.cu", "fp8.cu", "crc32.cu", "move.cu")
        )
        self._gather_raw = segments.get_function("gather_raw").kernel
        self._gather = segments.get_function("gather").kernel
        self._scatter_raw = segments.get_function("scatter_raw").kernel
        self._encode_fp8 = [
            fp8.get_function(f"encode_fp8_{dtype}").kernel for dtype in ("bf16", "f16")
        ]
        self._decode_fp8 = [
            fp8.get_function(f"decode_fp8_{dtype}").kernel for dtype in ("bf16", "f16")
        ]
        self._crc32 = crc32.get_function("crc32").kernel
        self._move_words = move.get_function("move_words").kernel

    def encode(self, span: Span, launch: Launch) -> None:
        """Encode the tasks of one launch, whatever it needs, and add to their CRCs."""
        name, *parameters = launch.kernel
        where = (span, launch.first, launch.count, launch.most_stored_nbytes)
        if name == "raw":
            self.gather_raw(*where)
        elif name == "fp8":
            self.encode_fp8(*where, is_half=parameters[0])
        else:
            raise ValueError(f"kernel {launch.kernel}")

    def decode(self, span: Span, launch: Launch) -> None:
        """Decode the tasks of one launch, whatever it needs, in units without a fault."""
        name, *parameters = launch.kernel
        where = (span, launch.first, launch.count, launch.most_stored_nbytes)
        if name == "raw":
            self.scatter_raw(*where)
        elif name == "fp8":
            self.decode_fp8(*where, is_half=parameters[0])
        else:
            raise ValueError(f"kernel {launch.kernel}")

    def gather_raw(self, span: Span, first: int, count: int, most_stored_nbytes: int) -> None:
        """Copy segments into their payloads, and add to their CRCs."""
        self._launch(self._gather_raw, span, first, count, most_stored_nbytes)

    def gather(self, span: Span, first: int, count: int, most_stored_nbytes: int) -> None:
        """Copy segments into their payloads. CRCs are left."""
        self._launch(self._gather, span, first, count, most_stored_nbytes)

    def scatter_raw(self, span: Span, first: int, count: int, most_stored_nbytes: int) -> None:
        """Copy payloads into their segments, in units without a fault."""
        self._launch(self._scatter_raw, span, first, count, most_stored_nbytes)

    def encode_fp8(
        self, span: Span, first: int, count: int, most_stored_nbytes: int, *, is_half: bool
    ) -> None:
        """Encode segments of FP16 or else bfloat16, add to their CRCs, and report faults."""
        self._launch(self._encode_fp8[is_half], span, first, count, most_stored_nbytes)

    def decode_fp8(
        self, span: Span, first: int, count: int, most_stored_nbytes: int, *, is_half: bool
    ) -> None:
        """Decode payloads into segments of FP16 or else bfloat16, in units without a fault."""
        # A line of 512 bytes is one of the segment here.
        kernel = self._decode_fp8[is_half]
        self._launch(kernel, span, first, count, most_stored_nbytes, LINE_NBYTES // 2)

    def crc32(self, span: Span, first: int, count: int, most_stored_nbytes: int) -> None:
        """Add to the CRCs of payloads, here of the tasks ``[first, first + count)``."""
        span = span._replace(order=0)
        self._launch(self._crc32, span, first, count, most_stored_nbytes)

    # encode_turboquant and decode_turboquant

    def move(self, target: int, source: int, nbytes: int) -> None:
        """Copy whole words between the device and pinned host memory, without a copy engine.

        Args:
            nbytes: A multiple of 4.
        """
        words = nbytes // 4
        blocks = min(_MOVE_BLOCKS, -(-words // _BLOCK[0]))
        arguments = (np.uint64(target), np.uint64(source), np.uint32(words))
        if words:
            self._move_words((blocks,), _BLOCK, arguments)

    def _module(self, name: str, *macros: str) -> Any:  # noqa: ANN401 - CuPy has no types
        return self._cupy.RawModule(code=source(name), options=(*OPTIONS, *macros))

    def _launch(
        self,
        kernel: Any,  # noqa: ANN401 - as above
        span: Span,
        first: int,
        count: int,
        most_stored_nbytes: int,
        line_nbytes: int = LINE_NBYTES,
    ) -> None:
        """Start one warp a share, of as few lines as let the device hold all of them at once."""
        most_lines = -(-most_stored_nbytes // line_nbytes)
        lines = _FEWEST_LINES
        while lines < _MOST_LINES and count * -(-most_lines // lines) > self._most_warps:
            lines *= 2
        shares = -(-most_lines // lines)
        if not count * shares:
            return
        arguments = (
            np.uint64(span.slots),
            np.uint64(span.tasks),
            np.uint64(span.order),
            np.uint32(first),
            np.uint32(count),
            np.uint32(shares),
            np.uint64(span.crcs),
            np.uint64(span.faults),
            self._crc_tables_at,
            np.uint32(lines),
        )
        kernel((-(-count * shares // _BLOCK_WARPS),), _BLOCK, arguments)
