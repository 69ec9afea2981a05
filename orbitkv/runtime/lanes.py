"""Lanes: where a node's work is ordered, and the only place that waits for it."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import ParamSpec, Protocol, TypeVar, runtime_checkable

P = ParamSpec("P")
T = TypeVar("T")


async def drained(submitted: asyncio.Future[T]) -> T:
    """Wait until submitted work, I/O or DMA is over, even if the caller is cancelled.

    Until then the device may touch the buffer, so its lease must not be released.
    """
    cancelled: asyncio.CancelledError | None = None
    while not submitted.done():
        try:
            await asyncio.wait([submitted])  # never cancels what it waits for
        except asyncio.CancelledError as error:
            cancelled = error
    if cancelled is not None:
        raise cancelled from submitted.exception()
    return submitted.result()


@runtime_checkable
class BlockingEvent(Protocol):
    """An engine's event that a thread can wait for: ``threading.Event``, a CUDA event."""

    def wait(self) -> object: ...


class HostLane:
    """One host thread: work submitted to it runs in order.

    The thread starts with the first work, and ``close`` waits for the last.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self._thread = ThreadPoolExecutor(1, thread_name_prefix=f"orbitkv-{name}")

    async def start(self) -> None:
        """Nothing to prepare."""

    async def run(self, fn: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run ``fn`` on the lane's thread. A cancelled caller still waits for its end."""
        loop = asyncio.get_running_loop()
        call = functools.partial(fn, *args, **kwargs)
        return await drained(loop.run_in_executor(self._thread, call))

    async def reached(self, event: object) -> None:
        """Wait for the engine's event, in order with this lane's work.

        Raises:
            TypeError: the event is nothing that a thread can wait for.
        """
        if not isinstance(event, BlockingEvent):
            raise TypeError(f"event {event!r}; accepted: an object with wait()")
        await self.run(event.wait)

    async def close(self) -> None:
        """Wait for all submitted work, then end the thread."""
        await asyncio.to_thread(self._thread.shutdown)
