"""Calls: requests to the daemon, each matched with its answer, or told why there is none."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import socket
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

from orbitkv.errors import DeadlineMissed, OrbitError, ProtocolError, SessionLost
from orbitkv.runtime import wire
from orbitkv.runtime.connection import Connection, peer_credentials

R = TypeVar("R", bound=wire.Reply)


@dataclass(slots=True, eq=False)
class _Waiting:
    """A request without an answer.

    Attributes:
        slots: Where its slot is given back.
        promised: Number of a second answer, which follows unless this one is a refusal.
    """

    replied: asyncio.Future[Any]
    slots: asyncio.Semaphore
    promised: int | None = None


class Calls:
    """One session's requests, on the running loop; use it as an async context manager.

    Args:
        path: The daemon's socket.
        deadline_s: For the daemon to take the session, and for a sign of life while a request is
            under way.

    Attributes:
        lost: Why the session is over; None while it stands.
        welcome: What the daemon said of itself.

    Raises:
        SessionLost: nobody serves the socket, or refuses the session.
    """

    def __init__(self, path: Path, deadline_s: float) -> None:
        self.path = path
        self.lost: SessionLost | None = None
        self._deadline_s = deadline_s
        self._numbers = itertools.count(1)
        self._waiting: dict[int, _Waiting] = {}

    async def __aenter__(self) -> Self:
        self._loop = asyncio.get_running_loop()
        self._heard_s = self._loop.time()
        self._set_slots(1)
        self._connection = await self._connect()
        self._reader = self._loop.create_task(self._read())
        try:
            self.welcome = await self.ask(
                lambda number: wire.Hello(number, wire.VERSION), wire.Welcome, self._deadline_s
            )
        except BaseException:
            self._connection.close()
            await self._reader
            raise
        self._set_slots(self.welcome.max_in_flight)
        self._watcher = self._loop.create_task(self._watch())
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._watcher.cancel()
        self._connection.close()
        await asyncio.wait([self._reader, self._watcher])

    def _set_slots(self, count: int) -> None:
        """Bound what is under way. A call never waits for tickets, which may take for ever."""
        self._tickets, self._answers = asyncio.Semaphore(count), asyncio.Semaphore(count)

    @property
    def waiting(self) -> int:
        """Requests that have no answer yet."""
        return len(self._waiting)

    def next_number(self) -> int:
        """A number that no other request of the session has."""
        return next(self._numbers)

    def check_open(self) -> None:
        """Refuse a call of a session that is over.

        Raises:
            SessionLost: why it is.
        """
        if self.lost is not None:
            raise SessionLost(str(self.lost))

    async def ask(
        self,
        request: Callable[[int], wire.Request],
        answer: type[R],
        deadline_s: float | None,
        descriptors: Sequence[int] = (),
    ) -> R:
        """Send a request as soon as there is a slot, and wait for its answer.

        Args:
            deadline_s: For both. None: for ever.

        Raises:
            OrbitError: what the daemon said.
            DeadlineMissed: it said nothing in time. What it says later is given back.
            SessionLost: it has gone.
        """
        self.check_open()
        message = request(self.next_number())
        async with self._deadline(message, deadline_s):
            return await self._ask(message, answer, descriptors)

    async def ask_twice(
        self, request: Callable[[int, int], wire.Prepare], deadline_s: float
    ) -> tuple[wire.Leased, int, asyncio.Future[Any]]:
        """Ask for a lease, and for what ends as a ticket does, under a number of its own.

        Raises:
            OrbitError: as ``ask``.

        Returns:
            The lease; number and answer of the ticket, which has yet to come.
        """
        self.check_open()
        number = self.next_number()
        message = request(self.next_number(), number)
        async with self._deadline(message, deadline_s):
            await self._tickets.acquire()
            expected = _Waiting(self._loop.create_future(), self._tickets)
            self._waiting[number] = expected
            try:
                leased = await self._ask(message, wire.Leased, promised=number)
            except BaseException:
                if not expected.replied.cancel():
                    expected.replied.exception()  # of a session that was lost: told already
                if message.number not in self._waiting:  # it was refused, or never sent
                    self._forget(number)
                raise
        return leased, number, expected.replied

    async def _ask(
        self,
        message: wire.Request,
        answer: type[R],
        descriptors: Sequence[int] = (),
        promised: int | None = None,
    ) -> R:
        slots = self._tickets if answer is wire.Ended else self._answers
        await slots.acquire()
        try:
            self.check_open()
            self._connection.send(message, descriptors)
        except OrbitError:
            slots.release()
            raise
        waiting = _Waiting(self._loop.create_future(), slots, promised)
        self._waiting[message.number] = waiting
        return await self.answer(waiting.replied, answer)

    @contextlib.asynccontextmanager
    async def _deadline(
        self, message: wire.Request, deadline_s: float | None
    ) -> AsyncIterator[None]:
        try:
            async with asyncio.timeout(deadline_s):
                yield
        except TimeoutError as error:
            what = type(message).__name__.lower()
            raise DeadlineMissed(
                f"the daemon at {self.path}: no answer to {what} in {deadline_s} s"
            ) from error

    async def answer(self, replied: asyncio.Future[Any], kind: type[R]) -> R:
        """Wait for an answer of a kind; raises as ``ask``."""
        reply = await replied
        if isinstance(reply, kind):
            return reply
        if isinstance(reply, wire.Refused):
            raise wire.error_of(reply.fault)
        raise ProtocolError(f"{type(reply).__name__} where {kind.__name__} is the answer")

    def _forget(self, number: int) -> None:
        """Wait no longer for an answer that will not come."""
        if waiting := self._waiting.pop(number, None):
            waiting.slots.release()

    def tell(self, message: wire.Request) -> None:
        """Send what has no answer; to a daemon that has gone, nothing."""
        with contextlib.suppress(SessionLost):
            self._connection.send(message)

    def cancel(self, number: int) -> None:
        """Let go what an unanswered request has not submitted."""
        if number in self._waiting:
            self.tell(wire.Cancel(number))

    async def _connect(self) -> Connection[wire.Reply]:
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        sock.setblocking(False)  # noqa: FBT003 - the socket module's own signature
        try:
            async with asyncio.timeout(self._deadline_s):
                await self._loop.sock_connect(sock, str(self.path))
        except TimeoutError as error:
            sock.close()
            raise SessionLost(f"the daemon at {self.path} takes no session") from error
        except OSError as error:
            sock.close()
            raise SessionLost(
                f"no daemon at {self.path}: {error.strerror or error}; "
                f"start one: orbitkv-cache-manager --socket {self.path}"
            ) from error
        _, uid, _ = peer_credentials(sock)
        if uid not in (0, os.getuid()):
            sock.close()
            raise SessionLost(f"{self.path} is served by user {uid}; accepted: our own, or 0")
        return Connection(sock, wire.REPLIES, lingers=True)  # else why it ended would be lost

    async def _read(self) -> None:
        """Hand every reply to whoever waits for it, until the session is over."""
        try:
            while (reply := await self._connection.receive()) is not None:
                self._heard_s = self._loop.time()
                if reply.number == 0 and isinstance(reply, wire.Refused):
                    self._lose(f"the daemon ended the session: {reply.fault.message}")
                    return
                self._settle(reply)
            self._lose("the daemon has gone")
        except OrbitError as error:
            self._lose(str(error))

    def _settle(self, reply: wire.Reply) -> None:
        waiting = self._waiting.pop(reply.number, None)
        if waiting is None:
            return  # to a sign of life, or to giving back
        waiting.slots.release()
        if waiting.promised is not None and isinstance(reply, wire.Refused):
            self._forget(waiting.promised)
        if not waiting.replied.done():
            waiting.replied.set_result(reply)
        elif isinstance(reply, wire.Leased):  # too late: nobody will ever use it
            self.tell(wire.Release(self.next_number(), reply.lease))
        elif isinstance(reply, wire.Registered):
            self.tell(wire.Unregister(self.next_number(), reply.instance))

    def _lose(self, reason: str) -> None:
        """End the session: every call that waits, and every later one, is told why."""
        if self.lost is not None:
            return
        self.lost = SessionLost(f"{self.path}: {reason}; register again in a new session")
        self._connection.close()
        unanswered, self._waiting = self._waiting, {}
        for waiting in unanswered.values():
            waiting.slots.release()
            if not waiting.replied.done():
                waiting.replied.set_exception(SessionLost(str(self.lost)))

    async def _watch(self) -> None:
        """Ask for a sign of life while a request waits, and end the session where none comes."""
        asked_s: float | None = None
        while self.lost is None:
            await asyncio.sleep(self._deadline_s / 4)
            now_s = self._loop.time()
            if not self._waiting or self._heard_s > now_s - self._deadline_s / 2:
                asked_s = None
            elif asked_s is None:
                asked_s = now_s
                self.tell(wire.Ping(self.next_number()))
            elif self._heard_s > asked_s:
                asked_s = None
            elif now_s - asked_s > self._deadline_s:
                self._lose(f"the daemon gave no sign of life in {self._deadline_s} s")
