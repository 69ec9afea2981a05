"""What does the framework itself cost: an empty batch through five nodes, submit to ticket?

``on the loop``: the stages do nothing. ``a lane each``: every stage also calls into a host thread
of its own and back, as a real one does. Beside them: the bare crossing of five threads.
"""

from __future__ import annotations

import asyncio
import itertools
import statistics
import sys
import time
from collections.abc import Awaitable, Callable
from typing import Any, ClassVar

import structlog
from measure import parser, report

from orbitkv import Config, Edge, Graph, Node, Saved, Ticket
from orbitkv.cache.catalogue import Catalogue
from orbitkv.cache.direct import DirectRoute, Gate
from orbitkv.cache.pool import Pool
from orbitkv.errors import OrbitError
from orbitkv.graph import Bound, Lanes, Port, Ports, StageUse
from orbitkv.runtime.lanes import HostLane
from orbitkv.runtime.runtime import Runtime
from orbitkv.stages.base import Outputs, StageContext
from orbitkv.stages.ticket import Part

IDS = "ABCDE"
WARMUP = 200
TARGET_US = (250, 1000)


class EmptyBatch:
    """No bytes, one part."""

    nbytes = 0

    def __init__(self, part: Part) -> None:
        self.part = part

    def abandon(self, error: OrbitError) -> None:
        """Fail the part."""
        self.part.fail(error)


class Pass:
    """Hand the batch on; with ``cross`` set, after a call into the lane's thread."""

    inputs: ClassVar[Ports] = {"in": Port(EmptyBatch, entry=True)}
    outputs: ClassVar[Ports] = {"out": Port(EmptyBatch, optional=True)}
    lanes: ClassVar[Lanes] = frozenset({"host"})

    def __init__(self, *, cross: bool) -> None:
        self._cross = cross

    async def run(self, batch: EmptyBatch, ctx: StageContext) -> Outputs:
        """Settle at the end of the chain."""
        if self._cross:
            await ctx.lane.run(int)
        if ctx.live_outputs:
            return {"out": batch}
        batch.part.settle(done=())
        return {}


class PassOn(Pass):
    """The same behind an edge."""

    inputs: ClassVar[Ports] = {"in": Port(EmptyBatch)}


def five_nodes(*, cross: bool) -> Graph:
    """A > B > C > D > E."""
    bound = Bound(max_items=2, max_nbytes=1)
    nodes = {
        node_id: Node(
            id=node_id,
            label=node_id,
            stages=(StageUse("pass", PassOn if index else Pass, {"cross": cross}),),
            lane=f"host:{node_id}",
            entry=None if index else bound,
        )
        for index, node_id in enumerate(IDS)
    }
    edges = tuple(
        Edge(
            src=src,
            src_port="out",
            dst=dst,
            dst_port="in",
            max_items=bound.max_items,
            max_nbytes=bound.max_nbytes,
            on_full="wait",
        )
        for src, dst in itertools.pairwise(IDS)
    )
    return Graph("five", nodes, edges)


async def through_graph(graph: Graph, repeats: int) -> list[float]:
    """Microseconds from submission to the ticket's end, one batch at a time."""

    async def once() -> None:
        ticket = Ticket(lambda done, not_done: Saved(done, (), not_done))
        part = ticket.part(())
        ticket.seal()
        await runtime.submit(EmptyBatch(part))
        await ticket

    catalogue = Catalogue(Pool(2**20, lock_memory=False), None)
    async with Runtime(
        graph,
        catalogue=catalogue,
        config=Config(),
        open_lane=lambda node: HostLane(node.lane),
        direct=DirectRoute(Gate(catalogue.counters, structlog.get_logger())),
        log=structlog.get_logger(),
    ) as runtime:
        return await timed(once, repeats)


async def through_threads(repeats: int) -> list[float]:
    """The bare cost of five crossings to a thread and back."""
    lanes = [HostLane(name) for name in IDS]
    for lane in lanes:
        await lane.start()

    async def once() -> None:
        for lane in lanes:
            await lane.run(int)

    taken = await timed(once, repeats)
    for lane in lanes:
        await lane.close()
    return taken


async def timed(once: Callable[[], Awaitable[Any]], repeats: int) -> list[float]:
    """Microseconds of each call, after a warm-up."""
    taken_us = []
    for _ in range(WARMUP + repeats):
        started_s = time.perf_counter()
        await once()
        taken_us.append((time.perf_counter() - started_s) * 1e6)
    return taken_us[WARMUP:]


def main() -> int:
    """Print p50 and p99 of each, beside the target."""
    arguments = parser(__doc__ or "")
    arguments.add_argument("--repeats", type=int, default=5000)
    args = arguments.parse_args()
    taken = {
        "five nodes, on the loop": asyncio.run(
            through_graph(five_nodes(cross=False), args.repeats)
        ),
        "five nodes, a lane each": asyncio.run(through_graph(five_nodes(cross=True), args.repeats)),
        "five threads, no graph": asyncio.run(through_threads(args.repeats)),
    }
    rows = []
    for name, values in taken.items():
        percentiles = statistics.quantiles(values, n=100)
        rows.append((name, percentiles[49], percentiles[98], *TARGET_US))
    columns = ("what", "p50 us", "p99 us", "target p50", "target p99")
    report("An empty batch", columns, rows, as_json=args.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
