"""What goes wrong on a GPU's way ends one request, or one page of it, and nothing after it."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest

from orbitkv import Config, Geometry, Manager, Miss, Role, Saved, Slot
from orbitkv.cache.pool import Pool
from orbitkv.config import MIB
from orbitkv.errors import Closed, DeviceFault
from orbitkv.objects import Format, read_header
from orbitkv.runtime import devices
from orbitkv.stages.ticket import Failed
from tests.builders import WAIT_S, counters, ended, in_thread, numbered, page_hash, rest
from tests.conftest import ManagerFactory
from tests.emulated import EmulatedDevice, EmulatedMemory
from tests.stages.test_both_devices import (
    PAGES,
    Pages,
    decoded,
    dense,
    geometry_of,
    gpu,
    opened,
    same,
)

__all__ = ["gpu", "opened"]  # fixtures


def engine_of(manager: Manager, geometry: Geometry, device: str) -> Pages:
    return Pages(manager, geometry, dense(geometry, device), emulated=device == "emulated")


def test_groups_whose_tables_are_the_same_are_told_apart(opened: ManagerFactory, gpu: str) -> None:
    shape = {"heads": 4, "head_dim": 64, "dtype": "bfloat16"}
    slots = tuple(
        Slot(name=f"{role}{layer}", layer=layer, role=role, group=group, **shape)  # type: ignore[arg-type]
        for layer, group in enumerate(("attention", "window"))
        for role in (Role.K, Role.V)
    )
    engine = engine_of(opened(), Geometry(32, slots), gpu)
    before = engine.snapshot()
    engine.save(numbered(3))
    engine.poison()
    assert len(engine.restore(numbered(3)).restored) == 3
    assert all(same(engine.snapshot()[index], before[index]) for index in range(3))


@pytest.mark.parametrize("codec", ["fp8", "turboquant-4"])
def test_refusals_in_every_batch_do_not_lock_the_lane(
    opened: ManagerFactory, gpu: str, codec: str
) -> None:
    geometry = geometry_of(page_tokens=64)
    manager = opened(storage_codec=codec, storage_codec_budget_nbytes=MIB)
    engine = engine_of(manager, geometry, gpu)
    for index, tensor in enumerate(engine.tensors.values()):
        if index % 3:
            tensor[:, 0, 0, 0] = float("nan")
    before = engine.snapshot()
    assert len(engine.save(numbered(PAGES)).stored) == PAGES
    formats = {row.format for row in read_header(engine.image(page_hash(0))).rows}
    assert len(formats) == 2
    assert Format.RAW in formats
    engine.poison()
    assert len(engine.restore(numbered(PAGES)).restored) == PAGES
    for index in range(PAGES):
        assert same(engine.snapshot()[index], decoded(codec, geometry, before[index]))


def test_refusals_where_the_pool_is_small_wait_for_it_and_go_on(
    opened: ManagerFactory, gpu: str
) -> None:
    geometry = geometry_of(page_tokens=64)
    manager = opened(
        storage_codec="fp8",
        storage_codec_budget_nbytes=MIB,
        pool_nbytes=3 * geometry.object_nbytes["attention"],
    )
    engine = engine_of(manager, geometry, gpu)
    for tensor in engine.tensors.values():
        tensor[:, 0, 0, 0] = float("nan")
    assert len(engine.save(numbered(PAGES)).stored) == PAGES


def test_a_restore_that_loses_its_only_page_leaves_the_next_one_alone(
    opened: ManagerFactory, gpu: str
) -> None:
    geometry = geometry_of()
    engine = engine_of(opened(), geometry, gpu)
    before = engine.snapshot()
    engine.save(numbered(2))
    engine.image(page_hash(0))[:64] ^= 0xFF
    assert isinstance(engine.restore({page_hash(0): 5}), Miss)
    assert engine.restore({page_hash(1): 5}).missed == ()
    assert same(engine.snapshot()[5], before[1])


def test_a_first_batch_without_anything_to_do_ends(
    opened: ManagerFactory, gpu: str, ssd_path: Path
) -> None:
    geometry = geometry_of()
    manager = opened(ssd_cache_paths=ssd_path, ssd_cache_capacity_nbytes=8 * MIB)
    host = Pages(manager, geometry, dense(geometry, "cpu"))
    host.save(numbered(3))
    manager.flush(evict_dram=True)
    engine = engine_of(manager, geometry, gpu)
    os.truncate(ssd_path, 0)
    assert isinstance(engine.restore(numbered(3)), Miss)
    assert rest(manager) == []


def test_an_arena_that_cannot_grow_fails_the_request_and_not_the_lane(
    opened: ManagerFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(devices, "Device", EmulatedDevice)
    engine = engine_of(opened(), geometry_of(page_tokens=64), "emulated")
    engine.save(numbered(1))

    def break_down(_: EmulatedMemory) -> None:
        raise RuntimeError("an illegal address")

    with monkeypatch.context() as broken:
        broken.setattr(EmulatedMemory, "free", break_down)
        pages = list(numbered(10, first=50).items())
        outcome = engine.manager.publish(engine.instance, pages).result(WAIT_S)
        assert isinstance(outcome, Failed)
        assert isinstance(outcome.error, DeviceFault)
    assert isinstance(engine.save(numbered(1, first=90)), Saved)


class SlowToPin(EmulatedDevice):
    """Takes its time, as the pinning of gigabytes does; knows what is pinned."""

    pinned_now: ClassVar[set[int]] = set()

    def __init__(self, ordinal: int, pool: Pool) -> None:
        self.ordinal = ordinal
        pool.pin(self._register, self.pinned_now.remove)

    def _register(self, address: int, _: int) -> None:
        assert address not in self.pinned_now, "pinned twice"
        time.sleep(0.2)
        self.pinned_now.add(address)


def test_two_registrations_at_once_open_the_device_once(
    opened: ManagerFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(devices, "Device", SlowToPin)
    manager, geometry = opened(), geometry_of()
    made: list[Pages] = []
    threads = [
        in_thread(lambda: made.append(engine_of(manager, geometry, "emulated"))) for _ in range(2)
    ]
    assert all(ended(thread) for thread in threads)
    assert len(made) == 2
    made[0].save(numbered(2))


def test_a_manager_that_closes_while_a_device_opens_waits_for_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(devices, "Device", SlowToPin)
    manager = Manager(Config(pool_nbytes=MIB, lock_memory=False))
    refused: list[BaseException] = []

    def register() -> None:
        try:
            engine_of(manager, geometry_of(), "emulated")
        except Closed as error:
            refused.append(error)

    thread = in_thread(register)
    time.sleep(0.05)
    assert ended(in_thread(manager.close))
    assert ended(thread)
    assert not SlowToPin.pinned_now
    assert not [t.name for t in threading.enumerate() if "on cuda" in t.name]


def test_ordinary_pages_after_refused_ones_are_counted_by_reason(
    opened: ManagerFactory, gpu: str
) -> None:
    geometry = geometry_of(layers=2)
    engine = engine_of(opened(storage_codec="fp8"), geometry, gpu)
    engine.tensors["k0"][0, 0, 0, 0] = float("inf")
    engine.tensors["v1"][0, 0, 0, 0] = 1000.0
    engine.save(numbered(2))
    seen = counters(engine.manager)
    assert (seen["raw_nonfinite"], seen["raw_out_of_range"]) == (1, 1)
    assert seen["encoded_segments"] == 6
    assert np.array_equal(engine.image(page_hash(0))[-1:], np.zeros(1, np.uint8))
