"""Sessions: who may speak to the daemon, how many at once, and how they all end."""

from __future__ import annotations

import asyncio
import os
import socket
import time
from collections.abc import Callable

import structlog

from orbitkv.errors import (
    SessionLost,
    Unavailable,
)
from orbitkv.runtime import wire
from orbitkv.runtime.connection import Connection, peer_credentials
from orbitkv.runtime.core import Core
from orbitkv.runtime.host import Host
from orbitkv.runtime.served import ServedSession, farewell
from orbitkv.stages.ticket import Ticket

_MESSAGE_S = 30.0  # for the rest of a message that has begun
_ACCEPT_AGAIN_S = 0.1


class Sessions:
    """All sessions of one daemon.

    Args:
        core: Entered, on the running loop.
        devices: Ordinals of the GPUs that tensors may be on; None: all.
        credentials: Tells pid, uid and gid of a socket's other end.
        observe: Told of each save and restore that has ended, and how many seconds it took.

    Attributes:
        host: What they share.
    """

    def __init__(
        self,
        core: Core,
        *,
        max_sessions: int,
        devices: frozenset[int] | None,
        log: structlog.stdlib.BoundLogger,
        credentials: Callable[[socket.socket], tuple[int, int, int]] = peer_credentials,
        observe: Callable[[str, float], None] = lambda _outcome, _seconds: None,
    ) -> None:
        self.host = Host(core, devices, log, observe, self.status)
        self._ended = 0
        self._refused = 0
        self._max_sessions = max_sessions
        self._credentials = credentials
        self._tasks: dict[asyncio.Task[None], ServedSession] = {}
        self._started_s = time.monotonic()
        self._accepting: asyncio.Task[None] | None = None

    @property
    def live(self) -> tuple[ServedSession, ...]:
        """The sessions that have not ended, those that are being drained too."""
        return tuple(self._tasks.values())

    def listen(self, listener: socket.socket) -> None:
        """Take sessions from a listening socket, until ``stop_accepting``."""
        self._accepting = asyncio.get_running_loop().create_task(self._accept(listener))

    async def stop_accepting(self) -> None:
        """Take no new sessions."""
        if self._accepting:
            self._accepting.cancel()
            await asyncio.wait([self._accepting])

    async def drain(self, limit_s: float) -> bool:
        """Take no new saves, restores and leases, and wait for those under way.

        Returns:
            Whether all had ended within the limit; else the rest has been cancelled.
        """
        self.host.draining = True
        deadline_s = time.monotonic() + limit_s
        while tickets := [t for session in self.live for t in session.tickets.values()]:
            left_s = deadline_s - time.monotonic()
            if left_s <= 0:
                for ticket in tickets:
                    ticket.cancel()
                return False
            waiting = [asyncio.ensure_future(_end_of(ticket)) for ticket in tickets]
            _, late = await asyncio.wait(waiting, timeout=left_s)
            for task in late:
                task.cancel()
        return True

    async def close(self, reason: str) -> None:
        """Tell every client why, and end its session."""
        for session in self.live:
            session.end(SessionLost(reason))
        while self._tasks:
            await asyncio.wait(self._tasks)

    async def status(self) -> wire.DaemonStatus:
        """Take a snapshot of the daemon."""
        sessions = self.live
        return wire.DaemonStatus(
            pid=os.getpid(),
            incarnation=self.host.incarnation,
            up_s=time.monotonic() - self._started_s,
            sessions=len(sessions),
            instances=sum(len(session.instances) for session in sessions),
            leases=sum(session.standing for session in sessions),
            tickets=sum(len(session.tickets) for session in sessions),
            ended_sessions=self._ended,
            refused_sessions=self._refused,
            counters=dict(self.host.counters),
            statistics=await self.host.core.statistics(),
        )

    async def _accept(self, listener: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                sock, _ = await loop.sock_accept(listener)
            except OSError as error:  # no descriptor is free
                self.host.log.warning("session_not_accepted", reason=str(error))
                await asyncio.sleep(_ACCEPT_AGAIN_S)
                continue
            self.take(sock)

    def take(self, sock: socket.socket) -> None:
        """Serve a connected socket, or tell its peer why not."""
        pid, uid, _ = self._credentials(sock)
        connection: Connection[wire.Request] = Connection(sock, wire.REQUESTS, message_s=_MESSAGE_S)
        reason = None
        if uid not in (0, os.geteuid()):
            reason = f"user {uid} may not use this daemon; accepted: {os.geteuid()}, 0"
        elif len(self._tasks) >= self._max_sessions:
            reason = f"{len(self._tasks)} sessions are open; accepted: {self._max_sessions}"
        if reason:
            self._refused += 1
            self.host.log.warning("session_refused", pid=pid, uid=uid, reason=reason)
            farewell(connection, Unavailable(reason))
            return
        session = ServedSession(self.host, connection, pid)
        task = asyncio.get_running_loop().create_task(session.serve())
        self._tasks[task] = session
        task.add_done_callback(self._forget)

    def _forget(self, task: asyncio.Task[None]) -> None:
        del self._tasks[task]
        self._ended += 1
        if not task.cancelled() and (error := task.exception()):
            self.host.log.error("session_failed", exc_info=error)


async def _end_of(ticket: Ticket) -> None:
    await ticket
