"""Manager: OrbitKV inside an engine's process."""

from __future__ import annotations

import asyncio
import concurrent.futures
import logging
import threading
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Self, TypeVar

import structlog

from orbitkv.cache.catalogue import Catalogue, Copy, Tier
from orbitkv.cache.extents import ExtentStore
from orbitkv.cache.pool import Pool
from orbitkv.config import MIB, Config
from orbitkv.errors import (
    Cancelled,
    Closed,
    ConfigError,
    DestinationError,
    ImpossibleRequest,
)
from orbitkv.graph import Node
from orbitkv.pipeline import load_pipeline
from orbitkv.runtime.channel import ChannelStatistics
from orbitkv.runtime.lanes import BlockingEvent, HostLane
from orbitkv.runtime.preadv import PreadLane
from orbitkv.runtime.runtime import LaneFactory, NodeStatistics, OwnedLane, Runtime
from orbitkv.runtime.uring import RingLane, open_io_lane
from orbitkv.segment import (
    Geometry,
    ModelIdentity,
    PagedTensors,
    StateKey,
    hash_pages,
    make_namespace,
)
from orbitkv.stages.base import Batch
from orbitkv.stages.batch import (
    Destination,
    FetchBatch,
    PublishBatch,
    ReadBatch,
    RestoreBatch,
    WriteBatch,
)
from orbitkv.stages.ticket import Miss, Outcome, Restored, Saved, Ticket

MAX_BATCH_SEGMENTS = 256
# What R reads for its CRC is still in the last-level cache when E copies it.
TARGET_BATCH_NBYTES = 16 * MIB

T = TypeVar("T")


@dataclass(eq=False)
class Instance:
    """One registration of an engine's pages: what ``publish`` reads and ``restore`` fills.

    Attributes:
        namespace: ``orbitkv:v2:<64 hex>``; instances with equal namespaces share objects.
    """

    namespace: str
    tensors: PagedTensors
    tickets: set[Ticket] = field(default_factory=set)
    closed: bool = False

    @property
    def geometry(self) -> Geometry:
        """As declared at registration."""
        return self.tensors.geometry

    def hash_pages(self, tokens: Sequence[int]) -> list[bytes]:
        """Hash every full page of a token sequence, each chained to its prefix."""
        return hash_pages(self.namespace, tokens, self.geometry.page_tokens)


@dataclass(eq=False)
class PrefixLease:
    """The longest prefix that can be restored, kept from eviction until released or restored.

    Attributes:
        hashes: The prefix, in order: the first ``len(hashes)`` of those asked for.
        copies: The objects of each page, one a state group.
    """

    instance: Instance
    hashes: tuple[bytes, ...]
    copies: tuple[tuple[Copy, ...], ...]
    _release: Callable[[PrefixLease], None]
    spent: bool = False

    def release(self) -> None:
        """Let the pages be evicted again. Harmless after a restore, or twice."""
        self._release(self)

    def tiers(self) -> dict[Tier, int]:
        """How many objects come from each tier."""
        found = [copy.tier for page in self.copies for copy in page]
        return {tier: found.count(tier) for tier in Tier}

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.release()


@dataclass(frozen=True, slots=True)
class Flushed:
    """What a flush did.

    Attributes:
        unwritten: Objects in DRAM that SSD does not have, because a write failed or found no room.
        evicted_nbytes: Bytes of DRAM that were freed.
    """

    unwritten: int
    evicted_nbytes: int


@dataclass(frozen=True, slots=True)
class ManagerStatistics:
    """A snapshot of a manager. Bytes are whole 4 KiB blocks.

    Attributes:
        nodes, channels, unavailable: Of each direction, ``save`` and ``restore``.
    """

    pool_capacity_nbytes: int
    pool_used_nbytes: int
    pool_largest_free_nbytes: int
    ssd_capacity_nbytes: int
    ssd_used_nbytes: int
    counters: Mapping[str, int]
    nodes: Mapping[str, Mapping[str, NodeStatistics]]
    channels: Mapping[str, tuple[ChannelStatistics, ...]]
    unavailable: Mapping[str, Mapping[str, str]]


class Manager:
    """Saves and restores pages through the two pipelines of its configuration.

    Embedded in an engine's process: it runs an event loop in a thread of its own, and every
    method may be called from any other thread. Each method that waits has a twin named
    ``..._async``, for callers on an event loop. Use it as a context manager of either kind.

    Args:
        config: Settings; the defaults keep 1 GiB in DRAM and nothing on SSD.
        open_lane: Makes the lane of a node. For tests that inject faults.

    Raises:
        GraphError: a definition is wrong.
        Unavailable: something demanded explicitly cannot be had on this machine.
        StoreError: the SSD path cannot be used.
    """

    def __init__(
        self, config: Config | None = None, *, open_lane: LaneFactory | None = None
    ) -> None:
        self.config = config or Config()
        self._open_lane = open_lane or self.open_lane
        self._instances: set[Instance] = set()
        self._leases: set[PrefixLease] = set()
        self._feeding: set[asyncio.Task[None]] = set()
        self._io_lanes: list[RingLane | PreadLane] = []
        self._calls: set[concurrent.futures.Future[Any]] = set()
        self._closing = False
        self._log = _logger()
        self._started: concurrent.futures.Future[None] = concurrent.futures.Future()
        self._thread = threading.Thread(target=self._run, name="orbitkv-manager", daemon=True)
        self._thread.start()
        self._started.result()

    # For callers: blocking ----------------------------------------------------------------

    def register(
        self, geometry: Geometry, tensors: Mapping[str, Any], *, model: ModelIdentity
    ) -> Instance:
        """Register an engine's paged tensors, one for each slot. Nothing is copied.

        Raises:
            GeometryError: with every difference between a tensor and its declaration.
            ImpossibleRequest: one page is more than the pool, an edge or a budget holds.
        """
        return self._call(self._register(geometry, tensors, model))

    def unregister(self, instance: Instance) -> None:
        """Forget an instance, once everything it has under way has ended."""
        self._call(self._unregister(instance))

    def publish(
        self,
        instance: Instance,
        pages: Iterable[tuple[bytes, int]],
        *,
        ready: object | None = None,
    ) -> Ticket:
        """Save pages, given as (page hash, page index). They must not change until it has ended.

        Args:
            ready: The engine's event, after which the pages hold what is to be saved. None: now.

        Raises:
            DestinationError: a page index is out of range or comes twice; nothing is saved.
        """
        return self._call(self._publish(instance, tuple(pages), ready))

    def query(self, instance: Instance, hashes: Sequence[bytes]) -> PrefixLease:
        """Find the longest prefix that can be restored, and keep it from eviction."""
        return self._call(self._query(instance, tuple(hashes)))

    def restore(self, lease: PrefixLease, destinations: Mapping[bytes, int]) -> Ticket:
        """Restore pages of a lease into an instance, given as {page hash: page index}.

        The lease is spent: pages that are not named may be evicted from now on.

        Raises:
            DestinationError: a hash is not leased, or an index is out of range or comes twice;
                no byte has moved, and the lease still stands.
        """
        return self._call(self._restore(lease, dict(destinations)))

    def flush(self, *, evict_dram: bool = False) -> Flushed:
        """Wait until every object in DRAM is on SSD too, where there is one.

        Args:
            evict_dram: Then let go of all DRAM that nobody reads.
        """
        return self._call(self._flush(evict_dram=evict_dram))

    def statistics(self) -> ManagerStatistics:
        """Take a snapshot."""
        return self._call(self._statistics())

    def leaks(self) -> list[str]:
        """Everything that is not as it must be at rest; empty where all is well."""
        return self._call(self._leaks())

    def close(self) -> None:
        """Release all leases, let everything under way end, and free all memory. Idempotent."""
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._stop.set)
            self._thread.join()

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
        return await self._call_async(self._register(geometry, tensors, model))

    async def unregister_async(self, instance: Instance) -> None:
        """Like ``unregister``."""
        await self._call_async(self._unregister(instance))

    async def publish_async(
        self,
        instance: Instance,
        pages: Iterable[tuple[bytes, int]],
        *,
        ready: object | None = None,
    ) -> Ticket:
        """Like ``publish``; the ticket can be awaited."""
        return await self._call_async(self._publish(instance, tuple(pages), ready))

    async def query_async(self, instance: Instance, hashes: Sequence[bytes]) -> PrefixLease:
        """Like ``query``."""
        return await self._call_async(self._query(instance, tuple(hashes)))

    async def restore_async(self, lease: PrefixLease, destinations: Mapping[bytes, int]) -> Ticket:
        """Like ``restore``; the ticket can be awaited."""
        return await self._call_async(self._restore(lease, dict(destinations)))

    async def flush_async(self, *, evict_dram: bool = False) -> Flushed:
        """Like ``flush``."""
        return await self._call_async(self._flush(evict_dram=evict_dram))

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

    # On the manager's loop ----------------------------------------------------------------

    def open_lane(self, node: Node) -> OwnedLane:
        """Make the lane that a node names."""
        if node.lane_kind != "ring":
            return HostLane(node.lane)
        lane = open_io_lane(
            node.lane, depth=node.depth, backend=self.config.ssd_backend, log=self._log.info
        )
        self._io_lanes.append(lane)
        return lane

    async def _register_pool(self) -> None:
        """Pin a locked pool for io_uring once; else every transfer pins its own pages."""
        if self._catalogue.pool.unlocked_reason is None and self.config.lock_memory:
            for lane in self._io_lanes:
                if not await lane.register_buffers(self._catalogue.pool.memory):
                    self._log.info("pool_not_registered", reason=lane.buffers_refused)

    def _run(self) -> None:
        try:
            asyncio.run(self._serve())
        except BaseException as error:
            if not self._started.done():
                self._started.set_exception(error)
            else:
                raise
        finally:
            self._refuse_calls()

    async def _serve(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._stop = asyncio.Event()
        config = self.config
        save_graph = load_pipeline(config.save_pipeline).graph
        restore_graph = load_pipeline(config.restore_pipeline).graph
        pool = Pool(config.pool_nbytes, lock_memory=config.lock_memory)
        extents = None
        if config.ssd_path:
            extents = ExtentStore(
                config.ssd_path, config.ssd_capacity_nbytes, persist=config.ssd_persist
            )
        self._catalogue = Catalogue(pool, extents)
        try:
            self._save, self._fetch = (
                Runtime(
                    graph,
                    catalogue=self._catalogue,
                    config=config,
                    open_lane=self._open_lane,
                    log=self._log,
                )
                for graph in (save_graph, restore_graph)
            )
            self._check_entries()
            async with self._save, self._fetch:
                await self._register_pool()
                self._tell_what_is_off(extents)
                self._started.set_result(None)
                await self._stop.wait()
                await self._drain()
        finally:
            self._closing = True
            self._catalogue.close()

    def _check_entries(self) -> None:
        """Refuse definitions that nothing can be asked of."""
        if not self._save.accepts(PublishBatch):
            raise ConfigError(
                f"save_pipeline: {self._save.graph.name!r} takes no pages to save; "
                "accepted: a definition with the stage 'gather'"
            )
        if not (self._fetch.accepts(FetchBatch) or self._fetch.accepts(ReadBatch)):
            raise ConfigError(
                f"restore_pipeline: {self._fetch.graph.name!r} has nothing to restore from; "
                "accepted: a definition with the stage 'serve' or 'read'"
            )

    def _tell_what_is_off(self, extents: ExtentStore | None) -> None:
        """Say once, at start, what this machine does not give."""
        pool = self._catalogue.pool
        if pool.unlocked_reason:
            self._log.info("pool_not_locked", reason=pool.unlocked_reason)
        if extents and extents.buffered_reason:
            self._log.info("ssd_buffered", reason=extents.buffered_reason)
        if extents and extents.cold_reason:
            self._log.warning("ssd_cold_start", reason=extents.cold_reason)
        for runtime in (self._save, self._fetch):
            for node_id, reason in runtime.unavailable.items():
                self._log.info(
                    "node_unavailable", pipeline=runtime.graph.name, node=node_id, reason=reason
                )

    async def _drain(self) -> None:
        """Take nothing new; release what callers hold; wait for what they submitted."""
        self._closing = True
        for lease in tuple(self._leases):
            self._release(lease)
        while self._feeding:
            await asyncio.wait(self._feeding)

    def _call(self, work: Coroutine[Any, Any, T]) -> T:
        call = self._submit(work)
        try:
            return call.result()
        except concurrent.futures.CancelledError as error:
            raise Closed("the manager was closed") from error

    async def _call_async(self, work: Coroutine[Any, Any, T]) -> T:
        call = self._submit(work)
        try:
            return await asyncio.wrap_future(call)
        except asyncio.CancelledError as error:
            if self._thread.is_alive():
                raise
            raise Closed("the manager was closed") from error

    def _submit(self, work: Coroutine[Any, Any, T]) -> concurrent.futures.Future[T]:
        if threading.current_thread() is self._thread:
            work.close()
            raise RuntimeError("a manager's methods cannot be called from its own loop")
        if self._closing:
            work.close()
            raise Closed("the manager is closed")
        try:
            call = asyncio.run_coroutine_threadsafe(self._guarded(work), self._loop)
        except RuntimeError as error:  # the loop has been closed since we looked
            work.close()
            raise Closed("the manager is closed") from error
        self._calls.add(call)
        call.add_done_callback(self._calls.discard)
        if not self._thread.is_alive():
            self._refuse_calls()  # the loop ended between our look and the call
        return call

    def _refuse_calls(self) -> None:
        """Answer callers whose work the loop did not get to before it ended."""
        for call in tuple(self._calls):
            call.cancel()

    async def _guarded(self, work: Coroutine[Any, Any, T]) -> T:
        if self._closing:
            work.close()
            raise Closed("the manager is closed")
        return await work

    async def _register(
        self, geometry: Geometry, tensors: Mapping[str, Any], model: ModelIdentity
    ) -> Instance:
        paged = PagedTensors(geometry, tensors)
        limit_nbytes = min(
            self._save.batch_nbytes(PublishBatch), self._catalogue.pool.capacity_nbytes
        )
        for group, nbytes in geometry.object_nbytes.items():
            if nbytes > limit_nbytes:
                raise ImpossibleRequest(
                    f"one page of group {group!r} takes {nbytes} bytes; the pool and every edge "
                    f"and budget of pipeline {self._save.graph.name!r} hold {limit_nbytes}"
                )
        namespace = make_namespace(model, geometry, storage_codec=self.config.storage_codec)
        instance = Instance(namespace, paged)
        self._instances.add(instance)
        return instance

    async def _unregister(self, instance: Instance) -> None:
        self._check_open(instance)
        instance.closed = True
        self._instances.remove(instance)
        for lease in [lease for lease in self._leases if lease.instance is instance]:
            self._release(lease)
        while instance.tickets:
            await next(iter(instance.tickets))

    def _check_open(self, instance: Instance) -> None:
        if instance not in self._instances:
            raise Closed("the instance is not registered here")

    async def _publish(
        self, instance: Instance, pages: tuple[tuple[bytes, int], ...], ready: object | None
    ) -> Ticket:
        self._check_open(instance)
        if ready is not None and not isinstance(ready, BlockingEvent):
            raise TypeError(f"ready {ready!r}; accepted: an event with wait(), or None")
        instance.tensors.check_indices([index for _, index in pages], distinct=True)
        resident: list[bytes] = []
        fresh: list[tuple[StateKey, int]] = []
        for page_hash, index in dict(reversed(pages)).items():
            keys = [StateKey(instance.namespace, page_hash, g) for g in instance.geometry.groups]
            missing = [key for key in keys if not self._catalogue.is_resident(key.digest)]
            fresh += [(key, index) for key in missing]
            if not missing:
                resident.append(page_hash)

        def conclude(done: tuple[bytes, ...], not_done: tuple[bytes, ...]) -> Outcome:
            return Saved(done, tuple(resident), not_done)

        ticket = Ticket(conclude)
        nbytes_of = instance.geometry.object_nbytes
        packs = self._pack(
            [(nbytes_of[key.group], len(instance.geometry.groups[key.group])) for key, _ in fresh],
            self._save.batch_nbytes(PublishBatch),
        )
        batches = [
            PublishBatch(
                ticket.part(tuple(key.page_hash for key, _ in fresh[pack])),
                instance.tensors,
                tuple(fresh[pack]),
                ready,
                sum(nbytes_of[key.group] for key, _ in fresh[pack]),
            )
            for pack in packs
        ]
        self._send_off(instance, ticket, self._save, batches)
        return ticket

    async def _query(self, instance: Instance, hashes: tuple[bytes, ...]) -> PrefixLease:
        self._check_open(instance)
        tiers = [
            tier
            for tier, payload in ((Tier.DRAM, FetchBatch), (Tier.SSD, ReadBatch))
            if self._fetch.accepts(payload)
        ]
        found: list[tuple[Copy, ...]] = []
        for page_hash in hashes:
            copies = []
            for group in instance.geometry.groups:
                digest = StateKey(instance.namespace, page_hash, group).digest
                copy = next(filter(None, (self._catalogue.find(digest, t) for t in tiers)), None)
                if copy is not None:
                    copies.append(copy)
            if len(copies) < len(instance.geometry.groups):
                break
            found.append(tuple(copies))
        for copy in (copy for page in found for copy in page):
            self._catalogue.pin(copy)
            self._catalogue.touch(copy)
        lease = PrefixLease(
            instance, hashes[: len(found)], tuple(found), self._release_from_any_thread
        )
        self._leases.add(lease)
        return lease

    def _release_from_any_thread(self, lease: PrefixLease) -> None:
        if threading.current_thread() is self._thread:
            self._release(lease)
        elif not self._closing:
            self._loop.call_soon_threadsafe(self._release, lease)

    def _release(self, lease: PrefixLease) -> None:
        if lease.spent:
            return
        lease.spent = True
        self._leases.discard(lease)
        for copy in (copy for page in lease.copies for copy in page):
            self._catalogue.unpin(copy)

    async def _restore(self, lease: PrefixLease, destinations: dict[bytes, int]) -> Ticket:
        instance = lease.instance
        self._check_open(instance)
        if lease.spent:
            raise Closed("the lease was released or restored before")
        unknown = [page_hash.hex()[:16] for page_hash in destinations.keys() - set(lease.hashes)]
        if unknown:
            raise DestinationError(f"pages {', '.join(sorted(unknown))}...: not in the lease")
        instance.tensors.check_indices(destinations.values(), distinct=True)

        def conclude(done: tuple[bytes, ...], not_done: tuple[bytes, ...]) -> Outcome:
            return Restored(done, not_done) if done else Miss(not_done)

        ticket = Ticket(conclude)
        groups = tuple(instance.geometry.groups.values())
        work: dict[type[FetchBatch | ReadBatch], list[tuple[Copy, Destination]]] = {
            FetchBatch: [],
            ReadBatch: [],
        }
        for page_hash, copies in zip(lease.hashes, lease.copies, strict=True):
            for copy, slot_indices in zip(copies, groups, strict=True):
                if page_hash not in destinations:
                    self._catalogue.unpin(copy)
                    continue
                target = Destination(page_hash, destinations[page_hash], slot_indices)
                kind = FetchBatch if copy.tier is Tier.DRAM else ReadBatch
                work[kind].append((copy, target))
        lease.spent = True
        self._leases.discard(lease)
        batches: list[RestoreBatch] = []
        for station, items in work.items():
            packs = self._pack(
                [(copy.nbytes, len(target.slot_indices)) for copy, target in items],
                self._fetch.batch_nbytes(station) if items else 0,
            )
            for pack in packs:
                part = ticket.part(tuple(target.page_hash for _, target in items[pack]))
                batches.append(station(part, self._catalogue, instance.tensors, items[pack]))
        self._send_off(instance, ticket, self._fetch, batches)
        return ticket

    async def _flush(self, *, evict_dram: bool) -> Flushed:
        unwritten: list[Copy] = []
        if self._save.accepts(WriteBatch):
            wanted = self._unwritten()
            fresh = [copy for copy in wanted if not copy.write_queued]
            for copy in fresh:
                self._catalogue.queue_write(copy)
            packs = self._pack(
                [(copy.nbytes, 1) for copy in fresh], self._save.batch_nbytes(WriteBatch)
            )
            for pack in packs:
                await self._save.submit(WriteBatch(self._catalogue, tuple(fresh[pack])))
            await self._catalogue.written(wanted)
            unwritten = self._unwritten()
        evicted_nbytes = self._catalogue.evict_unpinned(Tier.DRAM) if evict_dram else 0
        return Flushed(len(unwritten), evicted_nbytes)

    def _unwritten(self) -> list[Copy]:
        return [
            copy
            for copy in self._catalogue.copies(Tier.DRAM)
            if not self._catalogue.find(copy.digest, Tier.SSD)
        ]

    def _pack(self, sizes: Sequence[tuple[int, int]], limit_nbytes: int) -> list[slice]:
        """Cut a sequence of (bytes, segments) into batches; each item fits one by itself."""
        limit_nbytes = min(limit_nbytes, self._catalogue.pool.capacity_nbytes, TARGET_BATCH_NBYTES)
        cuts, batch_nbytes, batch_segments = [0], 0, 0
        for index, (nbytes, segments) in enumerate(sizes):
            full = batch_nbytes + nbytes > limit_nbytes
            if index > cuts[-1] and (full or batch_segments + segments > MAX_BATCH_SEGMENTS):
                cuts.append(index)
                batch_nbytes = batch_segments = 0
            batch_nbytes += nbytes
            batch_segments += segments
        ends = [*cuts[1:], len(sizes)]
        return [slice(start, end) for start, end in zip(cuts, ends, strict=True) if end > start]

    def _send_off(
        self, instance: Instance, ticket: Ticket, runtime: Runtime, batches: Sequence[Batch]
    ) -> None:
        """Feed a ticket's batches in order, without making the caller wait for the queue."""
        instance.tickets.add(ticket)
        ticket.when_done(lambda: instance.tickets.discard(ticket))
        ticket.seal()

        async def feed() -> None:
            for batch in batches:
                if ticket.cancelled:
                    batch.abandon(Cancelled("the request was cancelled"))
                else:
                    await runtime.submit(batch)

        if batches:
            feeding = asyncio.create_task(feed())
            self._feeding.add(feeding)
            feeding.add_done_callback(self._feeding.discard)

    async def _statistics(self) -> ManagerStatistics:
        pool, extents = self._catalogue.pool, self._catalogue.extents
        pipelines = {"save": self._save, "restore": self._fetch}
        taken = {name: runtime.statistics() for name, runtime in pipelines.items()}
        return ManagerStatistics(
            pool.capacity_nbytes,
            pool.used_nbytes,
            pool.largest_free_nbytes,
            extents.capacity_nbytes if extents else 0,
            extents.used_nbytes if extents else 0,
            dict(self._catalogue.counters),
            {name: nodes for name, (nodes, _) in taken.items()},
            {name: channels for name, (_, channels) in taken.items()},
            {name: runtime.unavailable for name, runtime in pipelines.items()},
        )

    async def _leaks(self) -> list[str]:
        found = self._catalogue.leaks() + self._save.leaks() + self._fetch.leaks()
        if self._leases:
            found.append(f"{len(self._leases)} leases")
        if tickets := sum(len(instance.tickets) for instance in self._instances):
            found.append(f"{tickets} tickets")
        return found


def _logger() -> structlog.stdlib.BoundLogger:
    """Events go to the standard library's logger ``orbitkv``, which the application configures."""
    log: structlog.stdlib.BoundLogger = structlog.wrap_logger(
        logging.getLogger("orbitkv"),
        wrapper_class=structlog.stdlib.BoundLogger,
        processors=[
            structlog.stdlib.filter_by_level,
            structlog.processors.format_exc_info,
            structlog.processors.KeyValueRenderer(key_order=["event"]),
        ],
    )
    return log
