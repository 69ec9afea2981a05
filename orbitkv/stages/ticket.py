"""Ticket: the handle of a submitted save or restore, and the parts that its batches settle."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import threading
from collections.abc import Callable, Generator, Iterable
from dataclasses import dataclass, field
from typing import Any

from orbitkv.errors import Cancelled, OrbitError

_CANCELLING = threading.Lock()  # between whoever cancels and whoever waits to hear of it


@dataclass(frozen=True, slots=True)
class Saved:
    """A save ended. Every page named is in one of the three.

    Attributes:
        stored: Hashes whose objects are now resident.
        resident: Hashes that were resident before, and were not copied.
        dropped: Hashes that could not be stored, and may be published again.
    """

    stored: tuple[bytes, ...]
    resident: tuple[bytes, ...]
    dropped: tuple[bytes, ...]


@dataclass(frozen=True, slots=True)
class Restored:
    """A restore ended, and at least one page was placed.

    Attributes:
        restored: Hashes whose pages hold the saved bytes.
        missed: Hashes whose pages must be recomputed, whatever their destinations hold now.
        ready: Of pages on a GPU: an event, whose ``wait(stream)`` lets a stream of the engine's
            read them. It has happened already. None where a host wrote them.
    """

    restored: tuple[bytes, ...]
    missed: tuple[bytes, ...]
    ready: Any = field(default=None, compare=False)


@dataclass(frozen=True, slots=True)
class Miss:
    """A restore ended, and no page was placed."""

    missed: tuple[bytes, ...]


@dataclass(frozen=True, slots=True)
class Warmed:
    """A warming or a preparation ended.

    Attributes:
        warm: Hashes whose pages are in DRAM, whether they were before or not.
        missed: Hashes whose pages no tier has, or could not be read.
    """

    warm: tuple[bytes, ...]
    missed: tuple[bytes, ...]


@dataclass(frozen=True, slots=True)
class Failed:
    """A request ended with a fault. Whatever it had submitted has run to its end."""

    error: OrbitError


Outcome = Saved | Restored | Miss | Warmed | Failed


class Part:
    """One batch's share of a ticket: settled exactly once, however the batch ends.

    The ticket hears of it when nobody holds it any more.
    """

    __slots__ = ("_ended", "_holds", "hashes", "ticket")

    def __init__(self, ticket: Ticket, hashes: tuple[bytes, ...]) -> None:
        self.ticket = ticket
        self.hashes = hashes
        self._ended: tuple[frozenset[bytes], OrbitError | None] | None = None
        self._holds = 0

    @property
    def settled(self) -> bool:
        """Whether the part has ended."""
        return self._ended is not None

    def settle(self, *, done: Iterable[bytes]) -> None:
        """Tell which of the part's pages were stored or placed. The others were not."""
        self._end(frozenset(done), None)

    def fail(self, error: OrbitError) -> None:
        """End the part with a fault, which ends the whole ticket once its other parts are over."""
        self._end(frozenset(), error)

    def hold(self) -> None:
        """Keep the ticket from ending before the matching ``let_go``: a second batch is at work."""
        self._holds += 1

    def let_go(self) -> None:
        """End one hold."""
        self._holds -= 1
        self._tell()

    def _end(self, done: frozenset[bytes], error: OrbitError | None) -> None:
        if self._ended is None:
            self._ended = (done, error)
            self._tell()

    def _tell(self) -> None:
        if self._ended is not None and not self._holds:
            self.ticket._settle(self, *self._ended)  # noqa: SLF001 - two halves of one


class Ticket:
    """A submitted request. It ends only when none of its batches is under way any more.

    Wait for it from a thread with ``result()``, or on any event loop with ``await``.

    Args:
        conclude: Makes the outcome from the pages done and not done, in the order asked for.

    Attributes:
        cancelled: Batches that have not been submitted must be let go.
        ready: The last event of a GPU's stream that its parts have come to.
    """

    def __init__(self, conclude: Callable[[tuple[bytes, ...], tuple[bytes, ...]], Outcome]) -> None:
        self._conclude = conclude
        self._future: concurrent.futures.Future[Outcome] = concurrent.futures.Future()
        self._hashes: list[bytes] = []
        self._done: set[bytes] = set()
        self._not_done: set[bytes] = set()
        self._open_parts = 0
        self._sealed = False
        self._error: OrbitError | None = None
        self.ready: Any = None
        self.cancelled = False
        self._on_cancel: list[Callable[[], None]] = []

    def part(self, hashes: tuple[bytes, ...]) -> Part:
        """Open a share for one batch. Several parts may name one page: all must be done."""
        assert not self._sealed, "a sealed ticket takes no more parts"
        self._hashes += hashes
        self._open_parts += 1
        return Part(self, hashes)

    def seal(self) -> None:
        """No more parts will come: the ticket may end."""
        self._sealed = True
        self._end_if_over()

    def fail(self, error: OrbitError) -> None:
        """Record a fault that belongs to no batch. The first fault is the outcome's."""
        self._error = self._error or error

    def cancel(self) -> None:
        """Stop what has not been submitted to a lane. May be called from any thread."""
        with _CANCELLING:
            self.cancelled = True
            calls, self._on_cancel = self._on_cancel, []
        for call in calls:
            call()

    def cancellation(self) -> asyncio.Future[None]:
        """A future of the running loop that ends when the ticket is cancelled."""
        loop = asyncio.get_running_loop()
        ended: asyncio.Future[None] = loop.create_future()

        def end() -> None:
            if not ended.done():
                ended.set_result(None)

        def tell() -> None:
            with contextlib.suppress(RuntimeError):  # the loop has been closed since
                loop.call_soon_threadsafe(end)

        with _CANCELLING:
            if not self.cancelled:
                self._on_cancel.append(tell)
                return ended
        tell()
        return ended

    @property
    def done(self) -> bool:
        """Whether the ticket has ended."""
        return self._future.done()

    def result(self, timeout_s: float | None = None) -> Outcome:
        """Wait for the outcome, from any thread but the manager's loop.

        Raises:
            TimeoutError: the ticket has not ended within ``timeout_s``; it goes on.
        """
        return self._future.result(timeout_s)

    def when_done(self, call: Callable[[], None]) -> None:
        """Call once the ticket has ended, on the manager's loop; at once if it has."""
        self._future.add_done_callback(lambda _: call())

    def __await__(self) -> Generator[object, None, Outcome]:
        # Shielded: a waiter that goes away does not end the request.
        return asyncio.shield(asyncio.wrap_future(self._future)).__await__()

    def _settle(self, part: Part, done: frozenset[bytes], error: OrbitError | None) -> None:
        self._done |= done
        self._not_done |= set(part.hashes) - done
        self._error = self._error or error
        self._open_parts -= 1
        self._end_if_over()

    def _end_if_over(self) -> None:
        if not self._sealed or self._open_parts or self._future.done():
            return
        if self.cancelled:
            self._error = self._error or Cancelled("the request was cancelled")
        if self._error is not None:
            self._future.set_result(Failed(self._error))
            return
        order = tuple(dict.fromkeys(self._hashes))
        whole = self._done - self._not_done
        done = tuple(h for h in order if h in whole)
        not_done = tuple(h for h in order if h not in whole)
        self._future.set_result(self._conclude(done, not_done))
