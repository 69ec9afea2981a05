"""Spans: what one pipeline's nodes and queues tell a trace of each batch."""

from __future__ import annotations

import asyncio
import hashlib
from collections import Counter
from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any, Protocol

from orbitkv.cache.budget import Budget
from orbitkv.cache.catalogue import Copy
from orbitkv.errors import OrbitError
from orbitkv.objects import RawReason
from orbitkv.runtime.lanes import drain_task
from orbitkv.runtime.trace import NO_TICKET, Tracer, guarded, now_ns
from orbitkv.runtime.trace_file import Drop, Payload, Span
from orbitkv.stages.base import Batch, ItemStage, Outputs, StageContext
from orbitkv.stages.batch import EncodedBatch, PageBatch, PublishBatch, RestoreBatch

_MOST_UNDER_WAY = 2**16  # batches remembered between two nodes


class _Queue(Protocol):
    """What is told of a queue."""

    name: str

    @property
    def items(self) -> int:
        """Batches in it."""
        ...


class PipelineTrace:
    """What the nodes and queues of one pipeline tell; none of it raises."""

    def __init__(self, tracer: Tracer, direction: str) -> None:
        self.tracer = tracer
        self.direction = direction
        self._sent: dict[int, _Sent] = {}
        self._waits: dict[int, tuple[int, int]] = {}
        self._taken: dict[int, tuple[str, int, int]] = {}

    def gauge(self, queues: Iterable[_Queue], budgets: Iterable[Budget]) -> None:
        """Sample how many batches wait in queues, and what is used of budgets."""
        for queue in queues:
            self.tracer.gauges[f"{self.direction} {queue.name}"] = partial(getattr, queue, "items")
        for budget in budgets:
            name = f"{self.direction} {budget.name}"
            self.tracer.gauges[name] = partial(getattr, budget, "used_nbytes")

    # Queues, by the identity of what is in them -------------------------------------------

    @guarded
    def blocked(self, item: object) -> None:
        """A queue has no room yet for a batch."""
        ns = now_ns()
        self._waits[id(item)] = (ns, ns)

    @guarded
    def entered(self, queue: _Queue, item: object) -> None:
        """A batch is in a queue."""
        del queue
        ns = now_ns()
        offered_ns, _ = self._waits.get(id(item), (ns, ns))
        self._waits[id(item)] = (offered_ns, ns)

    @guarded
    def taken(self, queue: _Queue, item: object) -> None:
        """A node takes a batch from a queue."""
        ns = now_ns()
        offered_ns, entered_ns = self._waits.pop(id(item), (ns, ns))
        self._taken[id(item)] = (queue.name, ns - entered_ns, entered_ns - offered_ns)

    @guarded
    def dropped(self, queue: _Queue, item: Any, error: OrbitError) -> None:  # noqa: ANN401 - any batch
        """A queue does not pass a batch on, which has not been abandoned yet."""
        self._waits.pop(id(item), None)
        parent, request, _ = self._sent.pop(id(item), _SUBMITTED)
        ticket, space = self._request(item, request)
        reason = type(error).__name__
        ns, nbytes = now_ns(), item.nbytes
        drop = Drop(ns, self.direction, queue.name, parent, ticket, space, nbytes, reason)
        self.tracer.put(drop, ns)

    # Nodes --------------------------------------------------------------------------------

    @guarded
    def visit(self, ctx: StageContext, batch: Batch) -> Visit:
        """A node begins to work on a batch."""
        parent, request, given = self._sent.pop(id(batch), _SUBMITTED)
        arrival = self._taken.pop(id(batch), ("", 0, 0))
        return Visit(self, ctx, parent, self._request(batch, request), arrival, given)

    def sent(self, visit: Visit, outputs: Outputs, given: _Measure) -> None:
        """Remember whose a batch is that goes to another node."""
        if len(self._sent) >= _MOST_UNDER_WAY:
            self._sent.clear()  # of a pipeline that was stopped; then some have no parent
        known = given if len(outputs) == 1 else None  # else it is of all of them
        for port, batch in outputs.items():
            if port in visit.live:
                self._sent[id(batch)] = (visit.number, visit.request, known)

    def _request(self, batch: Batch, inherited: tuple[int, int]) -> tuple[int, int]:
        found = self.tracer.request_of(batch)
        return found if found[0] else inherited


class Clocked:
    """An item stage, and the time that its items have taken on the lane."""

    __slots__ = ("_run_item", "taken_ns")

    def __init__(self, stage: ItemStage) -> None:
        self._run_item = stage.run_item
        self.taken_ns = 0

    def run_item(self, batch: Any, index: int) -> None:  # noqa: ANN401 - its port's type
        """As the stage's."""
        began_ns = now_ns()
        try:
            self._run_item(batch, index)
        finally:
            self.taken_ns += now_ns() - began_ns


class Visit:
    """One batch in one node: a span for each of the node's stages."""

    __slots__ = (
        "_arrival", "_batch", "_clocked", "_corruptions", "_digest", "_end_ns", "_given", "_items",
        "_missed", "_next", "_node", "_on_gpu", "_open", "_parent", "_paused_at_ns", "_paused_ns",
        "_pieces", "_stage", "_start_ns", "_trace", "live", "number", "request", "tracer",
    )  # fmt: skip

    def __init__(
        self,
        trace: PipelineTrace,
        ctx: StageContext,
        parent: int,
        request: tuple[int, int],
        arrival: tuple[str, int, int],
        given: _Measure | None,
    ) -> None:
        self.tracer = trace.tracer
        self.number = trace.tracer.next_visit()
        self.request = request
        self.live = ctx.live_outputs
        self._trace = trace
        self._node = ctx.node
        self._parent = parent
        self._arrival = arrival
        self._stage = 0
        self._open = False
        self._next = given  # of the batch that the next stage takes, where that is known
        self._end_ns = 0
        self._clocked: list[Clocked] = []
        self._digest = b""
        self._pieces = _NOTHING

    @guarded
    def begin(self, batch: Batch) -> None:
        """The next stage takes a batch."""
        self._open = True
        self._batch = batch
        self._given = self._next or _measure(batch)
        self._on_gpu = getattr(batch, "workspace", None) is not None
        self._items = None
        if isinstance(batch, RestoreBatch):
            self._items = batch.items  # another list where some are missed or loaded
            self._missed = len(batch.missed)
            self._corruptions = self.tracer.corruptions()
        self._paused_ns = self._paused_at_ns = self._end_ns = 0
        self._start_ns = now_ns()

    def clocked(self, stages: Sequence[ItemStage]) -> Sequence[Clocked]:
        """The item stages that are to run as one, to be run in place of themselves."""
        self._clocked = [Clocked(stage) for stage in stages]
        return self._clocked

    @guarded
    def pause(self, outputs: Outputs) -> None:
        """A piece is there, and waits for room on its edge."""
        given = self._sum(outputs)
        self._trace.sent(self, outputs, given)
        self._pieces += given
        self._paused_at_ns = now_ns()

    @guarded
    def resume(self) -> None:
        """It is on its way."""
        self._paused_ns += now_ns() - self._paused_at_ns
        self._paused_at_ns = 0

    @guarded
    def stop(self) -> None:
        """The stage has done its work."""
        self._end_ns = now_ns()

    @property
    def hashes(self) -> bool:
        """Whether what a stage gave is to be hashed, or recorded."""
        return (self.tracer.digests or self.tracer.payloads) and self.tracer.dropped is None

    async def hash(self, batch: Batch) -> None:
        """Hash what a stage gave, on a thread; the batch must stay as it is meanwhile."""
        try:
            hashed = asyncio.to_thread(_digest, batch, self.tracer.payloads)
            self._digest, payload = await drain_task(hashed)
        except Exception as error:  # noqa: BLE001 - as above
            self.tracer.drop(error)
            return
        if payload:
            self.tracer.put(Payload(self.number, *payload), self._end_ns, len(payload[1]))

    @guarded
    def end(self, outputs: Outputs) -> None:
        """Record the stage that has ended, or the stages that ran as one."""
        if not self._end_ns:
            self._end_ns = now_ns()
        given = self._sum(outputs) if outputs else self._pieces
        given = self._next = given if given.batches else self._given
        batch = next(iter(outputs.values()), self._batch)
        missed, outcome = 0, "ok"
        if isinstance(self._batch, RestoreBatch) and isinstance(batch, RestoreBatch):
            missed = len(batch.missed) - self._missed
        if missed > 0:
            found = self.tracer.corruptions() > self._corruptions
            outcome = "corrupt" if found else "missed"
        workspace = getattr(batch, "workspace", None) if outputs else None
        ended_by = "event" if self._on_gpu else "host"
        if workspace is not None and (workspace.running or workspace.ready is not None):
            ended_by = "enqueued"
        self._record(outputs, given, outcome, max(missed, 0), ended_by)

    @guarded
    def fail(self, error: BaseException) -> None:
        """Record the stage that failed, if one was at work."""
        if self._open:
            self.stop()
            self._record({}, self._given, type(error).__name__, 0, "host")

    @guarded
    def cancelled(self, batch: Batch) -> None:
        """Record that the next stage was not begun."""
        self.begin(batch)
        self.stop()
        self._record({}, _NOTHING, "cancelled", 0, "host")

    @guarded
    def leave(self, outputs: Outputs) -> None:
        """The batch leaves the node."""
        if outputs and self._next:
            self._trace.sent(self, outputs, self._next)
        self.tracer.sample(self._end_ns)

    def _sum(self, outputs: Outputs) -> _Measure:
        total = _NOTHING
        for batch in outputs.values():
            same = isinstance(batch, RestoreBatch) and batch.items is self._items
            found = self._given if same else _measure(batch)
            total = total + found if total.batches else found
        return total

    def _record(
        self, outputs: Outputs, given: _Measure, outcome: str, missed: int, ended_by: str
    ) -> None:
        self._open = False
        start_ns, end_ns = self._start_ns, self._end_ns
        # Side by side on the row, each as long as its items took; the last has what is left.
        for clocked in self._clocked[:-1]:
            until_ns = min(start_ns + clocked.taken_ns, end_ns)
            self._put(start_ns, until_ns, given, (outcome, 0, ended_by), batch=None)
            start_ns = until_ns
        batch = next(iter(outputs.values()), None)
        self._put(start_ns, end_ns, given, (outcome, missed, ended_by), batch=batch)
        self._clocked, self._digest, self._pieces = [], b"", _NOTHING

    def _put(
        self,
        start_ns: int,
        end_ns: int,
        given: _Measure,
        ending: tuple[str, int, str],
        *,
        batch: Batch | None,
    ) -> None:
        edge, wait_ns, blocked_ns = self._arrival if self._stage == 0 else ("", 0, 0)
        stages = self._node.stages
        outcome, missed, ended_by = ending
        self.tracer.put(
            Span(
                self._trace.direction,
                self._node.id,
                stages[min(self._stage, len(stages) - 1)].name,
                self._node.lane,
                self.number,
                self._parent,
                *self.request,
                edge,
                start_ns,
                end_ns,
                wait_ns,
                blocked_ns,
                self._paused_ns,
                self._given.nbytes,
                given.nbytes,
                given.segments or self._given.segments,
                _raw_reasons(batch),
                given.generations if given.generations[1] else self._given.generations,
                self._digest if batch is not None else b"",
                outcome,
                missed,
                ended_by,
            ),
            self._end_ns,
        )
        self._stage += 1


class _Measure:
    """What is told of batches: how many, their bytes, segments, and generations."""

    __slots__ = ("batches", "generations", "nbytes", "segments")

    def __init__(
        self,
        batches: int = 0,
        nbytes: int = 0,
        segments: int = 0,
        generations: tuple[int, int] = (0, 0),
    ) -> None:
        self.batches = batches
        self.nbytes = nbytes
        self.segments = segments
        self.generations = generations

    def __add__(self, other: _Measure) -> _Measure:
        known = [g for g in (*self.generations, *other.generations) if g]
        return _Measure(
            self.batches + other.batches,
            self.nbytes + other.nbytes,
            self.segments + other.segments,
            (min(known), max(known)) if known else (0, 0),
        )


_NOTHING = _Measure()
_Sent = tuple[int, tuple[int, int], _Measure | None]
_SUBMITTED: _Sent = (0, NO_TICKET, None)


def _measure(batch: Any) -> _Measure:  # noqa: ANN401 - any batch, a user's own too
    """Tell of a batch what its kind has."""
    nbytes, segments = batch.nbytes, 0
    copies: Sequence[Copy] = ()
    if isinstance(batch, RestoreBatch):
        copies = [copy for copy, _ in batch.items]
        segments = sum(len(target.slot_indices) for _, target in batch.items)
    elif isinstance(batch, EncodedBatch):
        copies = [entry.home for entry in batch.objects if entry.home]
        segments = sum(len(entry.slots) for entry in batch.objects)
        if not batch.workspace and batch.objects and batch.objects[0].segments:
            nbytes = _stored_nbytes(batch)
    elif isinstance(batch, PageBatch):
        segments = sum(len(slots) for _, _, slots in batch.objects)
    elif isinstance(batch, PublishBatch):
        groups = batch.tensors.geometry.groups
        segments = sum(len(groups[key.group]) for key, _ in batch.pages)
    else:
        copies = getattr(batch, "copies", ())
    generations = [copy.generation for copy in copies]
    ends = (min(generations), max(generations)) if generations else (0, 0)
    return _Measure(1, nbytes, segments, ends)


def _stored_nbytes(batch: EncodedBatch) -> int:
    """Of all segments; where each is raw, objects with the same slots are as long."""
    if not batch.codecs.chosen_raw:
        return sum(s.payload.nbytes for entry in batch.objects for s in entry.segments)
    nbytes: dict[tuple[int, ...], int] = {}
    total = 0
    for entry in batch.objects:
        if entry.slots not in nbytes:
            nbytes[entry.slots] = sum(segment.payload.nbytes for segment in entry.segments)
        total += nbytes[entry.slots]
    return total


def _raw_reasons(batch: Batch | None) -> dict[str, int]:
    if not isinstance(batch, EncodedBatch):
        return {}
    if batch.codecs.chosen_raw:
        return {"chosen": sum(len(entry.slots) for entry in batch.objects)}
    if batch.workspace:
        found: Counter[int] = Counter(
            place.raw_reason
            for entry in batch.objects
            if entry.layout
            for place in entry.layout.places
            if place.raw_reason
        )
    else:
        found = Counter(s.raw_reason for e in batch.objects for s in e.segments if not s.format)
    return {RawReason(reason).name.lower(): count for reason, count in found.items()}


def _digest(
    batch: Any,  # noqa: ANN401 - any batch
    payloads: bool,  # noqa: FBT001 - called by an executor
) -> tuple[bytes, tuple[tuple[bytes, ...], bytes] | None]:
    """Hash what a batch holds in host memory; of pages to be saved, give the bytes too."""
    if getattr(batch, "workspace", None) is not None or batch.tensors.device is not None:
        return b"", None
    pieces: list[Any] = []
    keys: tuple[bytes, ...] = ()
    tensors = batch.tensors
    if isinstance(batch, PageBatch):
        keys = tuple(key.digest for key, _, _ in batch.objects)
        places = [(slot, index) for _, index, slots in batch.objects for slot in slots]
        pieces = [tensors.segment(*place).tobytes() for place in places]
    elif isinstance(batch, EncodedBatch):
        for segment in (s for entry in batch.objects for s in entry.segments):
            pieces += [bytes([segment.format]), segment.payload]
    elif isinstance(batch, RestoreBatch) and batch.placed:
        pieces = [
            tensors.segment(slot, target.page_index).tobytes()
            for _, target in batch.items
            for slot in target.slot_indices
        ]
    elif isinstance(batch, RestoreBatch):
        pieces = [copy.memory for copy, _ in batch.items if copy.memory is not None]
    if not pieces:
        return b"", None
    sha256 = hashlib.sha256()
    for piece in pieces:
        sha256.update(piece)
    wanted = payloads and isinstance(batch, PageBatch)
    return sha256.digest(), (keys, b"".join(pieces)) if wanted else None
