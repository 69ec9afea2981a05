"""Arena: granted in order, never above its limit, grown only when nothing is leased."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Awaitable, Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orbitkv.config import MIB
from orbitkv.errors import DeviceFault, ImpossibleRequest
from orbitkv.runtime.arena import Arena, ArenaLease
from tests.emulated import EmulatedMemory

LIMIT = 8 * MIB


class Memory(EmulatedMemory):
    """Says what was allocated, and fails when it is told to."""

    def __init__(self) -> None:
        super().__init__(LIMIT)
        self.allocated: list[int] = []
        self.fails = False

    def allocate(self, nbytes: int) -> int:
        if self.fails:
            raise DeviceFault("out of memory")
        self.allocated.append(nbytes)
        return super().allocate(nbytes)


async def run(call: Callable[..., object], *args: object) -> object:
    await asyncio.sleep(0)
    return call(*args)


def scenario(work: Callable[[Arena, Memory], Awaitable[None]]) -> None:
    async def main() -> None:
        memory = Memory()
        arena = Arena("arena of a test", LIMIT, memory, run)
        async with asyncio.timeout(20):
            await work(arena, memory)
            assert arena.used_nbytes == 0
            await arena.close()
        assert memory.held.nbytes == 0

    asyncio.run(main())


def test_it_grows_to_room_for_two_and_frees_the_old_memory_first() -> None:
    async def work(arena: Arena, memory: Memory) -> None:
        small = await arena.acquire(MIB)
        assert arena.capacity_nbytes == 2 * MIB
        small.release()
        large = await arena.acquire(3 * MIB)  # EmulatedMemory refuses two allocations at once
        assert memory.allocated == [2 * MIB, 6 * MIB]
        large.release()
        again = await arena.acquire(MIB)
        assert memory.allocated == [2 * MIB, 6 * MIB]
        again.release()

    scenario(work)


def test_it_does_not_grow_under_a_lease() -> None:
    async def work(arena: Arena, memory: Memory) -> None:
        small = await arena.acquire(MIB)
        large = asyncio.create_task(arena.acquire(4 * MIB))
        behind = asyncio.create_task(arena.acquire(4096))
        for _ in range(5):
            await asyncio.sleep(0)
        assert not large.done()
        assert not behind.done(), "it went before one who waits"
        small.release()
        for lease in (await large, await behind):
            lease.release()
        assert memory.allocated == [2 * MIB, 8 * MIB]

    scenario(work)


def test_more_than_the_limit_is_refused_at_once() -> None:
    async def work(arena: Arena, _: Memory) -> None:
        with pytest.raises(ImpossibleRequest, match=f"{LIMIT + 1} bytes asked for"):
            await arena.acquire(LIMIT + 1)
        whole = await arena.acquire(LIMIT)
        whole.release()
        whole.release()

    scenario(work)


def test_a_device_without_memory_fails_one_request_and_not_the_next() -> None:
    async def work(arena: Arena, memory: Memory) -> None:
        memory.fails = True
        with pytest.raises(DeviceFault, match="out of memory"):
            await arena.acquire(MIB)
        memory.fails = False
        (await arena.acquire(MIB)).release()

    scenario(work)


def test_a_cancelled_wait_takes_nothing_and_holds_nobody_up() -> None:
    async def work(arena: Arena, _: Memory) -> None:
        held = await arena.acquire(LIMIT)
        first, second = (asyncio.create_task(arena.acquire(MIB)) for _ in range(2))
        await asyncio.sleep(0)
        first.cancel()
        held.release()
        (await second).release()
        assert first.cancelled()
        held = await arena.acquire(LIMIT)
        granted = asyncio.create_task(arena.acquire(MIB))
        await asyncio.sleep(0)
        held.release()
        granted.cancel()  # in the tick in which it was granted
        await asyncio.wait([granted])
        assert granted.cancelled()

    scenario(work)


@given(st.lists(st.tuples(st.integers(1, LIMIT), st.booleans()), max_size=40))
def test_leases_never_overlap_and_never_exceed_the_limit(steps: list[tuple[int, bool]]) -> None:
    async def work(arena: Arena, memory: Memory) -> None:
        held: list[ArenaLease] = []
        waiting: list[asyncio.Task[ArenaLease]] = []
        for nbytes, releases in steps:
            waiting.append(asyncio.create_task(arena.acquire(nbytes)))
            if releases and held:
                held.pop(0).release()
            for _ in range(8):
                await asyncio.sleep(0)
            while waiting and waiting[0].done():
                held.append(waiting.pop(0).result())
            ends = sorted((lease.address, lease.address + lease.nbytes) for lease in held)
            assert all(a[1] <= b[0] for a, b in itertools.pairwise(ends))
            assert memory.held.nbytes <= LIMIT
        while held or waiting:
            while held:
                held.pop(0).release()
            if waiting:
                held.append(await waiting.pop(0))

    scenario(work)
