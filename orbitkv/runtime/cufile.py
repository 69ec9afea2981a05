"""CuFileLane: registered GPU memory to files and back, through KvikIO, on threads of its own.

KvikIO and CuPy are imported when a GPU is opened, and never before: without a driver a
``CuFile`` may spin for ever.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

from orbitkv.cache.direct import SLOT_NBYTES, SLOTS
from orbitkv.config import MIB
from orbitkv.errors import DirectFault
from orbitkv.runtime.cuda import Device, faults
from orbitkv.runtime.lanes import Submitted, drained

P = ParamSpec("P")
T = TypeVar("T")

# Two slots move at once, in two parts each: one thread's copies leave the disk idle, and smaller
# parts read slower.
_THREADS = 4
_PART_NBYTES = 2 * MIB

Move = Callable[..., int]


class RegisteredSlot:
    """GPU memory that cuFile knows.

    Attributes:
        address: Device address.
        array: uint8[``SLOT_NBYTES``] of CuPy's.
    """

    def __init__(self, device: Device) -> None:
        import cupy  # noqa: PLC0415 - see above
        import kvikio.buffer  # noqa: PLC0415 - see above

        self.device = device
        with faults("staging slot"), device.handle:
            self.array: Any = cupy.empty(SLOT_NBYTES, cupy.uint8)
        self.address = int(self.array.data.ptr)
        kvikio.buffer.memory_register(self.array)

    def close(self) -> None:
        """Let cuFile forget it, then free it. Only once no transfer uses it."""
        import kvikio.buffer  # noqa: PLC0415 - see above

        with contextlib.suppress(RuntimeError):  # a context that died has let go of it
            kvikio.buffer.memory_deregister(self.array)
        del self.array


class CuFileLane:
    """Moves slots, each in parts that go side by side; slots take turns.

    Args:
        paths: Files of the SSD tier, one a shard.
    """

    def __init__(self, name: str, paths: Sequence[Path]) -> None:
        self.name = name
        self._paths = tuple(paths)
        self._slots: dict[int, tuple[RegisteredSlot, ...]] = {}
        self._files: list[Any] = []
        self._threads = ThreadPoolExecutor(_THREADS, f"orbitkv-{name}")
        self._closed = False

    async def start(self) -> None:
        """Bind the lane to the running loop."""
        self._loop = asyncio.get_running_loop()

    def open_device(self, device: Device) -> None:
        """Open the files, and register slots on a GPU. Blocks.

        Raises:
            DirectFault: cuFile refuses.
        """
        if device.ordinal in self._slots:
            return
        import kvikio  # noqa: PLC0415 - see above

        try:
            for path in self._paths[len(self._files) :]:
                self._files.append(kvikio.CuFile(path, "r+"))
            self._slots[device.ordinal] = tuple(RegisteredSlot(device) for _ in range(SLOTS))
        except (OSError, RuntimeError, ValueError) as error:
            raise DirectFault(f"cuFile on cuda:{device.ordinal}: {_first_line(error)}") from error

    def slots(self, device: int) -> Sequence[RegisteredSlot]:
        """The registered slots on a GPU that has been opened."""
        return self._slots[device]

    async def run(self, fn: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run host work off the loop. A cancelled caller still waits for its end."""
        return await self._submit(lambda: fn(*args, **kwargs))

    async def read(self, shard: int, slot: RegisteredSlot, nbytes: int, offset: int) -> int:
        """Fill the first ``nbytes`` of a slot; gives the bytes moved, fewer at a file's end.

        Raises:
            DirectFault: cuFile refused or failed.
        """
        return await self._move(self._files[shard].raw_read, "read", slot, nbytes, offset)

    async def write(self, shard: int, slot: RegisteredSlot, nbytes: int, offset: int) -> int:
        """Write the first ``nbytes`` of a slot; gives the bytes moved, maybe fewer.

        Raises:
            DirectFault: cuFile refused or failed.
        """
        return await self._move(self._files[shard].raw_write, "write", slot, nbytes, offset)

    async def close(self) -> None:
        """Wait for all transfers; then close the files and free the slots. Idempotent."""
        if self._closed:
            return
        self._closed = True
        await self._submit(self._release)
        self._threads.shutdown()

    def _release(self) -> None:
        for file in self._files:
            file.close()
        for slot in (slot for slots in self._slots.values() for slot in slots):
            slot.close()
        self._files, self._slots = [], {}

    async def _move(
        self, call: Move, verb: str, slot: RegisteredSlot, nbytes: int, offset: int
    ) -> int:
        """Move a slot's parts side by side, and wait for all of them, whatever comes."""

        def part(start: int) -> int:
            length = min(_PART_NBYTES, nbytes - start)
            slot.device.make_current()
            return call(slot.array, length, offset + start, start)

        starts = range(0, nbytes, _PART_NBYTES)
        parts = [self._submit(part, start) for start in starts]
        moved = await asyncio.gather(*parts, return_exceptions=True)
        for start, outcome in zip(starts, moved, strict=True):
            if isinstance(outcome, BaseException):
                where = f"{verb} of {nbytes} bytes at offset {offset}"
                raise DirectFault(f"{where}: {_first_line(outcome)}") from outcome
            if outcome < min(_PART_NBYTES, nbytes - start):
                return start + outcome  # what came after a gap does not count
        return nbytes

    async def _submit(self, call: Callable[..., T], *args: object) -> T:
        over: Submitted[T] = Submitted(loop=self._loop)

        def work() -> None:
            try:
                result = call(*args)
            except Exception as error:  # noqa: BLE001 - handed to whoever submitted it
                self._loop.call_soon_threadsafe(over.set_exception, error)
            else:
                self._loop.call_soon_threadsafe(over.set_result, result)

        self._threads.submit(work)
        return await drained(over)


def _first_line(error: BaseException) -> str:
    """What a fault says first: cuFile's are a page long."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0] if lines else repr(error)
