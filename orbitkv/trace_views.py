"""What a trace shows: Chrome trace events, where the time went, and two runs side by side."""

from __future__ import annotations

import itertools
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from orbitkv.runtime.recording import Recording
from orbitkv.runtime.trace_file import Span

Event = dict[str, Any]

_SLOWEST = 5


@dataclass(frozen=True, slots=True)
class Visited:
    """One batch in one node: the spans of its stages, in order."""

    spans: tuple[Span, ...]

    @property
    def first(self) -> Span:
        """Of the node's first stage, which tells of the queue."""
        return self.spans[0]

    @property
    def start_ns(self) -> int:
        """When the first stage began."""
        return self.spans[0].start_ns

    @property
    def end_ns(self) -> int:
        """When the last stage ended."""
        return self.spans[-1].end_ns

    @property
    def service_ns(self) -> int:
        """Of all stages, without waiting for room behind them."""
        return sum(span.end_ns - span.start_ns - span.paused_ns for span in self.spans)


def visits_of(recording: Recording) -> dict[int, Visited]:
    """The visits of a trace by number, in the order in which they began."""
    found: dict[int, list[Span]] = defaultdict(list)
    for span in recording.spans:
        found[span.batch].append(span)
    visits = {number: Visited(tuple(spans)) for number, spans in found.items()}
    return dict(sorted(visits.items(), key=lambda item: (item[1].start_ns, item[0])))


def span_s(recording: Recording) -> float:
    """From the first to the last thing that a trace tells of, in seconds."""
    times = [s.end_ns for s in recording.spans] + [e.ns for e in recording.ended.values()]
    starts = [s.start_ns for s in recording.spans] + [a.ns for a in recording.arrivals]
    return (max(times) - min(starts)) / 1e9 if times and starts else 0.0


# Chrome trace events ---------------------------------------------------------------------------


class Rows:
    """Rows of a process: as many as things overlap, for a row shows one after the other."""

    def __init__(self, tids: Iterator[int]) -> None:
        self._tids = tids
        self._rows: dict[str, list[tuple[int, int]]] = defaultdict(list)
        self.names: dict[int, str] = {}

    def place(self, name: str, start_ns: int, end_ns: int) -> int:
        """The row for something, in the order of their starts."""
        rows = self._rows[name]
        for position, (tid, busy_ns) in enumerate(rows):
            if busy_ns <= start_ns:
                rows[position] = (tid, end_ns)
                return tid
        tid = next(self._tids)
        rows.append((tid, end_ns))
        self.names[tid] = name if len(rows) == 1 else f"{name} ({len(rows)})"
        return tid


def to_chrome(recording: Recording) -> dict[str, Any]:
    """Render as Chrome trace events, in the JSON object format that Perfetto opens."""
    zero_ns = recording.header.clock_ns
    own = int(recording.header.hardware["pid"])
    tids = itertools.count(1)
    processes: dict[int, Rows] = {own: Rows(tids)}
    events: list[Event] = []

    def us(ns: int) -> float:
        return (ns - zero_ns) / 1000

    steps: dict[int, list[Event]] = defaultdict(list)
    for request in _requests(recording, own):
        rows = processes.setdefault(request["pid"], Rows(tids))
        start_ns, end_ns = request.pop("start_ns"), request.pop("end_ns")
        tid = rows.place(request.pop("row"), start_ns, end_ns)
        event = request | {"ph": "X", "tid": tid, "ts": us(start_ns)}
        events.append(event | {"dur": (end_ns - start_ns) / 1000})
        steps[request["args"]["ticket"]].append(event)
    for visit in visits_of(recording).values():
        lane = f"{visit.first.pipeline} {visit.first.lane}"
        tid = processes[own].place(lane, visit.start_ns, visit.end_ns)
        for span in visit.spans:
            event = {
                "name": f"{span.node} {span.stage}",
                "cat": span.pipeline,
                "ph": "X",
                "pid": own,
                "tid": tid,
                "ts": us(span.start_ns),
                "dur": (span.end_ns - span.start_ns) / 1000,
                "args": _arguments(span, recording),
            }
            events.append(event)
        first = {"pid": own, "tid": tid, "ts": us(visit.start_ns)}
        steps[visit.first.ticket].append(first)
    steps.pop(0, None)  # background work follows nobody
    events += itertools.chain.from_iterable(_flow(*step) for step in steps.items())
    events += _counters(recording, own, us)
    events.sort(key=lambda event: event["ts"])
    names = list(_names(processes, own))
    lost = {"lost_records": recording.lost, "cut": recording.cut or ""}
    return {
        "traceEvents": names + events,
        "displayTimeUnit": "ms",
        "otherData": recording.header.versions | recording.header.hardware | lost,
    }


def _requests(recording: Recording, own: int) -> Iterator[Event]:
    """Requests as they were under way, each in the process that made it."""
    for number, arrival in sorted(recording.tickets.items(), key=lambda item: item[1].ns):
        ended, remote = recording.ended.get(number), recording.remotes.get(number)
        row = f"session {remote.session}" if remote else "requests"
        yield {
            "name": arrival.kind,
            "cat": "request",
            "pid": remote.pid if remote else own,
            "row": row,
            "start_ns": arrival.ns,
            "end_ns": ended.ns if ended else arrival.ns,
            "args": {
                "ticket": number,
                "request": remote.number if remote else number,
                "namespace": recording.spaces.get(arrival.namespace, ""),
                "pages": len(arrival.hashes),
                "outcome": ended.outcome if ended else "not ended",
            },
        }


def _arguments(span: Span, recording: Recording) -> Event:
    return {
        "queue_wait_us": span.wait_ns / 1000,
        "blocked_us": span.blocked_ns / 1000,
        "in_nbytes": span.in_nbytes,
        "stored_nbytes": span.stored_nbytes,
        "segments": span.segments,
        "raw": span.raw,
        "generation": list(span.generations),
        "digest": span.digest.hex(),
        "outcome": span.outcome,
        "ended_by": span.ended_by,
        "edge": span.edge,
        "batch": span.batch,
        "ticket": span.ticket,
        "namespace": recording.spaces.get(span.namespace, ""),
    }


def _flow(ticket: int, steps: Sequence[Event]) -> Iterator[Event]:
    """An arrow through all that was done for a request; one step alone has none."""
    ordered = sorted(steps, key=lambda step: step["ts"])
    for position, step in enumerate(ordered if len(ordered) > 1 else ()):
        last = position == len(ordered) - 1
        event = {
            "name": "request",
            "cat": "flow",
            "ph": "f" if last else "t" if position else "s",
            "id": ticket,
            "pid": step["pid"],
            "tid": step["tid"],
            "ts": step["ts"],
        }
        yield event | ({"bp": "e"} if last else {})


def _counters(recording: Recording, pid: int, us: Any) -> Iterator[Event]:  # noqa: ANN401 - a clock
    for sample in recording.samples:
        for name, value in sample.values.items():
            kind = {"name": name, "ph": "C", "pid": pid, "ts": us(sample.ns)}
            yield kind | {"args": {"value": value}}
    for drop in recording.drops:
        event = {"name": f"{drop.edge}: {drop.reason}", "ph": "i", "s": "p", "pid": pid, "tid": 0}
        yield event | {"ts": us(drop.ns), "args": {"nbytes": drop.nbytes, "ticket": drop.ticket}}


def _names(processes: Mapping[int, Rows], own: int) -> Iterator[Event]:
    def meta(kind: str, pid: int, tid: int, **values: object) -> Event:
        return {"name": kind, "ph": "M", "pid": pid, "tid": tid, "args": values}

    for pid, rows in processes.items():
        name = "orbitkv" if pid == own else f"client {pid}"
        yield meta("process_name", pid, 0, name=name)
        for index, (tid, row) in enumerate(sorted(rows.names.items(), key=lambda item: item[1])):
            yield meta("thread_name", pid, tid, name=row)
            yield meta("thread_sort_index", pid, tid, sort_index=index)


# Where the time went ---------------------------------------------------------------------------


def summarise(recording: Recording, *, slowest: int = _SLOWEST) -> dict[str, Any]:
    """Add up a trace: by node, by arrow, by namespace, and the slowest requests one by one."""
    visits = visits_of(recording)
    return {
        "seconds": span_s(recording),
        "cut": recording.cut,
        "lost": recording.lost,
        "pipelines": {d: p.sha256 for d, p in recording.pipelines.items()},
        "nodes": list(_nodes(recording, visits.values())),
        "arrows": list(_arrows(recording, visits.values())),
        "namespaces": list(_namespaces(recording)),
        "slowest": list(_slowest(recording, visits, slowest)),
    }


def _nodes(recording: Recording, visits: Iterable[Visited]) -> Iterator[Event]:
    by_node: dict[tuple[str, str], list[Visited]] = defaultdict(list)
    for visit in visits:
        by_node[visit.first.pipeline, visit.first.node].append(visit)
    for direction, pipeline in recording.pipelines.items():
        for node in pipeline.lanes:
            found = by_node.get((direction, node), [])
            spans = [span for visit in found for span in visit.spans]
            stages: Counter[str] = Counter()
            for span in spans:
                stages[span.stage] += span.end_ns - span.start_ns - span.paused_ns
            outcomes = Counter(s.outcome for s in spans if s.outcome != "ok")
            yield {
                "pipeline": direction,
                "node": node,
                "lane": pipeline.lanes[node],
                "batches": len(found),
                "queue_s": sum(v.first.wait_ns + v.first.blocked_ns for v in found) / 1e9,
                "service_s": sum(v.service_ns for v in found) / 1e9,
                "in_nbytes": sum(v.first.in_nbytes for v in found),
                "stored_nbytes": sum(v.spans[-1].stored_nbytes for v in found),
                "stages_s": {stage: ns / 1e9 for stage, ns in stages.items()},
                "enqueued": sum(v.spans[-1].ended_by == "enqueued" for v in found),
                "missed_pages": sum(span.missed for span in spans),
                "outcomes": dict(outcomes),
            }


def _arrows(recording: Recording, visits: Iterable[Visited]) -> Iterator[Event]:
    by_edge: dict[tuple[str, str], list[Visited]] = defaultdict(list)
    for visit in visits:
        by_edge[visit.first.pipeline, visit.first.edge].append(visit)
    for direction, pipeline in recording.pipelines.items():
        edges = {edge.name: edge for edge in pipeline.edges}
        entries = [name for d, name in by_edge if d == direction and name and name not in edges]
        for name in (*sorted(entries), *edges):
            found, edge = by_edge.get((direction, name), []), edges.get(name)
            drops = [d for d in recording.drops if (d.pipeline, d.edge) == (direction, name)]
            nbytes, busy_s = sum(v.first.in_nbytes for v in found), _busy_s(found)
            yield {
                "pipeline": direction,
                "arrow": name,
                "src": edge.src if edge else None,
                "dst": edge.dst if edge else name.rpartition(" ")[2],
                "batches": len(found),
                "nbytes": nbytes,
                "wait_s": sum(v.first.wait_ns for v in found) / 1e9,
                "blocked_s": sum(v.first.blocked_ns for v in found) / 1e9,
                "longest_wait_s": max((v.first.wait_ns for v in found), default=0) / 1e9,
                "service_s": sum(v.service_ns for v in found) / 1e9,
                "busy_s": busy_s,
                "gb_s": nbytes / busy_s / 1e9 if busy_s else 0.0,
                "max_items": edge.max_items if edge else None,
                "max_nbytes": edge.max_nbytes if edge else None,
                "dropped": len(drops),
                "dropped_nbytes": sum(drop.nbytes for drop in drops),
                "drop_reasons": dict(Counter(drop.reason for drop in drops)),
            }


def _busy_s(visits: Iterable[Visited]) -> float:
    """How long at least one of them was under way."""
    busy_ns = until_ns = 0
    for visit in sorted(visits, key=lambda visit: visit.start_ns):
        busy_ns += max(0, visit.end_ns - max(visit.start_ns, until_ns))
        until_ns = max(until_ns, visit.end_ns)
    return busy_ns / 1e9


def _namespaces(recording: Recording) -> Iterator[Event]:
    for number, namespace in recording.spaces.items():
        arrivals = [a for a in recording.arrivals if a.namespace == number]
        ended = [recording.ended[a.ticket] for a in arrivals if a.ticket in recording.ended]
        spans = [s for s in recording.spans if s.namespace == number and s.edge]
        yield {
            "namespace": namespace,
            "requests": dict(Counter(arrival.kind for arrival in arrivals)),
            "outcomes": dict(Counter(end.outcome for end in ended)),
            "pages": sum(end.pages for end in ended),
            "missed": sum(end.missed for end in ended),
            "batches": len(spans),
            "nbytes": sum(s.in_nbytes for s in spans if s.edge.startswith("entry of ")),
        }


def _slowest(
    recording: Recording, visits: Mapping[int, Visited], count: int
) -> Iterator[dict[str, Any]]:
    whole = [
        (recording.ended[number].ns - arrival.ns, number)
        for number, arrival in recording.tickets.items()
        if number in recording.ended
    ]
    by_ticket: dict[int, list[Visited]] = defaultdict(list)
    for visit in visits.values():
        by_ticket[visit.first.ticket].append(visit)
    for taken_ns, number in sorted(whole, reverse=True)[:count]:
        ended = recording.ended[number]
        path = _critical_path(by_ticket[number], visits, ended.ns)
        steps = [
            {
                "node": visit.first.node,
                "edge": visit.first.edge,
                "blocked_s": visit.first.blocked_ns / 1e9,
                "wait_s": visit.first.wait_ns / 1e9,
                "service_s": max(0, min(visit.end_ns, ended.ns) - visit.start_ns) / 1e9,
            }
            for visit in path
        ]
        parts = ("blocked_s", "wait_s", "service_s")
        told_s = sum(step[part] for step in steps for part in parts)  # type: ignore[misc]
        yield {
            "ticket": number,
            "kind": recording.tickets[number].kind,
            "outcome": ended.outcome,
            "pages": ended.pages,
            "seconds": taken_ns / 1e9,
            "path": steps,
            "elsewhere_s": taken_ns / 1e9 - told_s,
        }


def _critical_path(
    own: Sequence[Visited], visits: Mapping[int, Visited], end_ns: int
) -> list[Visited]:
    """The last visit that the request waited for, and those that led to it."""
    waited_for = [visit for visit in own if visit.start_ns <= end_ns]
    if not waited_for:
        return []
    path = [max(waited_for, key=lambda visit: min(visit.end_ns, end_ns))]
    while (parent := visits.get(path[-1].first.parent)) is not None:
        path.append(parent)
    return path[::-1]


# Two runs --------------------------------------------------------------------------------------

_NODE_FIGURES = ("batches", "queue_s", "service_s", "in_nbytes", "stored_nbytes", "missed_pages")
_ARROW_FIGURES = ("batches", "nbytes", "wait_s", "blocked_s", "gb_s", "dropped")


def compare(one: Recording, other: Recording) -> dict[str, Any]:
    """Put two traces side by side: each figure as a pair."""
    a, b = summarise(one), summarise(other)
    return {
        "seconds": (a["seconds"], b["seconds"]),
        "same_pipelines": a["pipelines"] == b["pipelines"],
        "nodes": _pairs(a["nodes"], b["nodes"], "node", _NODE_FIGURES),
        "arrows": _pairs(a["arrows"], b["arrows"], "arrow", _ARROW_FIGURES),
    }


def _pairs(
    a: Sequence[Event], b: Sequence[Event], name: str, figures: Sequence[str]
) -> list[Event]:
    sides = [{(row["pipeline"], row[name]): row for row in rows} for rows in (a, b)]
    return [
        {"pipeline": key[0], name: key[1]}
        | {figure: tuple(side.get(key, {}).get(figure, 0) for side in sides) for figure in figures}
        for key in dict.fromkeys(itertools.chain(*sides))
    ]
