"""Trace: what nodes and queues did, told to a file, and never at a run's expense."""

from __future__ import annotations

import asyncio
import functools
import itertools
import os
import platform
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import BinaryIO, ParamSpec, TypeVar

import structlog

from orbitkv.cache.catalogue import Catalogue
from orbitkv.config import Config
from orbitkv.errors import ConfigError
from orbitkv.graph import Graph
from orbitkv.pipeline import Pipeline
from orbitkv.runtime.trace_file import (
    FIELDS,
    MAX_BUFFERED,
    MAX_BUFFERED_PAYLOAD_NBYTES,
    Arrival,
    Ended,
    Header,
    Record,
    Remote,
    Sample,
    Space,
    TracedEdge,
    TracedPipeline,
    TraceWriter,
)
from orbitkv.stages.base import Batch
from orbitkv.stages.ticket import Failed, Miss, Restored, Saved, Ticket, Warmed

P = ParamSpec("P")
T = TypeVar("T")

now_ns = time.perf_counter_ns
_SAMPLE_NS = 10_000_000  # least time between two samples
NO_TICKET = (0, 0)  # numbers of no ticket, and of no namespace


def guarded(call: Callable[P, T]) -> Callable[P, T | None]:
    """Let a method of a trace drop the trace where it fails, and nothing else."""

    @functools.wraps(call)
    def guard(*args: P.args, **kwargs: P.kwargs) -> T | None:
        try:
            return call(*args, **kwargs)
        except Exception as error:  # noqa: BLE001 - a trace must not break what it traces
            args[0].tracer.drop(error)  # type: ignore[attr-defined]
            return None

    return guard


@dataclass(frozen=True, slots=True)
class TraceTotals:
    """What a recording came to.

    Attributes:
        dropped: Why it was ended before its end; empty where it was not.
    """

    records: int
    lost: int
    dropped: str


def open_trace(path: Path) -> BinaryIO:
    """Make the file of a trace, for this user alone.

    Raises:
        ConfigError: it cannot be made.
    """
    try:
        return os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb")
    except OSError as error:
        accepted = "a path where a file can be made"
        raise ConfigError(f"trace: {path}: {error.strerror}; accepted: {accepted}") from error


class Tracer:
    """Records one manager, on its loop, until it is closed or dropped.

    Args:
        file: Open for writing, and the tracer's from now on.
        header: The first record; it says whether there are to be digests and payloads.
        on_drop: Called on the loop where the tracer cannot go on, once; it must detach it.

    Attributes:
        dropped: Why nothing is recorded any more; None while all is well.
        gauges: What is sampled besides the tiers, by name.
    """

    def __init__(
        self,
        file: BinaryIO,
        header: Header,
        *,
        catalogue: Catalogue,
        log: structlog.stdlib.BoundLogger,
        on_drop: Callable[[], None],
    ) -> None:
        self.tracer = self  # as the others have it
        self.digests, self.payloads = header.digests, header.payloads
        self.dropped: BaseException | None = None
        self.gauges: dict[str, Callable[[], int]] = {}
        self.writer = TraceWriter(file, header, max_buffered=header.bounds["records"])
        self._catalogue = catalogue
        self._log = log
        self._on_drop = on_drop
        self._visits = itertools.count(1)
        self._numbers = itertools.count(1)
        self._tickets: dict[Ticket, tuple[int, int]] = {}
        self._spaces: dict[str, int] = {}
        self._sampled_ns = 0

    @guarded
    def arrived(
        self,
        kind: str,
        namespace: str,
        ticket: Ticket | None,
        hashes: Sequence[bytes],
        indices: Sequence[int] = (),
    ) -> None:
        """Tell of a request as it came, and follow its ticket to its end."""
        ns, space = now_ns(), self._spaces.get(namespace)
        if space is None:
            self._spaces[namespace] = space = len(self._spaces) + 1
            self.put(Space(space, namespace), ns)
        number = 0
        if ticket is not None:
            number = next(self._numbers)
            self._tickets[ticket] = (number, space)
            ticket.when_done(lambda: self._end(ticket))
        self.put(Arrival(ns, number, kind, space, tuple(hashes), tuple(map(int, indices))), ns)

    @guarded
    def came_from(self, ticket: Ticket, pid: int, session: int, number: int) -> None:
        """Tell which request of which other process a ticket is."""
        if known := self._tickets.get(ticket):
            ns = now_ns()
            self.put(Remote(ns, known[0], pid, session, number), ns)

    @guarded
    def _end(self, ticket: Ticket) -> None:
        number, _ = self._tickets.pop(ticket)
        outcome = ticket.result()
        name, pages, missed = type(outcome).__name__.lower(), 0, 0
        match outcome:
            case Failed():
                name = type(outcome.error).__name__
            case Saved():
                pages, missed = len(outcome.stored), len(outcome.dropped)
            case Restored():
                pages, missed = len(outcome.restored), len(outcome.missed)
            case Warmed():
                pages, missed = len(outcome.warm), len(outcome.missed)
            case Miss():
                missed = len(outcome.missed)
        ns = now_ns()
        self.put(Ended(ns, number, name, pages, missed), ns)

    def put(self, record: Record, ns: int, payload_nbytes: int = 0) -> None:
        """Record something of that time, unless the tracer has been dropped."""
        if self.dropped is not None:
            return
        if self.writer.fault is not None:
            self.drop(self.writer.fault)
            return
        self.writer.put(record, ns, payload_nbytes)

    def next_visit(self) -> int:
        """The number of a batch's visit to a node."""
        return next(self._visits)

    def request_of(self, batch: Batch) -> tuple[int, int]:
        """Numbers of a batch's ticket and namespace."""
        part = batch.part
        return self._tickets.get(part.ticket, NO_TICKET) if part is not None else NO_TICKET

    def sample(self, ns: int) -> None:
        """Record the counters, if they were not just now."""
        if ns - self._sampled_ns < _SAMPLE_NS:
            return
        self._sampled_ns = ns
        catalogue = self._catalogue
        values = {name: read() for name, read in self.gauges.items()}
        values["pool_used_nbytes"] = catalogue.pool.used_nbytes
        if catalogue.extents:
            values["ssd_used_nbytes"] = catalogue.extents.used_nbytes
        for name in ("evicted_dram", "evicted_ssd"):
            values[name] = catalogue.counters[name]
        self.put(Sample(ns, values), ns)

    def corruptions(self) -> int:
        """How many objects have been refused for their bytes, not for a read that failed."""
        count = self._catalogue.counters.get  # a Counter is slow to tell of what it lacks
        hidden = count("corrupt_dram", 0) + count("corrupt_ssd", 0) + count("undecodable", 0)
        return hidden - count("ssd_read_faults", 0)

    def drop(self, error: BaseException) -> None:
        """Record no more, and tell of it once. The run goes on as if there were no trace."""
        if self.dropped is None:
            self.dropped = error
            self._on_drop()
            self._log.warning("trace_dropped", reason=repr(error))

    async def close(self) -> TraceTotals:
        """Write all that is left, and close the file."""
        await asyncio.to_thread(self.writer.close, now_ns())
        if self.writer.fault is not None:
            self.drop(self.writer.fault)
        dropped = repr(self.dropped) if self.dropped else ""
        return TraceTotals(self.writer.records, self.writer.lost, dropped)


def make_header(
    config: Config,
    pipelines: Mapping[str, tuple[Pipeline, Graph, Mapping[str, str]]],
    *,
    digests: bool,
    payloads: bool,
    devices: Sequence[int] = (),
) -> Header:
    """Tell what is traced, and where.

    Args:
        pipelines: By direction: the definition, the graph that runs, and what of it is off.
        devices: Ordinals of the GPUs that hold registered pages.
    """
    return Header(
        fields=FIELDS,
        unix_ns=time.time_ns(),
        clock_ns=now_ns(),
        digests=digests,
        payloads=payloads,
        versions={"orbitkv": version("orbitkv"), "python": platform.python_version()},
        hardware={
            "machine": platform.machine(),
            "kernel": platform.release(),
            "cpus": str(os.cpu_count()),
            "memory_nbytes": str(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")),
            "gpus": ", ".join(map(str, devices)),
            "pid": str(os.getpid()),
        },
        config={name: str(value) for name, value in asdict(config).items()},
        pipelines=tuple(
            TracedPipeline(
                direction,
                graph.name,
                pipeline.sha256,
                pipeline.text,
                {node.id: node.label for node in graph.nodes.values()},
                {node.id: node.lane for node in graph.nodes.values()},
                {node.id: tuple(u.name for u in node.stages) for node in graph.nodes.values()},
                tuple(
                    TracedEdge(str(e), e.src, e.dst, e.max_items, e.max_nbytes, e.on_full)
                    for e in graph.edges
                ),
                dict(off),
            )
            for direction, (pipeline, graph, off) in pipelines.items()
        ),
        bounds={"records": MAX_BUFFERED, "payload_nbytes": MAX_BUFFERED_PAYLOAD_NBYTES},
    )
