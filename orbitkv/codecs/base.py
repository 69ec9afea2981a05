"""What every codec speaks of: segments, reasons to store them raw, and its two halves."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, Self, runtime_checkable

import numpy as np
import numpy.typing as npt

from orbitkv.config import MIB
from orbitkv.objects import PAYLOAD_ALIGN_NBYTES, Bytes, Format, RawReason, align_up
from orbitkv.segment import DTYPE_NBYTES, HND, Axis, Role, Slot

MOST_SOURCE_NBYTES = 16 * MIB

# What a kernel found wrong with a segment. Bits; what is not finite outweighs the rest.
NONFINITE, OUT_OF_RANGE, SCALAR_OVERFLOW = 1, 2, 4

Words = npt.NDArray[Any]
Addresses = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class SegmentSpec:
    """What the bytes of one slot's segments are: declared, never guessed from their number.

    Attributes:
        axes: Order of a segment's bytes, row-major, the last one running fastest. In a slot of
            role ``KV`` the ``dim`` axis holds ``head_dim`` elements of K, then as many of V.
    """

    dtype: str
    role: Role
    tokens: int
    heads: int
    head_dim: int
    axes: tuple[Axis, ...] = HND[1:]

    @classmethod
    def of(cls, slot: Slot, page_tokens: int) -> Self:
        """Describe the segments of a registered slot."""
        return cls(
            dtype=slot.dtype,
            role=slot.role,
            tokens=page_tokens,
            heads=slot.heads,
            head_dim=slot.head_dim,
            axes=tuple(axis for axis in slot.axes if axis is not Axis.PAGE),
        )

    @property
    def rows(self) -> int:
        """Runs along ``dim``: one a token and head."""
        return self.tokens * self.heads

    @property
    def vectors(self) -> int:
        """Vectors of ``head_dim`` elements: two a row where K and V are packed."""
        return self.rows * (2 if self.role is Role.KV else 1)

    @property
    def elements(self) -> int:
        """Elements of a segment."""
        return self.vectors * self.head_dim

    @property
    def original_nbytes(self) -> int:
        """Bytes of a segment as the engine holds it."""
        return self.elements * DTYPE_NBYTES[self.dtype]

    @property
    def row_major(self) -> bool:
        """Whether each axis comes once, ``dim`` last, so that every vector is one run of bytes."""
        return sorted(self.axes) == sorted(HND[1:]) and self.axes[-1] is Axis.DIM


class SegmentCodec(Protocol):
    """One codec for the segments of one spec. Holds no state; any thread may call it.

    Both directions are pure functions of their bytes, and release the GIL while they work. The
    ``many`` forms take int64[n] addresses and save the cost of a call for each small segment; that
    every address is good for the whole length, and stays so, is the caller's word.
    """

    @property
    def spec(self) -> SegmentSpec:
        """What it was bound to."""
        ...

    @property
    def format(self) -> Format:
        """Format of what ``encode`` writes and ``decode`` reads."""
        ...

    @property
    def kernel(self) -> tuple[Any, ...]:
        """The GPU kernels that do the same: a name, and what they are instantiated for."""
        ...

    @property
    def encoded_nbytes(self) -> int | None:
        """Length of every payload: it depends on the spec alone. None: of a ``GpuCodec``."""
        ...

    def encode(self, words: Words, out: Bytes) -> int | RawReason:
        """Encode one segment.

        Args:
            words: The segment's elements, contiguous, host, any shape.
            out: uint8[encoded_nbytes or more], host. What lies past ``encoded_nbytes`` is left.

        Returns:
            ``encoded_nbytes``, or why the segment must be raw; ``out`` then holds nothing of use.

        Raises:
            ValueError: one of them has another length, or is not contiguous.
        """
        ...

    def encode_many(self, sources: Addresses, targets: Addresses) -> Mapping[int, RawReason]:
        """Encode segments. Returns the index and reason of each that must be raw, usually none."""
        ...

    def decode(self, payload: Bytes, out: Words) -> None:
        """Decode one payload into ``out``: the segment's elements, contiguous, host, any shape.

        Raises:
            CorruptObject: the payload has another length than ``encoded_nbytes``, or scalars that
                no encoder writes. ``out`` then holds nothing of use.
            ValueError: ``out`` has another length than the segment, or is not contiguous.
        """
        ...

    def decode_many(self, sources: Addresses, targets: Addresses) -> None:
        """Decode payloads whose lengths have been checked.

        Raises:
            CorruptObject: naming the first payload with scalars that no encoder writes.
        """
        ...


class Codec(Protocol):
    """One representation of segments, chosen by name."""

    @property
    def name(self) -> str:
        """As ``open_codec`` takes it."""
        ...

    @property
    def format(self) -> Format:
        """Format of what it encodes."""
        ...

    @property
    def identity(self) -> str:
        """All that decides the bytes: name, version, seed. A part of the namespace."""
        ...

    @property
    def protects_layers(self) -> bool:
        """Whether the outer layers of a pipeline stage are to stay exact."""
        ...

    def bind(self, spec: SegmentSpec) -> SegmentCodec | RawReason:
        """Make ready for the segments of one slot, which loads kernels or, once, compiles them.

        Returns:
            The codec for them, or why all of them must be raw.
        """
        ...


class Together(Protocol):
    """A codec for all slots of a geometry, which works on whole objects at once, on a GPU.

    Lengths of payloads depend on values, and are known only when a batch is over.
    """

    def encode_nbytes(self, slots: tuple[int, ...], *, gathered: bool) -> int:
        """Device memory that an object takes beside its image while it is encoded, at most.

        Args:
            gathered: Segments are not each one run of memory that the encoder may read.
        """
        ...

    def decode_nbytes(self, slots: tuple[int, ...]) -> int:
        """Device memory that an object takes beside its image while it is decoded, at most."""
        ...


@runtime_checkable
class GpuCodec(Codec, Protocol):
    """A codec that neither encodes nor decodes on a host."""

    def bind_together(
        self, codecs: Sequence[SegmentCodec | RawReason], segment_nbytes: Sequence[int]
    ) -> Together:
        """Make ready for batches of objects.

        Args:
            codecs: Of each slot, from ``bind``.
            segment_nbytes: Of each slot.
        """
        ...


def length_of(codec: SegmentCodec) -> int:
    """Length of every payload of a codec that works on a host."""
    assert codec.encoded_nbytes is not None, "a codec that works on a GPU only"
    return codec.encoded_nbytes


def reason_of(fault: int) -> RawReason:
    """Why a segment in which a kernel found these faults must be raw."""
    if fault & NONFINITE:
        return RawReason.NONFINITE
    return RawReason.OUT_OF_RANGE if fault & OUT_OF_RANGE else RawReason.SCALAR_OVERFLOW


def reason_to_stay_raw(encoded_nbytes: int, original_nbytes: int) -> RawReason | None:
    """Tell whether a payload of this length is not worth keeping, and why.

    An encoded segment must save 12.5 % of the footprint on 512 B boundaries. Sources over 16 MiB
    are not encoded.
    """
    if original_nbytes > MOST_SOURCE_NBYTES:
        return RawReason.OVERSIZED
    footprint_nbytes = align_up(encoded_nbytes, PAYLOAD_ALIGN_NBYTES)
    if footprint_nbytes * 8 > align_up(original_nbytes, PAYLOAD_ALIGN_NBYTES) * 7:
        return RawReason.SAVES_TOO_LITTLE
    return None
