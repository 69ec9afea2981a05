"""Builders for tests: toy engines, lanes that fail on demand, definitions with a change."""

from __future__ import annotations

import hashlib
import os
import threading
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, cast

import numpy as np

from orbitkv import Config, Manager
from orbitkv.cache.catalogue import Copy, Tier
from orbitkv.codecs.cuda.workspace import DeviceStream
from orbitkv.errors import Closed
from orbitkv.graph import Node, Port
from orbitkv.objects import HEADER_NBYTES, ROW_NBYTES, Bytes, payload_offsets
from orbitkv.pipeline import PACKAGED
from orbitkv.runtime.instance import Instance
from orbitkv.runtime.runtime import OwnedLane
from orbitkv.segment import Geometry, ModelIdentity, Role, Slot, StateKey
from orbitkv.stages.base import Batch, IoLane, Outputs, StageContext, Transfer
from orbitkv.stages.batch import EncodedBatch, ValidatedBatch
from orbitkv.stages.ticket import Miss, Outcome, Restored, Saved

WAIT_S = 20.0  # long enough for a busy machine; reached only by what would never have ended
REST_S = 5.0  # likewise, for what must come to rest by itself
BLOCK = 4096
TOY_OBJECT_NBYTES = BLOCK


def slot(name: str, layer: int, role: Role, **changes: object) -> Slot:
    shape = {"dtype": "float16", "heads": 2, "head_dim": 8} | changes
    return Slot(name=name, layer=layer, role=role, **shape)  # type: ignore[arg-type]


def toy_geometry(*, layers: int = 2, page_tokens: int = 4, **changes: object) -> Geometry:
    """K and V of each layer in segments of 128 bytes: an object of one 4 KiB block."""
    slots = [
        slot(f"{role}{layer}", layer, role, **changes)
        for layer in range(layers)
        for role in (Role.K, Role.V)
    ]
    return Geometry(page_tokens, tuple(slots))


def big_geometry(segment_nbytes: int) -> Geometry:
    """One slot: an object of ``segment_nbytes`` and one block more for its header."""
    return toy_geometry_of_slots(slot("k0", 0, Role.K, heads=1, head_dim=segment_nbytes // 2))


def toy_geometry_of_slots(*slots: Slot, page_tokens: int = 1) -> Geometry:
    return Geometry(page_tokens, slots)


def grouped_geometry() -> Geometry:
    """Two state groups a page, each an object of its own."""
    return toy_geometry_of_slots(
        slot("k0", 0, Role.K),
        slot("v0", 0, Role.V),
        slot("state", 1, Role.KV, group="recurrent"),
        page_tokens=4,
    )


def page_hash(name: object) -> bytes:
    return hashlib.sha256(str(name).encode()).digest()


def model(name: str = "toy") -> ModelIdentity:
    return ModelIdentity(name)


def tensors_of(geometry: Geometry, pages: int, *, seed: int | None = 1) -> dict[str, np.ndarray]:
    """Random bytes for every slot; zeros where ``seed`` is None."""
    rng = np.random.default_rng(seed)
    made = {}
    for item in geometry.slots:
        shape = geometry.shape(item, pages)
        tensor = np.zeros(shape, item.dtype)
        if seed is not None:
            raw = tensor.reshape(-1).view(np.uint8)
            raw[:] = rng.integers(1, 256, raw.size, np.uint8)
        made[item.name] = tensor
    return made


@dataclass
class Engine:
    """A registered toy engine: its tensors, and what a page of them holds."""

    manager: Manager
    geometry: Geometry
    tensors: dict[str, np.ndarray]
    instance: Instance

    @classmethod
    def register(
        cls,
        manager: Manager,
        *,
        pages: int = 8,
        seed: int | None = 1,
        geometry: Geometry | None = None,
        name: str = "toy",
    ) -> Engine:
        geometry = geometry or toy_geometry()
        tensors = tensors_of(geometry, pages, seed=seed)
        return cls(
            manager, geometry, tensors, manager.register(geometry, tensors, model=model(name))
        )

    def page(self, index: int) -> bytes:
        """All bytes of one page, in the order of the slots."""
        views = []
        for item in self.geometry.slots:
            axis = item.axes.index("page")
            views.append(np.ascontiguousarray(np.take(self.tensors[item.name], index, axis)))
        return b"".join(view.view(np.uint8).tobytes() for view in views)

    def clear(self) -> None:
        for tensor in self.tensors.values():
            tensor.reshape(-1).view(np.uint8)[:] = 0

    def is_clear(self, index: int) -> bool:
        return not any(self.page(index))

    def save(self, pages: Mapping[bytes, int] | Iterable[tuple[bytes, int]]) -> Saved:
        pairs = pages.items() if isinstance(pages, Mapping) else pages
        outcome = self.manager.publish(self.instance, pairs).result(WAIT_S)
        assert isinstance(outcome, Saved), outcome
        return outcome

    def restore(self, destinations: Mapping[bytes, int]) -> Outcome:
        """Query for the pages in their order, and restore those that are found."""
        lease = self.manager.query(self.instance, list(destinations))
        found = {page: destinations[page] for page in lease.hashes}
        return self.manager.restore(lease, found).result(WAIT_S)

    def restored(self, destinations: Mapping[bytes, int]) -> tuple[bytes, ...]:
        outcome = self.restore(destinations)
        assert isinstance(outcome, Restored | Miss), outcome
        return outcome.restored if isinstance(outcome, Restored) else ()

    def copy(self, page: bytes, tier: Tier, group: str = "attention") -> Copy:
        key = StateKey(self.instance.namespace, page, group)
        copy = self.manager.core.catalogue.find(key.digest, tier)
        assert copy is not None, f"{page.hex()[:8]} is not in {tier}"
        return copy

    def hits(self, pages: Sequence[bytes]) -> int:
        with self.manager.query(self.instance, pages) as lease:
            return len(lease.hashes)


def numbered(count: int, *, first: int = 0) -> dict[bytes, int]:
    """Page hashes with the indices 0, 1, 2..."""
    return {page_hash(first + index): index for index in range(count)}


def rest(manager: Manager) -> list[str]:
    """What a manager still holds once background work has had the time to end."""
    deadline = time.monotonic() + REST_S
    while (found := manager.leaks()) and time.monotonic() < deadline:
        time.sleep(0.002)
    return found


def comes_to_wait(manager: Manager, count: int) -> bool:
    """Whether as many requests come to wait for pool memory."""
    deadline = time.monotonic() + REST_S
    while f"pool: {count} waiting" not in manager.leaks():
        if time.monotonic() > deadline:
            return False
    return True


def comes_to_refuse(engine: Engine) -> bool:
    """Whether the engine's instance comes to be closed, by itself or with its manager."""
    deadline = time.monotonic() + REST_S
    while time.monotonic() < deadline:
        try:
            engine.manager.query(engine.instance, []).release()
        except Closed:
            return True
    return False


def in_thread(call: Callable[[], Any]) -> threading.Thread:
    """Start a call that may block. A hang of it fails a test, and does not keep pytest alive."""
    thread = threading.Thread(target=call, daemon=True)
    thread.start()
    return thread


def ended(thread: threading.Thread) -> bool:
    thread.join(WAIT_S)
    return not thread.is_alive()


def counters(manager: Manager) -> Mapping[str, int]:
    return manager.statistics().counters


class Gate:
    """Holds whoever passes until it is opened; tells when somebody has arrived."""

    built: ClassVar[list[Gate]] = []  # a test that fails half-way leaves none of them shut

    def __init__(self) -> None:
        self.built.append(self)
        self.arrived = threading.Event()
        self._open = threading.Event()

    def pass_through(self) -> None:
        self.arrived.set()
        if not self._open.wait(2 * WAIT_S):
            raise TimeoutError("nobody opened the gate")

    def open(self) -> None:
        self._open.set()

    def await_arrival(self) -> None:
        assert self.arrived.wait(WAIT_S), "nobody came to the gate"


Judge = Callable[[Transfer], "int | OSError | None"]


@dataclass
class Lanes:
    """Makes lanes that do as the real ones do, but for what a test sets here.

    Attributes:
        on_write, on_read: Give the result of a transfer that shall not be made; None: make it.
        before: By lane name, called on the lane's thread before each of its calls and transfers.
        after: The same, once the transfers of one call have been made, before that is told.
        seen: Function names and kinds of transfer, by lane.
    """

    on_write: Judge | None = None
    on_read: Judge | None = None
    before: dict[str, Callable[[], object]] = field(default_factory=dict)
    after: dict[str, Callable[[], object]] = field(default_factory=dict)
    seen: dict[str, list[str]] = field(default_factory=dict)
    opened: list[FaultyLane] = field(default_factory=list)
    _made_by: Callable[[Node], OwnedLane] | None = None

    def wrap(self, inner: OwnedLane) -> OwnedLane:
        lane = FaultyLane(inner, self)
        self.opened.append(lane)
        return lane


class FaultyLane:
    """A lane around a real one."""

    def __init__(self, inner: OwnedLane, lanes: Lanes) -> None:
        self.inner = inner
        self.lanes = lanes
        self.closed = 0

    @property
    def name(self) -> str:
        return self.inner.name

    async def start(self) -> None:
        await self.inner.start()

    async def close(self) -> None:
        self.closed += 1
        await self.inner.close()

    def _note(self, what: str) -> Callable[[], object]:
        self.lanes.seen.setdefault(self.name, []).append(what)
        return self.lanes.before.get(self.name, lambda: None)

    async def run(self, fn: Callable[..., object], *args: object, **kwargs: object) -> object:
        before = self._note(getattr(fn, "__name__", "call"))

        def call() -> object:
            before()
            return fn(*args, **kwargs)

        return await self.inner.run(call)

    async def reached(self, event: object) -> None:
        await self.inner.reached(event)  # type: ignore[attr-defined]

    def on(self, device: int) -> DeviceStream:
        return self.inner.on(device)  # type: ignore[attr-defined]

    async def read_many(self, transfers: Sequence[Transfer]) -> list[int | OSError]:
        return await self._many(transfers, self.lanes.on_read, writes=False)

    async def write_many(self, transfers: Sequence[Transfer]) -> list[int | OSError]:
        return await self._many(transfers, self.lanes.on_write, writes=True)

    async def _many(
        self, transfers: Sequence[Transfer], judge: Judge | None, *, writes: bool
    ) -> list[int | OSError]:
        before = self._note("write" if writes else "read")
        await self.inner.run(before)
        inner = cast("IoLane", self.inner)
        results = [judge(transfer) if judge else None for transfer in transfers]
        real = [t for t, result in zip(transfers, results, strict=True) if result is None]
        moved = iter(await (inner.write_many(real) if writes else inner.read_many(real)))
        if after := self.lanes.after.get(self.name):
            await self.inner.run(after)
        return [next(moved) if result is None else result for result in results]


class FaultyManager(Manager):
    """A manager whose lanes are those of ``Lanes``, each around the one it would have opened."""

    def __init__(self, config: Config, lanes: Lanes) -> None:
        self.lanes = lanes
        super().__init__(config, wrap_lane=lanes.wrap)


def regions(geometry: Geometry, object_nbytes: int) -> dict[str, range]:
    """Byte ranges of an object's image, by what they hold."""
    nbytes = geometry.segment_nbytes
    offsets = payload_offsets(nbytes)
    table_end = HEADER_NBYTES + ROW_NBYTES * len(nbytes)
    found = {
        "header": range(HEADER_NBYTES),
        "table": range(HEADER_NBYTES, table_end),
        "padding before": range(table_end, offsets[0]),
        "payload first": range(offsets[0], offsets[0] + nbytes[0]),
        "payload last": range(offsets[-1], offsets[-1] + nbytes[-1]),
        "padding after": range(offsets[-1] + nbytes[-1], object_nbytes),
    }
    if len(offsets) > 1:
        found["padding between"] = range(offsets[0] + nbytes[0], offsets[1])
    return found


def flip_memory(memory: Bytes, position: int, bit: int) -> None:
    memory[position] ^= 1 << bit


def flip_file(path: Path, position: int, bit: int) -> None:
    fd = os.open(path, os.O_RDWR)
    try:
        (byte,) = os.pread(fd, 1, position)
        os.pwrite(fd, bytes([byte ^ 1 << bit]), position)
        os.fsync(fd)
    finally:
        os.close(fd)


def definition(directory: Path, name: str, *edits: tuple[str, str]) -> str:
    """Write a packaged definition with some of its text replaced; return the file's path."""
    text = (PACKAGED / f"{name}.toml").read_text()
    for old, new in edits:
        assert old in text, f"{name}.toml has no {old!r}"
        text = text.replace(old, new)
    path = directory / f"{name}.edited.toml"
    path.write_text(text)
    return str(path)


Plan = Callable[[Any, StageContext], Awaitable[None]]
PLANS: dict[str, Plan] = {}


class _Planned:
    """A user's stage that does what a test planned under its name, and passes its batch on."""

    lanes: ClassVar = frozenset({"stream", "host"})

    def __init__(self, plan: str) -> None:
        self._plan = plan

    async def run(self, batch: Batch, ctx: StageContext) -> Outputs:
        if plan := PLANS.get(self._plan):
            await plan(batch, ctx)
        return {"out": batch}


class PlannedEncode(_Planned):
    """Fits between ``encode`` and ``crc32``."""

    inputs: ClassVar = {"in": Port(EncodedBatch)}
    outputs: ClassVar = {"out": Port(EncodedBatch)}


class PlannedDecode(_Planned):
    """Fits between ``validate`` and ``decode``."""

    inputs: ClassVar = {"in": Port(ValidatedBatch)}
    outputs: ClassVar = {"out": Port(ValidatedBatch)}


class NeedsWhatIsNotHere(PlannedEncode):
    """A user's stage for hardware that no machine has."""

    def __init__(self) -> None:
        super().__init__("none")

    @staticmethod
    def unavailable(config: object) -> str | None:
        del config
        return "no quantum memory in this machine"
