"""Persistence: tiers opened, checkpointed and closed in threads, while the loop serves."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from types import TracebackType
from typing import Any, Self

import structlog

from orbitkv.cache.admission import TinyLfu, WritePolicy
from orbitkv.cache.catalogue import Catalogue, Copy
from orbitkv.cache.extents import ExtentStore
from orbitkv.cache.pool import Pool
from orbitkv.cache.retention import Retention
from orbitkv.config import KIB, Config
from orbitkv.errors import ConfigError, StoreError
from orbitkv.probe import driver_unavailable, numba_unavailable
from orbitkv.runtime.lanes import drain_task

LFU_OBJECT_NBYTES = 256 * KIB  # objects to expect in a pool; a sketch grows where they are smaller


class Persistence:
    """Checkpoints of an SSD store that changes, for as long as it is entered; then its close.

    Args:
        interval_s: Between the end of one checkpoint and the begin of the next.
        counters: Gets ``ssd_checkpoints``, by shard, and ``ssd_checkpoint_faults``.
    """

    def __init__(
        self,
        extents: ExtentStore[Copy],
        *,
        interval_s: float,
        counters: Counter[str],
        log: structlog.stdlib.BoundLogger,
    ) -> None:
        self._extents = extents
        self._interval_s = interval_s
        self._counters = counters
        self._log = log

    async def __aenter__(self) -> Self:
        self._keeping = asyncio.create_task(self._keep())
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """End the checkpoint under way, and close the store."""
        try:
            self._keeping.cancel()
            await asyncio.wait([self._keeping])
        finally:
            await _off_loop(self._extents.close)
        if not self._keeping.cancelled():
            self._keeping.result()

    async def _keep(self) -> None:
        while True:
            await asyncio.sleep(self._interval_s)
            try:
                self._counters["ssd_checkpoints"] += await self._extents.checkpoint(_off_loop)
            except StoreError as error:  # what was written before stands, and is tried again
                self._counters["ssd_checkpoint_faults"] += 1
                self._log.warning("ssd_checkpoint_failed", fault=str(error))


async def _off_loop(call: Callable[..., None], *args: Any) -> None:  # noqa: ANN401 - the call's own
    """Run what blocks in a thread. A cancelled caller still waits for its end."""
    await drain_task(asyncio.to_thread(call, *args))


async def open_tiers(config: Config) -> Catalogue:
    """Open pool and store in a thread: files are allocated, memory locked, an index read.

    Raises:
        ConfigError: the machine has less memory than the pool, or cannot compile the policies.
        StoreError: the SSD tier cannot be opened.
    """
    opened: list[Catalogue] = []
    try:
        await _off_loop(lambda: opened.append(_open(config)))
    except asyncio.CancelledError:
        for catalogue in opened:
            await _off_loop(catalogue.close)
        raise
    return opened[0]


def _open(config: Config) -> Catalogue:
    compiled = _compiles(config)
    with ExitStack() as undo:
        pool = Pool(config.pool_nbytes, lock_memory=config.lock_memory)
        undo.callback(pool.close)
        store = None
        if config.ssd_cache_paths:
            store = ExtentStore[Copy](
                config.ssd_cache_paths, config.ssd_cache_capacity_nbytes, persist=config.ssd_persist
            )
            undo.callback(store.close)
        entries = pool.capacity_nbytes // LFU_OBJECT_NBYTES
        catalogue = Catalogue(
            pool,
            store,
            Retention(pool.capacity_nbytes, config.cache_protected_percent, compiled=compiled),
            write_policy=WritePolicy(config.ssd_write_policy),
            lfu=TinyLfu(entries, compiled=compiled) if config.enable_lfu_admission else None,
        )
        undo.pop_all()
    return catalogue


def _compiles(config: Config) -> bool:
    """Whether the policies' loops are to be compiled."""
    reason = numba_unavailable()
    if config.compile_policies is None:
        return reason is None and driver_unavailable() is None
    if config.compile_policies and reason is not None:
        accepted = "True with numba (pip install numba), False or None"
        raise ConfigError(f"compile_policies: True, and {reason}; accepted: {accepted}")
    return config.compile_policies
