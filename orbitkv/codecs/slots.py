"""SlotCodecs: one codec, bound to every slot of a geometry, and where its payloads will lie."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple, Self

import numpy as np

from orbitkv.codecs.base import (
    Codec,
    GpuCodec,
    SegmentCodec,
    SegmentSpec,
    Together,
    length_of,
    reason_to_stay_raw,
)
from orbitkv.codecs.raw import RawCodec
from orbitkv.objects import (
    OBJECT_ALIGN_NBYTES,
    PAYLOAD_ALIGN_NBYTES,
    ROW,
    Format,
    RawReason,
    Rows,
    Table,
    align_up,
    payload_offsets,
)
from orbitkv.segment import Geometry

PROTECTED_LAYERS = 2  # at each end of a pipeline stage
ATTENTION_GROUP = "attention"


class Place(NamedTuple):
    """One segment of an object, as it lies where its codec takes it.

    Attributes:
        codec: None: stored raw, for ``raw_reason``. Never one of a ``GpuCodec``.
    """

    slot: int
    offset: int
    original_nbytes: int
    codec: SegmentCodec | None
    raw_reason: RawReason

    @property
    def stored_nbytes(self) -> int:
        """Length of the payload."""
        return length_of(self.codec) if self.codec else self.original_nbytes


@dataclass(frozen=True, eq=False)
class Layout:
    """Where an object's segments lie in its image, and in which form.

    Attributes:
        rows: The segment table, ``ROW``[segments], with CRCs of zero.
        places: One a segment, in order. None at all where a GPU told the lengths.
    """

    rows: Rows
    places: tuple[Place, ...] = ()

    @classmethod
    def of(cls, places: tuple[Place, ...]) -> Self:
        """Make the table of what is known beforehand."""
        rows = np.array(
            [
                (
                    int(place.codec.format if place.codec else Format.RAW),
                    int(place.raw_reason),
                    0,
                    0,
                    place.original_nbytes,
                    place.stored_nbytes,
                    place.offset,
                )
                for place in places
            ],
            ROW,
        )
        return cls(rows, places)

    @cached_property
    def table(self) -> Table:
        """The same as words, to be copied and given CRCs."""
        return self.rows.view(np.uint32).reshape(len(self.rows), -1)

    @cached_property
    def table_bytes(self) -> bytes:
        """The same as bytes, to be compared."""
        return self.rows.tobytes()

    @cached_property
    def payloads(self) -> range:
        """From the first payload's first byte to the last one's last."""
        offsets = self.rows["offset"]
        return range(int(offsets[0]), int(offsets[-1]) + int(self.rows["stored_nbytes"][-1]))

    @cached_property
    def slots(self) -> tuple[int, ...]:
        """Of each segment."""
        return tuple(place.slot for place in self.places)

    @cached_property
    def nbytes(self) -> int:
        """Length of the object, a multiple of 4 KiB."""
        return align_up(self.payloads.stop, OBJECT_ALIGN_NBYTES)

    @cached_property
    def counts(self) -> tuple[tuple[str, int], ...]:
        """What an object adds to the counters: bytes in and out, and each reason to stay raw."""
        raw = self.rows["format"] == Format.RAW
        counts: dict[str, int] = {}
        for reason, count in enumerate(np.bincount(self.rows["raw_reason"][raw]).tolist()):
            if count:
                counts[f"raw_{RawReason(reason).name.lower()}"] = count
        if not raw.all():
            encoded = self.rows[~raw]
            counts["encoded_segments"] = len(encoded)
            counts["encoded_original_nbytes"] = int(encoded["original_nbytes"].sum())
            counts["encoded_stored_nbytes"] = int(encoded["stored_nbytes"].sum())
        return tuple(counts.items())

    @cached_property
    def has_gaps(self) -> bool:
        """Whether there is padding between two payloads."""
        return bool((self.rows["stored_nbytes"][:-1] % PAYLOAD_ALIGN_NBYTES).any())


@dataclass(frozen=True, eq=False)
class SlotCodecs:
    """What each slot of a geometry is stored as.

    Attributes:
        codecs: Of each slot: its codec, or why its segments are always raw.
        layouts: Of each state group: its segments' places, unless one must be raw after all. Where
            lengths are not known beforehand, as if no workspace budget held a page.
        together: What encodes and decodes whole objects where lengths are not known beforehand.
    """

    codecs: tuple[SegmentCodec | RawReason, ...]
    layouts: Mapping[str, Layout]
    together: Together | None = None

    @property
    def chosen_raw(self) -> bool:
        """Whether nobody asked for anything but the original bytes."""
        return self.codecs[0] is RawReason.CHOSEN

    def codec_of(self, slot: int) -> SegmentCodec | None:
        """The codec of a slot; None where its segments are always raw."""
        codec = self.codecs[slot]
        return None if isinstance(codec, RawReason) else codec


def bind_slots(codec: Codec, geometry: Geometry, *, protect: bool) -> SlotCodecs:
    """Bind a codec to every slot of a geometry, which may compile kernels, so not on a loop.

    Args:
        protect: Keep the first and last two layers exact, and all state that is not attention's,
            as quantisers must.
    """
    layers = sorted({slot.layer for slot in geometry.slots})
    protected = {*layers[:PROTECTED_LAYERS], *layers[-PROTECTED_LAYERS:]} if protect else set()
    codecs: list[SegmentCodec | RawReason] = []
    for slot in geometry.slots:
        if codec.name == "none":
            codecs.append(RawReason.CHOSEN)
            continue
        if protect and slot.group != ATTENTION_GROUP:
            codecs.append(RawReason.OPAQUE_STATE)
            continue
        if slot.layer in protected:
            codecs.append(RawReason.PROTECTED_LAYER)
            continue
        bound = codec.bind(SegmentSpec.of(slot, geometry.page_tokens))
        if not isinstance(bound, RawReason) and bound.encoded_nbytes is not None:
            bound = reason_to_stay_raw(bound.encoded_nbytes, bound.spec.original_nbytes) or bound
        codecs.append(bound)
    found = SlotCodecs(tuple(codecs), {})
    layouts = {
        group: lay_out(found, geometry, slots, {}) for group, slots in geometry.groups.items()
    }
    together = None
    if isinstance(codec, GpuCodec) and any(found.codec_of(slot) for slot in range(len(codecs))):
        together = codec.bind_together(codecs, geometry.segment_nbytes)
    return SlotCodecs(found.codecs, layouts, together)


def lay_out(
    codecs: SlotCodecs,
    geometry: Geometry,
    slots: tuple[int, ...],
    raw: Mapping[int, RawReason],
) -> Layout:
    """Place an object's segments, those in ``raw`` (by slot) uncoded for its reasons."""
    kinds: list[tuple[SegmentCodec | None, RawReason]] = []
    for slot in slots:
        codec = codecs.codecs[slot]
        if isinstance(codec, RawReason):
            kinds.append((None, codec))
        elif slot in raw:
            kinds.append((None, raw[slot]))
        elif codec.encoded_nbytes is None:
            kinds.append((None, RawReason.NO_BUDGET))
        else:
            kinds.append((codec, RawReason.CHOSEN))
    originals = [geometry.segment_nbytes[slot] for slot in slots]
    stored = [
        length_of(codec) if codec else nbytes
        for (codec, _), nbytes in zip(kinds, originals, strict=True)
    ]
    offsets = payload_offsets(stored)
    return Layout.of(
        tuple(
            Place(slot, offset, nbytes, codec, reason)
            for slot, offset, nbytes, (codec, reason) in zip(
                slots, offsets, originals, kinds, strict=True
            )
        )
    )


@functools.cache
def raw_slots(geometry: Geometry) -> SlotCodecs:
    """Everything as it is."""
    return bind_slots(RawCodec(), geometry, protect=False)
