"""Runtime: small graphs at work. What leaves a node, who waits, and what a fault stops."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import ClassVar

import pytest
import structlog

from orbitkv.cache.catalogue import Catalogue
from orbitkv.cache.direct import DirectRoute, Gate
from orbitkv.cache.pool import Pool
from orbitkv.config import Config
from orbitkv.errors import (
    Cancelled,
    Closed,
    Dropped,
    ImpossibleRequest,
    OrbitError,
    StageFault,
    Unavailable,
)
from orbitkv.graph import Bound, Edge, Graph, Node, OnFull, Port, StageUse
from orbitkv.runtime.lanes import HostLane
from orbitkv.runtime.runtime import OwnedLane, Runtime, unavailable_nodes
from orbitkv.stages.base import Outputs, StageContext
from orbitkv.stages.ticket import Failed, Outcome, Part, Saved, Ticket
from tests.builders import BLOCK


class Load:
    """A batch that knows which nodes it has seen and how it ended."""

    def __init__(self, name: str, part: Part | None = None, nbytes: int = 1) -> None:
        self.name = name
        self.part = part
        self.nbytes = nbytes
        self.trail: list[str] = []
        self.abandoned_with: list[OrbitError] = []

    def abandon(self, error: OrbitError) -> None:
        self.abandoned_with.append(error)
        if self.part is not None:
            self.part.fail(error)


class Other(Load):
    """A batch of another kind."""


Act = Callable[[Load, StageContext], Awaitable[None]]


class _Step:
    """Notes its node, does what the test gave it, and passes the batch on."""

    lanes: ClassVar = frozenset({"host"})
    inputs: ClassVar = {"in": Port(Load)}
    outputs: ClassVar = {"out": Port(Load)}

    def __init__(self, act: Act | None = None) -> None:
        self._act = act

    async def run(self, batch: Load, ctx: StageContext) -> Outputs:
        batch.trail.append(ctx.node.id)
        if self._act:
            await self._act(batch, ctx)
        return dict.fromkeys(self.outputs, batch)


class Source(_Step):
    inputs: ClassVar = {"in": Port(Load, entry=True)}


class Through(_Step):
    pass


class Pieces(_Step):
    """Makes three of one, after what the test gave it has been done for each."""

    left: ClassVar[list[str]] = []

    async def split(self, batch: Load, ctx: StageContext) -> AsyncGenerator[Outputs]:
        batch.trail.append(ctx.node.id)
        try:
            for index in range(3):
                piece = Load(f"{batch.name}.{index}")
                if self._act:
                    await self._act(piece, ctx)
                yield {"out": piece}
            if batch.part:
                batch.part.settle(done=batch.part.hashes)
        finally:
            self.left.append(batch.name)


class Sink(_Step):
    outputs: ClassVar = {}

    async def run(self, batch: Load, ctx: StageContext) -> Outputs:
        await super().run(batch, ctx)
        if batch.part is not None:
            batch.part.settle(done=batch.part.hashes)
        return {}


class Fork(_Step):
    """Passes its batch on at ``left``, and another one at ``right``."""

    inputs: ClassVar = {"in": Port(Load, entry=True)}
    outputs: ClassVar = {"left": Port(Load), "right": Port(Load)}
    made: ClassVar[list[Load]] = []

    async def run(self, batch: Load, ctx: StageContext) -> Outputs:
        twin = Load(f"twin of {batch.name}")
        self.made.append(twin)
        return {"left": batch, "right": twin}


class Gone(Through):
    @staticmethod
    def unavailable(config: Config) -> str | None:
        return "not in this machine"


class OptionalOut(Source):
    outputs: ClassVar = {"out": Port(Load, optional=True)}


def node(
    node_id: str,
    *stages: type[_Step],
    act: Act | None = None,
    depth: int = 1,
    entry: Bound | None = None,
    budget_nbytes: int | None = None,
    required: bool = False,
    lane: str = "",
) -> Node:
    uses = tuple(StageUse(stage.__name__, stage, {"act": act}) for stage in stages)
    return Node(
        id=node_id,
        label=node_id,
        stages=uses,
        lane=lane or f"host:{node_id}",
        depth=depth,
        entry=entry,
        budget_nbytes=budget_nbytes,
        required=required,
    )


ENTRY = Bound(max_items=8, max_nbytes=100)


def edge(
    src: str, dst: str, *, items: int = 8, nbytes: int = 100, on_full: OnFull = "wait"
) -> Edge:
    a, _, a_port = src.partition(".")
    return Edge(
        src=a,
        src_port=a_port or "out",
        dst=dst,
        dst_port="in",
        max_items=items,
        max_nbytes=nbytes,
        on_full=on_full,
    )


def graph(nodes: list[Node], *edges: Edge) -> Graph:
    return Graph("toy", {n.id: n for n in nodes}, edges)


def line(
    *, act: Act | None = None, depth: int = 1, sink_act: Act | None = None, **edge_bounds: int
) -> Graph:
    """Source a, through b, sink c."""
    nodes = [node("a", Source, entry=ENTRY), node("b", Through, act=act, depth=depth)]
    nodes.append(node("c", Sink, act=sink_act))
    return graph(nodes, edge("a", "b", **edge_bounds), edge("b", "c", **edge_bounds))


def bound(
    description: Graph, *, opened: list[OwnedLane] | None = None, config: Config | None = None
) -> Runtime:
    def open_lane(of: Node) -> OwnedLane:
        lane = HostLane(of.lane)
        if opened is not None:
            opened.append(lane)
        return lane

    return Runtime(
        description,
        catalogue=Catalogue(Pool(BLOCK, lock_memory=False), None),
        config=config or Config(),
        open_lane=open_lane,
        direct=DirectRoute(Gate(Counter(), structlog.get_logger())),
        log=structlog.get_logger(),
    )


@asynccontextmanager
async def running(
    description: Graph, *, opened: list[OwnedLane] | None = None
) -> AsyncIterator[Runtime]:
    async with bound(description, opened=opened) as runtime:
        yield runtime
    assert runtime.leaks() == []


def ticket() -> Ticket:
    def conclude(done: tuple[bytes, ...], not_done: tuple[bytes, ...]) -> Outcome:
        return Saved(done, (), not_done)

    return Ticket(conclude)


def one(name: str, nbytes: int = 1) -> tuple[Ticket, Load]:
    """A ticket of one batch, whose page is named like it."""
    made = ticket()
    load = Load(name, made.part((name.encode(),)), nbytes)
    made.seal()
    return made, load


async def settle(ticks: int = 30) -> None:
    for _ in range(ticks):
        await asyncio.sleep(0)


def error_of(made: Ticket) -> OrbitError:
    outcome = made.result(0)
    assert isinstance(outcome, Failed), outcome
    return outcome.error


def test_batches_pass_every_node_in_order() -> None:
    async def scenario() -> None:
        arrived: list[str] = []

        async def note(batch: Load, ctx: StageContext) -> None:
            arrived.append(batch.name)

        made = [one(str(index)) for index in range(20)]
        async with running(line(sink_act=note)) as runtime:
            for _, load in made:
                await runtime.submit(load)
        assert arrived == [str(index) for index in range(20)]
        assert all(load.trail == ["a", "b", "c"] for _, load in made)
        assert all(isinstance(t.result(0), Saved) for t, _ in made)

    asyncio.run(scenario())


def test_close_lets_everything_that_was_submitted_end() -> None:
    async def scenario() -> None:
        go = asyncio.Event()

        async def wait(batch: Load, ctx: StageContext) -> None:
            await go.wait()

        made = [one(str(index)) for index in range(6)]
        runtime = bound(line(act=wait))
        async with runtime:
            for _, load in made:
                await runtime.submit(load)
            closing = asyncio.create_task(runtime.close())
            await settle()
            closed_early = closing.done()
            late, load = one("late")
            await runtime.submit(load)
            go.set()
            await closing
        assert not closed_early
        assert isinstance(error_of(late), Closed)
        assert all(isinstance(t.result(0), Saved) for t, _ in made)
        assert runtime.leaks() == []

    asyncio.run(scenario())


def test_slow_node_makes_those_before_it_wait_within_the_bounds() -> None:
    async def scenario() -> None:
        go = asyncio.Event()

        async def wait(batch: Load, ctx: StageContext) -> None:
            await go.wait()

        made = [one(str(index)) for index in range(20)]
        async with running(line(act=wait, items=2)) as runtime:
            loads = [load for _, load in made]
            feeding = asyncio.create_task(feed(runtime, loads))
            await settle()
            _, channels = runtime.statistics()
            held = {channel.name: channel.items for channel in channels}
            went_on = feeding.done()
            go.set()
            await feeding
        # one at work in b, two before it, one waiting in a, eight at the entry
        assert held == {"entry of a": 8, "a.out > b.in": 2, "b.out > c.in": 0}
        assert not went_on
        _, channels = runtime.statistics()
        assert [channel.peak_items for channel in channels][1:] == [2, 2]

    asyncio.run(scenario())


async def feed(runtime: Runtime, loads: list[Load]) -> None:
    for load in loads:
        await runtime.submit(load)


def test_orbit_error_in_a_stage_fails_that_request_only() -> None:
    async def scenario() -> None:
        async def refuse(batch: Load, ctx: StageContext) -> None:
            if batch.name == "bad":
                raise OrbitError("not this one")

        made = [one(name) for name in ("first", "bad", "last")]
        async with running(line(act=refuse)) as runtime:
            await feed(runtime, [load for _, load in made])
        assert [type(t.result(0)) for t, _ in made] == [Saved, Failed, Saved]
        assert str(error_of(made[1][0])) == "not this one"
        nodes, _ = runtime.statistics()
        assert (nodes["b"].batches, nodes["b"].failed) == (3, 1)
        assert nodes["c"].batches == 2

    asyncio.run(scenario())


@pytest.mark.parametrize("depth", [1, 3])
def test_bug_in_a_stage_stops_the_pipeline_and_fails_every_ticket_with_it(depth: int) -> None:
    """Those at work elsewhere, those in a queue, those that wait to get in, and those to come."""

    async def scenario() -> None:
        start, never = asyncio.Event(), asyncio.Event()

        async def fail(batch: Load, ctx: StageContext) -> None:
            await start.wait()
            raise ZeroDivisionError("a bug")

        async def hold(batch: Load, ctx: StageContext) -> None:
            if batch.name == "0":
                await never.wait()

        nodes = [
            node("a", Source, entry=Bound(max_items=2, max_nbytes=100)),
            node("b", Through, act=hold),
            node("c", Through, act=fail, depth=depth),
            node("d", Sink),
        ]
        description = graph(
            nodes, edge("a", "b", items=1), edge("b", "c", items=1), edge("c", "d", items=1)
        )
        made = [one(str(index)) for index in range(1, 12)]
        async with running(description) as runtime:
            loads = [load for _, load in made]
            feeding = asyncio.create_task(feed(runtime, loads))
            await settle()
            at_work = one("0")
            other = asyncio.create_task(runtime.submit(at_work[1]))
            await settle()
            start.set()
            await asyncio.gather(feeding, other)
            await settle()
            late = one("late")
            await runtime.submit(late[1])
        for made_ticket, load in (*made, at_work, late):
            assert made_ticket.done, f"batch {load.name} was lost"
            assert isinstance(error_of(made_ticket), StageFault), load.name
            assert len(load.abandoned_with) == 1, f"batch {load.name} ended more than once"

    asyncio.run(scenario())


def test_batch_at_work_in_another_node_fails_with_the_bug_too() -> None:
    async def scenario() -> None:
        async def wait(batch: Load, ctx: StageContext) -> None:
            if batch.name == "at work":
                await asyncio.Event().wait()

        async def fail(batch: Load, ctx: StageContext) -> None:
            raise ZeroDivisionError("a bug")

        nodes = [
            node("a", Source, act=wait, entry=ENTRY, depth=2),
            node("b", Sink, act=fail),
        ]
        at_work, bad = one("at work"), one("bad")
        async with running(graph(nodes, edge("a", "b"))) as runtime:
            await feed(runtime, [at_work[1], bad[1]])
            await settle()
        assert isinstance(error_of(bad[0]), StageFault)
        assert isinstance(error_of(at_work[0]), StageFault)

    asyncio.run(scenario())


def test_bug_in_a_deep_node_loses_no_batch_that_was_about_to_start() -> None:
    """The failing batch leaves its slot to the next, which must not vanish before it began."""

    async def scenario() -> None:
        start = asyncio.Event()

        async def fail(batch: Load, ctx: StageContext) -> None:
            await start.wait()
            if batch.name == "0":
                raise ZeroDivisionError("a bug")
            await asyncio.Event().wait()

        made = [one(str(index)) for index in range(5)]
        description = graph([node("a", Sink_at_entry, act=fail, entry=ENTRY, depth=2)])
        async with bound(description) as runtime:
            await feed(runtime, [load for _, load in made])
            await settle()
            start.set()
            await settle()
        lost = [load.name for made_ticket, load in made if not made_ticket.done]
        assert not lost, f"batches {lost} were neither run nor abandoned"

    asyncio.run(scenario())


class Sink_at_entry(Sink):  # noqa: N801 - reads as what it is
    inputs: ClassVar = {"in": Port(Load, entry=True)}


def test_bug_while_a_node_waits_at_one_output_loses_nothing_for_the_other() -> None:
    async def scenario() -> None:
        start = asyncio.Event()

        async def fail(batch: Load, ctx: StageContext) -> None:
            await start.wait()
            raise ZeroDivisionError("a bug")

        Fork.made.clear()
        nodes = [
            node("a", Fork, entry=ENTRY),
            node("l", Sink, act=fail),
            node("r", Sink),
        ]
        description = graph(nodes, edge("a.left", "l", items=1), edge("a.right", "r", items=1))
        made = [one(str(index)) for index in range(6)]
        async with bound(description) as runtime:
            await feed(runtime, [load for _, load in made])
            await settle()
            start.set()
            await settle()
        for made_ticket, load in made:
            assert made_ticket.done, load.name
        lost = [twin.name for twin in Fork.made if not (twin.abandoned_with or twin.trail)]
        assert not lost, f"{lost} were neither sent on nor abandoned"

    asyncio.run(scenario())


@pytest.mark.parametrize("depth", [1, 2])
def test_stage_that_splits_feels_the_next_edge_piece_by_piece(depth: int) -> None:
    async def scenario() -> None:
        go, made_pieces, arrived = asyncio.Event(), [], []

        async def note(piece: Load, ctx: StageContext) -> None:
            made_pieces.append(piece.name)

        async def wait(piece: Load, ctx: StageContext) -> None:
            await go.wait()
            arrived.append(piece.name)

        nodes = [
            node("a", Source, entry=ENTRY),
            node("b", Pieces, act=note, depth=depth),
            node("c", Sink, act=wait),
        ]
        description = graph(nodes, edge("a", "b"), edge("b", "c", items=1))
        first, second = one("x"), one("y")
        async with running(description) as runtime:
            await feed(runtime, [first[1], second[1]])
            await settle()
            before = len(made_pieces)
            ended = first[0].done
            go.set()
        # One at work in c, one on the edge, and one that each batch in b waits with.
        assert before == 2 + depth
        assert not ended
        assert sorted(arrived) == [f"{name}.{index}" for name in "xy" for index in range(3)]
        assert [name for name in arrived if name[0] == "x"] == ["x.0", "x.1", "x.2"]
        assert isinstance(first[0].result(0), Saved)
        assert isinstance(second[0].result(0), Saved)

    asyncio.run(scenario())


@pytest.mark.parametrize("fault", [OrbitError("no more"), ZeroDivisionError("a bug")])
def test_fault_between_two_pieces_ends_the_batch_and_keeps_what_went_on(fault: Exception) -> None:
    async def scenario() -> None:
        arrived: list[str] = []
        Pieces.left.clear()

        async def fail(piece: Load, ctx: StageContext) -> None:
            if piece.name == "x.1":
                raise fault

        async def note(piece: Load, ctx: StageContext) -> None:
            arrived.append(piece.name)

        nodes = [
            node("a", Source, entry=ENTRY),
            node("b", Pieces, act=fail),
            node("c", Sink, act=note),
        ]
        made, load = one("x")
        async with running(graph(nodes, edge("a", "b"), edge("b", "c"))) as runtime:
            await feed(runtime, [load])
            await settle()
        if isinstance(fault, OrbitError):  # a bug stops those behind it too
            assert arrived == ["x.0"]
        assert Pieces.left == ["x"], "the stage was not closed"
        assert len(load.abandoned_with) == 1
        assert isinstance(error_of(made), OrbitError)

    asyncio.run(scenario())


def test_stage_that_splits_is_closed_when_the_pipeline_stops() -> None:
    async def scenario() -> None:
        Pieces.left.clear()

        async def fail(piece: Load, ctx: StageContext) -> None:
            await asyncio.sleep(0)
            raise ZeroDivisionError("a bug")

        nodes = [
            node("a", Source, entry=ENTRY),
            node("b", Pieces),
            node("c", Sink, act=fail),
        ]
        made, load = one("x")
        async with running(graph(nodes, edge("a", "b"), edge("b", "c", items=1))) as runtime:
            await feed(runtime, [load])
            await settle()
        assert Pieces.left == ["x"]
        assert made.done
        assert len(load.abandoned_with) <= 1

    asyncio.run(scenario())


def test_cancelled_ticket_goes_no_further_than_the_stage_it_is_in() -> None:
    async def scenario() -> None:
        go = asyncio.Event()

        async def wait(batch: Load, ctx: StageContext) -> None:
            await go.wait()

        cancelled, kept = one("cancelled"), one("kept")
        async with running(line(act=wait)) as runtime:
            await feed(runtime, [cancelled[1], kept[1]])
            await settle()
            cancelled[0].cancel()
            await settle()
            left_early = cancelled[0].done
            go.set()
        assert not left_early, "its stage had not ended"
        assert isinstance(error_of(cancelled[0]), Cancelled)
        assert cancelled[1].trail == ["a", "b"]
        assert isinstance(kept[0].result(0), Saved)

    asyncio.run(scenario())


def test_cancelled_ticket_skips_the_stages_left_in_its_node() -> None:
    async def scenario() -> None:
        async def cancel(batch: Load, ctx: StageContext) -> None:
            if batch.part:
                batch.part.ticket.cancel()

        uses = (StageUse("s", Source, {"act": cancel}), StageUse("t", Through, {}))
        first = Node(id="a", label="a", stages=uses, lane="host:a", entry=ENTRY)
        made, load = one("x")
        async with running(graph([first, node("b", Sink)], edge("a", "b"))) as runtime:
            await runtime.submit(load)
        assert load.trail == ["a"]
        assert isinstance(error_of(made), Cancelled)

    asyncio.run(scenario())


def test_depth_lets_as_many_batches_into_a_node_at_once() -> None:
    async def scenario() -> None:
        inside, most, go = 0, 0, asyncio.Event()

        async def count(batch: Load, ctx: StageContext) -> None:
            nonlocal inside, most
            inside += 1
            most = max(most, inside)
            await go.wait()
            inside -= 1

        async with running(line(act=count, depth=3)) as runtime:
            await feed(runtime, [one(str(index))[1] for index in range(8)])
            await settle()
            at_once = inside
            go.set()
        assert at_once == most == 3

    asyncio.run(scenario())


def test_full_drop_edge_counts_and_never_stalls_its_node() -> None:
    async def scenario() -> None:
        go = asyncio.Event()

        async def wait(batch: Load, ctx: StageContext) -> None:
            await go.wait()

        nodes = [node("a", Source, entry=ENTRY), node("b", Sink, act=wait)]
        description = graph(nodes, edge("a", "b", items=1, on_full="drop"))
        made = [one(str(index)) for index in range(5)]
        async with running(description) as runtime:
            for _, load in made:
                await runtime.submit(load)
                await settle()
            dropped = [t for t, _ in made if t.done]
            go.set()
        assert len(dropped) == 3, "one is at work, one is in the queue"
        assert all(isinstance(error_of(t), Dropped) for t in dropped)
        assert sum(c.dropped_items for c in runtime.statistics()[1]) == 3

    asyncio.run(scenario())


def test_batch_larger_than_an_edge_fails_that_request_only() -> None:
    async def scenario() -> None:
        large, small = one("large", 50), one("small", 5)
        async with running(line(nbytes=10)) as runtime:
            await feed(runtime, [large[1], small[1]])
        assert isinstance(error_of(large[0]), ImpossibleRequest)
        assert isinstance(small[0].result(0), Saved)

    asyncio.run(scenario())


def test_work_of_a_kind_that_no_entry_takes_is_refused_in_words() -> None:
    async def scenario() -> None:
        made = ticket()
        load = Other("x", made.part((b"x",)))
        made.seal()
        async with running(line()) as runtime:
            assert runtime.accepts(Load)
            assert not runtime.accepts(Other)
            await runtime.submit(load)
        assert "pipeline 'toy' takes no Other here" in str(error_of(made))

    asyncio.run(scenario())


def test_output_without_an_edge_drops_what_it_is_given() -> None:
    async def scenario() -> None:
        made, load = one("x")
        async with running(graph([node("a", OptionalOut, entry=ENTRY)])) as runtime:
            await runtime.submit(load)
        assert isinstance(error_of(made), Dropped)

    asyncio.run(scenario())


def test_batch_bound_is_the_least_of_every_edge_and_budget_it_passes() -> None:
    nodes = [
        node("a", Fork, entry=Bound(max_items=1, max_nbytes=90)),
        node("l", Sink, budget_nbytes=70),
        node("r", Sink),
    ]
    wide = edge("a.left", "l", nbytes=80), edge("a.right", "r", nbytes=85)
    assert bound(graph(nodes, *wide)).batch_nbytes(Load) == 70
    narrow = edge("a.left", "l", nbytes=80), edge("a.right", "r", nbytes=60)
    assert bound(graph(nodes, *narrow)).batch_nbytes(Load) == 60
    assert bound(graph([node("a", Sink_at_entry, entry=ENTRY)])).batch_nbytes(Load) == 100
    config = Config(storage_codec_budget_nbytes=7)
    assert bound(graph(nodes, *wide), config=config).batch_nbytes(Load) == 7


def test_nodes_that_name_one_lane_share_it_and_each_lane_is_closed() -> None:
    async def scenario() -> None:
        opened: list[OwnedLane] = []
        nodes = [
            node("a", Source, entry=ENTRY, lane="host:shared"),
            node("b", Through, lane="host:own"),
            node("c", Sink, lane="host:shared"),
        ]
        async with running(graph(nodes, edge("a", "b"), edge("b", "c")), opened=opened):
            pass
        assert [lane.name for lane in opened] == ["host:shared", "host:own"]
        assert not any(lane._thread.is_alive() for lane in opened)  # type: ignore[attr-defined]

    asyncio.run(scenario())


def test_lane_that_cannot_start_closes_those_before_it() -> None:
    class Refusing(HostLane):
        async def start(self) -> None:
            raise OSError("no ring")

    async def scenario() -> None:
        opened: list[HostLane] = []

        def open_lane(of: Node) -> OwnedLane:
            opened.append(HostLane(of.lane) if not opened else Refusing(of.lane))
            return opened[-1]

        runtime = Runtime(
            line(),
            catalogue=Catalogue(Pool(BLOCK, lock_memory=False), None),
            config=Config(),
            open_lane=open_lane,
            direct=DirectRoute(Gate(Counter(), structlog.get_logger())),
            log=structlog.get_logger(),
        )
        with pytest.raises(OSError, match="no ring"):
            await runtime.__aenter__()
        assert not opened[0]._thread.is_alive()

    asyncio.run(scenario())


def test_unavailable_node_takes_along_what_depends_on_it_and_nothing_else() -> None:
    """a leads to g, which is gone, and to r; h has its input from g alone; k from g and r."""
    nodes = [
        node("a", ForkOptional, entry=ENTRY),
        node("g", Gone),
        node("h", Sink),
        node("r", Sink),
    ]
    description = graph(nodes, edge("a.left", "g"), edge("g", "h"), edge("a.right", "r"))
    assert unavailable_nodes(description, Config()) == {
        "g": "not in this machine",
        "h": "nothing leads here: g cannot run",
    }


class ForkOptional(Fork):
    outputs: ClassVar = {"left": Port(Load, optional=True), "right": Port(Load)}


def test_node_whose_only_way_out_is_gone_is_unavailable_as_well() -> None:
    nodes = [node("a", Source, entry=ENTRY), node("g", Gone), node("h", Sink)]
    description = graph(nodes, edge("a", "g"), edge("g", "h"))
    assert unavailable_nodes(description, Config()) == {
        "a": "output 'out' leads nowhere: g cannot run",
        "g": "not in this machine",
        "h": "nothing leads here: g cannot run",
    }
    with pytest.raises(Unavailable, match="pipeline 'toy' cannot start: node a: output 'out'"):
        bound(description)


def test_what_is_emitted_towards_a_switched_off_arm_is_dropped() -> None:
    async def scenario() -> None:
        nodes = [node("a", ForkOptional, entry=ENTRY), node("g", Gone), node("h", Sink)]
        nodes.append(node("r", Sink))
        description = graph(nodes, edge("a.left", "g"), edge("g", "h"), edge("a.right", "r"))
        Fork.made.clear()
        made, load = one("x")
        async with running(description) as runtime:
            await runtime.submit(load)
        assert isinstance(error_of(made), Dropped)
        assert Fork.made[0].trail == ["r"]
        assert [c.name for c in runtime.statistics()[1]] == ["entry of a", "a.right > r.in"]

    asyncio.run(scenario())


def test_required_node_that_is_unavailable_refuses_to_start_with_the_reason() -> None:
    nodes = [
        node("a", ForkOptional, entry=ENTRY),
        node("g", Gone, required=True),
        node("h", Sink),
        node("r", Sink),
    ]
    description = graph(nodes, edge("a.left", "g"), edge("g", "h"), edge("a.right", "r"))
    with pytest.raises(
        Unavailable, match="pipeline 'toy' cannot start: node g: not in this machine"
    ):
        bound(description)


def test_required_node_that_depends_on_an_unavailable_one_refuses_too() -> None:
    nodes = [
        node("a", ForkOptional, entry=ENTRY),
        node("g", Gone),
        node("h", Sink, required=True),
        node("r", Sink),
    ]
    description = graph(nodes, edge("a.left", "g"), edge("g", "h"), edge("a.right", "r"))
    with pytest.raises(Unavailable, match="node h: nothing leads here: g cannot run"):
        bound(description)
