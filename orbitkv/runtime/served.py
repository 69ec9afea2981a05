"""Served: the daemon's side of one client, unable to hurt another."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import os
import stat
import time
from collections.abc import Callable, Coroutine
from typing import Any

from orbitkv.errors import (
    Closed,
    DestinationError,
    ImpossibleRequest,
    OrbitError,
    ProtocolError,
    SessionLost,
)
from orbitkv.runtime import wire
from orbitkv.runtime.connection import Connection
from orbitkv.runtime.host import (
    MAX_EVENTS,
    MAX_IN_FLIGHT,
    MAX_INSTANCES,
    MAX_LEASES,
    Host,
    ServedInstance,
    check_count,
    too_many,
)
from orbitkv.runtime.ipc import ImportedEvent
from orbitkv.runtime.leases import PrefixLease
from orbitkv.runtime.tensors import Imported
from orbitkv.stages.ticket import Ticket

_HELLO_S = 5.0  # for the first message
_TURN_MESSAGES = 16  # of one session, before others have theirs


class ServedSession:
    """One client's session: its requests, and everything that goes with it when it ends.

    Attributes:
        instances, leases, tickets: What the client holds, by handle, and by request.
    """

    def __init__(self, host: Host, connection: Connection[wire.Request], pid: int) -> None:
        self.pid = pid
        self.instances: dict[int, ServedInstance] = {}
        self.leases: dict[int, PrefixLease] = {}
        self.tickets: dict[int, Ticket] = {}
        self._host = host
        self._core = host.core
        self._messages = 0
        self._memories = 0
        self._number = host.next_session()
        self._tracing = False
        self._connection = connection
        self._events: dict[tuple[bytes, int], ImportedEvent] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._log = host.log.bind(pid=pid)
        self._handlers: dict[type[wire.Request], Callable[[Any], Coroutine[Any, Any, None]]] = {
            wire.Ping: self._ping,
            wire.Publish: self._publish,
            wire.Query: self._query,
            wire.Prepare: self._prepare,
            wire.Warm: self._warm,
            wire.Release: self._release,
            wire.Restore: self._restore,
            wire.Cancel: self._cancel,
            wire.GetStatus: self._status,
            wire.GetLeaks: self._leaks,
            wire.BeginTrace: self._begin_trace,
        }
        self._long_handlers: dict[
            type[wire.Request], Callable[[Any], Coroutine[Any, Any, None]]
        ] = {
            wire.Unregister: self._unregister,
            wire.Flush: self._flush,
            wire.EndTrace: self._end_trace,
        }

    @property
    def standing(self) -> int:
        """Leases that have neither ended nor expired."""
        return sum(not lease.spent for lease in self.leases.values())

    async def serve(self) -> None:
        """Serve until the client goes, or breaks a rule; then give back all that it held."""
        try:
            await self._welcome()
            while (message := await self._receive()) is not None:
                await self._take(message)
        except (ProtocolError, TimeoutError) as error:
            self._log.warning("session_ended", reason=str(error) or "too slow")
            self.end(error if isinstance(error, OrbitError) else ProtocolError("too slow"))
        except SessionLost as error:
            self._log.info("session_ended", reason=str(error))
            self.end(error)
        finally:
            self._connection.close()
            await self._give_back()

    def end(self, error: OrbitError) -> None:
        """End the session; its client is told why, if it reads."""
        farewell(self._connection, error)

    async def _receive(self) -> wire.Request | None:
        self._messages += 1
        if not self._messages % _TURN_MESSAGES:
            await asyncio.sleep(0)
        return await self._connection.receive()

    async def _welcome(self) -> None:
        async with asyncio.timeout(_HELLO_S):
            hello = await self._connection.receive()
        if hello is None:
            raise SessionLost("closed before its first message")
        if not isinstance(hello, wire.Hello) or hello.magic != "orbitkv":
            raise ProtocolError("the first message is no hello")
        if hello.version != wire.VERSION:
            raise ProtocolError(
                f"the client speaks version {hello.version}; the daemon speaks {wire.VERSION}"
            )
        self._connection.send(
            wire.Welcome(
                hello.number,
                wire.VERSION,
                self._host.incarnation,
                os.getpid(),
                MAX_IN_FLIGHT,
                wire.MAX_HASHES,
                self._core.config.lease_ttl_s,
            )
        )
        self._log.info("session_began")

    async def _take(self, message: wire.Request) -> None:
        kind = type(message)
        if isinstance(message, wire.Register):
            self._begin_register(message)
        elif kind in self._handlers:
            await self._guarded(self._handlers[kind], message)
        elif kind in self._long_handlers:
            self._begin(self._long_handlers[kind], message)
        else:
            raise ProtocolError(f"{kind.__name__.lower()} in the middle of a session")

    def _begin(
        self, handler: Callable[[Any], Coroutine[Any, Any, None]], message: wire.Request
    ) -> None:
        """Carry a request out beside those that come after it, unless too many are."""
        if len(self._tasks) >= MAX_IN_FLIGHT:
            self._reply(wire.Refused(message.number, wire.fault_of(too_many())))
            return
        task = asyncio.get_running_loop().create_task(self._guarded(handler, message))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _begin_register(self, message: wire.Register) -> None:
        """Take its descriptors before the next message comes, which may have some too."""
        shared = sum(memory.kind == "shared" for memory in message.memories)
        descriptors: list[int] = []
        try:
            descriptors = self._connection.take_descriptors(shared)
            self._check_registration(message, shared)
        except OrbitError as error:
            for descriptor in descriptors:
                os.close(descriptor)
            self._reply(wire.Refused(message.number, wire.fault_of(error)))
            return
        self._memories += shared
        self._begin(functools.partial(self._register, descriptors), message)

    async def _guarded(
        self, handler: Callable[[Any], Coroutine[Any, Any, None]], message: wire.Request
    ) -> None:
        """Answer whatever the handler raises; only a client that has gone ends the session."""
        try:
            await handler(message)
        except SessionLost:
            return  # which the next receive tells
        except OrbitError as error:
            self._reply(wire.Refused(message.number, wire.fault_of(error)))
        except Exception as error:  # noqa: BLE001 - a bug in one call must not end the others
            self._log.error("request_failed", request=type(message).__name__, exc_info=error)
            fault = wire.Fault("OrbitError", f"the daemon failed: {error!r}")
            self._reply(wire.Refused(message.number, fault))

    def _reply(self, reply: wire.Reply) -> None:
        try:
            self._connection.send(reply)
        except ProtocolError as error:  # longer than a message may be
            self._connection.send(wire.Refused(reply.number, wire.fault_of(error)))
        except SessionLost:
            pass

    def _check_draining(self) -> None:
        if self._host.draining:
            raise Closed("the daemon is ending, and takes no new work")

    def _instance(self, handle: int) -> ServedInstance:
        served = self.instances.get(handle)
        if served is None or served.leaving:
            raise self._host.stale(handle, "instance")
        return served

    # Requests -----------------------------------------------------------------------------

    async def _ping(self, message: wire.Ping) -> None:
        self._reply(wire.Done(message.number))

    def _check_registration(self, message: wire.Register, shared: int) -> None:
        self._check_draining()
        if len(self._tasks) >= MAX_IN_FLIGHT:
            raise too_many()
        if (message.rank, message.ranks) != (0, 1):
            seen = f"rank {message.rank} of {message.ranks}"
            raise ImpossibleRequest(f"{seen} of one instance; accepted: rank 0 of 1")
        if len(self.instances) >= MAX_INSTANCES:
            raise ImpossibleRequest(f"more than {MAX_INSTANCES} instances of one session")
        if self._memories + shared > self._host.max_memories:
            raise ImpossibleRequest(
                f"{self._memories} shared memories of one session, and {shared} more; "
                f"accepted: {self._host.max_memories}"
            )

    async def _register(self, descriptors: list[int], message: wire.Register) -> None:
        """Map the tensors off the loop, and register them."""
        try:
            imported = await asyncio.to_thread(
                Imported,
                message.geometry,
                message.memories,
                message.tensors,
                descriptors,
                self._host.devices,
            )
        except BaseException:
            self._memories -= len(descriptors)
            raise
        try:
            instance = await self._core.register(message.geometry, imported.tensors, message.model)
        except BaseException:
            await self._unmap(imported)
            raise
        handle = self._host.next_handle()
        self.instances[handle] = ServedInstance(instance, imported, self.pid)
        self._log.info("instance_registered", namespace=instance.namespace)
        self._reply(wire.Registered(message.number, handle, instance.namespace))

    async def _unregister(self, message: wire.Unregister) -> None:
        served = self._instance(message.instance)
        served.leaving = True
        await self._drop(served)
        del self.instances[message.instance]
        self._reply(wire.Done(message.number))

    async def _publish(self, message: wire.Publish) -> None:
        served = self._instance(message.instance)
        self._check_ticket(message)
        ready = await self._ready(served, message.ready)
        pages = tuple(zip(message.hashes, message.indices, strict=True))
        self._follow(message.number, await self._core.publish(served.instance, pages, ready))

    async def _query(self, message: wire.Query) -> None:
        served = self._instance(message.instance)
        self._check_lease()
        check_count(message)
        lease = await self._core.query(served.instance, message.hashes)
        counters = self._host.counters
        counters["queries"] += 1
        counters["queried_pages"] += len(message.hashes)
        counters["found_pages"] += len(lease.hashes)
        for tier, count in self._hand_over(message.number, lease).items():
            counters[f"found_objects_{tier}"] += count

    async def _prepare(self, message: wire.Prepare) -> None:
        served = self._instance(message.instance)
        self._check_lease()
        check_count(message)
        self._check_number(message.ticket)
        lease = await self._core.prepare(served.instance, message.hashes)
        self._hand_over(message.number, lease)
        if lease.preparation:
            self._follow(message.ticket, lease.preparation)

    async def _warm(self, message: wire.Warm) -> None:
        served = self._instance(message.instance)
        check_count(message)
        self._check_number(message.number)
        self._follow(message.number, await self._core.warm(served.instance, message.hashes))

    def _check_lease(self) -> None:
        self._check_draining()
        if len(self.leases) >= MAX_LEASES:  # those that ended by themselves do not count
            self.leases = {handle: ls for handle, ls in self.leases.items() if not ls.spent}
        if len(self.leases) >= MAX_LEASES:
            raise ImpossibleRequest(f"more than {MAX_LEASES} leases of one session")

    def _hand_over(self, number: int, lease: PrefixLease) -> dict[str, int]:
        """Tell the client of a lease, and return its objects by tier."""
        handle = 0
        if not lease.spent:
            handle = self._host.next_handle()
            self.leases[handle] = lease
        tiers = {str(tier): count for tier, count in lease.tiers().items() if count}
        self._reply(wire.Leased(number, handle, len(lease.hashes), tiers))
        return tiers

    async def _release(self, message: wire.Release) -> None:
        if lease := self.leases.pop(message.lease, None):
            lease.release()

    async def _restore(self, message: wire.Restore) -> None:
        lease = self.leases.get(message.lease)
        if lease is None:
            raise self._host.stale(message.lease, "lease")
        self._check_ticket(message)
        served = next(s for s in self.instances.values() if s.instance is lease.instance)
        ready = await self._ready(served, message.ready)
        destinations = dict(zip(message.hashes, message.indices, strict=True))
        ticket = await self._core.restore(lease, destinations, ready)
        self.leases.pop(message.lease, None)
        self._follow(message.number, ticket)

    async def _cancel(self, message: wire.Cancel) -> None:
        if ticket := self.tickets.get(message.number):
            ticket.cancel()

    async def _flush(self, message: wire.Flush) -> None:
        flushed = await self._core.flush(evict_dram=message.evict_dram)
        self._reply(wire.FlushEnded(message.number, flushed))

    async def _status(self, message: wire.GetStatus) -> None:
        self._reply(wire.Status(message.number, await self._host.status()))

    async def _leaks(self, message: wire.GetLeaks) -> None:
        self._reply(wire.Leaks(message.number, tuple(await self._core.leaks())))

    async def _begin_trace(self, message: wire.BeginTrace) -> None:
        """Record to the client's file, which this process needs no right to open."""
        (descriptor,) = self._connection.take_descriptors(1)
        file = os.fdopen(descriptor, "wb")
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):  # else its reader could hold us up
            file.close()
            raise ProtocolError("a trace to what is no regular file")
        await self._core.begin_trace(file, digests=message.digests, payloads=message.payloads)
        self._tracing = True
        self._reply(wire.Done(message.number))

    async def _end_trace(self, message: wire.EndTrace) -> None:
        if not self._tracing:
            raise Closed("this session records no trace")
        self._tracing = False
        self._reply(wire.TraceEnded(message.number, await self._core.end_trace()))

    # Tickets, and the end -----------------------------------------------------------------

    def _check_ticket(self, message: wire.Publish | wire.Restore) -> None:
        check_count(message)
        self._check_number(message.number)
        if len(message.hashes) != len(message.indices):
            seen = f"{len(message.hashes)} hashes, {len(message.indices)} page indices"
            raise DestinationError(f"{seen}; accepted: as many")

    def _check_number(self, number: int) -> None:
        """Refuse one more ticket where there can be none."""
        self._check_draining()
        if len(self.tickets) >= MAX_IN_FLIGHT:
            raise too_many()
        if number in self.tickets:
            raise ProtocolError(f"request {number} comes twice")

    async def _ready(self, served: ServedInstance, handle: bytes) -> ImportedEvent | None:
        """The engine's event, opened once for all requests that name it."""
        ordinal = served.imported.ordinal
        if not handle:
            return None
        if ordinal is None:
            raise ProtocolError("an event of a GPU for tensors in host memory")
        known = self._events.get((handle, ordinal))
        if known is None:
            if len(self._events) >= MAX_EVENTS:
                raise ImpossibleRequest(f"more than {MAX_EVENTS} events of one session")
            known = await asyncio.to_thread(ImportedEvent, handle, ordinal)
            self._events[handle, ordinal] = known
        return known

    def _follow(self, number: int, ticket: Ticket) -> None:
        self.tickets[number] = ticket
        if self._core.trace is not None:
            self._core.trace.came_from(ticket, self.pid, self._number, number)
        began_s = time.perf_counter()

        def tell() -> None:
            del self.tickets[number]
            outcome = ticket.result()
            self._host.observe(type(outcome).__name__.lower(), time.perf_counter() - began_s)
            self._reply(wire.ended_of(number, outcome))

        ticket.when_done(tell)

    async def _drop(self, served: ServedInstance) -> None:
        """Take an instance from the core, once its work has ended; then its mappings."""
        for handle, lease in tuple(self.leases.items()):
            if lease.instance is served.instance:
                del self.leases[handle]
                lease.release()
        with contextlib.suppress(Closed):
            await self._core.unregister(served.instance)
        await self._unmap(served.imported)
        self._log.info("instance_unregistered", namespace=served.instance.namespace)

    async def _unmap(self, imported: Imported) -> None:
        await asyncio.to_thread(imported.close)
        self._memories -= imported.shared

    async def _give_back(self) -> None:
        """Let go of all that the client held, each thing when the last I/O on it has ended."""
        for ticket in tuple(self.tickets.values()):
            ticket.cancel()
        for lease in self.leases.values():
            lease.release()
        self.leases.clear()
        if self._tracing:
            self._tracing = False
            await self._core.end_trace()
        while self._tasks:  # a registration under way is one of those below when it has ended
            await asyncio.wait(self._tasks)
        for served in self.instances.values():
            await self._drop(served)
        self.instances.clear()
        for event in self._events.values():
            await asyncio.to_thread(event.close)
        self._events.clear()


def farewell(connection: Connection[wire.Request], error: OrbitError) -> None:
    """Tell why, as far as the socket takes it now, and close."""
    with contextlib.suppress(OrbitError):
        connection.send(wire.Refused(0, wire.fault_of(error)))
    connection.close()
