"""Graph: an immutable, checked description of stages and the bounded queues between them.

Nothing here runs. The runtime binds a graph to lanes; the pipeline module reads one from TOML.
"""

from __future__ import annotations

import string
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, Protocol, get_args

from orbitkv.errors import GraphError

# What Mermaid reads as the text of a box without quotes around it.
_PLAIN_LABEL = frozenset(string.ascii_letters + string.digits + " _-.,:/+")

# The port of an edge's end that named none where there are several: told by who read the edge.
UNNAMED_PORT = "?"

OnFull = Literal["wait", "drop"]
LANE_KINDS: Mapping[str, str] = {
    "stream": "a CUDA stream on each GPU with registered pages, one for bulk copies; else a thread",
    "host": "one host thread",
    "ring": "io_uring, or a preadv pool where it is not permitted",
    "file": "cuFile through KvikIO",
    "peer": "the peer client's threads",
}


@dataclass(frozen=True, slots=True)
class Port:
    """One input or output of a stage.

    Attributes:
        payload: Class of the batches that pass. An edge may carry a subclass to an input.
        entry: An input that the manager may submit work to. It needs bounds of its own.
        optional: The port may stay without an edge; what is emitted there goes nowhere.
    """

    payload: type
    entry: bool = False
    optional: bool = False

    def __post_init__(self) -> None:
        if not isinstance(self.payload, type):
            raise TypeError(f"Port of {self.payload!r}; accepted: a class of batches")


Ports = Mapping[str, Port]
Lanes = frozenset[str]


class StageType(Protocol):
    """What a graph has to know of a stage's class to check a definition."""

    inputs: ClassVar[Ports]
    outputs: ClassVar[Ports]
    lanes: ClassVar[Lanes]


@dataclass(frozen=True, slots=True)
class StageUse:
    """A stage as one node uses it: its name in the definition, its class, its options.

    ``implementation`` is None where the name could not be resolved; the reader of the definition
    has then already recorded the fault, and the ports of that node are not checked.
    """

    name: str
    implementation: type[StageType] | None
    options: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Bound:
    """How much a queue may hold: batches, and the bytes that they pin."""

    max_items: int
    max_nbytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """One box of the flowchart: stages that run in order on one lane, with no queue between.

    Attributes:
        lane: ``kind:name``, with a kind of ``LANE_KINDS``. Nodes that name one lane share it.
        depth: Batches that may be in this node at once. More than one gives up their order.
        entry: Bounds of the queue for submitted work, where the first stage has an entry port.
        budget_nbytes: Most workspace the node's stages may hold at once. None: they need none.
        required: Refuse to start where the node is unavailable, instead of switching it off.
    """

    id: str
    label: str
    stages: tuple[StageUse, ...]
    lane: str
    depth: int = 1
    entry: Bound | None = None
    budget_nbytes: int | None = None
    required: bool = False

    @property
    def lane_kind(self) -> str:
        """The part of ``lane`` before the colon."""
        return self.lane.partition(":")[0]

    @property
    def inputs(self) -> Ports:
        """Ports of the first stage."""
        first = self.stages[0].implementation if self.stages else None
        return first.inputs if first else {}

    @property
    def outputs(self) -> Ports:
        """Ports of the last stage."""
        last = self.stages[-1].implementation if self.stages else None
        return last.outputs if last else {}

    @property
    def resolved(self) -> bool:
        """Whether every stage's class is known, so that ports can be checked."""
        return bool(self.stages) and all(use.implementation for use in self.stages)


@dataclass(frozen=True, slots=True, kw_only=True)
class Edge:
    """One arrow of the flowchart: a queue bounded by items and by bytes.

    ``wait`` makes the producer wait while the queue is full; ``drop`` counts the batch and lets
    it go, so that a slow disk or peer never stalls publication.
    """

    src: str
    src_port: str
    dst: str
    dst_port: str
    max_items: int
    max_nbytes: int
    on_full: OnFull

    def __str__(self) -> str:
        return f"{self.src}.{self.src_port} > {self.dst}.{self.dst_port}"


@dataclass(frozen=True, slots=True)
class Chart:
    """The drawing of one or more graphs. Unlike a graph it may contain cycles."""

    labels: Mapping[str, str]
    arrows: tuple[tuple[str, str], ...]

    def __or__(self, other: Chart) -> Chart:
        """Draw both, this one first. A box that both have must carry one label.

        Raises:
            GraphError: the charts label one box in two ways.
        """
        faults = tuple(
            f"box {node_id} is labelled {self.labels[node_id]!r} and {label!r}"
            for node_id, label in other.labels.items()
            if self.labels.get(node_id, label) != label
        )
        if faults:
            raise GraphError("chart", faults)
        arrows = (*self.arrows, *(arrow for arrow in other.arrows if arrow not in self.arrows))
        return Chart({**self.labels, **other.labels}, arrows)

    def to_mermaid(self, *, dashed: frozenset[tuple[str, str]] = frozenset()) -> str:
        """Render arrows as declared; a box shows its label at first mention only.

        Args:
            dashed: Arrows to draw dashed: those of an arm that is switched off.
        """
        drawn: set[str] = set()

        def box(node_id: str) -> str:
            if node_id in drawn:
                return node_id
            drawn.add(node_id)
            label = self.labels[node_id]
            plain = set(label) <= _PLAIN_LABEL
            return (
                f"{node_id}[{label}]"
                if plain
                else f'{node_id}["{label.replace(chr(34), "#quot;")}"]'
            )

        lines = [
            f"    {box(src)} {'-.->' if (src, dst) in dashed else '-->'} {box(dst)}"
            for src, dst in self.arrows
        ]
        lonely = [f"    {box(node_id)}" for node_id in self.labels if node_id not in drawn]
        return "\n".join(["flowchart LR", *lines, *lonely])


@dataclass(frozen=True, slots=True)
class Graph:
    """Nodes and edges that have been checked as a whole.

    Raises:
        GraphError: with every fault: ports of other types, loose or unknown ports, cycles,
            duplicate edges, missing or impossible bounds, lanes a stage cannot run on.
    """

    name: str
    nodes: Mapping[str, Node]
    edges: tuple[Edge, ...]

    def __post_init__(self) -> None:
        faults = tuple(graph_faults(self.nodes, self.edges))
        if faults:
            raise GraphError(self.name, faults)

    @property
    def chart(self) -> Chart:
        """The drawing of this graph, arrows in the order of the definition."""
        arrows = tuple(dict.fromkeys((edge.src, edge.dst) for edge in self.edges))
        return Chart({node.id: node.label for node in self.nodes.values()}, arrows)

    def into(self, node_id: str) -> tuple[Edge, ...]:
        """Edges that end at a node, in order."""
        return tuple(edge for edge in self.edges if edge.dst == node_id)

    def out_of(self, node_id: str) -> tuple[Edge, ...]:
        """Edges that start at a node, in order."""
        return tuple(edge for edge in self.edges if edge.src == node_id)


def graph_faults(nodes: Mapping[str, Node], edges: Sequence[Edge]) -> Iterator[str]:
    """Yield everything that is wrong with a description, in the order of the definition."""
    if not nodes:
        yield "no nodes"
    depths: dict[str, tuple[str, int]] = {}
    for node in nodes.values():
        yield from _node_faults(node)
        other, depth = depths.setdefault(node.lane, (node.id, node.depth))
        if depth != node.depth and node.lane_kind == "ring":
            depths_seen = f"depths {depth} and {node.depth}"
            yield f"nodes {other} and {node.id}: share lane {node.lane!r} at {depths_seen}"
    yield from _edge_faults(nodes, edges)
    yield from _loose_ports(nodes, edges)
    yield from _entry_faults(nodes)
    cycle = _find_cycle(nodes, edges)
    if cycle:
        yield f"cycle: {' > '.join(cycle)}"


def _node_faults(node: Node) -> Iterator[str]:
    where = f"node {node.id}"
    if not node.stages:
        yield f"{where}: no stages"
    kind, colon, lane_name = node.lane.partition(":")
    if kind not in LANE_KINDS or not colon or not lane_name:
        accepted = ", ".join(f"{kind}:NAME" for kind in LANE_KINDS)
        yield f"{where}: lane {node.lane!r}; accepted: {accepted}"
    else:
        for use in node.stages:
            if use.implementation and kind not in use.implementation.lanes:
                lanes = ", ".join(sorted(use.implementation.lanes))
                yield f"{where}: stage {use.name!r} cannot run on a {kind} lane; it runs on {lanes}"
    if node.depth < 1:
        yield f"{where}: depth {node.depth}; accepted: 1 or more"
    if node.budget_nbytes is not None and node.budget_nbytes < 1:
        yield f"{where}: budget {node.budget_nbytes}; accepted: 1 byte or more"
    for use, following in zip(node.stages, node.stages[1:], strict=False):
        if use.implementation and following.implementation:
            yield from _joint_faults(where, use, following)


def _joint_faults(where: str, use: StageUse, following: StageUse) -> Iterator[str]:
    """Check that two neighbouring stages of one node fit: one port each, of one type."""
    assert use.implementation
    assert following.implementation
    if hasattr(use.implementation, "split"):
        seen = f"stages {use.name!r} and {following.name!r} cannot follow each other"
        yield f"{where}: {seen}: the first emits piece by piece, wanted as the last one"
        return
    outputs, inputs = use.implementation.outputs, following.implementation.inputs
    if len(outputs) != 1 or len(inputs) != 1:
        yield (
            f"{where}: stages {use.name!r} and {following.name!r} cannot follow each other: "
            f"{len(outputs)} outputs and {len(inputs)} inputs, wanted one of each"
        )
        return
    (given,), (wanted,) = outputs.values(), inputs.values()
    if not issubclass(given.payload, wanted.payload):
        yield (
            f"{where}: stage {use.name!r} gives {given.payload.__name__}, "
            f"stage {following.name!r} takes {wanted.payload.__name__}"
        )


def _edge_faults(nodes: Mapping[str, Node], edges: Iterable[Edge]) -> Iterator[str]:
    seen: set[tuple[str, str, str, str]] = set()
    owners: dict[tuple[str, str], tuple[str, str]] = {}
    for edge in edges:
        where = f"edge {edge}"
        end = (edge.dst, edge.dst_port)
        other = owners.setdefault((edge.src, edge.src_port), end)
        if other != end:
            yield f"{where}: output leads to {'.'.join(other)} as well; a batch has one owner"
        ends = (edge.src, edge.src_port, edge.dst, edge.dst_port)
        if ends in seen:
            yield f"{where}: declared twice"
        seen.add(ends)
        if edge.max_items < 1:
            yield f"{where}: items {edge.max_items}; accepted: 1 or more"
        if edge.max_nbytes < 1:
            yield f"{where}: bytes {edge.max_nbytes}; accepted: 1 or more"
        if edge.on_full not in get_args(OnFull):
            yield f"{where}: on_full {edge.on_full!r}; accepted: {', '.join(get_args(OnFull))}"
        for node_id in dict.fromkeys((edge.src, edge.dst)):
            if node_id not in nodes:
                yield f"{where}: no node {node_id!r}; declared: {', '.join(nodes)}"
        yield from _port_faults(where, edge, nodes.get(edge.src), nodes.get(edge.dst))


def _port_faults(where: str, edge: Edge, src: Node | None, dst: Node | None) -> Iterator[str]:
    given = wanted = None
    if src and src.resolved and edge.src_port != UNNAMED_PORT:
        given = src.outputs.get(edge.src_port)
        if given is None:
            has = ", ".join(src.outputs) or "none"
            yield f"{where}: {src.id} has no output {edge.src_port!r}; it has {has}"
    if dst and dst.resolved and edge.dst_port != UNNAMED_PORT:
        wanted = dst.inputs.get(edge.dst_port)
        if wanted is None:
            has = ", ".join(dst.inputs) or "none"
            yield f"{where}: {dst.id} has no input {edge.dst_port!r}; it has {has}"
    if given and wanted and not issubclass(given.payload, wanted.payload):
        yield (
            f"{where}: {edge.src} gives {given.payload.__name__}, "
            f"{edge.dst} takes {wanted.payload.__name__}"
        )


def _loose_ports(nodes: Mapping[str, Node], edges: Sequence[Edge]) -> Iterator[str]:
    fed = {(edge.dst, edge.dst_port) for edge in edges}
    drained = {(edge.src, edge.src_port) for edge in edges}
    for node in nodes.values():
        if not node.resolved:
            continue
        for name, port in node.inputs.items():
            if (node.id, name) not in fed and not (port.entry or port.optional):
                yield f"node {node.id}: input {name!r} has no edge"
        for name, port in node.outputs.items():
            if (node.id, name) not in drained and not port.optional:
                yield f"node {node.id}: output {name!r} has no edge"


def _entry_faults(nodes: Mapping[str, Node]) -> Iterator[str]:
    takers: dict[type, str] = {}
    for node in nodes.values():
        if not node.resolved:
            continue
        entries = [port for port in node.inputs.values() if port.entry]
        if entries and node.entry is None:
            yield f"node {node.id}: takes submitted work, and declares no entry bounds"
        if node.entry and not entries:
            yield f"node {node.id}: declares entry bounds, and takes no submitted work"
        if node.entry and (node.entry.max_items < 1 or node.entry.max_nbytes < 1):
            yield (
                f"node {node.id}: entry bounds of {node.entry.max_items} items and "
                f"{node.entry.max_nbytes} bytes; accepted: 1 or more of each"
            )
        for port in entries:
            if other := takers.get(port.payload):
                yield f"nodes {other} and {node.id}: both take submitted {port.payload.__name__}"
            takers[port.payload] = node.id


def _find_cycle(nodes: Mapping[str, Node], edges: Sequence[Edge]) -> tuple[str, ...]:
    """Return the ids along one cycle, its first id repeated last; empty if there is none."""
    following: dict[str, list[str]] = {node_id: [] for node_id in nodes}
    for edge in edges:
        if edge.src in nodes and edge.dst in nodes:
            following[edge.src].append(edge.dst)
    finished: set[str] = set()
    for root in nodes:
        path: list[str] = []
        on_path: dict[str, Iterator[str]] = {}
        step: str | None = root
        while step is not None:
            if step in on_path:
                return (*path[path.index(step) :], step)
            if step not in finished:
                path.append(step)
                on_path[step] = iter(following[step])
            step = None
            while path and step is None:
                step = next(on_path[path[-1]], None)
                if step is None:
                    done = path.pop()
                    del on_path[done]
                    finished.add(done)
    return ()
