"""Requests: what a save or a restore is cut into, each batch as soon as its turn comes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TypeVar

from orbitkv.cache.catalogue import Catalogue, Copy
from orbitkv.codecs.cuda.tasks import tasks_nbytes
from orbitkv.codecs.cuda.workspace import workspace_nbytes
from orbitkv.codecs.slots import SlotCodecs
from orbitkv.config import MIB, Config
from orbitkv.objects import OBJECT_ALIGN_NBYTES, align_up
from orbitkv.runtime.runtime import Runtime
from orbitkv.segment import Geometry, PagedTensors, StateKey
from orbitkv.stages.batch import Destination, PublishBatch, RestoreBatch
from orbitkv.stages.ticket import Ticket

T = TypeVar("T")
Slots = tuple[int, ...]

MAX_BATCH_SEGMENTS = 256
# What R reads for its CRC is still in a host's last-level cache when E copies it.
TARGET_BATCH_NBYTES = 16 * MIB


def pack(
    items: Iterable[T], size_of: Callable[[T], tuple[int, int]], limit_nbytes: int
) -> Iterator[list[T]]:
    """Cut items into batches as they come; each fits one by itself.

    Args:
        size_of: Gives an item's bytes and segments.
    """
    found: list[T] = []
    found_nbytes = found_segments = 0
    for item in items:
        nbytes, segments = size_of(item)
        full = found_nbytes + nbytes > limit_nbytes
        if found and (full or found_segments + segments > MAX_BATCH_SEGMENTS):
            yield found
            found, found_nbytes, found_segments = [], 0, 0
        found.append(item)
        found_nbytes += nbytes
        found_segments += segments
    if found:
        yield found


@dataclass(frozen=True, slots=True)
class Cutter:
    """Cuts the requests of one manager.

    Args:
        bound: What each slot of a registered geometry is stored as.
    """

    catalogue: Catalogue
    config: Config
    bound: Mapping[Geometry, SlotCodecs]

    def publish(
        self,
        ticket: Ticket,
        tensors: PagedTensors,
        pages: Iterable[tuple[StateKey, int]],
        runtime: Runtime,
        ready: object | None,
    ) -> Iterator[PublishBatch]:
        """Cut a save, given as (key, page index)."""
        geometry = tensors.geometry
        nbytes_of = geometry.object_nbytes
        sizes = {
            group: (nbytes_of[group] + self._half_beside(tensors, slots, saves=True), len(slots))
            for group, slots in geometry.groups.items()
        }
        limit_nbytes = self._target_nbytes(tensors, runtime, PublishBatch)
        for some in pack(pages, lambda page: sizes[page[0].group], limit_nbytes):
            part = ticket.part(tuple(key.page_hash for key, _ in some))
            nbytes = sum(nbytes_of[key.group] for key, _ in some)
            yield PublishBatch(part, tensors, tuple(some), ready, nbytes)

    def restore(
        self,
        ticket: Ticket,
        tensors: PagedTensors,
        work: Mapping[type[RestoreBatch], Iterable[tuple[Copy, Destination]]],
        runtime: Runtime,
        ready: object | None,
        *,
        stays: bool = False,
    ) -> Iterator[RestoreBatch]:
        """Cut a restore, given by the batches that its pinned copies travel in.

        Args:
            stays: It goes no further than D.
        """
        besides = {
            slots: self._half_beside(tensors, slots, saves=False)
            for slots in tensors.geometry.groups.values()
        }

        def size_of(item: tuple[Copy, Destination]) -> tuple[int, int]:
            copy, target = item
            return copy.nbytes + besides[target.slot_indices], len(target.slot_indices)

        for station, items in work.items():
            if not items:
                continue
            limit_nbytes = self._target_nbytes(tensors, runtime, station)
            for some in pack(items, size_of, limit_nbytes):
                part = ticket.part(tuple(target.page_hash for _, target in some))
                yield station(part, self.catalogue, tensors, some, ready=ready, stays=stays)

    def exceeds_arenas(self, geometry: Geometry) -> bool:
        """Whether a raw page is more than a GPU lane may hold of it at once."""
        budget_nbytes = self.config.storage_codec_budget_nbytes
        together = self.bound[geometry].together
        for group, nbytes in geometry.object_nbytes.items():
            slots = geometry.groups[group]
            needed_nbytes = workspace_nbytes([nbytes], len(slots))
            if together:
                encode_nbytes = together.encode_nbytes(slots, gathered=True)
                beside_nbytes = max(encode_nbytes, together.decode_nbytes(slots))
                needed_nbytes += align_up(beside_nbytes, OBJECT_ALIGN_NBYTES)
            if needed_nbytes > budget_nbytes:
                return True
        return False

    def _half_beside(self, tensors: PagedTensors, slots: Slots, *, saves: bool) -> int:
        """Half the arena's room that an object takes beside its image, once for two batches."""
        together = self.bound[tensors.geometry].together
        if together is None or tensors.bridged:
            return 0
        if saves:
            gathered = not tensors.device_slots.are_runs
            return together.encode_nbytes(slots, gathered=gathered) // 2
        return together.decode_nbytes(slots) // 2

    def _target_nbytes(self, tensors: PagedTensors, runtime: Runtime, station: type) -> int:
        """How much a batch shall be: of raw objects on a save, of stored ones on a restore."""
        limit_nbytes = min(
            runtime.batch_nbytes(station, budgets=not tensors.bridged),
            self.catalogue.pool.capacity_nbytes,
        )
        if tensors.device is None or tensors.bridged:
            return min(limit_nbytes, TARGET_BATCH_NBYTES)
        # Two in the arena: one leaves while the next is made.
        arena_nbytes = self.config.storage_codec_budget_nbytes - tasks_nbytes(MAX_BATCH_SEGMENTS)
        half_nbytes = arena_nbytes // 2
        if station is PublishBatch:
            geometry = tensors.geometry
            raw_nbytes = sum(geometry.object_nbytes.values())
            layouts = self.bound[geometry].layouts.values()
            half_nbytes = half_nbytes * raw_nbytes // sum(layout.nbytes for layout in layouts)
        return min(limit_nbytes, half_nbytes)
