"""Workspace: what one batch holds of a GPU from its first kernel or copy to its last."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol, Self

from orbitkv.codecs.cuda.tasks import Item, Tasks, tasks_nbytes
from orbitkv.codecs.raw import address_of
from orbitkv.objects import OBJECT_ALIGN_NBYTES, Bytes, align_up
from orbitkv.segment import Words

Runs = list[tuple[int, int, int]]
"""Bytes to copy: (target address, source address, bytes)."""


class Leased(Protocol):
    """A range of an arena."""

    @property
    def address(self) -> int:
        """Device address, a multiple of 4 KiB."""
        ...

    def release(self) -> None:
        """Give it back."""
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


class DeviceStream(Protocol):
    """One lane's work on one GPU: kernels in order, bulk copies beside them."""

    @property
    def arena(self) -> Leasing:
        """Workspace of the lane's batches."""
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
        lease: Leased,
        scratch: Bytes,
        image_nbytes: Sequence[int],
    ) -> None:
        self.stream = stream
        self.running = False
        self.tasks: Tasks | None = None
        self.ready: Any = None
        self._lease: Leased | None = lease
        self._scratch = scratch
        self._host_address = address_of(scratch)
        self.images: list[int] = []
        end = lease.address
        for nbytes in image_nbytes:
            self.images.append(end)
            end += nbytes
        self._tasks_address = end

    @classmethod
    async def open(cls, stream: DeviceStream, image_nbytes: Sequence[int], segments: int) -> Self:
        """Wait in turn for room in the arena.

        Raises:
            ImpossibleRequest: the arena can never hold it.
        """
        scratch_nbytes = tasks_nbytes(segments)
        lease = await stream.arena.acquire(workspace_nbytes(image_nbytes, segments))
        try:
            scratch = await stream.take_scratch(scratch_nbytes)
        except BaseException:
            lease.release()
            raise
        return cls(stream, lease, scratch, image_nbytes)

    def fill(
        self, slots: int, items: Sequence[Item], units: Sequence[Sequence[int]] | None = None
    ) -> Tasks:
        """Write the batch's tasks into the scratch."""
        self.tasks = Tasks(self._scratch, self._tasks_address, slots, items, units)
        return self.tasks

    def send_tasks(self) -> None:
        """Enqueue: bring the tasks to the device."""
        assert self.tasks
        self.stream.kernels.move(self.tasks.span.tasks, self._host_address, self.tasks.nbytes)

    def fetch_results(self) -> None:
        """Enqueue: bring CRCs and faults back, and mark their arrival."""
        assert self.tasks
        at, nbytes = self.tasks.results
        self.stream.kernels.move(self._host_address + at, self._tasks_address + at, nbytes)
        self.ready = self.stream.record()

    async def results(self) -> Tasks:
        """Wait for the results."""
        assert self.tasks
        await self.stream.reached(self.ready)
        self.running = False
        return self.tasks

    def release(self) -> None:
        """Give everything back. Harmless twice; only when nothing is running."""
        assert not self.running, "a kernel or copy may still use this workspace"
        lease, self._lease = self._lease, None
        if lease is not None:
            self.stream.give_scratch(self._scratch)
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


def workspace_nbytes(image_nbytes: Sequence[int], segments: int) -> int:
    """Bytes of the arena that a batch of objects takes."""
    return align_up(sum(image_nbytes) + tasks_nbytes(segments), OBJECT_ALIGN_NBYTES)
