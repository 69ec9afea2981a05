"""A GPU in host memory: the stages' device path runs without one, its kernels being the CPU codecs.

Work is done late, by a thread of its own and in order, as a real stream does it: what is freed or
read too early shows.
"""

# ruff: noqa: ANN401 - what kernels are given has no types

from __future__ import annotations

import asyncio
import ctypes
import functools
import os
import queue
import random
import threading
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from orbitkv.cache.direct import SLOT_NBYTES
from orbitkv.cache.pool import Pool
from orbitkv.codecs.base import SegmentSpec
from orbitkv.codecs.cuda.ans import AnsDevice, DecodePlan, EncodePlan
from orbitkv.codecs.cuda.crc_tables import zeros_crc32
from orbitkv.codecs.cuda.tasks import SLOT, TASK, Launch, Span, are_runs, describe_slots
from orbitkv.codecs.cuda.workspace import Runs, SharedRoom
from orbitkv.codecs.host import Fp8Codec, TurboQuantCodec
from orbitkv.codecs.slots import SlotCodecs
from orbitkv.objects import Bytes, RawReason
from orbitkv.runtime.arena import Arena
from orbitkv.runtime.lanes import HostLane, Submitted, drained
from orbitkv.segment import PagedTensors, Role, Words

UNDECODABLE = 8
_one_at_a_time = threading.Lock()  # kernels on a CPU share their threads' state
FAULTS = {
    RawReason.NONFINITE: 1,
    RawReason.OUT_OF_RANGE: 2,
    RawReason.SCALAR_OVERFLOW: 4,
}


class OnGpu:
    """A CPU tensor that says that it is on ``cuda:0``."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor
        self.dtype, self.shape, self.layout = tensor.dtype, tensor.shape, tensor.layout
        self.device = torch.device("cuda", 0)

    def stride(self) -> tuple[int, ...]:
        return self.tensor.stride()

    def data_ptr(self) -> int:
        return self.tensor.data_ptr()


def memory_at(address: int, nbytes: int) -> Bytes:
    return np.frombuffer((ctypes.c_uint8 * nbytes).from_address(address), np.uint8)


class EmulatedEvent:
    def __init__(self) -> None:
        self.happened = threading.Event()
        self.ptr = id(self)

    def await_it(self) -> None:
        assert self.happened.wait(30), "nobody recorded the event"

    def wait(self, stream: object = None) -> None:
        assert self.happened.is_set()


class EmulatedMemory:
    """Counts what is allocated, and spoils what is freed."""

    def __init__(self, limit_nbytes: int) -> None:
        self.limit_nbytes = limit_nbytes
        self.held: Bytes = np.empty(0, np.uint8)

    def allocate(self, nbytes: int) -> int:
        assert not self.held.nbytes, "two arenas at once"
        assert nbytes <= self.limit_nbytes
        room = np.full(nbytes + 4096, 0xEE, np.uint8)
        start = -room.ctypes.data % 4096
        self.held = room[start : start + nbytes]
        return int(self.held.ctypes.data)

    def free(self) -> None:
        self.held[:] = 0xDD
        self.held = np.empty(0, np.uint8)


class EmulatedKernels:
    """Kernels over host memory, run when their turn comes."""

    def __init__(self, enqueue: Callable[[Callable[[], None]], None]) -> None:
        self._enqueue = enqueue

    def move(self, target: int, source: int, nbytes: int) -> None:
        self._enqueue(lambda: ctypes.memmove(target, source, nbytes) and None)

    def gather(self, span: Span, first: int, count: int, most_stored_nbytes: int) -> None:
        def work() -> None:
            tasks, _, _ = self._views(span, first + count)
            for task in tasks[first:]:
                assert task["stored_nbytes"] <= most_stored_nbytes
                payload = memory_at(int(task["payload"]), int(task["stored_nbytes"]))
                payload[:] = np.ascontiguousarray(self._segment(span, task)).reshape(-1)

        self._enqueue(work)

    def scatter_raw(self, span: Span, first: int, count: int, most_stored_nbytes: int) -> None:
        order = np.arange(first, first + count, dtype=np.uint32)
        launch = Launch(("raw",), 0, count, most_stored_nbytes)
        self.decode(span._replace(order=order.ctypes.data), launch, order)

    def encode_ans(self, plan: EncodePlan, **at: int) -> None:
        self._enqueue_ans(lambda device: device.enqueue_encode(plan, 0, **at))

    def expect_ans(self, **at: int) -> None:
        self._enqueue_ans(lambda device: device.enqueue_expect(0, **at))

    def decode_ans(self, plan: DecodePlan, **at: int) -> None:
        self._enqueue_ans(lambda device: device.enqueue_decode(plan, 0, **at))

    def _enqueue_ans(self, call: Callable[[AnsDevice], None]) -> None:
        def work() -> None:
            assert EmulatedDevice.ans
            with _one_at_a_time:
                call(EmulatedDevice.ans)

        self._enqueue(work)

    def crc32(self, span: Span, first: int, count: int, most_stored_nbytes: int) -> None:
        def work() -> None:
            tasks, crcs, _ = self._views(span, first + count)
            for index in range(first, first + count):
                self._add_crc(tasks[index], crcs, index)

        self._enqueue(work)

    def encode(self, span: Span, launch: Launch) -> None:
        self._enqueue(lambda: self._encode(span, launch))

    def decode(self, span: Span, launch: Launch, held: object = None) -> None:
        self._enqueue(lambda: self._decode(span, launch, held))

    def _views(self, span: Span, count: int) -> tuple[Any, Any, Any]:
        tasks = memory_at(span.tasks, TASK.itemsize * count).view(TASK)
        crcs, faults = (
            memory_at(address, 4 * count).view(np.uint32) for address in (span.crcs, span.faults)
        )
        return tasks, crcs, faults

    @staticmethod
    def _add_crc(task: Any, crcs: Any, index: int) -> None:
        nbytes = int(task["stored_nbytes"])
        payload = memory_at(int(task["payload"]), nbytes)
        crcs[index] ^= zlib.crc32(payload) ^ zeros_crc32(nbytes)

    @staticmethod
    def _segment(span: Span, task: Any) -> Words:
        at = span.slots + SLOT.itemsize * int(task["slot"])
        slot = memory_at(at, SLOT.itemsize).view(SLOT)[0]
        address = int(slot["base"]) + int(slot["page_stride"]) * int(task["page"])
        shape = (int(slot["outer"]), int(slot["inner"]), int(slot["row_nbytes"]))
        strides = (int(slot["outer_stride"]), int(slot["inner_stride"]), 1)
        nbytes = sum((n - 1) * s for n, s in zip(shape, strides, strict=True)) + 1
        return np.lib.stride_tricks.as_strided(memory_at(address, nbytes), shape, strides)

    @staticmethod
    def _codec(kernel: tuple[Any, ...], segment: Words, stored_nbytes: int) -> Any:
        name, *parameters = kernel
        if name == "fp8":
            (is_half,) = parameters
            codec: Any = Fp8Codec(print)
            spec = {"role": Role.K, "tokens": 1, "heads": 1, "head_dim": segment.size // 2}
        else:
            bits, head_dim, is_half, seed = parameters
            codec = TurboQuantCodec(f"turboquant-{bits}", seed, print)
            rows = segment.shape[0] * segment.shape[1]
            scalars_nbytes = stored_nbytes // rows - segment.shape[2] // 2 * bits // 8
            role = {2: Role.K, 4: Role.V, 6: Role.KV}[scalars_nbytes]
            spec = {"role": role, "tokens": rows, "heads": 1, "head_dim": head_dim}
        return codec.bind(SegmentSpec(dtype="float16" if is_half else "bfloat16", **spec))

    def _tasks_of(self, span: Span, launch: Launch) -> Iterator[tuple[int, Any, Any, Any]]:
        end = launch.first + launch.count
        order = memory_at(span.order, 4 * end).view(np.uint32)[launch.first : end].tolist()
        tasks, crcs, faults = self._views(span, max(order) + 1)
        for index in order:
            assert tasks[index]["stored_nbytes"] <= launch.most_stored_nbytes
            yield index, tasks[index], crcs, faults

    def _encode(self, span: Span, launch: Launch) -> None:
        for index, task, crcs, faults in self._tasks_of(span, launch):
            segment = self._segment(span, task)
            source = np.ascontiguousarray(segment).reshape(-1)
            payload = memory_at(int(task["payload"]), int(task["stored_nbytes"]))
            if launch.kernel == ("raw",):
                payload[:] = source
            else:
                codec = self._codec(launch.kernel, segment, payload.nbytes)
                result = codec.encode(source.view(np.uint16), payload)
                if isinstance(result, RawReason):
                    faults[index] |= FAULTS[result]
            self._add_crc(task, crcs, index)

    def _decode(self, span: Span, launch: Launch, held: object) -> None:
        del held  # memory of this process that the span names
        for index, task, _, _ in self._tasks_of(span, launch):
            first, count = int(task["unit_first"]), int(task["unit_count"])
            assert first <= index < first + count
            _, unit_crcs, unit_faults = self._views(span, first + count)
            if unit_crcs[first:].any() or (unit_faults[first:] & UNDECODABLE).any():
                continue
            segment = self._segment(span, task)
            payload = memory_at(int(task["payload"]), int(task["stored_nbytes"]))
            if launch.kernel == ("raw",):
                segment[...] = payload.reshape(segment.shape)
            else:
                words = np.empty(segment.size // 2, np.uint16)
                self._codec(launch.kernel, segment, payload.nbytes).decode(payload, words)
                segment[...] = words.view(np.uint8).reshape(segment.shape)


class EmulatedQueue:
    """Work in order, on a thread of its own, each piece now and then late."""

    def __init__(self, seed: int) -> None:
        self._rng = random.Random(seed)
        self._work: queue.SimpleQueue[Callable[[], object] | None] = queue.SimpleQueue()
        self.error: Exception | None = None
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def put(self, work: Callable[[], object]) -> None:
        self._work.put(work)

    def follow(self, event: EmulatedEvent) -> None:
        self.put(event.await_it)

    def record(self) -> EmulatedEvent:
        event = EmulatedEvent()
        self.put(event.happened.set)
        return event

    def end(self) -> None:
        self._work.put(None)
        self._thread.join()

    def _serve(self) -> None:
        while (work := self._work.get()) is not None:
            if self._rng.random() < 0.2:
                time.sleep(self._rng.random() * 1e-3)
            try:
                work()
            except Exception as error:  # noqa: BLE001 - told to whoever waits next
                self.error = self.error or error


class EmulatedStream:
    """A queue for kernels, one for copies beside them, and one that waits for events."""

    def __init__(self, name: str, arena_nbytes: int, run: Callable[..., Any]) -> None:
        self.name = name
        self._loop = asyncio.get_running_loop()
        self.arena = Arena(f"arena of {name}", arena_nbytes, EmulatedMemory(arena_nbytes), run)
        self.shared = SharedRoom(self.arena)
        self._work, self._copies, self._watch = (EmulatedQueue(seed) for seed in range(3))
        self.kernels = EmulatedKernels(self._work.put)
        self._ending: set[asyncio.Task[None]] = set()
        self.scratch_out = 0

    def after(self, event: EmulatedEvent) -> None:
        self._work.follow(event)

    def record(self) -> EmulatedEvent:
        return self._work.record()

    def clear(self, address: int, nbytes: int) -> None:
        self._work.put(lambda: ctypes.memset(address, 0, nbytes))

    def copy(self, runs: Runs, after: EmulatedEvent | None = None) -> EmulatedEvent:
        if after is not None:
            self._copies.follow(after)
        for run in list(runs):
            self._copies.put(functools.partial(ctypes.memmove, *run))
        return self._copies.record()

    async def reached(self, event: EmulatedEvent) -> None:
        over: Submitted[None] = Submitted(loop=self._loop)
        self._watch.follow(event)
        self._watch.put(lambda: self._loop.call_soon_threadsafe(over.set_result, None))
        await drained(over)
        for error in (self._work.error, self._copies.error, self._watch.error):
            if error:
                raise error

    async def take_scratch(self, nbytes: int) -> Bytes:
        self.scratch_out += 1
        return np.full(max(nbytes, 4096), 0xAA, np.uint8)

    def give_scratch(self, scratch: Bytes) -> None:
        self.scratch_out -= 1
        scratch[:] = 0xBB

    async def idle(self) -> None:
        self.after(self.copy([]))
        await self.reached(self.record())

    def when_over(self, call: Callable[[], None]) -> None:
        async def wait() -> None:
            try:
                await self.idle()
            finally:
                call()

        ending = self._loop.create_task(wait())
        self._ending.add(ending)
        ending.add_done_callback(self._ending.discard)

    def bridge(self) -> EmulatedBridge:
        return EmulatedBridge()

    def leaks(self) -> list[str]:
        used = self.arena.used_nbytes
        return [f"{self.name}: {used} bytes, {self.scratch_out} out"] * bool(
            used or self.scratch_out
        )

    async def close(self) -> None:
        while self._ending:
            await asyncio.wait(self._ending)
        for work in (self._work, self._copies, self._watch):
            await asyncio.to_thread(work.end)
        await self.arena.close()


class EmulatedBridge:
    def __init__(self) -> None:
        self.buffer = np.zeros(2**24, np.uint8)

    def fetch(self, segment: Words, target: Bytes) -> None:
        target[:] = np.ascontiguousarray(segment).reshape(-1).view(np.uint8)

    def put(self, source: Bytes, segment: Words) -> None:
        segment[...] = source.view(segment.dtype).reshape(segment.shape)


class EmulatedSlot:
    def __init__(self) -> None:
        self.memory = np.full(SLOT_NBYTES, 0xCC, np.uint8)
        self.address = int(self.memory.ctypes.data)


class EmulatedFileLane(HostLane):
    """Takes the place of ``orbitkv.runtime.cufile.CuFileLane``."""

    def __init__(self, name: str, paths: Sequence[Path]) -> None:
        super().__init__(name)
        self._paths = tuple(paths)
        self._slots: dict[int, list[EmulatedSlot]] = {}
        self._fds: list[int] = []

    def open_device(self, device: Any) -> None:
        if device.ordinal not in self._slots:
            self._slots[device.ordinal] = [EmulatedSlot(), EmulatedSlot()]
            self._fds += [os.open(path, os.O_RDWR) for path in self._paths[len(self._fds) :]]

    def slots(self, device: int) -> Sequence[EmulatedSlot]:
        return self._slots[device]

    async def read(self, shard: int, slot: EmulatedSlot, nbytes: int, offset: int) -> int:
        assert offset % 4096 == nbytes % 4096 == 0
        assert nbytes <= SLOT_NBYTES
        slot.memory[:] = 0xCC
        return await self.run(os.preadv, self._fds[shard], [slot.memory[:nbytes]], offset)

    async def write(self, shard: int, slot: EmulatedSlot, nbytes: int, offset: int) -> int:
        assert offset % 4096 == nbytes % 4096 == 0
        assert nbytes <= SLOT_NBYTES
        moved = await self.run(os.pwrite, self._fds[shard], slot.memory[:nbytes], offset)
        slot.memory[:] = 0xCC
        return moved

    async def close(self) -> None:
        await super().close()
        while self._fds:
            os.close(self._fds.pop())


class EmulatedDevice:
    """Takes the place of ``orbitkv.runtime.cuda.Device``.

    Attributes:
        ans: Kernels around nvCOMP, or what stands for it: those of ``tests.codecs.emulation``.
    """

    ans: AnsDevice | None = None

    def __init__(self, ordinal: int, pool: Pool) -> None:
        self.ordinal = ordinal
        self.pinned: list[int] = []
        pool.pin(lambda address, _: self.pinned.append(address), self.pinned.remove)

    def open_stream(self, lane: str, arena_nbytes: int, run: Callable[..., Any]) -> EmulatedStream:
        return EmulatedStream(lane, arena_nbytes, run)

    def prepare(self, tensors: PagedTensors, codecs: SlotCodecs) -> None:
        del codecs
        described = describe_slots(tensors)

        class Slots:
            address = described.ctypes.data

        Slots.described, Slots.are_runs = described, are_runs(described)
        tensors.device_slots = Slots
