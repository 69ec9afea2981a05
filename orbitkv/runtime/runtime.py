"""Runtime: binds a graph's nodes to lanes and runs one task a node."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Protocol, Self

import structlog

from orbitkv.cache.budget import Budget
from orbitkv.cache.catalogue import Catalogue
from orbitkv.cache.direct import DirectRoute
from orbitkv.codecs.slots import SlotCodecs, raw_slots
from orbitkv.config import Config
from orbitkv.errors import (
    Cancelled,
    Closed,
    CorruptObject,
    Dropped,
    OrbitError,
    StageFault,
    Unavailable,
)
from orbitkv.graph import Edge, Graph, Node
from orbitkv.runtime.channel import Channel, ChannelStatistics, Inbox
from orbitkv.runtime.spans import PipelineTrace, Visit
from orbitkv.segment import Geometry
from orbitkv.stages.base import (
    Batch,
    ItemBatch,
    ItemStage,
    Lane,
    Outputs,
    SplitStage,
    Stage,
    StageContext,
    unavailable_reason,
)


class OwnedLane(Lane, Protocol):
    """A lane as the runtime holds it: started before the first batch, closed after the last."""

    async def start(self) -> None:
        """Take what the lane needs, on the running loop."""
        ...

    async def close(self) -> None:
        """Wait for everything submitted, then give it back."""
        ...


LaneFactory = Callable[[Node], OwnedLane]


@dataclass(frozen=True, slots=True)
class NodeStatistics:
    """What one node has done since its runtime started."""

    batches: int
    failed: int
    busy_s: float


@dataclass(slots=True)
class Stopping:
    """Why a pipeline stops early: the first bug, which every batch that it ends is told."""

    channels: list[Channel[Batch]]
    fault: OrbitError | None = None

    def explain(self, node: Node, error: BaseException) -> OrbitError:
        """Turn what ended a stage into the fault of its batch."""
        if not isinstance(error, asyncio.CancelledError) and self.fault is None:
            self.fault = StageFault(f"node {node.id} failed, and stops its pipeline: {error!r}")
            for channel in self.channels:  # now: later, those who wait to send are cancelled
                channel.abandon_all(self.fault)
        return self.fault or Closed(f"node {node.id} was stopped")


@dataclass(slots=True)
class Work:
    """A batch in a node, as what it has become there: that is to be abandoned if a stage fails."""

    batch: Batch
    visit: Visit | None = None

    def cancelled(self) -> bool:
        """Whether the batch's request was cancelled; then the batch has been ended."""
        if self.batch.part is None or not self.batch.part.ticket.cancelled:
            return False
        if self.visit:
            self.visit.cancelled(self.batch)
        self.batch.abandon(Cancelled("the request was cancelled"))
        return True

    def abandon(self, error: OrbitError) -> None:
        """End the batch, as a stage has failed."""
        if self.visit:
            self.visit.fail(error)
        self.batch.abandon(error)


@dataclass(slots=True)
class BoundNode:
    """A node with its lane, its stages, and the channels of its edges.

    Attributes:
        splitter: The last stage, where that emits piece by piece; it is none of the steps.
        trace: Is told of every batch; None: nobody is.
    """

    node: Node
    steps: tuple[Stage | tuple[ItemStage, ...], ...]
    splitter: SplitStage | None
    ctx: StageContext
    inputs: Inbox[Batch]
    outputs: Mapping[str, Channel[Batch]]
    stopping: Stopping
    batches: int = 0
    failed: int = 0
    busy_s: float = 0.0
    trace: PipelineTrace | None = None

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        for channel in self.outputs.values():
            channel.close()

    async def run_stages(self, batch: Batch) -> Outputs:
        """Run the stages in order on the batch, which is abandoned if any of them fails.

        Between two stages a batch whose ticket was cancelled goes no further.
        """
        started_s = time.perf_counter()
        work = Work(batch)
        if self.trace is not None:
            work.visit = self.trace.visit(self.ctx, batch)
        try:
            return await self._run_steps(work)
        except OrbitError as error:
            self.failed += 1
            work.abandon(error)
            return {}
        except BaseException as error:
            bug = _as_bug(error)
            work.abandon(self.stopping.explain(self.node, bug))
            if bug is error:
                raise
            raise bug from error
        finally:
            self.batches += 1
            self.busy_s += time.perf_counter() - started_s

    async def _run_steps(self, work: Work) -> Outputs:
        outputs: Outputs = {"in": work.batch}
        for step in self.steps:
            if not outputs:
                return {}  # the stage before ended the batch itself
            work.batch = next(iter(outputs.values()))
            if work.cancelled():
                return {}
            outputs = await self._run_step(step, work)
        if self.splitter and outputs:
            work.batch = next(iter(outputs.values()))
            outputs = await self._split(self.splitter, work)
        if work.visit:
            work.visit.leave(outputs)
        return outputs

    async def _run_step(self, step: Stage | tuple[ItemStage, ...], work: Work) -> Outputs:
        visit = work.visit
        if visit:
            visit.begin(work.batch)
        if not isinstance(step, tuple):
            outputs = _checked(step, work.batch, await step.run(work.batch, self.ctx))
        else:
            for stage in step:
                outputs = await stage.prepare(work.batch, self.ctx)
                work.batch = next(iter(outputs.values()))
            await self._run_items(visit.clocked(step) if visit else step, work.batch)
        if visit:
            if visit.hashes and len(outputs) == 1:
                visit.stop()
                work.batch = next(iter(outputs.values()))
                await visit.hash(work.batch)
            visit.end(outputs)
        return outputs

    async def _run_items(self, stages: Sequence[RunsItems], batch: Any) -> None:  # noqa: ANN401
        """Run neighbouring item stages as one on the lane; ``batch`` is an ``ItemBatch``."""
        if batch.units():
            faults = await self.ctx.lane.run(run_items, stages, batch)
            if faults:
                batch.reject(faults, self.ctx.log)

    async def _split(self, stage: SplitStage, work: Work) -> Outputs:
        """Send each piece on as soon as it stands; nothing is left to emit."""
        visit = work.visit
        if work.cancelled():
            return {}
        if visit:
            visit.begin(work.batch)
        async with contextlib.aclosing(stage.split(work.batch, self.ctx)) as pieces:
            async for outputs in pieces:
                if visit:
                    visit.pause(outputs)
                await self.emit(outputs)
                if visit:
                    visit.resume()
        if visit:
            visit.end({})
        return {}

    async def emit(self, outputs: Outputs) -> None:
        """Send on, edge by edge. Only here does a node feel that the next one is slow."""
        rest = dict(outputs)
        try:
            for port in outputs:
                batch, channel = rest.pop(port), self.outputs.get(port)
                if channel is None:
                    batch.abandon(Dropped(f"{self.node.id}.{port} leads nowhere here"))
                else:
                    await channel.send(batch)
        except BaseException as error:
            for batch in rest.values():
                batch.abandon(self.stopping.explain(self.node, error))
            raise


def _checked(stage: Stage, batch: Batch, outputs: Any) -> Outputs:  # noqa: ANN401 - of a user's
    """Refuse what a stage must not return: its batch would be lost, and its ticket never end."""
    name = type(stage).__name__
    if not isinstance(outputs, Mapping):
        raise TypeError(f"stage {name} returned {outputs!r}; accepted: batches by output port")
    if not outputs and batch.part is not None and not batch.part.settled:
        raise TypeError(f"stage {name} returned no batch, and did not settle its part")
    return outputs


def _as_bug(error: BaseException) -> BaseException:
    """Turn what would end the loop, but comes from a stage, into an ordinary exception."""
    task = asyncio.current_task()
    ours = isinstance(error, asyncio.CancelledError) and task is not None and task.cancelling()
    return error if ours or isinstance(error, Exception) else RuntimeError(repr(error))


class RunsItems(Protocol):
    """An item stage, as far as the lane has to do with it."""

    def run_item(self, batch: Any, index: int) -> None:  # noqa: ANN401 - its port's type
        """As ``ItemStage.run_item``."""
        ...


def run_items(stages: Sequence[RunsItems], batch: ItemBatch) -> dict[int, CorruptObject]:
    """Run all stages on each unit of a batch in turn; return the items that one of them refused."""
    faults = {}
    for unit in batch.units():
        for stage, index in itertools.product(stages, unit):
            try:
                stage.run_item(batch, index)
            except CorruptObject as error:
                faults[index] = error
                break
    return faults


def group_steps(
    stages: Sequence[Stage | ItemStage | SplitStage],
) -> tuple[Stage | tuple[ItemStage, ...], ...]:
    """Put neighbouring item stages together, to be run as one."""
    steps: list[Stage | tuple[ItemStage, ...]] = []
    for fused, group in itertools.groupby(stages, key=lambda stage: isinstance(stage, ItemStage)):
        members: list[Any] = list(group)
        steps += [tuple(members)] if fused else members
    return tuple(steps)


async def run_node(bound: BoundNode) -> None:
    """Pull, run the stages, emit; at most ``depth`` batches at once.

    The outputs are closed however this ends, so that the next node drains and stops.
    """
    if bound.node.depth == 1:
        async with bound:
            async for batch in bound.inputs:
                await bound.emit(await bound.run_stages(batch))
                del batch  # else an idle node keeps the memory of an engine that has gone
        return
    slots = asyncio.Semaphore(bound.node.depth)
    unbegun: set[Batch] = set()

    async def run_batch(batch: Batch) -> None:
        unbegun.discard(batch)
        try:
            await bound.emit(await bound.run_stages(batch))
        finally:
            slots.release()

    async with bound:
        try:
            async with asyncio.TaskGroup() as under_way:
                await slots.acquire()
                async for batch in bound.inputs:
                    unbegun.add(batch)
                    under_way.create_task(run_batch(batch))
                    del batch  # as above
                    await slots.acquire()
        finally:
            for batch in unbegun:  # its task was cancelled before its first step
                batch.abandon(bound.stopping.explain(bound.node, asyncio.CancelledError()))


def unavailable_nodes(graph: Graph, config: Config) -> dict[str, str]:
    """Which nodes cannot run on this machine, and why, in the order of the definition.

    A node is unavailable where one of its stages is, where nothing that runs leads to it, or
    where an output that it must have leads only to such nodes.
    """
    reasons: dict[str, str] = {}
    for node in graph.nodes.values():
        for use in node.stages:
            assert use.implementation
            reason = unavailable_reason(use.implementation, config)
            if reason:
                reasons.setdefault(node.id, reason)
    while True:
        found = {
            node.id: reason
            for node in graph.nodes.values()
            if node.id not in reasons and (reason := _stranded(graph, node, reasons))
        }
        if not found:
            return {node_id: reasons[node_id] for node_id in graph.nodes if node_id in reasons}
        reasons |= found


def _stranded(graph: Graph, node: Node, reasons: Mapping[str, str]) -> str | None:
    sources = [edge.src for edge in graph.into(node.id)]
    if sources and node.entry is None and all(source in reasons for source in sources):
        return f"nothing leads here: {', '.join(dict.fromkeys(sources))} cannot run"
    for name, port in node.outputs.items():
        ends = [edge.dst for edge in graph.out_of(node.id) if edge.src_port == name]
        if ends and not port.optional and all(end in reasons for end in ends):
            return f"output {name!r} leads nowhere: {', '.join(dict.fromkeys(ends))} cannot run"
    return None


class Runtime:
    """One graph at work on the running loop. Use as an async context manager.

    Args:
        open_lane: Makes the lane of a node; nodes that name one lane share what it returns.
        codecs: What each slot of a geometry is stored as.
        direct: Past the host, to SSD or from it.

    Attributes:
        unavailable: Nodes that are switched off, and why.

    Raises:
        Unavailable: at construction, where a node that the definition requires cannot run.
    """

    def __init__(
        self,
        graph: Graph,
        *,
        catalogue: Catalogue,
        config: Config,
        open_lane: LaneFactory,
        direct: DirectRoute,
        log: structlog.stdlib.BoundLogger,
        codecs: Callable[[Geometry], SlotCodecs] = raw_slots,
    ) -> None:
        self.graph = graph
        self.unavailable = unavailable_nodes(graph, config)
        self._log = log.bind(pipeline=graph.name)
        self._codecs = codecs
        self._direct = direct
        live = [node for node in graph.nodes.values() if node.id not in self.unavailable]
        nothing_enters = not any(node.entry for node in live)
        faults = [
            f"node {node_id}: {reason}"
            for node_id, reason in self.unavailable.items()
            if nothing_enters or graph.nodes[node_id].required
        ]
        if faults:
            raise Unavailable(f"pipeline {graph.name!r} cannot start: {'; '.join(faults)}")
        self._lanes: dict[str, OwnedLane] = {}
        for node in live:
            if node.lane not in self._lanes:
                self._lanes[node.lane] = open_lane(node)
        self._edges = {
            edge: Channel[Batch](
                str(edge),
                max_items=edge.max_items,
                max_nbytes=edge.max_nbytes,
                on_full=edge.on_full,
            )
            for edge in graph.edges
            if edge.src not in self.unavailable and edge.dst not in self.unavailable
        }
        self._entries: dict[type, Channel[Batch]] = {}
        self._stopping = Stopping(list(self._edges.values()))
        self._nodes = {node.id: self._bind(node, catalogue, config) for node in live}
        self._running: asyncio.Task[None] | None = None

    def _bind(self, node: Node, catalogue: Catalogue, config: Config) -> BoundNode:
        inputs = [channel for edge, channel in self._edges.items() if edge.dst == node.id]
        if node.entry:
            entry = Channel[Batch](
                f"entry of {node.id}",
                max_items=node.entry.max_items,
                max_nbytes=node.entry.max_nbytes,
                on_full="wait",
            )
            inputs.insert(0, entry)
            self._stopping.channels.append(entry)
            for port in node.inputs.values():
                if port.entry:
                    self._entries[port.payload] = entry
        outputs = {e.src_port: channel for e, channel in self._edges.items() if e.src == node.id}
        budget_nbytes = node.budget_nbytes and min(
            node.budget_nbytes, config.storage_codec_budget_nbytes
        )
        ctx = StageContext(
            node=node,
            lane=self._lanes[node.lane],
            budget=Budget(f"budget of node {node.id}", budget_nbytes) if budget_nbytes else None,
            catalogue=catalogue,
            config=config,
            codecs=self._codecs,
            live_outputs=frozenset(outputs),
            direct=self._direct,
            log=self._log.bind(node=node.id),
        )
        stages = [_instantiate(use.implementation, use.options) for use in node.stages]
        last = stages[-1]
        splitter = last if isinstance(last, SplitStage) else None
        return BoundNode(
            node,
            group_steps(stages[: -1 if splitter else None]),
            splitter,
            ctx,
            Inbox(tuple(inputs)),
            outputs,
            self._stopping,
        )

    async def __aenter__(self) -> Self:
        async with AsyncExitStack() as started:
            for lane in self._lanes.values():
                await lane.start()
                started.push_async_callback(lane.close)
            started.pop_all()
        self._running = asyncio.create_task(self._run(), name=f"orbitkv-{self.graph.name}")
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.close()

    @property
    def fault(self) -> OrbitError | None:
        """The bug that stopped the pipeline; None while it runs."""
        return self._stopping.fault

    def accepts(self, payload: type) -> bool:
        """Whether work of this kind can be submitted here."""
        return payload in self._entries

    def batch_nbytes(self, payload: type, *, budgets: bool = True) -> int:
        """The most bytes that one submitted batch may have to pass every edge and budget."""
        entry = self._entries[payload]
        reached = {n.node.id for n in self._nodes.values() if entry in n.inputs.channels}
        bounds = [entry.max_nbytes]
        for edge, channel in self._in_order():
            if edge.src in reached:
                reached.add(edge.dst)
                bounds.append(channel.max_nbytes)
        if budgets:
            found = [self._nodes[node_id].ctx.budget for node_id in reached]
            bounds += [budget.capacity_nbytes for budget in found if budget]
        return min(bounds)

    def _in_order(self) -> list[tuple[Edge, Channel[Batch]]]:
        """Live edges, each after all edges that lead to its source."""
        waiting = dict(self._edges)
        ordered: list[tuple[Edge, Channel[Batch]]] = []
        while waiting:
            targets = {edge.dst for edge in waiting}
            free = [edge for edge in waiting if edge.src not in targets]
            ordered += [(edge, waiting.pop(edge)) for edge in free]
        return ordered

    async def submit(self, batch: Batch) -> None:
        """Put work in at its entry, in turn. The batch is the runtime's from the call on."""
        if not self.offer(batch):
            await self._entries[type(batch)].send(batch)

    def offer(self, batch: Batch) -> bool:
        """Put work in, if that needs no waiting. True: the batch is the runtime's."""
        entry = self._entries.get(type(batch))
        if entry is None:
            kind = type(batch).__name__
            batch.abandon(Unavailable(f"pipeline {self.graph.name!r} takes no {kind} here"))
            return True
        return entry.offer(batch) is not None

    async def close(self) -> None:
        """Take nothing new, let everything under way end, then close the lanes."""
        for entry in self._entries.values():
            entry.close()
        if self._running is not None:
            await self._running
        for lane in self._lanes.values():
            await lane.close()

    def statistics(self) -> tuple[dict[str, NodeStatistics], tuple[ChannelStatistics, ...]]:
        """What every node has done, and every channel holds and has carried."""
        nodes = {
            node_id: NodeStatistics(bound.batches, bound.failed, bound.busy_s)
            for node_id, bound in self._nodes.items()
        }
        channels = (*dict.fromkeys(self._entries.values()), *self._edges.values())
        return nodes, tuple(channel.statistics() for channel in channels)

    def trace_with(self, trace: PipelineTrace | None) -> None:
        """Let all nodes and queues tell a trace what they do; None: nobody."""
        for bound in self._nodes.values():
            bound.trace = trace
        for channel in self._stopping.channels:
            channel.watch = trace
        if trace is not None:
            budgets = (bound.ctx.budget for bound in self._nodes.values())
            trace.gauge(self._stopping.channels, filter(None, budgets))

    def leaks(self) -> list[str]:
        """Workspace and queue places still held: none at rest."""
        found = [
            f"{bound.ctx.budget.name}: {bound.ctx.budget.used_nbytes} bytes"
            for bound in self._nodes.values()
            if bound.ctx.budget and bound.ctx.budget.used_nbytes
        ]
        found += [
            f"{channel.name}: {channel.items} batches"
            for channel in self.statistics()[1]
            if channel.items or channel.senders_waiting
        ]
        return found

    async def _run(self) -> None:
        """Run all nodes until their inputs are exhausted; a bug in a stage stops them all."""
        try:
            async with asyncio.TaskGroup() as nodes:
                for bound in self._nodes.values():
                    nodes.create_task(run_node(bound), name=f"node {bound.node.id}")
        except* Exception as bugs:  # noqa: BLE001 - whatever a stage raised stops its pipeline
            self._log.error("pipeline_stopped", exc_info=_first(bugs))
        finally:
            fault = self._stopping.fault or Closed(f"pipeline {self.graph.name!r} is closed")
            for channel in self._stopping.channels:
                channel.abandon_all(fault)


def _first(error: BaseException) -> BaseException:
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


def _instantiate(
    implementation: type[Any] | None, options: Mapping[str, Any]
) -> Stage | ItemStage | SplitStage:
    assert implementation is not None, "a checked graph has resolved stages"
    stage: Stage | ItemStage | SplitStage = implementation(**options)
    return stage
