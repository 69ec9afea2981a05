"""Read a pipeline definition: TOML to a checked Graph, with every fault in one report."""

from __future__ import annotations

import difflib
import hashlib
import importlib
import tomllib
from collections.abc import Iterable, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, get_args

from orbitkv.config import Config, parse_nbytes
from orbitkv.errors import ConfigError, GraphError
from orbitkv.graph import (
    LANE_KINDS,
    UNNAMED_PORT,
    Bound,
    Edge,
    Graph,
    Node,
    OnFull,
    Port,
    StageType,
    StageUse,
    graph_faults,
)
from orbitkv.stages import STAGES
from orbitkv.stages.io_uring import ReadExtents, WriteExtents

PACKAGED = Path(__file__).parent / "pipelines"

_TOP_KEYS = ("name", "edges", "nodes")
_NODE_KEYS = ("label", "stages", "lane", "depth", "entry", "budget", "required")
_EDGE_KEYS = ("from", "to", "items", "bytes", "on_full")
_BOUND_KEYS = ("items", "bytes")


@dataclass(frozen=True, slots=True)
class Pipeline:
    """A definition that has been read and checked.

    Attributes:
        sha256: Of the file's bytes, 64 hex digits; stamps every trace of a run.
        text: The file's bytes, read as UTF-8.
    """

    graph: Graph
    sha256: str
    text: str


def packaged_names() -> tuple[str, ...]:
    """Names of the definitions that come with OrbitKV."""
    return tuple(sorted(path.stem for path in PACKAGED.glob("*.toml")))


def load_pipeline(source: str | Path) -> Pipeline:
    """Read a definition by its packaged name (``save``), or from a file.

    Raises:
        GraphError: with every fault of the definition, or that there is no such file.
    """
    path = Path(source)
    if str(source) in packaged_names():
        path = PACKAGED / f"{source}.toml"
    try:
        if path.exists() and not path.is_file():
            raise GraphError(str(source), ("not a regular file; accepted: a TOML file",))
        document = path.read_bytes()
    except (OSError, ValueError) as error:  # ValueError: a path that no file can have
        names = ", ".join(packaged_names())
        seen = error.strerror if isinstance(error, OSError) else error
        reason = f"{seen}; accepted: a file, or one of {names}"
        raise GraphError(str(source), (reason,)) from error
    try:
        text = document.decode()
        table = tomllib.loads(text)
    except (ValueError, RecursionError) as error:
        raise GraphError(str(source), (f"not TOML: {error}",)) from error
    return Pipeline(_Reader(path.stem).read(table), hashlib.sha256(document).hexdigest(), text)


def with_settings(graph: Graph, config: Config) -> Graph:
    """The graph that runs: as its definition says, but for what the configuration says instead.

    ``ssd_write_inflight`` and ``ssd_prefetch_inflight`` become the depth of the nodes that write
    and read extents, and with it of their lanes. ``ssd_write_queue_depth`` becomes the length of
    the edges to the former; the bytes of a longer edge grow in proportion.

    Raises:
        GraphError: two nodes that share a lane are given different depths.
    """
    nodes = dict(graph.nodes)
    for node in graph.nodes.values():
        for stage, depth in (
            (WriteExtents, config.ssd_write_inflight),
            (ReadExtents, config.ssd_prefetch_inflight),
        ):
            if depth and _uses(node, stage):
                nodes[node.id] = replace(node, depth=depth)
    items = config.ssd_write_queue_depth
    edges = tuple(
        replace(
            edge,
            max_items=items,
            max_nbytes=max(edge.max_nbytes, edge.max_nbytes * items // edge.max_items),
        )
        if items and _uses(nodes[edge.dst], WriteExtents)
        else edge
        for edge in graph.edges
    )
    return Graph(graph.name, nodes, edges)


def _uses(node: Node, stage: type) -> bool:
    return any(use.implementation and issubclass(use.implementation, stage) for use in node.stages)


@dataclass(slots=True)
class _Reader:
    """Collects faults on the way, so that one bad key does not hide the next."""

    name: str
    faults: list[str] = field(default_factory=list)

    def read(self, table: Mapping[str, Any]) -> Graph:
        self._known_keys("definition", table, _TOP_KEYS)
        self.name = self._text("definition", table, "name") or self.name
        node_tables = self._table("definition", table, "nodes")
        nodes = {
            node_id: self._node(node_id, self._as_table(f"node {node_id}", node_table))
            for node_id, node_table in node_tables.items()
        }
        listed = table.get("edges", [])
        if not isinstance(listed, list):
            self.faults.append(f"definition: edges {listed!r}; accepted: an array of tables")
            listed = []
        edges = []
        for index, edge_table in enumerate(listed):
            edge = self._edge(index, self._as_table(f"edge {index + 1}", edge_table), nodes)
            if edge:
                edges.append(edge)
        faults = (*self.faults, *graph_faults(nodes, edges))
        if faults:
            raise GraphError(self.name, tuple(dict.fromkeys(faults)))
        return Graph(self.name, nodes, tuple(edges))

    def _node(self, node_id: str, table: Mapping[str, Any]) -> Node:
        where = f"node {node_id}"
        self._known_keys(where, table, _NODE_KEYS)
        if not node_id.isidentifier():
            self.faults.append(f"{where}: id {node_id!r}; accepted: letters, digits, underscores")
        listed = table.get("stages")
        if not isinstance(listed, list):
            self.faults.append(f"{where}: stages {listed!r}; accepted: an array of names or tables")
            listed = []
        entry = table.get("entry")
        required = table.get("required", False)
        if not isinstance(required, bool):
            self.faults.append(f"{where}: required {required!r}; accepted: true or false")
        budget = table.get("budget")
        return Node(
            id=node_id,
            label=self._text(where, table, "label") or node_id,
            stages=tuple(self._stage(where, use) for use in listed),
            lane=self._text(where, table, "lane") or "",
            depth=self._count(where, table, "depth") if "depth" in table else 1,
            entry=None if entry is None else self._bound(f"{where}: entry", entry),
            budget_nbytes=None if budget is None else self._nbytes(where, table, "budget"),
            required=required is True,
        )

    def _stage(self, where: str, use: Any) -> StageUse:  # noqa: ANN401 - whatever TOML held
        options = dict(use) if isinstance(use, Mapping) else {}
        name = options.pop("use", None) if options else use
        if not isinstance(name, str):
            accepted = "a name, or a table with the key 'use'"
            self.faults.append(f"{where}: stage {use!r}; accepted: {accepted}")
            return StageUse(repr(use), None)
        implementation = self._import(where, name) if ":" in name else STAGES.get(name)
        if implementation is None and ":" not in name:
            hint = _nearest(name, STAGES)
            self.faults.append(
                f"{where}: no stage {name!r}{hint}; accepted: {', '.join(STAGES)}, "
                "or package.module:Class"
            )
        if implementation is not None:
            try:
                implementation(**options)
            except (Exception, SystemExit) as error:  # noqa: BLE001 - a stage may refuse in any way
                reason = " ".join(str(error).split()) or repr(error)
                self.faults.append(f"{where}: options of stage {name!r}: {reason}")
        return StageUse(name, implementation, options)

    def _import(self, where: str, name: str) -> type[StageType] | None:
        module_name, _, class_name = name.partition(":")
        try:
            found = getattr(importlib.import_module(module_name), class_name)
        except (Exception, SystemExit) as error:  # noqa: BLE001 - a user's module may fail in any way
            self.faults.append(f"{where}: stage {name!r} cannot be imported: {error!r}")
            return None
        works = any(
            all(callable(getattr(found, name, None)) for name in names)
            for names in (("run",), ("prepare", "run_item"), ("split",))
        )
        if not isinstance(found, type) or not works:
            wanted = "a class with inputs, outputs, lanes and run, prepare and run_item, or split"
            self.faults.append(f"{where}: stage {name!r} is {found!r}; accepted: {wanted}")
            return None
        implementation: Any = found
        for kind in ("inputs", "outputs"):
            table = getattr(implementation, kind, None)
            if not isinstance(table, Mapping) or not all(
                isinstance(port, Port) for port in table.values()
            ):
                accepted = "a mapping of names to orbitkv.graph.Port"
                self.faults.append(
                    f"{where}: {kind} of stage {name!r} {table!r}; accepted: {accepted}"
                )
                return None
        lanes = getattr(implementation, "lanes", None)
        if not isinstance(lanes, AbstractSet) or not lanes <= LANE_KINDS.keys():
            accepted = f"a set of {', '.join(LANE_KINDS)}"
            self.faults.append(f"{where}: lanes of stage {name!r} {lanes!r}; accepted: {accepted}")
            return None
        stage_type: type[StageType] = implementation
        return stage_type

    def _edge(self, index: int, table: Mapping[str, Any], nodes: Mapping[str, Node]) -> Edge | None:
        where = f"edge {index + 1}"
        ends = (self._text(where, table, "from"), self._text(where, table, "to"))
        if all(ends):
            where = f"edge {ends[0]} > {ends[1]}"
        self._known_keys(where, table, _EDGE_KEYS)
        bound = self._bound(where, {key: table[key] for key in _BOUND_KEYS if key in table})
        on_full = table.get("on_full", "wait")
        if on_full not in get_args(OnFull):
            accepted = ", ".join(get_args(OnFull))
            self.faults.append(f"{where}: on_full {on_full!r}; accepted: {accepted}")
            on_full = "wait"
        if not ends[0] or not ends[1]:
            return None
        src, _, src_port = ends[0].partition(".")
        dst, _, dst_port = ends[1].partition(".")
        return Edge(
            src=src,
            src_port=src_port or self._only_port(where, nodes.get(src), "output"),
            dst=dst,
            dst_port=dst_port or self._only_port(where, nodes.get(dst), "input"),
            max_items=bound.max_items,
            max_nbytes=bound.max_nbytes,
            on_full=on_full,
        )

    def _only_port(self, where: str, node: Node | None, kind: str) -> str:
        """The port that an end without one means: the only one there is."""
        if node is None or not node.resolved:
            return UNNAMED_PORT
        ports = tuple(node.outputs if kind == "output" else node.inputs)
        if len(ports) == 1:
            return ports[0]
        has = ", ".join(f"{node.id}.{port}" for port in ports) or "none"
        self.faults.append(f"{where}: {node.id} has {len(ports)} {kind}s, name one; it has {has}")
        return UNNAMED_PORT

    def _bound(self, where: str, value: Any) -> Bound:  # noqa: ANN401 - whatever TOML held
        table = self._as_table(where, value)
        self._known_keys(where, table, _BOUND_KEYS)
        return Bound(
            max_items=self._count(where, table, "items"),
            max_nbytes=self._nbytes(where, table, "bytes"),
        )

    def _count(self, where: str, table: Mapping[str, Any], key: str) -> int:
        value = table.get(key)
        if isinstance(value, int) and not isinstance(value, bool) and value > 0:
            return value
        self._missing_or_bad(where, table, key, "a whole number of 1 or more")
        return 1

    def _nbytes(self, where: str, table: Mapping[str, Any], key: str) -> int:
        if key in table:
            try:
                nbytes = parse_nbytes(table[key], setting=f"{where}: {key}")
            except ConfigError as error:
                self.faults.append(str(error))
                return 1
            if nbytes > 0:
                return nbytes
        self._missing_or_bad(where, table, key, "a size of 1 byte or more, such as 64 MiB")
        return 1

    def _text(self, where: str, table: Mapping[str, Any], key: str) -> str | None:
        value = table.get(key)
        if isinstance(value, str) and value.splitlines() == [value]:
            return value
        self._missing_or_bad(where, table, key, "a line of text")
        return None

    def _table(self, where: str, table: Mapping[str, Any], key: str) -> Mapping[str, Any]:
        if key in table:
            return self._as_table(f"{where}: {key}", table[key])
        self.faults.append(f"{where}: no {key!r}; accepted: a table")
        return {}

    def _as_table(self, where: str, value: Any) -> Mapping[str, Any]:  # noqa: ANN401 - from TOML
        if isinstance(value, Mapping):
            return value
        self.faults.append(f"{where}: {value!r}; accepted: a table")
        return {}

    def _missing_or_bad(
        self, where: str, table: Mapping[str, Any], key: str, accepted: str
    ) -> None:
        seen = f"{key} {table[key]!r}" if key in table else f"no {key!r}"
        self.faults.append(f"{where}: {seen}; accepted: {accepted}")

    def _known_keys(self, where: str, table: Mapping[str, Any], known: Iterable[str]) -> None:
        known = tuple(known)
        for key in table:
            if key not in known:
                hint = _nearest(key, known)
                self.faults.append(
                    f"{where}: unknown key {key!r}{hint}; accepted: {', '.join(known)}"
                )


def _nearest(word: str, known: Iterable[str]) -> str:
    found = difflib.get_close_matches(word, tuple(known), n=1, cutoff=0.0)
    return f" (nearest: {found[0]!r})" if found else ""
