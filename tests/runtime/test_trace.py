"""Traces: what is recorded of every batch, that nothing is when nobody asks, and the file."""

# ruff: noqa: ANN401 - what stands for a lane's call takes what that takes

from __future__ import annotations

import asyncio
import hashlib
import os
import threading
import tracemalloc
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any, Self

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orbitkv import Client, Config, Manager, Miss, Restored
from orbitkv.cache.catalogue import Tier
from orbitkv.config import MIB
from orbitkv.errors import Cancelled, Closed, ConfigError, ProtocolError, TraceError
from orbitkv.pipeline import load_pipeline
from orbitkv.runtime import spans as spans_module
from orbitkv.runtime import trace as trace_module
from orbitkv.runtime.recording import Recording, read_recording
from orbitkv.runtime.trace_file import (
    Arrival,
    Header,
    Lost,
    Payload,
    Sample,
    Space,
    Span,
    TraceWriter,
    file_head,
    frame,
)
from orbitkv.stages.ticket import Failed
from tests.builders import (
    BLOCK,
    PLANS,
    WAIT_S,
    Engine,
    Gate,
    Lanes,
    definition,
    flip_memory,
    numbered,
    page_hash,
    rest,
)
from tests.conftest import ManagerFactory
from tests.serving import Served
from tests.stages.test_both_devices import ans, opened
from tests.stages.test_direct_route import Route, direct, engine_of, evict_dram, gpu, route

__all__ = ["ans", "direct", "gpu", "opened", "route"]  # fixtures

SAVE = [("E", "gather"), ("C", "encode"), ("C", "crc32"), ("D", "store"), ("U", "write")]
LEAVE = [("R", "upload"), ("R", "validate"), ("R", "decode"), ("E", "place")]
FROM_DRAM = [("D", "serve"), *LEAVE]
FROM_SSD = [("U", "read"), ("D", "serve"), *LEAVE]


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    return tmp_path / "run.okvtrace"


def of(recording: Recording, ticket: int) -> list[Span]:
    found = [span for span in recording.spans if span.ticket == ticket]
    return sorted(found, key=lambda span: (span.start_ns, span.end_ns))


def stages(spans: list[Span]) -> list[tuple[str, str]]:
    return [(span.node, span.stage) for span in spans]


def closed(manager: Manager, path: Path) -> Recording:
    """What was recorded, once the manager has ended."""
    assert rest(manager) == []
    manager.close()
    recording = read_recording(path)
    assert recording.cut is None
    return recording


# What is recorded ------------------------------------------------------------------------------


def test_every_stage_of_a_save_and_of_both_restores_is_a_span_in_order(
    open_manager: ManagerFactory, ssd_path: Path, trace: Path
) -> None:
    manager = open_manager(ssd_cache_paths=ssd_path, trace=trace)
    engine = Engine.register(manager)
    engine.save(numbered(6))
    assert isinstance(engine.restore(numbered(6)), Restored)
    manager.flush(evict_dram=True)
    assert isinstance(engine.restore(numbered(6)), Restored)
    recording = closed(manager, trace)
    assert [stages(of(recording, ticket)) for ticket in (1, 2, 3)] == [SAVE, FROM_DRAM, FROM_SSD]
    for span in recording.spans:
        assert span.outcome == "ok"
        assert span.ended_by == "host"
        assert span.start_ns <= span.end_ns
        assert span.lane == recording.pipelines[span.pipeline].lanes[span.node]
        assert span.in_nbytes > 0
        assert span.stored_nbytes > 0
        assert span.segments == (0 if span.node == "U" and span.pipeline == "save" else 24)
    for before, after in pairwise(of(recording, 3)):
        assert before.end_ns <= after.start_ns
    raw = {span.stage: span.raw for span in of(recording, 1)}
    assert raw["crc32"] == {"chosen": 24}
    assert {span.generations for span in of(recording, 2)} == {(1, 6)}


def test_batches_keep_their_line_of_descent_and_the_arrow_they_came_by(
    open_manager: ManagerFactory, ssd_path: Path, trace: Path
) -> None:
    manager = open_manager(ssd_cache_paths=ssd_path, trace=trace)
    engine = Engine.register(manager)
    engine.save(numbered(6))
    recording = closed(manager, trace)
    first = {span.node: span for span in of(recording, 1) if span.edge}
    assert [first[node].edge for node in "ECDU"] == [
        "entry of E",
        "E.out > C.in",
        "C.dram > D.in",
        "D.write > U.in",
    ]
    assert first["E"].parent == 0
    for node, parent in (("C", "E"), ("D", "C"), ("U", "D")):
        assert first[node].parent == first[parent].batch
        assert first[node].start_ns - first[node].wait_ns <= first[node].start_ns
    names = {edge.name for edge in recording.pipelines["save"].edges}
    assert {span.edge for span in first.values()} <= names | {"entry of E"}


def test_requests_have_arrivals_ends_and_namespaces_of_their_own(
    open_manager: ManagerFactory, trace: Path
) -> None:
    manager = open_manager(trace=trace)
    one, other = (Engine.register(manager, name=name) for name in ("one", "other"))
    one.save(numbered(3))
    other.save(numbered(2))
    one.restore(numbered(3))
    recording = closed(manager, trace)
    assert recording.spaces == {1: one.instance.namespace, 2: other.instance.namespace}
    told = [(a.kind, a.ticket, a.namespace, len(a.hashes)) for a in recording.arrivals]
    assert told == [
        ("publish", 1, 1, 3),
        ("publish", 2, 2, 2),
        ("query", 0, 1, 3),
        ("restore", 3, 1, 3),
    ]
    assert recording.tickets[3].hashes == tuple(numbered(3))
    assert recording.tickets[3].indices == (0, 1, 2)
    ends = {t: (e.outcome, e.pages, e.missed) for t, e in recording.ended.items()}
    assert ends == {1: ("saved", 3, 0), 2: ("saved", 2, 0), 3: ("restored", 3, 0)}
    for span in recording.spans:
        assert span.namespace == recording.tickets[span.ticket].namespace


def test_spans_go_past_the_host_and_back_on_a_gpu(
    direct: ManagerFactory, route: Route, trace: Path
) -> None:
    engine = engine_of(direct(trace=trace), route)
    engine.save(numbered(6))
    evict_dram(engine)
    assert len(engine.restore(numbered(6)).restored) == 6
    recording = closed(engine.manager, trace)
    save, restore = of(recording, 1), of(recording, 2)
    assert {(s.node, s.stage) for s in save} == {*SAVE[:4], ("G", "stage"), ("S", "write_cufile")}
    assert set(stages(restore)) == {
        ("S", "read_cufile"),
        ("G", "land"),
        ("V", "validate"),
        ("V", "decode"),
        ("E", "place"),
    }
    ends = {span.node: span.ended_by for span in save + restore if span.stage != "validate"}
    assert ends["C"] == "enqueued"
    assert ends["V"] == "enqueued"
    assert ends["D"] == "event"
    assert ends["E"] == "event"
    visits = {span.batch: span for span in recording.spans}
    for span in recording.spans:
        if span.node in "GSV":
            assert span.parent == 0 or visits[span.parent].ticket == span.ticket


def test_a_dropped_write_is_told_with_its_arrow_and_request(
    open_manager: ManagerFactory, ssd_path: Path, trace: Path
) -> None:
    lanes, gate = Lanes(), Gate()
    lanes.before["ring:write"] = gate.pass_through
    manager = open_manager(
        lanes=lanes,
        ssd_cache_paths=ssd_path,
        ssd_write_inflight=1,
        ssd_write_queue_depth=1,
        trace=trace,
    )
    engine = Engine.register(manager)
    engine.save({page_hash(0): 0})
    gate.await_arrival()
    for index in range(1, 4):
        engine.save({page_hash(index): index})
    gate.open()
    recording = closed(manager, trace)
    told = [(d.edge, d.ticket, d.nbytes, d.reason) for d in recording.drops]
    assert told == [("D.write > U.in", t, BLOCK, "Dropped") for t in (3, 4)]
    sender = {span.batch: span for span in recording.spans}
    assert [sender[drop.parent].node for drop in recording.drops] == ["D", "D"]


def test_a_cancelled_request_is_told_where_it_stopped(
    open_manager: ManagerFactory, trace: Path
) -> None:
    lanes, gate = Lanes(), Gate()
    lanes.before["stream:save"] = gate.pass_through
    manager = open_manager(lanes=lanes, trace=trace)
    engine = Engine.register(manager)
    ticket = manager.publish(engine.instance, list(numbered(2).items()))
    gate.await_arrival()
    ticket.cancel()
    gate.open()
    outcome = ticket.result(WAIT_S)
    assert isinstance(outcome, Failed)
    assert isinstance(outcome.error, Cancelled)
    recording = closed(manager, trace)
    assert of(recording, 1)[-1].outcome == "cancelled"
    assert recording.ended[1].outcome == "Cancelled"


def test_corruption_is_the_outcome_of_the_stage_that_found_it(
    open_manager: ManagerFactory, trace: Path
) -> None:
    manager = open_manager(trace=trace)
    engine = Engine.register(manager)
    engine.save(numbered(4))
    memory = engine.copy(page_hash(2), Tier.DRAM).memory
    assert memory is not None
    flip_memory(memory, 1024, 3)
    assert len(engine.restored(numbered(4))) == 3
    recording = closed(manager, trace)
    found = {s.outcome: s.missed for s in of(recording, 2) if s.outcome != "ok"}
    assert found == {"corrupt": 1}
    assert {s.node for s in of(recording, 2) if s.outcome == "corrupt"} == {"R"}
    assert (recording.ended[2].pages, recording.ended[2].missed) == (3, 1)


def test_a_fault_is_the_outcome_of_its_stage(
    open_manager: ManagerFactory, trace: Path, tmp_path: Path
) -> None:
    async def refuse(batch: object, ctx: object) -> None:
        del batch, ctx
        raise Closed("as planned")

    PLANS["refuse"] = refuse
    stage = '["encode", { use = "tests.builders:PlannedEncode", plan = "refuse" }, "crc32"]'
    changed = definition(tmp_path, "save", ('["encode", "crc32"]', stage))
    manager = open_manager(trace=trace, save_pipeline=changed)
    engine = Engine.register(manager)
    outcome = manager.publish(engine.instance, [(page_hash(0), 0)]).result(WAIT_S)
    assert isinstance(outcome, Failed)
    recording = closed(manager, trace)
    assert of(recording, 1)[-1].outcome == "Closed"
    assert recording.ended[1].outcome == "Closed"


def test_waiting_is_told_as_queue_and_as_blocked(open_manager: ManagerFactory, trace: Path) -> None:
    lanes, gate = Lanes(), Gate()
    lanes.before["stream:save"] = gate.pass_through
    manager = open_manager(lanes=lanes, trace=trace, pool_nbytes=4 * MIB)
    engine = Engine.register(manager, pages=16)
    tickets = [manager.publish(engine.instance, [(page_hash(i), i)]) for i in range(12)]
    gate.await_arrival()
    threading.Event().wait(0.05)
    gate.open()
    for ticket in tickets:
        ticket.result(WAIT_S)
    recording = closed(manager, trace)
    first = [span for span in recording.spans if span.edge]
    assert max(span.wait_ns for span in first) > 40e6, "the queue's wait"
    assert max(span.blocked_ns for span in first) > 40e6, "waiting for room in it"


def test_counters_are_sampled(open_manager: ManagerFactory, trace: Path) -> None:
    manager = open_manager(trace=trace)
    engine = Engine.register(manager)
    engine.save(numbered(4))
    recording = closed(manager, trace)
    names = set().union(*(sample.values for sample in recording.samples))
    assert {"pool_used_nbytes", "evicted_dram", "save entry of E"} <= names
    times = [sample.ns for sample in recording.samples]
    assert times == sorted(times)
    assert all(b - a >= 1_000_000 for a, b in pairwise(times))


def test_the_header_says_what_ran_and_where(open_manager: ManagerFactory, trace: Path) -> None:
    manager = open_manager(trace=trace, cache_protected_percent=30)
    manager.close()
    header = read_recording(trace).header
    for pipeline in header.pipelines:
        loaded = load_pipeline(pipeline.direction)
        assert pipeline.sha256 == loaded.sha256
        assert hashlib.sha256(pipeline.text.encode()).hexdigest() == pipeline.sha256
        assert pipeline.stages["E"]
        assert "P" in pipeline.unavailable
    assert header.config["cache_protected_percent"] == "30"
    assert header.versions["orbitkv"]
    assert int(header.hardware["cpus"]) > 0
    assert set(header.fields["span"]) == set(Span.__struct_fields__)


def test_digests_follow_the_bytes(open_manager: ManagerFactory, tmp_path: Path) -> None:
    def digests(name: str, seed: int) -> dict[tuple[str, str, str], bytes]:
        path = tmp_path / name
        manager = open_manager()
        file = path.open("wb")
        on_loop(manager, lambda: manager.core.begin_trace(file, digests=True, payloads=True))
        engine = Engine.register(manager, seed=seed)
        engine.save(numbered(2))
        engine.restore(numbered(2))
        first = engine.page(0)
        recording = closed(manager, path)
        (payload,) = recording.payloads.values()
        assert payload.pages[: len(first)] == first
        assert len(payload.keys) == 2
        return {(s.pipeline, s.node, s.stage): s.digest for s in recording.spans}

    one, again, other = digests("a", 1), digests("b", 1), digests("c", 2)
    assert one == again
    known = {key for key, digest in one.items() if digest}
    assert {("save", "E", "gather"), ("save", "C", "crc32"), ("restore", "R", "decode")} <= known
    assert all(one[key] != other[key] for key in known)


# Off, bounded, and failing ---------------------------------------------------------------------


def on_loop(manager: Manager, work: Callable[[], Any]) -> Any:
    loop = manager.core._loop
    return asyncio.run_coroutine_threadsafe(work(), loop).result(WAIT_S)


def test_off_means_off(open_manager: ManagerFactory, tmp_path: Path) -> None:
    """No file, no thread, and not one allocation in the code that records."""
    manager = open_manager()
    engine = Engine.register(manager)
    engine.save(numbered(2))
    before = set(tmp_path.iterdir())
    tracemalloc.start()
    try:
        engine.save(numbered(4, first=10))
        engine.restore(numbered(4, first=10))
        snapshot = tracemalloc.take_snapshot()
    finally:
        tracemalloc.stop()
    for module in (trace_module, spans_module):
        only = snapshot.filter_traces([tracemalloc.Filter(True, str(module.__file__))])  # noqa: FBT003
        assert only.statistics("filename") == []
    assert set(tmp_path.iterdir()) == before
    assert "orbitkv-trace" not in {thread.name for thread in threading.enumerate()}
    for runtime in (manager.core._save, manager.core._fetch):
        assert all(bound.trace is None for bound in runtime._nodes.values())
        assert all(channel.watch is None for channel in runtime._stopping.channels)


class Unwritable:
    """A file on a full disk."""

    closed = False

    def write(self, data: bytes) -> int:
        raise OSError(28, f"no room for {len(data)} bytes")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.closed = True


@pytest.mark.parametrize("failing", ["file", "code"])
def test_a_tracer_that_fails_is_dropped_told_once_and_breaks_nothing(
    open_manager: ManagerFactory,
    trace: Path,
    failing: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    manager = open_manager()
    engine = Engine.register(manager)
    if failing == "code":

        def explode(batch: object) -> object:
            raise ZeroDivisionError(f"measuring {type(batch).__name__}")

        monkeypatch.setattr(spans_module, "_measure", explode)
    file: Any = Unwritable() if failing == "file" else trace.open("wb")
    on_loop(manager, lambda: manager.core.begin_trace(file))
    with caplog.at_level("WARNING", logger="orbitkv"):
        for round_ in range(40):
            assert len(engine.save(numbered(4, first=10 * round_)).stored) == 4
            assert len(engine.restored(numbered(4, first=10 * round_))) == 4
            if manager.core.trace is None:
                break
            threading.Event().wait(0.01)
    assert manager.core.trace is None
    assert len([r for r in caplog.records if "trace_dropped" in r.getMessage()]) == 1
    totals = on_loop(manager, manager.core.end_trace)
    assert totals.dropped
    assert file.closed
    on_loop(manager, lambda: manager.core.begin_trace((trace.parent / "next").open("wb")))
    engine.save(numbered(2, first=900))
    assert closed(manager, trace.parent / "next").lost == 0


def header() -> Header:
    return Header({}, 0, 0, False, False, {}, {"pid": "1"}, {}, (), {})  # noqa: FBT003


def test_the_buffer_is_bounded_and_the_file_says_what_it_lost(tmp_path: Path) -> None:
    path, gate = tmp_path / "t", Gate()

    class Slow:
        def __init__(self) -> None:
            self.file = path.open("wb")

        def write(self, data: bytes) -> int:
            gate.pass_through()
            return self.file.write(data)

        def flush(self) -> None:
            self.file.flush()

        def __enter__(self) -> Self:
            return self

        def __exit__(self, *error: object) -> None:
            self.file.close()

    slow: Any = Slow()
    writer = TraceWriter(slow, header(), max_buffered=10)
    gate.await_arrival()
    taken = [writer.put(Sample(number, {"n": number}), number) for number in range(100)]
    assert taken == [True] * 10 + [False] * 90
    gate.open()
    writer.close(100)
    assert writer.fault is None
    recording = read_recording(path)
    assert (len(recording.samples), recording.lost, writer.lost) == (10, 90, 90)
    assert recording.cut is None


def test_a_payload_larger_than_the_room_for_them_is_lost_and_told(tmp_path: Path) -> None:
    path = tmp_path / "t"
    writer = TraceWriter(path.open("wb"), header())
    assert not writer.put(Payload(1, (), bytes(65 * MIB)), 0, 65 * MIB)
    assert writer.put(Payload(2, (), bytes(MIB)), 0, MIB)
    writer.close(1)
    recording = read_recording(path)
    assert list(recording.payloads) == [2]
    assert recording.lost == 1


def test_a_second_trace_is_refused_and_the_first_goes_on(
    open_manager: ManagerFactory, trace: Path
) -> None:
    manager = open_manager(trace=trace)
    second = trace.with_name("second").open("wb")
    with pytest.raises(Closed, match="one at a time"):
        on_loop(manager, lambda: manager.core.begin_trace(second))
    assert second.closed
    Engine.register(manager).save(numbered(1))
    assert closed(manager, trace).spans


def test_a_path_that_cannot_be_made_is_refused_by_name(tmp_path: Path) -> None:
    missing = tmp_path / "no" / "t"
    with pytest.raises(ConfigError, match=rf"trace: {missing}: .*accepted: a path"):
        Manager(Config(pool_nbytes=MIB, lock_memory=False, trace=missing))
    with pytest.raises(ConfigError, match="trace: 3; accepted"):
        Config(trace=3)  # type: ignore[arg-type]


def test_a_trace_is_for_its_user_alone(open_manager: ManagerFactory, trace: Path) -> None:
    open_manager(trace=trace).close()
    assert trace.stat().st_mode & 0o777 == 0o600


# Through the daemon ----------------------------------------------------------------------------


def test_a_daemons_trace_names_the_clients_requests(tmp_path: Path, trace: Path) -> None:
    served = Served(tmp_path / "s")
    with Client(served.path) as watcher, Client(served.path) as client, trace.open("wb") as file:
        watcher.begin_trace(file, digests=True)
        engine = Engine.register(client)  # type: ignore[arg-type]
        engine.save(numbered(3))
        assert isinstance(engine.restore(numbered(3)), Restored)
        totals = watcher.end_trace()
        assert (totals.lost, totals.dropped) == (0, "")
        with pytest.raises(Closed, match="records no trace"):
            watcher.end_trace()
    recording = read_recording(trace)
    assert recording.cut is None
    assert recording.header.digests
    remotes = [recording.remotes[ticket] for ticket in (1, 2)]
    assert {remote.pid for remote in remotes} == {os.getpid()}
    assert len({remote.number for remote in remotes}) == 2
    assert stages(of(recording, 1)) == SAVE[:4]
    assert served.rest() == []
    assert served.stop()


def test_a_daemons_trace_ends_with_the_session_that_began_it(tmp_path: Path, trace: Path) -> None:
    served = Served(tmp_path / "s")
    with Client(served.path) as watcher, trace.open("wb") as file:
        watcher.begin_trace(file)
        with (
            Client(served.path) as other,
            (tmp_path / "other").open("wb") as second,
            pytest.raises(Closed, match="one at a time"),
        ):
            other.begin_trace(second)
    assert served.rest() == []
    assert served.core.trace is None
    assert read_recording(trace).cut is None
    assert served.stop()


def test_a_daemon_records_to_regular_files_alone(tmp_path: Path) -> None:
    served = Served(tmp_path / "s")
    reader, writer = os.pipe()
    with (
        Client(served.path) as client,
        os.fdopen(writer, "wb") as file,
        pytest.raises(ProtocolError, match="no regular file"),
    ):
        client.begin_trace(file)
    os.close(reader)
    assert served.stop()


# The file --------------------------------------------------------------------------------------


def small(path: Path) -> bytes:
    """A trace of every kind of record."""
    writer = TraceWriter(path.open("wb"), header())
    writer.put(Space(1, "orbitkv:v2:00"), 0)
    writer.put(Arrival(1, 1, "publish", 1, (b"h" * 32,), (0,)), 1)
    writer.put(Sample(2, {"pool_used_nbytes": 4096}), 2)
    writer.put(Payload(1, (b"k",), b"bytes"), 3)
    writer.put(Lost(4, 1, 2), 4)
    writer.close(5)
    return path.read_bytes()


def test_a_trace_cut_at_every_byte_is_read_up_to_there_or_refused_in_words(tmp_path: Path) -> None:
    path = tmp_path / "t"
    whole = small(path)
    header_end = len(file_head()) + len(frame(header()))
    counts = []
    for end in range(len(whole)):
        path.write_bytes(whole[:end])
        if end < header_end:
            with pytest.raises(TraceError, match=r"cut|no trace"):
                read_recording(path)
            continue
        recording = read_recording(path)
        assert recording.cut
        assert "cut" in recording.cut
        found = recording.arrivals, recording.samples, recording.payloads, recording.spaces
        counts.append(sum(map(len, found)))
    assert counts == sorted(counts)
    assert set(counts) == {0, 1, 2, 3, 4}


def test_every_changed_byte_is_refused_with_its_record(tmp_path: Path) -> None:
    path = tmp_path / "t"
    whole = bytearray(small(path))
    for position in range(len(whole)):
        for bit in (0, 7):
            whole[position] ^= 1 << bit
            path.write_bytes(whole)
            with pytest.raises(TraceError) as refused:
                read_recording(path)
            whole[position] ^= 1 << bit
            said = str(refused.value)
            if position >= len(file_head()):
                assert "record" in said, said
                assert f"at byte {len(file_head())}" in said or "at byte" in said


@given(noise=st.binary(max_size=200), whole_head=st.booleans())
def test_noise_is_no_trace(
    tmp_path_factory: pytest.TempPathFactory, noise: bytes, *, whole_head: bool
) -> None:
    path = tmp_path_factory.mktemp("noise") / "t"
    path.write_bytes((file_head() if whole_head else b"") + noise)
    with pytest.raises(TraceError):
        read_recording(path)


def test_a_miss_is_told(open_manager: ManagerFactory, ssd_path: Path, trace: Path) -> None:
    """An extent that cannot be read makes its page a miss, which is no corruption."""
    lanes = Lanes(on_read=lambda _: OSError(5, "as planned"))
    manager = open_manager(lanes=lanes, ssd_cache_paths=ssd_path, trace=trace)
    engine = Engine.register(manager)
    engine.save(numbered(1))
    manager.flush(evict_dram=True)
    assert isinstance(engine.restore(numbered(1)), Miss)
    recording = closed(manager, trace)
    assert of(recording, 2)[0].outcome == "missed"
    assert recording.ended[2].outcome == "miss"
