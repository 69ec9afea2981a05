"""What a stage is, what it is given, and what a lane promises."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import (
    Any,
    ClassVar,
    NamedTuple,
    ParamSpec,
    Protocol,
    TypeVar,
    cast,
    runtime_checkable,
)

import structlog

from orbitkv.cache.budget import Budget
from orbitkv.cache.catalogue import Catalogue
from orbitkv.cache.direct import DirectRoute, Slot
from orbitkv.codecs.cuda.workspace import Bridge, DeviceStream
from orbitkv.codecs.slots import SlotCodecs
from orbitkv.config import Config
from orbitkv.errors import CorruptObject, OrbitError
from orbitkv.graph import Lanes, Node, Ports
from orbitkv.objects import Bytes
from orbitkv.segment import Geometry, PagedTensors
from orbitkv.stages.ticket import Part

P = ParamSpec("P")
T = TypeVar("T")


class Batch(Protocol):
    """What travels along an edge. Whoever holds a batch last ends it, exactly once."""

    @property
    def part(self) -> Part | None:
        """The share of a ticket that this batch settles; None for background work."""
        ...

    @property
    def nbytes(self) -> int:
        """Bytes that the batch keeps from others while it waits."""
        ...

    def abandon(self, error: OrbitError) -> None:
        """End the batch without having done its work: free what it holds, fail its part."""
        ...


Outputs = Mapping[str, Batch]
"""Batches by output port. A port that is left out emits nothing."""


class Lane(Protocol):
    """Where a node's work is ordered. Stages enqueue; only lanes wait."""

    @property
    def name(self) -> str:
        """As in the definition: ``kind:name``."""
        ...

    async def run(self, fn: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run host work off the loop, in its turn. A cancelled caller still waits for its end."""
        ...


@runtime_checkable
class StreamLane(Lane, Protocol):
    """A lane whose work runs in order, and can be ordered after an engine's event."""

    async def reached(self, event: object) -> None:
        """Return once what the engine queued before its event is over."""
        ...

    def on(self, device: int) -> DeviceStream:
        """The lane's stream on a GPU that holds registered pages."""
        ...


class Transfer(NamedTuple):
    """One move between a file and host memory, short if the file ends first.

    ``buffer`` is uint8[n], contiguous, 1 to 2**30 bytes, and writable if it is read into. With
    O_DIRECT its address, n and ``offset`` are multiples of the device's block (512 B).
    """

    fd: int
    buffer: Bytes
    offset: int


@runtime_checkable
class IoLane(Lane, Protocol):
    """A lane that moves bytes between host memory and files, with a bound on what is in flight."""

    async def read_many(self, transfers: Sequence[Transfer]) -> list[int | OSError]:
        """Fill every buffer from its file. Gives per transfer the bytes moved, or the refusal."""
        ...

    async def write_many(self, transfers: Sequence[Transfer]) -> list[int | OSError]:
        """Write every buffer to its file. Gives per transfer the bytes moved, or the refusal."""
        ...


@runtime_checkable
class FileLane(Lane, Protocol):
    """A lane that moves bytes between registered GPU memory and files, through cuFile."""

    async def read(self, shard: int, slot: Slot, nbytes: int, offset: int) -> int:
        """Fill the first ``nbytes`` of a slot; gives the bytes moved, fewer at a file's end.

        Raises:
            DirectFault: cuFile refused or failed.
        """
        ...

    async def write(self, shard: int, slot: Slot, nbytes: int, offset: int) -> int:
        """Write the first ``nbytes`` of a slot; gives the bytes moved, maybe fewer.

        Raises:
            DirectFault: cuFile refused or failed.
        """
        ...


@dataclass(frozen=True, slots=True)
class StageContext:
    """What a node's stages work with.

    Attributes:
        budget: Bytes the node's batches may keep at once, where its definition bounds them.
        codecs: Of the manager's codec, bound to a geometry. Every registered one is bound.
        live_outputs: Output ports of the node that lead to a node that runs.
        direct: The pipeline's way past the host, to SSD or from it.
    """

    node: Node
    lane: Lane
    budget: Budget | None
    catalogue: Catalogue
    config: Config
    codecs: Callable[[Geometry], SlotCodecs]
    live_outputs: frozenset[str]
    direct: DirectRoute
    log: structlog.stdlib.BoundLogger

    def stream_of(self, tensors: PagedTensors) -> DeviceStream | None:
        """The lane's stream on the GPU that holds the pages; None where a host works on them."""
        if tensors.device is None or tensors.bridged:
            return None
        return cast("StreamLane", self.lane).on(tensors.device)

    def bridge_of(self, tensors: PagedTensors) -> Bridge | None:
        """What carries single segments between a host and the GPU; None where nothing has to."""
        if tensors.device is None or not tensors.bridged:
            return None
        return cast("StreamLane", self.lane).on(tensors.device).bridge()


class Stage(Protocol):
    """One step of a node. Options of the definition are its constructor's keywords.

    A stage class may also have ``unavailable(config) -> str | None``, a static method that tells
    why it cannot run on this machine; its node's arm is then switched off.
    """

    inputs: ClassVar[Ports]
    outputs: ClassVar[Ports]
    lanes: ClassVar[Lanes]

    async def run(self, batch: Any, ctx: StageContext) -> Outputs:  # noqa: ANN401 - its port's type
        """Take over ``batch``, and return what goes on.

        On an OrbitError the runtime abandons ``batch``; whatever the stage took itself, it frees.
        """
        ...


@runtime_checkable
class SplitStage(Protocol):
    """A stage that makes several batches of one, and emits each as soon as it stands.

    It is the last of its node: while one of its batches waits for room on an edge, so does it.
    """

    inputs: ClassVar[Ports]
    outputs: ClassVar[Ports]
    lanes: ClassVar[Lanes]

    def split(self, batch: Any, ctx: StageContext) -> AsyncGenerator[Outputs]:  # noqa: ANN401 - its port's
        """Take over ``batch``, and give what goes on, piece by piece.

        On an OrbitError the runtime abandons ``batch``. It may be closed at any ``yield``.
        """
        ...


class ItemBatch(Batch, Protocol):
    """A batch whose items can be worked on one after the other."""

    def units(self) -> Sequence[Sequence[int]]:
        """Indices of the items, those together that stand or fall together."""
        ...

    def reject(
        self, faults: Mapping[int, CorruptObject], log: structlog.stdlib.BoundLogger
    ) -> None:
        """Go on without the items that an item stage refused, by index."""
        ...


@runtime_checkable
class ItemStage(Protocol):
    """A stage whose work is done item by item, on the lane's thread.

    A node runs neighbouring item stages as one: all of them on the first item, then all on the
    next. So what one of them has read or written is still in the cache for the one after it.
    """

    inputs: ClassVar[Ports]
    outputs: ClassVar[Ports]
    lanes: ClassVar[Lanes]

    async def prepare(self, batch: Any, ctx: StageContext) -> Outputs:  # noqa: ANN401 - its port's
        """On the loop, before any item: take over ``batch``, and what its items will need."""
        ...

    def run_item(self, batch: Any, index: int) -> None:  # noqa: ANN401 - its port's type
        """On the lane: do the work on one item of what the last ``prepare`` returned.

        Raises:
            CorruptObject: to go on without this item. Any other OrbitError ends the batch.
        """
        ...


def unavailable_reason(implementation: type, config: Config) -> str | None:
    """Why a stage cannot run on this machine; None where it can, or does not say."""
    probe = getattr(implementation, "unavailable", None)
    try:
        reason: str | None = probe(config) if probe else None
    except Exception as error:  # noqa: BLE001 - a user's probe may fail in any way
        return f"cannot tell whether it can run here: {error!r}"
    return reason
