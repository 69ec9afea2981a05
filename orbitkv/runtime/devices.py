"""Devices: the GPUs of a manager, opened when a registration first names them."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path

import structlog

from orbitkv.cache.catalogue import Catalogue
from orbitkv.cache.direct import DirectRoute, Gate
from orbitkv.codecs.slots import SlotCodecs
from orbitkv.errors import Closed, DirectFault
from orbitkv.runtime.arena import Arena
from orbitkv.runtime.cuda import CudaLane, Device
from orbitkv.runtime.cufile import CuFileLane
from orbitkv.runtime.lanes import drain_task
from orbitkv.segment import PagedTensors


class Devices:
    """GPUs, and the lanes that have a stream or registered slots on each of them.

    Args:
        arena_nbytes: Most device memory that the batches of one lane may lease, on each GPU.

    Attributes:
        direct: The way past the host of each pipeline, ``save`` and ``restore``.
        gate: Of both.
    """

    def __init__(
        self, catalogue: Catalogue, arena_nbytes: int, log: structlog.stdlib.BoundLogger
    ) -> None:
        self._catalogue = catalogue
        self._arena_nbytes = arena_nbytes
        self._streams: list[CudaLane] = []
        self._files: list[tuple[CuFileLane, DirectRoute, bool]] = []
        self._opened: dict[int, Device] = {}
        self._opening = asyncio.Lock()
        self._closing = False
        self.gate = gate = Gate(catalogue.counters, log)
        self.direct = {"save": DirectRoute(gate), "restore": DirectRoute(gate)}

    @property
    def streams(self) -> Sequence[CudaLane]:
        """Every lane of streams."""
        return self._streams

    @property
    def ordinals(self) -> tuple[int, ...]:
        """Of the GPUs that are in use."""
        return tuple(self._opened)

    def stream_lane(self, name: str) -> CudaLane:
        """Make a lane that gets a stream on each GPU."""
        lane = CudaLane(name, self._arena_nbytes)
        self._streams.append(lane)
        return lane

    def file_lane(
        self, name: str, direction: str, paths: Sequence[Path], *, chosen: bool
    ) -> CuFileLane:
        """Make a lane that gets registered slots on each GPU, for one pipeline.

        Args:
            chosen: A GPU without them is refused, instead of served by U.
        """
        lane = CuFileLane(name, paths)
        self._files.append((lane, self.direct[direction], chosen))
        return lane

    async def open(self, tensors: PagedTensors, codecs: SlotCodecs) -> None:
        """Give every lane what it needs on the GPU of the tensors, and tell it their slots.

        Raises:
            Unavailable: there is no such GPU, or the pool cannot be pinned.
            DirectFault: cuFile refuses, and was chosen.
        """
        ordinal = tensors.device
        assert ordinal is not None
        async with self._opening:  # one at a time: the pool is pinned once
            if self._closing:
                raise Closed("the manager is closed")
            # Drained: a thread that pins the pool does not end with whoever asked for it.
            if ordinal not in self._opened:
                opened = asyncio.to_thread(Device, ordinal, self._catalogue.pool)
                self._opened[ordinal] = await drain_task(opened)
            device = self._opened[ordinal]
            for stream_lane in self._streams:
                stream_lane.open_device(device)
            for lane, route, chosen in self._files:
                try:
                    await drain_task(asyncio.to_thread(lane.open_device, device))
                except DirectFault as fault:
                    if chosen:
                        raise
                    route.gate.close(fault)
                else:
                    route.open_device(ordinal, lane.slots(ordinal))
            await drain_task(asyncio.to_thread(device.prepare, tensors, codecs))

    def arenas(self) -> list[Arena]:
        """The workspace of every lane on every GPU."""
        return [stream.arena for lane in self._streams for stream in lane.streams.values()]

    async def end_opening(self) -> None:
        """Open nothing more; a thread that pins the pool, or loads kernels, ends before it goes."""
        self._closing = True
        async with self._opening:
            pass

    def leaks(self) -> list[str]:
        """Workspace and slots still in use: none at rest."""
        streams = (stream for lane in self._streams for stream in lane.streams.values())
        found = [leak for stream in streams for leak in stream.leaks()]
        return found + [leak for route in self.direct.values() for leak in route.leaks()]
