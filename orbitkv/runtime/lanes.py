"""Lanes: where a node's work is ordered, and the only place that waits for it."""

from __future__ import annotations

import asyncio
import functools
import queue
import threading
from collections.abc import Callable, Coroutine
from typing import Any, ParamSpec, Protocol, TypeVar, runtime_checkable

P = ParamSpec("P")
T = TypeVar("T")


class Submitted(asyncio.Future[T]):
    """The end of work, I/O or DMA that nobody can call back.

    It refuses to be cancelled, so that whoever waits for it, and is cancelled, hears of that only
    when it is over. Until then the device may touch the buffer, and its lease must not be released.
    """

    def cancel(self, msg: Any | None = None) -> bool:  # noqa: ANN401 - asyncio's signature
        """Refuse."""
        del msg
        return False


async def drained(submitted: Submitted[T]) -> T:
    """Wait until submitted work, I/O or DMA is over, even if the caller is cancelled."""
    try:
        return await submitted
    except asyncio.CancelledError as cancelled:
        assert submitted.done()
        raise cancelled from submitted.exception()


async def drain_task(work: Coroutine[Any, Any, T]) -> T:
    """Wait for work to its end, even if the caller is cancelled meanwhile."""
    submitted: Submitted[None] = Submitted()
    task = asyncio.create_task(work)
    task.add_done_callback(lambda _: submitted.set_result(None))
    await drained(submitted)
    return task.result()


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
        self._work: queue.SimpleQueue[tuple[Submitted[Any], Callable[[], Any]] | None]
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
        submitted: Submitted[T] = Submitted(loop=self._loop)
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
