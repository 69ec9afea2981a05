"""Workspace: what one batch holds of a GPU from its first kernel or copy to its last."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any, Protocol, Self

from orbitkv.codecs.cuda.ans_batch import (
    AnsDecoding,
    AnsEncoding,
    AnsSlots,
    DecodeShape,
    EncodeShape,
    Slots,
    decoding_nbytes,
)
from orbitkv.codecs.cuda.tasks import Item, Tasks, TaskTable, tasks_nbytes
from orbitkv.codecs.raw import address_of
from orbitkv.codecs.slots import Layout
from orbitkv.objects import OBJECT_ALIGN_NBYTES, Bytes, Rows, align_up
from orbitkv.segment import Words

Runs = list[tuple[int, int, int]]
"""Bytes to copy: (target address, source address, bytes)."""


class Held(Protocol):
    """Device memory of an arena, until it is given back."""

    @property
    def address(self) -> int:
        """Device address, a multiple of 4 KiB."""
        ...

    def release(self) -> None:
        """Give it back."""
        ...


class Leased(Held, Protocol):
    """A range of an arena."""

    def split(self, nbytes: int) -> Self:
        """Keep the first ``nbytes``, a multiple of 4 KiB; return the rest as a range of its own."""
        ...


class Leasing(Protocol):
    """Device memory of one lane, leased in ranges."""

    @property
    def limit_nbytes(self) -> int:
        """Most that can ever be leased."""
        ...

    async def acquire(self, nbytes: int) -> Leased:
        """Wait in turn for a range."""
        ...

    async def acquire_now(self, nbytes: int) -> Leased | None:
        """A range, unless it had to wait for somebody else's."""
        ...


class DeviceStream(Protocol):
    """One lane's work on one GPU: kernels in order, bulk copies beside them."""

    @property
    def arena(self) -> Leasing:
        """Workspace of the lane's batches."""
        ...

    @property
    def shared(self) -> SharedRoom:
        """Room of the arena that batches take turns with."""
        ...

    @property
    def kernels(self) -> Any:  # noqa: ANN401 - a ``Launcher``, or what stands for it in tests
        """Launches kernels, in order."""
        ...

    def after(self, event: Any) -> None:  # noqa: ANN401 - an event of ours, or a cudaEvent_t
        """Let what is enqueued from here on wait for an event."""
        ...

    def record(self) -> Any:  # noqa: ANN401 - an event, which only streams look into
        """Mark what has been enqueued so far."""
        ...

    def clear(self, address: int, nbytes: int) -> None:
        """Zero device memory, in order."""
        ...

    def copy(self, runs: Runs, after: Any = None) -> Any:  # noqa: ANN401 - as above
        """Copy beside the kernels; gives the event after which all has been copied."""
        ...

    async def reached(self, event: Any) -> None:  # noqa: ANN401 - as above
        """Wait for an event, even if the caller is cancelled."""
        ...

    async def take_scratch(self, nbytes: int) -> Bytes:
        """Pinned host memory."""
        ...

    def give_scratch(self, scratch: Bytes) -> None:
        """Give pinned host memory back."""
        ...

    async def idle(self) -> None:
        """Wait until everything enqueued so far, copies too, has ended or failed."""
        ...

    def when_over(self, call: Callable[[], None]) -> None:
        """Call on the loop once everything enqueued so far, copies too, has ended."""
        ...

    def bridge(self) -> Bridge:
        """What carries segments that the arena cannot hold."""
        ...


class Bridge(Protocol):
    """Segments to and from a GPU, one by one, for pages that no arena can hold.

    Every call blocks its thread until the bytes have moved.
    """

    @property
    def buffer(self) -> Bytes:
        """uint8[16 MiB], pinned: room for one segment."""
        ...

    def fetch(self, segment: Words, target: Bytes) -> None:
        """Copy a segment, described in GPU memory, to contiguous pinned memory."""
        ...

    def put(self, source: Bytes, segment: Words) -> None:
        """Copy contiguous pinned memory to a segment in GPU memory."""
        ...


class SharedRoom:
    """Room of an arena that the batches of one stream use one after the other.

    Kernels of a stream run in order. So memory that no batch needs after its last kernel, and no
    copy beside the kernels reads, is leased once while there are batches, not by each of them.
    """

    def __init__(self, arena: Leasing) -> None:
        self._arena = arena
        self._part: SharedPart | None = None

    async def acquire(self, own_nbytes: int, shared_nbytes: int) -> tuple[Leased, SharedPart]:
        """Wait in turn for a range of the caller's own, and for a part in the shared one.

        Raises:
            ImpossibleRequest: the arena can never hold both.
        """
        own_nbytes = align_up(max(own_nbytes, 1), OBJECT_ALIGN_NBYTES)
        shared_nbytes = align_up(shared_nbytes, OBJECT_ALIGN_NBYTES)
        if self._holds(shared_nbytes):
            # Holding nothing: an arena grows only when all of it has been given back.
            own = await self._arena.acquire(own_nbytes)
            if self._part and self._holds(shared_nbytes):
                self._part.users += 1
                return own, self._part
            own.release()
        lease = await self._arena.acquire(shared_nbytes + own_nbytes)
        own = lease.split(shared_nbytes)
        self._part = SharedPart(lease, shared_nbytes)
        return own, self._part

    def _holds(self, nbytes: int) -> bool:
        part = self._part
        return part is not None and part.users > 0 and nbytes <= part.nbytes


class SharedPart:
    """A range that several batches hold. The last of them gives it back."""

    def __init__(self, lease: Leased, nbytes: int) -> None:
        self._lease = lease
        self.address = lease.address
        self.nbytes = nbytes
        self.users = 1

    def release(self) -> None:
        """Give the caller's part back."""
        self.users -= 1
        if not self.users:
            self._lease.release()


class Workspace:
    """A range of the lane's arena for the images of a batch's objects, and for its tasks.

    Attributes:
        images: Device address of each object's image.
        running: Something has been enqueued that uses the workspace and is not known to be over.
        tasks: Set by ``fill``.
        ready: The event after which the results are in ``tasks``.
    """

    def __init__(
        self,
        stream: DeviceStream,
        leases: Sequence[Held],
        scratch: Bytes,
        image_nbytes: Sequence[int],
    ) -> None:
        self.stream = stream
        self.running = False
        self.tasks: TaskTable | None = None
        self.ready: Any = None
        self._leases = tuple(leases)
        self._users = 1
        self._released = False
        self._scratch = scratch
        self._heads: Bytes | None = None
        self._host_address = address_of(scratch)
        self.images: list[int] = []
        self._start = self._end = leases[0].address
        self.lay_out(image_nbytes)

    def lay_out(self, image_nbytes: Sequence[int]) -> None:
        """Let the images follow one another."""
        *self.images, self._end = itertools.accumulate(image_nbytes, initial=self._start)

    @classmethod
    async def open(cls, stream: DeviceStream, image_nbytes: Sequence[int], segments: int) -> Self:
        """Wait in turn for room in the arena.

        Raises:
            ImpossibleRequest: the arena can never hold it.
        """
        lease = await stream.arena.acquire(workspace_nbytes(image_nbytes, segments))
        scratch = await _scratch_with(stream, tasks_nbytes(segments), [lease])
        return cls(stream, [lease], scratch, image_nbytes)

    def fill(
        self, slots: int, items: Sequence[Item], units: Sequence[Sequence[int]] | None = None
    ) -> Tasks:
        """Write the batch's tasks into the scratch."""
        self.tasks = tasks = Tasks(self._scratch, self._end, slots, items, units)
        return tasks

    def send_tasks(self) -> None:
        """Enqueue: bring the tasks to the device."""
        assert self.tasks
        self.stream.kernels.move(self.tasks.span.tasks, self._host_address, self.tasks.nbytes)

    def check(self) -> None:
        """Enqueue: bring the tasks to the device, and compare the payloads' CRCs."""
        assert isinstance(self.tasks, Tasks)
        self.send_tasks()
        self.stream.kernels.crc32(
            self.tasks.span, 0, self.tasks.count, self.tasks.most_stored_nbytes
        )

    def decode(self) -> None:
        """Enqueue: write the pages whose segments all stand, and fetch what was found."""
        assert isinstance(self.tasks, Tasks)
        kernels = self.stream.kernels
        for launch in self.tasks.launches:
            kernels.decode(self.tasks.span, launch)
        self.fetch_results()

    def fetch_results(self) -> None:
        """Enqueue: bring CRCs and faults back, and mark their arrival."""
        assert self.tasks
        at, nbytes = self.tasks.results
        self.stream.kernels.move(self._host_address + at, self.tasks.span.crcs, nbytes)
        self.ready = self.stream.record()

    async def results(self) -> TaskTable:
        """Wait for the results."""
        assert self.tasks
        await self.stream.reached(self.ready)
        self.running = False
        return self.tasks

    async def fetch_heads(self, nbytes: Sequence[int]) -> list[Bytes]:
        """Bring the first bytes of each image to the host: views, until ``release``."""
        total_nbytes = sum(nbytes)
        self._heads = heads = await self.stream.take_scratch(total_nbytes)
        starts = list(itertools.accumulate(nbytes, initial=0))
        host = address_of(heads)
        pieces = zip(starts, self.images, nbytes, strict=False)
        self.running = True
        copied = self.stream.copy(
            [(host + start, image, length) for start, image, length in pieces]
        )
        await self.stream.reached(copied)
        return [heads[start:end] for start, end in itertools.pairwise(starts)]

    def share(self) -> Callable[[], None]:
        """Keep the workspace for a second user too; gives what ends that use, at most once."""
        self._users += 1
        left = False

        def leave() -> None:
            nonlocal left
            if not left:
                left = True
                self._leave()

        return leave

    def release(self) -> None:
        """Give everything back. Harmless twice; only when nothing is running."""
        assert not self.running, "a kernel or copy may still use this workspace"
        if not self._released:
            self._released = True
            self._leave()

    def _leave(self) -> None:
        self._users -= 1
        if self._users:
            return
        self.stream.give_scratch(self._scratch)
        if self._heads is not None:
            self.stream.give_scratch(self._heads)
        for lease in self._leases:
            lease.release()

    def end(self, then: Callable[[], None]) -> None:
        """Release, then call: at once, or when what is running has ended."""

        def over() -> None:
            self.running = False
            self.release()
            then()

        if self.running:
            self.stream.when_over(over)
        else:
            over()


class AnsSaving(Workspace):
    """Workspace of a batch that ANS encodes: the objects' room is its own, all else shared."""

    tasks: AnsEncoding | None

    def __init__(
        self,
        stream: DeviceStream,
        leases: tuple[Leased, SharedPart],
        scratch: Bytes,
        shape: EncodeShape,
    ) -> None:
        super().__init__(stream, leases, scratch, [shape.output_nbytes])
        self._layouts: list[Layout] | None = None
        self._shape = shape
        self._own, self._shared = leases

    @classmethod
    async def open_for(cls, stream: DeviceStream, shape: EncodeShape) -> Self:
        """Wait in turn for room in the arena.

        Raises:
            ImpossibleRequest: the arena can never hold it.
        """
        leases = await stream.shared.acquire(shape.output_nbytes, shape.shared_nbytes)
        scratch = await _scratch_with(stream, shape.scratch_nbytes, leases)
        return cls(stream, leases, scratch, shape)

    def encode(self, device_slots: Any, pages: Sequence[int]) -> None:  # noqa: ANN401 - see below
        """Enqueue everything up to the CRCs.

        Args:
            device_slots: ``DeviceSlots`` of the registration, or what stands for it in tests.
            pages: Page index of each object.
        """
        self.tasks = AnsEncoding(
            self._shape,
            self._scratch,
            self._host_address,
            shared=self._shared.address,
            output=self._own.address,
            slots=device_slots.address,
        )
        self.tasks.fill(device_slots.described, pages)
        self.running = True
        # In one go: between two kernels of this batch another must not use the shared room.
        self.tasks.enqueue(self.stream.kernels)
        self.tasks.fetch(self.stream.kernels)
        self.ready = self.stream.record()

    def fetch_results(self) -> None:
        """Nothing is left to enqueue."""

    async def encoded(self) -> list[Layout]:
        """Wait for the results; give the objects' layouts, and back the room that they leave."""
        assert self.tasks
        await self.stream.reached(self.ready)
        if self._layouts is not None:  # somebody else asked before
            return self._layouts
        self._layouts = layouts = self.tasks.layouts()
        image_nbytes = [layout.nbytes for layout in layouts]
        self.lay_out(image_nbytes)
        if sum(image_nbytes) < self._shape.output_nbytes:
            self._own.split(sum(image_nbytes)).release()
        return layouts


class AnsRestoring(Workspace):
    """Workspace of a batch that ANS decodes: the images' room is its own, all else shared."""

    tasks: AnsDecoding | None

    @classmethod
    async def open_for(
        cls, stream: DeviceStream, slots: AnsSlots, objects: Sequence[Slots], nbytes: Sequence[int]
    ) -> Self:
        """Wait in turn for room in the arena.

        Args:
            objects: Slots of each.
            nbytes: Of each image.

        Raises:
            ImpossibleRequest: the arena can never hold it.
        """
        needed_nbytes = sum(map(slots.decode_nbytes, objects))
        leases = await stream.shared.acquire(sum(nbytes), needed_nbytes)
        scratch_nbytes = decoding_nbytes(sum(map(len, objects)))
        scratch = await _scratch_with(stream, scratch_nbytes, leases)
        return cls(stream, leases, scratch, nbytes)

    def describe(
        self, shape: DecodeShape, slots: int, rows: Rows, **objects: Sequence[Any]
    ) -> None:
        """Write the batch's tasks into the scratch.

        Args:
            slots: Device address of the registration's slots.
            rows: Segment tables of all objects, ``ROW``[tasks].
            objects: As ``AnsDecoding.fill`` takes them.
        """
        shared = self._leases[1].address
        self.tasks = AnsDecoding(
            shape, self._scratch, self._host_address, shared=shared, slots=slots
        )
        self.tasks.fill(rows, **objects)

    def check(self) -> None:
        """Nothing yet: between two kernels of this batch another must not use the shared room."""

    def decode(self) -> None:
        """Enqueue: compare CRCs, write the pages whose segments all stand, fetch the results."""
        assert self.tasks
        self.tasks.check(self.stream.kernels)
        self.tasks.decode(self.stream.kernels)
        self.fetch_results()


async def _scratch_with(stream: DeviceStream, nbytes: int, leases: Sequence[Held]) -> Bytes:
    """Take scratch for a batch that holds leases already, or give them back."""
    try:
        return await stream.take_scratch(nbytes)
    except BaseException:
        for lease in leases:
            lease.release()
        raise


def workspace_nbytes(image_nbytes: Sequence[int], segments: int) -> int:
    """Bytes of the arena that a batch of objects takes."""
    return align_up(sum(image_nbytes) + tasks_nbytes(segments), OBJECT_ALIGN_NBYTES)
