"""What is shown of a trace: Chrome trace events, sums, differences, and the chart."""

from __future__ import annotations

import json
import threading
import xml.etree.ElementTree as ET
from collections import defaultdict
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from orbitkv import Client
from orbitkv.cli import main
from orbitkv.config import MIB
from orbitkv.runtime.recording import Recording, read_recording
from orbitkv.trace_svg import draw_svg
from orbitkv.trace_views import compare, summarise, to_chrome
from tests.builders import BLOCK, Engine, Gate, Lanes, numbered, page_hash, rest
from tests.conftest import ManagerFactory
from tests.serving import Served

Event = dict[str, Any]


@pytest.fixture
def trace(open_manager: ManagerFactory, ssd_path: Path, tmp_path: Path) -> Path:
    """Two namespaces, saves and restores at once, both tiers, and a write that was dropped."""
    path, lanes, gate = tmp_path / "run.okvtrace", Lanes(), Gate()
    lanes.before["ring:write"] = gate.pass_through
    manager = open_manager(
        lanes=lanes,
        ssd_cache_paths=ssd_path,
        pool_nbytes=4 * MIB,
        ssd_write_inflight=1,
        ssd_write_queue_depth=2,
        trace=path,
    )
    one, other = (Engine.register(manager, pages=64, name=name) for name in ("one", "other"))
    one.save({page_hash(0): 0})
    gate.await_arrival()
    for index in range(1, 4):
        one.save({page_hash(index): index})
    gate.open()
    tickets = [
        manager.publish(engine.instance, [(page_hash((engine.instance.namespace, i)), i)])
        for i in range(4, 24)
        for engine in (one, other)
    ]
    for ticket in tickets:
        ticket.result()
    manager.flush(evict_dram=True)
    one.restore(numbered(4))
    one.restore(numbered(4))
    assert rest(manager) == []
    manager.close()
    return path


@pytest.fixture
def recording(trace: Path) -> Recording:
    return read_recording(trace)


# Chrome trace events ---------------------------------------------------------------------------


def check_flows(
    phases: dict[str, list[Event]], slices: dict[tuple[int, int], list[tuple[float, float]]]
) -> None:
    flows: dict[int, list[Event]] = defaultdict(list)
    for phase in "stf":
        for event in phases[phase]:
            flows[event["id"]].append(event)
    for steps in flows.values():
        steps.sort(key=lambda event: (event["ts"], "stf".index(event["ph"])))
        assert [e["ph"] for e in steps] == ["s", *"t" * (len(steps) - 2), "f"]
        assert len({(e["name"], e["cat"]) for e in steps}) == 1
        for step in steps:  # bound to a slice that is there at that time
            row = slices[step["pid"], step["tid"]]
            assert any(start <= step["ts"] <= end for start, end in row)


def check_rules(shown: dict[str, Any]) -> dict[str, list[Event]]:
    """Hold what is shown against the rules of the JSON object format; events by phase."""
    shown = json.loads(json.dumps(shown, allow_nan=False))
    phases: dict[str, list[Event]] = defaultdict(list)
    for event in shown["traceEvents"]:
        phases[event["ph"]].append(event)
        assert isinstance(event["name"], str)
        assert isinstance(event["pid"], int)
        if event["ph"] != "C":
            assert isinstance(event["tid"], int)
        if event["ph"] != "M":
            assert event["ts"] >= 0
    assert set(phases) <= set("MXstfCi")
    named = {(e["pid"], e["tid"]) for e in phases["M"] if e["name"] == "thread_name"}
    processes = {e["pid"] for e in phases["M"] if e["name"] == "process_name"}
    slices: dict[tuple[int, int], list[tuple[float, float]]] = defaultdict(list)
    for event in phases["X"]:
        assert event["dur"] >= 0
        slices[event["pid"], event["tid"]].append((event["ts"], event["ts"] + event["dur"]))
    assert set(slices) == named, "every row has a name, and no row is empty"
    assert {pid for pid, _ in named} == processes
    for row in slices.values():
        assert row == sorted(row), "rows are in the order of time"
        for (_, end), (start, _) in pairwise(row):
            assert end <= start + 1e-3, "one after the other on a row"
    check_flows(phases, slices)
    assert all(event["bp"] == "e" for event in phases["f"])
    assert all(isinstance(v, int) for e in phases["C"] for v in e["args"].values())
    return phases


def test_events_follow_the_rules_of_the_format(recording: Recording) -> None:
    phases = check_rules(to_chrome(recording))
    spans = [e for e in phases["X"] if e["cat"] != "request"]
    assert len(spans) == len(recording.spans)
    flows = {event["id"] for event in phases["s"]}
    assert flows == set(recording.tickets)
    assert flows == {event["id"] for event in phases["f"]}
    assert len(phases["i"]) == len(recording.drops) > 0
    assert {e["name"] for e in phases["C"]} >= {"pool_used_nbytes", "save D.write > U.in"}


def test_each_lane_is_a_row_and_overlap_makes_more(recording: Recording) -> None:
    shown = to_chrome(recording)
    rows = {e["args"]["name"] for e in shown["traceEvents"] if e["name"] == "thread_name"}
    used = {f"{s.pipeline} {s.lane}" for s in recording.spans}
    assert {row.partition(" (")[0] for row in rows} == used | {"requests"}


def test_a_clients_request_is_a_slice_of_its_own_process(tmp_path: Path) -> None:
    served, path = Served(tmp_path / "s"), tmp_path / "t"
    with Client(served.path) as watcher, Client(served.path) as client, path.open("wb") as file:
        watcher.begin_trace(file)
        Engine.register(client).save(numbered(2))  # type: ignore[arg-type]
        watcher.end_trace()
    assert served.stop()
    recording = read_recording(path)
    recording.header.hardware["pid"] = "1"  # else both are this one process
    phases = check_rules(to_chrome(recording))
    (start,) = phases["s"]
    assert start["pid"] == recording.remotes[1].pid
    assert phases["f"][0]["pid"] == 1


def test_a_trace_that_is_cut_is_shown_as_far_as_it_goes(trace: Path) -> None:
    whole = trace.read_bytes()
    for end in range(len(whole) // 2, len(whole), 997):
        trace.write_bytes(whole[:end])
        cut = read_recording(trace)
        check_rules(to_chrome(cut))
        summarise(cut)
        draw_svg(cut)


# Where the time went ---------------------------------------------------------------------------


def test_summary_adds_up_spans_by_node_and_arrow(recording: Recording) -> None:
    summary = summarise(recording)
    nodes = {(n["pipeline"], n["node"]): n for n in summary["nodes"]}
    arrows = {(a["pipeline"], a["arrow"]): a for a in summary["arrows"]}
    service_ns = sum(s.end_ns - s.start_ns - s.paused_ns for s in recording.spans)
    assert sum(n["service_s"] for n in nodes.values()) == pytest.approx(service_ns / 1e9)
    wait_ns = sum(s.wait_ns for s in recording.spans)
    assert sum(a["wait_s"] for a in arrows.values()) == pytest.approx(wait_ns / 1e9)
    assert arrows["save", "D.write > U.in"]["dropped"] == len(recording.drops)
    assert arrows["save", "D.write > U.in"]["drop_reasons"] == {"Dropped": len(recording.drops)}
    assert arrows["save", "C.dram > D.in"]["max_items"] == 4
    assert arrows["restore", "U.out > D.loaded"]["nbytes"] == 4 * BLOCK
    for node in nodes.values():
        assert sum(node["stages_s"].values()) == pytest.approx(node["service_s"])


def test_summary_keeps_namespaces_apart(recording: Recording) -> None:
    one, other = summarise(recording)["namespaces"]
    assert one["requests"] == {"publish": 24, "query": 2, "restore": 2}
    assert other["requests"] == {"publish": 20}
    assert (one["pages"], other["pages"]) == (24 + 8, 20)


def test_critical_path_of_a_request_accounts_for_its_time(recording: Recording) -> None:
    slowest = summarise(recording, slowest=100)["slowest"]
    assert len(slowest) == len(recording.ended)
    assert [r["seconds"] for r in slowest] == sorted((r["seconds"] for r in slowest), reverse=True)
    for request in slowest:
        parts = sum(s["blocked_s"] + s["wait_s"] + s["service_s"] for s in request["path"])
        assert parts + request["elsewhere_s"] == pytest.approx(request["seconds"])
        assert request["elsewhere_s"] > -1e-6
    restores = [r for r in slowest if r["kind"] == "restore"]
    paths = sorted("".join(step["node"] for step in r["path"]) for r in restores)
    assert paths == ["DRE", "UDRE"]
    saves = {"".join(step["node"] for step in r["path"]) for r in slowest if r["kind"] == "publish"}
    assert saves == {"ECD"}, "what is written later is nothing a save waits for"


def test_diff_of_a_trace_with_itself_shows_none(recording: Recording) -> None:
    found = compare(recording, recording)
    assert found["same_pipelines"]
    for row in (*found["nodes"], *found["arrows"]):
        pairs = [value for value in row.values() if isinstance(value, tuple)]
        assert pairs
        assert all(one == other for one, other in pairs)


def test_diff_puts_two_runs_side_by_side(
    recording: Recording, open_manager: ManagerFactory, tmp_path: Path
) -> None:
    manager = open_manager(trace=tmp_path / "small")
    Engine.register(manager).save(numbered(3))
    manager.close()
    found = compare(recording, read_recording(tmp_path / "small"))
    nodes = {(n["pipeline"], n["node"]): n["batches"] for n in found["nodes"]}
    assert nodes["save", "D"] == (44, 1)
    assert nodes["save", "U"][1] == 0


# The chart -------------------------------------------------------------------------------------


def texts(svg: str) -> Iterator[str]:
    for element in ET.fromstring(svg).iter():
        if element.tag.endswith("text"):
            yield element.text or ""


def test_chart_has_every_box_and_arrow_with_its_figures(recording: Recording) -> None:
    svg = draw_svg(recording)
    shown = list(texts(svg))
    titles = [e.text for e in ET.fromstring(svg).iter() if e.tag.endswith("title")]
    edges = [edge for pipeline in recording.pipelines.values() for edge in pipeline.edges]
    assert titles == [edge.name for edge in edges]
    assert len([text for text in shown if "GB/s" in text and "wait" in text]) >= len(edges)
    for pipeline in recording.pipelines.values():
        for node, label in pipeline.labels.items():
            assert f"{node}: {label}" in shown
    assert any(f"{len(recording.drops)} dropped" in text for text in shown)


def test_chart_of_a_trace_is_always_the_same(trace: Path) -> None:
    assert draw_svg(read_recording(trace)) == draw_svg(read_recording(trace))


# The commands ----------------------------------------------------------------------------------


def test_commands_show_a_trace(trace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = trace.with_suffix(".json")
    assert main(["trace", "view", str(trace), "--out", str(out)]) == 0
    check_rules(json.loads(out.read_text()))
    capsys.readouterr()
    assert main(["trace", "summary", str(trace)]) == 0
    told = capsys.readouterr().out
    assert "D.write > U.in" in told
    assert "Namespaces" in told
    assert main(["trace", "summary", str(trace), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["cut"] is None
    assert main(["trace", "diff", str(trace), str(trace)]) == 0
    assert "C.dram > D.in" in capsys.readouterr().out
    assert main(["trace", "diff", str(trace), str(trace), "--json"]) == 0
    json.loads(capsys.readouterr().out)
    assert main(["draw", "--trace", str(trace)]) == 0
    assert capsys.readouterr().out == draw_svg(read_recording(trace))


def test_commands_refuse_what_is_no_trace(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = tmp_path / "other"
    other.write_text("no trace at all")
    assert main(["trace", "summary", str(other)]) == 2
    assert "no trace; accepted" in capsys.readouterr().err
    assert main(["trace", "summary", str(tmp_path / "none")]) == 2
    assert "No such file" in capsys.readouterr().err
    assert main(["draw", "--live", "--trace", str(other)]) == 2
    assert "accepted alone" in capsys.readouterr().err


def test_a_cut_trace_is_told_on_standard_error(
    trace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace.write_bytes(trace.read_bytes()[:-7])
    assert main(["trace", "summary", str(trace)]) == 0
    assert "cut within record" in capsys.readouterr().err


def test_record_writes_what_a_daemon_does_meanwhile(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    served, path = Served(tmp_path / "s"), tmp_path / "t.okvtrace"
    ended = threading.Event()

    def work() -> None:
        with Client(served.path) as client:
            engine = Engine.register(client)  # type: ignore[arg-type]
            first = 0
            while not ended.is_set():
                engine.save(numbered(2, first=first))
                first += 2

    thread = threading.Thread(target=work)
    thread.start()
    arguments = ["--socket", str(served.path), "--out", str(path), "--seconds", "0.4"]
    assert main(["trace", "record", *arguments, "--payloads"]) == 0
    ended.set()
    thread.join()
    assert "0 lost" in capsys.readouterr().out
    recording = read_recording(path)
    assert recording.cut is None
    assert recording.ended
    assert recording.payloads
    assert served.stop()
    assert main(["trace", "record", *arguments[:4], "--seconds", "0"]) == 2
    assert "--seconds: 0.0; accepted" in capsys.readouterr().err
