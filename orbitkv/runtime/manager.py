"""Manager: OrbitKV inside an engine's process, and what an engine may ask of any manager."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import threading
from collections.abc import Coroutine, Iterable, Mapping, Sequence
from types import TracebackType
from typing import Any, Generic, Protocol, Self, TypeVar

import uvloop

from orbitkv.config import Config
from orbitkv.errors import Closed
from orbitkv.runtime.core import Core, Flushed, LaneWrapper, ManagerStatistics
from orbitkv.runtime.instance import Instance
from orbitkv.runtime.leases import PrefixLease
from orbitkv.segment import Geometry, ModelIdentity
from orbitkv.stages.ticket import Ticket

T = TypeVar("T")
Pages = Mapping[bytes, int] | Iterable[tuple[bytes, int]]


class Serving(Protocol):
    """What carries out the calls: a core here, or a session with one in a daemon.

    Entered, called and left on the loop of the front that owns it.
    """

    @property
    def closing(self) -> bool:
        """Nothing new is taken any more."""
        ...

    async def __aenter__(self) -> Self: ...

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None: ...

    async def register(
        self, geometry: Geometry, tensors: Mapping[str, Any], model: ModelIdentity
    ) -> Instance:
        """As ``Front.register``; so are the others."""
        ...

    async def unregister(self, instance: Instance) -> None: ...  # noqa: D102

    async def publish(  # noqa: D102
        self, instance: Instance, pages: tuple[tuple[bytes, int], ...], ready: object | None
    ) -> Ticket: ...

    async def query(  # noqa: D102
        self, instance: Instance, hashes: tuple[bytes, ...]
    ) -> PrefixLease: ...

    async def prepare(  # noqa: D102
        self, instance: Instance, hashes: tuple[bytes, ...]
    ) -> PrefixLease: ...

    async def warm(self, instance: Instance, hashes: tuple[bytes, ...]) -> Ticket: ...  # noqa: D102

    async def restore(  # noqa: D102
        self, lease: PrefixLease, destinations: dict[bytes, int], ready: object | None = None
    ) -> Ticket: ...

    async def flush(self, *, evict_dram: bool) -> Flushed: ...  # noqa: D102

    async def statistics(self) -> ManagerStatistics: ...  # noqa: D102

    async def leaks(self) -> list[str]: ...  # noqa: D102


S = TypeVar("S", bound=Serving)


class Front(Generic[S]):
    """The calls of an engine, which may come from any thread or loop.

    Runs an event loop in a thread of its own; every method may be called from any other thread.
    Each method that waits has a twin named ``..._async``, for callers on an event loop. Use it as
    a context manager of either kind.

    Args:
        core: What carries them out.
        name: Of the thread.
    """

    def __init__(self, core: S, *, name: str) -> None:
        self.core = core
        self._calls: dict[concurrent.futures.Future[Any], tuple[Coroutine[Any, Any, Any], ...]] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._fault: BaseException | None = None
        self._started: concurrent.futures.Future[None] = concurrent.futures.Future()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()
        try:
            self._started.result()
        except KeyboardInterrupt:  # what the thread has opened meanwhile is closed by nobody else
            concurrent.futures.wait([self._started])
            if self._started.exception() is None:
                self.close()
            raise

    # For callers: blocking ----------------------------------------------------------------

    def register(
        self, geometry: Geometry, tensors: Mapping[str, Any], *, model: ModelIdentity
    ) -> Instance:
        """Register an engine's paged tensors, one for each slot. Nothing is copied.

        Raises:
            GeometryError: with every difference between a tensor and its declaration.
            ImpossibleRequest: one page is more than the pool, an edge or a budget holds.
        """
        return self._call(self.core.register(geometry, tensors, model))

    def unregister(self, instance: Instance) -> None:
        """Forget an instance, once everything it has under way has ended."""
        self._call(self.core.unregister(instance))

    def publish(
        self,
        instance: Instance,
        pages: Pages,
        *,
        ready: object | None = None,
    ) -> Ticket:
        """Save pages, given as (page hash, page index). They must not change until it has ended.

        Args:
            pages: Pairs, or a mapping of hashes to indices.
            ready: The engine's event, after which the pages hold what is to be saved. None: now.
                Saves are in order: one whose event never happens holds up all behind it.

        Raises:
            DestinationError: a page index is out of range or comes twice; nothing is saved.
        """
        return self._call(self.core.publish(instance, _pairs(pages), ready))

    def query(self, instance: Instance, hashes: Sequence[bytes]) -> PrefixLease:
        """Find the longest prefix that can be restored, and keep it from eviction."""
        return self._call(self.core.query(instance, tuple(hashes)))

    def prepare(self, instance: Instance, hashes: Sequence[bytes]) -> PrefixLease:
        """Like ``query``, but no demand; what SSD alone has is brought to DRAM meanwhile.

        The lease may be restored at any time; its ``preparation`` ends as ``Warmed``.
        """
        return self._call(self.core.prepare(instance, tuple(hashes)))

    def warm(self, instance: Instance, hashes: Sequence[bytes]) -> Ticket:
        """Bring pages to DRAM that SSD alone has. Nobody owns them there, and it is no demand."""
        return self._call(self.core.warm(instance, tuple(hashes)))

    def restore(
        self,
        lease: PrefixLease,
        destinations: Mapping[bytes, int],
        *,
        ready: object | None = None,
    ) -> Ticket:
        """Restore pages of a lease into an instance, given as {page hash: page index}.

        The lease is spent: pages that are not named may be evicted from now on.

        Args:
            ready: The engine's event, after which its pages may be written. None: now.

        Raises:
            DestinationError: a hash is not leased, or an index is out of range or comes twice;
                no byte has moved, and the lease still stands.
            Closed: the lease was spent, or has expired. With a daemon, one that expires while
                the request is on its way ends the ticket as ``Failed`` with the same error.
        """
        return self._call(self.core.restore(lease, dict(destinations), ready))

    def flush(self, *, evict_dram: bool = False) -> Flushed:
        """Wait until every object in DRAM is on SSD too, where there is one.

        Args:
            evict_dram: Then let go of all DRAM that nobody reads.
        """
        return self._call(self.core.flush(evict_dram=evict_dram))

    def statistics(self) -> ManagerStatistics:
        """Take a snapshot."""
        return self._call(self.core.statistics())

    def leaks(self) -> list[str]:
        """Everything that is not as it must be at rest; empty where all is well."""
        return self._call(self.core.leaks())

    def close(self) -> None:
        """Release all leases, let everything under way end, and free all memory. Idempotent.

        Raises:
            StoreError: the SSD store could not leave its index; all else is closed.
        """
        with contextlib.suppress(RuntimeError):  # its loop has ended already
            self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join()
        fault, self._fault = self._fault, None
        if fault is not None:
            raise fault

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    # For callers: on an event loop of their own -------------------------------------------

    async def register_async(
        self, geometry: Geometry, tensors: Mapping[str, Any], *, model: ModelIdentity
    ) -> Instance:
        """Like ``register``."""
        return await self._call_async(self.core.register(geometry, tensors, model))

    async def unregister_async(self, instance: Instance) -> None:
        """Like ``unregister``."""
        await self._call_async(self.core.unregister(instance))

    async def publish_async(
        self,
        instance: Instance,
        pages: Pages,
        *,
        ready: object | None = None,
    ) -> Ticket:
        """Like ``publish``; the ticket can be awaited."""
        return await self._call_async(self.core.publish(instance, _pairs(pages), ready))

    async def query_async(self, instance: Instance, hashes: Sequence[bytes]) -> PrefixLease:
        """Like ``query``."""
        return await self._call_async(self.core.query(instance, tuple(hashes)))

    async def prepare_async(self, instance: Instance, hashes: Sequence[bytes]) -> PrefixLease:
        """Like ``prepare``."""
        return await self._call_async(self.core.prepare(instance, tuple(hashes)))

    async def warm_async(self, instance: Instance, hashes: Sequence[bytes]) -> Ticket:
        """Like ``warm``; the ticket can be awaited."""
        return await self._call_async(self.core.warm(instance, tuple(hashes)))

    async def restore_async(
        self,
        lease: PrefixLease,
        destinations: Mapping[bytes, int],
        *,
        ready: object | None = None,
    ) -> Ticket:
        """Like ``restore``; the ticket can be awaited."""
        return await self._call_async(self.core.restore(lease, dict(destinations), ready))

    async def flush_async(self, *, evict_dram: bool = False) -> Flushed:
        """Like ``flush``."""
        return await self._call_async(self.core.flush(evict_dram=evict_dram))

    async def close_async(self) -> None:
        """Like ``close``."""
        await asyncio.to_thread(self.close)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.close_async()

    # Between the two threads --------------------------------------------------------------

    def _run(self) -> None:
        try:
            with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
                runner.run(self._serve())
        except BaseException as error:  # noqa: BLE001 - the constructor or close raises it
            if self._started.done():
                self._fault = error
            else:
                self._started.set_exception(error)
        finally:
            self._refuse_calls()

    async def _serve(self) -> None:
        self._loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
        async with self.core:
            self._started.set_result(None)
            await self._stop.wait()

    def _call(self, work: Coroutine[Any, Any, T]) -> T:
        call = self._submit(work)
        try:
            return call.result()
        except concurrent.futures.CancelledError as error:
            raise Closed("the manager was closed") from error
        except KeyboardInterrupt:
            call.add_done_callback(self._give_back)
            raise

    async def _call_async(self, work: Coroutine[Any, Any, T]) -> T:
        call = self._submit(work)
        # The manager's loop finishes what it began; a caller that goes away cannot stop it.
        waiting = asyncio.shield(asyncio.wrap_future(call))
        try:
            return await waiting
        except asyncio.CancelledError as error:
            if call.cancelled():
                raise Closed("the manager was closed") from error
            call.add_done_callback(self._give_back)
            raise

    def _give_back(self, call: concurrent.futures.Future[Any]) -> None:
        """Undo what a call gave to nobody, because its caller was cancelled."""
        result = None if call.cancelled() or call.exception() else call.result()
        if isinstance(result, PrefixLease):
            result.release()
        elif isinstance(result, Ticket):
            result.cancel()
        elif isinstance(result, Instance):
            self._loop.create_task(self._guarded(self.core.unregister(result)))

    def _submit(self, work: Coroutine[Any, Any, T]) -> concurrent.futures.Future[T]:
        if threading.current_thread() is self._thread and not self.core.closing:
            work.close()
            raise RuntimeError("a manager's methods cannot be called from its own loop")
        call: concurrent.futures.Future[T] = concurrent.futures.Future()
        answered = self._answer(call, work)
        self._calls[call] = (answered, work)
        call.add_done_callback(lambda call: self._calls.pop(call, None))
        try:
            self._loop.call_soon_threadsafe(self._begin, answered)
        except RuntimeError as error:  # the loop has been closed
            self._refuse_calls()
            raise Closed("the manager is closed") from error
        if not self._thread.is_alive():
            self._refuse_calls()  # the loop ended between our look and the call
        return call

    def _refuse_calls(self) -> None:
        """Answer callers whose work the loop did not get to before it ended."""
        for call, coroutines in tuple(self._calls.items()):
            for coroutine in coroutines:
                coroutine.close()
            call.cancel()

    def _begin(self, answered: Coroutine[Any, Any, None]) -> None:
        task = self._loop.create_task(answered)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _answer(
        self, call: concurrent.futures.Future[T], work: Coroutine[Any, Any, T]
    ) -> None:
        """Do the work, and tell its caller at once; a future of the loop's would take two turns."""
        try:
            result = await self._guarded(work)
        except asyncio.CancelledError:
            call.cancel()
            raise
        except Exception as error:  # noqa: BLE001 - raised where the call was made
            call.set_exception(error)
        else:
            call.set_result(result)

    async def _guarded(self, work: Coroutine[Any, Any, T]) -> T:
        if self.core.closing:
            work.close()
            raise Closed("the manager is closed")
        return await work


class Manager(Front[Core]):
    """Saves and restores pages through the two pipelines of its configuration.

    Embedded in an engine's process, on a thread of its own.

    Args:
        config: Settings; the defaults keep 1 GiB in DRAM and nothing on SSD.
        wrap_lane: Puts something around each lane, for tests that inject faults.

    Raises:
        GraphError: a definition is wrong.
        Unavailable: something demanded explicitly cannot be had on this machine.
        StoreError: the SSD path cannot be used.
    """

    def __init__(
        self, config: Config | None = None, *, wrap_lane: LaneWrapper | None = None
    ) -> None:
        self.config = config or Config()
        super().__init__(Core(self.config, wrap_lane=wrap_lane), name="orbitkv-manager")


def _pairs(pages: Pages) -> tuple[tuple[bytes, int], ...]:
    return tuple(pages.items() if isinstance(pages, Mapping) else pages)
