"""Fixtures that more than one folder of tests asks for."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from orbitkv import Config, Manager
from orbitkv.config import MIB
from tests import builders
from tests.builders import FaultyManager, Gate, Lanes, ended, in_thread, rest

ManagerFactory = Callable[..., Manager]


@pytest.fixture
def ssd_path(tmp_path: Path) -> Path:
    """Where an SSD tier may be, on the filesystem of the temporary directory."""
    return tmp_path / "kv.ssd"


@pytest.fixture
def open_manager() -> Iterator[ManagerFactory]:
    """Open small managers; at the end each must hold nothing, and close."""
    opened: list[Manager] = []

    def open_one(*, lanes: Lanes | None = None, **settings: object) -> Manager:
        small = {"pool_nbytes": MIB, "ssd_cache_capacity_nbytes": MIB, "lock_memory": False}
        config = Config(**{**small, **settings})  # type: ignore[arg-type]
        manager = Manager(config) if lanes is None else FaultyManager(config, lanes)
        opened.append(manager)
        return manager

    yield open_one
    while Gate.built:
        Gate.built.pop().open()
    leaks = [rest(manager) for manager in opened if not manager.core.closing]
    closed = [ended(in_thread(manager.close)) for manager in opened]
    assert not any(leaks), leaks
    assert all(closed), "a manager did not close"


@pytest.fixture(autouse=True)
def _no_plans() -> Iterator[None]:
    """What one test plans for its stages does not outlive it."""
    yield
    builders.PLANS.clear()
