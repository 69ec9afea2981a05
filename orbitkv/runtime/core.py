"""Core: what a manager does, on the loop that owns all of its state."""

from __future__ import annotations

import asyncio
import functools
import inspect
import itertools
import logging
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from types import TracebackType
from typing import Any, BinaryIO, Self

import structlog

from orbitkv.cache.admission import SkipReason, WritePolicy, hashes_of
from orbitkv.cache.catalogue import Copy, Tier
from orbitkv.codecs import open_codec
from orbitkv.codecs.base import GpuCodec
from orbitkv.codecs.slots import SlotCodecs, bind_slots
from orbitkv.config import Config, SsdBackend
from orbitkv.errors import (
    Cancelled,
    Closed,
    ConfigError,
    DestinationError,
    Dropped,
    ImpossibleRequest,
    Unavailable,
)
from orbitkv.graph import Graph, Node
from orbitkv.pipeline import load_pipeline, with_settings
from orbitkv.runtime.channel import ChannelStatistics
from orbitkv.runtime.devices import Devices
from orbitkv.runtime.instance import Instance
from orbitkv.runtime.lanes import BlockingEvent, HostLane
from orbitkv.runtime.leases import Leases, PrefixLease
from orbitkv.runtime.persistence import Persistence, open_tiers
from orbitkv.runtime.preadv import Demand, PreadLane
from orbitkv.runtime.requests import TARGET_BATCH_NBYTES, Cutter, pack
from orbitkv.runtime.runtime import NodeStatistics, OwnedLane, Runtime
from orbitkv.runtime.spans import PipelineTrace
from orbitkv.runtime.trace import Tracer, TraceTotals, make_header, open_trace
from orbitkv.runtime.uring import RingLane, open_io_lane
from orbitkv.segment import (
    Geometry,
    ModelIdentity,
    PagedTensors,
    StateKey,
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
from orbitkv.stages.direct import DirectReadBatch
from orbitkv.stages.ticket import Miss, Outcome, Restored, Saved, Ticket, Warmed

LaneWrapper = Callable[[OwnedLane], OwnedLane]
STATIONS: Mapping[Tier, tuple[type[RestoreBatch], ...]] = {
    Tier.DRAM: (FetchBatch,),
    Tier.SSD: (ReadBatch, DirectReadBatch),
}
_PAGES_A_TURN = 256  # that a warming looks for before others have their turn
RESTORE_STATIONS = tuple(itertools.chain.from_iterable(STATIONS.values()))


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
class ArenaStatistics:
    """Workspace of one lane on one GPU: what is allocated, and what batches hold of it."""

    capacity_nbytes: int
    used_nbytes: int


@dataclass(frozen=True, slots=True)
class ManagerStatistics:
    """A snapshot of a manager. Bytes are whole 4 KiB blocks.

    Attributes:
        query_used_nbytes, query_budget_nbytes: What leases hold, and may hold; None: any number.
        arenas: By lane, as ``stream:save on cuda:0``.
        nodes, channels, unavailable: Of each direction, ``save`` and ``restore``.
    """

    pool_capacity_nbytes: int
    pool_used_nbytes: int
    pool_largest_free_nbytes: int
    ssd_capacity_nbytes: int
    ssd_used_nbytes: int
    query_used_nbytes: int
    query_budget_nbytes: int | None
    arenas: Mapping[str, ArenaStatistics]
    counters: Mapping[str, int]
    nodes: Mapping[str, Mapping[str, NodeStatistics]]
    channels: Mapping[str, tuple[ChannelStatistics, ...]]
    unavailable: Mapping[str, Mapping[str, str]]


class Core:
    """Tiers, pipelines and registrations of one manager, without locks.

    Use as an async context manager; every method is to be called on the loop that entered it,
    but for ``PrefixLease.release``, which any thread may call.

    Args:
        wrap_lane: Puts something around each lane, for tests that inject faults.
        log: Takes its events. None: the standard library's logger ``orbitkv``.

    Attributes:
        closing: Nothing new is taken any more.
    """

    def __init__(
        self,
        config: Config,
        *,
        wrap_lane: LaneWrapper | None = None,
        log: structlog.stdlib.BoundLogger | None = None,
    ) -> None:
        self.config = config
        self.closing = False
        self._wrap_lane = wrap_lane or (lambda lane: lane)
        self._instances: set[Instance] = set()
        self._feeding: set[asyncio.Task[None]] = set()
        self._bound: dict[Geometry, SlotCodecs] = {}
        self._users: Counter[Geometry] = Counter()
        self._io_lanes: list[RingLane | PreadLane] = []
        self._demand = Demand()
        self._trace: Tracer | None = None
        self._opened_trace: Tracer | None = None  # until it is closed, even if it was dropped
        self._log = log or _logger()

    async def __aenter__(self) -> Self:
        self._loop, self._thread = asyncio.get_running_loop(), threading.current_thread()
        config = self.config
        self._pipelines = [
            load_pipeline(source) for source in (config.save_pipeline, config.restore_pipeline)
        ]
        graphs = [with_settings(pipeline.graph, config) for pipeline in self._pipelines]
        self._codec = open_codec(
            config.storage_codec,
            rotation_seed=config.rotation_seed,
            on_compile=self._log.warning,
            nvcomp_library=config.nvcomp_library,
        )
        async with AsyncExitStack() as opened:
            self.catalogue = await open_tiers(config)
            opened.callback(self.catalogue.close)
            if self.catalogue.extents:
                persistence = Persistence(
                    self.catalogue.extents,
                    interval_s=config.ssd_checkpoint_interval_s,
                    counters=self.catalogue.counters,
                    log=self._log,
                )
                await opened.enter_async_context(persistence)
            self.leases = Leases(self.catalogue, config, self._release_from_any_thread)
            self._cutter = Cutter(self.catalogue, config, self._bound)
            self.devices = Devices(self.catalogue, config.storage_codec_budget_nbytes, self._log)
            self._save, self._fetch = (
                Runtime(
                    graph,
                    catalogue=self.catalogue,
                    config=config,
                    open_lane=functools.partial(self._open_lane, direction),
                    direct=self.devices.direct[direction],
                    log=self._log,
                    codecs=self._bound.__getitem__,
                )
                for direction, graph in zip(("save", "restore"), graphs, strict=True)
            )
            self._check_entries()
            self._settle_ssd_routes()
            opened.push_async_callback(self.end_trace)
            for runtime in (self._save, self._fetch):
                await opened.enter_async_context(runtime)
            if config.trace:
                await self.begin_trace(await asyncio.to_thread(open_trace, config.trace))
            await self._register_pool()
            self._tell_what_is_off()
            self._opened = opened.pop_all()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Take nothing new, release what callers hold, and let what they submitted end."""
        self.closing = True
        await self.devices.end_opening()
        async with self._opened:
            self.leases.release_all()
            while self._feeding:
                await asyncio.wait(self._feeding)

    def _open_lane(self, direction: str, node: Node) -> OwnedLane:
        if node.lane_kind == "stream":
            return self._wrap_lane(self.devices.stream_lane(node.lane))
        if node.lane_kind == "file":
            lane = self.devices.file_lane(
                node.lane,
                direction,
                self.config.ssd_cache_paths,
                chosen=self._ssd_choice(direction) == "cufile",
            )
            return self._wrap_lane(lane)
        if node.lane_kind != "ring":
            return self._wrap_lane(HostLane(node.lane))
        chosen = self._ssd_choice(direction)
        ring = open_io_lane(
            node.lane,
            depth=node.depth,
            backend="auto" if chosen == "cufile" else chosen,
            log=self._log.info,
            demand=self._demand,
        )
        self._io_lanes.append(ring)
        return self._wrap_lane(ring)

    async def _register_pool(self) -> None:
        """Pin a locked pool for io_uring once; else every transfer pins its own pages."""
        if self.catalogue.pool.unlocked_reason is None and self.config.lock_memory:
            for lane in self._io_lanes:
                if not await lane.register_buffers(self.catalogue.pool.memory):
                    self._log.info("pool_not_registered", reason=lane.buffers_refused)

    def _check_entries(self) -> None:
        """Refuse definitions that nothing can be asked of."""
        if not self._save.accepts(PublishBatch):
            raise ConfigError(
                f"save_pipeline: {self._save.graph.name!r} takes no pages to save; "
                "accepted: a definition with the stage 'gather'"
            )
        if not any(map(self._fetch.accepts, RESTORE_STATIONS)):
            raise ConfigError(
                f"restore_pipeline: {self._fetch.graph.name!r} has nothing to restore from; "
                "accepted: a definition with the stage 'serve', 'read' or 'read_cufile'"
            )

    def _settle_ssd_routes(self) -> None:
        """Say which way each direction takes to SSD, and why.

        Raises:
            Unavailable: the way that was chosen cannot be had here, or no definition leads there.
        """
        for setting, direction, runtime, verb in (
            ("ssd_backend", "save", self._save, "write"),
            ("ssd_read_path", "restore", self._fetch, "read"),
        ):
            if not self.config.ssd_cache_paths:
                return
            chosen = self._ssd_choice(direction)
            reason = _why_off(runtime, f"{verb}_cufile")
            by_host = _why_off(runtime, verb)
            refused = {"auto": None, "cufile": reason}.get(chosen, by_host)
            if refused:
                raise Unavailable(f"{setting} {chosen!r}: {refused}")
            backends = {lane.backend for lane in self._io_lanes}
            taken = "cufile" if reason is None else by_host or ", ".join(sorted(backends))
            self._log.info("ssd_route", setting=setting, chosen=chosen, taken=taken, reason=reason)

    def _ssd_choice(self, direction: str) -> SsdBackend:
        """What is to write, or to read, the SSD tier."""
        read_path = self.config.ssd_read_path if direction == "restore" else None
        return read_path or self.config.ssd_backend

    def _tell_what_is_off(self) -> None:
        """Say once, at start, what this machine does not give."""
        pool, extents = self.catalogue.pool, self.catalogue.extents
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

    async def register(
        self, geometry: Geometry, tensors: Mapping[str, Any], model: ModelIdentity
    ) -> Instance:
        """Check tensors against their declaration, and that one page of them can pass."""
        paged = PagedTensors(geometry, tensors)
        if paged.device is None and isinstance(self._codec, GpuCodec):
            raise ConfigError(
                f"storage_codec: {self._codec.name!r}, and tensors on the CPU; "
                "accepted: tensors on an NVIDIA GPU, as it neither encodes nor decodes on a host"
            )
        direct = "cufile" in (self.config.ssd_backend, self.config.ssd_read_path)
        if paged.device is None and direct and self.config.ssd_cache_paths:
            raise ConfigError(
                "ssd_backend or ssd_read_path: 'cufile', and tensors on the CPU; "
                "accepted: tensors on an NVIDIA GPU, as cuFile moves their bytes past the host"
            )
        self._users[geometry] += 1
        try:
            if geometry not in self._bound:
                self._bound[geometry] = await asyncio.to_thread(
                    bind_slots, self._codec, geometry, protect=self._codec.protects_layers
                )
            paged.bridged = paged.device is not None and self._cutter.exceeds_arenas(geometry)
            self._check_page(paged)
            if paged.device is not None:
                await self.devices.open(paged, self._bound[geometry])
        except BaseException:
            self._let_go(geometry)
            raise
        namespace = make_namespace(
            model,
            geometry,
            storage_codec=self._codec.identity,
            rotation_seed=self.config.rotation_seed if self._codec.protects_layers else 0,
        )
        instance = Instance(namespace, paged)
        self._instances.add(instance)
        return instance

    def _check_page(self, paged: PagedTensors) -> None:
        """Refuse pages of which one alone cannot pass; tell of those that no SSD shard holds."""
        geometry = paged.geometry
        counted = not paged.bridged
        limits = {
            "pool": self.catalogue.pool.capacity_nbytes,
            f"pipeline {self._save.graph.name!r}": self._save.batch_nbytes(
                PublishBatch, budgets=counted
            ),
        }
        for station in RESTORE_STATIONS:
            if self._fetch.accepts(station):
                where = f"pipeline {self._fetch.graph.name!r} for a {station.__name__}"
                limits[where] = self._fetch.batch_nbytes(station, budgets=counted)
        for group, nbytes in geometry.object_nbytes.items():
            small = [f"{where}: {limit}" for where, limit in limits.items() if nbytes > limit]
            if small:
                raise ImpossibleRequest(
                    f"one page of group {group!r} takes {nbytes} bytes; too small for it: "
                    + ", ".join(small)
                )
            extents = self.catalogue.extents
            if extents and nbytes > extents.shard_nbytes:  # DRAM serves it all the same
                self.catalogue.counters["ssd_groups_too_large"] += 1
                self._log.warning(
                    "ssd_group_too_large",
                    group=group,
                    object_nbytes=nbytes,
                    shard_nbytes=extents.shard_nbytes,
                )

    def _let_go(self, geometry: Geometry) -> None:
        """Forget what was bound to a geometry that nobody has any more."""
        self._users[geometry] -= 1
        if not self._users[geometry]:
            del self._users[geometry]
            self._bound.pop(geometry, None)

    async def unregister(self, instance: Instance) -> None:
        """Take an instance away: its leases now, its tensors once its work has ended."""
        self._check_open(instance)
        self._instances.remove(instance)
        self.leases.release_all(self.leases.of(instance))
        while instance.tickets:
            await next(iter(instance.tickets))
        self._let_go(instance.geometry)

    def _check_open(self, instance: Instance) -> None:
        if instance not in self._instances:
            raise Closed("the instance is not registered here")

    async def publish(
        self, instance: Instance, pages: tuple[tuple[bytes, int], ...], ready: object | None
    ) -> Ticket:
        """Filter what is resident, cut the rest into batches, and send them off."""
        self._check_open(instance)
        check_hashes(page_hash for page_hash, _ in pages)
        check_ready(ready)
        instance.tensors.check_indices([index for _, index in pages], distinct=True)
        resident: list[bytes] = []
        unwelcome: list[bytes] = []
        saved: list[StateKey] = []
        nbytes = sum(instance.geometry.object_nbytes.values())

        def conclude(done: tuple[bytes, ...], not_done: tuple[bytes, ...]) -> Outcome:
            return Saved(done, tuple(resident), (*not_done, *unwelcome))

        repeats = len(pages) - len({page_hash for page_hash, _ in pages})
        self.catalogue.writes.skipped[SkipReason.DUPLICATE] += repeats

        def fresh() -> Iterator[tuple[StateKey, int]]:
            # Of a hash named twice the first counts; in order, so that a prefix is saved as one.
            for page_hash, index in dict(reversed(dict(reversed(pages)).items())).items():
                keys = (
                    StateKey(instance.namespace, page_hash, group)
                    for group in instance.geometry.groups
                )
                missing = [key for key in keys if not self.catalogue.is_resident(key.digest)]
                if missing and not self.catalogue.welcomes(missing[0].digest, nbytes):
                    unwelcome.append(page_hash)
                    continue
                saved.extend(missing)
                yield from ((key, index) for key in missing)
                if not missing:
                    resident.append(page_hash)

        ticket = Ticket(conclude)
        if self._trace is not None:
            hashes, indices = zip(*pages, strict=True) if pages else ((), ())
            self._trace.arrived("publish", instance.namespace, ticket, hashes, indices)
        batches = self._cutter.publish(ticket, instance.tensors, fresh(), self._save, ready)
        self._send_off(instance, ticket, self._save, batches)
        ticket.when_done(lambda: self._touch_from_the_end(saved))
        ticket.when_done(lambda: self._count_saved(instance, ticket.result()))
        return ticket

    def _touch_from_the_end(self, keys: Sequence[StateKey]) -> None:
        """Let eviction take a saved prefix's tail before its head."""
        found = (self.catalogue.find(key.digest, Tier.DRAM) for key in reversed(keys))
        self.catalogue.touch([copy for copy in found if copy])

    def _count_saved(self, instance: Instance, outcome: Outcome) -> None:
        """Count the bytes of pages that a save has stored, and of their objects."""
        if not isinstance(outcome, Saved):
            return
        digests = (digest_of[h] for digest_of in instance.digests for h in outcome.stored)
        find = self.catalogue.find
        copies = [find(digest, Tier.DRAM) or find(digest, Tier.SSD) for digest in digests]
        stored_nbytes = sum(copy.nbytes for copy in copies if copy)
        self._count_moved("saved", instance, len(outcome.stored), stored_nbytes)

    def _count_moved(self, verb: str, instance: Instance, pages: int, stored_nbytes: int) -> None:
        counters = self.catalogue.counters
        counters[f"{verb}_logical_nbytes"] += pages * instance.geometry.page_nbytes
        counters[f"{verb}_stored_nbytes"] += stored_nbytes

    async def query(self, instance: Instance, hashes: tuple[bytes, ...]) -> PrefixLease:
        """Find the longest prefix of which every state group is in a tier that can be read."""
        self._check_open(instance)
        check_hashes(hashes)
        if self._trace is not None:
            self._trace.arrived("query", instance.namespace, None, hashes)
        lease = self.leases.grant(instance, hashes, self._find_prefix(instance, hashes))
        # From the end, so that eviction takes a prefix's tail before its head.
        self._note_demand(instance, hashes, lease.copies[::-1])
        return lease

    async def prepare(self, instance: Instance, hashes: tuple[bytes, ...]) -> PrefixLease:
        """Find a prefix like ``query``, but without demand; bring to DRAM what SSD alone has."""
        self._check_open(instance)
        check_hashes(hashes)
        lease = self.leases.grant(instance, hashes, self._find_prefix(instance, hashes))
        groups = instance.geometry.groups.values()
        lease.preparation = self._bring(
            instance,
            lease.hashes,
            [
                (copy, Destination(page_hash, 0, slots))
                for (page_hash, slots), copy in zip(
                    itertools.product(lease.hashes, groups), lease.copies, strict=True
                )
                if copy.tier is Tier.SSD
            ],
            (),
            kind="prepare",
        )
        return lease

    async def warm(self, instance: Instance, hashes: tuple[bytes, ...]) -> Ticket:
        """Bring pages to DRAM that SSD alone has. Nobody owns them there, and it is no demand."""
        self._check_open(instance)
        check_hashes(hashes)
        found: list[bytes] = []
        missed: list[bytes] = []
        items: list[tuple[Copy, Destination]] = []
        groups = instance.geometry.groups.values()
        for number, page_hash in enumerate(dict.fromkeys(hashes)):
            if number % _PAGES_A_TURN == _PAGES_A_TURN - 1:
                await asyncio.sleep(0)  # others have their turn on the loop
                self._check_open(instance)
            page = self._find_prefix(instance, (page_hash,))
            (found if page else missed).append(page_hash)
            for copy, slots in zip(page, groups, strict=bool(page)):
                if copy.tier is Tier.SSD:
                    items.append((copy, Destination(page_hash, 0, slots)))
        return self._bring(instance, tuple(found), items, tuple(missed), kind="warm")

    def _bring(
        self,
        instance: Instance,
        hashes: tuple[bytes, ...],
        items: list[tuple[Copy, Destination]],
        missed: tuple[bytes, ...],
        *,
        kind: str,
    ) -> Ticket:
        """Read copies on SSD into DRAM, through U, whichever way demand takes."""
        lost: set[bytes] = set()
        if not self._fetch.accepts(ReadBatch):
            lost = {target.page_hash for _, target in items}
            items = []

        def conclude(done: tuple[bytes, ...], not_done: tuple[bytes, ...]) -> Outcome:
            del done
            lost.update(not_done)
            warm = tuple(page_hash for page_hash in hashes if page_hash not in lost)
            return Warmed(warm, (*missed, *(h for h in hashes if h in lost)))

        def pinned() -> Iterator[tuple[Copy, Destination]]:
            # Batch by batch: all at once would keep everything on SSD from being overwritten.
            for copy, target in items:
                if copy.hidden:
                    lost.add(target.page_hash)
                else:
                    self.catalogue.pin(copy)
                    yield copy, target

        ticket = Ticket(conclude)
        if self._trace is not None:
            self._trace.arrived(kind, instance.namespace, ticket, hashes)
        batches = self._cutter.restore(
            ticket,
            instance.tensors,
            {ReadBatch: pinned()} if items else {},
            self._fetch,
            None,
            stays=True,
        )
        self._send_off(instance, ticket, self._fetch, batches)
        return ticket

    def _find_prefix(self, instance: Instance, hashes: tuple[bytes, ...]) -> list[Copy]:
        """The copies of page after page, as far as every state group of it is in a tier."""
        tiers = [
            tier for tier, stations in STATIONS.items() if any(map(self._fetch.accepts, stations))
        ]
        columns: list[list[Copy]] = []
        for digest_of in instance.digests:
            asked = hashes[: len(columns[-1])] if columns else hashes
            columns.append(self.catalogue.find_run(map(digest_of.__getitem__, asked), tiers))
        return list(itertools.chain.from_iterable(zip(*columns, strict=False)))

    def _note_demand(
        self, instance: Instance, hashes: Sequence[bytes], copies: Sequence[Copy]
    ) -> None:
        """Tell the policies what a foreground query asked for, and what it got."""
        catalogue = self.catalogue
        catalogue.look_up(copies)
        if catalogue.lfu:
            digests = [digest_of[h] for digest_of in instance.digests for h in hashes]
            catalogue.lfu.record(hashes_of(digests))
        if catalogue.writes.policy is WritePolicy.ALL:
            return  # it writes what is new, and this is not
        in_dram = {copy.digest: copy for copy in copies if copy.tier is Tier.DRAM}
        wanted = [in_dram[digest] for digest in catalogue.writes.query(list(in_dram))]
        if wanted and self._save.accepts(WriteBatch):
            for copy in wanted:
                catalogue.queue_write(copy)
            for some in pack(wanted, lambda copy: (copy.nbytes, 1), self._write_limit_nbytes()):
                batch = WriteBatch(catalogue, tuple(some))
                if not self._save.offer(batch):
                    batch.abandon(Dropped("the queue of writes is full"))

    def _release_from_any_thread(self, lease: PrefixLease) -> None:
        if threading.current_thread() is self._thread:
            self.leases.release(lease)
        elif not self.closing:
            self._loop.call_soon_threadsafe(self.leases.release, lease)

    async def restore(
        self, lease: PrefixLease, destinations: dict[bytes, int], ready: object | None = None
    ) -> Ticket:
        """Check every destination; then cut by tier into batches, and send them off."""
        check_ready(ready)
        instance = lease.instance
        self._check_open(instance)
        check_destinations(lease, destinations)

        def conclude(done: tuple[bytes, ...], not_done: tuple[bytes, ...]) -> Outcome:
            return Restored(done, not_done, ticket.ready) if done else Miss(not_done)

        ticket = Ticket(conclude)
        if self._trace is not None:
            indices = tuple(destinations.values())
            self._trace.arrived("restore", instance.namespace, ticket, tuple(destinations), indices)
        groups = tuple(instance.geometry.groups.values())
        from_ssd = self._ssd_station(instance.tensors)
        work: dict[type[RestoreBatch], list[tuple[Copy, Destination]]] = {
            FetchBatch: [],
            from_ssd: [],
        }
        lost: list[bytes] = []
        stored_nbytes: Counter[bytes] = Counter()
        pages = itertools.product(lease.hashes, groups)
        for (page_hash, slots), copy in zip(pages, lease.copies, strict=True):
            if page_hash not in destinations:
                self.catalogue.unpin(copy)
                continue
            target = Destination(page_hash, destinations[page_hash], slots)
            nearest = self._nearest(copy)
            stored_nbytes[page_hash] += nearest.nbytes
            station = FetchBatch if nearest.tier is Tier.DRAM else from_ssd
            if self._fetch.accepts(station):
                work[station].append((nearest, target))
            else:  # S alone reads here, and cuFile has failed since
                self.catalogue.unpin(nearest)
                lost.append(page_hash)
        self.leases.spend(lease)
        if lease.claim:
            ticket.when_done(lease.claim.release)
        if lost:
            ticket.part(tuple(lost)).settle(done=())

        def count() -> None:
            outcome = ticket.result()
            if isinstance(outcome, Restored):
                nbytes = sum(stored_nbytes[page_hash] for page_hash in outcome.restored)
                self._count_moved("restored", instance, len(outcome.restored), nbytes)

        ticket.when_done(count)
        batches = self._cutter.restore(ticket, instance.tensors, work, self._fetch, ready)
        self._send_off(instance, ticket, self._fetch, batches)
        return ticket

    def _nearest(self, copy: Copy) -> Copy:
        """The copy in DRAM that came since a lease was granted, in place of the one on SSD."""
        leads = copy.tier is Tier.SSD and self._fetch.accepts(FetchBatch)
        if leads and (resident := self.catalogue.find(copy.digest, Tier.DRAM)):
            self.catalogue.pin(resident)
            self.catalogue.unpin(copy)
            return resident
        return copy

    def _ssd_station(self, tensors: PagedTensors) -> type[RestoreBatch]:
        """Where copies on SSD are submitted: S, where cuFile reads for these pages; else U."""
        direct = tensors.device is not None and not tensors.bridged
        if direct and self.devices.direct["restore"].takes(tensors.device):
            return DirectReadBatch
        return ReadBatch

    async def flush(self, *, evict_dram: bool) -> Flushed:
        """Write what SSD lacks, waiting where writeback would drop; then evict, if asked to."""
        unwritten: list[Copy] = []
        await self.devices.direct["save"].written()  # else U would write the same objects
        if self._save.accepts(WriteBatch):
            wanted = self._unwritten()
            fresh = [copy for copy in wanted if not copy.write_queued]
            for copy in fresh:
                self.catalogue.queue_write(copy)
            for some in pack(fresh, lambda copy: (copy.nbytes, 1), self._write_limit_nbytes()):
                await self._save.submit(WriteBatch(self.catalogue, tuple(some)))
            await self.catalogue.written([*wanted, *self.catalogue.queued_writes()])
            unwritten = self._unwritten()
        evicted_nbytes = self.catalogue.evict_unpinned(Tier.DRAM) if evict_dram else 0
        return Flushed(len(unwritten), evicted_nbytes)

    def _write_limit_nbytes(self) -> int:
        return min(
            self._save.batch_nbytes(WriteBatch),
            TARGET_BATCH_NBYTES,
            self.catalogue.pool.capacity_nbytes,
        )

    def _unwritten(self) -> list[Copy]:
        return [
            copy
            for copy in self.catalogue.copies(Tier.DRAM)
            if not self.catalogue.find(copy.digest, Tier.SSD)
        ]

    def _send_off(
        self, instance: Instance, ticket: Ticket, runtime: Runtime, batches: Iterator[Batch]
    ) -> None:
        """Feed a ticket's batches in order, each as soon as it is made and its turn has come.

        The first goes at once; for the others the caller does not wait.
        """
        instance.tickets.add(ticket)
        ticket.when_done(lambda: instance.tickets.discard(ticket))

        async def feed(batch: Batch | None) -> None:
            try:
                while batch is not None:
                    if ticket.cancelled:
                        batch.abandon(Cancelled("the request was cancelled"))
                    else:
                        await runtime.submit(batch)
                        await asyncio.sleep(0)  # the nodes work on it while the next is made
                    batch = next(batches, None)
            finally:
                ticket.seal()

        first = next(batches, None)
        if first is not None and not ticket.cancelled and runtime.offer(first):
            first = next(batches, None)
        if first is None:
            ticket.seal()
            return
        feeding = asyncio.create_task(feed(first))
        self._feeding.add(feeding)
        feeding.add_done_callback(self._feeding.discard)

    async def begin_trace(
        self, file: BinaryIO, *, digests: bool = False, payloads: bool = False
    ) -> None:
        """Record what happens from now on, to a file that is the core's from the call on.

        Raises:
            Closed: another trace is being recorded.
        """
        if self._opened_trace is not None:
            file.close()
            raise Closed("a trace is being recorded already; accepted: one at a time")
        runtimes = (self._save, self._fetch)
        header = make_header(
            self.config,
            {
                direction: (pipeline, runtime.graph, runtime.unavailable)
                for direction, pipeline, runtime in zip(
                    ("save", "restore"), self._pipelines, runtimes, strict=True
                )
            },
            digests=digests,
            payloads=payloads,
            devices=self.devices.ordinals,
        )
        self._trace = self._opened_trace = Tracer(
            file, header, catalogue=self.catalogue, log=self._log, on_drop=self._stop_telling
        )
        for instance in self._instances:
            for ticket in instance.tickets:
                self._trace.arrived("under way", instance.namespace, ticket, ())
        for direction, runtime in zip(("save", "restore"), runtimes, strict=True):
            runtime.trace_with(PipelineTrace(self._trace, direction))

    async def end_trace(self) -> TraceTotals:
        """End the recording, if there is one: all it has is in the file then."""
        trace, self._opened_trace = self._opened_trace, None
        self._stop_telling()
        return await trace.close() if trace else TraceTotals(0, 0, "")

    def _stop_telling(self) -> None:
        self._trace = None
        for runtime in (self._save, self._fetch):
            runtime.trace_with(None)

    @property
    def trace(self) -> Tracer | None:
        """Takes what is to be recorded; None: nothing is."""
        return self._trace

    async def statistics(self) -> ManagerStatistics:
        """Take a snapshot."""
        pool, extents = self.catalogue.pool, self.catalogue.extents
        pipelines = {"save": self._save, "restore": self._fetch}
        taken = {name: runtime.statistics() for name, runtime in pipelines.items()}
        return ManagerStatistics(
            pool.capacity_nbytes,
            pool.used_nbytes,
            pool.largest_free_nbytes,
            extents.capacity_nbytes if extents else 0,
            extents.used_nbytes if extents else 0,
            self.leases.quota.used_nbytes,
            self.config.query_budget_nbytes,
            {
                arena.name.removeprefix("arena of "): ArenaStatistics(
                    arena.capacity_nbytes, arena.used_nbytes
                )
                for arena in self.devices.arenas()
            },
            dict(self.catalogue.counters) | self.catalogue.policy_counters(),
            {name: nodes for name, (nodes, _) in taken.items()},
            {name: channels for name, (_, channels) in taken.items()},
            {name: runtime.unavailable for name, runtime in pipelines.items()},
        )

    def graphs(self) -> list[tuple[Graph, Mapping[str, str]]]:
        """Both graphs as they run, each with the nodes that are off here, and why."""
        return [(runtime.graph, runtime.unavailable) for runtime in (self._save, self._fetch)]

    def faults(self) -> list[str]:
        """Tell of each pipeline that a bug has stopped, and of a direct route that is closed."""
        found = [str(runtime.fault) for runtime in (self._save, self._fetch) if runtime.fault]
        if self.devices.gate.closed_reason:
            found.append(f"the direct route is closed: {self.devices.gate.closed_reason}")
        return found

    async def leaks(self) -> list[str]:
        """List everything that is not as it must be at rest."""
        found = self.catalogue.leaks() + self._save.leaks() + self._fetch.leaks()
        found += self.devices.leaks()
        found += self.leases.leaks()
        if tickets := sum(len(instance.tickets) for instance in self._instances):
            found.append(f"{tickets} tickets")
        return found


def check_ready(ready: object | None) -> None:
    """Refuse an engine's event that nothing can wait for."""
    waits = ready is None or isinstance(ready, BlockingEvent)
    if not waits or inspect.iscoroutinefunction(getattr(ready, "wait", None)):
        raise TypeError(f"ready {ready!r}; accepted: an event that a thread can wait() for")


def check_destinations(lease: PrefixLease, destinations: Mapping[bytes, int]) -> None:
    """Refuse a restore of a lease that is spent, or to pages that cannot be; nothing has moved."""
    if lease.expired:
        raise Closed("the lease has expired; query again")
    if lease.spent and lease.hashes:  # one of nothing can always be restored, as a miss
        raise Closed("the lease was released or restored before")
    unknown = [page_hash.hex()[:16] for page_hash in destinations.keys() - set(lease.hashes)]
    if unknown:
        raise DestinationError(f"pages {', '.join(sorted(unknown))}...: not in the lease")
    lease.instance.tensors.check_indices(destinations.values(), distinct=True)


def check_hashes(hashes: Iterable[object]) -> None:
    """Refuse page hashes that are not bytes."""
    strange = [page_hash for page_hash in hashes if not isinstance(page_hash, bytes)]
    if strange:
        raise DestinationError(f"page hash {strange[0]!r}; accepted: bytes")


def _why_off(runtime: Runtime, stage: str) -> str | None:
    """Why no node of a pipeline runs a stage; None where one does."""
    nodes = [
        node.id
        for node in runtime.graph.nodes.values()
        if stage in [use.name for use in node.stages]
    ]
    reasons = [runtime.unavailable[node_id] for node_id in nodes if node_id in runtime.unavailable]
    if not nodes:
        return f"{runtime.graph.name!r} has no {stage!r}"
    return reasons[0] if len(reasons) == len(nodes) else None


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
