"""Lanes: where a node's work is ordered, and the only place that waits for it."""

from __future__ import annotations

import asyncio
import functools
import queue
import threading
from collections.abc import Callable
from typing import Any, ParamSpec, Protocol, TypeVar, runtime_checkable

P = ParamSpec("P")
T = TypeVar("T")


async def drained(submitted: asyncio.Future[T]) -> T:
    """Wait until submitted work, I/O or DMA is over, even if the caller is cancelled.

    Until then the device may touch the buffer, so its lease must not be released.
    """
    cancelled: asyncio.CancelledError | None = None
    while not submitted.done():
        # A future of our own takes the cancellation, so that what was submitted never does.
        over: asyncio.Future[None] = submitted.get_loop().create_future()
        submitted.add_done_callback(functools.partial(_end, over))
        try:
            await over
        except asyncio.CancelledError as error:
            cancelled = error
    if cancelled is not None:
        raise cancelled from submitted.exception()
    return submitted.result()


def _end(over: asyncio.Future[None], _: asyncio.Future[Any]) -> None:
    if not over.done():
        over.set_result(None)


@runtime_checkable
class BlockingEvent(Protocol):
    """An engine's event that a thread can wait for, such as ``threading.Event``.

    Where it has ``synchronize`` (a CUDA event), that is called: there, ``wait`` only orders a
    stream, and returns at once.
    """

    def wait(self) -> object:
        """Block until the event has happened."""
        ...


class HostLane:
    """One host thread: work submitted to it runs in order.

    Leaner than an executor, whose futures cost more than a small batch's work: one queue in,
    one call into the loop out.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self._work: queue.SimpleQueue[tuple[asyncio.Future[Any], Callable[[], Any]] | None]
        self._work = queue.SimpleQueue()
        self._closed = False
        self._thread = threading.Thread(target=self._serve, name=f"orbitkv {name}", daemon=True)

    async def start(self) -> None:
        """Start the thread."""
        self._loop = asyncio.get_running_loop()
        self._thread.start()

    async def run(self, fn: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run ``fn`` on the lane's thread. A cancelled caller still waits for its end."""
        if self._closed:
            raise RuntimeError(f"lane {self.name} is closed")
        submitted: asyncio.Future[T] = self._loop.create_future()
        self._work.put((submitted, functools.partial(fn, *args, **kwargs)))
        return await drained(submitted)

    async def reached(self, event: object) -> None:
        """Wait for the engine's event, in order with this lane's work."""
        assert isinstance(event, BlockingEvent), "the manager takes no other"
        await self.run(getattr(event, "synchronize", event.wait))

    async def close(self) -> None:
        """Wait for all submitted work, then end the thread. Idempotent."""
        self._closed = True
        self._work.put(None)
        await asyncio.to_thread(self._thread.join)

    def _serve(self) -> None:
        while (entry := self._work.get()) is not None:
            submitted, call = entry
            try:
                result = call()
            except StopIteration as error:  # the one exception that no future takes
                fault = RuntimeError(f"{error!r} was raised on lane {self.name}")
                self._loop.call_soon_threadsafe(submitted.set_exception, fault)
            except Exception as error:  # noqa: BLE001 - handed to whoever submitted it
                self._loop.call_soon_threadsafe(submitted.set_exception, error)
            except BaseException as error:  # noqa: BLE001 - would end the loop, not the request
                fault = RuntimeError(f"{error!r} was raised on lane {self.name}")
                self._loop.call_soon_threadsafe(submitted.set_exception, fault)
            else:
                self._loop.call_soon_threadsafe(submitted.set_result, result)
            del entry, submitted, call  # else an idle lane keeps the last batch alive
