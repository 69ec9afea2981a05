"""A graph is checked as a whole, and everything that is wrong with it is said at once."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Mapping

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from orbitkv.errors import GraphError
from orbitkv.graph import Bound, Chart, Edge, Graph, Node, Port, StageUse, graph_faults

unhurried = settings(deadline=None)  # a busy machine is no fault


class Batch:
    pass


class Special(Batch):
    pass


class Other:
    pass


class Work:
    pass


def stage(
    inputs: Mapping[str, Port], outputs: Mapping[str, Port], lanes: Iterable[str] = ("host",)
) -> type:
    members = {"inputs": inputs, "outputs": outputs, "lanes": frozenset(lanes)}
    return type("ToyStage", (), members)


SOURCE = stage({"in": Port(Work, entry=True)}, {"out": Port(Special)})
MIDDLE = stage({"in": Port(Batch)}, {"out": Port(Special)})
SPLIT = stage({"in": Port(Batch)}, {"left": Port(Batch), "right": Port(Batch, optional=True)})
SINK = stage({"in": Port(Batch)}, {})
OTHER_SINK = stage({"in": Port(Other)}, {})
BOUND = Bound(max_items=1, max_nbytes=1)


def node(
    node_id: str, *implementations: type | None, lane: str = "host:a", **settings: object
) -> Node:
    uses = tuple(StageUse(f"{node_id}{i}".lower(), use) for i, use in enumerate(implementations))
    if SOURCE in implementations:
        settings.setdefault("entry", BOUND)
    return Node(id=node_id, label=node_id, stages=uses, lane=lane, **settings)  # type: ignore[arg-type]


def edge(src: str, dst: str, **settings: object) -> Edge:
    given = {
        "src_port": "out",
        "dst_port": "in",
        "max_items": 1,
        "max_nbytes": 1,
        "on_full": "wait",
        **settings,
    }
    return Edge(src=src, dst=dst, **given)  # type: ignore[arg-type]


def faults(nodes: Iterable[Node], edges: Iterable[Edge]) -> list[str]:
    return list(graph_faults({node.id: node for node in nodes}, tuple(edges)))


A, B, C = node("A", SOURCE), node("B", MIDDLE), node("C", SINK)
AB, BC = edge("A", "B"), edge("B", "C")


def test_a_graph_without_faults_is_accepted() -> None:
    graph = Graph("toy", {"A": A, "B": B, "C": C}, (AB, BC))
    assert graph.chart == Chart({"A": "A", "B": "B", "C": "C"}, (("A", "B"), ("B", "C")))
    assert (graph.into("B"), graph.out_of("B")) == ((AB,), (BC,))


def test_a_graph_cannot_be_changed() -> None:
    graph = Graph("toy", {"A": A, "B": B, "C": C}, (AB, BC))
    for described in (graph, A, AB, BOUND, graph.chart):
        name = dataclasses.fields(described)[0].name
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(described, name, None)


def test_an_edge_carries_a_subclass_but_not_a_base_class() -> None:
    strict = node("C", stage({"in": Port(Special)}, {}))
    loose = node("B", stage({"in": Port(Special)}, {"out": Port(Batch)}))
    assert faults([A, loose, C], [AB, BC]) == []
    assert faults([A, loose, strict], [AB, BC]) == [
        "edge B.out > C.in: B gives Batch, C takes Special"
    ]


def test_an_optional_port_and_an_entry_may_stay_without_an_edge() -> None:
    split = node("B", SPLIT)
    assert faults([A, split, C], [AB, edge("B", "C", src_port="left")]) == []


def test_stages_of_one_node_follow_each_other() -> None:
    assert faults([A, node("B", MIDDLE, MIDDLE, MIDDLE), C], [AB, BC]) == []


@pytest.mark.parametrize(
    ("nodes", "edges", "fault"),
    [
        ((), (), "no nodes"),
        ((A, node("B"), C), (AB, BC), "node B: no stages"),
        (
            (A, B, node("C", SINK, lane="gpu:a")),
            (AB, BC),
            "node C: lane 'gpu:a'; accepted: stream:NAME, host:NAME, ring:NAME, file:NAME, peer:",
        ),
        ((A, B, node("C", SINK, lane="host")), (AB, BC), "node C: lane 'host'; accepted: "),
        ((A, B, node("C", SINK, lane="host:")), (AB, BC), "node C: lane 'host:'; accepted: "),
        ((A, B, node("C", SINK, lane="")), (AB, BC), "node C: lane ''; accepted: "),
        (
            (A, B, node("C", stage({"in": Port(Batch)}, {}, ("ring", "file")), lane="host:a")),
            (AB, BC),
            "node C: stage 'c0' cannot run on a host lane; it runs on file, ring",
        ),
        (
            (A, B, node("C", SINK, depth=0)),
            (AB, BC),
            "node C: depth 0; accepted: 1 or more",
        ),
        (
            (A, B, node("C", SINK, budget_nbytes=0)),
            (AB, BC),
            "node C: budget 0; accepted: 1 byte or more",
        ),
        (
            (A, node("B", MIDDLE, OTHER_SINK), C),
            (AB,),
            "node B: stage 'b0' gives Special, stage 'b1' takes Other",
        ),
        (
            (A, node("B", SPLIT, SINK)),
            (AB,),
            "node B: stages 'b0' and 'b1' cannot follow each other: 2 outputs and 1 inputs, wanted",
        ),
        (
            (A, node("B", SPLIT), C, node("X", SINK)),
            (AB, edge("B", "C", src_port="left"), edge("B", "X", src_port="left")),
            "edge B.left > X.in: output leads to C.in as well; a batch has one owner",
        ),
        ((A, B, C), (AB, AB, BC), "edge A.out > B.in: declared twice"),
        ((A, B, C), (AB, edge("B", "C", max_items=0)), "edge B.out > C.in: items 0; accepted: 1"),
        ((A, B, C), (AB, edge("B", "C", max_nbytes=-1)), "edge B.out > C.in: bytes -1; accepted"),
        (
            (A, B, C),
            (AB, edge("B", "C", on_full="block")),
            "edge B.out > C.in: on_full 'block'; accepted: wait, drop",
        ),
        ((A, B, C), (AB, BC, edge("B", "Z")), "edge B.out > Z.in: no node 'Z'; declared: A, B, C"),
        ((A, B, C), (AB, BC, edge("Z", "C")), "edge Z.out > C.in: no node 'Z'; declared: A, B, C"),
        (
            (A, B, C),
            (AB, BC, edge("B", "C", src_port="up")),
            "edge B.up > C.in: B has no output 'up'; it has out",
        ),
        (
            (A, B, C),
            (AB, BC, edge("C", "B")),
            "edge C.out > B.in: C has no output 'out'; it has none",
        ),
        (
            (A, B, C),
            (AB, edge("B", "C", dst_port="down")),
            "edge B.out > C.down: C has no input 'down'; it has in",
        ),
        (
            (A, B, node("C", OTHER_SINK)),
            (AB, BC),
            "edge B.out > C.in: B gives Special, C takes Other",
        ),
        ((A, B, C), (BC,), "node B: input 'in' has no edge"),
        ((A, B), (AB,), "node B: output 'out' has no edge"),
        (
            (node("A", SOURCE, entry=None), B, C),
            (AB, BC),
            "node A: takes submitted work, and declares no entry bounds",
        ),
        (
            (A, B, node("C", SINK, entry=BOUND)),
            (AB, BC),
            "node C: declares entry bounds, and takes no submitted work",
        ),
        (
            (node("A", SOURCE, entry=Bound(max_items=0, max_nbytes=1)), B, C),
            (AB, BC),
            "node A: entry bounds of 0 items and 1 bytes; accepted: 1 or more of each",
        ),
        (
            (A, node("X", SOURCE), B, C),
            (AB, BC, edge("X", "B")),
            "nodes A and X: both take submitted Work",
        ),
        ((A, B, C), (AB, BC, edge("B", "B")), "cycle: B > B"),
    ],
)
def test_every_fault_is_named_with_what_is_accepted(
    nodes: tuple[Node, ...], edges: tuple[Edge, ...], fault: str
) -> None:
    found = faults(nodes, edges)
    assert any(said.startswith(fault) for said in found), found
    with pytest.raises(GraphError) as caught:
        Graph("toy", {node.id: node for node in nodes}, edges)
    assert caught.value.faults == tuple(found)
    assert caught.value.name == "toy"


def test_a_definition_with_a_dozen_faults_reports_all_of_them_at_once() -> None:
    picky = stage({"in": Port(Other)}, {}, ("ring",))
    nodes = [
        node("A", SOURCE, entry=None),
        node("B", MIDDLE, OTHER_SINK),
        node("D", lane="host:d"),
        node("E", picky, lane="host:e", depth=-1, budget_nbytes=-5),
        node("F", SINK, lane="nowhere", entry=BOUND),
        node("G", MIDDLE),
        node("H", MIDDLE),
        node("I", MIDDLE),
    ]
    edges = [
        edge("A", "B", max_items=0),
        edge("A", "B", max_nbytes=0, on_full="burst"),
        edge("A", "E"),
        edge("G", "H"),
        edge("H", "G"),
        edge("G", "Z"),
        edge("H", "F", src_port="side"),
    ]
    wanted = [
        "node B: stage 'b0' gives Special, stage 'b1' takes Other",
        "node D: no stages",
        "node E: stage 'e0' cannot run on a host lane; it runs on ring",
        "node E: depth -1",
        "node E: budget -5",
        "node F: lane 'nowhere'",
        "edge A.out > B.in: items 0",
        "edge A.out > B.in: declared twice",
        "edge A.out > B.in: bytes 0",
        "edge A.out > B.in: on_full 'burst'",
        "edge A.out > E.in: output leads to B.in as well",
        "edge A.out > E.in: A gives Special, E takes Other",
        "edge G.out > Z.in: no node 'Z'",
        "edge G.out > Z.in: output leads to H.in as well",
        "edge H.side > F.in: H has no output 'side'",
        "node I: input 'in' has no edge",
        "node I: output 'out' has no edge",
        "node A: takes submitted work",
        "node F: declares entry bounds",
        "cycle: G > H > G",
    ]
    with pytest.raises(GraphError) as caught:
        Graph("broken", {node.id: node for node in nodes}, tuple(edges))
    found = caught.value.faults
    for start in wanted:
        assert sum(said.startswith(start) for said in found) == 1, (start, found)
    assert len(found) == len(wanted)
    report = str(caught.value).splitlines()
    assert report[0] == f"pipeline 'broken': {len(wanted)} faults"
    assert report[1:] == [f"  - {said}" for said in found]


def test_one_fault_is_counted_in_the_singular() -> None:
    assert str(GraphError("toy", ("no nodes",))).startswith("pipeline 'toy': 1 fault\n")


def test_ports_of_an_unresolved_node_are_not_blamed() -> None:
    unresolved = node("B", None)
    assert faults([A, unresolved, C], [AB, BC]) == []


# Any graph ---------------------------------------------------------------------------------


def wired(arrows: Iterable[tuple[int, int]], count: int) -> tuple[dict[str, Node], list[Edge]]:
    """Nodes that have exactly the ports which these arrows need."""
    arrows = list(arrows)
    nodes = {}
    for i in range(count):
        inputs = {f"from{src}": Port(Batch) for src, dst in arrows if dst == i}
        outputs = {f"to{dst}": Port(Special) for src, dst in arrows if src == i}
        nodes[f"n{i}"] = node(f"n{i}", stage(inputs, outputs))
    edges = [
        edge(f"n{src}", f"n{dst}", src_port=f"to{dst}", dst_port=f"from{src}")
        for src, dst in arrows
    ]
    return nodes, edges


@st.composite
def dags(draw: st.DrawFn) -> tuple[int, list[tuple[int, int]]]:
    """A number of nodes, and arrows that lead from lower to higher places of a shuffled order."""
    count = draw(st.integers(1, 9))
    order = draw(st.permutations(range(count)))
    pairs = list(itertools.combinations(order, 2))
    arrows = draw(st.lists(st.sampled_from(pairs), unique=True)) if pairs else []
    return count, arrows


def reachable(arrows: Iterable[tuple[int, int]], start: int) -> set[int]:
    arrows = list(arrows)
    found, fresh = {start}, {start}
    while fresh:
        fresh = {dst for src, dst in arrows if src in fresh} - found
        found |= fresh
    return found


@unhurried
@given(dags())
def test_any_acyclic_graph_is_accepted(dag: tuple[int, list[tuple[int, int]]]) -> None:
    count, arrows = dag
    nodes, edges = wired(arrows, count)
    graph = Graph("any", nodes, tuple(edges))
    assert graph.chart.arrows == tuple((f"n{src}", f"n{dst}") for src, dst in arrows)


@unhurried
@given(dags(), st.data())
def test_one_arrow_back_is_always_reported_as_a_cycle(
    dag: tuple[int, list[tuple[int, int]]], data: st.DataObject
) -> None:
    count, arrows = dag
    start = data.draw(st.integers(0, count - 1))
    end = data.draw(st.sampled_from(sorted(reachable(arrows, start))))
    arrows = [*arrows, (end, start)]
    nodes, edges = wired(arrows, count)
    (fault,) = graph_faults(nodes, edges)
    assert fault.startswith("cycle: ")
    path = fault.removeprefix("cycle: ").split(" > ")
    assert path[0] == path[-1]
    assert (f"n{end}", f"n{start}") in itertools.pairwise(path)
    assert set(itertools.pairwise(path)) <= {(edge.src, edge.dst) for edge in edges}


def test_a_long_chain_is_checked_without_recursion() -> None:
    count = 2000
    nodes, edges = wired([], 0)
    nodes = {f"n{i}": node(f"n{i}", MIDDLE) for i in range(count)}
    edges = [edge(f"n{i}", f"n{(i + 1) % count}") for i in range(count)]
    (fault,) = graph_faults(nodes, edges)
    assert fault.count(" > ") == count


def chart_of(arrows: Iterable[tuple[int, int]]) -> Chart:
    named = tuple((f"n{src}", f"n{dst}") for src, dst in arrows)
    return Chart({box: box.upper() for arrow in named for box in arrow}, named)


arrow_lists = st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5)), unique=True)


@unhurried
@given(arrow_lists, arrow_lists)
def test_charts_join_in_order_each_arrow_once(
    first: list[tuple[int, int]], second: list[tuple[int, int]]
) -> None:
    joined = chart_of(first) | chart_of(second)
    assert joined.arrows == chart_of(dict.fromkeys([*first, *second])).arrows
    assert joined.labels.keys() == chart_of([*first, *second]).labels.keys()
    assert joined | chart_of(first) == joined
    drawn = joined.to_mermaid()
    assert drawn.count("-->") == len(joined.arrows)
    for label in joined.labels.values():
        assert drawn.count(f"[{label}]") == 1


def test_an_output_that_leads_to_two_inputs_of_one_node_is_a_fault() -> None:
    both = node("B", stage({"a": Port(Batch), "b": Port(Batch)}, {}))
    twice = [edge("A", "B", dst_port="a"), edge("A", "B", dst_port="b")]
    assert any("a batch has one owner" in fault for fault in faults([A, both], twice))
