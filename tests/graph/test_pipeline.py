"""A definition is read strictly: whatever is in the file, the answer is a graph or every fault."""

from __future__ import annotations

import contextlib
import copy
import datetime as dt
import hashlib
import json
import sys
import textwrap
import tomllib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from orbitkv.config import Config
from orbitkv.errors import GraphError
from orbitkv.graph import Bound, Graph
from orbitkv.pipeline import PACKAGED, load_pipeline, with_settings
from orbitkv.stages import STAGES

unhurried = settings(deadline=None)  # a busy machine is no fault
Load = Callable[[str | Mapping[str, Any]], Graph]
FaultsOf = Callable[[str | Mapping[str, Any]], tuple[str, ...]]
SAVE: dict[str, Any] = {
    "name": "toy",
    "edges": [
        {"from": "E", "to": "C", "items": 2, "bytes": "32 MiB"},
        {"from": "C.dram", "to": "D", "items": 4, "bytes": "64 MiB"},
    ],
    "nodes": {
        "E": {
            "label": "pages",
            "stages": ["gather"],
            "lane": "stream:save",
            "entry": {"items": 2, "bytes": "32 MiB"},
        },
        "C": {
            "label": "encode",
            "stages": ["encode", "crc32"],
            "lane": "stream:save",
            "budget": "64 MiB",
        },
        "D": {"label": "dram", "stages": ["store"], "lane": "stream:save"},
    },
}


def to_toml(table: Mapping[str, Any]) -> str:
    return "".join(f"{_text(key)} = {_value(value)}\n" for key, value in table.items())


def _value(value: Any) -> str:  # noqa: ANN401 - whatever TOML can hold
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        return _text(value)
    if isinstance(value, Mapping):
        inside = ", ".join(f"{_text(k)} = {_value(v)}" for k, v in value.items())
        return f"{{ {inside} }}"
    if isinstance(value, list):
        return f"[{', '.join(map(_value, value))}]"
    return value.isoformat() if isinstance(value, dt.date) else str(value)


def _text(text: str) -> str:
    return json.dumps(text).replace("\x7f", "\\u007f")


@pytest.fixture
def load(tmp_path: Path) -> Load:
    def load(definition: str | Mapping[str, Any]) -> Graph:
        text = definition if isinstance(definition, str) else to_toml(definition)
        path = tmp_path / "toy.toml"
        path.write_text(text, encoding="utf-8")
        return load_pipeline(path).graph

    return load


@pytest.fixture
def faults_of(load: Load) -> FaultsOf:
    def faults_of(definition: str | Mapping[str, Any]) -> tuple[str, ...]:
        with pytest.raises(GraphError) as caught:
            load(definition)
        return caught.value.faults

    return faults_of


def changed(path: str, value: object) -> dict[str, Any]:
    """SAVE with one value set at a dotted path; None takes the key away."""
    table = copy.deepcopy(SAVE)
    *way, last = path.split("/")
    at: Any = table
    for step in way:
        at = at[int(step) if isinstance(at, list) else step]
    key = int(last) if isinstance(at, list) else last
    if value is None:
        del at[key]
    else:
        at[key] = value
    return table


# What is accepted --------------------------------------------------------------------------


def test_a_definition_becomes_a_graph(load: Load) -> None:
    graph = load(SAVE)
    assert graph.name == "toy"
    assert list(graph.nodes) == ["E", "C", "D"]
    assert [str(edge) for edge in graph.edges] == ["E.out > C.in", "C.dram > D.in"]
    assert graph.nodes["E"].entry == Bound(max_items=2, max_nbytes=2**25)
    assert graph.nodes["C"].budget_nbytes == 2**26
    assert [use.implementation for use in graph.nodes["C"].stages] == [
        STAGES["encode"],
        STAGES["crc32"],
    ]
    first = graph.edges[0]
    assert (first.max_items, first.max_nbytes, first.on_full) == (2, 2**25, "wait")


def test_depth_is_one_and_required_is_false_unless_said(load: Load) -> None:
    assert (load(SAVE).nodes["D"].depth, load(SAVE).nodes["D"].required) == (1, False)
    told = load(changed("nodes/D", {**SAVE["nodes"]["D"], "depth": 3, "required": True}))
    assert (told.nodes["D"].depth, told.nodes["D"].required) == (3, True)


def test_an_end_without_a_port_means_the_only_one(load: Load, faults_of: FaultsOf) -> None:
    assert load(SAVE).edges[0].src_port == "out"
    found = faults_of(changed("edges/1/from", "C"))
    assert found[0] == "edge C > D: C has 2 outputs, name one; it has C.dram, C.direct"


def test_sizes_may_be_bare_numbers_of_bytes(load: Load) -> None:
    assert load(changed("edges/0/bytes", 4096)).edges[0].max_nbytes == 4096


def test_a_definition_is_stamped_with_the_digest_of_its_file(tmp_path: Path) -> None:
    path = tmp_path / "toy.toml"
    path.write_text(to_toml(SAVE))
    assert load_pipeline(path).sha256 == hashlib.sha256(path.read_bytes()).hexdigest()
    assert load_pipeline(str(path)) == load_pipeline(path)


@pytest.mark.parametrize("name", ["save", "restore"])
def test_packaged_definitions_are_found_by_name_from_anywhere(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    document = (PACKAGED / f"{name}.toml").read_bytes()
    assert load_pipeline(name).graph.name == name
    assert load_pipeline(name).sha256 == hashlib.sha256(document).hexdigest()


# Files -------------------------------------------------------------------------------------


def test_settings_take_the_place_of_a_definitions_numbers_and_of_nothing_else() -> None:
    save, restore = load_pipeline("save").graph, load_pipeline("restore").graph
    assert with_settings(save, Config()) == save
    config = Config(ssd_write_inflight=3, ssd_prefetch_inflight=5, ssd_write_queue_depth=128)
    told = with_settings(save, config)
    assert {node.id for node in told.nodes.values() if node != save.nodes[node.id]} == {"U"}
    assert told.nodes["U"] == replace(save.nodes["U"], depth=3)
    assert with_settings(restore, config).nodes["U"] == replace(restore.nodes["U"], depth=5)
    (changed_edge,) = set(told.edges) - set(save.edges)
    (edge,) = set(save.edges) - set(told.edges)
    assert changed_edge == replace(edge, max_items=128, max_nbytes=edge.max_nbytes * 2)
    shorter = with_settings(save, Config(ssd_write_queue_depth=1))
    assert shorter.into("U")[0] == replace(edge, max_items=1)
    assert told.chart == save.chart


def test_settings_that_give_nodes_of_one_lane_two_depths_are_a_fault() -> None:
    restore, writer = load_pipeline("restore").graph, load_pipeline("save").graph.nodes["U"]
    reader = replace(restore.nodes["U"], lane=writer.lane)
    nodes = {**restore.nodes, "U": reader, "W": replace(writer, id="W")}
    both = Graph("both", nodes, restore.edges)
    assert with_settings(both, Config(ssd_write_inflight=2, ssd_prefetch_inflight=2))
    with pytest.raises(GraphError, match="share lane 'ring:write' at depths 8 and 2"):
        with_settings(both, Config(ssd_write_inflight=2))


def test_a_missing_file_names_the_packaged_definitions(tmp_path: Path) -> None:
    with pytest.raises(GraphError, match="No such file or directory; accepted: a file, or one of"):
        load_pipeline(tmp_path / "absent.toml")
    with pytest.raises(GraphError, match="restore, save"):
        load_pipeline("sav")


def test_a_directory_is_not_a_definition(tmp_path: Path) -> None:
    with pytest.raises(GraphError, match="not a regular file"):
        load_pipeline(tmp_path)


def test_what_is_not_toml_is_told_with_its_line(faults_of: FaultsOf) -> None:
    (fault,) = faults_of('name = "toy"\nedges = [\n')
    assert fault.startswith("not TOML: ")
    (fault,) = faults_of("name = 1\nname = 2\n")
    assert "line 2" in fault


def test_what_is_not_utf8_is_not_toml(tmp_path: Path) -> None:
    (tmp_path / "toy.toml").write_bytes(b'name = "\xff"\n')
    with pytest.raises(GraphError, match="not TOML: 'utf-8' codec"):
        load_pipeline(tmp_path / "toy.toml")


@pytest.mark.parametrize(
    "document",
    [
        pytest.param("depth = " + "9" * 5000, id="a number of 5,000 digits"),
        pytest.param("edges = " + "[" * 5000 + "]" * 5000, id="5,000 nested arrays"),
    ],
)
def test_what_tomllib_cannot_hold_is_not_toml(document: str, faults_of: FaultsOf) -> None:
    assert faults_of(document)[0].startswith("not TOML: ")


def test_a_name_that_no_file_can_have_is_a_missing_file() -> None:
    with pytest.raises(GraphError, match="accepted: a file"):
        load_pipeline("save\0")


def test_an_empty_file_has_no_name_and_no_nodes(faults_of: FaultsOf) -> None:
    assert faults_of("") == (
        "definition: no 'name'; accepted: a line of text",
        "definition: no 'nodes'; accepted: a table",
        "no nodes",
    )


# Keys --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("path", "value", "where", "nearest"),
    [
        ("edge", [], "definition: unknown key 'edge'", "edges"),
        ("node", {}, "definition: unknown key 'node'", "nodes"),
        ("nodes/D/lanes", "host:a", "node D: unknown key 'lanes'", "lane"),
        ("nodes/D/buget", 1, "node D: unknown key 'buget'", "budget"),
        ("nodes/D/stage", "store", "node D: unknown key 'stage'", "stages"),
        ("nodes/E/entry/item", 1, "node E: entry: unknown key 'item'", "items"),
        ("edges/0/onfull", "drop", "edge E > C: unknown key 'onfull'", "on_full"),
        ("edges/1/byte", 1, "edge C.dram > D: unknown key 'byte'", "bytes"),
        ("edges/1/form", "C", "edge C.dram > D: unknown key 'form'", "from"),
    ],
)
def test_an_unknown_key_names_the_nearest_known_one(
    path: str, value: object, where: str, nearest: str, faults_of: FaultsOf
) -> None:
    (fault,) = faults_of(changed(path, value))
    assert fault.startswith(f"{where} (nearest: '{nearest}'); accepted: ")


def test_an_unknown_stage_names_the_nearest_known_one(faults_of: FaultsOf) -> None:
    (fault,) = faults_of(changed("nodes/D/stages", ["stroe"]))
    assert fault.startswith("node D: no stage 'stroe' (nearest: 'store'); accepted: gather, ")
    assert fault.endswith(", or package.module:Class")


@pytest.mark.parametrize(
    ("path", "fault"),
    [
        ("name", "definition: no 'name'; accepted: a line of text"),
        ("nodes/D/label", "node D: no 'label'; accepted: a line of text"),
        ("nodes/D/lane", "node D: no 'lane'; accepted: a line of text"),
        ("nodes/D/stages", "node D: stages None; accepted: an array of names or tables"),
        ("nodes/E/entry/items", "node E: entry: no 'items'; accepted: a whole number of 1 or more"),
        ("nodes/E/entry/bytes", "node E: entry: no 'bytes'; accepted: a size of 1 byte or more"),
        ("nodes/E/entry", "node E: takes submitted work, and declares no entry bounds"),
        ("edges/0/items", "edge E > C: no 'items'; accepted: a whole number of 1 or more"),
        ("edges/0/bytes", "edge E > C: no 'bytes'; accepted: a size of 1 byte or more"),
        ("edges/0/from", "edge 1: no 'from'; accepted: a line of text"),
        ("edges/1/to", "edge 2: no 'to'; accepted: a line of text"),
        ("edges/0", "node E: output 'out' has no edge"),
        ("edges", "node C: input 'in' has no edge"),
        ("nodes/D", "edge C.dram > D.?: no node 'D'; declared: E, C"),
    ],
)
def test_what_is_missing_is_said(path: str, fault: str, faults_of: FaultsOf) -> None:
    found = faults_of(changed(path, None))
    assert any(said.startswith(fault) for said in found), found


@pytest.mark.parametrize(
    ("path", "value", "fault"),
    [
        ("name", 7, "definition: name 7; accepted: a line of text"),
        ("name", "", "definition: name ''; accepted"),
        ("name", "two\nlines", "definition: name 'two\\nlines'; accepted"),
        ("nodes", 7, "definition: nodes: 7; accepted: a table"),
        ("nodes", ["E"], "definition: nodes: ['E']; accepted: a table"),
        ("nodes/D", "store", "node D: 'store'; accepted: a table"),
        ("nodes/D/label", ["x"], "node D: label ['x']; accepted: a line of text"),
        ("nodes/D/lane", 3, "node D: lane 3; accepted: a line of text"),
        ("nodes/D/lane", "thread:x", "node D: lane 'thread:x'; accepted: stream:NAME"),
        ("nodes/D/lane", "ring:x", "node D: stage 'store' cannot run on a ring lane; it runs on"),
        ("nodes/D/stages", "store", "node D: stages 'store'; accepted: an array of names"),
        ("nodes/D/stages", [], "node D: no stages"),
        ("nodes/D/stages", [7], "node D: stage 7; accepted: a name, or a table with the key 'use'"),
        ("nodes/D/stages", [{}], "node D: stage {}; accepted: a name, or a table"),
        (
            "nodes/D/stages",
            [{"name": "store"}],
            "node D: stage {'name': 'store'}; accepted: a name",
        ),
        ("nodes/D/stages", [{"use": 7}], "node D: stage {'use': 7}; accepted: a name, or a table"),
        ("nodes/D/depth", 0, "node D: depth 0; accepted: a whole number of 1 or more"),
        ("nodes/D/depth", 1.5, "node D: depth 1.5; accepted: a whole number of 1 or more"),
        ("nodes/D/depth", True, "node D: depth True; accepted: a whole number of 1 or more"),
        ("nodes/D/required", "yes", "node D: required 'yes'; accepted: true or false"),
        ("nodes/D/required", 1, "node D: required 1; accepted: true or false"),
        ("nodes/C/budget", "64 QiB", "node C: budget: '64 QiB' is not a size; accepted: a number"),
        ("nodes/C/budget", 0, "node C: budget 0; accepted: a size of 1 byte or more"),
        ("nodes/C/budget", -1, "node C: budget: -1 is not a size"),
        ("nodes/C/budget", True, "node C: budget: True is not a size"),
        ("nodes/C/budget", [1], "node C: budget: [1] is not a size"),
        ("nodes/C/budget", {"a": 1}, "node C: budget: {'a': 1} is not a size"),
        ("nodes/C/budget", "0.3", "node C: budget: '0.3' is 0.3 bytes; accepted: a whole number"),
        ("nodes/E/entry", 5, "node E: entry: 5; accepted: a table"),
        ("nodes/E/entry/items", 0, "node E: entry: items 0; accepted: a whole number of 1 or more"),
        ("edges", 7, "definition: edges 7; accepted: an array of tables"),
        ("edges/0", "E > C", "edge 1: 'E > C'; accepted: a table"),
        ("edges/0/from", 7, "edge 1: from 7; accepted: a line of text"),
        ("edges/0/items", "2", "edge E > C: items '2'; accepted: a whole number of 1 or more"),
        ("edges/0/items", -2, "edge E > C: items -2; accepted: a whole number of 1 or more"),
        ("edges/0/bytes", "much", "edge E > C: bytes: 'much' is not a size; accepted: a number"),
        ("edges/0/bytes", 0, "edge E > C: bytes 0; accepted: a size of 1 byte or more"),
        ("edges/0/on_full", "block", "edge E > C: on_full 'block'; accepted: wait, drop"),
        ("edges/0/on_full", ["drop"], "edge E > C: on_full ['drop']; accepted: wait, drop"),
        ("edges/0/to", "Z", "edge E.out > Z.?: no node 'Z'; declared: E, C, D"),
        ("edges/0/to", "D", "edge E.out > D.in: E gives PageBatch, D takes SealedBatch"),
        (
            "edges/1/from",
            "C.down",
            "edge C.down > D.in: C has no output 'down'; it has dram, direct",
        ),
        ("edges/1/to", "D.a.b", "edge C.dram > D.a.b: D has no input 'a.b'; it has in"),
        ("edges/1", {**SAVE["edges"][0]}, "edge E.out > C.in: declared twice"),
        ("nodes/a b", {**SAVE["nodes"]["D"]}, "node a b: id 'a b'; accepted: letters, digits"),
        ("nodes/C.x", {**SAVE["nodes"]["D"]}, "node C.x: id 'C.x'; accepted: letters, digits"),
    ],
)
def test_what_is_wrong_is_said_with_what_was_seen_and_what_is_accepted(
    path: str, value: object, fault: str, faults_of: FaultsOf
) -> None:
    found = faults_of(changed(path, value))
    assert any(said.startswith(fault) for said in found), found


@pytest.mark.parametrize(
    "size",
    [
        pytest.param("9" * 5000, id="more digits than int takes"),
        pytest.param("9" * 400 + ".5", id="more than a float holds"),
    ],
)
def test_a_size_that_no_number_holds_is_a_fault(size: str, faults_of: FaultsOf) -> None:
    (fault,) = faults_of(changed("edges/0/bytes", size))
    assert "accepted" in fault


@pytest.mark.parametrize("label", ["a]b", "[", "(", "SSD (fast)", "a {b}"])
def test_a_label_that_would_break_the_drawing_is_drawn_in_quotes(label: str, load: Load) -> None:
    assert f'D["{label}"]' in load(changed("nodes/D/label", label)).chart.to_mermaid()


@pytest.mark.parametrize("label", ["a\rb", "a\x0bb", "a\u2028b"])
def test_a_line_of_text_is_one_line(label: str, faults_of: FaultsOf) -> None:
    (fault,) = faults_of(changed("nodes/D/label", label))
    assert fault.startswith("node D: label ")


def test_a_definition_with_a_dozen_faults_reports_all_of_them_at_once(faults_of: FaultsOf) -> None:
    definition = """
        name = 3
        colour = "red"
        edges = [
          { from = "E", to = "C", bytes = "32 MiB" },
          { from = "C.dram", to = "D", items = 4, bytes = "64 parsecs", on_full = "explode" },
          { from = "D.write", to = "X", items = 0, bytes = 1 },
          { from = "Q", items = 1, bytes = 1 },
          "E > C",
        ]
        [nodes]
        E = { label = "pages", stages = ["gather"], lane = "stream:save" }
        C = { label = "encode", stages = ["encod", "crc32"], lane = "stream:save", budget = "lots" }
        D = { label = "dram", stages = ["store"], lane = "ring:save", depth = 0, requird = true }
        F = { label = "free", stages = [{ use = "crc32", bits = 64 }], lane = "here" }
    """
    found = faults_of(textwrap.dedent(definition))
    for start in (
        "definition: unknown key 'colour'",
        "definition: name 3",
        "edge E > C: no 'items'",
        "edge C.dram > D: bytes: '64 parsecs' is not a size",
        "edge C.dram > D: on_full 'explode'",
        "edge D.write > X: items 0",
        "edge 4: no 'to'",
        "edge 5: 'E > C'; accepted: a table",
        "node E: takes submitted work",
        "node C: no stage 'encod' (nearest: 'encode')",
        "node C: budget: 'lots' is not a size",
        "node D: stage 'store' cannot run on a ring lane",
        "node D: depth 0",
        "node D: unknown key 'requird' (nearest: 'required')",
        "node F: options of stage 'crc32': ",
        "node F: lane 'here'",
        "node F: output 'dram' has no edge",
        "edge D.write > X.?: no node 'X'",
    ):
        assert sum(said.startswith(start) for said in found) == 1, (start, found)


def test_each_fault_is_reported_once(faults_of: FaultsOf) -> None:
    found = faults_of(changed("edges/0/on_full", "block"))
    assert len(found) == len(set(found)) == 1


# Stages of the user's own ------------------------------------------------------------------

OWN_STAGE = """
    from orbitkv.graph import Port
    from orbitkv.stages.batch import SealedBatch, EncodedBatch

    class Sink:
        inputs = {"in": Port(SealedBatch)}
        outputs = {}
        lanes = frozenset({"host", "stream"})

        def __init__(self, *, keep=1):
            self.keep = keep

        async def run(self, batch, ctx):
            return {}

    class NeedsOption(Sink):
        def __init__(self, *, path):
            pass

    class Elsewhere(Sink):
        lanes = frozenset({"ring"})

    class TakesOther(Sink):
        inputs = {"in": Port(int)}

    class BareTypes(Sink):
        inputs = {"in": SealedBatch}

    class NotMappings(Sink):
        inputs = ["in"]

    class NoLanes(Sink):
        lanes = None

    class TextLanes(Sink):
        lanes = "streams"

    class NotAStage:
        inputs = {}

    def function():
        pass

    number = 7
"""


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Importable modules of a user's own, forgotten afterwards."""
    before = set(sys.modules)
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "own_stage.py").write_text(textwrap.dedent(OWN_STAGE))
    (tmp_path / "own_raises.py").write_text("raise RuntimeError('not today')\n")
    (tmp_path / "own_exits.py").write_text("raise SystemExit(3)\n")
    (tmp_path / "own_syntax.py").write_text("def :\n")
    (tmp_path / "own_needs.py").write_text("import own_absent_library\n")
    yield
    for name in set(sys.modules) - before:
        if name.startswith("own_"):
            del sys.modules[name]


def with_stage(use: object) -> dict[str, Any]:
    return changed("nodes/D/stages", [use])


@pytest.mark.usefixtures("own")
def test_a_stage_of_the_users_own_is_named_by_import_path(load: Load) -> None:
    (use,) = load(with_stage("own_stage:Sink")).nodes["D"].stages
    assert (use.name, use.options) == ("own_stage:Sink", {})
    assert use.implementation is sys.modules["own_stage"].Sink


@pytest.mark.usefixtures("own")
def test_options_beside_use_go_to_the_stages_constructor(load: Load) -> None:
    (use,) = load(with_stage({"use": "own_stage:Sink", "keep": 3})).nodes["D"].stages
    assert use.options == {"keep": 3}


@pytest.mark.usefixtures("own")
@pytest.mark.parametrize(
    ("use", "fault"),
    [
        ("own_absent:Sink", "cannot be imported: ModuleNotFoundError"),
        ("own_stage:Absent", "cannot be imported: AttributeError"),
        ("own_stage:", "cannot be imported: AttributeError"),
        (":Sink", "cannot be imported: ValueError"),
        (".own_stage:Sink", "cannot be imported: TypeError"),
        ("own stage:Sink", "cannot be imported: ModuleNotFoundError"),
        ("own_raises:Sink", "cannot be imported: RuntimeError('not today')"),
        ("own_syntax:Sink", "cannot be imported: SyntaxError"),
        ("own_needs:Sink", "cannot be imported: ModuleNotFoundError"),
        ("own_stage:NotAStage", "accepted: a class with inputs, outputs, lanes and run"),
        ("own_stage:function", "accepted: a class with inputs, outputs, lanes and run"),
        ("own_stage:number", "is 7; accepted: a class with inputs, outputs, lanes and run"),
        ("own_stage:BareTypes", "accepted: a mapping of names to orbitkv.graph.Port"),
        ("own_stage:TakesOther", "C gives SealedBatch, D takes int"),
        ("own_stage:Elsewhere", "cannot run on a stream lane; it runs on ring"),
        ("own_stage:NeedsOption", "missing 1 required keyword-only"),
        (
            {"use": "own_stage:Sink", "kep": 1},
            "got an unexpected keyword argument 'kep'",
        ),
        ({"use": "store", "keep": 1}, "options of stage 'store': "),
    ],
)
def test_a_stage_that_cannot_be_used_is_a_fault(
    use: object, fault: str, faults_of: FaultsOf
) -> None:
    found = faults_of(with_stage(use))
    assert len(found) == 1, found
    assert fault in found[0]


@pytest.mark.usefixtures("own")
@pytest.mark.parametrize(
    "use",
    [
        pytest.param("own_stage:NotMappings", id="ports in a list"),
        pytest.param("own_stage:NoLanes", id="lanes of None"),
        pytest.param("own_stage:TextLanes", id="lanes in one text"),
        pytest.param("own_exits:Sink", id="a module that exits"),
    ],
)
def test_a_stage_of_a_strange_make_is_a_fault(use: str, faults_of: FaultsOf) -> None:
    found = faults_of(with_stage(use))
    assert len(found) == 1, found


# Any definition ----------------------------------------------------------------------------

words = st.sampled_from(
    [
        *("E", "C", "D", "C.dram", "D.write", "name", "edges", "nodes", "stages", "use", "lane"),
        *("entry", "items", "bytes", "from", "to", "on_full", "drop", "store", "host:x", "4096"),
    ]
) | st.text(alphabet='ab.:_ "\\\n\t\x7f\0é[]{}=#', max_size=6)
leaves = (
    words | st.booleans() | st.integers(-(2**70), 2**70) | st.floats() | st.dates() | st.datetimes()
)
values = st.recursive(
    leaves,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(words, inner, max_size=3),
    max_leaves=8,
)


@pytest.fixture(scope="module")
def scratch(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("any") / "any.toml"


def read_or_refuse(path: Path, text: str) -> None:
    path.write_text(text, encoding="utf-8")
    with contextlib.suppress(GraphError):
        assert load_pipeline(path).graph.nodes


@unhurried
@given(st.dictionaries(words, values, max_size=4))
def test_any_table_is_a_graph_or_every_fault(scratch: Path, table: dict[str, Any]) -> None:
    text = to_toml(table)
    assert tomllib.loads(text).keys() == table.keys()
    read_or_refuse(scratch, text)


def spots(table: Any, way: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:  # noqa: ANN401
    inside = table.items() if isinstance(table, dict) else enumerate(table)
    for key, value in inside:
        yield (*way, key)
        if isinstance(value, dict | list):
            yield from spots(value, (*way, key))


@settings(deadline=None, max_examples=300, suppress_health_check=[HealthCheck.too_slow])
@given(st.data())
def test_any_change_of_a_good_definition_is_a_graph_or_every_fault(
    scratch: Path, data: st.DataObject
) -> None:
    table: Any = tomllib.loads((PACKAGED / "save.toml").read_text())
    for _ in range(data.draw(st.integers(1, 4))):
        *way, last = data.draw(st.sampled_from(list(spots(table))))
        at = table
        for step in way:
            at = at[step]
        action = data.draw(st.sampled_from(["set", "set", "delete", "add", "rename"]))
        if action == "set" or isinstance(at, list):
            at[last] = data.draw(values)
        elif action == "add":
            at[data.draw(words)] = data.draw(values)
        elif action == "rename" or len(at) > 1:
            value = at.pop(last)
            if action == "rename":
                at[data.draw(words)] = value
    read_or_refuse(scratch, to_toml(table))


@unhurried
@given(st.binary(max_size=200) | st.text(max_size=200).map(lambda text: text.encode()))
def test_any_file_is_a_graph_or_every_fault(scratch: Path, document: bytes) -> None:
    scratch.write_bytes(document)
    with pytest.raises(GraphError):
        load_pipeline(scratch)
