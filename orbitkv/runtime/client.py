"""Client: the manager's calls, carried out by the daemon of this host."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Callable, Coroutine, Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, Self

import numpy.typing as npt

from orbitkv.errors import (
    Cancelled,
    Closed,
    DeadlineMissed,
    EngineFault,
    OrbitError,
    SessionLost,
)
from orbitkv.runtime import wire
from orbitkv.runtime.calls import Calls
from orbitkv.runtime.core import (
    Flushed,
    ManagerStatistics,
    check_destinations,
    check_hashes,
    check_ready,
)
from orbitkv.runtime.instance import Instance
from orbitkv.runtime.ipc import EventExporter, PastEvent
from orbitkv.runtime.lanes import HostLane
from orbitkv.runtime.leases import PrefixLease
from orbitkv.runtime.manager import Front
from orbitkv.runtime.remote import Move, RemoteInstance, RemoteLease, check_count
from orbitkv.runtime.tensors import Exported, SharedMemory, allocate_tensors
from orbitkv.runtime.trace import TraceTotals
from orbitkv.segment import Geometry, ModelIdentity, PagedTensors
from orbitkv.stages.ticket import Outcome, Ticket


def default_socket() -> Path:
    """Where the daemon of this user listens unless told otherwise."""
    own = Path(f"/run/user/{os.getuid()}")
    return (own if own.is_dir() else Path("/run/orbitkv")) / "orbitkv.sock"


class Session:
    """One session with the daemon, on the loop of the client that owns it.

    Args:
        path: The daemon's socket.
        deadline_s: For answers to what the daemon does at once, and to a sign of life while a
            request is under way.
        long_deadline_s: For what waits for codecs or devices: register, unregister and flush.

    Attributes:
        closing: Nothing new is taken any more.
        memories: Shared memory that engines may have their tensors in.
    """

    def __init__(self, path: Path, *, deadline_s: float, long_deadline_s: float) -> None:
        self.closing = False
        self.memories: list[SharedMemory] = []
        self._calls = Calls(path, deadline_s)
        self._deadline_s = deadline_s
        self._long_deadline_s = long_deadline_s
        self._instances: set[RemoteInstance] = set()
        self._leases: set[PrefixLease] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._save, self._restore = HostLane("client:save"), HostLane("client:restore")

    async def __aenter__(self) -> Self:
        self._loop = asyncio.get_running_loop()
        await self._calls.__aenter__()
        for lane in (self._save, self._restore):
            await lane.start()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Release what the caller holds, and let what it submitted end."""
        self.closing = True
        for lease in tuple(self._leases):
            self._release(lease)
        with contextlib.suppress(SessionLost, DeadlineMissed):
            for instance in tuple(self._instances):
                await self.unregister(instance)
        while self._tasks:
            await asyncio.wait(self._tasks)
        for instance in self._instances:  # those of a session that was lost
            instance.close()
        await self._calls.__aexit__(None, None, None)
        for lane in (self._save, self._restore):
            await lane.close()
        for memory in self.memories:
            memory.close()

    # What an engine asks ------------------------------------------------------------------

    async def register(
        self, geometry: Geometry, tensors: Mapping[str, Any], model: ModelIdentity
    ) -> RemoteInstance:
        """Check tensors here, and let the daemon map them."""
        paged = PagedTensors(geometry, tensors)
        exported = await asyncio.to_thread(Exported, paged, tuple(self.memories))
        try:
            events = None
            if paged.device is not None:
                events = await asyncio.to_thread(EventExporter, paged.device)
            registered = await self._calls.ask(
                lambda number: wire.Register(
                    number, geometry, model, tuple(exported.memories), tuple(exported.tensors)
                ),
                wire.Registered,
                self._long_deadline_s,
                exported.descriptors,
            )
        except BaseException:
            exported.close()
            raise
        instance = RemoteInstance(registered.namespace, paged)
        instance.number, instance.exported, instance.events = registered.instance, exported, events
        self._instances.add(instance)
        return instance

    async def unregister(self, instance: Instance) -> None:
        """Take an instance away, once its work has ended here and there."""
        remote = self._check_open(instance)
        self._instances.remove(remote)
        for lease in [lease for lease in self._leases if lease.instance is remote]:
            self._release(lease)
        while remote.tickets:
            await next(iter(remote.tickets))
        try:
            await self._calls.ask(
                lambda number: wire.Unregister(number, remote.number),
                wire.Done,
                self._long_deadline_s,
            )
        finally:
            remote.close()

    async def publish(
        self, instance: Instance, pages: tuple[tuple[bytes, int], ...], ready: object | None
    ) -> Ticket:
        """Check a save here; the rest happens behind the ticket."""
        remote = self._check_open(instance)
        hashes = tuple(page_hash for page_hash, _ in pages)
        indices = tuple(index for _, index in pages)
        self._check_hashes(hashes)
        check_ready(ready)
        remote.tensors.check_indices(indices, distinct=True)
        move = Move(
            remote,
            pages,
            self._save,
            saves=True,
            request=lambda number, event: wire.Publish(
                number, remote.number, hashes, tuple(map(int, indices)), event
            ),
        )
        return self._begin(remote, hashes, lambda ticket: self._move(move, ready, ticket))

    async def query(self, instance: Instance, hashes: tuple[bytes, ...]) -> RemoteLease:
        """Ask for the longest prefix that can be restored."""
        remote = self._check_open(instance)
        self._check_hashes(hashes)
        leased = await self._calls.ask(
            lambda number: wire.Query(number, remote.number, hashes), wire.Leased, self._deadline_s
        )
        return self._keep(remote, hashes, leased)

    async def prepare(self, instance: Instance, hashes: tuple[bytes, ...]) -> RemoteLease:
        """Find a prefix like ``query``, but without demand; bring to DRAM what SSD alone has."""
        remote = self._check_open(instance)
        self._check_hashes(hashes)
        leased, number, ended = await self._calls.ask_twice(
            lambda asked, promised: wire.Prepare(asked, remote.number, hashes, promised),
            self._deadline_s,
        )
        lease = self._keep(remote, hashes, leased)

        async def prepared(ticket: Ticket) -> wire.Ended:
            with self._cancelling(ticket, number):
                return await self._calls.answer(ended, wire.Ended)

        lease.preparation = self._begin(remote, lease.hashes, prepared)
        return lease

    async def warm(self, instance: Instance, hashes: tuple[bytes, ...]) -> Ticket:
        """Bring pages to DRAM that SSD alone has. Nobody owns them there, and it is no demand."""
        remote = self._check_open(instance)
        self._check_hashes(hashes)

        def request(number: int) -> wire.Warm:
            return wire.Warm(number, remote.number, hashes)

        return self._begin(remote, hashes, lambda ticket: self._ask(ticket, request))

    async def restore(
        self, lease: PrefixLease, destinations: dict[bytes, int], ready: object | None = None
    ) -> Ticket:
        """Check a restore here; the rest happens behind the ticket."""
        check_ready(ready)
        remote = self._check_open(lease.instance)
        check_destinations(lease, destinations)
        assert isinstance(lease, RemoteLease), "a lease of another manager's instance"
        handle = lease.number
        self._spend(lease)
        if not lease.hashes:
            return self._begin(remote, (), _missed)
        hashes, indices = tuple(destinations), tuple(map(int, destinations.values()))
        move = Move(
            remote,
            tuple(destinations.items()),
            self._restore,
            saves=False,
            request=lambda number, event: wire.Restore(number, handle, hashes, indices, event),
        )

        async def moved(ticket: Ticket) -> wire.Ended:
            try:
                return await self._move(move, ready, ticket)
            except OrbitError:  # the daemon may not have been asked, or may have refused
                self._calls.tell(wire.Release(self._calls.next_number(), handle))
                raise

        return self._begin(remote, hashes, moved)

    async def flush(self, *, evict_dram: bool) -> Flushed:
        """As the manager's, of all that the daemon holds."""
        ended = await self._calls.ask(
            lambda number: wire.Flush(number, evict_dram), wire.FlushEnded, self._long_deadline_s
        )
        return ended.flushed

    async def status(self) -> wire.DaemonStatus:
        """Take a snapshot of the daemon."""
        return (await self._calls.ask(wire.GetStatus, wire.Status, self._deadline_s)).status

    async def begin_trace(self, file: BinaryIO, *, digests: bool, payloads: bool) -> None:
        """Let the daemon record to a regular file, which stays the caller's to close."""
        await self._calls.ask(
            lambda number: wire.BeginTrace(number, digests, payloads),
            wire.Done,
            self._deadline_s,
            [file.fileno()],
        )

    async def end_trace(self) -> TraceTotals:
        """End the recording; all of it is in the file then."""
        ended = await self._calls.ask(wire.EndTrace, wire.TraceEnded, self._long_deadline_s)
        return ended.totals

    async def statistics(self) -> ManagerStatistics:
        """Take a snapshot of what the daemon's core holds."""
        return (await self.status()).statistics

    async def leaks(self) -> list[str]:
        """What is not as it must be at rest, in the daemon and here."""
        found = list((await self._calls.ask(wire.GetLeaks, wire.Leaks, self._deadline_s)).found)
        if self._calls.waiting:
            found.append(f"{self._calls.waiting} requests without an answer")
        return found

    # Saves and restores -------------------------------------------------------------------

    def _begin(
        self,
        remote: RemoteInstance,
        hashes: tuple[bytes, ...],
        work: Callable[[Ticket], Coroutine[Any, Any, wire.Ended]],
    ) -> Ticket:
        """Make the ticket of a request, and let it end as its work does."""
        outcome: list[Outcome] = []
        ticket = Ticket(lambda _done, _not_done: outcome[0])
        part = ticket.part(hashes)
        ticket.seal()
        remote.tickets.add(ticket)
        ticket.when_done(lambda: remote.tickets.discard(ticket))

        async def finish() -> None:
            try:
                ended = await work(ticket)
            except OrbitError as error:
                part.fail(error)
            except BaseException as error:
                part.fail(Cancelled(f"the client failed: {error!r}"))
                raise
            else:
                ready = None if remote.tensors.device is None else PastEvent()
                outcome.append(wire.outcome_of(ended, ready))
                part.settle(done=())

        task = self._loop.create_task(finish())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return ticket

    async def _move(self, move: Move, ready: object | None, ticket: Ticket) -> wire.Ended:
        """Wait for the engine's event, then ask the daemon to save or restore."""
        mirror = move.instance.mirror
        event = await self._follow(move, ready)
        if mirror and move.saves:
            await move.lane.run(mirror.take, [index for _, index in move.pages])
        try:
            ended = await self._ask(
                ticket, lambda number: move.request(number, event.handle if event else b"")
            )
        finally:
            if event and move.instance.events:
                move.instance.events.give_back(event)
        if mirror and not move.saves:
            done = set(ended.done)
            await move.lane.run(mirror.give, [i for page, i in move.pages if page in done])
        return ended

    async def _follow(self, move: Move, ready: object | None) -> Any:  # noqa: ANN401 - see ipc.py
        """Order the move after the engine's event: by a shared event on a GPU, else by waiting."""
        if ready is None:
            return None
        handle = getattr(ready, "cuda_event", getattr(ready, "ptr", None))
        events = move.instance.events
        if events is not None and isinstance(handle, int):
            return await move.lane.run(events.record_after, handle) if handle else None
        try:
            # A host's event is waited for here: in the daemon it could hold up everybody.
            await move.lane.reached(ready)
        except Exception as error:
            raise EngineFault(f"the engine's event failed: {error!r}") from error
        return None

    async def _ask(self, ticket: Ticket, request: Callable[[int], wire.Request]) -> wire.Ended:
        """Ask for what ends with a ticket, however long that takes."""
        number = self._calls.next_number()
        with self._cancelling(ticket, number):
            return await self._calls.ask(lambda _: request(number), wire.Ended, None)

    @contextlib.contextmanager
    def _cancelling(self, ticket: Ticket, number: int) -> Iterator[None]:
        """Let a cancelled ticket cancel its request."""
        if ticket.cancelled:
            raise Cancelled("the request was cancelled")

        def cancel(_: object) -> None:
            self._calls.cancel(number)

        cancelled = ticket.cancellation()
        cancelled.add_done_callback(cancel)
        try:
            yield
        finally:
            cancelled.remove_done_callback(cancel)

    def _check_hashes(self, hashes: tuple[bytes, ...]) -> None:
        check_hashes(hashes)
        check_count(hashes, self._calls.welcome.max_hashes)

    def _check_open(self, instance: Instance) -> RemoteInstance:
        self._calls.check_open()
        if not isinstance(instance, RemoteInstance) or instance not in self._instances:
            raise Closed("the instance is not registered here")
        return instance

    def _release_from_any_thread(self, lease: PrefixLease) -> None:
        if not lease.spent and not self.closing:
            with contextlib.suppress(RuntimeError):  # the loop has ended, and the lease with it
                self._loop.call_soon_threadsafe(self._release, lease)

    def _release(self, lease: PrefixLease) -> None:
        if lease.spent:
            return
        self._spend(lease)
        assert isinstance(lease, RemoteLease)
        self._calls.tell(wire.Release(self._calls.next_number(), lease.number))

    def _keep(
        self, remote: RemoteInstance, hashes: tuple[bytes, ...], leased: wire.Leased
    ) -> RemoteLease:
        """Keep a lease for as long as the daemon does."""
        lease = RemoteLease(remote, hashes[: leased.pages], leased, self._release_from_any_thread)
        if not lease.spent:
            lease.expiry = self._loop.call_later(
                self._calls.welcome.lease_ttl_s, self._expire, lease
            )
            self._leases.add(lease)
        return lease

    def _expire(self, lease: PrefixLease) -> None:
        lease.expired = True
        self._release(lease)

    def _spend(self, lease: PrefixLease) -> None:
        lease.spent = True
        self._leases.discard(lease)
        if lease.expiry:
            lease.expiry.cancel()


async def _missed(_: Ticket) -> wire.Ended:
    """What a restore of nothing comes to, which the daemon need not be asked for."""
    return wire.Ended(0, "miss", (), (), ())


class Client(Front[Session]):
    """The manager's interface, carried out by the daemon: an engine does not know which it has.

    Pages in shared memory of ``allocate``, and pages on a GPU, are read and written by the daemon
    where they are. Other host tensors are copied to and from a mirror, page by page, which takes
    host memory for every page that was ever moved. A request that names more than 16,384 pages
    raises ``ImpossibleRequest``. After ``SessionLost`` all handles are void: an
    engine goes on without, or makes a new client and registers again.

    Args:
        socket: Of the daemon. None: where ``orbitkv-cache-manager`` listens by default.
        deadline_s: For an answer to what the daemon does at once, and for a sign of life while a
            ticket is open.
        long_deadline_s: For ``register``, ``unregister`` and ``flush``.

    Raises:
        SessionLost: nobody serves the socket, or refuses the session.
    """

    def __init__(
        self,
        socket: str | Path | None = None,
        *,
        deadline_s: float = 10.0,
        long_deadline_s: float = 300.0,
    ) -> None:
        path = Path(socket) if socket is not None else default_socket()
        session = Session(path, deadline_s=deadline_s, long_deadline_s=long_deadline_s)
        super().__init__(session, name="orbitkv-client")

    def allocate(self, geometry: Geometry, pages: int) -> dict[str, npt.NDArray[Any]]:
        """Zeroed host tensors of a geometry that the daemon can reach without a copy.

        bfloat16 and float8_e4m3fn come as uint16 and uint8. The memory goes when the client is
        closed and the last array is gone.
        """
        memory, tensors = allocate_tensors(geometry, pages)
        self.core.memories.append(memory)
        return tensors

    def status(self) -> wire.DaemonStatus:
        """Take a snapshot of the daemon."""
        return self._call(self.core.status())

    def begin_trace(self, file: BinaryIO, *, digests: bool = False, payloads: bool = False) -> None:
        """Record what the daemon does from now on, until ``end_trace`` or the client's end.

        Args:
            file: A regular one, open for writing; the daemon writes to it, not to a path.
            digests: Hash what each stage gives, where that lies in host memory.
            payloads: Record the bytes of the pages that saves read, too.

        Raises:
            Closed: another trace is being recorded.
        """
        self._call(self.core.begin_trace(file, digests=digests, payloads=payloads))

    def end_trace(self) -> TraceTotals:
        """End the recording, and tell what it came to."""
        return self._call(self.core.end_trace())
