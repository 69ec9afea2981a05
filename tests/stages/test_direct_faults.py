"""The direct route in bad hands: copies that fail, definitions that leave parts out, two GPUs."""

# ruff: noqa: ANN401 - what stands for a stream's call takes what that takes

from __future__ import annotations

import itertools
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from orbitkv import Manager, Miss, Restored, Saved
from orbitkv.cache.catalogue import Tier
from orbitkv.config import MIB
from orbitkv.errors import DeviceFault, DirectFault
from orbitkv.pipeline import PACKAGED
from orbitkv.stages import staging
from orbitkv.stages.ticket import Warmed
from tests import emulated
from tests.builders import WAIT_S, ended, in_thread, numbered, page_hash, rest
from tests.conftest import ManagerFactory
from tests.emulated import EmulatedStream, OnGpu
from tests.stages.test_direct_route import (
    Route,
    ans,
    direct,
    engine_of,
    evict_dram,
    gpu,
    opened,
    publish,
    route,
    tally,
)

__all__ = ["ans", "direct", "gpu", "opened", "route"]  # fixtures


def changed(direction: str, path: Path, change: Callable[[str], str]) -> str:
    """The packaged definition with a change, as a file of its own."""
    before = (PACKAGED / f"{direction}.toml").read_text()
    after = change(before)
    assert after != before
    path.write_text(after)
    return str(path)


def only(nodes: str) -> Callable[[str], str]:
    """Leave out all nodes but these, and the edges that lead from or to the others."""

    def change(text: str) -> str:
        kept = []
        for line in text.splitlines():
            ends = re.match(r'  \{ from = "(\w)[^"]*", *to = "(\w)', line)
            node = re.match(r"(\w) = \{", line)
            named = set(ends.groups()) if ends else {node[1]} if node else set()
            if named <= set(nodes):
                kept.append(line)
        return "\n".join(kept)

    return change


def test_a_copy_that_fails_gives_its_slot_back(
    direct: ManagerFactory, route: Route, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = engine_of(direct(), route)
    copies = itertools.count()
    original = EmulatedStream.copy

    def fail_into_slots(self: EmulatedStream, *args: Any, **after: Any) -> Any:
        if self.name.startswith("stream:direct") and next(copies) % 2:
            raise DeviceFault("the copy engine failed")
        return original(self, *args, **after)

    if route.device == "cuda":
        pytest.skip("what fails here is the emulation's")
    monkeypatch.setattr(emulated.EmulatedStream, "copy", fail_into_slots)
    for name, index in numbered(4).items():  # more than there are slots
        assert isinstance(publish(engine, name, index).result(WAIT_S), Saved)
    assert rest(engine.manager) == []
    assert engine.manager.core.catalogue.copies(Tier.SSD) == ()
    assert engine.manager.flush().unwritten == 0


def test_without_u_nothing_is_warmed_and_a_closed_route_is_a_miss(
    direct: ManagerFactory, route: Route, tmp_path: Path
) -> None:
    async def fail(*_: object) -> int:
        raise DirectFault("an I/O error")

    definition = changed("restore", tmp_path / "r.toml", only("ESGVDR"))
    engine = engine_of(direct(restore_pipeline=definition), route)
    names = numbered(3)
    engine.save(names)
    evict_dram(engine)
    warmed = engine.manager.warm(engine.instance, list(names)).result(WAIT_S)
    assert warmed == Warmed((), tuple(names))
    lease = engine.manager.prepare(engine.instance, list(names))
    assert lease.preparation
    assert lease.preparation.result(WAIT_S) == Warmed((), tuple(names))
    assert len(engine.manager.restore(lease, names).result(WAIT_S).restored) == 3  # type: ignore[union-attr]
    route.meddle("read", fail)
    for _ in range(2):  # the fault itself, and what comes after it
        outcome = engine.restore(names)
        assert isinstance(outcome, Miss)
        assert set(outcome.missed) == set(names)
    assert rest(engine.manager) == []


def test_without_d_what_dram_has_too_is_read_from_ssd(
    direct: ManagerFactory, route: Route, tmp_path: Path
) -> None:
    definition = changed("restore", tmp_path / "r.toml", only("ESGV"))
    engine = engine_of(direct(restore_pipeline=definition), route)
    engine.save(numbered(3))
    assert len(engine.restore(numbered(3)).restored) == 3
    assert tally(engine)["direct_reads"] == 3


def test_pieces_of_one_batch_may_land_at_once(
    direct: ManagerFactory, route: Route, tmp_path: Path
) -> None:
    deep = 'stages = ["land"], lane = "stream:read", depth = 3'
    definition = changed(
        "restore",
        tmp_path / "r.toml",
        lambda text: text.replace('stages = ["land"], lane = "stream:read"', deep),
    )
    settings = {"pool_nbytes": 64 * MIB, "restore_pipeline": definition}
    engine = engine_of(direct(**settings), route, page_tokens=256)
    names = list(numbered(12))
    for _ in range(5):
        engine.save(numbered(12))
        evict_dram(engine)
        apart = {names[index]: index for index in (0, 2, 4, 6)}  # a piece each
        lease = engine.manager.query(engine.instance, list(apart))
        outcome = engine.manager.restore(lease, apart).result(WAIT_S)
        assert isinstance(outcome, Restored)
        assert outcome.missed == ()
        assert rest(engine.manager) == []
    assert tally(engine)["corrupt_ssd"] == 0


def test_jobs_that_g_has_not_begun_hold_nobody_up(
    direct: ManagerFactory, route: Route, tmp_path: Path
) -> None:
    shallow = 'stages = ["stage"], lane = "stream:direct"'
    definition = changed(
        "save", tmp_path / "s.toml", lambda text: text.replace(f"{shallow}, depth = 8", shallow)
    )
    engine = engine_of(direct(save_pipeline=definition), route)
    release = route.pause("write")
    tickets = [publish(engine, name, index) for name, index in numbered(12).items()]
    for ticket in tickets[-4:]:
        assert isinstance(ticket.result(WAIT_S), Saved)
    assert not tickets[0].done
    release.set()
    for ticket in tickets:
        assert isinstance(ticket.result(WAIT_S), Saved)


def test_a_slow_disk_under_one_gpu_holds_no_save_of_another(
    direct: ManagerFactory, route: Route, monkeypatch: pytest.MonkeyPatch
) -> None:
    if route.device == "cuda":
        pytest.skip("one GPU is enough for the other tests")
    original = OnGpu.__init__
    manager = direct()
    one = engine_of(manager, route)

    def on_the_second(self: OnGpu, tensor: torch.Tensor) -> None:
        original(self, tensor)
        self.device = torch.device("cuda", 1)

    monkeypatch.setattr(OnGpu, "__init__", on_the_second)
    other = engine_of(manager, route)
    release = route.pause("write")
    first = [publish(one, name, index) for name, index in numbered(10).items()]
    assert isinstance(first[-1].result(WAIT_S), Saved)
    second = [publish(other, name, index) for name, index in numbered(10, first=100).items()]
    assert isinstance(second[-1].result(WAIT_S), Saved)
    release.set()
    for ticket in (*first, *second):
        assert isinstance(ticket.result(WAIT_S), Saved)


@pytest.mark.parametrize("chosen", ["auto", "cufile"])
def test_a_gpu_that_cufile_refuses_is_served_by_u_unless_cufile_was_chosen(
    opened: ManagerFactory,
    route: Route,
    ssd_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    chosen: str,
) -> None:
    def refuse(*_: object) -> None:
        raise DirectFault("no registered memory left")

    monkeypatch.setattr(staging, "direct_unavailable", lambda *_: None)
    monkeypatch.setattr(route.lane, "open_device", refuse)
    settings = {"ssd_cache_paths": ssd_path, "ssd_cache_capacity_nbytes": 64 * MIB}
    manager: Manager = opened(**settings, ssd_backend=chosen)
    if chosen == "cufile":
        with pytest.raises(DirectFault, match="no registered memory left"):
            engine_of(manager, route)
        return
    engine = engine_of(manager, route)
    engine.save(numbered(2))
    engine.manager.flush(evict_dram=True)
    assert len(engine.restore(numbered(2)).restored) == 2
    seen = tally(engine)
    assert (seen["direct_faults"], seen["ssd_writes"], seen["direct_writes"]) == (2, 2, 0)
    assert "no registered memory left" in manager.core.faults()[0]


def test_a_flush_waits_for_direct_writes_and_writes_nothing_twice(
    direct: ManagerFactory, route: Route
) -> None:
    engine = engine_of(direct(), route)
    release = route.pause("write")
    ticket = publish(engine, page_hash(0), 0)
    with pytest.raises(TimeoutError):
        ticket.result(0.2)
    flushing = in_thread(engine.manager.flush)
    flushing.join(0.2)
    assert flushing.is_alive()
    release.set()
    assert ended(flushing)
    assert isinstance(ticket.result(WAIT_S), Saved)
    seen = tally(engine)
    assert (seen["direct_writes"], seen["ssd_writes"], seen["duplicate_ssd"]) == (1, 0, 0)


def test_what_reuse_does_not_want_is_not_written_past_the_host(
    direct: ManagerFactory, route: Route
) -> None:
    engine = engine_of(direct(ssd_write_policy="reuse"), route)
    engine.save(numbered(4))
    seen = tally(engine)
    assert (seen["direct_writes"], seen["direct_refused"]) == (0, 0)
    assert seen["ssd_skips_cold"] == 4
    evict_dram(engine)
    engine.save(numbered(4))
    assert tally(engine)["direct_writes"] == 4, "the second publication"


def test_a_device_that_is_done_at_once_leaves_g_its_turn(
    direct: ManagerFactory, route: Route, monkeypatch: pytest.MonkeyPatch
) -> None:
    """D does not wait for anything then, and would be there before G has got the batch."""
    if route.device == "emulated":

        async def at_once(self: EmulatedStream, event: Any) -> None:
            del self
            event.await_it()

        monkeypatch.setattr(EmulatedStream, "reached", at_once)
    engine = engine_of(direct(), route)
    for round_ in range(4):
        engine.save(numbered(6, first=10 * round_))
    seen = tally(engine)
    assert (seen["direct_writes"], seen["direct_refused"]) == (24, 0)
