"""ANS, by name: nvCOMP's entropy coder, on a GPU, for whole batches at a time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from orbitkv.codecs.base import MOST_SOURCE_NBYTES, SegmentCodec, SegmentSpec
from orbitkv.codecs.cuda.ans import AnsSegments, cut
from orbitkv.codecs.cuda.ans_batch import AnsSlots
from orbitkv.codecs.nvcomp import Kind, Nvcomp, open_nvcomp
from orbitkv.config import KIB
from orbitkv.errors import Unavailable
from orbitkv.objects import Format, RawReason, align_up
from orbitkv.probe import cuda_unavailable

VERSION = 1  # of the payload around the coded slices
LEAST_SOURCE_NBYTES = 4 * KIB
_ROOM_ALIGN_NBYTES = 256
_KINDS = {
    "bfloat16": Kind.FLOAT16,
    "float16": Kind.FLOAT16,
    "float8_e4m3fn": Kind.FLOAT8_E4M3,
}


@dataclass(frozen=True, eq=False)
class AnsCodec:
    """nvCOMP's ANS: lossless, for any dtype, on a GPU only."""

    nvcomp: Nvcomp
    name = "ans"
    format = Format.ANS
    protects_layers = False

    @property
    def identity(self) -> str:
        """Name and version of the payload, and whose coded slices it holds."""
        return f"ans, {VERSION}, nvCOMP {self.nvcomp.generation}"

    def bind(self, spec: SegmentSpec) -> AnsSegments | RawReason:
        """Take segments of 4 KiB to 16 MiB."""
        if spec.original_nbytes < LEAST_SOURCE_NBYTES:
            return RawReason.UNSUPPORTED_LAYOUT
        if spec.original_nbytes > MOST_SOURCE_NBYTES:
            return RawReason.OVERSIZED
        kind = _KINDS.get(spec.dtype, Kind.BYTES)
        _, slice_nbytes = cut(spec.original_nbytes)
        room_nbytes = self.nvcomp.max_output_nbytes(kind, slice_nbytes)
        return AnsSegments(spec, kind, self.nvcomp, align_up(room_nbytes, _ROOM_ALIGN_NBYTES))

    def bind_together(
        self, codecs: Sequence[SegmentCodec | RawReason], segment_nbytes: Sequence[int]
    ) -> AnsSlots:
        """Make ready for batches of segments of all slots."""
        bound = [one if isinstance(one, AnsSegments | RawReason) else None for one in codecs]
        return AnsSlots(self.nvcomp, [one for one in bound if one is not None], segment_nbytes)


def open_ans(library: str | None) -> AnsCodec:
    """Open nvCOMP for a machine with a GPU. Touches no device.

    Args:
        library: nvCOMP's, as ``open_nvcomp`` takes it.

    Raises:
        Unavailable: there is no driver, GPU or CuPy, or no nvCOMP of a known ABI.
    """
    reason = cuda_unavailable()
    if reason is not None:
        raise Unavailable(f"storage codec 'ans': needs an NVIDIA GPU and nvCOMP; {reason}")
    return AnsCodec(open_nvcomp(library))
