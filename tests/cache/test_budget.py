"""Budget: never over its bound, in the order of asking, whatever is cancelled when."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from orbitkv.cache.budget import Budget, Lease
from orbitkv.errors import ImpossibleRequest

CAPACITY_NBYTES = 10


async def settle() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


def test_impossible_request_is_refused_at_once_even_behind_others() -> None:
    async def scenario() -> None:
        budget = Budget("budget of node C", CAPACITY_NBYTES)
        held = await budget.acquire(CAPACITY_NBYTES)
        waiting = asyncio.create_task(budget.acquire(1))
        await settle()
        with pytest.raises(ImpossibleRequest, match=r"budget of node C: 11 bytes .* is 10"):
            await budget.acquire(CAPACITY_NBYTES + 1)
        held.release()
        (await waiting).release()
        assert budget.used_nbytes == 0

    asyncio.run(scenario())


def test_small_request_does_not_overtake_a_large_one() -> None:
    async def scenario() -> None:
        budget = Budget("b", CAPACITY_NBYTES)
        held = await budget.acquire(5)
        large = asyncio.create_task(budget.acquire(8))
        await settle()
        small = asyncio.create_task(budget.acquire(1))
        await settle()
        assert not small.done(), "5 bytes were free, and 8 were asked for first"
        held.release()
        await settle()
        assert large.done()
        assert small.done()
        assert budget.used_nbytes == 9
        assert budget.peak_nbytes == 9

    asyncio.run(scenario())


def test_releasing_twice_gives_back_once() -> None:
    async def scenario() -> None:
        budget = Budget("b", CAPACITY_NBYTES)
        first, second = await budget.acquire(4), await budget.acquire(4)
        first.release()
        first.release()
        assert budget.used_nbytes == 4
        second.release()
        assert budget.used_nbytes == 0

    asyncio.run(scenario())


def test_waiter_cancelled_in_the_tick_of_its_grant_leaks_nothing() -> None:
    async def scenario() -> None:
        budget = Budget("b", CAPACITY_NBYTES)
        held = await budget.acquire(CAPACITY_NBYTES)
        first = asyncio.create_task(budget.acquire(6))
        second = asyncio.create_task(budget.acquire(6))
        await settle()
        held.release()
        first.cancel()
        await settle()
        assert first.cancelled()
        assert second.done()
        assert budget.used_nbytes == 6

    asyncio.run(scenario())


def test_cancelled_head_of_the_queue_lets_the_next_one_go() -> None:
    async def scenario() -> None:
        budget = Budget("b", CAPACITY_NBYTES)
        held = await budget.acquire(5)
        head = asyncio.create_task(budget.acquire(8))
        following = asyncio.create_task(budget.acquire(5))
        await settle()
        head.cancel()
        await settle()
        assert following.done()
        held.release()
        following.result().release()
        assert budget.used_nbytes == 0

    asyncio.run(scenario())


class Interleaving:
    """One budget, what was done to it, and what must hold whatever that was."""

    def __init__(self) -> None:
        self.budget = Budget("b", CAPACITY_NBYTES)
        self.asked: list[tuple[int, asyncio.Task[Lease]]] = []
        self.granted: set[int] = set()
        self.released: set[int] = set()
        self.checks: list[asyncio.Task[None]] = []

    async def acquire(self, index: int, nbytes: int) -> Lease:
        lease = await self.budget.acquire(nbytes)
        self.granted.add(index)
        self.checks.append(asyncio.create_task(self.check_order(index)))
        return lease

    async def check_order(self, index: int) -> None:
        """Who asked before is granted too, though its task may resume a tick later."""
        await asyncio.sleep(0)
        for earlier, (_, task) in enumerate(self.asked[:index]):
            assert earlier in self.granted or task.cancelling(), "overtaken"

    def holders(self) -> list[int]:
        return [
            index
            for index, (_, task) in enumerate(self.asked)
            if task.done() and not task.cancelled() and index not in self.released
        ]

    def release(self, index: int) -> None:
        self.asked[index][1].result().release()
        self.released.add(index)

    async def apply(self, name: str, number: int) -> None:
        if name == "acquire":
            task = asyncio.create_task(self.acquire(len(self.asked), number))
            self.asked.append((number, task))
        elif name == "release" and (held := self.holders()):
            self.release(held[number % len(held)])
        elif name == "cancel" and self.asked:
            self.asked[number % len(self.asked)][1].cancel()
        elif name == "tick":
            for _ in range(number):
                await asyncio.sleep(0)
        assert 0 <= self.budget.used_nbytes <= CAPACITY_NBYTES

    def check_rest(self) -> None:
        held_nbytes = sum(self.asked[index][0] for index in self.holders())
        assert self.budget.used_nbytes == held_nbytes
        assert held_nbytes <= self.budget.peak_nbytes <= CAPACITY_NBYTES
        waiting = [nbytes for nbytes, task in self.asked if not task.done()]
        if waiting:
            assert held_nbytes + waiting[0] > CAPACITY_NBYTES, "room, and yet the first waits"


operations = st.lists(
    st.one_of(
        st.tuples(st.just("acquire"), st.integers(0, CAPACITY_NBYTES)),
        st.tuples(st.just("release"), st.integers(0, 30)),
        st.tuples(st.just("cancel"), st.integers(0, 30)),
        st.tuples(st.just("tick"), st.integers(1, 2)),
    ),
    max_size=60,
)


@settings(max_examples=300, deadline=None)
@given(operations)
def test_any_interleaving_keeps_the_bound_and_the_order(plan: list[tuple[str, int]]) -> None:
    async def scenario() -> None:
        run = Interleaving()
        for name, number in plan:
            await run.apply(name, number)
        await settle()
        await asyncio.gather(*run.checks)
        run.check_rest()
        for _, task in run.asked:
            task.cancel()
        await settle()
        for index in run.holders():
            run.release(index)
        assert run.budget.used_nbytes == 0
        assert not run.budget._waiting

    asyncio.run(scenario())
