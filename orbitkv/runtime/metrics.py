"""Metrics: a daemon's snapshot as Prometheus reads it. ``docs/metrics.md`` lists them.

Figures are taken when they are asked for; nothing is counted twice. A new counter of the catalogue
is one line in ``COUNTERS``; until it has one, it is there as ``orbitkv_events_total``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from prometheus_client import CollectorRegistry, Histogram, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from orbitkv.runtime.channel import ChannelStatistics
from orbitkv.runtime.core import ArenaStatistics
from orbitkv.runtime.runtime import NodeStatistics
from orbitkv.runtime.wire import DaemonStatus

Samples = Iterable[tuple[tuple[str, ...], float]]
Labels = tuple[str, ...]

_SECONDS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30)


@dataclass(frozen=True, slots=True)
class Metric:
    """One metric: its name without ``_total``, and how to read it from a snapshot."""

    name: str
    help: str
    labels: Labels
    read: Callable[[DaemonStatus], Samples]
    counts: bool = False


def _one(read: Callable[[DaemonStatus], float]) -> Callable[[DaemonStatus], Samples]:
    return lambda status: [((), read(status))]


def _nodes(
    read: Callable[[NodeStatistics], float],
) -> Callable[[DaemonStatus], Samples]:
    return lambda status: [
        ((pipeline, node), read(found))
        for pipeline, nodes in status.statistics.nodes.items()
        for node, found in nodes.items()
    ]


def _channels(
    read: Callable[[ChannelStatistics], float],
) -> Callable[[DaemonStatus], Samples]:
    return lambda status: [
        ((pipeline, found.name), read(found))
        for pipeline, channels in status.statistics.channels.items()
        for found in channels
    ]


def _arenas(read: Callable[[ArenaStatistics], float]) -> Callable[[DaemonStatus], Samples]:
    return lambda status: [
        ((lane,), read(arena)) for lane, arena in status.statistics.arenas.items()
    ]


def _limit(nbytes: int | None) -> float:
    return math.inf if nbytes is None else nbytes


_EDGE = ("pipeline", "edge")
_NODE = ("pipeline", "node")

METRICS = (
    Metric("orbitkv_up_seconds", "Since the daemon started.", (), _one(lambda s: s.up_s)),
    Metric("orbitkv_sessions", "Open sessions.", (), _one(lambda s: s.sessions)),
    Metric("orbitkv_instances", "Registered instances.", (), _one(lambda s: s.instances)),
    Metric("orbitkv_leases", "Leases that clients hold.", (), _one(lambda s: s.leases)),
    Metric("orbitkv_tickets", "Saves and restores under way.", (), _one(lambda s: s.tickets)),
    Metric(
        "orbitkv_sessions_ended",
        "Sessions that have ended.",
        (),
        _one(lambda s: s.ended_sessions),
        counts=True,
    ),
    Metric(
        "orbitkv_sessions_refused",
        "Connections that got no session.",
        (),
        _one(lambda s: s.refused_sessions),
        counts=True,
    ),
    Metric(
        "orbitkv_pool_capacity_bytes",
        "DRAM for encoded objects.",
        (),
        _one(lambda s: s.statistics.pool_capacity_nbytes),
    ),
    Metric(
        "orbitkv_pool_used_bytes",
        "DRAM that objects take.",
        (),
        _one(lambda s: s.statistics.pool_used_nbytes),
    ),
    Metric(
        "orbitkv_protected_bytes",
        "DRAM of objects that are protected.",
        (),
        _one(lambda s: s.statistics.counters.get("protected_nbytes", 0)),
    ),
    Metric(
        "orbitkv_pool_largest_free_bytes",
        "Longest free range of the pool.",
        (),
        _one(lambda s: s.statistics.pool_largest_free_nbytes),
    ),
    Metric(
        "orbitkv_ssd_capacity_bytes",
        "SSD for encoded objects.",
        (),
        _one(lambda s: s.statistics.ssd_capacity_nbytes),
    ),
    Metric(
        "orbitkv_ssd_used_bytes",
        "SSD that objects take.",
        (),
        _one(lambda s: s.statistics.ssd_used_nbytes),
    ),
    Metric(
        "orbitkv_query_used_bytes",
        "Stored bytes that leases hold.",
        (),
        _one(lambda s: s.statistics.query_used_nbytes),
    ),
    Metric(
        "orbitkv_query_budget_bytes",
        "Stored bytes that leases may hold; +Inf: any number.",
        (),
        _one(lambda s: _limit(s.statistics.query_budget_nbytes)),
    ),
    Metric(
        "orbitkv_arena_capacity_bytes",
        "Workspace that a lane has allocated on a GPU.",
        ("lane",),
        _arenas(lambda a: a.capacity_nbytes),
    ),
    Metric(
        "orbitkv_arena_used_bytes",
        "Workspace that a lane's batches hold on a GPU.",
        ("lane",),
        _arenas(lambda a: a.used_nbytes),
    ),
    Metric(
        "orbitkv_node_batches",
        "Batches that a node has worked on.",
        _NODE,
        _nodes(lambda n: n.batches),
        counts=True,
    ),
    Metric(
        "orbitkv_node_failed_batches",
        "Batches that a node gave up.",
        _NODE,
        _nodes(lambda n: n.failed),
        counts=True,
    ),
    Metric(
        "orbitkv_node_busy_seconds",
        "Time that a node had a batch in its hands.",
        _NODE,
        _nodes(lambda n: n.busy_s),
        counts=True,
    ),
    Metric(
        "orbitkv_node_available",
        "1 where the node runs here, 0 where it is switched off.",
        _NODE,
        lambda s: [
            *(
                ((pipeline, node), 1.0)
                for pipeline, nodes in s.statistics.nodes.items()
                for node in nodes
            ),
            *(
                ((pipeline, node), 0.0)
                for pipeline, nodes in s.statistics.unavailable.items()
                for node in nodes
            ),
        ],
    ),
    Metric("orbitkv_edge_items", "Batches that wait.", _EDGE, _channels(lambda c: c.items)),
    Metric("orbitkv_edge_bytes", "Bytes that wait.", _EDGE, _channels(lambda c: c.nbytes)),
    Metric(
        "orbitkv_edge_senders_waiting",
        "Batches for which an edge has no room.",
        _EDGE,
        _channels(lambda c: c.senders_waiting),
    ),
    Metric(
        "orbitkv_edge_passed_items",
        "Batches that have passed.",
        _EDGE,
        _channels(lambda c: c.passed_items),
        counts=True,
    ),
    Metric(
        "orbitkv_edge_passed_bytes",
        "Bytes that have passed.",
        _EDGE,
        _channels(lambda c: c.passed_nbytes),
        counts=True,
    ),
    Metric(
        "orbitkv_edge_dropped_items",
        "Batches dropped because an edge was full.",
        _EDGE,
        _channels(lambda c: c.dropped_items),
        counts=True,
    ),
)


@dataclass(frozen=True, slots=True)
class Named:
    """What a counter by name is as a metric. Counters may share one, by different labels."""

    metric: str
    help: str
    labels: Mapping[str, str]


def _named(metric: str, text: str, **labels: str) -> Named:
    return Named(metric, text, labels)


_EVICTED = "Objects evicted, by tier."
_CORRUPT = "Objects found damaged, by tier."
_WRITES = "Objects asked to be written to SSD, by what became of them."
_FAULTS = "Objects that could not be written to SSD, or read from it."
_SSD_NBYTES = "Bytes moved between DRAM and SSD."
_FOUND = "Objects that queries found, by tier."
_CLASSES = "Objects evicted from DRAM, by their class."
_SKIPS = "Writes to SSD that the write policy did not ask for, by reason."
_LFU = "New objects that LFU admission judged."
_REFUSED = "Queries that got nothing, because their pages exceed a budget."
_DIRECT = "Objects moved between GPU and SSD without DRAM."
_DIRECT_NBYTES = "Bytes moved between GPU and SSD without DRAM."
_SAVED = "Bytes that saves have stored: of pages, and of their objects."
_RESTORED = "Bytes that restores have placed: of pages, and of their objects."
_DIRECT_REFUSED = "Objects left to U although the direct route is in use."
_DIRECT_FAULTS = "Failures of cuFile; the first closes the direct route until a restart."
_DIRECT_TRANSFERS = "Reads that cuFile was asked for, of up to 4 MiB and several objects each."
_CHECKPOINTS = "Checkpoints of the SSD index."
_READS = "Objects asked from SSD; shared: another request had asked already."
_TWICE = "Objects that came when they were there already, by tier."

COUNTERS: Mapping[str, Named] = {
    "evicted_dram": _named("orbitkv_evicted_objects", _EVICTED, tier="dram"),
    "evicted_ssd": _named("orbitkv_evicted_objects", _EVICTED, tier="ssd"),
    "corrupt_dram": _named("orbitkv_corrupt_objects", _CORRUPT, tier="dram"),
    "corrupt_ssd": _named("orbitkv_corrupt_objects", _CORRUPT, tier="ssd"),
    "ssd_writes": _named("orbitkv_ssd_writes", _WRITES, result="written"),
    "ssd_writes_dropped": _named("orbitkv_ssd_writes", _WRITES, result="dropped"),
    "ssd_writes_dead": _named("orbitkv_ssd_writes", _WRITES, result="dead"),
    "ssd_writes_resident": _named("orbitkv_ssd_writes", _WRITES, result="resident"),
    "ssd_writes_no_room": _named("orbitkv_ssd_writes", _WRITES, result="no_room"),
    "ssd_write_faults": _named("orbitkv_ssd_faults", _FAULTS, direction="write"),
    "ssd_read_faults": _named("orbitkv_ssd_faults", _FAULTS, direction="read"),
    "ssd_written_nbytes": _named("orbitkv_ssd_bytes", _SSD_NBYTES, direction="write"),
    "ssd_read_nbytes": _named("orbitkv_ssd_bytes", _SSD_NBYTES, direction="read"),
    "pool_wait_expired": _named(
        "orbitkv_pool_wait_expired", "Demand reads that found no pool memory in time."
    ),
    "encoded_segments": _named("orbitkv_encoded_segments", "Segments stored encoded."),
    "encoded_original_nbytes": _named(
        "orbitkv_codec_bytes", "Bytes of encoded segments.", kind="logical"
    ),
    "encoded_stored_nbytes": _named(
        "orbitkv_codec_bytes", "Bytes of encoded segments.", kind="stored"
    ),
    "undecodable": _named("orbitkv_decode_failures", "Objects that could not be decoded."),
    "queries": _named("orbitkv_queries", "Prefix queries."),
    "queried_pages": _named("orbitkv_queried_pages", "Pages that queries asked for."),
    "found_pages": _named("orbitkv_found_pages", "Pages that queries found, as a prefix."),
    "found_objects_dram": _named("orbitkv_found_objects", _FOUND, tier="dram"),
    "evicted_reclaimable": Named("orbitkv_evicted_class", _CLASSES, {"class": "reclaimable"}),
    "evicted_probationary": Named("orbitkv_evicted_class", _CLASSES, {"class": "probationary"}),
    "evicted_protected": Named("orbitkv_evicted_class", _CLASSES, {"class": "protected"}),
    "promotions": _named("orbitkv_promotions", "Objects that became protected."),
    "demotions": _named("orbitkv_demotions", "Objects that were protected, and are no longer."),
    "ssd_writes_admitted": _named("orbitkv_ssd_writes_admitted", "Writes the policy asked for."),
    "ssd_skips_cold": _named("orbitkv_ssd_admission_skips", _SKIPS, reason="cold"),
    "ssd_skips_resident": _named("orbitkv_ssd_admission_skips", _SKIPS, reason="resident"),
    "ssd_skips_pending": _named("orbitkv_ssd_admission_skips", _SKIPS, reason="pending"),
    "ssd_skips_duplicate": _named("orbitkv_ssd_admission_skips", _SKIPS, reason="duplicate"),
    "lfu_admitted": _named("orbitkv_lfu_decisions", _LFU, result="admitted"),
    "lfu_rejected": _named("orbitkv_lfu_decisions", _LFU, result="rejected"),
    "query_oversized": _named("orbitkv_queries_refused", _REFUSED, reason="oversized"),
    "query_budget_full": _named("orbitkv_queries_refused", _REFUSED, reason="budget_full"),
    "leases_expired": _named("orbitkv_leases_expired", "Leases that nobody claimed in time."),
    "ssd_reads": _named("orbitkv_ssd_reads", _READS, result="read"),
    "ssd_reads_shared": _named("orbitkv_ssd_reads", _READS, result="shared"),
    "duplicate_dram": _named("orbitkv_duplicate_objects", _TWICE, tier="dram"),
    "duplicate_ssd": _named("orbitkv_duplicate_objects", _TWICE, tier="ssd"),
    "ssd_checkpoints": _named("orbitkv_ssd_checkpoints", _CHECKPOINTS, result="written"),
    "ssd_checkpoint_faults": _named("orbitkv_ssd_checkpoints", _CHECKPOINTS, result="failed"),
    "direct_refused": _named("orbitkv_direct_refused", _DIRECT_REFUSED),
    "direct_faults": _named("orbitkv_direct_faults", _DIRECT_FAULTS),
    "direct_transfers": _named("orbitkv_direct_transfers", _DIRECT_TRANSFERS),
    "direct_writes": _named("orbitkv_direct_objects", _DIRECT, direction="write"),
    "direct_reads": _named("orbitkv_direct_objects", _DIRECT, direction="read"),
    "direct_written_nbytes": _named("orbitkv_direct_bytes", _DIRECT_NBYTES, direction="write"),
    "direct_read_nbytes": _named("orbitkv_direct_bytes", _DIRECT_NBYTES, direction="read"),
    "saved_logical_nbytes": _named("orbitkv_saved_bytes", _SAVED, kind="logical"),
    "saved_stored_nbytes": _named("orbitkv_saved_bytes", _SAVED, kind="stored"),
    "restored_logical_nbytes": _named("orbitkv_restored_bytes", _RESTORED, kind="logical"),
    "restored_stored_nbytes": _named("orbitkv_restored_bytes", _RESTORED, kind="stored"),
    "found_objects_ssd": _named("orbitkv_found_objects", _FOUND, tier="ssd"),
}

_RAW = _named("orbitkv_raw_segments", "Segments stored raw, by reason.")
_OTHER = _named("orbitkv_events", "Counters that have no metric of their own yet, by name.")


class Metrics:
    """All metrics of one daemon. Those that are no part of a snapshot are kept here."""

    def __init__(self) -> None:
        self._kept = CollectorRegistry()
        self._seconds = Histogram(
            "orbitkv_request_seconds",
            "From a save's or restore's arrival to its end, by outcome.",
            ("outcome",),
            buckets=_SECONDS,
            registry=self._kept,
        )
        ProcessCollector(registry=self._kept)

    def observe(self, outcome: str, seconds: float) -> None:
        """Note how long a save or a restore took."""
        self._seconds.labels(outcome).observe(seconds)

    def render(self, status: DaemonStatus, faults: int) -> bytes:
        """Write a snapshot in Prometheus' text format.

        Args:
            faults: Reasons for which the daemon's health is degraded.
        """
        registry = CollectorRegistry()
        registry.register(_Snapshot(status, faults))
        return generate_latest(registry) + generate_latest(self._kept)


class _Snapshot(Collector):
    """Hands one snapshot over."""

    def __init__(self, status: DaemonStatus, faults: int) -> None:
        self._status = status
        self._faults = faults

    def collect(self) -> Iterator[Any]:
        """All metrics, with their samples."""
        degraded = "Reasons for which the daemon's health is degraded."
        yield GaugeMetricFamily("orbitkv_degraded_reasons", degraded, self._faults)
        for metric in METRICS:
            yield _family(
                metric.name,
                metric.help,
                metric.labels,
                metric.counts,
                [(labels, value) for labels, value in metric.read(self._status)],
            )
        yield from self._counters()

    def _counters(self) -> Iterator[Any]:
        counters = {**self._status.statistics.counters, **self._status.counters}
        counters.pop("protected_nbytes", None)  # which rises and falls
        found: dict[str, tuple[Named, list[tuple[tuple[str, ...], float]]]] = {}
        # Those that have a metric are there from the start, as zero.
        for name in dict.fromkeys((*COUNTERS, *counters)):
            named, labels = _place(name)
            entry = found.setdefault(named.metric, (named, []))
            entry[1].append((labels, float(counters.get(name, 0))))
        for named, samples in found.values():
            yield _family(named.metric, named.help, _label_names(named), True, samples)  # noqa: FBT003


def _place(name: str) -> tuple[Named, tuple[str, ...]]:
    """The metric of a counter, and its labels' values."""
    if named := COUNTERS.get(name):
        return named, tuple(named.labels.values())
    if name.startswith("raw_"):
        return _RAW, (name.removeprefix("raw_"),)
    return _OTHER, (name,)


def _label_names(named: Named) -> Labels:
    if named is _RAW:
        return ("reason",)
    return ("event",) if named is _OTHER else tuple(named.labels)


def _family(name: str, text: str, labels: Labels, counts: bool, samples: Samples) -> Any:  # noqa: ANN401, FBT001
    kind = CounterMetricFamily if counts else GaugeMetricFamily
    family = kind(name, text, labels=labels)
    for values, value in samples:
        family.add_metric(values, value)
    return family


def metric_names() -> list[str]:
    """Every metric's name as Prometheus sees it, for the documentation's test."""
    names = [f"{m.name}_total" if m.counts else m.name for m in METRICS]
    names += [f"{named.metric}_total" for named in (*COUNTERS.values(), _RAW, _OTHER)]
    return sorted({*names, "orbitkv_degraded_reasons", "orbitkv_request_seconds"})
